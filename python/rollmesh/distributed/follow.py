"""Generator.follow: rank 0 makes the calls, and the other ranks make the same calls. This gives a
single controller over the ranks of SPMD.

    rank 0          a followed method ──► queue ──► the next collective call sends the queue and
                    runs rank 0's own part
    other ranks     receive ──► the same methods with the same arguments, in the same order

The followed methods are those that change the state that all ranks share; each is marked at its
definition. Calls without an exchange (adding or aborting a request) wait in the queue, so a step
costs only one more message than in SPMD. If a followed method calls another one, only the outer
call is sent, since the other ranks then make the inner call themselves.

A rank waits for the next message at most for the comm's timeout, as in any collective. While rank 0
is idle, it sends empty messages.
"""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, is_dataclass
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar
from weakref import WeakMethod, ref

from rollmesh import _core
from rollmesh.distributed.wire import decode, encode
from rollmesh.errors import Error, StateError
from rollmesh.runtime.threads import starting

P = ParamSpec("P")
T = TypeVar("T")
CLOSE = "close"
_FOLLOWED: set[Callable[..., Any]] = set()
IDLE_SHARE = 4  # rank 0 sends a message at least every 2/IDLE_SHARE of the comm's timeout


class Role(Protocol):
    """The role of a rank after all ranks have called Generator.follow: Leader or Follower."""

    def call(
        self, name: str, values: Mapping[str, Any], collective: bool
    ) -> AbstractContextManager[None]:
        """Returns a context for this rank's own part of a followed call."""

    def close(self) -> None:
        """Called before the generator is closed."""


class Followed(Protocol):
    """An object with followed methods."""

    @property
    def role(self) -> Role | None:
        """The role of this rank; None if every rank makes its own calls."""


F = TypeVar("F", bound=Followed)


def followed(
    *sent: str, collective: bool = False
) -> Callable[[Callable[Concatenate[F, P], T]], Callable[Concatenate[F, P], T]]:
    """Marks a method that the other ranks must call too. sent: names of the arguments to send; the
    other ranks use the defaults of all other arguments. collective: the ranks exchange messages in
    this method, so the call cannot wait in the queue."""

    def mark(method: Callable[Concatenate[F, P], T]) -> Callable[Concatenate[F, P], T]:
        signature = inspect.signature(method)

        @wraps(method)
        def call(self: F, /, *args: P.args, **kwargs: P.kwargs) -> T:
            role = self.role
            if role is None:
                return method(self, *args, **kwargs)
            values = signature.bind(self, *args, **kwargs).arguments if sent else {}
            with role.call(
                method.__name__, {name: values[name] for name in sent if name in values}, collective
            ):
                return method(self, *args, **kwargs)

        _FOLLOWED.add(call)
        return call

    return mark


def followed_methods(*parts: object) -> dict[str, Callable[..., Any]]:
    """Returns the followed methods of these objects, bound, by name."""
    return {
        name: getattr(part, name)
        for part in parts
        for name, function in inspect.getmembers(type(part), inspect.isfunction)
        if function in _FOLLOWED
    }


class Leader:
    """Rank 0. Its callers have exclusive use of the engine. A thread sends messages while a caller
    is busy, for example in a tokenizer."""

    def __init__(
        self, control: _core.Comm, timeout: float, give_up: WeakMethod[Callable[[], None]]
    ):
        """give_up: aborts the mesh."""
        self._control, self._give_up = control, give_up
        # Guards the control comm and the queue. A collective call holds it until it returns.
        self._lock = threading.RLock()
        self._queue: list[Any] = []  # [name, values] of calls that were not sent yet
        self._is_inside = False  # whether a followed call is running
        self._sent_at, self._closed = time.monotonic(), threading.Event()
        silence = timeout / IDLE_SHARE
        speaking, name = (ref(self), self._closed, silence), "rollmesh-leader"
        with starting("rank 0 of follow()"):
            threading.Thread(target=_keep_speaking, args=speaking, name=name, daemon=True).start()

    @contextmanager
    def call(self, name: str, values: Mapping[str, Any], collective: bool) -> Iterator[None]:
        if self._is_inside:
            yield
            return
        self._is_inside = True
        try:
            with self._lock if collective else nullcontext():
                with self._lock:
                    self._queue.append(
                        [name, {key: _plain(value) for key, value in values.items()}]
                    )
                    if collective:
                        self._send()
                yield
        except BaseException as error:
            if not isinstance(error, Exception) and (give_up := self._give_up()):
                # After a Ctrl-C this rank may have skipped a call that the other ranks make.
                give_up()
            raise
        finally:
            self._is_inside = False

    def close(self) -> None:
        """Makes the other ranks return from follow."""
        self._closed.set()
        with self._lock:
            self._queue.append([CLOSE, {}])
            with suppress(Error):  # the mesh may have ended already
                self._send()

    def speak(self, silence: float) -> None:
        """Sends the queue, which may be empty, if the last message is at least `silence` seconds
        old."""
        with self._lock:
            if not self._closed.is_set() and time.monotonic() - self._sent_at >= silence:
                self._send()

    def _send(self) -> None:
        queue, self._queue = self._queue, []
        self._control.all_gather(encode(queue))
        self._sent_at = time.monotonic()


def _keep_speaking(leader: ref[Leader], closed: threading.Event, silence: float) -> None:
    """Sends messages until the leader is closed, or was deleted with its generator."""
    while not closed.wait(silence) and (its := leader()) is not None:
        with suppress(Error):  # the next call raises the error
            its.speak(silence)
        del its


class Follower:
    """Any other rank. Until it has ended, it makes only calls of rank 0."""

    def __init__(self, control: _core.Comm, rank: int):
        self._control, self._rank = control, rank
        self._thread: int | None = None  # the thread that is making a call of rank 0
        self.ended = False

    @contextmanager
    def call(self, name: str, values: Mapping[str, Any], collective: bool) -> Iterator[None]:
        del name, values, collective
        if threading.get_ident() != self._thread and not self.ended:
            raise StateError(
                f"rank {self._rank} follows rank 0 (Generator.follow); make this call on rank 0"
            )
        yield

    @contextmanager
    def obeying(self) -> Iterator[None]:
        """Returns a context in which this thread makes calls of rank 0."""
        self._thread = threading.get_ident()
        try:
            yield
        finally:
            self._thread = None  # calls made by a signal handler are not calls of rank 0

    def close(self) -> None:
        with self.call(CLOSE, {}, False):
            pass

    def received(self) -> Iterator[list[tuple[str, dict[str, Any]]]]:
        """Yields the calls of rank 0, as names and arguments of methods, until rank 0 closes its
        generator."""
        while True:
            batch = [(name, values) for name, values in decode(self._control.all_gather(b"")[0])]
            if batch and batch[-1][0] == CLOSE:
                yield batch[:-1]
                return
            if batch:
                yield batch


def _plain(value: Any) -> Any:
    """Converts an argument to a value that rollmesh.distributed.wire can encode. Generator.follow
    makes the dataclasses again from these values."""
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return sorted(value) if isinstance(value, (set, frozenset)) else value

"""Rank 0 makes the calls and the other ranks follow (Generator.follow): a single controller over
the ranks of SPMD.

    rank 0          a followed method ──► queue ──► the next collective call sends the queue and
                    makes its own part
    other ranks     receive ──► the same methods with the same arguments, in the same order

What is followed are the methods that change what all ranks hold: they are marked where they are
defined. Calls that exchange nothing (an added request, an abort) wait in the queue, so that a step
costs one message more than in SPMD. A method that a followed one calls is not sent: the other ranks
come to it by themselves.

A rank waits for the next message as for any collective, at most the comm's timeout. Rank 0 sends an
empty one while it has nothing to do.
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
IDLE_SHARE = 4  # rank 0 is silent for two of these shares of the comm's timeout at most


class Role(Protocol):
    """What a rank is once all have called Generator.follow."""

    def call(
        self, name: str, values: Mapping[str, Any], collective: bool
    ) -> AbstractContextManager[None]:
        """Around this rank's own part of a followed call."""

    def close(self) -> None:
        """The generator is about to be closed."""


class Followed(Protocol):
    """What has followed methods."""

    @property
    def role(self) -> Role | None:
        """None: every rank makes its own calls."""


F = TypeVar("F", bound=Followed)


def followed(
    *sent: str, collective: bool = False
) -> Callable[[Callable[Concatenate[F, P], T]], Callable[Concatenate[F, P], T]]:
    """Marks a method that the other ranks have to call too. sent: the arguments that they need; the
    others take their defaults there. collective: ranks exchange messages in it, so that it cannot
    wait in the queue."""

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
    """By their names, bound."""
    return {
        name: getattr(part, name)
        for part in parts
        for name, function in inspect.getmembers(type(part), inspect.isfunction)
        if function in _FOLLOWED
    }


class Leader:
    """Rank 0. Callers have the engine to themselves; while one is busy (a tokenizer), a thread
    keeps sending."""

    def __init__(
        self, control: _core.Comm, timeout: float, give_up: WeakMethod[Callable[[], None]]
    ):
        """give_up: aborts the mesh."""
        self._control, self._give_up = control, give_up
        self._lock = (
            threading.RLock()
        )  # of the control comm and the queue; a collective call holds it to its end
        self._queue: list[
            Any
        ] = []  # [name, values] of calls that the other ranks have not made yet
        self._is_inside = False  # a followed call
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
                give_up()  # a Ctrl-C: the other ranks make the call, and this one perhaps did not
            raise
        finally:
            self._is_inside = False

    def close(self) -> None:
        """The other ranks return from follow."""
        self._closed.set()
        with self._lock:
            self._queue.append([CLOSE, {}])
            with suppress(Error):  # the mesh has ended already
                self._send()

    def speak(self, silence: float) -> None:
        """Sends what is queued, perhaps nothing, after that many seconds of silence."""
        with self._lock:
            if not self._closed.is_set() and time.monotonic() - self._sent_at >= silence:
                self._send()

    def _send(self) -> None:
        queue, self._queue = self._queue, []
        self._control.all_gather(encode(queue))
        self._sent_at = time.monotonic()


def _keep_speaking(leader: ref[Leader], closed: threading.Event, silence: float) -> None:
    """Until the leader is closed, or was dropped with its generator."""
    while not closed.wait(silence) and (its := leader()) is not None:
        with suppress(Error):  # a lost rank is the next call's error
            its.speak(silence)
        del its


class Follower:
    """Any other rank. Until it has ended, its calls come from rank 0 only."""

    def __init__(self, control: _core.Comm, rank: int):
        self._control, self._rank = control, rank
        self._thread: int | None = None  # which makes a call of rank 0 now
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
        """This thread makes calls of rank 0."""
        self._thread = threading.get_ident()
        try:
            yield
        finally:
            self._thread = None  # calls of a signal's handler are not calls of rank 0

    def close(self) -> None:
        with self.call(CLOSE, {}, False):
            pass

    def received(self) -> Iterator[list[tuple[str, dict[str, Any]]]]:
        """Yields the calls of rank 0 as methods and arguments, until it closes its generator."""
        while True:
            batch = [(name, values) for name, values in decode(self._control.all_gather(b"")[0])]
            if batch and batch[-1][0] == CLOSE:
                yield batch[:-1]
                return
            if batch:
                yield batch


def _plain(value: Any) -> Any:
    """As rollmesh.distributed.wire takes it. The methods' other dataclasses are made again by who
    calls them (Generator.follow)."""
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return sorted(value) if isinstance(value, (set, frozenset)) else value

"""Rank 0 decides what all ranks of a mesh of processes do.

    rank 0          an operation (`led`) ──► queue ──► the next collective operation sends the queue
                    and runs rank 0's own part
    other ranks     receive ──► the same operations with the same arguments, in the same order

The operations are those that change the state that all ranks share: requests, steps, syncs, sleep.
Operations without an exchange wait in the queue, so a step costs one message. If an operation calls
another one, only the outer one is sent, since the other ranks then make the inner call themselves.

A rank above 0 receives in one of two ways:

    follow()        until rank 0 closes its generator. While rank 0 is idle, it sends empty
                    messages, since a rank waits at most for the comm's timeout
    a public call   if every rank makes the same calls: until rank 0 has ended this call. The last
                    message has rank 0's result or error

Each message has the call that its rank is in, with its arguments. Ranks in different calls raise
CollectiveMismatchError before anything is computed; operations that were not sent stay in the
queue, so the mesh stays usable.

With several replicas the ranks of one replica compute a request; on all other ranks it is
*foreign*. After each step the first rank of each replica sends the results of its finished
requests, and a foreign request counts as finished once its result has arrived.
"""

from __future__ import annotations

import hashlib
import inspect
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial, wraps
from typing import Any, TypeVar, cast

from rollmesh import _core
from rollmesh.distributed.comm import Comm
from rollmesh.distributed.mesh import Mesh
from rollmesh.distributed.peers import FOLLOW, PeerEngine
from rollmesh.distributed.rank_engine import Lead
from rollmesh.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    DeviceError,
    Error,
    RankLostError,
    StateError,
)

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
Operations = Callable[[str], Callable[..., Any]]
Run = Callable[[Callable[[], Any]], Any]
CLOSE = "close"  # in place of the end of a call
IN_STREAMS = "agenerate()"  # the call of rank 0 while no thread waits in one
# Arguments that belong to one rank.
OWN_ARGUMENTS = ("self", "source", "timeout", "use_tqdm")
# Errors after which the end of a failed call cannot be sent.
ENDED = (CollectiveTimeoutError, DeviceError, RankLostError, StateError)
MOST_TEXT = 160  # characters of a call's arguments in a message; longer ones are hashed
IDLE_SHARE = 4  # rank 0 sends a message at least every 2/IDLE_SHARE of the comm's timeout


def call_text(name: str, arguments: Mapping[str, Any]) -> str:
    """Returns a call and its arguments, without those that belong to one rank. Equal calls have
    equal texts in every process."""
    text = ", ".join(
        f"{key}={_text(value)}" for key, value in arguments.items() if key not in OWN_ARGUMENTS
    )
    text = re.sub(r" at 0x[0-9a-f]+", "", text)  # of functions and of objects without a repr
    if len(text) > MOST_TEXT:
        digest = hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:16]
        text = f"{text[:MOST_TEXT]}… of digest {digest}"
    return f"{name}({text})"


def _text(value: Any) -> str:
    """Returns the repr of an argument; NumPy would leave out elements of a long array."""
    if hasattr(value, "tolist"):
        return repr(value.tolist())
    if isinstance(value, (list, tuple)) and value and not isinstance(value[0], int):
        return f"[{', '.join(map(_text, value))}]"
    return repr(value)


def by_every_rank(method: F) -> F:
    """Marks a method of Generator that every rank may call, see make_call and use_ranks."""
    signature = inspect.signature(method)

    @wraps(method)
    def call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        def bound() -> Mapping[str, Any]:
            return signature.bind(self, *args, **kwargs).arguments

        return make_call(self, method.__name__, bound, lambda: method(self, *args, **kwargs))

    method.__dict__["of_ranks"] = call
    return method


def make_call(
    generator: Any,
    name: str,
    arguments: Callable[[], Mapping[str, Any]],
    function: Callable[[], T],
) -> T:
    """Makes a call that every rank may make, if ranks are processes: rank 0 makes it, and the other
    ranks apply its operations and return its result."""
    engine = generator._engine
    if not isinstance(engine, LedEngine) or engine.is_followed:
        return function()
    values = arguments()
    text = call_text(name, values)
    if engine.rank == 0:
        return engine.lead_call(text, function, generator._loop.call)

    def apply() -> Any:
        operations = generator._operations(lambda version: values.get("source"))
        return engine.apply_calls(text, operations, lambda operation: operation())

    result: T = generator._loop.lend(apply)
    return result


class LedEngine(PeerEngine):
    """One rank of a generator whose ranks are processes. Callers have exclusive use of it."""

    def __init__(self, engine: _core.Engine, comm: Comm, control: _core.Comm, *, mesh: Mesh):
        super().__init__(engine, comm, control)
        self._queue: list[Any] = []  # [name, sent, result] of operations that were not sent yet
        self._is_inside = False  # whether an operation is running
        self._call = IN_STREAMS  # the call that rank 0 is in
        self.is_followed = False  # rank 0: whether all other ranks were in follow() last
        self._is_following = False  # other ranks: whether they are in follow()
        self._sent_at = time.monotonic()
        self.silence_s = comm.timeout / IDLE_SHARE
        self._tp, self.has_replicas = mesh.tp, mesh.dp > 1
        self._reported: set[int] = set()  # requests whose result this rank has sent

    # -------------------------------------------------------------------------------------- rank 0
    def lead(self, kind: Lead, name: str, args: tuple[Any, ...], run: Callable[[], T]) -> T:
        if self._is_inside:
            return run()
        if kind == Lead.EVERY_RANK:
            self.check_not_following()
            if self.is_followed:
                raise StateError(
                    "begin_sync: expected ranks that make their own calls, got ranks that follow "
                    "rank 0; call sync_weights there"
                )
        sent = [sorted(value) if isinstance(value, (set, frozenset)) else value for value in args]

        def send_and_run() -> T:
            if self.rank == 0 and kind == Lead.COLLECTIVE:
                self._send([name, sent, None])
            return run()

        self._is_inside = True
        try:
            result = super().lead(kind, name, args, send_and_run)
            if self.rank == 0 and kind == Lead.QUEUED:
                self._queue.append([name, sent, result])
                self.idle()  # a call may queue requests for a long time
            return result
        finally:
            self._is_inside = False

    def lead_call(self, call: str, function: Callable[[], T], run: Run) -> T:
        """Makes a public call that every rank makes. run: runs a function with exclusive use of the
        engine."""
        result: T | None = None
        failure: Exception | None = None
        self._call = call
        try:
            try:
                result = function()
            except Exception as error:  # noqa: BLE001 (raised once the other ranks know)
                failure = error
            # After a mismatch all ranks have left the call.
            if not (self.is_followed or isinstance(failure, CollectiveMismatchError)):
                end = [result, failure, getattr(failure, "outputs", None)]
                with suppress(*(() if failure is None else ENDED)):
                    run(partial(self._send, end=end))
        except BaseException as error:
            if not isinstance(error, Exception) and not self.is_followed:
                self.give_up()  # the other ranks are in this call too
            raise
        finally:
            self._call = IN_STREAMS
        try:
            if failure is not None:
                raise failure
            return cast(T, result)
        finally:
            failure = None  # it refers to this frame

    def _send(self, *operations: Any, end: Any = None) -> None:
        """Sends the queue and these operations. end: the end of a call, see lead_call."""
        value = [[*self._queue, *operations], end]
        everyone = self.gather(self._call, value, leads=True)
        self._queue.clear()
        self._sent_at = time.monotonic()
        self.is_followed = all(follows for _, _, follows in everyone[1:])

    def idle(self) -> None:
        if self.is_followed and time.monotonic() - self._sent_at >= (self.silence_s or 0):
            with suppress(Error):  # the next call raises the error
                self._send()

    def close(self) -> None:
        if self.is_followed:
            with suppress(Error):  # the mesh may have ended already
                self._send(end=CLOSE)
        super().close()

    # --------------------------------------------------------------------------------- other ranks
    def check_not_following(self) -> None:
        if self._is_following:
            raise StateError(
                f"rank {self.rank} follows rank 0 (Generator.follow); make this call on rank 0"
            )

    def apply_calls(self, call: str, operations: Operations, run: Run) -> Any:
        """Applies the operations of rank 0 until it ends `call`, and returns its result or raises
        its error. A sync's report and error are this rank's own. FOLLOW: until rank 0 closes.

        operations: returns the function of a name. run: runs a function with exclusive use of the
        engine."""
        self.check_not_following()
        self._is_following = call == FOLLOW
        own: Any = None  # the last error or report of this rank
        try:
            while True:
                [batch, end], *_ = self.all_gather(call)
                if batch:
                    own = run(partial(self._apply, operations, batch)) or own
                if end == CLOSE:
                    return None
                if call == FOLLOW:
                    own = None
                elif end is not None:
                    break
        except BaseException as error:
            self.abort_unless_shared(error)
            raise
        finally:
            self._is_following = False
        result, failure, outputs = end
        if failure is None:
            return result if own is None or isinstance(own, Exception) else own
        if outputs is not None:
            failure.outputs = outputs
        try:
            raise own if isinstance(own, Exception) else failure
        finally:
            own = None  # it refers to this frame

    def _apply(self, operations: Operations, batch: list[Any]) -> Any:
        """Makes the operations of a message. Returns the last error, or the report of a sync."""
        own: Any = None
        for name, args, expected in batch:
            try:
                result = operations(name)(*args)
            except Exception as error:
                if expected is not None:  # rank 0 has made this operation
                    self.give_up()
                if expected is not None or self.abort_unless_shared(error):
                    raise
                own = error
                continue
            if expected is not None and result != expected:
                raise CollectiveMismatchError(
                    f"{name} gave {expected} on rank 0 and {result} on rank {self.rank}"
                )
            own = result if name == "sync" else own
        return own

    # ------------------------------------------------------------------------------------ requests
    def add(self, *args: Any) -> int:
        number = self._engine.add(*args)
        if not self._engine.has(number):
            self.foreign[number] = None
        return number

    def share_step(
        self, rows: int, fault: Exception | None, result_of: Callable[[int], Any]
    ) -> int:
        """Exchanges the results of this rank's step, and returns the number of rows of all
        replicas. fault: the exception that the step raised, or None. If one replica has one, all
        ranks raise one: that replica its own, the others one of the same class (or Error).
        result_of: returns the result of a finished request."""
        results = self._results(result_of)
        value = rows if fault is None and not results else [rows, fault, results]
        everyone = [
            [its, None, []] if isinstance(its, int) else its
            for its in self.all_gather("a step", value)
        ]
        for number, result in (entry for _, _, results in everyone for entry in results):
            if number in self.foreign:
                self.foreign[number] = result
        faults = [its for _, its, _ in everyone if its is not None]
        if faults and self.unfinished():
            self._known_error = fault or faults[0]
            raise self._known_error
        return sum(its for its, _, _ in everyone[:: self._tp])

    def _results(self, result_of: Callable[[int], Any]) -> list[Any]:
        """Returns [number, result] of each request that has finished, on the first rank of a
        replica. Rank 0, which alone reads results, sends True."""
        if self.rank % self._tp:
            return []
        new = sorted(self._engine.finished() - self._reported)
        self._reported.update(new)
        return [[number, result_of(number) if self.rank else True] for number in new]

    def finished(self) -> set[int]:
        known = (number for number, result in self.foreign.items() if result is not None)
        return self._engine.finished().union(known)

    def unfinished(self) -> int:
        return self._engine.unfinished() + sum(result is None for result in self.foreign.values())

    def ids(self) -> list[int]:
        return sorted([*self._engine.ids(), *self.foreign])

    def abort(self, number: int) -> None:
        if number not in self.foreign:
            self._engine.abort(number)

    def release(self, number: int) -> None:
        if number not in self.foreign:
            self._engine.release(number)
        self.foreign.pop(number, None)
        self._reported.discard(number)

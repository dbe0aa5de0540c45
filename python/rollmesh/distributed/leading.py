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
*foreign*. After each step the first rank of each replica sends the records of its finished
requests, and a foreign request counts as finished once its record has arrived.
"""

from __future__ import annotations

import hashlib
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar, cast
from weakref import ref

import numpy as np
from numpy.typing import NDArray

from rollmesh import _core
from rollmesh.distributed.comm import Comm
from rollmesh.distributed.mesh import Mesh
from rollmesh.distributed.peers import FOLLOW, PeerEngine
from rollmesh.distributed.rank_engine import ALONE, Array
from rollmesh.distributed.wire import encode
from rollmesh.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    DeviceError,
    Error,
    RankLostError,
    StateError,
)
from rollmesh.runtime.engine_views import Finish, Ids, RequestView, SampleView
from rollmesh.runtime.messages import reason
from rollmesh.runtime.threads import starting

T = TypeVar("T")
# {"number": int, "request": RequestView, "samples": [SampleView], "logits": array or None,
#  "fault": why its text could not be read, or None}
Record = dict[str, Any]
Operations = Mapping[str, Callable[..., Any]]
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


class LedEngine(PeerEngine):
    """One rank of a generator whose ranks are processes. Callers have exclusive use of it."""

    def __init__(self, engine: _core.Engine, comm: Comm, control: _core.Comm, *, mesh: Mesh):
        super().__init__(engine, comm, control)
        # Guards the control comm and the queue. A collective operation holds it until it returns.
        self._lock = threading.RLock()
        self._queue: list[Any] = []  # [name, sent, result] of operations that were not sent yet
        self._is_inside = self.rank > 0  # whether operations are made here, without sending them
        self._call = IN_STREAMS  # the call that rank 0 is in
        self.is_followed = False  # rank 0: whether all other ranks were in follow() last
        self._is_following = False  # other ranks: whether they are in follow()
        self._sent_at, self._closed = time.monotonic(), threading.Event()
        self._thread: threading.Thread | None = None  # sends messages while rank 0 is idle
        self._tp, self._has_replicas = mesh.tp, mesh.dp > 1
        self._foreign: dict[int, Record | None] = {}  # None until the record has arrived
        self._logits: dict[int, NDArray[np.float32]] = {}
        self._recorded: set[int] = set()  # requests whose record this rank has sent

    # -------------------------------------------------------------------------------------- rank 0
    def lead(
        self, name: str, args: tuple[Any, ...], is_collective: bool, run: Callable[[], T]
    ) -> T:
        if self._is_inside:
            return run()
        sent = [sorted(value) if isinstance(value, (set, frozenset)) else value for value in args]
        with self._lock:
            self._is_inside = True
            try:
                if is_collective:
                    self._send([name, sent, None])
                result = run()
                if not is_collective:
                    self._queue.append([name, sent, result])
                return result
            except Exception:
                raise
            except BaseException:
                # After a Ctrl-C this rank may have skipped an operation that the others make.
                self.give_up()
                raise
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
            # After a mismatch no rank is in the call.
            if not (self.is_followed or isinstance(failure, CollectiveMismatchError)):
                end = [result, failure, getattr(failure, "outputs", None)]
                with suppress(() if failure is None else ENDED):
                    run(partial(self._send, end=end))
        except BaseException as error:
            if not isinstance(error, Exception) and not self.is_followed:
                self.give_up()  # the other ranks are in this call too
            raise
        finally:
            self._call = IN_STREAMS
        if failure is not None:
            raise failure
        return cast(T, result)

    def _send(self, *operations: Any, end: Any = None) -> None:
        """Sends the queue and these operations. end: the end of a call, see lead_call."""
        with self._lock:
            value = [[*self._queue, *operations], end]
            everyone = self._gather(encode([self._call, value, True]))
            self._queue.clear()
            self._sent_at = time.monotonic()
            self.is_followed = all(call == FOLLOW for call, _, _ in everyone[1:])
        if self.is_followed and self._thread is None:
            sending = (ref(self), self._closed, self._comm.timeout / IDLE_SHARE)
            self._thread = threading.Thread(
                target=_keep_sending, args=sending, name="rollmesh-leader", daemon=True
            )
            with starting("rank 0 of follow()"):
                self._thread.start()

    def send_if_silent(self, silence: float) -> None:
        """Sends the queue, which may be empty, if the last message is at least `silence` seconds
        old."""
        with self._lock:
            idle = time.monotonic() - self._sent_at
            if self.is_followed and not self._closed.is_set() and idle >= silence:
                self._send()

    @contextmanager
    def by_every_rank(self) -> Iterator[None]:
        self.check_not_following()
        if self.is_followed:
            raise StateError(
                "begin_sync: expected ranks that make their own calls, got ranks that follow rank "
                "0; call sync_weights there"
            )
        was_inside, self._is_inside = self._is_inside, True
        try:
            with self._lock:
                yield
        finally:
            self._is_inside = was_inside

    def close(self) -> None:
        self._closed.set()
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

        operations: functions by their names. run: runs a function with exclusive use of the
        engine."""
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
        result, failure, outputs = end
        if failure is None:
            return result if own is None or isinstance(own, Exception) else own
        if outputs is not None:
            failure.outputs = outputs
        raise own if isinstance(own, Exception) else failure

    def _apply(self, operations: Operations, batch: list[Any]) -> Any:
        """Makes the operations of a message. Returns the last error, or the report of a sync."""
        own: Any = None
        for name, args, expected in batch:
            try:
                result = operations[name](*args)
            except Exception as error:
                if self.abort_unless_shared(error, voting=name == "sync"):
                    raise
                own = error
                continue
            if expected is not None and result != expected:
                raise CollectiveMismatchError(
                    f"{name} gave {expected} on rank 0 and {result} on rank {self.rank}"
                )
            own = result if name == "sync" else own
        return own

    @contextmanager
    def following(self) -> Iterator[None]:
        """Returns a context in which this rank makes no calls of its own."""
        self.check_not_following()
        self._is_following = True
        try:
            yield
        finally:
            self._is_following = False

    # ------------------------------------------------------------------------------------ requests
    def add(
        self,
        prompt: Ids,
        stop_token_ids: Ids,
        request: Any,
        logits: NDArray[np.float32] | None,
        edits: tuple[Array, ...] | None = None,
    ) -> int:
        number = super().add(prompt, stop_token_ids, request, logits, edits)
        if logits is not None:
            self._logits[number] = logits
        if not self._engine.has(number):
            self._foreign[number] = None
        return number

    def step(self, watch: Callable[[], None]) -> int:
        """If one replica raises an exception that does not abort the mesh, all ranks raise one
        after the exchange: that replica its own, the others one of the same class (or Error)."""
        if not self._has_replicas:
            return super().step(watch)
        rows, fault = 0, None
        is_asleep = bool(self._engine.stats()["asleep"])
        try:
            if not is_asleep:
                rows = super().step(watch)
        except (*ALONE, MemoryError):
            raise
        except Exception as error:  # noqa: BLE001 (sent to all ranks, then raised)
            fault = error
        everyone = self.all_gather("a step", [rows, fault, self._new_records()])
        for _, _, records in everyone:
            self._store(records)
        faults = [its for _, its, _ in everyone if its is not None]
        if faults:
            self._known_error = fault or faults[0]
            raise self._known_error
        if is_asleep and not self.paused and self.unfinished():
            self._engine.step()  # raises
        return sum(its for its, _, _ in everyone[:: self._tp])

    def _new_records(self) -> list[Record]:
        """Returns the records of requests that have finished, on the first rank of a replica."""
        if self.rank % self._tp:
            return []
        new = self._engine.finished() - self._recorded
        self._recorded |= new
        return [self._record(number) for number in sorted(new)]

    def _record(self, number: int) -> Record:
        if self.rank == 0:  # which alone reads results
            return {"number": number}
        view = self._engine.request(number)
        fault = self.request_faults.get(number)
        return {
            "number": number,
            "request": view,
            "samples": [self._engine.sample(number, i) for i in range(view["n"])],
            "logits": self._logits.get(number),
            "fault": None if fault is None else reason(fault),
        }

    def _store(self, records: list[Record]) -> None:
        for record in records:
            number = record["number"]
            if number not in self._foreign:
                continue
            self._foreign[number] = record
            if record.get("logits") is not None:
                self._logits[number][...] = record["logits"]
            if record.get("fault") is not None:
                self.request_faults[number] = Error(record["fault"])

    def finished(self) -> set[int]:
        known = (number for number, record in self._foreign.items() if record is not None)
        return super().finished().union(known)

    def unfinished(self) -> int:
        return super().unfinished() + sum(record is None for record in self._foreign.values())

    def ids(self) -> list[int]:
        return sorted([*super().ids(), *self._foreign])

    def abort(self, number: int) -> None:
        if number not in self._foreign:
            super().abort(number)

    def release(self, number: int) -> None:
        if number not in self._foreign:
            super().release(number)
        self._late.discard(number)
        self.request_faults.pop(number, None)
        self._foreign.pop(number, None)
        self._logits.pop(number, None)
        self._recorded.discard(number)

    def request(self, number: int) -> RequestView:
        if number not in self._foreign:
            return super().request(number)
        return cast(RequestView, self._known(number)["request"])

    def sample(self, number: int, index: int) -> SampleView:
        if number not in self._foreign:
            return super().sample(number, index)
        return cast(SampleView, self._known(number)["samples"][index])

    def tokens(self, number: int, index: int, start: int) -> tuple[Finish, Ids]:
        """Returns the finish reason and the tokens from `start`. If a stop string ended a foreign
        sample, the reason is "length", since this rank has to find the string itself too."""
        if number not in self._foreign:
            return super().tokens(number, index, start)
        if self._foreign[number] is None:
            return None, np.zeros(0, np.int32)
        sample = self.sample(number, index)
        by_string = sample["finish"] == "stop" and sample["stop_token"] < 0
        return "length" if by_string else sample["finish"], sample["token_ids"][start:]

    def stop_sample(self, number: int, sample: int, n_tokens: int) -> None:
        if number not in self._foreign:
            super().stop_sample(number, sample, n_tokens)

    def _known(self, number: int) -> Record:
        record = self._foreign[number]
        assert record is not None, "a request of another replica is read once it has finished"
        return record


def _keep_sending(leader: ref[LedEngine], closed: threading.Event, silence: float) -> None:
    """Sends messages until rank 0 closes its generator, or has deleted it."""
    while not closed.wait(silence) and (engine := leader()) is not None:
        with suppress(Error):  # the next call raises the error
            engine.send_if_silent(silence)
        del engine

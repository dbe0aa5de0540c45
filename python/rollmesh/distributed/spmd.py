"""One rank of a mesh of processes, with the interface of a single engine. Every process makes the
same calls in the same order. This file sends data between the ranks, so that the layers above use
one engine.

The ranks of one replica compute a request; on all other ranks it is *foreign*. After each step the
first rank of each replica sends the records of its finished requests. A request counts as finished
once all ranks have received its record, so that it finishes in the same call on all ranks. All
ranks take the same number of steps, so poll returns the same as on this mesh in one process.

    add, add … ──► step (own requests, then an exchange) … ──► finished, request, sample, tokens
               ──► release

Each exchange contains the name of the call and a hash of all requests so far. Ranks that differ
raise CollectiveMismatchError before anything is computed. A rank that leaves a call alone (Ctrl-C,
out of memory) aborts the mesh; waiting ranks raise RankLostError.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any, cast
from weakref import WeakMethod

import numpy as np
from numpy.typing import NDArray

from rollmesh import _core
from rollmesh.distributed.comm import Comm, Endpoints, check_alike
from rollmesh.distributed.follow import Follower, Leader, followed
from rollmesh.distributed.mesh import Mesh
from rollmesh.distributed.rank_engine import ALONE, PUSHES, Array, RankEngine
from rollmesh.distributed.wire import decode, encode
from rollmesh.errors import (
    CollectiveMismatchError,
    Error,
    RankLostError,
    StateError,
    SyncAbortedError,
)
from rollmesh.runtime.engine_views import CONTRACT_VERSION, Finish, Ids, RequestView, SampleView
from rollmesh.runtime.messages import reason

# {"request": RequestView, "samples": [SampleView], "logits": array or None, "late": bool,
#  "fault": why its text could not be read, or None}
Record = dict[str, Any]
# Options that may differ between ranks, since results do not depend on them.
OF_A_RANK = (
    "threads",
    "isa",
    "cuda_library",
    "cuda_ordinal",
    "nccl_library",
    "nccl_gpu",
    "cublas_library",
)


class SpmdEngine(RankEngine):
    """A _core.Engine that is one rank of several processes."""

    has_peers = True

    def __init__(
        self,
        engine: _core.Engine,
        comm: Comm,
        control: _core.Comm,
        sends_records: bool,
        own_requests: bool = False,
    ):
        """sends_records: whether this is the first rank of its replica, which sends the replica's
        records. own_requests: whether each replica gets different requests (from vLLM), which are
        not compared."""
        super().__init__(engine)
        self._comm, self.control = comm, control
        self.rank, self._sends_records, self._own_requests = comm.rank, sends_records, own_requests
        self._requests_hash = hashlib.sha256()  # hash of all requests so far
        self._announced = True  # whether the ranks have compared the hash with all requests in it
        self._ids: list[int] = []  # requests added and not released, oldest first
        self._foreign: dict[int, Record | None] = {}  # None until the record has arrived
        self._logits: dict[int, NDArray[np.float32]] = {}
        self._settled: set[int] = set()
        self._known_error: BaseException | None = None  # an exception that all ranks have received

    def close(self) -> None:
        self._engine.close()
        self.control.close()
        self._comm.close()

    # --------------------------------------------------------------------------------- among ranks
    def all_gather(self, call: str, value: Any = None) -> list[Any]:
        """Returns every rank's value. Raises CollectiveMismatchError if ranks are in different
        calls or were given different requests."""
        asked = self._requests_hash.hexdigest()[:16]
        parts = self.control.all_gather(encode([call, asked, value]))
        everyone = [decode(part) if part else [PUSHES, asked, None] for part in parts]
        for rank, (its_call, its_asked, _) in enumerate(everyone):
            if (its_call, its_asked) != (call, asked):
                if its_call != call:
                    raise CollectiveMismatchError(
                        f"rank {rank} is in {its_call} and rank {self.rank} in {call}"
                    )
                raise CollectiveMismatchError(
                    f"rank {rank} and rank {self.rank} in {call} differ in the requests that they "
                    "were given"
                )
        return [value for _, _, value in everyone]

    def handshake(self, facts: Mapping[str, Any]) -> None:
        """Raises MeshMismatchError unless all ranks have the same spec and options. The error lists
        the ranks and the differences."""
        text = {
            name: json.dumps(value, sort_keys=True, default=lambda array: array.tolist())
            for name, value in facts.items()
        }
        digest = {
            name: hashlib.sha256(value.encode()).hexdigest()[:16] if len(value) > 80 else value
            for name, value in text.items()
        }
        check_alike(self.all_gather("initialization", digest))

    def own_deadline(self, deadline: float | None) -> float | None:
        """Returns None, since ranks act on deadlines only together."""
        del deadline
        return None

    def abort_unless_shared(self, error: BaseException, voting: bool = False) -> bool:
        alike = isinstance(error, Error) and not isinstance(error, ALONE)
        if error is self._known_error or alike or (voting and isinstance(error, MemoryError)):
            return False
        self.give_up()
        return True

    def give_up(self) -> None:
        """Aborts the mesh. The other ranks raise RankLostError in the call in which they wait."""
        self._engine.give_up()
        self.control.abort()
        self._comm.abort()

    def follow(self, fault: Exception | None) -> Follower | None:
        """Lets rank 0 make the calls from now on. Returns None on rank 0. fault: an error because
        of which this rank cannot follow."""
        if self.role is not None:
            raise StateError("follow was called before")
        self.require_equal(
            "follow",
            [
                f"paused={paused}"
                for paused in self.all_gather_or_raise("follow", self.paused, fault)
            ],
        )
        if self.rank == 0:
            self.role = Leader(self.control, self._comm.timeout, WeakMethod(self.give_up))
            return None
        self.role = follower = Follower(self.control, self.rank)
        return follower

    # ------------------------------------------------------------------------------------ requests
    def add(
        self,
        prompt: Ids,
        stop_token_ids: Ids,
        request: Any,
        logits: NDArray[np.float32] | None,
        edits: tuple[Array, ...] | None = None,
    ) -> int:
        number = self._engine.add(prompt, stop_token_ids, request, logits, edits)
        self._ids.append(number)
        arrays = [array.tobytes() for array in (prompt, stop_token_ids, *(edits or ()))]
        self._hash_request(
            repr(asdict(request)).encode(), *arrays, b"" if logits is None else b"logits"
        )
        self._announced = False
        if logits is not None:
            self._logits[number] = logits
        if not self._engine.has(number):
            self._foreign[number] = None
        return number

    def _hash_request(self, *asked: bytes) -> None:
        """Adds bytes to the hash that ranks compare at their next exchange."""
        for part in () if self._own_requests else asked:
            self._requests_hash.update(len(part).to_bytes(8, "little") + part)

    def _is_halted(self) -> bool:
        """Returns whether the engine is paused or asleep, and so cannot step. This is equal on all
        ranks."""
        return self.paused or bool(self._engine.stats()["asleep"])

    def _refuse_asleep(self) -> None:
        if self._waiting() and not self.paused and self._is_halted():
            self._engine.step()  # raises

    def step(self, watch: Callable[[], None], deadline: float | None) -> tuple[int, bool]:
        """Runs a step of this rank's own requests, calls watch() to search them for stop strings,
        then exchanges the finished records.

        If one rank raises an exception that does not abort the mesh, all ranks raise one after the
        exchange: that rank its own, the others one of the same class (or Error)."""
        call, rows, fault = "a step", 0, None
        if not self._announced:  # compare requests before computing new ones
            self.all_gather(call)
            self._announced = True
        try:
            if not self._is_halted():
                rows, _ = self._engine.step()
                watch()
        except (*ALONE, MemoryError):
            raise
        except Exception as error:  # noqa: BLE001 (sent to all ranks, then raised)
            fault = error
        late = deadline is not None and time.monotonic() >= deadline
        records = self._finished_here(self._waiting())
        told = {
            "rows": rows if self._sends_records else 0,
            "late": late,
            "fault": fault,
            "records": records,
        }
        everyone = self.all_gather(call, told)
        self._store_records([its["records"] for its in everyone])
        faults = [its["fault"] for its in everyone if its["fault"] is not None]
        if faults:
            self._known_error = fault or faults[0]
            raise self._known_error
        self._refuse_asleep()
        return sum(its["rows"] for its in everyone), any(its["late"] for its in everyone)

    def _waiting(self) -> list[int]:
        return [number for number in self._ids if number not in self._settled]

    def _finished_here(self, numbers: Iterable[int]) -> dict[str, Record]:
        """Returns the records of those requests that are finished, if this rank sends the records
        of its replica."""
        finished = self._engine.finished() if self._sends_records else set()
        return {str(number): self._record(number) for number in numbers if number in finished}

    def _store_records(self, everyone: list[dict[str, Record]]) -> None:
        """Stores the records of all ranks. Their requests count as finished from now on."""
        finished = self._engine.finished()
        for name, record in (
            (name, record) for records in everyone for name, record in records.items()
        ):
            number = int(name)
            if number in self._foreign:
                self._foreign[number] = record
                if record["logits"] is not None:
                    self._logits[number][...] = record["logits"]
            elif number not in finished:
                raise CollectiveMismatchError(
                    f"request {number} is finished on the first rank of its replica and not on "
                    f"rank {self.rank}"
                )
            if record["late"]:
                self._late.add(number)
            if record["fault"] is not None:
                self.request_faults.setdefault(number, Error(record["fault"]))
            self._settled.add(number)

    def _record(self, number: int) -> Record:
        view = self._engine.request(number)
        samples = [self._engine.sample(number, i) for i in range(view["n"])]
        return {
            "request": view,
            "samples": samples,
            "logits": self._logits.get(number),
            "late": number in self._late,
            "fault": reason(self.request_faults[number]) if number in self.request_faults else None,
        }

    def finished(self) -> set[int]:
        return set(self._settled)

    def unfinished(self) -> int:
        return len(self._ids) - len(self._settled)

    def ids(self) -> list[int]:
        return list(self._ids)

    @followed("numbers")
    def cut_off(self, numbers: Iterable[int]) -> None:
        """Aborts those of these requests that still run in this rank's replica, because their
        deadline has passed. Other replicas abort their own requests."""
        for number in set(numbers).difference(self._foreign, self._engine.finished()):
            self._late.add(number)
            self._engine.abort(number)

    def abort(self, number: int) -> None:
        """Aborts a request. All ranks call this; the ranks that compute the request abort it."""
        self._hash_request(b"abort", str(number).encode())
        if number not in self._foreign:
            self._engine.abort(number)

    def release(self, number: int) -> None:
        if number not in self._foreign:
            self._engine.release(number)
        self._foreign.pop(number, None)
        self._logits.pop(number, None)
        self._settled.discard(number)
        self._late.discard(number)
        self.request_faults.pop(number, None)
        self._ids.remove(number)

    def stop_sample(self, number: int, sample: int, n_tokens: int) -> None:
        if number not in self._foreign:
            self._engine.stop_sample(number, sample, n_tokens)

    # ------------------------------------------------------------------------------------- results
    def request(self, number: int) -> RequestView:
        if number not in self._foreign:
            return self._engine.request(number)
        return cast(RequestView, self._known(number)["request"])

    def sample(self, number: int, index: int) -> SampleView:
        if number not in self._foreign:
            return self._engine.sample(number, index)
        return cast(SampleView, self._known(number)["samples"][index])

    def tokens(self, number: int, index: int, start: int) -> tuple[Finish, Ids]:
        """Returns the finish reason and the tokens from `start`. If a stop string ended a foreign
        sample, the reason is "length", since this rank has to find the string itself too."""
        if number not in self._foreign:
            return self._engine.tokens(number, index, start)
        if self._foreign[number] is None:
            return None, np.zeros(0, np.int32)
        sample = self.sample(number, index)
        by_string = sample["finish"] == "stop" and sample["stop_token"] < 0
        return "length" if by_string else sample["finish"], sample["token_ids"][start:]

    def _known(self, number: int) -> Record:
        record = self._foreign[number]
        if record is None:
            raise CollectiveMismatchError(
                f"request {number} belongs to another replica and was read before it finished"
            )
        return record

    # ------------------------------------------------------------------------------------- weights
    def all_gather_or_raise(self, where: str, value: Any, error: Exception | None) -> list[Any]:
        error, self.fault = error or self.fault, None
        everyone = self.all_gather(where, [value, None if error is None else reason(error)])
        self.raise_failure(error, [why for _, why in everyone])
        return [value for value, _ in everyone]

    def refuse(self, where: str, error: Exception) -> None:
        try:
            self.barrier(where, error)
        except BaseException as raised:
            self.abort_unless_shared(raised)
            raise

    def require_equal(self, what: str, values: list[str]) -> None:
        """Raises CollectiveMismatchError unless the values are equal. All ranks have received the
        same values, so all of them raise. The mesh stays usable."""
        for rank, value in enumerate(values):
            if value != values[0]:
                self._known_error = CollectiveMismatchError(
                    f"rank {rank} begins {what} with {value}, rank 0 with {values[0]}"
                )
                raise self._known_error

    def raise_failure(self, error: Exception | None, reasons: list[str | None]) -> None:
        """Raises this rank's own error, or SyncAbortedError with the first reason of another rank.
        All ranks have received the same reasons."""
        if error is not None:
            self._known_error = error
            raise error
        for rank, why in enumerate(reasons):
            if why is not None:
                raise SyncAbortedError(f"rank {rank}: {why}")

    def all_gather_push(self, at: str, why: str | None) -> list[tuple[str, str | None]]:
        """Returns each rank's place in a sync of begin_sync, and the reason of its failure or None.
        Every rank calls this once for each push ("push"), when it drops the sync ("abort"), and
        when it commits ("commit"); a committing rank repeats the call while other ranks still push.
        A push that succeeded sends an empty message."""
        parts = self.control.all_gather(
            b"" if (at, why) == ("push", None) else encode([PUSHES, at, why])
        )
        everyone: list[tuple[str, str | None]] = []
        for rank, part in enumerate(parts):
            call, its_at, its_why = decode(part) if part else (PUSHES, "push", None)
            if call != PUSHES:
                raise CollectiveMismatchError(
                    f"rank {rank} is in {call} and rank {self.rank} in {PUSHES}"
                )
            everyone.append((its_at, its_why))
        return everyone


def join(
    values: Any, options: Any, comm: Comm | None, mesh: Mesh, may_differ: Iterable[str] = ()
) -> RankEngine:
    """Makes the engine of this rank, after all ranks have connected and compared spec and options.
    Ranks may differ in OF_A_RANK and in the options listed in may_differ. comm may be None in a
    world of one rank. Raises this rank's own error, MeshMismatchError, or RankLostError if another
    rank failed."""
    ends = None if comm is None else comm.connect(mesh)
    if comm is None or ends is None or ends.control is None:
        return RankEngine(_core.Engine(values, options))
    try:
        # Compared first, since with None the ranks exchange messages while the engines are made.
        sized = {"kv_cache_gib": "None" if options.memory_fraction else "a number"}
        everyone = [
            decode(part)
            for part in ends.control.all_gather(encode([comm.handshake_values(), sized]))
        ]
        comm.accept_handshake([its for its, _ in everyone])
        check_alike([its for _, its in everyone])
        engine = _make(values, options, comm.rank, ends, ends.control)
    except BaseException:
        ends.control.close()
        comm.close()
        raise
    sends_records = comm.rank % mesh.tp == 0
    own_requests = mesh.dp > 1 and options.external_pages > 0
    spmd = SpmdEngine(engine, comm, ends.control, sends_records, own_requests)
    try:
        facts = {
            name: value
            for name, value in asdict(options).items()
            if name not in {*OF_A_RANK, *may_differ}
        }
        spmd.handshake(
            {
                **facts,
                "spec": asdict(values),
                "contract": CONTRACT_VERSION,
                "family": engine.stats()["family"],
            }
        )
    except BaseException:
        spmd.close()
        raise
    return spmd


def _make(
    values: Any, options: Any, rank: int, ends: Endpoints, control: _core.Comm
) -> _core.Engine:
    """Makes this rank's engine. Raises RankLostError if another rank failed to make its engine."""
    try:
        engine = _core.Engine(values, options, (rank, ends.tp, ends.ep, ends.world))
    except BaseException as error:
        for end in (ends.tp, ends.ep, ends.world):
            if end is not None:  # other ranks may be waiting for this rank
                end.abort()
        failures = map(decode, control.all_gather(encode(f"{type(error).__name__}: {error}"[:500])))
        first = next(
            (
                (other, why)
                for other, why in enumerate(failures)
                if why and not why.startswith(RankLostError.__name__)
            ),
            None,
        )
        # Another rank failed while the groups were connected.
        if isinstance(error, RankLostError) and first is not None:
            raise RankLostError(f"rank {first[0]} could not be made: {first[1]}") from error
        raise
    for other, failure in enumerate(map(decode, control.all_gather(encode(None)))):
        if failure is not None:
            engine.close()
            raise RankLostError(f"rank {other} could not be made: {failure}")
    return engine

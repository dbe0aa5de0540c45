"""One rank of a mesh of processes, behind the calls of an engine. Every process makes the same calls in the same order; here is
what they tell one another, so that the layers above need not know that there are others.

A request is kept by the ranks of one replica and is *foreign* to all others. Nothing counts as finished before all ranks have heard
of it, so that all see the same, in the same call: the first rank of each replica sends the records of what it has finished. They meet
for that in one of two ways, and which it is follows from the calls alone:

    to the end     add (own or foreign) ──► step … step (own) ──► settle (all) ──► finished, request, sample, tokens ──► release
    step by step   add, add … ──► step_with_all (a step, and what it finished is settled) ──► …  more may be added after any

To the end is how a call waits for everything that is unfinished (generate, score, a sync that waits): no replica holds another up.
Step by step is how poll works, and a call that is to return while other requests run on: all ranks take as many steps, so that what
a poll gives out is what it gives out in one process with the same mesh.

Wherever ranks meet here they say which call they are in and what they have been asked so far: ranks of a program that has come apart
get CollectiveMismatchError before anything is computed. A rank that leaves a call alone (Ctrl-C, no memory) gives the mesh up, and the
others get RankLostError where they wait.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from rollmesh import _core
from rollmesh.distributed.comm import Comm, Ends, check_alike
from rollmesh.distributed.mesh import Mesh
from rollmesh.distributed.rank_engine import ALONE, PUSHES, RankEngine
from rollmesh.distributed.wire import decode, encode
from rollmesh.errors import (
    CollectiveMismatchError,
    Error,
    RankLostError,
    SyncAbortedError,
)
from rollmesh.runtime.engine_views import CONTRACT_VERSION, Finish, Ids, RequestView, SampleView
from rollmesh.runtime.messages import reason

Record = dict[str, Any]  # {"request": RequestView, "samples": [SampleView], "logits": array or None, "late": bool}
# Options that the bits do not depend on.
OF_A_RANK = ("threads", "isa", "cuda_library", "cuda_ordinal", "nccl_library", "nccl_gpu", "cublas_library")


class SpmdEngine(RankEngine):
    """A _core.Engine that is one rank of several processes."""

    has_peers = True

    def __init__(
        self,
        engine: _core.Engine,
        comm: Comm,
        control: _core.Comm,
        lockstep: _core.Comm | None,
        leads: bool,
        spans: bool,
        apart: bool = False,
    ):
        """leads: it speaks for its replica. spans: experts are spread over replicas, which therefore step together. apart: replicas are
        given requests of their own (by vLLM), which are not compared."""
        super().__init__(engine)
        self._comm, self.control, self._lockstep = comm, control, lockstep
        self.rank, self._leads, self._spans, self._apart = comm.rank, leads, spans, apart
        self._asked = hashlib.sha256()  # of all requests so far
        self._announced = True  # nothing was asked since the ranks last compared that
        self._ids: list[int] = []  # added and not released, oldest first
        self._foreign: dict[int, Record | None] = {}  # None until settled
        self._logits: dict[int, NDArray[np.float32]] = {}
        self._settled: set[int] = set()
        self._told: BaseException | None = None  # an exception that all ranks know of

    def close(self) -> None:
        self._engine.close()
        for end in (self.control, self._lockstep):
            if end is not None:
                end.close()
        self._comm.close()

    # ---------------------------------------------------------------------------------------- among ranks
    def meet(self, call: str, value: Any = None) -> list[Any]:
        """Every rank's value. Raises CollectiveMismatchError when they are not all in the same call, asked for the same."""
        asked = self._asked.hexdigest()[:16]
        parts = self.control.all_gather(encode([call, asked, value]))
        everyone = [decode(part) if part else [PUSHES, asked, None] for part in parts]
        for rank, (its_call, its_asked, _) in enumerate(everyone):
            if (its_call, its_asked) != (call, asked):
                what = f"is in {its_call} and rank {self.rank} in {call}" if its_call != call else f"and rank {self.rank} in {call} differ"
                raise CollectiveMismatchError(f"rank {rank} {what}{'' if its_call != call else ' in the requests that they were given'}")
        return [value for _, _, value in everyone]

    def handshake(self, facts: Mapping[str, Any]) -> None:
        """All ranks must have been made alike. Raises MeshMismatchError that lists who was not, and in what."""
        text = {name: json.dumps(value, sort_keys=True, default=lambda array: array.tolist()) for name, value in facts.items()}
        digest = {name: hashlib.sha256(value.encode()).hexdigest()[:16] if len(value) > 80 else value for name, value in text.items()}
        check_alike(self.meet("its making", digest))

    def agree(self, flag: bool) -> bool:
        """Whether any rank that steps together with this one says so."""
        self._announce("a call with a timeout")
        if self._lockstep is None:
            return flag
        return b"1" in self._lockstep.all_gather(b"1" if flag else b"0")

    def own_deadline(self, deadline: float | None) -> float | None:
        """None: all ranks act on a deadline together."""
        del deadline
        return None

    def _announce(self, call: str) -> None:
        """Before the first step for new requests: all have been given the same."""
        if not self._announced:
            self.meet(call)
            self._announced = True

    def leave(self, error: BaseException, voting: bool = False) -> None:
        """This rank is about to leave a call by an exception. One that the others do not get too, or learn of, ends the mesh: they
        would wait for this rank. voting: a sync had come to its vote, in which a lack of memory is a voice like others."""
        alike = isinstance(error, Error) and not isinstance(error, ALONE)
        if error is not self._told and not alike and not (voting and isinstance(error, MemoryError)):
            self.give_up()

    def give_up(self) -> None:
        """This rank leaves the common order of calls: the others learn it where they wait."""
        self._engine.give_up()
        for end in (self.control, self._lockstep):
            if end is not None:
                end.abort()
        self._comm.abort()

    # ---------------------------------------------------------------------------------------- requests
    def add(self, prompt: Ids, stop_token_ids: Ids, request: Any, logits: NDArray[np.float32] | None) -> int:
        number = self._engine.add(prompt, stop_token_ids, request, logits)
        self._ids.append(number)
        self._note(repr(request).encode(), prompt.tobytes(), stop_token_ids.tobytes(), b"" if logits is None else b"logits")
        self._announced = False
        if logits is not None:
            self._logits[number] = logits
        if not self._engine.has(number):
            self._foreign[number] = None
        return number

    def _note(self, *asked: bytes) -> None:
        """The ranks compare it where they next meet."""
        for part in () if self._apart else asked:
            self._asked.update(len(part).to_bytes(8, "little") + part)

    def step(self) -> tuple[int, bool]:
        """To the end: a step of this rank's own requests, or when they are finished what the others have to say. While paused or asleep
        only what is finished already (aborted) is heard of."""
        self._announce("a call without a timeout")
        if self._still():
            return self._settle_finished(), False
        self._comm.look(self.control)  # replicas that do not step together meet late
        rows, more = self._engine.step()
        if more or self._engine.unfinished():
            return max(rows, int(more)), more
        return self._settle(), False

    def _settle(self) -> int:
        """Number of requests that finished for everybody, which are all."""
        settled, lacking = self._settle_some("the end of its requests"), self._waiting()
        if lacking:
            raise CollectiveMismatchError(f"no rank answers for request {lacking[0]}; all ranks have to make the same calls")
        return settled

    def _settle_finished(self) -> int:
        """The same while no step can be made. StateError when the engine sleeps and something is left to be done."""
        settled = self._settle_some("a call that makes no step")
        self._refuse_asleep()
        return settled

    def _settle_some(self, call: str) -> int:
        waiting = self._waiting()
        if waiting:
            self._take(self.meet(call, self._finished_here(waiting)))
        return len(waiting) - len(self._waiting())

    def _still(self) -> bool:
        """No step can be made; all ranks are paused and asleep together."""
        return self.paused or bool(self._engine.stats()["asleep"])

    def _refuse_asleep(self) -> None:
        if self._waiting() and not self.paused and self._still():
            self._engine.step()

    def runs_besides(self, numbers: set[int]) -> bool:
        """Requests other than these are unfinished, so that a call for these does not go to the end of all."""
        return not numbers.issuperset(self._waiting())

    def step_with_all(self, watch: Callable[[], None], deadline: float | None) -> tuple[int, bool]:
        """Step by step: a step of this rank's own requests, watch() for stop strings in them, and what finished on any rank.

        Returns (rows of all replicas, whether any rank has seen its deadline pass). An exception of any rank but those that end the mesh
        is raised on all, once they have met: its own there, one of its class (or Error) elsewhere."""
        call, rows, fault = "a step with all", 0, None
        self._announce(call)
        try:
            if not self._still():
                rows, _ = self._engine.step()
                watch()
        except (*ALONE, MemoryError):
            raise
        except Exception as error:  # noqa: BLE001 (told to all ranks, then raised)
            fault = error
        late, records = deadline is not None and time.monotonic() >= deadline, self._finished_here(self._waiting())
        told = {"rows": rows if self._leads else 0, "late": late, "fault": fault, "records": records}
        everyone = self.meet(call, told)
        self._take([its["records"] for its in everyone])
        faults = [its["fault"] for its in everyone if its["fault"] is not None]
        if faults:
            self._told = fault or faults[0]
            raise self._told
        self._refuse_asleep()
        return sum(its["rows"] for its in everyone), any(its["late"] for its in everyone)

    def _waiting(self) -> list[int]:
        return [number for number in self._ids if number not in self._settled]

    def _finished_here(self, numbers: Iterable[int]) -> dict[str, Record]:
        """Of these what the replica that this rank leads has finished."""
        finished = self._engine.finished() if self._leads else set()
        return {str(number): self._record(number) for number in numbers if number in finished}

    def _take(self, everyone: list[dict[str, Record]]) -> None:
        """From now on these are finished, for everybody."""
        finished = self._engine.finished()
        for name, record in ((name, record) for records in everyone for name, record in records.items()):
            number = int(name)
            if number in self._foreign:
                self._foreign[number] = record
                if record["logits"] is not None:
                    self._logits[number][...] = record["logits"]
            elif number not in finished:
                raise CollectiveMismatchError(f"request {number} is finished on the first rank of the replica and not on rank {self.rank}")
            if record["late"]:
                self._late.add(number)
            self._settled.add(number)

    def _record(self, number: int) -> Record:
        view = self._engine.request(number)
        samples = [self._engine.sample(number, i) for i in range(view["n"])]
        return {"request": view, "samples": samples, "logits": self._logits.get(number), "late": number in self._late}

    def finished(self) -> set[int]:
        return set(self._settled)

    def unfinished(self) -> int:
        return len(self._ids) - len(self._settled)

    def ids(self) -> list[int]:
        return list(self._ids)

    def cut_off(self, numbers: Iterable[int]) -> None:
        """The deadline of these has passed: what this rank's replica keeps and has not finished ends. Others end their own."""
        for number in set(numbers).difference(self._foreign, self._engine.finished()):
            self._late.add(number)
            self._engine.abort(number)

    def abort(self, number: int) -> None:
        """The ranks that keep it end it; all make this call."""
        self._note(b"abort", str(number).encode())
        if number not in self._foreign:
            self._engine.abort(number)

    def release(self, number: int) -> None:
        if number not in self._foreign:
            self._engine.release(number)
        self._foreign.pop(number, None)
        self._logits.pop(number, None)
        self._settled.discard(number)
        self._late.discard(number)
        self._ids.remove(number)

    def stop_sample(self, number: int, sample: int, n_tokens: int) -> None:
        if number not in self._foreign:
            self._engine.stop_sample(number, sample, n_tokens)

    # ---------------------------------------------------------------------------------------- results
    def request(self, number: int) -> RequestView:
        if number not in self._foreign:
            return self._engine.request(number)
        return cast(RequestView, self._known(number)["request"])

    def sample(self, number: int, index: int) -> SampleView:
        if number not in self._foreign:
            return self._engine.sample(number, index)
        return cast(SampleView, self._known(number)["samples"][index])

    def tokens(self, number: int, index: int, start: int) -> tuple[Finish, Ids]:
        """Of a foreign sample that a stop string ended the finish is "length": where the string is has to be found here too."""
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
            raise CollectiveMismatchError(f"request {number} is another rank's, and was asked for before it was finished")
        return record

    # ---------------------------------------------------------------------------------------- weights
    def tell_of_sync(self, where: str, value: Any, error: Exception | None) -> list[Any]:
        error, self.fault = error or self.fault, None
        everyone = self.meet(where, [value, None if error is None else reason(error)])
        self.end_on_all(error, [why for _, why in everyone])
        return [value for value, _ in everyone]

    def refuse(self, where: str, error: Exception, turn: Callable[[], AbstractContextManager[None]]) -> None:
        with turn():
            try:
                self.settle_sync(where, error)
            except BaseException as raised:
                self.leave(raised)
                raise

    def compare(self, what: str, values: list[str]) -> None:
        """All ranks have heard the same values: CollectiveMismatchError on all, naming two that differ, and the mesh goes on."""
        for rank, value in enumerate(values):
            if value != values[0]:
                self._told = CollectiveMismatchError(f"rank {rank} begins {what} with {value}, rank 0 with {values[0]}")
                raise self._told

    def end_on_all(self, error: Exception | None, reasons: list[str | None]) -> None:
        """All ranks have heard the same reasons for not going on: raises this rank's own error, or SyncAbortedError with another's."""
        if error is not None:
            self._told = error
            raise error
        for rank, why in enumerate(reasons):
            if why is not None:
                raise SyncAbortedError(f"rank {rank}: {why}")

    def among_pushes(self, at: str, why: str | None) -> list[tuple[str, str | None]]:
        """A pushed set: where each rank is, and if so why it goes no further. All ranks come here once for every push ("push"), when
        they drop the set ("abort"), and when they are through ("commit"), then as often as others still push. Nothing is said of a
        push that went well."""
        parts = self.control.all_gather(b"" if (at, why) == ("push", None) else encode([PUSHES, at, why]))
        everyone: list[tuple[str, str | None]] = []
        for rank, part in enumerate(parts):
            call, its_at, its_why = decode(part) if part else (PUSHES, "push", None)
            if call != PUSHES:
                raise CollectiveMismatchError(f"rank {rank} is in {call} and rank {self.rank} in {PUSHES}")
            everyone.append((its_at, its_why))
        return everyone


def join(values: Any, options: Any, comm: Comm | None, mesh: Mesh, may_differ: Iterable[str] = ()) -> RankEngine:
    """This process's rank, once all have come and were made alike; a rank may have threads, an isa, and what may_differ names of the
    options for itself. Raises what made this rank fail, MeshMismatchError, or RankLostError when another has failed. A world of one
    rank is an engine and has nobody to ask."""
    ends = None if comm is None else comm.connect(mesh)
    if comm is None or ends is None or ends.control is None:
        return RankEngine(_core.Engine(values, options))
    try:
        sized = {"kv_cache_gib": "None" if options.memory_fraction else "a number"}  # with None ranks meet while they are made
        told = [decode(part) for part in ends.control.all_gather(encode([comm.tells(), sized]))]
        comm.hears([its for its, _ in told])
        check_alike([its for _, its in told])
        engine = _make(values, options, comm.rank, ends, ends.control)
    except BaseException:
        ends.control.close()
        comm.close()
        raise
    spans = mesh.dp > 1 and mesh.ep > mesh.tp
    leads, apart = comm.rank % mesh.tp == 0, mesh.dp > 1 and options.host_pages > 0
    spmd = SpmdEngine(engine, comm, ends.control, ends.lockstep, leads, spans, apart)
    try:
        facts = {name: value for name, value in asdict(options).items() if name not in {*OF_A_RANK, *may_differ}}
        spmd.handshake({**facts, "spec": asdict(values), "contract": CONTRACT_VERSION, "family": engine.stats()["family"]})
    except BaseException:
        spmd.close()
        raise
    return spmd


def _make(values: Any, options: Any, rank: int, ends: Ends, control: _core.Comm) -> _core.Engine:
    """The engine of this rank, when all ranks could make theirs."""
    try:
        engine = _core.Engine(values, options, (rank, ends.tp, ends.ep, ends.world))
    except BaseException as error:
        for end in (ends.tp, ends.ep, ends.world):
            if end is not None:  # where others may wait for this rank
                end.abort()
        failures = map(decode, control.all_gather(encode(f"{type(error).__name__}: {error}"[:500])))
        first = next(((other, why) for other, why in enumerate(failures) if why and not why.startswith(RankLostError.__name__)), None)
        if isinstance(error, RankLostError) and first is not None:  # it heard of another's, where they make their groups
            raise RankLostError(f"rank {first[0]} could not be made: {first[1]}") from error
        raise
    for other, failure in enumerate(map(decode, control.all_gather(encode(None)))):
        if failure is not None:
            engine.close()
            raise RankLostError(f"rank {other} could not be made: {failure}")
    return engine

"""One rank of a mesh of processes, behind the calls of an engine. Every process makes the same calls in the same order; here is
what they tell one another, so that the layers above need not know that there are others.

A request is kept by the ranks of one replica and is *foreign* to all others. Each rank steps until its own requests are
finished, then all settle: the first rank of each replica sends the records of what finished, and from then on every rank can
give out every output. Nothing counts as finished before that, so all ranks see the same.

    add (own or foreign) ──► step … step (own) ──► settle (all) ──► finished, request, sample, tokens ──► release
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from rollmesh import _core
from rollmesh.comm import Comm, Ends
from rollmesh.errors import CollectiveMismatchError, MeshMismatchError, SyncAbortedError
from rollmesh.mesh import Mesh
from rollmesh.requests import Ids
from rollmesh.sources.arrays import as_array
from rollmesh.views import Finish, RequestView, SampleView, Stats
from rollmesh.wire import decode, encode

Record = dict[str, Any]  # {"request": RequestView, "samples": [SampleView], "logits": array or None}


class SpmdEngine:
    """A _core.Engine that is one rank of several processes."""

    def __init__(self, engine: _core.Engine, ends: Ends, rank: int, leads: bool, spans: bool):
        """leads: it speaks for its replica. spans: experts are spread over replicas, which therefore step together."""
        self._engine, self._control, self._lockstep = engine, ends.control, ends.lockstep
        self._rank, self._leads, self._spans = rank, leads, spans
        self._ids: list[int] = []  # added and not released, oldest first
        self._foreign: dict[int, Record | None] = {}  # None until settled
        self._logits: dict[int, NDArray[np.float32]] = {}
        self._settled: set[int] = set()
        self._paused = False

    def __getattr__(self, name: str) -> Any:
        """What concerns this rank alone, or is a collective of the engine's own: syncs, sleep, wake, the manifest."""
        return getattr(self._engine, name)

    def close(self) -> None:
        self._engine.close()
        for end in (self._control, self._lockstep):
            if end is not None:
                end.close()

    # ---------------------------------------------------------------------------------------- among ranks
    def handshake(self, facts: Mapping[str, Any]) -> None:
        """All ranks must have been made alike. Raises MeshMismatchError that lists who was not, and in what."""
        text = {name: json.dumps(value, sort_keys=True, default=lambda array: array.tolist()) for name, value in facts.items()}
        if self._control is None:
            return
        digest = {name: hashlib.sha256(value.encode()).hexdigest()[:16] if len(value) > 80 else value for name, value in text.items()}
        everyone = [decode(part) for part in self._control.all_gather(encode(digest))]
        wrong = [
            f"rank {rank} has {name} = {its.get(name)}, rank 0 {everyone[0].get(name)}"
            for rank, its in enumerate(everyone)
            for name in sorted({*its, *everyone[0]})
            if its.get(name) != everyone[0].get(name)
        ]
        if wrong:
            raise MeshMismatchError(f"the ranks of this mesh were not made alike: {'; '.join(wrong)[:2000]}")

    def agree(self, flag: bool) -> bool:
        """Whether any rank that steps together with this one says so."""
        if self._lockstep is None:
            return flag
        return b"1" in self._lockstep.all_gather(b"1" if flag else b"0")

    def give_up(self) -> None:
        """This rank leaves the common order of calls: the others learn it where they wait."""
        for end in (self._control, self._lockstep):
            if end is not None:
                end.abort()

    # ---------------------------------------------------------------------------------------- requests
    def add(self, prompt: Ids, stop_token_ids: Ids, request: Any, logits: NDArray[np.float32] | None) -> int:
        number = self._engine.add(prompt, stop_token_ids, request, logits)
        self._ids.append(number)
        if logits is not None:
            self._logits[number] = logits
        if not self._engine.has(number):
            self._foreign[number] = None
        return number

    def step(self) -> tuple[int, bool]:
        """A step of this rank's own requests, or when they are finished what the others have to say."""
        if self._paused:
            return 0, False
        if self._spans or self._engine.unfinished():
            rows, more = self._engine.step()
            if more or self._engine.unfinished():
                return max(rows, int(more)), more
        return self._settle(), False

    def _settle(self) -> int:
        """Number of requests that finished for everybody."""
        waiting = [number for number in self._ids if number not in self._settled]
        if not waiting:
            return 0
        mine = {str(number): self._record(number) for number in waiting if self._leads and number not in self._foreign}
        for part in [encode(mine)] if self._control is None else self._control.all_gather(encode(mine)):
            for name, record in decode(part).items():
                number = int(name)
                if number in self._foreign:
                    self._foreign[number] = record
                    if record["logits"] is not None:
                        self._logits[number][...] = record["logits"]
        lacking = [number for number in waiting if self._foreign.get(number, {}) is None]
        if lacking:
            raise CollectiveMismatchError(f"no rank answers for request {lacking[0]}; all ranks have to make the same calls")
        self._settled.update(waiting)
        return len(waiting)

    def _record(self, number: int) -> Record:
        view = self._engine.request(number)
        return {"request": view, "samples": [self._engine.sample(number, i) for i in range(view["n"])], "logits": self._logits.get(number)}

    def finished(self) -> set[int]:
        return set(self._settled)

    def unfinished(self) -> int:
        return len(self._ids) - len(self._settled)

    def ids(self) -> list[int]:
        return list(self._ids)

    def abort(self, number: int) -> None:
        """The ranks that keep it end it; all make this call."""
        if number not in self._foreign:
            self._engine.abort(number)

    def release(self, number: int) -> None:
        if number not in self._foreign:
            self._engine.release(number)
        self._foreign.pop(number, None)
        self._logits.pop(number, None)
        self._settled.discard(number)
        self._ids.remove(number)

    def stop_sample(self, number: int, sample: int, n_tokens: int) -> None:
        if number not in self._foreign:
            self._engine.stop_sample(number, sample, n_tokens)

    def pause(self, paused: bool) -> None:
        self._paused = paused
        self._engine.pause(paused)

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
        if number not in self._foreign:
            return self._engine.tokens(number, index, start)
        if self._foreign[number] is None:
            return None, np.zeros(0, np.int32)
        sample = self.sample(number, index)
        return sample["finish"], sample["token_ids"][start:]

    def _known(self, number: int) -> Record:
        record = self._foreign[number]
        if record is None:
            raise CollectiveMismatchError(f"request {number} is another rank's, and was asked for before it was finished")
        return record

    def stats(self) -> Stats:
        return self._engine.stats()

    # ---------------------------------------------------------------------------------------- weights
    def spread(self, source: Any) -> Iterator[tuple[str, Any]]:
        """The entries of the first rank that has a source, on every rank, one after another; an exception of that source ends the
        sync on all."""
        assert self._control is not None
        has = [part == b"1" for part in self._control.all_gather(b"0" if source is None else b"1")]
        root = has.index(True) if any(has) else -1
        if root < 0:
            raise SyncAbortedError("no rank has a source of weights, wanted one at least")
        return self._send(source) if root == self._rank else self._receive(root)

    def _send(self, source: Any) -> Iterator[tuple[str, Any]]:
        assert self._control is not None
        entries = iter(source.items() if isinstance(source, Mapping) else source)
        try:
            for name, tensor in entries:
                self._control.all_gather(encode({"name": name, "array": as_array(name, tensor)}))
                yield name, tensor
        except GeneratorExit:
            raise
        except BaseException as error:
            self._control.all_gather(encode({"error": f"{type(error).__name__}: {error}"[:500]}))
            raise
        self._control.all_gather(encode({}))

    def settle_sync(self, error: Exception | None) -> None:
        """Every rank has taken its part of all entries, or failed: all go on to commit or none does."""
        assert self._control is not None
        everyone = [
            decode(part) for part in self._control.all_gather(encode(None if error is None else f"{type(error).__name__}: {error}"[:1000]))
        ]
        if error is not None:
            raise error
        for rank, message in enumerate(everyone):
            if message is not None:
                raise SyncAbortedError(f"rank {rank}: {message}")

    def _receive(self, root: int) -> Iterator[tuple[str, Any]]:
        assert self._control is not None
        while message := decode(self._control.all_gather(b"")[root]):
            if "error" in message:
                raise SyncAbortedError(f"rank {root}: {message['error']}")
            yield message["name"], message["array"]


def join(values: Any, options: Any, comm: Comm, mesh: Mesh, facts: Mapping[str, Any]) -> SpmdEngine:
    """This process's rank, once all have come and were made alike. Raises what made this rank fail, MeshMismatchError, or
    RankLostError when another has failed."""
    ends = comm.connect(mesh)
    try:
        engine = _core.Engine(values, options, (comm.rank, ends.tp, ends.ep, ends.world))
    except BaseException:
        if ends.control is not None:
            ends.control.abort()
        raise
    spmd = SpmdEngine(engine, ends, comm.rank, leads=comm.rank % mesh.tp == 0, spans=mesh.dp > 1 and mesh.ep > mesh.tp)
    try:
        spmd.handshake({**facts, "family": engine.stats()["family"]})
    except BaseException:
        spmd.close()
        raise
    return spmd

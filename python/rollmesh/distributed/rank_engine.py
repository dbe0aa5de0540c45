"""The engine of this process and its exchanges with the other ranks of the mesh, as one interface
for the generator, requests, weight updates and vLLM's runner.

RankEngine       all ranks are in this process, as threads if there are several: requests go to the
                 C engine, and exchanges return at once
SpmdEngine       (spmd.py) this process is one rank of several: exchanges go to the other ranks
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollmesh import _core
from rollmesh.distributed.follow import Role, followed
from rollmesh.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    DeadlineError,
    DeviceError,
    RankLostError,
)
from rollmesh.runtime.engine_views import Finish, Ids, OpTime, RequestView, SampleView, Stats

# Errors that one rank may raise while the others do not.
ALONE = (CollectiveMismatchError, CollectiveTimeoutError, RankLostError, DeadlineError, DeviceError)
PUSHES = "begin_sync"
Array = NDArray[Any]


class RankEngine:
    """A _core.Engine in a single process."""

    has_peers = False  # whether other processes make the same calls in the same order
    rank = 0

    def __init__(self, engine: _core.Engine):
        self._engine = engine
        self.paused = False
        self.role: Role | None = None  # set by Generator.follow
        # Error of this rank's source, raised at the next exchange of the sync.
        self.fault: Exception | None = None
        self._late: set[int] = set()  # requests aborted by a deadline and not yet released
        # Request → error of the tokenizer in the search for stop strings.
        self.request_faults: dict[int, BaseException] = {}

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of the C engine: methods of syncs, sleep, wake, the manifest."""
        return getattr(self._engine, name)

    def close(self) -> None:
        self._engine.close()

    # --------------------------------------------------------------------------------- among ranks
    def all_gather(self, call: str, value: Any = None) -> list[Any]:
        """Returns every rank's value. Raises CollectiveMismatchError if ranks are in different
        calls or were given different requests."""
        del call
        return [value]

    def own_deadline(self, deadline: float | None) -> float | None:
        """Returns the deadline on which this rank may act without the other ranks."""
        return deadline

    def abort_unless_shared(self, error: BaseException, voting: bool = False) -> bool:
        """Called when this rank leaves a call by an exception. Aborts the mesh unless the other
        ranks also raise the exception or have received it, since they would otherwise wait for this
        rank. voting: the call is the two-phase commit of a sync, in which a MemoryError is a vote.
        Returns whether the mesh was aborted."""
        del error, voting
        return False

    # ------------------------------------------------------------------------------------ requests
    def add(
        self,
        prompt: Ids,
        stop_token_ids: Ids,
        request: Any,
        logits: NDArray[np.float32] | None,
        edits: tuple[Array, ...] | None = None,
    ) -> int:
        """Adds a request and returns its number. edits: the arrays of
        rollmesh.request.logit_edits."""
        return self._engine.add(prompt, stop_token_ids, request, logits, edits)

    def step(self, watch: Callable[[], None], deadline: float | None) -> tuple[int, bool]:
        """Runs one step, after which all ranks have the same finished requests. watch() searches
        for stop strings in this rank's own requests before the exchange; the caller calls it again
        afterwards. Returns (rows of all replicas, whether the deadline of any rank has passed)."""
        del watch
        rows = 0 if self.paused else self._engine.step()[0]
        return rows, deadline is not None and time.monotonic() >= deadline

    def finished(self) -> set[int]:
        return self._engine.finished()

    def unfinished(self) -> int:
        return self._engine.unfinished()

    def ids(self) -> list[int]:
        """Returns the requests that were added and not released, oldest first."""
        return self._engine.ids()

    @followed("numbers")
    def cut_off(self, numbers: Iterable[int]) -> None:
        """Aborts those of these requests that still run, because their deadline has passed."""
        for number in set(numbers).difference(self.finished()):
            self._late.add(number)
            self._engine.abort(number)

    def late(self, numbers: Iterable[int]) -> set[int]:
        """Returns those of these requests that a deadline has aborted."""
        return self._late.intersection(numbers)

    def abort(self, number: int) -> None:
        self._engine.abort(number)

    def release(self, number: int) -> None:
        self._engine.release(number)
        self._late.discard(number)
        self.request_faults.pop(number, None)

    def stop_sample(self, number: int, sample: int, n_tokens: int) -> None:
        self._engine.stop_sample(number, sample, n_tokens)

    @followed("paused")
    def pause(self, paused: bool) -> None:
        self.paused = paused
        self._engine.pause(paused)

    @followed()
    def reset_prefix_cache(self) -> None:
        self._engine.reset_prefix_cache()

    def request(self, number: int) -> RequestView:
        return self._engine.request(number)

    def sample(self, number: int, index: int) -> SampleView:
        return self._engine.sample(number, index)

    def tokens(self, number: int, index: int, start: int) -> tuple[Finish, Ids]:
        return self._engine.tokens(number, index, start)

    def stats(self) -> Stats:
        return self._engine.stats()

    def profile(self) -> list[OpTime]:
        return self._engine.profile()

    # ------------------------------------------------------------------------------------- weights
    def all_gather_or_raise(self, where: str, value: Any, error: Exception | None) -> list[Any]:
        """Returns every rank's value once all ranks have reached this point of a sync. error: this
        rank's error, or None. This rank raises it; the other ranks raise SyncAbortedError with the
        reason."""
        self.raise_failure(error, [])
        return self.all_gather(where, value)

    def barrier(self, where: str, error: Exception | None) -> None:
        """Like all_gather_or_raise, without a value."""
        self.all_gather_or_raise(where, None, error)

    def refuse(self, where: str, error: Exception) -> None:
        """Sends the other ranks the error with which this rank refuses the arguments of a call that
        all ranks make."""

    def require_equal(self, what: str, values: list[str]) -> None:
        """Raises CollectiveMismatchError on all ranks unless all values are equal. The mesh stays
        usable."""

    def raise_failure(self, error: Exception | None, reasons: list[str | None]) -> None:
        """Raises this rank's own error or, if another rank has failed, SyncAbortedError with the
        first reason."""
        del reasons
        if error is not None:
            raise error

    def all_gather_push(self, at: str, why: str | None) -> list[tuple[str, str | None]]:
        """Returns each rank's place in a sync of begin_sync ("push", "abort", "commit"), and the
        reason of its failure or None."""
        return [(at, why)]

"""The engine of this process and its exchanges with the other ranks of the mesh, as one interface
for the generator, requests, weight updates and vLLM's runner.

RankEngine       all ranks are in this process, as threads if there are several: requests go to the
                 C engine, and exchanges return at once
PeerEngine       (peers.py) this process is one rank of several: exchanges go to the other ranks
LedEngine        (leading.py) a PeerEngine whose operations are decided by rank 0
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from rollmesh import _core
from rollmesh.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    DeviceError,
    RankLostError,
)
from rollmesh.runtime.engine_views import Finish, Ids, OpTime, RequestView, SampleView, Stats

# Errors that one rank may raise while the others do not.
ALONE = (CollectiveMismatchError, CollectiveTimeoutError, RankLostError, DeviceError)
PUSHES = "begin_sync"
Array = NDArray[Any]
P = ParamSpec("P")
T = TypeVar("T")


class _HasEngine(Protocol):
    @property
    def engine(self) -> RankEngine: ...


S = TypeVar("S", bound=_HasEngine)


def led(
    is_collective: bool = False,
) -> Callable[[Callable[Concatenate[S, P], T]], Callable[Concatenate[S, P], T]]:
    """Marks an operation that rank 0 sends to the other ranks of a LedEngine, with its positional
    arguments. Keyword arguments stay on this rank. is_collective: the ranks exchange messages in
    the operation, so it is sent before it runs; other operations wait for the next message."""

    def mark(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
        @wraps(method)
        def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
            return self.engine.lead(
                method.__name__, args, is_collective, lambda: method(self, *args, **kwargs)
            )

        return call

    return mark


class RankEngine:
    """A _core.Engine in a single process."""

    has_peers = False  # whether this process is one rank of several
    rank = 0

    def __init__(self, engine: _core.Engine):
        self._engine = engine
        self.paused = False
        # Error of this rank's source, raised at the next exchange of the sync.
        self.fault: Exception | None = None
        self._late: set[int] = set()  # requests aborted by a deadline and not yet released
        # Request → error of the tokenizer in the search for stop strings.
        self.request_faults: dict[int, BaseException] = {}

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of the C engine: methods of syncs, sleep, wake, the manifest."""
        return getattr(self._engine, name)

    @property
    def engine(self) -> RankEngine:
        return self

    def close(self) -> None:
        self._engine.close()

    # --------------------------------------------------------------------------------- among ranks
    def lead(
        self, name: str, args: tuple[Any, ...], is_collective: bool, run: Callable[[], T]
    ) -> T:
        """Runs an operation of `led`."""
        del name, args, is_collective
        return run()

    def by_every_rank(self) -> AbstractContextManager[None]:
        """Returns a context for operations that every rank makes by itself."""
        return nullcontext()

    def all_gather(self, call: str, value: Any = None) -> list[Any]:
        """Returns every rank's value. Raises CollectiveMismatchError if ranks are in different
        calls."""
        del call
        return [value]

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

    def step(self, watch: Callable[[], None]) -> int:
        """Runs one step, then calls watch(), which searches for stop strings. Returns the number of
        rows of all replicas."""
        rows = 0 if self.paused else self._engine.step()[0]
        watch()
        return rows

    def finished(self) -> set[int]:
        return self._engine.finished()

    def unfinished(self) -> int:
        return self._engine.unfinished()

    def ids(self) -> list[int]:
        """Returns the requests that were added and not released, oldest first."""
        return self._engine.ids()

    @led()
    def cut_off(self, numbers: Iterable[int]) -> None:
        """Aborts those of these requests that still run, because their deadline has passed."""
        for number in set(numbers).difference(self.finished()):
            self._late.add(number)
            self.abort(number)

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

    @led()
    def pause(self, paused: bool) -> None:
        self.paused = paused
        self._engine.pause(paused)

    @led()
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

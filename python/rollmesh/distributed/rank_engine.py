"""The engine of this process and its exchanges with the other ranks of the mesh, as one interface
for the generator, requests, weight updates and vLLM's runner.

RankEngine       all ranks are in this process, as threads if there are several: requests go to the
                 C engine, and exchanges return at once
PeerEngine       (peers.py) this process is one rank of several: exchanges go to the other ranks
LedEngine        (leading.py) a PeerEngine whose operations are decided by rank 0
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from functools import wraps
from typing import Any, TypeVar

from rollmesh import _core
from rollmesh.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    DeviceError,
    RankLostError,
    SyncAbortedError,
)
from rollmesh.runtime.messages import reason

# Errors that one rank may raise while the others do not.
ALONE = (CollectiveMismatchError, CollectiveTimeoutError, RankLostError, DeviceError)
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


class Lead(Enum):
    """How the ranks of a mesh of processes come to make an operation."""

    QUEUED = auto()  # rank 0 sends it with its next message
    COLLECTIVE = auto()  # the ranks exchange messages in it: rank 0 sends it before it runs
    EVERY_RANK = auto()  # as COLLECTIVE, but every rank calls it and rank 0 sends nothing


def led(kind: Lead) -> Callable[[F], F]:
    """Marks an operation that changes the state that all ranks share; a method of an object with an
    attribute `engine`. Rank 0 sends positional arguments; keyword arguments stay on this rank."""

    def mark(method: F) -> F:
        @wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            return self.engine.lead(
                kind, method.__name__, args, lambda: method(self, *args, **kwargs)
            )

        method.__dict__["of_ranks"] = call
        return method

    return mark


def use_ranks(*parts: Any) -> None:
    """Replaces the marked methods of these objects by those that all ranks make together. Called
    once if ranks are processes, so that in one process nothing stands in front of a method."""
    for part in parts:
        cls = type(part)
        methods = {name: getattr(getattr(cls, name), "of_ranks", None) for name in dir(cls)}
        marked = {name: method for name, method in methods.items() if method is not None}
        part.__class__ = type(cls.__name__, (cls,), marked)


class RankEngine:
    """A _core.Engine in a single process. Methods that are not here are those of the C engine."""

    has_peers = False  # whether this process is one rank of several
    has_replicas = False  # whether other processes compute some requests, see LedEngine
    rank = 0
    silence_s: float | None = None  # how often the engine's thread calls idle(), at least

    def __init__(self, engine: _core.Engine):
        self._engine = engine
        self.step = engine.step  # faster than __getattr__, once for each step
        self.paused = False
        # Results of the requests that other ranks compute; None before they arrive.
        self.foreign: dict[int, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    @property
    def engine(self) -> RankEngine:
        return self

    def idle(self) -> None:
        """Called by the engine's thread while no call is active. Rank 0 then sends an empty message
        if it has sent none for silence_s, since a rank waits at most for the comm's timeout."""

    def all_gather(self, call: str, value: Any = None, error: Exception | None = None) -> list[Any]:
        """Returns every rank's value once all ranks have reached this point. error: this rank's
        error, or None. This rank raises it; the other ranks raise SyncAbortedError with the reason.
        If ranks are in different calls, all raise CollectiveMismatchError."""
        everyone = self.gather(call, value, None if error is None else reason(error))
        self.raise_failure(error, [why for _, why, _ in everyone])
        return [value for value, _, _ in everyone]

    def gather(
        self, call: str, value: Any, why: str | None = None
    ) -> list[tuple[Any, str | None, bool]]:
        """Returns every rank's value and the reason of its failure, see PeerEngine."""
        del call
        return [(value, why, False)]

    def raise_failure(self, error: Exception | None, reasons: list[str | None]) -> None:
        """Raises this rank's own error or, if another rank has failed, SyncAbortedError with the
        first reason. All ranks have received the same reasons."""
        if error is not None:
            raise error
        for rank, why in enumerate(reasons):
            if why is not None:
                raise SyncAbortedError(f"rank {rank}: {why}")

    def abort_unless_shared(self, error: BaseException) -> bool:
        """Called when this rank leaves a call by an exception. Aborts the mesh unless the other
        ranks also raise the exception or have received it, since they would otherwise wait for this
        rank. Returns whether the mesh was aborted."""
        del error
        return False

    @led(Lead.QUEUED)
    def pause(self, paused: bool) -> None:
        self.paused = paused  # Requests.step then runs no step

    @led(Lead.QUEUED)
    def reset_prefix_cache(self) -> None:
        self._engine.reset_prefix_cache()

"""One rank of a mesh of processes: the collectives of the layers above, and `join`, which makes its
engine.

Every message has the name of the call that its rank is in, so ranks in different calls raise
CollectiveMismatchError before anything is computed. A rank that leaves a call alone (Ctrl-C, out of
memory) aborts the mesh; waiting ranks raise RankLostError.

In vLLM each worker is a PeerEngine, because vLLM makes every call on every worker. A generator's
ranks are LedEngines (leading.py).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any, TypeVar

from rollmesh import _core
from rollmesh.distributed.comm import Comm, Endpoints, check_alike
from rollmesh.distributed.mesh import Mesh
from rollmesh.distributed.rank_engine import ALONE, Lead, RankEngine
from rollmesh.distributed.wire import decode, encode
from rollmesh.errors import (
    CollectiveMismatchError,
    Error,
    FormatError,
    RankLostError,
)
from rollmesh.runtime.engine_views import CONTRACT_VERSION
from rollmesh.runtime.messages import reason, shown

T = TypeVar("T")
PUSHES = "begin_sync"
FOLLOW = "follow()"  # the call of a rank that makes every call of rank 0
A_STEP: list[Any] = [[["step", [], None]], None]  # rank 0 sends a step alone


def _pack(call: str, value: Any, why: str | None, leads: bool) -> bytes:
    """Returns a message. The messages of a step have a short form, a word and the call, because
    serialising a value takes longer than a step of a small model. Others begin with a colon."""
    word = None
    if leads:
        word = "step" if value == A_STEP else None
    elif value is None or type(value) is int:
        word = str(value)
    if word is None or why is not None:
        return b":" + encode([call, value, why, leads])
    return f"{word} {call}".encode("utf-8", "surrogatepass")


def _unpack(message: bytes) -> list[Any]:
    """Returns the call, the value, the reason and whether rank 0 leads. Raises FormatError for
    bytes that `_pack` did not make."""
    if message.startswith(b":"):
        return list(decode(message[1:]))
    try:
        word, _, call = message.decode("utf-8", "surrogatepass").partition(" ")
        if word == "step":
            return [call, A_STEP, None, True]
        return [call, None if word == "None" else int(word), None, False]
    except ValueError as error:
        raise FormatError(f"expected a message of a rank, got {shown(message)}") from error


class PeerEngine(RankEngine):
    """A _core.Engine that is one rank of several processes."""

    has_peers = True

    def __init__(self, engine: _core.Engine, comm: Comm, control: _core.Comm):
        super().__init__(engine)
        self._comm, self.control, self.rank = comm, control, comm.rank
        self._known_error: BaseException | None = None  # an exception that all ranks have received

    def close(self) -> None:
        self._engine.close()
        self.control.close()
        self._comm.close()

    def gather(
        self, call: str, value: Any, why: str | None = None, leads: bool = False
    ) -> list[tuple[Any, str | None, bool]]:
        """Returns every rank's value and `why`, and whether the rank is in follow(), which is
        allowed if rank 0 decides what the ranks do (`leads`)."""
        everyone = list(map(_unpack, self.control.all_gather(_pack(call, value, why, leads))))
        first, _, _, leads = everyone[0]
        for rank, (its, *_) in enumerate(everyone):
            if its != first and not (leads and its == FOLLOW):
                self._known_error = CollectiveMismatchError(
                    f"rank {rank} is in {its}, rank 0 in {first}"
                )
                raise self._known_error
        return [(value, why, its == FOLLOW) for its, value, why, _ in everyone]

    def abort_unless_shared(self, error: BaseException) -> bool:
        alike = isinstance(error, Error) and not isinstance(error, ALONE)
        if alike or error is self._known_error:
            return False
        self.give_up()
        return True

    def give_up(self) -> None:
        """Aborts the mesh. The other ranks raise RankLostError in the call in which they wait."""
        self._engine.give_up()
        self.control.abort()
        self._comm.abort()

    def lead(self, kind: Lead, name: str, args: tuple[Any, ...], run: Callable[[], T]) -> T:
        """Runs an operation of `led`."""
        try:
            return run()
        except BaseException as error:
            # After a Ctrl-C this rank may have skipped an operation that the others make.
            if kind != Lead.QUEUED or not isinstance(error, Exception):
                self.abort_unless_shared(error)
            raise

    def raise_failure(self, error: Exception | None, reasons: list[str | None]) -> None:
        self._known_error = error or self._known_error
        super().raise_failure(error, reasons)


def join(
    values: Any,
    options: Any,
    comm: Comm | None,
    mesh: Mesh,
    make: Callable[[_core.Engine, Comm, _core.Comm], PeerEngine] = PeerEngine,
    may_differ: Iterable[str] = (),
) -> RankEngine:
    """Makes the engine of this rank, after all ranks have connected and compared spec and options.
    The options must be equal on all ranks, except those of a rank and those in may_differ. comm may
    be None in a world of one rank. make: makes the PeerEngine. Raises this rank's own error,
    MeshMismatchError, or RankLostError if another rank failed."""
    ends = None if comm is None else comm.connect(mesh)
    if comm is None or ends is None or ends.control is None:
        return RankEngine(_core.Engine(values, options))
    spec = {**vars(values), "spec": asdict(values.spec)}
    facts = options.shared_by_ranks() | {"spec": spec, "contract": CONTRACT_VERSION}
    mine = {name: _short(facts[name]) for name in facts.keys() - set(may_differ)}
    # Compared first, since with None the ranks exchange messages while the engines are made.
    sized = {"kv_cache_gib": "None" if options.memory_fraction else "a number"}
    try:
        message = encode([comm.handshake_values(), sized])
        everyone = [decode(part) for part in ends.control.all_gather(message)]
        comm.accept_handshake([its for its, _ in everyone])
        check_alike([its for _, its in everyone])
        engine = _create(values, options, comm.rank, ends, ends.control, mine)
    except BaseException:
        ends.control.close()
        comm.close()
        raise
    return make(engine, comm, ends.control)


def _short(value: Any) -> str:
    """Returns the JSON text of a value that ranks compare, or the digest of a long one."""
    text = json.dumps(value, sort_keys=True, default=lambda array: array.tolist())
    return hashlib.sha256(text.encode()).hexdigest()[:16] if len(text) > 80 else text


def _create(
    values: Any,
    options: Any,
    rank: int,
    ends: Endpoints,
    control: _core.Comm,
    facts: dict[str, str],
) -> _core.Engine:
    """Makes this rank's engine. Raises RankLostError if another rank failed to make its engine, and
    MeshMismatchError unless all ranks have the same facts."""
    engine: _core.Engine | None = None
    own: BaseException | None = None
    try:
        engine = _core.Engine(values, options, (rank, ends.tp, ends.ep, ends.world))
        facts["family"] = engine.stats()["family"]
    except BaseException as error:  # noqa: BLE001 (raised once the other ranks know)
        own = error
        for end in (ends.tp, ends.ep, ends.world):
            if end is not None:  # other ranks may be waiting for this rank
                end.abort()
    try:
        message = encode([own and reason(own), facts])
        everyone = [decode(part) for part in control.all_gather(message)]
        failed = [(other, why) for other, (why, _) in enumerate(everyone) if why is not None]
        # Ranks that lost another one while the groups were connected come last.
        failed.sort(key=lambda its: its[1].startswith(RankLostError.__name__))
        if own is not None and (not isinstance(own, RankLostError) or failed[0][0] == rank):
            raise own
        if failed:
            raise RankLostError(f"rank {failed[0][0]} could not be made: {failed[0][1]}") from own
        check_alike([its for _, its in everyone])
        assert engine is not None
        return engine
    except BaseException:
        if engine is not None:
            engine.close()
        raise
    finally:
        own = None  # it refers to this frame

"""The weights of one generator: which version serves, whether a set is open, and the order of the engine's calls for each way
in (sync.py has the ways). Used under the generator's turn, but for `Sync`, the caller's handle on an open set, which takes it.

A set that was opened without `with` closes at the generator's next step and at a repeated name: complete, it is committed;
incomplete, IncompleteSyncError is raised and the old version serves.

Where ranks are processes they meet at the beginning, at every push and at the end. What fails on one rank (arguments, a tensor, memory,
the block of a `with`) ends the set on all at once: its own error there, SyncAbortedError with the rank and its reason elsewhere.
A tensor that every rank refuses leaves the set open, as in one process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from types import TracebackType
from typing import Any, TypeVar

from rollmesh.distributed.rank_engine import ALONE, PUSHES, RankEngine
from rollmesh.errors import CapacityError, DeadlineError, StateError, VersionError
from rollmesh.request.outputs import SyncReport
from rollmesh.request.requests import Requests
from rollmesh.runtime.arguments import KEEP, PARTS, deadline_of
from rollmesh.runtime.messages import byte_text, reason
from rollmesh.weights.pieces import local_tensor
from rollmesh.weights.resharding import spread
from rollmesh.weights.sync import SyncOptions, check_deadline, check_mapping, lent, push_all, push_entries, push_mapping, report_of

BEGINNING = "the beginning of a sync"
SLEEP, WAKE = "a sleep", "a wake"
TIMED = "commit in time"
T = TypeVar("T")


class Weights:
    """State of the syncs of one engine."""

    def __init__(self, engine: RankEngine, requests: Requests):
        self._engine, self._requests = engine, requests
        self.manifest = engine.manifest()
        self.version: int | None = None
        self._last = -1  # the version committed last, serving or not
        self._open: Sync | None = None

    def sync(self, source: Any, options: SyncOptions, deadline: float | None) -> SyncReport:
        """A whole set from a mapping or an iterator."""
        if self._engine.has_peers:
            return self._sync_together(source, options, deadline)
        self._check_version(options)
        self.reset("a later sync began")
        if options.mode == "inplace":
            self._finish_running(options, deadline)
        try:
            options.begin(self._engine)
            with lent(source) as is_lent_still:
                if isinstance(source, Mapping):
                    check_mapping(self._engine, self.manifest, source, options)
                    push_mapping(self._engine, source, deadline)
                else:
                    push_entries(self._engine, source, deadline)
                is_lent_still()
                return self._commit(options, deadline)  # a loan goes back when it serves: what fails may be tried again
        except BaseException:
            self._abort()
            raise

    def _sync_together(self, source: Any, options: SyncOptions, deadline: float | None) -> SyncReport:
        """As sync, on one rank of several processes. Every rank hears every entry to the end, whatever it thinks of one, so that all are at
        the same place when they tell. A deadline is looked at when all are, too."""
        engine = self._engine
        kind = None if source is None else "mapping" if isinstance(source, Mapping) else "entries"
        told = self._open_together(BEGINNING, [kind, deadline is not None], options)
        kinds, timed = [its for its, _ in told], any(its for _, its in told)
        first = next((rank for rank, its in enumerate(kinds) if its is not None), None)
        voting = False
        try:  # around the block: what fails when tensors are given back is heard of too
            with ExitStack() as held:  # what a source has lent, until all have committed
                if options.mode == "inplace":
                    self._finish_running(options, None)
                still: list[Callable[[], None]] = []
                fault = _fault_of(options.begin, engine) or _fault_of(lambda: still.append(held.enter_context(lent(source))))
                if fault is None and kind == "mapping" and (None not in kinds or first == engine.rank):
                    fault = _fault_of(check_mapping, engine, self.manifest, source, options)
                engine.settle_sync("a sync before its entries", fault)
                listing = first is not None and kinds[engine.rank if None not in kinds else first] == "mapping"
                fault = push_all(engine, spread(engine, source, options), listing, deadline)
                engine.settle_sync("a sync after its entries", fault or _fault_of(still[0]))
                self._await_turn_to_commit(options, timed, deadline)
                voting = True
                report = self._commit(options, None)
                voting = False
            return report
        except BaseException as error:
            self._abort()
            engine.leave(error, voting)
            raise

    def _open_together(self, where: str, value: Any, options: SyncOptions) -> list[Any]:
        """All ranks begin, unless one of them may not; an open set is reset then. Returns every rank's value."""
        everyone = self._tell(where, value, _fault_of(self._check_version, options))
        self.reset("a later sync began")
        return everyone

    def _await_turn_to_commit(self, options: SyncOptions, timed: bool, deadline: float | None) -> None:
        """A deadline is looked at when all ranks have finished what runs. timed: some rank has one."""
        if timed:
            self._finish_running(options, None)
            self._engine.settle_sync("a sync before its commit", _fault_of(check_deadline, deadline, "its commit"))

    def begin(self, sync: Sync) -> None:
        """Opens the set of a handle; another open one is reset."""
        options = sync.options
        # Ranks may differ in the version: the two-phase commit compares it.
        told = self._open_together(PUSHES, repr(replace(options, version=None)), options)
        try:
            self._engine.compare("a set of weights", told)
            if options.mode == "inplace":
                self._finish_running(options, None)
            self._engine.settle_sync(PUSHES, _fault_of(self._begun, sync))
        except BaseException as error:
            self._abort()
            self._engine.leave(error)
            raise

    def _begun(self, sync: Sync) -> None:
        self._open = sync
        sync.options.begin(self._engine)
        self.refresh()

    def is_open(self, sync: Sync) -> bool:
        return self._open is sync

    def push(self, sync: Sync, name: str, tensor: Any, fault: Exception | None = None) -> None:
        """fault: why there is no tensor."""
        sync.require_open()
        if isinstance(name, str) and name in sync.names and not sync.scoped:
            self.finish(sync, None)
            sync.reopen()
            self.begin(sync)
        try:
            if fault is None:
                fault = _fault_of(self._engine.sync_push, name, tensor)
            self._meet_among_pushes(sync, "push", fault)
        except BaseException as error:
            self._engine.leave(error)
            raise
        sync.names.add(name)

    def _meet_among_pushes(self, sync: Sync, at: str, fault: Exception | None = None) -> set[str]:
        """Hears from every rank; one that cannot go on ends the set on all. Returns the places where they are."""
        everyone = self._engine.among_pushes(at, None if fault is None else reason(fault))
        reasons = [why for _, why in everyone]
        refusals = [why for its_at, why in everyone if its_at == "push" and why is not None]  # no generator: a Ctrl-C would hit its end
        if len(refusals) < len(everyone) and any(reasons):
            self.reset("it ended on all ranks when one of them failed", only=sync)
        self._engine.end_on_all(fault, reasons)
        return {its_at for its_at, _ in everyone}

    def abort(self, sync: Sync, error: BaseException | None) -> None:
        """The set of a handle is dropped, if it is open. error: what has ended its block."""
        if self._open is not sync:
            return
        self.reset("it was aborted", only=sync)
        if error is None or (isinstance(error, Exception) and not isinstance(error, ALONE)):
            self._engine.among_pushes("abort", "the set was aborted" if error is None else reason(error))
        else:
            self._engine.leave(error)

    def finish(self, sync: Sync, deadline: float | None) -> SyncReport:
        """Commits the open set. Whatever happens, it is closed afterwards."""
        sync.require_open()
        self._open, sync.closed = None, "it failed"
        voting = False
        try:
            if self._engine.has_peers:
                at = "commit" if deadline is None else TIMED
                while not {"commit", TIMED}.issuperset(places := self._meet_among_pushes(sync, at)):
                    pass  # others push on
                self._await_turn_to_commit(sync.options, TIMED in places, deadline)
                deadline = None
            voting = True
            sync.report = self._commit(sync.options, deadline)
        except BaseException as error:
            self._abort()
            self._engine.leave(error, voting)
            raise
        sync.closed = f"it was committed as version {sync.report.version}"
        return sync.report

    def close_unscoped(self) -> None:
        """The first step after pushes closes a set that has no block to close it."""
        if self._open is not None and not self._open.scoped:
            self.finish(self._open, None)

    def reset(self, why: str, only: Sync | None = None) -> None:
        """Drops the open set, if there is one (and it is that of `only`)."""
        if self._open is not None and only in (None, self._open):
            self._abort(why)

    def sleep(self, parts: int, keep: bool) -> None:
        """Memory of parts goes back; no set is open. keep: what serves waits in the host's memory, on all ranks or none sleeps."""
        try:
            if keep:
                self._require_host_room()
                self.together("sleep", self._engine.keep_weights, True)
            self._engine.sleep(parts | KEEP if keep else parts)
            self.refresh()
        except BaseException:
            self._settle_kept()
            raise

    def _settle_kept(self) -> None:
        """The host keeps no weights that are awake."""
        if not self._engine.stats()["asleep"] & PARTS["weights"]:
            self._engine.keep_weights(False)
        self.refresh()

    def _require_host_room(self) -> None:
        """Processes of one host ask it for what all of them need, before the first takes any: CapacityError on all ranks of the mesh."""
        if not self._engine.has_peers:
            return
        pools: dict[int, list[tuple[int, int, int]]] = {}  # of the machine's memory, and of a control group's share of it
        for rank, (wanted, its_pools) in enumerate(self._tell("the room of its host", list(self._engine.host_room()))):
            for name, available in its_pools:
                pools.setdefault(name, []).append((rank, wanted, available))
        for ranks in pools.values():
            wanted, available = sum(its[1] for its in ranks), min(its[2] for its in ranks)
            if wanted > available:
                who = ", ".join(str(its[0]) for its in ranks)
                raise CapacityError(
                    f"the weights of ranks {who} take {byte_text(wanted)} and their host has {byte_text(available)} left to keep them in"
                )

    def wake(self, parts: int) -> None:
        """Takes the memory again, on all ranks or none. Weights that were kept serve then."""
        asleep = parts & self._engine.stats()["asleep"]
        try:
            self.together("wake", self._engine.wake, parts)
        except BaseException:
            if woken := asleep & ~self._engine.stats()["asleep"]:  # another rank could not
                self._engine.sleep(woken | KEEP)
            raise
        try:
            self._settle_kept()
        except BaseException:
            self._settle_kept()
            raise

    def _tell(self, where: str, value: Any, fault: Exception | None = None) -> list[Any]:
        """Every rank's value; of one process its own. fault: why this rank goes no further; raised, and SyncAbortedError elsewhere."""
        try:
            return self._engine.tell_of_sync(where, value, fault)
        except BaseException as error:
            self._engine.leave(error)
            raise

    def alike(self, what: str, value: str) -> None:
        """All ranks have come to it with the same value, or CollectiveMismatchError on all."""
        self._engine.compare(what, self._tell(what, value))

    def together(self, where: str, action: Callable[..., T], *args: Any) -> T:
        """This rank's part of a call that all ranks make. What fails on one is raised on all: its own error there, SyncAbortedError with
        the rank and its reason elsewhere."""
        fault: Exception | None = None
        try:
            result = action(*args)
        except Exception as error:  # noqa: BLE001 (raised when all ranks know)
            fault = error
        except BaseException as error:
            self._engine.leave(error)
            raise
        self._tell(where, None, fault)
        return result

    def forget(self) -> None:
        """The generator is being closed: the engine will be gone."""
        if self._open is not None:
            self._open.closed, self._open = "the generator was closed", None
        self.version = None

    def refresh(self) -> None:
        self.version = self._engine.sync_state()[0]

    def _abort(self, why: str = "it failed") -> None:
        if self._open is not None:
            self._open.closed, self._open = why, None
        self._engine.sync_abort()
        self.refresh()

    def _commit(self, options: SyncOptions, deadline: float | None) -> SyncReport:
        self._finish_running(options, deadline)
        before = self.version
        try:
            report = report_of(self._engine.sync_commit(options.at_commit))
            self._follow(before, options)
            return report
        except BaseException:
            self._follow(before, options)  # a Ctrl-C may have come when the new version served already
            raise

    def _follow(self, before: int | None, options: SyncOptions) -> None:
        """What Python remembers follows the engine, if it serves another version than `before`. Twice is as good as once."""
        self.refresh()
        if self.version not in (None, before):
            self._last = self.version
            if options.inflight == "restart":
                self._requests.rewind()

    def _check_version(self, options: SyncOptions) -> None:
        """The engine checks it too, but when an open set of another handle has been dropped for the new one."""
        if options.version is not None and options.version <= self._last:
            raise VersionError(f"version {options.version} does not exceed {self._last}, the last one")

    def _finish_running(self, options: SyncOptions, deadline: float | None) -> None:
        """inflight="wait": what runs is finished on the old version, under this turn."""
        while options.inflight == "wait" and (left := self._engine.unfinished()):
            if deadline is not None and time.monotonic() >= deadline:
                raise DeadlineError(f"{left} requests were still running at the sync's timeout")
            if self._requests.step() == 0 and (left := self._engine.unfinished()):
                raise StateError(f"{left} requests cannot finish (paused or asleep): resume() or wake(), or choose another inflight")


def _fault_of(call: Callable[..., None], *args: Any) -> Exception | None:
    """What a call raises: all ranks are told, and then it is raised."""
    try:
        call(*args)
    except Exception as error:  # noqa: BLE001
        return error
    return None


class Sync:
    """One set of weights that is being pushed; made by Generator.begin_sync.

    As a context manager it commits when the block ends and aborts when the block raises; meanwhile the old version serves.
    Without `with`: push …, then commit() or abort(), or leave closing to the next step or repeated name.
    """

    def __init__(self, weights: Weights, turn: Callable[[float | None], AbstractContextManager[None]], options: SyncOptions):
        self._weights, self._turn = weights, turn
        self.options = options
        self.scoped = False
        self.names: set[str] = set()
        self.closed: str | None = None  # why, once it is
        self.report: SyncReport | None = None

    def push(self, name: str, tensor: Any) -> None:
        """Copies one tensor into staging. Raises what is wrong with it; the set stays open. Where ranks are processes: unless some have
        taken it, which ends the set on all; SyncAbortedError when it ended because of another rank."""
        local, fault = None, None
        try:
            local = local_tensor(tensor)  # before the turn: gathering a DTensor is a collective of the trainer's
        except Exception as error:  # noqa: BLE001 (raised by push, when all ranks know)
            fault = error
        with self._turn(None):
            self._weights.push(self, name, local, fault)

    def commit(self, timeout: float | None = None) -> SyncReport:
        """Closes the set and swaps versions. IncompleteSyncError when something is missing; then the old version serves."""
        deadline = deadline_of(timeout)
        with self._turn(deadline):
            return self._weights.finish(self, deadline)

    def abort(self) -> None:
        """Drops what was pushed. Nothing happens when the set is closed already."""
        self._abort(None)

    def _abort(self, error: BaseException | None) -> None:
        if self.closed is None:
            with self._turn(None):
                self._weights.abort(self, error)

    def reopen(self) -> None:
        """A repeated name after a complete set: the next set begins, with the next version."""
        self.options = replace(self.options, version=None)
        self.names, self.closed = set(), None

    def require_open(self) -> None:
        if self.closed is not None:
            raise StateError(f"this sync is closed: {self.closed}")

    def __enter__(self) -> Sync:
        try:
            self.require_open()
            self.scoped = True
            return self
        except BaseException as error:  # a Ctrl-C: the block is not entered, and no step shall find the set open
            self._abort(error)
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            self._abort(error)
        elif self.closed is None:
            self.commit()

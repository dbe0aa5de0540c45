"""The weights of one generator: which version serves, whether a set is open, and the order of the engine's calls for each way
in (sync.py has the ways). Used under the generator's turn, but for `Sync`, the caller's handle on an open set, which takes it.

A set that was opened without `with` closes at the generator's next step and at a repeated name: complete, it is committed;
incomplete, IncompleteSyncError is raised and the old version serves.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from types import TracebackType
from typing import Any

from rollmesh.arguments import deadline_of
from rollmesh.errors import DeadlineError, StateError, VersionError
from rollmesh.outputs import SyncReport
from rollmesh.requests import Requests
from rollmesh.spmd import AnyEngine, SpmdEngine
from rollmesh.sync import SyncOptions, check_deadline, check_mapping, local_tensor, push_entries, push_mapping, report_of


class Weights:
    """State of the syncs of one engine."""

    def __init__(self, engine: AnyEngine, requests: Requests):
        self._engine, self._requests = engine, requests
        self.manifest = engine.manifest()
        self.version: int | None = None
        self._last = -1  # the version committed last, serving or not
        self._open: Sync | None = None

    def sync(self, source: Any, options: SyncOptions, deadline: float | None) -> SyncReport:
        """A whole set from a mapping or an iterator."""
        self._check_version(options)
        self.reset("a later sync began")
        if isinstance(self._engine, SpmdEngine):
            return self._sync_together(self._engine, source, options, deadline)
        if options.mode == "inplace":
            self._finish_running(options, deadline)
        try:
            options.begin(self._engine)
            if isinstance(source, Mapping):
                check_mapping(self._engine, self.manifest, source, options)
                push_mapping(self._engine, source, deadline)
            else:
                push_entries(self._engine, source, deadline)
            return self._commit(options, deadline)
        except BaseException:
            self._abort()
            raise

    def _sync_together(self, engine: SpmdEngine, source: Any, options: SyncOptions, deadline: float | None) -> SyncReport:
        """As sync, one rank of several processes. Every rank hears every entry to the end, whatever it thinks of one, so that all are at
        the same place when they tell. A deadline is looked at when all are, too."""
        voting = False
        try:
            entries = engine.spread(source, options)
            if options.mode == "inplace":
                self._finish_running(options, None)
            fault = _fault_of(options.begin, engine)
            for entry in entries:
                fault = fault or _fault_of(push_entries, engine, [entry], deadline)
            engine.settle_sync(fault)
            if deadline is not None:
                self._finish_running(options, None)
                engine.settle_sync(_fault_of(check_deadline, deadline, "its commit"))
            voting = True
            return self._commit(options, None)
        except BaseException as error:
            self._abort()
            engine.leave(error, voting)
            raise

    def begin(self, sync: Sync) -> None:
        """Opens the set of a handle; another open one is reset."""
        self._check_version(sync.options)
        self.reset("a later sync began")
        if sync.options.mode == "inplace":
            self._finish_running(sync.options, None)
        sync.options.begin(self._engine)
        self.refresh()
        self._open = sync

    def push(self, sync: Sync, name: str, tensor: Any) -> None:
        sync.require_open()
        if name in sync.names and not sync.scoped:
            self.finish(sync, None)
            sync.reopen()
            self.begin(sync)
        self._engine.sync_push(name, tensor)
        sync.names.add(name)

    def finish(self, sync: Sync, deadline: float | None) -> SyncReport:
        """Commits the open set. Whatever happens, it is closed afterwards."""
        sync.require_open()
        self._open, sync.closed = None, "it failed"
        try:
            sync.report = self._commit(sync.options, deadline)
        except BaseException as error:
            self._abort()
            if isinstance(self._engine, SpmdEngine):
                self._engine.leave(error, voting=True)
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
            self._open.closed, self._open = why, None
            self._abort()

    def forget(self) -> None:
        """The generator is being closed: the engine will be gone."""
        if self._open is not None:
            self._open.closed, self._open = "the generator was closed", None
        self.version = None

    def refresh(self) -> None:
        self.version = self._engine.sync_state()[0]

    def _abort(self) -> None:
        self._engine.sync_abort()
        self.refresh()

    def _commit(self, options: SyncOptions, deadline: float | None) -> SyncReport:
        self._finish_running(options, deadline)
        report = report_of(self._engine.sync_commit(options.at_commit))
        self.version = self._last = report.version
        if options.inflight == "restart":
            self._requests.rewind()
        return report

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
    """One set of weights that is being pushed in pieces; made by Generator.begin_sync.

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
        """Copies one tensor into staging. Raises what is wrong with it; the set stays open."""
        local = local_tensor(tensor)  # before the turn: gathering a DTensor is a collective of the trainer's
        with self._turn(None):
            self._weights.push(self, name, local)

    def commit(self, timeout: float | None = None) -> SyncReport:
        """Closes the set and swaps versions. IncompleteSyncError when something is missing; then the old version serves."""
        deadline = deadline_of(timeout)
        with self._turn(deadline):
            return self._weights.finish(self, deadline)

    def abort(self) -> None:
        """Drops what was pushed. Nothing happens when the set is closed already."""
        if self.closed is None:
            with self._turn(None):
                self._weights.reset("it was aborted", only=self)

    def reopen(self) -> None:
        """A repeated name after a complete set: the next set begins, with the next version."""
        self.options = replace(self.options, version=None)
        self.names, self.closed = set(), None

    def require_open(self) -> None:
        if self.closed is not None:
            raise StateError(f"this sync is closed: {self.closed}")

    def __enter__(self) -> Sync:
        self.require_open()
        self.scoped = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            self.abort()
        elif self.closed is None:
            self.commit()

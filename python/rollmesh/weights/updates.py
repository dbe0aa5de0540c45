"""The weights of one generator: the serving version, the open sync, and the order of the engine's
calls for each kind of source. The docstring of the package states the protocol.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any, TypeVar

from rollmesh.distributed.peers import PUSHES
from rollmesh.distributed.rank_engine import ALONE, Lead, RankEngine, led
from rollmesh.errors import CapacityError, DeadlineError, StateError, VersionError
from rollmesh.request.outputs import SyncReport
from rollmesh.request.requests import Requests
from rollmesh.runtime.arguments import OFFLOAD, PARTS, deadline_of
from rollmesh.runtime.messages import byte_text, reason
from rollmesh.weights.pieces import local_tensor
from rollmesh.weights.plan import LetStep, Plan, check_deadline, error_of
from rollmesh.weights.resharding import spread
from rollmesh.weights.sync import SyncOptions, lent

T = TypeVar("T")


class Weights:
    """State of the syncs of one engine."""

    def __init__(self, engine: RankEngine, requests: Requests):
        self.engine, self._requests = engine, requests
        self.manifest = engine.manifest()
        self.version: int | None = None
        self._last = -1  # the version committed last, serving or not
        self._open: Sync | None = None

    @led(Lead.COLLECTIVE)
    def sync(
        self,
        options: SyncOptions,
        *,
        source: Any,
        deadline: float | None = None,
        let_step: LetStep = None,
    ) -> SyncReport:
        """Copies and commits a whole set. If ranks are processes, a rank that fails still iterates
        over all entries, so that all ranks report their errors at the same points. let_step: lets
        requests take steps for some seconds. It is called between the copies of a staged set, if
        all ranks are in this process."""
        engine = self.engine
        if engine.has_peers or options.mode == "inplace" or not engine.unfinished():
            let_step = None
        plan = Plan(engine, options, let_step)
        is_mapping = isinstance(source, Mapping)
        self._open_together("the beginning of a sync", options)
        try:
            with ExitStack() as loans:  # loans end after all ranks have committed
                if options.mode == "inplace":
                    self._finish_running(options, deadline)
                checks: list[Callable[[], None]] = []  # each raises if the loan has ended
                fault = error_of(options.begin, engine) or error_of(
                    lambda: checks.append(loans.enter_context(lent(source)))
                )
                if fault is None and is_mapping:
                    fault = error_of(plan.check, source)
                engine.all_gather("a sync before its entries", error=fault)
                if engine.has_peers:
                    fault = plan.push_all(spread(engine, plan, source, options), deadline)
                elif is_mapping:
                    plan.push_mapping(source, deadline)
                else:
                    plan.push_entries(source, deadline)
                engine.all_gather("a sync after its entries", error=fault or error_of(checks[0]))
                return self._commit(options, deadline, let_step)
        except BaseException as error:  # includes errors of closing the loan
            self._abort()
            fault = None
            plan.entries.clear()  # drops the tensors, since the error may be kept for long
            _clear_own_frames(error)
            raise

    def _open_together(self, where: str, options: SyncOptions) -> None:
        """Drops an open sync once all ranks have accepted the version number."""
        self.engine.all_gather(where, error=error_of(self._check_version, options))
        self.reset("a later sync began")

    @led(Lead.EVERY_RANK)
    def begin(self, sync: Sync) -> None:
        """Opens the sync of a handle, and drops another sync that is open."""
        options = sync.options
        # The version is left out here, because the two-phase commit compares it.
        self._open_together(f"{PUSHES} of {replace(options, version=None)}", options)
        try:
            if options.mode == "inplace":
                self._finish_running(options, None)
            self.engine.all_gather(PUSHES, error=error_of(self._begun, sync))
        except BaseException:
            self._abort()
            raise

    def _begun(self, sync: Sync) -> None:
        self._open = sync
        sync.options.begin(self.engine)
        self.refresh()

    def is_open(self, sync: Sync) -> bool:
        return self._open is sync

    @led(Lead.EVERY_RANK)
    def push(self, sync: Sync, name: str, tensor: Any, fault: Exception | None = None) -> None:
        """Copies one tensor. fault: the error that gathering the tensor raised, or None."""
        sync.require_open()
        try:
            if fault is None:
                fault = error_of(sync.plan.push, name, tensor)
            self._all_gather_push(sync, "push", fault)
        except BaseException as error:
            fault = None
            _clear_own_frames(error)
            raise

    def _all_gather_push(self, sync: Sync, at: str, fault: Exception | None = None) -> set[str]:
        """Sends this rank's place in the sync and its error to every rank, and returns the set of
        all places. An error of one rank ends the sync on all ranks, unless all ranks refuse the
        same push."""
        why = None if fault is None else reason(fault)
        everyone = self.engine.gather(PUSHES, at, why)
        reasons = [why for _, why, _ in everyone]
        # A list, for the same reason as in `sync`.
        refusals = [why for its_at, why, _ in everyone if its_at == "push" and why is not None]
        if len(refusals) < len(everyone) and any(reasons):
            self.reset("it ended on all ranks when one of them failed", only=sync)
        self.engine.raise_failure(fault, reasons)
        return {its_at for its_at, _, _ in everyone}

    @led(Lead.EVERY_RANK)
    def abort(self, sync: Sync, error: BaseException | None) -> None:
        """Drops the sync of a handle, if it is open. error: the exception that ended its `with`
        block, or None."""
        if self._open is not sync:
            return
        self.reset("it was aborted", only=sync)
        if error is None or (isinstance(error, Exception) and not isinstance(error, ALONE)):
            why = "the sync was aborted" if error is None else reason(error)
            self.engine.gather(PUSHES, "abort", why)
        else:
            self.engine.abort_unless_shared(error)

    @led(Lead.EVERY_RANK)
    def finish(self, sync: Sync, deadline: float | None) -> SyncReport:
        """Commits the open sync. The sync is closed afterwards, even if this raises."""
        sync.require_open()
        self._open, sync.closed = None, "it failed"
        try:
            while self._all_gather_push(sync, "commit") != {"commit"}:
                pass  # other ranks are still pushing
            sync.report = self._commit(sync.options, deadline)
        except BaseException:
            self._abort()
            raise
        sync.closed = f"it was committed as version {sync.report.version}"
        return sync.report

    def reset(self, why: str, only: Sync | None = None) -> None:
        """Drops the open sync, if there is one. only: drop the sync only if it is this one."""
        if self._open is not None and only in (None, self._open):
            self._abort(why)

    @led(Lead.COLLECTIVE)
    def sleep(self, parts: int, offload: bool) -> None:
        """Frees the memory of `parts`, and drops an open sync if the weights are among them.
        offload: copy the serving weights to host memory first. If this fails on one rank, all ranks
        stay awake."""
        if parts & PARTS["weights"]:
            self.reset("the weights were put to sleep")
        try:
            if offload:
                self._require_host_room()
                self.on_all_ranks("sleep", self.engine.offload_weights, True)
            self.engine.sleep(parts | OFFLOAD if offload else parts)
            self.refresh()
        except BaseException:
            self._free_offloaded()
            raise

    def _free_offloaded(self) -> None:
        """Frees the host copy of the weights if the weights are awake."""
        if not self.engine.stats()["asleep"] & PARTS["weights"]:
            self.engine.offload_weights(False)
        self.refresh()

    def _require_host_room(self) -> None:
        """Raises CapacityError on all ranks unless each machine has enough free memory for all its
        ranks. Runs before any rank allocates."""
        if not self.engine.has_peers:
            return
        # Machine or control group → (rank, bytes needed, bytes available) of each of its ranks.
        pools: dict[int, list[tuple[int, int, int]]] = {}
        for rank, (needed, its_pools) in enumerate(
            self.engine.all_gather("the room of its host", list(self.engine.host_room()))
        ):
            for name, available in its_pools:
                pools.setdefault(name, []).append((rank, needed, available))
        for ranks in pools.values():
            needed, available = sum(its[1] for its in ranks), min(its[2] for its in ranks)
            if needed > available:
                who = ", ".join(str(its[0]) for its in ranks)
                raise CapacityError(
                    f"keep_weights: expected {byte_text(needed)} of free host memory for the "
                    f"weights of ranks {who}, "
                    f"got {byte_text(available)}; sleep without keep_weights, or free memory"
                )

    @led(Lead.COLLECTIVE)
    def wake(self, parts: int) -> None:
        """Allocates the memory of `parts` again, on all ranks or on none. Offloaded weights are
        copied back and serve again."""
        asleep = parts & self.engine.stats()["asleep"]
        try:
            self.on_all_ranks("wake", self.engine.wake, parts)
        except BaseException:
            if woken := asleep & ~self.engine.stats()["asleep"]:  # another rank failed
                self.engine.sleep(woken | OFFLOAD)
            raise
        self._free_offloaded()

    @led(Lead.EVERY_RANK)
    def require_equal(self, what: str, value: str) -> None:
        """Raises CollectiveMismatchError on all ranks unless all ranks have the same value."""
        self.engine.all_gather(f"{what} of {value}")

    @led(Lead.EVERY_RANK)
    def on_all_ranks(self, where: str, action: Callable[..., T], *args: Any) -> T:
        """Runs this rank's part of a call that all ranks make. If it fails on one rank, that rank
        raises its error, and the others raise SyncAbortedError with the rank and the reason."""
        results: list[T] = []
        fault = error_of(lambda: results.append(action(*args)))
        self.engine.all_gather(where, error=fault)
        return results[0]

    def forget(self) -> None:
        """Closes the open sync because the generator is being closed."""
        if self._open is not None:
            self._open.closed, self._open = "the generator was closed", None
        self.version = None

    def refresh(self) -> None:
        self.version = self.engine.sync_state()[0]

    def _abort(self, why: str = "it failed") -> None:
        if self._open is not None:
            self._open.closed, self._open = why, None
        self.engine.sync_abort()
        self.refresh()

    def _commit(
        self, options: SyncOptions, deadline: float | None, let_step: LetStep = None
    ) -> SyncReport:
        """Finishes running requests if inflight is "wait", checks the deadline on all ranks
        together, and commits."""
        self._finish_running(options, deadline, let_step)
        self.engine.all_gather(
            "a sync before its commit",
            error=error_of(check_deadline, deadline, "its commit"),
        )
        before = self.version
        try:
            values = self.engine.sync_commit(options.at_commit)
            self._follow(before, options)
            return SyncReport(**{**values, "digest": f"{values['digest']:016x}"})
        except BaseException as error:
            # A Ctrl-C may arrive after the engine has swapped to the new version.
            self._follow(before, options)
            if isinstance(error, MemoryError):  # all ranks have received it as this rank's vote
                self.engine.raise_failure(error, [])
            raise

    def _follow(self, before: int | None, options: SyncOptions) -> None:
        """Updates the state kept in Python if the engine serves another version than `before`. May
        be called twice."""
        self.refresh()
        if self.version not in (None, before):
            self._last = self.version
            if options.inflight == "restart":
                self._requests.rewind()

    def _check_version(self, options: SyncOptions) -> None:
        """Raises VersionError unless the version is newer than the last one. The engine checks this
        too, but only after the open sync of another handle was dropped."""
        if options.version is not None and options.version <= self._last:
            raise VersionError(
                f"version {options.version} does not exceed {self._last}, the last one"
            )

    def _finish_running(
        self,
        options: SyncOptions,
        deadline: float | None,
        let_step: LetStep = None,
    ) -> None:
        """If inflight is "wait", finishes running requests on the old version. deadline: checked
        only in one process, since ranks take the same number of steps. let_step: as in `sync`."""
        while options.inflight == "wait" and (left := self.engine.unfinished()):
            is_late = deadline is not None and time.monotonic() >= deadline
            if is_late and not self.engine.has_peers:
                raise DeadlineError(f"{left} requests were still running at the sync's timeout")
            if self._requests.step() == 0 and (left := self.engine.unfinished()):
                raise StateError(
                    f"{left} requests cannot finish (paused or asleep): call resume() or wake(), "
                    "or choose another inflight"
                )
            if let_step is not None:
                let_step(0.0)


def _clear_own_frames(error: BaseException) -> None:
    """Clears the local variables of this package's frames in an error's traceback. One of them is
    the error itself, and this cycle would keep the caller's tensors alive. The caller's own frames
    are kept for debuggers."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_globals.get("__name__", "").startswith("rollmesh."):
            with suppress(RuntimeError):  # the frame is still running
                frame.clear()


class Sync:
    """A sync whose tensors the caller pushes; created by Generator.begin_sync.

    A context manager: commits when the block ends, and aborts when the block raises. Without a
    `with` block, call push for each tensor, then commit() or abort(). The old version serves until
    the commit. Beginning another sync drops one that is still open.
    """

    def __init__(
        self,
        weights: Weights,
        exclusive: Callable[[Callable[[], Any], float | None], Any],
        options: SyncOptions,
    ):
        """exclusive: runs a function with exclusive use of the engine, until a deadline."""
        self._weights, self._exclusive = weights, exclusive
        self.options = options
        self.plan = Plan(weights.engine, options)
        self.closed: str | None = None  # why the sync is closed; None while it is open
        self.report: SyncReport | None = None

    def push(self, name: str, tensor: Any) -> None:
        """Copies one tensor into the staged weights. An error leaves the sync open. If ranks are
        processes, a tensor that only some ranks refuse ends the sync on all of them; the other
        ranks raise SyncAbortedError."""
        local, fault = None, None
        try:
            local = local_tensor(tensor)  # gathering a DTensor is a collective of the trainer
        except Exception as error:  # noqa: BLE001 (push raises it after sending it to all ranks)
            fault = error
        self._exclusive(lambda: self._weights.push(self, name, local, fault), None)

    def commit(self, timeout: float | None = None) -> SyncReport:
        """Commits the set: the new version serves. Raises IncompleteSyncError if a required
        parameter is missing; the old version then keeps serving. timeout: seconds until
        DeadlineError; None: no limit."""
        deadline = deadline_of(timeout)
        report: SyncReport = self._exclusive(lambda: self._weights.finish(self, deadline), deadline)
        return report

    def abort(self) -> None:
        """Drops the pushed tensors. Does nothing if the sync is already closed."""
        self._abort(None)

    def _abort(self, error: BaseException | None) -> None:
        if self.closed is None:
            self._exclusive(lambda: self._weights.abort(self, error), None)

    def require_open(self) -> None:
        if self.closed is not None:
            raise StateError(f"this sync is closed: {self.closed}")

    def __enter__(self) -> Sync:
        self.require_open()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._abort(error)
        elif self.closed is None:
            self.commit()

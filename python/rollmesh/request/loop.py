"""The engine's thread and its inbox.

    caller ──► inbox ──► thread: begin ── step … step ── done ──► the caller's queue ──► caller

Every use of the engine is a `Call`, and calls begin in the order in which they arrive. A call that
needs steps stays active, and one step serves all active calls. The thread takes the next call
between two steps, so steps do not switch threads. A `Loan` is the reverse: the caller's thread uses
the engine while the engine's thread waits, for functions that must run in the caller's thread.

A Ctrl-C interrupts a waiting caller but not the engine: `EngineLoop.run` waits until the thread has
undone the call, then raises the exception. A second Ctrl-C raises at once.

The thread is a daemon. While idle it has no reference to the generator. It ends when the generator
is closed or deleted, and at exit after its current step.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from rollmesh.distributed.rank_engine import RankEngine
from rollmesh.errors import DeadlineError, Error, StateError
from rollmesh.request.requests import Requests
from rollmesh.runtime.threads import starting

HALTED_S = 0.02  # between two checks of the calls while the generator is paused or asleep
EXIT_S = 1.0  # how long the interpreter's exit waits for the current step


def _nothing() -> None:
    """Does nothing; replaces a function that was called."""


class Call:
    """A function that the engine's thread runs between two steps. Subclasses need steps."""

    deadline: float | None = None  # a value of time.monotonic()
    waits = False  # whether it waits while a part is asleep, instead of failing

    def __init__(self, function: Callable[[], Any]):
        self.function = function
        self.news: SimpleQueue[Any] = SimpleQueue()  # wakes the caller
        self.result: Any = None
        self.error: BaseException | None = None
        self.reason: BaseException | None = None  # the exception that interrupted the caller
        self.is_started = self.is_done = self.has_failed = False

    def begin(self) -> bool:
        """Runs the first part, in the engine's thread. Returns whether the call is done."""
        function, self.function = self.function, _nothing  # drops the caller's objects
        self.result = function()
        return True

    def look(self, finished: set[int], rows: int, late: bool) -> bool:
        """Runs after each step. Returns whether the call is done. finished: requests that are
        finished and not released. rows: number of rows of the step. late: whether the deadline has
        passed."""
        raise NotImplementedError

    def drop(self) -> None:
        """Cleans up after a failure, or after an interrupt before the end."""

    def undo(self) -> None:
        """Undoes a result that the caller will not receive."""

    def tell(self) -> None:
        """Wakes the caller after the call is done."""
        self.news.put(None)

    def is_late(self) -> bool:
        return self.deadline is not None and time.monotonic() >= self.deadline

    def check_wanted(self) -> None:
        """Raises the exception that interrupted the caller, if any."""
        if self.reason is not None:
            raise self.reason


class Loan(Call):
    """A function that the caller's thread runs while the engine's thread waits. It may let the
    engine's thread run steps of the active calls; other calls begin after its end."""

    def __init__(
        self, step_for: Callable[[float], None], requests: Requests, deadline: float | None
    ):
        super().__init__(_nothing)
        self._step_for, self._requests, self.deadline = step_for, requests, deadline
        # From the caller's thread: seconds for steps, or None at the end. From the engine's: None
        # after these steps.
        self.returned: SimpleQueue[float | None] = SimpleQueue()
        self._lent: SimpleQueue[None] = SimpleQueue()
        self._is_stepping = False
        self._since = 0.0  # the end of the last step, or the beginning
        self.pause_s = 0.0  # the longest time without a step for unfinished requests

    def begin(self) -> bool:
        self.note_step()
        self._requests.loan = self
        self.news.put(self)
        while (seconds := self.returned.get()) is not None:
            try:
                self._step_for(seconds)
            finally:
                self._is_stepping = False
                self._lent.put(None)
        self._requests.loan = None
        return True

    def use(self) -> None:
        """Runs the function, in the caller's thread."""
        function, self.function = self.function, _nothing
        self.result = function()
        if self._requests.engine.unfinished():
            self.note_pause()
        self.is_done = True
        self.returned.put(None)

    def let_step(self, seconds: float) -> None:
        """Lets the engine's thread run steps for this time, if calls are active."""
        self._is_stepping = True
        interrupt: BaseException | None = None
        try:
            self.returned.put(seconds)
        except BaseException as error:  # noqa: BLE001 (of a signal, once put has returned)
            interrupt = error
        while self._is_stepping:  # an interrupted get() may have taken the item
            try:
                self._lent.get()
            except BaseException as error:  # noqa: BLE001 (raised once the steps have ended)
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def note_pause(self) -> None:
        """Runs before each step, in the thread that runs the step."""
        self.pause_s = max(self.pause_s, time.monotonic() - self._since)

    def note_step(self) -> None:
        self._since = time.monotonic()


_STOP = Call(_nothing)


class EngineLoop:
    """The thread and the inbox of one engine."""

    def __init__(self, engine: RankEngine, requests: Requests):
        """Raises CapacityError if the system cannot start a thread."""
        self._engine, self._requests = engine, requests
        self._inbox: SimpleQueue[Call] = SimpleQueue()
        self._active: list[Call] = []  # calls that need steps; used by the engine's thread only
        self._moves = True  # whether the last step computed any rows; used by that thread only
        self._inside: set[int] = set()  # threads that are inside a call
        self._undone: set[Call] = set()  # calls of all threads that are not done
        self._pid = os.getpid()
        self.is_closed = False
        self._thread = threading.Thread(
            target=_serve,
            args=(self._inbox, weakref.ref(self), engine.silence_s),
            name="rollmesh-engine",
            daemon=True,
        )
        weakref.finalize(self, _stop, self._inbox, self._thread)
        with starting("a generator"):
            self._thread.start()

    # ---------------------------------------------------------------------------- in any thread
    def run(
        self,
        call: Call,
        advance: Callable[[int], object] | None = None,
    ) -> Any:
        """Makes a call and returns its result. advance: receives the numbers that the call reports.

        Raises StateError (closed, in another process, or inside another call of this thread), and
        DeadlineError if the call did not begin before the deadline."""
        self.check_alive()
        self.check_outside()
        thread = threading.get_ident()
        try:
            try:
                self._inside.add(thread)
                self.post(call)
                return self._wait(call, advance)
            finally:
                self._inside.discard(thread)
        except BaseException as error:
            if not call.has_failed:
                self._cancel(call, error)
            raise

    def call(self, function: Callable[[], Any]) -> Any:
        """Runs a function in the engine's thread, between two steps."""
        return self.run(Call(function))

    def lend(self, function: Callable[[], Any], deadline: float | None = None) -> Any:
        """Runs a function in this thread, with exclusive use of the engine."""
        loan = self.loan(deadline)
        loan.function = function
        return self.run(loan)

    def loan(self, deadline: float | None) -> Loan:
        """Returns a loan whose function the caller sets."""
        return Loan(self._step_for, self._requests, deadline)

    def post(self, call: Call) -> None:
        """Adds a call to the inbox."""
        self._undone.add(call)
        self._inbox.put(call)
        if self.is_closed:  # the thread has ended and does not empty the inbox
            self._refuse_all()

    def abandon(self, call: Call, reason: BaseException) -> Call:
        """Makes the engine's thread undo a call. Returns the call that undoes it."""
        call.reason = reason
        undo = Call(lambda: self._undo(call))
        self.post(undo)
        return undo

    def close(self, release: Callable[[], None]) -> None:
        """Ends all calls and the thread. release: frees the engine; if it raises, the calls and the
        thread continue."""

        def end() -> None:
            release()
            self.end_all()

        if not self.is_gone():
            self.run(Call(end))
            self._thread.join()

    def is_gone(self) -> bool:
        return self.is_closed or os.getpid() != self._pid

    def check_alive(self) -> None:
        if os.getpid() != self._pid:
            raise StateError(
                f"expected a generator of this process, got that of process {self._pid}; a forked "
                "child has to make its own"
            )
        if self.is_closed:
            raise _closed()

    @property
    def is_inside(self) -> bool:
        """Returns whether this thread is inside a call."""
        thread = threading.get_ident()
        return thread in self._inside or thread == self._thread.ident

    def check_outside(self) -> None:
        if self.is_inside:
            raise StateError(
                "the generator was called from inside one of its own calls (a callback, weights "
                "iterator or signal handler)"
            )

    def _wait(self, call: Call, advance: Callable[[int], object] | None) -> Any:
        deadline = call.deadline
        while not call.is_done:
            wait = None
            if deadline is not None and not call.is_started and len(self._undone) > 1:
                wait = deadline - time.monotonic()
                if wait <= 0:
                    raise DeadlineError(
                        "the generator was busy in another thread until the deadline"
                    )
            try:
                news = call.news.get(timeout=wait)
            except Empty:
                continue
            if isinstance(news, Loan):
                news.use()
                self._undone.discard(call)
            elif advance is not None and news is not None:
                advance(news)
        if not call.has_failed:
            return call.result
        assert call.error is not None
        try:
            raise call.error
        finally:
            call.error = None  # it refers to this frame

    def _cancel(self, call: Call, reason: BaseException) -> None:
        """Abandons a call and waits until it is undone."""
        undo = self.abandon(call, reason)
        if isinstance(call, Loan):
            call.returned.put(None)
            return
        while not undo.is_done:
            undo.news.get()

    def _refuse_all(self) -> None:
        """Refuses all calls in the inbox, after the end of the thread."""
        with suppress(Empty):
            while True:
                call = self._inbox.get_nowait()
                if not call.is_done:
                    call.error, call.has_failed = _closed(), True
                self._undone.discard(call)
                call.is_done = True
                call.tell()

    # ---------------------------------------------------------------------------- in the thread
    def work(self, call: Call | None) -> bool:
        """Begins a call, if any, then runs steps until all calls are done. Returns False if the
        thread must end."""
        todo = call
        del call
        while todo is not _STOP:
            if todo is not None:
                self._begin(todo)
            elif self._active:
                self._step()
            elif self.is_closed:
                return False
            else:
                self._engine.idle()
                return True
            todo = None  # drops the caller's objects
            todo = self._next()
        return False

    def end_all(self) -> None:
        """Ends all calls; later ones are refused."""
        self.is_closed = True
        for call in list(self._active):
            self._end(call, _closed())
        self._refuse_all()

    def _next(self) -> Call | None:
        """Returns the next call, or None. Waits a moment for a call if a step would do nothing."""
        try:
            if self._active and not self._moves:
                return self._inbox.get(timeout=HALTED_S)
            return None if self._inbox.empty() else self._inbox.get_nowait()
        except Empty:
            return None

    def _begin(self, call: Call) -> None:
        self._moves = call.is_started = True
        try:
            call.check_wanted()
            is_done = call.begin()
        except BaseException as error:  # noqa: BLE001 (raised in the caller's thread)
            self._end(call, error)
            return
        if is_done:
            self._end(call)
        else:
            self._active.append(call)

    def _undo(self, call: Call) -> None:
        """Ends a call that has begun and whose caller was interrupted."""
        if call in self._active:
            self._end(call, call.reason)
        elif not call.has_failed:
            with suppress(Error):
                call.undo()

    def _end(self, call: Call, error: BaseException | None = None) -> None:
        if call in self._active:
            self._active.remove(call)
        if error is not None:
            call.error, call.has_failed = error, True
            with suppress(Error):  # a lost mesh or device; the first error is raised
                call.drop()
        self._undone.discard(call)
        call.is_done = True
        call.tell()

    def _step_for(self, seconds: float) -> None:
        """Runs steps for about this time, at least one, while they do something."""
        end = time.monotonic() + seconds
        while self._active:
            self._step()
            if not self._moves or time.monotonic() >= end:
                return

    def _step(self) -> None:
        """Runs one step for all active calls."""
        try:
            rows = self._requests.step()
            finished = self._engine.finished()
        except BaseException as error:  # noqa: BLE001 (raised in the callers' threads)
            self._fail(error)
            return
        self._moves = rows > 0
        for call in list(self._active):
            try:
                is_done = call.look(finished, rows, call.is_late())
            except BaseException as error:  # noqa: BLE001 (raised in the caller's thread)
                self._end(call, error)
                continue
            if is_done:
                self._end(call)

    def _fail(self, error: BaseException) -> None:
        """Ends active calls after the engine has failed or while a part of it is asleep. Some calls
        wait until it is awake."""
        self._moves = False
        is_asleep = isinstance(error, StateError) and bool(self._engine.stats()["asleep"])
        for call in list(self._active):
            if not (is_asleep and call.waits):
                self._end(call, error)


def _closed() -> StateError:
    return StateError("the generator is closed")


def _serve(
    inbox: SimpleQueue[Call], loop_of: weakref.ref[EngineLoop], silence_s: float | None
) -> None:
    """Runs the engine's thread."""
    while True:
        call = None
        with suppress(Empty):
            call = inbox.get(timeout=silence_s)
        loop = loop_of()
        if loop is None:
            return
        try:
            if not loop.work(call):
                return
        except BaseException:
            loop.end_all()  # after a bug callers get StateError instead of waiting forever
            raise
        del loop, call  # an idle thread has no references


def _stop(inbox: SimpleQueue[Call], thread: threading.Thread) -> None:
    """Stops the thread when the generator is deleted or the interpreter exits."""
    inbox.put(_STOP)
    if thread.is_alive() and thread is not threading.current_thread():
        thread.join(EXIT_S)

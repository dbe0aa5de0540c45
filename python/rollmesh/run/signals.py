"""Ctrl-C, SIGTERM and SIGHUP end a run at a safe point, between two states that can be written, by
a KeyboardInterrupt with the signal's number."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
AGAIN_S = 0.02
_log = logging.getLogger("rollmesh.grpo")
_entered: list[Interrupts] = []
_forking = threading.local()


class Signalled(KeyboardInterrupt):
    """A KeyboardInterrupt with the signal's number. It is a subclass because of CPython: after a
    plain KeyboardInterrupt has left code called from C, such as an import, the process later ends
    by SIGINT, whatever status it returns."""


class Interrupts:
    """A context for the main thread, which may be nested; in other threads it does nothing.

    A signal raises immediately. Between `hold` and `release`, the first signal raises in `release`,
    a second one immediately. Signals that the program ignores or handles are left alone.

    In a callback of the garbage collector or of a weak reference, Python cannot raise an exception,
    so the signal is sent again a moment later. If a library swallows the exception, the next
    `release` raises it; if a library turns it into another error, the end of the context does.
    Forked processes keep the former handlers: a reward's pool ends its processes by SIGTERM."""

    def __init__(self) -> None:
        self._before: dict[signal.Signals, Any] = {}
        self._hook = sys.unraisablehook
        self._depth = self._pending = self._raised = 0
        self._until = ""  # between hold and release: what the end of the run waits for

    def __enter__(self) -> Interrupts:
        self._depth += 1
        if self._depth == 1:
            self._pending, self._raised, self._until = 0, 0, ""
            if threading.current_thread() is threading.main_thread():
                self._hook, sys.unraisablehook = sys.unraisablehook, self._unraisable
                for number in SIGNALS:
                    if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                        self._before[number] = signal.signal(number, self._handle)
                _entered.append(self)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._depth -= 1
        if self._depth:
            return
        self._leave()
        if not self._raised or error is None:
            return
        if isinstance(error, KeyboardInterrupt):
            error.args = error.args or (self._raised,)  # a comm raises it without args
        else:
            interrupt = Signalled(self._raised)
            for note in getattr(error, "__notes__", ()):
                interrupt.add_note(note)
            raise interrupt from error

    def _leave(self) -> None:
        while self._before:
            signal.signal(*self._before.popitem())
        if sys.unraisablehook == self._unraisable:
            sys.unraisablehook = self._hook
        if self in _entered:
            _entered.remove(self)

    def hold(self, until: str) -> None:
        """Delays signals. until: what the end of the run waits for, in the warning."""
        self._until = until

    def release(self) -> None:
        number, self._until = self._pending or self._raised, ""
        if number:
            self._pending, self._raised = 0, number
            raise Signalled(number)

    def drop(self) -> None:
        """Releases without raising, for a run that ends by an error. The next signal raises
        immediately."""
        self._pending, self._until = 0, ""

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._until and not self._pending:
            self._pending = number
            _log.warning(
                "%s: the run ends after %s; a second one ends it at once",
                signal.Signals(number).name,
                self._until,
            )
            return
        self._pending, self._raised, self._until = 0, number, ""
        raise Signalled(number)

    def _unraisable(self, what: sys.UnraisableHookArgs) -> None:
        if self._raised and isinstance(what.exc_value, KeyboardInterrupt):
            threading.Timer(AGAIN_S, os.kill, (os.getpid(), self._raised)).start()
        else:
            self._hook(what)


def _before_fork() -> None:
    """Blocks signals until the child has the former handlers. This module's handlers would raise in
    the hooks of the fork, which drop the exception."""
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS if _entered else ())


def _after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _after_fork_in_child() -> None:
    for interrupts in list(_entered):
        interrupts._leave()
    _after_fork()


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child
)

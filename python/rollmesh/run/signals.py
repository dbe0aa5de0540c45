"""Ctrl-C, SIGTERM and SIGHUP end a run between two states that can be written: a KeyboardInterrupt
with the signal's number."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
AGAIN_S = 0.02
_log = logging.getLogger("rollmesh.grpo")
_entered: list[Interrupts] = []
_forking = threading.local()


class Signalled(KeyboardInterrupt):
    """A KeyboardInterrupt with the signal's number. Of its own class, since CPython notes when a
    KeyboardInterrupt leaves code that C runs, as imports do, and would end the process by SIGINT
    whatever status it returns."""


class Interrupts:
    """A context, in the main thread (elsewhere it does nothing), which may be entered again inside
    itself. A signal raises at once; between `hold` and `release` it raises in `release`, and a
    second one at once. Signals that the program ignores or handles itself stay so.

    Where Python cannot raise it, as in a callback of the garbage collector or of a weak reference,
    the signal comes again a moment later. What a library has swallowed is raised by the next
    `release`, and what a library has turned into another error at the context's end. A forked
    process, as of a reward's pool, has none of this: a pool ends its processes by SIGTERM, and
    waits for them."""

    def __init__(self) -> None:
        self._before: dict[signal.Signals, Any] = {}
        self._hook = sys.unraisablehook
        self._depth = self._pending = self._raised = 0
        self._until = ""  # while it holds: what the end waits for

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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._depth -= 1
        if self._depth:
            return
        self._leave()
        if not self._raised or error is None:
            return
        if isinstance(error, KeyboardInterrupt):
            error.args = error.args or (self._raised,)  # the exchange of a comm raises one without
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
        """`until`: what the end of the run waits for, in the message."""
        self._until = until

    def release(self) -> None:
        number, self._until = self._pending or self._raised, ""
        if number:
            self._pending, self._raised = 0, number
            raise Signalled(number)

    def drop(self) -> None:
        """Releases without raising, for a run that ends by an error: the next signal raises at
        once."""
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
    """A signal to the child waits there until it has the handlers of before: ours would raise in
    the hooks of the fork, which drop it."""
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

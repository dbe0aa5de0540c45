"""Ctrl-C, SIGTERM and SIGHUP end a run between two states that can be written: a KeyboardInterrupt with the signal's number."""

from __future__ import annotations

import logging
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_log = logging.getLogger("rollmesh.grpo")


class Interrupts:
    """A context, in the main thread (elsewhere it does nothing). A signal raises at once; between `hold` and `release`, while the weights
    are of no step, it raises in `release`, and a second one at once. Signals that the program ignores or handles itself stay so."""

    def __init__(self) -> None:
        self._before: dict[signal.Signals, Any] = {}
        self._is_held, self._pending = False, 0

    def __enter__(self) -> Interrupts:
        self._is_held, self._pending = False, 0
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        while self._before:
            signal.signal(*self._before.popitem())

    def hold(self) -> None:
        self._is_held = True

    def release(self) -> None:
        self._is_held, pending = False, self._pending
        if pending:
            self._pending = 0
            raise KeyboardInterrupt(pending)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._is_held and not self._pending:
            self._pending = number
            _log.warning("%s: the run ends after this step's update; a second one ends it at once", signal.Signals(number).name)
            return
        self._is_held, self._pending = False, 0
        raise KeyboardInterrupt(number)

"""How much of a run's time trainer and generator work at once: each side says when it starts and
stops."""

from __future__ import annotations

import threading
import time
from typing import Literal

Side = Literal["trainer", "generator"]
# (trainer works, generator works) → the metric
SHARES = {
    (True, True): "both_share",
    (True, False): "trainer_only_share",
    (False, True): "generator_only_share",
}
IDLE = "idle"


class Overlap:
    """Any thread may call it. A side may start several times: it works until it has stopped as
    often."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._working: dict[Side, int] = {"trainer": 0, "generator": 0}
        self._seconds: dict[str, float] = {}
        self._since = time.perf_counter()

    def start(self, side: Side) -> None:
        self._change(side, 1)

    def stop(self, side: Side) -> None:
        self._change(side, -1)

    def shares(self) -> dict[str, float]:
        """Of the time since the last call; what is missing to 1 is the time in which neither
        worked."""
        with self._lock:
            self._advance()
            seconds, self._seconds = self._seconds, {}
        total = sum(seconds.values()) or 1.0
        return {name: seconds.get(name, 0.0) / total for name in SHARES.values()}

    def _change(self, side: Side, by: int) -> None:
        with self._lock:
            self._advance()
            self._working[side] += by

    def _advance(self) -> None:
        now = time.perf_counter()
        name = SHARES.get((self._working["trainer"] > 0, self._working["generator"] > 0), IDLE)
        self._seconds[name] = self._seconds.get(name, 0.0) + now - self._since
        self._since = now

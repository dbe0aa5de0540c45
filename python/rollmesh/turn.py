"""One writer at a time, in the order of arrival. threading.Lock is not fair: a thread that steps the engine in a loop would
take it again before a waiting one wakes up, and a sync from another thread would wait for the whole rollout.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from rollmesh.errors import DeadlineError, StateError


class Turn:
    """A fair lock that refuses re-entry (StateError) where it would deadlock, and gives up at a deadline (DeadlineError)."""

    def __init__(self) -> None:
        self._guard = threading.RLock()  # re-entrant for signal handlers
        self._owner: int | None = None  # thread ident
        self._waiting: deque[tuple[threading.Event, int]] = deque()

    @contextmanager
    def take(self, deadline: float | None = None) -> Iterator[None]:
        """Holds the turn for a block. `deadline` is on time.monotonic()'s clock."""
        me = threading.get_ident()
        if self._owner == me or any(waiting == me for _, waiting in self._waiting):
            raise StateError("the generator was called from inside one of its own calls (a callback, weights iterator or signal handler)")
        try:
            self._acquire(me, deadline)
            yield
        finally:
            self._release(me)

    def _acquire(self, me: int, deadline: float | None) -> None:
        with self._guard:
            if self._owner is None:
                self._owner = me
                return
            event = threading.Event()
            self._waiting.append((event, me))
        if not event.wait(None if deadline is None else max(0.0, deadline - time.monotonic())):
            raise DeadlineError("the generator was busy in another thread until the deadline")

    def _release(self, me: int) -> None:
        """Passes the turn on, or leaves the queue if it never came (a deadline, an exception while waiting)."""
        with self._guard:
            if self._owner != me:
                self._waiting = deque(entry for entry in self._waiting if entry[1] != me)
                return
            self._owner = None
            if self._waiting:
                event, self._owner = self._waiting.popleft()
                event.set()

"""A generator's lock: threads get their turn in the order in which they ask (a fair lock,
_core.Turn)."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager

from rollmesh import _core
from rollmesh.errors import StateError


class Turn:
    """The lock of one generator, which also knows whether it is closed, or belongs to another
    process."""

    def __init__(self) -> None:
        self._turn = _core.Turn()
        self._pid = os.getpid()
        self.closed = False

    def is_gone(self) -> bool:
        return self.closed or os.getpid() != self._pid

    def check_alive(self) -> None:
        if os.getpid() != self._pid:
            raise StateError(
                f"expected a generator of this process, got that of process {self._pid}; a forked "
                "child has to make its own"
            )
        if self.closed:
            raise StateError("the generator is closed")

    @property
    def is_inside(self) -> bool:
        """Whether this thread is inside a call."""
        return self._turn.is_inside

    def check_outside(self) -> None:
        """StateError inside another call of this thread."""
        if self.is_inside:
            raise StateError(
                "the generator was called from inside one of its own calls (a callback, weights "
                "iterator or signal handler)"
            )

    def take(self, deadline: float | None = None) -> AbstractContextManager[None]:
        """Holds the lock for a block. StateError: closed, of another process, or inside another
        call. DeadlineError: not in time."""
        # before the turn too: after fork it may be held by a thread that does not exist here
        self.check_alive()
        return self._turn.take(deadline, self.check_alive)

    def take_to_close(self) -> AbstractContextManager[None]:
        """The same for a close, which may be repeated."""
        return self._turn.take()

"""A Gloo group of a trainer (rank 0) and vLLM's workers on any machine, for broadcasts from the
trainer. The trainer listens on a port from its first send on.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

from rollmesh.errors import ConfigError, StateError, SyncAbortedError
from rollmesh.runtime.messages import shown
from rollmesh.runtime.threads import starting
from rollmesh.weights.transport.segment import POLL_S, Bytes

TRAINER = "trainer"  # key in the store; present while rank 0 is in the group
HELD_S = 5.0  # timeout of a look into the store


class Group:
    """One rank's end. Not registered in torch.distributed, so that the process's own groups are
    unaffected."""

    def __init__(self, store: Any, rank: int, world: int, timeout: float):
        self._store, self.rank, self.world, self._timeout = store, rank, world, timeout
        self._group: Any = None

    @classmethod
    def listening(cls, address: str, port: int, world: int, timeout: float) -> Group:
        """The trainer's end, bound to `address` only; port 0: a free one."""
        try:
            listener = socket.create_server(
                (address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET
            )
        except OSError as error:
            raise ConfigError(
                f"cannot listen on master_address = {shown(address)}, master_port = {port}: {error}"
            ) from error
        port = listener.getsockname()[1]
        store = _distributed().TCPStore(
            address,
            port,
            world,
            True,
            timedelta(seconds=timeout),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        store.set(TRAINER, "here")
        return cls(store, 0, world, timeout)

    @classmethod
    def joining(cls, address: str, port: int, rank: int, world: int, timeout: float) -> Group:
        """A worker's end; returns once all ranks have joined."""
        seconds = timedelta(seconds=timeout)
        try:
            store = _distributed().TCPStore(
                address, port, world, False, seconds, wait_for_workers=False
            )
            store.set(f"rank {rank}", "here")
            group = cls(store, rank, world, timeout)
            group._connect()
        except RuntimeError as error:
            raise SyncAbortedError(
                f"rank {rank} did not reach the trainer at {address}:{port}: {_line(error)}"
            ) from error
        return group

    @property
    def port(self) -> int:
        return int(self._store.port)

    def is_held(self) -> bool:
        """Whether the trainer is alive and in the group. False if it does not answer within
        HELD_S."""
        found = []

        def ask(store: Any) -> None:
            with suppress(RuntimeError):
                found.append(bool(store.check([TRAINER])))

        if self._store is not None:
            asking = threading.Thread(target=ask, args=(self._store,), daemon=True)
            with starting("asking for the trainer"):
                asking.start()
            asking.join(HELD_S)
        return found == [True]

    def gather(self, given_up: Callable[[], bool]) -> None:
        """The trainer waits until all workers have joined or given up."""
        names = [f"rank {rank}" for rank in range(1, self.world)]
        store, deadline = (
            self._store,
            time.monotonic() + self._timeout,
        )  # another thread may close this
        if store is None:
            raise StateError("the group of trainer and workers is closed")
        while not store.check(names):
            if given_up() or time.monotonic() > deadline:
                raise SyncAbortedError(
                    f"not all of {self.world - 1} workers joined the trainer's group"
                )
            time.sleep(0.01)
        self._connect()

    def _connect(self) -> None:
        torch = _distributed()
        self._group = torch.ProcessGroupGloo(
            torch.PrefixStore("weights", self._store),
            self.rank,
            self.world,
            timedelta(seconds=self._timeout),
        )

    def broadcast(self, data: Bytes, given_up: Callable[[], bool] = lambda: False) -> None:
        """From rank 0, in place."""
        import torch

        group = self._group  # another thread may close this
        if group is None:
            raise StateError("the group of trainer and workers is closed")
        if data.size == 0:
            return
        try:
            work = group.broadcast(torch.from_numpy(data), 0)
            while self.rank == 0 and not work.is_completed() and not given_up():
                time.sleep(POLL_S)
            if self.rank != 0 or work.is_completed():
                work.wait()
                return
        except RuntimeError as error:
            self.close()
            raise SyncAbortedError(
                f"rank {self.rank} lost the group of trainer and workers: {_line(error)}"
            ) from error
        self.close()
        with starting("the end of a broadcast"):
            threading.Thread(target=_outlive, args=(work, group), daemon=True).start()
        raise SyncAbortedError("the workers gave up a bucket of weights")

    def close(self) -> None:
        store, self._group, self._store = self._store, None, None
        if store is not None and self.rank == 0:
            with suppress(RuntimeError):
                store.delete_key(TRAINER)  # the store itself lives until all operations have ended


def _outlive(work: Any, group: Any) -> None:
    """Keeps the group alive: Gloo cannot cancel an operation, and destroying the group would block
    the process until it ends."""
    while not work.is_completed():
        time.sleep(POLL_S)


def _distributed() -> Any:
    import torch.distributed

    return torch.distributed


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]

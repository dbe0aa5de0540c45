"""The Gloo group of a trainer, rank 0, and vLLM's workers on any machine: blocks of bytes are broadcast from the trainer. The trainer
listens on a port only when its first send asks the workers to join.
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
from rollmesh.weights.transport.segment import POLL_S, Bytes

TRAINER = "trainer"  # a key of the store: rank 0 is there
HELD_S = 5.0


class Group:
    """One rank's end. It is not in torch.distributed's registry: neither side's own groups are touched."""

    def __init__(self, store: Any, rank: int, world: int, timeout: float):
        self._store, self.rank, self.world, self._timeout = store, rank, world, timeout
        self._group: Any = None

    @classmethod
    def listening(cls, address: str, port: int, world: int, timeout: float) -> Group:
        """The trainer's end, bound to `address` alone; port 0: a free one."""
        try:
            listener = socket.create_server((address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
        except OSError as error:
            raise ConfigError(f"master_address = {shown(address)}, master_port = {port}, wanted to listen there: {error}") from error
        port = listener.getsockname()[1]
        store = _distributed().TCPStore(
            address, port, world, True, timedelta(seconds=timeout), wait_for_workers=False, master_listen_fd=listener.detach()
        )
        store.set(TRAINER, "here")
        return cls(store, 0, world, timeout)

    @classmethod
    def joining(cls, address: str, port: int, rank: int, world: int, timeout: float) -> Group:
        """A worker's end; returns when all have come."""
        seconds = timedelta(seconds=timeout)
        try:
            store = _distributed().TCPStore(address, port, world, False, seconds, wait_for_workers=False)
            store.set(f"rank {rank}", "here")
            group = cls(store, rank, world, timeout)
            group._connect()
        except RuntimeError as error:
            raise SyncAbortedError(f"rank {rank} did not reach the trainer at {address}:{port}: {_line(error)}") from error
        return group

    @property
    def port(self) -> int:
        return int(self._store.port)

    def is_held(self) -> bool:
        """Whether the trainer lives, and has not left. One that does not answer for some seconds does not."""
        found = []

        def ask(store: Any) -> None:
            with suppress(RuntimeError):
                found.append(bool(store.check([TRAINER])))

        if self._store is not None:
            asking = threading.Thread(target=ask, args=(self._store,), daemon=True)
            asking.start()
            asking.join(HELD_S)
        return found == [True]

    def gather(self, given_up: Callable[[], bool]) -> None:
        """The trainer waits for the workers, unless they have given up."""
        names = [f"rank {rank}" for rank in range(1, self.world)]
        store, deadline = self._store, time.monotonic() + self._timeout  # another thread may close this
        if store is None:
            raise StateError("the group of trainer and workers is closed")
        while not store.check(names):
            if given_up() or time.monotonic() > deadline:
                raise SyncAbortedError(f"not all of {self.world - 1} workers came to the trainer's group")
            time.sleep(0.01)
        self._connect()

    def _connect(self) -> None:
        torch = _distributed()
        self._group = torch.ProcessGroupGloo(
            torch.PrefixStore("weights", self._store), self.rank, self.world, timedelta(seconds=self._timeout)
        )

    def broadcast(self, block: Bytes, given_up: Callable[[], bool] = lambda: False) -> None:
        """From rank 0, in place."""
        import torch

        group = self._group  # another thread may close this
        if group is None:
            raise StateError("the group of trainer and workers is closed")
        if block.size == 0:
            return
        try:
            work = group.broadcast(torch.from_numpy(block), 0)
            while self.rank == 0 and not work.is_completed() and not given_up():
                time.sleep(POLL_S)
            if self.rank != 0 or work.is_completed():
                work.wait()
                return
        except RuntimeError as error:
            self.close()
            raise SyncAbortedError(f"rank {self.rank} lost the group of trainer and workers: {_line(error)}") from error
        self.close()
        threading.Thread(target=_outlive, args=(work, group), daemon=True).start()
        raise SyncAbortedError("the workers gave up a block of weights")

    def close(self) -> None:
        store, self._group, self._store = self._store, None, None
        if store is not None and self.rank == 0:
            with suppress(RuntimeError):
                store.delete_key(TRAINER)  # the store itself lives as long as something is under way


def _outlive(work: Any, group: Any) -> None:
    """Gloo cannot be told to give up, and a group that goes while something is under way holds the whole process up until that is over."""
    while not work.is_completed():
        time.sleep(POLL_S)


def _distributed() -> Any:
    import torch.distributed

    return torch.distributed


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]

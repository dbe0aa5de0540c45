"""How the bytes of weights come from a trainer to vLLM's workers. What vLLM itself carries is small and of plain values: names, shapes,
types and places in a block of bytes. The block comes by one of two ways:

    shm           a file in /dev/shm that the trainer makes and all workers of the machine read in place. Its name is random, its mode
                  0600, and it is gone as soon as all have opened it; a foreign owner, another mode or another nonce is AuthError.
                  The trainer holds a lock on it: one that was killed before leaves a file that the next sender takes away
                  Tensors on the trainer's GPUs may be lent beside it (lent.py): the file says whether they still are, and a worker
                  that reads them locks a byte of it, which the trainer waits for
    distributed   a broadcast of the trainer, rank 0 of a Gloo group of its own; the trainer listens on a port only then

The trainer's process needs no vLLM, and with shm no torch either.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import secrets
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from rollmesh.errors import AuthError, CapacityError, ConfigError, FormatError, RankLostError, StateError, SyncAbortedError
from rollmesh.runtime.messages import shown

Bytes = NDArray[np.uint8]

FOLDER = Path("/dev/shm")
PREFIX = "rollmesh-weights-"
NAME = re.compile(PREFIX + "[0-9a-f]{32}")
NONCE = re.compile(r"[0-9a-f]{32}")
MAGIC = b"rollmesh weights"
HEAD = 64  # bytes before the block: the magic, the nonce, the number of what is lent (0: nothing is)
LENT = 48  # where that number is
FLOCK = struct.Struct("hhqqi4x")  # struct flock of Linux on x86-64: type, whence, start, length, process
POLL_S = 0.0005
TRAINER = "trainer"  # a key of the store: rank 0 is there
HELD_S = 5.0
STALE_S = 60.0  # a younger one may not have been locked yet


class SharedBlock:
    """The trainer's end of shm. Owned by one sender; `unlink` once the workers have it open, `close` when it is not needed."""

    def __init__(self, size: int):
        _sweep()
        self.name, self.nonce, self.size = PREFIX + secrets.token_hex(16), secrets.token_hex(16), size
        self._descriptor, self._linked = -1, True
        self.data: Bytes | None = None
        self._lent: NDArray[np.uint64] | None = None
        self._loans = 0
        try:
            self._descriptor = os.open(FOLDER / self.name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)  # another sender's sweep may hold it for a moment
            os.fchmod(self._descriptor, 0o600)  # whatever the umask took away
            os.posix_fallocate(self._descriptor, 0, HEAD + size)  # now, and not as a SIGBUS in the middle
            memory = mmap.mmap(self._descriptor, HEAD + size)
            memory[: len(MAGIC) + len(self.nonce)] = MAGIC + self.nonce.encode()
            self.data = np.frombuffer(memory, np.uint8)[HEAD:]
            self._lent = np.frombuffer(memory, np.uint64, 1, LENT)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise CapacityError(f"shared memory has no room for {size} bytes of weights: {error.strerror}") from error
            raise

    def lend(self) -> int:
        """Number of a loan, from now until `take_back`."""
        assert self._lent is not None
        self._loans += 1
        self._lent[0] = self._loans
        return self._loans

    def take_back(self, seconds: float) -> bool:
        """No worker begins to read what is lent any more, and what one has read of it is refused. Whether none has it open any more
        within so many seconds: then it is the trainer's again."""
        if self._lent is None or not self._lent[0]:
            return True
        self._lent[0] = 0
        deadline = time.monotonic() + seconds
        while True:
            if _lock_reading(self._descriptor, fcntl.F_WRLCK):  # no worker has its lock; that of one that has ended is gone
                _lock_reading(self._descriptor, fcntl.F_UNLCK)
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL_S)

    def unlink(self) -> None:
        if self._linked:
            (FOLDER / self.name).unlink(missing_ok=True)
            self._linked = False

    def close(self) -> None:
        self.unlink()
        descriptor, self._descriptor, self.data, self._lent = self._descriptor, -1, None, None
        if descriptor >= 0:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # also where a process that was forked meanwhile has it
            finally:
                os.close(descriptor)


def _lock_reading(descriptor: int, kind: int) -> bool:
    """Of the byte that workers lock while they read what is lent: F_RDLCK, F_WRLCK or F_UNLCK. False: another has it. The lock is the open
    file's and not the process's, which would lose it when it closes the same file elsewhere (a sender's sweep does)."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, FLOCK.pack(kind, os.SEEK_SET, 0, 1, 0))
    except (BlockingIOError, PermissionError):
        return False
    return True


def _sweep() -> None:
    """Files of this user whose sender has ended without taking them away."""
    for path in FOLDER.glob(PREFIX + "*"):
        with suppress(OSError):  # another's, in use, or gone by now
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if time.time() - os.fstat(descriptor).st_mtime > STALE_S:
                    path.unlink()
            finally:
                os.close(descriptor)


class SharedReader:
    """A worker's end: the block that was opened last stays open, so that its name may go."""

    def __init__(self) -> None:
        self._name, self._descriptor = "", -1
        self._memory: Bytes | None = None
        self._lent: NDArray[np.uint64] | None = None

    def block(self, name: Any, nonce: Any, size: int) -> Bytes:
        """The first `size` bytes, as a view that is valid until the next block is asked for."""
        if not isinstance(name, str) or not NAME.fullmatch(name) or not isinstance(nonce, str) or not NONCE.fullmatch(nonce):
            raise FormatError(f"a block of weights with segment {shown(name)} and nonce {shown(nonce)}, wanted those of a WeightSender")
        if name != self._name:
            self._open(name, nonce)
        held = os.fstat(self._descriptor).st_size - HEAD
        if self._memory is None or size > min(held, self._memory.size):
            raise FormatError(f"{FOLDER / name} holds {max(held, 0)} bytes of weights, wanted {size}")
        return self._memory[:size]

    @contextmanager
    def reading(self, number: int) -> Iterator[Callable[[], None]]:
        """What is lent by that number beside the block that is open may be looked at in here: its trainer waits. Gives what raises once
        it is lent no more: StateError when the trainer has taken it back, RankLostError when it has ended."""
        if not _lock_reading(self._descriptor, fcntl.F_RDLCK):
            self._refuse_taken_back(number)
        try:
            self._require_lent(number)
            yield lambda: self._require_lent(number)
        finally:
            _lock_reading(self._descriptor, fcntl.F_UNLCK)

    def _require_lent(self, number: int) -> None:
        if self._lent is None or self._lent[0] != number:
            self._refuse_taken_back(number)
        if not self.is_held():
            raise RankLostError(f"the trainer that lends block {number} of {FOLDER / self._name} has ended")

    def _refuse_taken_back(self, number: int) -> NoReturn:
        raise StateError(f"block {number} of {FOLDER / self._name} was taken back by its trainer")

    def is_held(self) -> bool:
        """Whether the sender of the block that is open still lives, and sends."""
        if self._descriptor < 0:
            return False
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        return False

    def _open(self, name: str, nonce: str) -> None:
        self.close()
        path = FOLDER / name
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise AuthError(f"{path} is not there; over shm the trainer and the workers must be on one machine") from error
        except OSError as error:
            raise AuthError(f"{path}: {error.strerror}") from error
        try:
            self._memory = self._mapped(path, nonce)
        except BaseException:
            self.close()
            raise
        self._name = name

    def _mapped(self, path: Path, nonce: str) -> Bytes:
        status = os.fstat(self._descriptor)
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) != 0o600 or not stat.S_ISREG(status.st_mode):
            raise AuthError(f"{path} has owner {status.st_uid} and mode {stat.filemode(status.st_mode)}, wanted our own with 0600")
        if status.st_size < HEAD:
            raise FormatError(f"{path} has {status.st_size} bytes, wanted {HEAD} at least")
        memory = mmap.mmap(self._descriptor, status.st_size, prot=mmap.PROT_READ)
        if not secrets.compare_digest(memory[: len(MAGIC) + len(nonce)], MAGIC + nonce.encode()):
            raise AuthError(f"{path} was not written by the sender of this update")
        self._lent = np.frombuffer(memory, np.uint64, 1, LENT)
        return np.frombuffer(memory, np.uint8)[HEAD:]

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        self._name, self._memory, self._lent = "", None, None
        if descriptor >= 0:
            os.close(descriptor)


class Group:
    """The trainer, rank 0, and all workers. It is no group of torch.distributed's registry: neither side's own groups are touched."""

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

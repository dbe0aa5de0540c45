"""One file of shared memory: its owner fills it, other processes of the same user and machine map it.

    0      magic
    16     nonce, 32 hex characters that the owner tells its readers
    48     uint64, number of the loan that goes with the file, 0: none (loans.py)
    56     uint64, bytes of the manifest in the file, 0: it is sent another way
    64     a byte for each reader of the loan: FREE, READS or HAS_READ
    4160   the manifest; at the next multiple of 64 the tensors

The name is random and the mode 0600; another owner, mode or nonce is AuthError. Locks are those of open file descriptions: they end
with their process, and closing the same file elsewhere in the process does not drop them. The owner locks byte 0 as long as it lives,
a reader of a loan its own byte. A file whose owner was killed is removed when the next segment is made in the same folder.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
import stat
import struct
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rollmesh.errors import (
    AuthError,
    CapacityError,
    ConfigError,
    DeadlineError,
    Error,
    FormatError,
    LimitError,
    RankLostError,
    StateError,
)

Bytes = NDArray[np.uint8]

FOLDER = Path("/dev/shm")
PREFIX = "rollmesh-weights-"
MAGIC = b"rollmesh weights"
ALIGN = 64  # bytes; where a tensor begins
MAX_MANIFEST = 256 << 20
MAX_READERS = 4096
OWNER, LOAN, READERS = 0, 48, 64  # offsets of what is locked and written
HEADER = struct.Struct("<16s32sQQ")
HEAD = READERS + MAX_READERS
FREE, READS, HAS_READ = 0, 1, 2
FLOCK = struct.Struct("hhqqi4x")  # struct flock of Linux on x86-64: type, whence, start, length, process
POLL_S = 0.0005
STALE_S = 60.0  # a younger file may not have been locked yet
LOCK_S = 10.0  # a sweep of another process has a new file locked for a moment
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def aligned(size: int) -> int:
    return (size + ALIGN - 1) // ALIGN * ALIGN


def _lock(descriptor: int, kind: int, at: int, length: int = 1) -> bool:
    """kind: F_WRLCK or F_UNLCK; length 0: to the end of the file. False: another has it."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, FLOCK.pack(kind, os.SEEK_SET, at, length, 0))
    except (BlockingIOError, PermissionError):
        return False
    return True


def _is_locked(descriptor: int, at: int, length: int = 1) -> bool:
    """Whether another holds any of these bytes."""
    found = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, at, length, 0))
    return bool(FLOCK.unpack(found)[0] != fcntl.F_UNLCK)


def _map(descriptor: int, size: int, *, writes: bool) -> mmap.mmap:
    """By a description of its own: a mapping keeps its description open, and with it the locks."""
    again = os.open(f"/proc/self/fd/{descriptor}", (os.O_RDWR if writes else os.O_RDONLY) | os.O_CLOEXEC)
    try:
        return mmap.mmap(again, size, prot=mmap.PROT_READ | (mmap.PROT_WRITE if writes else 0))
    finally:
        os.close(again)


class _LockedFile:
    """An open file that goes with its segment, also when that is not closed. A forked child closes it and has no part in its locks."""

    def __init__(self, path: Path):
        self.path, self.descriptor = path, -1

    def open(self, flags: int) -> None:
        self.descriptor = os.open(self.path, flags | os.O_CLOEXEC, 0o600)
        _open.add(self)

    def close(self) -> None:
        """Unlocks first: a child that has not closed its copy of the descriptor yet would keep the locks."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            try:
                with suppress(OSError):
                    _lock(descriptor, fcntl.F_UNLCK, 0, 0)
            finally:
                os.close(descriptor)
        _open.discard(self)

    def close_in_child(self) -> None:
        """The locks are the parent's."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


_open: set[_LockedFile] = set()


def _close_in_child() -> None:
    while _open:
        _open.pop().close_in_child()


os.register_at_fork(after_in_child=_close_in_child)


def _sweep(folder: Path) -> None:
    """Removes files of this user whose owner has ended."""
    for path in folder.glob(PREFIX + "*"):
        with suppress(OSError):  # another's, in use, or gone by now
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                if not _lock(descriptor, fcntl.F_WRLCK, OWNER):
                    continue
                status = os.fstat(descriptor)  # without a link: its owner has renamed another version over it since it was opened
                if status.st_nlink > 0 and time.time() - status.st_mtime > STALE_S:
                    path.unlink()
            finally:
                os.close(descriptor)


# -------------------------------------------------------------------------------------------------- the owner
class _OwnedFile(_LockedFile):
    """With its name, which the owner removes and none of its children."""

    def __init__(self, path: Path):
        super().__init__(path)
        self.is_linked, self._process = True, os.getpid()

    def unlink(self) -> None:
        if self.is_linked and os.getpid() == self._process:
            self.path.unlink(missing_ok=True)
            self.is_linked = False

    def close(self) -> None:
        self.unlink()
        super().close()


class Segment:
    """The owner's end. `unlink` once the readers have it open; `close`, or the end of the object or the process, removes it."""

    def __init__(self, size: int, folder: Path | None = None, *, nonce: str | None = None, manifest: bytes = b""):
        """size: bytes of tensors."""
        folder = folder or FOLDER
        if len(manifest) > MAX_MANIFEST:
            raise LimitError(f"the names and shapes of the weights take {len(manifest)} bytes; the limit is {MAX_MANIFEST}")
        self.name, self.nonce, self.size = PREFIX + secrets.token_hex(16), nonce or secrets.token_hex(16), size
        self.data: Bytes | None = None
        self._loans = 0
        self._file = file = _OwnedFile(folder / self.name)
        self._end = weakref.finalize(self, file.close)
        start = aligned(HEAD + len(manifest))
        try:
            _sweep(folder)
            file.open(os.O_CREAT | os.O_EXCL | os.O_RDWR)
            self._lock_as_owner()
            os.fchmod(file.descriptor, 0o600)  # whatever the umask took away
            self._allocate(start + size)
            memory = _map(file.descriptor, start + size, writes=True)
            HEADER.pack_into(memory, 0, MAGIC, self.nonce.encode(), 0, len(manifest))
            memory[HEAD : HEAD + len(manifest)] = manifest
            self.data = np.frombuffer(memory, np.uint8)[start:]
        except BaseException as error:
            self.close()
            if isinstance(error, OSError) and not isinstance(error, Error):
                raise CapacityError(f"no segment in {folder} for {size} bytes of weights: {error.strerror}") from error
            raise

    def _lock_as_owner(self) -> None:
        deadline = time.monotonic() + LOCK_S
        while not _lock(self._file.descriptor, fcntl.F_WRLCK, OWNER):
            if time.monotonic() >= deadline:
                raise DeadlineError(f"{self.path} is new, and another process has kept it locked for {LOCK_S:g} seconds")
            time.sleep(POLL_S)

    def _allocate(self, size: int) -> None:
        try:
            os.posix_fallocate(self._file.descriptor, 0, size)  # now, and not as a SIGBUS in the middle
        except OSError as error:
            raise CapacityError(f"shared memory has no room for {size} bytes of weights: {error.strerror}") from error

    @property
    def path(self) -> Path:
        return self._file.path

    def rename(self, path: Path) -> None:
        """Takes the place of what is there. From then on the name is the caller's to remove."""
        os.rename(self._file.path, path)
        self._file.is_linked = False

    def unmap(self) -> None:
        """The bytes are written."""
        self.data = None

    def unlink(self) -> None:
        self._file.unlink()

    def close(self) -> None:
        self.data = None
        self._file.close()
        self._end.detach()  # a Ctrl-C within a finalizer is lost

    # ---------------------------------------------------------------------------------------- loans
    @property
    def next_loan(self) -> int:
        return self._loans + 1

    def lend(self) -> int:
        """Opens a loan; returns its number. Those of a segment count from 1."""
        self._loans = self.next_loan
        os.pwrite(self._file.descriptor, bytes(MAX_READERS), READERS)
        os.pwrite(self._file.descriptor, self._loans.to_bytes(8, "little"), LOAN)
        return self._loans

    def take_back(self, seconds: float) -> bool:
        """Ends the loan: no reader begins, and one that reads is refused at its end. Whether within so many seconds no reader had it open
        any more: then the tensors are the owner's again."""
        if self._file.descriptor < 0:
            return True
        os.pwrite(self._file.descriptor, bytes(8), LOAN)
        deadline = time.monotonic() + seconds
        while self.is_being_read():
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL_S)
        return True

    def is_being_read(self) -> bool:
        return _is_locked(self._file.descriptor, READERS, MAX_READERS)

    def num_read(self) -> int:
        """Readers of the open loan that were through with it."""
        return self._states().count(HAS_READ)

    def num_reading(self) -> int:
        return sum(_is_locked(self._file.descriptor, READERS + i) for i, state in enumerate(self._states()) if state == READS)

    def lost_reader(self) -> bool:
        """Whether a reader of the open loan has ended within it; each is told once."""
        for i, state in enumerate(self._states()):
            if state != READS or _is_locked(self._file.descriptor, READERS + i) or self._states()[i] != READS:
                continue
            os.pwrite(self._file.descriptor, bytes([FREE]), READERS + i)
            return True
        return False

    def _states(self) -> bytes:
        return os.pread(self._file.descriptor, MAX_READERS, READERS)


# -------------------------------------------------------------------------------------------------- a reader
class MappedSegment:
    """A reader's end. Views of it stay valid when it is closed. It is opened for reading only; what is lent is read through a second
    descriptor, which can write this reader's byte. FileNotFoundError where there is no file."""

    def __init__(self, path: Path, nonce: str):
        self.path, self._file = path, _LockedFile(path)
        self._marks = _LockedFile(path)  # open from the first `reading`
        self._reader = -1  # the byte that is locked
        self._marked = (0, -1)  # the loan that was read last, and the byte that says so
        try:
            self._file.open(os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise (CapacityError if error.errno in EXHAUSTED else AuthError)(f"{path}: {error.strerror}") from error
        self._end = weakref.finalize(self, _close_both, self._marks, self._file)
        self._end.atexit = False  # the end of the process does it
        try:
            self._memory, described = self._mapped(nonce)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise CapacityError(f"{path} cannot be mapped: {error.strerror}") from error
            raise
        self._start = aligned(HEAD + described)
        self.manifest = self._memory[HEAD : HEAD + described].tobytes()
        self.size = self._memory.size - self._start  # bytes of tensors

    def _mapped(self, nonce: str) -> tuple[Bytes, int]:
        status = os.fstat(self._descriptor)
        self._identity = _identity(status)
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) != 0o600 or not stat.S_ISREG(status.st_mode):
            raise AuthError(f"{self.path} has owner {status.st_uid} and mode {stat.filemode(status.st_mode)}, wanted our own with 0600")
        if status.st_size < HEAD:
            raise FormatError(f"{self.path} has {status.st_size} bytes, wanted {HEAD} at least")
        memory = _map(self._descriptor, status.st_size, writes=False)
        magic, told, _, described = HEADER.unpack_from(memory)
        if not secrets.compare_digest(magic + told, MAGIC + nonce.encode(errors="replace")):
            raise AuthError(f"{self.path} was not written by the sender of these weights")
        if described > MAX_MANIFEST or aligned(HEAD + described) > status.st_size:
            raise FormatError(f"{self.path} has {status.st_size} bytes, and {described} of names and shapes among them")
        return np.frombuffer(memory, np.uint8), described

    @property
    def _descriptor(self) -> int:
        return self._file.descriptor

    def block(self, size: int) -> Bytes:
        """The first bytes of tensors, as a view. FormatError where the file has fewer: it may have been cut since it was mapped."""
        held = os.fstat(self._descriptor).st_size - self._start
        if size > min(held, self.size):
            raise FormatError(f"{self.path} holds {max(held, 0)} bytes of weights, wanted {size}")
        return self._memory[self._start : self._start + size]

    def is_current(self) -> bool:
        """Whether its path still names this file, as it was when it was mapped."""
        try:
            return self._descriptor >= 0 and _identity(os.lstat(self.path)) == self._identity
        except OSError:
            return False

    def is_owned(self) -> bool:
        """Whether the owner lives and has not closed its end."""
        return _is_locked(self._descriptor, OWNER)

    @contextmanager
    def reading(self, number: int, what: str) -> Iterator[Callable[[], None]]:
        """The loan of that number may be read in here; its owner waits. Yields what raises once it is lent no more: StateError when the
        owner has taken it back, RankLostError when it has ended. Counts as read when the block ends well, once however often. After an
        error within the loan this reader still counts as one that reads, until it tries again or is closed. ConfigError where the file
        cannot be written to."""
        if self._reader < 0:
            self._reader = self._claim(number, what)
        try:
            self._require_lent(number, what)
        except BaseException:
            self._leave(FREE)
            raise
        try:
            yield lambda: self._require_lent(number, what)
        except BaseException:
            if self._loan() != number:
                self._leave(FREE)
            raise
        self._marked = number, self._reader
        self._leave(HAS_READ)

    def _claim(self, number: int, what: str) -> int:
        """Locks a free byte, or the one in which this reader has said before that it has read this loan."""
        if self._marks.descriptor < 0:
            self._open_marks(what)
        marks, (loan, mine) = self._marks.descriptor, self._marked
        for i in (mine,) if loan == number else range(MAX_READERS):
            if _lock(marks, fcntl.F_WRLCK, READERS + i):
                if loan == number or os.pread(marks, 1, READERS + i) == bytes([FREE]):
                    os.pwrite(marks, bytes([READS]), READERS + i)
                    return i
                _lock(marks, fcntl.F_UNLCK, READERS + i)
        raise LimitError(f"{what} has {MAX_READERS} readers; the limit is {MAX_READERS}")

    def _open_marks(self, what: str) -> None:
        self._marks.path = Path(f"/proc/self/fd/{self._descriptor}")  # its name may be gone
        try:
            self._marks.open(os.O_RDWR)
        except OSError as error:
            if error.errno in EXHAUSTED:
                raise CapacityError(f"{self.path}: {error.strerror}") from error
            raise ConfigError(
                f"a reader of {what} locks a byte of {self.path}, expected a file that it can write to: {error.strerror}; "
                "lend_to=0, or a WeightSender's lend=False, copies"
            ) from error

    def _leave(self, state: int) -> None:
        reader, self._reader = self._reader, -1
        if reader >= 0 and self._marks.descriptor >= 0:  # closed in a forked child
            os.pwrite(self._marks.descriptor, bytes([state]), READERS + reader)
            _lock(self._marks.descriptor, fcntl.F_UNLCK, READERS + reader)

    def _loan(self) -> int:
        return int.from_bytes(os.pread(self._descriptor, 8, LOAN), "little")

    def _require_lent(self, number: int, what: str) -> None:
        if self._loan() != number:
            raise StateError(f"{what} was taken back by its trainer")
        if not self.is_owned():
            raise RankLostError(f"the trainer that lends {what} has ended")

    def close(self) -> None:
        """This reader is counted no more, unless it has read."""
        if self._descriptor >= 0:
            self._leave(FREE)
            _close_both(self._marks, self._file)
            self._end.detach()


def _close_both(marks: _LockedFile, file: _LockedFile) -> None:
    marks.close()
    file.close()


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_mode, status.st_uid, status.st_size

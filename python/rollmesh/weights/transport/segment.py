"""A file of shared memory. Its owner writes it, and other processes of the same user and machine
map it.

    0      magic
    16     nonce, 32 hex characters that the owner sends to its readers
    48     uint64, number of the open loan (loans.py); 0 if there is none
    56     uint64, bytes of the manifest in the file; 0 if it is sent another way
    64     one byte for each reader of the loan: FREE, READS or HAS_READ
    4160   uint64, checksum of the manifest
    4168   the manifest; at the next multiple of 64 the tensors

The name is random and the mode is 0600; a reader raises AuthError for another owner, mode or nonce.
Locks belong to open file descriptions: they end with their process, and closing the same file
elsewhere in the process does not release them. The owner holds a lock on byte 0 until it ends; a
reader of a loan holds a lock on its own byte. If an owner was killed, its file is removed when the
next segment is made in the same folder.
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

from rollmesh import _core
from rollmesh.errors import (
    AuthError,
    CapacityError,
    ConfigError,
    Error,
    FormatError,
    LimitError,
    RankLostError,
    StateError,
)

Bytes = NDArray[np.uint8]

FOLDER = Path("/dev/shm")
PREFIX = "rollmesh-weights-"
FORMAT = b"rollmesh weights"  # magic of the first release
MAGIC = b"rollmesh-weight2"
ALIGN = 64  # bytes; where a tensor begins
MAX_MANIFEST = 256 << 20
MAX_READERS = 4096
OWNER, LOAN, READERS = 0, 48, 64  # offsets
HEADER = struct.Struct("<16s32sQQ")
SUM = READERS + MAX_READERS
HEAD = SUM + 8
FREE, READS, HAS_READ = 0, 1, 2
# struct flock of Linux on x86-64: type, whence, start, length, pid
FLOCK = struct.Struct("hhqqi4x")
POLL_S = 0.0005
STALE_S = 60.0  # a younger file is not swept, since its owner may not have locked it yet
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def aligned(size: int) -> int:
    return (size + ALIGN - 1) // ALIGN * ALIGN


def lock(descriptor: int, kind: int, at: int, length: int = 1) -> bool:
    """Locks or unlocks bytes of a file. kind: F_WRLCK or F_UNLCK; length 0: to the end of the file.
    Returns False if another description holds the lock."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, FLOCK.pack(kind, os.SEEK_SET, at, length, 0))
    except (BlockingIOError, PermissionError):
        return False
    return True


def is_locked(descriptor: int, at: int, length: int = 1) -> bool:
    """Whether another description has a lock on any of these bytes."""
    found = fcntl.fcntl(
        descriptor, fcntl.F_OFD_GETLK, FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, at, length, 0)
    )
    return bool(FLOCK.unpack(found)[0] != fcntl.F_UNLCK)


def _map(descriptor: int, size: int, *, writes: bool) -> mmap.mmap:
    """Maps the file through a new description, since a mapping keeps its description open and a
    description keeps its locks."""
    again = os.open(
        f"/proc/self/fd/{descriptor}", (os.O_RDWR if writes else os.O_RDONLY) | os.O_CLOEXEC
    )
    try:
        return mmap.mmap(again, size, prot=mmap.PROT_READ | (mmap.PROT_WRITE if writes else 0))
    finally:
        os.close(again)


class LockedFile:
    """A file descriptor that holds locks. Forked children close their copies, so that locks end
    with the parent."""

    def __init__(self, path: Path):
        self.path, self.descriptor = path, -1

    def open(self, flags: int) -> None:
        self.descriptor = os.open(self.path, flags | os.O_CLOEXEC, 0o600)
        _open.add(self)

    def close(self) -> None:
        """Unlocks the file, then closes it. A child that has not yet closed its copy of the
        descriptor would otherwise keep the locks."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            try:
                with suppress(OSError):
                    lock(descriptor, fcntl.F_UNLCK, 0, 0)
            finally:
                os.close(descriptor)
        _open.discard(self)


_open: set[LockedFile] = set()


def _close_in_child() -> None:
    """Closes the descriptors without releasing the parent's locks."""
    while _open:
        file = _open.pop()
        descriptor, file.descriptor = file.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


os.register_at_fork(after_in_child=_close_in_child)


def _sweep(folder: Path) -> None:
    """Removes the files of this user's processes that have ended."""
    for path in folder.glob(PREFIX + "*"):
        with suppress(OSError):  # of another user, in use, or removed meanwhile
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                if time.time() - os.fstat(descriptor).st_mtime < STALE_S:
                    continue
                # The link count is 0 if the owner has renamed another version over the file.
                is_free = lock(descriptor, fcntl.F_WRLCK, OWNER)
                if is_free and os.fstat(descriptor).st_nlink > 0:
                    path.unlink()
            finally:
                os.close(descriptor)


# -------------------------------------------------------------------------------------- the owner
class _OwnedFile(LockedFile):
    """A locked file whose `close` also unlinks it, in the owner's process only."""

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
    """The owner's end of a segment. Call `unlink` once the readers have opened the file; otherwise
    `close`, or the end of the object or the process, removes it."""

    def __init__(
        self,
        size: int,
        folder: Path | None = None,
        *,
        nonce: str | None = None,
        manifest: bytes = b"",
    ):
        """size: number of bytes of all tensors."""
        folder = folder or FOLDER
        if len(manifest) > MAX_MANIFEST:
            raise LimitError(
                f"a manifest of weights: expected at most {MAX_MANIFEST} bytes, got {len(manifest)}"
            )
        self.name, self.nonce = PREFIX + secrets.token_hex(16), nonce or secrets.token_hex(16)
        self.size = size
        self.data: Bytes | None = None  # bytes of the tensors
        self._memory: Bytes | None = None  # bytes of the whole file
        self._loans = 0
        self._file = file = _OwnedFile(folder / self.name)
        self._end = weakref.finalize(self, file.close)
        start = aligned(HEAD + len(manifest))
        try:
            _sweep(folder)
            file.open(os.O_CREAT | os.O_EXCL | os.O_RDWR)
            if not lock(file.descriptor, fcntl.F_WRLCK, OWNER):
                raise StateError(
                    f"{self.path}: expected a lock on the new file, got none; try again"
                )
            os.fchmod(file.descriptor, 0o600)  # regardless of the umask
            # Allocates all pages now, since a later write without memory would raise SIGBUS.
            os.posix_fallocate(file.descriptor, 0, start + size)
            memory = _map(file.descriptor, start + size, writes=True)
            HEADER.pack_into(memory, 0, MAGIC, self.nonce.encode(), 0, len(manifest))
            self._memory = np.frombuffer(memory, np.uint8)
            self.data = self._memory[start:]
            self.describe(manifest)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError) and not isinstance(error, Error):
                raise CapacityError(
                    f"{folder}: expected shared memory for {size} bytes of weights: "
                    f"{error.strerror}"
                ) from error
            raise

    def describe(self, manifest: bytes) -> None:
        """Writes the manifest, or replaces it by another one of the same size. The tensors must
        still be mapped."""
        assert self._memory is not None
        words = np.frombuffer(manifest, np.uint8)
        self._memory[HEAD : HEAD + words.size] = words
        self._memory[SUM:HEAD] = np.frombuffer(_sum(words), np.uint8)

    @property
    def path(self) -> Path:
        return self._file.path

    def rename(self, path: Path) -> None:
        """Renames the file to `path`, replacing the file there. The caller removes that name."""
        os.rename(self._file.path, path)
        self._file.is_linked = False

    def unmap(self) -> None:
        """Drops the mapping after all bytes were written."""
        self.data = self._memory = None

    def unlink(self) -> None:
        self._file.unlink()

    def close(self) -> None:
        self.unmap()
        self._file.close()
        self._end.detach()  # a Ctrl-C within a finalizer would be swallowed

    # --------------------------------------------------------------------------------------- loans
    @property
    def next_loan(self) -> int:
        return self._loans + 1

    def lend(self) -> int:
        """Opens a loan and returns its number. The loans of a segment are numbered from 1."""
        self._loans = self.next_loan
        os.pwrite(self._file.descriptor, bytes(MAX_READERS), READERS)
        os.pwrite(self._file.descriptor, self._loans.to_bytes(8, "little"), LOAN)
        return self._loans

    def take_back(self, seconds: float) -> bool:
        """Ends the loan: new readers are refused, and a reader that is reading fails at its end.
        Returns whether all readers closed the loan within `seconds`; only then may the owner change
        the tensors."""
        if self._file.descriptor < 0:
            return True
        os.pwrite(self._file.descriptor, bytes(8), LOAN)
        deadline = time.monotonic() + seconds
        while is_locked(self._file.descriptor, READERS, MAX_READERS):  # a reader is reading
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL_S)
        return True

    def num_read(self) -> int:
        """Returns the number of readers that have finished reading the open loan."""
        return self._states().count(HAS_READ)

    def num_reading(self) -> int:
        return sum(state == READS and self._is_held(i) for i, state in enumerate(self._states()))

    def lost_reader(self) -> bool:
        """Returns whether a reader's process ended while it was reading the open loan. Reports each
        such reader once."""
        for i, state in enumerate(self._states()):
            if state != READS or self._is_held(i) or self._states()[i] != READS:
                continue
            os.pwrite(self._file.descriptor, bytes([FREE]), READERS + i)
            return True
        return False

    def _is_held(self, reader: int) -> bool:
        return is_locked(self._file.descriptor, READERS + reader)

    def _states(self) -> bytes:
        return os.pread(self._file.descriptor, MAX_READERS, READERS)


# --------------------------------------------------------------------------------------- a reader
class MappedSegment:
    """A reader's end of a segment. Views stay valid after close(). The file is opened for writing,
    if possible, since a reader of a loan writes its byte; the mapping is read-only. Raises
    FileNotFoundError if the file does not exist."""

    def __init__(self, path: Path, nonce: str):
        self.path, self._file = path, LockedFile(path)
        self._reader = -1  # index of the locked byte
        self._marked = (0, -1)  # number of the loan read last, and index of the byte that marks it
        try:
            self._can_write = self._open_file()
        except FileNotFoundError:
            raise
        except OSError as error:
            raise (CapacityError if error.errno in EXHAUSTED else AuthError)(
                f"{path}: {error.strerror}"
            ) from error
        self._end = weakref.finalize(self, self._file.close)
        self._end.atexit = False  # the end of the process closes the files anyway
        try:
            self._memory, described = self._mapped(nonce)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise CapacityError(
                    f"{path}: expected a file that can be mapped: {error.strerror}"
                ) from error
            raise
        self._start = aligned(HEAD + described)
        self.manifest = self._memory[HEAD : HEAD + described].tobytes()
        self.size = self._memory.size - self._start  # bytes of all tensors

    def _open_file(self) -> bool:
        """Returns whether the file is writable."""
        flags = os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            self._file.open(os.O_RDWR | flags)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
            self._file.open(os.O_RDONLY | flags)
            return False
        return True

    def _mapped(self, nonce: str) -> tuple[Bytes, int]:
        status = os.fstat(self._descriptor)
        self._identity = _identity(status)
        if (
            status.st_uid != os.geteuid()
            or stat.S_IMODE(status.st_mode) != 0o600
            or not stat.S_ISREG(status.st_mode)
        ):
            mode = stat.filemode(status.st_mode)
            raise AuthError(
                f"{self.path}: expected our own file with mode 0600, got owner {status.st_uid} "
                f"and mode {mode}"
            )
        if status.st_size < HEAD:
            raise FormatError(f"{self.path}: expected {HEAD} bytes at least, got {status.st_size}")
        memory = _map(self._descriptor, status.st_size, writes=False)
        magic, told, _, described = HEADER.unpack_from(memory)
        if magic == FORMAT:
            raise FormatError(
                f"{self.path}: expected format {MAGIC.decode()}, got {FORMAT.decode()}; "
                "use the same release of rollmesh in trainer and generators"
            )
        if not secrets.compare_digest(magic + told, MAGIC + nonce.encode(errors="replace")):
            raise AuthError(
                f"{self.path}: expected a file of the sender of these weights, got another"
            )
        if described > MAX_MANIFEST or aligned(HEAD + described) > status.st_size:
            raise FormatError(
                f"{self.path}: expected a manifest of {described} bytes and at most "
                f"{MAX_MANIFEST}, got a file of {status.st_size}"
            )
        words = np.frombuffer(memory, np.uint8)
        if _sum(words[HEAD : HEAD + described]) != words[SUM:HEAD].tobytes():
            raise FormatError(
                f"{self.path}: expected the checksum that the manifest has, got another"
            )
        return words, described

    @property
    def _descriptor(self) -> int:
        return self._file.descriptor

    def tensors(self, size: int) -> Bytes:
        """Returns a view of the first `size` bytes of the tensors. Raises FormatError if the file
        has fewer."""
        self.require_whole()
        if size > self.size:
            raise FormatError(f"{self.path}: expected {size} bytes of weights, got {self.size}")
        return self._memory[self._start : self._start + size]

    def require_whole(self) -> None:
        """Raises FormatError if the file was truncated: an access to a missing page would end the
        process with SIGBUS."""
        if self._descriptor >= 0:  # -1: closed, but views are still in use
            held = os.fstat(self._descriptor).st_size - self._start
            if held < self.size:
                raise FormatError(
                    f"{self.path}: expected {self.size} bytes of weights, got {max(held, 0)}"
                )

    def is_current(self) -> bool:
        """Returns whether the path still names the mapped file."""
        try:
            return self._descriptor >= 0 and _identity(os.lstat(self.path)) == self._identity
        except OSError:
            return False

    def is_owned(self) -> bool:
        """Returns whether the owner's process is alive and has not closed its end."""
        return is_locked(self._descriptor, OWNER)

    @contextmanager
    def reading(self, number: int, what: str) -> Iterator[Callable[[], None]]:
        """Holds this reader's lock on a loan; the owner waits for this lock. Yields a function that
        raises if the loan has ended: StateError if the owner took it back, RankLostError if the
        owner's process has ended. A block that ends without an error marks the loan as read, once
        per reader. After an error this reader counts as reading until it tries again or is closed.
        Raises ConfigError if the file is not writable."""
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
        """Locks a free byte, or the byte that this reader used before for the same loan."""
        if not self._can_write:
            raise ConfigError(
                f"expected write access to {self.path}, where a reader of {what} locks a byte; "
                "lend_to=0, or a WeightSender's lend=False, copies"
            )
        marks, (loan, mine) = self._descriptor, self._marked
        for i in (mine,) if loan == number else range(MAX_READERS):
            if lock(marks, fcntl.F_WRLCK, READERS + i):
                if loan == number or os.pread(marks, 1, READERS + i) == bytes([FREE]):
                    os.pwrite(marks, bytes([READS]), READERS + i)
                    return i
                lock(marks, fcntl.F_UNLCK, READERS + i)
        raise LimitError(f"{what}: expected at most {MAX_READERS} readers, got more")

    def _leave(self, state: int) -> None:
        reader, self._reader = self._reader, -1
        if reader >= 0 and self._descriptor >= 0:  # -1 in a forked child
            os.pwrite(self._descriptor, bytes([state]), READERS + reader)
            lock(self._descriptor, fcntl.F_UNLCK, READERS + reader)

    def _loan(self) -> int:
        return int.from_bytes(os.pread(self._descriptor, 8, LOAN), "little")

    def _require_lent(self, number: int, what: str) -> None:
        if self._loan() != number:
            raise StateError(f"{what}: expected an open loan, got one that its trainer took back")
        if not self.is_owned():
            raise RankLostError(f"{what}: expected the trainer that lends it, which has ended")

    def close(self) -> None:
        """Closes the files and ends a read. A finished read still counts as read."""
        if self._descriptor >= 0:
            self._leave(FREE)
            self._file.close()
            self._end.detach()


def _sum(manifest: Bytes) -> bytes:
    return _core.checksum(manifest).to_bytes(8, "little")


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_mode, status.st_uid, status.st_size

"""Weights through shared memory, between a trainer and generators that are processes of one machine and one user.

    trainer     writer = SharedWriter()                 generator   reader = SharedReader(address)
                send writer.address once                            version = reader.refresh()
                writer.publish(state_dict, version)                 gen.sync_weights(reader, version=version)

A store is a folder with a random name and mode 0700 that holds one file, `current`, of mode 0600:

    magic | bytes of the header | JSON header: nonce, version, tensors | the tensors, each at a multiple of 64 bytes

A version is written to a file of its own and renamed, so a reader finds a whole one or the one before, and one that it has
mapped stays as it was. The address carries the nonce: a file left by somebody else, or made to look like ours, is AuthError.

Tensors on GPUs are copied into it by way of the host, or lent (loans.py): then the file says which memory another process may open, and
nothing is copied before the generator's own GPU reads it.

    trainer     writer.publish(state_dict, version, lend_to=1)
                writer.wait_until_read(timeout=60)              before a tensor is written to again
"""

from __future__ import annotations

import mmap
import os
import secrets
import stat
import struct
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollmesh import _core
from rollmesh.errors import (
    AuthError,
    CapacityError,
    DeadlineError,
    Error,
    FormatError,
    LimitError,
    NotSyncedError,
    RankLostError,
    StateError,
    VersionError,
)
from rollmesh.runtime.arguments import deadline_of, integer
from rollmesh.runtime.messages import shown
from rollmesh.weights.transport.loans import ALIVE, Borrowed, Lease, Lender, LentSource, Loan, is_free, is_on_gpu, parse_loan, this_process
from rollmesh.weights.transport.tensors import ALIGN, MAX_HEADER, Entry, as_array, bytes_of, check_new_name, describe, lay_out, parse, take

MAGIC = b"rollmesh"
MAX_VERSION = 2**63 - 1
FIXED = struct.Struct("<8sQ")  # magic, bytes of the header
CURRENT, NEW = "current", "new"
PRIVATE = partial(os.open, mode=0o600)
POLL_SECONDS = 0.002
MAX_READERS = 4096


class SharedWriter:
    """The trainer's side. `close` (or leaving a `with` block) removes the store; readers keep what they have mapped."""

    def __init__(self, folder: str | Path = "/dev/shm"):
        self._folder = Path(tempfile.mkdtemp(prefix="rollmesh-", dir=folder))
        self._nonce = secrets.token_hex(16)
        self.version: int | None = None
        self._closed = False
        self._lender: Lender | None = None
        self._lent_to = 0  # readers of the version that is lent; 0: none is

    @property
    def address(self) -> str:
        """What a reader needs. Whoever has it can read the weights if the file system lets them."""
        return f"{self._folder}:{self._nonce}"

    def publish(self, source: Mapping[str, Any] | Iterable[tuple[str, Any]], version: int | None = None, *, lend_to: int = 0) -> int:
        """Copies the tensors into a new version and makes it the current one. Returns its number.

        Takes NumPy arrays and torch tensors on any device. VersionError when the number does not increase or is no integer
        below 2^63; DuplicateKeyError for a name that comes twice; LimitError for one that is no str, empty or too long; CapacityError
        when the memory is not there. On any error what was current stays so: the version before, or none where that was lent and is back.

        lend_to: by how many readers tensors on GPUs (of any library, by DLPack) will be read where they are. What writes them is waited
        for; from then on they must stay as they are, and are kept alive, until `wait_until_read` or `take_back`, before which nothing
        else can be published (StateError). Where no tensor is on a GPU nothing is lent: the version is a copy like any other, which
        `wait_until_read` does not wait for. UnsupportedTensorError for GPU memory that no other process can open; ConfigError where
        this build has no CUDA library.
        """
        if self._closed:
            raise StateError("the store is closed")
        if self._lent_to:
            raise StateError(f"version {self.version} is lent to {self._lent_to} readers; wait_until_read() or take_back() comes first")
        lend_to = integer("lend_to", lend_to, 0, MAX_READERS)
        last = -1 if self.version is None else self.version
        version = last + 1 if version is None else version
        if isinstance(version, bool) or not isinstance(version, (int, np.integer)) or version > MAX_VERSION:
            raise VersionError(f"version {shown(version)} is not an integer in [0, {MAX_VERSION}]")
        version = int(version)
        if version <= last:
            raise VersionError(f"version {version} does not exceed {last}")
        arrays, lent = _arrays(source, lend_to > 0)
        entries, size = lay_out(arrays)
        try:
            loan = {"lent": self._lend(lent, lend_to)} if lent else {}
            header = describe(entries, nonce=self._nonce, version=version, **loan)
            self._publish(version, lend_to if lent else 0, header, arrays, entries, size)
        except BaseException:
            if self._lender is not None and self.version != version:
                self._lender.release(version)
            raise
        return version

    def _lend(self, tensors: list[tuple[str, Any]], readers: int) -> dict[str, Any]:
        if self._lender is None:
            self._lender = Lender(self._folder)
        return self._lender.lend(tensors, readers)

    def _publish(
        self, version: int, readers: int, header: bytes, arrays: list[tuple[str, NDArray[Any]]], entries: list[Entry], size: int
    ) -> None:
        if len(header) > MAX_HEADER:
            raise LimitError(f"the names and shapes of the weights take {len(header)} bytes; the limit is {MAX_HEADER}")
        start = (FIXED.size + len(header) + ALIGN - 1) // ALIGN * ALIGN
        new, current, before = self._folder / NEW, self._folder / CURRENT, (self.version, self._lent_to)
        try:
            with open(new, "w+b", buffering=0, opener=PRIVATE) as file:
                self._write(file.fileno(), header, start, start + size, arrays, entries)
            self.version, self._lent_to = version, readers
            os.rename(new, current)  # a Ctrl-C comes before both lines or after both
        except BaseException:
            if os.path.lexists(new):  # it is not current
                self.version, self._lent_to = before
                os.unlink(new)
            raise

    def wait_until_read(self, timeout: float | None = 600.0) -> None:
        """Until every reader of the version that is lent has said that it looks at it no more; at once where none is. Afterwards the
        tensors are the trainer's again, and no version is current before the next `publish`.

        DeadlineError when `timeout` seconds (None: without end) have not been enough, RankLostError when a reader has ended before it
        was through (told once of each): the version stays lent, for another wait or for `take_back`. One that ended before the `publish`,
        or before it had begun to read, is not missed, since another may come in its place: a timeout ends the wait for it, and says how
        many readers live.
        """
        deadline = deadline_of(timeout)
        while self._lent_to:
            assert self._lender is not None
            assert self.version is not None
            read = self._lender.read_by(self.version)
            told = f"version {self.version} was read by {read} of {self._lent_to} readers"
            if read >= self._lent_to:
                self.take_back()
            elif self._lender.lost_reader(self.version):
                raise RankLostError(f"{told}, and one of the others has ended")
            elif deadline is not None and time.monotonic() >= deadline:
                raise DeadlineError(f"{told} within the timeout; {self._lender.living()} that have read some version so far live")
            else:
                time.sleep(POLL_SECONDS)

    def take_back(self) -> None:
        """What is lent is no longer current; whoever reads it just now fails before it uses it, and must have given it back before its
        memory goes. Nothing where nothing is lent."""
        if self._lent_to:
            assert self._lender is not None
            assert self.version is not None
            (self._folder / CURRENT).unlink(missing_ok=True)
            self._lender.release(self.version)
            self._lent_to = 0

    @staticmethod
    def _write(descriptor: int, header: bytes, start: int, size: int, arrays: list[tuple[str, NDArray[Any]]], entries: list[Entry]) -> None:
        try:
            os.posix_fallocate(descriptor, 0, max(size, 1))  # now, and not as a SIGBUS in the middle
        except OSError as error:
            raise CapacityError(f"shared memory has no room for {size} bytes of weights: {error.strerror}") from error
        memory = mmap.mmap(descriptor, max(size, 1))  # unmapped with its last view; a `with` would fail when a Ctrl-C leaves one
        block = np.frombuffer(memory, np.uint8)
        memory[: FIXED.size + len(header)] = FIXED.pack(MAGIC, len(header)) + header
        for (_, array), entry in zip(arrays, entries, strict=True):
            block[start + entry.offset : start + entry.offset + entry.bytes] = bytes_of(array)

    def close(self) -> None:
        if not self._closed:
            self.take_back()
            lender, self._lender = self._lender, None
            if lender is not None:
                lender.close()
            _remove(self._folder)
            self._closed = True

    def __enter__(self) -> SharedWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _remove(folder: Path) -> None:
    """A folder of files, as far as it can be had. A Ctrl-C leaves something for a second call, where shutil.rmtree may raise OSError."""
    for name in os.listdir(folder) if folder.exists() else ():
        try:
            os.unlink(folder / name)
        except OSError:
            continue
    try:
        os.rmdir(folder)
    except OSError:
        return


def _arrays(
    source: Mapping[str, Any] | Iterable[tuple[str, Any]], lend: bool
) -> tuple[list[tuple[str, NDArray[Any]]], list[tuple[str, Any]]]:
    """What goes into the file, and with `lend` what stays on GPUs. A DTensor is gathered."""
    arrays: dict[str, NDArray[Any]] = {}
    lent: dict[str, Any] = {}
    seen: set[str] = set()
    for name, tensor in source.items() if isinstance(source, Mapping) else source:
        check_new_name(name, seen)
        whole = tensor.full_tensor() if lend and callable(getattr(tensor, "full_tensor", None)) else tensor
        if lend and is_on_gpu(whole):
            lent[name] = whole
        else:
            arrays[name] = as_array(name, whole)
    return list(arrays.items()), list(lent.items())


class SharedReader(Mapping[str, Any], LentSource):
    """The generator's side: the tensors of the version that `refresh` found, by name, as views of the shared memory. Those that are lent
    can be read by `Generator.sync_weights`, or inside of `lent()`. Where ranks are processes and each has a reader, each reads what it
    needs where it is; otherwise the ranks get what they want by way of a reader's host.

    Each tensor's bytes are summed and compared when it is first taken (verify=False leaves that out): a version that was mapped
    is not written to again. `close` it, or leave its `with` block, when no more versions are wanted.
    """

    def __init__(self, address: str, *, verify: bool = True):
        folder, separator, self._nonce = address.rpartition(":") if isinstance(address, str) and "\0" not in address else ("", "", "")
        if not separator or not self._nonce:
            raise AuthError(f"{shown(address)} is not an address of a SharedWriter")
        self._path = Path(folder) / CURRENT
        self._verify = verify
        self._verified: set[str] = set()  # names of this version
        self._block: NDArray[np.uint8] | None = None
        self._entries: dict[str, Entry] = {}
        self._loan: Loan | None = None
        self._file: tuple[int, int] | None = None  # which `current` was
        self._lease: Lease | None = None
        self._borrowed: Borrowed | None = None
        self._read = False  # and given back
        self.version: int | None = None

    def refresh(self) -> int:
        """Maps the current version and returns its number. NotSyncedError when nothing has been published yet."""
        self._require_unread()
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise NotSyncedError(f"{self._path.parent} has no published version") from error
        except OSError as error:
            raise AuthError(f"{self._path}: {error.strerror}") from error
        try:
            block, header, start = self._map(descriptor)
            file = _identity(os.fstat(descriptor))
        finally:
            os.close(descriptor)
        entries, values = parse(header, block.size - start)
        if not secrets.compare_digest(str(values.get("nonce")).encode(errors="replace"), self._nonce.encode(errors="replace")):
            raise AuthError(f"{self._path} was not written by the store of this address")
        version = values.get("version")
        if isinstance(version, bool) or not isinstance(version, int) or not 0 <= version <= MAX_VERSION:
            raise FormatError(f"{self._path}: version {version!r:.80} is not an integer in [0, {MAX_VERSION}]")
        by_name = {entry.name: entry for entry in entries}
        loan = parse_loan(values["lent"]) if "lent" in values else None
        if both := by_name.keys() & (loan.tensors if loan else {}):
            raise FormatError(f"{self._path}: {min(both)} is there twice")
        if len(by_name) != len(entries):
            raise FormatError(f"{self._path}: {len(entries)} tensors have {len(by_name)} names")
        self._block, self._entries, self._verified, self.version = block[start:], by_name, set(), version
        self._loan, self._file, self._read = loan, file, False
        return version

    @contextmanager
    def lent(self) -> Iterator[Callable[[], None]]:
        """In the block the tensors on GPUs are open; `sync_weights` does so itself. Gives what is to be called when all that was wanted
        has been read (by a GPU too: it was waited for): it raises if they were not the version's to the end. A block that ends well
        gives them back for good.

        RankLostError when the trainer has ended or closed its store, StateError when it has taken the version back, when this reader
        has given it back, or when this is the trainer itself; ConfigError when a GPU is not visible here; DeviceError in CUDA's words.
        """
        if self._loan is None:
            yield lambda: None
            return
        if self._read or self._borrowed is not None:
            raise StateError(f"version {self.version} {'was given back' if self._read else 'is being read'}; refresh() finds the next one")
        if self._loan.process == this_process():
            raise StateError("the weights are lent by this very process: pass the tensors themselves")
        self._still_lent()
        if self._lease is None:
            self._lease = Lease(self._path.parent)
        assert self.version is not None
        self._borrowed = self._borrow(self._loan)
        try:
            yield self._still_lent
        finally:
            borrowed, self._borrowed = self._borrowed, None
            borrowed.close()
        self._lease.read(self.version)
        self._read = True

    def _borrow(self, loan: Loan) -> Borrowed:
        try:
            return Borrowed(loan)
        except Error:
            self._still_lent()  # what has no lender cannot be opened: that is the reason then
            raise

    def _still_lent(self) -> None:
        if not (alive := self._path.parent / ALIVE).exists() or is_free(alive):
            raise RankLostError(f"the trainer that lends version {self.version} has ended, or closed {self._path.parent}")
        try:
            same = _identity(os.stat(self._path, follow_symlinks=False)) == self._file
        except FileNotFoundError:
            same = False
        if not same:
            raise StateError(f"version {self.version} was taken back by its trainer")

    def close(self) -> None:
        """The trainer does not count on this reader any more. StateError inside of `lent()`."""
        self._require_unread()
        if self._lease is not None:
            self._lease.close()
            self._lease = None
        self._block, self._entries, self._loan, self.version = None, {}, None, None

    def _require_unread(self) -> None:
        if self._borrowed is not None:
            raise StateError(f"version {self.version} is being read")

    def __enter__(self) -> SharedReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _map(self, descriptor: int) -> tuple[NDArray[np.uint8], bytes, int]:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) != 0o600 or not stat.S_ISREG(status.st_mode):
            raise AuthError(f"{self._path} has owner {status.st_uid} and mode {stat.filemode(status.st_mode)}, wanted our own with 0600")
        if status.st_size < FIXED.size:
            raise FormatError(f"{self._path} has {status.st_size} bytes")
        memory = mmap.mmap(descriptor, status.st_size, prot=mmap.PROT_READ)
        magic, length = FIXED.unpack_from(memory)
        start = (FIXED.size + length + ALIGN - 1) // ALIGN * ALIGN
        if magic != MAGIC or length > MAX_HEADER or start > status.st_size:
            raise FormatError(f"{self._path} is no weight store: magic {magic!r}, header of {length} in {status.st_size} bytes")
        return np.frombuffer(memory, np.uint8), memory[FIXED.size : FIXED.size + length], start

    def __getitem__(self, name: str) -> NDArray[Any] | _core.DeviceArray:
        if self._loan is not None and name in self._loan.tensors:
            if self._borrowed is None:
                raise StateError(f"{name} is lent: it is open in sync_weights, or inside of `with reader.lent()`")
            return self._borrowed.array(name)
        self._require_version()
        entry = self._entries[name]
        assert self._block is not None
        array = take(entry, self._block, verify=self._verify and name not in self._verified)
        self._verified.add(name)
        return array

    def __iter__(self) -> Iterator[str]:
        self._require_version()
        return iter((*self._entries, *(self._loan.tensors if self._loan else ())))

    def _require_version(self) -> None:
        if self.version is None:
            raise StateError(f"the reader of {self._path.parent} has no version: refresh() maps the current one")

    def __len__(self) -> int:
        self._require_version()
        return len(self._entries) + (len(self._loan.tensors) if self._loan else 0)


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino

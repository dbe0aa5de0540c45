"""Weights through shared memory, between a trainer and generators that are processes of one machine and one user.

    trainer     writer = SharedWriter()                 generator   reader = SharedReader(address)
                send writer.address once                            version = reader.refresh()
                writer.publish(state_dict, version)                 gen.sync_weights(reader, version=version)

A store is a folder with a random name and mode 0700 that holds one file, `current`, of mode 0600:

    magic | bytes of the header | JSON header: nonce, version, tensors | the tensors, each at a multiple of 64 bytes

A version is written to a file of its own and renamed, so a reader finds a whole one or the one before, and one that it has
mapped stays as it was. The address carries the nonce: a file left by somebody else, or made to look like ours, is AuthError.
"""

from __future__ import annotations

import mmap
import os
import secrets
import shutil
import stat
import struct
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollmesh.errors import AuthError, CapacityError, DuplicateKeyError, FormatError, LimitError, NotSyncedError, StateError, VersionError
from rollmesh.show import shown
from rollmesh.sources.arrays import ALIGN, MAX_HEADER, Entry, as_array, bytes_of, check_name, describe, lay_out, parse, take

MAGIC = b"rollmesh"
MAX_VERSION = 2**63 - 1
FIXED = struct.Struct("<8sQ")  # magic, bytes of the header
CURRENT = "current"


class SharedWriter:
    """The trainer's side. `close` (or leaving a `with` block) removes the store; readers keep what they have mapped."""

    def __init__(self, folder: str | Path = "/dev/shm"):
        self._folder = Path(tempfile.mkdtemp(prefix="rollmesh-", dir=folder))
        self._nonce = secrets.token_hex(16)
        self.version: int | None = None
        self._closed = False

    @property
    def address(self) -> str:
        """What a reader needs. Whoever has it can read the weights if the file system lets them."""
        return f"{self._folder}:{self._nonce}"

    def publish(self, source: Mapping[str, Any] | Iterable[tuple[str, Any]], version: int | None = None) -> int:
        """Copies the tensors into a new version and makes it the current one. Returns its number.

        Takes NumPy arrays and torch tensors on any device. VersionError when the number does not increase or is no integer
        below 2^63; DuplicateKeyError for a name that comes twice; LimitError for one that is no str or too long; CapacityError
        when the memory is not there. On any error the version before stays current.
        """
        if self._closed:
            raise StateError("the store is closed")
        last = -1 if self.version is None else self.version
        version = last + 1 if version is None else version
        if isinstance(version, bool) or not isinstance(version, (int, np.integer)) or version > MAX_VERSION:
            raise VersionError(f"version {version!r:.80} is not an integer in [0, {MAX_VERSION}]")
        version = int(version)
        if version <= last:
            raise VersionError(f"version {version} does not exceed {last}")
        arrays = _arrays(source)
        entries, size = lay_out(arrays)
        header = describe(entries, nonce=self._nonce, version=version)
        if len(header) > MAX_HEADER:
            raise LimitError(f"the names and shapes of {len(entries)} weights take {len(header)} bytes; the limit is {MAX_HEADER}")
        start = (FIXED.size + len(header) + ALIGN - 1) // ALIGN * ALIGN
        descriptor, name = tempfile.mkstemp(dir=self._folder)  # mode 0600
        try:
            self._write(descriptor, header, start, start + size, arrays, entries)
            os.rename(name, self._folder / CURRENT)
        except BaseException:
            os.unlink(name)
            raise
        finally:
            os.close(descriptor)
        self.version = version
        return version

    @staticmethod
    def _write(descriptor: int, header: bytes, start: int, size: int, arrays: list[tuple[str, NDArray[Any]]], entries: list[Entry]) -> None:
        try:
            os.posix_fallocate(descriptor, 0, max(size, 1))  # now, and not as a SIGBUS in the middle
        except OSError as error:
            raise CapacityError(f"shared memory has no room for {size} bytes of weights: {error.strerror}") from error
        with mmap.mmap(descriptor, max(size, 1)) as memory:
            block = np.frombuffer(memory, np.uint8)
            memory[: FIXED.size + len(header)] = FIXED.pack(MAGIC, len(header)) + header
            for (_, array), entry in zip(arrays, entries, strict=True):
                block[start + entry.offset : start + entry.offset + entry.bytes] = bytes_of(array)
            del block

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> SharedWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _arrays(source: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> list[tuple[str, NDArray[Any]]]:
    arrays: dict[str, NDArray[Any]] = {}
    for name, tensor in source.items() if isinstance(source, Mapping) else source:
        check_name(name)
        if name in arrays:
            raise DuplicateKeyError(f"{name} comes twice")
        arrays[name] = as_array(name, tensor)
    return list(arrays.items())


class SharedReader(Mapping[str, NDArray[Any]]):
    """The generator's side: the tensors of the version that `refresh` found, by name, as views of the shared memory.

    Each tensor's bytes are summed and compared when it is first taken (verify=False leaves that out): a version that was mapped
    is not written to again.
    """

    def __init__(self, address: str, *, verify: bool = True):
        folder, separator, self._nonce = address.rpartition(":")
        if not separator or not self._nonce:
            raise AuthError(f"{shown(address)} is not an address of a SharedWriter")
        self._path = Path(folder) / CURRENT
        self._verify = verify
        self._verified: set[str] = set()  # names of this version
        self._block: NDArray[np.uint8] | None = None
        self._entries: dict[str, Entry] = {}
        self.version: int | None = None

    def refresh(self) -> int:
        """Maps the current version and returns its number. NotSyncedError when nothing has been published yet."""
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise NotSyncedError(f"{self._path.parent} has no published version") from error
        except OSError as error:
            raise AuthError(f"{self._path}: {error.strerror}") from error
        try:
            block, header, start = self._map(descriptor)
        finally:
            os.close(descriptor)
        entries, values = parse(header, block.size - start)
        if not secrets.compare_digest(str(values.get("nonce")), self._nonce):
            raise AuthError(f"{self._path} was not written by the store of this address")
        version = values.get("version")
        if isinstance(version, bool) or not isinstance(version, int) or not 0 <= version <= MAX_VERSION:
            raise FormatError(f"{self._path}: version {version!r:.80} is not an integer in [0, {MAX_VERSION}]")
        by_name = {entry.name: entry for entry in entries}
        if len(by_name) != len(entries):
            raise FormatError(f"{self._path}: {len(entries)} tensors have {len(by_name)} names")
        self._block, self._entries, self._verified, self.version = block[start:], by_name, set(), version
        return version

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

    def __getitem__(self, name: str) -> NDArray[Any]:
        entry = self._entries[name]
        assert self._block is not None
        array = take(entry, self._block, verify=self._verify and name not in self._verified)
        self._verified.add(name)
        return array

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

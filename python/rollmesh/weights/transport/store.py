"""Weights of a trainer for generators in other processes of the machine and the user.

    trainer     writer = SharedWriter()                 generator   reader = SharedReader(address)
                send writer.address once                            version = reader.refresh()
                writer.publish(state_dict, version)                 gen.sync_weights(reader, version=version)

A version is a segment (segment.py) that is filled and then renamed to the path in the address. So a reader finds a whole version or the
one before, and one that it has mapped stays as it was. Tensors on GPUs are copied into it by way of the host, or lent (loans.py):

    trainer     writer.publish(state_dict, version, lend_to=1)
                writer.wait_until_read(timeout=60)              before a tensor is written to again
"""

from __future__ import annotations

import os
import secrets
import time
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from rollmesh.errors import AuthError, DeadlineError, FormatError, NotSyncedError, RankLostError, StateError, VersionError
from rollmesh.runtime.arguments import deadline_of, integer
from rollmesh.runtime.messages import shown
from rollmesh.weights.transport.loans import Held, Lender, ReceivedTensors
from rollmesh.weights.transport.manifest import check_new_name, describe, fill, lay_out, parse
from rollmesh.weights.transport.segment import FOLDER, MAX_READERS, PREFIX, MappedSegment, Segment
from rollmesh.weights.transport.tensors import as_array

MAX_VERSION = 2**63 - 1
POLL_SECONDS = 0.002
FIRST_LOAN = 1  # of a segment


class SharedWriter:
    """The trainer's side. `close`, leaving a `with` block, or the end of the process removes the current version; readers keep what they
    have mapped. What a killed process leaves, the next writer of the folder removes."""

    def __init__(self, folder: str | Path = FOLDER):
        self._path = Path(folder).resolve(strict=True) / f"{PREFIX}{secrets.token_hex(16)}"
        self._end = weakref.finalize(self, _remove, self._path, os.getpid())
        self._nonce = secrets.token_hex(16)
        self._lender = Lender()
        self._segment: Segment | None = None  # of the current version
        self._kept: list[Held] = []
        self._lent_to = 0  # readers of the version that is lent; 0: none is
        self.version: int | None = None
        self._closed = False

    @property
    def address(self) -> str:
        """What a reader needs. Whoever has it can read the weights if the file system lets them."""
        return f"{self._path}:{self._nonce}"

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
        version = self._next(version)
        take = self._lender.take if lend_to else as_array
        seen: set[str] = set()
        arrays, held = [], []
        for name, tensor in source.items() if isinstance(source, Mapping) else source:
            check_new_name(name, seen)
            taken = take(name, tensor)
            if isinstance(taken, Held):
                held.append(taken)
            else:
                arrays.append((name, taken))
        entries, size = lay_out(arrays)
        lent = self._lender.describe(held, FIRST_LOAN) if held else None
        segment = Segment(size, self._path.parent, nonce=self._nonce, manifest=describe(entries, lent, version=version))
        try:
            assert segment.data is not None
            fill(segment.data, entries, arrays)
            segment.unmap()
            if held:
                segment.lend()
            self._make_current(segment, version, held, lend_to if held else 0)
        except BaseException:
            if self._segment is not segment:
                segment.close()
            raise
        return version

    def _next(self, version: Any) -> int:
        last = -1 if self.version is None else self.version
        version = last + 1 if version is None else version
        if isinstance(version, bool) or not isinstance(version, (int, np.integer)) or version > MAX_VERSION:
            raise VersionError(f"version {shown(version)} is not an integer in [0, {MAX_VERSION}]")
        if version <= last:
            raise VersionError(f"version {version} does not exceed {last}")
        return int(version)

    def _make_current(self, segment: Segment, version: int, held: list[Held], readers: int) -> None:
        before, new = (self._segment, self.version, self._kept, self._lent_to), segment.path
        try:
            self._segment, self.version, self._kept, self._lent_to = segment, version, held, readers
            segment.rename(self._path)  # a Ctrl-C comes before both lines or after both
        except BaseException:
            if os.path.lexists(new):  # it is not current
                self._segment, self.version, self._kept, self._lent_to = before
            raise
        finally:
            if self._segment is segment and before[0] is not None:
                before[0].close()

    def wait_until_read(self, timeout: float | None = 600.0) -> None:
        """Until every reader of the version that is lent has said that it looks at it no more; at once where none is. Afterwards the
        tensors are the trainer's again, and no version is current before the next `publish`.

        DeadlineError when `timeout` seconds (None: without end) have not been enough, RankLostError when a reader has ended before it
        was through (told once of each): the version stays lent, for another wait or for `take_back`. One that ended before it had begun
        to read is not missed, since another may come in its place: a timeout ends the wait for it, and says how many are reading.
        """
        deadline = deadline_of(timeout)
        while self._lent_to:
            assert self._segment is not None
            read = self._segment.num_read()
            told = f"version {self.version} was read by {read} of {self._lent_to} readers"
            if read >= self._lent_to:
                self.take_back()
            elif self._segment.lost_reader():
                raise RankLostError(f"{told}, and one of the others has ended")
            elif deadline is not None and time.monotonic() >= deadline:
                raise DeadlineError(f"{told} within the timeout; {self._segment.num_reading()} others have begun")
            else:
                time.sleep(POLL_SECONDS)

    def take_back(self) -> None:
        """What is lent is no longer current; whoever reads it just now fails before it uses it, and must have given it back before its
        memory goes. Nothing where nothing is lent."""
        if self._lent_to:
            assert self._segment is not None
            self._path.unlink(missing_ok=True)
            self._segment.take_back(0)
            self._kept, self._lent_to = [], 0

    def close(self) -> None:
        if not self._closed:
            self._path.unlink(missing_ok=True)
            if self._segment is not None:
                self._segment.close()
            self._kept, self._lent_to, self._closed = [], 0, True
            self._end.detach()

    def __enter__(self) -> SharedWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _remove(path: Path, process: int) -> None:
    if os.getpid() == process:  # and not a forked child
        path.unlink(missing_ok=True)


class SharedReader(ReceivedTensors):
    """The generator's side: the tensors of the version that `refresh` found, by name, as views of the shared memory. Those that are lent
    can be read by `Generator.sync_weights`, or inside of `lent()`. Where ranks are processes and each has a reader, each reads what it
    needs where it is; otherwise the ranks get what they want by way of a reader's host.

    Each tensor's bytes are summed and compared when it is first taken (verify=False leaves that out): a version that was mapped
    is not written to again. `close` it, or leave its `with` block, when no more versions are wanted.
    """

    def __init__(self, address: str, *, verify: bool = True):
        path, separator, self._nonce = address.rpartition(":") if isinstance(address, str) and "\0" not in address else ("", "", "")
        if not separator or not self._nonce:
            raise AuthError(f"{shown(address)} is not an address of a SharedWriter")
        self._path = Path(path)
        self.version: int | None = None
        super().__init__(verify=verify)
        self.receive(None, None, None, str(path))

    def refresh(self) -> int:
        """Maps the current version, unless it is mapped already, and returns its number. NotSyncedError when nothing has been published
        yet."""
        self._require_unread()
        before = self._segment
        segment = before if before is not None and before.is_current() else self._map()
        try:
            manifest = parse(segment.manifest, segment.size)
            version = manifest.values.get("version")
            if isinstance(version, bool) or not isinstance(version, int) or not 0 <= version <= MAX_VERSION:
                raise FormatError(f"{self._path}: version {version!r:.80} is not an integer in [0, {MAX_VERSION}]")
            block = segment.block(segment.size)
        except BaseException:
            if segment is not before:
                segment.close()
            raise
        self.receive(manifest, block, segment, f"version {version}")
        self.version = version
        if before is not None and before is not segment:
            before.close()
        return version

    def _map(self) -> MappedSegment:
        try:
            return MappedSegment(self._path, self._nonce)
        except FileNotFoundError as error:
            raise NotSyncedError(f"{self._path} has no published version") from error

    def close(self) -> None:
        """The trainer does not count on this reader any more. StateError inside of `lent()`."""
        self._require_unread()
        if self._segment is not None:
            self._segment.close()
        self.receive(None, None, None, str(self._path))
        self.version = None

    def _require_unread(self) -> None:
        if self._borrowed is not None:
            raise StateError(f"version {self.version} is being read")

    def __enter__(self) -> SharedReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

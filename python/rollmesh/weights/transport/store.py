"""Weights of a trainer for generators in other processes of the same machine and user.

    trainer     writer = SharedWriter()                 generator   reader = SharedReader(address)
                send writer.address once                            version = reader.refresh()
                writer.publish(state_dict, version)                 gen.sync_weights(reader,
                                                                    version=version)

A version is a segment (segment.py) that is filled and then renamed to the path in the address. A
reader therefore finds a complete version, and a mapped version never changes. Tensors on GPUs are
copied through the host, or lent (loans.py):

    trainer     writer.publish(state_dict, version, lend_to=1)
                writer.wait_until_read(timeout=60)              before writing to a tensor again
"""

from __future__ import annotations

import os
import secrets
import time
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rollmesh.errors import (
    AuthError,
    DeadlineError,
    FormatError,
    NotSyncedError,
    RankLostError,
    StateError,
)
from rollmesh.runtime.arguments import deadline_of, existing_folder, integer, integer_of, is_path
from rollmesh.runtime.messages import shown
from rollmesh.weights.transport.loans import Lender, OwnedTensor, ReceivedTensors
from rollmesh.weights.transport.manifest import (
    MAX_VERSION,
    NO_SUM,
    check_new_name,
    check_version,
    describe,
    fill,
    lay_out,
    parse,
)
from rollmesh.weights.transport.segment import FOLDER, MAX_READERS, PREFIX, MappedSegment, Segment
from rollmesh.weights.transport.tensors import (
    as_array,
    check_source,
    entries_of,
    holds_tensors,
    own_array,
)

POLL_SECONDS = 0.002
FIRST_LOAN = 1  # number of the first loan of a segment


class _Published(NamedTuple):
    """A version of a SharedWriter."""

    segment: Segment
    version: int
    kept: list[OwnedTensor]
    lent_to: int  # number of readers of the loan; 0: it is not lent


class SharedWriter:
    """The trainer's side. `close`, the end of a `with` block, or the end of the process removes the
    current version; readers keep the versions that they have mapped. If the process is killed, the
    next writer in the folder removes its file."""

    def __init__(self, folder: str | Path = FOLDER):
        self._path = existing_folder(folder).resolve() / f"{PREFIX}{secrets.token_hex(16)}"
        self._end = weakref.finalize(self, _remove, self._path, os.getpid())
        self._nonce = secrets.token_hex(16)
        self._lender = Lender()
        self._now: _Published | None = None  # replaced in one assignment, because of Ctrl-C
        self._closed, self._process = False, os.getpid()

    @property
    def address(self) -> str:
        """Address for SharedReader. Any process that has the address and may open the file can read
        the weights."""
        return f"{self._path}:{self._nonce}"

    @property
    def version(self) -> int | None:
        """Number of the version published last."""
        return None if self._now is None else self._now.version

    def publish(
        self,
        source: Mapping[str, Any] | Iterable[tuple[str, Any]],
        version: int | None = None,
        *,
        lend_to: int = 0,
    ) -> int:
        """Copies the tensors into a new version and makes it the current one. Returns its number.

        The tensors are NumPy arrays or torch tensors on any device. Each tensor of an iterator, or
        of a mapping that is not a dict, is copied before the next one is read; this takes host
        memory for a second copy of the set.

        lend_to: number of readers that will read tensors on GPUs (of any library, by DLPack) in
        place. This call waits for kernels that still write these tensors. They are kept alive and
        must not change until `wait_until_read` or `take_back` returns; publishing before that
        raises StateError. If all tensors are on the CPU, they are copied as usual.

        Raises VersionError if the number does not increase or is not an integer below 2^63;
        DuplicateKeyError for a repeated name; LimitError for a name that is not a str, empty or too
        long; CapacityError if memory is short; with lend_to, UnsupportedTensorError for GPU memory
        that other processes cannot open, and ConfigError if this build has no CUDA library. After
        any error the current version stays.
        """
        if self._closed:
            raise StateError("publish: expected an open writer, got one that was closed")
        if os.getpid() != self._process:
            raise StateError(
                f"expected a writer of this process, got that of process {self._process}; "
                "a forked child has to make its own"
            )
        if self._now is not None and self._now.lent_to:
            raise StateError(
                f"publish: expected no version that is lent, got version {self.version}, which is "
                f"lent to {self._now.lent_to} readers; call wait_until_read() or take_back() first"
            )
        lend_to = integer("lend_to", lend_to, 0, MAX_READERS)
        check_source(source)
        version = check_version(version, self.version)
        copy = not holds_tensors(source)
        as_host = own_array if copy else as_array
        seen: set[str] = set()
        arrays, held = [], []
        for name, tensor in entries_of(source):
            check_new_name(name, seen)
            taken = self._lender.take(name, tensor, copy) if lend_to else as_host(name, tensor)
            if isinstance(taken, OwnedTensor):
                held.append(taken)
            else:
                arrays.append((name, taken))
        entries, size = lay_out(arrays)
        lent = self._lender.describe(held, FIRST_LOAN) if held else None
        unknown = describe([entry._replace(sum=NO_SUM) for entry in entries], lent, version=version)
        segment = Segment(size, self._path.parent, nonce=self._nonce, manifest=unknown)
        try:
            assert segment.data is not None
            entries = fill(segment.data, entries, arrays, sums=True)
            segment.describe(describe(entries, lent, version=version))
            segment.unmap()
            if held:
                segment.lend()
            self._make_current(_Published(segment, version, held, lend_to if held else 0))
        except BaseException:
            if self._now is None or self._now.segment is not segment:
                segment.close()
            raise
        return version

    def _make_current(self, new: _Published) -> None:
        before, path = self._now, new.segment.path
        try:
            self._now = new
            new.segment.rename(self._path)  # a Ctrl-C cannot interrupt between these two lines
        except BaseException:
            if os.path.lexists(path):  # the file was not renamed
                self._now = before
            raise
        finally:
            if self._now is new and before is not None:
                before.segment.close()

    def wait_until_read(self, timeout: float | None = 600.0) -> None:
        """Waits until all readers have read the lent version. Returns at once if the current
        version is not lent. Afterwards the tensors may change again, and there is no current
        version until the next `publish`.

        Raises DeadlineError after `timeout` seconds (None: no limit), and RankLostError if a
        reader's process ended while it was reading (once for each reader). The version then stays
        lent: wait again, or call `take_back`. A reader that ends before it begins to read is not
        noticed, since another reader may replace it; the timeout ends that wait.
        """
        deadline = deadline_of(timeout)
        while (now := self._now) is not None and now.lent_to:
            read = now.segment.num_read()
            told = f"version {now.version} was read by {read} of {now.lent_to} readers"
            if read >= now.lent_to:
                self.take_back()
            elif now.segment.lost_reader():
                raise RankLostError(f"{told}, and one of the others has ended")
            elif deadline is not None and time.monotonic() >= deadline:
                raise DeadlineError(
                    f"{told} within the timeout; {now.segment.num_reading()} others have begun"
                )
            else:
                time.sleep(POLL_SECONDS)

    def take_back(self) -> None:
        """Ends the loan: the version is no longer current, and a reader that is reading it fails
        before its commit. The memory must not be freed before that reader has closed the loan. Does
        nothing if the current version is not lent."""
        if self._now is not None and self._now.lent_to:
            _remove(self._path, self._process)
            self._now.segment.take_back(0)
            self._now = self._now._replace(kept=[], lent_to=0)

    def close(self) -> None:
        if not self._closed:
            _remove(self._path, self._process)
            if self._now is not None:
                self._now.segment.close()
                self._now = self._now._replace(kept=[], lent_to=0)
            self._closed = True
            self._end.detach()

    def __enter__(self) -> SharedWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _remove(path: Path, process: int) -> None:
    if os.getpid() == process:  # False in a forked child
        path.unlink(missing_ok=True)


class SharedReader(ReceivedTensors):
    """The generator's side: maps names to the tensors of the version that `refresh` mapped, as
    views of shared memory. Lent tensors can be read by `Generator.sync_weights`, or within
    `lent()`. If ranks are processes, give each rank a reader, so that it reads its shards directly;
    ranks without a reader get their shards from a rank with one, through that rank's host memory.

    The checksum of each tensor is compared at its first access (verify=False: never). Call `close`
    at the end, or use the reader in a `with` block.
    """

    def __init__(self, address: str, *, verify: bool = True):
        path, separator, self._nonce = (
            address.rpartition(":")
            if isinstance(address, str) and is_path(address)
            else ("", "", "")
        )
        if not separator or not self._nonce:
            raise AuthError(f"address: expected a SharedWriter's, got {shown(address)}")
        self._path = Path(path)
        super().__init__(verify=verify)
        self.receive(None, None, None, str(path))

    @property
    def version(self) -> int | None:
        """Number of the mapped version; None before the first `refresh` and after `close`."""
        return None if self._manifest is None else int(self._manifest.values["version"])

    def refresh(self) -> int:
        """Maps the current version, unless it is already mapped, and returns its number. Raises
        NotSyncedError if there is no current version, and StateError while a sync reads the mapped
        one."""
        with self._guard:
            self._require_unread(f"version {self.version}")
            return self._refresh()

    def _refresh(self) -> int:
        before = self._segment
        segment = before if before is not None and before.is_current() else self._map()
        try:
            manifest = parse(segment.manifest, segment.size)
            name = f"{self._path}: version"
            version = integer_of(FormatError, name, manifest.values.get("version"), 0, MAX_VERSION)
            data = segment.tensors(segment.size)
        except BaseException:
            if segment is not before:
                segment.close()
            raise
        self.receive(manifest, data, segment, f"version {version}")
        if before is not None and before is not segment:
            before.close()
        return version

    def _map(self) -> MappedSegment:
        try:
            return MappedSegment(self._path, self._nonce)
        except FileNotFoundError as error:
            raise NotSyncedError(f"{self._path}: expected a published version, got none") from error

    def close(self) -> None:
        """Closes this reader. Raises StateError within `lent()`."""
        with self._guard:
            self._require_unread(f"version {self.version}")
            segment = self._segment
            self.receive(None, None, None, str(self._path))
            if segment is not None:
                segment.close()

    def __enter__(self) -> SharedReader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

"""Versions of weights as differences: the changes of an optimizer step, for generators on other
machines than their trainer.

    trainer     encoder = DeltaEncoder()                      generator   decoder = DeltaDecoder()
                message = encoder.encode(state_dict, 7)                   version =
                                                                          decoder.apply(message)
                … send the bytes …                                        gen.sync_weights(decoder,
                                                                          version=version)

A message is a whole set, or the changes against the previous version. The changes of a tensor are
the changed places with old XOR new or, if many places changed, XOR for all places. Both sides keep
one copy of the last version in host memory. `apply` takes a whole message or raises and changes
nothing: it checks the message first and the checksum of each tensor afterwards. XOR undoes itself,
so the undo needs no second copy.

    magic [8] · size of the header [8] · blake2b of the header [8] · header, JSON · payload
    header   {run, base (null: whole), version, bytes, sum (of the payload), tensors: [[name, dtype,
             shape, kind, changed, sizes, sum], …]}
    kind     "same": unchanged; "places": gaps (uint32) and XOR of the changed words; "words": XOR
             of all words
    payload  the streams of each tensor: byte planes (all low bytes first), each stream a frame of
             zstd

Alternatives measured by benchmarks/deltas.py, new values instead of XOR and streams without byte
planes, take more bytes.
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollmesh import _core
from rollmesh.errors import (
    BaseVersionError,
    CapacityError,
    ConfigError,
    FormatError,
    LimitError,
    NotSyncedError,
)
from rollmesh.runtime.arguments import thread_count
from rollmesh.runtime.messages import byte_text, shown
from rollmesh.runtime.threads import in_threads
from rollmesh.weights.transport.loans import LentSource
from rollmesh.weights.transport.manifest import (
    MAX_VERSION,
    Entry,
    bytes_needed,
    check_new_name,
    check_version,
)
from rollmesh.weights.transport.tensors import (
    DTYPES,
    bytes_of,
    check_source,
    checksum,
    dtype_name,
    entries_of,
    own_array,
)

MAGIC = b"rmdelta2"
START = 24  # bytes before the header
MAX_HEADER = 1 << 28
LEVEL = 1  # of zstd
DENSE_SHARE = 8  # all words are sent if at least one in this many has changed
WORDS: dict[int, Any] = {2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}
GAP = np.dtype("<u4")
MAX_GAP = 2**32 - 1
Array = NDArray[Any]


def _zstd() -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise ConfigError(
            "deltas: expected the library zstandard, which is not installed: pip install "
            "'rollmesh[delta]'"
        ) from error
    return zstandard


def _words(array: Array) -> Array:
    return array.reshape(-1).view(WORDS[array.dtype.itemsize])


def _planes(words: Array) -> bytes:
    """Returns all lowest bytes, then all second ones, and so on. Most high bytes are equal, and
    zstd compresses a run of equal bytes to almost nothing."""
    return np.ascontiguousarray(words.view(np.uint8).reshape(-1, words.dtype.itemsize).T).tobytes()


def _from_planes(data: bytes, dtype: np.dtype[Any], count: int) -> Array:
    planes = np.frombuffer(data, np.uint8).reshape(dtype.itemsize, count)
    return np.array(planes.T, order="C").reshape(-1).view(dtype)  # a writable copy


def _header_sum(header: bytes) -> bytes:
    return hashlib.blake2b(header, digest_size=8).digest()


# ------------------------------------------------------------------------------------ the trainer
class Kept(NamedTuple):
    """The copy of a version that a side keeps."""

    arrays: dict[str, Array]  # owned
    sums: dict[str, str]
    run: str | None = None  # id of its DeltaEncoder
    version: int | None = None
    base: int | None = None  # version that its message is a delta against; None: a whole set


_NOTHING = Kept({}, {})


class DeltaEncoder:
    """The trainer's side. Keeps a copy of the last version, in its dtypes, in host memory."""

    def __init__(self, threads: int | None = None):
        """threads: number of threads that compare and compress; None: one for each core that this
        process may use. Raises ConfigError if zstandard is not installed."""
        self._compressor, self._threads = _zstd().ZstdCompressor, thread_count(threads)
        self.run = secrets.token_hex(16)
        # Replaced in one assignment, so that a Ctrl-C cannot leave a mixture of two versions.
        self.last = _NOTHING

    @property
    def version(self) -> int | None:
        """Number of the version encoded last."""
        return self.last.version

    @property
    def base(self) -> int | None:
        """Base of the last message; None if that message is a whole set."""
        return self.last.base

    def encode(
        self,
        source: Mapping[str, Any] | Iterable[tuple[str, Any]],
        version: int,
        *,
        whole: bool = False,
    ) -> bytes:
        """Returns the message of a version: its changes against the version encoded last. The
        message is a whole set for the first version, with whole=True, and if names, shapes or
        dtypes have changed. Tensors are torch tensors (on any device) or NumPy arrays, and keep
        their dtypes. Each tensor is copied before the next one is read.

        Raises VersionError unless the number exceeds the last one, and DuplicateKeyError,
        UnsupportedTensorError, DTypeError or LimitError for a wrong entry. After any error,
        including an exception of the source, the encoder keeps its last version.
        """
        version = check_version(version, self.version)
        check_source(source)
        new: dict[str, Array] = {}
        seen: set[str] = set()
        for name, tensor in entries_of(source):
            check_new_name(name, seen)
            new[name] = own_array(name, tensor)
        is_whole = whole or self.version is None or _forms(new) != _forms(self.last.arrays)
        message, self.last = self._message(new, version, None if is_whole else self.version)
        return message

    def whole(self) -> bytes:
        """Returns the version encoded last as a whole set, for a receiver that does not have the
        base of its delta. Raises NotSyncedError before the first version."""
        if self.version is None:
            raise NotSyncedError("whole: expected an encoded version, got none; call encode first")
        return self._message(self.last.arrays, self.version, None)[0]

    def _message(self, new: dict[str, Array], version: int, base: int | None) -> tuple[bytes, Kept]:
        """Makes the message and the stored copy of a version. base None: a whole set. The copy
        shares unchanged tensors with its base."""
        old = {} if base is None else self.last.arrays

        def changed(name: str) -> tuple[str, int, list[bytes], str]:
            return self._changes(name, new[name], old.get(name))

        changes = in_threads(changed, new, self._threads)
        rows, arrays, sums = [], dict[str, Array](), dict[str, str]()
        for (name, array), (kind, count, parts, total) in zip(new.items(), changes, strict=True):
            arrays[name], sums[name] = old[name] if kind == "same" else array, total
            sizes = [len(part) for part in parts]
            rows.append([name, dtype_name(array), list(array.shape), kind, count, sizes, total])
        payload = b"".join(part for _, _, parts, _ in changes for part in parts)
        values = {"run": self.run, "base": base, "version": version, "bytes": len(payload)}
        header = json.dumps(
            {**values, "sum": checksum(np.frombuffer(payload, np.uint8)), "tensors": rows}
        ).encode()
        if len(header) > MAX_HEADER:
            raise LimitError(
                f"a delta's header: expected at most {MAX_HEADER} bytes for {len(rows)} tensors, "
                f"got {len(header)}; send fewer tensors, or shorter names"
            )
        start = MAGIC + len(header).to_bytes(8, "little") + _header_sum(header)
        return b"".join((start, header, payload)), Kept(arrays, sums, self.run, version, base)

    def _changes(
        self, name: str, array: Array, before: Array | None
    ) -> tuple[str, int, list[bytes], str]:
        """Returns kind, number of changed words, streams and checksum of one tensor."""
        # Created here, since a compressor belongs to one thread.
        compress = self._compressor(level=LEVEL).compress
        words, total = _words(array), checksum(bytes_of(array))
        kind, count, streams = "words", words.size, [words] if words.size else []
        if before is not None:
            old = _words(before)
            differs = words != old
            changed = int(np.count_nonzero(differs))
            if changed == 0:
                return "same", 0, [], self.last.sums[name]
            if changed * DENSE_SHARE < words.size:
                places = np.flatnonzero(differs)
                gaps = np.diff(places, prepend=0)
                if int(gaps.max()) <= MAX_GAP:
                    kind, count = "places", changed
                    streams = [gaps.astype(GAP), words[places] ^ old[places]]
            if kind == "words":
                streams = [words ^ old]
        return kind, count, [compress(_planes(part)) for part in streams], total


def _forms(arrays: Mapping[str, Array]) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (dtype_name(array), array.shape) for name, array in arrays.items()}


# ---------------------------------------------------------------------------------- the generator
class _Row(NamedTuple):
    """One tensor of a message, after its checks."""

    entry: Entry
    kind: str
    changed: int
    sizes: tuple[int, ...]

    @property
    def words(self) -> np.dtype[Any]:
        return WORDS[DTYPES[self.entry.dtype].itemsize]  # type: ignore[no-any-return]

    @property
    def size(self) -> int:
        return math.prod(self.entry.shape)


Change = tuple[_Row, Any, Array]  # the places (None: all of them) and the XOR of a tensor


class Header(NamedTuple):
    run: str
    base: int | None
    version: int
    rows: tuple[_Row, ...]
    bytes: int  # of the payload
    sum: str  # of the payload


class DeltaDecoder(Mapping[str, Any], LentSource):
    """The generator's side: a mapping of the tensors of the version applied last, for
    Generator.sync_weights. The next `apply` changes these arrays in place."""

    def __init__(self, threads: int | None = None):
        """threads: number of threads that decompress and check; None: one for each core that this
        process may use. Raises ConfigError if zstandard is not installed."""
        super().__init__()
        self._zstd, self._threads = _zstd(), thread_count(threads)
        # Replaced in one assignment, so that a Ctrl-C leaves the old version or the new one.
        self._now = _NOTHING

    @property
    def version(self) -> int | None:
        """Number of the version applied last."""
        return self._now.version

    @property
    def run(self) -> str | None:
        """Id of the DeltaEncoder that made the version applied last."""
        return self._now.run

    @property
    def _arrays(self) -> dict[str, Array]:
        return self._now.arrays

    def __getitem__(self, name: str) -> Array:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        if self.version is None:
            raise NotSyncedError("expected a version, got none; the first message is a whole set")
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def apply(self, message: Any) -> int:
        """Makes the message's version the current one and returns its number. message: bytes, or an
        object with the buffer protocol.

        Raises FormatError (the message is truncated, damaged, or made for other values than those
        of the base), VersionError (the version is not newer), BaseVersionError (the delta is
        against another version or run than the current one: apply a whole set, or the deltas in
        between), CapacityError (too little memory for a whole set), or StateError while a sync
        reads the current version. After an error the current version is unchanged, bit for bit. If
        a second interrupt stops the undo, there is no current version; apply a whole set then.
        """
        with self._guard:
            self._require_unread(f"version {self.version}")
            return self._apply(*read_message(message))

    def _check(self, header: Header) -> None:
        """Checks everything that can be checked before the payload is read."""
        check_version(header.version, self.version)
        if header.base is None:
            _require_room(header)
        else:
            self._require_base(header)

    def _apply(self, header: Header, payload: memoryview) -> int:
        if (seen := checksum(np.frombuffer(payload, np.uint8))) != header.sum:
            raise FormatError(f"a delta's payload: expected checksum {header.sum}, got {seen}")
        self._check(header)
        sums = {row.entry.name: row.entry.sum for row in header.rows}
        then = Kept(self._arrays, sums, header.run, header.version, header.base)
        items = [*zip(header.rows, _parts(header, payload), strict=True)]
        if header.base is None:
            arrays = in_threads(lambda item: self._whole(*item), items, self._threads)
            self._now = then._replace(arrays=dict(zip(sums, arrays, strict=True)))
        else:
            changes = in_threads(lambda item: self._change(*item), items, self._threads)
            self._change_all([change for change in changes if change is not None], then)
        return header.version

    def _require_base(self, header: Header) -> None:
        if self.version is None:
            raise BaseVersionError(
                f"version {header.version}: expected a whole set first, got a delta against "
                f"version {header.base}"
            )
        if (header.run, header.base) != (self.run, self.version):
            run = "" if header.run == self.run else f" of run {header.run[:8]}"
            raise BaseVersionError(
                f"version {header.version}: expected a delta against version {self.version} of "
                f"run {str(self.run)[:8]}, "
                f"got one against version {header.base}{run}; apply the deltas between, or a "
                "whole set"
            )
        if _forms(self._arrays) != {
            row.entry.name: (row.entry.dtype, row.entry.shape) for row in header.rows
        }:
            raise FormatError(
                f"version {header.version}: expected the names, dtypes and shapes of version "
                f"{self.version}, got others"
            )

    def _whole(self, row: _Row, parts: list[memoryview]) -> Array:
        words = np.empty(0, row.words)
        if parts:
            words = self._stream(row, parts[0], row.words, row.size)
        array = words.view(DTYPES[row.entry.dtype]).reshape(row.entry.shape)
        _require_sum(row.entry, array)
        return array

    def _change_all(self, changes: list[Change], then: Kept) -> None:
        """XORs the changes into the arrays. After an error, undoes the changes made so far."""
        begun: list[Change] = []
        before = self._now

        def flip(change: Change) -> None:
            entry = change[0].entry
            begun.append(change)
            _flip(before.arrays[entry.name], *change[1:])
            _require_sum(entry, before.arrays[entry.name])

        try:
            in_threads(flip, changes, self._threads)
            self._now = then
        except BaseException:
            if self._now is not then:
                # No current version until the undo is complete, since a Ctrl-C may interrupt it.
                self._now = _NOTHING
                for row, places, values in begun:
                    # The checksum is compared because a signal may have interrupted the change.
                    array = before.arrays[row.entry.name]
                    if checksum(bytes_of(array)) != before.sums[row.entry.name]:
                        _flip(array, places, values)
                self._now = before
            raise

    def _change(self, row: _Row, parts: list[memoryview]) -> Change | None:
        """Returns the change of a tensor, or None if the tensor is unchanged."""
        if row.kind == "same" and row.entry.sum != self._now.sums[row.entry.name]:
            raise FormatError(
                f"{row.entry.name}: expected checksum {row.entry.sum}, the base has "
                f"{self._now.sums[row.entry.name]}"
            )
        if not parts:
            return None
        if row.kind == "words":
            return row, None, self._stream(row, parts[0], row.words, row.size)
        gaps = self._stream(row, parts[0], GAP, row.changed).astype(np.int64)
        places = np.cumsum(gaps)
        if not (gaps[1:] > 0).all() or int(places[-1]) >= row.size:
            raise FormatError(
                f"{row.entry.name}: expected growing places below {row.size}, got others"
            )
        return row, places, self._stream(row, parts[1], row.words, row.changed)

    def _stream(self, row: _Row, data: memoryview, dtype: np.dtype[Any], count: int) -> Array:
        """Decompresses one stream. Checks the decompressed size before decompressing."""
        try:
            size = self._zstd.get_frame_parameters(data).content_size
            if size != count * dtype.itemsize:
                raise FormatError(
                    f"{row.entry.name}: expected a stream of {count * dtype.itemsize} bytes, got "
                    f"{size}"
                )
            return _from_planes(
                self._zstd.ZstdDecompressor().decompress(data, max_output_size=size), dtype, count
            )
        except self._zstd.ZstdError as error:
            raise FormatError(f"{row.entry.name}: {error}") from error


def _flip(array: Array, places: Any, values: Array) -> None:
    words = _words(array)
    if places is None:
        words ^= values
    else:
        words[places] ^= values


def _parts(header: Header, payload: memoryview) -> Iterator[list[memoryview]]:
    """Yields the streams of each row."""
    for row in header.rows:
        parts = []
        for size in row.sizes:
            parts.append(payload[:size])
            payload = payload[size:]
        yield parts


def _require_room(header: Header) -> None:
    needed = header.bytes + sum(row.entry.bytes for row in header.rows)
    if needed > (available := min(room for _, room in _core.memory_pools())):
        raise CapacityError(
            f"version {header.version}: expected {byte_text(needed)} of free host memory for a "
            f"whole set, got {byte_text(available)}"
        )


def _require_sum(entry: Entry, array: Array) -> None:
    if (seen := checksum(bytes_of(array))) != entry.sum:
        raise FormatError(f"{entry.name}: expected checksum {entry.sum}, got {seen}")


# ----------------------------------------------------------------------------------------- checks
def read_message(message: Any) -> tuple[Header, memoryview]:
    """Returns header and payload of a message. Raises FormatError."""
    try:
        data = memoryview(message).cast("B")
    except (TypeError, ValueError) as error:  # NumPy raises ValueError for its dates
        raise FormatError(
            f"expected the bytes of a delta, got a {type(message).__name__}"
        ) from error
    start = bytes(data[:START])
    end = START + header_size(start, len(data))
    return parse_header(start, bytes(data[START:end]), len(data) - end), data[end:]


# DeltaReader reads a file in these steps, so that it allocates only what a valid file may need.
def header_size(start: bytes, num_bytes: int) -> int:
    """Returns the size of a header in bytes. start: the first START bytes of a message of num_bytes
    bytes."""
    size = int.from_bytes(start[8:16], "little")
    if start[:7] == MAGIC[:7] and start[:8] != MAGIC:
        raise FormatError(
            f"expected a delta of format {MAGIC.decode()}, got {start[:8]!r}; "
            "use the same release of rollmesh in trainer and generators"
        )
    if start[:8] != MAGIC or size > MAX_HEADER or num_bytes < START + size:
        raise FormatError(
            f"expected a message of DeltaEncoder, got {num_bytes} bytes that begin with "
            f"{start[:8]!r}"
        )
    return size


def parse_header(start: bytes, text: bytes, num_bytes: int) -> Header:
    """Returns the header of a message without its payload. num_bytes: bytes of the payload."""
    if _header_sum(text) != start[16:START]:
        raise FormatError("a delta's header: expected the checksum before it, got another")
    try:
        values = json.loads(text)
        rows = tuple(_row(num_bytes, *row) for row in values["tensors"])
        run, base, version = str(values["run"]), values["base"], values["version"]
        length = values["bytes"]
        found = str(values["sum"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise FormatError(f"expected the header of a delta: {error!r:.200}") from error
    if length != num_bytes or sum(sum(row.sizes) for row in rows) != length:
        raise FormatError(
            f"expected a delta with {length} bytes behind its header, got {num_bytes}"
        )
    for number in (version,) if base is None else (base, version):
        if type(number) is not int or not 0 <= number <= MAX_VERSION:
            raise FormatError(
                f"a delta's versions: expected integers in [0, {MAX_VERSION}], got {number!r:.80}"
            )
    names: set[str] = set()
    for row in rows:
        check_new_name(row.entry.name, names)
        if base is None and row.kind != "words":
            raise FormatError(
                f"{row.entry.name}: expected all words in a whole set, got {row.kind!r}"
            )
    return Header(run, base, version, rows, length, found)


def _row(
    num_bytes: int,
    name: Any,
    dtype: Any,
    shape: Any,
    kind: Any,
    changed: Any,
    sizes: Any,
    total: Any,
) -> _Row:
    needed = bytes_needed(name, dtype, shape)
    row = _Row(Entry(name, dtype, tuple(shape), 0, needed, str(total)), kind, changed, tuple(sizes))
    streams, changes = {
        "same": (0, 0), "places": (2, changed), "words": (int(row.size > 0), row.size)
    }[kind]  # fmt: skip
    if (
        type(changed) is not int
        or not (kind == "places") <= changed <= row.size
        or changed != changes
        or len(row.sizes) != streams
        or not all(type(n) is int and 0 <= n <= num_bytes for n in row.sizes)
        or sum(row.sizes) > _most(needed) + _most(changed * GAP.itemsize)
    ):
        raise ValueError(
            f"{kind!r} of {shown(name)}: {changed!r:.80} changes of {row.size} words in streams "
            f"of {sizes!r:.80} bytes"
        )
    return row


def _most(size: int) -> int:
    """Returns the largest number of bytes that zstd may produce from `size` bytes."""
    return size + size // 128 + 4096

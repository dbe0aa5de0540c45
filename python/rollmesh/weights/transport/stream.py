"""Weights from one rank of a group to all others, in buckets; from GPU to GPU if the group uses
NCCL.

    group          data                                        needs
    rm.comm.nccl   between GPUs                                NCCL; no torch
    torch, NCCL    between GPUs, as torch tensors              torch
    torch, Gloo    through the host                            torch
    rm.comm.shm    through the host                            nothing

With both backends in a torch group each bucket stays where its tensors are. The exchanges, in
order:

    every rank     the sender's rank, and whether this is the sender: all agree, or all raise
    the sender     head     int64 [4]: what follows (BUCKET, END, ABORT), bytes of the manifest,
                   bytes of the data, whether on GPUs uint8    the manifest: names, dtypes, shapes,
                                                               offsets and checksums as JSON
    every rank     whether it has memory for the bucket: all have, or all raise
    the sender     uint8    the data, which travels while the next bucket is filled (from GPUs) and
                   the previous one is read

All ranks of the group must take part: the sender in send_weights, the others in receive_weights. A
sender that fails sends ABORT, and the receivers raise SyncAbortedError. A receiver whose consumer
stops early still receives the rest of the stream, so that the group stays usable. Waits are limited
by the group's own timeout.
"""

from __future__ import annotations

import json
import numbers
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import numpy as np

from rollmesh.errors import (
    CollectiveMismatchError,
    ConfigError,
    Error,
    FormatError,
    LimitError,
    SyncAbortedError,
)
from rollmesh.runtime.arguments import boolean
from rollmesh.runtime.messages import reason, shown
from rollmesh.weights.transport.carriers import Bucket, Carrier, Piece, carrier_of
from rollmesh.weights.transport.manifest import check_name, check_new_name, describe, parse, place
from rollmesh.weights.transport.segment import MAX_MANIFEST
from rollmesh.weights.transport.tensors import as_array, entries_of, grouped, holds_tensors

BUCKET, END, ABORT = 1, 2, 3
MAX_BUCKET = 1 << 40
MAX_WHY = 300  # characters of an error that are sent to the other ranks
MAX_WHY_BYTES = 1800  # of them as JSON, where a character takes up to 12; below carriers.MAX_TOLD


def send_weights(
    source: Mapping[str, Any] | Iterable[tuple[str, Any]],
    group: Any = None,
    *,
    src: int | None = None,
    bucket_bytes: int = 256 << 20,
    device: str | None = None,
) -> int:
    """Sends NumPy arrays or torch tensors (with rm.comm.nccl any library's GPU arrays) to all other
    ranks of the group. Returns the number of bytes of data. Tensors on the host and on GPUs may be
    mixed.

    group         a torch.distributed group (None: the default one), or a comm of its own:
                  rm.comm.nccl(…), shm(…), torch(…). The first stream connects it, later ones reuse
                  it, and all ranks call comm.close() at the end
    src           the sender's rank, by default this one; receivers must name the same. In a torch
                  group it is the global rank
    bucket_bytes  of data sent at once; a rank holds two buckets, three with rm.comm.nccl. Only the
                  sender chooses it
    device        with rm.comm.nccl this rank's GPU: "cuda" (the one of its rank) or "cuda:N"

    Whatever fails at the sender, the other ranks raise SyncAbortedError. LimitError for a name that
    is empty, too long or not a str (in a mapping before anything is sent); DuplicateKeyError for a
    repeated name, before its bucket is sent; ConfigError or DeviceError for a device that this rank
    does not have. CollectiveMismatchError on all ranks that do not agree about the sender;
    SyncAbortedError if another rank has no memory; RankLostError and CollectiveTimeoutError if one
    is lost, and the group is dead then. With torch's NCCL a lost rank raises nothing: torch's
    watchdog ends the process.
    """
    _check_source(source)
    carrier = carrier_of(group)
    stream = _Stream(carrier, carrier.rank if src is None else src, device)
    stream.agree(sends=True)
    sent, last = 0, None
    try:
        for pieces in _buckets(stream.carrier, source, bucket_bytes):
            bucket, description = stream.filled(pieces)
            if last is not None:
                stream.finish(last)
            stream.send(bucket, description)
            sent, last = sent + bucket.size, bucket
        if last is not None:
            stream.finish(last)
    except BaseException:
        stream.abort(last)
        raise
    stream.end()
    return sent


def receive_weights(
    group: Any = None, *, src: int, verify: bool | None = None, device: str | None = None
) -> Iterator[tuple[str, Any]]:
    """The entries that rank `src` sends, as arrays that stay valid: torch tensors on this rank's
    GPU with torch's NCCL, DLPack producers on it (for Generator.sync_weights, torch.from_dlpack)
    with rm.comm.nccl, else NumPy arrays.

    group   as in send_weights
    verify  compare each entry's checksum; None: if there are checksums, which only rm.comm.nccl
            lacks
    device  "cpu": NumPy arrays, whatever the group; with rm.comm.nccl also this rank's GPU, as in
            send_weights

    SyncAbortedError if the sender gives up or another rank has no memory, CapacityError or
    MemoryError if this one has none, FormatError for a wrong manifest or checksum,
    DuplicateKeyError for a repeated name; else as send_weights.
    """
    stream, seen = _Stream(carrier_of(group), src, device), set[str]()
    checks = stream.agree(sends=False, verify=verify)
    coming = None
    try:
        coming = stream.receive()
        while coming is not None:
            (bucket, description), coming = coming, None
            stream.finish(bucket)
            entries = parse(description, bucket.size).entries
            for i, entry in enumerate(entries.values()):
                check_new_name(entry.name, seen)
                if i == 1:  # the consumer holds no entry of the previous bucket any more
                    coming = stream.receive()
                yield entry.name, _given(bucket.take(entry, checks), entry.name, device)
            if len(entries) < 2:
                coming = stream.receive()
    except (Exception, GeneratorExit):
        stream.drain(coming)
        raise
    except BaseException:  # an interrupt must not wait for the sender
        if not stream.is_over:
            stream.carrier.give_up()
        raise


def _given(tensor: Any, name: str, device: str | None) -> Any:
    return as_array(name, tensor) if device == "cpu" else tensor


def _check_source(source: Any) -> None:
    if isinstance(source, (str, bytes)) or not isinstance(source, Iterable):
        raise ConfigError(
            "source: expected a mapping of names to tensors, or pairs of both, got a "
            f"{type(source).__name__}"
        )


def _buckets(
    carrier: Carrier, source: Mapping[str, Any] | Iterable[tuple[str, Any]], bucket_bytes: int
) -> Iterator[list[Piece]]:
    if isinstance(source, Mapping):
        for name in source:
            check_name(name)
    copy = not holds_tensors(source)
    pieces = (carrier.piece(name, tensor, copy) for name, tensor in _named(source))
    for bucket in grouped(((piece.name, piece) for piece in pieces), bucket_bytes):
        yield [piece for _, piece in bucket]


def _named(source: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    seen: set[str] = set()
    for name, tensor in entries_of(source):
        check_new_name(name, seen)
        yield name, tensor


class _Stream:
    """This rank's part of one stream: its exchanges, in the same order on all ranks."""

    def __init__(self, carrier: Carrier, src: Any, device: Any):
        self.carrier, self.src, self.device = carrier, src, device
        self.is_over = False

    @contextmanager
    def _together(self) -> Iterator[None]:
        """For calls of the group. If one fails there are no more exchanges: the group is dead, or
        this rank gives it up."""
        self.is_over = True
        try:
            yield
        except Error:
            raise
        except BaseException:
            self.carrier.give_up()
            raise
        self.is_over = False

    def agree(self, *, sends: bool, verify: bool | None = None) -> bool:
        """Checks that all ranks have the same sender. Returns whether this rank compares
        checksums."""
        fault: Error | None = None
        try:
            self._check(verify)
            self.carrier.check(self.device, sends)
        except Error as error:
            fault = error
        with self._together():
            told = self.carrier.all_gather([None if fault else self.src, sends, _why(fault)])
        self._refuse(fault, [why for _, _, why in told])
        if [(self.src, rank == self.src) for rank in self.carrier.ranks] != [
            (src, does) for src, does, _ in told
        ]:
            who = zip(self.carrier.ranks, told, strict=True)
            text = ", ".join(
                f"rank {rank} {'sends as' if does else 'receives from'} {src}"
                for rank, (src, does, _) in who
            )
            raise CollectiveMismatchError(
                f"expected one sender, and its rank as src on all ranks, got: {text[:1000]}"
            )
        with self._together():
            self._open()
        return self.carrier.has_sums if verify is None else verify

    def _open(self) -> None:
        try:
            self.carrier.open()
        except Error:
            self.carrier.give_up()
            raise

    def _check(self, verify: bool | None) -> None:
        if (
            isinstance(self.src, bool)
            or not isinstance(self.src, numbers.Integral)
            or self.src not in self.carrier.ranks
        ):
            raise ConfigError(
                f"src: expected a rank of the group, one of {shown(self.carrier.ranks)}, got "
                f"{shown(self.src)}"
            )
        self.src = int(self.src)  # NumPy's too
        if verify is not None and boolean("verify", verify) and not self.carrier.has_sums:
            raise ConfigError(
                "verify: expected None or False with rm.comm.nccl, got True; it has no checksums"
            )

    def _refuse(self, fault: Exception | None, whys: list[str | None]) -> None:
        """Raises if a rank has failed; all ranks have exchanged their reasons."""
        self.is_over = fault is not None or any(whys)
        if fault is not None:
            raise fault
        for rank, why in zip(self.carrier.ranks, whys, strict=True):
            if why:
                raise SyncAbortedError(f"rank {rank}: {why}")

    # ---------------------------------------------------------------------------------- the sender
    def filled(self, pieces: list[Piece]) -> tuple[Bucket, bytes]:
        """A bucket with these, and its manifest."""
        entries, size = place(
            (piece.name, piece.dtype, piece.shape, piece.nbytes) for piece in pieces
        )
        bucket = self.carrier.bucket(size, self.carrier.is_for_gpu(pieces))
        for entry, piece in zip(entries, pieces, strict=True):
            bucket.put(entry.offset, piece)
        if self.carrier.has_sums:
            entries = [replace(entry, sum=bucket.sum(entry)) for entry in entries]
        description = describe(entries)
        if len(description) > MAX_MANIFEST:
            raise LimitError(
                f"the manifest of one bucket has {len(description)} bytes; the limit is "
                f"{MAX_MANIFEST}"
            )
        return bucket, description

    def send(self, bucket: Bucket, description: bytes) -> None:
        with self._together():
            self._say(BUCKET, len(description), bucket.size, bucket.on_gpu)
            self.carrier.broadcast(np.frombuffer(description, np.uint8).copy(), self.src)
            whys = self.carrier.all_gather(None)
            if not any(whys):
                bucket.begin(self.src)
        self._refuse(None, whys)

    def finish(self, bucket: Bucket) -> None:
        with self._together():
            bucket.finish()

    def end(self) -> None:
        with self._together():
            self._say(END)

    def abort(self, last: Bucket | None) -> None:
        """Tells the receivers that the sender failed. Ignores further errors."""
        with suppress(Error):
            if not self.is_over and last is not None:
                self.finish(last)
            if not self.is_over:
                with self._together():
                    self._say(ABORT)

    def _say(self, kind: int, described: int = 0, size: int = 0, on_gpu: bool = False) -> None:
        self.carrier.broadcast(np.array([kind, described, size, on_gpu], np.int64), self.src)

    # ---------------------------------------------------------------------------------- a receiver
    def receive(self) -> tuple[Bucket, bytes] | None:
        """The next bucket, whose broadcast has begun, and its manifest; None at the end."""
        with self._together():
            head = np.zeros(4, np.int64)
            self.carrier.broadcast(head, self.src)
            kind, described, size, on_gpu = (int(value) for value in head)
            if kind == ABORT:
                raise SyncAbortedError(f"rank {self.src} gave up sending its weights")
            if kind != END and not (
                kind == BUCKET
                and 0 < described <= MAX_MANIFEST
                and 0 <= size <= MAX_BUCKET
                and on_gpu in (0, 1)
            ):
                self.carrier.give_up()  # the ranks are not at the same point
                raise FormatError(
                    f"expected a bucket of rank {self.src}, got {[kind, described, size, on_gpu]}"
                )
            if kind == BUCKET:
                description = np.zeros(described, np.uint8)
                self.carrier.broadcast(description, self.src)
                bucket, fault = self._room(size, bool(on_gpu))
                whys = self.carrier.all_gather(_why(fault))
                if bucket is not None and not any(whys):
                    bucket.begin(self.src)
        if kind == END:
            self.is_over = True
            return None
        self._refuse(fault, whys)
        assert bucket is not None
        return bucket, description.tobytes()

    def _room(self, size: int, on_gpu: bool) -> tuple[Bucket | None, Exception | None]:
        try:
            return self.carrier.bucket(size, on_gpu), None
        except (Error, MemoryError) as error:
            return None, error

    def drain(self, coming: tuple[Bucket, bytes] | None) -> None:
        """Receives the rest of the stream, for a consumer that has stopped."""
        with suppress(Error):
            while not self.is_over:
                if coming is not None:
                    self.finish(coming[0])
                coming = self.receive()


def _why(fault: Exception | None) -> str | None:
    if fault is None:
        return None
    why = reason(fault)[:MAX_WHY]
    while len(json.dumps(why)) > MAX_WHY_BYTES:
        why = why[:-1]
    return why

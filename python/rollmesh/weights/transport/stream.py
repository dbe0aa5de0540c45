"""Weights from one rank of a group to all others, in buckets, GPU to GPU where the group is NCCL's.

    group          data                                        needs
    rm.comm.nccl   between GPUs' memories                      NCCL; no torch
    torch, NCCL    between GPUs' memories, as torch tensors    torch
    torch, Gloo    by the host                                 torch
    rm.comm.shm    by the host                                 nothing

A torch group with both backends takes each bucket where its tensors lie. What the ranks say and do:

    every rank     which rank it takes for the sender, and whether it is that one: all agree, or all raise
    the sender     head     int64 [4]: what follows (BUCKET, END, ABORT), bytes of the description, bytes of the data, whether on GPUs
                   uint8    the description: names, dtypes, shapes, places and sums as JSON
    every rank     whether it has room: all have, or all raise
    the sender     uint8    the data, which travels while the next bucket is filled (from GPUs), and the one before is read

All ranks of the group must take part: the sender in send_weights, the others in receive_weights. A sender that fails says ABORT
and the receivers raise SyncAbortedError. A receiver whose consumer stops early still takes the rest of the stream, so that
the group's next collective is the right one. How long a wait may last is the group's own timeout.
"""

from __future__ import annotations

import json
import numbers
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import numpy as np

from rollmesh.errors import CollectiveMismatchError, ConfigError, Error, FormatError, LimitError, SyncAbortedError
from rollmesh.runtime.arguments import boolean
from rollmesh.runtime.messages import reason, shown
from rollmesh.weights.transport.carriers import Bucket, Carrier, Piece, carrier_of
from rollmesh.weights.transport.manifest import check_name, check_new_name, describe, parse, place
from rollmesh.weights.transport.segment import MAX_MANIFEST
from rollmesh.weights.transport.tensors import as_array, bucketed

BUCKET, END, ABORT = 1, 2, 3
MAX_BUCKET = 1 << 40
MAX_WHY = 300  # characters of an error that the others are told
MAX_WHY_BYTES = 1800  # of these as JSON, where a character takes up to 12: below carriers.MAX_TOLD


def send_weights(
    source: Mapping[str, Any] | Iterable[tuple[str, Any]],
    group: Any = None,
    *,
    src: int | None = None,
    bucket_bytes: int = 256 << 20,
    device: str | None = None,
) -> int:
    """Sends NumPy arrays or tensors of torch (of any library's GPU memory, by rm.comm.nccl) to all other ranks of the group; returns
    the bytes of data sent. Tensors of the host and of GPUs may be mixed.

    group         a torch.distributed group (None: the default one), or rm.comm.nccl(…), shm(…), torch(…): a comm of its own, which
                  the first stream connects, later ones use again and comm.close() leaves, on all ranks
    src           the sender's rank, by default this one; receivers must name the same. Of a torch group it is the global rank
    bucket_bytes  of data sent at once; a rank holds two buckets, three with rm.comm.nccl. The sender's alone is asked for
    device        with rm.comm.nccl this rank's GPU: "cuda" (the one of its number) or "cuda:N"

    Raises LimitError for a name that is empty, too long or no str (of a mapping before anything is sent) and DuplicateKeyError for one
    that comes twice, before its bucket is sent: the others SyncAbortedError, as for all that fails here.
    CollectiveMismatchError on all ranks that do not agree about the sender, SyncAbortedError when another rank has no room,
    RankLostError and CollectiveTimeoutError when one is lost: the group is dead then. Over torch's own NCCL nothing is raised for a lost
    rank: torch's watchdog ends the process. ConfigError or DeviceError for a device that this rank does not have, and SyncAbortedError on
    the others.
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


def receive_weights(group: Any = None, *, src: int, verify: bool | None = None, device: str | None = None) -> Iterator[tuple[str, Any]]:
    """The entries that rank `src` sends, as arrays that stay valid: torch tensors on this rank's GPU where the group is torch's and NCCL's,
    DLPack producers on it (for Generator.sync_weights, torch.from_dlpack) with rm.comm.nccl, else NumPy arrays.

    group   as in send_weights
    verify  whether sums of every entry's bytes are compared; None: where there are sums, which is everywhere but with rm.comm.nccl
    device  "cpu": NumPy arrays, whatever the group; with rm.comm.nccl also this rank's GPU, as in send_weights

    SyncAbortedError when the sender gives up or another rank has no room, CapacityError or MemoryError where that is this one,
    FormatError for a description or a sum that is wrong, DuplicateKeyError for a name that has come before; else as send_weights.
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
                if i == 1:  # the consumer has let go of the bucket before
                    coming = stream.receive()
                yield entry.name, _given(bucket.take(entry, checks), entry.name, device)
            if len(entries) < 2:
                coming = stream.receive()
    except (Exception, GeneratorExit):
        stream.drain(coming)
        raise
    except BaseException:  # an interrupt, which is not to wait for the sender
        if not stream.is_over:
            stream.carrier.give_up()
        raise


def _given(tensor: Any, name: str, device: str | None) -> Any:
    return as_array(name, tensor) if device == "cpu" else tensor


def _check_source(source: Any) -> None:
    if isinstance(source, (str, bytes)) or not isinstance(source, Iterable):
        raise ConfigError(f"source is a {type(source).__name__}, wanted a mapping of names to tensors, or pairs of both")


def _buckets(carrier: Carrier, source: Mapping[str, Any] | Iterable[tuple[str, Any]], bucket_bytes: int) -> Iterator[list[Piece]]:
    items = _named(source.items() if isinstance(source, Mapping) else source)
    if isinstance(source, Mapping):
        for name in source:
            check_name(name)
    pieces = (carrier.piece(name, tensor) for name, tensor in items)
    for bucket in bucketed(((piece.name, piece) for piece in pieces), bucket_bytes):
        yield [piece for _, piece in bucket]


def _named(entries: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    seen: set[str] = set()
    for name, tensor in entries:
        check_new_name(name, seen)
        yield name, tensor


class _Stream:
    """This rank's part of one stream: what it has to say and to hear, so that all ranks stay at the same place of it."""

    def __init__(self, carrier: Carrier, src: Any, device: Any):
        self.carrier, self.src, self.device = carrier, src, device
        self.is_over = False

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Calls of the group. After one that fails nothing is to be said any more: the group is dead, or is given up here."""
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
        """All ranks mean the same stream. Returns whether sums are compared here."""
        fault: Error | None = None
        try:
            self._check(verify)
            self.carrier.check(self.device, sends)
        except Error as error:
            fault = error
        with self._together():
            told = self.carrier.tell([None if fault else self.src, sends, _why(fault)])
        self._refuse(fault, [why for _, _, why in told])
        if [(self.src, rank == self.src) for rank in self.carrier.ranks] != [(src, does) for src, does, _ in told]:
            who = zip(self.carrier.ranks, told, strict=True)
            text = ", ".join(f"rank {rank} {'sends as' if does else 'receives from'} {src}" for rank, (src, does, _) in who)
            raise CollectiveMismatchError(f"{text[:1000]}; wanted one sender, and its rank as src on all")
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
        if isinstance(self.src, bool) or not isinstance(self.src, numbers.Integral) or self.src not in self.carrier.ranks:
            raise ConfigError(f"src = {shown(self.src)}, wanted a rank of the group, one of {shown(self.carrier.ranks)}")
        self.src = int(self.src)  # NumPy's too
        if verify is not None and boolean("verify", verify) and not self.carrier.has_sums:
            raise ConfigError("verify = True with rm.comm.nccl, wanted None or False: bytes on GPUs are summed by torch alone")

    def _refuse(self, fault: Exception | None, whys: list[str | None]) -> None:
        """All ranks have heard why one goes no further, or that none has a reason."""
        self.is_over = fault is not None or any(whys)
        if fault is not None:
            raise fault
        for rank, why in zip(self.carrier.ranks, whys, strict=True):
            if why:
                raise SyncAbortedError(f"rank {rank}: {why}")

    # ---------------------------------------------------------------------------------------- the sender
    def filled(self, pieces: list[Piece]) -> tuple[Bucket, bytes]:
        """A bucket with these, and its description."""
        entries, size = place((piece.name, piece.dtype, piece.shape, piece.nbytes) for piece in pieces)
        bucket = self.carrier.bucket(size, self.carrier.is_for_gpu(pieces))
        for entry, piece in zip(entries, pieces, strict=True):
            bucket.put(entry.offset, piece)
        if self.carrier.has_sums:
            entries = [replace(entry, sum=bucket.sum(entry)) for entry in entries]
        description = describe(entries)
        if len(description) > MAX_MANIFEST:
            raise LimitError(f"{len(description)} bytes of names and shapes in one bucket; the limit is {MAX_MANIFEST}")
        return bucket, description

    def send(self, bucket: Bucket, description: bytes) -> None:
        with self._together():
            self._say(BUCKET, len(description), bucket.size, bucket.on_gpu)
            self.carrier.words(np.frombuffer(description, np.uint8).copy(), self.src)
            whys = self.carrier.tell(None)
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
        """For what is raised anyway: nothing that goes wrong here is."""
        with suppress(Error):
            if not self.is_over and last is not None:
                self.finish(last)
            if not self.is_over:
                with self._together():
                    self._say(ABORT)

    def _say(self, kind: int, described: int = 0, size: int = 0, on_gpu: bool = False) -> None:
        self.carrier.words(np.array([kind, described, size, on_gpu], np.int64), self.src)

    # ---------------------------------------------------------------------------------------- a receiver
    def receive(self) -> tuple[Bucket, bytes] | None:
        """The next bucket, on its way, and its description; None at the end."""
        with self._together():
            head = np.zeros(4, np.int64)
            self.carrier.words(head, self.src)
            kind, described, size, on_gpu = (int(value) for value in head)
            if kind == ABORT:
                raise SyncAbortedError(f"rank {self.src} gave up sending its weights")
            if kind != END and not (kind == BUCKET and 0 < described <= MAX_MANIFEST and 0 <= size <= MAX_BUCKET and on_gpu in (0, 1)):
                self.carrier.give_up()  # nobody knows what comes next
                raise FormatError(f"a bucket of kind {kind} with {described} + {size} bytes (on GPUs: {on_gpu}) from rank {self.src}")
            if kind == BUCKET:
                description = np.zeros(described, np.uint8)
                self.carrier.words(description, self.src)
                bucket, fault = self._room(size, bool(on_gpu))
                whys = self.carrier.tell(_why(fault))
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
        """What is left of the stream, for a consumer that wants no more of it."""
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

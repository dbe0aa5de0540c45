"""Weights over a torch.distributed group: one rank sends, every other one receives, each bucket by three broadcasts.

    head     int64 [3]: what follows (BUCKET, END, ABORT), bytes of the description, bytes of the data
    uint8    the description: names, dtypes, shapes, places and sums as JSON
    uint8    the data

All ranks of the group must take part: the sender in send_weights, the others in receive_weights. A sender that fails says ABORT
and the receivers raise SyncAbortedError. A receiver whose consumer stops early still takes the rest of the stream, so that
the group's next collective is the right one. How long a wait may last is the group's own timeout.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollmesh.errors import FormatError, SyncAbortedError
from rollmesh.sources.arrays import MAX_HEADER, as_array, bucketed, bytes_of, describe, lay_out, parse, take

BUCKET, END, ABORT = 1, 2, 3
MAX_BUCKET = 1 << 40


def send_weights(
    source: Mapping[str, Any] | Iterable[tuple[str, Any]], group: Any = None, *, src: int | None = None, bucket_bytes: int = 256 << 20
) -> int:
    """Sends NumPy arrays or torch tensors to all other ranks of the group; returns the bytes of data sent.

    `src` is the global rank of the sender, by default this one; receivers must name the same.
    """
    import torch.distributed as dist

    src = dist.get_rank() if src is None else src
    items = source.items() if isinstance(source, Mapping) else source
    sent = 0
    try:
        for bucket in bucketed(((name, as_array(name, tensor)) for name, tensor in items), bucket_bytes):
            entries, size = lay_out(bucket)
            description = describe(entries)
            data = np.zeros(size, np.uint8)
            for (_, array), entry in zip(bucket, entries, strict=True):
                data[entry.offset : entry.offset + entry.bytes] = bytes_of(array)
            _broadcast(np.array([BUCKET, len(description), size], np.int64), src, group)
            _broadcast(np.frombuffer(description, np.uint8).copy(), src, group)
            _broadcast(data, src, group)
            sent += size
    except BaseException:
        _broadcast(np.array([ABORT, 0, 0], np.int64), src, group)
        raise
    _broadcast(np.array([END, 0, 0], np.int64), src, group)
    return sent


def receive_weights(group: Any = None, *, src: int, verify: bool = True) -> Iterator[tuple[str, NDArray[Any]]]:
    """The entries that rank `src` sends, as arrays that stay valid. SyncAbortedError when the sender gives up."""
    try:
        while bucket := _receive_bucket(src, group):
            entries, _ = parse(bucket[0].tobytes(), bucket[1].size)
            for entry in entries:
                yield entry.name, take(entry, bucket[1], verify=verify)
    except (GeneratorExit, FormatError) as error:
        if not isinstance(error, _BrokenStream):
            _drain(src, group)
        raise


class _BrokenStream(FormatError):
    """The head makes no sense, so nobody knows what comes next."""


def _drain(src: int, group: Any) -> None:
    try:
        while _receive_bucket(src, group):
            pass
    except (SyncAbortedError, _BrokenStream):
        return


def _receive_bucket(src: int, group: Any) -> tuple[NDArray[np.uint8], NDArray[np.uint8]] | None:
    """Description and data; None at the end."""
    head = np.zeros(3, np.int64)
    _broadcast(head, src, group)
    kind, described, size = (int(value) for value in head)
    if kind == ABORT:
        raise SyncAbortedError(f"rank {src} gave up sending its weights")
    if kind == END:
        return None
    if kind != BUCKET or not 0 < described <= MAX_HEADER or not 0 <= size <= MAX_BUCKET:
        raise _BrokenStream(f"a bucket of kind {kind} with {described} + {size} bytes from rank {src}")
    description, data = np.zeros(described, np.uint8), np.zeros(size, np.uint8)
    _broadcast(description, src, group)
    _broadcast(data, src, group)
    return description, data


def _broadcast(array: NDArray[Any], src: int, group: Any) -> None:
    """In place. A group without a CPU backend (NCCL alone) gets a copy on this process's GPU."""
    import torch
    import torch.distributed as dist

    tensor = torch.from_numpy(array)
    if array.size == 0:
        return
    on_cpu = "cpu" in str(dist.get_backend_config(group)) or dist.get_backend(group) == "gloo"
    moved = tensor if on_cpu else tensor.cuda()
    dist.broadcast(moved, src, group=group)
    if not on_cpu:
        tensor.copy_(moved)

"""Tensors as bytes and back, for the sources that move them: a view as a NumPy array, a description in JSON, a 64-bit sum.

bfloat16 has no NumPy dtype. Here it is uint16 words whose dtype says so in its metadata, which views and slices keep and
which Generator.sync_weights reads as bfloat16 (ext/tensor.c).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollmesh import _core
from rollmesh.errors import (
    ConfigError,
    DTypeError,
    DuplicateKeyError,
    FormatError,
    LayoutError,
    LimitError,
    UnsupportedTensorError,
)
from rollmesh.runtime.arguments import is_masked
from rollmesh.runtime.dtypes import BF16
from rollmesh.runtime.messages import shown

DTYPES: dict[str, np.dtype[Any]] = {
    "bfloat16": BF16,
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "float64": np.dtype(np.float64),
}
ALIGN = 64  # bytes; where a tensor begins in a file or a bucket
MAX_ENTRIES = 1_000_000
MAX_NAME = 1024
MAX_DIMS = 32  # NumPy's
MAX_HEADER = 256 << 20

_SUM_COLUMNS = 512
_SUM_WORDS = _SUM_COLUMNS << 12  # 16 MiB at a time


def as_array(name: str, tensor: Any) -> NDArray[Any]:
    """A C-contiguous array in one of DTYPES; a view where the tensor is one already. Torch tensors may be on any device."""
    if isinstance(tensor, np.ndarray):
        if is_masked(tensor):
            raise UnsupportedTensorError(f"{name}: a masked array; send .filled(value); wanted a dense tensor")
        if tensor.dtype.metadata and tensor.dtype.metadata.get("rollmesh") == "bfloat16":
            return np.asarray(tensor, order="C").view(BF16)
        array = np.asarray(tensor, order="C")  # ascontiguousarray would make [1] of a scalar
        if array.dtype.name == "bfloat16":  # ml_dtypes
            return array.view(np.uint16).view(BF16)
        if array.dtype.isnative and array.dtype.name in DTYPES:
            return array
        raise DTypeError(f"{name}: {array.dtype} cannot be sent; wanted {', '.join(DTYPES)}")
    if isinstance(tensor, _core.DeviceArray):
        return _from_gpu(tensor)
    if not is_torch(tensor):
        raise UnsupportedTensorError(f"{name}: {type(tensor).__name__} is neither a NumPy array nor a torch tensor")
    import torch

    tensor = dense(name, tensor).cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy().view(BF16)  # type: ignore[no-any-return]
    return tensor.numpy()  # type: ignore[no-any-return]


def is_torch(tensor: Any) -> bool:
    return type(tensor).__module__.split(".")[0] == "torch" or callable(getattr(tensor, "untyped_storage", None))


def dense(name: str, tensor: Any) -> Any:
    """A torch tensor as one of its values alone, in one of DTYPES and whole, where it is; a DTensor is gathered."""
    if (what := _objection(tensor)) is not None:
        raise UnsupportedTensorError(f"{name}: {what}; wanted a dense tensor")
    if callable(getattr(tensor, "full_tensor", None)):
        tensor = tensor.full_tensor()
    if tensor.numel() and tensor.untyped_storage().nbytes() == 0:  # resized, as sharded trainers do; NumPy would make up values
        raise LayoutError(f"{name}: the tensor's storage is empty (0 bytes)")
    if str(tensor.dtype).removeprefix("torch.") not in DTYPES:
        raise DTypeError(f"{name}: {tensor.dtype} cannot be sent; wanted {', '.join(DTYPES)}")
    return tensor.detach()


def _from_gpu(tensor: _core.DeviceArray) -> NDArray[Any]:
    return tensor.numpy().view(DTYPES[tensor.dtype])


def _objection(tensor: Any) -> str | None:
    """Why a torch tensor has no plain memory to read, whatever its device; in the words of ext/tensor.c."""
    if type(tensor).__name__ in ("FakeTensor", "FunctionalTensor"):
        return "a fake tensor, which has no data"
    if type(tensor).__name__ == "MaskedTensor":
        return "a masked tensor; send .to_tensor(value)"
    if tensor.is_meta:
        return "a meta tensor, which has no data"
    if tensor.is_nested:
        return "a nested tensor"
    return None if str(tensor.layout) == "torch.strided" else f"a tensor of layout {tensor.layout}"


def dtype_name(array: NDArray[Any]) -> str:
    return "bfloat16" if array.dtype.metadata else array.dtype.name


def bytes_of(array: NDArray[Any]) -> NDArray[np.uint8]:
    return array.reshape(-1).view(np.uint8)


def checksum(data: NDArray[np.uint8]) -> str:
    """64 bits over all bytes, at memory speed: 512 sums of words for each 16 MiB, and a hash of those. A change of any one
    word shows for certain, more than one with 1 − 2⁻⁶⁴."""
    hasher = hashlib.blake2b(str(data.size).encode(), digest_size=8)
    whole = data.size // (8 * _SUM_COLUMNS) * (8 * _SUM_COLUMNS)
    words = data[:whole].view(np.uint64)
    for at in range(0, words.size, _SUM_WORDS):
        hasher.update(np.add.reduce(words[at : at + _SUM_WORDS].reshape(-1, _SUM_COLUMNS), axis=0, dtype=np.uint64).tobytes())
    hasher.update(data[whole:].tobytes())
    return hasher.hexdigest()


def checksum_of_torch(data: Any) -> str:
    """The same of a torch tensor of bytes, wherever it is: 4 KiB of each 16 MiB come to the host."""
    import torch

    hasher = hashlib.blake2b(str(data.numel()).encode(), digest_size=8)
    whole = data.numel() // (8 * _SUM_COLUMNS) * (8 * _SUM_COLUMNS)
    for at in range(0, whole, 8 * _SUM_WORDS):
        words = data[at : min(at + 8 * _SUM_WORDS, whole)].view(torch.int64)  # whose sums wrap as those of uint64 do
        hasher.update(words.view(-1, _SUM_COLUMNS).sum(0).cpu().numpy().tobytes())
    hasher.update(data[whole:].cpu().numpy().tobytes())
    return hasher.hexdigest()


# -------------------------------------------------------------------------------------------------- descriptions
@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor in a block of bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    bytes: int
    sum: str


def lay_out(arrays: Sequence[tuple[str, NDArray[Any]]], *, sums: bool = True) -> tuple[list[Entry], int]:
    """Places and sums (or "") of arrays one after another, and the bytes of the block. LimitError for what `parse` would refuse."""
    if len(arrays) > MAX_ENTRIES:
        raise LimitError(f"{len(arrays)} weights in one set; the limit is {MAX_ENTRIES}")
    sizes = [(name, dtype_name(array), array.shape, array.nbytes) for name, array in arrays]
    entries, size = place(sizes)
    if sums:
        entries = [replace(entry, sum=checksum(bytes_of(array))) for entry, (_, array) in zip(entries, arrays, strict=True)]
    return entries, size


def place(tensors: Iterable[tuple[str, str, tuple[int, ...], int]]) -> tuple[list[Entry], int]:
    """Entries without a sum for tensors of (name, dtype, shape, bytes) one after another, and the bytes of the block."""
    entries, at = [], 0
    for name, dtype, shape, size in tensors:
        check_name(name)
        entries.append(Entry(name, dtype, shape, at, size, ""))
        at = (at + size + ALIGN - 1) // ALIGN * ALIGN
    return entries, at


def check_name(name: Any) -> None:
    if not isinstance(name, str) or not name:
        raise LimitError(f"a tensor's name is {shown(name)[:80]}, wanted a str of 1 to {MAX_NAME} characters")
    if len(name) > MAX_NAME:
        raise LimitError(f"a tensor's name has {len(name)} characters ({name[:40]}…); the limit is {MAX_NAME}")


def check_new_name(name: Any, seen: set[str]) -> None:
    """Of a set whose names so far are `seen`, this one among them afterwards."""
    check_name(name)
    if name in seen:
        raise DuplicateKeyError(f"{name} comes twice")
    if len(seen) == MAX_ENTRIES:
        raise LimitError(f"more than {MAX_ENTRIES} weights in one set; the limit is {MAX_ENTRIES}")
    seen.add(name)


def describe(entries: Iterable[Entry], **more: Any) -> bytes:
    return json.dumps({**more, "tensors": [asdict(entry) for entry in entries]}).encode()


def parse(text: bytes, block: int) -> tuple[list[Entry], dict[str, Any]]:
    """What `describe` wrote, for a block of so many bytes. Every place in it is checked; FormatError names the first wrong one."""
    try:
        values = json.loads(text)
        tensors = values.pop("tensors")
        entries = [Entry(**{**tensor, "shape": tuple(tensor["shape"])}) for tensor in tensors]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FormatError(f"a description of weights that is not one: {error}") from error
    if len(entries) > MAX_ENTRIES:
        raise LimitError(f"{len(entries)} weights in one set; the limit is {MAX_ENTRIES}")
    for entry in entries:
        _check_entry(entry, block)
    return entries, values


def _check_entry(entry: Entry, block: int) -> None:
    check_name(entry.name)
    sizes = (*entry.shape, entry.offset, entry.bytes)
    if not all(isinstance(size, int) and not isinstance(size, bool) and size >= 0 for size in sizes):
        raise FormatError(f"{entry.name}: sizes {sizes!r:.200} are not all integers >= 0")
    if len(entry.shape) > MAX_DIMS or math.prod(size or 1 for size in entry.shape) >= 2**60:
        raise FormatError(f"{entry.name}: shape {list(entry.shape)!r:.200} is beyond {MAX_DIMS} dimensions or 2^60 elements")
    if not isinstance(entry.dtype, str) or entry.dtype not in DTYPES:
        raise FormatError(f"{entry.name}: dtype {entry.dtype!r:.80} is not one of {', '.join(DTYPES)}")
    needed = math.prod(entry.shape) * DTYPES[entry.dtype].itemsize
    if entry.bytes != needed or entry.offset + entry.bytes > block or entry.offset % ALIGN:
        where = f"{entry.bytes} bytes at {entry.offset} of {block}"
        raise FormatError(f"{entry.name}: {where} do not hold {entry.dtype} {list(entry.shape)}, which takes {needed}")


def take(entry: Entry, block: NDArray[np.uint8], *, verify: bool) -> NDArray[Any]:
    """The tensor as a view of the block. FormatError when its sum differs."""
    data = block[entry.offset : entry.offset + entry.bytes]
    if verify and (seen := checksum(data)) != entry.sum:
        raise FormatError(f"{entry.name}: the sum of its bytes is {seen}, wanted {entry.sum}")
    return data.view(DTYPES[entry.dtype]).reshape(entry.shape)


def bucketed(entries: Iterable[tuple[str, Any]], bucket_bytes: int) -> Iterator[list[tuple[str, Any]]]:
    """Groups of consecutive entries of at most bucket_bytes together; an entry larger than that is a group of its own."""
    if isinstance(bucket_bytes, bool) or not isinstance(bucket_bytes, (int, np.integer)):
        raise ConfigError(f"bucket_bytes = {shown(bucket_bytes)}, wanted a number of bytes")
    if bucket_bytes <= 0:
        raise LimitError(f"bucket_bytes={bucket_bytes} is not > 0")
    bucket: list[tuple[str, Any]] = []
    size = 0
    for name, tensor in entries:
        nbytes = int(tensor.nbytes)
        if bucket and size + nbytes > bucket_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += nbytes
    if bucket:
        yield bucket

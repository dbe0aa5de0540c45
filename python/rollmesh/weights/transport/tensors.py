"""Tensors as bytes, for the transports that move them: a view as a NumPy array, a 64-bit sum, groups of bounded size.

bfloat16 has no NumPy dtype. Here it is uint16 words whose dtype says so in its metadata, which views and slices keep and
which Generator.sync_weights reads as bfloat16 (ext/tensor.c).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollmesh import _core
from rollmesh.errors import ConfigError, DTypeError, LayoutError, LimitError, UnsupportedTensorError
from rollmesh.runtime.arguments import is_masked
from rollmesh.runtime.dtypes import BF16
from rollmesh.runtime.messages import shown

DTYPES: dict[str, np.dtype[Any]] = {
    "bfloat16": BF16,
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "float64": np.dtype(np.float64),
}

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

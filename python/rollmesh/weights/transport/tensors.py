"""Tensors as bytes, for the transports: NumPy views, checksums and buckets of bounded size.

How a source is read: a dict, a list, a tuple or the items() of a dict holds all its tensors at
once, so views of the tensors are kept until the call ends. Any other source (an iterator or a
mapping of another class) may use the memory of an entry again for the next one, so each tensor is
written, sent or copied before the next one is read.

NumPy has no bfloat16. Here bfloat16 is uint16 with metadata in the dtype. Views and slices keep the
metadata, and Generator.sync_weights reads such arrays as bfloat16 (ext/tensor.c).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollmesh import _core
from rollmesh.errors import ConfigError, DTypeError, LayoutError, LimitError, UnsupportedTensorError
from rollmesh.runtime.arguments import exportable, is_integer, is_masked
from rollmesh.runtime.dtypes import BF16
from rollmesh.runtime.messages import plain, shown

DTYPES: dict[str, np.dtype[Any]] = {
    "bfloat16": BF16,
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "float64": np.dtype(np.float64),
}

_VIEWS: tuple[type, ...] = (type({}.items()), type(OrderedDict().items()))
_HOLDING: tuple[type, ...] = (dict, OrderedDict, list, tuple, *_VIEWS)


def as_array(name: str, tensor: Any) -> NDArray[Any]:
    """Returns a C-contiguous array of a dtype in DTYPES, a view if possible. `tensor` may be a
    torch tensor on any device."""
    if isinstance(tensor, np.ndarray):
        if is_masked(tensor):
            raise UnsupportedTensorError(
                f"{name}: expected a dense tensor, got a masked array; send .filled(value)"
            )
        if tensor.dtype.metadata and tensor.dtype.metadata.get("rollmesh") == "bfloat16":
            return np.asarray(tensor, order="C").view(BF16)
        array = np.asarray(tensor, order="C")  # ascontiguousarray would change shape [] to [1]
        if array.dtype.name == "bfloat16":  # the dtype of ml_dtypes
            return array.view(np.uint16).view(BF16)
        if array.dtype.isnative and array.dtype.name in DTYPES:
            return array
        raise DTypeError(f"{name}: expected {', '.join(DTYPES)}, got {array.dtype}")
    if isinstance(tensor, _core.DeviceArray):
        return tensor.numpy().view(DTYPES[tensor.dtype])
    if not is_torch(tensor):
        raise UnsupportedTensorError(
            f"{name}: expected a NumPy array or a torch tensor, got a {type(tensor).__name__}"
        )
    import torch

    tensor = dense(name, tensor).cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy().view(BF16)  # type: ignore[no-any-return]
    return tensor.numpy()  # type: ignore[no-any-return]


def is_torch(tensor: Any) -> bool:
    return type(tensor).__module__.split(".")[0] == "torch" or callable(
        getattr(tensor, "untyped_storage", None)
    )


def dense(name: str, tensor: Any) -> Any:
    """Returns a dense torch tensor on its device, of a dtype in DTYPES and detached from autograd.
    Gathers a DTensor."""
    if callable(getattr(tensor, "full_tensor", None)):
        tensor = tensor.full_tensor()
    tensor = exportable(name, tensor)
    # Sharded trainers resize the storage to 0; NumPy would then read freed memory.
    if tensor.numel() and tensor.untyped_storage().nbytes() == 0:
        raise LayoutError(f"{name}: expected a tensor with storage, got one of 0 bytes")
    if str(tensor.dtype).removeprefix("torch.") not in DTYPES:
        raise DTypeError(f"{name}: expected {', '.join(DTYPES)}, got {tensor.dtype}")
    return tensor


def dtype_name(array: NDArray[Any]) -> str:
    return "bfloat16" if array.dtype.metadata else array.dtype.name


def bytes_of(array: NDArray[Any]) -> NDArray[np.uint8]:
    return array.reshape(-1).view(np.uint8)


def checksum(data: NDArray[np.uint8]) -> str:
    """Returns a 64-bit checksum of bytes and their places. csrc/base/checksum.h lists the errors
    that it detects."""
    return f"{_core.checksum(data):016x}"


def check_source(source: Any) -> None:
    """Raises an error for a module, for a tensor and for any other object that is neither a mapping
    nor an iterable of (name, tensor) pairs."""
    if callable(getattr(source, "state_dict", None)):
        raise UnsupportedTensorError(
            f"source: expected a state dict, got a {type(source).__name__}; pass its state_dict()"
        )
    if (
        not isinstance(source, Iterable)
        or isinstance(source, (str, bytes))
        or hasattr(source, "__array__")
    ):
        raise UnsupportedTensorError(
            "source: expected a mapping or an iterator of (name, tensor), got a "
            f"{type(source).__name__}"
        )


def pair_of(entry: Any) -> tuple[Any, Any]:
    """Returns the name and tensor of an entry of a source or of a mapping's items()."""
    if not isinstance(entry, (tuple, list)) or len(entry) != 2:
        raise UnsupportedTensorError(
            f"weights: expected pairs (name, tensor), got a {type(entry).__name__}"
        )
    return entry[0], entry[1]


def entries_of(source: Mapping[str, Any] | Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """Returns an iterator over the pairs of a source; each pair is read once."""
    return map(pair_of, source.items() if isinstance(source, Mapping) else source)


def holds_tensors(source: Any) -> bool:
    """Returns whether a source holds all its tensors at once, so that views may be kept."""
    return type(source) in _HOLDING


def own(tensor: Any) -> Any:
    """Returns a copy of a NumPy array or torch tensor on its device, and any other object
    unchanged."""
    if isinstance(tensor, np.ndarray):
        return tensor.copy()
    return tensor.detach().clone() if is_torch(tensor) else tensor


def own_array(name: str, tensor: Any) -> NDArray[Any]:
    """Returns a copy in the form that as_array returns."""
    array = as_array(name, tensor)
    is_made = is_torch(tensor) and tensor.device.type != "cpu"
    return array if is_made or isinstance(tensor, _core.DeviceArray) else array.copy()


def bucketed(
    entries: Iterable[tuple[str, Any]], bucket_bytes: int
) -> Iterator[list[tuple[str, Any]]]:
    """Yields consecutive entries in buckets of at most bucket_bytes bytes. A larger entry has its
    own bucket.

    Copies the tensors unless `entries` is a dict's items(), a list or a tuple: an iterator may use
    the memory of an entry again for the next one.
    """
    pairs = entries_of(entries)
    if not holds_tensors(entries):
        pairs = ((name, own(tensor)) for name, tensor in pairs)
    return grouped(pairs, bucket_bytes)


def grouped(
    entries: Iterable[tuple[str, Any]], bucket_bytes: int
) -> Iterator[list[tuple[str, Any]]]:
    """Groups entries as `bucketed` does, without copying them."""
    if not is_integer(bucket_bytes):
        raise ConfigError(f"bucket_bytes: expected a number of bytes, got {shown(bucket_bytes)}")
    if bucket_bytes <= 0:
        raise LimitError(f"bucket_bytes: expected a number above 0, got {bucket_bytes}")
    bucket: list[tuple[str, Any]] = []
    size = 0
    for name, tensor in entries:
        nbytes = getattr(tensor, "nbytes", None)
        if not isinstance(nbytes, (int, np.integer)):
            raise UnsupportedTensorError(
                f"{plain(name)}: expected a tensor with nbytes, got a {type(tensor).__name__}"
            )
        if bucket and size + nbytes > bucket_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += int(nbytes)
    if bucket:
        yield bucket

"""A trainer's weights in pieces: what one rank has of a tensor, as a box of the whole tensor's indices.

    DTensor (FSDP2, tensor parallel, any mesh)   to_local(), and where torch says that it lies
    Piece(array, shape, offsets)                 the same, said by the caller
    anything else                                the whole tensor

Shard and Replicate make boxes. _StridedShard (what FSDP over tensor parallelism makes of one dim) and Partial do not: those tensors are
gathered by full_tensor(), one at a time, which is a collective of the trainer's mesh.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollmesh.errors import DTypeError, LayoutError, ShapeError, UnexpectedKeyError, UnsupportedTensorError
from rollmesh.runtime.messages import shown
from rollmesh.weights.transport.tensors import DTYPES, as_array, dtype_name

Dims = tuple[int, ...]
MAX_DIMS = 4
MAX_ELEMENTS = 2**60  # what NumPy can describe, in float64


def _dims(name: str, value: Any) -> Dims:
    if not isinstance(value, (tuple, list)) or not all(isinstance(n, (int, np.integer)) and not isinstance(n, bool) for n in value):
        raise LayoutError(f"{name} = {shown(value)} of a piece, wanted a tuple of integers")
    return tuple(int(n) for n in value)


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """What this rank has of one tensor, in the source of Generator.sync_weights where ranks are processes: a trainer that shards without
    DTensor. Every rank that has a source names the same tensors in the same order; one without a part of a tensor gives an empty array.

    array    torch or NumPy, of as many dims as the tensor; viewed, not copied
    shape    of the whole tensor, in elements
    offsets  where in it array[0, …, 0] lies, in elements

    Raises LayoutError when the array is not inside the shape, UnsupportedTensorError when it is no array.
    """

    array: Any
    shape: Dims
    offsets: Dims

    def __post_init__(self) -> None:
        for name in ("shape", "offsets"):
            object.__setattr__(self, name, _dims(name, getattr(self, name)))
        if not isinstance(getattr(self.array, "shape", None), tuple):
            raise UnsupportedTensorError(f"the array of a piece is a {type(self.array).__name__}, wanted a NumPy array or a torch tensor")
        fits = len(self.shape) == len(self.offsets) == len(self.sizes) <= MAX_DIMS
        if not fits or not all(0 <= o <= o + n <= s for o, n, s in zip(self.offsets, self.sizes, self.shape, strict=True)):
            raise LayoutError(f"{self._where()}, wanted it inside, of at most {MAX_DIMS} dims")

    @property
    def sizes(self) -> Dims:
        return tuple(int(n) for n in self.array.shape)

    def _where(self) -> str:
        return f"a piece of shape {list(self.sizes)} at {list(self.offsets)} of a tensor of shape {list(self.shape)}"

    def whole(self) -> Any:
        """The array, when it is the whole tensor; LayoutError otherwise."""
        if self.sizes != self.shape:
            raise LayoutError(f"{self._where()}, wanted all of it: only sync_weights where ranks are processes puts pieces together")
        return self.array


def is_sharded(tensor: Any) -> bool:
    return isinstance(tensor, Piece) or callable(getattr(tensor, "full_tensor", None))


def local_tensor(tensor: Any) -> Any:
    """The tensor that an engine can read by itself: a DTensor is gathered, autograd is left behind. LayoutError for a part of one."""
    if isinstance(tensor, Piece):
        tensor = tensor.whole()
    elif is_sharded(tensor):
        tensor = tensor.full_tensor()
    if getattr(tensor, "requires_grad", False):
        tensor = tensor.detach()
    return tensor


@dataclass(frozen=True, slots=True)
class Part:
    """One entry of this rank's source."""

    name: str
    dtype: str
    shape: Dims
    offsets: Dims
    sizes: Dims  # any 0: this rank has nothing of it
    array: Callable[[], NDArray[Any]]  # of `sizes`, C-contiguous


def part_of(name: Any, tensor: Any) -> Part:
    """Raises UnexpectedKeyError, UnsupportedTensorError, DTypeError, ShapeError or LayoutError. No collective, and nothing is copied that
    is on the CPU and contiguous."""
    if not isinstance(name, str):
        raise UnexpectedKeyError(f"a weight's name is {shown(name)}, wanted str")
    if isinstance(tensor, Piece):
        return _given(name, tensor.array, tensor.shape, tensor.offsets)
    if not is_sharded(tensor):
        return _given(name, tensor, None, None)
    offsets = _offsets_of(tensor)
    if offsets is not None:
        return _given(name, tensor.to_local(), _shape(tensor), offsets)
    dtype, shape = str(tensor.dtype).removeprefix("torch."), _shape(tensor)
    if dtype not in DTYPES:
        raise DTypeError(f"{name}: {dtype} cannot be sent; wanted {', '.join(DTYPES)}")
    return Part(name, dtype, shape, (0,) * len(shape), shape, lambda: as_array(name, tensor))


def _given(name: str, tensor: Any, shape: Dims | None, offsets: Dims | None) -> Part:
    array = as_array(name, tensor)
    shape = array.shape if shape is None else shape
    if math.prod(size or 1 for size in shape) >= MAX_ELEMENTS:
        raise ShapeError(f"{name}: a tensor of shape {list(shape)}, wanted fewer than 2^60 elements")
    sizes = array.shape if array.size and len(array.shape) == len(shape) else (0,) * len(shape)
    return Part(name, dtype_name(array), shape, offsets or (0,) * len(shape), sizes, lambda: array)


def _shape(tensor: Any) -> Dims:
    return tuple(int(n) for n in tensor.shape)


def _offsets_of(tensor: Any) -> Dims | None:
    """Where a DTensor's local tensor lies; None when it is no box. A rank with nothing of it lies anywhere."""
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if not isinstance(tensor, DTensor) or not all(type(placement) in (Shard, Replicate) for placement in tensor.placements):
        return None
    local = tensor.to_local()
    if local.numel() == 0:
        return (0,) * tensor.ndim
    shape, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    if tuple(shape) != tuple(local.shape):
        raise LayoutError(f"a DTensor whose local tensor is {list(local.shape)}, wanted {list(shape)} by its placements")
    return tuple(int(offset) for offset in offsets)

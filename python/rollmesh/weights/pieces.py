"""A sharded trainer's tensors: the piece that one rank holds, as a box of the whole tensor.

    DTensor (FSDP2, tensor parallel, any mesh)   to_local(), with torch's offsets
    Piece(array, shape, offsets)                 the same, given by the caller
    anything else                                the whole tensor

FSDP over tensor or expert parallelism of the same dim makes a _StridedShard: the later mesh dims
cut the dim first. Its local tensor is a box too. The local tensors of other DTensors are not boxes
(Partial, a _StridedShard from a view or with unequal parts): full_tensor() gathers these DTensors
one at a time, in a collective of the trainer's mesh.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from numpy.typing import NDArray

from rollmesh.errors import (
    DTypeError,
    LayoutError,
    ShapeError,
    UnexpectedKeyError,
    UnsupportedTensorError,
)
from rollmesh.runtime.arguments import is_integer
from rollmesh.runtime.messages import shown
from rollmesh.weights.transport.tensors import DTYPES, as_array, dtype_name

Dims = tuple[int, ...]
MAX_DIMS = 4
MAX_ELEMENTS = 2**60  # NumPy's limit for float64


def _dims(name: str, value: Any) -> Dims:
    if not isinstance(value, (tuple, list)) or not all(map(is_integer, value)):
        raise LayoutError(f"{name} of a piece: expected a tuple of integers, got {shown(value)}")
    return tuple(int(n) for n in value)


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """The part of one tensor that this rank holds, for trainers that shard without DTensor and call
    Generator.sync_weights with processes as ranks. Every rank with a source names the same tensors
    in the same order; a rank that holds no part of a tensor gives an empty array.

    array    a torch tensor or NumPy array with as many dims as the whole tensor; it is not copied
    shape    shape of the whole tensor, in elements
    offsets  position of array[0, …, 0] in the whole tensor, in elements

    Raises LayoutError if the array is not inside the shape, UnsupportedTensorError if it is not an
    array.
    """

    array: Any
    shape: Dims
    offsets: Dims

    def __post_init__(self) -> None:
        for name in ("shape", "offsets"):
            object.__setattr__(self, name, _dims(name, getattr(self, name)))
        if not isinstance(getattr(self.array, "shape", None), tuple):
            raise UnsupportedTensorError(
                "array of a piece: expected a NumPy array or a torch tensor, got a "
                f"{type(self.array).__name__}"
            )
        fits = len(self.shape) == len(self.offsets) == len(self.sizes) <= MAX_DIMS
        if not fits or not all(
            0 <= o <= o + n <= s
            for o, n, s in zip(self.offsets, self.sizes, self.shape, strict=True)
        ):
            raise LayoutError(
                f"expected a piece of at most {MAX_DIMS} dims inside its tensor, got "
                f"{self._where()}"
            )

    @property
    def sizes(self) -> Dims:
        return tuple(int(n) for n in self.array.shape)

    def _where(self) -> str:
        return (
            f"a piece of shape {list(self.sizes)} at {list(self.offsets)} of a tensor of shape "
            f"{list(self.shape)}"
        )

    def whole(self) -> Any:
        """Returns the array if it is the whole tensor; otherwise raises LayoutError."""
        if self.sizes != self.shape:
            raise LayoutError(
                f"expected the whole tensor, got {self._where()}; only sync_weights over "
                "processes joins pieces"
            )
        return self.array


def is_sharded(tensor: Any) -> bool:
    return isinstance(tensor, Piece) or callable(getattr(tensor, "full_tensor", None))


def local_tensor(tensor: Any) -> Any:
    """Returns the whole tensor: gathers a DTensor. Raises LayoutError for a Piece that is not the
    whole tensor."""
    if isinstance(tensor, Piece):
        tensor = tensor.whole()
    elif is_sharded(tensor):
        tensor = tensor.full_tensor()
    return tensor


class Part(NamedTuple):
    """One entry of this rank's source."""

    name: str
    dtype: str
    shape: Dims
    offsets: Dims
    sizes: Dims  # contains a 0 if this rank holds no part of the tensor
    array: Callable[[], NDArray[Any]]  # returns a C-contiguous array of these sizes


def part_of(name: Any, tensor: Any) -> Part:
    """Describes an entry, without calling a collective or copying a contiguous CPU tensor. Raises
    UnexpectedKeyError, UnsupportedTensorError, DTypeError, ShapeError or LayoutError."""
    if not isinstance(name, str):
        raise UnexpectedKeyError(f"a weight's name: expected a str, got {shown(name)}")
    if isinstance(tensor, Piece):
        return _given(name, tensor.array, tensor.shape, tensor.offsets)
    if not is_sharded(tensor):
        return _given(name, tensor, None, None)
    offsets = _offsets_of(tensor)
    if offsets is not None:
        return _given(name, tensor.to_local(), _shape(tensor), offsets)
    dtype, shape = str(tensor.dtype).removeprefix("torch."), _shape(tensor)
    if dtype not in DTYPES:
        raise DTypeError(f"{name}: expected {', '.join(DTYPES)}, got {dtype}")
    return Part(name, dtype, shape, (0,) * len(shape), shape, lambda: as_array(name, tensor))


def _given(name: str, tensor: Any, shape: Dims | None, offsets: Dims | None) -> Part:
    array = as_array(name, tensor)
    shape = array.shape if shape is None else shape
    if math.prod(size or 1 for size in shape) >= MAX_ELEMENTS:
        raise ShapeError(f"{name}: expected fewer than 2^60 elements, got shape {list(shape)}")
    sizes = array.shape if array.size and len(array.shape) == len(shape) else (0,) * len(shape)
    return Part(name, dtype_name(array), shape, offsets or (0,) * len(shape), sizes, lambda: array)


def _shape(tensor: Any) -> Dims:
    return tuple(int(n) for n in tensor.shape)


def _offsets_of(tensor: Any) -> Dims | None:
    """Returns the offsets of a DTensor's local tensor, zeros if the local tensor is empty. Returns
    None if the local tensor is not a box; all ranks get the same answer."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if not isinstance(tensor, DTensor) or not _is_box(tensor):
        return None
    local = tensor.to_local()
    if local.numel() == 0:
        return (0,) * tensor.ndim
    shape, offsets = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    if tuple(shape) != tuple(local.shape):
        raise LayoutError(
            f"a DTensor: expected a local tensor of shape {list(shape)} by its placements, got "
            f"{list(local.shape)}"
        )
    return tuple(int(offset) for offset in offsets)


def _is_box(tensor: Any) -> bool:
    """Returns whether the local tensor is a box. A _StridedShard gives a box if its split_factor is
    the number of parts into which later mesh dims cut the same dim, and all these parts are
    equal."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    parts: dict[int, int] = {}  # dim → number of parts that the mesh dims from here on make of it
    strided: set[int] = set()
    for size, placement in zip(
        reversed(tensor.device_mesh.shape), reversed(tensor.placements), strict=True
    ):
        if type(placement) is Replicate:
            continue
        if type(placement) not in (Shard, _StridedShard):
            return False
        later = parts.get(placement.dim, 1)
        if type(placement) is _StridedShard:
            if placement.split_factor != later:
                return False
            strided.add(placement.dim)
        parts[placement.dim] = later * size
    return all(tensor.shape[dim] % parts[dim] == 0 for dim in strided)

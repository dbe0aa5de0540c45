"""Where an op of rollmesh.ops runs: on the CPU over NumPy arrays, or on the CUDA device that its
arrays are on.

The first array of a device opens it for ops, with a stream and a workspace that are kept until
`release_devices`. Arrays of other libraries are taken by DLPack, without a copy; the op waits for
their stream. DLPack cannot say when an op has finished with the memory. So a call returns when its
op is done; or, `with on_stream(handle, device)`, ops are ordered with that stream, as if they were
enqueued on it, and a call returns at once. Then the arrays must be used on that stream only.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from rollmesh import _core
from rollmesh._core import available_isas
from rollmesh.errors import ConfigError, ShapeError, UnsupportedTensorError
from rollmesh.ops.arguments import MAX_SIZE, MAX_THREADS, Array, kernels, new_array, words_of
from rollmesh.runtime.arguments import integer_of
from rollmesh.runtime.devices import CUDA_FAMILIES, LIBRARY_SWITCH, device_of
from rollmesh.runtime.messages import shown

HOST = -1
CUDA_TYPES = (2, 13)  # DLPack's: a device's memory, and managed memory
ROLES = _core.op_arguments()
_ARRAYS = {
    op: [name for name, role in roles.items() if role not in ("number", "host")]
    for op, roles in ROLES.items()
}

_streams: ContextVar[dict[int, int]] = ContextVar("streams", default={})  # noqa: B039 (never changed)


# ----------------------------------------------------------------------------------- what is kept
def _process() -> tuple[int, str]:
    """The process and library that open a device: CUDA does not survive a fork."""
    return os.getpid(), os.environ.get(LIBRARY_SWITCH, "")


def op_device_at(ordinal: int) -> _core.OpDevice:
    return _op_device(ordinal, *_process())


@lru_cache(maxsize=64)
def _op_device(ordinal: int, process: int, switch: str) -> _core.OpDevice:
    device = device_of(f"cuda:{ordinal}")
    assert device.cuda_library is not None
    return _core.OpDevice(device.cuda_library, device.cuda_ordinal)


@lru_cache(maxsize=64)
def _device_kernels(
    family: str, ordinal: int, stream: int, process: int, switch: str
) -> _core.Kernels:
    return _core.Kernels(family, 1, _op_device(ordinal, process, switch), stream)


def release_devices() -> None:
    """Frees the streams and workspaces of devices, once none of their arrays is left. The next op
    opens its device again."""
    _device_kernels.cache_clear()
    _op_device.cache_clear()


@contextmanager
def on_stream(stream: int, device: str) -> Iterator[None]:
    """Inside, ops of this thread on `device` ("cuda:0") are ordered with a CUDA stream:
    torch.cuda.Stream.cuda_stream, cupy's .ptr; 0 is the default stream. A call waits only for
    indices on the device; a later call reports a kernel's failure. Freeing an output waits for the
    device. ConfigError from an op: the stream belongs to another device, or is being captured."""
    ordinal = _ordinal(device)
    handle = integer_of(ConfigError, "stream", stream, 0, 2**64 - 1)
    token = _streams.set(
        {**_streams.get(), ordinal: handle or 1}
    )  # 1 is how the default stream is written where 0 is none
    try:
        yield
    finally:
        _streams.reset(token)


def to_device(array: Array, device: str = "cuda") -> _core.DeviceArray:
    """A copy of a NumPy array on a device; uint16 words are bfloat16 there."""
    if not isinstance(array, np.ndarray):
        raise UnsupportedTensorError(f"array: expected a NumPy array, got a {type(array).__name__}")
    return op_device_at(_ordinal(device)).to_device(words_of(array))


def _ordinal(device: Any) -> int:
    """ "cuda" is the first of them."""
    if device == "cpu":
        raise ConfigError("device: expected 'cuda' or 'cuda:N', got 'cpu'")
    return max(device_of(device).cuda_ordinal, 0)


# ----------------------------------------------------------------------------------------- one op
class Op(NamedTuple):
    """Kernels, and the device of the outputs."""

    core: _core.Kernels
    op_device: _core.OpDevice | None = None  # None: the host

    def new(self, shape: tuple[int, ...], dtype: Any, *, zeros: bool = False) -> Array:
        return new_in(self.op_device, shape, dtype, zeros=zeros)


def new_in(
    op_device: _core.OpDevice | None, shape: tuple[int, ...], dtype: Any, *, zeros: bool = False
) -> Array:
    """An output; on a device zeros in any case. MemoryError or CapacityError where memory is
    short."""
    if op_device is None:
        return new_array(shape, dtype, np.zeros if zeros else np.empty)
    if any(not 0 <= size <= MAX_SIZE for size in shape[1:]):  # the first may count groups
        raise ShapeError(f"expected an output that can be addressed, got shape {shown(shape)}")
    return op_device.zeros(shape, dtype_name(dtype))


def dtype_name(dtype: Any) -> str:
    """A device array's, of NumPy's or its own: uint16 words are bfloat16."""
    name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
    return "bfloat16" if name == "uint16" else name


def op_device_on(device: str) -> _core.OpDevice | None:
    """For what takes no array of the device; None is the CPU."""
    return None if device == "cpu" else op_device_at(_ordinal(device))


def run(op: str, /, isa: str | None, threads: int, **arguments: Any) -> tuple[Any, ...]:
    """Runs an op of the table (ext/ops/ops.h) on the device of its arrays and returns its outputs,
    in the table's order. For an output that is None the op makes an array, for an optional output
    only if it is `...`."""
    given = {
        name: array
        for name in _ARRAYS[op]
        if (array := arguments.get(name)) is not None and array is not ...
    }
    over, taken = op_over(isa, threads, given, ROLES[op])
    arguments.update(zip(given, taken))
    return over.core.run(op, arguments)


def op_over(
    isa: str | None, threads: int, arrays: dict[str, Any], roles: dict[str, str] | None = None
) -> tuple[Op, list[Any]]:
    """(Op, the arrays as it takes them, in order). On the CPU that is each as it is, ml_dtypes'
    bfloat16 as words. An array whose role is "index" may be on the host in any case: it is small,
    and the host checks it.

    ConfigError: an isa of another device. UnsupportedTensorError: arrays on several devices."""
    if isa not in CUDA_FAMILIES and set(map(type, arrays.values())) == {np.ndarray}:
        return Op(kernels(isa, threads)), list(map(words_of, arrays.values()))
    places = {name: _place(array) for name, array in arrays.items()}
    first = next((name for name, place in places.items() if place > HOST), None)
    if first is None:
        if isa in CUDA_FAMILIES:
            families = ", ".join(available_isas())
            raise ConfigError(
                f"isa: expected one of {families}, since {next(iter(places))} is on the CPU, got "
                f"{isa!r}"
            )
        return Op(kernels(isa, threads)), [words_of(array) for array in arrays.values()]
    ordinal = places[first]
    op = _op_at(isa, threads, first, ordinal)
    assert op.op_device is not None
    indices = {name for name, role in (roles or {}).items() if role == "index"}
    return op, [
        array
        if places[name] == HOST and name in indices and isinstance(array, np.ndarray)
        else _taken(op.op_device, name, array, places[name], first, ordinal)
        for name, array in arrays.items()
    ]


def _place(array: Any) -> int:
    """A CUDA device's number, or HOST, also for what is no array: the op refuses that."""
    if isinstance(array, np.ndarray):
        return HOST
    where = getattr(type(array), "__dlpack_device__", None)
    try:
        kind, number = where(array) if where is not None else (1, 0)
    except (
        BufferError,
        RuntimeError,
        TypeError,
        ValueError,
    ):  # torch's meta device, which DLPack does not know; or a producer that lies
        return HOST
    return number if kind in CUDA_TYPES and isinstance(number, int) and number >= 0 else HOST


def _op_at(isa: str | None, threads: int, first: str, ordinal: int) -> Op:
    family = CUDA_FAMILIES[0] if isa is None else isa
    if family not in CUDA_FAMILIES:
        raise ConfigError(
            f"isa: expected {' or '.join(CUDA_FAMILIES)}, since {first} is on cuda:{ordinal}, got "
            f"{shown(isa)}"
        )
    if integer_of(ConfigError, "threads", threads, 1, MAX_THREADS) != 1:
        raise ConfigError(f"threads: expected 1, since {first} is on cuda:{ordinal}, got {threads}")
    op_device, stream = op_device_at(ordinal), _streams.get().get(ordinal, 0)
    if stream:
        op_device.check_stream(stream)  # before anything is allocated
    return Op(_device_kernels(family, ordinal, stream, *_process()), op_device)


def _taken(
    op_device: _core.OpDevice, name: str, array: Any, place: int, first: str, ordinal: int
) -> Any:
    if place != ordinal:
        where = "the CPU" if place == HOST else f"cuda:{place}"
        raise UnsupportedTensorError(
            f"expected all arrays of a call on one device, got {name} on {where} and {first} on "
            f"cuda:{ordinal}"
        )
    if isinstance(array, _core.DeviceArray) and array.op_device is op_device:
        return array
    return op_device.take(name, array)

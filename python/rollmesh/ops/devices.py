"""Selects where an op of rollmesh.ops runs: on the CPU over NumPy arrays, or on the CUDA device of
its arrays.

The first array of a device opens it for ops, with a stream and a workspace that are kept until
`release_devices`. Arrays of other libraries are taken by DLPack, without a copy, and the op waits
for their stream. DLPack has no way to report that an op has finished with the memory, so a call
returns after its op has finished. Inside `with on_stream(handle, device)`, ops are instead ordered
with that stream, as if they were enqueued on it, and a call returns at once; the arrays must then
be used only on that stream.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

import numpy as np

from rollmesh import _core
from rollmesh._core import available_isas
from rollmesh.errors import ConfigError, ShapeError, UnsupportedTensorError
from rollmesh.ops.arguments import (
    MAX_THREADS,
    USER_DTYPES,
    Array,
    kernels,
    words_of,
)
from rollmesh.runtime.arguments import exportable, integer_of
from rollmesh.runtime.devices import CUDA_FAMILIES, LIBRARY_SWITCH, device_name, device_of
from rollmesh.runtime.messages import shown

HOST = -1
CUDA_TYPES = (2, 13)  # DLPack's numbers of device memory and managed memory
ROLES = _core.op_arguments()
_ARRAYS = {
    op: [name for name, role in roles.items() if role not in ("number", "host")]
    for op, roles in ROLES.items()
}

_streams: ContextVar[dict[int, int]] = ContextVar("streams", default={})  # noqa: B039 (never changed)


# ----------------------------------------------------------------------------------- what is kept
def _process() -> tuple[int, str]:
    """Returns the process and the library that open a device. The process is part of the cache key
    because CUDA does not survive a fork."""
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
    """Frees the streams and workspaces of devices, after all their arrays were freed. The next op
    opens its device again."""
    _device_kernels.cache_clear()
    _op_device.cache_clear()


@contextmanager
def on_stream(stream: int, device: str) -> Iterator[None]:
    """Returns a context in which ops of this thread on `device` ("cuda:0") are ordered with a CUDA
    stream. stream: torch.cuda.Stream.cuda_stream or cupy's .ptr; 0 is the default stream. A call
    waits only for indices on the device, and a later call reports the failure of a kernel. Freeing
    an output waits for the device. An op raises ConfigError if the stream belongs to another device
    or is being captured."""
    ordinal = _ordinal(device)
    handle = integer_of(ConfigError, "stream", stream, 0, 2**64 - 1)
    # CUDA's handle 1 also means the default stream; 0 stands for no stream here.
    token = _streams.set({**_streams.get(), ordinal: handle or 1})
    try:
        yield
    finally:
        _streams.reset(token)


def to_device(array: Array, device: str = "cuda") -> _core.DeviceArray:
    """Copies a NumPy array to a device. uint16 words become bfloat16 there."""
    if not isinstance(array, np.ndarray):
        raise UnsupportedTensorError(f"array: expected a NumPy array, got a {type(array).__name__}")
    return op_device_at(_ordinal(device)).to_device(words_of(array))


def _ordinal(device: Any) -> int:
    """Returns the number of a CUDA device; "cuda" is the first one."""
    if device_name(device) == "cpu":
        raise ConfigError("device: expected 'cuda' or 'cuda:N', got 'cpu'")
    return max(device_of(device).cuda_ordinal, 0)


# ----------------------------------------------------------------------------------------- one op
def zeros_in(op_device: _core.OpDevice | None, shape: tuple[int, ...], dtype: Any) -> Array:
    """Makes an array of zeros. Raises MemoryError or CapacityError if memory is short, and
    ShapeError for a size that is too large for an array."""
    if op_device is not None:
        return op_device.zeros(shape, dtype_name(dtype))
    try:
        return np.zeros(shape, dtype)
    except ValueError as error:
        raise ShapeError(
            f"expected an output that can be addressed, got shape {shown(shape)}"
        ) from error


def dtype_name(dtype: Any) -> str:
    """Returns the name of a device array's dtype, for a NumPy dtype or a name; uint16 stands for
    bfloat16."""
    name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
    return "bfloat16" if name == "uint16" else name


def op_device_on(device: str) -> _core.OpDevice | None:
    """Returns the OpDevice of a device's name, for functions without array arguments; None for the
    CPU."""
    return None if device_name(device) == "cpu" else op_device_at(_ordinal(device))


def run(op: str, /, isa: str | None, threads: int, **arguments: Any) -> tuple[Any, ...]:
    """Runs an op of the table (ext/ops/ops.h) on the device of its arrays. Returns its outputs in
    the order of the table. The op makes a new array for an output that is None, and for an optional
    output that is `...`."""
    given = {}
    is_plain = (
        str(isa) not in CUDA_FAMILIES
    )  # whether all arrays are as the CPU's kernels take them
    for name in _ARRAYS[op]:
        array = arguments.get(name)
        if array is not None and array is not ...:
            given[name] = array
            is_plain = is_plain and type(array) is np.ndarray and array.dtype.num < USER_DTYPES
    if is_plain:
        return kernels(isa, threads).run(op, arguments)
    over, taken = op_over(isa, threads, given, ROLES[op])
    arguments.update(zip(given, taken))
    return over.run(op, arguments)


def op_over(
    isa: str | None, threads: int, arrays: dict[str, Any], roles: dict[str, str] | None = None
) -> tuple[_core.Kernels, list[Any]]:
    """Returns the kernels and the arrays in the form that they take, in order. On the CPU arrays
    are unchanged, except that ml_dtypes' bfloat16 is viewed as words. An array with the role
    "index" may always be on the host, since it is small and the host checks it.

    Raises ConfigError for an isa of another device, and UnsupportedTensorError for arrays on
    several devices."""
    places = {name: _place(array) for name, array in arrays.items()}
    first = next((name for name, place in places.items() if place > HOST), None)
    if first is None:
        if str(isa) in CUDA_FAMILIES:  # of any type
            raise ConfigError(
                f"isa: expected one of {', '.join(available_isas())}, since {next(iter(places))} "
                f"is on the CPU, got {isa!r}"
            )
        return kernels(isa, threads), [words_of(array) for array in arrays.values()]
    ordinal = places[first]
    op = _op_at(isa, threads, first, ordinal)
    assert op.op_device is not None
    return op, [
        array
        if isinstance(array, np.ndarray) and (roles or {}).get(name) == "index"
        else _taken(op.op_device, name, array, places[name], first, ordinal)
        for name, array in arrays.items()
    ]


def _place(array: Any) -> int:
    """Returns the number of the array's CUDA device, or HOST. Also returns HOST for an object that
    is not an array, which the op refuses later."""
    if isinstance(array, np.ndarray):
        return HOST
    where = getattr(type(array), "__dlpack_device__", None)
    try:
        kind, number = where(array) if where is not None else (1, 0)
    # torch's meta device, which DLPack does not have, or a producer with a wrong method.
    except (BufferError, RuntimeError, TypeError, ValueError):
        return HOST
    return number if kind in CUDA_TYPES and isinstance(number, int) and number >= 0 else HOST


def _op_at(isa: str | None, threads: int, first: str, ordinal: int) -> _core.Kernels:
    family = CUDA_FAMILIES[0] if isa is None else isa
    if str(family) not in CUDA_FAMILIES:
        raise ConfigError(
            f"isa: expected {' or '.join(CUDA_FAMILIES)}, since {first} is on cuda:{ordinal}, got "
            f"{shown(isa)}"
        )
    if integer_of(ConfigError, "threads", threads, 1, MAX_THREADS) != 1:
        raise ConfigError(f"threads: expected 1, since {first} is on cuda:{ordinal}, got {threads}")
    return _device_kernels(family, ordinal, _streams.get().get(ordinal, 0), *_process())


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
    return op_device.take(name, exportable(name, array))

"""Checks of rollmesh.ops' arguments that C does not make, and checks of the arguments from which
the size of an output is computed."""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Any

import numpy as np

from rollmesh import _core
from rollmesh._core import available_isas, best_isa
from rollmesh.errors import ConfigError, DTypeError, ShapeError, UnsupportedTensorError
from rollmesh.runtime.arguments import choice, integer_of, is_masked
from rollmesh.runtime.messages import plain, shown

Array = Any  # a NumPy array, or a _core.DeviceArray if the arguments are on a CUDA device
MAX_SIZE, MAX_THREADS = 2**31 - 1, 256
# NumPy's NPY_USERDEF. The number is compared first, since the name of a dtype takes a microsecond.
USER_DTYPES = 256


def kernels(isa: str | None = None, threads: int = 1) -> _core.Kernels:
    """Returns the kernels of an instruction set, with a thread team and a workspace. They are
    cached for each process, since a forked child would inherit them without their threads, and
    possibly locked."""
    name = best_isa() if isa is None else isa
    if not isinstance(name, str):
        raise ConfigError(f"isa: expected one of {', '.join(available_isas())}, got {shown(isa)}")
    return _kernels(name, integer_of(ConfigError, "threads", threads, 1, MAX_THREADS), os.getpid())


@lru_cache(maxsize=16)
def _kernels(isa: str, threads: int, process: int) -> _core.Kernels:
    return _core.Kernels(choice("isa", isa, available_isas()), threads)


def size_of(name: str, value: Any) -> int:
    return integer_of(ShapeError, name, value, 0, MAX_SIZE)


def words_of(array: Array) -> Array:
    """Returns an ml_dtypes.bfloat16 array as uint16 words, as C requires, and any other object
    unchanged. The dtype is recognized by its name, since its number varies."""
    if not isinstance(array, np.ndarray) or array.dtype.num < USER_DTYPES:
        return array
    return array.view(np.uint16) if array.dtype.name == "bfloat16" else array


def array_of(name: str, array: Array, dims: int | None = None) -> Array:
    """Checks an array that gives a default output its size or dtype; C checks the rest."""
    array = words_of(array)
    if not isinstance(array, np.ndarray | _core.DeviceArray):
        raise UnsupportedTensorError(
            f"{name}: expected a NumPy array, got a {type(array).__name__}"
        )
    if dims is not None and array.ndim != dims:
        raise ShapeError(f"{name}: expected {dims} dims, got {array.ndim}")
    return array


def matrices_of(name: str, array: Array) -> Array:
    if is_masked(array):
        raise UnsupportedTensorError(
            f"{name}: expected a plain array, got a masked one; .filled(value) makes one"
        )
    try:
        array = (
            array
            if isinstance(array, _core.DeviceArray)
            else np.asarray(words_of(array), order="C")
        )
    except (TypeError, ValueError) as error:  # rows of different lengths
        raise UnsupportedTensorError(f"{name}: expected a matrix, got {plain(error)}") from error
    if array.ndim not in (2, 3):
        raise ShapeError(f"{name}: expected 2 dims, or 3 with groups, got {array.ndim}")
    return array


def numpy_dtype(dtype: str) -> type[np.uint16] | type[np.float32]:
    if not isinstance(dtype, str) or dtype not in ("bfloat16", "float32"):
        raise DTypeError(f"dtype: expected 'bfloat16' or 'float32', got {shown(dtype)}")
    return np.uint16 if dtype == "bfloat16" else np.float32


def round_up(n: int, to: int) -> int:
    return -(-n // to) * to

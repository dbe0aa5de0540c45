"""Finds NVIDIA's cuBLASLt, for `rm.Generator(fast=True)`: the library that
ROLLMESH_CUBLASLT_LIBRARY names, else the one that this process has loaded already (torch's), else
that of the wheel nvidia-cublas, else the system's. Without fast=True it is not looked for."""

from __future__ import annotations

import ctypes
import os

from rollmesh.errors import ConfigError
from rollmesh.runtime import libraries
from rollmesh.runtime.devices import Device
from rollmesh.runtime.libraries import Library
from rollmesh.runtime.messages import plain, shown

LIBRARY_SWITCH = "ROLLMESH_CUBLASLT_LIBRARY"
LEAST = (12, 0, 0)
WHEEL = {"nvidia.cu13": "libcublasLt.so.13", "nvidia.cublas": "libcublasLt.so.12"}
INSTALL = "pip install '.[cuda]' in rollmesh's checkout"
FAMILY = "cuda_mma"  # of the other ops with fast=True: there are no bits to keep


def find() -> Library:
    """The cuBLASLt that would be used. ConfigError: there is none, or it cannot be loaded, or is
    older than 12.0."""
    path = os.environ.get(LIBRARY_SWITCH)
    asked = (path, f"as {LIBRARY_SWITCH} says") if path else None
    library = libraries.find("cublasLt", "nvidia-cublas", WHEEL, _version, asked, INSTALL)
    if library.version < LEAST:
        raise ConfigError(f"expected cuBLASLt {'.'.join(map(str, LEAST))} or later, got {library}")
    return library


def _version(path: str) -> int:
    try:
        asked = ctypes.CDLL(path).cublasLtGetVersion
    except (OSError, AttributeError) as error:
        raise ConfigError(
            f"expected a cuBLASLt that can be loaded, got {path}: {plain(error)}"
        ) from None
    asked.restype = ctypes.c_size_t
    return int(asked())


def for_generator(where: Device, dtype: str) -> Library:
    """The library for fast=True. ConfigError: the device or dtype does not allow it, or there is
    none."""
    if not where.cuda_library:
        raise ConfigError("fast = True: expected device = 'cuda' (cuBLASLt is for GPUs), got 'cpu'")
    if dtype != "bfloat16":
        raise ConfigError(f"fast = True: expected dtype = 'bfloat16', got {shown(dtype)}")
    try:
        return find()
    except ConfigError as error:
        raise ConfigError(f"fast = True: {error}") from None

"""Which device a generator runs on: "cpu", "cuda" or "cuda:N".

What needs CUDA is librollmesh_cuda.so beside the extension (kernels/cuda), which is loaded when a GPU is asked for and brings the CUDA
runtime with it; a machine needs NVIDIA's driver only.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, NamedTuple

from rollmesh import _core
from rollmesh.errors import ConfigError
from rollmesh.runtime.messages import plain, shown

LIBRARY = "librollmesh_cuda.so"
CUDA_FAMILIES = ("cuda_fma", "cuda_mma")
LIBRARY_SWITCH = "ROLLMESH_CUDA_LIBRARY"  # another build of it: a test's, or one for other architectures


class Device(NamedTuple):
    """Where the ranks of this process run."""

    cuda_library: str | None = None  # None: the CPU
    cuda_ordinal: int = -1  # the CUDA device of all ranks here; -1: each rank has that of its number, counted round


def library_path() -> Path:
    return Path(os.environ.get(LIBRARY_SWITCH) or Path(_core.__file__).parent / LIBRARY)


def is_there(path: Path) -> bool:
    """A file, and nothing that opening would wait for."""
    try:
        return path.is_file()
    except OSError:  # a name that is too long
        return False


def device_name(name: Any) -> str:
    """A name that may be a device's, here or elsewhere. ConfigError: it is none's."""
    if not isinstance(name, str) or not re.fullmatch(r"cpu|cuda(:(0|[1-9][0-9]{0,3}))?", name):
        raise ConfigError(f"device = {shown(name)}, wanted 'cpu', 'cuda' or 'cuda:N'")
    return name


_NO_DEVICE = {
    0: "the driver shows no device here",
    -1: "there is no NVIDIA driver here",
    -2: "the NVIDIA driver here is too old, CUDA 13 wants 580 or later",
}


def device_of(name: Any) -> Device:
    """ConfigError says what is missing: the library, the driver, a device of that number."""
    if device_name(name) == "cpu":
        return Device()
    path = library_path()
    if not is_there(path) and os.environ.get(LIBRARY_SWITCH):
        raise ConfigError(f"{LIBRARY_SWITCH}={plain(str(path))}: there is no such file, wanted a library that setup.py cuda has made")
    if not is_there(path):
        raise ConfigError(f"device = {name!r}, and this build has no {path.name}: it was made without nvcc, or with ROLLMESH_CUDA=0")
    count = _core.cuda_count(str(path))
    ordinal = int(name.partition(":")[2] or -1)
    if count < 1:
        raise ConfigError(f"device = {name!r}, and {_NO_DEVICE[count]}")
    if ordinal >= count:
        raise ConfigError(f"device = {name!r}, and the driver shows {count} device{'' if count == 1 else 's'}, numbered from 0")
    return Device(str(path), ordinal)

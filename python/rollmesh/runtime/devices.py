"""The device that a generator runs on: "cpu", "cuda" or "cuda:N".

The CUDA kernels are in librollmesh_cuda.so beside the extension, which is loaded when a GPU is
asked for. The CUDA runtime is linked into it; a machine needs only NVIDIA's driver.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, NamedTuple

from rollmesh import _core
from rollmesh.errors import ConfigError
from rollmesh.runtime.messages import plain, shown

# A build has the library, or the second file, which has the reason.
LIBRARY, ABSENT = "librollmesh_cuda.so", "librollmesh_cuda.absent"
CUDA_FAMILIES = ("cuda_fma", "cuda_mma")
# Another build of the library: a test's, or one for other architectures.
LIBRARY_SWITCH = "ROLLMESH_CUDA_LIBRARY"


class Device(NamedTuple):
    """Where the ranks of this process run."""

    cuda_library: str | None = None  # None: the CPU
    # The CUDA device of all ranks here; -1: rank r has device r modulo their number.
    cuda_ordinal: int = -1


def library_path() -> Path:
    return Path(os.environ.get(LIBRARY_SWITCH) or Path(_core.__file__).parent / LIBRARY)


def why_absent() -> str:
    """How a build without the library was made, as setup.py wrote it."""
    try:
        return (Path(_core.__file__).parent / ABSENT).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return "made without nvcc or with ROLLMESH_CUDA=0"


def device_name(name: Any) -> str:
    """Checks the form of a device's name; the device need not exist here. ConfigError otherwise."""
    if not isinstance(name, str) or not re.fullmatch(r"cpu|cuda(:(0|[1-9][0-9]{0,3}))?", name):
        raise ConfigError(f"device: expected 'cpu', 'cuda' or 'cuda:N', got {shown(name)}")
    return name


_NO_DEVICE = {
    0: "expected a CUDA device, got none from the driver",
    -1: "expected an NVIDIA driver, got none on this machine",
    -2: "expected NVIDIA driver 580 or later (CUDA 13), got an older one",
}


def device_of(name: Any) -> Device:
    """ConfigError says what is missing: the library, the driver, a device of that number."""
    if device_name(name) == "cpu":
        return Device()
    path = library_path()
    if not os.path.isfile(path) and os.environ.get(LIBRARY_SWITCH):
        raise ConfigError(
            f"{LIBRARY_SWITCH}: expected the path of a library built by setup.py cuda, got "
            f"{plain(str(path))}, which is not a file"
        )
    if not os.path.isfile(path):
        raise ConfigError(
            f"device = {name!r}: expected a build with {path.name}, got one {why_absent()}"
        )
    count = _core.cuda_count(str(path))
    ordinal = int(name.partition(":")[2] or -1)
    if count < 1:
        raise ConfigError(f"device = {name!r}: {_NO_DEVICE[count]}")
    if ordinal >= count:
        raise ConfigError(
            f"device: expected one of the driver's {count} device{'' if count == 1 else 's'}, "
            f"numbered from 0, got {name!r}"
        )
    return Device(str(path), ordinal)

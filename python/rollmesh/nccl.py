"""Where NVIDIA's NCCL is. rollmesh is built without it and loads it when a group of GPUs is made: the one that this process has loaded
already (torch's), so that there are not two, else the one of the wheel nvidia-nccl-cu13, else the system's."""

from __future__ import annotations

import ctypes.util
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rollmesh import _core
from rollmesh.errors import ConfigError
from rollmesh.show import shown

SHARES_GPU = (2, 30, 3)  # the first in which two ranks may have one GPU
SHARES_GPU_VARIABLE = "NCCL_MULTI_RANK_GPU_ENABLE"  # and only if this is 1
INSTALL = f"pip install 'nvidia-nccl-cu13>={'.'.join(map(str, SHARES_GPU))}'"  # of the extra `cuda` in pyproject.toml


class Library(NamedTuple):
    path: str
    version: tuple[int, int, int]
    source: str  # where it was found, in words

    def __str__(self) -> str:
        return f"{'.'.join(map(str, self.version))}, {self.source} ({self.path})"


def find(path: str | os.PathLike[str] | None = None) -> Library:
    """The NCCL that would be used, or the one at `path`. ConfigError: there is none, or it cannot be loaded, or is older than 2.17.1."""
    if path is not None and (not isinstance(path, (str, os.PathLike)) or not os.fspath(path) or "\0" in str(path)):
        raise ConfigError(f"library = {shown(path)}, wanted None or the path of a libnccl.so.2")
    found = next(_candidates(), None) if path is None else (os.fspath(path), "as asked for")
    if found is None:
        raise ConfigError(f"no libnccl.so.2 was found: none is loaded, no wheel has it, and neither has the system ({INSTALL})")
    name, source = found
    code = _core.nccl_version(name)
    return Library(name, (code // 10000, code // 100 % 100, code % 100), source)


def _candidates() -> Iterator[tuple[str, str]]:
    for path in _loaded():
        yield path, "which this process has loaded already"
    for path in _of_wheels():
        yield path, "of the wheel nvidia-nccl"
    if name := ctypes.util.find_library("nccl"):
        yield name, "the system's"


def _loaded() -> Iterator[str]:
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    paths = (line.split(maxsplit=5)[5] for line in lines if "/libnccl.so" in line)
    yield from (path for path in dict.fromkeys(paths) if os.path.basename(path).startswith("libnccl.so") and os.path.exists(path))


def _of_wheels() -> Iterator[str]:
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except (ImportError, ValueError):  # no wheel of NVIDIA at all
        return
    for folder in (spec and spec.submodule_search_locations) or ():
        path = Path(folder) / "lib" / "libnccl.so.2"
        if path.exists():
            yield str(path)


__all__ = ["INSTALL", "SHARES_GPU", "SHARES_GPU_VARIABLE", "Library", "find"]

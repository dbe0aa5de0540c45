"""Finds NVIDIA's NCCL, which is loaded when a group of GPUs is made: the one that this process has
loaded already (torch's), else that of the wheel nvidia-nccl-cu13, else the system's."""

from __future__ import annotations

import os

from rollmesh import _core
from rollmesh.errors import ConfigError
from rollmesh.runtime import libraries
from rollmesh.runtime.arguments import is_path
from rollmesh.runtime.libraries import Library as Library
from rollmesh.runtime.messages import shown

SHARES_GPU = (2, 30, 3)  # the first in which two ranks may have one GPU
SHARES_GPU_VARIABLE = "NCCL_MULTI_RANK_GPU_ENABLE"  # and only if this is 1
# Limits the blocks of a kernel, since the kernels of several ranks run on one GPU at once.
FEWER_BLOCKS = ("NCCL_MAX_CTAS", "4")
WHEEL = {"nvidia.nccl": "libnccl.so.2"}
# of the extra `cuda` in pyproject.toml
INSTALL = f"pip install 'nvidia-nccl-cu13>={'.'.join(map(str, SHARES_GPU))}'"


def find(path: str | os.PathLike[str] | None = None) -> Library:
    """The NCCL that would be used, or the one at `path`. ConfigError: there is none, or it cannot
    be loaded, or is older than 2.17.1."""
    if path is not None and not (is_path(path) and os.fspath(path)):
        raise ConfigError(
            f"library: expected None or the path of a libnccl.so.2, got {shown(path)}"
        )
    asked = None if path is None else (os.fspath(path), "as asked for")
    return libraries.find("nccl", "nvidia-nccl", WHEEL, _core.nccl_version, asked, INSTALL)

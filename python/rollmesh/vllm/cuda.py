"""The platform that VLLM_PLUGINS=rollmesh brings to a machine with an NVIDIA GPU: vLLM's own, but for the worker. Imported on such
machines only, since vLLM's class loads the kernels of its CUDA build.
"""

from __future__ import annotations

from vllm.platforms.cuda import CudaPlatform

from rollmesh.vllm.cpu import RollmeshPlatform


class RollmeshCudaPlatform(RollmeshPlatform, CudaPlatform):  # type: ignore[misc]
    """vLLM's CUDA platform with rollmesh's worker and without compilation."""

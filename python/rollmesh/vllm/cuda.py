"""The platform that VLLM_PLUGINS=rollmesh brings to a machine with an NVIDIA GPU: each worker's engine has a CUDA device.

vLLM's own side stays on the host (its torch device is the CPU): it schedules, edits logits and masks, and no tensor of its needs a GPU,
so neither vLLM's CUDA platform nor its kernels are loaded, and any build of torch will do.
"""

from __future__ import annotations

from rollmesh import _core
from rollmesh.devices import device_of
from rollmesh.vllm.cpu import RollmeshCpuPlatform


class RollmeshCudaPlatform(RollmeshCpuPlatform):
    engine_device = "cuda"
    device_control_env_var = "CUDA_VISIBLE_DEVICES"  # vLLM sets it for each data parallel rank

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return f"{cls.engine_device}:{device_id}"

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        """What is free of it: the whole, where nothing else runs there yet."""
        library, _ = device_of(cls.engine_device)
        return 0 if library is None else _core.cuda_available(library, device_id)

"""The vLLM platform of VLLM_PLUGINS=rollmesh on a machine with an NVIDIA GPU: each worker's engine
has a CUDA device.

vLLM's own code stays on the host (its torch device is the CPU): it schedules and edits logits,
which needs no tensors on a GPU. vLLM's CUDA platform and kernels are not loaded, so any build of
torch works.
"""

from __future__ import annotations

import os
from typing import Any

from rollmesh import _core
from rollmesh.errors import ConfigError
from rollmesh.runtime.devices import device_of
from rollmesh.vllm import START_METHOD
from rollmesh.vllm.platforms.cpu import RollmeshCpuPlatform


class RollmeshCudaPlatform(RollmeshCpuPlatform):
    engine_device = "cuda"
    device_control_env_var = "CUDA_VISIBLE_DEVICES"

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        if os.environ.get(START_METHOD) == "fork":
            raise ConfigError(
                f"{START_METHOD}: expected 'spawn', got 'fork'; CUDA does not survive a fork"
            )
        super().check_and_update_config(vllm_config)

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return f"{cls.engine_device}:{device_id}"

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        """Returns the free memory, from which vLLM derives defaults that rollmesh does not use."""
        library, _ = device_of(cls.engine_device)
        return 0 if library is None else _core.cuda_available(library, device_id)

"""The vLLM platform of VLLM_PLUGINS=rollmesh on a machine without a GPU: vLLM schedules, rollmesh's
worker computes.

It is an out-of-tree platform (`is_out_of_tree()`), since vLLM's own CPU platform needs kernels that
only vLLM's CPU build has. vLLM calls it to check the whole configuration once
(`check_and_update_config`, in the user's own LLM(…) call) and to check each request
(`validate_request`).

On every platform except its own CPU platform, vLLM calls some functions of torch.accelerator, which
raise if torch has no accelerator. In this case the platform replaces them by no-ops, as vLLM's CPU
model runner does.
"""

from __future__ import annotations

import os
import platform
import random
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from vllm.platforms.interface import Platform, PlatformEnum

from rollmesh._core import usable_cores
from rollmesh.runtime.devices import device_of
from rollmesh.vllm.platforms import config

REASONS = "rollmesh.vllm.serve.Reasons"


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Does nothing; replaces functions of vLLM and of torch.accelerator."""


class RollmeshCpuPlatform(Platform):  # type: ignore[misc]
    _enum = PlatformEnum.OOT
    device_name = "cpu"  # vLLM passes it to torch.device
    device_type = "cpu"
    dispatch_key = "CPU"
    dist_backend = "gloo"
    # A worker takes one Ray resource of this name; `ray start --num-gpus=N` sets their number.
    ray_device_key = "GPU"
    simple_compile_backend = "eager"  # for small functions of vLLM; a compiler would take seconds
    # vLLM sets this variable for each data parallel rank; rollmesh does not read it.
    device_control_env_var = "ROLLMESH_VISIBLE_DEVICES"
    engine_device = "cpu"  # as rm.Generator's `device`
    # Modes of all engines of this process, since a request does not name its engine.
    logprobs_modes: ClassVar[set[str]] = set()

    # There is one device, vLLM's kernels are not used, and the model has no layers of vLLM.
    set_device = import_kernels = import_ir_kernels = staticmethod(_nothing)
    update_block_size_for_backend = staticmethod(_nothing)

    def __init__(self) -> None:
        if not torch.accelerator.is_available():
            for name in ("synchronize", "empty_cache", "empty_host_cache"):
                setattr(torch.accelerator, name, _nothing)

    @classmethod
    def pre_register_and_update(cls, parser: Any = None) -> None:
        """Adds serve.Reasons to the default of --middleware. vLLM calls this before it parses a
        server's command line."""
        if (
            parser is not None
            and (given := parser.get_default("middleware")) is not None
            and REASONS not in given
        ):
            parser.set_defaults(middleware=[*given, REASONS])
        super().pre_register_and_update(parser)

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        device_of(cls.engine_device)
        config.check(vllm_config)
        config.update(vllm_config)
        if vllm_config.model_config is not None:
            cls.logprobs_modes.add(vllm_config.model_config.logprobs_mode)
        super().check_and_update_config(vllm_config)

    @classmethod
    def validate_request(cls, processed_inputs: Any, params: Any) -> None:
        # Imported here because the platform is imported while vLLM's config is being imported.
        from rollmesh.vllm.worker import sampling

        sampling.refuse_inputs(processed_inputs)
        sampling.refuse(params)
        # With two modes the worker checks the request.
        for mode in cls.logprobs_modes if len(cls.logprobs_modes) == 1 else ():
            sampling.refuse_mode(params, mode)

    @property
    def supported_dtypes(self) -> list[torch.dtype]:
        """The supported dtypes. dtype="auto" selects the first one for float16 and float32 models,
        so that weights are rounded only if the user requests it."""
        return [torch.float32, torch.bfloat16]

    def is_sleep_mode_available(self) -> bool:
        return True

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return platform.processor() or platform.machine()

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return config.total_memory()

    @classmethod
    def get_current_memory_usage(cls, device: Any = None) -> float:
        resident = Path("/proc/self/statm").read_text("ascii").split()[1]
        return float(int(resident) * os.sysconf("SC_PAGE_SIZE"))

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)

    @classmethod
    def inference_mode(cls) -> Any:
        return torch.no_grad()

    @classmethod
    def check_if_supports_dtype(cls, dtype: torch.dtype) -> None:
        config.dtype_name(dtype)

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        return False

    @classmethod
    def support_hybrid_kv_cache(cls) -> bool:
        return False

    @classmethod
    def num_compute_units(cls, device_id: int = 0) -> int:
        return usable_cores()

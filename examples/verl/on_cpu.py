"""Adapts verl 0.9.1 to a machine without a GPU: adds a platform "cpu", selected by
VERL_PLATFORM=cpu and VERL_USE_EXTERNAL_MODULES=on_cpu. verl has platforms for CUDA, ROCm and
Ascend, and uses torch.cuda if it finds none of them. This file does not depend on rollmesh.

Ray's resource is "GPU" here too, because verl's resource pools count only GPUs:
ray.init(num_gpus=N) sets how many workers fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.cpu
import verl.utils.distributed
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


@PlatformRegistry.register(platform="cpu")
class PlatformCpu(PlatformBase):  # type: ignore[misc]
    """Selected by name only. Weights reach the rollout through shared memory, because CUDA handles
    do not exist."""

    device_name = vendor_name = "cpu"
    device_module = torch.cpu

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        """Returns False: a node without a GPU may serve a cluster that has GPUs."""
        return False

    def current_device(self) -> torch.device:
        """verl moves tensors to this device; a number would mean an accelerator."""
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        """Does nothing: there is only one device."""

    def synchronize(self, device_index: int | None = None) -> None:
        """Does nothing: a call has finished when it returns."""

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings: str) -> None:
        """Does nothing: the host's allocator has no settings."""

    def empty_cache(self) -> None:
        """Does nothing: the host's allocator keeps no cache."""

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"  # what Ray sets for its "GPU"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        """Does nothing: the CPU has no device profiler."""

    profiler_stop = profiler_start

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None


def _no_bytes() -> int:
    return 0


# Functions that verl calls on a device's module and that torch.cpu lacks.
torch.cpu.empty_cache = PlatformCpu().empty_cache
for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
    setattr(torch.cpu, name, _no_bytes)
torch.cpu.get_rng_state, torch.cpu.set_rng_state = torch.get_rng_state, torch.set_rng_state


def _join(timeout_second: float | None = None, backend: str | None = None) -> None:
    """Joins the names once: verl's own function asks for "cpu:gloo,cpu:gloo", which torch
    refuses."""
    _verls_join(timeout_second, backend or "cpu:gloo")


_verls_join = verl.utils.distributed.initialize_global_process_group_ray
verl.utils.distributed.initialize_global_process_group_ray = _join

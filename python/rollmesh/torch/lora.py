"""The weights that the layers of a transformers model compute with.

peft's LoRA adapters are merged. For parts that peft trains whole (modules_to_save) the active
adapter's copy is used; peft's wrapper of such a part has the attributes of that copy."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rollmesh.errors import ConfigError

# The classes of peft that are taken: adapters of a linear layer, and a part that is trained whole.
LORA, WHOLE = "peft.tuners.lora.layer.Linear", "peft.utils.other.ModulesToSaveWrapper"


def base_of(module: Any) -> Any:
    return getattr(module, "base_layer", module)


def in_use(module: Any) -> Any:
    """Returns the module that computes. For a part that peft trains whole it is the active
    adapter's copy, or the original if adapters are off."""
    copies = module._modules.get("modules_to_save")
    if copies is None:
        return module
    active = [] if module.disable_adapters else module.active_adapters
    return copies[active[0]] if active and active[0] in copies else module.original_module


def state_of(model: Any) -> dict[str, Tensor]:
    """Returns the weights by their Hugging Face names, with adapters merged and the copies in use
    of parts that are trained whole."""
    modules = list(model.named_modules())
    state = {
        name.replace(".base_layer.", "."): tensor
        for name, tensor in model.state_dict().items()
        if ".lora_" not in name
    }
    state |= {
        f"{name}.weight": weight_of(layer) for name, layer in modules if layer is not base_of(layer)
    }
    for name, module in reversed(modules):  # inner parts first
        used = in_use(module)
        if used is not module:
            part = next(path for path, each in module.named_modules(prefix=name) if each is used)
            state = {
                key.replace(f"{part}.", f"{name}.", 1): tensor
                for key, tensor in state.items()
                if key.startswith(f"{part}.") or not key.startswith(f"{name}.")
            }
    return state


def active_lora(path: str, module: Any) -> list[str]:
    """Lists the adapters to add to a LoRA layer's weight. Raises a ConfigError for one that is more
    than W + scaling · B · A."""
    if module is base_of(module) or module.merged or module.disable_adapters:
        return []
    active = [adapter for adapter in module.active_adapters if adapter in module.lora_A]
    for adapter in active:
        if adapter in module.lora_variant:
            variant = module.lora_variant[adapter]
            name = variant.__name__ if isinstance(variant, type) else type(variant).__name__
            raise ConfigError(
                f"{path}: expected plain LoRA adapters, whose weights can be merged, "
                f"got adapter {adapter!r} with {name}"
            )
        if module.lora_bias[adapter]:
            raise ConfigError(
                f"{path}: lora_bias: expected False, got True for adapter {adapter!r}; "
                "a bias is not merged"
            )
        if module.fan_in_fan_out:
            raise ConfigError(f"{path}: fan_in_fan_out: expected False, got True for {adapter!r}")
    return active


def unmerge_if_disabled(module: Any) -> None:
    """Does what a LoRA layer of peft does when it is called while adapters are disabled."""
    if module.disable_adapters and module.merged:
        module.unmerge()


def weight_of(module: Any) -> Tensor:
    """Returns W + Σ scaling · B · A over the active adapters, for the forward pass and for push."""
    weight: Tensor = base_of(module).weight
    for adapter in active_lora("adapter", module):
        dropout = module.lora_dropout[adapter]
        if dropout.training and getattr(dropout, "p", 0.0) > 0:
            raise ConfigError(
                f"lora_dropout: expected 0 in training, got {dropout.p}; a rollout drops nothing"
            )
        with torch.autocast(weight.device.type, enabled=False):  # so that push gives the same bits
            weight = weight + module.get_delta_weight(adapter).to(weight.dtype)
    return weight

"""The weights of a transformers layer as they are used: with the LoRA adapters of peft merged, and of the parts that peft trains whole
(modules_to_save) the copy of the active adapter. peft's wrapper of such a part has the attributes of the copy that is in use."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rollmesh.errors import ConfigError

ELSEWHERE = "expected adapters of attention and dense MLPs only, got one of {}"


def base_of(module: Any) -> Any:
    return getattr(module, "base_layer", module)


def in_use(module: Any) -> Any:
    """Of a part that peft trains whole: the active adapter's copy, or the original where adapters are off; else the module."""
    copies = module._modules.get("modules_to_save")
    if copies is None:
        return module
    return module.original_module if module.disable_adapters or not module.active_adapters else copies[module.active_adapters[0]]


def state_of(model: Any) -> dict[str, Tensor]:
    """Weights by their Hugging Face names: adapters merged, of parts that are trained whole the copy in use."""
    modules = list(model.named_modules())
    state = {name.replace(".base_layer.", "."): tensor for name, tensor in model.state_dict().items() if ".lora_" not in name}
    state |= {f"{name}.weight": with_lora(module, _base_weight(module)) for name, module in modules if module is not base_of(module)}
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


def _base_weight(module: Any) -> Tensor:
    weight = getattr(base_of(module), "weight", None)
    if weight is None:  # experts have other names
        raise ConfigError(ELSEWHERE.format("the router or of experts"))
    return weight  # type: ignore[no-any-return]


def norm_weight_of(module: Any) -> Tensor:
    if module is not base_of(module):
        raise ConfigError(ELSEWHERE.format(f"a norm, a {type(module).__name__}"))
    return module.weight  # type: ignore[no-any-return]


def check_no_bias(module: Any) -> None:
    if getattr(base_of(module), "bias", None) is not None:
        raise ConfigError(f"bias: expected none, got one of a {type(module).__name__} that has none in the model's config")


def weights_of(modules: list[Any]) -> list[Tensor]:
    """The effective weight of each linear layer."""
    return [with_lora(module, base_of(module).weight) for module in modules]


def with_lora(module: Any, weight: Tensor) -> Tensor:
    """W + Σ scaling · B · A of the active adapters of a peft layer: what is pushed and what the forward pass uses."""
    if module is base_of(module) or module.merged or module.disable_adapters:
        return weight
    if not hasattr(module, "lora_A") or not hasattr(module, "get_delta_weight"):
        raise ConfigError(f"expected LoRA layers of peft, got a {type(module).__name__}")
    for adapter in module.active_adapters:
        if adapter not in module.lora_A:
            continue
        if adapter in module.lora_variant:
            variant = module.lora_variant[adapter]
            name = variant.__name__ if isinstance(variant, type) else type(variant).__name__
            raise ConfigError(f"expected plain LoRA adapters, whose weights can be merged, got adapter {adapter!r} with {name}")
        if module.lora_bias[adapter]:
            raise ConfigError(f"lora_bias: expected False, got True for adapter {adapter!r}; a bias is not merged")
        if module.training and getattr(module.lora_dropout[adapter], "p", 0.0) > 0:
            raise ConfigError(f"lora_dropout: expected 0 in training, got {module.lora_dropout[adapter].p}; a rollout drops nothing")
        with torch.autocast(weight.device.type, enabled=False):  # what is pushed does not depend on it
            weight = weight + module.get_delta_weight(adapter).to(weight.dtype)
    return weight


def expert_weights_of(mlp: Any) -> tuple[Tensor, Tensor, Tensor]:
    for module in (mlp.gate, mlp.experts):
        if module is not base_of(module):
            raise ConfigError(ELSEWHERE.format("the router or of experts"))
    return mlp.gate.weight, mlp.experts.gate_up_proj, mlp.experts.down_proj


def shared_expert_of(mlp: Any) -> Any:
    """The expert that all rows pass, by either of its names."""
    return mlp.shared_expert if hasattr(mlp, "shared_expert") else mlp.shared_experts

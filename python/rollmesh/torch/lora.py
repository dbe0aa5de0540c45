"""The weights of a transformers layer as they are used: with the LoRA adapters of peft merged."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rollmesh.errors import ConfigError


def base_of(module: Any) -> Any:
    return getattr(module, "base_layer", module)


def weights_of(modules: list[Any]) -> tuple[list[Tensor], list[Tensor]]:
    """(the effective weight of each linear layer, the tensors that these are made of)."""
    weights, sources = [], []
    for module in modules:
        base = base_of(module).weight
        weights.append(with_lora(module, base))
        sources.append(base)
        if module is not base_of(module):
            sources += [p for name, p in module.named_parameters() if name.startswith("lora_")]
    return weights, sources


def with_lora(module: Any, weight: Tensor) -> Tensor:
    """W + Σ scaling · B · A of the active adapters of a peft layer: what is pushed and what the forward pass uses."""
    if module is base_of(module) or module.merged or module.disable_adapters:
        return weight
    if not hasattr(module, "get_delta_weight"):
        raise ConfigError(f"expected LoRA layers of peft, got a {type(module).__name__}")
    for adapter in module.active_adapters:
        if adapter not in module.lora_A:
            continue
        if module.use_dora.get(adapter):
            raise ConfigError(f"expected LoRA adapters, got adapter {adapter!r} with use_dora=True, which is no sum of weights")
        if module.training and getattr(module.lora_dropout[adapter], "p", 0.0) > 0:
            raise ConfigError(f"lora_dropout: expected 0 in training, got {module.lora_dropout[adapter].p}; a rollout drops nothing")
        weight = weight + module.get_delta_weight(adapter).to(weight.dtype)
    return weight


def expert_weights_of(mlp: Any) -> tuple[Tensor, Tensor, Tensor]:
    for module in (mlp.gate, mlp.experts):
        if module is not base_of(module):
            raise ConfigError("expected adapters of attention and dense MLPs only, got one of the router or of experts")
    return mlp.gate.weight, mlp.experts.gate_up_proj, mlp.experts.down_proj

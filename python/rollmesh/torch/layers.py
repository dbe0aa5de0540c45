"""Finds the weights of a transformers layer, in the order in which the kernels take them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rollmesh import ModelSpec
from rollmesh.model.families import FAMILIES
from rollmesh.torch.functions import DeltaHeads
from rollmesh.torch.lora import weight_of


def router_bias(mlp: Any, router: Any) -> Tensor | None:
    """Returns the bias that a router adds to its scores to choose experts, float32 [experts], or
    None. Families have it in different modules, some in the model's dtype."""
    for module in (mlp, router, getattr(router, "moe_statics", None)):
        for name in ("e_score_correction_bias", "expert_bias"):
            bias: Tensor | None = getattr(module, name, None)
            if bias is not None:
                return bias.detach().float().flatten()
    return None


def query_and_gate(attention: Any, q: Tensor, spec: ModelSpec) -> tuple[Tensor, Tensor]:
    """The weights of q and of attention's gate. q: the weight of q_proj, which may hold both."""
    if not FAMILIES[spec.model_type].gate_in_q:
        return q, weight_of(attention.gate_proj)
    of_head, of_gate = q.view(-1, 2, spec.head_dim, q.shape[1]).unbind(1)
    return of_head.flatten(0, 1), of_gate.flatten(0, 1)


def delta_heads(spec: ModelSpec) -> DeltaHeads:
    return DeltaHeads(
        spec.linear_num_key_heads,
        spec.linear_num_value_heads,
        spec.linear_key_head_dim,
        spec.linear_value_head_dim,
        spec.rms_norm_eps,
    )


def delta_weights(net: Any, spec: ModelSpec) -> list[Tensor]:
    """The weights of a delta net's q, k, v, z, b and a, one below the other."""
    if not FAMILIES[spec.model_type].delta_alternates:
        return [weight_of(getattr(net, f"in_proj_{name}")) for name in ("qkv", "z", "b", "a")]
    heads = delta_heads(spec)
    widths = [width // heads.num_k_heads for width in heads.widths]  # of one key head

    def apart(module: Any, widths: list[int]) -> list[Tensor]:
        weight = weight_of(module)
        by_head = weight.view(heads.num_k_heads, -1, weight.shape[1])
        return [part.flatten(0, 1) for part in torch.split(by_head, widths, 1)]

    return apart(net.in_proj_qkvz, widths[:4]) + apart(net.in_proj_ba, widths[4:])

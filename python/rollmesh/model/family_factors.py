"""Rules of families for factors, caps and other numbers of their configs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rollmesh.errors import ConfigError
from rollmesh.model.reader import Reader
from rollmesh.model.rope import ROPE_TABLES
from rollmesh.runtime.messages import shown


def olmoe_heads(c: Reader, head_dim: int) -> None:
    """OLMoE: the norms of q and k are as wide as hidden_size, whatever head_dim is."""
    if c.given("clip_qkv"):
        raise ConfigError(
            f"clip_qkv={shown(c.values['clip_qkv'])}: clipped q, k and v are not supported"
        )
    hidden, heads = c.values["hidden_size"], c.values["num_attention_heads"]
    if head_dim * heads != hidden:
        raise ConfigError(
            f"head_dim: expected hidden_size / num_attention_heads={hidden / heads:g}, got "
            f"{head_dim}"
        )


def rope_is_given(c: Reader, head_dim: int) -> None:
    """CWM: transformers' default, a table of the type llama3, is not supported."""
    if not any(c.given(name) for name in ROPE_TABLES):
        raise ConfigError("rope_parameters: expected a table, got none")


def _factor(c: Reader, key: str) -> float | None:
    value = c.positive(key, 1.0)
    return None if value == 1 else value


def _cap(c: Reader, key: str, default: float | None) -> float | None:
    given = c.values.get(key, default)
    return None if given is None else c.positive(key, given)


def gemma_factors(attention_cap: float | None, logit_cap: float | None) -> Callable[[Reader], Any]:
    """Returns a Gemma's `factors`. The arguments are the defaults of its caps. attention_cap=None:
    the family has no cap of scores."""

    def factors(c: Reader) -> dict[str, Any]:
        key = "attn_logit_softcapping"
        return {
            "attention_multiplier": c.positive("query_pre_attn_scalar", 256) ** -0.5,
            key: None if attention_cap is None else _cap(c, key, attention_cap),
            "final_logit_softcapping": _cap(c, "final_logit_softcapping", logit_cap),
            "embedding_multiplier": c.integer("hidden_size") ** 0.5,
            "rounds_embedding_multiplier": True,
        }

    return factors


def granite_factors(c: Reader) -> dict[str, Any]:
    keys = ("embedding_multiplier", "residual_multiplier", "logits_scaling")
    return {
        "attention_multiplier": c.positive("attention_multiplier", 1.0),
        **{key: _factor(c, key) for key in keys},
    }


def afmoe_factors(c: Reader) -> dict[str, Any]:
    is_scaled = c.boolean("mup_enabled", False)
    return {"embedding_multiplier": c.integer("hidden_size") ** 0.5 if is_scaled else None}


def hunyuan_moe_top_k(c: Reader) -> dict[str, Any]:
    """HunYuan: moe_topk may be a list of equal numbers, at least one for each layer."""
    key = "moe_topk" if c.given("moe_topk") else "num_experts_per_tok"
    given = c.values.get(key, 1)
    layers = c.integer("num_hidden_layers")
    each = list(given) if isinstance(given, (list, tuple)) else [given] * layers
    if len(each) < layers or each != [each[0]] * len(each):
        raise ConfigError(f"{key}: expected one number for all layers, got {shown(given)}")
    top_k = Reader({key: each[0]}).integer(key)
    if (other := c.integer("num_experts_per_tok", default=top_k)) != top_k:
        raise ConfigError(f"num_experts_per_tok: expected moe_topk={top_k}, got {other}")
    return {"num_experts_per_tok": top_k}

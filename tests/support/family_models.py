"""Random transformers models of every family: configs with the family's options drawn at random,
weights by name.

Unlike in helpers.py, which writes the Qwen3 formats down, names and shapes are transformers' own,
so that a new family needs only a function that draws its config."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import helpers
import numpy as np
import oracle
import torch
import transformers

Draw = Callable[["Dice"], dict[str, Any]]


class Dice:
    def __init__(self, seed: list[int]):
        self.rng = np.random.default_rng(seed)

    def between(self, low: int, high: int) -> int:
        return int(self.rng.integers(low, high + 1))

    def pick(self, *choices: Any) -> Any:
        return choices[self.rng.integers(len(choices))]

    def chance(self, share: float) -> bool:
        return bool(self.rng.random() < share)


def rope(dice: Dice) -> dict[str, Any]:
    theta = float(dice.rng.uniform(100, 1e6))
    return dice.pick(
        {"rope_type": "default", "rope_theta": theta},
        {"rope_type": "default", "rope_theta": theta},
        {"rope_type": "linear", "rope_theta": theta, "factor": 2.5},
        {"rope_type": "yarn", "rope_theta": theta, "factor": 4.0,
        "original_max_position_embeddings": 64},
        {
            "rope_type": "llama3", "rope_theta": theta, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    )  # fmt: skip


def sizes(dice: Dice, *, head_dim: bool = True, heads_divide: bool = False) -> dict[str, Any]:
    """The config keys that all families share. head_dim: the family reads that key. heads_divide:
    hidden_size is a multiple of the number of heads."""
    kv_heads = dice.between(1, 4)
    heads = kv_heads * dice.between(1, 4)
    dim = 2 * dice.between(2, 16)
    fields = {
        "vocab_size": dice.between(2, 300),
        "hidden_size": heads * dim if heads_divide or not head_dim else dice.between(5, 80),
        "intermediate_size": dice.between(1, 100),
        "num_hidden_layers": dice.between(1, 4),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 256,
        "rms_norm_eps": dice.pick(1e-6, 1e-5, 1e-2),
        "rope_parameters": rope(dice),
        "tie_word_embeddings": dice.chance(0.3),
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    return fields | ({"head_dim": dim} if head_dim else {})


def llama(dice: Dice) -> dict[str, Any]:
    return sizes(dice, heads_divide=True) | {"attention_bias": dice.chance(0.4)}


def mistral(dice: Dice) -> dict[str, Any]:
    return sizes(dice) | {"sliding_window": dice.pick(None, 1, 8, 40)}


def _qwen_windows(dice: Dice, layers: int) -> dict[str, Any]:
    if dice.chance(0.5):
        return {"use_sliding_window": False}
    fields = {
        "use_sliding_window": True,
        "sliding_window": dice.between(1, 60),
        "max_window_layers": dice.between(0, layers),
    }
    types = [dice.pick("sliding_attention", "full_attention") for _ in range(layers)]
    return fields | ({"layer_types": types} if dice.chance(0.5) else {})


def qwen2(dice: Dice) -> dict[str, Any]:
    fields = sizes(dice, head_dim=False)
    return fields | _qwen_windows(dice, fields["num_hidden_layers"])


def qwen3(dice: Dice) -> dict[str, Any]:
    fields = sizes(dice) | {"attention_bias": dice.chance(0.4)}
    return fields | _qwen_windows(dice, fields["num_hidden_layers"])


def smollm3(dice: Dice) -> dict[str, Any]:
    fields = sizes(dice, head_dim=False) | {"attention_bias": dice.chance(0.4)}
    layers = fields["num_hidden_layers"]
    fields |= dice.pick(
        {"no_rope_layers": [dice.between(0, 1) for _ in range(layers)]},
        {"no_rope_layer_interval": dice.between(1, 3)},
    )
    return fields | (
        {"use_sliding_window": True, "sliding_window": dice.between(1, 60)}
        if dice.chance(0.5)
        else {}
    )


def olmo2(dice: Dice) -> dict[str, Any]:
    return sizes(dice, head_dim=False) | {"attention_bias": dice.chance(0.4)}


def mixtral(dice: Dice) -> dict[str, Any]:
    experts = dice.between(1, 12)
    return sizes(dice) | {
        "sliding_window": dice.pick(None, 1, 8, 40), "num_local_experts": experts,
        "num_experts_per_tok": dice.between(1, experts),
    }  # fmt: skip


def qwen2_moe(dice: Dice) -> dict[str, Any]:
    fields, experts = sizes(dice, head_dim=False), dice.between(1, 12)
    layers = fields["num_hidden_layers"]
    return fields | _qwen_windows(dice, layers) | {
        "qkv_bias": dice.chance(0.7), "num_experts": experts,
        "num_experts_per_tok": dice.between(1, experts),
        "moe_intermediate_size": dice.between(1, 50),
        "shared_expert_intermediate_size": dice.between(1, 70),
        "norm_topk_prob": dice.chance(0.5), "decoder_sparse_step": dice.between(1, 2),
        "mlp_only_layers": [i for i in range(layers) if dice.chance(0.2)],
    }  # fmt: skip


def olmoe(dice: Dice) -> dict[str, Any]:
    experts = dice.between(1, 12)
    return sizes(dice, head_dim=False) | {
        "attention_bias": dice.chance(0.4), "num_experts": experts,
        "num_experts_per_tok": dice.between(1, experts),
        "norm_topk_prob": dice.chance(0.5),
    }  # fmt: skip


def arcee(dice: Dice) -> dict[str, Any]:
    return sizes(dice, heads_divide=True) | {"attention_bias": dice.chance(0.4)}


def glm4(dice: Dice) -> dict[str, Any]:
    changes = {
        "head_dim": 8 * dice.between(1, 4),
        "partial_rotary_factor": dice.pick(0.25, 0.5, 1.0),
        "attention_bias": dice.chance(0.5),
    }
    changes |= {"eos_token_id": []}  # of None it makes its own
    return sizes(dice, head_dim=False) | changes


def glm4_moe(dice: Dice) -> dict[str, Any]:
    groups, each = dice.between(1, 4), dice.between(2, 5)
    top_groups = dice.between(1, groups)
    fields = sizes(dice, head_dim=False)
    dim = 8 * dice.between(1, 4)
    return fields | {
        "head_dim": dim, "partial_rotary_factor": dice.pick(0.25, 0.5, 1.0),
        "attention_bias": dice.chance(0.5),
        "use_qk_norm": dice.chance(0.5), "n_routed_experts": groups * each, "n_group": groups,
        "topk_group": top_groups,
        "num_experts_per_tok": dice.between(1, top_groups * each),
        "n_shared_experts": dice.between(1, 2),
        "moe_intermediate_size": dice.between(1, 50), "norm_topk_prob": dice.chance(0.7),
        "routed_scaling_factor": dice.pick(1.0, 2.5),
        "first_k_dense_replace": dice.between(0, fields["num_hidden_layers"]),
    }  # fmt: skip


def gpt_oss(dice: Dice) -> dict[str, Any]:
    fields, experts = sizes(dice), dice.between(1, 12)
    layers = fields["num_hidden_layers"]
    types = [dice.pick("sliding_attention", "full_attention") for _ in range(layers)]
    yarn = {
        "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0,
        "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 64,
    }  # fmt: skip
    return fields | {
        "sliding_window": dice.pick(1, 8, 40), "layer_types": dice.pick(types, None),
        "attention_bias": dice.chance(0.7), "num_local_experts": experts,
        "num_experts_per_tok": dice.between(1, experts),
        "rope_parameters": dice.pick(yarn, fields["rope_parameters"], None),
        "swiglu_alpha": dice.pick(1.702, 0.5), "swiglu_limit": dice.pick(7.0, 0.1, 0.02),
    }  # fmt: skip


def glm(dice: Dice) -> dict[str, Any]:
    return glm4(dice)


def seed_oss(dice: Dice) -> dict[str, Any]:
    return sizes(dice) | {
        "attention_bias": dice.chance(0.6), "attention_out_bias": dice.chance(0.4),
        "attention_dropout": 0.0, "residual_dropout": 0.0,
    }  # fmt: skip


def minimax_m2(dice: Dice) -> dict[str, Any]:
    experts, dim = dice.between(1, 12), 8 * dice.between(1, 4)
    return sizes(dice, head_dim=False) | {
        "head_dim": dim, "rotary_dim": dice.pick(dim // 2, dim // 4, dim),
        "num_local_experts": experts, "num_experts_per_tok": dice.between(1, experts),
    }  # fmt: skip


def _deepseek(dice: Dice, layers: int) -> dict[str, Any]:
    """The experts of DeepSeek-V3's block."""
    groups, each = dice.between(1, 4), dice.between(2, 5)
    top_groups = dice.between(1, groups)
    return {
        "n_routed_experts": groups * each, "n_group": groups, "topk_group": top_groups,
        "num_experts_per_tok": dice.between(1, top_groups * each),
        "n_shared_experts": dice.between(1, 2),
        "moe_intermediate_size": dice.between(1, 50), "norm_topk_prob": dice.chance(0.7),
        "routed_scaling_factor": dice.pick(1.0, 2.5),
        "first_k_dense_replace": dice.between(0, layers),
    }  # fmt: skip


def _layer_types(dice: Dice, layers: int) -> dict[str, Any]:
    types = [dice.pick("sliding_attention", "full_attention") for _ in range(layers)]
    return {"sliding_window": dice.between(1, 60)} | (
        {"layer_types": types} if dice.chance(0.5) else {}
    )


def dots1(dice: Dice) -> dict[str, Any]:
    fields = sizes(dice, heads_divide=True)
    layers = fields["num_hidden_layers"]
    fields |= {
        "attention_bias": dice.chance(0.4),
        "max_window_layers": dice.between(0, layers),
    }
    return fields | _layer_types(dice, layers) | _deepseek(dice, layers)


def solar_open(dice: Dice) -> dict[str, Any]:
    fields = sizes(dice) | {"attention_bias": dice.chance(0.4)} | _deepseek(dice, 0)
    return fields | {"first_k_dense_replace": None}


def hy_v3(dice: Dice) -> dict[str, Any]:
    fields, experts = sizes(dice), dice.between(1, 12)
    types = [dice.pick("sparse", "dense") for _ in range(fields["num_hidden_layers"])]
    return fields | {
        "attention_bias": dice.chance(0.4), "num_experts": experts,
        "num_experts_per_tok": dice.between(1, experts),
        "num_shared_experts": dice.between(1, 2), "moe_intermediate_size": dice.between(1, 50),
        "router_scaling_factor": dice.pick(1.0, 2.5), "enable_moe_fp32_combine": dice.chance(0.5),
        "mlp_layer_types": dice.pick(None, types),
    }  # fmt: skip


def exaone4(dice: Dice) -> dict[str, Any]:
    fields = sizes(dice)
    fields["sliding_window_pattern"] = dice.between(1, 3)
    return fields | _layer_types(dice, fields["num_hidden_layers"])


def exaone_moe(dice: Dice) -> dict[str, Any]:
    fields = exaone4(dice)
    block = _deepseek(dice, fields["num_hidden_layers"])
    block["num_experts"] = block.pop("n_routed_experts")
    block["num_shared_experts"] = block.pop("n_shared_experts")
    return fields | block


def flex_olmo(dice: Dice) -> dict[str, Any]:
    return olmoe(dice)


def ernie4_5(dice: Dice) -> dict[str, Any]:
    return sizes(dice)


def ernie4_5_moe(dice: Dice) -> dict[str, Any]:
    fields, experts = sizes(dice), dice.between(1, 12)
    layers = fields["num_hidden_layers"]
    return fields | {
        "moe_num_experts": experts, "moe_k": dice.between(1, experts),
        "moe_num_shared_experts": dice.between(0, 2),
        "moe_intermediate_size": dice.between(1, 50), "moe_norm_min": dice.pick(1e-12, 0.9),
        "moe_layer_start_index": dice.between(0, layers - 1),
        "moe_layer_end_index": dice.pick(-1, layers - 1), "moe_layer_interval": dice.between(1, 2),
    }  # fmt: skip


def cwm(dice: Dice) -> dict[str, Any]:
    fields = sizes(dice, heads_divide=True) | {"bos_token_id": 1, "eos_token_id": []}
    return fields | _layer_types(dice, fields["num_hidden_layers"])


def phi3(dice: Dice) -> dict[str, Any]:
    """The types of rope are the family's. All sequences are longer than the two positions from
    which on transformers uses long_factor."""
    fields = sizes(dice, heads_divide=True, head_dim=False)
    kv_heads = fields["num_key_value_heads"]
    dim, heads = 8 * dice.between(1, 3), kv_heads * dice.between(1, 4)
    partial = dice.pick(0.5, 0.75, 1.0)
    table = {"rope_theta": float(dice.rng.uniform(100, 1e6)), "partial_rotary_factor": partial}
    factors = [
        [float(x) for x in dice.rng.uniform(1, 4, int(dim * partial) // 2)] for _ in range(2)
    ]
    longrope = {"short_factor": factors[0], "long_factor": factors[1], "rope_type": "longrope"}
    return fields | {
        "hidden_size": dim * heads, "num_attention_heads": heads,
        "sliding_window": dice.pick(None, 1, 8, 40),
        "rope_parameters": table | dice.pick({"rope_type": "default"}, longrope),
        "original_max_position_embeddings": 2,
    }  # fmt: skip


def ministral(dice: Dice) -> dict[str, Any]:
    fields = sizes(dice)
    return fields | _layer_types(dice, fields["num_hidden_layers"])


def gemma2(dice: Dice) -> dict[str, Any]:
    fields = sizes(dice, heads_divide=True)
    return fields | _layer_types(dice, fields["num_hidden_layers"]) | {
        "head_dim": 2 * dice.between(2, 16), "attention_bias": dice.chance(0.3),
        "query_pre_attn_scalar": dice.between(4, 64),
        "attn_logit_softcapping": dice.pick(None, 2.0, 50.0),
        "final_logit_softcapping": dice.pick(None, 3.0, 30.0),
    }  # fmt: skip


def _two_ropes(dice: Dice, full: Any) -> dict[str, Any]:
    local = {"rope_type": "default", "rope_theta": float(dice.rng.uniform(100, 1e5))}
    local |= dice.pick({}, {"rope_type": "linear", "factor": 3.0})
    return {"rope_parameters": {"full_attention": full, "sliding_attention": local}}


def gemma3_text(dice: Dice) -> dict[str, Any]:
    fields = gemma2(dice)
    del fields["attn_logit_softcapping"]
    return fields | _two_ropes(dice, fields["rope_parameters"]) | {
        "sliding_window_pattern": dice.between(1, 3),
        "num_hidden_layers": 3 if "layer_types" not in fields else fields["num_hidden_layers"],
    }  # fmt: skip


def olmo3(dice: Dice) -> dict[str, Any]:
    fields = olmo2(dice)
    types = _layer_types(dice, fields["num_hidden_layers"])
    return fields | types | _two_ropes(dice, fields["rope_parameters"])


def granite(dice: Dice) -> dict[str, Any]:
    return sizes(dice) | {
        "attention_bias": dice.chance(0.4), "embedding_multiplier": dice.pick(1.0, 12, 0.3),
        "residual_multiplier": dice.pick(1.0, 0.22), "logits_scaling": dice.pick(1.0, 8, 6.0),
        "attention_multiplier": dice.pick(1.0, 0.0078125, 0.2),
    }  # fmt: skip


def granitemoe(dice: Dice) -> dict[str, Any]:
    experts = dice.between(1, 12)
    return granite(dice) | {
        "num_local_experts": experts, "num_experts_per_tok": dice.between(1, experts)
    }  # fmt: skip


def afmoe(dice: Dice) -> dict[str, Any]:
    fields, experts = sizes(dice), dice.between(1, 12)
    layers = fields["num_hidden_layers"]
    return fields | _layer_types(dice, layers) | {
        "attention_bias": dice.chance(0.4), "num_experts": experts,
        "num_experts_per_tok": dice.between(1, experts), "num_shared_experts": dice.between(1, 2),
        "moe_intermediate_size": dice.between(1, 50), "num_dense_layers": dice.between(0, layers),
        "route_scale": dice.pick(1.0, 2.5), "mup_enabled": dice.chance(0.5),
        "global_attn_every_n_layers": dice.between(1, 3),
    }  # fmt: skip


def hunyuan_v1_dense(dice: Dice) -> dict[str, Any]:
    fields = sizes(dice) | {"attention_bias": dice.chance(0.4)}
    alpha = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0, "alpha": 50.0}
    return fields | ({"rope_parameters": alpha} if dice.chance(0.4) else {})


def hunyuan_v1_moe(dice: Dice) -> dict[str, Any]:
    experts = dice.between(1, 12)
    top_k, fields = dice.between(1, experts), hunyuan_v1_dense(dice)
    listed = [top_k] * fields["num_hidden_layers"]
    return fields | {"num_experts": experts, "moe_topk": dice.pick(top_k, listed)}


def deepseek_v3(dice: Dice) -> dict[str, Any]:
    fields = sizes(dice, head_dim=False)
    heads = dice.between(1, 6)
    yarn = {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "mscale": dice.pick(1.0, 0.7),
        "mscale_all_dim": dice.pick(1.0, 0.7), "original_max_position_embeddings": 64,
    }  # fmt: skip
    return fields | _deepseek(dice, fields["num_hidden_layers"]) | {
        "hidden_size": dice.between(5, 80), "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "rope_parameters": dice.pick(yarn, fields["rope_parameters"]),
        "q_lora_rank": dice.pick(None, dice.between(1, 40)),
        "kv_lora_rank": 16 * dice.between(1, 5), "qk_nope_head_dim": dice.between(1, 40),
        "qk_rope_head_dim": 2 * dice.between(2, 12), "v_head_dim": 16 * dice.between(1, 3),
        "rope_interleave": dice.chance(0.7),
    }  # fmt: skip


def glm4_moe_lite(dice: Dice) -> dict[str, Any]:
    fields = deepseek_v3(dice)
    del fields["first_k_dense_replace"]
    types = [dice.pick("sparse", "dense") for _ in range(fields["num_hidden_layers"])]
    return fields | {"mlp_layer_types": dice.pick(None, types)}


def qwen3_5_text(dice: Dice) -> dict[str, Any]:
    """At least one layer has attention."""
    fields, k_heads = sizes(dice, head_dim=False), dice.between(1, 3)
    layers = fields["num_hidden_layers"]
    interval = dice.between(1, layers)
    types = [dice.pick("linear_attention", "full_attention") for _ in range(layers)]
    types[dice.between(0, layers - 1)] = "full_attention"
    return fields | {
        "head_dim": 8 * dice.between(1, 4), "partial_rotary_factor": dice.pick(0.25, 0.5, 1.0),
        "layer_types": dice.pick(types, None), "full_attention_interval": interval,
        "linear_num_key_heads": k_heads, "linear_num_value_heads": k_heads * dice.between(1, 3),
        "linear_key_head_dim": dice.between(1, 40), "linear_value_head_dim": dice.between(1, 40),
        "linear_conv_kernel_dim": dice.between(1, 5), "hidden_act": dice.pick("silu", "swish"),
    }  # fmt: skip


def qwen3_5_moe_text(dice: Dice) -> dict[str, Any]:
    experts = dice.between(1, 12)
    return qwen3_5_text(dice) | {
        "num_experts": experts, "num_experts_per_tok": dice.between(1, experts),
        "moe_intermediate_size": dice.between(1, 50),
        "shared_expert_intermediate_size": dice.between(1, 70),
    }  # fmt: skip


def qwen3_next(dice: Dice) -> dict[str, Any]:
    fields = qwen3_5_moe_text(dice)
    return fields | {
        "norm_topk_prob": dice.chance(0.5), "decoder_sparse_step": dice.between(1, 2),
        "mlp_only_layers": [i for i in range(fields["num_hidden_layers"]) if dice.chance(0.2)],
    }  # fmt: skip


NO_HEAD_DIM = {
    "deepseek_v3",
    "glm4_moe_lite",
    "qwen2",
    "smollm3",
    "olmo2",
    "olmo3",
    "qwen2_moe",
    "olmoe",
    "flex_olmo",
    "phi3",
}  # draw none
FAMILIES: dict[str, Draw] = {
    "llama": llama, "mistral": mistral, "qwen2": qwen2, "qwen3": qwen3, "smollm3": smollm3,
    "olmo2": olmo2, "mixtral": mixtral,
    "qwen2_moe": qwen2_moe, "olmoe": olmoe, "arcee": arcee, "glm4": glm4, "glm4_moe": glm4_moe,
    "gpt_oss": gpt_oss,
    "glm": glm, "seed_oss": seed_oss, "minimax_m2": minimax_m2, "dots1": dots1,
    "solar_open": solar_open, "hy_v3": hy_v3, "exaone4": exaone4, "exaone_moe": exaone_moe,
    "flex_olmo": flex_olmo, "ernie4_5": ernie4_5, "cwm": cwm, "ministral": ministral,
    "ernie4_5_moe": ernie4_5_moe, "phi3": phi3,
    "olmo3": olmo3, "gemma2": gemma2, "gemma3_text": gemma3_text, "granite": granite,
    "granitemoe": granitemoe,
    "qwen3_next": qwen3_next, "qwen3_5_text": qwen3_5_text, "qwen3_5_moe_text": qwen3_5_moe_text,
    "afmoe": afmoe, "hunyuan_v1_dense": hunyuan_v1_dense, "hunyuan_v1_moe": hunyuan_v1_moe,
    "deepseek_v3": deepseek_v3, "glm4_moe_lite": glm4_moe_lite,
}  # fmt: skip


DELTA = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2, "linear_num_value_heads": 6,
    "linear_key_head_dim": 24, "linear_value_head_dim": 20, "linear_conv_kernel_dim": 4,
    "partial_rotary_factor": 0.5,
}  # fmt: skip
GRANITE = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 6.0}


def cuttable(family: str) -> dict[str, Any]:
    """Changes that make a model one for tp = 2 and 3 and ep = 2 and 4, with a last vocabulary block
    that is not full."""
    heads = {
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "hidden_size": 96,
        "intermediate_size": 80,
        "vocab_size": 300,
    }
    windows = ["sliding_attention", "full_attention"]
    deepseek = {
        "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 3,
        "first_k_dense_replace": 1, "num_hidden_layers": 2, "routed_scaling_factor": 2.5,
    }  # fmt: skip
    latent = {
        "num_key_value_heads": 6, "kv_lora_rank": 48, "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 12, "v_head_dim": 16, "rms_norm_eps": 1e-2,
    }  # fmt: skip
    mscale = {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "mscale": 1.0,
        "mscale_all_dim": 0.7, "original_max_position_embeddings": 64,
    }  # fmt: skip
    experts = {"num_experts": 8, "num_experts_per_tok": 3}
    changes = {
        "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 3},
        "qwen2_moe": {"num_experts": 8, "num_experts_per_tok": 3, "decoder_sparse_step": 1,
        "mlp_only_layers": []},
        "olmoe": {"num_experts": 8, "num_experts_per_tok": 3},
        "glm4_moe": {
            "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 3,
            "first_k_dense_replace": 0,
            "num_hidden_layers": 2, "partial_rotary_factor": 0.5, "routed_scaling_factor": 2.5,
        },
        "gpt_oss": {
            "num_local_experts": 8, "num_experts_per_tok": 3, "num_hidden_layers": 2,
            "sliding_window": 8, "layer_types": None, "attention_bias": True, "swiglu_limit": 0.1,
        },
        "glm4": {"partial_rotary_factor": 0.5, "attention_bias": True},
        "glm": {"partial_rotary_factor": 0.5, "attention_bias": True},
        "seed_oss": {"attention_bias": True, "attention_out_bias": True},
        "minimax_m2": {"rotary_dim": 8, "num_local_experts": 8, "num_experts_per_tok": 3},
        "dots1": deepseek | {"sliding_window": 20, "layer_types": windows},
        "solar_open": deepseek | {"first_k_dense_replace": None},
        "hy_v3": {
            "num_experts": 8, "num_experts_per_tok": 3, "num_hidden_layers": 2,
            "mlp_layer_types": ["sparse", "dense"], "router_scaling_factor": 2.5,
        },
        "exaone4": {"num_hidden_layers": 2, "sliding_window": 20, "layer_types": windows},
        "exaone_moe": {
            "num_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 3,
            "num_hidden_layers": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5,
            "sliding_window": 20, "layer_types": windows,
        },
        "ernie4_5_moe": {
            "moe_num_experts": 8, "moe_k": 3, "num_hidden_layers": 2, "moe_num_shared_experts": 1,
            "moe_norm_min": 0.3, "moe_layer_start_index": 1, "moe_layer_interval": 1,
            "moe_layer_end_index": -1,
        },
        "phi3": {"rope_parameters": {
            "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75,
            "short_factor": [1.0] * 6, "long_factor": [1.0, 1.1, 1.5, 2.0, 2.5, 3.0],
        }},
        "flex_olmo": {"num_experts": 8, "num_experts_per_tok": 3},
        "cwm": {"num_hidden_layers": 2, "sliding_window": 20, "layer_types": windows},
        "ministral": {"num_hidden_layers": 2, "sliding_window": 20, "layer_types": windows},
        "smollm3": {"num_hidden_layers": 2, "no_rope_layers": [1, 0]},
        "qwen3_5_text": DELTA, "qwen3_5_moe_text": DELTA | experts,
        "qwen3_next": DELTA | experts | {"decoder_sparse_step": 2, "mlp_only_layers": []},
        "gemma2": {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0,
        "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
        "olmo3": {"num_hidden_layers": 2, "layer_types": windows, "sliding_window": 20},
        "gemma3_text": {"num_hidden_layers": 2, "final_logit_softcapping": 3.0,
        "layer_types": ["sliding_attention", "full_attention"]},
        "granite": GRANITE,
        "afmoe": {
            "num_experts": 8, "num_experts_per_tok": 3, "num_dense_layers": 0, "route_scale": 2.5,
            "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"],
            "mup_enabled": True,
        },
        "hunyuan_v1_moe": {"num_experts": 8, "moe_topk": 3},
        "granitemoe": {"num_local_experts": 8, "num_experts_per_tok": 3, **GRANITE},
        "deepseek_v3": {
            **deepseek, **latent, "q_lora_rank": 24, "rope_interleave": True,
            "rope_parameters": mscale,
        },
        "glm4_moe_lite": {
            **{key: n for key, n in deepseek.items() if key != "first_k_dense_replace"}, **latent,
            "q_lora_rank": None, "mlp_layer_types": ["sparse", "dense"], "rope_interleave": False,
        },
    }  # fmt: skip
    return heads | changes.get(family, {}) | ({"head_dim": 16} if family not in NO_HEAD_DIM else {})


@dataclasses.dataclass
class Model:
    """A config and its weights, by transformers' names."""

    config: Any
    state: dict[str, torch.Tensor]  # float32

    def net(self, dtype: str = "float32") -> Any:
        net = transformers.AutoModelForCausalLM.from_config(
            oracle.config_of(self.config.to_dict()),
            dtype=getattr(torch, dtype),
            attn_implementation="eager",
            experts_implementation="eager",
        )
        if dtype == "float64":
            for parameter in net.parameters():  # HunYuan's routers are float32 in any model
                parameter.data = parameter.data.double()
        net.load_state_dict(
            {name: x.to(net.state_dict()[name].dtype) for name, x in self.state.items()}
        )
        net.tie_weights()
        return net.eval().requires_grad_(False)


HIDDEN_ACT = ("gelu", "silu", "gelu_new", "gelu_pytorch_tanh", "relu2", "gelu", "swish")


def activation_key(family: str) -> str:
    return "hidden_activation" if family.startswith("gemma") else "hidden_act"


def draw(family: str, number: int, seed: int = 0, **changes: Any) -> Model:
    fields = {activation_key(family): HIDDEN_ACT[(number + number // 100) % 7]}
    fields |= FAMILIES[family](Dice([seed, number, *family.encode()])) | changes
    config = oracle.config_of({"model_type": family, **fields})
    with torch.device("meta"):
        made = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.float32
        ).state_dict()
    state = {
        name: torch.from_numpy(helpers.weight(name, x.shape, seed)) for name, x in made.items()
    }
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    return Model(config, state)


@dataclasses.dataclass
class Routing:
    """The choices of one layer's router for each row, best first, and the smallest gap between the
    values that it compared."""

    ids: list[np.ndarray] = dataclasses.field(default_factory=list)
    gaps: list[np.ndarray] = dataclasses.field(default_factory=list)


def _gap(keys: torch.Tensor, chosen: int) -> torch.Tensor:
    """[rows]: the gap between the last of `chosen` and the next, for keys [rows][n]."""
    ranked = keys.sort(-1, descending=True).values
    return (
        ranked[:, chosen - 1] - ranked[:, chosen]
        if chosen < keys.shape[1]
        else torch.full((len(keys),), torch.inf)
    )


def _gaps(router: Any, logits: torch.Tensor, bias: Any = None) -> torch.Tensor:
    """[rows]: relative to the scores if these come from a softmax, whose sum is 1. bias: an
    argument of the router's forward method in some families."""
    logits = logits.double()
    if hasattr(router, "moe_statics"):
        return _gap(router.moe_statics(logits.softmax(-1)), router.top_k)
    bias = getattr(router, "e_score_correction_bias", bias)
    if bias is None:
        return _gap(torch.log_softmax(logits, -1), router.top_k)
    keys, groups = logits.sigmoid() + bias.double(), getattr(router, "num_group", 1)
    if groups == 1:
        return _gap(keys, router.top_k)
    by_group = keys.view(len(keys), groups, -1).topk(2, -1).values.sum(-1)
    best = torch.zeros_like(by_group, dtype=torch.bool).scatter_(
        1, by_group.topk(router.topk_group, -1).indices, True
    )
    kept = keys.masked_fill(~best.repeat_interleave(keys.shape[1] // groups, 1), -torch.inf)
    return torch.minimum(_gap(kept, router.top_k), _gap(by_group, router.topk_group))


@contextlib.contextmanager
def routings(net: Any) -> Iterator[Routing]:
    """Records the routings of the forward passes inside the block, one layer after another."""
    made = Routing()

    def record(router: Any, given: Any, outputs: Any) -> None:
        logits, _, ids = outputs
        made.ids.append(ids.numpy())
        made.gaps.append(_gaps(router, logits, *given[1:]).numpy())

    hooks = [
        module.register_forward_hook(record)
        for module in net.modules()
        if type(module).__name__.lower().endswith(("topkrouter", "choicerouter", "moev1gate"))
    ]
    try:
        yield made
    finally:
        for hook in hooks:
            hook.remove()


def forward(
    net: Any, ids: list[int], double: bool = False
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(logits float64 [n][vocab], chosen experts [n][moe layers][k], the least gap of each row
    [n])."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode())
        if double:
            stack.enter_context(oracle.Double().exempting(net.model.rotary_emb))
        routing = stack.enter_context(routings(net))
        logits = net(torch.tensor([ids]), use_cache=False).logits[0].double().numpy()
    if not routing.ids:
        return logits, np.zeros((len(ids), 0, 0), np.int64), np.full(len(ids), np.inf)
    return logits, np.stack(routing.ids, 1), np.min(routing.gaps, 0)

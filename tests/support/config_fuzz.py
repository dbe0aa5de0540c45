"""Malformed configs: dicts with up to four mistakes in them, and their JSON with changed bytes; and
arguments of SamplingParams, SyncOptions, Mesh and Generator, with up to two mistakes.

Oracle: ModelSpec.from_hf returns a spec or raises an error of rollmesh, within `SECONDS` and
`MOST_KIB`. A refusal is at most a page long and names one of the changed keys, or a key that is
computed from them. A spec survives a round trip through its dict, keeps the rules of
csrc/model/spec.h, which are written down again here, and, if it is small, becomes a Generator or
raises an error of rollmesh. Wrong arguments are refused in the same way; accepted arguments are
kept unchanged.

    PYTHONPATH=python python tests/support/config_fuzz.py [--cases 2000] [--seconds 0] [--seed 1]
    [--first 0] [--plant 0]

A case depends only on the seed and its number. --plant injects a fault. 1: a rule is missing in the
oracle; 2: an error is not an error of rollmesh."""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import itertools
import json
import math
import random
import re
import resource
import sys
import tempfile
import time
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import helpers
import numpy as np

import rollmesh
from rollmesh.model.families import FAMILIES
from rollmesh.weights.sync import SyncOptions

Config = dict[Any, Any]
SECONDS = 5.0  # a case takes a millisecond; a machine may be loaded
HUGE = 10**400, 10**5000  # beyond a double; beyond what Python prints
MOST_KIB = 1 << 18  # by which a case may raise what the process has held at its peak
PAGE = 8192  # characters of a message

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "truncate": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
LONGROPE = {
    "type": "longrope",
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 32,
}
SLIDING: Config = {"use_sliding_window": True, "sliding_window": 9}


def of_family(model_type: str, **changes: Any) -> Config:
    """The keys of helpers.tiny_config that all families share, with the given model type and
    changes."""
    common = {
        key: value
        for key, value in helpers.tiny_config().items()
        if key not in ("attention_bias", "use_sliding_window")
    }
    return {**common, "model_type": model_type, **changes}


DEEPSEEK: Config = {
    "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 3,
    "n_shared_experts": 1, "moe_intermediate_size": 24, "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1, "norm_topk_prob": True,
}  # fmt: skip
LATENT: Config = {
    "kv_lora_rank": 32, "qk_nope_head_dim": 6, "qk_rope_head_dim": 16, "v_head_dim": 16,
    "num_key_value_heads": 4,
}  # fmt: skip
DELTA: Config = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4, "full_attention_interval": 2,
}  # fmt: skip
BASES: list[Config] = [
    helpers.tiny_config(),
    helpers.tiny_config(True),
    helpers.tiny_config(attention_bias=True, tie_word_embeddings=True, rope_parameters=YARN),
    helpers.tiny_config(True, num_hidden_layers=4, mlp_only_layers=[1], decoder_sparse_step=2),
    helpers.tiny_config(rope_scaling={"type": "linear", "factor": 2.0}, rope_theta=1e6,
    eos_token_id=[1, 2]),
    helpers.tiny_config(rope_parameters=LLAMA3, max_window_layers=1, **SLIDING),
    helpers.tiny_config(
        head_dim=16, rope_scaling=LONGROPE, use_sliding_window=True, sliding_window=4,
        layer_types=["sliding_attention"] * 2
    ),
    helpers.tiny_config(True, rope_parameters={"rope_type": "dynamic", "factor": 2.0,
    "rope_theta": 1e4}),
    helpers.tiny_config(rope_parameters={"rope_type": "proportional", "partial_rotary_factor": 0.5,
    "rope_theta": 1e4}),
    of_family("llama", attention_bias=True, rope_parameters=LLAMA3),
    of_family("mistral", sliding_window=9),
    of_family("qwen2", max_window_layers=1, **SLIDING),
    of_family("smollm3", attention_bias=False, num_hidden_layers=4, no_rope_layer_interval=2,
    **SLIDING),
    of_family("smollm3", no_rope_layers=[1, 0], use_sliding_window=False),
    of_family("olmo2", attention_bias=True),
    of_family("mixtral", sliding_window=None, num_local_experts=4, num_experts_per_tok=2),
    of_family(
        "qwen2_moe", qkv_bias=True, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24,
        norm_topk_prob=True,
        shared_expert_intermediate_size=40, decoder_sparse_step=1, mlp_only_layers=[],
        max_window_layers=2, **SLIDING,
    ),
    of_family("olmoe", attention_bias=False, clip_qkv=None, num_experts=4, num_experts_per_tok=2,
    norm_topk_prob=True),
    of_family("arcee", attention_bias=True),
    of_family("glm4", attention_bias=True, partial_rotary_factor=0.5),
    of_family(
        "glm4_moe", attention_bias=True, use_qk_norm=True, partial_rotary_factor=0.5, **DEEPSEEK
    ),
    of_family("glm", attention_bias=True, partial_rotary_factor=0.5),
    of_family("seed_oss", attention_bias=True, attention_out_bias=True, residual_dropout=0.1),
    of_family("minimax_m2", rotary_dim=8, num_local_experts=4, num_experts_per_tok=2,
    use_qk_norm=True, attn_type_list=[1, 1]),
    of_family("dots1", sliding_window=9, max_window_layers=1, **DEEPSEEK),
    of_family("solar_open", attention_bias=True, **DEEPSEEK | {"first_k_dense_replace": 0}),
    of_family(
        "hy_v3", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24,
        num_shared_experts=1, router_scaling_factor=2.5, mlp_layer_types=["dense", "sparse"]
    ),
    of_family("exaone4", sliding_window=9, sliding_window_pattern=2),
    of_family(
        "exaone_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24,
        num_shared_experts=1, sliding_window=9, layer_types=["sliding_attention", "full_attention"]
    ),
    of_family("flex_olmo", num_experts=4, num_experts_per_tok=2, norm_topk_prob=True),
    of_family("ernie4_5", use_bias=False),
    of_family("cwm", sliding_window=9, rope_parameters=LLAMA3),
    of_family("ministral", sliding_window=9),
    of_family(
        "ernie4_5_moe", moe_num_experts=4, moe_k=2, moe_num_shared_experts=1, moe_norm_min=1e-12,
        moe_intermediate_size=24, moe_layer_start_index=1, moe_layer_interval=1,
        moe_layer_end_index=-1
    ),
    of_family("phi3", sliding_window=9, rope_scaling=LONGROPE | {"type": "su"}),
    of_family(
        "deepseek_v3", q_lora_rank=None, scoring_func="sigmoid", **DEEPSEEK, **LATENT,
        rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 0.7},
    ),
    of_family(
        "glm4_moe_lite", q_lora_rank=8, mlp_layer_types=["dense", "sparse"], rope_interleave=False,
        **DEEPSEEK, **LATENT,
    ),
    of_family("qwen3_5_text", attn_output_gate=True, **DELTA),
    of_family(
        "qwen3_next", num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24,
        shared_expert_intermediate_size=24, layer_types=["linear_attention", "full_attention"],
        **DELTA,
    ),
]  # fmt: skip
KNOWN = sorted(
    {key for base in BASES for key in base}
    | {
        "quantization_config",
        "auto_map",
        "pruned_heads",
        "num_local_experts",
        "partial_rotary_factor",
        "original_max_position_embeddings",
    }
    | {
        "is_encoder_decoder",
        "add_cross_attention",
        "sliding_window",
        "layer_types",
        "norm_topk_prob",
        "decoder_sparse_step",
    }
)
ROPE_KEYS = [
    "rope_type",
    "type",
    "rope_theta",
    "factor",
    "original_max_position_embeddings",
    "attention_factor",
    "beta_fast",
    "beta_slow",
]
ROPE_KEYS += [
    "mscale",
    "mscale_all_dim",
    "truncate",
    "short_factor",
    "long_factor",
    "low_freq_factor",
    "high_freq_factor",
]
ROPE = ["rope_parameters", "rope_scaling", *ROPE_KEYS, "partial_rotary_factor"]
# Keys that a refusal may name instead of the one that was touched: what is computed from it, or
# held against it.
AKIN: dict[str, list[str]] = {
    "hidden_size": ["head_dim", "rotary_dim"],
    "num_attention_heads": ["head_dim", "num_key_value_heads", "rotary_dim"],
    "head_dim": ["num_attention_heads", "rotary_dim", *ROPE],
    "linear_num_key_heads": ["linear_num_value_heads"],
    "full_attention_interval": ["layer_types"],
    "kv_lora_rank": ["head_dim"],
    "qk_rope_head_dim": ["head_dim", "qk_head_dim", "num_attention_heads", *ROPE],
    "qk_nope_head_dim": ["qk_head_dim", "num_attention_heads"],
    "v_head_dim": ["num_attention_heads"],
    "num_hidden_layers": ["layer_types", "mlp_only_layers", "no_rope_layers"],
    "max_position_embeddings": ROPE,
    "vocab_size": ["eos_token_id"],
    "sliding_window": ["layer_types"],
    "use_sliding_window": ["layer_types", "sliding_window", "max_window_layers"],
    "model_type": KNOWN,
    "num_experts": [
        "num_experts_per_tok",
        "num_local_experts",
        "moe_intermediate_size",
        "intermediate_size",
    ],
    "num_local_experts": ["num_experts"],
    "n_routed_experts": ["num_experts_per_tok"],
    "moe_intermediate_size": ["n_shared_experts", "num_shared_experts"],
    "num_experts_per_tok": ["num_experts"],
    "mlp_only_layers": ["intermediate_size", "num_experts_per_tok", "moe_intermediate_size"],
    "decoder_sparse_step": ["intermediate_size", "num_experts_per_tok", "moe_intermediate_size"],
} | dict.fromkeys(ROPE, ROPE)


# Functions that take arguments: how to call each of them, and with which values.
SMALL = {
    "max_model_len": 48,
    "kv_cache_gib": 0.004,
    "threads": 1,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 16,
}
# Each of these is a valid value for some field.
RIGHT = [0, 1, 2, 16, 0.5, 1.0, True, None, "float32", "keep", "ref", (1, 2), [], ["ab"]]
TAKERS: dict[str, tuple[Any, list[str]]] = {
    "SamplingParams": (
        rollmesh.SamplingParams,
        [field.name for field in dataclasses.fields(rollmesh.SamplingParams)],
    ),
    "SyncOptions": (SyncOptions, [field.name for field in dataclasses.fields(SyncOptions)]),
    "Mesh": (rollmesh.Mesh, ["tp", "dp", "ep", "cp", "pp"]),
    "Generator": (
        lambda **given: rollmesh.Generator(helpers.tiny_spec(), **{**SMALL, **given}),
        [
            *(
                "mesh",
                "comm",
                "device",
                "dtype",
                "ep_backend",
                "sequence_parallel",
                "eos_token_ids",
                "max_model_len",
                "max_num_seqs",
            ),
            *(
                "max_num_batched_tokens",
                "block_size",
                "kv_cache_gib",
                "enable_prefix_caching",
                "threads",
                "seed",
                "isa",
            ),
        ],
    ),
}


class Failure(AssertionError):
    """A config for which the oracle does not hold."""


# --------------------------------------------------------------------------------------- mistakes
WORDS = [
    "",
    "8",
    "silu",
    "yarn",
    "default",
    "sliding_attention",
    "qwen3",
    "NaN",
    "true",
    "x" * 100_000,
    "é",
    "\ud800",
    "\x00",
    "None",
]
ODD = [
    b"8",
    1j,
    Decimal("8"),
    Fraction(3, 2),
    {1, 2},
    object(),
    int,
    np.int64(8),
    np.float32(1.5),
    np.bool_(True),
    np.arange(3),
]


class Dice(random.Random):
    bombs = True  # whether there may be values that memory holds and no text could


def number(r: Dice) -> int | float:
    powers = 2 ** r.choice([7, 10, 14, 20, 22, 26, 31, 32, 53, 62, 63, 64, 100, 1030]) + r.randint(
        -1, 1
    )
    special = r.choice(
        [math.nan, math.inf, -math.inf, 1e308, 5e-324, -0.0, 1e-46, *HUGE, 0.5, 1.0, 1e6]
    )
    return r.choice(
        [
            r.randint(-3, 8),
            r.randint(0, 4000),
            powers,
            -powers,
            special,
            r.random(),
            r.gauss(0, 100),
        ]
    )


def junk(r: Dice, depth: int = 0) -> Any:
    """Any value that JSON, Python or a transformers object may hold."""
    if depth < 3 and r.random() < 0.3:
        times = 1000 if depth == 0 and r.bombs and r.random() < 0.1 else 1
        items = [junk(r, depth + 1) for _ in range(r.choice([0, 1, 2, 3, 8]))] * times
        return r.choice(
            [
                items,
                tuple(items),
                {str(i): item for i, item in enumerate(items)},
                {r.choice(ROPE_KEYS): item for item in items},
            ]
        )
    if depth == 0 and r.random() < 0.01:
        deep: Any = 0
        for _ in range(100_000):
            deep = [deep]
        return deep
    if r.bombs and depth == 0 and r.random() < 0.01:
        wide: Any = 0
        for _ in range(9):
            wide = [wide] * 100
        return wide  # 10^18 elements in a few kilobytes
    kind = r.random()
    return (
        number(r)
        if kind < 0.4
        else r.choice([None, True, False])
        if kind < 0.6
        else r.choice(WORDS)
        if kind < 0.8
        else r.choice(ODD)
    )


def nudge(r: Dice, value: Any) -> Any:
    """A value close to a valid one."""
    if isinstance(value, bool):
        return r.choice([not value, int(value), str(value)])
    if isinstance(value, (int, float)) and abs(value) < 1e30:
        return r.choice(
            [
                value + 1,
                value - 1,
                -value,
                value * 2,
                value / 2,
                float(value),
                str(value),
                [value],
                value * 10**30,
                np.int64(1),
            ]
        )
    if isinstance(value, str):
        at = r.randrange(len(value) + 1)
        return r.choice(
            [
                value[:at],
                value.upper(),
                value[:at] + r.choice(["_", " ", "\n", "x"]) + value[at:],
                value.encode(errors="replace"),
                [value],
            ]
        )
    if isinstance(value, (list, tuple)):
        items = list(value)
        at = r.randrange(len(items) + 1)
        return r.choice(
            [
                items[:at],
                [*items[:at], junk(r, 2), *items[at + 1 :]],
                [*items, *items[:1]],
                tuple(items),
                items[::-1],
                items * 500,
            ]
        )
    if isinstance(value, dict):
        key = r.choice([*value, *ROPE_KEYS, "unheard_of"])
        if r.random() < 0.2:
            return {k: v for k, v in value.items() if k != key}
        return {
            **value,
            key: nudge(r, value[key]) if key in value and r.random() < 0.5 else junk(r, 1),
        }
    return junk(r)


def mutate(r: Dice, config: Config) -> set[str]:
    """Makes one mistake in the config; returns the names of the changed keys."""
    key: Any = r.choice(KNOWN if r.random() < 0.9 else list(config))
    how = r.random()
    if how < 0.15:
        config.pop(key, None)
    elif how < 0.5 and key in config:
        config[key] = nudge(r, config[key])
    elif how < 0.85:
        config[key] = junk(r)
    elif how < 0.9:
        other = r.choice(list(config) or ["head_dim"])
        config[key], config[other] = config.get(other), config.get(key)
        return {str(key), str(other)}
    else:
        key = r.choice(
            [
                "unheard_of",
                "",
                "rope_thetaa",
                "x" * 100_000,
                7,
                None,
                ("a", "b"),
                "é\n",
                "\ud800",
                "vocab_size ",
            ]
        )
        for i in range(r.choice([1, 1, 1, 1000])):
            config[key if i == 0 else f"{str(key)[:20]}{i}"] = junk(r, 2)
    return {str(key)}


# ------------------------------------------------------------------------------------- the oracle
def names(message: str, touched: set[str]) -> bool:
    """Whether the message names what was changed, or something related. A key that is not an
    identifier may appear as its repr."""
    akin = touched.union(*(AKIN.get(key, []) for key in touched))
    return (
        any(key[:50] in message or repr(key)[1:50] in message for key in akin)
        or "unknown config keys" in message
    )


def check_spec(spec: rollmesh.ModelSpec, plant: int) -> None:
    """Checks the rules of csrc/model/spec.h."""
    s = spec
    sizes = [
        (s.vocab_size, 2**26),
        (s.hidden_size, 2**22),
        (s.num_hidden_layers, 1024),
        (s.num_attention_heads, 2**14),
    ]
    rules = [all(type(size) is int and 1 <= size <= most for size, most in sizes)]
    rules += [
        type(s.head_dim) is int,
        2 <= s.head_dim <= 1024,
        s.head_dim % 2 == plant % 2,
        s.num_attention_heads * s.head_dim <= 2**22,
    ]
    rules += [s.num_key_value_heads >= 1, s.num_attention_heads % s.num_key_value_heads == 0]
    rules += [
        len(s.is_moe_layer) == len(s.sliding_windows) == s.num_hidden_layers,
        all(0 <= w <= 2**62 for w in s.sliding_windows),
    ]
    rules += [
        math.isfinite(s.rms_norm_eps),
        s.rms_norm_eps > 0,
        all(0 <= token < s.vocab_size for token in s.eos_token_ids),
    ]
    if any(s.is_moe_layer):
        each = s.num_experts // s.n_group
        rules += [
            1 <= s.num_experts_per_tok <= s.num_experts <= 16384,
            1 <= s.moe_intermediate_size <= 2**22,
        ]
        rules += [
            1 <= s.topk_group <= s.n_group <= 64,
            s.num_experts % s.n_group == 0,
            s.n_group == 1 or each >= 2,
        ]
        rules += [
            s.num_experts_per_tok <= s.topk_group * each,
            math.isfinite(s.routed_scaling_factor),
            s.routed_scaling_factor > 0,
        ]
        rules += [type(s.shared_intermediate_size) is int, 0 <= s.shared_intermediate_size <= 2**22]
        rules += [
            s.score_func in ("softmax", "sigmoid"),
            not s.shared_switch or s.shared_intermediate_size > 0,
        ]
    else:
        rules.append(
            (
                s.num_experts,
                s.num_experts_per_tok,
                s.moe_intermediate_size,
                s.shared_intermediate_size,
            )
            == (0, 0, 0, 0)
        )
    nets = s.layer_kinds.count("delta_net")
    heads = s.linear_num_key_heads, s.linear_num_value_heads
    dims = s.linear_key_head_dim, s.linear_value_head_dim
    if nets:
        rules += [nets < s.num_hidden_layers, 1 <= heads[0] <= heads[1] <= 2**14]
        rules += [heads[1] % heads[0] == 0, all(1 <= dim <= 128 for dim in dims)]
        rules += [1 <= s.linear_conv_kernel_dim <= 64, s.activation == "silu"]
    else:
        rules.append((*heads, *dims, s.linear_conv_kernel_dim) == (0,) * 5)
    if s.kv_lora_rank:
        rules += [s.kv_lora_rank % 16 == 0, s.v_head_dim % 16 == 0, s.num_key_value_heads == 1]
        rules += [1 <= s.v_head_dim <= 1024, 1 <= s.qk_nope_head_dim <= 1024]
        rules += [0 <= s.q_lora_rank <= 2**22, s.num_attention_heads * s.v_head_dim <= 2**22]
    rules += [len(s.rope_layers) == s.num_hidden_layers, s.qk_norm in ("none", "head", "whole")]
    rules.append(
        s.intermediate_size == 0 if all(s.is_moe_layer) else 1 <= s.intermediate_size <= 2**22
    )
    for length in (1, 64, s.max_position_embeddings):
        try:
            inv_freq, scale = s.rope(length)
        except rollmesh.ConfigError:
            continue
        rules += [inv_freq.dtype == np.float32, bool(np.isfinite(inv_freq).all()), scale > 0]
        whole = FAMILIES[s.model_type].partial_rotary_factor is None
        most = (s.head_dim - s.kv_lora_rank) // 2
        rules.append(len(inv_freq) == most if whole else 1 <= len(inv_freq) <= most)
    if not all(rules):
        raise Failure(f"rule {rules.index(False)} is broken by {dataclasses.asdict(s)}")
    again = rollmesh.ModelSpec.from_dict(json.loads(json.dumps(s.to_dict())))
    if again != s or hash(again) != hash(s):
        raise Failure(f"to_dict and from_dict give another: {again}")


def is_small(s: rollmesh.ModelSpec) -> bool:
    width = max(
        s.hidden_size,
        s.intermediate_size,
        s.moe_intermediate_size,
        s.num_attention_heads * s.head_dim,
    )
    return (
        width <= 1024
        and s.vocab_size <= 10_000
        and s.num_hidden_layers <= 16
        and s.num_experts <= 64
    )


def build(spec: rollmesh.ModelSpec) -> bool:
    """Returns whether it becomes a generator; only errors of rollmesh are caught."""
    try:
        with rollmesh.Generator(
            spec,
            max_model_len=48,
            kv_cache_gib=0.004,
            threads=1,
            max_num_seqs=2,
            max_num_batched_tokens=16,
        ) as gen:
            needed = {name: info.shape for name, info in gen.manifest().items() if info.required}
            shapes = {
                name: shape
                for name, shape in needed.items()
                if not name.endswith("correction_bias")
            }
    except rollmesh.Error:
        return False
    if shapes != dict(spec.parameters()):
        raise Failure("the manifest of the engine is another than the spec's")
    return True


def arguments(r: Dice) -> str:
    """Calls one of TAKERS with up to two arguments that are likely wrong; returns what became of
    it."""
    name = r.choice(list(TAKERS))
    make, fields = TAKERS[name]
    given = {
        field: junk(r) if r.random() < 0.7 else r.choice(RIGHT)
        for field in r.sample(fields, r.choice([1, 1, 2]))
    }
    # Sizes that a Generator would allocate are small, or larger than any memory.
    if name == "Generator":
        given = {
            k: v * 2**64 if isinstance(v, (int, float)) and 8 < abs(v) < 2**64 else v
            for k, v in given.items()
        }
    begin = time.monotonic()
    try:
        with (
            contextlib.closing(make(**given))
            if name == "Generator"
            else contextlib.nullcontext(make(**given)) as made
        ):
            for field, value in given.items():
                got = getattr(made, field, value)
                # vLLM's 0 is -1.
                plain = isinstance(value, (int, float)) and (field, value) != ("top_k", 0)
                if plain and isinstance(got, float) and isinstance(value, int):
                    value = float(value)  # an integer beyond 2^53 is rounded as Python rounds it
                if plain and not isinstance(got, tuple) and got != value:
                    raise Failure(f"{name}({field}={value}) became {got}")
    except (rollmesh.Error, MemoryError) as error:
        took, message = time.monotonic() - begin, str(error)
        message.encode()
        named = any(field in message for field in given) or "mesh of" in message
        if took > SECONDS or not 0 < len(message) <= PAGE or not named:
            raise Failure(
                f"{name} of {set(given)}: {len(message)} characters in {took:.1f} s: "
                f"{message[:500]}"
            ) from error
        return "arguments refused"
    return "arguments taken"


def damaged_json(r: Dice, config: Config, folder: Path) -> Path:
    """Returns the config as a file with a few bytes changed, cut, doubled, or nested very
    deeply."""
    try:
        text = bytearray(
            json.dumps(config, default=str, skipkeys=True).encode("utf-8", "surrogatepass")
        )
    except (RecursionError, ValueError):  # nested too deeply, an integer of too many digits
        text = bytearray(json.dumps(helpers.tiny_config()).encode())
    for _ in range(r.randint(0, 3)):
        at = r.randrange(len(text) + 1)
        some = r.choice(
            [
                b"",
                b"\xff",
                b"NaN",
                b"-Infinity",
                b"1e999",
                b"9" * 5000,
                b"[" * 5000,
                b'"',
                b"\\ud800",
                b"null",
                b"{",
                b"\x00",
            ]
        )
        text[at : at + r.choice([0, 1, 1, 5, 10_000])] = some
    file = folder / "config.json"
    file.write_bytes(bytes(text))
    return file


# ---------------------------------------------------------------------------------------- running
def one(seed: int, case: int, folder: Path, plant: int) -> str:
    """Runs a case; returns what became of it."""
    r = Dice(f"{seed}/{case}")
    if r.random() < 0.2:
        return arguments(r)
    from_file = r.random() < 0.2
    r.bombs = not from_file
    config = {**r.choice(BASES)}
    touched: set[str] = set()
    for _ in range(r.choice([0, 1, 1, 1, 2, 3, 4])):
        touched |= mutate(r, config)
    source: Any = damaged_json(r, config, folder) if from_file else config
    begin = time.monotonic()
    try:
        if plant == 2 and r.random() < 0.01:
            raise TypeError("planted")
        spec = rollmesh.ModelSpec.from_hf(source)
    except rollmesh.Error as error:
        took, message = time.monotonic() - begin, str(error)
        message.encode()  # it can be written down
        named = from_file or names(message, touched)
        if took > SECONDS or not message or len(message) > PAGE or not named:
            raise Failure(
                f"{touched}: {len(message)} characters in {took:.1f} s: {type(error).__name__}: "
                f"{message[:500]}"
            ) from error
        return type(error).__name__
    check_spec(spec, plant)
    if time.monotonic() - begin > SECONDS:
        raise Failure(f"{touched}: accepted after {time.monotonic() - begin:.1f} s")
    if is_small(spec) and r.random() < 0.25:
        return "generators" if build(spec) else "refused by the engine"
    return "accepted"


def run(
    *, seed: int, first: int = 0, cases: int = 0, seconds: float = 0, plant: int = 0
) -> tuple[int, collections.Counter[str]]:
    """Runs cases until there are enough or the seconds are over; (how many, what became of them).
    Raises Failure, which says how to run the case alone."""
    counts: collections.Counter[str] = collections.Counter()
    begin, done = time.monotonic(), 0
    with tempfile.TemporaryDirectory(prefix="rollmesh-") as folder:
        for case in itertools.count(first):
            if (cases and done == cases) or (seconds and time.monotonic() - begin > seconds):
                break
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            try:
                counts[one(seed, case, Path(folder), plant)] += 1
                if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak > MOST_KIB:
                    raise Failure(f"it took over {MOST_KIB} KiB")
            except Exception as error:  # whatever it is, it is not what was promised
                raise Failure(
                    f"config_fuzz.py --seed {seed} --first {case} --cases 1: "
                    f"{type(error).__name__}: {error}"
                ) from error
            done += 1
    return done, counts


def line(done: int, counts: collections.Counter[str], seed: int) -> str:
    return (
        f"fuzz_configs: {done} configs "
        f"({', '.join(f'{what} {n}' for what, n in sorted(counts.items()))}), seed {seed}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    for name, default in (("cases", 0), ("seconds", 0), ("seed", 1), ("first", 0), ("plant", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = vars(parser.parse_args())
    if not options["cases"] and not options["seconds"]:
        options["cases"] = 2000
    try:
        done, counts = run(**options)
    except Failure as error:
        sys.stderr.write(re.sub(r"(.{4000}).*", r"\1…", str(error), flags=re.DOTALL) + "\n")
        return 1
    sys.stdout.write(line(done, counts, options["seed"]) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

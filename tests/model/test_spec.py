"""ModelSpec.from_hf: what configs of transformers 4 and 5 mean, and absurd configs.

Oracles: transformers' own config classes and rotary embeddings (inv_freq bit for bit), and the rule
that an error names.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import tiny_config

import rollmesh as rm
from rollmesh.model.families import FAMILIES

DENSE, MOE = tiny_config(), tiny_config(True)
QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def spec(base: dict[str, Any] = DENSE, **changes: Any) -> rm.ModelSpec:
    return rm.ModelSpec.from_hf({**base, **changes})


# ----------------------------------------------------------------------------------- what is read
def test_a_config_of_transformers_4() -> None:
    s = rm.ModelSpec.from_hf(QWEN3_06B)
    assert (
        s.vocab_size,
        s.hidden_size,
        s.num_hidden_layers,
        s.num_key_value_heads,
        s.head_dim,
    ) == (151936, 1024, 28, 8, 128)
    assert (s.num_experts, s.num_experts_per_tok, s.moe_intermediate_size, s.is_moe_layer) == (
        0,
        0,
        0,
        (False,) * 28,
    )
    assert (s.tie_word_embeddings, s.eos_token_ids, s.sliding_windows) == (
        True,
        (151645,),
        (0,) * 28,
    )
    assert (s.rope_settings.type, s.rope_settings.theta) == ("default", 1e6)
    assert s.num_parameters == 596_049_920  # as published


@pytest.mark.parametrize("moe", [False, True])
def test_transformers_configs_with_defaults(moe: bool) -> None:
    """A config object brings transformers' defaults as values; the dict without them must mean the
    same."""
    transformers = pytest.importorskip("transformers")
    kind = transformers.Qwen3MoeConfig if moe else transformers.Qwen3Config
    few = {
        "vocab_size": 500,
        "hidden_size": 96,
        "intermediate_size": 64,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    if moe:
        few |= {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    for more in (
        {},
        {"use_sliding_window": True, "sliding_window": 7},
        {"rope_theta": 5e5},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
    ):
        config = kind(**few, **more)
        assert rm.ModelSpec.from_hf(config) == rm.ModelSpec.from_hf(
            {"model_type": config.model_type, **few, **more}
        )


def test_which_layers_are_sparse_and_which_slide() -> None:
    base = {**MOE, "num_hidden_layers": 6}
    assert spec(base, decoder_sparse_step=2).is_moe_layer == (False, True) * 3
    assert spec(base, decoder_sparse_step=2, mlp_only_layers=[1, 2]).is_moe_layer == (
        False,
        False,
        False,
        True,
        False,
        True,
    )
    assert spec(base, mlp_only_layers=list(range(6))).num_experts == 0
    assert spec(base, num_experts=0).is_moe_layer == (False,) * 6
    assert spec(base, num_experts=None, num_local_experts=8) == spec(base)
    assert spec(base, use_sliding_window=True, sliding_window=9).sliding_windows == (9,) * 6
    dense = {**DENSE, "num_hidden_layers": 4}
    assert spec(
        dense, use_sliding_window=True, sliding_window=9, max_window_layers=3
    ).sliding_windows == (0, 0, 0, 9)
    assert (
        spec(dense, use_sliding_window=False, sliding_window=9, max_window_layers=0).sliding_windows
        == (0,) * 4
    )
    assert (
        spec(
            dense, use_sliding_window=True, sliding_window=None, max_window_layers=0
        ).sliding_windows
        == (0,) * 4
    )
    types = ["sliding_attention", "full_attention"] * 2
    assert spec(
        dense, use_sliding_window=True, sliding_window=9, layer_types=types
    ).sliding_windows == (9, 0, 9, 0)


# --------------------------------------------------------------------------------- absurd configs
ABSURD: list[tuple[dict[str, Any], str]] = [
    *[
        ({key: value}, key)
        for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
        for value in (0, -1, 1.5, "8", True, None)
    ],
    ({"num_key_value_heads": 0}, "num_key_value_heads: .*got 0"),
    ({"num_key_value_heads": 3}, "divisor of num_attention_heads=4, got 3"),
    ({"num_key_value_heads": 8}, "num_key_value_heads: expected 1 to 4, got 8"),
    ({"head_dim": 2**40}, "head_dim: expected at most 1024, got 1099511627776"),
    ({"head_dim": 15}, "head_dim: .*got 15"),
    ({"head_dim": 0}, "head_dim: .*got 0"),
    ({"intermediate_size": 0}, "intermediate_size: .*got 0"),
    ({"rms_norm_eps": 0.0}, "rms_norm_eps"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps: .*got nan"),
    ({"rms_norm_eps": float("inf")}, "rms_norm_eps: .*got inf"),
    ({"max_position_embeddings": 0}, "max_position_embeddings: .*got 0"),
    (
        {"hidden_act": "gelu_fast"},
        "hidden_act: expected one of silu, swish, gelu, gelu_new, gelu_pytorch_tanh, relu2, got "
        "'gelu_fast'",
    ),
    ({"hidden_act": ["silu"]}, "hidden_act: .*got \\['silu'\\]"),
    ({"hidden_act": None}, "hidden_act: .*got None"),
    ({"attention_bias": 1}, "attention_bias: .*got 1"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    ({"eos_token_id": 151}, r"eos_token_id=151 is not in \[0, vocab_size=151\)"),
    ({"eos_token_id": [3, -1]}, "eos_token_id=-1"),
    ({"eos_token_id": "</s>"}, "eos_token_id"),
    ({"model_type": "gpt2"}, "model_type: .*got 'gpt2'"),
    ({"model_type": None}, "model_type: .*got None"),
    ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ({"auto_map": {"AutoModel": "x.Y"}}, "auto_map"),
    ({"logit_scale": 0.5}, "logit_scale=0.5"),
    ({"mlp_bias": True}, "mlp_bias=True"),
    ({"is_causal": False}, "is_causal=False: attention to later tokens is not supported"),
    ({"is_causal": None}, "is_causal: expected a bool, got None"),
    ({"attn_logit_softcapping": 30.0}, "attn_logit_softcapping"),
    ({"layer_types": ["full_attention"]}, "layer_types"),
    ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
    (
        {
            "layer_types": ["full_attention", "sliding_attention"],
            "use_sliding_window": True,
            "sliding_window": None,
        },
        "sliding_attention",
    ),
    ({"use_sliding_window": True, "sliding_window": 0}, "sliding_window: .*got 0"),
    ({"use_sliding_window": True, "sliding_window": -4}, "sliding_window: .*got -4"),
    ({"rope_theta": float("nan"), "rope_parameters": None}, "rope_theta: .*got nan"),
    ({"rope_theta": float("inf"), "rope_parameters": None}, "rope_theta: .*got inf"),
    ({"rope_theta": 0, "rope_parameters": None}, "rope_theta: .*got 0"),
    ({"rope_theta": -1e4, "rope_parameters": None}, "rope_theta: .*got -10000"),
    ({"rope_theta": 1e-300, "rope_parameters": None}, "rope_theta"),
    ({"rope_parameters": {"rope_theta": float("nan")}}, "rope_theta: .*got nan"),
    ({"rope_parameters": [1]}, "rope_parameters"),
    ({"rope_parameters": {"rope_type": "mrope"}}, "rope_type: .*got 'mrope'"),
    ({"rope_parameters": {"rope_type": "default", "mrope_section": [1]}}, "mrope_section"),
    (
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        "partial_rotary_factor=0.5",
    ),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    (
        {"rope_parameters": {"rope_type": "proportional", "partial_rotary_factor": 1.5}},
        "partial_rotary_factor=1.5",
    ),
    ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
    ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
    ({"rope_scaling": {"rope_type": "linear", "factor": None}}, "factor"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "factor: .*got 0.5"),
    ({"rope_scaling": {"rope_type": "linear", "factor": float("inf")}}, "factor: .*got inf"),
    (
        {"rope_scaling": {"rope_type": "linear", "factor": 1e308}},
        r"factor: expected a finite float32 >= 1, got 1e\+308",
    ),
    (
        {"partial_rotary_factor": 1e308, "rope_parameters": None},
        r"partial_rotary_factor: expected a finite float32 >= 0, got 1e\+308",
    ),
    ({"rope_scaling": {"rope_type": "yarn"}}, "factor"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "truncate": 1}}, "truncate"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": "32"}}, "beta_fast"),
    (
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "attention_factor": -1.0}},
        "attention_factor",
    ),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1.0}}, "rope_theta=1"),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "head_dim": 2}, "head_dim=2"),
    (
        {
            "rope_scaling": {
                "rope_type": "longrope",
                "short_factor": [1.0] * 7,
                "long_factor": [1.0] * 8,
            }
        },
        "short_factor: expected 8 entries, half of the elements of a head that rope turns, got 7",
    ),
    (
        {
            "rope_scaling": {
                "rope_type": "longrope",
                "short_factor": [1.0] * 8,
                "long_factor": [1.0] * 7 + [0.0],
            }
        },
        r"long_factor\[7\]",
    ),
    ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 8}}, "long_factor"),
    (
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 4.0,
                "high_freq_factor": 4.0,
            }
        },
        "high_freq_factor=4",
    ),
    (
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}},
        "high_freq_factor",
    ),
]
ABSURD_MOE: list[tuple[dict[str, Any], str]] = [
    ({"num_experts_per_tok": 9}, "num_experts_per_tok: expected at most num_experts=8, got 9"),
    ({"num_experts_per_tok": 0}, "num_experts_per_tok: .*got 0"),
    ({"num_experts": -1}, "num_experts: .*got -1"),
    ({"num_experts": None}, "num_experts"),
    ({"num_experts": 8, "num_local_experts": 4}, "num_local_experts=4"),
    ({"moe_intermediate_size": 0}, "moe_intermediate_size: .*got 0"),
    ({"decoder_sparse_step": 0}, "decoder_sparse_step: .*got 0"),
    ({"mlp_only_layers": [2]}, "mlp_only_layers"),
    ({"mlp_only_layers": "0"}, "mlp_only_layers"),
    ({"norm_topk_prob": 1}, "norm_topk_prob: .*got 1"),
    (
        {
            "layer_types": ["full_attention", "sliding_attention"],
            "use_sliding_window": True,
            "sliding_window": 4,
        },
        "layer_types",
    ),
    ({"head_dim": None, "num_attention_heads": 64, "num_key_value_heads": 64}, "head_dim: .*got 1"),
    (
        {"head_dim": None, "num_attention_heads": 128, "num_key_value_heads": 128},
        "head_dim: .*got 0",
    ),
]


@pytest.mark.parametrize(("changes", "words"), ABSURD, ids=lambda value: str(value))
def test_absurd_config(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(rm.ConfigError, match=words):
        spec(DENSE, **changes)


@pytest.mark.parametrize(("changes", "words"), ABSURD_MOE, ids=lambda value: str(value))
def test_absurd_moe_config(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(rm.ConfigError, match=words):
        spec(MOE, **changes)


LARGE: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (DENSE, {"vocab_size": 2**40}, "vocab_size"),
    (DENSE, {"hidden_size": 2**40}, "hidden_size"),
    (DENSE, {"intermediate_size": 2**62}, "intermediate_size"),
    (DENSE, {"num_hidden_layers": 100_000}, "num_hidden_layers"),
    (DENSE, {"head_dim": 2**20}, "head_dim"),
    (DENSE, {"num_attention_heads": 2**20, "num_key_value_heads": 1}, "num_attention_heads"),
    (MOE, {"num_experts": 10**6}, "num_experts"),
    (MOE, {"num_experts": 16384, "num_hidden_layers": 100}, "num_experts"),
    (MOE, {"num_experts": 100, "num_experts_per_tok": 65}, "num_experts_per_tok"),
    (
        DENSE,
        {
            "vocab_size": 2**26,
            "hidden_size": 2**22,
            "intermediate_size": 2**22,
            "num_hidden_layers": 1024,
        },
        ".",
    ),
]


BEYOND_ANY_INTEGER: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (DENSE, {"vocab_size": 2**70}, "vocab_size: .*got 1180591620717411303424"),
    (DENSE, {"hidden_size": 2**64}, "hidden_size: .*got "),
    (DENSE, {"intermediate_size": 2**70}, "intermediate_size: .*got "),
    (MOE, {"moe_intermediate_size": 2**70}, "moe_intermediate_size: .*got "),
    (MOE, {"num_experts": 10**30}, "num_experts: .*got "),
    (DENSE, {"num_hidden_layers": 10**18}, r"num_hidden_layers: .*\[1, 1024\], got "),
    (DENSE, {"num_hidden_layers": 10**30}, r"num_hidden_layers: .*\[1, 1024\], got "),
    (DENSE, {"num_hidden_layers": 10**5000}, r"num_hidden_layers: .*got a int too large to print"),
    (DENSE, {"max_position_embeddings": 2**70}, "max_position_embeddings: .*got "),
    (
        DENSE,
        {"num_attention_heads": 2**13, "num_key_value_heads": 1, "head_dim": 1024},
        "head_dim: expected at most 4194304, got 8388608",
    ),
    (DENSE, {"rms_norm_eps": 10**400}, "rms_norm_eps: .*got 1000"),
    (DENSE, {"rope_parameters": None, "rope_theta": 10**400}, "rope_theta: .*got 1000"),
    (DENSE, {"rope_parameters": {"rope_type": ["x"]}}, r"rope_type: .*got \['x'\]"),
    (
        DENSE,
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 1e308}},
        r"beta_fast: expected a finite float32 > 0, got 1e\+308",
    ),
    (
        DENSE,
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "beta_slow": 1e-308}},
        r"'beta_slow': 1e-308",
    ),
    (DENSE, {"eos_token_id": 1.5}, r"eos_token_id=1\.5"),
    (DENSE, {"eos_token_id": [1, 1.5]}, r"eos_token_id=1\.5"),
    (MOE, {"mlp_only_layers": [True]}, r"mlp_only_layers: .*got \[True\]"),
]


@pytest.mark.parametrize(
    ("base", "changes", "words"),
    BEYOND_ANY_INTEGER,
    ids=[f"{i}-{next(iter(c[1]))}" for i, c in enumerate(BEYOND_ANY_INTEGER)],
)
def test_what_no_machine_integer_or_double_holds(
    base: dict[str, Any], changes: dict[str, Any], words: str
) -> None:
    """Refused by from_hf itself, with key, value and bound, before anything of that size is
    made."""
    with pytest.raises(rm.ConfigError, match=words):
        spec(base, **changes)


@pytest.mark.parametrize(("base", "changes", "words"), LARGE, ids=lambda value: str(value)[:60])
def test_sizes_beyond_any_model(base: dict[str, Any], changes: dict[str, Any], words: str) -> None:
    """The engine refuses these sizes by a rule, before it allocates anything; if they break no
    rule, it runs out of memory."""
    with pytest.raises((rm.ConfigError, rm.CapacityError, MemoryError), match=words):
        rm.Generator(
            spec(base, **changes), max_model_len=32, kv_cache_gib=0.002, threads=1
        ).sync_weights({})


MANY = {f"key{i}": i for i in range(5000)}
LAUGHS: Any = 0
for _ in range(9):
    LAUGHS = [LAUGHS] * 100  # 10^18 elements in a few kilobytes
NO_JSON: list[tuple[dict[str, Any], str]] = [
    (
        {"rope_scaling": np.arange(3)},
        r"rope_scaling: expected a JSON value, got a ndarray: array\(\[0, 1, 2\]\)",
    ),
    ({"hidden_act": np.arange(3)}, "hidden_act: .*got a ndarray"),
    ({"model_type": np.arange(3)}, "model_type: .*got a ndarray"),
    ({"quantization_config": np.arange(3)}, "quantization_config=.*: quantized weights"),
    ({"layer_types": [10**5000, "full_attention"]}, "layer_types: expected .*got "),
    ({"layer_types": [np.arange(3)] * 2}, "layer_types: expected .*got "),
    (MANY, "unknown config keys: key0=0, key1=1, .* and 4980 more"),
    ({"x" * 10**6: 1}, "unknown config keys: 'xxx"),
    ({"\ud800": 1}, r"unknown config keys: '\\ud800'=1"),
    ({7: 1, ("a", "b"): 2}, r"unknown config keys: 7=1, \('a', 'b'\)=2"),
    ({"rope_parameters": MANY}, r"unknown config keys: rope_parameters\.key0=0, .* and 4980 more"),
    ({"quantization_config": LAUGHS}, "quantization_config="),
    ({"num_hidden_layers": LAUGHS}, "num_hidden_layers: .*got "),
]


@pytest.mark.parametrize(
    ("changes", "words"), NO_JSON, ids=[str(next(iter(c[0])))[:20] for c in NO_JSON]
)
def test_what_no_file_holds(changes: dict[Any, Any], words: str) -> None:
    """Values of Python's alone, and more of them than a message should list: refused as any other,
    on less than a page."""
    with pytest.raises(rm.ConfigError, match=words) as refused:
        rm.ModelSpec.from_hf({**DENSE, **changes})
    assert len(str(refused.value).encode()) < 8192


# -------------------------------------------------------------------------------------- from_dict
def without(key: str) -> dict[str, Any]:
    return {k: v for k, v in spec(MOE).to_dict().items() if k != key}


def rope_of(**changes: Any) -> dict[str, Any]:
    return {"rope_settings": {**spec(MOE).to_dict()["rope_settings"], **changes}}


EXPERTS_OFF = {
    "num_experts": 0,
    "num_experts_per_tok": 0,
    "moe_intermediate_size": 0,
    "is_moe_layer": [False, False],
}
BAD_VALUES: list[tuple[dict[str, Any], str]] = [
    *(
        ({key: value}, rf"^{key}: expected (an integer in \[\d, \d+\]|1 to \d+), got ")
        for key, value in {
            "vocab_size": 0, "hidden_size": 64.0, "intermediate_size": -1,
            "num_hidden_layers": True, "num_attention_heads": "4",
            "num_key_value_heads": 0, "head_dim": 2**70, "num_experts": -1,
            "num_experts_per_tok": [4], "moe_intermediate_size": 1.5,
            "max_position_embeddings": {}, "n_group": 0, "topk_group": 65,
            "shared_intermediate_size": np.int64(3),
        }.items()
    ),
    ({"max_position_embeddings": 0, **rope_of(max_positions=0)}, "^max_position_embeddings: "
                                                                 "expected an integer in "),
    ({**EXPERTS_OFF, "intermediate_size": 8, "n_group": 0}, "^n_group: expected an integer in "),
    ({"vocab_size": None}, "^vocab_size: expected an integer, got None"),
    *(
        ({key: value}, f"^{key}: expected a bool, got ")
        for key, value in {
            "norm_topk_prob": 1, "norm_after": None, "attention_bias": "no", "o_bias": [],
            "tie_word_embeddings": 0,
            "router_bias": np.True_, "shared_switch": {},
        }.items()
    ),
    *(({key: "other"}, f"^{key}: expected one of .*, got "
                       "'other'") for key in ("model_type", "qk_norm", "score_func", "activation")),
    ({"qk_norm": None}, "^qk_norm: expected one of none, head, whole, got None"),
    *(({"rms_norm_eps": value}, "^rms_norm_eps: expected a finite "
                                "float32 > 0") for value in (0, -1e-6, float("nan"), float("inf"),
                                "1e-6")),
    ({"routed_scaling_factor": None}, "^routed_scaling_factor: expected a finite float32"),
    ({"is_moe_layer": [True]}, r"^is_moe_layer: expected a bool for each of num_hidden_layers=2, "
                               r"got \[True\]"),
    ({"is_moe_layer": [True, 1]}, "^is_moe_layer: expected a bool"),
    ({"rope_layers": None}, "^rope_layers: expected a bool"),
    ({"sliding_windows": [0, -1]}, r"^sliding_windows: expected an integer in .* for each of "
                                   r"num_hidden_layers=2, got \[0, -1\]"),
    ({"sliding_windows": [0, False]}, "^sliding_windows: expected an integer"),
    ({"sliding_windows": "00"}, "^sliding_windows: expected an integer"),
    ({"layer_kinds": ["attention"]}, "^layer_kinds: expected attention.* for each of num_hidden"),
    ({"layer_kinds": ["attention", "none"]}, "^layer_kinds: expected attention"),
    ({"layer_kinds": None}, "^layer_kinds: expected attention"),
    ({"num_hidden_layers": 3}, "^is_moe_layer: expected a bool for each of num_hidden_layers=3"),
    ({"eos_token_ids": 3}, "^eos_token_ids: expected a list of token ids, got 3"),
    ({"eos_token_ids": [151]}, r"^eos_token_id=151 is not in \[0, vocab_size=151\)"),
    ({"eos_token_ids": [[1]]}, r"^eos_token_id=\[1\] is not in"),
    ({"num_key_value_heads": 3}, "^num_key_value_heads: expected a divisor of "
                                 "num_attention_heads=4, got 3"),
    ({"num_attention_heads": 2**14, "head_dim": 1024}, "^num_attention_heads·head_dim: expected "
                                                       "at most"),
    ({"head_dim": 17, **rope_of(head_dim=16)}, "^head_dim: expected an even number"),
    ({"num_experts": 0}, "^num_experts_per_tok, moe_intermediate_size: expected 0 and 0 with "
                         "num_experts=0, got "),
    ({"is_moe_layer": [True, False]}, "^intermediate_size: expected 1 to 4194304, got 0"),
    (EXPERTS_OFF | {"is_moe_layer": [True, True]}, "^layer 0: expected a dense MLP with "
                                                   "num_experts=0, got experts"),
    ({"intermediate_size": 8}, "^intermediate_size: expected 0 with is_moe_layer="),
    ({**EXPERTS_OFF, "intermediate_size": 0}, "^intermediate_size: expected 1 to 4194304, got 0"),
    ({"intermediate_size": 8, "is_moe_layer": [False, False]}, "^num_experts: expected 0 with "
                                                               "is_moe_layer="),
    ({"num_experts_per_tok": 13}, "^num_experts_per_tok: expected at most num_experts=8, got 13"),
    ({"n_group": 5}, "^n_group=5, topk_group=1: expected groups of equal size"),
    ({"rope_settings": None}, r"^rope_settings: expected a dict, got None"),
    ({"rope_settings": {}}, r"^rope_settings: expected the fields of Rope, got none for type"),
    (rope_of(other=1), "^rope_settings: expected some of .*, got other=1"),
    (rope_of(type="x"), "^rope_type: expected one of"),
    (rope_of(type="yarn"), "^rope_type='yarn' needs factor"),
    (rope_of(theta=0), "^rope_theta: expected a finite float32 > 0, got 0"),
    (rope_of(theta="x"), "^rope_theta: expected a finite float32"),
    (rope_of(head_dim=18), r"^rope_settings\.head_dim: expected an integer in \[2, 16\], got 18"),
    (rope_of(head_dim=15), "^rope_settings: expected .*'head_dim': 14.*, got .*'head_dim': 15"),
    (rope_of(max_positions=7), "^rope_settings: expected .*'max_positions': 2048"),
    (rope_of(max_positions=np.array([1, 2])), r"^rope_settings\.max_positions: expected an "
                                              "integer"),
    (rope_of(parameters=3), r"^rope_settings\.parameters: expected pairs of a name and a value, "
                            r"got 3"),
    (rope_of(parameters=[["factor"]]), r"^rope_settings\.parameters: expected pairs"),
    (rope_of(parameters=[[["factor"], 2]]), r"^rope_settings\.parameters: expected pairs"),
    (rope_of(parameters=[]), r"^rope_settings: expected .*\{'partial_rotary_factor': 1\.0\}"),
    (rope_of(parameters=[["rope_theta", 7.0]]), r"^rope_settings: expected "),
    (rope_of(parameters=[["factors", 7.0]]), r"^rope_parameters: expected keys of the rope types, "
                                             r"got rope_parameters\.factors=7\.0"),
    (rope_of(type="linear", parameters=[["factor", 0]]), "^rope_parameters.factor: expected a "
                                                         "finite float32"),
    ({"norm_before": False}, "^norm_before, norm_after: expected norms"),
    ({"ungated": 1}, "^ungated: expected"),
    ({"extra": 1}, "^spec: expected some of .*, got extra=1"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "words"),
    BAD_VALUES,
    ids=[f"{i}-{next(iter(c[0]))}" for i, c in enumerate(BAD_VALUES)],
)
def test_bad_values_of_a_dict_are_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(rm.ConfigError, match=words):
        rm.ModelSpec.from_dict({**spec(MOE).to_dict(), **changes})


def test_what_is_no_dict_of_a_spec() -> None:
    """Fields that a later version has added have defaults; the others are needed."""
    for bad in (None, 3, [1], "x"):
        with pytest.raises(rm.ConfigError, match=r"^spec: expected a dict, got"):
            rm.ModelSpec.from_dict(bad)  # type: ignore[arg-type]
    later = {
        f.name for f in dataclasses.fields(rm.ModelSpec) if f.default is not dataclasses.MISSING
    }
    assert {"router_bias", "norm_before", "layer_kinds"} <= later
    for key in spec(MOE).to_dict():
        if key in later:
            assert rm.ModelSpec.from_dict(without(key)) == spec(MOE)
        else:
            with pytest.raises(rm.ConfigError, match=f"got none for {key}$"):
                rm.ModelSpec.from_dict(without(key))


# ------------------------------------------------------------------------------------- end tokens
@pytest.mark.parametrize("family", FAMILIES)
def test_without_an_end_token_a_config_has_its_familys(family: str, tmp_path: Path) -> None:
    """The default is that of transformers' class, if the vocabulary contains it. None, and the
    tokens of generation_config.json, are explicit values."""
    mapping = pytest.importorskip("transformers.models.auto.configuration_auto").CONFIG_MAPPING
    default = mapping[family]().eos_token_id
    own = {  # a default that is unusual, and keys without one
        "glm4_moe": {"head_dim": 128},
        "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
    }.get(family, {})
    config = {
        k: v
        for k, v in mapping[family](vocab_size=201_000, **own).to_dict().items()
        if k != "eos_token_id"
    }
    listed = default if isinstance(default, list) else [] if default is None else [default]
    assert rm.ModelSpec.from_hf(config).eos_token_ids == tuple(listed)
    assert rm.ModelSpec.from_hf({**config, "eos_token_id": None}).eos_token_ids == ()
    assert (
        rm.ModelSpec.from_hf({**config, "eos_token_id": 7}, ignore=("eos_token_id",)).eos_token_ids
        == ()
    )
    assert rm.ModelSpec.from_hf({**config, "vocab_size": 1}).eos_token_ids == ()
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert rm.ModelSpec.from_hf(tmp_path) == rm.ModelSpec.from_hf(config)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [11, 5]}')
    assert rm.ModelSpec.from_hf(tmp_path).eos_token_ids == (11, 5)


def test_what_is_no_config(tmp_path: Path) -> None:
    for bad in (None, 3, [1], object()):
        with pytest.raises(rm.ConfigError):
            rm.ModelSpec.from_hf(bad)
    with pytest.raises(rm.ConfigError, match=r"nowhere.*No such file"):
        rm.ModelSpec.from_hf(tmp_path / "nowhere")
    for text in ("", "{", "[1]", "\0", "[" * 200_000):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(rm.FormatError, match=r"config\.json"):
            rm.ModelSpec.from_hf(tmp_path)


def test_unknown_keys_that_are_off_pass_and_others_by_name() -> None:
    assert spec(DENSE, mlp_bias=False, logit_scale=None) == spec()
    assert (
        rm.ModelSpec.from_hf(
            {**DENSE, "team": "b", "logit_scale": 1.0}, ignore=("team", "logit_scale")
        )
        == spec()
    )
    with pytest.raises(rm.ConfigError, match=r"logit_scale=1\.0"):
        rm.ModelSpec.from_hf({**DENSE, "team": "b", "logit_scale": 1.0}, ignore=("team",))


@pytest.mark.parametrize("ignore", ["my_rms_norm_eps", "rms_norm_eps", b"x", 5, None, (1,)])
def test_ignore_is_keys_and_never_a_part_of_one(ignore: Any) -> None:
    """Given as a str, "my_rms_norm_eps" would also hide rms_norm_eps, and the model would use the
    default."""
    with pytest.raises(rm.ConfigError, match="ignore: expected a tuple of keys"):
        rm.ModelSpec.from_hf({**DENSE, "rms_norm_eps": 0.5}, ignore=ignore)


# Keys that transformers 4.30 to 5.24 wrote. Those of the installed version are read below.
BOOKKEEPING = {
    "_attn_implementation_autoset": True, "_attn_implementation": "sdpa",
    "_flash_attn_2_enabled": True, "_auto_class": "AutoConfig",
    "_commit_hash": "0f", "_name_or_path": "org/model", "_pre_quantization_dtype": "bfloat16",
    "base_model_tp_plan": {"layers.*": "rowwise"},
    "gradient_checkpointing": True, "loss_type": "ForCausalLM", "max_new_tokens": 64,
    "output_attentions": True, "pruned_heads": {},
    "task_specific_params": {"summarization": {"max_length": 5}}, "tf_legacy_loss": True,
    "torch_dtype": "float16", "unsloth_fixed": True,
    "unsloth_version": "2025.3", "use_bfloat16": True, "xla_device": True,
}  # fmt: skip


def test_bookkeeping_keys_of_transformers_change_nothing() -> None:
    """With values that would count if they were read: any but None and False."""
    configs = pytest.importorskip("transformers.configuration_utils")
    generation = configs.GenerationConfig._get_default_generation_params()
    ours = ("model_type", "is_encoder_decoder")
    known = {
        **dict.fromkeys(configs.PreTrainedConfig().to_dict(), "x"),
        **dict.fromkeys(generation, 7),
        **BOOKKEEPING,
    }
    for key in known.keys() - set(ours):
        assert rm.ModelSpec.from_hf({**DENSE, key: known[key]}) == spec(), key


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize("ignored", ["rope_scaling.attn_factor", "rope_parameters.attn_factor"])
@pytest.mark.parametrize("table", ["rope_scaling", "rope_parameters"])
def test_ignore_reaches_a_key_of_a_table(table: str, ignored: str, tmp_path: Path) -> None:
    """By either name of the rope table; the rest of the table is read. In dicts, config objects,
    folders and files."""
    from transformers import Qwen3Config

    base = {k: v for k, v in DENSE.items() if not k.startswith("rope")}
    want = rm.ModelSpec.from_hf({**base, "rope_theta": 1e6, table: YARN})
    config = {**base, "rope_theta": 1e6, table: {**YARN, "attn_factor": 0.878}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for source in (config, Qwen3Config(**config), tmp_path, tmp_path / "config.json"):
        assert rm.ModelSpec.from_hf(source, ignore=("absent", ignored, "absent.key")) == want
        with pytest.raises(
            rm.ConfigError, match=r"attn_factor=0\.878; ignore=\('(rope_\w+\.attn_factor)',\)"
        ) as refused:
            rm.ModelSpec.from_hf(source, ignore=("attn_factor", "factor", "rope_scaling.attn"))
        assert rm.ModelSpec.from_hf(source, ignore=refused.value.names) == want  # type: ignore[attr-defined]
    assert config[table]["attn_factor"] == 0.878, "the caller's config stays"


def test_a_table_of_ignored_keys_alone_is_left_out() -> None:
    config = {**DENSE, "team": {"a": 1, "b": {"c": 2}}, "rope_scaling": {"x": {"y": 1}}}
    names = ("team.a", "team.b.c", "rope_scaling.x.y")
    assert rm.ModelSpec.from_hf(config, ignore=names) == spec()
    with pytest.raises(rm.ConfigError, match=r"unknown config keys: team=\{'b': \{'c': 2\}\}; "):
        rm.ModelSpec.from_hf(config, ignore=names[::2])


def test_all_unknown_keys_are_named_at_once_as_ignore_takes_them() -> None:
    config = {
        **DENSE,
        "team": "b",
        "a.b": 1,
        5: 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "x": 1, 7: 2, "off": None},
    }
    with pytest.raises(
        rm.ConfigError,
        match=r"team='b', a\.b=1, 5=1, rope_parameters\.x=1, rope_parameters\.7=2; ignore=",
    ) as refused:
        rm.ModelSpec.from_hf(config)
    names = ("team", "a.b", "5", "rope_parameters.x", "rope_parameters.7")
    assert refused.value.names == names  # type: ignore[attr-defined]
    want = rm.ModelSpec.from_hf(
        {**DENSE, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    )
    assert rm.ModelSpec.from_hf(config, ignore=refused.value.names) == want  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------------------- rope


def test_power_is_not_the_nearest_float_and_neither_is_torchs() -> None:
    """The frequency of Qwen3 itself that makes the emulation necessary: without it this index is
    off by one bit."""
    inv_freq, _ = rm.ModelSpec.from_hf(QWEN3_06B).rope(4096)
    exact = (1.0 / np.float64(1e6) ** (np.arange(0, 128, 2) / 128)).astype(np.float32)
    steps = np.abs(inv_freq.view(np.int32) - exact.view(np.int32))
    assert steps.max() <= 2  # two roundings: of the power, of the reciprocal
    nearest = np.float32(1) / (
        np.float64(1e6)
        ** (np.arange(0, 128, 2, dtype=np.float32) / np.float32(128)).astype(np.float64)
    ).astype(np.float32)
    assert np.flatnonzero(inv_freq != nearest).tolist() == [37]

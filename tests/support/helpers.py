"""Tiny random models for the tests: their configs as data, their weights as a pure function of
(name, shape, seed).

A `Case` is a transformers config as a plain dict plus what the config cannot say (a router bias,
the longest context). Its weights are made by NumPy from the parameter's checkpoint name alone, so
the same numbers reach rollmesh (with or without torch in the process), a transformers module and a
torchtitan-style state dict. Scales are chosen so that results are distinctive: logits spread over
several units, routers choose differently for each row, norm weights differ from one, and biases
differ from zero.

torch and transformers are imported inside functions only: sanitizer runs use this file without
them.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

Config = dict[str, Any]
# Metrics of a run that differ between any two runs.
TIMES = (
    "tokens_per_s",
    "sync_s",
    "pause_s",
    "sync_gb_per_s",
    "generate_s",
    "update_s",
    "step_s",
    "eval_s",
)
TIMES += ("reward_s", "environment_s", "both_share", "trainer_only_share", "generator_only_share")
TINY_RUN = [  # settings of `rollmesh grpo` under which a step takes a moment
    "model.hidden_size=32", "model.intermediate_size=32", "model.num_attention_heads=2",
    "model.num_key_value_heads=1",
    "rollout.prompts=4", "rollout.samples=4", "eval.prompts=8", "generator.kv_cache_gib=0.01",
    "eval.every=2",
    "train.threads=1", "generator.threads=1",
]  # fmt: skip

_DENSE: Config = {
    "model_type": "qwen3",
    "vocab_size": 151,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "attention_bias": False,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "bos_token_id": None,
    "eos_token_id": None,
}

_MOE: Config = {
    **_DENSE,
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


# Limits of a generator that takes little of a machine.
SMALL = {
    "max_model_len": 96,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "kv_cache_gib": 0.002,
    "threads": 1,
}


def tiny_config(moe: bool = False, **changes: Any) -> Config:
    """A config of about 50 thousand parameters with `changes` applied."""
    return {**(_MOE if moe else _DENSE), **changes}


def tiny_spec(moe: bool = False, **changes: Any) -> Any:
    """The rollmesh.ModelSpec of tiny_config(), without torch or transformers."""
    import rollmesh

    return rollmesh.ModelSpec.from_hf(tiny_config(moe, **changes))


@dataclasses.dataclass(frozen=True)
class Case:
    """A model to compare with transformers."""

    name: str
    config: Config
    router_bias: bool = False
    max_model_len: int = 1100
    # Lengths around a K block, an attention block and a page.
    prompt_lens: tuple[int, ...] = (1, 2, 15, 33, 64, 97)
    long_len: int = 1045  # crosses the attention segment of 1024; 0: no long prompt
    without: Config | None = (
        None  # config changes that switch the case's option off: the numbers must differ
    )
    seed: int = 0

    @property
    def is_moe(self) -> bool:
        return self.config["model_type"] == "qwen3_moe"


def _dense(name: str, *, case: Mapping[str, Any] | None = None, **changes: Any) -> Case:
    return Case(name, tiny_config(False, **changes), **(case or {}))


def _moe(name: str, *, case: Mapping[str, Any] | None = None, **changes: Any) -> Case:
    return Case(name, tiny_config(True, **changes), **(case or {}))


def _rope(rope_type: str, theta: float = 10000.0, **parameters: Any) -> Config:
    return {"rope_type": rope_type, "rope_theta": theta, **parameters}


_DEFAULT_ROPE = {"rope_parameters": _rope("default")}
_FULL_ATTENTION = {"use_sliding_window": False, "layer_types": None}
_SHORT_FACTOR = [1.0, 1.05, 1.1, 1.2, 1.3, 1.5, 1.75, 2.0]
_LONG_FACTOR = [1.0, 1.5, 2.0, 3.0, 4.5, 6.0, 8.0, 12.0]

SHAPE_CASES = (
    _dense("dense"),
    _dense("mqa", num_attention_heads=6, num_key_value_heads=1),
    _dense("mha", num_attention_heads=4, num_key_value_heads=4),
    _dense("gqa_3", num_attention_heads=6, num_key_value_heads=2, num_hidden_layers=3),
    _dense("mha_odd", num_attention_heads=5, num_key_value_heads=5, hidden_size=40),
    _dense("head_dim_2", head_dim=2, num_attention_heads=7, num_key_value_heads=1),
    _dense("head_dim_8", head_dim=8),
    _dense(
        "head_dim_20", head_dim=20, num_attention_heads=3, num_key_value_heads=3, hidden_size=52
    ),
    _dense(
        "head_dim_24", head_dim=24, num_attention_heads=6, num_key_value_heads=3, hidden_size=48
    ),
    _dense(
        "head_dim_64", head_dim=64, num_attention_heads=2, num_key_value_heads=1, hidden_size=40
    ),
    _dense(
        "head_dim_128", head_dim=128, num_attention_heads=2, num_key_value_heads=2, hidden_size=96
    ),
    _dense(
        "all_odd",
        hidden_size=37,
        intermediate_size=51,
        vocab_size=113,
        head_dim=6,
        num_attention_heads=3,
        num_key_value_heads=1,
    ),
    _dense(
        "narrow",
        hidden_size=8,
        intermediate_size=5,
        vocab_size=129,
        head_dim=4,
        num_attention_heads=2,
        num_key_value_heads=1,
    ),
    _dense("wide_mlp", intermediate_size=208, vocab_size=256, hidden_size=32),
    _dense("one_layer", num_hidden_layers=1, vocab_size=257),
    _dense("attention_bias", attention_bias=True, case={"without": {"attention_bias": False}}),
    _dense("tied", tie_word_embeddings=True, vocab_size=131, hidden_size=56),
    _dense("tied_bias", tie_word_embeddings=True, attention_bias=True, hidden_size=36, head_dim=12),
    _dense("large_eps", rms_norm_eps=0.05, case={"without": {"rms_norm_eps": 1e-6}}),
)

ROPE_CASES = (
    _dense("theta_1e6", rope_parameters=_rope("default", 1e6), case={"without": _DEFAULT_ROPE}),
    _dense(
        "theta_500",
        rope_parameters=_rope("default", 500.0),
        head_dim=24,
        case={"without": _DEFAULT_ROPE},
    ),
    _dense("linear", rope_parameters=_rope("linear", factor=4.0), case={"without": _DEFAULT_ROPE}),
    _dense(
        "yarn",
        rope_parameters=_rope("yarn", factor=4.0, original_max_position_embeddings=512),
        case={"without": _DEFAULT_ROPE},
    ),
    _dense(
        "yarn_options",
        rope_parameters=_rope(
            "yarn",
            1e5,
            factor=8.0,
            original_max_position_embeddings=256,
            beta_fast=16.0,
            beta_slow=2.0,
            truncate=False,
            attention_factor=1.25,
        ),
        case={
            "without": {
                "rope_parameters": _rope(
                    "yarn", 1e5, factor=8.0, original_max_position_embeddings=256
                )
            }
        },
    ),
    _dense(
        "yarn_mscale",
        rope_parameters=_rope(
            "yarn",
            factor=8.0,
            original_max_position_embeddings=256,
            mscale=0.707,
            mscale_all_dim=1.2,
        ),
        case={
            "without": {
                "rope_parameters": _rope("yarn", factor=8.0, original_max_position_embeddings=256)
            }
        },
    ),
    _dense(
        "llama3",
        rope_parameters=_rope(
            "llama3",
            5e5,
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=256,
        ),
        head_dim=32,
        case={"without": {"rope_parameters": _rope("default", 5e5)}},
    ),
    _dense(
        "proportional",
        rope_parameters=_rope("proportional", partial_rotary_factor=0.5),
        case={"without": _DEFAULT_ROPE},
    ),
    # dynamic and longrope: transformers chooses the table by the batch, rollmesh by max_model_len;
    # the lengths make them agree.
    _dense("dynamic_short", rope_parameters=_rope("dynamic", factor=2.0)),
    _dense(
        "dynamic_long",
        rope_parameters=_rope("dynamic", factor=2.0),
        max_position_embeddings=64,
        case={"max_model_len": 192, "prompt_lens": (192,), "long_len": 0, "without": _DEFAULT_ROPE},
    ),
    _dense(
        "longrope_short",
        rope_parameters=_rope(
            "longrope",
            factor=4.0,
            original_max_position_embeddings=128,
            short_factor=_SHORT_FACTOR,
            long_factor=_LONG_FACTOR,
        ),
        max_position_embeddings=512,
        case={"max_model_len": 128, "long_len": 0, "without": _DEFAULT_ROPE},
    ),
    _dense(
        "longrope_long",
        rope_parameters=_rope(
            "longrope",
            original_max_position_embeddings=64,
            short_factor=_SHORT_FACTOR,
            long_factor=_LONG_FACTOR,
        ),
        max_position_embeddings=512,
        case={
            "max_model_len": 512,
            "prompt_lens": (65, 97, 200, 301),
            "long_len": 0,
            "without": _DEFAULT_ROPE,
        },
    ),
)

WINDOW_CASES = (
    _dense(
        "window_8_of_layer_1",
        num_hidden_layers=3,
        use_sliding_window=True,
        sliding_window=8,
        max_window_layers=1,
        case={"without": _FULL_ATTENTION},
    ),
    _dense(
        "window_1",
        use_sliding_window=True,
        sliding_window=1,
        max_window_layers=1,
        case={"without": _FULL_ATTENTION},
    ),
    _dense(
        "window_40",
        use_sliding_window=True,
        sliding_window=40,
        max_window_layers=0,
        case={"without": _FULL_ATTENTION},
    ),
    _dense(
        "window_1030",
        use_sliding_window=True,
        sliding_window=1030,
        max_window_layers=0,
        case={"without": _FULL_ATTENTION},
    ),
    _dense(
        "window_layer_types",
        num_hidden_layers=3,
        use_sliding_window=True,
        sliding_window=33,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        case={"without": _FULL_ATTENTION},
    ),
    _dense("window_unused", use_sliding_window=False, sliding_window=8, max_window_layers=0),
    _moe(
        "moe_window", use_sliding_window=True, sliding_window=16, case={"without": _FULL_ATTENTION}
    ),
)

MOE_CASES = (
    _moe("moe"),
    _moe("moe_raw_gates", norm_topk_prob=False, case={"without": {"norm_topk_prob": True}}),
    # Seed 1: at 0 a near-tie early in the long prompt could turn on another machine and take a
    # thousand rows with it.
    _moe("moe_top_1", num_experts_per_tok=1, case={"seed": 1}),
    _moe(
        "moe_top_1_raw",
        num_experts_per_tok=1,
        norm_topk_prob=False,
        case={"seed": 1, "without": {"norm_topk_prob": True}},
    ),
    _moe("moe_all", num_experts=5, num_experts_per_tok=5, moe_intermediate_size=24),
    _moe("moe_all_raw", num_experts=6, num_experts_per_tok=6, norm_topk_prob=False),
    _moe("moe_7_of_33", num_experts=33, num_experts_per_tok=7, moe_intermediate_size=20),
    _moe(
        "moe_3_of_12_odd",
        num_experts=12,
        num_experts_per_tok=3,
        moe_intermediate_size=19,
        hidden_size=44,
        norm_topk_prob=False,
    ),
    _moe("moe_one_expert", num_experts=1, num_experts_per_tok=1),
    _moe("moe_sparse_step", num_hidden_layers=3, decoder_sparse_step=2),
    _moe("moe_mlp_only", num_hidden_layers=3, mlp_only_layers=[0, 2], intermediate_size=72),
    _moe("moe_no_sparse_layer", mlp_only_layers=[0, 1]),
    _moe(
        "moe_tied_bias",
        tie_word_embeddings=True,
        attention_bias=True,
        num_key_value_heads=1,
        head_dim=24,
    ),
    _moe(
        "moe_yarn",
        rope_parameters=_rope("yarn", 1e6, factor=4.0, original_max_position_embeddings=256),
        max_position_embeddings=1024,
        case={"without": {"rope_parameters": _rope("default", 1e6)}},
    ),
    _moe("moe_router_bias", case={"router_bias": True}),
    _moe(
        "moe_router_bias_raw",
        num_experts=12,
        num_experts_per_tok=4,
        norm_topk_prob=False,
        case={"router_bias": True},
    ),
)

CASES = SHAPE_CASES + ROPE_CASES + WINDOW_CASES + MOE_CASES
CASES_BY_NAME = {case.name: case for case in CASES}


def random_config(rng: np.random.Generator) -> Config:
    """Returns any combination of the options, at widths that are awkward for every layout."""

    def pick(*choices: Any) -> Any:
        return choices[rng.integers(len(choices))]

    moe, layers, kv_heads = (
        bool(rng.random() < 0.6),
        int(rng.integers(1, 4)),
        int(rng.integers(1, 5)),
    )
    experts = int(rng.integers(1, 20))
    config = tiny_config(
        moe,
        hidden_size=int(rng.integers(5, 80)),
        intermediate_size=int(rng.integers(1, 100)),
        vocab_size=int(rng.integers(2, 300)),
        num_hidden_layers=layers,
        num_key_value_heads=kv_heads,
        num_attention_heads=kv_heads * int(rng.integers(1, 5)),
        head_dim=2 * int(rng.integers(2, 20)),
        attention_bias=pick(True, False),
        tie_word_embeddings=pick(True, False),
        rms_norm_eps=pick(1e-6, 1e-5, 1e-2),
        rope_parameters=pick(
            _rope("default", float(rng.uniform(10, 1e6))),
            _rope("linear", factor=2.5),
            _rope("yarn", factor=4.0, original_max_position_embeddings=128),
            _rope(
                "llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=128,
            ),
            _rope("proportional", partial_rotary_factor=0.5),
        ),
    )
    if rng.random() < 0.4:
        config |= {"use_sliding_window": True, "sliding_window": int(rng.integers(1, 120))}
        if not moe:
            config |= {
                "layer_types": [pick("sliding_attention", "full_attention") for _ in range(layers)]
            }
    if moe:
        config |= {
            "num_experts": experts,
            "num_experts_per_tok": int(rng.integers(1, experts + 1)),
            "moe_intermediate_size": int(rng.integers(1, 50)),
            "norm_topk_prob": pick(True, False),
            "decoder_sparse_step": int(rng.integers(1, 3)),
            "mlp_only_layers": [layer for layer in range(layers) if rng.random() < 0.2],
        }
    return config


# ---------------------------------------------------------------------------------------- weights
def weight(name: str, shape: Iterable[int], seed: int = 0) -> np.ndarray:
    """The float32 values of the parameter with this checkpoint name. A function of name, shape and
    seed alone."""
    shape = tuple(shape)
    normal = np.random.default_rng([seed, zlib.crc32(name.encode())]).standard_normal(
        shape, dtype=np.float32
    )
    if name.endswith("norm.weight"):
        return 1.0 + np.float32(0.3) * normal
    if name.endswith(("expert_bias", "e_score_correction_bias")):
        # Scores are about 1/experts, so this changes many choices.
        return np.float32(0.5 / shape[0]) * normal
    if name.endswith(".sinks"):
        return normal
    if name.endswith(".bias"):
        return np.float32(0.3) * normal
    if name.endswith("embed_tokens.weight"):
        return np.float32(0.5) * normal
    gain = 2.0 if name.endswith(("lm_head.weight", "mlp.gate.weight")) else 1.2
    return np.float32(gain / np.sqrt(shape[-1])) * normal


def is_moe_layer(config: Mapping[str, Any], layer: int) -> bool:
    if config["model_type"] != "qwen3_moe" or layer in config["mlp_only_layers"]:
        return False
    return (layer + 1) % config["decoder_sparse_step"] == 0


def parameter_shapes(
    config: Mapping[str, Any], router_bias: bool = False
) -> dict[str, tuple[int, ...]]:
    """Checkpoint names and shapes of a config, in checkpoint order: written from the format,
    independent of rollmesh."""
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden)
    }

    def mlp(prefix: str, width: int) -> None:
        for part in ("gate_proj", "up_proj"):
            shapes[f"{prefix}.{part}.weight"] = (width, hidden)
        shapes[f"{prefix}.down_proj.weight"] = (hidden, width)

    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        for part, rows, cols in (
            ("q", q, hidden),
            ("k", kv, hidden),
            ("v", kv, hidden),
            ("o", hidden, q),
        ):
            shapes[f"{at}.self_attn.{part}_proj.weight"] = (rows, cols)
            if config["attention_bias"]:
                shapes[f"{at}.self_attn.{part}_proj.bias"] = (rows,)
        shapes[f"{at}.self_attn.q_norm.weight"] = shapes[f"{at}.self_attn.k_norm.weight"] = (
            head_dim,
        )
        shapes[f"{at}.input_layernorm.weight"] = shapes[f"{at}.post_attention_layernorm.weight"] = (
            hidden,
        )
        if is_moe_layer(config, layer):
            shapes[f"{at}.mlp.gate.weight"] = (config["num_experts"], hidden)
            if router_bias:
                shapes[f"{at}.mlp.gate.e_score_correction_bias"] = (config["num_experts"],)
            for expert in range(config["num_experts"]):
                mlp(f"{at}.mlp.experts.{expert}", config["moe_intermediate_size"])
        else:
            mlp(f"{at}.mlp", config["intermediate_size"])
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def numpy_state_dict(
    config: Mapping[str, Any],
    seed: int = 0,
    dtype: str = "float32",
    router_bias: bool = False,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> dict[str, np.ndarray]:
    """Checkpoint names → arrays; bfloat16 as ml_dtypes'. The router bias is float32 in both.
    shapes: of a model that parameter_shapes does not describe."""
    state = {
        name: weight(name, shape, seed)
        for name, shape in (shapes or parameter_shapes(config, router_bias)).items()
    }
    if dtype == "bfloat16":
        import ml_dtypes

        state = {
            name: x if name.endswith("e_score_correction_bias") else x.astype(ml_dtypes.bfloat16)
            for name, x in state.items()
        }
    return state


def state_dict(case: Case, dtype: str = "float32", seed: int | None = None) -> dict[str, Any]:
    """Checkpoint names → torch tensors. bfloat16 values are the float32 values rounded to nearest
    even, as by .to()."""
    import torch

    arrays = numpy_state_dict(
        case.config, case.seed if seed is None else seed, router_bias=case.router_bias
    )
    to = getattr(torch, dtype)
    return {
        name: torch.from_numpy(x).to(
            torch.float32 if name.endswith("e_score_correction_bias") else to
        )
        for name, x in arrays.items()
    }


def module_state_dict(state: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """The same weights in the layout of a transformers 5 module: experts stacked, gate and up in
    one tensor."""
    import torch

    packed = {name: x for name, x in state.items() if ".experts." not in name}
    for layer in range(config["num_hidden_layers"]):
        if not is_moe_layer(config, layer):
            continue
        at = f"model.layers.{layer}.mlp.experts"
        parts = {
            part: torch.stack(
                [state[f"{at}.{e}.{part}.weight"] for e in range(config["num_experts"])]
            )
            for part in ("gate_proj", "up_proj", "down_proj")
        }
        packed[f"{at}.gate_up_proj"] = torch.cat([parts["gate_proj"], parts["up_proj"]], dim=1)
        packed[f"{at}.down_proj"] = parts["down_proj"]
    return packed


_TITAN_TOP = {
    "model.embed_tokens.weight": "tok_embeddings.weight",
    "model.norm.weight": "norm.weight",
}
_TITAN_LAYER = {
    "self_attn.o_proj.weight": "attention.wo.weight",
    "self_attn.q_norm.weight": "attention.q_norm.weight",
    "self_attn.k_norm.weight": "attention.k_norm.weight",
    "input_layernorm.weight": "attention_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "feed_forward.w1.weight",
    "mlp.up_proj.weight": "feed_forward.w3.weight",
    "mlp.down_proj.weight": "feed_forward.w2.weight",
    "mlp.gate.weight": "moe.router.gate.weight",
}


def titan_state_dict(
    state: Mapping[str, Any], config: Mapping[str, Any], style: str = "plain"
) -> dict[str, Any]:
    """The same weights under torchtitan's Qwen3 names, as it spelled them over time:
    "plain"    attention.wq, moe.experts.w1 [E, F, D], moe.expert_bias, output
    "shapes"   attention.qkv_linear.wq, moe.experts.w1_EFD, moe.expert_bias_E, lm_head
    "nested"   as "shapes", with moe.routed_experts.inner_experts.w1_EFD"""
    import torch

    plain = style == "plain"
    experts = {"gate_proj": ("w1", "_EFD"), "down_proj": ("w2", "_EDF"), "up_proj": ("w3", "_EFD")}
    out = {titan: state[name] for name, titan in _TITAN_TOP.items()}
    if "lm_head.weight" in state:
        out["output.weight" if plain else "lm_head.weight"] = state["lm_head.weight"]
    for layer in range(config["num_hidden_layers"]):
        at, to = f"model.layers.{layer}", f"layers.{layer}"
        out.update(
            {
                f"{to}.{titan}": state[f"{at}.{name}"]
                for name, titan in _TITAN_LAYER.items()
                if f"{at}.{name}" in state
            }
        )
        for part in "qkv":
            out[f"{to}.attention.{'' if plain else 'qkv_linear.'}w{part}.weight"] = state[
                f"{at}.self_attn.{part}_proj.weight"
            ]
        if not is_moe_layer(config, layer):
            continue
        for part, (titan, dims) in experts.items():
            stacked = torch.stack(
                [state[f"{at}.mlp.experts.{e}.{part}.weight"] for e in range(config["num_experts"])]
            )
            inner = "routed_experts.inner_experts" if style == "nested" else "experts"
            out[f"{to}.moe.{inner}.{titan}{'' if plain else dims}"] = stacked
        bias = state.get(f"{at}.mlp.gate.e_score_correction_bias")
        if bias is not None:
            out[f"{to}.moe.expert_bias{'' if plain else '_E'}"] = bias
    return out


def fused_state_dict(state: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """The same weights fused as in inference engines: qkv_proj and gate_up_proj, rows one after
    another."""
    import torch

    out = dict(state)

    def fuse(prefix: str, parts: tuple[str, ...], to: str, kind: str) -> None:
        names = [f"{prefix}.{part}.{kind}" for part in parts]
        if names[0] in out:
            out[f"{prefix}.{to}.{kind}"] = torch.cat([out.pop(name) for name in names])

    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        for kind in ("weight", "bias"):
            fuse(f"{at}.self_attn", ("q_proj", "k_proj", "v_proj"), "qkv_proj", kind)
        for prefix in [
            f"{at}.mlp",
            *(f"{at}.mlp.experts.{e}" for e in range(config.get("num_experts", 0))),
        ]:
            fuse(prefix, ("gate_proj", "up_proj"), "gate_up_proj", "weight")
    return out


# ---------------------------------------------------------------------------------------- prompts
def prompts(config: Mapping[str, Any], lengths: Iterable[int], seed: int = 0) -> list[list[int]]:
    """Uniform random token ids, one list for each length."""
    rng = np.random.default_rng([seed, 0x70726F6D])
    return [rng.integers(0, config["vocab_size"], length).tolist() for length in lengths]


def hf_model(case: Case, dtype: str = "float32", seed: int | None = None, **changes: Any) -> Any:
    """Returns the transformers model of a case (its config with `changes`), with the weights of
    state_dict(case, dtype, seed)."""
    import oracle

    return oracle.model(case, state_dict(case, dtype, seed), dtype, changes)


def push_entry(engine: Any, name: str, tensor: Any) -> None:
    """Pushes one tensor into the open sync of an extension's engine."""
    entry = engine.sync_resolve(name)
    engine.sync_take(entry, tensor)
    engine.sync_push([entry])

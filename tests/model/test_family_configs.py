"""Reading the config of every family: keys that are missing, wrong or published.

Oracle: transformers' config of the same keys, and the numbers of parameters that the models'
authors publish. Bound: equality."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import numpy as np
import pytest

import rollmesh as rm
from rollmesh.model.families import FAMILIES

pytest.importorskip("torch", reason="the oracle is transformers")
oracle, family_models = importlib.import_module("oracle"), importlib.import_module("family_models")
family_runs = importlib.import_module("family_runs")


@pytest.mark.parametrize("family", family_runs.TRIED)
def test_configs_without_lists_of_layers(family: str, seed: int) -> None:
    """Checks which layers have a window and which rope, if a config has only the keys from which
    transformers makes these lists."""
    for number in range(30):
        fields = {
            "model_type": family,
            **family_models.FAMILIES[family](family_models.Dice([seed, number])),
        }
        for key in ("layer_types", "no_rope_layers"):
            fields.pop(key, None)
        assert rm.ModelSpec.from_hf(fields) == rm.ModelSpec.from_hf(
            oracle.config_of(fields).to_dict()
        )


@pytest.mark.parametrize("family", family_runs.TRIED)
def test_a_missing_key_has_the_default_of_transformers(family: str, seed: int) -> None:
    """The alternative is that the config is refused, because the key is required."""
    fields = {"model_type": family, **family_models.FAMILIES[family](family_models.Dice([seed]))}
    fields |= {"num_attention_heads": 32, "num_key_value_heads": 16, "hidden_size": 128}
    if family == "phi3":  # whose rope depends on the size of a head
        fields["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4}
    if FAMILIES[family].latent:  # each head has its own keys
        fields["num_key_value_heads"] = 32
    if "use_sliding_window" in FAMILIES[family].keys.split():
        fields |= {
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 1,
            "layer_types": None,
        }
    assert rm.ModelSpec.from_hf(fields) == rm.ModelSpec.from_hf(oracle.config_of(fields))
    for key in fields.keys() - {"eos_token_id"}:
        left = {name: value for name, value in fields.items() if name != key}
        try:
            spec = rm.ModelSpec.from_hf(left)
        except rm.ConfigError:
            continue
        assert spec == rm.ModelSpec.from_hf(oracle.config_of(left)), key


def test_a_partial_rotary_factor_of_none_turns_whole_heads(seed: int) -> None:
    """In GLM-4-MoE, whose default for a missing key is a half; in a dict and in a config object,
    which does not keep the None."""
    fields = {
        "model_type": "glm4_moe",
        **family_models.FAMILIES["glm4_moe"](family_models.Dice([seed])),
        "partial_rotary_factor": None,
    }
    config = oracle.config_of(fields)
    wanted = family_models.transformers.AutoModelForCausalLM.from_config(
        config
    ).model.rotary_emb.inv_freq.numpy()
    for given in (fields, config):
        inv_freq, _ = rm.ModelSpec.from_hf(given).rope(256)
        assert np.array_equal(inv_freq, wanted)


@pytest.mark.parametrize(
    "name, changes, message",
    [
        (
            "hy_v3",
            {"moe_intermediate_size": 2**40, "num_shared_experts": 1},
            "moe_intermediate_size: expected 1 to 4194304",
        ),
        ("ernie4_5_moe", {"moe_k": 99}, "moe_k: expected at most moe_num_experts="),
        ("ernie4_5_moe", {"moe_num_experts": 2**32}, "moe_num_experts: expected 0 to 16384"),
        ("mixtral", {"intermediate_size": 2**40}, "^intermediate_size: expected 1 to 4194304"),
        (
            "qwen2_moe",
            {"shared_expert_intermediate_size": 2**22 + 1},
            r"shared_expert_intermediate_size: expected an integer in \[1, 4194304\]",
        ),
        ("minimax_m2", {"rotary_dim": 7}, "rotary_dim: expected an even number, got 7"),
        ("minimax_m2", {"rotary_dim": 2**20}, "rotary_dim: expected an integer in "),
        ("minimax_m2", {"scoring_func": [np.arange(3)]}, "scoring_func: expected 'sigmoid'"),
    ],
    ids=str,
)
def test_an_error_names_the_key_of_the_config(
    name: str, changes: dict[str, Any], message: str, seed: int
) -> None:
    """Also where the engine's field has another name, or a product is too large."""
    fields = {
        "model_type": name,
        **family_models.FAMILIES[name](family_models.Dice([seed])),
        **family_models.cuttable(name),
    }
    with pytest.raises(rm.ConfigError, match=message):
        rm.ModelSpec.from_hf(fields | changes)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_local_experts": 4}, "n_routed_experts=8 and num_local_experts=4 differ"),
        (
            {"n_routed_experts": 9},
            "n_group=2, topk_group=1: expected groups of equal size, at least 2 of "
            "n_routed_experts=9",
        ),
        (
            {"num_experts_per_tok": 9},
            "num_experts_per_tok: expected at most n_routed_experts=8, got 9",
        ),
        (
            {"n_shared_experts": 2, "moe_intermediate_size": 2**22},
            r"n_shared_experts: expected an integer in \[0, 1\], got 2",
        ),
        (
            {"partial_rotary_factor": 0.1},
            "partial_rotary_factor=0.1 with rope_type='default': expected an even number of at "
            "least 2",
        ),
    ],
    ids=str,
)
def test_what_glm4_moe_refuses(changes: dict[str, Any], message: str, seed: int) -> None:
    fields = {
        **family_models.FAMILIES["glm4_moe"](family_models.Dice([seed])),
        **family_models.cuttable("glm4_moe"),
    }
    fields |= {
        "model_type": "glm4_moe",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }
    with pytest.raises(rm.ConfigError, match=message):
        rm.ModelSpec.from_hf(fields | changes)


def test_gpt_oss_published_config() -> None:
    """OpenAI's config.json of the 20B model, abridged: keys of transformers 4, MXFP4."""
    fields: dict[str, Any] = {
        "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "head_dim": 64,
        "num_attention_heads": 64, "num_key_value_heads": 8, "num_hidden_layers": 24,
        "num_local_experts": 32, "num_experts_per_tok": 4, "experts_per_token": 4,
        "vocab_size": 201088, "eos_token_id": 200002, "initial_context_length": 4096,
        "rope_theta": 150000, "rope_scaling": {
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "truncate": False, "original_max_position_embeddings": 4096,
        },
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    }  # fmt: skip
    spec = rm.ModelSpec.from_hf(fields)
    assert spec.num_parameters == 20_914_757_184
    assert spec.sliding_windows == (128, 0) * 12
    with pytest.raises(rm.ConfigError, match="activation: expected one of MLPs without a gate"):
        dataclasses.replace(spec, ungated=True)


@pytest.mark.parametrize("family", ["gemma3_text", "olmo3"])
def test_nested_rope_tables_have_their_own_original_length(family: str, seed: int) -> None:
    """transformers reads original_max_position_embeddings beside the tables in other families."""
    kinds = ["full_attention", "sliding_attention"]
    model = family_models.draw(family, 0, seed, layer_types=kinds, num_hidden_layers=2)
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    fields = {
        **model.config.to_dict(),
        "rope_parameters": {"full_attention": yarn, "sliding_attention": yarn},
    }
    beside = fields | {"original_max_position_embeddings": 16}
    spec = rm.ModelSpec.from_hf(beside)
    assert spec == rm.ModelSpec.from_hf(fields)
    config = oracle.config_of(beside)
    net = family_models.transformers.AutoModelForCausalLM.from_config(config)
    theirs = net.model.rotary_emb.full_attention_inv_freq.numpy()
    assert np.array_equal(spec.rope(256)[0], theirs)


@pytest.mark.parametrize("family", ["seed_oss", "ernie4_5"])
def test_a_head_dim_of_none_is_that_of_hidden_size(family: str, seed: int) -> None:
    fields = {"model_type": family, **family_models.FAMILIES[family](family_models.Dice([seed]))}
    fields |= {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2}
    fields["head_dim"] = None
    spec = rm.ModelSpec.from_hf(fields)
    assert spec.head_dim == 16
    assert spec == rm.ModelSpec.from_hf(oracle.config_of(fields))


def test_factors_that_c_reads_as_zeros(seed: int) -> None:
    """0 stands for "none" there."""
    spec = rm.ModelSpec.from_hf(family_models.draw("gemma2", 0, seed).config)
    for name in ("attn_logit_softcapping", "residual_multiplier", "logits_scaling"):
        for value, what in ((1e-60, "a float32 of at least"), (0.0, "a finite float32 > 0")):
            with pytest.raises(rm.ConfigError, match=f"{name}: expected {what}"):
                dataclasses.replace(spec, **{name: value})
    with pytest.raises(rm.ConfigError, match="attn_logit_softcapping: expected a float32 of at"):
        rm.ModelSpec.from_hf(
            {
                **family_models.draw("gemma2", 0, seed).config.to_dict(),
                "attn_logit_softcapping": 1e-60,
            }
        )


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"moe_topk": [3]}, r"moe_topk: expected one number for all layers, got \[3\]"),
        ({"moe_topk": [3, 2]}, r"moe_topk: expected one number for all layers, got \[3, 2\]"),
        ({"num_experts_per_tok": 2}, "num_experts_per_tok: expected moe_topk=3, got 2"),
    ],
    ids=["short list", "two numbers", "two keys"],
)
def test_what_hunyuan_moe_refuses(changes: dict[str, Any], message: str, seed: int) -> None:
    model = family_models.draw(
        "hunyuan_v1_moe", 300, seed, num_experts=8, moe_topk=3, num_hidden_layers=2
    )
    with pytest.raises(rm.ConfigError, match=message):
        rm.ModelSpec.from_hf(model.config.to_dict() | changes)


def test_keys_beside_the_text_model(seed: int) -> None:
    """An option that is not in text_config is refused by its name too."""
    from transformers import Qwen3_5Config

    text = family_runs.cut("qwen3_5_text", seed).config.to_dict()
    config = {**Qwen3_5Config(text_config=text).to_dict(), "text_config": text}
    config["tie_word_embeddings"] = text["tie_word_embeddings"]
    assert rm.ModelSpec.from_hf(config) == rm.ModelSpec.from_hf(text)
    for key, value, message in (
        ("quantization_config", {"quant_method": "fp8"}, "quantized weights are not supported"),
        (
            "rope_scaling",
            {"rope_type": "yarn", "factor": 4.0},
            "text_config.rope_scaling: expected",
        ),
        ("new_option", 3, r"unknown config keys: new_option=3"),
        ("hidden_size", 8, r"text_config.hidden_size: expected hidden_size=8, got 96"),
        ("text_config", text | {"model_type": "llama"}, "text_config.model_type: expected"),
    ):
        with pytest.raises(rm.ConfigError, match=message):
            rm.ModelSpec.from_hf(config | {key: value})


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"attention_bias": True}, "attention_bias: expected False, got True"),
        ({"kv_lora_rank": 40}, "kv_lora_rank: expected a multiple of 16, got 40"),
        ({"kv_lora_rank": 1024}, r"kv_lora_rank: expected an integer in \[1, \d+\], got 1024"),
        ({"qk_rope_head_dim": 2048}, r"qk_rope_head_dim: expected an integer in \[2, 1023\]"),
        ({"v_head_dim": 24}, "v_head_dim: expected a multiple of 16, got 24"),
        (
            {"num_key_value_heads": 2},
            "num_key_value_heads: expected 6 with latent attention, got 2",
        ),
        ({"head_dim": 16}, "head_dim: expected 12 with latent attention, got 16"),
        ({"scoring_func": "softmax"}, "scoring_func: expected 'sigmoid', got 'softmax'"),
        ({"topk_method": "greedy"}, "topk_method: expected 'noaux_tc', got 'greedy'"),
        ({"index_topk": 2048}, "unknown config keys: index_topk=2048"),
    ],
    ids=str,
)
def test_what_latent_attention_refuses(changes: dict[str, Any], message: str, seed: int) -> None:
    fields = family_runs.cut("deepseek_v3", seed).config.to_dict() | changes
    with pytest.raises(rm.ConfigError, match=message):
        rm.ModelSpec.from_hf(fields)
    spec = rm.ModelSpec.from_hf(family_runs.cut("deepseek_v3", seed).config)
    assert rm.ModelSpec.from_dict(spec.to_dict()) == spec
    for field in ({"sinks": True}, {"layer_kinds": ()}, {"kv_lora_rank": 0}):
        with pytest.raises(rm.ConfigError, match=r"latent|layer_kinds"):
            dataclasses.replace(spec, **field)


def test_published_configs_of_latent_attention() -> None:
    """Kimi-K2's config.json and Moonlight's, abridged."""
    kimi: dict[str, Any] = {
        "model_type": "kimi_k2", "hidden_size": 7168, "intermediate_size": 18432,
        "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 64,
        "num_key_value_heads": 64, "n_routed_experts": 384, "num_experts_per_tok": 8,
        "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
        "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "v_head_dim": 128, "routed_scaling_factor": 2.827, "scoring_func": "sigmoid",
        "topk_method": "noaux_tc", "moe_layer_freq": 1, "seq_aux": True, "aux_loss_alpha": 0.001,
        "ep_size": 1, "num_nextn_predict_layers": 0, "vocab_size": 163840, "norm_topk_prob": True,
        "max_position_embeddings": 131072, "rope_theta": 50000.0, "rope_scaling": {
            "type": "yarn", "factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0,
            "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096,
        },
        "eos_token_id": 163585, "auto_map": {"AutoConfig": "configuration_deepseek.Config"},
    }  # fmt: skip
    spec = rm.ModelSpec.from_hf(kimi, ignore=("auto_map",))
    assert spec.model_type == "deepseek_v3"
    assert spec.num_parameters == 1_026_408_209_408
    mscale = 0.1 * np.log(32.0) + 1
    assert np.isclose(spec.attention_scale, 192**-0.5 * mscale**2)
    assert spec.kv_elements_per_token() == 61 * (64 + 2 * 512)
    moonlight = kimi | {
        "model_type": "deepseek_v3", "hidden_size": 2048, "intermediate_size": 11264,
        "moe_intermediate_size": 1408, "num_hidden_layers": 27, "num_attention_heads": 16,
        "num_key_value_heads": 16, "n_routed_experts": 64, "num_experts_per_tok": 6,
        "n_shared_experts": 2, "q_lora_rank": None, "rope_scaling": None,
        "routed_scaling_factor": 2.446, "max_position_embeddings": 8192,
    }  # fmt: skip
    spec = rm.ModelSpec.from_hf(moonlight, ignore=("auto_map",))
    assert spec.q_lora_rank == 0
    assert spec.num_parameters == 15_960_108_544

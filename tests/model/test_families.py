"""Every model family against transformers, on configs with the family's options drawn at random.

Oracle: transformers' float64 forward of the same weights (family_models.py). Bounds as in
test_parity.py: logits within 2e-4 of the row's largest magnitude, greedy tokens and experts equal
where the margin is over 1e-5. bfloat16: no further from the truth than 1.1 times transformers' own
bfloat16.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import json
import re
from pathlib import Path
from typing import Any

import helpers
import marks
import numpy as np
import pytest
from marks import full, some
from paths import ROOT

import rollmesh as rm
from rollmesh.model.families import FAMILIES
from rollmesh.model.family import Family

pytest.importorskip("torch", reason="the oracle is transformers")
oracle, family_models = importlib.import_module("oracle"), importlib.import_module("family_models")
LOGITS_BOUND = 2e-4
MARGIN = 1e-5
TRIED = list(family_models.FAMILIES)
LIKE_OTHERS = {"mistral", "qwen2", "qwen3", "olmoe"}  # others have their features
SOME = some(TRIED, lambda family: family not in LIKE_OTHERS)
LIMITS = {**helpers.SMALL, "max_model_len": 256}


def generator(model: Any, state: Any = None, **options: Any) -> rm.Generator:
    gen = rm.Generator(
        rm.ModelSpec.from_hf(model.config), **{**LIMITS, "dtype": "float32", **options}
    )
    gen.sync_weights(model.state if state is None else state, cast=True)
    return gen


def test_every_family_is_drawn() -> None:
    # test_parity.py has the configs of Qwen3-MoE.
    assert set(TRIED) | {"qwen3_moe"} == set(FAMILIES)


def test_the_page_lists_every_text_model_of_transformers() -> None:
    """docs/models.md has one table of the families, and one of the other model_types, each once."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as THEIRS

    blocks = (ROOT / "docs/models.md").read_text(encoding="utf-8").split("\n\n")
    ours, others = (
        re.findall(r"`([^`]+)`", " ".join(re.findall(r"^\| ([^|]+) \|", block, re.MULTILINE)))
        for block in blocks
        if block.startswith("| model_type |")
    )
    assert set(ours) == set(FAMILIES)
    assert sorted(others) == sorted(set(THEIRS) - set(FAMILIES))


def compare(gen: rm.Generator, model: Any, number: int, seed: int) -> tuple[int, int]:
    """Returns (rows, skipped rows) of three prompts and of four tokens after each."""
    net64, rows, skipped = model.net("float64"), 0, 0
    lengths = np.random.default_rng([seed, number]).integers(1, 130, 3).tolist()
    prompts = helpers.prompts({"vocab_size": model.config.vocab_size}, lengths, number)
    outs = gen.generate(
        prompts, rm.SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True), use_tqdm=False
    )
    for ids, ours, out in zip(prompts, gen.logits(prompts), outs, strict=True):
        sample, n = out.outputs[0], len(ids)
        truth, routed, gaps = family_models.forward(
            net64, ids + sample.token_ids.tolist()[:-1], double=True
        )
        listed = np.zeros(len(truth), bool)
        if routed.size:
            turned = (np.sort(sample.routed_experts, -1) != np.sort(routed, -1)).any((1, 2))
            assert (
                not (turned & (gaps >= MARGIN)).any()
                or (turned & (gaps < MARGIN)).argmax() < (turned & (gaps >= MARGIN)).argmax()
            )
            listed = gaps < MARGIN
            if turned.any():
                listed[int(turned.argmax()) :] = True
        scale = np.abs(truth).max(1)
        error = np.where(listed[:n], 0.0, np.abs(ours - truth[:n]).max(1) / scale[:n])
        assert error.max() <= LOGITS_BOUND, (
            f"{error.max():.2e} at row {error.argmax()} of {n}: {model.config}"
        )
        top = -np.sort(-truth, axis=1)[:, :2]
        clear = ~listed[n - 1 :] & (top[n - 1 :, 0] - top[n - 1 :, 1] >= MARGIN)
        assert np.array_equal(sample.token_ids[clear], truth[n - 1 :].argmax(1)[clear])
        rows, skipped = rows + len(truth), skipped + int(listed.sum())
    return rows, skipped


@pytest.mark.quick(4)
@pytest.mark.parametrize("part", [0, *(full(part) for part in range(1, 7))])
@pytest.mark.parametrize("family", SOME)
def test_logits_of_random_configs(
    family: str, part: int, seed: int, request: pytest.FixtureRequest
) -> None:
    rows = skipped = 0
    for number in range(3 * part, 3 * part + 3):
        model = family_models.draw(family, number, seed)
        with generator(model, block_size=16 if number % 2 else 64) as gen:
            one, listed = compare(gen, model, number, seed)
        rows, skipped = rows + one, skipped + listed
    request.config.stash[marks.SUMMARY].append(
        f"{family}, part {part}: {rows} rows, {skipped} listed"
    )
    assert skipped <= 0.01 * rows


@pytest.mark.parametrize("family", SOME)
def test_logits_with_the_familys_own_features(family: str, seed: int) -> None:
    """Tests the features of `cuttable`, which are drawn for every seed."""
    model = cut(family, seed)
    with generator(model) as gen:
        rows, skipped = compare(gen, model, 300, seed)
    assert skipped <= 0.05 * rows


@pytest.mark.parametrize("family", TRIED)
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


@pytest.mark.parametrize("family", TRIED)
def test_a_missing_key_has_the_default_of_transformers(family: str, seed: int) -> None:
    """The alternative is that the config is refused, because the key is required."""
    fields = {"model_type": family, **family_models.FAMILIES[family](family_models.Dice([seed]))}
    fields |= {"num_attention_heads": 32, "num_key_value_heads": 16, "hidden_size": 128}
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
        ("hy_v3", {"moe_intermediate_size": 2**40}, "moe_intermediate_size: expected 1 to 4194304"),
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
    model = family_models.draw(family, 0, seed)
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


@pytest.mark.quick(3)
@pytest.mark.parametrize("family", SOME)
def test_bfloat16_is_no_further_from_the_truth(family: str, seed: int) -> None:
    model = family_models.draw(family, 100, seed, vocab_size=200)
    model.state = {
        name: x if name.endswith(("correction_bias", "expert_bias")) else x.bfloat16().float()
        for name, x in model.state.items()
    }
    prompts = helpers.prompts(
        {"vocab_size": 200}, [16 if FAMILIES[family].has_experts else 64] * 41, 1
    )
    truth = oracle.batch_logits(model.net("float64"), prompts, double=True)
    theirs = oracle.batch_logits(model.net("bfloat16"), prompts)
    with generator(model, dtype="bfloat16", max_num_seqs=16, kv_cache_gib=0.01) as gen:
        ours = gen.logits(prompts)
    our_error = np.array([oracle.relative_error(a, b) for a, b in zip(ours, truth, strict=True)])
    their_error = np.array(
        [oracle.relative_error(a, b) for a, b in zip(theirs, truth, strict=True)]
    )
    assert np.median(our_error) <= 1.1 * np.median(their_error)
    assert np.median(our_error) > 1e-4  # bfloat16 did compute


@pytest.mark.parametrize("family", SOME)
def test_a_checkpoint_folder_is_the_module(family: str, tmp_path: Path, seed: int) -> None:
    """The names and config.json that save_pretrained writes give the digest of the module's state
    dict."""
    model = family_models.draw(family, 200, seed)
    model.net().save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    assert values["model_type"] == family
    with (
        generator(model) as gen,
        rm.Generator.from_hf(tmp_path, dtype="float32", tokenizer=None, **LIMITS) as other,
    ):
        assert gen.spec == other.spec
        report = other.sync_weights(rm.sources.SafetensorsFolder(tmp_path))
        assert report.digest == gen.sync_weights(model.state).digest
        listed = {parameter.name: tuple(parameter.shape) for parameter in gen.spec.parameters()}
    from safetensors import safe_open

    with safe_open(tmp_path / "model.safetensors", "np") as file:
        names = list(file.keys())
        held = {name: tuple(file.get_slice(name).get_shape()) for name in names}
    # GLM-4's fused tensor, which is listed as its halves.
    for name in [name for name in held if name.endswith("mlp.gate_up_proj.weight")]:
        rows, hidden = held.pop(name)
        held |= {name.replace("gate_up", part): (rows // 2, hidden) for part in ("gate", "up")}
    # gpt-oss's tensors of all experts, which are listed one by one, not transposed.
    for name in [name for name in held if ".mlp.experts." in name and len(held[name]) == 3]:
        experts, cols, rows = held.pop(name)
        held.pop(f"{name}_bias")
        parts = ("gate_proj", "up_proj") if "gate_up" in name else ("down_proj",)
        for e, part in itertools.product(range(experts), parts):
            one = f"{name.rpartition('.')[0]}.{e}.{part}"
            held |= {f"{one}.weight": (rows // len(parts), cols)}
            held |= {f"{one}.bias": (rows // len(parts),)}
    # The keys and values of latent attention, which are listed apart, keys transposed.
    for name in [name for name in held if name.endswith("self_attn.kv_b_proj.weight")]:
        held.pop(name)
        held |= {(key := name.replace("kv_b", part)): listed[key] for part in ("k_b", "v_b")}
    for name in [name for name in held if name.endswith("self_attn.qkv_proj.weight")]:  # Phi-3's
        held.pop(name)
        held |= {(key := name.replace("qkv", part)): listed[key] for part in "qkv"}
    # Tensors of delta nets and of gated q, whose parts are listed one by one.
    fused = {
        "in_proj_qkvz": [f"in_proj_{part}" for part in "qkvz"],
        "in_proj_ba": ["in_proj_b", "in_proj_a"],
        "in_proj_qkv": [f"in_proj_{part}" for part in "qkv"],
        "conv1d": [f"conv1d_{part}" for part in "qkv"],
    } | ({"q_proj": ["q_proj.query", "q_proj.gate"]} if FAMILIES[family].gate_in_q else {})
    for name, parts_of in itertools.product(list(held), fused.items()):
        if name.endswith(f".{parts_of[0]}.weight"):
            shape = held.pop(name)
            keys = [name.replace(parts_of[0], part) for part in parts_of[1]]
            assert shape[0] == sum(listed[key][0] for key in keys)
            held |= {key: listed[key] for key in keys}
    # GraniteMoE's tensors of all experts, which are listed one by one.
    parts = {"input_linear": ("gate", "up"), "output_linear": ("down",)}
    for name in [name for name in held if name.endswith("put_linear.weight")]:
        experts, rows, hidden = held.pop(name)
        at, linear = name.removesuffix(".weight").rsplit(".", 1)
        held |= {
            f"{at}.experts.{e}.{part}_proj.weight": (rows // len(parts[linear]), hidden)
            for e in range(experts)
            for part in parts[linear]
        }
    assert {
        name: shape
        for name, shape in held.items()
        if not name.endswith(("correction_bias", "expert_bias"))
    } == listed
    assert model.config.num_hidden_layers == gen.spec.num_hidden_layers


def test_the_text_model_of_a_multimodal_checkpoint(tmp_path: Path, seed: int) -> None:
    """Qwen3.5: text_config is read; tensors of the vision model and of multi-token prediction are
    refused by a message that names `ignore`, and left out with it."""
    from safetensors.torch import save_file

    from rollmesh.run.models import load_model

    model = cut("qwen3_5_text", seed)
    config = {
        "model_type": "qwen3_5", "text_config": model.config.to_dict(),
        "vision_config": {"depth": 1}, "tie_word_embeddings": model.config.tie_word_embeddings,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    named = {
        name.replace("model.", "model.language_model.", 1): x for name, x in model.state.items()
    }
    if model.config.tie_word_embeddings:
        del named["lm_head.weight"]
    others = ["model.visual.blocks.0.norm1.weight", "mtp.fc.weight"]
    save_file(
        named | {name: oracle.torch.zeros(3) for name in others}, tmp_path / "model.safetensors"
    )
    ignore = ("model.visual.*", "mtp.*")
    with (
        generator(model) as gen,
        rm.Generator.from_hf(tmp_path, dtype="float32", tokenizer=None, **LIMITS) as other,
    ):
        assert other.spec == gen.spec
        for skipped, pattern in ((ignore[:1], "mtp"), (ignore[1:], "model.visual")):
            with pytest.raises(rm.UnexpectedKeyError, match=rf'ignore=\("{pattern}.\*",\)'):
                other.sync_weights(rm.sources.SafetensorsFolder(tmp_path, ignore=skipped))
        report = other.sync_weights(rm.sources.SafetensorsFolder(tmp_path, ignore=ignore))
        assert report.digest == gen.sync_weights(model.state).digest
    net = load_model(tmp_path, "float32", ignore)
    assert type(net).__name__ == "Qwen3_5ForCausalLM"
    assert all(oracle.torch.equal(x, model.state[name]) for name, x in net.state_dict().items())
    config["text_config"]["tie_word_embeddings"] = not config["tie_word_embeddings"]
    with pytest.raises(rm.ConfigError, match=r"text_config.tie_word_embeddings: expected"):
        rm.ModelSpec.from_hf(config)


def test_keys_beside_the_text_model(seed: int) -> None:
    """An option that is not in text_config is refused by its name too."""
    from transformers import Qwen3_5Config

    text = cut("qwen3_5_text", seed).config.to_dict()
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


def _by_head(x: Any, heads: int, parts: list[int]) -> list[Any]:
    """Returns the parts of a tensor whose rows are the parts of one head after another."""
    each = x.reshape(heads, -1, *x.shape[1:]).split([part // heads for part in parts], 1)
    return [part.reshape(-1, *x.shape[1:]) for part in each]


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text"])
def test_fused_rows_of_hybrid_models(family: str, seed: int) -> None:
    """The tensors of a checkpoint, their parts, and q, gate, k and v in one tensor."""
    model = cut(family, seed)
    c, torch = model.config, oracle.torch
    keys = c.linear_num_key_heads * c.linear_key_head_dim
    values, heads = c.linear_num_value_heads * c.linear_value_head_dim, c.linear_num_value_heads
    parts, fused = dict(model.state), dict(model.state)
    for name in model.state:
        at, layer, _ = name.rpartition("linear_attn.")
        if name.endswith("in_proj_qkvz.weight"):
            sizes = [keys, keys, values, values]
            found = _by_head(parts.pop(name), c.linear_num_key_heads, sizes)
        elif name.endswith("in_proj_ba.weight"):
            found = _by_head(parts.pop(name), c.linear_num_key_heads, [heads, heads])
        elif name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
            found = list(parts.pop(name).split([keys, keys, values]))
        elif name.endswith("q_proj.weight"):
            others = [fused.pop(name.replace("q_proj", f"{k}_proj")) for k in "kv"]
            fused[name.replace("q_proj", "qkv_proj")] = torch.cat([fused.pop(name), *others])
            continue
        else:
            continue
        base = name[len(at + layer) :].removesuffix(".weight")
        letters = base.removeprefix("in_proj_") if base != "conv1d" else "qkv"
        stem = "conv1d_" if base == "conv1d" else "in_proj_"
        parts |= {
            f"{at}{layer}{stem}{letter}.weight": x[:, 0] if x.dim() == 3 else x
            for letter, x in zip(letters, found, strict=True)
        }
    with generator(model) as gen:
        digest = gen.sync_weights(model.state).digest
        assert gen.sync_weights(fused).digest == digest
        assert gen.sync_weights(parts).digest == digest


def test_mimo_is_a_qwen2_with_layers_to_skip(tmp_path: Path, seed: int) -> None:
    """The released folders name their own code, which computes a Qwen2, and contain layers for
    multi-token prediction."""
    from safetensors.torch import save_file

    from rollmesh.run.models import load_model

    torch, model = oracle.torch, family_models.draw("qwen2", 200, seed, tie_word_embeddings=False)
    config = json.loads(model.config.to_json_string(use_diff=False)) | {
        "model_type": "mimo", "attention_bias": True, "num_nextn_predict_layers": 1,
        "auto_map": {"AutoConfig": "configuration_mimo.MiMoConfig"},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    more = {"model.mtp_layers.0.input_proj.weight": torch.ones(3, 6)}
    save_file(model.state | more, tmp_path / "model.safetensors")
    ignore = ("auto_map", "model.mtp_layers.*")
    with pytest.raises(rm.ConfigError, match=r"auto_map=.*; ignore=\('auto_map',\) reads"):
        rm.ModelSpec.from_hf(tmp_path)
    with pytest.raises(rm.ConfigError, match="attention_bias: expected True, got False"):
        rm.ModelSpec.from_hf(config | {"attention_bias": False}, ignore=ignore)
    folder = rm.sources.SafetensorsFolder(tmp_path, ignore=ignore[1:])
    with (
        generator(model) as gen,
        rm.Generator.from_hf(
            tmp_path, ignore=ignore[:1], dtype="float32", tokenizer=None, **LIMITS
        ) as other,
    ):
        assert other.spec == gen.spec
        assert other.sync_weights(folder).digest == gen.sync_weights(model.state).digest
    net = load_model(tmp_path, "float32", ignore)
    assert type(net).__name__ == "Qwen2ForCausalLM"
    assert all(torch.equal(x, model.state[name]) for name, x in net.state_dict().items())


# ------------------------------------------------------------------------------------------- bits
def cut(family: str, seed: int) -> Any:
    """Draws a model that a mesh can cut, though not into equal parts."""
    return family_models.draw(family, 300, seed, **family_models.cuttable(family))


def told(gen: rm.Generator) -> list[bytes]:
    """Returns all results of a few requests that the contract fixes."""
    prompts = [[7], [1, 2], list(range(100, 133)), list(range(40, 57))]
    outs = gen.generate(
        prompts,
        rm.SamplingParams(n=2, max_tokens=5, seed=11, prompt_logprobs=0, ignore_eos=True),
        use_tqdm=False,
    )
    words = [
        x
        for out in outs
        for c in out.outputs
        for x in (c.token_ids, c.logprobs, c.sampling_logprobs, c.routed_experts)
    ]
    return [
        x.tobytes()
        for x in (*words, *(out.prompt_logprobs for out in outs), *gen.logits(prompts))
        if x is not None
    ]


def meshes(experts: bool) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {
        "reference": {"isa": "ref"},
        "chunks": {"max_num_batched_tokens": 5},
        "tp=2": {"mesh": rm.Mesh(tp=2)},
        "tp=3, rows": {"mesh": rm.Mesh(tp=3), "sequence_parallel": True},
        "dp=2": {"mesh": rm.Mesh(tp=2, dp=2)},
    }
    for backend in ("alltoall", "allgather_reducescatter", "local_allreduce") if experts else ():
        found[backend] = {"mesh": rm.Mesh(tp=2, ep=2), "ep_backend": backend}
    if experts:
        found["dp=2, ep=4"] = {
            "mesh": rm.Mesh(tp=2, dp=2, ep=4),
            "ep_backend": "alltoall",
            "sequence_parallel": True,
        }
    return found


@pytest.mark.quick(4)
@pytest.mark.parametrize("dtype", ["bfloat16", full("float32")])
@pytest.mark.parametrize("family", SOME)
def test_bits_are_those_of_one_rank(family: str, dtype: str, seed: int) -> None:
    """Compares over instruction sets, chunks and meshes: 0 bits differ, digest of the weights
    included."""
    model = cut(family, seed)
    with generator(model, dtype=dtype) as gen:
        want, digest = told(gen), gen.sync_weights(model.state, cast=True).digest
    for name, options in meshes(FAMILIES[family].has_experts).items():
        with generator(model, dtype=dtype, **options) as gen:
            assert told(gen) == want, name
            assert gen.sync_weights(model.state, cast=True).digest == digest, name


@pytest.mark.parametrize(
    "family", [name for name, one in FAMILIES.items() if one.wq_rows == "neighbours"]
)
def test_names_under_which_rope_turns_neighbours(family: str, seed: int) -> None:
    """wq and wk, as in Meta's, Mistral's and torchtitan's checkpoints: the same digest and results
    as q_proj and k_proj, for a rank's part too."""
    model = cut(family, seed)
    spec = rm.ModelSpec.from_hf(model.config)
    state = dict(model.state)
    for layer in range(spec.num_hidden_layers):
        for kind, heads in (("q", spec.num_attention_heads), ("k", spec.num_key_value_heads)):
            weight = state.pop(f"model.layers.{layer}.self_attn.{kind}_proj.weight")
            halves = weight.view(heads, 2, spec.head_dim // 2, -1)
            state[f"layers.{layer}.attention.w{kind}.weight"] = halves.transpose(1, 2).reshape(
                weight.shape
            )
    for options in ({}, {"mesh": rm.Mesh(tp=2)}, {"mesh": rm.Mesh(tp=3), "dtype": "bfloat16"}):
        with generator(model, **options) as gen:
            want, digest = (
                gen.logits([[1, 2, 3, 4]])[0],
                gen.sync_weights(model.state, cast=True).digest,
            )
            assert gen.sync_weights(state, cast=True).digest == digest
            assert gen.logits([[1, 2, 3, 4]])[0].tobytes() == want.tobytes()
            wq = "layers.0.attention.wq.weight"
            broken = state[wq].clone()
            broken[spec.head_dim + 3, 1] = float("nan")
            with pytest.raises(
                rm.NonFiniteError, match=rf"{wq}: element \[{spec.head_dim + 3}, 1\] is not finite"
            ):
                gen.sync_weights({**state, wq: broken}, cast=True)


def test_a_model_without_gates_has_no_place_for_one(seed: int) -> None:
    model = family_models.draw("arcee", 0, seed)
    rows, hidden = model.config.intermediate_size, model.config.hidden_size
    gate = {"model.layers.0.mlp.gate_proj.weight": oracle.torch.ones(rows, hidden)}
    both = {"model.layers.0.mlp.gate_up_proj.weight": oracle.torch.ones(2 * rows, hidden)}
    with generator(model) as gen:
        for more in (gate, both):
            with pytest.raises(
                rm.UnexpectedKeyError, match=rf"{next(iter(more))}: the model's MLPs have no gate"
            ):
                gen.sync_weights({**model.state, **more}, cast=True)


@pytest.mark.parametrize("family, has_others", [("glm4", True), ("glm4", False), ("qwen2", True)])
def test_a_bias_of_o_is_refused_by_the_option_only_where_that_is_off(
    family: str, has_others: bool, seed: int
) -> None:
    model = family_models.draw(
        family, 0, seed, **({"attention_bias": has_others} if family == "glm4" else {})
    )
    name = "model.layers.0.self_attn.o_proj.bias"
    said = f"{name}: the model has no bias there" + (
        "" if has_others else " (attention_bias=False)"
    )
    with generator(model) as gen, pytest.raises(rm.UnexpectedKeyError, match=f"{re.escape(said)}$"):
        gen.sync_weights(
            {**model.state, name: oracle.torch.ones(model.config.hidden_size)}, cast=True
        )


def test_fused_and_turned_rows(seed: int) -> None:
    """GLM-4's q and k, in which rope rotates neighbours in a part of each head, in qkv_proj as in
    inference engines, strided and not: the same digest and results as the checkpoint's tensors. The
    error for an element that is not finite has the index in the sender's tensor."""
    model = family_models.draw("glm4", 300, seed, **family_models.cuttable("glm4"))
    spec, torch = rm.ModelSpec.from_hf(model.config), oracle.torch
    state = dict(model.state)
    for layer in range(spec.num_hidden_layers):
        at = f"model.layers.{layer}.self_attn."
        for kind in ("weight", "bias"):
            whole = torch.cat([state.pop(f"{at}{part}_proj.{kind}") for part in "qkv"])
            state[f"{at}qkv_proj.{kind}"] = torch.stack([whole, whole], -1)[..., layer % 2]
    for options in ({}, {"mesh": rm.Mesh(tp=2)}, {"mesh": rm.Mesh(tp=3), "dtype": "bfloat16"}):
        with generator(model, **options) as gen:
            want, digest = (
                gen.logits([[1, 2, 3, 4]])[0],
                gen.sync_weights(model.state, cast=True).digest,
            )
            assert gen.sync_weights(state, cast=True).digest == digest
            assert gen.logits([[1, 2, 3, 4]])[0].tobytes() == want.tobytes()
            for row in (1, spec.head_dim - 1, 6 * spec.head_dim + 3):
                for kind, index in (("weight", (row, 1)), ("bias", (row,))):
                    name = f"model.layers.0.self_attn.qkv_proj.{kind}"
                    broken = state[name].clone()
                    broken[index] = float("nan")
                    with pytest.raises(
                        rm.NonFiniteError,
                        match=rf"{name}: element \[{', '.join(map(str, index))}\] is not finite",
                    ):
                        gen.sync_weights({**state, name: broken}, cast=True)
    with (
        pytest.raises(rm.UnexpectedKeyError, match="the order of its rows is known of"),
        generator(model) as gen,
    ):
        gen.sync_weights(state | {"layers.0.attention.wq.weight": torch.ones(96, 96)}, cast=True)


def test_keys_and_values_of_latents_under_either_name(seed: int) -> None:
    """kv_b_proj as in a checkpoint, strided, and as the parts that ModelSpec.parameters lists: the
    same digest and results. The error for an element that is not finite has its index in the
    sender's tensor."""
    model = cut("deepseek_v3", seed)
    spec, torch = rm.ModelSpec.from_hf(model.config), oracle.torch
    pitch, nope = spec.qk_nope_head_dim + spec.v_head_dim, spec.qk_nope_head_dim
    name = "model.layers.0.self_attn.kv_b_proj.weight"
    parts, strided = dict(model.state), dict(model.state)
    for layer in range(spec.num_hidden_layers):
        at = f"model.layers.{layer}.self_attn."
        both = parts.pop(f"{at}kv_b_proj.weight")
        strided[f"{at}kv_b_proj.weight"] = torch.stack([both, both], -1)[..., 0]
        k, v = both.view(6, pitch, -1).split([nope, spec.v_head_dim], 1)
        parts[f"{at}k_b_proj.weight"] = k.transpose(1, 2).reshape(-1, nope)
        parts[f"{at}v_b_proj.weight"] = v.reshape(-1, spec.kv_lora_rank)
    listed = {parameter.name: parameter.shape for parameter in spec.parameters()}
    assert all(tuple(x.shape) == listed[key] for key, x in parts.items() if "_b_proj" in key)
    for options in ({}, {"mesh": rm.Mesh(tp=2)}, {"mesh": rm.Mesh(tp=3), "dtype": "bfloat16"}):
        with generator(model, **options) as gen:
            want = gen.logits([[1, 2, 3, 4]])[0]
            digest = gen.sync_weights(model.state, cast=True).digest
            for state in (parts, strided):
                assert gen.sync_weights(state, cast=True).digest == digest
                assert gen.logits([[1, 2, 3, 4]])[0].tobytes() == want.tobytes()
            for row in (1, pitch - 1, 4 * pitch + nope - 1):
                broken = model.state[name].clone()
                broken[row, 3] = float("nan")
                with pytest.raises(rm.NonFiniteError, match=rf"element \[{row}, 3\] is not finite"):
                    gen.sync_weights({**model.state, name: broken}, cast=True)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"attention_bias": True}, "attention_bias: expected False, got True"),
        ({"kv_lora_rank": 40}, "kv_lora_rank: expected a multiple of 16, got 40"),
        ({"kv_lora_rank": 1024}, r"kv_lora_rank: expected an integer in \[1, \d+\], got 1024"),
        ({"qk_rope_head_dim": 2048}, r"qk_rope_head_dim: expected an integer in \[2, 512\]"),
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
    fields = cut("deepseek_v3", seed).config.to_dict() | changes
    with pytest.raises(rm.ConfigError, match=message):
        rm.ModelSpec.from_hf(fields)
    spec = rm.ModelSpec.from_hf(cut("deepseek_v3", seed).config)
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


# ------------------------------------------------------------------------------------ the trainer
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", SOME)
def test_a_patched_model_gives_the_rollouts_logprobs(family: str, dtype: str, seed: int) -> None:
    model = family_models.draw(family, 400, seed)
    net = rm.torch.patch(model.net(dtype))
    with rm.Generator(rm.ModelSpec.from_hf(model.config), **{**LIMITS, "dtype": dtype}) as gen:
        rm.torch.push(net, gen)
        (out,) = gen.generate(
            [[1, 0, 1]], rm.SamplingParams(max_tokens=40, seed=3, ignore_eos=True), use_tqdm=False
        )
    sample = out.outputs[0]
    ids = oracle.torch.tensor([[*out.prompt_token_ids.tolist(), *sample.token_ids.tolist()]])
    assert (rm.torch.logprobs(net, ids).logprobs[0, 2:].numpy() == sample.logprobs).all()


@pytest.mark.parametrize("family", [name for name in TRIED if not FAMILIES[name].activation])
def test_a_patch_refuses_an_activation_that_is_not_the_configs(family: str, seed: int) -> None:
    key = family_models.activation_key(family)
    net = family_models.draw(family, 400, seed, **{key: "silu"}).net()
    setattr(net.config, key, "gelu")
    with pytest.raises(
        rm.ConfigError,
        match=r"act(ivation)?_fn: expected a .*GELUActivation, as the config says, got a .*SiLU",
    ):
        rm.torch.patch(net)


@pytest.mark.parametrize("family", SOME)
def test_gradients_are_transformers(family: str, seed: int) -> None:
    model = family_models.draw(family, 500, seed)
    ids = oracle.torch.tensor(
        helpers.prompts({"vocab_size": model.config.vocab_size}, [50] * 2, seed)
    )

    def gradients(net: Any, logprobs: Any) -> dict[str, Any]:
        net.requires_grad_(True)
        values = logprobs(net)
        (values * oracle.torch.linspace(-1, 1, values.numel()).view_as(values)).sum().backward()
        return {name: p.grad for name, p in net.named_parameters() if p.grad is not None}

    def plain(net: Any) -> Any:
        return (
            net(ids, use_cache=False)
            .logits[:, :-1]
            .log_softmax(-1)
            .gather(-1, ids[:, 1:, None])[..., 0]
        )

    patched = rm.torch.patch(model.net(), max_model_len=LIMITS["max_model_len"])
    got = gradients(patched, lambda net: rm.torch.logprobs(net, ids).logprobs)
    want = gradients(model.net().double(), plain)  # float32 is further from the truth than 1e-3
    assert got.keys() == want.keys()
    least = 1e-4 * max(float(x.norm()) for x in want.values())  # a bias of k without rope has none
    error = {
        name: float((got[name] - want[name]).norm() / want[name].norm().clamp(min=least))
        for name in want
    }
    assert max(error.values()) < 1e-3, error


@pytest.mark.parametrize("family", ["gemma2", "granite", "deepseek_v3"])
def test_the_cap_reaches_loss_and_long_sequences(family: str, seed: int) -> None:
    """A patched model's logits are the generator's, its loss is of these, and gradients of rows too
    long for stored scores are transformers'."""
    torch = oracle.torch
    model = family_models.draw(family, 300, seed, **family_models.cuttable(family))
    ids = torch.tensor(helpers.prompts({"vocab_size": 300}, [300], seed))

    def gradients(net: Any) -> tuple[Any, dict[str, Any]]:
        out = net.requires_grad_(True)(ids, labels=ids)
        out.loss.backward()
        return out, {name: p.grad for name, p in net.named_parameters() if p.grad is not None}

    net = rm.torch.patch(model.net(), max_model_len=512)
    out, got = gradients(net)
    plain, want = gradients(model.net())
    with generator(model, max_model_len=512) as gen:
        assert (out.logits[0].detach().numpy() == gen.logits(ids.tolist())[0]).all()
    assert abs(out.loss.item() - plain.loss.item()) < 1e-4
    for name, wanted in want.items():
        least = 1e-4 * max(float(x.norm()) for x in want.values())
        assert float((got[name] - wanted).norm() / wanted.norm().clamp(min=least)) < 1e-3, name
    assert net(ids, logits_to_keep=2).logits.shape == (1, 2, 300)


# -------------------------------------------------------------------------- a family of one's own
PARROT = Family(
    "ParrotForCausalLM",
    "silent_layers",
    norm_before=False,
    norm_after=True,
    qk_norm="head",
    o_bias=False,
    attention_bias=True,
    rope_layers=lambda c, layers: tuple(
        int(i not in c.values["silent_layers"]) for i in range(layers)
    ),
    names=(
        *((kind, f"attn.{kind}.weight") for kind in "qkvo"),
        *((f"{kind}_bias", f"attn.{kind}.bias") for kind in "qkv"),
        ("up", "mlp.wide.weight"),
        ("post_attn_norm", "post_attention_layernorm.weight"),
    ),
)


def parrot(
    w: dict[str, Any], ids: list[int], heads: int, kv_heads: int, dim: int, silent: list[int]
) -> Any:
    """The family's forward pass in float64: logits [n, vocab]."""
    torch = oracle.torch
    functional, n = torch.nn.functional, len(ids)

    def norm(x: Any, name: str) -> Any:
        return functional.rms_norm(x, x.shape[-1:], w[name], 1e-6)

    def turned(x: Any) -> Any:
        inverse = 1.0 / 10000.0 ** (torch.arange(0, dim, 2).double() / dim)
        angle = torch.outer(torch.arange(n).double(), inverse)[:, None]
        a, b = x.chunk(2, -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    x = w["model.embed_tokens.weight"][ids]
    for layer in range(2):
        at = f"model.layers.{layer}."
        q, k, v = (
            (x @ w[f"{at}attn.{part}.weight"].T + w[f"{at}attn.{part}.bias"]).view(n, -1, dim)
            for part in "qkv"
        )
        q, k = norm(q, f"{at}self_attn.q_norm.weight"), norm(k, f"{at}self_attn.k_norm.weight")
        q, k = (q, k) if layer in silent else (turned(q), turned(k))
        out = functional.scaled_dot_product_attention(
            *(t.transpose(0, 1) for t in (q, k, v)), is_causal=True, enable_gqa=heads > kv_heads
        )
        out = out.transpose(0, 1).reshape(n, -1) @ w[f"{at}attn.o.weight"].T
        x = x + norm(out, f"{at}post_attention_layernorm.weight")
        inner = functional.silu(x @ w[f"{at}mlp.gate_proj.weight"].T) * (
            x @ w[f"{at}mlp.wide.weight"].T
        )
        x = x + norm(
            inner @ w[f"{at}mlp.down_proj.weight"].T, f"{at}post_feedforward_layernorm.weight"
        )
    return (norm(x, "model.norm.weight") @ w["lm_head.weight"].T).numpy()


def test_a_made_up_family(monkeypatch: pytest.MonkeyPatch) -> None:
    """A combination of features that does not occur in a real family, with new names: it needs one
    entry of FAMILIES and no C code."""
    monkeypatch.setitem(FAMILIES, "parrot", PARROT)
    config = {
        key: value
        for key, value in helpers.tiny_config().items()
        if key not in ("attention_bias", "use_sliding_window")
    }
    spec = rm.ModelSpec.from_hf({**config, "model_type": "parrot", "silent_layers": [1]})
    state = {
        name: oracle.torch.from_numpy(helpers.weight(name, shape))
        for name, shape in spec.parameters()
    }
    ids = helpers.prompts(config, [70])[0]
    truth = parrot({name: x.double() for name, x in state.items()}, ids, 4, 2, 16, [1])
    with rm.Generator(spec, **LIMITS, dtype="float32") as gen:
        with pytest.raises(rm.MissingKeyError, match=r"model.layers.1.mlp.wide.weight"):
            gen.sync_weights(
                {name: x for name, x in state.items() if name != "model.layers.1.mlp.wide.weight"}
            )
        with pytest.raises(
            rm.UnexpectedKeyError,
            match=r"layers.0.input_layernorm.weight: the model norms a block's output",
        ):
            gen.sync_weights(
                state | {"model.layers.0.input_layernorm.weight": oracle.torch.ones(64)}
            )
        gen.sync_weights(state)
        (ours,) = gen.logits([ids])
    assert (np.abs(ours - truth).max(1) <= LOGITS_BOUND * np.abs(truth).max(1)).all()

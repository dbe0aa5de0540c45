"""The names and layouts under which the weights of every family arrive.

Oracle: the digest and the results of the tensors under the names of transformers' module. Bound:
equality."""

from __future__ import annotations

import importlib
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

import rollmesh as rm
from rollmesh.model.families import FAMILIES

pytest.importorskip("torch", reason="the models are transformers'")
oracle, family_models = importlib.import_module("oracle"), importlib.import_module("family_models")
family_runs = importlib.import_module("family_runs")
SOME, LIMITS = family_runs.SOME, family_runs.LIMITS
generator, cut = family_runs.generator, family_runs.cut


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

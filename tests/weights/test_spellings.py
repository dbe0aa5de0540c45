"""One set of weights under every spelling that a trainer may use: Hugging Face checkpoints,
transformers 5 modules, inference engines' fused tensors, torchtitan's names of several versions.
Input: random weights with a router bias that changes choices. Oracle: the other spellings. Bound:
zero, on the digest, the logits and the routing. Also one config in every form."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import helpers
import numpy as np
import pytest

import rollmesh

torch = pytest.importorskip("torch", reason="state dicts of torch modules")

MODELS = {
    "moe": helpers.Case(
        "",
        helpers.tiny_config(True, num_hidden_layers=3, mlp_only_layers=[1], head_dim=24),
        router_bias=True,
    ),
    "moe_odd": helpers.Case(
        "",
        helpers.tiny_config(
            True, hidden_size=44, moe_intermediate_size=19, num_experts=5, num_experts_per_tok=3
        ),
    ),
    "moe_tied": helpers.Case(
        "",
        helpers.tiny_config(True, tie_word_embeddings=True, num_key_value_heads=1),
        router_bias=True,
    ),
    "dense": helpers.Case(
        "", helpers.tiny_config(num_attention_heads=6, num_key_value_heads=3, hidden_size=52)
    ),
    "dense_bias": helpers.Case("", helpers.tiny_config(attention_bias=True)),
}


def spellings(case: helpers.Case, dtype: str) -> Iterator[tuple[str, dict[str, Any]]]:
    state, config = helpers.state_dict(case, dtype), case.config
    yield "checkpoint", state
    yield "checkpoint, other order", dict(reversed(state.items()))
    module = helpers.module_state_dict(state, config)
    yield "fused", helpers.fused_state_dict(state, config)
    yield "module", module
    yield (
        "module, bias as expert_bias",
        {
            key.replace("gate.e_score_correction_bias", "expert_bias"): x
            for key, x in module.items()
        },
    )
    # The state dict of a trainer: the module's own state_dict(), with lm_head and embed_tokens one
    # tensor when tied.
    net = helpers.hf_model(dataclasses.replace(case, router_bias=False), dtype)
    biases = {key: x for key, x in state.items() if key.endswith("e_score_correction_bias")}
    yield "transformers", {**net.state_dict(), **biases}
    if config["tie_word_embeddings"]:
        embed = state["model.embed_tokens.weight"]
        yield "tied, lm_head sent too", {**state, "lm_head.weight": embed.clone()}
        yield "tied, lm_head the same memory, first", {"lm_head.weight": embed, **state}
        rest = {key: x for key, x in state.items() if x is not embed}
        yield "tied, lm_head alone", {**rest, "lm_head.weight": embed}
        yield "tied, lm_head alone, of torchtitan", {"output.weight": embed, **rest}
    if not config["attention_bias"]:  # torchtitan has no such option
        for style in ("plain", "shapes", "nested"):
            yield f"titan {style}", helpers.titan_state_dict(state, config, style)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_every_spelling_is_the_same_model(
    name: str, dtype: str, tiny_generator: Callable[..., Any]
) -> None:
    case = MODELS[name]
    gen = tiny_generator(case, dtype=dtype, weights=None)
    prompts = helpers.prompts(case.config, [1, 33, 70])
    seen: dict[str, tuple[str, bytes, bytes]] = {}
    for spelling, state in spellings(case, dtype):
        digest = gen.sync_weights(state).digest
        logits = b"".join(x.tobytes() for x in gen.logits(prompts))
        outs = gen.generate(
            prompts,
            rollmesh.SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True),
            use_tqdm=False,
        )
        routed = (
            b"".join(np.asarray(out.outputs[0].routed_experts).tobytes() for out in outs)
            if case.is_moe
            else b""
        )
        seen[spelling] = (digest, logits, routed)
    first = seen["checkpoint"]
    assert {
        spelling: tuple(a == b for a, b in zip(other, first)) for spelling, other in seen.items()
    } == dict.fromkeys(seen, (True,) * 3)


def test_another_bias_is_another_model(tiny_generator: Callable[..., Any]) -> None:
    """The digest and the numbers depend on the router bias: the test above can fail."""
    case = MODELS["moe"]
    gen = tiny_generator(case, weights=None)
    prompts = helpers.prompts(case.config, [70])
    state = helpers.state_dict(case)
    before = gen.sync_weights(state).digest, gen.logits(prompts)[0].tobytes()
    moved = {
        key: x + 0.25 * torch.arange(8) if key.endswith("correction_bias") else x
        for key, x in state.items()
    }
    after = gen.sync_weights(moved).digest, gen.logits(prompts)[0].tobytes()
    assert before[0] != after[0]
    assert before[1] != after[1]


@pytest.mark.parametrize("model_type", ["qwen2", "smollm3"])
@pytest.mark.parametrize("kind", ["attention.wq", "attention.wk", "attention.qkv_linear.wq"])
def test_rows_of_no_known_order_are_refused(model_type: str, kind: str) -> None:
    """Meta's, Mistral's and torchtitan's Llamas have other rows under these names than torchtitan's
    Qwen3."""
    config = {
        key: value
        for key, value in helpers.tiny_config().items()
        if key not in ("attention_bias", "use_sliding_window")
    }
    spec = rollmesh.ModelSpec.from_hf({**config, "model_type": model_type})
    state = {name: helpers.weight(name, shape) for name, shape in spec.parameters()}
    name = f"layers.1.{kind}.weight"
    hf_name = f"model.layers.1.self_attn.{kind[-1]}_proj.weight"
    with rollmesh.Generator(spec, **helpers.SMALL, dtype="float32") as gen:
        with pytest.raises(
            rollmesh.UnexpectedKeyError,
            match=rf"{name}: the order of its rows .*expected self_attn.{kind[-1]}_proj",
        ):
            gen.sync_weights({name if key == hf_name else key: x for key, x in state.items()})
        gen.sync_weights(state)


LLAMA = {
    key: value
    for key, value in helpers.tiny_config().items()
    if key not in ("attention_bias", "use_sliding_window")
} | {"model_type": "llama"}
# Names that a model does not have, and what it lacks.
ABSENT = {
    "dense": (
        helpers.tiny_config(),
        {
            "layers.2.mlp.up_proj.weight": ": layer 2; the model has 2",
            "layers.0.mlp.gate.weight": ": layer 0 has no experts",
            "layers.1.mlp.experts.0.gate_proj.weight": ": layer 1 has no experts",
            "layers.0.self_attn.q_proj.bias": ": the model has no bias there (attention_bias=False",
            "layers.0.post_feedforward_layernorm.weight": ": the model norms a block's input",
            "embed_positions.weight": " is not a parameter of this model",
        },
    ),
    "moe": (
        helpers.tiny_config(True),
        {
            "layers.1.mlp.experts.8.up_proj.weight": ": expert 8; the model has 8",
            "layers.1.mlp.gate_proj.weight": ": layer 1 is a mixture of experts",
            "layers.1.mlp.shared_expert_gate.weight": ": the model has no shared expert",
        },
    ),
    "llama": (
        LLAMA,
        {
            "layers.0.self_attn.q_norm.weight": ": the model does not norm q and k",
            "layers.1.self_attn.k_norm.weight": ": the model does not norm q and k",
        },
    ),
}


@pytest.mark.parametrize("model", ABSENT)
def test_the_error_of_a_name_says_what_the_model_lacks(model: str) -> None:
    config, names = ABSENT[model]
    tensor = np.zeros(1, np.float32)
    with generator_of(config, MESHES[0]) as generator:
        for name, lacks in names.items():
            message = re.escape(f"1 of the weights: model.{name}{lacks}")
            with pytest.raises(rollmesh.UnexpectedKeyError, match=f"^{message}"):
                generator.sync_weights({f"model.{name}": tensor})


@pytest.mark.parametrize("case", helpers.CASES, ids=lambda case: case.name)
def test_every_form_of_a_config_is_the_same_spec(case: helpers.Case, tmp_path: Path) -> None:
    """The config as a dict, as the transformers object, as its to_dict(), as a folder it was saved
    to, and as our own JSON."""
    import oracle

    hf = oracle.config_of(case.config)
    hf.save_pretrained(tmp_path)
    forms = [hf, hf.to_dict(), hf.to_diff_dict(), tmp_path, tmp_path / "config.json"]
    spec = rollmesh.ModelSpec.from_hf(case.config)
    assert [rollmesh.ModelSpec.from_hf(form) for form in forms] == [spec] * len(forms)
    assert rollmesh.ModelSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    assert hash(rollmesh.ModelSpec.from_dict(spec.to_dict())) == hash(spec)
    assert {p.name: p.shape for p in spec.parameters()} == helpers.parameter_shapes(case.config)


# ------------------------------------------------------------------- tied heads, buffers
DENSE, TIED = helpers.tiny_config(), helpers.tiny_config(tie_word_embeddings=True)
MESHES = [rollmesh.Mesh(), rollmesh.Mesh(tp=2)]


def generator_of(config: dict[str, Any], mesh: rollmesh.Mesh) -> rollmesh.Generator:
    spec = rollmesh.ModelSpec.from_hf(config)
    return rollmesh.Generator(
        spec, mesh=mesh, dtype="float32", max_model_len=16, kv_cache_gib=0.002, threads=1
    )


def digest_of(config: dict[str, Any], state: dict[str, np.ndarray]) -> str:
    with generator_of(config, MESHES[0]) as generator:
        return generator.sync_weights(state).digest


@pytest.mark.parametrize("mesh", MESHES, ids=["one rank", "tp=2"])
def test_buffers_of_rope_are_passed_over(mesh: rollmesh.Mesh) -> None:
    """Buffers of any float dtype are ignored without a cast. Other names beside them are
    refused."""
    q = "model.layers.0.self_attn.q_proj.weight"
    state, half = helpers.numpy_state_dict(DENSE), np.ones(3, np.float16)
    buffers = {"model.rotary_emb.inv_freq": half}
    buffers |= {
        f"model.layers.{i}.self_attn.rotary_emb.{name}": half
        for i in (0, 1)
        for name in ("inv_freq", "cos_cached", "sin_cached")
    }
    want = digest_of(DENSE, state)
    with generator_of(DENSE, mesh) as generator:
        for source in ({**buffers, **state}, iter({**state, **buffers}.items())):
            report = generator.sync_weights(source)
            assert (report.digest, report.num_skipped, report.num_tensors) == (
                want,
                len(buffers),
                len(state),
            )
        with generator.begin_sync() as sync:
            for name, tensor in {**buffers, **state}.items():
                sync.push(name, tensor)
        assert sync.report is not None
        assert (sync.report.digest, sync.report.num_skipped) == (want, len(buffers))
        for name in (
            "model.layers.0.self_attn.rotary_emb.freqs",
            "model.layers.0.rotary_emb.inv_freq",
            "inv_freq",
        ):
            with pytest.raises(rollmesh.UnexpectedKeyError, match=name):
                generator.sync_weights({**state, name: half})
        # The report of a later sync does not count these dropped values.
        bad = {**state, q: np.full_like(state[q], np.nan)}
        with pytest.raises(rollmesh.NonFiniteError):
            generator.sync_weights({**buffers, **bad})
        assert generator.sync_weights({**buffers, **state}).num_skipped == len(buffers)


@pytest.mark.parametrize("mesh", MESHES, ids=["one rank", "tp=2"])
def test_a_tied_matrix_that_comes_as_lm_head_alone(mesh: rollmesh.Mesh) -> None:
    """Sent as a mapping, a stream and single tensors, after another version under the other name.
    Oracle: the digest of the usual name."""
    state, other = helpers.numpy_state_dict(TIED), helpers.numpy_state_dict(TIED, seed=1)
    embed = state.pop("model.embed_tokens.weight")
    want = digest_of(TIED, helpers.numpy_state_dict(TIED))
    with generator_of(TIED, mesh) as generator:
        with pytest.raises(rollmesh.MissingKeyError, match="embed_tokens"):
            generator.sync_weights(state)
        sent = {**state, "lm_head.weight": embed}
        for source in (sent, iter(sent.items()), dict(reversed(sent.items()))):
            assert generator.sync_weights(source).digest == want
            assert generator.sync_weights(other).digest == digest_of(TIED, other) != want
        with pytest.raises(rollmesh.IncompleteSyncError, match="embed_tokens"):
            generator.sync_weights(iter(state.items()))
        with generator.begin_sync() as sync:
            for name, tensor in sent.items():
                sync.push(name, tensor)
        assert sync.report is not None
        assert sync.report.digest == want
        generator.sync_weights(other)
        # Only the new values of the embedding count, not the old ones.
        partly = generator.sync_weights({"lm_head.weight": embed}, strict=False).digest
        assert partly == digest_of(TIED, {**other, "model.embed_tokens.weight": embed})

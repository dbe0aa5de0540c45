"""Every model family against transformers, on configs with the family's options drawn at random.

Oracle: transformers' float64 forward of the same weights (family_models.py). Bounds as in
test_parity.py: logits within 2e-4 of the row's largest magnitude, greedy tokens and experts equal
where the margin is over 1e-5. bfloat16: no further from the truth than 1.1 times transformers' own
bfloat16.
"""

from __future__ import annotations

import importlib
import re
from typing import Any

import helpers
import marks
import numpy as np
import pytest
from marks import full
from paths import ROOT

import rollmesh as rm
from rollmesh.model.families import FAMILIES
from rollmesh.model.family import Family

pytest.importorskip("torch", reason="the oracle is transformers")
oracle, family_models = importlib.import_module("oracle"), importlib.import_module("family_models")
family_runs = importlib.import_module("family_runs")
TRIED, SOME, LIMITS = family_runs.TRIED, family_runs.SOME, family_runs.LIMITS
generator, cut, told = family_runs.generator, family_runs.cut, family_runs.told
LOGITS_BOUND = 2e-4
MARGIN = 1e-5


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


# ------------------------------------------------------------------------------------------- bits
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


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_next", "afmoe", "deepseek_v3"])
def test_checkpointing_does_not_change_gradients(family: str, seed: int) -> None:
    """For each kind of layer: 0 bits differ."""
    model = cut(family, seed)
    ids = oracle.torch.tensor(helpers.prompts({"vocab_size": 300}, [40] * 2, seed))
    found = []
    for reentrant in (None, False, True):
        net = rm.torch.patch(model.net().train().requires_grad_())
        if reentrant is not None:
            net.gradient_checkpointing_enable({"use_reentrant": reentrant})
        rm.torch.logprobs(net, ids).logprobs.sum().backward()
        found.append({name: p.grad for name, p in net.named_parameters() if p.grad is not None})
    for got in found[1:]:
        assert got.keys() == found[0].keys()
        assert all(oracle.torch.equal(grad, got[name]) for name, grad in found[0].items())


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
    names={
        **{kind: f"attn.{kind}.weight" for kind in "qkvo"},
        **{f"{kind}_bias": f"attn.{kind}.bias" for kind in "qkv"},
        "up": "mlp.wide.weight",
        "post_attn_norm": "post_attention_layernorm.weight",
    },
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

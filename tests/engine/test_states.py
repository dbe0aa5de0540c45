"""States of sequences (csrc/scheduler/scheduler.c, kv_cache.c) in models with delta nets.

Oracle: the same requests in an engine without prefix cache, with memory for all of them. Bound: 0
bits. After every case all pages and states are free.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from marks import full

import rollmesh as rm

pytest.importorskip("torch", reason="transformers makes the weights")
family_models = importlib.import_module("family_models")
FAMILY = "qwen3_5_text"
PAGE_BYTES, STATE_BYTES = 6144, 59136  # of the model below, float32, pages of 16
LIMITS: dict[str, Any] = {"max_model_len": 256, "dtype": "float32", "threads": 2}


@pytest.fixture
def model(seed: int) -> Any:
    return family_models.draw(FAMILY, 300, seed, **family_models.cuttable(FAMILY))


@contextlib.contextmanager
def generator(model: Any, **options: Any) -> Iterator[rm.Generator]:
    with rm.Generator(rm.ModelSpec.from_hf(model.config), **{**LIMITS, **options}) as gen:
        gen.sync_weights(model.state, cast=True)
        yield gen
        stats = gen.metrics()
        assert stats["kv_pages_free"] == stats["kv_pages"]
        assert stats["states_free"] == stats["states"] > 0


def room(pages: int, states: int) -> float:
    return (pages * PAGE_BYTES + states * STATE_BYTES) / 2**30


def conversations(count: int) -> list[list[int]]:
    """Prompts that begin alike, up to a different length each."""
    rng = np.random.default_rng(5)
    base = rng.integers(0, 300, 200).tolist()
    lengths = [32, 33, 47, 48, 64, 100, 129, 160, 16, 5]
    return [
        base[: lengths[i % len(lengths)]] + rng.integers(0, 300, i % 7 + 1).tolist()
        for i in range(count)
    ]


def told(outs: list[Any]) -> list[bytes]:
    """Returns what the contract fixes."""
    words = [x for out in outs for c in out.outputs for x in (c.token_ids, c.logprobs)]
    return [x.tobytes() for x in (*words, *(out.prompt_logprobs for out in outs)) if x is not None]


def ask(gen: rm.Generator, prompts: list[list[int]], **params: Any) -> list[bytes]:
    given = {"n": 3, "max_tokens": 20, "seed": 4, "ignore_eos": True, **params}
    return told(gen.generate(prompts, rm.SamplingParams(**given), use_tqdm=False))


CASES: dict[str, dict[str, Any]] = {
    "a state in every page": {"state_interval": 16},
    "some pages": {"state_interval": 48, "max_num_batched_tokens": 37},
    "the default": {},
    "few states": {"state_interval": 16, "kv_cache_gib": room(0, 18)},
    "two states": {"kv_cache_gib": room(20, 2)},
    "a mesh": {"state_interval": 16, "mesh": rm.Mesh(tp=3), "sequence_parallel": True},
}


@pytest.mark.parametrize("prompt_logprobs", [-1, full(0)])
@pytest.mark.parametrize("case", CASES)
def test_prefixes_forks_and_preemption(model: Any, case: str, prompt_logprobs: int) -> None:
    """Each round repeats earlier prompts, so that its prefixes are cached, if states fit."""
    prompts = conversations(12)
    more = {"prompt_logprobs": prompt_logprobs} if prompt_logprobs >= 0 else {}
    with generator(model, enable_prefix_caching=False) as gen:
        wanted = [ask(gen, prompts[a:b], **more) for a, b in ((0, 5), (3, 12), (0, 12))]
        assert gen.metrics()["cached_tokens"] == 0
    with generator(model, **CASES[case]) as gen:
        for want, (a, b) in zip(wanted, ((0, 5), (3, 12), (0, 12)), strict=True):
            assert ask(gen, prompts[a:b], **more) == want
        stats = gen.metrics()
    if case != "two states":
        assert stats["cached_tokens"] > 0
    if case == "few states":
        assert stats["states"] == 9
        assert stats["state_evictions"] > 0
    assert (stats["preemptions"] > 0) == case.endswith(" states")


def test_a_prefix_ends_at_a_state(model: Any) -> None:
    """Counts the tokens that are not computed. A prompt keeps a state at its last full page, and
    leaves a row to compute."""
    prompt = conversations(8)[7][:160]
    with generator(model, state_interval=64) as gen:
        for end, hit in ((160, 0), (160, 144), (159, 144), (144, 128), (143, 128), (128, 64)):
            before = gen.metrics()["cached_tokens"]
            ask(gen, [prompt[:end]], n=1, max_tokens=1)
            assert gen.metrics()["cached_tokens"] - before == hit, end
        gen.score([prompt])  # logprobs of all tokens: the pages above have none
        scored = gen.metrics()["cached_tokens"]
        gen.score([prompt])
        assert gen.metrics()["cached_tokens"] - scored == 144


def test_the_default_interval_is_at_most_256(seed: int) -> None:
    """In a model whose state takes the memory of 584 positions."""
    sizes = {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
    model = family_models.draw(FAMILY, 300, seed, **family_models.cuttable(FAMILY) | sizes)
    prompt = np.random.default_rng(5).integers(0, 300, 310).tolist()
    with generator(model, max_model_len=320) as gen:
        for ids in (prompt, [*prompt[:280], 1]):
            ask(gen, [ids], n=1, max_tokens=1)
        assert gen.metrics()["cached_tokens"] == 256


def test_a_conversation_continues_at_its_last_page(model: Any) -> None:
    """With the default interval of 160 positions. Of the generated pages only the last one keeps a
    state."""
    prompt = conversations(1)[0][:30]
    params = rm.SamplingParams(max_tokens=40, ignore_eos=True, seed=1)
    with generator(model, enable_prefix_caching=False) as gen:
        (first,) = gen.generate([prompt], params, use_tqdm=False)
        ids = prompt + first.outputs[0].token_ids.tolist()
        wanted = ask(gen, [[*ids, 3, 4]])
    with generator(model) as gen:
        gen.generate([prompt], params, use_tqdm=False)
        for end, hit in ((48, 16), (70, 64)):  # 16: the last full page of the prompt
            before = gen.metrics()["cached_tokens"]
            ask(gen, [ids[:end]], n=1, max_tokens=1)
            assert gen.metrics()["cached_tokens"] - before == hit
        assert ask(gen, [[*ids, 3, 4]]) == wanted


def test_memory_fraction_counts_states(model: Any) -> None:
    """A state for each sequence and one to fork; pages get the rest."""
    with generator(
        model, kv_cache_gib=None, memory_fraction=0.02, max_num_seqs=3, enable_prefix_caching=False
    ) as gen:
        stats = gen.metrics()
        assert stats["states"] == 4
        assert stats["kv_bytes"] == stats["kv_pages"] * PAGE_BYTES + 4 * STATE_BYTES
        ask(gen, conversations(2))


def test_new_weights_and_sleep(model: Any, seed: int) -> None:
    """Checks that states of an old version, or from before sleep, are not used."""
    other = family_models.draw(FAMILY, 300, seed + 1, **family_models.cuttable(FAMILY))
    prompts = conversations(6)
    with generator(model, enable_prefix_caching=False) as gen:
        first = ask(gen, prompts)
        gen.sync_weights(other.state, cast=True)
        second = ask(gen, prompts)
    assert first != second
    with generator(model, state_interval=16) as gen:
        assert ask(gen, prompts) == ask(gen, prompts) == first
        gen.sync_weights(other.state, cast=True)
        assert ask(gen, prompts) == second
        gen.sleep(keep_weights=True)
        gen.wake()
        assert ask(gen, prompts) == second
        gen.reset_prefix_cache()
        assert ask(gen, prompts) == second


def test_a_failed_request_gives_its_states_back(model: Any) -> None:
    """K is not finite, in a prompt whose pages would keep states."""
    bad = dict(model.state)
    name = "model.layers.1.self_attn.k_proj.weight"
    bad[name] = bad[name] * 3e38
    with generator(model, state_interval=16) as gen:
        gen.sync_weights(bad, allow_nonfinite=True)
        with pytest.raises(rm.NumericsError, match="a row of K or V is not finite"):
            ask(gen, [list(range(70))])


def test_what_is_refused(model: Any) -> None:
    spec = rm.ModelSpec.from_hf(model.config)
    with pytest.raises(rm.ConfigError, match=r"state_interval: expected a multiple of block_size"):
        rm.Generator(spec, **LIMITS, state_interval=24)
    with pytest.raises(rm.CapacityError, match="for a page and two states"):
        rm.Generator(spec, **LIMITS, kv_cache_gib=room(0, 2))
    fields = model.config.to_dict()
    types = {"layer_types": ["linear_attention"] * 3}
    with pytest.raises(rm.ConfigError, match="layer_types: expected a layer of attention"):
        rm.ModelSpec.from_hf(fields | types)
    with pytest.raises(rm.ConfigError, match="hidden_act: expected silu with linear attention"):
        rm.ModelSpec.from_hf(fields | {"hidden_act": "gelu"})
    with pytest.raises(rm.ConfigError, match="linear_num_value_heads: expected a multiple"):
        rm.ModelSpec.from_hf(fields | {"linear_num_value_heads": 5})
    with pytest.raises(rm.ConfigError, match=r"attention_bias: expected False, got True"):
        rm.ModelSpec.from_hf(fields | {"attention_bias": True})
    spec = rm.ModelSpec.from_hf(fields | {"num_attention_heads": 8})
    with pytest.raises(rm.ConfigError, match="tp: expected a divisor of linear_num_value_heads=6"):
        rm.Generator(spec, **LIMITS, mesh=rm.Mesh(tp=4))

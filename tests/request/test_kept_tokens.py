"""SamplingParams(kept_tokens=True): which tokens the filters kept for each draw.

Input: rollouts of tiny random models. Oracle: docs/numerics.md §7 in plain numpy over the rows of
`logits`, with float64's exp; the same request alone, without a mesh and without kept_tokens. Bounds
are 0, except for probabilities: 1e-6.
"""

from __future__ import annotations

from typing import Any

import helpers
import numpy as np
import pytest
from marks import full
from numpy.typing import NDArray

import rollmesh as rm

Params = rm.SamplingParams
CONFIGS = {"dense": helpers.tiny_config(), "moe": helpers.tiny_config(moe=True)}
WEIGHTS = {
    (name, seed): helpers.numpy_state_dict(config, seed)
    for name, config in CONFIGS.items()
    for seed in (1, 2)
}
WAYS: list[dict[str, Any]] = [
    {"top_k": 5, "temperature": 1.4},
    {"top_k": 50, "top_p": 0.9, "n": 3},
    {"top_k": 12, "top_p": 0.5, "temperature": 0.7, "logprobs": 3},
    {"top_k": 40, "min_p": 0.05, "logprobs": 60, "n": 2},
    {"top_k": 150, "top_p": 0.97, "min_p": 0.001, "temperature": 2.5},
    {"top_k": 8, "temperature": 0.0},
    {"top_k": 1},
]
PARAMS = [
    Params(max_tokens=6 + 3 * i, seed=10 * i, ignore_eos=True, kept_tokens=True, **way)
    for i, way in enumerate(WAYS)
]
PROMPTS = helpers.prompts(CONFIGS["dense"], [1, 20, 17, 33, 50, 4, 16], seed=8)


def generator(model: str, **options: Any) -> rm.Generator:
    options = {
        "dtype": "float32",
        "threads": 1,
        "max_model_len": 128,
        "kv_cache_gib": 0.02,
        "enable_prefix_caching": False,
        **options,
    }
    gen = rm.Generator(rm.ModelSpec.from_hf(CONFIGS[model]), **options)
    gen.sync_weights(WEIGHTS[model, 1], cast=True, version=1)
    return gen


def kept_of(logits: NDArray[np.float32], params: Params) -> tuple[list[int], NDArray[np.float64]]:
    """Returns the kept tokens of one row, by descending logit, and their probabilities."""
    order = np.lexsort((np.arange(len(logits)), -logits))
    if params.temperature == 0.0:
        return [int(order[0])], np.ones(1)
    x = logits[order].astype(np.float64)
    e = np.exp((x - x[0]) / params.temperature)
    weights = np.floor(e * 2**40)
    left = (weights > 0) & (e >= params.min_p)
    left[params.top_k :] = False
    if params.top_p < 1.0:
        before = np.cumsum(weights * left) - weights * left
        left &= before < np.ceil(float(np.float32(params.top_p)) * np.sum(weights * left))
    count = int(left.sum())
    assert left[:count].all(), "what is left is a prefix"
    return order[:count].tolist(), e[:count] / e[:count].sum()


def check(
    gen: rm.Generator,
    prompt: list[int],
    params: Params,
    sample: rm.CompletionOutput,
    only: Any = slice(None),
) -> list[int]:
    """Compares a sample's kept tokens with the oracle, for draws with gen's weights. Returns how
    many each draw kept."""
    tokens, kept = sample.token_ids, sample.kept_tokens
    assert kept is not None
    assert (kept.dtype, kept.shape) == (np.int32, (len(tokens), params.top_k))
    assert kept.flags.owndata
    if not len(tokens):
        return []
    rows = gen.logits([[*prompt, *tokens.tolist()]])[0][len(prompt) - 1 : -1]
    counts = []
    for i in np.arange(len(tokens))[only].tolist():
        want, p = kept_of(rows[i], params)
        assert kept[i].tolist() == want + [-1] * (params.top_k - len(want))
        at = want.index(tokens[i])
        assert abs(np.exp(np.float64(sample.sampling_logprobs[i])) - p[at]) < 1e-6
        counts.append(len(want))
    return counts


def all_of(outputs: list[rm.RequestOutput], with_kept: bool = True) -> list[bytes | None]:
    arrays: list[Any] = []
    for sample in (sample for output in outputs for sample in output.outputs):
        top = sample.top_logprobs
        arrays += [
            sample.token_ids,
            sample.logprobs,
            sample.sampling_logprobs,
            sample.routed_experts,
            top and top.ids,
        ]
        arrays += [top and top.logprobs, sample.kept_tokens if with_kept else None]
    return [
        None if array is None else f"{array.shape}".encode() + array.tobytes() for array in arrays
    ]


def run(gen: rm.Generator) -> list[rm.RequestOutput]:
    return gen.generate(PROMPTS, PARAMS, use_tqdm=False)


# ---------------------------------------------------------------------------------- what they are
@pytest.mark.parametrize("model", CONFIGS)
def test_kept_tokens_are_what_the_filters_leave_of_the_logits(model: str) -> None:
    seen = set()
    with generator(model) as gen:
        for prompt, params, output in zip(PROMPTS, PARAMS, run(gen), strict=True):
            for sample in output.outputs:
                counts = check(gen, prompt, params, sample)
                assert len(counts) == params.max_tokens
                seen.update(counts)
    assert len(seen) > 20


def test_kept_tokens_change_nothing_else() -> None:
    """The top logprobs stay the same too, although more are recorded than were requested."""
    plain = [
        Params(max_tokens=6 + 3 * i, seed=10 * i, ignore_eos=True, **way)
        for i, way in enumerate(WAYS)
    ]
    with generator("moe") as gen:
        outputs = gen.generate(PROMPTS, plain, use_tqdm=False)
        assert all(sample.kept_tokens is None for output in outputs for sample in output.outputs)
        assert all_of(run(gen), with_kept=False) == all_of(outputs)
        mixed = gen.generate(
            PROMPTS,
            [p if i % 2 else q for i, (p, q) in enumerate(zip(PARAMS, plain))],
            use_tqdm=False,
        )
        assert [
            sample.kept_tokens is None for output in mixed for sample in output.outputs[:1]
        ] == [True, False] * 3 + [True]
        assert all_of(mixed[1::2]) == all_of(run(gen)[1::2])
        # Scored with the rollout's own params.
        scored = gen.score([[*PROMPTS[0], *mixed[0].outputs[0].token_ids.tolist()]], PARAMS[0])[0]
        assert scored.tobytes() == mixed[0].outputs[0].sampling_logprobs.tobytes()


# ---------------------------------------------------------------------- ways that an output comes
OTHERS: dict[str, dict[str, Any]] = {
    "chunks": {"max_num_batched_tokens": 7, "threads": 2},
    "small batches": {"max_num_seqs": 2, "block_size": 32},
    "preempted": {"kv_cache_gib": 13.5 * 2 * 2 * 16 * 48 * 4 / 2**30},
    "prefix cache": {"enable_prefix_caching": True},
    "tp 2": {"mesh": rm.Mesh(tp=2)},
    "dp 2": {"mesh": rm.Mesh(dp=2)},
    "tp 2, dp 2": {"mesh": rm.Mesh(tp=2, dp=2)},
}


@pytest.mark.parametrize("way", OTHERS)
def test_kept_tokens_are_the_same_in_any_batch_and_on_any_mesh(way: str) -> None:
    with generator("moe") as gen:
        want = all_of(run(gen))
    with generator("moe", **OTHERS[way]) as gen:
        assert all_of(run(gen)) == want
        assert all_of(run(gen)) == want
        assert (gen.metrics()["preemptions"] > 0) == (way == "preempted")


@pytest.mark.parametrize("inflight", ["keep", full("restart"), full("abort")])
def test_kept_tokens_across_a_sync(inflight: Any) -> None:
    """Each draw has the kept tokens of its version, and an aborted sample has one entry per
    token."""
    params = Params(
        n=2, max_tokens=12, seed=3, top_k=30, top_p=0.8, ignore_eos=True, kept_tokens=True
    )
    with generator("dense") as old, generator("dense") as gen, generator("dense") as new:
        new.sync_weights(WEIGHTS["dense", 2], cast=True, version=2)
        gen.submit([PROMPTS[1]], params)
        for _ in range(5):
            gen.poll()
        gen.sync_weights(WEIGHTS["dense", 2], cast=True, version=2, inflight=inflight)
        counted = 0
        for sample in gen.poll(1)[0].outputs:
            for which, version in ((old, 1), (new, 2)):
                counted += len(check(which, PROMPTS[1], params, sample, sample.versions == version))
            assert (
                set(sample.versions.tolist())
                == {"keep": {1, 2}, "restart": {2}, "abort": {1}}[inflight]
            )
        assert counted == (24 if inflight != "abort" else 10)


def test_a_sample_ended_by_a_stop_has_kept_tokens_up_to_it() -> None:
    with generator("dense") as gen:
        free = Params(max_tokens=12, seed=3, top_k=30, ignore_eos=True, kept_tokens=True)
        whole = gen.generate([PROMPTS[1]], free, use_tqdm=False)[0].outputs[0]
        assert whole.kept_tokens is not None
        stop = int(whole.token_ids[5])
        first = whole.token_ids.tolist().index(stop) + 1
        cut = Params(
            max_tokens=12,
            seed=3,
            top_k=30,
            ignore_eos=True,
            kept_tokens=True,
            stop_token_ids=[stop],
        )
        ended = gen.generate([PROMPTS[1]], cut, use_tqdm=False)[0].outputs[0]
        assert ended.kept_tokens is not None
        assert ended.kept_tokens.tolist() == whole.kept_tokens[:first].tolist()


# --------------------------------------------------------------------------------------- refusals
def test_kept_tokens_need_a_bound_and_no_bans() -> None:
    for wrong, said in (
        ({}, "expected top_k >= 1, got -1; set top_k"),
        ({"top_k": 0}, "expected top_k >= 1, got -1; set top_k"),
        ({"top_k": 4, "min_tokens": 2}, "expected no min_tokens, got 2; leave one of the two out"),
    ):
        with pytest.raises(rm.RequestError, match=f"kept_tokens=True: {said}"):
            Params(kept_tokens=True, **wrong)
    with (
        generator("dense") as gen,
        pytest.raises(
            rm.RequestError, match=r"kept_tokens=True: expected top_k in \[1, 151\), got 151; set"
        ),
    ):
        gen.generate([PROMPTS[0]], Params(kept_tokens=True, top_k=151), use_tqdm=False)

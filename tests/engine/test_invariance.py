"""Results do not depend on how they are computed: bit for bit, zero tolerance.

Input: tiny models (dense and MoE, full and sliding window, tied, float32 and bfloat16) and two
loads each: `SHORT`, 28 requests of 1 … 200 prompt tokens with 1 … 4 samples, some with common
beginnings, every way of sampling; `LONG`, four of up to 1,150 positions, past the attention split
of 1,024. Oracle: every request alone in a plain engine (one thread, whole prompts, page 16, no
prefix cache). Bound: 0. Compared are the bytes of tokens, logprobs, sampling logprobs, prompt
logprobs, top-k and routed experts, over batch composition and order, chunk size, page size, prefix
hits, preemption, threads, the reference kernels against the fast ones, and the caller's
floating-point mode; and `score` of the generated sequences.

The last test asserts that a million logprobs were compared, if all tests of the file ran.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import helpers
import marks
import numpy as np
import pytest
from marks import some

import rollmesh as rm
from rollmesh import ops

Outputs = list[rm.RequestOutput]
Params = rm.SamplingParams

WINDOW = {
    "num_hidden_layers": 3,
    "use_sliding_window": True,
    "sliding_window": 40,
    "max_window_layers": 1,
}
MODELS: dict[str, tuple[str, helpers.Config]] = {
    "dense_f32": (
        "float32",
        helpers.tiny_config(num_attention_heads=6, num_key_value_heads=2, head_dim=24),
    ),
    "dense_bf16": ("bfloat16", helpers.tiny_config()),
    "window_f32": ("float32", helpers.tiny_config(**WINDOW)),
    "window_bf16": (
        "bfloat16",
        helpers.tiny_config(**WINDOW, tie_word_embeddings=True, attention_bias=True),
    ),
    "moe_f32": ("float32", helpers.tiny_config(moe=True, norm_topk_prob=False)),
    "moe_bf16": (
        "bfloat16",
        helpers.tiny_config(moe=True, num_experts=12, num_experts_per_tok=3, num_key_value_heads=1),
    ),
}
QUICK = {"dense_bf16", "window_f32", "moe_bf16"}
COMPARED = {"logprobs": 0, "logits": 0, "tests": 0}


# ------------------------------------------------------------------------------------------ loads
@dataclasses.dataclass(frozen=True)
class Load:
    prompts: list[list[int]]
    params: list[Params]
    pages: int  # of 16 positions: enough for the longest request, too few for all

    def of(self, picks: list[int]) -> Load:
        return Load([self.prompts[i] for i in picks], [self.params[i] for i in picks], self.pages)

    def __len__(self) -> int:
        return len(self.prompts)


WAYS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.0, "logprobs": 5},
    {"temperature": 0.7, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 1.3, "top_k": 12, "n": 3, "top_p": 0.95, "kept_tokens": True},
    {
        "temperature": 1.0,
        "n": 4,
        "min_tokens": 9,
        "stop_token_ids": tuple(range(0, 151, 7)),
        "logprobs": 2,
    },
]


def short_load() -> Load:
    config = helpers.tiny_config()
    lengths = [1, 2, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 97, 128, 200, 7, 80, 112]
    prompts = helpers.prompts(config, lengths, seed=5)
    stem = helpers.prompts(config, [100], seed=6)[0]
    prompts += [
        stem[:cut] + tail
        for cut, tail in zip(
            [32, 48, 64, 64, 80, 96, 100], helpers.prompts(config, [9, 1, 16, 33, 5, 20, 3])
        )
    ]
    prompts += [stem[:64], stem, list(stem)]
    params = [
        Params(
            max_tokens=20 + 8 * (i % 6),
            seed=1000 * i,
            prompt_logprobs=3 if i % 9 == 4 else 0,
            **WAYS[i % len(WAYS)],
        )
        for i in range(len(prompts))
    ]
    return Load(prompts, params, pages=30)


def long_load() -> Load:
    prompts = helpers.prompts(helpers.tiny_config(), [1015, 1045, 1100, 60], seed=7)
    ways = [WAYS[0], {**WAYS[2], "n": 2}, WAYS[1], WAYS[3]]
    return Load(
        prompts,
        [Params(max_tokens=45, seed=i, prompt_logprobs=0, **way) for i, way in enumerate(ways)],
        pages=74,
    )


SHORT, LONG = short_load(), long_load()


# ---------------------------------------------------------------------------------------- engines
def page_bytes(config: helpers.Config, dtype: str) -> int:
    """Bytes of 16 positions of K and V over all layers: head_dim rounded up to 32 and to 16
    (kernels.h)."""
    head_dim = config["head_dim"]
    per_head = 16 * ((head_dim + 31) // 32 * 32 + (head_dim + 15) // 16 * 16)
    return (
        config["num_hidden_layers"]
        * config["num_key_value_heads"]
        * per_head
        * (2 if dtype == "bfloat16" else 4)
    )


@contextlib.contextmanager
def engine(model: str, pages: int = 1200, **options: Any) -> Iterator[rm.Generator]:
    dtype, config = MODELS[model]
    settings: dict[str, Any] = {
        "threads": 1,
        "block_size": 16,
        "enable_prefix_caching": False,
        "max_model_len": 1160,
        **options,
    }
    gib = (pages + 0.5) * page_bytes(config, dtype) / 2**30
    with rm.Generator(
        rm.ModelSpec.from_hf(config), dtype=dtype, kv_cache_gib=gib, **settings
    ) as gen:
        assert gen.metrics()["kv_pages"] == pages * 16 // settings["block_size"]
        gen.sync_weights(helpers.numpy_state_dict(config, dtype=dtype))
        yield gen


def together(gen: rm.Generator, load: Load) -> Outputs:
    return gen.generate(load.prompts, load.params, use_tqdm=False)


def alone(gen: rm.Generator, load: Load) -> Outputs:
    return [
        gen.generate(prompt, params, use_tqdm=False)[0]
        for prompt, params in zip(load.prompts, load.params)
    ]


def shuffled(gen: rm.Generator, load: Load) -> Outputs:
    order = np.random.default_rng(3).permutation(len(load)).tolist()
    outputs = together(gen, load.of(order))
    return [outputs[order.index(i)] for i in range(len(load))]


def staggered(gen: rm.Generator, load: Load) -> Outputs:
    """Adds one more request a step, so that new and old lengths mix."""
    done: dict[int, rm.RequestOutput] = {}
    ids = []
    for prompt, params in zip(load.prompts, load.params):
        ids += gen.submit([prompt], params)
        done |= {output.request_id: output for output in gen.poll()}
    done |= {output.request_id: output for output in gen.poll(len(ids) - len(done))}
    return [done[i] for i in ids]


def twice(gen: rm.Generator, load: Load) -> Outputs:
    """Generates twice; the second time most prompts are found in the cache."""
    together(gen, load)
    before = gen.metrics()["cached_tokens"]
    outputs = together(gen, load)
    assert gen.metrics()["cached_tokens"] - before > sum(map(len, load.prompts)) // 2
    assert any(output.num_cached_tokens >= 64 for output in outputs)
    return outputs


def crowded(gen: rm.Generator, load: Load) -> Outputs:
    outputs = together(gen, load)
    assert gen.metrics()["preemptions"] >= 2
    return outputs


# ------------------------------------------------------------------------------------- comparison
def pieces(output: rm.RequestOutput) -> Iterator[tuple[str, np.ndarray | None]]:
    """Returns every array of an output; names of logprob arrays contain "logprob"."""
    yield "prompt_logprobs", output.prompt_logprobs
    if output.prompt_top_logprobs is not None:
        yield "prompt_top.ids", output.prompt_top_logprobs.ids
        yield "prompt_top.logprobs", output.prompt_top_logprobs.logprobs
    for c in output.outputs:
        yield f"[{c.index}].token_ids", c.token_ids
        yield f"[{c.index}].logprobs", c.logprobs
        yield f"[{c.index}].sampling_logprobs", c.sampling_logprobs
        yield f"[{c.index}].routed_experts", c.routed_experts
        yield f"[{c.index}].kept_tokens", c.kept_tokens
        if c.top_logprobs is not None:
            yield f"[{c.index}].top.ids", c.top_logprobs.ids
            yield f"[{c.index}].top.logprobs", c.top_logprobs.logprobs


def count(name: str, array: np.ndarray | None) -> None:
    if array is not None and "logprobs" in name:
        COMPARED["logprobs"] += array.size


def assert_same(got: Outputs, want: Outputs) -> None:
    assert len(got) == len(want)
    for i, (a, b) in enumerate(zip(got, want)):
        assert a.error is None
        assert [(c.finish_reason, c.stop_reason) for c in a.outputs] == [
            (c.finish_reason, c.stop_reason) for c in b.outputs
        ], i
        for (name, x), (other, y) in zip(pieces(a), pieces(b), strict=True):
            assert name == other
            assert (x is None) == (y is None), f"request {i}: {name}"
            assert x is None or y is None or x.tobytes() == y.tobytes(), (
                f"request {i}: {name} differs"
            )
            count(name, x)


BASE: dict[tuple[str, str], Outputs] = {}


def base(model: str, which: str) -> Outputs:
    """The oracle: each request alone. Also checks that the tokens vary, though less with tied
    embeddings."""
    if (model, which) not in BASE:
        with engine(model) as gen:
            BASE[model, which] = alone(gen, SHORT if which == "short" else LONG)
        tokens = np.concatenate(
            [c.token_ids for output in BASE[model, which] for c in output.outputs]
        )
        assert len(np.unique(tokens)) > 12
    return BASE[model, which]


Variant = tuple[dict[str, Any], Callable[[rm.Generator, Load], Outputs]]
VARIANTS: dict[str, Variant] = {
    "batch": ({}, together),
    "order": ({"max_num_seqs": 48}, shuffled),
    "staggered": ({"max_num_batched_tokens": 96}, staggered),
    "chunk_3": ({"max_num_batched_tokens": 3, "enable_prefix_caching": True}, together),
    "chunk_17": ({"max_num_batched_tokens": 17}, together),
    "chunk_64": ({"max_num_batched_tokens": 64}, shuffled),
    "few_places": ({"max_num_seqs": 3, "enable_prefix_caching": True}, together),
    "page_64": ({"block_size": 64}, together),
    "page_64_chunks": (
        {"block_size": 64, "max_num_batched_tokens": 50, "enable_prefix_caching": True},
        twice,
    ),
    "prefix": ({"enable_prefix_caching": True}, twice),
    "preemption": ({"pages": 0}, crowded),
    "preemption_prefix": (
        {"pages": 0, "enable_prefix_caching": True, "max_num_batched_tokens": 70},
        crowded,
    ),
    "threads_2": ({"threads": 2}, together),
    "threads_2_chunks": (
        {"threads": 2, "max_num_batched_tokens": 41, "enable_prefix_caching": True},
        shuffled,
    ),
}
LONG_VARIANTS = (
    "batch",
    "chunk_17",
    "chunk_64",
    "page_64",
    "prefix",
    "preemption",
    "threads_2_chunks",
)


def run_variant(model: str, which: str, variant: str) -> None:
    options, how = VARIANTS[variant]
    load = SHORT if which == "short" else LONG
    options = {**options, "pages": load.pages} if "pages" in options else options
    want = base(model, which)
    with engine(model, **options) as gen:
        assert_same(how(gen, load), want)
    COMPARED["tests"] += 1


@pytest.mark.quick(14)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("model", some(MODELS, QUICK.__contains__))
def test_short(model: str, variant: str) -> None:
    run_variant(model, "short", variant)


@pytest.mark.quick(7)
@pytest.mark.parametrize("variant", LONG_VARIANTS)
@pytest.mark.parametrize("model", some(MODELS, QUICK.__contains__))
def test_across_the_split(model: str, variant: str) -> None:
    run_variant(model, "long", variant)


# The plain loops and the other variants of this machine.
OTHERS = [isa for isa in ops.available_isas() if isa != ops.best_isa()]


@pytest.mark.quick(6)
@pytest.mark.parametrize("isa", OTHERS)
@pytest.mark.parametrize("model", MODELS)
def test_other_kernels(model: str, isa: str) -> None:
    """The plain loops of kernels/cpu/ref.c are bit-identical to the chosen variant, also with a
    different batch, chunk and page."""
    picks = [0, 3, 4, 7, 9, 13, 18, 21, 23]
    with engine(
        model, isa=isa, block_size=64, max_num_batched_tokens=150, enable_prefix_caching=True
    ) as gen:
        assert gen.metrics()["isa"] == isa
        assert_same(together(gen, SHORT.of(picks)), [base(model, "short")[i] for i in picks])
    with engine(model) as gen:
        assert gen.metrics()["isa"] == ops.best_isa()
    COMPARED["tests"] += 1


@pytest.mark.quick(2)
@pytest.mark.parametrize("isa", OTHERS)
@pytest.mark.parametrize("model", ["window_f32", "moe_bf16"])
def test_other_kernels_across_the_split(model: str, isa: str) -> None:
    with engine(model, isa=isa) as gen:
        assert_same(together(gen, LONG.of([0])), [base(model, "long")[0]])
    COMPARED["tests"] += 1


# ---------------------------------------------------------------------------- the caller's thread
FE_UPWARD = 0x800  # fenv.h on x86


@contextlib.contextmanager
def rounding_upward() -> Iterator[None]:
    libm = ctypes.CDLL("libm.so.6")
    before = libm.fegetround()
    assert libm.fesetround(FE_UPWARD) == 0
    try:
        yield
        assert float("1") + 2.0**-60 > 1.0  # restored (fegetround would ask the x87)
    finally:
        libm.fesetround(before)


@contextlib.contextmanager
def flushing_denormals() -> Iterator[None]:
    torch = pytest.importorskip("torch")
    assert torch.set_flush_denormal(True)
    try:
        yield
        assert float("1e-310") * float("1") == 0.0  # still on
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize(
    "mode", [rounding_upward, flushing_denormals], ids=lambda mode: mode.__name__
)
@pytest.mark.parametrize("model", MODELS)
def test_floating_point_mode_of_the_caller(
    model: str, mode: Callable[[], contextlib.AbstractContextManager[None]]
) -> None:
    """Creates, syncs and steps under another floating-point mode than the contract's; the mode is
    restored after each call."""
    dtype, config = MODELS[model]
    weights = helpers.numpy_state_dict(config, dtype=dtype)
    want = base(model, "short")
    spec = rm.ModelSpec.from_hf(config)  # a rope's inverse frequencies are computed in Python
    with rm.Generator(spec, dtype=dtype, kv_cache_gib=0.02, threads=2, max_model_len=1160) as gen:
        with mode():
            gen.sync_weights(weights)
            outputs = together(gen, SHORT)
        assert_same(outputs, want)
    COMPARED["tests"] += 1


# ------------------------------------------------------------------------------- score and logits
@pytest.mark.quick(4)
@pytest.mark.parametrize("which", ["short", "long"])
@pytest.mark.parametrize("model", MODELS)
def test_generate_is_score(model: str, which: str) -> None:
    """.logprobs and .prompt_logprobs equal those of score, .sampling_logprobs those of score with
    the same params; cached or not."""
    load, outputs = SHORT if which == "short" else LONG, base(model, which)
    pairs = [
        (load.params[i], output, c) for i, output in enumerate(outputs) for c in output.outputs
    ]
    ids = [np.concatenate([output.prompt_token_ids, c.token_ids]) for _, output, c in pairs]
    with engine(model, enable_prefix_caching=True, max_num_batched_tokens=300, threads=2) as gen:
        for attempt in range(2):
            for (_, output, c), scores in zip(pairs, gen.score(ids)):
                want = np.concatenate([output.prompt_logprobs, c.logprobs])
                assert scores.tobytes() == want.tobytes(), (output.request_id, c.index, attempt)
                count("logprobs", scores)
        assert gen.metrics()["cached_tokens"] > 0
        params = [dataclasses.replace(p, min_tokens=0, n=1) for p, _, _ in pairs]
        for (p, output, c), scores in zip(pairs, gen.score(ids, params)):
            if p.min_tokens == 0:  # score does not know the bans of min_tokens
                sampled = scores[len(output.prompt_token_ids) - 1 :]
                assert sampled.tobytes() == c.sampling_logprobs.tobytes(), (
                    output.request_id,
                    c.index,
                )
                count("logprobs", sampled)
    COMPARED["tests"] += 1


@pytest.mark.parametrize("model", MODELS)
def test_logits(model: str) -> None:
    """Compares whole rows of logits over chunk sizes, page sizes, threads and batches; and their
    log-softmax, which defines a logprob."""
    ids = [*SHORT.prompts[8:14], LONG.prompts[1]]
    with engine(model) as gen:
        want = [gen.logits([x])[0] for x in ids]
        scores = gen.score(ids)
    for logits, x, score in zip(want, ids, scores):
        wide = logits[:-1].astype(np.float64)
        wide -= wide.max(axis=1, keepdims=True)
        logprobs = wide[np.arange(len(x) - 1), x[1:]] - np.log(np.exp(wide).sum(axis=1))
        assert np.abs(logprobs - score).max() < 1e-5 * (1 + np.abs(score).max())
    variants: list[dict[str, Any]] = [
        {"max_num_batched_tokens": 19},
        {"block_size": 64, "threads": 2},
        {"max_num_seqs": 2},
    ]
    for options in variants:
        with engine(model, **options) as gen:
            for a, b in zip(gen.logits(ids), want):
                assert a.tobytes() == b.tobytes()
                COMPARED["logits"] += a.size
    COMPARED["tests"] += 1


# -------------------------------------------------------------------------------------- the count
def test_a_million_logprobs(request: pytest.FixtureRequest) -> None:
    line = (
        f"invariance: {COMPARED['logprobs']:,} logprobs and {COMPARED['logits']:,} logits "
        "compared, 0 bits differ"
    )
    all_tests = len(MODELS) * (len(VARIANTS) + len(LONG_VARIANTS) + 5 + len(OTHERS)) + 2 * len(
        OTHERS
    )
    if COMPARED["tests"] != all_tests:
        pytest.skip(f"{COMPARED['tests']} of {all_tests} tests of this file passed in this run")
    request.config.stash[marks.SUMMARY].append(line)
    assert COMPARED["logprobs"] >= 1_000_000

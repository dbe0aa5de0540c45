"""Penalties, logit_bias, bad_words and allowed_token_ids of SamplingParams.

Input: rollouts of tiny random models. Oracle: vLLM's formulas (0.32: v1/sample,
update_from_tokenizer) in float32 NumPy over the rows of `logits`, from which ops.sample draws; the
same request alone, without a mesh. Bounds are 0.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import helpers
import numpy as np
import pytest
import test_detokenizer
import test_kept_tokens
from marks import full
from numpy.typing import NDArray

import rollmesh as rm
from rollmesh import ops
from rollmesh.request.logit_edits import logit_edits
from rollmesh.request.text import TextCodec

tokenizers = pytest.importorskip("tokenizers")

Params = rm.SamplingParams
VOCAB, SPACE = 151, 120
CONFIGS = {"dense": helpers.tiny_config(), "moe": helpers.tiny_config(moe=True)}
WEIGHTS = {
    (name, seed): helpers.numpy_state_dict(config, seed)
    for name, config in CONFIGS.items()
    for seed in (1, 2)
}


def letter(token: int) -> str:
    return " " if token == SPACE else chr(0x4E00 + token)


def make_tokenizer() -> Any:
    """Has a token for each of 120 characters and for the space, for a space and one of 29
    characters, and for a space and two of them."""
    vocab = {letter(i): i for i in range(SPACE + 1)} | {
        " " + letter(i): SPACE + 1 + i for i in range(29)
    }
    merges = [(" ", letter(i)) for i in range(29)] + [(" " + letter(0), letter(1))]
    return tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab | {" " + letter(0) + letter(1): VOCAB - 1}, merges)
    )


TOKENIZER = make_tokenizer()
COMMON = [*range(3, 140, 4)]
WORDS = [letter(i) for i in range(0, 120, 3)] + [
    letter(i) + letter(j) for i in range(1, 120, 3) for j in range(i % 2, 120, 2)
]
WAYS: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.7},
    "repetition wanted": {"repetition_penalty": 0.6, "temperature": 0.0},
    "frequency": {"frequency_penalty": 1.9, "temperature": 0.7, "n": 2},
    "presence": {"presence_penalty": -1.5, "top_p": 0.9},
    "penalties": {
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.7,
        "presence_penalty": 0.6,
        "n": 3,
        "top_k": 40,
        "logprobs": 2,
    },
    "bias": {"logit_bias": {7: 4.5, 11: -100.0, 150: 3.5}, "min_p": 0.01},
    "bias and penalties": {
        "logit_bias": {7: 9.0, 11: 9.0},
        "repetition_penalty": 2.5,
        "frequency_penalty": 0.5,
        "temperature": 0.0,
    },
    "allowed": {"allowed_token_ids": COMMON, "n": 2},
    "allowed and few": {
        "allowed_token_ids": COMMON[:5],
        "frequency_penalty": 2.0,
        "min_tokens": 4,
        "stop_token_ids": COMMON[:2],
    },
    "bad words": {"bad_words": WORDS, "n": 2},
    "bad words before": {
        "bad_words": WORDS[:60],
        "presence_penalty": 0.5,
        "min_tokens": 9,
        "stop_token_ids": [*range(0, 150, 2)],
    },
    "none": {"temperature": 0.9},
}
PARAMS = [
    Params(
        **{"max_tokens": 8 + 3 * i, "seed": 10 * i, "ignore_eos": True, "prompt_logprobs": 0, **way}
    )
    for i, way in enumerate(WAYS.values())
]
PROMPTS = [
    [*prompt, 7, 7, 11]
    for prompt in helpers.prompts(
        CONFIGS["dense"], [1, 20, 17, 33, 50, 4, 16, 2, 30, 31, 13, 5], seed=8
    )
]


def generator(model: str, **options: Any) -> rm.Generator:
    options = {
        "dtype": "float32",
        "threads": 1,
        "max_model_len": 128,
        "kv_cache_gib": 0.02,
        "enable_prefix_caching": False,
        **options,
    }
    gen = rm.Generator(rm.ModelSpec.from_hf(CONFIGS[model]), tokenizer=TOKENIZER, **options)
    gen.sync_weights(WEIGHTS[model, 1], cast=True, version=1)
    return gen


# -------------------------------------------------------------------------------- vLLM's formulas
def bad_word_ids(words: Any) -> list[list[int]]:
    ids: list[list[int]] = []
    for word in words or ():
        for prefix in ("", " "):
            these = TOKENIZER.encode(prefix + word.lstrip(), add_special_tokens=False).ids
            if not prefix or (these[0] != ids[-1][0] and len(these) == len(ids[-1])):
                ids.append(these)
    return ids


def edited(
    row: NDArray[np.float32], prompt: list[int], output: list[int], params: Params
) -> NDArray[np.float32]:
    """Returns a row of logits after vLLM's edits."""
    x = row.copy()
    if params.allowed_token_ids is not None:
        x[~np.isin(np.arange(len(x)), params.allowed_token_ids)] = -np.inf
    for word in bad_word_ids(params.bad_words):
        if len(word) <= len(output) + 1 and output[len(output) - len(word) + 1 :] == word[:-1]:
            x[word[-1]] = -np.inf
    if len(output) < params.min_tokens:
        x[list(params.stop_token_ids or ())] = -np.inf
    for token, bias in dict(params.logit_bias or {}).items():
        x[token] += np.float32(bias)
    counts = np.bincount(np.array(output, np.int64), minlength=len(x))
    seen = (counts > 0) | np.isin(np.arange(len(x)), prompt)
    repetition, frequency, presence = map(
        np.float32, (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
    )
    x[seen] = np.where(x[seen] > 0, x[seen] / repetition, x[seen] * repetition)
    x -= frequency * counts.astype(np.float32)
    x -= presence * (counts > 0).astype(np.float32)
    return x


def check(
    gen: rm.Generator,
    prompt: list[int],
    params: Params,
    sample: rm.CompletionOutput,
    only: Any = slice(None),
) -> int:
    """Compares a sample's draws with gen's weights with the oracle. Returns how many differ from
    the draws of the unedited row. A ban of −1, which is not a token, keeps ops.sample from
    computing the logprob from the stats."""
    assert params.seed is not None
    tokens = sample.token_ids.tolist()
    rows = gen.logits([prompt + tokens])[0][len(prompt) - 1 : -1]
    own = gen.score([prompt + tokens])[0][len(prompt) - 1 :]
    changed = 0
    for i in np.arange(len(tokens))[only].tolist():
        x = edited(rows[i], prompt, tokens[:i], params)
        own_draw = ops.SampleParams(
            temperature=params.temperature, top_p=params.top_p, min_p=params.min_p,
            top_k=params.top_k,
            seed=params.seed + sample.index, counter=len(prompt) + i, banned=[-1],
        )  # fmt: skip
        draw = dataclasses.replace(own_draw, banned=[-1, *np.flatnonzero(x == -np.inf).tolist()])
        stats = np.zeros((1, 2), np.float32)
        want, plain = ops.sample(x[None], stats, draw), ops.sample(rows[i : i + 1], stats, own_draw)
        assert tokens[i] == want.tokens[0], i
        assert sample.sampling_logprobs[i].tobytes() == want.sampling_logprobs[0].tobytes(), i
        assert sample.logprobs[i].tobytes() == own[i].tobytes(), "logprobs are the model's own"
        changed += int(plain.tokens[0] != tokens[i])
    return changed


def all_of(outputs: list[rm.RequestOutput]) -> list[bytes | None]:
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
    return [
        None if array is None else f"{array.shape}".encode() + array.tobytes() for array in arrays
    ]


def run(gen: rm.Generator) -> list[rm.RequestOutput]:
    return gen.generate(PROMPTS, PARAMS, use_tqdm=False)


# ---------------------------------------------------------------------------------- what is drawn
@pytest.mark.parametrize("model", CONFIGS)
def test_draws_are_from_logits_by_vllms_formulas(model: str) -> None:
    """All kinds of edits in one batch. Each changes some draw, and the prompts hold tokens that
    count and tokens that do not."""
    with generator(model) as gen:
        for name, prompt, params, output in zip(WAYS, PROMPTS, PARAMS, run(gen), strict=True):
            changed = sum(check(gen, prompt, params, sample) for sample in output.outputs)
            assert (changed > 0) == (name != "none"), name
            assert all(
                len(sample.token_ids) == params.max_tokens or params.min_tokens
                for sample in output.outputs
            )


def test_which_token_ids_a_bad_word_has() -> None:
    """Worked out by hand: also with a space before the word, even if that is one token and the word
    alone is two."""
    words = [letter(3), letter(40), " " + letter(5) + letter(6), letter(0) + letter(1)]
    made = logit_edits(Params(bad_words=words), TextCodec(TOKENIZER), VOCAB, ())
    assert made is not None
    assert made.banned.tolist() == [3, 40, SPACE + 1 + 3, VOCAB - 1]
    assert made.bad_words.tolist() == [SPACE, 40, 5, 6, SPACE + 1 + 5, 6, 0, 1]
    assert made.bad_word_ends.tolist() == [2, 4, 6, 8]


def test_a_bad_word_has_every_spelling() -> None:
    """A tokenizer of Llama 2's kind encodes a word with a space before it. Inside a text, the model
    can also generate it without the space, or with a space that is part of its first token."""
    tokenizer = test_detokenizer.llama()
    size = tokenizer.get_vocab_size()
    for word in ("red", " red", "  red"):
        made = logit_edits(Params(bad_words=[word]), TextCodec(tokenizer), size, ())
        assert made is not None
        ids = np.split(made.bad_words, made.bad_word_ends[:-1])
        spellings = {tuple(map(tokenizer.id_to_token, each.tolist())) for each in ids}
        assert spellings == {("▁r", "e", "d"), ("r", "e", "d"), ("▁", "▁r", "e", "d")}
    made = logit_edits(Params(bad_words=["x"]), TextCodec(tokenizer), size, ())
    assert made is not None
    assert made.banned.tolist() == [tokenizer.token_to_id("x")]
    made = logit_edits(Params(bad_words=["\n"]), TextCodec(tokenizer), size, ())
    assert made is not None
    assert made.banned.tolist() == [tokenizer.token_to_id("<0x0A>")]
    merged = test_detokenizer.llama(["(", "\n", "\n\n"], [("\n", "\n")])
    made = logit_edits(Params(bad_words=["\n"]), TextCodec(merged), merged.get_vocab_size(), ())
    assert made is not None
    assert made.banned.tolist() == [merged.token_to_id("\n")]


def test_a_bad_word_of_several_tokens_is_broken_off() -> None:
    """The ban applies after a beginning of the word in this sample's output; the prompt does not
    count."""
    free = Params(max_tokens=16, seed=3, temperature=0.0, ignore_eos=True)
    with generator("dense") as gen:
        tokens = gen.generate([PROMPTS[1]], free, use_tqdm=False)[0].outputs[0].token_ids.tolist()
        at = next(
            i
            for i in range(3, 14)
            if max(tokens[i : i + 3]) < SPACE and tokens[i : i + 3] not in (tokens[i - 1 : i + 2],)
        )
        word = "".join(map(letter, tokens[at : at + 3]))
        params = dataclasses.replace(free, bad_words=[word])
        broken = gen.generate([PROMPTS[1]], params, use_tqdm=False)[0].outputs[0]
        assert broken.token_ids[: at + 2].tolist() == tokens[: at + 2]
        assert broken.token_ids[at + 2] != tokens[at + 2]
        assert check(gen, PROMPTS[1], params, broken) >= 1
        begun = PROMPTS[1] + tokens[: at + 2]  # now the beginning stands in the prompt
        assert (
            gen.generate([begun], params, use_tqdm=False)[0].outputs[0].token_ids[0]
            == tokens[at + 2]
        )


def test_reported_logprobs_stay_the_models_own() -> None:
    """Also top_logprobs and ranks, which equal vLLM's raw_logprobs. sampling_logprobs equal its
    processed_logprobs."""
    with generator("dense") as gen:
        params = Params(
            max_tokens=4, temperature=0.0, logprobs=3, logit_bias={5: 80.0}, ignore_eos=True
        )
        sample = gen.generate([PROMPTS[0]], params, use_tqdm=False)[0].outputs[0]
        assert sample.token_ids.tolist() == [5] * 4
        assert sample.top_logprobs is not None
        own = gen.score([[*PROMPTS[0], 5, 5, 5, 5]])[0][len(PROMPTS[0]) - 1 :]
        assert sample.logprobs.tobytes() == own.tobytes()
        assert (sample.logprobs < sample.top_logprobs.logprobs[:, 0]).all()
        assert sample.sampling_logprobs.tolist() == [0.0] * 4


def test_a_neutral_setting_is_none() -> None:
    with generator("dense") as gen:
        free = Params(max_tokens=9, seed=3, ignore_eos=True)
        neutral = dataclasses.replace(
            free,
            repetition_penalty=1,
            presence_penalty=-0.0,
            logit_bias={},
            bad_words=[],
            frequency_penalty=0,
        )
        assert neutral == free
        every = dataclasses.replace(free, allowed_token_ids=range(VOCAB), logit_bias={3: 0.0})
        assert (
            all_of(gen.generate([PROMPTS[1]], every, use_tqdm=False))[:2]
            == all_of(gen.generate([PROMPTS[1]], free, use_tqdm=False))[:2]
        )


# ---------------------------------------------------------------------- ways that an output comes
OTHERS = test_kept_tokens.OTHERS | {
    isa: {"isa": isa} for isa in ops.available_isas() if isa != ops.best_isa()
}


@pytest.mark.quick(4)
@pytest.mark.parametrize("way", OTHERS)
def test_draws_are_the_same_in_any_batch_and_on_any_mesh(way: str) -> None:
    with generator("moe") as gen:
        want = all_of(
            [
                gen.generate([prompt], params, use_tqdm=False)[0]
                for prompt, params in zip(PROMPTS, PARAMS, strict=True)
            ]
        )
    with generator("moe", **OTHERS[way]) as gen:
        assert all_of(run(gen)) == want
        assert all_of(run(gen)) == want
        assert (gen.metrics()["preemptions"] > 0) == (way == "preempted")


def test_draws_are_the_same_by_every_call() -> None:
    async def streamed(gen: rm.Generator) -> list[rm.RequestOutput]:
        last = []
        for prompt, params in zip(PROMPTS, PARAMS, strict=True):
            async for output in gen.astream(prompt, params):
                kept = output
            last.append(kept)
        return last

    async def together(gen: rm.Generator) -> list[rm.RequestOutput]:
        return list(
            await asyncio.gather(
                *(
                    gen.agenerate(prompt, params)
                    for prompt, params in zip(PROMPTS, PARAMS, strict=True)
                )
            )
        )

    with generator("dense") as gen:
        want = all_of(run(gen))
        ids = gen.submit(PROMPTS, PARAMS)
        polled = {output.request_id: output for output in gen.poll(len(ids))}
        assert all_of([polled[request] for request in ids]) == want
        assert all_of(asyncio.run(together(gen))) == want
        assert all_of(asyncio.run(streamed(gen))) == want


@pytest.mark.parametrize("inflight", ["keep", "restart", full("abort")])
def test_draws_across_a_sync(inflight: Any) -> None:
    """Kept tokens stay counted, and a restarted request counts from the start."""
    params = Params(
        n=2,
        max_tokens=12,
        seed=3,
        frequency_penalty=1.5,
        repetition_penalty=1.3,
        bad_words=WORDS,
        ignore_eos=True,
    )
    with generator("dense") as old, generator("dense") as gen, generator("dense") as new:
        new.sync_weights(WEIGHTS["dense", 2], cast=True, version=2)
        gen.submit([PROMPTS[1]], params)
        for _ in range(5):
            gen.poll()
        gen.sync_weights(WEIGHTS["dense", 2], cast=True, version=2, inflight=inflight)
        for sample in gen.poll(1)[0].outputs:
            for which, version in ((old, 1), (new, 2)):
                check(which, PROMPTS[1], params, sample, sample.versions == version)
            assert (
                set(sample.versions.tolist())
                == {"keep": {1, 2}, "restart": {2}, "abort": {1}}[inflight]
            )


def test_score_takes_what_does_not_depend_on_the_output() -> None:
    params = Params(
        max_tokens=9,
        seed=3,
        temperature=0.7,
        top_k=30,
        logit_bias={7: 4.5, 9: -3.0},
        allowed_token_ids=range(100),
        ignore_eos=True,
    )
    with generator("dense") as gen:
        sample = gen.generate([PROMPTS[1]], params, use_tqdm=False)[0].outputs[0]
        scored = gen.score([[*PROMPTS[1], *sample.token_ids.tolist()], [5, 120, 7]], params)
        assert scored[0][len(PROMPTS[1]) - 1 :].tobytes() == sample.sampling_logprobs.tobytes()
        assert scored[1][0] == -np.inf
        for name, value in (
            ("presence_penalty", 0.5),
            ("frequency_penalty", 0.5),
            ("repetition_penalty", 1.5),
            ("bad_words", (letter(3),)),
        ):
            with pytest.raises(
                rm.RequestError,
                match=rf"{name}: expected none in score, got \(?'?{str(value).strip('(),')}"[:60],
            ):
                gen.score([[1, 2, 3]], Params(**{name: value}))


# --------------------------------------------------------------------------------------- refusals
@pytest.mark.filterwarnings("error")
def test_numbers_of_numpy_are_taken_without_a_warning() -> None:
    given = {
        "temperature": np.float16(0.5),
        "repetition_penalty": np.float16(2),
        "logit_bias": {np.uint8(3): np.float16(-4)},
    }
    assert Params(**given) == Params(temperature=0.5, repetition_penalty=2.0, logit_bias={3: -4.0})


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"presence_penalty": 2.1}, r"presence_penalty: expected a number in \[-2, 2\], got 2.1"),
        ({"presence_penalty": -1e-50}, "presence_penalty: expected 0 or at least"),
        (
            {"frequency_penalty": float("nan")},
            r"frequency_penalty: expected a number in \[-2, 2\], got nan",
        ),
        (
            {"frequency_penalty": True},
            r"frequency_penalty: expected a number in \[-2, 2\], got True",
        ),
        ({"repetition_penalty": 0.0}, "repetition_penalty: expected a finite float32 > 0, got 0.0"),
        (
            {"repetition_penalty": float("inf")},
            "repetition_penalty: expected a finite float32 > 0, got inf",
        ),
        (
            {"repetition_penalty": 1e-38},
            "repetition_penalty: expected at least 1.1754943508222875e-38, the smallest normal "
            "float",
        ),
        (
            {"repetition_penalty": np.float16("inf")},
            "repetition_penalty: expected a finite float32 > 0, got .*inf",
        ),
        (
            {"logit_bias": {3: np.float16("-inf")}},
            "logit_bias: expected a finite float32 for token 3, got .*-inf",
        ),
        ({"repetition_penalty": "1"}, "repetition_penalty: expected a finite float32 > 0, got '1'"),
        ({"logit_bias": 3}, "logit_bias: expected a dict of token ids and numbers, got 3"),
        ({"logit_bias": [3]}, r"logit_bias: expected a dict of token ids and numbers, got 3 in it"),
        ({"logit_bias": {"3": 1.0}}, "logit_bias: token id: expected an integer in .*, got '3'"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias: token id: expected an integer in .*, got -1"),
        (
            {"logit_bias": {3: float("-inf")}},
            "logit_bias: expected a finite float32 for token 3, got -inf",
        ),
        (
            {"logit_bias": {3: 1e39}},
            "logit_bias: expected a finite float32 for token 3, got 1e[+]39",
        ),
        (
            {"logit_bias": [(3, 1.0), (3, 2.0)]},
            "logit_bias: expected each token id once, got 3 twice",
        ),
        (
            {"bad_words": [""]},
            r"bad_words: expected a non-empty string or a sequence of them, got \[''\]",
        ),
        (
            {"bad_words": [3]},
            r"bad_words: expected a non-empty string or a sequence of them, got \[3\]",
        ),
        ({"bad_words": ["a", "\ud800"]}, "bad_words: expected text without half of a surrogate"),
        (
            {"stop": ["a", "b\udcff"]},
            r"stop: expected text without half of a surrogate pair, got 'b",
        ),
        (
            {"allowed_token_ids": []},
            "allowed_token_ids: expected at least one token id, or None, got none",
        ),
        (
            {"allowed_token_ids": [1.5]},
            "allowed_token_ids: token id: expected an integer in .*, got 1.5",
        ),
        (
            {"kept_tokens": True, "top_k": 3, "presence_penalty": 0.5},
            "kept_tokens=True: expected no presence_penalty, got 0.5; leave one",
        ),
        (
            {"kept_tokens": True, "top_k": 3, "allowed_token_ids": [5]},
            r"kept_tokens=True: expected no allowed_token_ids, got \(5,\)",
        ),
    ],
    ids=str,
)
def test_a_wrong_value_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(rm.RequestError, match=said):
        Params(**changes)


def test_what_only_the_generator_can_refuse() -> None:
    bare = rm.Generator(rm.ModelSpec.from_hf(CONFIGS["dense"]), eos_token_ids=[2], **helpers.SMALL)
    bare.sync_weights(WEIGHTS["dense", 1], cast=True)
    with bare, generator("dense") as gen:
        for which, changes, said in (
            (
                bare,
                {"bad_words": "abc"},
                r"bad_words: expected none, since the generator has no tokenizer, got \('abc',\)",
            ),
            (bare, {"logit_bias": {151: 1.0}}, r"logit_bias\[0\]: expected 0 to 150, got 151"),
            (
                bare,
                {"allowed_token_ids": [0, 151]},
                r"allowed_token_ids: expected token ids in \[0, 151\), got 151",
            ),
            (
                bare,
                {"allowed_token_ids": [2, 3], "stop_token_ids": [3], "min_tokens": 1},
                "may be drawn before min_tokens=1, got none",
            ),
            (
                bare,
                {"logit_bias": {3: 1.0}, "stop_token_ids": [151], "min_tokens": 1},
                r"stop_token_ids\[0\]: expected 0 to 150, got 151",
            ),
            (
                gen,
                {"allowed_token_ids": [3], "bad_words": letter(3)},
                "expected a token that may be drawn, got none",
            ),
            (
                gen,
                {"bad_words": ["\u0100"]},
                "bad_words: expected words of at least one token, got 'Ā'",
            ),
        ):
            with pytest.raises(rm.RequestError, match=said):
                which.generate([[1, 2, 3]], Params(max_tokens=2, **changes), use_tqdm=False)
        everything = Params(
            max_tokens=9, allowed_token_ids=[3], bad_words=letter(3) * 3, ignore_eos=True
        )
        error = gen.generate([[1, 2]], everything, use_tqdm=False, on_error="return")[0].error
        assert isinstance(error, rm.NumericsError)
        assert (
            "position 3: all tokens are banned, or logits with a bias or penalty are not finite"
            in str(error)
        )

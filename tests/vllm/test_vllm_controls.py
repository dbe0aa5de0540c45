"""vLLM's controls that edit logits before the draw, through a running engine: penalties, biases,
bans, grammars.

Input: requests with one control or several, greedy and seeded, all in one batch that is chunked and
preempted. Oracle: the rows of rm.Generator.logits for the whole text, edited by the control's
definition (NumPy, here), and the draw of the sample op at that length of the text. Bound: every
token equal, logprobs the model's own, bit for bit. test_vllm_host compares the editing itself with
vLLM's sampler; this file tests whether the right rows are used for each request."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np
import pytest
import vllm_support as support

from rollmesh import ops
from rollmesh.vllm.trainer import WeightSender

pytest.importorskip("vllm", reason="needs vLLM")
pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

VOCAB, EOS = 300, 299
ENGINES = {
    "uniproc-async-v2": ("moe", "bfloat16", {"v2": True}),
    "uniproc-sync-v1": ("dense", "float32", {"async_scheduling": False}),
    "tp2": ("moe", "float32", {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}),
}
Row = np.ndarray[Any, Any]
# (a row of logits to edit in place, the prompt, the output so far)
Edit = Callable[[Row, list[int], list[int]], None]


def tokenizer(folder: Path) -> str:
    """A tokenizer whose first 256 ids are bytes, so that grammars see their text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # ByteLevel's spelling of bytes.
    shown, others = ({*range(33, 127), *range(161, 173), *range(174, 256)}, iter(range(256, 512)))
    words = {chr(byte if byte in shown else next(others)): byte for byte in range(256)} | {
        f"<{i}>": i for i in range(256, VOCAB)
    }
    made = Tokenizer(models.BPE(vocab=words, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token=f"<{EOS}>").save_pretrained(
        str(folder)
    )
    return str(folder)


class Served:
    def __init__(self, llm: Any, model: str, dtype: str):
        self.llm, self.oracle = llm, support.Oracle(model, dtype)
        weights = support.weights_of(model, dtype, 1)
        WeightSender(llm).send(weights, 1)
        self.oracle.serve(weights)

    def generate(self, prompts: list[list[int]], params: list[Any]) -> list[Any]:
        outputs = self.llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
        )
        return [output.outputs[0] for output in outputs]

    def hold(self, prompts: list[list[int]], params: list[Any], edits: list[Edit]) -> None:
        for prompt, chosen, edit, sample in zip(
            prompts, params, edits, self.generate(prompts, params), strict=True
        ):
            tokens = list(sample.token_ids)
            rows = self.oracle.generator.logits([prompt + tokens])[0][len(prompt) - 1 : -1]
            scores = self.oracle.generator.score([prompt + tokens])[0][len(prompt) - 1 :]
            got = [
                support.vllm_position(position)[token]
                for position, token in zip(sample.logprobs, tokens, strict=True)
            ]
            assert [word for word, _ in got] == support.bits(scores)
            assert [rank for _, rank in got] == [
                1 + int((row > row[token]).sum()) for row, token in zip(rows, tokens, strict=True)
            ]
            for i, (row, token) in enumerate(zip(rows, tokens, strict=True)):
                edited = row.copy()
                edit(edited, prompt, tokens[:i])
                assert token == drawn(edited, chosen, len(prompt) + i), (
                    f"token {i} of {tokens} after a prompt of {len(prompt)}, {chosen}"
                )


def drawn(row: Row, params: Any, length: int) -> int:
    if params.temperature == 0.0:
        return int(row.argmax())
    how = ops.SampleParams(
        params.temperature, params.top_p, params.min_p, params.top_k or -1, params.seed, length
    )
    # These do not affect the token.
    stats = np.array([[row.max(), np.exp(row - row.max()).sum()]], np.float32)
    return int(ops.sample(row[None], stats, how).tokens[0])


@pytest.fixture(scope="module", params=ENGINES)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    model, dtype, changes = ENGINES[request.param]
    support.need_protocol(changes.get("v2", False))
    at = tmp_path_factory.mktemp("vllm")
    words = {
        "skip_tokenizer_init": False,
        "tokenizer": tokenizer(at / "tokenizer"),
        "num_gpu_blocks_override": 16,
    }
    words["structured_outputs_config"] = {"backend": "xgrammar", "disable_any_whitespace": True}
    with support.engine(at, model, dtype, **words, **changes) as llm:
        served = Served(llm, model, dtype)
        try:
            yield served
        finally:
            served.oracle.close()


# -------------------------------------------------------------------------------- the definitions
def nothing(row: Row, prompt: list[int], output: list[int]) -> None:
    pass


def repetition(by: float) -> Edit:
    def edit(row: Row, prompt: list[int], output: list[int]) -> None:
        seen = sorted({*prompt, *output})
        row[seen] = np.where(
            row[seen] > 0, row[seen] * (np.float32(1) / np.float32(by)), row[seen] * np.float32(by)
        )

    return edit


def frequency(by: float) -> Edit:
    def edit(row: Row, prompt: list[int], output: list[int]) -> None:
        row -= np.float32(by) * np.bincount(output, minlength=VOCAB).astype(np.float32)

    return edit


def presence(by: float) -> Edit:
    def edit(row: Row, prompt: list[int], output: list[int]) -> None:
        row[sorted(set(output))] -= np.float32(by)

    return edit


def bias(by: dict[int, float]) -> Edit:
    def edit(row: Row, prompt: list[int], output: list[int]) -> None:
        for token, value in by.items():
            row[token] += np.float32(value)

    return edit


def allowed(ids: list[int]) -> Edit:
    def edit(row: Row, prompt: list[int], output: list[int]) -> None:
        row[np.setdiff1d(np.arange(VOCAB), ids)] = -np.inf

    return edit


def banned(ids: list[int], until: int) -> Edit:
    def edit(row: Row, prompt: list[int], output: list[int]) -> None:
        if len(output) < until:
            row[ids] = -np.inf

    return edit


def bad_words(words: list[str]) -> Edit:
    spelled = [list(word.encode()) for word in words]

    def edit(row: Row, prompt: list[int], output: list[int]) -> None:
        for word in spelled:
            if output[len(output) - len(word) + 1 :] == word[:-1] and len(output) >= len(word) - 1:
                row[word[-1]] = -np.inf

    return edit


def spelling(allowed_at: list[str]) -> Edit:
    """Returns a regular expression of a fixed length, as the allowed characters of each place; then
    the end."""

    def edit(row: Row, prompt: list[int], output: list[int]) -> None:
        may = list(allowed_at[len(output)].encode()) if len(output) < len(allowed_at) else [EOS]
        row[np.setdiff1d(np.arange(VOCAB), may)] = -np.inf

    return edit


def both(*edits: Edit) -> Edit:
    def edit(row: Row, prompt: list[int], output: list[int]) -> None:
        for one in edits:
            one(row, prompt, output)

    return edit


COMMON = list(range(0, 256, 3))
LETTERS = "".join(map(chr, range(97, 123)))
CONTROLS: dict[str, tuple[dict[str, Any], Edit]] = {
    "none": ({}, nothing),
    "repetition": ({"repetition_penalty": 1.4}, repetition(1.4)),
    "repetition wanted": ({"repetition_penalty": 0.7}, repetition(0.7)),
    "frequency": ({"frequency_penalty": 0.9}, frequency(0.9)),
    "presence": ({"presence_penalty": -1.5}, presence(-1.5)),
    "penalties": (
        {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.6},
        both(repetition(1.2), frequency(0.3), presence(0.6)),
    ),
    "bias": ({"logit_bias": {7: 4.0, 11: -100.0, 250: 3.5}}, bias({7: 4.0, 11: -100.0, 250: 3.5})),
    "allowed": ({"allowed_token_ids": COMMON}, allowed(COMMON)),
    "allowed and penalized": (
        {"allowed_token_ids": COMMON[:5], "frequency_penalty": 1.0},
        both(allowed(COMMON[:5]), frequency(1.0)),
    ),
    "min_tokens": (
        {"min_tokens": 9, "stop_token_ids": list(range(150)), "ignore_eos": False},
        banned([*range(150), EOS], 9),
    ),
    "bad words": ({"bad_words": [*LETTERS, "AB", "%&"]}, bad_words([*LETTERS, "AB", "%&"])),
}
WAYS = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 30},
    {"temperature": 1.2, "min_p": 0.02},
)


def params_of(words: dict[str, Any], **more: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        **{"max_tokens": 14, "logprobs": 0, "ignore_eos": True, "detokenize": True} | more | words
    )


@pytest.mark.parametrize(
    "way", WAYS, ids=lambda way: "-".join(f"{key}={value}" for key, value in way.items())
)
def test_controls_of_every_kind_at_once(served: Served, way: dict[str, Any]) -> None:
    rng = np.random.default_rng(len(way))
    prompts = [rng.integers(0, 256, int(rng.integers(1, 70))).tolist() for _ in CONTROLS]
    params = [params_of(words, seed=i, **way) for i, (words, _) in enumerate(CONTROLS.values())]
    served.hold(prompts, params, [edit for _, edit in CONTROLS.values()])


def test_controls_under_preemption(served: Served) -> None:
    """The output so far comes back with the request."""
    chosen = [
        CONTROLS[name]
        for name in ("penalties", "repetition", "frequency", "presence", "none", "bias")
    ]
    prompts = [[40 + i] * 12 for i in range(len(chosen))]
    params = [
        params_of(words, seed=i, temperature=[0.0, 1.0][i % 2], max_tokens=80)
        for i, (words, _) in enumerate(chosen)
    ]
    served.hold(prompts, params, [edit for _, edit in chosen])


@pytest.mark.parametrize("way", WAYS[:2], ids=["greedy", "seeded"])
def test_tokens_that_verl_forbids(served: Served, way: dict[str, Any]) -> None:
    """verl replaces the model's compute_logits by a function that sets the ids that its tokenizer
    lacks to -inf. They are never drawn, by either sampler and with any other bans; logprobs stay
    the model's own."""
    from vllm.sampling_params import StructuredOutputsParams

    if served.llm.llm_engine.vllm_config.parallel_config.world_size > 1:
        pytest.skip("the model is reached in a worker of this process")
    model, forbidden = support.worker_of(served.llm).get_model(), [*range(40, 60), *range(256, EOS)]
    prompts = [[3 + i] * (1 + 5 * i) for i in range(len(CONTROLS))]
    params = [params_of(words, seed=i, **way) for i, (words, _) in enumerate(CONTROLS.values())]
    before = [set(sample.token_ids) & set(forbidden) for sample in served.generate(prompts, params)]
    compute = model.compute_logits

    def compute_logits(self: Any, *args: Any, **options: Any) -> Any:
        logits = compute(*args, **options)
        logits[..., forbidden] = -np.inf
        return logits

    model.compute_logits = MethodType(compute_logits, model)
    try:
        served.hold(
            prompts, params, [both(edit, banned(forbidden, 99)) for _, edit in CONTROLS.values()]
        )
        after = [
            set(sample.token_ids) & set(forbidden) for sample in served.generate(prompts, params)
        ]
        ends = {
            "structured_outputs": StructuredOutputsParams(regex="[()]?"),
            "min_tokens": 3,
            "ignore_eos": False,
        }
        (sample,) = served.generate([[1, 2, 3]], [params_of(ends, seed=0, **way)])
        # The grammar allows only this token, so min_tokens does not ban it.
        assert list(sample.token_ids) == [EOS]
    finally:
        model.compute_logits = compute
    assert sum(map(bool, before)) >= 3
    assert not any(after)


def test_a_control_and_the_end_of_a_sequence(served: Served) -> None:
    """When the ban ends, the stop token is allowed, and vLLM detects it."""
    (words, _) = CONTROLS["min_tokens"]
    (sample,) = served.generate([[1, 2, 3]], [params_of(words | {"max_tokens": 60}, seed=0)])
    assert sample.finish_reason == "stop"
    assert len(sample.token_ids) > 9


def structured(**how: Any) -> dict[str, Any]:
    pytest.importorskip("lmformatenforcer", reason="vLLM imports it for any grammar")
    from vllm.sampling_params import StructuredOutputsParams

    return {
        "structured_outputs": StructuredOutputsParams(**how),
        "ignore_eos": False,
        "max_tokens": 40,
    }


@pytest.mark.parametrize("way", WAYS[:2], ids=["greedy", "seeded"])
def test_grammars(served: Served, way: dict[str, Any]) -> None:
    """Beside requests without a grammar; one has a penalty as well."""
    words = structured(regex="[ab]{3}[0-9]{2}")
    spelled = spelling(["ab"] * 3 + ["0123456789"] * 2)
    edits = [spelled, nothing, both(spelled, frequency(2.0)), nothing]
    params = [
      params_of(words, seed=1, **way), params_of({}, seed=2, **way),
      params_of(words | {"frequency_penalty": 2.0}, seed=3, **way),
      params_of({}, seed=4, **way),
  ]  # fmt: skip
    served.hold([[1], [2] * 40, [3] * 20, [4]], params, edits)


def test_grammars_that_only_a_parser_knows(served: Served) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"enum": [1, 22]}},
        "required": ["a", "b"],
    }
    wanted = [
        structured(json=schema),
        structured(choice=["left", "right"]),
        structured(regex="x+y?z"),
    ]
    samples = served.generate(
        [[5], [6], [7]], [params_of(words, seed=i) for i, words in enumerate(wanted)]
    )
    read = json.loads(samples[0].text)
    assert isinstance(read["a"], bool)
    assert read["b"] in (1, 22)
    assert samples[1].text in ("left", "right")
    assert re.fullmatch("x+y?z", samples[2].text) or samples[2].finish_reason == "length"
    assert samples[1].finish_reason == "stop"


@pytest.mark.parametrize("v2", [False, True], ids=["v1", "v2"])
@pytest.mark.parametrize("model", ["dense", "moe"])
def test_logprobs_of_the_distribution_drawn_from(model: str, v2: bool, tmp_path: Path) -> None:
    """logprobs_mode="processed_logprobs", which TRL sets, equals Generator's .sampling_logprobs. A
    greedy draw has logprob 0."""
    support.need_protocol(v2)
    oracle = support.Oracle(model, "bfloat16", processed=True)
    try:
        with support.engine(
            tmp_path,
            model,
            "bfloat16",
            v2,
            logprobs_mode="processed_logprobs",
            num_gpu_blocks_override=16,
        ) as llm:
            weights = support.weights_of(model, "bfloat16")
            support.load(llm, weights)
            oracle.serve(weights)
            for seed in range(4):
                requests = support.drawn(model, seed)
                got, want = support.generate(llm, requests), oracle.answers(requests)
                support.agree(support.without_ranks(got), support.without_ranks(want))
    finally:
        oracle.close()

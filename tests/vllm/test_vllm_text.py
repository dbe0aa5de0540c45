"""Texts, stop strings and streams beside vLLM's front end, request by request.

A generator says random text (text_models.py). Its tokens go one by one through check_stop of vLLM's
scheduler and vLLM's OutputProcessor. Oracle: what vLLM returns after each token, as a whole for
generate and in deltas for astream. Compared are the text, the tokens, the finish and stop reason,
and every text that astream returns while a sample runs. Settings are random, and stop strings are
pieces of what the model says. Bound: no difference but those of docs/from_vllm.md.

    RM_TEXT_REQUESTS   requests for each kind of tokenizer (1000)
    RM_TEXT_SEED       (0)
"""

from __future__ import annotations

import asyncio
import os
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import text_models

import rollmesh as rm

os.environ.setdefault("VLLM_PLUGINS", "rollmesh")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
pytest.importorskip("vllm", reason="needs vLLM")
pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

with warnings.catch_warnings():  # which are errors here, and vLLM's own
    warnings.simplefilter("ignore")
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.tokenizers.hf import get_cached_tokenizer
    from vllm.v1.core.sched.utils import check_stop
    from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
    from vllm.v1.engine.output_processor import OutputProcessor
    from vllm.v1.request import Request

NUM_REQUESTS = int(os.environ.get("RM_TEXT_REQUESTS", "1000"))
SEED = int(os.environ.get("RM_TEXT_SEED", "0"))
PARTS = [(kind, raw) for kind in text_models.KINDS for raw in (False, True)][:-1]  # no raw slow one
Settings = dict[str, Any]


@dataclass(frozen=True)
class Sample:
    """texts: the text after each number of tokens, while the sample runs."""

    text: str
    tokens: list[int]
    end: tuple[str | None, int | str | None]
    texts: dict[int, str] = field(default_factory=dict)
    num_kept: int | None = None  # vLLM only: tokens before its decoder dropped text


class FrontEnd:
    """vLLM between the engine's tokens and the user."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._processor = OutputProcessor(get_cached_tokenizer(tokenizer), log_stats=False)

    def reads(
        self,
        prompt: Sequence[int],
        tokens: Sequence[int],
        settings: Settings,
        kind: RequestOutputKind = RequestOutputKind.CUMULATIVE,
    ) -> Sample:
        """A sample whose tokens come from the engine. It is aborted if they do not end it."""
        params = SamplingParams(**{**settings, "n": 1}, output_kind=kind)
        params.update_from_generation_config({}, self._tokenizer.eos_token_id)
        given = EngineCoreRequest(
            "0", list(prompt), None, params, None, 0.0, None, None, None, external_req_id="0"
        )
        request = Request.from_engine_core_request(given, None)
        self._processor.add_request(given, None)
        state: Any = self._processor.request_states["0"]
        decoder, num_kept = getattr(state.detokenizer, "stream", None), None
        texts = {0: ""}
        for count, token in enumerate(tokens, 1):
            request.append_output_token_ids(token)
            check_stop(request, text_models.MAX_MODEL_LEN)
            why, reason = request.get_finished_reason(), request.stop_reason
            made = EngineCoreOutput("0", [token], finish_reason=why, stop_reason=reason)
            [output] = self._processor.process_outputs([made]).request_outputs
            if num_kept is None and getattr(state.detokenizer, "stream", None) is not decoder:
                num_kept = count - 1
            if output.finished:
                break
            texts[count] = texts[count - 1] * (kind == RequestOutputKind.DELTA)
            texts[count] += output.outputs[0].text
        else:
            output = state.make_request_output([], None, FinishReason.ABORT, None)
            self._processor.abort_requests(["0"], internal=True)
        [sample] = output.outputs
        before = list(texts.values())[-1] if kind == RequestOutputKind.DELTA else ""
        end = sample.finish_reason, sample.stop_reason
        return Sample(before + sample.text, request.output_token_ids[:], end, texts, num_kept)

    def is_apart(self, prompt: Sequence[int], tokens: Sequence[int], settings: Settings) -> bool:
        """Returns whether vLLM is known to differ: the prompt ends inside a character; or a
        tokenizer in Python has added tokens, around which vLLM puts spaces, ids without a token,
        which split a character, or a prompt whose last tokens have no text, before which vLLM reads
        none."""
        tokenizer, skips = self._tokenizer, settings["skip_special_tokens"]
        if tokenizer.decode(prompt, skip_special_tokens=skips).endswith("\ufffd"):
            return True
        if tokenizer.is_fast:
            return False
        ids = {*prompt, *tokens}.difference(tokenizer.all_special_ids if skips else ())
        last = tokenizer.decode(prompt[-5:], skip_special_tokens=skips)
        has_added = not ids.isdisjoint(tokenizer.added_tokens_decoder)
        return not last or has_added or max(ids) >= len(tokenizer)


# ------------------------------------------------------------------------------------- requests
def some_prompt(rng: np.random.Generator, tokenizer: Any) -> str | list[int]:
    """Returns text, its ids, ids that end inside a character, any ids, or one id repeated."""
    line = text_models.CORPUS[rng.integers(len(text_models.CORPUS))]
    begin = int(rng.integers(len(line)))
    text = line[begin : begin + int(rng.integers(1, 20))]
    ids = text_models.ids_of(tokenizer, text)
    kind = rng.integers(5)
    if kind == 0 and ids:
        return text
    ids = ids or [0]
    if kind == 1:
        return ids
    if kind == 2:
        return ids[: int(rng.integers(1, len(ids) + 1))]
    most = len(tokenizer) + text_models.PADDING * tokenizer.is_fast  # else vLLM's IndexError
    if kind == 3:
        return [int(token) for token in rng.integers(0, most, int(rng.integers(1, 10)))]
    again = rng.choice([*tokenizer.all_special_ids, *rng.integers(0, most, 4)])
    return ids + [int(again)] * int(rng.integers(1, 100))


def some_settings(rng: np.random.Generator, vocab_size: int) -> Settings:
    """Draws all settings that do not depend on the text. With few allowed tokens, samples have long
    runs of bytes, of spaces or of tokens without text."""
    max_tokens = int(rng.integers(1, 100 if rng.random() < 0.1 else 33))
    few = rng.choice(vocab_size, int(rng.integers(3, 30)), replace=False).tolist()
    return {
        "allowed_token_ids": few if rng.random() < 0.1 else None,
        "temperature": float(rng.choice([0.7, 1.0, 1.5])),
        "seed": int(rng.integers(1 << 40)),
        "n": int(rng.choice([1, 1, 1, 1, 2, 3])),
        "max_tokens": max_tokens,
        "min_tokens": int(rng.integers(0, max_tokens + 1)) if rng.random() < 0.3 else 0,
        "ignore_eos": bool(rng.random() < 0.5),
        "skip_special_tokens": bool(rng.random() < 0.7),
        "include_stop_str_in_output": bool(rng.random() < 0.3),
    }


def some_stops(rng: np.random.Generator, text: str) -> list[str]:
    """Pieces of a text, pieces of these, and strings that do not occur. Some overlap."""
    stops = ["never"] if rng.random() < 0.1 else []
    for _ in range(int(rng.integers(1, 4)) if text else 0):
        begin = int(rng.integers(len(text)))
        stops.append(text[begin : begin + int(rng.choice([1, 2, 3, 4, 5, 6, 12, 30]))])
        if rng.random() < 0.2:
            stops.append(stops[-1][int(rng.integers(len(stops[-1]))) :])
        if rng.random() < 0.2:
            stops.append(text[max(0, begin - 2) : begin + 2])
    return stops


def generated(
    made: rm.Generator, prompts: Sequence[Any], settings: Sequence[Settings]
) -> list[rm.RequestOutput]:
    params = [rm.SamplingParams(**each) for each in settings]
    return made.generate(list(prompts), params, use_tqdm=False)


def streamed(
    made: rm.Generator, prompts: Sequence[Any], settings: Sequence[Settings]
) -> list[list[Sample]]:
    """Returns the samples of each request by astream, all at once, with every returned text."""

    async def one(prompt: Any, params: rm.SamplingParams) -> list[Sample]:
        texts: list[dict[int, str]] = [{} for _ in range(params.n)]
        async for output in made.astream(prompt, params):
            for sample in output.outputs:
                if sample.finish_reason is None:
                    texts[sample.index][len(sample.token_ids)] = sample.text
        return [replace(ours(sample), texts=texts[sample.index]) for sample in output.outputs]

    async def every() -> list[list[Sample]]:
        pairs = zip(prompts, settings, strict=True)
        return await asyncio.gather(*(one(p, rm.SamplingParams(**each)) for p, each in pairs))

    return asyncio.run(every())


def ours(sample: rm.CompletionOutput) -> Sample:
    end = sample.finish_reason, sample.stop_reason
    return Sample(sample.text, sample.token_ids.tolist(), end)


def some_requests(
    rng: np.random.Generator, made: rm.Generator, tokenizer: Any, front: FrontEnd, count: int
) -> tuple[list[Any], list[Settings], list[rm.RequestOutput]]:
    """Returns prompts, settings, and the model's text without stop strings."""
    prompts = [some_prompt(rng, tokenizer) for _ in range(count)]
    settings = [some_settings(rng, made.spec.vocab_size) for _ in range(count)]
    for each, output in zip(settings, generated(made, prompts, settings), strict=True):
        if rng.random() < 0.2 and each["allowed_token_ids"] is None:
            tokens = output.outputs[0].token_ids
            each["stop_token_ids"] = [int(token) for token in rng.choice(tokens, 2)]
    whole = generated(made, prompts, settings)
    for each, output in zip(settings, whole, strict=True):
        if rng.random() < 0.8:
            prompt, tokens = output.prompt_token_ids.tolist(), output.outputs[-1].token_ids
            each["stop"] = some_stops(rng, front.reads(prompt, tokens.tolist(), each).text)
    return prompts, settings, whole


# ----------------------------------------------------------------------------------- comparison
def differences(got: Sample, wanted: Sample) -> Iterator[str]:
    """Compares up to the place where vLLM drops text."""
    if wanted.num_kept is None:
        for name in ("tokens", "end", "text"):
            if getattr(got, name) != getattr(wanted, name):
                yield f"{name}: expected {getattr(wanted, name)!r}, got {getattr(got, name)!r}"
    for count, text in got.texts.items():
        is_kept = wanted.num_kept is None or count <= wanted.num_kept
        if is_kept and text != wanted.texts.get(count):
            yield f"text of {count} tokens: expected {wanted.texts.get(count)!r}, got {text!r}"


def shrunk(got: Sample) -> Iterator[str]:
    """Returns texts that are not a beginning of the final text."""
    for text in got.texts.values():
        if not got.text.startswith(text):
            yield f"text: expected the beginning of {got.text!r}, got {text!r}"


@pytest.mark.parametrize("kind, is_raw", PARTS)
def test_texts_are_vllms(kind: str, is_raw: bool, tmp_path: Path) -> None:
    """is_raw: rollmesh has the tokenizers.Tokenizer of transformers' tokenizer."""
    tokenizer = text_models.KINDS[kind](tmp_path)
    front, rng = FrontEnd(tokenizer), np.random.default_rng([SEED, is_raw, *kind.encode()])
    count = NUM_REQUESTS // 2
    given = tokenizer.backend_tokenizer if is_raw else tokenizer
    with text_models.speaker(tokenizer, given) as made:
        prompts, settings, whole = some_requests(rng, made, tokenizer, front, count)
        got, flows = generated(made, prompts, settings), streamed(made, prompts, settings)
    wrong, seen = list[str](), Counter[str]()
    for each, said, one, flow in zip(settings, whole, got, flows, strict=True):
        prompt = said.prompt_token_ids.tolist()
        for at, sample in enumerate(said.outputs):
            tokens = sample.token_ids.tolist()
            theirs = front.reads(prompt, tokens, each)
            deltas = front.reads(prompt, tokens, each, RequestOutputKind.DELTA)
            found = list(shrunk(flow[at]))
            if not front.is_apart(prompt, tokens, each):
                found += [f"generate {what}" for what in differences(ours(one.outputs[at]), theirs)]
                found += [f"astream {what}" for what in differences(flow[at], deltas)]
                seen.update(whole=theirs.num_kept is None, texts=len(flow[at].texts))
            seen.update(samples=1, stopped=isinstance(theirs.end[1], str))
            wrong += [f"{what} for {prompt} and {each}" for what in found]
    told = f"RM_TEXT_SEED={SEED} RM_TEXT_REQUESTS={NUM_REQUESTS} {dict(seen)}"
    assert not wrong, f"{told}: {len(wrong)} differences\n" + "\n".join(wrong[:20])
    assert seen["whole"] > 0.5 * seen["samples"], told
    assert seen["stopped"] > 0.3 * seen["samples"], told


def test_an_aborted_sample_has_vllms_text(tmp_path: Path) -> None:
    """An aborted sample has all text so far, without a partial character."""
    tokenizer, rng = text_models.metaspace(tmp_path), np.random.default_rng([SEED, 1])
    front, wrong, num_aborted = FrontEnd(tokenizer), list[str](), 0
    with text_models.speaker(tokenizer, tokenizer) as made:
        prompts, settings, _ = some_requests(rng, made, tokenizer, front, 100)
        ids = made.submit(prompts, [rm.SamplingParams(**each) for each in settings])
        outputs = made.poll(min_outputs=40)
        made.abort()
        outputs += made.poll(min_outputs=100 - len(outputs))
    for output in outputs:
        each, prompt = settings[ids.index(output.request_id)], output.prompt_token_ids.tolist()
        for got in map(ours, output.outputs):
            wanted = front.reads(prompt, got.tokens, each)
            if not front.is_apart(prompt, got.tokens, each):
                wrong += [f"{what} for {prompt} and {each}" for what in differences(got, wanted)]
                num_aborted += wanted.end[0] == "abort"
    assert not wrong, "\n".join(wrong)
    assert num_aborted > 10

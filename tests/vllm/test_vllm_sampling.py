"""vLLM's SamplingParams, field by field: each field is implemented, or refused by its name when the
request arrives.

Oracles: vLLM's own list of fields, rollmesh's SamplingParams with the same values, vLLM's own
translation of errors into HTTP."""

from __future__ import annotations

import os
import warnings
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import vllm_support as support

import rollmesh as rm
from rollmesh.request.requests import EngineRequest

os.environ.setdefault("VLLM_PLUGINS", "rollmesh")
pytest.importorskip("vllm", reason="needs vLLM")
pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

with warnings.catch_warnings():  # which are errors here, and vLLM's own
    warnings.simplefilter("ignore")
    from vllm import PoolingParams, SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
    from vllm.platforms import current_platform
    from vllm.sampling_params import StructuredOutputsParams

    from rollmesh.vllm.worker import sampling


class By(Enum):
    """The C engine, external_edits.py, vLLM's front end or scheduler, nobody."""

    ENGINE, EDITS, VLLM, REFUSED = range(4)


WHO = {
    "n": By.VLLM,  # each sample is a separate request, with seed + i
    "presence_penalty": By.EDITS,
    "frequency_penalty": By.EDITS,
    "repetition_penalty": By.EDITS,
    "temperature": By.ENGINE,
    "watermarking": By.REFUSED,
    "top_p": By.ENGINE,
    "top_k": By.ENGINE,
    "min_p": By.ENGINE,
    "seed": By.ENGINE,
    "stop": By.VLLM,
    "stop_token_ids": By.VLLM,  # except for min_tokens, see _all_stop_token_ids
    "ignore_eos": By.VLLM,
    "max_tokens": By.VLLM,  # the engine also reserves room for it
    "min_tokens": By.ENGINE,
    "logprobs": By.ENGINE,
    "prompt_logprobs": By.ENGINE,
    "prompt_logprob_token_ids": By.REFUSED,
    "prompt_logprob_start": By.REFUSED,
    "logprob_token_ids": By.REFUSED,
    "flat_logprobs": By.VLLM,
    "detokenize": By.VLLM,
    "skip_special_tokens": By.VLLM,
    "spaces_between_special_tokens": By.VLLM,
    "include_stop_str_in_output": By.VLLM,
    "output_kind": By.VLLM,
    "stream_interval": By.VLLM,
    "skip_clone": By.VLLM,
    "output_text_buffer_length": By.VLLM,
    "_eos_token_id": By.VLLM,
    "_all_stop_token_ids": By.ENGINE,  # not drawn before min_tokens
    "_watermarking_skipped": By.VLLM,
    "structured_outputs": By.EDITS,
    "logit_bias": By.EDITS,
    "allowed_token_ids": By.EDITS,
    "extra_args": By.EDITS,  # for the user's own logits processors
    "bad_words": By.EDITS,
    "_bad_words_token_ids": By.EDITS,
    "skip_reading_prefix_cache": By.VLLM,
    "thinking_token_budget": By.REFUSED,
    "repetition_detection": By.VLLM,
    "routed_experts_prompt_start": By.ENGINE,
    "trace_decode_token_ids": By.REFUSED,
}


def test_every_field_of_sampling_params_has_somebody() -> None:
    """A field that a later vLLM adds fails here until it is handled."""
    assert set(WHO) == set(SamplingParams.__struct_fields__)
    assert {name for name, by in WHO.items() if by is By.REFUSED} == set(sampling._REFUSED)


@pytest.mark.parametrize(
    "field, value",
    [
        ("watermarking", True),
        ("prompt_logprob_token_ids", [[1]]),
        ("prompt_logprob_start", 0),
        ("logprob_token_ids", [3]),
        ("thinking_token_budget", 5),
        ("thinking_token_budget", 0),
        ("trace_decode_token_ids", [1]),
        ("seed", -5),
        ("seed", 2**64),
        ("seed", 1.5),
        ("max_tokens", 1.5),
        ("max_tokens", float("nan")),
        ("min_tokens", 1.5),
        ("logprobs", 1.5),
        ("prompt_logprobs", float("nan")),
    ],
)
def test_refused_by_name_and_as_http_400(field: str, value: Any) -> None:
    inputs = {"type": "token", "prompt_token_ids": [1, 2]}
    current_platform.validate_request(inputs, SamplingParams())
    with pytest.raises(rm.RequestError, match=f"^{field}: expected ") as caught:
        current_platform.validate_request(inputs, SamplingParams(**{field: value}))
    answer = create_error_response(caught.value).error
    assert (answer.code, answer.param) == (400, field)


@pytest.mark.parametrize(
    "field, value, words",
    [
        ("allowed_token_ids", [3, 1.5], "expected token ids, got 1.5"),
        ("stop_token_ids", [True], "expected token ids, got True"),
        ("logit_bias", {0: float("nan")}, "expected a number for a token id, got 0: nan"),
        ("logit_bias", {0: "a"}, "expected a number for a token id, got 0: 'a'"),
    ],
)
def test_values_of_another_type(field: str, value: Any, words: str) -> None:
    """vLLM accepts these values; without a check they would raise in the worker and end its
    engine."""
    params = SamplingParams()
    setattr(params, field, value)  # bypasses the constructor's checks
    with pytest.raises(rm.RequestError, match=f"^{field}: {words}"):
        sampling.refuse(params)


@pytest.mark.parametrize(
    "ids", [["a"], [1, None], [1.0], [True], [1, 2**70], [[1, 2], [3, 4]], [1, [2]]]
)
def test_prompts_of_another_type(ids: list[Any]) -> None:
    with pytest.raises(rm.RequestError, match=r"^prompt: expected token ids, got "):
        current_platform.validate_request(
            {"type": "token", "prompt_token_ids": ids}, SamplingParams()
        )


def test_refused_inputs() -> None:
    with pytest.raises(
        rm.RequestError, match="prompt: expected text or token ids, got type 'embeds'"
    ):
        current_platform.validate_request({"type": "embeds"}, SamplingParams())
    with pytest.raises(rm.RequestError, match="pooling"):
        current_platform.validate_request({"type": "token"}, PoolingParams())
    with pytest.raises(rm.RequestError, match=r"seed \+ n"):
        sampling.refuse(SamplingParams(n=2, seed=2**64 - 1))
    sampling.refuse(SamplingParams(n=1, seed=2**64 - 1))


def test_top_logprobs_of_the_distribution_drawn_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process with engines of both modes cannot know the mode of a request; the worker can."""
    wanted = SamplingParams(logprobs=3)
    for modes, refused in (
        (["raw_logprobs"], False),
        (["processed_logprobs"], True),
        (["raw_logprobs", "processed_logprobs"], False),
    ):
        monkeypatch.setattr(type(current_platform), "logprobs_modes", set())
        for mode in modes:
            EngineArgs(
                **support.options(
                    tmp_path, "dense", "float32", logprobs_mode=mode, weight_transfer_config=None
                )
            ).create_engine_config()
        current_platform.validate_request({"type": "token"}, SamplingParams(logprobs=0))
        if refused:
            with pytest.raises(
                rm.RequestError,
                match="logprobs: expected None or 0 with logprobs_mode='processed_logprobs', got 3",
            ):
                current_platform.validate_request({"type": "token"}, wanted)
        else:
            current_platform.validate_request({"type": "token"}, wanted)


def test_what_the_engine_is_given() -> None:
    """Compares with rollmesh's own SamplingParams with the same values."""
    for words in (
        {},
        {
            "temperature": 0.7,
            "top_p": 0.9,
            "top_k": 5,
            "min_p": 0.1,
            "seed": 3,
            "max_tokens": 9,
            "min_tokens": 2,
        },
        {"temperature": 0.0, "logprobs": 3, "prompt_logprobs": 0},
        {"top_k": 10**6, "seed": 2**64 - 1, "logprobs": 0, "prompt_logprobs": 2},
    ):
        theirs, ours = SamplingParams(**words), rm.SamplingParams(**words)
        got, want = (
            sampling.engine_request(theirs, 11, theirs.max_tokens, 100),
            EngineRequest.of(ours, 11),
        )
        for name in want.__slots__:
            if name == "top_k":
                assert got.top_k == min(want.top_k, 100)
            elif name not in ("ignore_eos", "ranks"):
                # vLLM's scheduler ends requests; a Generator returns no ranks.
                assert getattr(got, name) == getattr(want, name), name
        assert not got.external_draws
        assert got.ranks == ("logprobs" in words or "prompt_logprobs" in words)
    every = sampling.engine_request(SamplingParams(logprobs=-1, prompt_logprobs=-1), 0, 16, 100)
    assert (every.logprobs, every.prompt_logprobs) == (100, 100)
    assert sampling.banned_ids(
        SamplingParams(stop_token_ids=[9, 4], min_tokens=3), 10
    ).tolist() == [4, 9]
    assert sampling.banned_ids(SamplingParams(stop_token_ids=[9, 4]), 10).tolist() == []
    for far in (10, 2**40):
        with pytest.raises(
            rm.RequestError, match=f"the stop tokens: expected token ids in .*, got {far}"
        ):
            sampling.banned_ids(SamplingParams(stop_token_ids=[far], min_tokens=3), 10)


@pytest.mark.parametrize(
    "words",
    [
        {"presence_penalty": 0.5},
        {"frequency_penalty": -0.5},
        {"repetition_penalty": 1.1},
        {"logit_bias": {3: 1.0}},
        {"allowed_token_ids": [3]},
        {"_bad_words_token_ids": [[3]]},
        {"structured_outputs": {"json_object": True}},
    ],
    ids=lambda words: next(iter(words)),
)
def test_what_needs_logits_on_the_host(words: dict[str, Any]) -> None:
    if "structured_outputs" in words:
        words = {"structured_outputs": StructuredOutputsParams(**words["structured_outputs"])}
    params = SamplingParams(**words, min_tokens=4)
    assert sampling.needs_external_edits(params)
    request = sampling.engine_request(params, 0, 16, 100)
    assert request.external_draws
    assert request.min_tokens == 0  # the host's, so that a grammar may end before it
    plain = SamplingParams(min_tokens=4)
    assert not sampling.needs_external_edits(plain)
    assert sampling.needs_external_edits(plain, custom_processors=True)

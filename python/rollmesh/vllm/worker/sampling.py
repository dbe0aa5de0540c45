"""vLLM's SamplingParams, field by field: who does what each asks for. Nothing is ignored: what nobody does is refused, at the front
end where the request comes in (`refuse`, out of generate() or as HTTP 400), and again by the worker.

    ENGINE   the C engine draws and records with it
    HOST     it edits the logits of a token before the draw: host_logits.py, over vLLM's own functions
    VLLM     vLLM's front end or scheduler, which rollmesh runs under
    REFUSED  nobody; only the value that asks for nothing is taken
"""

from __future__ import annotations

from enum import Enum
from numbers import Integral, Real
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.exceptions import VLLMValidationError
from vllm.pooling_params import PoolingParams

from rollmesh.errors import RequestError
from rollmesh.request.requests import EngineRequest
from rollmesh.runtime.messages import shown

GREEDY_BELOW = 1e-5  # vLLM's limit
MAX_SEED = 2**64 - 1
MOST = 2**63  # what vLLM's messages carry


class By(Enum):
    ENGINE, HOST, VLLM, REFUSED = range(4)


WHO = {
    "n": By.VLLM,  # each sample is a request of its own, with seed + i
    "presence_penalty": By.HOST,
    "frequency_penalty": By.HOST,
    "repetition_penalty": By.HOST,
    "temperature": By.ENGINE,
    "watermarking": By.REFUSED,
    "top_p": By.ENGINE,
    "top_k": By.ENGINE,
    "min_p": By.ENGINE,
    "seed": By.ENGINE,
    "stop": By.VLLM,
    "stop_token_ids": By.VLLM,  # but for min_tokens, see _all_stop_token_ids
    "ignore_eos": By.VLLM,
    "max_tokens": By.VLLM,  # the engine reserves room by it
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
    "structured_outputs": By.HOST,
    "logit_bias": By.HOST,
    "allowed_token_ids": By.HOST,
    "extra_args": By.HOST,  # for logits processors of the user's own; vLLM reads nothing in it
    "bad_words": By.HOST,
    "_bad_words_token_ids": By.HOST,
    "skip_reading_prefix_cache": By.VLLM,
    "thinking_token_budget": By.REFUSED,
    "repetition_detection": By.VLLM,
    "routed_experts_prompt_start": By.ENGINE,
    "trace_decode_token_ids": By.REFUSED,
}

# What a REFUSED field may be, and why not more.
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "watermarking": ((None, False), "no watermark is built in"),
    "prompt_logprob_token_ids": ((None,), "prompt_logprobs=k gives the k likeliest tokens"),
    "prompt_logprob_start": ((None,), "prompt_logprobs gives those of the whole prompt"),
    "logprob_token_ids": ((None,), "logprobs=k gives the k likeliest tokens, -1 all"),
    "thinking_token_budget": ((None,), "thinking is not limited apart from the rest"),
    "trace_decode_token_ids": ((None,), "tokens are drawn, not replayed"),
}

# What vLLM lets through whatever its type.
_INTEGERS = ("seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs", "routed_experts_prompt_start")
_IDS = ("stop_token_ids", "allowed_token_ids")


class RefusedError(RequestError, VLLMValidationError):  # type: ignore[misc]
    """A RequestError that vLLM knows as its own: HTTP 400, with the name of the parameter."""

    def __init__(self, message: str, parameter: str | None = None):
        super().__init__(message)
        self.parameter, self.value = parameter, None


# ---------------------------------------------------------------------------------------------------------------- refuse
def refuse(params: Any) -> None:
    """RefusedError for what a request asks for and nobody does, and for what is no value of its field."""
    if isinstance(params, PoolingParams):
        raise RefusedError("a pooling request, wanted SamplingParams: only generation is served")
    _refuse_types(params)
    for name, (taken, why) in _REFUSED.items():
        value = getattr(params, name)
        if not any(value is free or (isinstance(value, int) and value == free) for free in taken):
            raise RefusedError(f"{name} = {shown(value)}, wanted {' or '.join(map(shown, taken))}: {why}", name)
    seed = params.seed
    if seed is not None and not 0 <= seed <= MAX_SEED + 1 - params.n:
        raise RefusedError(f"seed = {shown(seed)}, wanted 0 <= seed and seed + n <= 2^64", "seed")


def _refuse_types(params: Any) -> None:
    for name in _INTEGERS:
        if (value := getattr(params, name)) is not None and not _is_integer(value):
            raise RefusedError(f"{name} = {shown(value)}, wanted an integer", name)
    for name in _IDS:
        if wrong := [token for token in getattr(params, name) or () if not _is_integer(token)]:
            raise RefusedError(f"{name} has {shown(wrong[0])}, wanted token ids", name)
    for token, bias in (params.logit_bias or {}).items():
        if not _is_integer(token) or not isinstance(bias, Real) or bias != bias:
            raise RefusedError(f"logit_bias has {shown(token)}: {shown(bias)}, wanted a number for a token id", "logit_bias")


def _is_integer(value: Any) -> bool:
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def refuse_mode(params: Any, logprobs_mode: str) -> None:
    """RefusedError for what cannot be had under this logprobs_mode."""
    if logprobs_mode == "processed_logprobs" and params.logprobs not in (None, 0):
        raise RefusedError(
            f"logprobs = {params.logprobs} under logprobs_mode = 'processed_logprobs', wanted None or 0: "
            "after temperature and filters only the drawn token's is recorded",
            "logprobs",
        )


def refuse_inputs(inputs: Any) -> None:
    """RefusedError unless the prompt is token ids, or text that has become token ids."""
    kind = inputs.get("type", "token") if isinstance(inputs, dict) else "token"
    if kind != "token":
        raise RefusedError(f"a prompt of type {shown(kind)}, wanted text or token ids: only text goes in")
    ids = inputs.get("prompt_token_ids") if isinstance(inputs, dict) else None
    if ids is not None and (wrong := [token for token in ids if not (_is_integer(token) and -MOST < token < MOST)]):
        raise RefusedError(f"a prompt with {shown(wrong[0])}, wanted token ids")


# ------------------------------------------------------------------------------------------------------------- translate
def needs_host_logits(params: Any, custom_processors: bool = False) -> bool:
    """Whether something edits the logits of its tokens before the draw. Logits processors of the user's own may edit any row."""
    return bool(
        custom_processors
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
        or params.repetition_penalty != 1.0
        or params.structured_outputs is not None
        or params.logit_bias
        or params.allowed_token_ids is not None
        or params.bad_words_token_ids
    )


def engine_request(params: Any, number: int, max_tokens: int, vocab_size: int, custom_processors: bool = False) -> EngineRequest:
    """A request of the hosted engine, of one sample.

    number        of the request, the same on all ranks: its seed is made of it and the engine's where it brings none
    max_tokens    that can still come: vLLM's limit, which ends it
    """
    hosted, greedy = needs_host_logits(params, custom_processors), params.temperature < GREEDY_BELOW
    return EngineRequest(
        n=1,
        max_tokens=max_tokens,
        min_tokens=0 if hosted else min(params.min_tokens, max_tokens),  # the host bans them too, and lets a grammar's end through
        temperature=0.0 if greedy else params.temperature,
        top_p=1.0 if greedy else params.top_p,
        min_p=0.0 if greedy else params.min_p,
        top_k=-1 if greedy or params.top_k in (0, -1) else min(params.top_k, vocab_size),
        has_seed=params.seed is not None,
        seed=number if params.seed is None else params.seed,
        ignore_eos=False,
        logprobs=_count(params.logprobs, vocab_size, none=0),
        prompt_logprobs=_count(params.prompt_logprobs, vocab_size, none=-1),
        score=False,
        score_sampling=False,
        host_draws=hosted,
        ranks=params.logprobs is not None or params.prompt_logprobs is not None,
    )


def token_ids(what: str, ids: Any, vocab_size: int) -> NDArray[np.int32]:
    """int32 [n]; RequestError for an id that is none. vLLM does not look where it has no tokenizer."""
    if wrong := [token for token in ids if not 0 <= token < vocab_size]:
        raise RequestError(f"token id {shown(wrong[0])} in {what}, wanted 0 <= id < {vocab_size}")
    return np.array(ids, dtype=np.int32)


def banned_ids(params: Any, vocab_size: int) -> NDArray[np.int32]:
    """Ascending: the tokens that may not come before min_tokens; the ends of a sequence as vLLM's scheduler knows them."""
    return token_ids("the stop tokens", sorted(params.all_stop_token_ids) if params.min_tokens else [], vocab_size)


def _count(value: int | None, vocab_size: int, none: int) -> int:
    """vLLM's number of likeliest tokens, where -1 means all, as the engine's."""
    return none if value is None else vocab_size if value == -1 else value

"""The fields of vLLM's SamplingParams. The C engine, external_edits.py or vLLM itself implements a
field; tests/vllm/test_vllm_sampling.py lists all of them. Unsupported values are refused in the
front end (`refuse`, raised by generate() or sent as HTTP 400), and again by the worker.
"""

from __future__ import annotations

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
MOST = 2**63  # limit of integers in vLLM's messages


# The accepted values of unsupported fields, and why other values are refused.
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "watermarking": ((None, False), "watermarks are not supported"),
    "prompt_logprob_token_ids": ((None,), "prompt_logprobs=k gives the k most likely tokens"),
    "prompt_logprob_start": ((None,), "prompt_logprobs covers the whole prompt"),
    "logprob_token_ids": ((None,), "logprobs=k gives the k most likely tokens, -1 all"),
    "thinking_token_budget": ((None,), "there is no separate limit for thinking"),
    "trace_decode_token_ids": ((None,), "tokens are drawn, not replayed"),
}

# Fields whose type vLLM does not check.
_INTEGERS = (
    "seed",
    "max_tokens",
    "min_tokens",
    "logprobs",
    "prompt_logprobs",
    "routed_experts_prompt_start",
)
_IDS = ("stop_token_ids", "allowed_token_ids")


class RefusedError(RequestError, VLLMValidationError):  # type: ignore[misc]
    """A RequestError that is also vLLM's validation error: HTTP 400 with the parameter's name."""

    def __init__(self, message: str, parameter: str | None = None):
        super().__init__(message)
        self.parameter, self.value = parameter, None


# ----------------------------------------------------------------------------------------- refuse
def refuse(params: Any) -> None:
    """Raises RefusedError for unsupported parameters and values of a wrong type."""
    if isinstance(params, PoolingParams):
        raise RefusedError(
            "expected SamplingParams, got a pooling request: only generation is supported"
        )
    _refuse_types(params)
    for name, (taken, why) in _REFUSED.items():
        value = getattr(params, name)
        if not any(value is free or (isinstance(value, int) and value == free) for free in taken):
            raise RefusedError(
                f"{name}: expected {' or '.join(map(shown, taken))}, got {shown(value)}; {why}",
                name,
            )
    seed = params.seed
    if seed is not None and not 0 <= seed <= MAX_SEED + 1 - params.n:
        raise RefusedError(
            f"seed: expected 0 <= seed and seed + n <= 2^64, got {shown(seed)}", "seed"
        )


def _refuse_types(params: Any) -> None:
    for name in _INTEGERS:
        if (value := getattr(params, name)) is not None and not _is_integer(value):
            raise RefusedError(f"{name}: expected an integer, got {shown(value)}", name)
    for name in _IDS:
        if wrong := [token for token in getattr(params, name) or () if not _is_integer(token)]:
            raise RefusedError(f"{name}: expected token ids, got {shown(wrong[0])}", name)
    for token, bias in (params.logit_bias or {}).items():
        if not _is_integer(token) or not isinstance(bias, Real) or bias != bias:
            raise RefusedError(
                f"logit_bias: expected a number for a token id, got {shown(token)}: {shown(bias)}",
                "logit_bias",
            )


def _is_integer(value: Any) -> bool:
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def refuse_mode(params: Any, logprobs_mode: str) -> None:
    """Raises RefusedError for logprobs that are not available with this logprobs_mode."""
    if logprobs_mode == "processed_logprobs" and params.logprobs not in (None, 0):
        raise RefusedError(
            "logprobs: expected None or 0 with logprobs_mode='processed_logprobs', got "
            f"{params.logprobs}; "
            "after temperature and filters only the drawn token's logprob is recorded",
            "logprobs",
        )


def refuse_inputs(inputs: Any) -> None:
    """Raises RefusedError unless the prompt is token ids, or text that vLLM has tokenized."""
    kind = inputs.get("type", "token") if isinstance(inputs, dict) else "token"
    if kind != "token":
        raise RefusedError(f"prompt: expected text or token ids, got type {shown(kind)}")
    ids = inputs.get("prompt_token_ids") if isinstance(inputs, dict) else None
    if ids is not None and (
        wrong := [token for token in ids if not (_is_integer(token) and -MOST < token < MOST)]
    ):
        raise RefusedError(f"prompt: expected token ids, got {shown(wrong[0])}")


# -------------------------------------------------------------------------------------- translate
def has_penalties(params: Any) -> bool:
    return bool(
        params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
        or params.repetition_penalty != 1.0
    )


def needs_external_edits(params: Any, custom_processors: bool = False) -> bool:
    """Returns whether external_edits.py edits the request's logits before the draw. The user's own
    logits processors may edit any row."""
    return bool(
        custom_processors
        or has_penalties(params)
        or params.structured_outputs is not None
        or params.logit_bias
        or params.allowed_token_ids is not None
        or params.bad_words_token_ids
    )


def engine_request(
    params: Any,
    number: int,
    max_tokens: int,
    vocab_size: int,
    custom_processors: bool = False,
    never_draws: bool = False,
) -> EngineRequest:
    """Converts a request with one sample to the engine's form.

    number        the request's number, the same on all ranks; the seed of a request without one is
                  made from it and the engine's seed
    max_tokens    number of tokens that vLLM can still request
    never_draws   whether the banned tokens may never be drawn; vLLM's processor then applies
                  min_tokens
    """
    external = needs_external_edits(params, custom_processors) or (
        never_draws and params.min_tokens > 0
    )
    greedy = params.temperature < GREEDY_BELOW
    return EngineRequest(
        max_tokens=max_tokens,
        min_tokens=max_tokens
        if never_draws
        else 0
        if external
        else min(params.min_tokens, max_tokens),  # as long as tokens are banned
        temperature=0.0 if greedy else params.temperature,
        top_p=1.0 if greedy else params.top_p,
        min_p=0.0 if greedy else params.min_p,
        top_k=-1 if greedy or params.top_k in (0, -1) else min(params.top_k, vocab_size),
        has_seed=params.seed is not None,
        seed=number if params.seed is None else params.seed,
        logprobs=_count(params.logprobs, vocab_size, none=0),
        prompt_logprobs=_count(params.prompt_logprobs, vocab_size, none=-1),
        external_draws=external,
        ranks=params.logprobs is not None or params.prompt_logprobs is not None,
    )


def token_ids(what: str, ids: Any, vocab_size: int) -> NDArray[np.int32]:
    """Returns token ids as int32 [n]. Raises RequestError for an id outside the vocabulary, which
    vLLM does not check without a tokenizer."""
    if wrong := [token for token in ids if not 0 <= token < vocab_size]:
        raise RequestError(
            f"{what}: expected token ids in [0, {vocab_size}), got {shown(wrong[0])}"
        )
    return np.array(ids, dtype=np.int32)


def banned_ids(params: Any, vocab_size: int) -> NDArray[np.int32]:
    """Returns the token ids that must not be drawn before min_tokens, ascending: all stop tokens of
    vLLM's scheduler."""
    return token_ids(
        "the stop tokens",
        sorted(params.all_stop_token_ids) if params.min_tokens else [],
        vocab_size,
    )


def _count(value: int | None, vocab_size: int, none: int) -> int:
    """Converts vLLM's number of most likely tokens, where -1 means all, to the engine's number."""
    return none if value is None else vocab_size if value == -1 else value

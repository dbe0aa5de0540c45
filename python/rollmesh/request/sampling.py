"""Sampling parameters: how tokens are chosen and when a sample ends. Names and meanings are vLLM's.
The filters apply in the order of the contract (docs/numerics.md): bias, penalties, bans,
temperature, min_p, top_k, top_p.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollmesh.distributed.wire import sendable
from rollmesh.errors import RequestError
from rollmesh.runtime.arguments import (
    MAX_FLOAT32,
    MAX_TOKENS,
    integer_of,
    is_real,
    is_unicode,
    items_of,
)
from rollmesh.runtime.messages import shown

MAX_SEED = 2**64
MAX_INT32 = 2**31 - 1
# The smallest normal float32; smaller numbers lose digits and then become 0.
MIN_FLOAT32 = 1.1754943508222875e-38
SHARE, POSITIVE = "a number in (0, 1]", "a finite float32 > 0"
_INTEGERS = {  # field → least and largest value
    "n": (1, 16384),  # as rm_request.n
    "top_k": (-1, MAX_INT32),
    "max_tokens": (1, 2**62),
    "min_tokens": (0, 2**62),
    "seed": (0, MAX_SEED - 1),
    "logprobs": (0, MAX_INT32),
    "prompt_logprobs": (0, MAX_INT32),
}
_OPTIONAL = ("max_tokens", "seed", "logprobs", "prompt_logprobs")  # of these, None is allowed
_REALS = {  # field → least and largest value, what is expected
    "temperature": (0.0, MAX_FLOAT32, "a finite float32 >= 0"),
    "top_p": (0.0, 1.0, SHARE),
    "min_p": (0.0, 1.0, "a number in [0, 1]"),
    "presence_penalty": (-2.0, 2.0, "a number in [-2, 2]"),
    "frequency_penalty": (-2.0, 2.0, "a number in [-2, 2]"),
    "repetition_penalty": (0.0, MAX_FLOAT32, POSITIVE),
}
_BOOLEANS = ("ignore_eos", "kept_tokens", "skip_special_tokens", "include_stop_str_in_output")


@sendable
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The settings of one request. Immutable; `dataclasses.replace` makes a changed copy. A wrong
    value raises RequestError.

    n                number of samples of the prompt; sample i draws from seed + i (mod 2^64)
    temperature      0: greedy; of equal tokens the lowest id is chosen
    top_p            in (0, 1]: keep the smallest set of likeliest tokens whose probabilities sum to
                     at least top_p
    top_k            keep the k likeliest tokens; -1 (or 0): all
    min_p            in [0, 1]: drop tokens whose probability is below min_p times the largest one
    max_tokens       largest number of generated tokens per sample; None: as many as fit into
                     max_model_len after the prompt. A character that is cut off is left out of the
                     text
    min_tokens       number of tokens before which neither eos, stop_token_ids nor stop strings end
                     a sample
    stop             strings that end a sample; the text ends before them (needs the generator's
                     tokenizer); None: no strings
    stop_token_ids   ids that end a sample, in addition to the generator's eos_token_ids
    ignore_eos       do not end a sample at the generator's eos_token_ids
    seed             0 <= seed < 2^64; None: the generator chooses one
    logprobs         None or 0: logprob of the sampled token only (always recorded); k > 0: also the
                     k largest logprobs, `.top_logprobs`
    prompt_logprobs  None: no logprobs; 0: logprob of each prompt token; k > 0: also the k largest
    kept_tokens      record which tokens the filters kept for each draw, `.kept_tokens`; needs
                     top_k >= 1 and min_tokens = 0
    presence_penalty    in [-2, 2]: subtracted from the logit of every token that was generated
    frequency_penalty   in [-2, 2]: subtracted once for each time that the token was generated
    repetition_penalty  > 0: positive logits of tokens in the prompt and the output are divided by
                        it, other logits of these tokens are multiplied by it
    logit_bias          {token id: number}: added to the logits, before the penalties; stored as a
                        tuple of pairs
    bad_words           words that are not generated, with or without a space before them (needs the
                        generator's tokenizer)
    allowed_token_ids   draw only these tokens; None: all
    skip_special_tokens         leave special tokens out of the text
    include_stop_str_in_output  end the text with the stop string or the stop token's text, instead
                                of before it
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | None = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    kept_tokens: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] | None = None
    bad_words: str | Sequence[str] | None = None
    allowed_token_ids: Sequence[int] | None = None

    def __post_init__(self) -> None:
        for name, bounds in _INTEGERS.items():
            value = getattr(self, name)
            if value is not None or name not in _OPTIONAL:
                self._set(name, integer_of(RequestError, name, value, *bounds))
        if self.top_k == 0:  # vLLM takes 0 as "all" too
            self._set("top_k", -1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens: expected at most max_tokens = {self.max_tokens}, got "
                f"{self.min_tokens}"
            )
        for name, (low, high, expected) in _REALS.items():
            self._set(name, _real(name, getattr(self, name), low, high, expected))
        for name in _BOOLEANS:
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name}: expected a bool, got {shown(getattr(self, name))}")
        self._set("logit_bias", self._bias())
        for name in ("stop", "bad_words"):
            self._set(name, self._strings(name))
        for name in ("stop_token_ids", "allowed_token_ids"):
            self._set(name, self._ids(name))
        if self.allowed_token_ids == ():
            raise RequestError(
                "allowed_token_ids: expected at least one token id, or None, got none"
            )
        if not self.kept_tokens:
            return
        if self.top_k < 1:
            raise RequestError(
                f"kept_tokens=True: expected top_k >= 1, got {self.top_k}; set top_k, which "
                "bounds the tokens kept"
            )
        for name in ("min_tokens", *logit_edit_names(self)):
            if value := getattr(self, name):
                raise RequestError(
                    f"kept_tokens=True: expected no {name}, got {shown(value)}; leave one of the "
                    "two out"
                )

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _strings(self, name: str) -> tuple[str, ...]:
        given = getattr(self, name)
        strings: Any = (given,) if isinstance(given, str) else () if given is None else given
        if isinstance(strings, Sequence):
            strings = items_of(RequestError, name, strings, MAX_TOKENS)
        if not isinstance(strings, list) or not all(
            isinstance(text, str) and text for text in strings
        ):
            raise RequestError(
                f"{name}: expected a non-empty string or a sequence of them, got {shown(given)}"
            )
        if wrong := [text for text in strings if not is_unicode(text)]:
            raise RequestError(
                f"{name}: expected text without half of a surrogate pair, got {shown(wrong[0])}"
            )
        # Plain str instead of NumPy's, since ranks compare and send them.
        return tuple(map(str.__str__, strings))

    def _ids(self, name: str) -> tuple[int, ...] | None:
        given = getattr(self, name)
        if given is None:
            return () if name == "stop_token_ids" else None
        if isinstance(given, str) or not isinstance(given, Sequence):
            raise RequestError(f"{name}: expected a sequence of token ids, got {shown(given)}")
        return tuple(_token_id(name, i) for i in items_of(RequestError, name, given, MAX_TOKENS))

    def _bias(self) -> tuple[tuple[int, float], ...] | None:
        given: Any = self.logit_bias
        if given is None:
            return None
        if isinstance(given, str) or not isinstance(given, (Mapping, Sequence)):
            raise RequestError(
                f"logit_bias: expected a dict of token ids and numbers, got {shown(given)}"
            )
        items = given.items() if isinstance(given, Mapping) else given
        pairs = items_of(RequestError, "logit_bias", items, MAX_TOKENS)
        biases: dict[int, float] = {}
        for pair in pairs:
            if not isinstance(pair, (tuple, list)) or len(pair) != 2:
                raise RequestError(
                    f"logit_bias: expected a dict of token ids and numbers, got {shown(pair)} in it"
                )
            token, value = _token_id("logit_bias", pair[0]), pair[1]
            if not _is_within(value, -MAX_FLOAT32, MAX_FLOAT32):
                raise RequestError(
                    f"logit_bias: expected a finite float32 for token {token}, got {shown(value)}"
                )
            if token in biases:
                raise RequestError(f"logit_bias: expected each token id once, got {token} twice")
            biases[token] = float(value)
        return tuple(sorted(biases.items())) or None


_NO_EDITS = {
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": None,
    "bad_words": (),
    "allowed_token_ids": None,
}


def logit_edit_names(params: SamplingParams) -> list[str]:
    """Returns the names of the given fields that change logits before a draw."""
    return [name for name, value in _NO_EDITS.items() if getattr(params, name) != value]


def _is_within(value: Any, low: float, high: float) -> bool:
    if not is_real(value):
        return False
    # In a comparison with a float16 the bounds would become float16 too, and infinite.
    if isinstance(value, np.floating):
        value = float(value)
    return bool(low <= value <= high)


def _real(name: str, value: Any, low: float, high: float, expected: str) -> float:
    is_positive = expected in (SHARE, POSITIVE)
    if not _is_within(value, low, high) or (is_positive and value == 0.0):
        raise RequestError(f"{name}: expected {expected}, got {shown(value)}")
    if value != 0.0 and -MIN_FLOAT32 < value < MIN_FLOAT32:
        least = f"{'' if is_positive else '0 or '}at least {MIN_FLOAT32}"
        raise RequestError(
            f"{name}: expected {least}, the smallest normal float32, got {shown(value)}"
        )
    return float(value)


def _token_id(name: str, token: Any) -> int:
    return integer_of(RequestError, f"{name}: token id", token, 0, MAX_INT32)

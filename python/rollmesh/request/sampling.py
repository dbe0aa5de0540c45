"""Sampling parameters: how tokens are chosen and when a sample ends. Names and meanings are vLLM's.
The filters apply in the order of the contract (docs/numerics.md): bias, penalties, bans,
temperature, min_p, top_k, top_p.
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollmesh.distributed.wire import sendable
from rollmesh.errors import RequestError
from rollmesh.runtime.arguments import MAX_TOKENS, REAL, is_unicode, items_of
from rollmesh.runtime.messages import shown

MAX_SEED = 2**64
MAX_INT32 = 2**31 - 1
MAX_FLOAT32 = 3.4028234663852886e38
# The smallest normal float32; smaller numbers lose digits and then become 0.
MIN_FLOAT32 = 1.1754943508222875e-38


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
        self._integer("n", 1, MAX_INT32)
        self._real("temperature", 0.0, MAX_FLOAT32, "a finite float32 >= 0")
        self._real("top_p", 0.0, 1.0, "a number in (0, 1]", is_positive=True)
        self._real("min_p", 0.0, 1.0, "a number in [0, 1]")
        self._integer("top_k", -1, MAX_INT32)
        if self.top_k == 0:  # vLLM takes 0 as "all" too
            object.__setattr__(self, "top_k", -1)
        if self.max_tokens is not None:
            self._integer("max_tokens", 1, 2**62)
        self._integer("min_tokens", 0, 2**62)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens: expected at most max_tokens = {self.max_tokens}, got "
                f"{self.min_tokens}"
            )
        if self.seed is not None:
            self._integer("seed", 0, MAX_SEED - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._integer(name, 0, MAX_INT32)
        for name in (
            "ignore_eos",
            "kept_tokens",
            "skip_special_tokens",
            "include_stop_str_in_output",
        ):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name}: expected a bool, got {shown(getattr(self, name))}")
        self._real("presence_penalty", -2.0, 2.0, "a number in [-2, 2]")
        self._real("frequency_penalty", -2.0, 2.0, "a number in [-2, 2]")
        self._real("repetition_penalty", 0.0, MAX_FLOAT32, "a finite float32 > 0", is_positive=True)
        object.__setattr__(self, "logit_bias", self._bias())
        object.__setattr__(self, "bad_words", self._strings("bad_words"))
        object.__setattr__(
            self,
            "allowed_token_ids",
            None if self.allowed_token_ids is None else self._ids("allowed_token_ids"),
        )
        if self.allowed_token_ids is not None and not len(self.allowed_token_ids):
            raise RequestError(
                "allowed_token_ids: expected at least one token id, or None, got none"
            )
        if self.kept_tokens and self.top_k < 1:
            raise RequestError(
                f"kept_tokens=True: expected top_k >= 1, got {self.top_k}; set top_k, which "
                "bounds the tokens kept"
            )
        if self.kept_tokens and self.min_tokens:
            raise RequestError(
                f"kept_tokens=True: expected min_tokens=0, got {self.min_tokens}; leave one of "
                "the two out"
            )
        if self.kept_tokens and (edits := logit_edit_names(self)):
            raise RequestError(
                f"kept_tokens=True: expected no {edits[0]}, got {shown(getattr(self, edits[0]))}; "
                "leave one of the two out"
            )
        object.__setattr__(self, "stop", self._strings("stop"))
        object.__setattr__(self, "stop_token_ids", self._ids("stop_token_ids"))

    def _integer(self, name: str, low: int, high: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise RequestError(f"{name}: expected an integer, got {shown(value)}")
        if not low <= int(value) <= high:
            raise RequestError(
                f"{name}: expected an integer in [{low}, {high}], got {shown(value)}"
            )
        object.__setattr__(self, name, int(value))

    def _real(
        self, name: str, low: float, high: float, expected: str, *, is_positive: bool = False
    ) -> None:
        value = getattr(self, name)
        if not _is_within(value, low, high) or (is_positive and value == 0.0):
            raise RequestError(f"{name}: expected {expected}, got {shown(value)}")
        if value != 0.0 and -MIN_FLOAT32 < value < MIN_FLOAT32:
            least = f"{'' if is_positive else '0 or '}at least {MIN_FLOAT32}"
            raise RequestError(
                f"{name}: expected {least}, the smallest normal float32, got {shown(value)}"
            )
        object.__setattr__(self, name, float(value))

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

    def _ids(self, name: str) -> tuple[int, ...]:
        ids: Any = () if getattr(self, name) is None else getattr(self, name)
        if isinstance(ids, str) or not isinstance(ids, Sequence):
            raise RequestError(f"{name}: expected a sequence of token ids, got {shown(ids)}")
        return tuple(
            _token_id(name, token) for token in items_of(RequestError, name, ids, MAX_TOKENS)
        )

    def _bias(self) -> tuple[tuple[int, float], ...] | None:
        given: Any = self.logit_bias
        if given is None:
            return None
        if isinstance(given, str) or not isinstance(given, (Mapping, Sequence)):
            raise RequestError(
                f"logit_bias: expected a dict of token ids and numbers, got {shown(given)}"
            )
        pairs = items_of(
            RequestError,
            "logit_bias",
            given.items() if isinstance(given, Mapping) else given,
            MAX_TOKENS,
        )
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
    if isinstance(value, bool) or not isinstance(value, REAL):
        return False
    # In a comparison with a float16 the bounds would become float16 too, and infinite.
    if isinstance(value, np.floating):
        value = float(value)
    return bool(low <= value <= high)


def _token_id(name: str, token: Any) -> int:
    if (
        isinstance(token, bool)
        or not isinstance(token, numbers.Integral)
        or not 0 <= int(token) <= MAX_INT32
    ):
        raise RequestError(f"{name}: expected token ids >= 0, got {shown(token)}")
    return int(token)

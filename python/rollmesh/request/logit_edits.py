"""Converts the fields of SamplingParams that change logits before a draw to the engine's form:
logit_bias, allowed_token_ids and bad_words. Penalties are numbers in EngineRequest, and the engine
counts tokens for them (csrc/scheduler/logit_edits.h).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import numpy as np

from rollmesh.errors import RequestError
from rollmesh.request.sampling import SamplingParams
from rollmesh.request.text import TextCodec
from rollmesh.runtime.engine_views import Floats, Ids
from rollmesh.runtime.messages import shown

# Texts that are put before a word. Few tokenizers merge a newline with a word, or "(" with one.
BEFORE = ("\n", "(")


class LogitEdits(NamedTuple):
    """Arrays of int32 [n], except biases, which are float32 and belong to bias_ids. banned: tokens
    that are never drawn. bad_words: the ids of words of several tokens, one word after the other;
    each word ends at its entry of bad_word_ends."""

    bias_ids: Ids
    biases: Floats
    banned: Ids
    bad_words: Ids
    bad_word_ends: Ids


def logit_edits(
    params: SamplingParams, codec: TextCodec | None, vocab_size: int, ends: Iterable[int]
) -> LogitEdits | None:
    """Returns the edits of a request, or None if it has none of these fields. ends: tokens that end
    a sample, which must not be drawn before min_tokens.

    Raises RequestError for an id outside the vocabulary, for bad_words without a tokenizer, or if
    all tokens are banned.
    """
    if not (params.logit_bias or params.bad_words or params.allowed_token_ids is not None):
        return None
    words = _word_ids(params, codec, vocab_size)
    allowed = np.ones(vocab_size, np.bool_)
    if params.allowed_token_ids is not None:
        if wrong := [token for token in params.allowed_token_ids if token >= vocab_size]:
            raise RequestError(
                f"allowed_token_ids: expected token ids in [0, {vocab_size}), got {wrong[0]}"
            )
        allowed[:] = False
        allowed[list(params.allowed_token_ids)] = True
    allowed[[word[0] for word in words if len(word) == 1]] = False
    free = allowed.copy()
    if params.min_tokens:
        # The engine raises the error for a token outside the vocabulary.
        free[[token for token in ends if token < vocab_size]] = False
    if not free.any():
        before = f" before min_tokens={params.min_tokens}" if params.min_tokens else ""
        raise RequestError(
            f"expected a token that may be drawn{before}, got none: allowed_token_ids, bad_words "
            "and stop tokens leave none"
        )
    longer = [word for word in words if len(word) > 1]
    bias: Any = params.logit_bias or ()  # pairs, since SamplingParams converts it
    return LogitEdits(
        np.array([token for token, _ in bias], np.int32),
        np.array([value for _, value in bias], np.float32),
        np.flatnonzero(~allowed).astype(np.int32),
        np.array([token for word in longer for token in word], np.int32),
        np.cumsum([len(word) for word in longer], dtype=np.int32),
    )


def _word_ids(
    params: SamplingParams,
    codec: TextCodec | None,
    vocab_size: int,
) -> Collection[tuple[int, ...]]:
    """Returns the token ids of bad_words in every spelling: with and without a space before the
    word, at the beginning of a text and inside one, where a tokenizer may add or merge a space."""
    if not params.bad_words:
        return ()
    if codec is None:
        raise RequestError(
            "bad_words: expected none, since the generator has no tokenizer, got "
            f"{shown(params.bad_words)}"
        )
    contexts = [(text, codec.encode(text, special_tokens=False)) for text in BEFORE]
    words: dict[tuple[int, ...], None] = {}  # an ordered set
    for word in params.bad_words:
        plain = word.lstrip(" ")
        if not codec.encode(plain, special_tokens=False):
            raise RequestError(
                f"bad_words: expected words of at least one token, got {shown(word)}"
            )
        for text in (plain, " " + plain):
            words[tuple(codec.encode(text, special_tokens=False))] = None
            for before, ids in contexts:
                inside = codec.encode(before + text, special_tokens=False)
                if inside[: len(ids)] == ids and len(inside) > len(ids):
                    words[tuple(inside[len(ids) :])] = None
    if wrong := [token for ids in words for token in ids if not 0 <= token < vocab_size]:
        raise RequestError(
            f"bad_words: expected token ids in [0, {vocab_size}) from the tokenizer, got {wrong[0]}"
        )
    return words

"""What changes logits before a draw, as the engine takes it: logit_bias, allowed_token_ids and
bad_words of a SamplingParams. Penalties are numbers of EngineRequest; the engine counts tokens for
them (csrc/scheduler/logit_edits.h).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollmesh.errors import RequestError
from rollmesh.request.sampling import SamplingParams
from rollmesh.request.text import TextCodec
from rollmesh.runtime.engine_views import Ids
from rollmesh.runtime.messages import shown

# Texts before a word. Few tokenizers merge a newline with a word, or "(" with a newline.
BEFORE = ("\n", "(")


class LogitEdits(NamedTuple):
    """int32 [n] each, but biases: float32, of bias_ids. banned: never drawn. bad_words: the ids of
    words of several tokens, one after the other, each up to its entry of bad_word_ends."""

    bias_ids: Ids
    biases: NDArray[np.float32]
    banned: Ids
    bad_words: Ids
    bad_word_ends: Ids


def logit_edits(
    params: SamplingParams, codec: TextCodec | None, vocab_size: int, ends: Iterable[int]
) -> LogitEdits | None:
    """None where nothing is asked for. ends: tokens that end a sample, and so may not be drawn
    before min_tokens.

    RequestError: an id outside the vocabulary, bad_words without a tokenizer, or no token is left
    to draw.
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
        free[[token for token in ends if token < vocab_size]] = (
            False  # the engine names one that is not
        )
    if not free.any():
        before = f" before min_tokens={params.min_tokens}" if params.min_tokens else ""
        raise RequestError(
            f"expected a token that may be drawn{before}, got none: allowed_token_ids, bad_words "
            "and stop tokens leave none"
        )
    longer = [word for word in words if len(word) > 1]
    bias: Any = params.logit_bias or ()  # pairs, once it was checked
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
    words: dict[tuple[int, ...], None] = {}  # in order, each once
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

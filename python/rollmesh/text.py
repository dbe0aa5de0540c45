"""Text at the edge of the engine, which knows only token ids: one face for both kinds of tokenizer, and the search for stop
strings while tokens come in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollmesh.errors import ConfigError, RequestError

REPLACEMENT = "\ufffd"
MAX_HELD_BACK = 8  # tokens; a character has at most four bytes, so longer runs of undecodable text are final


class TextCodec:
    """`tokenizer` is a transformers tokenizer or a tokenizers.Tokenizer."""

    def __init__(self, tokenizer: Any):
        if not (callable(getattr(tokenizer, "encode", None)) and callable(getattr(tokenizer, "decode", None))):
            raise ConfigError(f"tokenizer is {type(tokenizer).__name__}, wanted a transformers tokenizer or a tokenizers.Tokenizer")
        self.tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, special tokens added as the tokenizer does by default."""
        encoded = self.tokenizer.encode(text)
        ids = getattr(encoded, "ids", encoded)
        if not isinstance(ids, Sequence):
            raise RequestError(f"the tokenizer gave {type(ids).__name__} for a prompt, wanted a list of token ids")
        return list(ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens."""
        text = self.tokenizer.decode(list(ids), skip_special_tokens=True)
        if not isinstance(text, str):
            raise RequestError(f"the tokenizer gave {type(text).__name__} for token ids, wanted str")
        return text


class StopWatcher:
    """Finds the first of `stops` in the text of one sample, token by token.

    A token is not a piece of text of its own: the text of tokens [a, c) is decoded together and what [a, b) alone would have
    given is cut off its front, where a … b is the run before the new tokens. Text that ends in U+FFFD is held back, because
    the character may still be completed.
    """

    def __init__(self, codec: TextCodec, stops: Sequence[str], min_tokens: int):
        self.codec, self.stops, self.min_tokens = codec, stops, min_tokens
        self._tokens: list[int] = []
        self._context = self._taken = 0  # a, b
        self.text = ""

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    def push(self, token: int) -> str | None:
        """Takes the next token. Returns the stop string that it completed; `text` then ends before it."""
        self._tokens.append(token)
        known = self.codec.decode(self._tokens[self._context : self._taken])
        text = self.codec.decode(self._tokens[self._context :])
        held_back = len(self._tokens) - self._taken
        if len(text) <= len(known) or (text.endswith(REPLACEMENT) and held_back <= MAX_HELD_BACK):
            return None
        fresh = text[len(known) :]
        self._context, self._taken = self._taken, len(self._tokens)
        self.text += fresh
        if len(self._tokens) <= self.min_tokens:
            return None
        return self._find(len(fresh))

    def _find(self, num_fresh: int) -> str | None:
        """The stop string that begins first among those that end in the last num_fresh characters."""
        found: tuple[int, str] | None = None
        for stop in self.stops:
            at = self.text.find(stop, max(0, len(self.text) - num_fresh - len(stop) + 1))
            if at >= 0 and (found is None or at < found[0]):
                found = (at, stop)
        if found is None:
            return None
        self.text = self.text[: found[0]]
        return found[1]

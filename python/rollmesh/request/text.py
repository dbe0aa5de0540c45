"""Conversion between text and token ids: one interface for all kinds of tokenizers, reading a
tokenizer from a folder, and the text of a sample while its tokens arrive.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollmesh.errors import ConfigError, RequestError
from rollmesh.runtime.arguments import is_unicode
from rollmesh.runtime.messages import plain, shown

REPLACEMENT = "\ufffd"
FEW, MANY = 4, 128  # number of tokens at the end of a prompt that are decoded as context
MAX_CONTEXT = 16  # tokens of output that are decoded again as context
HEAD, TAIL = 8, 4  # tokens; a character has at most four bytes, so this many tokens hold all of it


def tokenizer_of_folder(folder: Path) -> Any:
    """Returns the tokenizer of a Hugging Face folder, or None if the folder has none. The result is
    a transformers tokenizer if there is a tokenizer_config.json and transformers is installed,
    otherwise a tokenizers.Tokenizer from tokenizer.json. Reads only local files and does not run
    code of the folder.

    Raises ConfigError if the files cannot be read as a tokenizer, or if the package to read them is
    missing.
    """
    file, settings = folder / "tokenizer.json", folder / "tokenizer_config.json"
    if not (settings.is_file() and (find_spec("transformers") or not file.is_file())):
        return load_tokenizer(file) if file.is_file() else None
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ConfigError(
            f"{plain(folder)}: reading its tokenizer needs transformers, or a tokenizer.json; "
            "tokenizer=None loads the model without one"
        ) from error
    try:
        return AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:
        raise ConfigError(
            f"{plain(folder)}: expected the files of a tokenizer: {plain(error)}"
        ) from error


def load_tokenizer(file: Path) -> Any:
    """Returns a tokenizers.Tokenizer from a tokenizer.json."""
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ConfigError(
            "reading tokenizer.json needs the package tokenizers: pip install tokenizers"
        ) from error
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:
        raise ConfigError(f"{plain(file)}: expected a tokenizer.json: {plain(error)}") from error


@dataclass(frozen=True)
class Chat:
    """A prompt that a chat template renders. options: arguments of apply_chat_template."""

    messages: Any
    options: Mapping[str, Any]


Prompt = str | Chat | Sequence[int] | NDArray[np.integer[Any]]


class TextCodec:
    """Encodes and decodes text. tokenizer: a transformers tokenizer or a tokenizers.Tokenizer."""

    def __init__(self, tokenizer: Any):
        if not (
            callable(getattr(tokenizer, "encode", None))
            and callable(getattr(tokenizer, "decode", None))
        ):
            raise ConfigError(
                "tokenizer: expected one of transformers or a tokenizers.Tokenizer, got "
                f"{type(tokenizer).__name__}"
            )
        self.tokenizer, self._decode = tokenizer, _decode_of(tokenizer)

    def encode(self, text: str, special_tokens: bool = True) -> list[int]:
        """Returns the token ids of a prompt, with the special tokens that the tokenizer adds by
        default."""
        if not is_unicode(text):  # tokenizers would raise a TypeError without a message
            raise RequestError(f"expected text without half of a surrogate pair, got {shown(text)}")
        encoded = (
            self.tokenizer.encode(text)
            if special_tokens
            else self.tokenizer.encode(text, add_special_tokens=False)
        )
        ids = getattr(encoded, "ids", encoded)
        if not isinstance(ids, Sequence):
            raise RequestError(
                f"expected a list of token ids from the tokenizer, got {type(ids).__name__}"
            )
        return list(ids)

    def encode_chat(self, messages: Any, options: Mapping[str, Any]) -> list[int]:
        """Returns the token ids of a chat, rendered by the tokenizer's template. options: arguments
        of apply_chat_template."""
        if not callable(getattr(self.tokenizer, "apply_chat_template", None)):
            raise RequestError(
                "chat: expected a tokenizer of transformers, with a chat template, got "
                f"{type(self.tokenizer).__name__}"
            )
        messages = chat_messages(messages)
        try:
            text = self.tokenizer.apply_chat_template(messages, **{**options, "tokenize": False})
            return self.encode(text, special_tokens=False)
        except RequestError as error:
            raise RequestError(f"chat: {error}") from error
        except Exception as error:
            raise RequestError(
                f"chat: expected messages that the template takes, got {type(error).__name__}: "
                f"{plain(error)}"
            ) from error

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of `ids` alone, without preceding tokens. For the text of a sample use
        Detokenizer."""
        text = self._decode(list(ids), skip_special_tokens=skip_special_tokens) if len(ids) else ""
        if not isinstance(text, str):
            raise RequestError(f"expected str from the tokenizer, got {type(text).__name__}")
        return text


def _decode_of(tokenizer: Any) -> Callable[..., Any]:
    """Returns the tokenizer's decode function. With tokenizers of transformers, the function keeps
    the spaces before punctuation that clean_up_tokenization_spaces removes, and skips ids beyond
    the tokenizer's vocabulary, which models have as padding. vLLM does the same."""
    if all(kind.__name__ != "PreTrainedTokenizerBase" for kind in type(tokenizer).__mro__):
        return tokenizer.decode  # type: ignore[no-any-return]
    if getattr(tokenizer, "backend_tokenizer", None) is not None:
        return tokenizer.backend_tokenizer.decode  # type: ignore[no-any-return]

    def decode(ids: list[int], skip_special_tokens: bool) -> Any:
        known = [token for token in ids if token < len(tokenizer)]
        return tokenizer.decode(
            known, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    return decode


def rendered_chat(tokenizer: Any, messages: Any, **options: Any) -> str:
    """Returns the text of a chat, rendered by the tokenizer's template. options: arguments of
    apply_chat_template."""
    return str(
        tokenizer.apply_chat_template(chat_messages(messages), **{**options, "tokenize": False})
    )


def chat_messages(messages: Any) -> list[dict[str, Any]]:
    """Returns messages in the form in which vLLM passes them to a template: content None with tool
    calls becomes "", and JSON in the arguments of a tool call becomes an object."""
    is_list = isinstance(messages, Iterable) and not isinstance(messages, (str, Mapping))
    if not (found := [_message(message) for message in messages] if is_list else []):
        raise RequestError(f"chat: expected messages of {{role, content}}, got {shown(messages)}")
    return found


def _message(message: Any) -> dict[str, Any]:
    """Checks and converts one message. Content that is not text is refused, since a template would
    print its Python repr or leave it out."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(f"chat: expected messages of {{role, content}}, got {shown(message)}")
    content, calls = message.get("content"), message.get("tool_calls")
    if not isinstance(content, str) and not (content is None and calls):
        raise RequestError(
            f"chat: expected the content of a message of role {message['role']} to be text, got "
            f"{shown(content)}"
        )
    plain = {**message, "content": content or ""}
    plain.pop("tool_calls", None)
    if calls and not isinstance(calls, (list, tuple)):
        raise RequestError(f"chat: expected a list of tool calls, got {shown(calls)}")
    return {**plain, "tool_calls": [_tool_call(call) for call in calls]} if calls else plain


def _tool_call(call: Any) -> Any:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise RequestError(
            f"chat: expected tool calls of {{function: {{name, arguments}}}}, got {shown(call)}"
        )
    arguments = function.get("arguments")
    if not isinstance(arguments, str) and arguments is not None:
        return call
    try:
        parsed = {**function, "arguments": json.loads(arguments or "{}")}
    except (ValueError, RecursionError) as error:
        raise RequestError(
            f"chat: expected JSON as the arguments of a tool call, got {shown(arguments)}"
        ) from error
    return {**call, "function": parsed} if "function" in call else parsed


class Detokenizer:
    """The text of one sample, token by token, and the first stop string in it.

        detokenizer = Detokenizer(codec, prompt_ids, stops=["\n\n"])
        for token in tokens:
            if detokenizer.push(token) is not None:
                break
            detokenizer.text_so_far()  # every later text begins with it
        detokenizer.text

    Each token is decoded together with the tokens before it; for the first token these are the last
    tokens of the prompt. Text that ends in U+FFFD is delayed until a token completes the character.
    If the sample ends first, its text ends before the character. The number of tokens that are
    decoded for each new token is bounded.
    """

    def __init__(
        self,
        codec: TextCodec,
        prompt_ids: Sequence[int] | NDArray[np.integer[Any]],
        *,
        stops: Sequence[str] = (),
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
        keeps_stop: bool = False,
    ):
        """min_tokens: number of tokens before the search for stop strings begins. keeps_stop:
        whether the text includes the stop string."""
        self._codec, self._prompt_ids, self._skips = codec, prompt_ids, skip_special_tokens
        self._stops, self._min_tokens, self._keeps_stop = stops, min_tokens, keeps_stop
        self._context: list[int] | None = None  # tokens with known text; None before the first push
        self._known: tuple[str, ...] = ()  # possible texts of the context; the first match is used
        self._held: list[int] = []  # tokens after the context that have no text yet
        self._num_done = 0  # number of tokens before those in _held
        self.text = ""
        self.found: str | None = None  # the stop string; push is not called after it was found

    @property
    def num_tokens(self) -> int:
        return self._num_done + len(self._held)

    def push(self, token: int) -> str | None:
        """Adds the next token; if the tokenizer raises, the state is unchanged. Returns the stop
        string that the token completes, if any; `text` then ends there."""
        if self._context is None:
            self._context, self._known = self._prime()
        fresh = self._fresh(token)
        if fresh is None or (not fresh and len(self._held) < HEAD + TAIL):
            self._held.append(token)
            return None
        count = self.num_tokens + 1
        if not fresh:
            self._num_done += 1  # the token is dropped, so that _held has a bounded size
            return None
        text, found = self.text + fresh, None
        if count > self._min_tokens:
            text, found = self._cut(text, len(fresh))
        context = [*self._held, token][-MAX_CONTEXT:]
        known, held = (self._decode(context),), list[int]()
        # Python handles signals in calls, so a Ctrl-C cannot interrupt between these assignments.
        self.text, self.found, self._num_done = text, found, count
        self._context, self._known, self._held = context, known, held
        return found

    def text_so_far(self) -> str:
        """Returns the text while more tokens may follow, without last characters that may be the
        beginning of a stop string."""
        if self.found is not None or self._keeps_stop or not self._stops:
            return self.text
        return self.text[: max(0, len(self.text) + 1 - max(map(len, self._stops)))]

    def _decode(self, ids: Sequence[int]) -> str:
        return self._codec.decode(ids, self._skips)

    def _prime(self) -> tuple[list[int], tuple[str, ...]]:
        """Returns the last tokens of the prompt, as many as are needed to have text, and that text.
        A prompt that ends inside a character has two texts: one with the fragment, and one without
        it in case a token completes the character."""
        end, size = len(self._prompt_ids), FEW
        while True:
            context = [int(token) for token in self._prompt_ids[max(0, end - size) : end]]
            whole = text = self._decode(context)
            for cut in range(len(context) - 1, max(-1, len(context) - TAIL), -1):
                if text.endswith(REPLACEMENT):
                    text = self._decode(context[:cut])
            if text and REPLACEMENT not in text:
                return context, (whole, text)
            if size >= min(MANY, end):
                return context, (whole, whole.rstrip(REPLACEMENT))
            if whole or size < MANY // 2:
                size *= 2
            else:
                end -= size  # tokens without text, such as padding

    def _fresh(self, token: int) -> str | None:
        """Returns the text that this token completes, or None if it ends inside a character."""
        context, held = self._context or [], [*self._held, token]
        is_long = len(held) > HEAD + TAIL
        # The first and last tokens determine whether the text ends inside a character.
        ends = [*held[:HEAD], *held[-TAIL:]] if is_long else held
        text = self._decode([*context, *ends])
        if is_long and not text.endswith(REPLACEMENT):
            text = self._decode([*context, *held])
        known = next(filter(text.startswith, self._known), None)
        if known is None and not text.endswith(REPLACEMENT):
            # With byte fallback, a wrong byte makes the characters before it undecodable too.
            known, text = "", self._decode(held)
        return None if text.endswith(REPLACEMENT) else text[len(known or "") :]

    def _cut(self, text: str, num_fresh: int) -> tuple[str, str | None]:
        """Finds the stop string that ends first within the last num_fresh characters. Returns the
        text up to it (or including it) and the stop string, or the whole text and None."""
        found = [
            (at + len(stop), stop)
            for stop in self._stops
            if (at := text.find(stop, max(0, len(text) - num_fresh - len(stop) + 1))) >= 0
        ]
        if not found:
            return text, None
        end, stop = min(found, key=lambda its: its[0])
        return text[: end if self._keeps_stop else end - len(stop)], stop

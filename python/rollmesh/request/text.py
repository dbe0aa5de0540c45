"""Text in and out; the engine knows only token ids. One interface for both kinds of tokenizer, how one is read from a folder, and the
search for stop strings while tokens come in.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rollmesh.errors import ConfigError, RequestError
from rollmesh.runtime.messages import plain, shown

REPLACEMENT = "\ufffd"
MAX_HELD_BACK = 8  # tokens; a character has at most four bytes, so longer runs of undecodable text are final


def tokenizer_of_folder(folder: Path) -> Any:
    """The tokenizer of a Hugging Face folder, None where it has none. A transformers tokenizer where there is a tokenizer_config.json and
    transformers is installed, else a tokenizers.Tokenizer from tokenizer.json. Only local files are read, and no code of the folder is run.

    ConfigError: the files are no tokenizer, or the package to read them is missing.
    """
    file, settings = folder / "tokenizer.json", folder / "tokenizer_config.json"
    if not (settings.is_file() and (find_spec("transformers") or not file.is_file())):
        return load_tokenizer(file) if file.is_file() else None
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        instead = "tokenizer=None loads the model without one"
        raise ConfigError(f"{plain(folder)}: reading its tokenizer needs transformers, or a tokenizer.json; {instead}") from error
    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise ConfigError(f"{plain(folder)}: expected the files of a tokenizer: {plain(error)}") from error


def load_tokenizer(file: Path) -> Any:
    """A tokenizers.Tokenizer from a tokenizer.json."""
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ConfigError("reading tokenizer.json needs the package tokenizers: pip install tokenizers") from error
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:
        raise ConfigError(f"{plain(file)}: expected a tokenizer.json: {plain(error)}") from error


class TextCodec:
    """`tokenizer` is a transformers tokenizer or a tokenizers.Tokenizer."""

    def __init__(self, tokenizer: Any):
        if not (callable(getattr(tokenizer, "encode", None)) and callable(getattr(tokenizer, "decode", None))):
            raise ConfigError(f"tokenizer: expected one of transformers or a tokenizers.Tokenizer, got {type(tokenizer).__name__}")
        self.tokenizer = tokenizer

    def encode(self, text: str, special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt, special tokens added as the tokenizer does by default."""
        try:
            text.encode()
        except UnicodeEncodeError as error:  # for which tokenizers have a bare TypeError
            raise RequestError(f"expected text without half of a surrogate pair, got {shown(text)}") from error
        encoded = self.tokenizer.encode(text) if special_tokens else self.tokenizer.encode(text, add_special_tokens=False)
        ids = getattr(encoded, "ids", encoded)
        if not isinstance(ids, Sequence):
            raise RequestError(f"expected a list of token ids from the tokenizer, got {type(ids).__name__}")
        return list(ids)

    def encode_chat(self, messages: Any, options: dict[str, Any]) -> list[int]:
        """Token ids of a chat, as the tokenizer's template renders it. options: of apply_chat_template."""
        if not callable(getattr(self.tokenizer, "apply_chat_template", None)):
            raise RequestError(f"chat: expected a tokenizer of transformers, with a chat template, got {type(self.tokenizer).__name__}")
        messages = _messages(messages)
        try:
            text = self.tokenizer.apply_chat_template(messages, **{**options, "tokenize": False})
            return list(self.tokenizer.encode(text, add_special_tokens=False))
        except Exception as error:
            raise RequestError(f"chat: expected messages that the template takes, got {type(error).__name__}: {plain(error)}") from error

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        text = self.tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        if not isinstance(text, str):
            raise RequestError(f"expected str from the tokenizer, got {type(text).__name__}")
        return text


def rendered_chat(tokenizer: Any, messages: Any, **options: Any) -> str:
    """Returns the text of a chat by the tokenizer's template. options: of apply_chat_template."""
    return str(tokenizer.apply_chat_template(_messages(messages), **{**options, "tokenize": False}))


def _messages(messages: Any) -> list[dict[str, Any]]:
    """Returns messages as vLLM gives them to a template: content None beside tool calls is "", and
    the arguments of a tool call are an object where they are JSON."""
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Iterable):
        raise RequestError(f"chat: expected messages of {{role, content}}, got {shown(messages)}")
    return [_message(message) for message in messages]


def _message(message: Any) -> dict[str, Any]:
    """A template would print what is no text as Python shows it, or nothing."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(f"chat: expected messages of {{role, content}}, got {shown(message)}")
    content, calls = message.get("content"), message.get("tool_calls")
    if not isinstance(content, str) and not (content is None and calls):
        raise RequestError(f"chat: expected the content of a message of role {message['role']} to be text, got {shown(content)}")
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


class StopWatcher:
    """Finds the first of `stops` in the text of one sample, token by token.

    Incremental detokenization: new text is decode(tokens[prefix_offset:]) without its beginning, decode(tokens[prefix_offset:
    read_offset]).
    Text that ends in U+FFFD is held back, because the character may still be completed.
    """

    def __init__(
        self, codec: TextCodec, stops: Sequence[str], min_tokens: int, *, skip_special_tokens: bool = True, keeps_stop: bool = False
    ):
        """keeps_stop: the text ends with the stop string."""
        self.codec, self.stops, self.min_tokens = codec, stops, min_tokens
        self._skips, self._keeps_stop = skip_special_tokens, keeps_stop
        self._tokens: list[int] = []
        self._prefix_offset = self._read_offset = 0
        self.text = ""
        self.found: str | None = None  # the stop string; nothing is pushed after it

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    def push(self, token: int) -> str | None:
        """Takes the next token, or on an exception none. Returns the stop string that it completed; `text` then ends there."""
        known = self.codec.decode(self._tokens[self._prefix_offset : self._read_offset], self._skips)
        text = self.codec.decode([*self._tokens[self._prefix_offset :], token], self._skips)
        count = len(self._tokens) + 1
        if len(text) <= len(known) or (text.endswith(REPLACEMENT) and count - self._read_offset <= MAX_HELD_BACK):
            self._tokens.append(token)
            return None
        fresh = text[len(known) :]
        text, found = self.text + fresh, None
        if count > self.min_tokens:
            text, found = self._cut(text, len(fresh))
        self.text, self.found, self._prefix_offset, self._read_offset = text, found, self._read_offset, count
        self._tokens.append(token)  # a Ctrl-C comes before both lines or after both
        return found

    def _cut(self, text: str, num_fresh: int) -> tuple[str, str | None]:
        """Text up to the stop string (or with it) that begins first among those that end in its last num_fresh characters, and that."""
        first: tuple[int, str] | None = None
        for stop in self.stops:
            at = text.find(stop, max(0, len(text) - num_fresh - len(stop) + 1))
            if at >= 0 and (first is None or at < first[0]):
                first = (at, stop)
        if first is None:
            return text, None
        return text[: first[0] + len(first[1]) * self._keeps_stop], first[1]

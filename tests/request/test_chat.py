"""Messages are normalized like in vLLM before the chat template renders them.

Oracle: the text, written by hand, of a template that prints all its inputs."""

from __future__ import annotations

import json
from collections import UserDict
from typing import Any

import numpy as np
import pytest
from paths import ROOT

from rollmesh.errors import RequestError
from rollmesh.request.text import TextCodec, rendered_chat
from rollmesh.run import data

CHARS = ROOT / "data/chars"
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ (c.function or c) | tojson }}{% endfor %}"
    "{{ m.name }};{% endfor %}"
)
CALL = {"name": "f", "arguments": {"x": [1, "é"]}}
TEXT = '{"name": "f", "arguments": {"x": [1, "é"]}}'


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    loaded = data.load_tokenizer(CHARS)
    loaded.chat_template = TEMPLATE
    return loaded


@pytest.mark.parametrize(
    "message, text",
    [
        ({"content": "a", "name": "b"}, "a:ab;"),
        ({"content": np.str_("a")}, "a:a;"),
        (UserDict({"content": "a"}), "a:a;"),
        ({"content": None, "tool_calls": [{"type": "function", "function": CALL}]}, f"a:{TEXT};"),
        (
            {"tool_calls": [{"function": {**CALL, "arguments": json.dumps(CALL["arguments"])}}]},
            f"a:{TEXT};",
        ),
        (
            {"content": "x", "tool_calls": [{**CALL, "arguments": json.dumps(CALL["arguments"])}]},
            f"a:x{TEXT};",
        ),
        (
            {"tool_calls": [{"function": {"name": "f", "arguments": ""}}]},
            'a:{"name": "f", "arguments": {}};',
        ),
        (
            {"tool_calls": [{"function": {"name": "f", "arguments": None}}]},
            'a:{"name": "f", "arguments": {}};',
        ),
        ({"tool_calls": [{"function": {"name": "f"}}]}, 'a:{"name": "f", "arguments": {}};'),
        ({"content": "x", "tool_calls": []}, "a:x;"),
        ({"content": "x", "tool_calls": None}, "a:x;"),
    ],
)
def test_a_message_reaches_the_template_as_in_vllm(tokenizer: Any, message: Any, text: str) -> None:
    message["role"] = "a"
    before = json.dumps(dict(message))
    assert rendered_chat(tokenizer, [message]) == text
    assert json.dumps(dict(message)) == before, "the caller's message does not change"


@pytest.mark.parametrize(
    "messages, words",
    [
        (None, "expected messages of {role, content}, got None"),
        ("ab", "expected messages of {role, content}, got 'ab'"),
        (
            [{"role": "a", "tool_calls": []}],
            "expected the content of a message of role a to be text, got None",
        ),
        (
            [{"role": "a", "tool_calls": ["f"]}],
            "expected tool calls of {function: {name, arguments}}, got 'f'",
        ),
        ([{"role": "a", "tool_calls": 3}], "expected a list of tool calls, got 3"),
        (
            [{"role": "a", "tool_calls": [{"name": "f", "arguments": "{"}]}],
            "expected JSON as the arguments of a tool call, got '{'",
        ),
    ],
)
def test_messages_that_are_none_are_refused(tokenizer: Any, messages: Any, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        TextCodec(tokenizer).encode_chat(messages, {})
    assert str(caught.value) == f"chat: {words}"


def test_messages_of_an_iterator_are_all_rendered(tokenizer: Any) -> None:
    """The checks do not consume the iterator."""
    codec, chat = (
        TextCodec(tokenizer),
        [{"role": "user", "content": "ab"}, {"role": "user", "content": "cd"}],
    )
    assert (
        codec.encode_chat(iter(chat), {})
        == codec.encode_chat(chat, {})
        == codec.encode("user:ab;user:cd;", False)
    )


def test_a_prompt_of_a_dataset_is_rendered_as_chat_does(tokenizer: Any) -> None:
    call = {"function": {"name": "f", "arguments": '{"x": 1}'}}
    chat = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    prompt = data.make_prompt({"messages": chat}, tokenizer, False, 0, "here")
    assert tokenizer.decode(prompt.ids) == 'user:a;assistant:{"name": "f", "arguments": {"x": 1}};'
    assert list(prompt.ids) == TextCodec(tokenizer).encode_chat(
        chat, {"add_generation_prompt": True}
    )
    assert prompt.source == chat

"""The tokens between two turns of the policy: the end of its message, the reply, and the beginning
of its next message.

    drawn    the tokens of a turn as they were drawn, including the end token
    between  the text that the chat template renders after that turn, without the part that the end
             token replaces
    drawn    the next turn

So a conversation is the template's text around the policy's own tokens. The part that the end token
replaces is

    up to the same token, if the template puts it before the text of the reply: <|im_end|> of Qwen,
        and the marker <|user|> that begins the next message of GLM-4
    up to the end token of the template, if it ends the message with another one: Llama 3.1's
        <|eot_id|>, where the policy drew <|eom_id|>
    empty, if the template does not end the message with an end token

The template renders the conversation with a marker instead of the turn's text, since templates such
as Qwen3's change the text of a turn if a reply follows it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import takewhile
from typing import Any

from rollmesh.request.text import rendered_chat

ANSWER, REPLY = "rollmesh.answer", "rollmesh.reply"  # templates render such words unchanged


def reply_tokens(
    before: Sequence[Any], reply: Any, end: int, tokenizer: Any, ends: Collection[int]
) -> list[int]:
    """Returns the tokens after the end token `end` of a turn.

    before  the messages before that turn, of a chat
    reply   the messages after it, or the text that follows in a text prompt
    ends    all end tokens

    Raises ValueError if the end of a message cannot be found in the template's text, and any error
    of the template."""
    if isinstance(reply, str):
        return _after(end, reply, tokenizer)
    marked = [{**m, "content": m["content"] and f"{REPLY}{i}"} for i, m in enumerate(reply)]
    whole, header = (_tail(before, messages, tokenizer) for messages in (reply, marked))
    for message in marked:
        if message["content"] not in header:
            raise ValueError(f"a template that leaves out a message of role {message['role']}")
    ids = _after(end, whole, tokenizer)
    opening = _after(end, header.partition(REPLY)[0], tokenizer)
    if end in opening:
        count = opening.index(end) + 1
    else:
        closing = _after(end, _tail(before, [], tokenizer), tokenizer)
        pairs = zip(closing, opening, strict=False)
        common = [a for a, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
        count = next((i + 1 for i, token in enumerate(common) if token in ends), 0)
    if ids[:count] != opening[:count]:
        raise ValueError("a template that ends a message according to the text of the next one")
    return ids[count:]


def _tail(before: Sequence[Any], after: Sequence[Any], tokenizer: Any) -> str:
    """Returns the text that the template renders after the text of an assistant's message between
    `before` and `after`. If `after` is not empty, it ends with the beginning of the next answer."""
    marker = ANSWER
    while any(marker in str(m.get("content")) for m in (*before, *after)):
        marker += "."
    messages = [*before, {"role": "assistant", "content": marker}, *after]
    parts = rendered_chat(tokenizer, messages, add_generation_prompt=bool(after)).split(marker)
    if len(parts) != 2:
        raise ValueError(f"a template that renders the text of an answer {len(parts) - 1} times")
    return parts[1]


def _after(end: int, text: str, tokenizer: Any) -> list[int]:
    """Returns the tokens of `text` after the token `end`, which may change the first one."""
    token = tokenizer.convert_ids_to_tokens(end) or ""  # None: an id that only the model has
    ids = tokenizer.encode(token + text, add_special_tokens=False)
    if ids[:1] != [end]:  # not a special token
        ids = [end, *tokenizer.encode(text, add_special_tokens=False)]
    return list(ids[1:])

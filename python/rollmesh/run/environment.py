"""The user's environment, which replies to the policy (grpo/environment.py)."""

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from rollmesh.errors import ConfigError
from rollmesh.request.reply_tokens import reply_tokens
from rollmesh.request.text import chat_messages
from rollmesh.run.data import Prompt
from rollmesh.run.files import library_errors
from rollmesh.run.user_code import Call, EventLoop, imported
from rollmesh.runtime.messages import shown


class Environment:
    """The function of [rollout] environment. An async function is awaited for all conversations
    together."""

    def __init__(self, name: str, folder: Path | None, event_loop: EventLoop) -> None:
        self.what = f"environment {name}"
        self._function = imported(name, folder, "[rollout] environment")
        self._loop = event_loop

    def replies(self, conversations: Sequence[tuple[Prompt, Any]]) -> list[Any]:
        """Returns None, a text or messages for each pair of a prompt and the completion so far.
        Raises ConfigError if the function raised or returned anything else."""

        def call(prompt: Prompt, completion: Any) -> Call:
            given = {**prompt.columns, "prompt": prompt.source, "completion": completion}
            return Call(self.what, self._function, lambda: copy.deepcopy(given))

        results = self._loop.run([call(*pair) for pair in conversations])
        pairs = zip(results, conversations, strict=True)
        return [self._checked(reply, prompt) for (reply, _), (prompt, _) in pairs]

    def _checked(self, reply: Any, prompt: Prompt) -> Any:
        messages = [reply] if isinstance(reply, dict) else reply
        if reply is None or (isinstance(reply, str) and reply and not prompt.is_chat):
            return reply
        if not prompt.is_chat:
            raise ConfigError(f"{self.what}: expected a text, or None, got {shown(reply)}")
        wanted = "a message {role, content} of what JSON has, a list of them, or None"
        with library_errors(f"{self.what}: expected {wanted}"):
            json.dumps(messages)  # for completions.jsonl
            return copy.deepcopy(chat_messages(messages))


def check_template(prompts: Sequence[Prompt], tokenizer: Any, ends: Collection[int]) -> None:
    """Raises ConfigError if the text between an answer and a reply cannot be found in the output of
    the chat template."""
    reply = [{"role": "user", "content": "a"}]
    of = f"the chat template of {tokenizer.name_or_path}"
    what = f"[rollout] environment: expected {of} to render an answer and a reply to it"
    for prompt in [p for p in prompts if p.is_chat][:1]:
        with library_errors(what):
            for end in ends:
                reply_tokens(list(prompt.source), reply, end, tokenizer, ends)

"""Rollouts of several turns: what the policy wrote goes to an environment, whose reply follows in
the same completion.

    turn 1    the policy draws tokens until an end token
    reply     environment(prompt, completion, **columns) → the reply, or None: the conversation is
              over
    turn 2    the policy goes on after the tokens of turn 1, as they were drawn, and those of the
              reply

Nothing that was drawn is ever tokenized again, so the trainer computes the logprobs that were
recorded. Tokens of replies are part of the sequence and not of the loss (Rollout.drawn). Together
with them a completion has at most max_tokens tokens. One whose turn ends without an end token is
over, and so is one whose reply leaves no room for a token, which is then left out.

reply_tokens.py gives the tokens of a reply.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import json
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import rollmesh as rm
from rollmesh.grpo.rollout import Rollout
from rollmesh.request.reply_tokens import reply_tokens
from rollmesh.run.config import RolloutTable
from rollmesh.run.data import Prompt, is_chat
from rollmesh.run.files import told_as
from rollmesh.run.user_code import EventLoop, finished, imported, is_async, naming
from rollmesh.runtime.messages import shown


class Environment:
    """[rollout] environment. An async function is awaited for all conversations together."""

    def __init__(self, name: str, folder: Path | None, event_loop: EventLoop) -> None:
        self.name = name
        self._function = imported(name, folder, "[rollout] environment")
        self._loop = event_loop

    def replies(self, prompts: Sequence[Prompt], completions: Sequence[Any]) -> list[Any]:
        """Of each conversation: None; a text; or of a chat messages. ConfigError: the function
        raised, or returned something else."""
        if is_async(self._function):
            works = [self._await(p, c) for p, c in zip(prompts, completions, strict=True)]
            found = self._loop.run(f"environment {self.name}", works)
        else:
            found = [self._call(p, c) for p, c in zip(prompts, completions, strict=True)]
        return [self._checked(reply, p) for reply, p in zip(found, prompts, strict=True)]

    def _call(self, prompt: Prompt, completion: Any) -> Any:
        with naming(f"environment {self.name}"):
            return self._function(**_given(prompt, completion))

    async def _await(self, prompt: Prompt, completion: Any) -> Any:
        with naming(f"environment {self.name}", but=asyncio.CancelledError):
            return await finished(self._function(**_given(prompt, completion)))

    def _checked(self, reply: Any, prompt: Prompt) -> Any:
        messages = [reply] if isinstance(reply, dict) else reply
        if reply is None or (isinstance(reply, str) and reply and not prompt.is_chat):
            return reply
        if prompt.is_chat and is_chat(messages):
            with told_as(
                f"environment {self.name}: expected a reply of what JSON has"
            ):  # completions.jsonl
                json.dumps(messages)
            return copy.deepcopy(messages)
        wanted = "a message {role, content}, a list of them" if prompt.is_chat else "a text"
        raise rm.ConfigError(
            f"environment {self.name}: expected {wanted}, or None, got {shown(reply)}"
        )

    def reply_ids(
        self, c: _Conversation, reply: Any, tokenizer: Any, ends: Collection[int]
    ) -> list[int]:
        """Returns the tokens of a reply to a conversation."""
        before = [*c.prompt.source, *c.completion()[:-1]] if c.prompt.is_chat else []
        what = "expected a reply that the tokenizer and its chat template take"
        with told_as(f"environment {self.name}: {what}"):
            return reply_tokens(before, reply, c.token_ids[-1], tokenizer, ends)


def check_template(prompts: Sequence[Prompt], tokenizer: Any, ends: Collection[int]) -> None:
    """ConfigError: it is not clear what the chat template puts between a turn and a reply to it."""
    reply = [{"role": "user", "content": "a"}]
    of = f"the chat template of {tokenizer.name_or_path}"
    for prompt in [p for p in prompts if p.is_chat][:1]:
        with told_as(f"[rollout] environment: expected {of} to render an answer and a reply to it"):
            for end in ends:
                reply_tokens(list(prompt.source), reply, end, tokenizer, ends)


def _given(prompt: Prompt, completion: Any) -> dict[str, Any]:
    return copy.deepcopy({**prompt.columns, "prompt": prompt.source, "completion": completion})


@dataclass
class _Conversation:
    prompt: Prompt
    rollout: Rollout  # of one completion, which grows
    turns: int = 1

    @property
    def token_ids(self) -> list[int]:
        return self.rollout.token_ids[0]

    def drawn(self) -> NDArray[np.bool_]:
        return (
            np.ones(len(self.token_ids), bool)
            if self.rollout.drawn is None
            else self.rollout.drawn[0]
        )

    def completion(self) -> Any:
        text = self.rollout.texts[0]
        return (
            [{"role": "assistant", "content": text}]
            if self.prompt.is_chat and isinstance(text, str)
            else text
        )

    def go_on(self, reply: Any, reply_ids: list[int], turn: Rollout) -> None:
        """`turn`: the policy's answer to the reply, one completion."""
        mine, said = self.rollout, turn.texts[0]
        text = self.completion() + (
            [*reply, {"role": "assistant", "content": said}]
            if self.prompt.is_chat
            else reply + said
        )
        drawn = [
            self.drawn(),
            np.zeros(len(reply_ids), bool),
            np.ones(len(turn.token_ids[0]), bool),
        ]
        kept = None
        if mine.kept_tokens is not None and turn.kept_tokens is not None:
            kept = [np.concatenate([mine.kept_tokens[0], turn.kept_tokens[0]])]
        self.rollout = Rollout(
            prompts=[self.prompt],
            token_ids=[[*self.token_ids, *reply_ids, *turn.token_ids[0]]],
            logprobs=[np.concatenate([mine.logprobs[0], turn.logprobs[0]])],
            texts=[text],
            stopped=turn.stopped,
            kept_tokens=kept,
            # of the whole sequence: all before this turn was its prompt
            routed_experts=turn.routed_experts,
            versions=[np.concatenate([mine.versions[0], turn.versions[0]])],
            drawn=[np.concatenate(drawn)],
        )
        self.turns += 1


def converse(
    first: Rollout,
    draw: Callable[[int, list[int], list[Prompt], list[int]], Rollout],
    environment: Environment,
    tokenizer: Any,
    ends: Collection[int],
    table: RolloutTable,
) -> Rollout:
    """The completions of `first`, which has the first turns, with all that follow.

    draw  (turn from 1, completions, what each goes on from as a prompt, tokens that each has left)
          → one completion of each"""
    every = [_Conversation(p, first.take([i])) for i, p in enumerate(first.prompts)]
    open_ones, seconds, environment_s = list(range(len(every))), first.seconds, 0.0
    for turn in range(1, table.max_assistant_turns):
        asked = [i for i in open_ones if every[i].rollout.stopped[0]]
        began = time.perf_counter()
        replies = environment.replies(
            [every[i].prompt for i in asked], [every[i].completion() for i in asked]
        )
        environment_s += time.perf_counter() - began
        told = {}
        for i, reply in zip(asked, replies, strict=True):
            if reply is not None:
                told[i] = reply, environment.reply_ids(every[i], reply, tokenizer, ends)
        left = {
            i: table.max_tokens - len(every[i].token_ids) - len(ids) for i, (_, ids) in told.items()
        }
        for i in told:
            every[i].rollout.stopped[0] = left[i] > 0
        open_ones = [i for i in told if left[i] > 0]
        if not open_ones:
            break
        prompts = [
            Prompt("", (*every[i].prompt.ids, *every[i].token_ids, *told[i][1]), {})
            for i in open_ones
        ]
        answers = draw(turn, open_ones, prompts, [left[i] for i in open_ones])
        seconds += answers.seconds
        for place, i in enumerate(open_ones):
            every[i].go_on(*told[i], answers.take([place]))
    whole = [
        dataclasses.replace(c.rollout, drawn=[c.drawn()], texts=[c.completion()], turns=[c.turns])
        for c in every
    ]
    return dataclasses.replace(Rollout.joined(whole), seconds=seconds, environment_s=environment_s)

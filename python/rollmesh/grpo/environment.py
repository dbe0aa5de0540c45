"""Rollouts of several turns: in one completion, an environment replies to the policy's text.

    turn 1    the policy draws tokens until an end token
    reply     environment(prompt, completion, **columns) → the reply, or None at the end
    turn 2    the policy continues after the drawn tokens of turn 1 and the tokens of the reply

Drawn tokens are never tokenized again, so the trainer computes the logprobs that were recorded. The
tokens of replies (request/reply_tokens.py) are part of the sequence and not of the loss
(Rollout.drawn). A completion has at most max_tokens tokens, replies included. A turn without an end
token ends it, and so does a reply that leaves no room for a token; such a reply is left out.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from rollmesh.grpo.rollout import completion_of
from rollmesh.request.reply_tokens import reply_tokens
from rollmesh.run.config import RolloutTable
from rollmesh.run.data import Prompt
from rollmesh.run.environment import Environment
from rollmesh.run.files import library_errors
from rollmesh.run.samples import Completion, Rollout


def converse(
    first: Rollout,
    draw: Callable[[int, list[int], list[Prompt], list[int]], Rollout],
    environment: Environment,
    tokenizer: Any,
    ends: Collection[int],
    table: RolloutTable,
) -> Rollout:
    """Continues the completions of `first`, which has their first turns.

    draw  a function of the turn (from 1), the completions, the tokens of each so far as a prompt,
          and the number of tokens left for each; returns one turn for each"""
    completions = [
        dataclasses.replace(c, text=completion_of(c.prompt, c.text)) for c in first.completions
    ]
    running, seconds, environment_s = list(range(len(completions))), first.seconds, 0.0
    for turn in range(1, table.max_assistant_turns):
        asked = [i for i in running if completions[i].stopped]
        began = time.perf_counter()
        replies = environment.replies([(completions[i].prompt, completions[i].text) for i in asked])
        environment_s += time.perf_counter() - began
        continued: dict[int, Completion] = {}
        left: dict[int, int] = {}
        for i, reply in zip(asked, replies, strict=True):
            if reply is None:
                continue
            c = completions[i]
            before = [*c.prompt.source, *c.text[:-1]] if c.prompt.is_chat else []
            what = "expected a reply that the tokenizer and its chat template take"
            with library_errors(f"{environment.what}: {what}"):
                ids = reply_tokens(before, reply, c.token_ids[-1], tokenizer, ends)
            room = table.max_tokens - len(c.token_ids) - len(ids)
            if room <= 0:
                completions[i] = dataclasses.replace(c, stopped=False)
                continue
            left[i], continued[i] = room, _with_reply(c, reply, ids)
        if not left:
            break
        running = list(left)
        given = [Prompt("", (*c.prompt.ids, *c.token_ids), {}) for c in continued.values()]
        answers = draw(turn, running, given, list(left.values()))
        seconds += answers.seconds
        for i, answer in zip(running, answers.completions, strict=True):
            completions[i] = _with_turn(continued[i], answer)
    return Rollout(completions, seconds, environment_s)


def _with_reply(c: Completion, reply: Any, ids: list[int]) -> Completion:
    return dataclasses.replace(
        c,
        token_ids=[*c.token_ids, *ids],
        text=c.text + reply,
        drawn=np.append(c.drawn, np.zeros(len(ids), bool)),
    )


def _with_turn(c: Completion, turn: Completion) -> Completion:
    """Appends the policy's answer. The prompt of `turn` was the whole sequence before it, so its
    routed experts are those of the whole sequence."""
    kept = None
    if c.kept_tokens is not None and turn.kept_tokens is not None:
        kept = np.concatenate([c.kept_tokens, turn.kept_tokens])
    return dataclasses.replace(
        c,
        token_ids=[*c.token_ids, *turn.token_ids],
        logprobs=np.append(c.logprobs, turn.logprobs),
        versions=np.append(c.versions, turn.versions),
        text=c.text + completion_of(c.prompt, turn.text),
        stopped=turn.stopped,
        drawn=np.append(c.drawn, np.ones(len(turn.token_ids), bool)),
        turns=c.turns + 1,
        kept_tokens=kept,
        routed_experts=turn.routed_experts,
    )

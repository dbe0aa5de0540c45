"""Rewards: a number for the text of each completion.

A reward is a function with TRL's signature,
`reward(prompts, completions, completion_ids=None, **columns) -> list[float]`. All arguments are
lists with one item per completion, so a prompt and its columns repeat for each of its samples. The
prompts and completions of a chat are lists of messages. The function may change its arguments.
`async def` functions are awaited together, after the others. A name is one of BUILT_IN or
`module:function`, imported from the config's folder, the working folder or the Python path.
"""

from __future__ import annotations

import copy
import functools
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import rollmesh as rm
from rollmesh.run.samples import Scores
from rollmesh.run.user_code import MAX_REWARD, EventLoop, call_rewards, imported
from rollmesh.runtime.messages import shown

_log = logging.getLogger("rollmesh.grpo")
RewardFunction = Callable[..., Sequence[float | None] | Awaitable[Sequence[float | None]]]


def _by_answer(compare: Callable[[str, str], float]) -> RewardFunction:
    """Makes a reward of a comparison of a completion's text with the column `answer`."""

    @functools.wraps(compare)
    def reward(
        prompts: Sequence[Any], completions: Sequence[Any], *, answer: Sequence[Any] = (), **_: Any
    ) -> list[float]:
        for wanted in answer or [None]:  # empty if the rows do not have the column
            if not isinstance(wanted, str):
                got = shown(wanted)
                raise TypeError(f"expected text in the column answer of each prompt, got {got}")
        return [float(compare(text_of(c), a)) for c, a in zip(completions, answer, strict=True)]

    return reward


@_by_answer
def char_match(text: str, answer: str) -> float:
    """Returns the share of positions with the answer's character, relative to the longer of the two
    texts. Only the answer itself gets 1."""
    longer = max(len(text), len(answer))
    return sum(a == b for a, b in zip(text, answer, strict=False)) / longer if longer else 1.0


@_by_answer
def exact_match(text: str, answer: str) -> float:
    """Returns 1 if the completion is the answer, apart from white space at both ends."""
    return text.strip() == answer.strip()


@_by_answer
def contains(text: str, answer: str) -> float:
    """Returns 1 if the completion contains the answer."""
    return answer in text


def text_of(completion: Any) -> str:
    """Returns the text of a completion; of a chat the policy's messages without the replies."""
    if isinstance(completion, str):
        return completion
    return "".join(m["content"] for m in completion if m["role"] == "assistant")


BUILT_IN: dict[str, RewardFunction] = {
    "char_match": char_match,
    "exact_match": exact_match,
    "contains": contains,
}


class Rewards:
    """The weighted sum of a run's reward functions."""

    def __init__(
        self, names: Sequence[str], weights: Sequence[float] = (), folder: Path | None = None
    ) -> None:
        self.names = tuple(names)
        self.functions = [resolve(name, folder) for name in names]
        self.weights = tuple(weights) or (1.0,) * len(self.functions)
        self.event_loop = EventLoop()
        self.close = self.event_loop.close
        self._warned = False

    def __call__(self, *args: Any) -> list[float]:
        """Takes the arguments of `judge` and returns its sums."""
        return self.judge(*args).total

    def judge(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        columns: dict[str, list[Any]],
    ) -> Scores:
        """Returns the weighted sum over the functions that judge a completion, NaN if all return
        None, and the values of each function.

        Raises ConfigError if a function raised (with its traceback as a note), or did not return
        one number or None for each completion."""
        began, count = time.perf_counter(), len(completions)

        def arguments() -> dict[str, Any]:
            given = {"prompts": list(prompts), "completions": list(completions), **columns}
            return {**copy.deepcopy(given), "completion_ids": [list(i) for i in completion_ids]}

        functions = dict(zip(self.names, self.functions, strict=True))
        results = call_rewards(self.event_loop, functions, arguments, count)
        numbers = {name: values for name, (values, _) in results.items()}
        total = [0.0] * count
        for name, weight in zip(self.names, self.weights, strict=True):
            total = [t + weight * (n or 0.0) for t, n in zip(total, numbers[name], strict=True)]
        for i, number in enumerate(total):
            if not abs(number) <= MAX_REWARD:
                raise rm.ConfigError(
                    f"[reward] weights: expected sums of at most {MAX_REWARD:g}, got {number:g} "
                    f"for completion {i}"
                )
        of_each = zip(*numbers.values(), strict=True)
        unjudged = [i for i, values in enumerate(of_each) if all(v is None for v in values)]
        for i in unjudged:
            total[i] = math.nan
        if unjudged and not self._warned:
            self._warned = True
            _log.warning(
                "%d of %d completions got None from every reward function; their advantage is 0, "
                "and they do not count in the means",
                len(unjudged),
                count,
            )
        seconds_of = {name: seconds for name, (_, seconds) in results.items()}
        return Scores(total, numbers, seconds_of, time.perf_counter() - began)


def resolve(name: str, folder: Path | None = None) -> RewardFunction:
    """Returns a built-in reward, or imports `module:function`. Raises ConfigError."""
    return BUILT_IN.get(name) or imported(name, folder, "[reward] functions", list(BUILT_IN))

"""Rewards: a number for the text of each completion.

A reward is a function with TRL's signature,
`reward(prompts, completions, completion_ids=None, **columns) -> list[float]`: lists of one length,
one item a completion, so a prompt and its columns come once for each of its samples. Of a chat,
prompts are message lists and completions lists of the messages that follow, as in TRL. It gets
copies, which it may change. `async def` functions are awaited together, after the others. Built-in
names stand below; anything else is `module:function`, imported from the config's folder, the
working folder or the Python path.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Set, Sized
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

import rollmesh as rm
from rollmesh.run.user_code import EventLoop, finished, imported, is_async, naming
from rollmesh.runtime.messages import shown

_log = logging.getLogger("rollmesh.grpo")
RewardFunction = Callable[..., Sequence[float | None] | Awaitable[Sequence[float | None]]]
Answer = tuple[list[Any], float]  # what a function returned, and the seconds it took
MAX_REWARD = 1e18  # its square fits into a float32
MAX_NOTE = 8000  # characters of a traceback, whose exception may hold a megabyte
TEXT = (str, bytes, bytearray)  # which float() or list() would take
UNORDERED_OR_TEXT = (*TEXT, Mapping, Set)


def char_match(
    prompts: Sequence[Any], completions: Sequence[Any], *, answer: Sequence[Any] = (), **_: Any
) -> list[float]:
    """Share of positions with the answer's character, over the longer of the two lengths. 1 only
    for the answer itself."""
    return [_char_match(text_of(c), a) for c, a in zip(completions, _texts(answer), strict=True)]


def exact_match(
    prompts: Sequence[Any], completions: Sequence[Any], *, answer: Sequence[Any] = (), **_: Any
) -> list[float]:
    """1 where the completion is the answer, white space at both ends apart."""
    return [
        float(text_of(c).strip() == a.strip())
        for c, a in zip(completions, _texts(answer), strict=True)
    ]


def contains(
    prompts: Sequence[Any], completions: Sequence[Any], *, answer: Sequence[Any] = (), **_: Any
) -> list[float]:
    """1 where the answer stands somewhere in the completion."""
    return [float(a in text_of(c)) for c, a in zip(completions, _texts(answer), strict=True)]


def _texts(answer: Sequence[Any]) -> Sequence[str]:
    for a in answer or [None]:  # none of the rows has the column
        if not isinstance(a, str):
            raise TypeError(f"expected text in the column answer of each prompt, got {shown(a)}")
    return answer


BUILT_IN: dict[str, RewardFunction] = {
    "char_match": char_match,
    "exact_match": exact_match,
    "contains": contains,
}


@dataclass(frozen=True)
class Scores:
    total: list[float]  # [completions]: the weighted sums; NaN: no function judged it
    values: dict[str, list[float | None]]  # of each function, by completion; None: not judged
    seconds_of: dict[str, float]  # that each function took
    seconds: float  # that all took

    def metrics(self) -> dict[str, float]:
        """Of each function: reward/NAME, its mean over the completions that it judged, and
        reward_s/NAME, its seconds."""
        judged = {
            name: [value for value in values if value is not None]
            for name, values in self.values.items()
        }
        means = {
            f"reward/{name}": math.fsum(values) / len(values)
            for name, values in judged.items()
            if values
        }
        return means | {f"reward_s/{name}": seconds for name, seconds in self.seconds_of.items()}

    def mean(self) -> float | None:
        """Mean reward of the judged completions. None: there are none."""
        return float(np.mean(judged)) if (judged := self._judged()) else None

    def std(self) -> float | None:
        """Their standard deviation."""
        return float(np.std(judged)) if (judged := self._judged()) else None

    def _judged(self) -> list[float]:
        return [number for number in self.total if not math.isnan(number)]

    def take(self, indices: Sequence[int]) -> Scores:
        """Those of these completions; the seconds stay."""
        values = {name: [numbers[i] for i in indices] for name, numbers in self.values.items()}
        return replace(self, total=[self.total[i] for i in indices], values=values)

    @staticmethod
    def joined(parts: Sequence[Scores]) -> Scores:
        names = parts[0].values
        return Scores(
            [number for part in parts for number in part.total],
            {name: [value for part in parts for value in part.values[name]] for name in names},
            {name: sum(part.seconds_of[name] for part in parts) for name in names},
            sum(part.seconds for part in parts),
        )


class Rewards:
    """The weighted sum of a run's reward functions."""

    def __init__(
        self, names: Sequence[str], weights: Sequence[float] = (), folder: Path | None = None
    ) -> None:
        self.names = tuple(names)
        self.functions = [resolve(name, folder) for name in names]
        self.weights = tuple(weights) or (1.0,) * len(self.functions)
        self.event_loop = EventLoop()
        self._says_unjudged = True

    def close(self) -> None:
        self.event_loop.close()

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        columns: dict[str, list[Any]],
    ) -> list[float]:
        """Returns one number per completion: the weighted sum over the functions that judge it, or
        NaN if all return None. A function returns None for a completion that it does not judge.

        ConfigError: a function raised (its traceback is a note of the error), or returned something
        else."""
        return self.judge(prompts, completions, completion_ids, columns).total

    def judge(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        columns: dict[str, list[Any]],
    ) -> Scores:
        """As __call__, with what each function said."""
        began, count, total = time.perf_counter(), len(completions), [0.0] * len(completions)

        def given() -> dict[str, Any]:
            texts = copy.deepcopy(
                {"prompts": list(prompts), "completions": list(completions), **columns}
            )
            return {**texts, "completion_ids": [list(ids) for ids in completion_ids]}

        functions = dict(zip(self.names, self.functions, strict=True))
        answers = {
            name: _call(name, f, given, count) for name, f in functions.items() if not is_async(f)
        }
        if waits := {name: f for name, f in functions.items() if is_async(f)}:
            found = self.event_loop.run(
                f"reward {', '.join(waits)}",
                [_await(name, f, given, count) for name, f in waits.items()],
            )
            answers |= zip(waits, found, strict=True)
        numbers = {
            n: [None if v is None else _number(v, n, i) for i, v in enumerate(answers[n][0])]
            for n in self.names
        }
        of_each = zip(*numbers.values(), strict=True)
        unjudged = [i for i, values in enumerate(of_each) if all(v is None for v in values)]
        if unjudged and self._says_unjudged:
            self._says_unjudged = False  # once a run
            _log.warning(
                "%d of %d completions got None from every reward function; their advantage is 0, "
                "and they do not count in the means",
                len(unjudged),
                count,
            )
        for name, weight in zip(self.names, self.weights, strict=True):
            total = [
                t + weight * (number or 0.0) for t, number in zip(total, numbers[name], strict=True)
            ]
        for i, number in enumerate(total):
            if not abs(number) <= MAX_REWARD:
                raise rm.ConfigError(
                    f"[reward] weights: expected sums of at most {MAX_REWARD:g}, got {number:g} "
                    f"for completion {i}"
                )
        for i in unjudged:
            total[i] = math.nan
        return Scores(
            total,
            numbers,
            {name: answers[name][1] for name in numbers},
            time.perf_counter() - began,
        )


def resolve(name: str, folder: Path | None = None) -> RewardFunction:
    """A built-in by its name, or `module:function`. Raises rm.ConfigError."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    return imported(name, folder, "[reward] functions", list(BUILT_IN))


def _call(
    name: str, function: RewardFunction, given: Callable[[], dict[str, Any]], count: int
) -> Answer:
    began = time.perf_counter()
    with naming(f"reward {name}"):
        returned = function(**given())
        values = _listed(returned, count)
    return _counted(name, returned, values, count), time.perf_counter() - began


async def _await(
    name: str, function: RewardFunction, given: Callable[[], dict[str, Any]], count: int
) -> Answer:
    began = time.perf_counter()
    with naming(f"reward {name}", but=asyncio.CancelledError):
        returned = await finished(function(**given()))  # type: ignore[arg-type]
        values = _listed(returned, count)
    return _counted(name, returned, values, count), time.perf_counter() - began


def _listed(returned: Any, count: int) -> list[Any] | None:
    """At most count + 1 values; a generator may have no end."""
    if isinstance(returned, UNORDERED_OR_TEXT) or not isinstance(returned, Iterable):
        return None
    return list(islice(returned, count + 1))


def _counted(name: str, returned: Any, values: list[Any] | None, count: int) -> list[Any]:
    if values is None or len(values) != count:
        got = (
            f"a {type(returned).__name__}"
            if values is None
            else len(returned)
            if isinstance(returned, Sized)
            else len(values)
        )
        raise rm.ConfigError(f"reward {name}: expected {count} values, one a completion, got {got}")
    return values


def _number(value: Any, name: str, i: int) -> float:
    try:
        number = math.nan if isinstance(value, TEXT) else float(value)
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001 (of the value's own __float__)
        number = math.nan
    if not abs(number) <= MAX_REWARD:
        raise rm.ConfigError(
            f"reward {name}: completion {i} got {shown(value)}; expected a finite number, or None"
        )
    return number


def text_of(completion: Any) -> str:
    """The text of a completion; of a chat that of the policy, without an environment's replies."""
    return (
        completion
        if isinstance(completion, str)
        else "".join(m["content"] for m in completion if m["role"] == "assistant")
    )


def _char_match(text: str, answer: str) -> float:
    longer = max(len(text), len(answer))
    return sum(a == b for a, b in zip(text, answer, strict=False)) / longer if longer else 1.0

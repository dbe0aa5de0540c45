"""Rewards: a number for the text of each completion.

A reward is a function with TRL's signature, `reward(prompts, completions, completion_ids=None, **columns) -> list[float]`: lists
of one length, one item a completion, so a prompt and its columns come once for each of its samples. Of a chat, prompts are
message lists and completions one-message lists, as in TRL. It gets copies, which it may change. `async def` functions are awaited
together, after the others. Built-in names stand below; anything else is `module:function`, imported from the config's folder, the
working folder or the Python path. That import runs the module: name only your own.
"""

from __future__ import annotations

import asyncio
import copy
import importlib
import inspect
import math
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import rollmesh as rm
from rollmesh.runtime.messages import plain, shown

RewardFunction = Callable[..., Sequence[float | None] | Awaitable[Sequence[float | None]]]
Answer = tuple[list[Any], float]  # what a function returned, and the seconds it took
MAX_REWARD = 1e18  # its square fits into a float32


def char_match(prompts: Sequence[Any], completions: Sequence[Any], *, answer: Sequence[str], **_: Any) -> list[float]:
    """Share of positions with the answer's character, over the longer of the two lengths. 1 only for the answer itself."""
    return [_char_match(text_of(c), a) for c, a in zip(completions, answer, strict=True)]


def exact_match(prompts: Sequence[Any], completions: Sequence[Any], *, answer: Sequence[str], **_: Any) -> list[float]:
    """1 where the completion is the answer, white space at both ends apart."""
    return [float(text_of(c).strip() == a.strip()) for c, a in zip(completions, answer, strict=True)]


def contains(prompts: Sequence[Any], completions: Sequence[Any], *, answer: Sequence[str], **_: Any) -> list[float]:
    """1 where the answer stands somewhere in the completion."""
    return [float(a in text_of(c)) for c, a in zip(completions, answer, strict=True)]


BUILT_IN: dict[str, RewardFunction] = {"char_match": char_match, "exact_match": exact_match, "contains": contains}


@dataclass(frozen=True)
class Scores:
    total: list[float]  # [completions]: the weighted sums
    values: dict[str, list[float | None]]  # of each function, by completion; None: not judged
    seconds_of: dict[str, float]  # that each function took
    seconds: float  # that all took

    def metrics(self) -> dict[str, float]:
        """Of each function: reward/NAME, its mean over the completions that it judged, and reward_s/NAME, its seconds."""
        judged = {name: [value for value in values if value is not None] for name, values in self.values.items()}
        means = {f"reward/{name}": math.fsum(values) / len(values) for name, values in judged.items() if values}
        return means | {f"reward_s/{name}": seconds for name, seconds in self.seconds_of.items()}

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
    """The weighted sum of a run's reward functions. Async ones run in an event loop that lasts until `close`, so that what they keep open
    between two steps, such as an HTTP client, stays usable."""

    def __init__(self, names: Sequence[str], weights: Sequence[float] = (), folder: Path | None = None) -> None:
        self.names = tuple(names)
        self.functions = [resolve(name, folder) for name in names]
        self.weights = tuple(weights) or (1.0,) * len(self.functions)
        self._runner = asyncio.Runner()

    def close(self) -> None:
        self._runner.close()

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], completion_ids: Sequence[Sequence[int]], columns: dict[str, list[Any]]
    ) -> list[float]:
        """One finite number a completion. A function may return None for a completion that it does not judge (it counts 0).

        ConfigError: a function raised (its traceback is a note of the error), or returned something else."""
        return self.judge(prompts, completions, completion_ids, columns).total

    def judge(
        self, prompts: Sequence[Any], completions: Sequence[Any], completion_ids: Sequence[Sequence[int]], columns: dict[str, list[Any]]
    ) -> Scores:
        """As __call__, with what each function said."""
        began, count, total = time.perf_counter(), len(completions), [0.0] * len(completions)

        def given() -> dict[str, Any]:
            texts = copy.deepcopy({"prompts": list(prompts), "completions": list(completions), **columns})
            return {**texts, "completion_ids": [list(ids) for ids in completion_ids]}

        answers = {name: _call(name, f, given, count) for name, f in zip(self.names, self.functions, strict=True) if not _is_async(f)}
        if waits := {name: f for name, f in zip(self.names, self.functions, strict=True) if _is_async(f)}:
            with _naming(f"reward {', '.join(waits)}", but=rm.ConfigError):
                answers |= self._runner.run(_await_all(waits, given, count))
        numbers = {n: [None if v is None else _number(v, n, i) for i, v in enumerate(answers[n][0])] for n in self.names}
        for name, weight in zip(self.names, self.weights, strict=True):
            total = [t + weight * (number or 0.0) for t, number in zip(total, numbers[name], strict=True)]
        for i, number in enumerate(total):
            if not abs(number) <= MAX_REWARD:
                raise rm.ConfigError(f"[reward] weights: expected sums of at most {MAX_REWARD:g}, got {number:g} for completion {i}")
        return Scores(total, numbers, {name: answers[name][1] for name in numbers}, time.perf_counter() - began)


def resolve(name: str, folder: Path | None = None) -> RewardFunction:
    """A built-in by its name, or `module:function`. Raises rm.ConfigError."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    module_name, colon, attribute = name.partition(":")
    if not colon or not module_name or not attribute:
        raise rm.ConfigError(f'[reward] functions: expected {", ".join(BUILT_IN)} or module:function, got "{name}"')
    what = f'[reward] functions: importing "{module_name}"'
    extra = [str(p.resolve()) for p in (folder, Path.cwd()) if p is not None]
    sys.path[:0] = extra
    try:
        with _naming(what, but=ImportError):
            module = importlib.import_module(module_name)
    except ImportError as e:
        raise rm.ConfigError(f'[reward] functions: cannot import "{module_name}": {e}') from e
    finally:
        # Late imports and spawned processes of the reward look there too; behind all else, so that no module there hides a library's.
        for p in extra:
            sys.path.remove(p)
        sys.path += [p for p in dict.fromkeys(extra) if p not in sys.path]
    function = getattr(module, attribute, None)
    if not callable(function):
        raise rm.ConfigError(f'[reward] functions: module "{module_name}" has no function "{attribute}"')
    return function  # type: ignore[no-any-return]


def _is_async(function: RewardFunction) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _call(name: str, function: RewardFunction, given: Callable[[], dict[str, Any]], count: int) -> Answer:
    began = time.perf_counter()
    with _naming(f"reward {name}"):
        returned = function(**given())
        values = _listed(returned, count)
    return _counted(name, returned, values, count), time.perf_counter() - began


async def _await(name: str, function: RewardFunction, given: Callable[[], dict[str, Any]], count: int) -> Answer:
    began = time.perf_counter()
    with _naming(f"reward {name}"):
        try:
            returned = await function(**given())  # type: ignore[misc]
        except asyncio.CancelledError as error:
            if (task := asyncio.current_task()) is None or task.cancelling():
                raise
            raise RuntimeError("what it awaited was cancelled").with_traceback(error.__traceback__) from None
        values = _listed(returned, count)
    return _counted(name, returned, values, count), time.perf_counter() - began


async def _await_all(functions: Mapping[str, RewardFunction], given: Callable[[], dict[str, Any]], count: int) -> dict[str, Answer]:
    """The first that fails cancels the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = {name: group.create_task(_await(name, function, given, count)) for name, function in functions.items()}
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return {name: task.result() for name, task in tasks.items()}


def _listed(returned: Any, count: int) -> list[Any] | None:
    """At most count + 1 values; a generator may have no end."""
    if isinstance(returned, (str, Mapping)) or not isinstance(returned, Iterable):
        return None
    return list(islice(returned, count + 1))


def _counted(name: str, returned: Any, values: list[Any] | None, count: int) -> list[Any]:
    if values is None or len(values) != count:
        got = f"a {type(returned).__name__}" if values is None else len(returned) if isinstance(returned, Sized) else len(values)
        raise rm.ConfigError(f"reward {name}: expected {count} values, one a completion, got {got}")
    return values


@contextmanager
def _naming(what: str, but: type[Exception] | tuple[()] = ()) -> Iterator[None]:
    """An exception of a reward's code becomes a ConfigError, with the traceback of that code as a note. A Ctrl-C is told where it came."""
    try:
        yield
    except but:
        raise
    except KeyboardInterrupt as error:
        if not hasattr(error, "__notes__"):
            error.add_note(f"{what} ran")
        raise
    except (Exception, SystemExit) as error:
        named = rm.ConfigError(f"{what} raised {type(error).__name__}: {plain(error)}".rstrip(": "))
        own = error.__traceback__
        while own is not None and _is_ours(own.tb_frame.f_code.co_filename):
            own = own.tb_next
        if own is not None or isinstance(error, SyntaxError):
            named.add_note("".join(traceback.format_exception(type(error), error, own)).rstrip())
        raise named from error


def _is_ours(file: str) -> bool:
    return file == __file__ or "importlib" in file


def _number(value: Any, name: str, i: int) -> float:
    try:
        number = math.nan if isinstance(value, str) else float(value)
    except Exception:  # noqa: BLE001 (of the value's own __float__)
        number = math.nan
    if not abs(number) <= MAX_REWARD:
        raise rm.ConfigError(f"reward {name}: completion {i} got {shown(value)}; expected a finite number, or None")
    return number


def text_of(completion: Any) -> str:
    """The text of a completion, of a chat or not."""
    return completion if isinstance(completion, str) else "".join(m["content"] for m in completion)


def _char_match(text: str, answer: str) -> float:
    longer = max(len(text), len(answer))
    return sum(a == b for a, b in zip(text, answer, strict=False)) / longer if longer else 1.0

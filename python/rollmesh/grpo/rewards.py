"""Rewards: a number for the text of each completion.

A reward is a function with TRL's signature, `reward(prompts, completions, completion_ids=None, **columns) -> list[float]`: lists
of one length, one item a completion, so a prompt and its columns come once for each of its samples. Of a chat, prompts are
message lists and completions one-message lists, as in TRL. It gets copies, which it may change. Built-in names stand below; anything
else is `module:function`, imported from the config's folder, the working folder or the Python path. That import runs the module: name
only your own.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set, Sized
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import rollmesh as rm
from rollmesh.runtime.messages import plain, shown

RewardFunction = Callable[..., Sequence[float | None]]
MAX_REWARD = 1e18  # its square fits into a float32
MAX_NOTE = 8000  # characters of a traceback, whose exception may hold a megabyte
TEXT = (str, bytes, bytearray)  # which float() or list() would take
UNORDERED_OR_TEXT = (*TEXT, Mapping, Set)


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


class Rewards:
    """The weighted sum of a run's reward functions."""

    def __init__(self, names: Sequence[str], weights: Sequence[float] = (), folder: Path | None = None) -> None:
        self.names = tuple(names)
        self.functions = [resolve(name, folder) for name in names]
        self.weights = tuple(weights) or (1.0,) * len(self.functions)

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], completion_ids: Sequence[Sequence[int]], columns: dict[str, list[Any]]
    ) -> list[float]:
        """One finite number a completion. A function may return None for a completion that it does not judge (it counts 0).

        ConfigError: a function raised (its traceback is a note of the error), or returned something else."""
        return self.judge(prompts, completions, completion_ids, columns)[0]

    def judge(
        self, prompts: Sequence[Any], completions: Sequence[Any], completion_ids: Sequence[Sequence[int]], columns: dict[str, list[Any]]
    ) -> tuple[list[float], dict[str, float]]:
        """As __call__, and the mean of each function over the completions that it judged."""
        total, means, count = [0.0] * len(completions), {}, len(completions)
        for name, function, weight in zip(self.names, self.functions, self.weights, strict=True):
            with _naming(f"reward {name}"):
                texts = copy.deepcopy({"prompts": list(prompts), "completions": list(completions), **columns})
                returned = function(**texts, completion_ids=[list(ids) for ids in completion_ids])
                values = None if isinstance(returned, UNORDERED_OR_TEXT) or not isinstance(returned, Iterable) else returned
                values = None if values is None else list(islice(values, count + 1))
            if values is None or len(values) != count:
                got = f"a {type(returned).__name__}" if values is None else len(returned) if isinstance(returned, Sized) else len(values)
                raise rm.ConfigError(f"reward {name}: expected {count} values, one a completion, got {got}")
            numbers = [None if value is None else _number(value, name, i) for i, value in enumerate(values)]
            total = [t + weight * (number or 0.0) for t, number in zip(total, numbers, strict=True)]
            if judged := [number for number in numbers if number is not None]:
                means[name] = math.fsum(judged) / len(judged)
        for i, number in enumerate(total):
            if not abs(number) <= MAX_REWARD:
                raise rm.ConfigError(f"[reward] weights: expected sums of at most {MAX_REWARD:g}, got {number:g} for completion {i}")
        return total, means


def resolve(name: str, folder: Path | None = None) -> RewardFunction:
    """A built-in by its name, or `module:function`. Raises rm.ConfigError."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    module_name, colon, attribute = name.partition(":")
    if not colon or not module_name or not attribute:
        raise rm.ConfigError(f'[reward] functions: expected {", ".join(BUILT_IN)} or module:function, got "{plain(name)}"')
    what = f'[reward] functions: importing "{plain(module_name)}"'
    extra = [str(p.resolve()) for p in (folder, Path.cwd()) if p is not None]
    sys.path[:0] = extra
    try:
        with _naming(what, but=ImportError):
            module = importlib.import_module(module_name)
    except ImportError as e:
        raise rm.ConfigError(f'[reward] functions: cannot import "{plain(module_name)}": {plain(e)}') from e
    finally:
        # Late imports and spawned processes of the reward look there too; behind all else, so that no module there hides a library's.
        for p in extra:
            sys.path.remove(p)
        sys.path += [p for p in dict.fromkeys(extra) if p not in sys.path]
    function = getattr(module, attribute, None)
    if not callable(function):
        raise rm.ConfigError(f'[reward] functions: module "{module_name}" has no function "{attribute}"')
    if inspect.iscoroutinefunction(function):
        raise rm.ConfigError(f'[reward] functions: expected a function that returns the rewards, got the async function "{name}"')
    return function  # type: ignore[no-any-return]


@contextmanager
def _naming(what: str, but: type[Exception] | tuple[()] = ()) -> Iterator[None]:
    """An exception of a reward's code becomes a ConfigError, with the traceback of that code as a note. A Ctrl-C is told where it came."""
    try:
        yield
    except but:
        raise
    except KeyboardInterrupt as error:
        error.add_note(f"{what} ran")
        raise
    except BaseException as error:  # SystemExit, asyncio.CancelledError and a class of its own too
        named = rm.ConfigError(f"{what} raised {type(error).__name__}: {plain(error)}".rstrip(": "))
        own = error.__traceback__
        while own is not None and _is_ours(own.tb_frame.f_code.co_filename):
            own = own.tb_next
        if own is not None or isinstance(error, SyntaxError):
            note = "".join(traceback.format_exception(type(error), error, own)).rstrip()
            named.add_note(note if len(note) <= MAX_NOTE else f"{note[: MAX_NOTE // 2]}\n…\n{note[-MAX_NOTE // 2 :]}")
        raise named from error


def _is_ours(file: str) -> bool:
    return file == __file__ or "importlib" in file


def _number(value: Any, name: str, i: int) -> float:
    try:
        number = math.nan if isinstance(value, TEXT) else float(value)
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001 (of the value's own __float__)
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

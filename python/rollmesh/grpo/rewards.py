"""Rewards: a number for the text of each completion.

A reward is a function with TRL's signature, `reward(prompts, completions, completion_ids=None, **columns) -> list[float]`: lists
of one length, one item a completion, so a prompt and its columns come once for each of its samples. Of a chat, prompts are
message lists and completions one-message lists, as in TRL. Built-in names stand below; anything else is `module:function`,
imported from the config's folder, the working folder or the Python path. That import runs the module: name only your own.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import rollmesh as rm

RewardFunction = Callable[..., Sequence[float | None]]


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
        """One finite number a completion. A function may return None for a completion that it does not judge (it counts 0)."""
        total = [0.0] * len(completions)
        for name, function, weight in zip(self.names, self.functions, self.weights, strict=True):
            try:
                values = list(function(prompts=prompts, completions=completions, completion_ids=completion_ids, **columns))
            except Exception as e:
                raise rm.ConfigError(f"reward {name} raised {type(e).__name__}: {e}") from e
            if len(values) != len(completions):
                raise rm.ConfigError(f"reward {name}: expected {len(completions)} values, one a completion, got {len(values)}")
            for i, value in enumerate(values):
                number = 0.0 if value is None else float(value)
                if not math.isfinite(number):
                    raise rm.ConfigError(f"reward {name}: completion {i} got {number}; expected a finite number")
                total[i] += weight * number
        return total


def resolve(name: str, folder: Path | None = None) -> RewardFunction:
    """A built-in by its name, or `module:function`. Raises rm.ConfigError."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    module_name, colon, attribute = name.partition(":")
    if not colon or not module_name or not attribute:
        raise rm.ConfigError(f'[reward] functions: expected {", ".join(BUILT_IN)} or module:function, got "{name}"')
    extra = [str(p.resolve()) for p in (folder, Path.cwd()) if p is not None]
    sys.path[:0] = extra
    try:
        module = importlib.import_module(module_name)
    except ImportError as e:
        raise rm.ConfigError(f'[reward] functions: cannot import "{module_name}": {e}') from e
    finally:
        for p in extra:
            sys.path.remove(p)
    function = getattr(module, attribute, None)
    if not callable(function):
        raise rm.ConfigError(f'[reward] functions: module "{module_name}" has no function "{attribute}"')
    return function  # type: ignore[no-any-return]


def text_of(completion: Any) -> str:
    """The text of a completion, of a chat or not."""
    return completion if isinstance(completion, str) else "".join(m["content"] for m in completion)


def _char_match(text: str, answer: str) -> float:
    longer = max(len(text), len(answer))
    return sum(a == b for a, b in zip(text, answer, strict=False)) / longer if longer else 1.0

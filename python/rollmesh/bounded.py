"""Lists that a caller gives: an iterable may be endless, or say that it has more than any memory holds."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

from rollmesh.errors import Error
from rollmesh.show import reason

MAX_ITEMS = 2**24  # prompts of a call, tokens of a prompt, request ids
MAX_TOKENS = 2**20  # different ones: vocabularies are smaller


def says_more_than(values: Any, most: int) -> bool:
    """By its length, where it has one: nothing of it is asked for."""
    try:
        return len(values) > most
    except OverflowError:  # beyond what Python counts with
        return True
    except (TypeError, ValueError):
        return False


def items_of(error: type[Error], name: str, values: Iterable[Any], most: int = MAX_ITEMS) -> list[Any]:
    """All of them; no more than one is asked for beyond what may be."""
    try:
        walk = iter(values)
    except TypeError as wrong:  # an array without dims has __iter__ too
        raise error(f"{name} is a {type(values).__name__} that cannot be walked: {reason(wrong)}") from wrong
    items = [] if (more := says_more_than(values, most)) else list(islice(walk, most + 1))
    if more or len(items) > most:
        raise error(f"{name} has more than {most} items, wanted at most {most}")
    return items

"""Marks for quick cases, and the lines that tests add to pytest's summary. These are not in
conftest.py because tests/vllm/vllm_cpu has one too, and a process that a test starts would import
either."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest

SUMMARY = pytest.StashKey[list[str]]()


def full(*values: Any) -> Any:
    """A case of the full suite only: pytest -m "not slow"."""
    return pytest.param(*values, marks=pytest.mark.full)


def some(
    cases: Iterable[Any], keep: Callable[[Any], bool] | Collection[int], names: int = 1
) -> list[Any]:
    """The cases of a parametrisation over the given names; only those that `keep` selects, by
    position or by value, are quick."""
    marked = []
    for place, case in enumerate(cases):
        stays = keep(case) if callable(keep) else place in keep
        marked.append(case if stays else full(case) if names == 1 else full(*case))
    return marked


def first_cases_are_quick(items: Iterable[pytest.Item], *words: str) -> None:
    """Marks the quick cases of each test as `full`, all but the first: or but as many as
    `pytest.mark.quick(n)` names. Cases with another one of `words` in their ids count apart."""
    seen: dict[tuple[str, ...], int] = {}
    for item in items:
        marks = {mark.name: mark for mark in item.iter_markers()}
        if marks.keys() & {"full", "slow"}:
            continue
        test, _, case = item.nodeid.partition("[")
        key = (test, *(word for word in words if word in case))
        seen[key] = seen.get(key, 0) + 1
        if seen[key] > (marks["quick"].args[0] if "quick" in marks else 1):
            item.add_marker("full")

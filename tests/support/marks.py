"""Which cases are quick, and the lines that tests leave in pytest's summary. Not in conftest.py:
tests/vllm/vllm_cpu has one too, and a process that a test starts would import either."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest

SUMMARY = pytest.StashKey[list[str]]()


def full(*values: Any) -> Any:
    """A case that only the whole set of tests has: pytest -m "not slow"."""
    return pytest.param(*values, marks=pytest.mark.full)


def some(
    cases: Iterable[Any], keep: Callable[[Any], bool] | Collection[int], names: int = 1
) -> list[Any]:
    """The cases of a parametrisation by so many names; only those that `keep` tells, by place or by
    value, are quick."""
    marked = []
    for place, case in enumerate(cases):
        stays = keep(case) if callable(keep) else place in keep
        marked.append(case if stays else full(case) if names == 1 else full(*case))
    return marked

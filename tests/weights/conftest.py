"""Generators that several test files share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sync_cases import DENSE, MOE, OLD, TIED, make

import rollmesh as rm


@pytest.fixture(scope="module")
def served() -> Iterator[dict[str, rm.Generator]]:
    """Generators that serve version 5 of OLD. Tests must not change them, which is also what they
    test."""
    generators = {
        "dense": make(DENSE, OLD["dense"]),
        "moe": make(MOE, OLD["moe"]),
        "tied": make(TIED, OLD["tied"]),
    }
    yield generators
    for generator in generators.values():
        generator.close()

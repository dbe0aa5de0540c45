"""Random weights of a model's shape, for benchmarks and smoke tests without a checkpoint and
without torch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

import rollmesh as rm


def random_weights(generator: rm.Generator, seed: int) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Yields (name, float32 array) for each parameter that the generator's manifest requires: norms
    are 1, the rest is normally distributed. Push them with cast=True."""
    rng = np.random.default_rng(seed)
    for name, info in generator.manifest().items():
        if not info.required:
            continue
        if name.endswith("norm.weight"):
            yield name, np.ones(info.shape, np.float32)
        else:
            yield name, rng.standard_normal(info.shape, dtype=np.float32) * np.float32(0.02)

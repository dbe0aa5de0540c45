"""Gathers the columns that each rank of vLLM's tensor parallel group has computed, between the ops
of the out-of-tree model (causal_lm.py). It does not add numbers, so results do not depend on the
number of ranks (docs/numerics.md). It does the same as csrc/model/shard.h, over vLLM's group.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import distributed

from rollmesh.model.placement import Placement

Array = NDArray[Any]


class Columns:
    """The gathers of one rank. group: a torch.distributed group for CPU tensors; None: one rank.
    places: the placement of each rank."""

    def __init__(self, group: Any, rank: int, places: Sequence[Placement]):
        self._group, self.rank, self.places = group, rank, tuple(places)
        self.here = self.places[rank]

    @property
    def size(self) -> int:
        return len(self.places)

    def whole(self, part: Array, cut: str, unit: int = 1) -> Array:
        """Returns the columns of all ranks. cut: the field of Placement that divides the axis;
        unit: array elements per entry of that field."""
        if self.size == 1:
            return part
        return self.joined(part, [unit * len(getattr(place, cut)) for place in self.places], 1)

    def all_squares(self, q: Array, k: Array) -> tuple[Array, Array]:
        """Returns head_squares of all heads and all KV heads. The first KV head of a rank may be
        the last one of the previous rank."""
        if self.size == 1:
            return q, k
        ends = [0, *(place.kv_heads.stop for place in self.places)]
        new = [stop - start for start, stop in pairwise(ends)]
        return self.whole(q, "heads"), self.joined(k[:, k.shape[1] - new[self.rank] :], new, axis=1)

    def joined(self, part: Array, sizes: Sequence[int], axis: int = 0) -> Array:
        """Returns the parts of all ranks, which have the given sizes. The all_gather pads them to
        the largest size."""
        shape = list(part.shape)
        shape[axis] = max(sizes)
        mine = np.zeros(shape, part.dtype)
        mine[(slice(None),) * axis + (slice(sizes[self.rank]),)] = part
        sent = torch.from_numpy(mine.reshape(-1).view(np.uint8))
        received = [torch.empty_like(sent) for _ in self.places]
        distributed.all_gather(received, sent, group=self._group)
        parts = [each.numpy().view(part.dtype).reshape(shape) for each in received]
        return np.concatenate(
            [each.take(range(n), axis) for each, n in zip(parts, sizes, strict=True)], axis
        )

"""Plans the copies of a tensor between ranks, when a trainer's ranks hold pieces of it and a
generator's ranks need shards. Both are boxes in the tensor's index space, for any pair of meshes.
Each copy goes directly from a rank that holds the elements to a rank that needs them.

A rank copies elements that it holds itself. Otherwise the holder with the next higher rank
(cyclically) sends, so that replicas share the load. Ranks with the same arguments compute the same
plan.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import NamedTuple

from rollmesh.errors import IncompleteSyncError

Box = tuple[tuple[int, int], ...]  # first index and end of each dim


class Copy(NamedTuple):
    """A box that rank `giver` sends to rank `taker`; they may be the same rank."""

    giver: int
    taker: int
    box: Box


def merged(boxes: Iterable[Box]) -> list[Box]:
    """Joins boxes that are equal in all dims but one, in which one ends where the other begins."""
    joined = list(boxes)
    for d in reversed(range(len(joined[0]) if joined else 0)):
        runs: dict[Box, list[tuple[int, int]]] = {}  # the box's other dims → ranges in dim d
        for box in sorted(joined, key=itemgetter(d)):
            its = runs.setdefault(box[:d] + box[d + 1 :], [])
            if its and its[-1][1] == box[d][0]:
                its[-1] = its[-1][0], box[d][1]
            else:
                its.append(box[d])
        joined = [(*rest[:d], run, *rest[d:]) for rest, its in runs.items() for run in its]
    return joined


def plan_copies(
    name: str, held: Sequence[tuple[int, Box]], wanted: Sequence[tuple[int, Box]]
) -> list[Copy]:
    """Returns copies that contain each wanted element once. held, wanted: ranks with their boxes,
    by ascending rank. Held boxes may overlap; the wanted boxes of one rank may not.

    Raises IncompleteSyncError, which names the first wanted element that no rank holds."""
    copies = []
    for taker, whole in wanted:
        left = [whole] if all(first < end for first, end in whole) else []
        begin = bisect_left(held, taker, key=itemgetter(0))
        for giver, given in (*held[begin:], *held[:begin]):
            rest: list[Box] = []
            for box in left:
                both, slabs = _split(box, given)
                rest += slabs
                if both is not None:
                    copies.append(Copy(giver, taker, both))
            left = rest
        if left:
            element = min([first for first, _ in box] for box in left)
            raise IncompleteSyncError(
                f"{name}: expected element {element} in a rank's piece, got none; rank {taker} "
                "needs it"
            )
    return copies


def _split(box: Box, held: Box) -> tuple[Box | None, list[Box]]:
    """Returns the part of a box that is in `held`, and the rest as disjoint boxes: for each dim a
    slab before `held` and one behind it."""
    inside, slabs = box, list[Box]()
    for d, ((first, end), (low, high)) in enumerate(zip(box, held, strict=True)):
        both = max(first, low), min(end, high)
        if both[0] >= both[1]:
            return None, [box]
        slabs += [
            (*inside[:d], slab, *inside[d + 1 :])
            for slab in ((first, both[0]), (both[1], end))
            if slab[0] < slab[1]
        ]
        inside = (*inside[:d], both, *inside[d + 1 :])
    return inside, slabs

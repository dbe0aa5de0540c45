"""Resharding: sends the shards of a trainer's ranks to the generator's ranks in the same processes,
without gathering whole tensors.

For each entry of the source, every rank sends a description of the piece that it holds (pieces.py).
The shard that a rank needs follows from the name. reshard_plan.py plans the copies, the same on all
ranks, and one all_to_all moves the parts that a rank needs and does not hold. The rank then pushes
an array of the whole shape in which only its shard was written; pages that were never written take
no memory.

If names or shapes differ, or no rank holds an element, all ranks raise the same error. If one
rank's source fails, the rank sends the reason instead of an entry and raises its own error; the
other ranks raise SyncAbortedError.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, groupby, islice, zip_longest
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollmesh.distributed.rank_engine import RankEngine
from rollmesh.errors import Error, MeshMismatchError, SyncAbortedError
from rollmesh.runtime.messages import reason
from rollmesh.weights.pieces import Dims, Part, is_sharded, part_of
from rollmesh.weights.plan import Plan
from rollmesh.weights.reshard_plan import Box, Copy, merged, plan_copies
from rollmesh.weights.sync import raises
from rollmesh.weights.transport.tensors import DTYPES, bytes_of, holds_tensors, pair_of

Array = NDArray[Any]
Described = list[Any]  # name, dtype, shape, offsets, sizes; or the reason why the source failed
AHEAD = 16  # entries per exchange if the source holds all its tensors; otherwise 1
BOX_DIMS = 4  # dims of a row of SyncEntry.wanted: rank, first indices, sizes
ALIKE = "all ranks with a source give the same names in the same order"


class Source:
    """One rank's source, iterated once. `is_sharded`: whether the source has DTensors or Pieces.
    For an iterator the first entry decides; if the first entries of all ranks are whole tensors, a
    later DTensor is gathered and a later Piece is refused."""

    def __init__(self, source: Any):
        self.holds, self.is_sharded = holds_tensors(source), False
        self._pairs: Iterator[Any]
        try:
            if isinstance(source, Mapping):
                self._pairs = iter(source.items())
                self.is_sharded = any(map(is_sharded, source.values()))
            else:
                pairs = iter(source)
                first = list(islice(pairs, 1))
                self._pairs = chain(first, pairs)
                self.is_sharded = any(is_sharded(pair_of(entry)[1]) for entry in first)
        except Exception as error:  # noqa: BLE001 (raised instead of returning the entry)
            self._pairs = map(raises, [error])

    def __iter__(self) -> Iterator[Any]:
        return self._pairs

    def take(self, count: int) -> list[Part | Exception]:
        """Returns the next entries, fewer at the end of the source. An exception of the source is
        the last element."""
        parts: list[Part | Exception] = []
        try:
            for entry in islice(self._pairs, count):
                parts.append(part_of(*pair_of(entry)))
        except Exception as error:  # noqa: BLE001 (sent to all ranks, then raised)
            parts.append(error)
        return parts


def _described(part: Part | Exception) -> Described:
    if isinstance(part, Exception):
        return [reason(part)]
    return [part.name, part.dtype, list(part.shape), list(part.offsets), list(part.sizes)]


def _box(offsets: Iterable[int], sizes: Iterable[int]) -> Box:
    return tuple((first, first + n) for first, n in zip(offsets, sizes, strict=True))


def wanted_boxes(wanted: NDArray[np.int64], n_dims: int) -> list[tuple[int, Box]]:
    """Converts the array of SyncEntry.wanted() to boxes, as few as possible for each rank."""
    parts = ((rank, numbers) for rank, *numbers in wanted.tolist() if 0 not in numbers[BOX_DIMS:])
    return [
        (rank, box)
        for rank, its in groupby(parts, itemgetter(0))
        for box in merged(_box(n[:n_dims], n[BOX_DIMS:][:n_dims]) for _, n in its)
    ]


def _slices(box: Box, origin: Dims) -> tuple[slice, ...]:
    """Returns a box as slices of an array whose first element is at `origin`."""
    return tuple(slice(first - o, end - o) for (first, end), o in zip(box, origin, strict=True))


def _packed(views: list[Array]) -> NDArray[np.uint8]:
    """Returns the bytes of all arrays, one after another. A single contiguous array is not
    copied."""
    if not views:
        return np.empty(0, np.uint8)
    return bytes_of(
        views[0]
        if len(views) == 1 and views[0].flags.c_contiguous
        else np.concatenate([view.reshape(-1) for view in views])
    )


def spread(ranks: RankEngine, plan: Plan, source: Any, options: Any) -> Iterable[tuple[str, Any]]:
    """Returns the entries that this rank pushes. If all ranks have a source of whole tensors, each
    rank reads its own source and receives nothing. Otherwise each rank receives its shards from all
    ranks with pieces or, if the sources are not sharded, from the first rank with a source. An
    exception of a source ends the sync on all ranks."""
    own = None if source is None else Source(source)
    kind = None if own is None else [own.holds, own.is_sharded]
    told = ranks.all_gather(f"the beginning of a sync with {options}", kind)
    givers = [rank for rank, its in enumerate(told) if its is not None]
    if not givers:
        raise SyncAbortedError("expected a source on one rank at least, got none on any")
    if not any(told[rank][1] for rank in givers):
        if own is not None and len(givers) == len(told):
            return own
        givers = givers[:1]
    ahead = AHEAD if all(told[rank][0] for rank in givers) else 1
    return Resharding(plan, ranks).entries(own if ranks.rank in givers else None, ahead)


class Resharding:
    """The exchanges of one sync, on one rank."""

    def __init__(self, plan: Plan, ranks: RankEngine):
        self._plan, self._ranks = plan, ranks
        # Held and wanted boxes → planned copies; all layers share them.
        self._copies: dict[Any, list[Copy]] = {}
        # Arrays that collect the parts of a tensor; the next layer uses them again.
        self._places: dict[tuple[Dims, str], Array] = {}

    def entries(self, source: Source | None, ahead: int) -> Iterator[tuple[str, Any]]:
        """Yields the entries that this rank pushes: arrays of whole shapes, in which only the parts
        that the rank needs are valid. `ahead`, the number of entries per exchange, is equal on all
        ranks."""
        while True:
            mine = None if source is None else source.take(ahead)
            everyone = self._ranks.all_gather(
                "a sync of pieces", None if mine is None else [_described(part) for part in mine]
            )
            lists = {rank: told for rank, told in enumerate(everyone) if told is not None}
            for part, told in zip_longest(mine or (), zip_longest(*lists.values())):
                yield self._entry(dict(zip(lists, told, strict=True)), part, len(everyone))
            if all(len(its) < ahead for its in lists.values()):
                return

    def _entry(
        self, told: Mapping[int, Described | None], mine: Part | Exception | None, world: int
    ) -> tuple[str, Any]:
        reasons = [
            its[0] if its is not None and len(its) == 1 else None
            for its in map(told.get, range(world))
        ]
        if any(reasons):
            self._ranks.raise_failure(mine if isinstance(mine, Exception) else None, reasons)
        name, dtype, shape = _same(told)
        try:
            entry = self._plan.entry(name)
            wanted = entry.wanted() if entry.shape == shape else None
        except Error:
            wanted = None
        if wanted is None:  # the name or shape is wrong: the push raises the error on every rank
            return name, np.broadcast_to(np.zeros((), DTYPES[dtype]), shape)
        held = tuple((rank, _box(*its[3:])) for rank, its in told.items() if its is not None)
        if (key := (held, wanted.tobytes())) not in self._copies:
            self._copies[key] = plan_copies(name, held, wanted_boxes(wanted, len(shape)))
        return name, self._moved(
            self._copies[key], dtype, shape, mine if isinstance(mine, Part) else None, world
        )

    def _moved(
        self, copies: list[Copy], dtype: str, shape: Dims, mine: Part | None, world: int
    ) -> Array:
        """Returns an array of the whole shape with the parts that this rank holds or receives. The
        other elements are not valid."""
        me = self._ranks.rank
        origin: Dims = ()
        array: Any = None
        if mine is not None and 0 not in mine.sizes:
            origin, array = mine.offsets, mine.array()
        has_all = array is not None and array.shape == shape
        place = array if has_all else self._place(shape, dtype)
        give: list[list[Array]] = [[] for _ in range(world)]
        take: list[list[Array]] = [[] for _ in range(world)]
        for giver, taker, box in copies:
            if giver == me:
                given = array[_slices(box, origin)]
                if taker != me:
                    give[taker].append(given)
                elif not has_all:
                    place[_slices(box, (0,) * len(shape))] = given
            elif taker == me:
                take[giver].append(place[_slices(box, (0,) * len(shape))])
        if any(copy.giver != copy.taker for copy in copies):
            self._exchange(give, take)
        return place

    def _place(self, shape: Dims, dtype: str) -> Array:
        if (shape, dtype) not in self._places:
            self._places[shape, dtype] = np.empty(shape, DTYPES[dtype])
        return self._places[shape, dtype]

    def _exchange(self, give: list[list[Array]], take: list[list[Array]]) -> None:
        """Sends give[r] to rank r and writes the bytes that rank r sends into the views take[r]."""
        sent = [_packed(views) for views in give]
        straight = [len(views) == 1 and views[0].flags.c_contiguous for views in take]
        got = [
            bytes_of(views[0]) if direct else np.empty(sum(view.nbytes for view in views), np.uint8)
            for views, direct in zip(take, straight, strict=True)
        ]
        self._ranks.control.all_to_all(sent, got)
        for views, direct, part in zip(take, straight, got, strict=True):
            at = 0
            for view in () if direct else views:
                view[...] = part[at : at + view.nbytes].view(view.dtype).reshape(view.shape)
                at += view.nbytes


def _same(told: Mapping[int, Described | None]) -> tuple[str, str, Dims]:
    """Returns name, dtype and shape, which must be equal on all ranks with a source.
    MeshMismatchError names two ranks that differ."""
    first, its = next((rank, its) for rank, its in told.items() if its is not None)
    for rank, other in told.items():
        if other is None or other[0] != its[0]:
            got = "no more weights" if other is None else other[0]
            raise MeshMismatchError(
                f"rank {rank}: expected {its[0]}, as on rank {first}, got {got}; {ALIKE}"
            )
        if other[1:3] != its[1:3]:
            raise MeshMismatchError(
                f"{its[0]}: expected {its[1]} {its[2]}, as on rank {first}, got {other[1]} "
                f"{other[2]} on rank {rank}"
            )
    return its[0], its[1], tuple(its[2])

"""Packed sequences: the tokens of a batch, one per row, without padding. All ops of a forward pass
but attention compute row by row, so a padded batch, a packed batch and each sequence alone give the
same bits."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollmesh import ops
from rollmesh.errors import RequestError, ShapeError, UnsupportedTensorError
from rollmesh.torch.arrays import check_tensor, device_name

PAGE = 32  # positions of a KV page; it does not change results


class Sequences:
    """Rows of sequences, one sequence behind the other.

    lengths    int64 [sequences], tokens of each, at least 1
    positions  int32 [rows] in the row's sequence, from 0
    seq_of_row int32 [rows]
    places     int64 [rows], where each row is in the flattened batch [B·T] it was taken from
    shape      (B, T)
    """

    def __init__(
        self,
        lengths: NDArray[np.int64],
        places: NDArray[np.int64] | None = None,
        shape: tuple[int, int] | None = None,
    ):
        self.lengths, self.num_rows = lengths, int(lengths.sum())
        self.starts = np.cumsum(lengths) - lengths
        self.seq_of_row = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
        self.positions = (np.arange(self.num_rows) - self.starts[self.seq_of_row]).astype(np.int32)
        self.places = np.arange(self.num_rows) if places is None else places
        self.shape = (1, self.num_rows) if shape is None else shape
        self._caches: dict[Any, tuple[Any, Any]] = {}

    @staticmethod
    def of_batch(
        shape: tuple[int, int], attention_mask: Any = None, position_ids: Any = None
    ) -> Sequences:
        """The sequences of a batch [B, T]. Without position_ids each row of the batch is one
        sequence, made of the tokens whose mask is not 0. With them a row may hold several: each
        begins where the position is 0.

        RequestError: a mask with a hole, or positions that are not 0, 1, 2 … in each sequence."""
        kept = _kept(shape, attention_mask)
        places = np.flatnonzero(kept)
        if not len(places):
            raise RequestError(
                f"attention_mask: expected at least one token, got none in a batch of {shape[0]} "
                f"times {shape[1]}"
            )
        row = places // shape[1]
        begins = np.diff(row, prepend=-1) > 0
        if position_ids is not None:
            positions = _matrix("position_ids", position_ids, shape).reshape(-1)[places]
            begins |= positions == 0
        firsts = np.flatnonzero(begins)
        made = Sequences(np.diff(firsts, append=len(places)), places, shape)
        if position_ids is not None and (positions != made.positions).any():
            at = int(np.flatnonzero(positions != made.positions)[0])
            where = f"[{row[at]}, {places[at] % shape[1]}]"
            raise RequestError(
                f"position_ids: expected {made.positions[at]} at {where}, since each sequence "
                f"counts from 0, got {positions[at]}"
            )
        holes = np.flatnonzero((np.diff(places, prepend=-2) != 1) & ~begins)
        if len(holes):
            where = f"[{row[holes[0]]}, {places[holes[0]] % shape[1]}]"
            raise RequestError(
                "attention_mask: expected the tokens of a sequence side by side, got a hole "
                f"before {where}"
            )
        return made

    @cached_property
    def block_tables(self) -> NDArray[np.int32]:
        pages = -(-self.lengths // PAGE)
        firsts = np.cumsum(pages) - pages
        each = np.arange(pages.max())
        return np.where(each < pages[:, None], firsts[:, None] + each, 0).astype(np.int32)

    @cached_property
    def slots(self) -> NDArray[np.int64]:
        table = self.block_tables[self.seq_of_row, self.positions // PAGE].astype(np.int64)
        return table * PAGE + self.positions % PAGE

    def caches(
        self, num_kv_heads: int, head_dim: int, like: Tensor, value_dim: int = 0
    ) -> tuple[Any, Any]:
        """(k, v) pages that hold all positions: one pair for all layers, since each layer writes
        what it reads."""
        key = num_kv_heads, head_dim, like.dtype, like.device
        if key not in self._caches:
            pages = int((-(-self.lengths // PAGE)).sum())
            dtype = str(like.dtype).removeprefix("torch.")
            self._caches[key] = ops.kv_cache(
                pages,
                num_kv_heads,
                PAGE,
                head_dim,
                value_dim=value_dim,
                dtype=dtype,
                device=device_name(like),
            )
        return self._caches[key]

    def forget_caches(self) -> None:
        self._caches.clear()

    @cached_property
    def rows(self) -> Tensor:
        """places as a tensor, for index_select."""
        return torch.from_numpy(self.places)

    def pad(self, rows: Tensor) -> Tensor:
        """[rows, …] → [B, T, …], with zeros for padding."""
        size = self.shape[0] * self.shape[1]
        if self.num_rows != size:
            rows = rows.new_zeros((size, *rows.shape[1:])).index_copy(
                0, self.rows.to(rows.device), rows
            )
        return rows.view(*self.shape, *rows.shape[1:])

    def pick(self, batch: Tensor) -> Tensor:
        """[B, T, …] → [rows, …], the inverse of pad."""
        flat = batch.reshape(-1, *batch.shape[2:])
        return (
            flat if self.num_rows == len(flat) else flat.index_select(0, self.rows.to(flat.device))
        )

    def grid(self) -> Sequences:
        """The same rows, with places in a batch that has a row for each sequence and padding on the
        right."""
        is_token = np.arange(self.lengths.max()) < self.lengths[:, None]
        return Sequences(self.lengths, np.flatnonzero(is_token), is_token.shape)

    def without_last(self) -> Sequences:
        """The rows that predict a token of their sequence: all but the last of each."""
        keep = np.ones(self.num_rows, bool)
        keep[self.starts + self.lengths - 1] = False
        lengths = self.lengths - 1
        return Sequences(lengths[lengths > 0], self.places[keep], self.shape)


def _matrix(name: str, given: Any, shape: tuple[int, int]) -> NDArray[Any]:
    if not isinstance(given, Tensor) or given.is_floating_point() or given.is_complex():
        seen = (
            f"a tensor of {given.dtype}"
            if isinstance(given, Tensor)
            else f"a {type(given).__name__}"
        )
        raise UnsupportedTensorError(f"{name}: expected a torch tensor of integers, got {seen}")
    values: NDArray[Any] = check_tensor(name, given).cpu().numpy()
    if values.ndim == 1 or (values.ndim == 2 and values.shape[0] == 1):
        values = np.broadcast_to(values.reshape(1, -1), (shape[0], values.size))
    if values.shape != shape:
        raise ShapeError(f"{name}: expected shape {shape}, got {tuple(given.shape)}")
    return values


def _kept(shape: tuple[int, int], mask: Any) -> NDArray[np.bool_]:
    if mask is None:
        return np.ones(shape, bool)
    if isinstance(mask, Tensor) and mask.ndim > 2:
        raise ShapeError(
            "attention_mask: expected 2 dims, [batch, tokens], since attention is causal, got "
            f"{mask.ndim}"
        )
    if isinstance(mask, Tensor) and mask.is_floating_point():
        mask = mask != 0
    if isinstance(mask, Tensor) and tuple(mask.shape) != shape:
        raise ShapeError(f"attention_mask: expected shape {shape}, got {tuple(mask.shape)}")
    kept: NDArray[np.bool_] = _matrix("attention_mask", mask, shape) != 0
    return kept

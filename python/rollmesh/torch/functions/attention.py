"""Norm of q and k, rope, and causal attention over packed sequences."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from rollmesh import ops
from rollmesh.errors import ShapeError
from rollmesh.torch import packing
from rollmesh.torch.arrays import array_of, check_flags, check_tensor, in_turn, tensor_of
from rollmesh.torch.functions.common import (
    Gradients,
    How,
    backward_pass,
    how_for,
    matmul_dtype,
    norm,
    rows_of,
    vector_of,
    vjp,
)
from rollmesh.torch.sequences import PAGE, Sequences

SHORT = 256  # tokens of the longest sequence up to which scores are stored
SCORES_AT_ONCE = 1 << 24  # float32 numbers


class Heads(NamedTuple):
    """Shapes and constants of an attention layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    window: int = 0  # positions that a token sees, its own included; 0: all
    norm_whole: bool = False  # q and k are normed over all heads; else each head

    @property
    def scale(self) -> float:
        return 1.0 / math.sqrt(self.head_dim)

    @property
    def widths(self) -> list[int]:
        """The numbers of columns of q, k and v in a row."""
        return [
            heads * self.head_dim
            for heads in (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        ]


def rope_table(
    frequencies: tuple[NDArray[np.float32], float],
    positions: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """(cos, sin) [positions, head_dim / 2], as `attention` takes them. frequencies: from
    ModelSpec.rope. They are not inference tensors: later passes of any kind may use them."""
    inv_freq, scale = frequencies
    cos, sin = ops.rope_table(inv_freq, positions, scale=scale, dtype=packing.name_of(dtype))
    with torch.inference_mode(False):
        return torch.from_numpy(cos).to(device), torch.from_numpy(sin).to(device)


def pairs_apart(weight: Tensor, head_dim: int, turned: int) -> Tensor:
    """A weight or bias of q or k, of whose heads rope turns neighbours among the first `turned`
    elements: with these as far apart as half of them, as `attention` turns them."""
    heads = weight.view(-1, head_dim, *weight.shape[1:])
    return torch.cat([heads[:, :turned:2], heads[:, 1:turned:2], heads[:, turned:]], 1).view_as(
        weight
    )


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        rope: tuple[Tensor, Tensor],
        rows: Sequences,
        heads: Heads,
        how: How,
    ) -> Tensor:
        with in_turn(qkv):
            flags = torch.zeros(rows.num_rows, dtype=torch.uint8, device=qkv.device)
            k, v = rows.caches(heads.num_kv_heads, heads.head_dim, qkv)
            q_width, k_width = heads.widths[:2] if heads.norm_whole else [heads.head_dim] * 2
            q_norm = vector_of("q_weight", q_weight, qkv, q_width)
            k_norm = vector_of("k_weight", k_weight, qkv, k_width)
            squares = None
            if heads.norm_whole:
                squares = ops.head_squares(array_of(qkv), heads.num_heads, heads.head_dim, **how)
            cos, sin = map(array_of, rope)
            q = ops.qk_rope_kv(
                array_of(qkv), q_norm, k_norm, cos, sin, rows.positions, rows.slots, k, v,
                num_heads=heads.num_heads, page_size=PAGE, eps=heads.eps, squares=squares,
                row_flags=array_of(flags), **how,
            )  # fmt: skip
            out = ops.attention(
                q, k, v, rows.positions, rows.seq_of_row, rows.block_tables,
                page_size=PAGE, scale=heads.scale, window=heads.window, **how,
            )  # fmt: skip
            made = tensor_of(out).view(rows.num_rows, heads.widths[0])
        check_flags("keys or values", flags)
        ctx.save_for_backward(qkv, q_weight, k_weight, *rope)
        ctx.rows, ctx.heads = rows, heads
        return made

    @staticmethod
    @backward_pass
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        qkv, q_weight, k_weight, cos, sin = ctx.saved_tensors
        rows, heads = ctx.rows, ctx.heads
        dtype = matmul_dtype(qkv)
        at = torch.from_numpy(rows.positions).to(qkv.device)
        turn = cos.index_select(0, at)[:, None], sin.index_select(0, at)[:, None]

        def turned(x: Tensor, weight: Tensor | None) -> Tensor:
            if weight is not None:
                flat = x.flatten(1) if heads.norm_whole else x
                x = norm(flat, weight, heads.eps).view_as(x)
            return _rotated(x.float(), *turn)

        def heads_of(qkv: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
            parts = torch.split(qkv, heads.widths, 1)
            q, k, v = (x.view(len(x), -1, heads.head_dim) for x in parts)
            q_norm, k_norm = weights or (None, None)
            return turned(q, q_norm).to(dtype), turned(k, k_norm).to(dtype), v.to(dtype)

        inputs = [qkv] if q_weight is None else [qkv, q_weight, k_weight]
        (q, k, v), pull = vjp(heads_of, *inputs)
        by_heads = _attention_gradients(q, k, v, grad.to(dtype).view(q.shape), rows, heads)
        by_inputs = pull(by_heads)
        return *by_inputs, *[None] * (7 - len(by_inputs))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[rows, heads, head_dim] by the angles [rows, 1, n], which turn the first 2·n elements."""
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


def _attention_gradients(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, rows: Sequences, heads: Heads
) -> tuple[Tensor, ...]:
    """Returns the gradients of q, k and v [rows, heads, head_dim]. Sequences are padded on the
    right, where the causal mask hides the padding."""
    steps = int(rows.lengths.max())
    is_token = torch.from_numpy(np.arange(steps) < rows.lengths[:, None]).to(q.device)

    def padded(x: Tensor) -> Tensor:
        each = list(torch.split(x, rows.lengths.tolist()))
        return pad_sequence(each, batch_first=True).transpose(1, 2)

    is_short = steps <= SHORT
    each = max(1, SCORES_AT_ONCE // (heads.num_heads * steps**2)) if is_short else len(rows.lengths)
    mask: Any = None
    if is_short or 0 < heads.window < steps:
        away = torch.arange(steps, device=q.device)[:, None] - torch.arange(steps, device=q.device)
        is_hidden = (away < 0) | (away >= (heads.window or steps))
        mask = q.new_zeros(steps, steps).masked_fill_(is_hidden, -torch.inf)
    attend = partial(_short_attention if is_short else _long_attention, mask=mask, heads=heads)
    chunks = zip(*(torch.split(padded(x), each) for x in (q, k, v, grad)), strict=True)
    parts = [vjp(attend, *qkv)[1](by_out) for *qkv, by_out in chunks]
    return tuple(torch.cat(same).transpose(1, 2)[is_token] for same in zip(*parts, strict=True))


def _long_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, heads: Heads) -> Tensor:
    """Attention of q [sequences, heads, steps, head_dim]. mask: added to the scores; None: that of
    causal attention."""
    return F.scaled_dot_product_attention(
        q, k, v, mask, is_causal=mask is None, scale=heads.scale, enable_gqa=True
    )


def _short_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, heads: Heads) -> Tensor:
    """The same, written out: where sequences are short, the scores fit the caches and batched
    matmuls are several times faster."""
    k, v = k.flatten(0, 1), v.flatten(0, 1)
    grouped = q.reshape(len(k), -1, heads.head_dim)  # the query heads of each KV head
    masks = mask.repeat(heads.num_heads // heads.num_kv_heads, 1)
    scores = torch.baddbmm(masks, grouped, k.transpose(1, 2), alpha=heads.scale)
    return (scores.float().softmax(-1).to(v.dtype) @ v).view_as(q)


def attention(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    rope: tuple[Tensor, Tensor],
    rows: Sequences,
    heads: Heads,
    *,
    how: How | None = None,
) -> Tensor:
    """Causal attention of packed sequences, [rows, num_heads · head_dim]. qkv [rows, (num_heads +
    2·num_kv_heads)·head_dim] is the projection's output; q and k of each head are normed by
    q_weight and k_weight [head_dim] (with norm_whole [heads · head_dim]; None: not) and rotated.
    rope: (cos, sin),
    float32 [positions, n], n ≤ head_dim / 2, rounded to qkv's dtype (ops.rope_table), which turn
    the first 2·n elements of a head."""
    qkv = rows_of("qkv", qkv, sum(heads.widths))
    if len(qkv) != rows.num_rows:
        raise ShapeError(
            f"qkv: expected {rows.num_rows} rows, those of the sequences, got {len(qkv)}"
        )
    for table in rope:
        check_tensor("rope", table)
    how = how or how_for(qkv)
    return _Attention.apply(  # type: ignore[no-any-return, no-untyped-call]
        qkv, q_weight, k_weight, rope, rows, heads, how
    )

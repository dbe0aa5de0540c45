"""Norm of q and k, rope, and causal attention over packed sequences."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from rollmesh import ops
from rollmesh.errors import NumericsError, ShapeError
from rollmesh.torch import packing
from rollmesh.torch.arrays import array_of, host_of, in_turn, tensor_of
from rollmesh.torch.functions.common import (
    How,
    backward_pass,
    how_for,
    matmul_dtype,
    norm_gradients,
    rows_of,
    vector_of,
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
            q_norm, k_norm = (
                None
                if w is None
                else vector_of(n, w, qkv, width if heads.norm_whole else heads.head_dim)
                for n, w, width in (
                    ("q_weight", q_weight, heads.widths[0]),
                    ("k_weight", k_weight, heads.widths[1]),
                )
            )
            squares = (
                ops.head_squares(array_of(qkv), heads.num_heads, heads.head_dim, **how)
                if heads.norm_whole
                else None
            )
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
            made = tensor_of(out, qkv.dtype).view(rows.num_rows, heads.widths[0])
        if (bad := host_of(flags)).any():
            raise NumericsError(
                f"keys or values of row {int(bad.argmax())} of {rows.num_rows} are not finite"
            )
        ctx.save_for_backward(qkv, q_weight, k_weight, *rope)
        ctx.rows, ctx.heads = rows, heads
        return made

    @staticmethod
    @backward_pass
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        qkv, q_weight, k_weight, cos, sin = ctx.saved_tensors
        rows, heads = ctx.rows, ctx.heads
        dtype = matmul_dtype(qkv)
        at = torch.from_numpy(rows.positions).to(qkv.device)
        turn = cos.index_select(0, at)[:, None], sin.index_select(0, at)[:, None]
        q0, k0, v = (
            part.reshape(rows.num_rows, -1, heads.head_dim) for part in qkv.split(heads.widths, 1)
        )
        q, k = (
            _rotated(_normed(x.float(), w, heads), *turn)
            for x, w in ((q0, q_weight), (k0, k_weight))
        )
        by_q, by_k, by_v = _attention_gradients(
            q.to(dtype), k.to(dtype), v.to(dtype), grad.to(dtype).view(q.shape), rows, heads
        )
        back = turn[0], -turn[1]
        (by_q0, by_q_weight), (by_k0, by_k_weight) = (
            (turned, None) if w is None else _norm_gradients(x, w, turned, heads)
            for x, w, turned in (
                (q0, q_weight, _rotated(by_q.float(), *back)),
                (k0, k_weight, _rotated(by_k.float(), *back)),
            )
        )
        by_qkv = torch.cat(
            [part.reshape(rows.num_rows, -1).to(qkv.dtype) for part in (by_q0, by_k0, by_v)], 1
        )
        return by_qkv, by_q_weight, by_k_weight, None, None, None, None


def _normed(x: Tensor, weight: Tensor | None, heads: Heads) -> Tensor:
    if weight is None:
        return x
    flat = x.flatten(1) if heads.norm_whole else x
    return F.rms_norm(flat, (flat.shape[-1],), weight.float(), heads.eps).view_as(x)


def _norm_gradients(x: Tensor, weight: Tensor, grad: Tensor, heads: Heads) -> tuple[Tensor, Tensor]:
    flat, of_flat = (x.flatten(1), grad.flatten(1)) if heads.norm_whole else (x, grad)
    by_x, by_weight = norm_gradients(flat, weight, of_flat, heads.eps)
    return by_x.view_as(x), by_weight


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
    to = torch.from_numpy(rows.seq_of_row.astype(np.int64) * steps + rows.positions).to(q.device)
    size = len(rows.lengths) * steps

    def padded(x: Tensor) -> Tensor:
        flat = (
            x if rows.num_rows == size else x.new_zeros((size, *x.shape[1:])).index_copy_(0, to, x)
        )
        return flat.view(-1, steps, *x.shape[1:]).transpose(1, 2)

    def picked(x: Tensor) -> Tensor:
        flat = x.transpose(1, 2).reshape(size, *x.shape[1::2])
        return flat if rows.num_rows == size else flat.index_select(0, to)

    q, k, v, grad = map(padded, (q, k, v, grad))
    if steps > SHORT:
        mask = _live(steps, heads, q.device) if 0 < heads.window < steps else None
        return tuple(map(picked, _flash_gradients(q, k, v, grad, mask, heads)))
    live = _live(steps, heads, q.device)
    each = max(1, SCORES_AT_ONCE // (heads.num_heads * steps * steps))
    chunks = [slice(first, first + each) for first in range(0, len(q), each)]
    parts = [_short_gradients(q[at], k[at], v[at], grad[at], live, heads) for at in chunks]
    return tuple(picked(torch.cat(same)) for same in zip(*parts, strict=True))


def _live(steps: int, heads: Heads, device: torch.device) -> Tensor:
    """bool [steps, steps]: which positions a token sees."""
    away = torch.arange(steps, device=device)[:, None] - torch.arange(steps, device=device)
    return (away >= 0) & (away < (heads.window or steps))


def _flash_gradients(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, mask: Tensor | None, heads: Heads
) -> tuple[Tensor, ...]:
    """Returns the gradients of q [sequences, heads, steps, head_dim], k and v, by torch's
    attention."""
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    with torch.enable_grad():
        out = F.scaled_dot_product_attention(
            *inputs,
            attn_mask=mask,
            is_causal=mask is None,
            scale=heads.scale,
            enable_gqa=True,
        )
    return torch.autograd.grad(out, inputs, grad)


def _short_gradients(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, live: Tensor, heads: Heads
) -> tuple[Tensor, ...]:
    """The same, written out: where sequences are short, the scores fit the caches and two batched
    matmuls are several times faster."""
    sequences, _, steps, head_dim = q.shape
    pairs, group = sequences * heads.num_kv_heads, heads.num_heads // heads.num_kv_heads
    q, grad = (x.reshape(pairs, group * steps, head_dim) for x in (q, grad))
    k, v = (x.reshape(pairs, steps, head_dim) for x in (k, v))
    scores = (q @ k.transpose(1, 2)).float().view(pairs, group, steps, steps)
    p = torch.softmax(scores.mul_(heads.scale).masked_fill_(~live, -torch.inf), -1)
    by_v = p.to(v.dtype).view(pairs, -1, steps).transpose(1, 2) @ grad
    by_p = (grad @ v.transpose(1, 2)).float().view_as(p)
    by_scores = p * (by_p - (p * by_p).sum(-1, keepdim=True)) * heads.scale
    by_scores = by_scores.to(q.dtype).view(pairs, -1, steps)
    by_q, by_k = by_scores @ k, by_scores.transpose(1, 2) @ q
    return tuple(x.view(sequences, -1, steps, head_dim) for x in (by_q, by_k, by_v))


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
    how = how or how_for(qkv)
    return _Attention.apply(  # type: ignore[no-any-return, no-untyped-call]
        qkv, q_weight, k_weight, rope, rows, heads, how
    )

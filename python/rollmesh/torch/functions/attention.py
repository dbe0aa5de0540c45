"""Norm of q and k, rope, and causal attention over packed sequences. Latent attention is in the
absorbed form, as csrc/model/latent.c computes it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from rollmesh import ops
from rollmesh.errors import ShapeError
from rollmesh.torch import packing
from rollmesh.torch.arrays import array_of, check_flags, check_tensor, in_turn, tensor_of
from rollmesh.torch.functions.common import (
    Gradients,
    How,
    Pull,
    backward_pass,
    differentiated,
    how_for,
    matmul_dtype,
    norm,
    rows_of,
    vector_of,
)
from rollmesh.torch.functions.dense import linear, rms_norm
from rollmesh.torch.sequences import PAGE, Sequences

Rope = tuple[Tensor, Tensor]  # cos and sin, [positions, n]
LATENT_EPS = 1e-6  # of the norms of latents, as in transformers
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
    multiplier: float | None = None  # of scores; None: head_dim ** -0.5
    softcap: float | None = None  # scores are softcap · tanh(score / softcap)
    zero_centered: bool = False  # q and k are normed with 1 + weight
    norm_last: bool = False  # after rope

    @property
    def scale(self) -> float:
        return 1.0 / math.sqrt(self.head_dim) if self.multiplier is None else self.multiplier

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
) -> Rope:
    """(cos, sin) [positions, head_dim / 2], as `attention` takes them. frequencies: from
    ModelSpec.rope. They are not inference tensors: later passes of any kind may use them."""
    inv_freq, scale = frequencies
    cos, sin = ops.rope_table(inv_freq, positions, scale=scale, dtype=packing.name_of(dtype))
    with torch.inference_mode(False):
        return torch.from_numpy(cos).to(device), torch.from_numpy(sin).to(device)


def pairs_apart(weight: Tensor, head_dim: int, turned: int, first: int = 0) -> Tensor:
    """A weight or bias of q or k with the rows of a head in the order of `attention`. Rope rotates
    neighbours among the `turned` rows from `first` on; they become half of these rows apart."""
    heads, end = weight.view(-1, head_dim, *weight.shape[1:]), first + turned
    parts = heads[:, :first], heads[:, first:end:2], heads[:, first + 1 : end : 2], heads[:, end:]
    return torch.cat(parts, 1).view_as(weight)


def _attended(
    qkv: Tensor,
    norms: tuple[Any, Any],
    rope: Rope,
    rows: Sequences,
    heads: Heads,
    how: How,
    *,
    queries: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Computes attention by the generator's kernels, [rows, heads, head_dim]. queries: those for
    latents, [heads, rows, rank]; None: attention is not latent."""
    rank, q_dim = 0, 0
    if queries is not None:
        rank, q_dim = queries.shape[2], (qkv.shape[1] - heads.head_dim) // heads.num_heads
    with in_turn(qkv):
        flags = torch.zeros(rows.num_rows, dtype=torch.uint8, device=qkv.device)
        k, v = rows.caches(heads.num_kv_heads, heads.head_dim, qkv, rank)
        squares = None
        if heads.norm_whole:
            squares = ops.head_squares(array_of(qkv), heads.num_heads, heads.head_dim, **how)
        cos, sin = map(array_of, rope)
        q = ops.qk_rope_kv(
            array_of(qkv), *norms, cos, sin, rows.positions, rows.slots, k, v,
            num_heads=heads.num_heads, page_size=PAGE, eps=heads.eps, squares=squares,
            zero_centered=heads.zero_centered, norm_last=heads.norm_last, value_dim=rank,
            q_dim=q_dim, row_flags=array_of(flags), **how,
        )  # fmt: skip
        if queries is not None:
            tensor_of(q)[..., -rank:] = queries.transpose(0, 1)
        out = ops.attention(
            q, k, v, rows.positions, rows.seq_of_row, rows.block_tables,
            page_size=PAGE, scale=heads.scale, softcap=heads.softcap, window=heads.window,
            value_dim=rank, sinks=vector_of("sinks", sinks, qkv, heads.num_heads), **how,
        )  # fmt: skip
        made = tensor_of(out)
    check_flags("keys or values", flags)
    return made


def _angles(rope: Sequence[Tensor], rows: Sequences) -> Iterator[Tensor]:
    """Returns cos and sin of each row, [rows, 1, n]."""
    at = torch.from_numpy(rows.positions).to(rope[0].device)
    return (x.index_select(0, at)[:, None] for x in rope)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        rope: Rope,
        rows: Sequences,
        heads: Heads,
        sinks: Tensor | None,
        how: How,
    ) -> Tensor:
        q_width, k_width = heads.widths[:2] if heads.norm_whole else [heads.head_dim] * 2
        norms = (
            vector_of("q_weight", q_weight, qkv, q_width),
            vector_of("k_weight", k_weight, qkv, k_width),
        )
        out = _attended(qkv, norms, rope, rows, heads, how, sinks=sinks)
        ctx.save_for_backward(qkv, q_weight, k_weight, sinks, *rope)
        ctx.rows, ctx.heads = rows, heads
        return out.flatten(1)

    @staticmethod
    @backward_pass
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        qkv, q_weight, k_weight, sinks, *rope = ctx.saved_tensors
        rows, heads = ctx.rows, ctx.heads
        cos, sin = _angles(rope, rows)

        def by_heads(x: Tensor) -> Tensor:
            return x.view(len(x), -1, heads.head_dim)

        def made(x: Tensor, weight: Tensor | None) -> tuple[Tensor, Pull]:
            x = x if heads.norm_whole else by_heads(x)
            x = rotated(x.float(), cos, sin) if heads.norm_last else x
            normed, pull = norm(x, weight, heads.eps, heads.zero_centered)
            if not heads.norm_last:
                return rotated(by_heads(normed()), cos, sin), lambda grad: pull(
                    rotated(grad, cos, -sin)
                )

            def back(grad: Tensor) -> Gradients:
                by_x, by_weight = pull(grad)
                return rotated(by_x, cos, -sin), by_weight

            return normed(), back

        q, k, v = qkv.split(heads.widths, 1)
        (q, pull_q), (k, pull_k) = made(q, q_weight), made(k, k_weight)
        q, k, v, grad = (x.to(matmul_dtype(qkv)) for x in (q, k, by_heads(v), by_heads(grad)))
        (by_q, by_k, by_v), by_sinks = attention_gradients(q, k, v, grad, sinks, rows, heads)
        (by_q, by_q_weight), (by_k, by_k_weight) = pull_q(by_q.float()), pull_k(by_k.float())
        by_qkv = torch.cat([x.flatten(1) for x in (by_q, by_k, by_v)], 1)
        return by_qkv, by_q_weight, by_k_weight, None, None, None, by_sinks, None


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[rows, heads, head_dim] by the angles [rows, 1, n], which turn the first 2·n elements."""
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    turned = (a * cos).addcmul_(b, sin, value=-1), (b * cos).addcmul_(a, sin)
    return torch.cat([*turned, rest], -1)


def _with_sink(x: Tensor, last: Tensor, first: float = 0.0) -> Tensor:
    """Returns x [sequences, heads, steps, head_dim] with one more element in each vector, `last`
    [heads], and one more step at the front: zeros with `first` as the last element."""
    wide = torch.cat([x, last[:, None, None].expand(*x.shape[:-1], 1)], -1)
    step = torch.zeros_like(wide[:, :, :1])
    step[..., -1] = first
    return torch.cat([step, wide], 2)


def attention_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad: Tensor,
    sinks: Tensor | None,
    rows: Sequences,
    heads: Heads,
) -> tuple[list[Tensor], Tensor | None]:
    """Returns the gradients of q, k and v [rows, heads, head_dim], and of sinks. Sequences are
    padded on the right, where the causal mask hides the padding. Sinks become a first position that
    every query sees. Its value is zeros. Queries and keys get one more element: in queries the sink
    divided by the scale, in keys 1 at the first position and 0 elsewhere. So the first position's
    score is the sink."""
    grid = rows.grid()
    steps = grid.shape[1]
    padded: Any = [grid.pad(x).transpose(1, 2) for x in (q, k, v, grad)]
    if sinks is not None:
        zeros = q.new_zeros(heads.num_heads)
        lasts = sinks.to(q.dtype) / heads.scale, *[zeros[: heads.num_kv_heads]] * 2, zeros
        padded = [
            _with_sink(x, last, float(i == 1))
            for i, (x, last) in enumerate(zip(padded, lasts, strict=True))
        ]
        steps += 1
    is_short = steps <= SHORT or heads.softcap is not None  # torch's attention has no cap
    each = max(1, SCORES_AT_ONCE // (heads.num_heads * steps**2)) if is_short else len(rows.lengths)
    mask: Any = None
    if is_short or 0 < heads.window < steps:
        away = torch.arange(steps, device=q.device)[:, None] - torch.arange(steps, device=q.device)
        is_hidden = (away < 0) | (away >= (heads.window or steps))
        if sinks is not None:
            is_hidden[:, 0] = False
        mask = q.new_zeros(steps, steps).masked_fill_(is_hidden, -torch.inf)
    chunks = zip(*(torch.split(x, each) for x in padded), strict=True)
    parts = [_padded_gradients(q, k, v, grad, mask, heads) for q, k, v, grad in chunks]
    made = [torch.cat(same) for same in zip(*parts, strict=True)]
    by_sinks = None
    if sinks is not None:
        by_sinks = made[0][..., -1].float().sum((0, 2)) / heads.scale
        made = [x[:, :, 1:, :-1] for x in made]
    return [grid.pick(x.transpose(1, 2)) for x in made], by_sinks


def _padded_gradients(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, mask: Any, heads: Heads
) -> tuple[Tensor, ...]:
    """Returns the gradients of q [sequences, heads, steps, head_dim], k and v. mask: added to the
    scores; None: that of causal attention."""
    if q.shape[2] > SHORT and heads.softcap is None:
        options = {"attn_mask": mask, "is_causal": mask is None, "scale": heads.scale}
        attend = partial(F.scaled_dot_product_attention, **options, enable_gqa=True)
        return differentiated(attend, q, k, v, dtype=q.dtype)[1](grad)
    # Scores of short sequences fit the caches, and batched matmuls are several times faster.
    shape, keys, values = q.shape, k.flatten(0, 1), v.flatten(0, 1)
    q, grad = (x.reshape(len(keys), -1, x.shape[-1]) for x in (q, grad))  # of each KV head
    masks = mask.repeat(heads.num_heads // heads.num_kv_heads, 1)
    slope: Tensor | float = heads.scale
    if heads.softcap is None:
        scores = torch.baddbmm(masks, q, keys.transpose(1, 2), alpha=heads.scale).float()
    else:
        shares = ((q @ keys.transpose(1, 2)).float() * (heads.scale / heads.softcap)).tanh()
        scores, slope = shares * heads.softcap + masks, heads.scale * (1 - shares**2)
    p = scores.softmax(-1)
    by_v = p.to(values.dtype).transpose(1, 2) @ grad
    by_p = (grad @ values.transpose(1, 2)).float()
    by_scores = torch.ops.aten._softmax_backward_data(by_p, p, -1, p.dtype).mul_(slope).to(q.dtype)
    by_q, by_k = by_scores @ keys, by_scores.transpose(1, 2) @ q
    return by_q.view(shape), by_k.view_as(k), by_v.view_as(v)


def attention(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    rope: Rope,
    rows: Sequences,
    heads: Heads,
    *,
    sinks: Tensor | None = None,
    how: How | None = None,
) -> Tensor:
    """Causal attention of packed sequences, [rows, num_heads · head_dim]. qkv [rows, (num_heads +
    2·num_kv_heads)·head_dim] is the projection's output; q and k of each head are normed by
    q_weight and k_weight [head_dim] (with norm_whole [heads · head_dim]; None: not) and rotated.
    rope: (cos, sin),
    float32 [positions, n], n ≤ head_dim / 2, rounded to qkv's dtype (ops.rope_table), which turn
    the first 2·n elements of a head. sinks [num_heads]: as in ops.attention."""
    qkv = rows_of("qkv", qkv, sum(heads.widths))
    if len(qkv) != rows.num_rows:
        raise ShapeError(
            f"qkv: expected {rows.num_rows} rows, those of the sequences, got {len(qkv)}"
        )
    for table in rope:
        check_tensor("rope", table)
    how = how or how_for(qkv)
    return _Attention.apply(  # type: ignore[no-any-return, no-untyped-call]
        qkv, q_weight, k_weight, rope, rows, heads, sinks, how
    )


# ------------------------------------------------------------------------------ latent attention
class Latent(NamedTuple):
    """The weights of a layer up to o_proj. q_a and q_a_norm are None where q_b takes x. In shapes,
    nope, rope, rank and v are qk_nope_head_dim, qk_rope_head_dim, kv_lora_rank and v_head_dim."""

    q_a: Tensor | None
    q_a_norm: Tensor | None
    q_b: Tensor  # [heads·(nope + rope), …]
    kv_a: Tensor  # [rank + rope, hidden]
    kv_a_norm: Tensor  # [rank]
    kv_b: Tensor  # [heads·(nope + v), rank]


class _PerHead(torch.autograd.Function):
    """Multiplies x [heads, rows, k] by the transpose of each head's weight [heads, n, k]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, how: How) -> Tensor:
        ctx.save_for_backward(x, weight)
        (heads, rows, k), n = x.shape, weight.shape[1]
        packed = packing.pack_rows([[matrix] for matrix in weight], x.dtype, how)
        bounds = torch.arange(heads + 1, dtype=torch.int32, device=x.device) * rows
        with in_turn(x):
            flat = array_of(x.reshape(-1, k).contiguous())
            made = ops.gemm(flat, packed, n, group_rows=array_of(bounds), **how)
            return tensor_of(made).view(heads, rows, n)

    @staticmethod
    @backward_pass
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        saved = ctx.saved_tensors  # gradient checkpointing allows a single read
        x, weight = (each.to(matmul_dtype(saved[0])) for each in saved)
        grad = grad.to(x.dtype)
        return grad @ weight, grad.transpose(1, 2) @ x, None


class _LatentAttention(torch.autograd.Function):
    """Attention of queries for latents [heads, rows, rank] over qkv [rows, heads·(nope + rope) +
    rank + rope]: q, the latent, then the key. Returns [heads, rows, rank]."""

    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        qkv: Tensor,
        weight: Tensor,
        rope: Rope,
        rows: Sequences,
        heads: Heads,
        how: How,
    ) -> Tensor:
        norms = None, vector_of("kv_a_norm", weight, qkv, queries.shape[2])
        out = _attended(qkv, norms, rope, rows, heads, how, queries=queries)
        ctx.save_for_backward(queries, qkv, weight, *rope)
        ctx.rows, ctx.heads = rows, heads
        return out.transpose(0, 1)

    @staticmethod
    @backward_pass
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        queries, qkv, weight, *rope = ctx.saved_tensors
        rows, heads, dtype = ctx.rows, ctx.heads, matmul_dtype(qkv)
        cos, sin = _angles(rope, rows)
        rank, turned = queries.shape[2], 2 * cos.shape[2]

        def made(qkv: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
            q_width = qkv.shape[1] - heads.head_dim
            q, latent, key = torch.split(qkv, [q_width, rank, turned], 1)
            q = rotated(q.view(len(q), heads.num_heads, -1)[..., -turned:], cos, sin)
            v = F.rms_norm(latent, [rank], weight, heads.eps)[:, None]
            return q, torch.cat([rotated(key[:, None], cos, sin), v], -1), v

        (q, k, v), pull = differentiated(made, qkv, weight)
        q = torch.cat([q.to(dtype), queries.transpose(0, 1).to(dtype)], -1)
        k, v, grad = (x.to(dtype) for x in (k, v, grad.transpose(0, 1)))
        (by_q, *by_kv), _ = attention_gradients(q, k, v, grad, None, rows, heads)
        by_q, by_queries = torch.split(by_q, [turned, rank], -1)
        by_inputs = pull(*(x.float() for x in (by_q, *by_kv)))
        return by_queries.transpose(0, 1), *by_inputs, None, None, None, None


def latent_attention(
    x: Tensor,
    weights: Latent,
    rope: Rope,
    rows: Sequences,
    heads: Heads,
    *,
    interleaved: bool,
    how: How,
) -> Tensor:
    """Returns causal latent attention over packed sequences x [rows, hidden], [rows, num_heads ·
    v]. heads: with one kv head, and with the head_dim of the cache. rope: as in `attention`.
    interleaved: rope rotates neighbours in the rows of q_b and kv_a, else halves."""
    turned, rank = 2 * rope[0].shape[1], len(weights.kv_a_norm)
    q_b, kv_a, low = weights.q_b, weights.kv_a, x
    q_dim = len(q_b) // heads.num_heads
    if interleaved:
        q_b = pairs_apart(q_b, q_dim, turned, q_dim - turned)
        kv_a = pairs_apart(kv_a, len(kv_a), turned, rank)
    if weights.q_a is not None and weights.q_a_norm is not None:
        low = rms_norm(linear(x, weights.q_a, how=how), weights.q_a_norm, LATENT_EPS, how=how)
    q = linear(low, q_b, how=how)
    qkv = torch.cat([q, linear(x, kv_a, how=how)], 1)
    kv_b, nope = weights.kv_b.view(heads.num_heads, -1, rank), q_dim - turned
    k_b, v_b = kv_b[:, :nope], kv_b[:, nope:]
    q_nope = q.view(len(q), heads.num_heads, q_dim)[..., :nope].transpose(0, 1)
    queries = _PerHead.apply(q_nope, k_b.transpose(1, 2), how)  # type: ignore[no-untyped-call]
    attended = _LatentAttention.apply(  # type: ignore[no-untyped-call]
        queries, qkv, weights.kv_a_norm, rope, rows, heads, how
    )
    out = _PerHead.apply(attended, v_b, how)  # type: ignore[no-untyped-call]
    return out.transpose(0, 1).flatten(1)  # type: ignore[no-any-return]

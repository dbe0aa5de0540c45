"""Latent attention in the absorbed form, as csrc/model/latent.c computes it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from rollmesh import ops
from rollmesh.torch import packing
from rollmesh.torch.arrays import array_of, check_flags, in_turn, tensor_of
from rollmesh.torch.functions.attention import Heads, attention_gradients, pairs_apart, rotated
from rollmesh.torch.functions.common import (
    Gradients,
    How,
    backward_pass,
    differentiated,
    matmul_dtype,
    vector_of,
)
from rollmesh.torch.functions.dense import linear, rms_norm
from rollmesh.torch.sequences import PAGE, Sequences

EPS = 1e-6  # of the norms of latents, as in transformers


class Latent(NamedTuple):
    """The weights of a layer up to o_proj. q_a and q_a_norm are None where q_b takes x."""

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
        packed = packing.pack_experts(weight, x.dtype, how)
        bounds = torch.arange(heads + 1, dtype=torch.int32, device=x.device) * rows
        with in_turn(x):
            flat = array_of(x.reshape(-1, k).contiguous())
            made = ops.gemm(flat, packed, n, group_rows=array_of(bounds), **how)
            return tensor_of(made).view(heads, rows, n)

    @staticmethod
    @backward_pass
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        x, weight = (each.to(matmul_dtype(ctx.saved_tensors[0])) for each in ctx.saved_tensors)
        grad = grad.to(x.dtype)
        return grad @ weight, grad.transpose(1, 2) @ x, None


class _Attention(torch.autograd.Function):
    """Attention of queries for latents [heads, rows, rank] over qkv [rows, heads·(nope + rope) +
    rank + rope]: q, the latent, then the key. Returns [heads, rows, rank]."""

    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        qkv: Tensor,
        weight: Tensor,
        rope: tuple[Tensor, Tensor],
        rows: Sequences,
        heads: Heads,
        how: How,
    ) -> Tensor:
        rank, turned = queries.shape[2], 2 * rope[0].shape[1]
        q_dim = (qkv.shape[1] - heads.head_dim) // heads.num_heads
        with in_turn(qkv):
            flags = torch.zeros(rows.num_rows, dtype=torch.uint8, device=qkv.device)
            k, v = rows.caches(1, heads.head_dim, qkv, rank)
            cos, sin = map(array_of, rope)
            made = ops.qk_rope_kv(
                array_of(qkv), None, vector_of("kv_a_norm", weight, qkv, rank), cos, sin,
                rows.positions, rows.slots, k, v,
                num_heads=heads.num_heads, page_size=PAGE, eps=heads.eps, value_dim=rank,
                q_dim=q_dim, row_flags=array_of(flags), **how,
            )  # fmt: skip
            q = tensor_of(made)
            q[..., turned:] = queries.transpose(0, 1)
            out = ops.attention(
                array_of(q), k, v, rows.positions, rows.seq_of_row, rows.block_tables,
                page_size=PAGE, scale=heads.scale, value_dim=rank, **how,
            )  # fmt: skip
            attended = tensor_of(out).transpose(0, 1)
        check_flags("keys or values", flags)
        ctx.save_for_backward(queries, qkv, weight, *rope)
        ctx.rows, ctx.heads = rows, heads
        return attended

    @staticmethod
    @backward_pass
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        queries, qkv, weight, cos, sin = ctx.saved_tensors
        rows, heads, dtype = ctx.rows, ctx.heads, matmul_dtype(qkv)
        rank, turned = queries.shape[2], 2 * cos.shape[1]
        at = torch.from_numpy(rows.positions).to(qkv.device)
        cos, sin = (x.index_select(0, at)[:, None] for x in (cos, sin))

        def made(queries: Tensor, qkv: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
            q_width = qkv.shape[1] - heads.head_dim
            q, latent, key = torch.split(qkv, [q_width, rank, turned], 1)
            q = rotated(q.view(len(q), heads.num_heads, -1)[..., -turned:], cos, sin)
            v = F.rms_norm(latent, [rank], weight, heads.eps)[:, None]
            k = torch.cat([rotated(key[:, None], cos, sin), v], -1)
            return torch.cat([q, queries.transpose(0, 1)], -1), k, v

        qkvs, pull = differentiated(made, queries, qkv, weight)
        q, k, v, grad = (x.to(dtype) for x in (*qkvs, grad.transpose(0, 1)))
        by_qkvs, _ = attention_gradients(q, k, v, grad, None, rows, heads)
        return *pull(*(x.float() for x in by_qkvs)), None, None, None, None


def latent_attention(
    x: Tensor,
    weights: Latent,
    rope: tuple[Tensor, Tensor],
    rows: Sequences,
    heads: Heads,
    *,
    interleaved: bool,
    how: How,
) -> Tensor:
    """Returns causal latent attention over packed sequences x [rows, hidden], [rows, num_heads ·
    v]. heads: with one kv head, and with the head_dim of the cache. rope: as in `attention`.
    interleaved: rope turns neighbours in the rows of q_b and kv_a, else halves."""
    turned, rank = 2 * rope[0].shape[1], len(weights.kv_a_norm)
    q_b, kv_a, low = weights.q_b, weights.kv_a, x
    q_dim = len(q_b) // heads.num_heads
    if interleaved:
        q_b = pairs_apart(q_b, q_dim, turned, q_dim - turned)
        kv_a = pairs_apart(kv_a, len(kv_a), turned, rank)
    if weights.q_a is not None and weights.q_a_norm is not None:
        low = rms_norm(linear(x, weights.q_a, how=how), weights.q_a_norm, EPS, how=how)
    q = linear(low, q_b, how=how)
    qkv = torch.cat([q, linear(x, kv_a, how=how)], 1)
    kv_b, nope = weights.kv_b.view(heads.num_heads, -1, rank), q_dim - turned
    k_b, v_b = kv_b[:, :nope], kv_b[:, nope:]
    q_nope = q.view(len(q), heads.num_heads, q_dim)[..., :nope].transpose(0, 1)
    queries = _PerHead.apply(q_nope, k_b.transpose(1, 2), how)  # type: ignore[no-untyped-call]
    attended = _Attention.apply(  # type: ignore[no-untyped-call]
        queries, qkv, weights.kv_a_norm, rope, rows, heads, how
    )
    out = _PerHead.apply(attended, v_b, how)  # type: ignore[no-untyped-call]
    return out.transpose(0, 1).flatten(1)  # type: ignore[no-any-return]

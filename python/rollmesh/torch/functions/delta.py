"""The gated delta rule over packed sequences."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from rollmesh import ops
from rollmesh.errors import ShapeError
from rollmesh.torch import packing
from rollmesh.torch.arrays import array_of, device_name, in_turn, tensor_of, weight_array
from rollmesh.torch.functions.common import (
    Gradients,
    How,
    backward_pass,
    differentiated,
    how_for,
    rows_of,
    vector_of,
)
from rollmesh.torch.sequences import Sequences

CHUNK = 64  # steps that a backward pass computes together, by matmuls
STEPS_AT_ONCE = 1 << 13  # of padded sequences that a backward pass computes together


class DeltaHeads(NamedTuple):
    """Shapes and constants of a layer with the gated delta rule."""

    num_k_heads: int
    num_v_heads: int
    k_dim: int
    v_dim: int
    eps: float  # of the norm

    @property
    def widths(self) -> list[int]:
        """The numbers of columns of q, k, v, z, b and a in a row."""
        of_k, of_v = self.num_k_heads * self.k_dim, self.num_v_heads * self.v_dim
        return [of_k, of_k, of_v, of_v, self.num_v_heads, self.num_v_heads]


class _DeltaNet(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        conv: Tensor,
        a_log: Tensor,
        dt_bias: Tensor,
        norm: Tensor,
        rows: Sequences,
        heads: DeltaHeads,
        how: How,
    ) -> Tensor:
        taps = packing.check_weight("conv", conv, 3).to(x.dtype)
        decay, bias = (
            weight_array(packing.check_weight("decay", w, 1).float()) for w in (a_log, dt_bias)
        )
        with in_turn(x):
            states = ops.delta_states(
                0, heads.num_v_heads, heads.k_dim, heads.v_dim, conv.shape[2],
                dtype=packing.name_of(x.dtype), device=device_name(x),
            )  # fmt: skip
            out = ops.delta_net(
                array_of(x), weight_array(taps.flatten(1)), decay, bias,
                vector_of("norm", norm, x, heads.v_dim), states,
                np.full(len(rows.lengths), -1, np.int32), np.full(len(x), -1, np.int32),
                rows.seq_of_row, k_dim=heads.k_dim, eps=heads.eps, **how,
            )  # fmt: skip
            made = tensor_of(out).flatten(1)
        ctx.save_for_backward(x, conv, a_log, dt_bias, norm)
        ctx.rows, ctx.heads = rows, heads
        return made

    @staticmethod
    @backward_pass
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        """Computes the rows again in float32, some sequences at a time."""
        x, *weights = ctx.saved_tensors
        grid = ctx.rows.grid()
        each = max(1, STEPS_AT_ONCE // grid.shape[1])
        parts = zip(*(torch.split(grid.pad(t), each) for t in (x, grad)), strict=True)
        by_x, by_weights = [], [torch.zeros_like(w, dtype=torch.float32) for w in weights]
        for part, grad_of_part in parts:
            _, pull = differentiated(partial(_computed, ctx.heads), part, *weights)
            of_x, *of_weights = pull(grad_of_part.float())
            by_x.append(of_x)
            for total, by_weight in zip(by_weights, of_weights, strict=True):
                total += by_weight
        return grid.pick(torch.cat(by_x)), *by_weights, None, None, None


def _computed(
    heads: DeltaHeads, x: Tensor, conv: Tensor, a_log: Tensor, dt_bias: Tensor, norm: Tensor
) -> Tensor:
    """Computes the op in torch: [sequences, steps, v_heads · v_dim] from x [sequences, steps,
    columns]."""
    *_, z, b, a = torch.split(x, heads.widths, 2)
    inputs = x[..., : len(conv)].mT
    mixed = F.silu(F.conv1d(inputs, conv, padding=conv.shape[2] - 1, groups=len(conv)))
    # [sequences, channels, steps]
    q, k, v = torch.split(mixed[..., : x.shape[1]], heads.widths[:3], 1)

    def by_heads(x: Tensor, size: int) -> Tensor:
        each = torch.unflatten(x, 1, (-1, size)).mT  # [sequences, heads, steps, size]
        return each.repeat_interleave(heads.num_v_heads // each.shape[1], 1)

    q, k = (by_heads(y, heads.k_dim) for y in (q, k))
    q, k = (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + 1e-6) for y in (q, k))
    decay = -a_log.exp() * F.softplus(a + dt_bias)
    o = _rule(q * heads.k_dim**-0.5, k, by_heads(v, heads.v_dim), decay.mT, b.sigmoid().mT)
    scale = torch.rsqrt(o.square().mean(-1, keepdim=True) + heads.eps)
    return (o * scale * norm).transpose(1, 2).flatten(2) * F.silu(z)


def _rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """Computes the recurrence over [sequences, heads, steps, …], chunk by chunk. decay: the
    logarithm of a step's factor. The deltas u of a chunk solve (1 + A) u = beta (v − e^decay k S),
    where A has the products of the chunk's keys, S is the state before the chunk, and decay is
    summed from the chunk's start (arXiv 2412.06464)."""
    steps = q.shape[2]
    more = -steps % CHUNK
    q, k, v = (torch.unflatten(F.pad(x, (0, 0, 0, more)), 2, (-1, CHUNK)) for x in (q, k, v))
    decay, beta = (torch.unflatten(F.pad(x, (0, more)), 2, (-1, CHUNK)) for x in (decay, beta))
    total = decay.cumsum(-1)
    shares = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
    kept, left = total.exp()[..., None], (total[..., -1:] - total).exp()[..., None]
    products = (beta[..., None] * (k @ k.mT) * shares).tril(-1)
    known = beta[..., None] * torch.cat([v, k * kept], -1)
    solved = torch.linalg.solve_triangular(products, known, upper=False, unitriangular=True)
    values, keys = torch.split(solved, [v.shape[-1], k.shape[-1]], -1)
    scores, q, k = (q @ k.mT) * shares, q * kept, k * left
    state, out = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1]), []
    for i in range(q.shape[2]):
        u = values[:, :, i] - keys[:, :, i] @ state
        out.append(q[:, :, i] @ state + scores[:, :, i] @ u)
        state = state * kept[:, :, i, -1:] + k[:, :, i].mT @ u
    return torch.stack(out, 2).flatten(2, 3)[:, :, :steps]


def delta_net(
    x: Tensor,
    conv: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    norm: Tensor,
    rows: Sequences,
    heads: DeltaHeads,
    *,
    how: How | None = None,
) -> Tensor:
    """Returns the gated delta rule over packed sequences, [rows, v_heads · v_dim]. x [rows,
    columns] is the output of the projections: q, k, v, z, b and a side by side. conv [channels, 1,
    kernel], a_log and dt_bias [v_heads], norm [v_dim]: as in ops.delta_net."""
    x = rows_of("x", x, sum(heads.widths))
    if len(x) != rows.num_rows:
        raise ShapeError(f"x: expected {rows.num_rows} rows, those of the sequences, got {len(x)}")
    return _DeltaNet.apply(  # type: ignore[no-any-return, no-untyped-call]
        x, conv, a_log, dt_bias, norm, rows, heads, how or how_for(x)
    )

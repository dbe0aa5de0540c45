"""The mixture of experts: router, dispatch, experts, combine."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from rollmesh import ops
from rollmesh.errors import ShapeError
from rollmesh.torch import packing
from rollmesh.torch.arrays import array_of, check_tensor, in_turn, tensor_of, weight_array
from rollmesh.torch.functions.common import (
    Gradients,
    How,
    backward_pass,
    differentiated,
    gated,
    how_for,
    matmul_dtype,
    rows_of,
    vector_of,
)


class Routed(NamedTuple):
    """out [rows, hidden], and the experts of each row, int32 [rows, top_k], best first."""

    out: Tensor
    ids: Tensor


class Scoring(NamedTuple):
    """How a router chooses and weighs, as the arguments of ops.router."""

    renormalize: bool = True
    score: str = "softmax"
    num_groups: int = 1
    top_groups: int = 1
    route_scale: float = 1.0
    min_sum: float = 0.0


class Gating(NamedTuple):
    """The activation of the experts, as the arguments of ops.gemm_swiglu."""

    activation: str = "silu"
    alpha: float = 1.702
    limit: float = 7.0


class _Moe(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        router: Tensor,
        gate_up: Tensor,
        down: Tensor,
        logit_bias: Tensor | None,
        gate_up_bias: Tensor | None,
        down_bias: Tensor | None,
        bias: Any,
        top_k: int,
        by: Scoring,
        gating: Gating,
        how: How,
    ) -> tuple[Tensor, Tensor]:
        experts, width = len(router), down.shape[2]
        packed_router = packing.pack_rows([[router]], x.dtype, how)
        packed_gate_up = packing.pack_gate_up([both.chunk(2) for both in gate_up], x.dtype, how)
        packed_down = packing.pack_rows([[matrix] for matrix in down], x.dtype, how)
        with in_turn(x):
            routing = ops.router(
                array_of(x), packed_router, experts, top_k, bias=bias, **by._asdict(),
                logit_bias=vector_of("logit_bias", logit_bias, x, experts), **how,
            )  # fmt: skip
            sent, group_rows, place = ops.permute(array_of(x), routing.ids, experts, **how)
            both = None
            if any(ctx.needs_input_grad):
                both = x.new_empty(len(x) * top_k, 2 * width)
            inner = ops.gemm_swiglu(
                sent,
                packed_gate_up,
                width,
                bias=_biases("gate_up_bias", gate_up_bias, x, (experts, 2 * width)),
                group_rows=group_rows,
                **gating._asdict(),
                gate_up=None if both is None else array_of(both),
                **how,
            )
            of_down = _biases("down_bias", down_bias, x, (experts, x.shape[1]))
            y = ops.gemm(inner, packed_down, x.shape[1], bias=of_down, group_rows=group_rows, **how)
            out = tensor_of(ops.combine(y, place, *routing, experts, **how))
            ids = tensor_of(routing.ids)
            if both is not None:
                routed = ids, tensor_of(routing.gates), tensor_of(place), tensor_of(group_rows)
                ctx.save_for_backward(
                    x, router, gate_up, down, logit_bias, down_bias, *routed, both
                )
                ctx.by, ctx.gating, ctx.has_gate_up_bias = by, gating, gate_up_bias is not None
        ctx.mark_non_differentiable(ids)
        return out, ids

    @staticmethod
    @backward_pass
    def backward(ctx: Any, grad: Tensor, _: Any) -> Gradients:
        x, router, gate_up, down, logit_bias, down_bias, *routed, both = ctx.saved_tensors
        ids, gates, place, ends = routed
        dtype, top_k, bounds = matmul_dtype(x), ids.shape[1], ends.tolist()
        order = torch.argsort(place.flatten())  # of the choices, as the experts have them
        row = order // top_k
        rows, sent = grad.to(dtype).index_select(0, row), x.to(dtype).index_select(0, row)
        gate = gates.flatten()[order, None]
        inner, pull = gated(both, *ctx.gating)
        by_inner, by_sent = torch.empty_like(inner), torch.empty_like(sent)
        by_down, by_gate_up = torch.zeros_like(down), torch.zeros_like(gate_up)
        groups = [(e, slice(*ab)) for e, ab in enumerate(pairwise(bounds)) if ab[0] < ab[1]]
        for e, at in groups:
            by_inner[at] = rows[at] @ down[e].to(dtype)
        by_gate = (by_inner * inner).sum(1, keepdim=True)
        if down_bias is not None:
            expert = ids.flatten()[order].long()
            by_gate += (rows.float() * down_bias.float()[expert]).sum(1, keepdim=True)
        by_gates = torch.empty_like(gate).index_copy_(0, order, by_gate).view_as(gates)
        by_both = torch.cat(pull(by_inner.mul_(gate)), 1).to(dtype)
        scaled, acted = (rows * gate).to(dtype), inner.to(dtype)
        for e, at in groups:
            by_down[e] = scaled[at].t() @ acted[at]
            by_gate_up[e] = by_both[at].t() @ sent[at]
            by_sent[at] = by_both[at] @ gate_up[e].to(dtype)
        rows = by_sent.index_select(0, place.flatten().long()).view(*ids.shape, x.shape[1])
        by_x = rows.float().sum(1)
        _, pull = differentiated(partial(_gates, ctx.by, ids.long()), x, router, logit_bias)
        by_rows, by_router, by_logit_bias = pull(by_gates)
        by_x += by_rows
        by_gate_up_bias = _sums(by_both, groups, len(router)) if ctx.has_gate_up_bias else None
        by_down_bias = None if down_bias is None else _sums(scaled, groups, len(router))
        biases = by_logit_bias, by_gate_up_bias, by_down_bias
        return by_x, by_router, by_gate_up, by_down, *biases, *[None] * 5


def _sums(rows: Tensor, groups: list[tuple[int, slice]], experts: int) -> Tensor:
    """Returns the sum of the rows of each expert, [experts, n]."""
    sums = rows.new_zeros(experts, rows.shape[1], dtype=torch.float32)
    for e, at in groups:
        sums[e] = rows[at].float().sum(0)
    return sums


def _biases(name: str, bias: Tensor | None, x: Tensor, shape: tuple[int, int]) -> Any:
    """Returns the biases of experts as an op takes them."""
    if bias is None:
        return None
    if tuple(packing.check_weight(name, bias).shape) != shape:
        raise ShapeError(f"{name}: expected shape {shape}, got {tuple(bias.shape)}")
    return weight_array(bias.detach().to(x.dtype).contiguous())


def _gates(
    by: Scoring, ids: Tensor, x: Tensor, router: Tensor, logit_bias: Tensor | None
) -> Tensor:
    """Returns the gates of the chosen experts. The choice has no gradient."""
    logits = F.linear(x, router, logit_bias)
    scores = logits.softmax(-1) if by.score == "softmax" else logits.sigmoid()
    chosen = scores.gather(1, ids)
    if by.renormalize:
        chosen = chosen / chosen.sum(1, keepdim=True).clamp(min=by.min_sum)
    return chosen * by.route_scale


def moe(
    x: Tensor,
    router: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    top_k: int,
    renormalize: bool = True,
    score: str = "softmax",
    num_groups: int = 1,
    top_groups: int = 1,
    route_scale: float = 1.0,
    min_sum: float = 0.0,
    bias: Tensor | None = None,
    logit_bias: Tensor | None = None,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "silu",
    alpha: float = 1.702,
    limit: float = 7.0,
    how: How | None = None,
) -> Routed:
    """The mixture of experts: router [experts, hidden], gate_up [experts, 2n, hidden] with the rows
    of gate first, down [experts, hidden, n]. Gates are float32; gradients flow through them into
    the router. bias, float32 [experts], is added to the scores for the choice of experts only, as
    DeepSeek-V3's; it has no gradient. logit_bias [experts], gate_up_bias [experts, 2n] and
    down_bias [experts, hidden] are added to the products. The arguments from renormalize to min_sum
    are those of ops.router; activation, alpha and limit are those of ops.gemm_swiglu."""
    x = rows_of("x", x)
    experts, hidden = len(packing.check_weight("router", router)), x.shape[1]
    width = packing.check_weight("down", down, 3).shape[2]
    packing.check_weight("gate_up", gate_up, 3)
    for name, weight, shape in (
        ("router", router, (experts, hidden)),
        ("gate_up", gate_up, (experts, 2 * width, hidden)),
        ("down", down, (experts, hidden, width)),
    ):
        if tuple(weight.shape) != shape:
            raise ShapeError(f"{name}: expected shape {shape}, got {tuple(weight.shape)}")
    chosen_by = None
    if bias is not None:
        bias = check_tensor("bias", bias)
        if bias.dtype != torch.float32 or tuple(bias.shape) != (experts,):
            raise ShapeError(
                f"bias: expected torch.float32 of shape ({experts},), got {bias.dtype} of shape "
                f"{tuple(bias.shape)}"
            )
        chosen_by = array_of(bias.contiguous())
    by = Scoring(renormalize, score, num_groups, top_groups, route_scale, min_sum)
    biases = logit_bias, gate_up_bias, down_bias
    gating = Gating(activation, alpha, limit)
    args = (x, router, gate_up, down, *biases, chosen_by, top_k, by, gating)
    return Routed(*_Moe.apply(*args, how or how_for(x)))  # type: ignore[no-untyped-call]

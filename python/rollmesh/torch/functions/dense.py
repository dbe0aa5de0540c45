"""embedding, linear, norms and SwiGLU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from rollmesh import ops
from rollmesh.errors import ShapeError
from rollmesh.torch import packing
from rollmesh.torch.arrays import array_of, call_op, check_tokens
from rollmesh.torch.functions.common import (
    ACTIVATIONS,
    Gradients,
    How,
    backward_pass,
    check_width,
    differentiated,
    gated,
    how_for,
    linear_gradients,
    matmul_dtype,
    norm,
    rows_of,
    vector_of,
)


def embedding(ids: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows [len(ids), hidden] of a table [vocab, hidden] in `dtype`: moves of bits, which are
    torch's as well."""
    packing.check_weight("weight", weight)
    check_tokens("ids", ids, 0, len(weight))
    return F.embedding(ids.reshape(-1).long(), weight).to(dtype)


class Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, how: How, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, *weights)
        packed, n = packing.pack_rows([weights], x.dtype, how), sum(map(len, weights))
        return call_op(ops.gemm, x, packed, n, bias=vector_of("bias", bias, x, n), **how)

    @staticmethod
    @backward_pass
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        x, *weights = ctx.saved_tensors
        needs_x, needs_bias, _, *needs_weights = ctx.needs_input_grad
        parts = torch.split(grad.to(matmul_dtype(x)), [len(weight) for weight in weights], 1)
        by_x, *by_weights = linear_gradients(x, weights, parts, [needs_x, *needs_weights])
        by_bias = grad.float().sum(0) if needs_bias else None
        return by_x, by_bias, None, *by_weights


def linear(
    x: Tensor,
    *weights: Tensor,
    bias: Tensor | None = None,
    how: How | None = None,
) -> Tensor:
    """x [rows, k] times the transposes of one or more weights [n, k], side by side: [rows, Σ n].
    One call for q, k and v is bit-identical to three calls."""
    x = rows_of("x", x)
    check_width("weight", weights, x.shape[1])
    return Linear.apply(  # type: ignore[no-any-return, no-untyped-call]
        x, bias, how or how_for(x), *weights
    )


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, eps: float, zero_centered: bool, how: How
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.options = eps, zero_centered
        vector = vector_of("weight", weight, x, x.shape[1])
        return call_op(ops.rms_norm, x, vector, eps=eps, zero_centered=zero_centered, **how)

    @staticmethod
    @backward_pass
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        x, weight = ctx.saved_tensors
        _, pull = norm(x, weight, *ctx.options)
        return *pull(grad), None, None, None


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    zero_centered: bool = False,
    how: How | None = None,
) -> Tensor:
    """weight · x / rms(x) over rows [rows, n]; zero_centered: with 1 + weight."""
    x = rows_of("x", x)
    return _RmsNorm.apply(  # type: ignore[no-any-return, no-untyped-call]
        x, weight, eps, zero_centered, how or how_for(x)
    )


def add_rms_norm(
    residual: Tensor, x: Tensor, weight: Tensor, eps: float, *, how: How | None = None
) -> tuple[Tensor, Tensor]:
    """(rms_norm of the sum, the sum residual + x), both [rows, n]."""
    total = add(residual, x, how=how)
    return rms_norm(total, weight, eps, how=how), total


def _scaled(x: Tensor, gate: Tensor) -> Tensor:
    return gate.sigmoid() * x


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, residual: Tensor, x: Tensor, gate: Tensor | None, scale: float | None, how: How
    ) -> Tensor:
        total, ctx.scale = residual.clone(), scale
        gates = None if gate is None else array_of(gate.reshape(-1))
        # The op that a rollout adds with.
        call_op(
            ops.rms_norm, total, None, eps=1.0, x=array_of(x), x_gate=gates, x_scale=scale, **how
        )
        if gate is not None:
            ctx.save_for_backward(x, gate)
        return total

    @staticmethod
    @backward_pass
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        saved = ctx.saved_tensors  # gradient checkpointing allows a single read
        if not saved:
            scaled = grad if ctx.scale is None else grad * ctx.scale
            return grad, scaled, None, None, None
        _, pull = differentiated(_scaled, *saved)
        return grad, *pull(grad.float()), None, None


def add(
    residual: Tensor,
    x: Tensor,
    gate: Tensor | None = None,
    *,
    scale: float | None = None,
    how: How | None = None,
) -> Tensor:
    """residual + x, [rows, n]: the sum of add_rms_norm. gate [rows, 1]: residual + sigmoid(gate) ·
    x. scale: residual + scale · x; not with a gate."""
    residual = rows_of("residual", residual)
    gate = None if gate is None else rows_of("gate", gate, 1)
    x = rows_of("x", x, residual.shape[1])
    return _Add.apply(  # type: ignore[no-any-return, no-untyped-call]
        residual, x, gate, scale, how or how_for(x)
    )


def decoder_layer(
    hidden: Tensor,
    norms: Sequence[Tensor],
    attend: Callable[[Tensor], Tensor],
    mix: Callable[[Tensor], Tensor],
    eps: float,
    *,
    norm_after: bool = False,
    also_after: Sequence[Tensor] | None = None,
    zero_centered: bool = False,
    scale: float | None = None,
    how: How | None = None,
) -> Tensor:
    """A layer over rows [rows, n], with a rollout's norms and sums. norms: weights before attention
    and before the MLP or experts, which `attend` and `mix` compute; with norm_after of their
    outputs. also_after: weights of norms of the outputs, beside those before. zero_centered: as in
    rms_norm; scale: of the outputs, as in add."""
    after = norms if norm_after else also_after
    normed = partial(rms_norm, eps=eps, zero_centered=zero_centered, how=how)
    for i, compute in enumerate((attend, mix)):
        out = compute(hidden if norm_after else normed(hidden, norms[i]))
        out = out if after is None else normed(out, after[i])
        hidden = add(hidden, out, scale=scale, how=how)
    return hidden


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, up: Tensor, activation: str, how: How) -> Tensor:
        packed = packing.pack_gate_up([(gate, up)], x.dtype, how)
        both = x.new_empty(len(x), 2 * len(gate)) if any(ctx.needs_input_grad) else None
        options: Any = {"activation": activation, **how}
        if both is not None:
            ctx.activation, options["gate_up"] = activation, array_of(both)
            ctx.save_for_backward(x, gate, up, both)
        return call_op(ops.gemm_swiglu, x, packed, len(gate), **options)

    @staticmethod
    @backward_pass
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        x, gate, up, both = ctx.saved_tensors
        _, pull = gated(both, ctx.activation)
        made = linear_gradients(x, (gate, up), pull(grad.float()), ctx.needs_input_grad[:3])
        return *made, None, None


def swiglu(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    *,
    activation: str = "silu",
    how: How | None = None,
) -> Tensor:
    """activation(x · gate) · (x · up), [rows, n], with gate and up [n, k]. activation: as in
    ops.gemm_swiglu."""
    x = rows_of("x", x)
    check_width("gate or up", (gate, up), x.shape[1])
    if len(gate) != len(up):
        raise ShapeError(f"up: expected {len(gate)} rows, as gate has, got {len(up)}")
    return _Swiglu.apply(  # type: ignore[no-any-return, no-untyped-call]
        x, gate, up, activation, how or how_for(x)
    )


class _Elementwise(torch.autograd.Function):
    """An op, and torch's function for its backward pass."""

    @staticmethod
    def forward(ctx: Any, op: Any, function: Any, options: How, *inputs: Tensor) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(*inputs)
        return call_op(op, *inputs, **options)

    @staticmethod
    @backward_pass
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        _, pull = differentiated(ctx.function, *ctx.saved_tensors)
        return None, None, None, *pull(grad.float())


def sigmoid_gate(x: Tensor, gate: Tensor, *, how: How | None = None) -> Tensor:
    """sigmoid(gate) · x, [rows, n]."""
    x = rows_of("x", x)
    gate = rows_of("gate", gate, x.shape[1])
    return _Elementwise.apply(  # type: ignore[no-any-return, no-untyped-call]
        ops.sigmoid_gate, _scaled, how or how_for(x), x, gate
    )


def activate(x: Tensor, activation: str, *, how: How | None = None) -> Tensor:
    """activation(x), [rows, n]: that of an MLP without a gate. activation: as in
    ops.gemm_swiglu."""
    x = rows_of("x", x)
    options = {"activation": activation, **(how or how_for(x))}
    return _Elementwise.apply(  # type: ignore[no-any-return, no-untyped-call]
        ops.activate, lambda x: ACTIVATIONS[activation](x), options, x
    )

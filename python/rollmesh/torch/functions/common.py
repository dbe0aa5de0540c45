"""Arguments of the differentiable ops, and parts of their backward passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from rollmesh import ops
from rollmesh.errors import ShapeError
from rollmesh.ops.arguments import MAX_THREADS
from rollmesh.torch import packing
from rollmesh.torch.arrays import check_tensor, weight_array

How = Mapping[str, Any]  # isa and threads of the ops
Gradients = tuple[Any, ...]  # of the arguments of a forward pass
Pull = Callable[[Tensor], Gradients]
BFLOAT16_ISAS = frozenset({"avx512bf16", "amx"})


def how_for(x: Tensor, isa: str | None = None, threads: int | None = None) -> How:
    """Options of the ops on x's device; on the CPU as many threads as torch has."""
    if threads is None:
        threads = 1 if x.is_cuda else min(torch.get_num_threads(), MAX_THREADS)
    return {"isa": isa, "threads": 1 if x.is_cuda else threads}


def rows_of(name: str, x: Any, width: int | None = None) -> Tensor:
    check_tensor(name, x)
    packing.name_of(x.dtype)
    if x.ndim != 2 or (width is not None and x.shape[1] != width):
        raise ShapeError(
            f"{name}: expected shape [rows, {'width' if width is None else width}], got "
            f"{tuple(x.shape)}"
        )
    return x.contiguous()  # type: ignore[no-any-return]


def vector_of(name: str, weight: Tensor | None, x: Tensor, width: int) -> Any:
    """A norm's weight or a bias as an op takes it."""
    if weight is None:
        return None
    vector = packing.check_weight(name, weight, 1).to(x.dtype)
    if len(vector) != width:
        raise ShapeError(f"{name}: expected {width} elements, got {len(vector)}")
    return weight_array(vector)


def check_width(name: str, weights: Sequence[Tensor], k: int) -> None:
    for weight in weights:
        if packing.check_weight(name, weight).shape[1] != k:
            raise ShapeError(
                f"{name}: expected {k} columns, as the activations have, got shape "
                f"{tuple(weight.shape)}"
            )


def matmul_dtype(x: Tensor) -> torch.dtype:
    return (
        x.dtype
        if x.is_cuda or not BFLOAT16_ISAS.isdisjoint(ops.available_isas())
        else torch.float32
    )


def linear_gradients(
    x: Tensor, weights: Sequence[Tensor], grads: Sequence[Tensor], needed: Sequence[bool]
) -> list[Tensor | None]:
    """The gradients of x and of each weight [n, k] for the gradients [rows, n] of x times the
    transpose of each weight. needed: which of them are wanted."""
    dtype, by_x = matmul_dtype(x), None
    grads = [grad.to(dtype) for grad in grads]
    if needed[0]:
        by_x = grads[0] @ weights[0].to(dtype)
        for grad, weight in zip(grads[1:], weights[1:], strict=True):
            by_x.addmm_(grad, weight.to(dtype))
    rows = x.to(dtype) if any(needed[1:]) else x
    return [by_x] + [
        grad.t() @ rows if wanted else None for grad, wanted in zip(grads, needed[1:], strict=True)
    ]


def backward_pass(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A `backward` that is not differentiated again. Inside autocast too it computes in the dtypes
    that it names. Torch converts the gradients that it returns to the dtypes of the inputs."""

    @wraps(backward)
    def plain(ctx: Any, *grads: Tensor) -> Any:
        if torch.is_autocast_enabled(grads[0].device.type):
            with torch.autocast(grads[0].device.type, enabled=False):
                return backward(ctx, *grads)
        return backward(ctx, *grads)

    return once_differentiable(plain)


def norm(
    x: Tensor, weight: Tensor | None, eps: float, zero_centered: bool = False
) -> tuple[Callable[[], Tensor], Pull]:
    """Returns two functions: the first computes weight · x / rms(x) over the last dim in float32
    (without a weight x itself; zero_centered: with 1 + weight), the second maps its gradient to
    those of x and weight."""
    wide = x.float()
    if weight is None:
        return lambda: wide, lambda grad: (grad, None)
    factors, size = weight.float() + zero_centered, len(weight)
    scale = torch.rsqrt(torch.linalg.vecdot(wide, wide)[..., None] / size + eps)
    normed = wide * scale

    def pull(grad: Tensor) -> Gradients:
        grad = grad.float().view_as(x)
        by_x = grad * factors
        mean = torch.linalg.vecdot(by_x, normed)[..., None] / size
        by_weight = (grad * normed).flatten(0, -2).sum(0)
        return by_x.addcmul_(normed, mean, value=-1).mul_(scale), by_weight

    return lambda: normed * factors, pull


def differentiated(
    function: Callable[..., Any], *inputs: Tensor | None, dtype: torch.dtype = torch.float32
) -> tuple[Any, Callable[..., Gradients]]:
    """Returns function(*inputs), computed in `dtype`, and a function that maps the gradients of its
    results to those of the inputs."""
    leaves = [x if x is None else x.detach().to(dtype).requires_grad_() for x in inputs]
    with torch.enable_grad():
        made = function(*leaves)

    def pull(*grads: Tensor) -> Gradients:
        found = iter(torch.autograd.grad(made, [x for x in leaves if x is not None], grads))
        return tuple(None if x is None else next(found) for x in leaves)

    return made, pull


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "gelu": F.gelu,
    "relu2": lambda x: x.relu().square(),
}


def gated(
    gate_up: Tensor, activation: str, alpha: float = 1.702, limit: float = 7.0
) -> tuple[Tensor, Pull]:
    """Returns activation(gate) · up in float32, and a function that maps its gradient to those of
    gate and up. alpha, limit: of "swiglu_oai"."""

    def made(gate: Tensor, up: Tensor) -> Tensor:
        if activation == "swiglu_oai":
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit) + 1
            return gate * (gate * alpha).sigmoid() * up
        return ACTIVATIONS[activation](gate) * up

    return differentiated(made, *gate_up.chunk(2, 1))

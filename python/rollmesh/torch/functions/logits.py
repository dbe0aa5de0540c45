"""lm_head, and the logprobs of given tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rollmesh import ops
from rollmesh.errors import NumericsError, RequestError, ShapeError
from rollmesh.ops.arguments import is_real
from rollmesh.runtime.messages import shown
from rollmesh.torch import packing
from rollmesh.torch.arrays import array_of, host_of, in_turn, tensor_of
from rollmesh.torch.functions.common import How, backward_pass, how_for, matmul_dtype, rows_of, width_of

LOGITS_AT_ONCE = 1 << 25  # float32 numbers of a pass over the vocabulary, beside those that are kept
LOGITS_KEPT = 1 << 28  # up to so many are kept for the backward pass; more are computed again


class TokenLogprobs(NamedTuple):
    """float32 [rows] each. entropy: None unless asked for."""

    logprobs: Tensor
    entropy: Tensor | None


class _LmHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, packed: Any, how: How) -> Tensor:
        ctx.save_for_backward(x, weight)
        with in_turn(x):
            head = ops.lm_head(array_of(x), packed, len(weight), **how)
            _check_logits(head.row_flags)
            return tensor_of(head.logits, torch.float32)

    @staticmethod
    @backward_pass
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dtype = matmul_dtype(x)
        g = grad.to(dtype)
        by_x = (g @ weight.to(dtype)).to(x.dtype) if ctx.needs_input_grad[0] else None
        return by_x, (g.t() @ x.to(dtype)).to(weight.dtype) if ctx.needs_input_grad[1] else None, None, None


def lm_head(x: Tensor, weight: Tensor, *, packed: Any = None, how: How | None = None) -> Tensor:
    """Logits of x [rows, hidden], float32 [rows, vocab]."""
    x = rows_of("x", x)
    how = how or how_for(x)
    width_of("weight", [weight], x.shape[1])
    made: Tensor = _LmHead.apply(x, weight, packing.pack_rows([weight], x.dtype, how) if packed is None else packed, how)  # type: ignore[no-untyped-call]
    return made


def _check_logits(flags: Any) -> None:
    if (bad := host_of(flags)).any():
        raise NumericsError(f"logits of row {int(bad.argmax())} of {len(bad)} are not finite")


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, temperature: float, wants_entropy: bool, packed: Any, how: How
    ) -> tuple[Tensor, Tensor]:
        vocab, needs_grad = len(weight), any(ctx.needs_input_grad)
        keep = needs_grad and len(x) * vocab <= LOGITS_KEPT
        logprobs, entropy = torch.empty(len(x), device=x.device), torch.zeros(len(x), device=x.device)
        kept: list[Tensor] = []
        for at in _chunks(len(x), vocab):
            wants_logits = keep or wants_entropy or temperature != 1
            with in_turn(x):
                head = ops.lm_head(array_of(x[at]), packed, vocab, targets=array_of(targets[at]), keep_logits=wants_logits, **how)
                _check_logits(head.row_flags)
                found = head.target_logprobs
                if temperature != 1:
                    assert head.logits is not None
                    params = ops.SampleParams(temperature=temperature)
                    found = ops.sample(head.logits, head.stats, params, forced=host_of(targets[at]), **how).sampling_logprobs
                logprobs[at] = tensor_of(found, torch.float32)
                logits = tensor_of(head.logits, torch.float32) if wants_logits else None
            if temperature != 1 and (never := torch.isneginf(logprobs[at])).any():
                assert logits is not None
                log_p = torch.log_softmax(logits[never] / temperature, -1)
                logprobs[at][never] = log_p.gather(1, targets[at][never, None].long())[:, 0]
            if wants_entropy:
                assert logits is not None
                log_p = torch.log_softmax(logits / temperature, -1)
                entropy[at] = -(log_p.exp() * log_p).sum(-1)
            if keep:
                assert logits is not None
                kept.append(logits)
        ctx.save_for_backward(x, weight, targets, *kept)
        ctx.temperature, ctx.wants_entropy = temperature, wants_entropy
        if not wants_entropy:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @backward_pass
    def backward(ctx: Any, grad: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, targets, *kept = ctx.saved_tensors
        dtype = matmul_dtype(x)
        by_x, matrix = torch.empty_like(x), weight.to(dtype)
        by_weight = None
        for i, at in enumerate(_chunks(len(x), len(weight))):
            logits = kept[i] if kept else (x[at].to(dtype) @ matrix.t()).float()
            scaled = logits if ctx.temperature == 1 else logits / ctx.temperature
            if ctx.wants_entropy:
                log_p = torch.log_softmax(scaled, -1)
                p = log_p.exp()
                by_logits = p * -(grad[at, None] + grad_entropy[at, None] * (log_p - (p * log_p).sum(-1, keepdim=True)))
            else:
                by_logits = torch.softmax(scaled, -1).mul_(-grad[at, None])
            by_logits.scatter_add_(1, targets[at, None].long(), grad[at, None])
            g = (by_logits if ctx.temperature == 1 else by_logits.div_(ctx.temperature)).to(dtype)
            by_x[at] = (g @ matrix).to(x.dtype)
            if ctx.needs_input_grad[1]:
                part = (g.t() @ x[at].to(dtype)).to(weight.dtype)
                by_weight = part if by_weight is None else by_weight.add_(part)
        return by_x, by_weight, None, None, None, None, None


def _chunks(rows: int, vocab: int) -> list[slice]:
    each = max(1, LOGITS_AT_ONCE // vocab)
    return [slice(start, min(rows, start + each)) for start in range(0, rows, each)]


def token_logprobs(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    packed: Any = None,
    how: How | None = None,
) -> TokenLogprobs:
    """The logprob of one token a row under softmax(x · weight / temperature): at temperature 1 a rollout's `logprobs`, at any other its
    `sampling_logprobs`. Where a rollout would never draw the token, which is 27 or more below the most likely one, it is torch's
    log_softmax instead of −inf. weight [vocab, hidden]; targets, integers [rows]. Logits are made in chunks, and those that need more
    than 1 GiB are not kept for the backward pass but computed again."""
    x = rows_of("x", x)
    how = how or how_for(x)
    width_of("weight", [weight], x.shape[1])
    if not is_real(temperature) or not 0 < temperature < float("inf"):
        raise RequestError(f"temperature: expected a finite number above 0, got {shown(temperature)}")
    if not isinstance(targets, Tensor) or targets.shape != x.shape[:1] or targets.is_floating_point():
        seen = tuple(targets.shape) if isinstance(targets, Tensor) else type(targets).__name__
        raise ShapeError(f"targets: expected integers of shape ({len(x)},), got {seen}")
    if len(x) and not 0 <= int(targets.min()) <= int(targets.max()) < len(weight):
        raise RequestError(f"targets: expected tokens in [0, {len(weight)}), got {int(targets.min())} to {int(targets.max())}")
    packed = packing.pack_rows([weight], x.dtype, how) if packed is None else packed
    logprobs, of_row = _TokenLogprobs.apply(x, weight, targets.int().contiguous(), float(temperature), entropy, packed, how)  # type: ignore[no-untyped-call]
    return TokenLogprobs(logprobs, of_row if entropy else None)

"""lm_head, and the logprobs of given tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rollmesh import ops
from rollmesh.errors import RequestError, ShapeError
from rollmesh.request.sampling import MIN_FLOAT32
from rollmesh.runtime.arguments import MAX_FLOAT32, boolean, is_real
from rollmesh.runtime.messages import shown
from rollmesh.torch import packing
from rollmesh.torch.arrays import (
    INTEGERS,
    array_of,
    check_flags,
    check_tensor,
    check_tokens,
    host_of,
    in_turn,
    tensor_of,
)
from rollmesh.torch.functions.common import (
    Gradients,
    How,
    backward_pass,
    check_width,
    how_for,
    linear_gradients,
    matmul_dtype,
    rows_of,
)

LOGITS_AT_ONCE = (
    1 << 25
)  # float32 numbers of a pass over the vocabulary, beside those that are kept
LOGITS_KEPT = 1 << 28  # up to so many are kept for the backward pass; more are computed again


class TokenLogprobs(NamedTuple):
    """float32 [rows] each. entropy: None unless asked for."""

    logprobs: Tensor
    entropy: Tensor | None


class Shape(NamedTuple):
    """Scale and cap of logits, as arguments of ops.lm_head."""

    scale: float | None = None
    softcap: float | None = None

    def of(self, dots: Tensor) -> Tensor:
        logits = dots if self.scale is None else dots * self.scale
        return logits if self.softcap is None else self.softcap * (logits / self.softcap).tanh()

    def pull(self, grad: Tensor, logits: Tensor) -> Tensor:
        """Maps the gradient of logits to that of x · weight."""
        grad = grad if self.scale is None else grad * self.scale
        if self.softcap is None:
            return grad
        # The logit −∞ stands for a token that is left out.
        return grad * (1 - (logits.clamp(min=-self.softcap) / self.softcap) ** 2)


class _LmHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, shape: Shape, how: How) -> Tensor:
        packed = packing.pack_rows([[weight]], x.dtype, how)
        with in_turn(x):
            head = ops.lm_head(array_of(x), packed, len(weight), **shape._asdict(), **how)
            check_flags("logits", head.row_flags)
            logits = tensor_of(head.logits)
        ctx.shape = shape
        ctx.save_for_backward(x, weight, *([] if shape.softcap is None else [logits]))
        return logits

    @staticmethod
    @backward_pass
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        x, weight, *logits = ctx.saved_tensors
        grad = ctx.shape.pull(grad, logits[0] if logits else grad).to(matmul_dtype(x))
        return *linear_gradients(x, [weight], [grad], ctx.needs_input_grad[:2]), None, None


def lm_head(
    x: Tensor,
    weight: Tensor,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    how: How | None = None,
) -> Tensor:
    """Logits of x [rows, hidden], float32 [rows, vocab]. scale, softcap: as in ops.lm_head."""
    x = rows_of("x", x)
    check_width("weight", [weight], x.shape[1])
    return _LmHead.apply(  # type: ignore[no-any-return, no-untyped-call]
        x, weight, Shape(scale, softcap), how or how_for(x)
    )


class _TokenLogprobs(torch.autograd.Function):
    """Over all tokens, or with kept_tokens over those of each row: then `among` are its logits at
    them, −∞ where a row has fewer, and a column of −∞, which makes the sampler's formula that of a
    filtered draw."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        kept_tokens: Tensor | None,
        options: tuple[float, bool, Shape],
        how: How,
    ) -> tuple[Tensor, Tensor]:
        vocab, (temperature, wants_entropy, ctx.shape) = len(weight), options
        columns = vocab if kept_tokens is None else kept_tokens.shape[1] + 1
        keep = any(ctx.needs_input_grad) and len(x) * columns <= LOGITS_KEPT
        is_drawn = temperature != 1 or kept_tokens is not None  # logprobs are the sampler's
        wants_logits = keep or wants_entropy or is_drawn
        logprobs = torch.empty(len(x), dtype=torch.float32, device=x.device)
        entropy = torch.zeros_like(logprobs)
        kept: list[Tensor] = []
        packed = packing.pack_rows([[weight]], x.dtype, how)
        for at in _chunks(len(x), vocab):
            with in_turn(x):
                head = ops.lm_head(
                    array_of(x[at]),
                    packed,
                    vocab,
                    targets=array_of(targets[at]),
                    keep_logits=wants_logits,
                    **ctx.shape._asdict(),
                    **how,
                )
                check_flags("logits", head.row_flags)
                logprobs[at] = tensor_of(head.target_logprobs)
                if not wants_logits:
                    continue
                of_rows = None if kept_tokens is None else kept_tokens[at]
                among, place = _among(tensor_of(head.logits), targets[at], of_rows)
                if is_drawn:
                    top_k = -1 if kept_tokens is None else columns - 1
                    params = ops.SampleParams(temperature=temperature, top_k=top_k)
                    drawn = ops.sample(
                        array_of(among), head.stats, params, forced=host_of(place), **how
                    ).sampling_logprobs
                    logprobs[at] = _with_unlikely(tensor_of(drawn), among, place, temperature)
            if wants_entropy:
                scaled = among if temperature == 1 else among / temperature
                log_p = torch.log_softmax(scaled, -1)
                p = log_p.exp()
                entropy[at] = -(p * log_p.masked_fill(p == 0, 0.0)).sum(-1)
            if keep:
                kept += among, place
        ctx.save_for_backward(x, weight, targets, kept_tokens, *kept)
        ctx.temperature, ctx.wants_entropy = temperature, wants_entropy
        if not wants_entropy:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @backward_pass
    def backward(ctx: Any, grad: Tensor, grad_entropy: Tensor) -> Gradients:
        x, weight, targets, kept_tokens, *kept = ctx.saved_tensors
        dtype = matmul_dtype(x)
        by_x, matrix = torch.empty_like(x), weight.to(dtype)
        by_weight = None
        grad, grad_entropy = (g[:, None] / ctx.temperature for g in (grad, grad_entropy))
        for i, at in enumerate(_chunks(len(x), len(weight))):
            of_rows = None if kept_tokens is None else kept_tokens[at]
            if kept:
                among, place = kept[2 * i : 2 * i + 2]
            else:
                logits = ctx.shape.of((x[at].to(dtype) @ matrix.t()).float())
                among, place = _among(logits, targets[at], of_rows)
            p = torch.softmax(among if ctx.temperature == 1 else among / ctx.temperature, -1)
            factors = -grad[at]
            if ctx.wants_entropy:
                log_p = p.clamp(min=MIN_FLOAT32).log_()
                mean = torch.linalg.vecdot(p, log_p)[:, None]
                factors = log_p.sub_(mean).mul_(-grad_entropy[at]).sub_(grad[at])
            by_logits = p.mul_(factors).scatter_add_(1, place[:, None].long(), grad[at])
            by_logits = ctx.shape.pull(by_logits, among)
            if of_rows is not None:
                by_logits = by_logits.new_zeros(len(place), len(weight)).scatter_add_(
                    1, of_rows.clamp(min=0).long(), by_logits[:, :-1]
                )
            g = by_logits.to(dtype)
            by_x[at] = (g @ matrix).to(x.dtype)
            if ctx.needs_input_grad[1]:
                part = (g.t() @ x[at].to(dtype)).to(weight.dtype)
                by_weight = part if by_weight is None else by_weight.add_(part)
        return by_x, by_weight, None, None, None, None


def _among(logits: Tensor, targets: Tensor, kept_tokens: Tensor | None) -> tuple[Tensor, Tensor]:
    """(the logits of the tokens that a draw could take, the column of each target)."""
    if kept_tokens is None:
        return logits, targets
    among = logits.new_full((len(logits), kept_tokens.shape[1] + 1), -torch.inf)
    among[:, :-1] = logits.gather(1, kept_tokens.clamp(min=0).long()).masked_fill_(
        kept_tokens < 0, -torch.inf
    )
    return among, (kept_tokens == targets[:, None]).int().argmax(1).int()


def _with_unlikely(logprobs: Tensor, among: Tensor, place: Tensor, temperature: float) -> Tensor:
    """The sampler counts probabilities in steps of 2^-40, and a token below has the logprob −∞: no
    draw ever recorded one. A ratio or a KL needs a number, with a gradient, and gets the real
    logprob."""
    unlikely = torch.isneginf(logprobs)
    if not unlikely.any():
        return logprobs
    log_p = torch.log_softmax(among[unlikely].double() / temperature, -1)
    logprobs[unlikely] = log_p.gather(1, place[unlikely, None].long())[:, 0].float()
    return logprobs


def _chunks(rows: int, vocab: int) -> list[slice]:
    each = max(1, LOGITS_AT_ONCE // vocab)
    return [slice(start, min(rows, start + each)) for start in range(0, max(rows, 1), each)]


def token_logprobs(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    kept_tokens: Tensor | None = None,
    temperature: float = 1.0,
    entropy: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    how: How | None = None,
) -> TokenLogprobs:
    """The logprob of one token a row under softmax(x · weight / temperature): at temperature 1 a
    rollout's `logprobs`, at any other its `sampling_logprobs`. Where a rollout would never draw the
    token, which is 27 or more below the most likely one, it is torch's log_softmax instead of −inf.
    weight [vocab, hidden]; targets, integers [rows]. kept_tokens, integers [rows, k], −1 after a
    row's last: the softmax is over these tokens alone, as that of a draw whose filters kept them.
    scale, softcap: as in ops.lm_head.
    Logits are made in chunks, and those that need more than 1 GiB are not kept for the backward
    pass but computed again."""
    x = rows_of("x", x)
    check_width("weight", [weight], x.shape[1])
    if not is_real(temperature) or not MIN_FLOAT32 <= temperature <= MAX_FLOAT32:
        raise RequestError(
            "temperature: expected a finite number above 0, a normal float32, got "
            f"{shown(temperature)}"
        )
    check_tensor("targets", targets)
    if targets.shape != x.shape[:1] or targets.dtype not in INTEGERS:
        raise ShapeError(f"targets: expected integers of shape ({len(x)},), got {_seen(targets)}")
    check_tokens("targets", targets, 0, len(weight))
    if kept_tokens is not None:
        kept_tokens = _check_kept(kept_tokens, targets, len(weight))
    entropy = boolean("entropy", entropy)
    options = float(temperature), entropy, Shape(scale, softcap)
    logprobs, of_row = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        x, weight, targets.int().contiguous(), kept_tokens, options, how or how_for(x)
    )
    return TokenLogprobs(logprobs, of_row if entropy else None)


def _seen(given: Tensor) -> str:
    return f"{given.dtype} of shape {tuple(given.shape)}"


def _check_kept(kept_tokens: Tensor, targets: Tensor, vocab: int) -> Tensor:
    """int32, a copy."""
    check_tensor("kept_tokens", kept_tokens)
    if (
        kept_tokens.dtype not in INTEGERS
        or kept_tokens.dim() != 2
        or len(kept_tokens) != len(targets)
        or not kept_tokens.shape[1]
    ):
        raise ShapeError(
            f"kept_tokens: expected integers of shape ({len(targets)}, k), got {_seen(kept_tokens)}"
        )
    check_tokens("kept_tokens", kept_tokens, -1, vocab, ", or -1 for none")
    kept_tokens = kept_tokens.to(targets.device).long()
    in_order = kept_tokens.sort(1).values
    twice = (in_order[:, 1:] == in_order[:, :-1]) & (in_order[:, 1:] >= 0)
    if twice.any():
        row = int(torch.nonzero(twice.any(1))[0])
        raise RequestError(
            f"kept_tokens: expected each token of row {row} once, got {kept_tokens[row].tolist()}"
        )
    missing = torch.nonzero(~(kept_tokens == targets[:, None]).any(1))[:, 0]
    if len(missing):
        row = int(missing[0])
        raise RequestError(
            f"kept_tokens: expected token {int(targets[row])} of row {row} among them, got "
            f"{kept_tokens[row].tolist()}"
        )
    return kept_tokens.int()

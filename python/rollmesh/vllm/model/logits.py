"""Logits with rollmesh's own log_softmax.

vLLM's sampler computes logprobs by torch's log_softmax, whose order of summation is torch's. Here a
logprob has one definition (docs/numerics.md, section 6), so this tensor carries the row statistics
of lm_head and computes log_softmax from them. After any other operation (a grammar's mask, a
temperature) it is a plain tensor.
"""

from __future__ import annotations

from typing import Any

import torch


class Logits(torch.Tensor):
    """float32 [rows, vocab]; made by logits_with."""

    _max: torch.Tensor | None  # [rows, 1]
    _log_sum: torch.Tensor  # [rows, 1]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") == "__get__":  # shape, dtype, device
            return _plainly(func, args, kwargs)
        if func is torch.Tensor.log_softmax and _is_over_the_vocabulary(args, kwargs):
            return _as_plain(args[0]).sub(args[0]._max).sub_(args[0]._log_sum).add_(0.0)
        for tensor in (*args, *kwargs.values()):
            if isinstance(tensor, Logits):
                tensor._max = None
        result = _plainly(func, args, kwargs)
        return _as_plain(result) if isinstance(result, Logits) else result


def logits_with(logits: torch.Tensor, maximum: torch.Tensor, log_sum: torch.Tensor) -> Logits:
    """maximum, log_sum: [rows]; a row's logprobs are (logit − maximum) − log_sum."""
    made = logits.as_subclass(Logits)
    made._max, made._log_sum = maximum[:, None], log_sum[:, None]
    return made


def _plainly(func: Any, args: Any, kwargs: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _as_plain(logits: Logits) -> torch.Tensor:
    """The same tensor without the statistics."""
    plain: torch.Tensor = _plainly(torch.Tensor.as_subclass, (logits, torch.Tensor), {})
    return plain


def _is_over_the_vocabulary(args: Any, kwargs: Any) -> bool:
    """Whether log_softmax is of unchanged logits, over the last dim, in float32."""
    if not args or not isinstance(args[0], Logits) or args[0]._max is None:
        return False
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    return dim in (-1, 1) and kwargs.get("dtype") in (None, torch.float32)

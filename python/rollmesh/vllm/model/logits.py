"""Logits that use rollmesh's log_softmax.

vLLM's sampler computes logprobs with torch's log_softmax, which sums in a different order. rollmesh
has one definition of a logprob (docs/numerics.md, section 6), so this tensor keeps the row
statistics of lm_head and computes log_softmax from them. The result of any other operation (a
grammar's mask, a temperature) is a plain tensor.
"""

from __future__ import annotations

from typing import Any

import torch


class Logits(torch.Tensor):
    """A float32 tensor [rows, vocab] with the statistics of its rows; made by logits_with."""

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
    """Returns logits with statistics. maximum, log_sum: [rows]; the logprobs of a row are
    (logit − maximum) − log_sum."""
    made = logits.as_subclass(Logits)
    made._max, made._log_sum = maximum[:, None], log_sum[:, None]
    return made


def _plainly(func: Any, args: Any, kwargs: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _as_plain(logits: Logits) -> torch.Tensor:
    """Returns the same tensor without the statistics."""
    plain: torch.Tensor = _plainly(torch.Tensor.as_subclass, (logits, torch.Tensor), {})
    return plain


def _is_over_the_vocabulary(args: Any, kwargs: Any) -> bool:
    """Returns whether these are the arguments of a log_softmax of unchanged logits over the last
    dim, in float32."""
    if not args or not isinstance(args[0], Logits) or args[0]._max is None:
        return False
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    return dim in (-1, 1) and kwargs.get("dtype") in (None, torch.float32)

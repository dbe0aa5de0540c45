"""TRL's trainers on a patched model.

A trainer of TRL gives its model another forward pass (trl.trainer.utils.add_fused_lm_head):
model(…, labels=…, fused_lm_head=True) takes hidden states and lm_head.weight, computes logprobs of
the labels by torch and returns them instead of logits. On a patched model the same call returns the
contract's logprobs; any other call is TRL's. The temperature is in TRL's closure only, so it is
read from there, and a closure without it is refused: nothing falls back to torch's logprobs.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any

from rollmesh.errors import ConfigError
from rollmesh.runtime.messages import shown

OUTPUTS = ("log_probs", "entropy")  # of TRL's FusedCausalLMOutput, by token

Score = Callable[
    ..., Any
]  # (model, temperature, whether entropy is wanted, labels, other arguments) → Scored


def with_contract_logprobs(model: Any, forward: Any, score: Score) -> Any:
    """`forward`, or if it is TRL's, a forward pass of `model` whose logprobs are those of
    `score`."""
    function = getattr(forward, "__func__", forward)
    if hasattr(function, "_rollmesh_head"):
        return forward
    fused = next((f for f in unwrapped(function) if "fused_lm_head" in _parameters(f)), None)
    if fused is None:
        return forward
    said = inspect.getclosurevars(fused).nonlocals
    if missing := {"temperature", "outputs"} - said.keys():
        raise ConfigError(
            "fused_lm_head: expected TRL 1.16's forward pass, got one without "
            f"{sorted(missing)[0]}; install that version"
        )
    temperature, outputs = said["temperature"], said["outputs"]
    if others := [name for name in outputs if name not in OUTPUTS]:
        raise ConfigError(
            f"outputs: expected log_probs and entropy, got {shown(others[0])}; for this trainer "
            "the model must not be patched"
        )

    @functools.wraps(function)
    def scored(self: Any, *args: Any, **options: Any) -> Any:
        if not options.get("fused_lm_head") or not hasattr(self, "_rollmesh"):
            return function(self, *args, **options)
        given = inspect.signature(type(self).forward).bind_partial(self, *args).arguments | options
        for name in ("self", "fused_lm_head"):
            given.pop(name)
        labels, total = given.pop("labels", None), given.pop("num_items_in_batch", None)
        if labels is None or given.pop("shift_labels", None) is not None:
            got = (
                "None"
                if labels is None and "shift_labels" not in given
                else "shift_labels (context parallelism)"
            )
            raise ConfigError(f"labels: expected those of the whole sequence, got {got}")
        made = score(self, temperature, "entropy" in outputs, labels, given)
        return _output(made, labels[:, 1:] != -100, total)

    scored._rollmesh_head = True  # type: ignore[attr-defined]
    return MethodType(scored, model)


def unwrapped(function: Any) -> list[Any]:
    """The function and those that it wraps, as accelerate's autocast does."""
    found = [function]
    while hasattr(found[-1], "__wrapped__"):
        found.append(found[-1].__wrapped__)
    return found


def _parameters(function: Any) -> Any:
    return inspect.signature(function, follow_wrapped=False).parameters


def _output(made: Any, mask: Any, total: Any) -> Any:
    from trl.trainer.utils import FusedCausalLMOutput

    loss = -made.logprobs.sum() / (mask.sum().clamp(min=1) if total is None else total)
    return FusedCausalLMOutput(
        loss=loss, log_probs=made.logprobs, entropy=made.entropy, label_mask=mask
    )

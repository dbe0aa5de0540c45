"""Routing replay (R3): the trainer uses the experts that the generator chose for the same token.

Near a tie, a small rounding difference makes a router choose another expert, and the trainer then
learns from another function than the one that generated the token. With [correction] routing_replay
the ids are those of the generator's record, and the gates those of the trainer's router, which is
therefore trained.
With p = softmax or sigmoid of the router's logits, and S the k recorded ids of a token:

    gate of expert e = p_e / Σ_{s in S} p_s     for e in S; without norm_topk_prob: p_e; some
                                                families multiply by routed_scaling_factor

The gradient flows through p. A position without a record (padding, the last token of a sequence)
keeps the trainer's routing; no logprob of a rollout depends on it (samples.make_batch). The
reference model has its own routing.

Ma, Zhang, Zhao et al. 2025: "Stabilizing MoE Reinforcement Learning by Aligning Training and
Inference Routers", arXiv 2510.11370.

A forward hook of torch replaces the result of a router. Rejected: another router class, because it
would become part of the model and its checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from rollmesh.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


def routers(model: Any) -> list[Any]:
    """Returns the routers of a transformers model, by layer. Raises ConfigError for a model without
    experts, and for AFMoE and HunYuan-MoE, whose routers give other outputs."""
    found = [
        module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter")
    ]
    if not found:
        names = {type(module).__name__ for module in model.modules()}
        has_experts = any(name.endswith("Experts") for name in names)
        what = "with routers of its own form" if has_experts else "without experts"
        raise ConfigError(
            f"[correction] routing_replay: expected false for a {type(model).__name__} {what}, "
            "got true"
        )
    return found


@contextmanager
def replay(model: Any, routed_BTLK: Tensor | None) -> Iterator[None]:
    """Makes forward passes of [B, T] tokens use these experts; −1: the router's choice. None: no
    replay.

    With gradient checkpointing, which computes the forward pass again, the backward pass must be
    inside the context too. Raises ConfigError if a router was not called because other kernels
    compute the model.
    """
    if routed_BTLK is None:
        yield
        return
    used: set[Any] = set()
    every = routers(model)
    handles = []
    for layer, router in enumerate(every):
        hook = partial(_recorded, routed_BTLK[:, :, layer].flatten(0, 1), used)
        handles.append(router.register_forward_hook(hook))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    if len(used) < len(every):
        raise ConfigError(
            f"[correction] routing_replay: expected false where the trainer runs {len(used)} of "
            f"the {len(every)} routers of its model, got true"
        )


def _recorded(
    recorded_RK: Tensor,
    used: set[Any],
    router: Any,
    args: Any,
    output: tuple[Tensor, Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """The hook of a router. Returns (logits, gates, ids) of the router's rows with the recorded ids
    and their gates, and adds the router to `used`."""
    import torch

    used.add(router)
    logits_RE, gates, own_RK = output
    ids_RK = torch.where(recorded_RK >= 0, recorded_RK, own_RK)
    # Sigmoid routers have a bias for the choice, as an attribute or as the second argument.
    is_sigmoid = hasattr(router, "e_score_correction_bias") or len(args) > 1
    logits = logits_RE.float()
    scores_RE = logits.sigmoid() if is_sigmoid else logits.softmax(-1)
    gates_RK = scores_RE.gather(1, ids_RK)
    if getattr(router, "norm_topk_prob", True):  # Mixtral's router has no such attribute
        least = getattr(router, "norm_min", 0.0)
        gates_RK = gates_RK / gates_RK.sum(-1, keepdim=True).clamp(min=least)
    for name in ("routed_scaling_factor", "router_scaling_factor"):
        gates_RK = gates_RK * getattr(router, name, 1.0)
    return logits_RE, gates_RK.to(gates.dtype), ids_RK

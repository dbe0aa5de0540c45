"""Routing replay (R3): the trainer's experts are the ones that the generator chose for the same
token.

A router near a tie chooses another expert after the smallest rounding, and then the trainer learns
from another function than the one that drew the token. With [correction] routing_replay the ids
come from the generator's record, and the gates from the trainer's own router, so that it learns.
Where p = softmax(the router's logits), GLM-4-MoE: their sigmoid, and S the k recorded ids of a
token:

    gate of expert e = p_e / Σ_{s in S} p_s     for e in S; without norm_topk_prob: p_e; GLM-4-MoE:
                                                times routed_scaling_factor

The gradient flows through p. A position without a record (padding, the last token of a sequence)
keeps its own routing; no logprob of a rollout depends on one (rollout.make_batch). The reference
model is another model and routes by itself.

Ma, Zhang, Zhao et al. 2025: "Stabilizing MoE Reinforcement Learning by Aligning Training and
Inference Routers", arXiv 2510.11370.

A forward hook does it, torch's own way to replace a result. A router class of our own would have to
be put into the model, and a checkpoint would be saved from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import rollmesh as rm

if TYPE_CHECKING:
    from torch import Tensor


def routers(model: Any) -> list[Any]:
    """The routers of a transformers model, by layer. ConfigError where it has none."""
    found = [
        module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter")
    ]
    if not found:
        raise rm.ConfigError(
            f"[correction] routing_replay: expected false for a {type(model).__name__} without "
            "experts, got true"
        )
    return found


@contextmanager
def replay(model: Any, routed_BTLK: Tensor | None) -> Iterator[None]:
    """Forwards of [B, T] tokens inside use these experts, -1: the router's own choice. None:
    nothing changes.

    Under gradient checkpointing, which computes the forward again, the backward has to be inside
    too. ConfigError where a router was not run: other kernels compute the model, and route by
    themselves.
    """
    if routed_BTLK is None:
        yield
        return
    hooks = [
        (router, _Recorded(routed_BTLK[:, :, layer].flatten(0, 1)))
        for layer, router in enumerate(routers(model))
    ]
    handles = [router.register_forward_hook(hook) for router, hook in hooks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    if (count := sum(hook.was_used for _, hook in hooks)) < len(hooks):
        raise rm.ConfigError(
            f"[correction] routing_replay: expected false where the trainer runs {count} of the "
            f"{len(hooks)} routers of its model, got true"
        )


class _Recorded:
    """The hook of one router: (logits, gates, ids) of its rows, with the recorded ids and their
    gates."""

    def __init__(self, ids_RK: Tensor) -> None:
        self.ids_RK = ids_RK
        self.was_used = False

    def __call__(
        self, router: Any, args: Any, output: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        import torch

        self.was_used = True
        logits_RE, gates, own_RK = output
        ids_RK = torch.where(self.ids_RK >= 0, self.ids_RK, own_RK)
        is_sigmoid = hasattr(router, "e_score_correction_bias")  # which counts for the choice alone
        scores_RE = (
            logits_RE.float().sigmoid()
            if is_sigmoid
            else torch.softmax(logits_RE, dim=-1, dtype=torch.float32)
        )
        gates_RK = scores_RE.gather(1, ids_RK)
        if getattr(router, "norm_topk_prob", True):  # Mixtral's has no such key
            gates_RK = gates_RK / gates_RK.sum(-1, keepdim=True)
        return (
            logits_RE,
            (gates_RK * getattr(router, "routed_scaling_factor", 1.0)).to(gates.dtype),
            ids_RK,
        )

"""Adapts torchtitan 0.3.0 to a machine without a GPU. Import this before torchtitan, which reads
the device when it is imported.

- without an accelerator its device is "cuda";
- FlexAttention has no backward on the CPU: plain attention with the same mask;
- GroupedExperts multiplies in bfloat16 whatever the dtype: here in the dtype of the weights;
- FSDP uses a reduction that Gloo does not have (PREMUL_SUM);
- it compiles the function that makes attention masks, which takes longer than a run here.
"""

# ruff: noqa: E402, I001

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # for Monarch's processes too

import torch
import torch._utils

torch._utils._get_available_device_type = lambda: "cpu"

# before torchtitan.experiments.rl, which imports vLLM: rollmesh.titan stands in for it
import rollmesh.titan
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_mask
from torchtitan.experiments.rl.actors.trainer import PolicyTrainer
from torchtitan.models.common import attention, moe


def bootstrap() -> None:
    """For spawn_procs: unpickling it imports this module first."""


def _attention(
    q: Any, k: Any, v: Any, *, block_mask: Any, scale: float | None = None, **options: Any
) -> tuple[Any, None]:
    del options
    k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], 1) for part in (k, v))
    length = q.shape[2]
    mask = create_mask(block_mask.mask_mod, q.shape[0], 1, length, length, device=q.device)
    scores = (q.float() @ k.float().transpose(-1, -2)) * (scale or q.shape[-1] ** -0.5)
    return (scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v.float()).to(q.dtype), None


def _experts(self: Any, x: torch.Tensor, num_tokens: torch.Tensor) -> torch.Tensor:
    w1, w2, w3 = (
        w.to_local() if hasattr(w, "to_local") else w
        for w in (self.w1_EFD, self.w2_EDF, self.w3_EFD)
    )
    experts = zip(x.split(num_tokens.tolist()), w1.unbind(), w2.unbind(), w3.unbind(), strict=True)
    return torch.cat([(F.silu(rows @ a.T) * (rows @ c.T)) @ b.T for rows, a, b, c in experts])


class _OnCpu:
    def __init__(self, *args: Any, **kwargs: Any):
        attention.FlexAttention._compiled_flex_attn = staticmethod(_attention)
        moe.GroupedExperts.forward = _experts
        torch.set_num_threads(1)
        super().__init__(*args, **kwargs)
        for module in self.model.modules():  # type: ignore[attr-defined]
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)


class CpuTrainer(_OnCpu, PolicyTrainer):
    pass


class CpuRollmeshTrainer(_OnCpu, rollmesh.titan.RollmeshTrainer):
    pass

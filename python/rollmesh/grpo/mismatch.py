"""How far trainer and generator are apart on the tokens of a step: always measured, on the version
that drew them.

With d = trainer's logprob − generator's recorded logprob of each generated token (both under the
distribution it was drawn from):

  logprob_diff_mean, logprob_diff_max   |d|
  kl_k1 = mean(−d)                      unbiased estimate of KL(generator ‖ trainer), may be
                                        negative
  kl_k3 = mean(exp(d) − 1 − d)          the same in expectation, never negative, less noise
  tokens_differ                         share of tokens whose two float32 numbers are not the same
                                        number

And what a correction ([correction] importance_sampling, formulas in loss.py) did about it:

  correction_mean                       mean weight c of a token
  correction_cut_share                  share of tokens with c ≠ r: truncated or masked
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

import rollmesh as rm
from rollmesh.grpo.loss import correction_weights
from rollmesh.grpo.rollout import Batch
from rollmesh.run.config import CorrectionTable

if TYPE_CHECKING:
    from torch import Tensor

ADVICE = '[train] mismatch = "record" goes on, and [train] kernels = "torch" corrects'


def mismatch(trainer: NDArray[np.float32], generator: NDArray[np.float32]) -> dict[str, float]:
    """float32 [tokens] each, in one order."""
    d = trainer.astype(np.float64) - generator.astype(np.float64)
    return {
        "logprob_diff_mean": float(np.abs(d).mean()),
        "logprob_diff_max": float(np.abs(d).max()),
        "kl_k1": float(-d.mean()),
        "kl_k3": float((np.expm1(d) - d).mean()),
        "tokens_differ": float((d != 0).mean()),
    }


def check_same(
    logprobs_N: Tensor, routed_BTLK: Tensor | None, batch: Batch, version: int | None = None
) -> None:
    """NumericsError where a logprob or an expert of the trainer is not the one that the generator
    recorded, with the first such token. For rollmesh's kernels on the weights that drew the tokens.
    version: of the trainer's weights; tokens of other versions are not compared."""
    if routed_BTLK is not None and batch.routed_BTLK is not None:
        _check_routing(routed_BTLK.cpu().numpy(), batch.routed_BTLK.cpu().numpy())
    trainer, generator = logprobs_N.detach().cpu().numpy(), batch.old_logprobs_N.cpu().numpy()
    is_ours = np.ones(len(trainer), bool)
    if version is not None and batch.versions_N is not None:
        is_ours = batch.versions_N.cpu().numpy() == version
    differ = np.flatnonzero((trainer != generator) & is_ours)
    if len(differ):
        n = int(differ[0])
        raise rm.NumericsError(
            f"logprobs: expected {generator[n]} for {_where(batch, n)}, which the generator "
            f"recorded, got {trainer[n]} from the trainer; "
            f"{len(differ)} of {is_ours.sum()} differ; {ADVICE}"
        )


def _where(batch: Batch, n: int) -> str:
    return (
        f"sequence {int(batch.rows_N[n])} of the batch, position "
        f"{int(batch.columns_N[n]) + 1}, token {int(batch.targets_N[n])}"
    )


def largest_kl(reference_N: Tensor, logprobs_N: Tensor, batch: Batch) -> tuple[float, str]:
    """The largest reference − trainer of a batch, which is the exponent of [loss] kl, and its token
    in words."""
    logprobs_N = logprobs_N.detach()
    difference_N = reference_N - logprobs_N
    n = int(difference_N.argmax())
    here = (
        f"[loss] kl is exp({float(reference_N[n])} − {float(logprobs_N[n])}), reference − "
        f"trainer, at {_where(batch, n)}"
    )
    return float(
        difference_N[n]
    ), f"{here}; lower [train] lr or [loss] kl, or raise [rollout] temperature"


def _check_routing(trainer: NDArray[np.int16], generator: NDArray[np.int16]) -> None:
    """[B, T, MoE layers, top_k]; −1 in the generator's: no record."""
    differ = np.argwhere((trainer != generator) & (generator >= 0))
    if len(differ):
        b, t, layer, place = map(int, differ[0])
        raise rm.NumericsError(
            f"routed experts: expected expert {generator[b, t, layer, place]} as choice {place} "
            f"of MoE layer {layer} for sequence {b} "
            f"of the batch, position {t}, which the generator recorded, got "
            f"{trainer[b, t, layer, place]} from the trainer; "
            f"{len(differ)} of {int((generator >= 0).sum())} differ; {ADVICE}"
        )


def corrections(
    trainer: NDArray[np.float32],
    generator: NDArray[np.float32],
    lengths: list[int],
    table: CorrectionTable,
) -> dict[str, float]:
    """float32 [tokens] each, in the order of the sequences; tokens of each sequence."""
    import torch

    weights, ratios = correction_weights(
        torch.from_numpy(trainer), torch.from_numpy(generator), torch.tensor(lengths), table
    )
    return {
        "correction_mean": float(weights.mean()),
        "correction_cut_share": float((weights != ratios).double().mean()),
    }

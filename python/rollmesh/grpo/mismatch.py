"""How far trainer and generator are apart on the tokens of a step: always measured, on the version that drew them.

With d = trainer's logprob − generator's recorded logprob of each generated token (both under the distribution it was drawn from):

  logprob_diff_mean, logprob_diff_max   |d|
  kl_k1 = mean(−d)                      unbiased estimate of KL(generator ‖ trainer), may be negative
  kl_k3 = mean(exp(d) − 1 − d)          the same in expectation, never negative, less noise
  tokens_differ                         share of tokens whose two float32 numbers are not the same number

And what a correction ([correction] importance_sampling, formulas in loss.py) did about it:

  correction_mean                       mean weight c of a token
  correction_cut_share                  share of tokens with c ≠ r: truncated or masked
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rollmesh.grpo.config import CorrectionTable
from rollmesh.grpo.loss import correction_weights


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


def corrections(
    trainer: NDArray[np.float32], generator: NDArray[np.float32], lengths: list[int], table: CorrectionTable
) -> dict[str, float]:
    """float32 [tokens] each, in the order of the sequences; tokens of each sequence."""
    import torch

    weights, ratios = correction_weights(torch.from_numpy(trainer), torch.from_numpy(generator), torch.tensor(lengths), table)
    return {"correction_mean": float(weights.mean()), "correction_cut_share": float((weights != ratios).double().mean())}

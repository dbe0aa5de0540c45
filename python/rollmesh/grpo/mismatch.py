"""How far trainer and generator are apart on the tokens of a step: always measured, on the version that drew them.

With d = trainer's logprob − generator's recorded logprob of each generated token (both under the distribution it was drawn from):

  logprob_diff_mean, logprob_diff_max   |d|
  kl_k1 = mean(−d)                      unbiased estimate of KL(generator ‖ trainer), may be negative
  kl_k3 = mean(exp(d) − 1 − d)          the same in expectation, never negative, less noise
  tokens_differ                         share of tokens whose two float32 numbers are not the same number
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


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

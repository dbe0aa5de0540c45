"""Advantages: how much better a sample did than the others of its prompt.

  baseline  mean           A = r − mean(group)                             GRPO
            leave-one-out  A = r − mean(the others) = (r − mean)·n/(n−1)   RLOO: the baseline does
                           not contain the sample
  scale     group          A / (std(group) + ε)                            GRPO: every prompt pulls
            alike, easy or hard batch          A / (std of all A of the step + ε)              one
                                               scale a step
            none           A                                               Dr. GRPO

A completion whose reward is NaN was not judged. It is left out of all means and spreads, and its
advantage is 0, as in TRL.

A group whose judged rewards are all equal teaches nothing and gets exact zeros: its mean can miss
the rewards by a rounding, and the division by a tiny spread would make noise of it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

EPSILON = 1e-4


def advantages(
    rewards: NDArray[np.float64], baseline: str = "mean", scale: str = "group"
) -> NDArray[np.float64]:
    """float64 [prompts, samples] → the same shape. NaN: not judged."""
    judged = ~np.isnan(rewards)
    counts = np.maximum(judged.sum(axis=1, keepdims=True), 1)
    mean = np.where(judged, rewards, 0.0).sum(axis=1, keepdims=True) / counts
    differ = rewards_differ(rewards)[:, None]
    centered: NDArray[np.float64] = np.where(judged & differ, rewards - mean, 0.0)
    out = centered * counts / np.maximum(counts - 1, 1) if baseline == "leave-one-out" else centered
    if scale == "group":
        out = out / (np.sqrt((centered**2).sum(axis=1, keepdims=True) / counts) + EPSILON)
    elif scale == "batch" and judged.any():
        out = out / (out[judged].std() + EPSILON)
    return out


def rewards_differ(rewards: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Whether the judged rewards of each group differ, [prompts, samples] → [prompts]."""
    # fmax and fmin pass over NaN; of a group without a judged reward both are NaN.
    most, least = np.fmax.reduce(rewards, axis=1), np.fmin.reduce(rewards, axis=1)
    differ: NDArray[np.bool_] = most > least
    return differ

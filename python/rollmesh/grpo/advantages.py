"""Advantages: how much better a sample is than the other samples of its prompt.

  baseline  mean           A = r − mean(group)                             GRPO
            leave-one-out  A = r − mean(the others) = (r − mean)·n/(n−1)   RLOO
  scale     group          A / (std(group) + ε)                            GRPO: per prompt
            batch          A / (std of all A of the step + ε)              one scale per step
            none           A                                               Dr. GRPO

The reward of an unjudged completion is NaN. Means and spreads leave it out; its advantage is 0.

A group whose judged rewards are all equal gets exact zeros. Otherwise rounding could make the mean
differ from the rewards, and the division by a tiny spread would amplify the difference.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

EPSILON = 1e-4


def advantages(
    rewards: NDArray[np.float64], baseline: str = "mean", scale: str = "group"
) -> NDArray[np.float64]:
    """Returns the advantages of rewards, float64 [prompts, samples]; NaN: not judged."""
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
    """Returns whether the judged rewards [prompts, samples] of each group differ, [prompts]."""
    # fmax and fmin skip NaN. Both are NaN for a group without a judged reward.
    most, least = np.fmax.reduce(rewards, axis=1), np.fmin.reduce(rewards, axis=1)
    differ: NDArray[np.bool_] = most > least
    return differ

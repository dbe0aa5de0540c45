"""Advantages: how much better a sample did than the others of its prompt.

  baseline  mean           A = r − mean(group)                             GRPO
            leave-one-out  A = r − mean(the others) = (r − mean)·n/(n−1)   RLOO: the baseline does not contain the sample
  scale     group          A / (std(group) + ε)                            GRPO: every prompt pulls alike, easy or hard
            batch          A / (std of all A of the step + ε)              one scale a step
            none           A                                               Dr. GRPO

A group whose rewards are all equal says nothing, and gets exact zeros: its mean can miss the rewards by a rounding, and the
division by a tiny spread would make noise of it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

EPSILON = 1e-4


def advantages(rewards: NDArray[np.float64], baseline: str = "mean", scale: str = "group") -> NDArray[np.float64]:
    """float64 [prompts, samples] → the same shape."""
    mean = rewards.mean(axis=1, keepdims=True)
    out: NDArray[np.float64] = rewards - mean
    if baseline == "leave-one-out":
        out *= rewards.shape[1] / (rewards.shape[1] - 1)
    flat = np.ptp(rewards, axis=1) == 0
    out[flat] = 0.0
    if scale == "group":
        out /= rewards.std(axis=1, keepdims=True) + EPSILON
    elif scale == "batch":
        out /= out.std() + EPSILON
    return out

"""The clipped GRPO loss of each token, and the weights that correct differences between trainer and
generator.

For token t of sequence i, with the trainer's logprob lp, the logprob old that the *generator*
recorded, and the advantage A of the sequence:

    ratio  = exp(lp − old)
    policy = −min(ratio·A, clip(ratio, 1−clip_low, 1+clip_high)·A)
    loss_t = policy − entropy·H_t + kl·k3_t      k3 = exp(ref − lp) − 1 − (ref − lp) ≥ 0

ref is the logprob of the reference model. The ratio divides by the recorded logprob, not by a
second forward pass of the trainer: the tokens come from the generator's distribution, so the
clipped ratio covers every difference between the two. The loss of a batch is Σ w_t·loss_t. Its
weights depend on the whole batch, not on the micro batches:

    token-mean     w = 1 / tokens of the batch            every token counts alike
    sequence-mean  w = 1 / (sequences · its tokens)       every answer counts alike (first GRPO)
    constant       w = 1 / (sequences · max_tokens)       no length in the denominator (Dr. GRPO)

With [correction] importance_sampling, old is the *trainer's* logprob before the first update of the
step, gen is the recorded one, and a weight c without gradient corrects their difference:

    ratio  = exp(lp − old)
    policy = −c·min(ratio·A, clip(ratio, …)·A)   a masked token counts in the denominator of w

    token_truncate     r = exp(old − gen)        c = min(r, cap)                        TIS (1)
    sequence_truncate  r = exp(Σ (old − gen))    c = min(r, cap), Σ over the sequence   (2)
    token_mask         r = exp(old − gen)        c = r in [mask_low, mask_high], else 0 IcePop (3)

The modes have TRL's names. (1) Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You
Off-Policy RL Training". (2) Liu et al. 2025, "When Speed Kills Stability". (3) Ling team 2025,
"Every Step Evolves", arXiv 2510.18855.

Metrics of the difference d = lp − gen on the weights that generated the tokens:

    logprob_diff_mean, logprob_diff_max   |d|
    kl_k1 = mean(−d)                      unbiased estimate of KL(generator ‖ trainer)
    kl_k3 = mean(exp(d) − 1 − d)          the same in expectation, never negative, less noise
    tokens_differ                         share of tokens with d ≠ 0
    correction_mean                       mean weight c of a token
    correction_cut_share                  share of tokens with c ≠ r: truncated or masked
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rollmesh.run.config import CorrectionTable, LossTable

if TYPE_CHECKING:
    from torch import Tensor

MAX_EXPONENT = 80.0  # limit for ratios with gradient 0: a larger exponent would give 0 · inf


def token_weights(lengths_B: Tensor, aggregation: str, max_tokens: int) -> Tensor:
    """Returns w of each token, [sum of lengths], in the order of the sequences."""
    lengths = lengths_B.double()
    if aggregation == "token-mean":
        per_sequence = (1.0 / lengths.sum()).expand(len(lengths))
    elif aggregation == "sequence-mean":
        per_sequence = 1.0 / (len(lengths) * lengths)
    else:
        per_sequence = lengths.new_full(lengths.shape, 1.0 / (len(lengths) * max_tokens))
    return per_sequence.float().repeat_interleave(lengths_B)


def correction_weights(
    old_N: Tensor, generator_N: Tensor, lengths_B: Tensor, table: CorrectionTable
) -> tuple[Tensor, Tensor]:
    """Returns c and r of each token, float64. lengths_B: number of tokens of each sequence."""
    import torch

    log_N = old_N.double() - generator_N.double()
    if table.importance_sampling == "sequence_truncate":
        sums = [part.sum() for part in torch.split(log_N, lengths_B.tolist())]
        log_N = torch.stack(sums).repeat_interleave(lengths_B)
    ratios_N = log_N.exp()
    if table.importance_sampling == "token_mask":
        is_kept_N = (ratios_N >= table.mask_low) & (ratios_N <= table.mask_high)
        return torch.where(is_kept_N, ratios_N, 0.0), ratios_N
    return ratios_N.clamp(max=table.cap), ratios_N


def grpo_loss(
    logprobs_N: Tensor,
    entropy_N: Tensor,
    old_logprobs_N: Tensor,
    advantages_N: Tensor,
    weights_N: Tensor,
    table: LossTable,
    ref_logprobs_N: Tensor | None = None,
    correction_N: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the loss of N tokens, a scalar with gradient, and the metrics. Both are sums of
    w_t·x_t, so the sums of the micro batches add up to those of the batch. Gradients flow through
    logprobs_N and entropy_N only. correction_N: c of each token; None: 1."""
    import torch

    log_ratio_N, is_bounded_N = logprobs_N - old_logprobs_N, advantages_N >= 0
    if correction_N is not None:
        is_bounded_N = is_bounded_N | (correction_N == 0)
    ratio_N = torch.exp(torch.where(is_bounded_N, log_ratio_N.clamp(max=MAX_EXPONENT), log_ratio_N))
    plain_N = ratio_N * advantages_N
    clipped_N = ratio_N.clamp(1 - table.clip_low, 1 + table.clip_high) * advantages_N
    policy_N = -torch.minimum(plain_N, clipped_N)
    if correction_N is not None:
        policy_N = policy_N * correction_N.to(policy_N.dtype)
    loss_N = policy_N - table.entropy * entropy_N
    terms = {"policy_loss": policy_N, "entropy": entropy_N, "clip_share": clipped_N < plain_N}
    if ref_logprobs_N is not None:
        difference_N = ref_logprobs_N - logprobs_N
        terms["kl_ref"] = torch.expm1(difference_N) - difference_N
        loss_N = loss_N + table.kl * terms["kl_ref"]
    loss = (weights_N * loss_N).sum()
    sums = {name: (weights_N * term_N).sum().detach() for name, term_N in terms.items()}
    return loss, {"loss": loss.detach(), **sums}


def mismatch(trainer: NDArray[np.float32], generator: NDArray[np.float32]) -> dict[str, float]:
    """Returns the metrics of the differences. Both are float32 [tokens], in the same order."""
    d = trainer.astype(np.float64) - generator.astype(np.float64)
    return {
        "logprob_diff_mean": float(np.abs(d).mean()),
        "logprob_diff_max": float(np.abs(d).max()),
        "kl_k1": float(-d.mean()),
        "kl_k3": float((np.expm1(d) - d).mean()),
        "tokens_differ": float((d != 0).mean()),
    }


def corrections(
    trainer: NDArray[np.float32],
    generator: NDArray[np.float32],
    lengths: list[int],
    table: CorrectionTable,
) -> dict[str, float]:
    """Returns the metrics of the correction weights. lengths: tokens of each sequence."""
    import torch

    weights, ratios = correction_weights(
        torch.from_numpy(trainer), torch.from_numpy(generator), torch.tensor(lengths), table
    )
    return {
        "correction_mean": float(weights.mean()),
        "correction_cut_share": float((weights != ratios).double().mean()),
    }

"""The clipped GRPO loss, token by token, and the weights that correct it where trainer and
generator differ.

For token t of sequence i, with the trainer's logprob lp, the *generator's recorded* logprob old,
and the sequence's advantage A:

    ratio  = exp(lp − old)
    policy = −min(ratio·A, clip(ratio, 1−clip_low, 1+clip_high)·A)
    loss_t = policy − entropy·H_t + kl·k3_t          k3 = exp(ref − lp) − 1 − (ref − lp) ≥ 0,
                                                     against the reference model

The ratio divides by what the generator recorded, not by a second forward of the trainer: the tokens
were drawn from the generator's distribution, so whatever separates the two is corrected by the same
ratio, and clipped. The loss of a batch is Σ w_t·loss_t, with weights that depend on the whole batch
and not on how it is cut into micro batches:

    token-mean     w = 1 / tokens of the batch                 every token alike; long answers weigh
                   more
    sequence-mean  w = 1 / (sequences · tokens of its own)     every answer alike: the first GRPO
    constant       w = 1 / (sequences · max_tokens)            no length in the denominator: Dr.
                   GRPO

With [correction] importance_sampling, old is the *trainer's* logprob before the first update of the
step, gen is what the generator recorded, and a weight c without gradient corrects what separates
these two:

    ratio  = exp(lp − old)                        how far the updates of this step have gone
    policy = −c·min(ratio·A, clip(ratio, …)·A)    entropy, kl and w as above; a masked token counts
                                                  in the denominator of w

    token_truncate     r = exp(old − gen)         c = min(r, cap)                             TIS
                       (1)
    sequence_truncate  r = exp(Σ (old − gen))     c = min(r, cap), Σ over all of a sequence   its
                       sequence form (2)
    token_mask         r = exp(old − gen)         c = r if mask_low ≤ r ≤ mask_high, else 0   IcePop
                       (3)

(1) Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training". (2)
Liu et al. 2025, "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference
Mismatch". (3) Ling team 2025, "Every Step Evolves: Scaling Reinforcement Learning for
Trillion-Scale Thinking Model", arXiv 2510.18855. The modes have TRL's names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollmesh.run.config import CorrectionTable, LossTable

if TYPE_CHECKING:
    from torch import Tensor


MAX_EXPONENT = (
    80.0  # of a ratio that is clipped or has the factor 0: the gradient of more would be 0 · inf
)


@dataclass(frozen=True)
class LossTerms:
    """Sums of w_t·x_t, so that micro batches add up to the batch."""

    loss: Tensor  # a scalar with gradient
    policy: Tensor
    entropy: Tensor
    clipped: Tensor  # share of tokens whose clipped branch was taken
    kl_ref: Tensor | None  # None without a reference

    def metrics(self) -> dict[str, Tensor]:
        found = {
            "loss": self.loss.detach(),
            "policy_loss": self.policy,
            "entropy": self.entropy,
            "clip_share": self.clipped,
        }
        return found if self.kl_ref is None else {**found, "kl_ref": self.kl_ref}


def token_weights(lengths_B: Tensor, aggregation: str, max_tokens: int) -> Tensor:
    """Number of tokens of each sequence → w of each token, [sum of lengths], in the sequences'
    order."""
    import torch

    num_sequences, lengths = len(lengths_B), lengths_B.double()
    if aggregation == "token-mean":
        per_sequence = torch.full_like(lengths, 1.0) / lengths.sum()
    elif aggregation == "sequence-mean":
        per_sequence = 1.0 / (num_sequences * lengths)
    else:
        per_sequence = torch.full_like(lengths, 1.0 / (num_sequences * max_tokens))
    return per_sequence.float().repeat_interleave(lengths_B)


def correction_weights(
    old_N: Tensor, generator_N: Tensor, lengths_B: Tensor, table: CorrectionTable
) -> tuple[Tensor, Tensor]:
    """float64 c and r of each token. lengths_B: tokens of each sequence, in the sequences'
    order."""
    import torch

    log_N = old_N.double() - generator_N.double()
    if table.importance_sampling == "sequence_truncate":
        sums = [part.sum() for part in torch.split(log_N, lengths_B.tolist())]
        log_N = torch.stack(sums).repeat_interleave(lengths_B)
    ratios_N = log_N.exp()
    if table.importance_sampling == "token_mask":
        return torch.where(
            (ratios_N >= table.mask_low) & (ratios_N <= table.mask_high), ratios_N, 0.0
        ), ratios_N
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
) -> LossTerms:
    """N tokens, flat. Gradients flow through logprobs_N and entropy_N alone. correction_N: c of
    each token, None: 1."""
    import torch

    log_ratio_N = logprobs_N - old_logprobs_N
    is_bounded_N = (
        advantages_N >= 0 if correction_N is None else (advantages_N >= 0) | (correction_N == 0)
    )
    ratio_N = torch.exp(torch.where(is_bounded_N, log_ratio_N.clamp(max=MAX_EXPONENT), log_ratio_N))
    plain_N = ratio_N * advantages_N
    clipped_N = ratio_N.clamp(1 - table.clip_low, 1 + table.clip_high) * advantages_N
    policy_N = -torch.minimum(plain_N, clipped_N)
    if correction_N is not None:
        policy_N = policy_N * correction_N.to(policy_N.dtype)
    loss_N = policy_N - table.entropy * entropy_N
    kl_ref: Tensor | None = None
    if ref_logprobs_N is not None:
        difference_N = ref_logprobs_N - logprobs_N
        k3_N = torch.expm1(difference_N) - difference_N
        loss_N = loss_N + table.kl * k3_N
        kl_ref = (weights_N * k3_N).sum().detach()
    return LossTerms(
        loss=(weights_N * loss_N).sum(),
        policy=(weights_N * policy_N).sum().detach(),
        entropy=(weights_N * entropy_N).sum().detach(),
        clipped=(weights_N * (clipped_N < plain_N)).sum().detach(),
        kl_ref=kl_ref,
    )

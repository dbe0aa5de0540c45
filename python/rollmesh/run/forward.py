"""The trainer's forward pass, and its comparison with the generator's records.

[train] kernels selects transformers' own forward pass ("torch") or the generator's ("rollmesh").
Everything that differs between the two is here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from rollmesh.errors import NumericsError
from rollmesh.run.config import Config, kernels_of
from rollmesh.run.samples import Batch

if TYPE_CHECKING:
    from torch import Tensor

NOT_KEPT = -1e30  # logit of a token that a filter removed
ADVICE = '[train] mismatch = "record" continues, and [train] kernels = "torch" corrects'


def forward_of(config: Config) -> TorchForward:
    return {"torch": TorchForward, "rollmesh": RollmeshForward}[kernels_of(config)](config)


class TorchForward:
    def __init__(self, config: Config) -> None:
        self.config = config

    def prepared(self, model: Any) -> Any:
        """Returns the model in the form that the other methods take."""
        return model

    def score(self, model: Any, tokens_T: Tensor) -> Tensor:
        """Returns the logprob of each token but the first at temperature 1, float32 [T - 1]."""
        import torch

        logits_TV = model(input_ids=tokens_T[None], use_cache=False).logits[0].float()
        return torch.log_softmax(logits_TV[:-1], -1).gather(1, tokens_T[1:, None]).squeeze(1)

    def logprobs(
        self, model: Any, batch: Batch, entropy: bool, on_policy: bool, version: int | None
    ) -> tuple[Tensor, Tensor]:
        """Implements Trainer.logprobs. version: version of the model's weights."""
        import torch

        hidden_BTC = model.model(input_ids=batch.ids_BT, use_cache=False).last_hidden_state
        logits_NV = model.lm_head(hidden_BTC[batch.rows_N, batch.columns_N]).float()
        logits_NV = logits_NV / self.config.rollout.temperature
        place_N = batch.targets_N
        if batch.kept_NK is not None:
            place_N = (batch.kept_NK == place_N[:, None]).int().argmax(1)
            logits_NV = logits_NV.gather(1, batch.kept_NK.clamp(min=0).long())
            # A finite value, so that the entropy of a removed token is 0 and not NaN.
            logits_NV = logits_NV.masked_fill(batch.kept_NK < 0, NOT_KEPT)
        all_NV = torch.log_softmax(logits_NV, dim=-1)
        logprobs_N = all_NV.gather(1, place_N[:, None]).squeeze(1)
        if not entropy:
            return logprobs_N, torch.zeros_like(logprobs_N)
        return logprobs_N, -(all_NV.exp() * all_NV).sum(-1)


class RollmeshForward(TorchForward):
    """The generator's forward pass. With the weights that generated the tokens, its logprobs are
    bit-identical to the recorded ones."""

    def prepared(self, model: Any) -> Any:
        import rollmesh.torch

        g = self.config.generator
        return rollmesh.torch.patch(model, dtype=g.dtype, max_model_len=g.max_model_len)

    def score(self, model: Any, tokens_T: Tensor) -> Tensor:
        import rollmesh.torch

        return rollmesh.torch.logprobs(model, tokens_T[None]).logprobs[0]

    def logprobs(
        self, model: Any, batch: Batch, entropy: bool, on_policy: bool, version: int | None
    ) -> tuple[Tensor, Tensor]:
        import rollmesh.torch

        is_checked = on_policy and self.config.train.mismatch == "raise"
        # With syncs in flight the samples of a prompt share one record of its routing, although
        # they may have different versions.
        has_routing = batch.routed_BTLK is not None and self.config.rollout.async_level == 0
        scored = rollmesh.torch.logprobs(
            model,
            batch.tokens_BT,
            batch.mask_BT,
            wanted=batch.generated_BT,
            kept_tokens=batch.kept_NK,
            temperature=self.config.rollout.temperature,
            entropy=entropy,
            routed_experts=is_checked and has_routing,
        )
        chosen_BT = batch.generated_BT[:, 1:]
        logprobs_N = scored.logprobs[chosen_BT]
        if is_checked:
            if scored.routed_experts is not None and batch.routed_BTLK is not None:
                # The last token of each sequence was drawn and never computed.
                check_routing(scored.routed_experts[:, :-1], batch.routed_BTLK)
            check_logprobs(logprobs_N, batch, version)
        if scored.entropy is None:
            return logprobs_N, logprobs_N.new_zeros(len(logprobs_N))
        return logprobs_N, scored.entropy[chosen_BT]


def check_logprobs(logprobs_N: Tensor, batch: Batch, version: int | None = None) -> None:
    """Raises NumericsError if a logprob of the trainer differs from the recorded one. version:
    version of the trainer's weights; tokens of other versions are not compared."""
    trainer, generator = logprobs_N.detach().cpu().numpy(), batch.old_logprobs_N.cpu().numpy()
    is_compared = np.ones(len(trainer), bool)
    if version is not None and batch.versions_N is not None:
        is_compared = batch.versions_N.cpu().numpy() == version
    differ = np.flatnonzero((trainer != generator) & is_compared)
    if len(differ):
        n = int(differ[0])
        raise NumericsError(
            f"logprobs: expected {generator[n]} for {token_text(batch, n)}, which the generator "
            f"recorded, got {trainer[n]} from the trainer; "
            f"{len(differ)} of {is_compared.sum()} differ; {ADVICE}"
        )


def check_routing(trainer_BTLK: Tensor, generator_BTLK: Tensor) -> None:
    """Raises NumericsError if the trainer chose another expert than the recorded one. −1: not
    recorded."""
    trainer, generator = trainer_BTLK.cpu().numpy(), generator_BTLK.cpu().numpy()
    differ = np.argwhere((trainer != generator) & (generator >= 0))
    if len(differ):
        b, t, layer, place = map(int, differ[0])
        raise NumericsError(
            f"routed experts: expected expert {generator[b, t, layer, place]} as choice {place} "
            f"of MoE layer {layer} for sequence {b} of the batch, position {t}, which the "
            f"generator recorded, got {trainer[b, t, layer, place]} from the trainer; "
            f"{len(differ)} of {int((generator >= 0).sum())} differ; {ADVICE}"
        )


def token_text(batch: Batch, n: int) -> str:
    """Returns a description of a generated token of a batch, for error messages."""
    row, column, token = (int(x[n]) for x in (batch.rows_N, batch.columns_N, batch.targets_N))
    return f"sequence {row} of the batch, position {column + 1}, token {token}"


def largest_kl(reference_N: Tensor, logprobs_N: Tensor, batch: Batch) -> tuple[float, str]:
    """Returns the largest exponent of [loss] kl in a batch, and a description of its token."""
    difference_N = reference_N - logprobs_N
    n = int(difference_N.argmax())
    return float(difference_N[n]), (
        f"[loss] kl is exp({float(reference_N[n])} − {float(logprobs_N[n])}), reference − trainer, "
        f"at {token_text(batch, n)}; lower [train] lr or [loss] kl, or raise [rollout] temperature"
    )

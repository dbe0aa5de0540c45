"""[train] kernels: the trainer's forward pass is transformers' own ("torch") or the generator's
("rollmesh"). All that differs between the two is here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import rollmesh as rm
from rollmesh.grpo.mismatch import check_same
from rollmesh.grpo.rollout import Batch
from rollmesh.run.config import Config, kernels_of

if TYPE_CHECKING:
    from torch import Tensor

    from rollmesh.run.generator import Pushed, RolloutGenerator

NOT_KEPT = -1e30  # a logit


def forward_of(config: Config) -> TorchForward:
    return {"torch": TorchForward, "rollmesh": RollmeshForward}[kernels_of(config)](config)


class TorchForward:
    def __init__(self, config: Config) -> None:
        self.config = config

    def prepared(self, model: Any) -> Any:
        """A model as the other methods take it."""
        return model

    def push(self, model: Any, generator: RolloutGenerator, version: int, **options: Any) -> Pushed:
        return generator.sync_weights(model.state_dict(), version=version, **options)

    def score(self, model: Any, tokens_T: Tensor) -> Tensor:
        """float32 [T - 1], the logprob of each token but the first at temperature 1."""
        import torch

        logits_TV = model(input_ids=tokens_T[None], use_cache=False).logits[0].float()
        return torch.log_softmax(logits_TV[:-1], -1).gather(1, tokens_T[1:, None]).squeeze(1)

    def logprobs(
        self, model: Any, batch: Batch, entropy: bool, on_policy: bool, version: int | None
    ) -> tuple[Tensor, Tensor]:
        """As Trainer.logprobs. version: of the model's weights."""
        import torch

        hidden_BTC = model.model(input_ids=batch.ids_BT, use_cache=False).last_hidden_state
        logits_NV = (
            model.lm_head(hidden_BTC[batch.rows_N, batch.columns_N]).float()
            / self.config.rollout.temperature
        )
        place_N = batch.targets_N
        if batch.kept_NK is not None:
            place_N = (batch.kept_NK == place_N[:, None]).int().argmax(1)
            # Finite, so that the entropy of a token that was not kept is 0 · number.
            logits_NV = logits_NV.gather(1, batch.kept_NK.clamp(min=0).long()).masked_fill(
                batch.kept_NK < 0, NOT_KEPT
            )
        all_NV = torch.log_softmax(logits_NV, dim=-1)
        logprobs_N = all_NV.gather(1, place_N[:, None]).squeeze(1)
        if not entropy:
            return logprobs_N, torch.zeros_like(logprobs_N)
        return logprobs_N, -(all_NV.exp() * all_NV).sum(-1)


class RollmeshForward(TorchForward):
    """On the weights that drew the tokens, logprobs are those that the generator recorded, bit for
    bit."""

    def prepared(self, model: Any) -> Any:
        import rollmesh.torch

        g = self.config.generator
        return rollmesh.torch.patch(model, dtype=g.dtype, max_model_len=g.max_model_len)

    def push(self, model: Any, generator: RolloutGenerator, version: int, **options: Any) -> Pushed:
        if not isinstance(generator, rm.Generator):
            return super().push(model, generator, version, **options)
        import rollmesh.torch

        return rollmesh.torch.push(model, generator, version, **options)

    def score(self, model: Any, tokens_T: Tensor) -> Tensor:
        import rollmesh.torch

        return rollmesh.torch.logprobs(model, tokens_T[None]).logprobs[0]

    def logprobs(
        self, model: Any, batch: Batch, entropy: bool, on_policy: bool, version: int | None
    ) -> tuple[Tensor, Tensor]:
        import rollmesh.torch

        must_be_same = on_policy and self.config.train.mismatch == "raise"
        # With syncs in flight samples of one prompt share its record of routing, whichever version
        # each is of.
        has_routing = batch.routed_BTLK is not None and self.config.rollout.async_level == 0

        scored = rollmesh.torch.logprobs(
            model, batch.tokens_BT, batch.mask_BT, wanted=batch.generated_BT,
            kept_tokens=batch.kept_NK,
            temperature=self.config.rollout.temperature, entropy=entropy,
            routed_experts=must_be_same and has_routing,
        )  # fmt: skip
        chosen = batch.generated_BT[:, 1:]
        logprobs_N = scored.logprobs[chosen]
        if must_be_same:
            # The last token of each sequence was drawn and never computed.
            check_same(
                logprobs_N,
                None if scored.routed_experts is None else scored.routed_experts[:, :-1],
                batch,
                version,
            )
        return logprobs_N, logprobs_N.new_zeros(
            len(logprobs_N)
        ) if scored.entropy is None else scored.entropy[chosen]

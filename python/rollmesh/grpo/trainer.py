"""The trainer: a causal LM of transformers, AdamW, and the logprobs of given tokens.

The trainer owns the weights. They are random, with the shapes of the config's [model] table, or
read from a checkpoint folder, which only the trainer reads. `state_dict()` is the source of each
push. Results are deterministic for a given number of threads.

Without async_level, the thread pools of torch and the generator work in turns. Each has at most as
many threads as the process has cores, since a pool that spins takes cores from the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import rollmesh as rm
from rollmesh.grpo.loss import correction_weights, corrections, grpo_loss, token_weights
from rollmesh.run.config import Config, TrainTable
from rollmesh.run.forward import forward_of, largest_kl
from rollmesh.run.models import (
    build_model,
    checkpoint_layers,
    load_model,
    set_up_torch,
    torch_device,
)
from rollmesh.run.routing_replay import replay, routers
from rollmesh.run.samples import Batch, Completion, Rollout, make_batch
from rollmesh.run.seeds import seed_of

if TYPE_CHECKING:
    from torch import Tensor

    from rollmesh.run.generator import RolloutGenerator

MAX_KL_EXPONENT = 40.0  # for [loss] kl; above it the squared gradient norm may exceed float32


class Trainer:
    def __init__(self, config: Config, tokenizer: Any, checkpoint: Path | None = None) -> None:
        """checkpoint: a folder whose weights replace the initial ones, for a resumed run."""
        import torch

        table = config.train
        set_up_torch(table.threads)
        self.config = config
        self.version: int | None = None  # version of the weights; set by push
        self.num_updates = 0  # number of updates of the weights, including an interrupted one
        self.device = torch_device(config)
        self.forward = forward_of(config)
        self.model = self._model(
            load_model(checkpoint, table.dtype, config.model.ignore)
            if checkpoint
            else build_model(config, tokenizer)
        )
        if config.correction.routing_replay:
            routers(self.model)  # raises for a model without experts
        if table.gradient_checkpointing:
            checkpoint_layers(self.model)
        self.reference: Any = None
        if config.loss.kl > 0:  # the initial model again, also in a resumed run
            self.reference = self._model(build_model(config, tokenizer)).requires_grad_(False)
        torch.manual_seed(seed_of(config.seed, 0, "run"))
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=table.lr,
            betas=(table.betas[0], table.betas[1]),
            weight_decay=table.weight_decay,
            foreach=True,
        )

    def push(self, generator: RolloutGenerator, version: int) -> rm.SyncReport:
        """Makes the weights the generator's `version`."""
        table = self.config.sync
        options: dict[str, Any] = {"cast": table.cast}
        if table.inflight != "wait":
            options["inflight"] = table.inflight
        report = generator.sync_weights(self.state_dict(), version=version, **options)
        self.version = version
        return report

    def state_dict(self) -> dict[str, Any]:
        return self.model.state_dict()  # type: ignore[no-any-return]

    def logprobs(
        self, batch: Batch, *, entropy: bool = False, model: Any = None, on_policy: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Returns the float32 logprob of each generated token, at the rollout's temperature and
        among the tokens that its filters kept, and the entropy (zeros with entropy=False).
        on_policy: whether these weights generated the tokens. With rollmesh's kernels and [train]
        mismatch = "raise" the logprobs must then equal the recorded ones."""
        model = self.model if model is None else model
        return self.forward.logprobs(model, batch, entropy, on_policy, self.version)

    def logprobs_of(self, rollout: Rollout) -> NDArray[np.float32]:
        """Returns the logprobs of all tokens of a rollout, without gradient, [tokens]. The weights
        must be those that generated them."""
        import torch

        with torch.no_grad():
            parts = []
            for completions in self._micro_batches(rollout.completions):
                batch = make_batch(completions, self.device)
                with self._replay(batch):
                    parts.append(self.logprobs(batch, on_policy=True)[0])
        return torch.cat(parts).cpu().numpy()

    def score(self, sequences: list[NDArray[np.int32]]) -> list[NDArray[np.float32]]:
        """Returns float32 [len - 1] per sequence at temperature 1, for Generator.self_test."""
        import torch

        with torch.no_grad():
            tokens = [torch.from_numpy(ids.astype(np.int64)).to(self.device) for ids in sequences]
            return [self.forward.score(self.model, tokens_T).cpu().numpy() for tokens_T in tokens]

    def learn(
        self, rollout: Rollout, advantages: NDArray[np.float64], step: int
    ) -> tuple[dict[str, float], NDArray[np.float32]]:
        """Makes the optimizer updates of a step. Returns their metrics, and the logprobs of the
        rollout's tokens before the first update."""
        import torch

        table, correction, every = self.config.train, self.config.correction, rollout.completions
        lengths = [len(c.logprobs) for c in every]
        each = np.repeat(advantages, lengths)
        size = len(every) // table.updates if table.minibatches else len(every)
        before = self.logprobs_of(rollout) if size < len(every) else None
        totals: dict[str, float] = {}
        for update in range(table.updates):
            first = update * size if table.minibatches else 0
            tokens = slice(sum(lengths[:first]), sum(lengths[: first + size]))
            with torch.enable_grad():  # a reward may have disabled it
                metrics, logprobs = self._update(
                    every[first : first + size],
                    each[tokens],
                    None if before is None else before[tokens],
                    step,
                    on_policy=update == 0,
                )
            before = logprobs if before is None else before
            for name, value in metrics.items():
                totals[name] = totals.get(name, 0.0) + value / table.updates
        assert before is not None
        if correction.importance_sampling != "none":
            totals |= corrections(before, rollout.logprobs, lengths, correction)
        return totals, before

    def _update(
        self,
        completions: list[Completion],
        advantages: NDArray[np.float64],
        before: NDArray[np.float32] | None,
        step: int,
        on_policy: bool,
    ) -> tuple[dict[str, float], NDArray[np.float32]]:
        """Makes one optimizer update. advantages, before: one value for each token. `before` has
        the trainer's logprobs before the first update; it is None in that update if the update uses
        the whole batch. Returns the metrics and the logprobs."""
        import torch

        c = self.config
        corrects = c.correction.importance_sampling != "none"
        lengths_B = torch.tensor([len(c.logprobs) for c in completions], device=self.device)
        weights = token_weights(lengths_B, c.loss.aggregation, c.rollout.max_tokens)
        sums: dict[str, float] = {}
        computed, taken, kl = [], 0, (0.0, "")
        for chosen in self._micro_batches(completions):
            batch = make_batch(chosen, self.device)
            tokens = slice(taken, taken := taken + len(batch.targets_N))
            # Gradient checkpointing computes the forward pass again in the backward pass.
            with self._replay(batch):
                logprobs_N, entropy_N = self.logprobs(batch, entropy=True, on_policy=on_policy)
                old_N, correction_N, ref_N = batch.old_logprobs_N, None, None
                if corrects:
                    old_N = logprobs_N.detach()
                    if before is not None:
                        old_N = torch.from_numpy(before[tokens]).to(self.device)
                    correction_N, _ = correction_weights(
                        old_N, batch.old_logprobs_N, batch.lengths_B, c.correction
                    )
                if self.reference is not None:
                    with torch.no_grad():
                        ref_N = self.logprobs(batch, model=self.reference)[0]
                    kl = max(kl, largest_kl(ref_N, logprobs_N.detach(), batch))
                loss, terms = grpo_loss(
                    logprobs_N,
                    entropy_N,
                    old_N,
                    torch.from_numpy(advantages[tokens]).to(self.device).float(),
                    weights[tokens],
                    c.loss,
                    ref_N,
                    correction_N,
                )
                loss.backward()  # type: ignore[no-untyped-call]
            computed.append(logprobs_N.detach())
            for name, value in terms.items():
                sums[name] = sums.get(name, 0.0) + float(value)
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), c.train.grad_clip))
        if not math.isfinite(norm):
            why = f"; {kl[1]}" if kl[0] > MAX_KL_EXPONENT else ""
            raise rm.NumericsError(
                f"gradient norm is {norm}: the loss of this step is not finite; the weights were "
                f"not updated{why}"
            )
        lr = learning_rate(c.train, step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.num_updates += 1
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return {**sums, "grad_norm": norm, "lr": lr}, torch.cat(computed).cpu().numpy()

    def _model(self, model: Any) -> Any:
        # No dropout, so that the trained policy is the one that generates.
        return self.forward.prepared(model.to(self.device)).eval()

    def _replay(self, batch: Batch) -> AbstractContextManager[None]:
        return replay(
            self.model, batch.routed_BTLK if self.config.correction.routing_replay else None
        )

    def _micro_batches(self, completions: list[Completion]) -> Iterator[list[Completion]]:
        size = self.config.train.micro_batch or len(completions)
        return (completions[i : i + size] for i in range(0, len(completions), size))


def learning_rate(table: TrainTable, step: int) -> float:
    """Returns the learning rate of a step: linear warm-up, then the schedule to 0 at `steps`."""
    if step < table.warmup_steps:
        return table.lr * (step + 1) / table.warmup_steps
    progress = (step - table.warmup_steps) / max(1, table.steps - table.warmup_steps)
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    return table.lr * {"constant": 1.0, "linear": 1.0 - progress, "cosine": cosine}[table.schedule]

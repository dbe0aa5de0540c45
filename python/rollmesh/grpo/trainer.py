"""The trainer: any causal LM of transformers, AdamW, and the logprobs of given tokens.

It owns the weights. It is randomly initialised from the config's `[model]` table, or loaded from a
checkpoint folder, which no other part reads. `state_dict()` is the source of each sync. Results are
deterministic for a given number of threads: seeds are set, torch's deterministic algorithms are on,
and the config gives the number of threads.

Without async_level torch's thread pool and the generator's never work at the same time, but a pool
that spins after its work takes cores from the other: the config sizes both to the cores of the
process at most.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import rollmesh as rm
from rollmesh.grpo.forward import forward_of
from rollmesh.grpo.loss import correction_weights, grpo_loss, token_weights
from rollmesh.grpo.mismatch import corrections, largest_kl
from rollmesh.grpo.rollout import Batch, Rollout, make_batch, with_trainer_logprobs
from rollmesh.run.config import Config, ModelTable, TrainTable
from rollmesh.run.models import experts_option, folder_config, load_model
from rollmesh.run.seeds import seed_of
from rollmesh.runtime.cores import usable_cores
from rollmesh.torch.routing_replay import replay, routers

if TYPE_CHECKING:
    from torch import Tensor

    from rollmesh.run.generator import Pushed, RolloutGenerator

MAX_KL_EXPONENT = 40.0  # of [loss] kl; the gradient norm's squares overflow float32 soon above it


class Trainer:
    def __init__(self, config: Config, tokenizer: Any, checkpoint: Path | None = None) -> None:
        """`checkpoint`: a folder whose weights replace the config's initial ones (a resumed
        run)."""
        import torch

        table = config.train
        torch.set_num_threads(table.threads or usable_cores())
        torch.use_deterministic_algorithms(True)
        # Deterministic mode would also fill every torch.empty().
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.manual_seed(seed_of(config.seed, 0, "weights"))
        self.config = config
        self.version: int | None = None  # of the weights, since the last push
        self.num_updates = 0  # of the weights, begun
        self.device = torch_device(table.device)
        check_devices(self.device, config)
        self.forward = forward_of(config)
        model = (
            load_model(checkpoint, table.dtype, config.model.ignore)
            if checkpoint
            else build_model(config, tokenizer)
        )
        self.model = self.forward.prepared(model.to(self.device))
        if config.correction.routing_replay:
            routers(self.model)
        self.model.eval()  # no dropout: the policy that is trained is the one that generates
        if table.gradient_checkpointing:
            checkpoint_layers(self.model)
        self.reference = (
            self.forward.prepared(build_reference(config, tokenizer).to(self.device))
            if config.loss.kl > 0
            else None
        )
        torch.manual_seed(seed_of(config.seed, 0, "run"))
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=table.lr,
            betas=(table.betas[0], table.betas[1]),
            weight_decay=table.weight_decay,
            foreach=True,
        )

    def push(self, generator: RolloutGenerator, version: int) -> Pushed:
        """The weights become the generator's version. A generator of this process shares its packed
        copy with rollmesh's kernels."""
        table = self.config.sync
        options: dict[str, Any] = (
            {"cast": table.cast}
            if table.inflight == "wait"
            else {"cast": table.cast, "inflight": table.inflight}
        )
        report = self.forward.push(self.model, generator, version, **options)
        self.version = version
        return report

    def state_dict(self) -> dict[str, Any]:
        return self.model.state_dict()  # type: ignore[no-any-return]

    def logprobs(
        self, batch: Batch, *, entropy: bool = False, model: Any = None, on_policy: bool = False
    ) -> tuple[Tensor, Tensor]:
        """float32 logprob of each generated token at the rollout's temperature, among the tokens
        that its filters kept, and (asked for, else zeros) the entropy. on_policy: the weights are
        those that drew the tokens; with rollmesh's kernels every number must then be the recorded
        one ([train] mismatch)."""
        return self.forward.logprobs(
            self.model if model is None else model, batch, entropy, on_policy, self.version
        )

    def logprobs_of(self, rollout: Rollout) -> NDArray[np.float32]:
        """Of all generated tokens of a rollout, without gradient, on the weights that drew them:
        [tokens]."""
        import torch

        with torch.no_grad():
            parts = []
            for chunk in self._micro(list(range(len(rollout.texts)))):
                batch = make_batch(rollout, chunk, self.device)
                with self._replay(batch):
                    parts.append(self.logprobs(batch, on_policy=True)[0])
        return torch.cat(parts).cpu().numpy()

    def score(self, sequences: list[NDArray[np.int32]]) -> list[NDArray[np.float32]]:
        """float32 [len - 1] per sequence at temperature 1: the scorer of rm.Generator.self_test."""
        import torch

        with torch.no_grad():
            tokens = [torch.from_numpy(ids.astype(np.int64)).to(self.device) for ids in sequences]
            return [self.forward.score(self.model, tokens_T).cpu().numpy() for tokens_T in tokens]

    def learn(
        self, rollout: Rollout, advantages: NDArray[np.float64], step: int
    ) -> tuple[dict[str, float], NDArray[np.float32]]:
        """The step's optimizer updates. Returns their metrics and the logprobs of the rollout's
        tokens before the first of them."""
        import torch

        table, updates, correction = (
            self.config.train,
            self.config.train.updates,
            self.config.correction,
        )
        corrects = correction.importance_sampling != "none"
        before = self.logprobs_of(rollout) if table.minibatches and updates > 1 else None
        per_update = len(rollout.texts) // updates if table.minibatches else len(rollout.texts)
        totals: dict[str, float] = {}
        for update in range(updates):
            if corrects and before is not None:
                rollout = with_trainer_logprobs(rollout, before)
            first = update * per_update if table.minibatches else 0
            indices = list(range(first, first + per_update))
            with torch.enable_grad():  # whatever a reward has set
                metrics, logprobs = self._update(
                    rollout, advantages, indices, learning_rate(table, step), on_policy=update == 0
                )
            before = logprobs if before is None else before
            for name, value in metrics.items():
                totals[name] = totals.get(name, 0.0) + value / updates
        assert before is not None
        if corrects:
            totals |= corrections(
                before,
                np.concatenate(rollout.logprobs),
                [len(recorded) for recorded in rollout.logprobs],
                correction,
            )
        return totals, before

    def _update(
        self,
        rollout: Rollout,
        advantages: NDArray[np.float64],
        indices: list[int],
        lr: float,
        on_policy: bool,
    ) -> tuple[dict[str, float], NDArray[np.float32]]:
        import torch

        c = self.config
        lengths_B = torch.tensor([len(rollout.logprobs[i]) for i in indices], device=self.device)
        weights = token_weights(lengths_B, c.loss.aggregation, c.rollout.max_tokens)
        sums: dict[str, float] = {}
        before, taken, kl = [], 0, (0.0, "")
        for chunk in self._micro(indices):
            batch = make_batch(rollout, chunk, self.device)
            count = len(batch.targets_N)
            with self._replay(
                batch
            ):  # the backward too, which computes the forward again under gradient checkpointing
                logprobs_N, entropy_N = self.logprobs(batch, entropy=True, on_policy=on_policy)
                old_N, correction_N = batch.old_logprobs_N, None
                if c.correction.importance_sampling != "none":
                    # The first update of a whole batch computes the logprobs before it.
                    old_N = (
                        logprobs_N.detach()
                        if batch.trainer_logprobs_N is None
                        else batch.trainer_logprobs_N
                    )
                    correction_N, _ = correction_weights(
                        old_N, batch.old_logprobs_N, batch.lengths_B, c.correction
                    )
                ref_N = None
                if self.reference is not None:
                    with torch.no_grad():
                        ref_N = self.logprobs(batch, model=self.reference)[0]
                    kl = max(kl, largest_kl(ref_N, logprobs_N, batch))
                advantages_N = (
                    torch.from_numpy(advantages[chunk])
                    .to(self.device)
                    .float()
                    .repeat_interleave(batch.lengths_B)
                )
                terms = grpo_loss(
                    logprobs_N,
                    entropy_N,
                    old_N,
                    advantages_N,
                    weights[taken : taken + count],
                    c.loss,
                    ref_N,
                    correction_N,
                )
                terms.loss.backward()  # type: ignore[no-untyped-call]
            taken += count
            before.append(logprobs_N.detach())
            for name, value in terms.metrics().items():
                sums[name] = sums.get(name, 0.0) + float(value)
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), c.train.grad_clip))
        if not math.isfinite(norm):
            why = f"; {kl[1]}" if kl[0] > MAX_KL_EXPONENT else ""
            raise rm.NumericsError(
                f"gradient norm is {norm}: the loss of this step is not finite; the weights were "
                f"not updated{why}"
            )
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.num_updates += 1
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return {**sums, "grad_norm": norm, "lr": lr}, torch.cat(before).cpu().numpy()

    def _replay(self, batch: Batch) -> AbstractContextManager[None]:
        return replay(
            self.model, batch.routed_BTLK if self.config.correction.routing_replay else None
        )

    def _micro(self, indices: list[int]) -> Iterator[list[int]]:
        size = self.config.train.micro_batch or len(indices)
        return (indices[i : i + size] for i in range(0, len(indices), size))


def torch_device(name: str) -> Any:
    """[train] device as a torch.device. ConfigError for anything but cpu, cuda and cuda:N, or a GPU
    that this torch does not see."""
    import torch

    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise rm.ConfigError(f"[train] device: expected cpu, cuda or cuda:N, got {name!r}")
    if device.type == "cuda":
        os.environ.setdefault(
            "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
        )  # needed for deterministic algorithms, before cuBLAS is loaded
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise rm.ConfigError(
                f"[train] device: expected one of torch's {count} CUDA devices, got {name!r}"
            )
    return device


def check_devices(device: Any, config: Config) -> None:
    """ConfigError for a trainer on a GPU with a rollmesh generator on the CPU, which cannot read
    its tensors."""
    g, name = config.generator, config.train.device
    if device.type == "cuda" and g.engine == "rollmesh" and g.device == "cpu":
        raise rm.ConfigError(
            f"[train] device: expected cpu with [generator] device = 'cpu', got {name!r}; use "
            "cuda for both, or cpu"
        )


def checkpoint_layers(model: Any) -> None:
    """Gradient checkpointing of transformers. A decoder layer does it in training mode alone: it is
    put there, and none of its parts."""
    # gradient_checkpointing_enable is deprecated where there is the other.
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": False})
    for layer in model.model.layers:
        layer.training = True


def learning_rate(table: TrainTable, step: int) -> float:
    """The learning rate of a 0-based step: linear warm-up, then the schedule down to 0 at
    `steps`."""
    if step < table.warmup_steps:
        return table.lr * (step + 1) / table.warmup_steps
    progress = (step - table.warmup_steps) / max(1, table.steps - table.warmup_steps)
    factor = {
        "constant": 1.0,
        "linear": 1.0 - progress,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
    }
    return table.lr * factor[table.schedule]


def build_model(config: Config, tokenizer: Any) -> Any:
    """The model the run starts from: the folder's, or a random one from torch's current seed."""
    if config.model.path is not None:
        return load_model(config.path(config.model.path), config.train.dtype, config.model.ignore)
    import torch
    from transformers import AutoModelForCausalLM

    hf_config = hf_config_of(config.model, tokenizer)
    rm.ModelSpec.from_hf(hf_config)  # its limits, before so much memory is taken
    return AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        hf_config, dtype=getattr(torch, config.train.dtype), **experts_option(hf_config)
    )


def build_reference(config: Config, tokenizer: Any) -> Any:
    """The initial model again, frozen: from the same seed or the same folder, so a resumed run has
    the same reference."""
    import torch

    torch.manual_seed(seed_of(config.seed, 0, "weights"))
    model = build_model(config, tokenizer)
    return model.eval().requires_grad_(False)


def hf_config_of(table: ModelTable, tokenizer: Any) -> Any:
    """The transformers config that a random model is built from; the tokenizer gives its vocabulary
    and eos. Where a family has a pad_token_id by default, that embedding would not learn."""
    from transformers import AutoConfig

    fields = {
        "vocab_size": len(tokenizer),
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": None,
        **table.hf_fields(),
    }
    if fields["vocab_size"] < len(tokenizer):
        raise rm.ConfigError(
            f"[model] vocab_size: {fields['vocab_size']} is below the tokenizer's {len(tokenizer)}"
        )
    try:
        return AutoConfig.for_model(str(table.architecture), **fields)
    except (ValueError, TypeError) as e:
        raise rm.ConfigError(f"[model]: {e}") from e


def model_config(config: Config, tokenizer: Any, checkpoint: Path | None = None) -> Any:
    """The transformers config of the model that Trainer builds, without building it."""
    if checkpoint is None and config.model.path is None:
        return hf_config_of(config.model, tokenizer)
    return folder_config(checkpoint or config.path(str(config.model.path)), config.model.ignore)

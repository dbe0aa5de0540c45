"""TitanRL's PolicyTrainer with the generator's forward pass (rollmesh.torch.functions): equal
weights give a token's logprob the same bits on both sides. The backward pass is torch's.

The modules and parameters of torchtitan are used unchanged; only their forward methods are
replaced, so that the hooks of FSDP and activation checkpointing around them keep working. lm_head
returns its input, from which the loss computes logprobs of the labels (_logprobs).
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchtitan.components import loss
from torchtitan.experiments.rl.actors.trainer import PolicyTrainer
from torchtitan.experiments.rl.losses import dapo
from torchtitan.models.common.attention import FusedQKVLinear
from torchtitan.models.llama3.model import Llama3TransformerBlock
from torchtitan.models.qwen3.model import Qwen3TransformerBlock
from torchtitan.protocols.model_spec import ModelSpec as TitanSpec

from rollmesh import ModelSpec
from rollmesh.errors import ConfigError
from rollmesh.model.families import FAMILIES
from rollmesh.runtime.messages import shown
from rollmesh.titan.generator import read_spec
from rollmesh.torch import functions
from rollmesh.torch.functions import Heads, How
from rollmesh.torch.functions.attention import pairs_apart
from rollmesh.torch.sequences import Sequences


class RollmeshTrainer(PolicyTrainer):
    """PolicyTrainer whose forward pass is the generator's. FSDP and HSDP only, without compile; a
    ConfigError names what is at fault."""

    def _build_model(
        self, model_spec: TitanSpec, config: PolicyTrainer.Config, device_type: str
    ) -> nn.Module:
        spec = read_spec(model_spec)
        degrees = config.parallelism
        for name in ("tensor", "expert", "context", "pipeline"):
            degree = getattr(degrees, f"{name}_parallel_degree")
            if degree != 1:
                raise ConfigError(
                    f"trainer.parallelism.{name}_parallel_degree: expected 1 with rollmesh's "
                    f"forward pass, got {degree}"
                )
        if self.compile_config.enable:
            raise ConfigError(
                "compile.enable: expected False with rollmesh's forward pass, got True"
            )
        if config.override.imports:
            raise ConfigError(
                "trainer.override: expected none with rollmesh's forward pass, got "
                f"{shown(config.override.imports)}"
            )
        model: nn.Module = super()._build_model(model_spec, config, device_type)
        Forward(spec, config.training.seq_len).take_over(model)
        return model


class Forward:
    """The forward pass of one Qwen3Model or Llama3Model of torchtitan."""

    def __init__(self, spec: ModelSpec, max_positions: int):
        self._spec, self._max_positions = spec, max_positions
        self._heads = Heads(
            spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim, spec.rms_norm_eps
        )
        self._is_interleaved = FAMILIES[spec.model_type].wq_rows == "neighbours"
        self._rows: tuple[Tensor, Sequences] | None = None  # of the batch whose positions these are
        self._rope: tuple[Tensor, Tensor] | None = None

    def take_over(self, model: Any) -> None:
        """Replaces the forward methods of model's parts, and compute_logprobs of the losses of this
        process."""
        warnings.filterwarnings(
            "ignore", r"FSDP2-wrapped module .* returned a view tensor"
        )  # nothing here writes in place
        blocks = [
            module
            for module in model.modules()
            if isinstance(module, (Qwen3TransformerBlock, Llama3TransformerBlock))
        ]
        for index, block in enumerate(blocks):
            block.forward = partial(self._block, block, self._spec.is_moe_layer[index])
        model.norm.forward = partial(self._norm, model.norm)
        model.lm_head.forward = _unchanged
        loss.compute_logprobs = dapo.compute_logprobs = partial(_logprobs, model.lm_head)

    def _norm(self, norm: Any, x: Tensor) -> Tensor:
        return functions.rms_norm(x.flatten(0, -2), norm.weight, self._spec.rms_norm_eps).view_as(x)

    def _block(
        self, block: Any, is_moe: bool, x: Tensor, attention_masks: Any, positions: Tensor
    ) -> Tensor:
        del attention_masks  # positions say where sequences begin
        hidden, rows, how = x.flatten(0, -2), self._sequences(positions), functions.how_for(x)
        made = functions.decoder_layer(
            hidden,
            (block.attention_norm.weight, block.ffn_norm.weight),
            lambda x: self._attend(block.attention, x, rows, how),
            lambda x: (
                self._experts(block.moe, x, how)
                if is_moe
                else self._mlp(block.feed_forward, x, how)
            ),
            self._spec.rms_norm_eps,
            how=how,
        )
        return made.view_as(x)

    def _attend(self, attention: Any, x: Tensor, rows: Sequences, how: How) -> Tensor:
        q, k, v = _qkv_weights(attention.qkv_linear)
        if self._is_interleaved:
            q, k = (
                pairs_apart(weight, self._spec.head_dim, self._spec.head_dim) for weight in (q, k)
            )
        made = functions.linear(x, q, k, v, how=how)
        q_norm, k_norm = (
            None if norm is None else norm.weight for norm in (attention.q_norm, attention.k_norm)
        )
        attended = functions.attention(
            made, q_norm, k_norm, self._table(x), rows, self._heads, how=how
        )
        return functions.linear(attended, attention.wo.weight, how=how)

    def _mlp(self, mlp: Any, x: Tensor, how: How) -> Tensor:
        return functions.linear(
            functions.swiglu(x, mlp.w1.weight, mlp.w3.weight, how=how), mlp.w2.weight, how=how
        )

    def _experts(self, moe: Any, x: Tensor, how: How) -> Tensor:
        experts, spec = moe.routed_experts.inner_experts, self._spec
        gate_up = torch.cat([experts.w1_EFD, experts.w3_EFD], 1)
        made = functions.moe(
            x, moe.router.gate.weight, gate_up, experts.w2_EDF,
            top_k=spec.num_experts_per_tok, **spec.scoring, bias=moe.expert_bias_E, how=how,
        )  # fmt: skip
        if moe.training:  # its optimizer moves the bias by this count
            with torch.no_grad():
                moe.tokens_per_expert_E.add_(
                    torch.bincount(made.ids.flatten(), minlength=spec.num_experts)
                )
        shared = moe.shared_experts
        if shared is None:
            return made.out
        switch = functions.linear(x, shared.gate.weight, how=how) if spec.shared_switch else None
        return functions.add(made.out, self._mlp(shared, x, how), switch, how=how)

    def _sequences(self, positions: Tensor) -> Sequences:
        if self._rows is None or self._rows[0] is not positions:
            shape = (positions.shape[0], positions.shape[1])
            self._rows = positions, Sequences.of_batch(shape, None, positions)
        return self._rows[1]

    def _table(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self._rope is None:
            self._rope = functions.rope_table(
                self._spec.rope(self._max_positions), self._max_positions, x.dtype, x.device
            )
        return self._rope


def _qkv_weights(linear: Any) -> list[Tensor]:
    if not isinstance(linear, FusedQKVLinear):
        return [linear.wq.weight, linear.wk.weight, linear.wv.weight]
    size, group, weight = linear.head_dim, linear.heads_per_kv, linear.wqkv.weight
    heads = weight.view(-1, group + 2, size, weight.shape[1])  # of each kv head: its q heads, k, v
    return [part.reshape(-1, weight.shape[1]) for part in heads.split([group, 1, 1], 1)]


def _unchanged(hidden: Tensor) -> Tensor:
    return hidden.view_as(hidden)


def _logprobs(
    head: Any, hidden: Tensor, labels: Tensor, *, return_entropy: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """Replaces torchtitan's compute_logprobs, which takes logits."""
    if isinstance(head.weight, DTensor):
        raise ConfigError(
            "trainer.loss: expected a ChunkedLossWrapper with rollmesh's forward pass, which "
            "keeps lm_head unsharded"
        )
    targets = labels.flatten().clamp(min=0)  # what the loss masks
    made = functions.token_logprobs(
        hidden.flatten(0, -2), head.weight, targets, entropy=return_entropy
    )
    if made.entropy is None:
        return made.logprobs.view(labels.shape)
    return made.logprobs.view(labels.shape), made.entropy.detach().view(labels.shape)

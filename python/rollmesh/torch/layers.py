"""The forward pass of transformers' decoder layers with the generator's kernels. Reorders weights
whose rows are in another order than the kernels'."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rollmesh import ModelSpec, _core
from rollmesh.errors import ConfigError, LimitError
from rollmesh.model.families import FAMILIES
from rollmesh.torch import functions
from rollmesh.torch.functions import DeltaHeads, Heads, How
from rollmesh.torch.functions.attention import LATENT_EPS, Latent, Rope, pairs_apart
from rollmesh.torch.lora import base_of, weight_of
from rollmesh.torch.sequences import Sequences

ROPE_STEP = 1024  # the rope table grows by so many positions


def router_bias(mlp: Any, router: Any) -> Tensor | None:
    """Returns the bias that a router adds to its scores to choose experts, float32 [experts], or
    None. Families have it in different modules, some in the model's dtype."""
    for module in (mlp, router, getattr(router, "moe_statics", None)):
        for name in ("e_score_correction_bias", "expert_bias"):
            bias: Tensor | None = getattr(module, name, None)
            if bias is not None:
                return bias.detach().float().flatten()
    return None


def query_and_gate(attention: Any, q: Tensor, spec: ModelSpec) -> tuple[Tensor, Tensor]:
    """Returns the weights of q and of attention's gate. q: the weight of q_proj, which may have the
    rows of both."""
    if not FAMILIES[spec.model_type].gate_in_q:
        return q, weight_of(attention.gate_proj)
    of_head, of_gate = q.view(-1, 2, spec.head_dim, q.shape[1]).unbind(1)
    return of_head.flatten(0, 1), of_gate.flatten(0, 1)


def delta_heads(spec: ModelSpec) -> DeltaHeads:
    return DeltaHeads(
        spec.linear_num_key_heads,
        spec.linear_num_value_heads,
        spec.linear_key_head_dim,
        spec.linear_value_head_dim,
        spec.rms_norm_eps,
    )


def delta_weights(net: Any, spec: ModelSpec) -> list[Tensor]:
    """Returns the weights of a delta net's q, k, v, z, b and a, as tensors whose rows follow each
    other in this order."""
    if not FAMILIES[spec.model_type].delta_alternates:
        return [weight_of(getattr(net, f"in_proj_{name}")) for name in ("qkv", "z", "b", "a")]
    heads = delta_heads(spec)
    widths = [width // heads.num_k_heads for width in heads.widths]  # of one key head

    def apart(module: Any, widths: list[int]) -> list[Tensor]:
        weight = weight_of(module)
        by_head = weight.view(heads.num_k_heads, -1, weight.shape[1])
        return [part.flatten(0, 1) for part in torch.split(by_head, widths, 1)]

    return apart(net.in_proj_qkvz, widths[:4]) + apart(net.in_proj_ba, widths[4:])


@dataclass(eq=False)
class Layers:
    """Computes the decoder layers of one model."""

    spec: ModelSpec
    dtype: torch.dtype
    isa: str | None
    threads: int | None
    max_model_len: int | None
    call: Any = field(init=False)  # _Call of patch.py

    def __post_init__(self) -> None:
        spec = self.spec
        self.heads = [
            Heads(
                spec.num_attention_heads,
                spec.num_key_value_heads,
                spec.head_dim,
                spec.rms_norm_eps,
                window,
                spec.qk_norm == "whole",
                spec.attention_multiplier,
                spec.attn_logit_softcapping,
                spec.zero_centered_norms,
                spec.qk_norm_last,
            )
            for window in spec.sliding_windows
        ]
        # The path of each kind of parameter within a layer.
        self.paths = {
            kind: name.split(".", 3)[-1].removesuffix(".weight")
            for kind, name, _ in _core.parameters(spec.engine_values(1))
        }
        self._ropes: dict[tuple[torch.device, bool], Rope] = {}

    def how(self, x: Tensor) -> How:
        return functions.how_for(x, self.isa, self.threads)

    def rope(self, rows: Sequences, device: torch.device, local: bool = False) -> Rope:
        longest, most = int(rows.lengths.max()), self.max_model_len
        if most is None:
            most = self.spec.max_position_embeddings
            if self.spec.rope_settings.depends_on_length:
                raise ConfigError(
                    "max_model_len: expected the generator's, since the frequencies of rope_type="
                    f"{self.spec.rope_settings.type!r} depend on it, got none; push to the "
                    "generator first, or give patch max_model_len"
                )
        if longest > most:
            raise LimitError(
                f"input_ids: expected sequences of at most {most} tokens (max_model_len), "
                f"got one of {longest}"
            )
        known = self._ropes.get((device, local))
        if known is None or len(known[0]) < longest:
            positions = min(-(-longest // ROPE_STEP) * ROPE_STEP, most)
            frequencies = self.spec.rope(most, local=local)
            table = functions.rope_table(frequencies, positions, self.dtype, device)
            known = self._ropes[device, local] = table
        return known

    # ------------------------------------------------------------------------------------- weights
    def in_halves(self, qkv: list[Tensor], turned: int) -> list[Tensor]:
        """Returns weights or biases of q, k and v. The first `turned` rows of each head of q and k
        are in the order in which the kernels turn them."""
        spec = self.spec
        if not spec.rope_neighbours:
            return qkv
        return [*(pairs_apart(each, spec.head_dim, turned) for each in qkv[:2]), qkv[2]]

    # -------------------------------------------------------------------------------------- a pass
    def attend(self, attention: Any, index: int, x: Tensor, rows: Sequences, how: How) -> Tensor:
        spec = self.spec
        local = spec.local_rope_settings is not None and spec.sliding_windows[index] > 0
        cos, sin = self.rope(rows, x.device, local)
        turned = 2 * cos.shape[1]
        if spec.kv_lora_rank:
            attended = self.attend_latent(attention, index, x, (cos, sin), rows, how)
            return functions.linear(attended, weight_of(attention.o_proj), how=how)
        if hasattr(attention, "qkv_proj"):  # some families have all three in one module
            qkv = [attention.qkv_proj]
            weights = list(torch.split(weight_of(qkv[0]), self.heads[index].widths))
        else:
            qkv = [attention.q_proj, attention.k_proj, attention.v_proj]
            weights = list(map(weight_of, qkv))
            if spec.attention_gate:
                weights[0], gate = query_and_gate(attention, weights[0], spec)
            weights = self.in_halves(weights, turned)
        bias = (
            None
            if base_of(qkv[0]).bias is None
            else torch.cat(self.in_halves([base_of(m).bias for m in qkv], turned))
        )
        made = functions.linear(x, *weights, bias=bias, how=how)
        paths = [] if spec.qk_norm == "none" else [self.paths["q_norm"], self.paths["k_norm"]]
        norms = [attention.get_submodule(path.removeprefix("self_attn.")) for path in paths]
        q_norm, k_norm = [norm.weight for norm in norms] or (None, None)
        turn = (cos, sin) if self.spec.rope_layers[index] else (cos[:, :0], sin[:, :0])
        attended = functions.attention(
            made, q_norm, k_norm, turn, rows, self.heads[index],
            sinks=attention.sinks if spec.sinks else None, how=how,
        )  # fmt: skip
        if spec.attention_gate:
            gates = functions.linear(x, gate, how=how)
            attended = functions.sigmoid_gate(attended, gates, how=how)
        o = attention.o_proj
        return functions.linear(attended, weight_of(o), bias=base_of(o).bias, how=how)

    def attend_latent(
        self, attention: Any, index: int, x: Tensor, rope: Rope, rows: Sequences, how: How
    ) -> Tensor:
        has_low = self.spec.q_lora_rank > 0
        weights = Latent(
            weight_of(attention.q_a_proj) if has_low else None,
            attention.q_a_layernorm.weight if has_low else None,
            weight_of(attention.q_b_proj if has_low else attention.q_proj),
            weight_of(attention.kv_a_proj_with_mqa),
            attention.kv_a_layernorm.weight,
            weight_of(attention.kv_b_proj),
        )
        heads = self.heads[index]._replace(eps=LATENT_EPS)
        interleaved = self.spec.rope_neighbours
        return functions.latent_attention(
            x, weights, rope, rows, heads, interleaved=interleaved, how=how
        )

    def recur(self, net: Any, x: Tensor, rows: Sequences, how: How) -> Tensor:
        made = functions.linear(x, *delta_weights(net, self.spec), how=how)
        out = functions.delta_net(
            made, net.conv1d.weight, net.A_log, net.dt_bias, net.norm.weight, rows,
            delta_heads(self.spec), how=how,
        )  # fmt: skip
        return functions.linear(out, weight_of(net.out_proj), how=how)

    def mix_dense(self, mlp: Any, x: Tensor, how: How) -> Tensor:
        if self.spec.ungated:
            up = functions.linear(x, weight_of(mlp.up_proj), how=how)
            inner = functions.activate(up, self.spec.activation, how=how)
        else:
            if hasattr(mlp, "gate_up_proj"):  # some families have both in one module
                gate, up = weight_of(mlp.gate_up_proj).chunk(2)
            else:
                gate, up = weight_of(mlp.gate_proj), weight_of(mlp.up_proj)
            inner = functions.swiglu(x, gate, up, activation=self.spec.activation, how=how)
        return functions.linear(inner, weight_of(mlp.down_proj), how=how)

    def mix_experts(self, mlp: Any, index: int, x: Tensor, how: How) -> Tensor:
        spec = self.spec
        router, experts = mlp.gate if hasattr(mlp, "gate") else mlp.router, mlp.experts
        bias = router_bias(mlp, router)
        for name in ("gate", "wg"):  # the matrix may be in a submodule of the router
            router = getattr(router, name, router)
        gate_up, down, biases = experts.gate_up_proj, experts.down_proj, {}
        if spec.moe_bias:
            gate_up_bias = experts.gate_up_proj_bias
            if FAMILIES[spec.model_type].experts_interleaved:
                gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
                gate_up, gate_up_bias = (
                    torch.cat([both[:, ::2], both[:, 1::2]], 1) for both in (gate_up, gate_up_bias)
                )
            biases = {
                "logit_bias": router.bias,
                "gate_up_bias": gate_up_bias,
                "down_bias": experts.down_proj_bias,
            }
        made = functions.moe(
            x, router.weight, gate_up, down,
            top_k=spec.num_experts_per_tok, **spec.scoring,
            bias=bias, **biases, **spec.gating, how=how,
        )  # fmt: skip
        if self.call.wanted is not None and self.call.wanted.routed:
            self.call.wanted.experts[index] = made.ids
        if not spec.shared_intermediate_size:
            return made.out
        # The expert that all rows pass has one of these names.
        names = ("shared_expert", "shared_experts", "shared_mlp")
        expert = next(getattr(mlp, name) for name in names if hasattr(mlp, name))
        shared = self.mix_dense(expert, x, how)
        if not spec.shared_switch:
            return functions.add(made.out, shared, how=how)
        switch = functions.linear(x, weight_of(mlp.shared_expert_gate), how=how)
        return functions.add(made.out, shared, switch, how=how)

    def layer(self, layer: Any, index: int, hidden: Tensor, rows: Sequences) -> Tensor:
        spec, how = self.spec, self.how(hidden)

        def attend(x: Tensor) -> Tensor:
            if hasattr(layer, "linear_attn"):
                return self.recur(layer.linear_attn, x, rows, how)
            return self.attend(layer.self_attn, index, x, rows, how)

        def mix(x: Tensor) -> Tensor:
            if spec.is_moe_layer[index]:
                experts = layer.mlp if hasattr(layer, "mlp") else layer.block_sparse_moe
                return self.mix_experts(experts, index, x, how)
            return self.mix_dense(layer.mlp, x, how)

        def norms(*kinds: str) -> list[Tensor]:
            return [layer.get_submodule(self.paths[kind]).weight for kind in kinds]

        before = norms("input_norm", "pre_mlp_norm") if spec.norm_before else []
        after = norms("post_attn_norm", "post_mlp_norm") if spec.norm_after else []
        return functions.decoder_layer(
            hidden,
            before or after,
            attend,
            mix,
            spec.rms_norm_eps,
            norm_after=not before,
            also_after=after if before and after else None,
            zero_centered=spec.zero_centered_norms,
            scale=spec.residual_multiplier,
            how=how,
        )

"""The families of docs/models.md as out-of-tree classes for vLLM's own model runner
(VLLM_PLUGINS=rollmesh_model). vLLM schedules, batches, allocates the KV cache and samples; rollmesh
computes the forward pass, op by op in the order of csrc/model/model.c, so that the logits are
bit-identical to rm.Generator's. This gives rollmesh's numbers in an otherwise unchanged vLLM. The
worker (VLLM_PLUGINS=rollmesh) is faster, since it calls the C engine once for the whole pass.

Weights: the constructor allocates no weights on any device (vLLM also makes models on the meta
device), but fills the buffer of the RoPE table. A Generator that never generates stores the
weights: `load_weights` stages, checks and packs them like every sync (weight_updates.py), and the
ops read the serving copy.

    load_weights(pairs), any number of times ─► committed at the next forward pass or at a repeated
    name

vLLM's prefix cache does not distinguish versions of the weights: call reset_prefix_cache after each
set, as with vLLM's own models.

Each tensor parallel rank holds the shards of rollmesh's placement, with whole experts
(enable_expert_parallel) or sharded ones, and the ranks gather the columns that they compute
(columns.py). vLLM's runner cannot fail a single request, so a value that is not finite raises
NumericsError.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.distributed import get_tp_group
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.model_executor.layers.attention import Attention

from rollmesh import ops
from rollmesh.distributed import comm
from rollmesh.distributed.mesh import Mesh
from rollmesh.errors import ConfigError, NotSyncedError, NumericsError, StateError
from rollmesh.generator import Generator
from rollmesh.model.families import FAMILIES
from rollmesh.model.placement import placements
from rollmesh.model.spec import ModelSpec
from rollmesh.torch.arrays import array_of, tensor_of
from rollmesh.vllm.model.attention import HEAD_DIMS, RollmeshAttentionBackend, Rope
from rollmesh.vllm.model.columns import Columns
from rollmesh.vllm.model.logits import logits_with
from rollmesh.vllm.platforms import config
from rollmesh.vllm.weight_updates import WeightUpdates

Array = NDArray[Any]
STORE_PAGE = 16  # positions; the smallest KV cache of a generator
VOCAB_BLOCK = 128  # vocabulary entries per (max, sum) pair


class Block(torch.nn.Module):
    """One layer. It has no torch parameters: `weights` are views of the serving copy, replaced
    after each commit."""

    def __init__(self, model: Model, index: int, prefix: str):
        super().__init__()
        spec, here = model.spec, model.columns.here
        group = spec.num_attention_heads // spec.num_key_value_heads
        self.weights: Mapping[str, Array] = {}
        self.is_moe = spec.is_moe_layer[index]
        self.sizes = [
            len(heads) * spec.head_dim for heads in (here.heads, here.kv_heads, here.kv_heads)
        ]
        self.attn = Attention(
            len(here.heads),
            spec.head_dim,
            spec.attention_scale,
            num_kv_heads=len(here.kv_heads),
            cache_config=model.vllm_config.cache_config,
            prefix=prefix,
            attn_backend=RollmeshAttentionBackend,
            rope=model.rope if spec.rope_layers[index] else model.no_rope,
            weights=lambda: self.weights,
            group=group,
            head0=here.heads.start % group,
            all_squares=model.columns.all_squares if spec.qk_norm == "whole" else None,
        )

    def attend(self, model: Model, x: Array) -> Array:
        """Returns the output of attention after o_proj, [rows, hidden]. x: normed, [rows,
        hidden]."""
        w, here, spec = self.weights, model.columns, model.spec
        qkv = ops.gemm(x, w["qkv"], sum(self.sizes), bias=w.get("qkv_bias"), **model.how)
        attended = array_of(
            self.attn(*map(tensor_of, np.split(qkv, np.cumsum(self.sizes)[:-1], 1)))
        )
        if spec.attention_gate:
            gate = ops.gemm(x, w["attn_gate"], self.sizes[0], **model.how)
            attended = ops.sigmoid_gate(attended, gate, **model.how)
        attended = here.whole(attended, "heads", spec.head_dim)
        return self._to_hidden(model, attended, "o")

    def _to_hidden(self, model: Model, x: Array, name: str) -> Array:
        """Returns the product with a matrix whose columns are those of the hidden states."""
        here, bias = model.columns, self.weights.get(f"{name}_bias")
        out = ops.gemm(x, self.weights[name], len(here.here.hidden), bias=bias, **model.how)
        return here.whole(out, "hidden")

    def mix(self, model: Model, x: Array) -> Array:
        """Returns the output of the MLP or the mixture of experts, [rows, hidden]. x: normed,
        [rows, hidden]."""
        w, here = self.weights, model.columns
        if self.is_moe:
            return self._mix_experts(model, x)
        if not model.spec.ungated:
            return self._mix_gated(model, x, "gate_up", "down", "inner")
        up = ops.gemm(x, w["up"], len(here.here.inner), **model.how)
        inner = here.whole(ops.activate(up, model.spec.activation, out=up, **model.how), "inner")
        return self._to_hidden(model, inner, "down")

    def _mix_experts(self, model: Model, x: Array) -> Array:
        w, spec, here = self.weights, model.spec, model.columns
        experts, top_k = spec.num_experts, spec.num_experts_per_tok
        routing = ops.router(
            x, w["router"], experts, top_k, bias=w["router_bias"], **spec.scoring,
            logit_bias=w.get("router_logit_bias"), **model.how,
        )  # fmt: skip
        rows, group_rows, place = ops.permute(x, routing.ids, experts, **model.how)
        own = here.here.experts
        first, end = int(group_rows[own.start]), int(group_rows[own.stop])
        groups = group_rows[own.start : own.stop + 1] - np.int32(first)
        inner = ops.gemm_swiglu(
            rows[first:end],
            w["expert_gate_up"],
            len(here.here.expert_inner),
            bias=_by_expert(w.get("expert_gate_up_bias"), len(own)),
            group_rows=groups,
            **model.gated,
        )
        if not model.expert_parallel:
            inner = here.whole(inner, "expert_inner")
        y = ops.gemm(
            inner, w["expert_down"], len(here.here.expert_hidden),
            bias=_by_expert(w.get("expert_down_bias"), len(own)), group_rows=groups, **model.how,
        )  # fmt: skip
        if model.expert_parallel:
            y = here.joined(
                y,
                [
                    int(group_rows[place.experts.stop] - group_rows[place.experts.start])
                    for place in here.places
                ],
            )
        out = ops.combine(y, place, routing.ids, routing.gates, experts, **model.how)
        out = out if model.expert_parallel else here.whole(out, "expert_hidden")
        if not spec.shared_intermediate_size:
            return out
        shared = self._mix_gated(model, x, "shared_gate_up", "shared_down", "shared_inner")
        gate = (
            ops.gemm(x, w["shared_switch"], 1, **model.how).reshape(-1)
            if spec.shared_switch
            else None
        )
        both: Array = ops.rms_norm(out, None, eps=1.0, x=shared, x_gate=gate, **model.how)
        return both

    def _mix_gated(self, model: Model, x: Array, up: str, down: str, cut: str) -> Array:
        """Returns the output of a gated MLP. cut: the field of Placement that divides its inner
        columns."""
        w, here = self.weights, model.columns
        size = len(getattr(here.here, cut))
        inner = here.whole(ops.gemm_swiglu(x, w[up], size, **model.gated), cut)
        return self._to_hidden(model, inner, down)


def _by_expert(biases: Array | None, experts: int) -> Array | None:
    """Returns biases of experts as [experts, n]."""
    return None if biases is None else biases.reshape(experts, -1)


class Model(torch.nn.Module):
    """The base class of all families; vLLM creates the objects."""

    model_type = ""

    def __init__(self, *, vllm_config: Any, prefix: str = ""):
        super().__init__()
        self.vllm_config, self.config = vllm_config, vllm_config.model_config.hf_config
        self.spec = spec = config.model_spec(vllm_config)
        self.dtype = config.dtype_name(vllm_config.model_config.dtype)
        options, parallel = config.options(vllm_config), vllm_config.parallel_config
        self._refuse()
        mesh = config.mesh_of(parallel, vllm_config.model_config.is_moe)
        self.expert_parallel = mesh.ep > 1
        group = get_tp_group() if mesh.tp > 1 else None
        rank = group.rank_in_group if group else 0
        self.columns = Columns(
            group and group.cpu_group, rank, placements(spec, mesh.tp, 1, mesh.ep)
        )
        self.how: dict[str, Any] = {
            "threads": options.threads or torch.get_num_threads(),
            "isa": options.isa,
        }
        self.gated = self.how | spec.gating
        self._add_rope(vllm_config.model_config.max_model_len)
        self.layers = torch.nn.ModuleList(
            Block(self, i, f"{prefix}{'.' if prefix else ''}model.layers.{i}.self_attn.attn")
            for i in range(spec.num_hidden_layers)
        )
        self._store = _store(
            spec, mesh, comm.torch(group.cpu_group) if group else None, self.dtype, self.how
        )
        self._updates = WeightUpdates(self._store._engine, vllm_config, rank)
        self._served: int | None = None  # version of the layers' views
        self._ends: Mapping[str, Any] = {}  # embed, final_norm, lm_head

    def _refuse(self) -> None:
        parallel, spec = self.vllm_config.parallel_config, self.spec
        config.check(self.vllm_config)
        if spec.model_type != self.model_type:
            raise ConfigError(
                f"model_type: expected {self.model_type!r} for {type(self).__name__}, got "
                f"{spec.model_type!r}"
            )
        if parallel.data_parallel_size != 1:
            raise ConfigError(
                f"data_parallel_size: expected 1, got {parallel.data_parallel_size}; "
                "VLLM_PLUGINS=rollmesh has data parallel ranks"
            )
        if spec.kv_lora_rank:
            raise ConfigError(
                f"kv_lora_rank: expected a model without latent attention, got {spec.kv_lora_rank};"
                " VLLM_PLUGINS=rollmesh computes it"
            )
        if "delta_net" in spec.layer_kinds:
            raise ConfigError(
                f"layer_types: expected attention in all layers, got {spec.model_type} with linear "
                "attention; VLLM_PLUGINS=rollmesh computes it"
            )
        if spec.head_dim % HEAD_DIMS:
            raise ConfigError(
                f"head_dim: expected a multiple of {HEAD_DIMS}, got {spec.head_dim}; vLLM's KV "
                "blocks have no padding"
            )
        if any(spec.sliding_windows):
            raise ConfigError(
                f"expected a model without sliding windows, got {max(spec.sliding_windows)} "
                "positions"
            )

    def _add_rope(self, positions: int) -> None:
        inv_freq, scale = self.spec.rope(positions)
        cos, sin = map(
            torch.from_numpy, ops.rope_table(inv_freq, positions, scale=scale, dtype=self.dtype)
        )
        self.register_buffer("rope_cos", cos, persistent=False)
        self.register_buffer("rope_sin", sin, persistent=False)
        spec = self.spec
        options = self.how | {
            "eps": spec.rms_norm_eps,
            "zero_centered": spec.zero_centered_norms,
            "norm_last": spec.qk_norm_last,
        }
        cap = spec.attn_logit_softcapping
        self.rope = Rope(cos, sin, options, cap, self.how)
        self.no_rope = Rope(cos[:, :0], sin[:, :0], options, cap, self.how)

    # ------------------------------------------------------------------------------------- weights
    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> set[str]:
        """Stages tensors by their Hugging Face names, in one call or several; see
        WeightUpdates.load. A wrong tensor raises at once; a missing tensor raises
        IncompleteSyncError at the commit, and the old version keeps serving."""
        return self._updates.load(weights)

    @property
    def version(self) -> int | None:
        """Number of the serving version, or None."""
        return self._updates.weight_version()

    def commit_weights(self) -> int | None:
        """Commits the tensors that load_weights has staged, if any, and returns the serving
        version. Each forward pass calls this."""
        self._updates.commit_open_sync()
        if self._served != self.version:
            self._ends = self._store._engine.weights() or {}
            for layer, views in zip(self.layers, self._ends.get("layers", ()), strict=True):
                layer.weights = views
            self._served = self.version
        return self._served

    # -------------------------------------------------------------------------------------- a pass
    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        self._require_weights()
        return tensor_of(self._embed(input_ids.to(torch.int32).numpy()))

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Returns the hidden states after the final norm, [rows, hidden]. Raises NotSyncedError
        without weights, except in vLLM's profiling pass, for which it returns zeros."""
        if intermediate_tensors is not None or kwargs:
            raise ConfigError(
                "expected no intermediate_tensors and no other arguments, got "
                f"{', '.join(kwargs) or 'intermediate_tensors'}"
            )
        step = _step_of(self.layers[0].attn.layer_name)  # type: ignore[union-attr, arg-type]
        if self.commit_weights() is None and step is None:
            return torch.zeros(
                len(positions), self.spec.hidden_size, dtype=getattr(torch, self.dtype)
            )
        self._require_weights()
        if inputs_embeds is not None:
            residual = array_of(inputs_embeds).copy()
        elif input_ids is not None:
            residual = self._embed(input_ids.to(torch.int32).numpy())
        else:
            raise StateError("expected input_ids or inputs_embeds, got neither")
        hidden = self._run(residual)
        if step is not None and step.flags.any():
            raise NumericsError(
                f"keys or values of row {int(step.flags.argmax())} of a step of {step.num_rows} "
                "are not finite"
            )
        return tensor_of(hidden)

    def _run(self, residual: Array) -> Array:
        x: Array | None = None
        layer: Any
        for layer in self.layers:
            w = layer.weights
            x = layer.attend(self, self._norm(residual, w.get("input_norm"), x))
            x = self._norm_after(x, w.get("post_attn_norm"))
            x = layer.mix(self, self._norm(residual, w.get("pre_mlp_norm"), x))
            x = self._norm_after(x, w.get("post_mlp_norm"))
        return self._norm(residual, self._ends["final_norm"], x)

    def _norm(self, x: Array, weight: Array | None, added: Array | None = None) -> Array:
        """Adds `added` to x and returns the normed x; without a weight x itself."""
        spec = self.spec
        normed: Array = ops.rms_norm(
            x, weight, eps=spec.rms_norm_eps, x=added, x_scale=spec.residual_multiplier,
            zero_centered=spec.zero_centered_norms, **self.how,
        )  # fmt: skip
        return normed

    def _norm_after(self, x: Array, weight: Array | None) -> Array:
        return self._norm(x, weight) if self.spec.norm_after else x

    def _embed(self, ids: NDArray[np.int32]) -> Array:
        """Returns the embeddings of ids. Each rank looks up the entries that it owns (entry 0 for
        other ids); then each row is taken from the rank that owns its entry."""
        here, hidden = self.columns.here.vocab, self.spec.hidden_size
        local = np.where((ids >= here.start) & (ids < here.stop), ids - here.start, 0).astype(
            np.int32
        )
        packed = (len(here), hidden) if self.spec.tie_word_embeddings else None
        found = (
            ops.embed(
                local,
                self._ends["embed"],
                packed=packed,
                scale=self.spec.embed_scale(self.dtype),
                **self.how,
            )
            if here
            else np.zeros((len(ids), hidden), np.uint16 if self.dtype == "bfloat16" else np.float32)
        )
        if self.columns.size == 1:
            return found
        stops = np.array([place.vocab.stop for place in self.columns.places])
        rows = self.columns.joined(found, [len(ids)] * self.columns.size)
        return rows.reshape(self.columns.size, len(ids), hidden)[
            np.searchsorted(stops, ids, side="right"), np.arange(len(ids))
        ]

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Returns float32 [rows, vocab] on every rank, with the statistics for logprobs
        (logits.py)."""
        vocab, rows = self.spec.vocab_size, len(hidden_states)
        if self._served is None:
            return torch.zeros(rows, vocab)  # vLLM's profiling pass
        x, w, here = array_of(hidden_states.contiguous()), self._ends["lm_head"], self.columns
        if here.size == 1:
            head = ops.lm_head(x, w, vocab, **self.spec.logit_options, **self.how)
            logits = head.logits
        else:
            part = ops.lm_head_pairs(
                x, w, len(here.here.vocab), **self.spec.logit_options, **self.how
            )
            assert part.logits is not None
            logits = here.whole(part.logits, "vocab")
            pairs = here.joined(
                part.pairs, [-(-len(place.vocab) // VOCAB_BLOCK) for place in here.places]
            )
            head = ops.merge_pairs(pairs, **self.how)
        assert logits is not None
        if head.row_flags.any():
            raise NumericsError(
                f"logits of row {int(head.row_flags.argmax())} of {rows} are not finite"
            )
        # The logprob of the likeliest token is (max − max) − log Σ.
        _, best = ops.top_logprobs(logits, head.stats, 1, **self.how)
        return logits_with(
            torch.from_numpy(logits),
            torch.from_numpy(head.stats[:, 0]),
            torch.from_numpy(-best[:, 0]),
        )

    def _require_weights(self) -> None:
        if self._served is None:
            raise NotSyncedError("weights: expected a call of load_weights first, got none")


# One class for each family, under transformers' name, by which vLLM looks it up in this module.
for _name, _family in FAMILIES.items():
    globals()[_family.architecture] = type(
        _family.architecture, (Model,), {"model_type": _name, "__module__": __name__}
    )


def _step_of(layer_name: str) -> Any:
    """Returns the metadata of the current step of vLLM's runner, or None in its profiling pass."""
    if not is_forward_context_available():
        return None
    metadata = get_forward_context().attn_metadata
    return metadata[layer_name] if isinstance(metadata, dict) else metadata


def _store(
    spec: ModelSpec, mesh: Mesh, ranks: Any, dtype: str, how: Mapping[str, Any]
) -> Generator:
    """Returns a generator that only stores weights: one page of KV, one row of activations."""
    heads = max(len(place.kv_heads) for place in placements(spec, *mesh.degrees))
    page = 8 * spec.num_hidden_layers * heads * STORE_PAGE * (-(-spec.head_dim // 32) * 32)
    return Generator(
        spec, mesh=mesh, comm=ranks, dtype=dtype, max_model_len=STORE_PAGE, max_num_seqs=1,
        max_num_batched_tokens=1,
        block_size=STORE_PAGE, kv_cache_gib=(page + 1) / 2**30, enable_prefix_caching=False, **how,
    )  # fmt: skip

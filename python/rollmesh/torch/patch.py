"""A transformers model, of any family that a generator takes, whose forward pass is the
generator's.

    rm.torch.patch(model)                                   # C kernels forward, torch backward
    rm.torch.push(model, generator, version=step)           # sync_weights of the model's weights
    scored = rm.torch.logprobs(model, input_ids, attention_mask)
    rm.torch.unpatch(model)

A patched model is used as before: model(input_ids, attention_mask) gives logits (float32), with
gradients. What differs:

- A token's logits depend on the tokens before it and on nothing else. Positions count from 0 at the
  first token of each sequence, on which side the padding may be; position_ids that begin at 0 again
  make several sequences of one row of the batch.
- No KV cache: generate with the generator. Options that are not supported are refused
  (ConfigError), among them dropout in training.
- Rows of padding are not computed; their hidden states are zeros.

Every forward pass packs the weights that the model has at that time, and drops the packed copies.

It works under gradient checkpointing and accumulation, no_grad, inference_mode, and FSDP2 if
decoder layers or the whole model are sharded (fully_shard). torch.compile leaves the patched parts
uncompiled. LoRA (peft) is applied as merged weights, in the forward pass as in `push`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import cache, partial, wraps
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rollmesh import Generator, ModelSpec, SyncReport, _core, ops
from rollmesh.errors import (
    ConfigError,
    DTypeError,
    LimitError,
    RequestError,
    ShapeError,
    StateError,
    UnsupportedTensorError,
)
from rollmesh.model.families import FAMILIES
from rollmesh.runtime.arguments import boolean, choice, integer, thread_count
from rollmesh.runtime.messages import shown
from rollmesh.torch import functions, layers, packing, parts
from rollmesh.torch.arrays import check_tensor, check_tokens
from rollmesh.torch.functions import Heads, How
from rollmesh.torch.functions.attention import pairs_apart
from rollmesh.torch.functions.latent import EPS, Latent
from rollmesh.torch.fused_head import with_contract_logprobs
from rollmesh.torch.lora import base_of, in_use, state_of, weight_of
from rollmesh.torch.sequences import Sequences

# Arguments that repeat what position_ids tell.
PACKED_KEYS = frozenset(
    {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}
)
IGNORED_KEYS = frozenset({"return_dict", "num_items_in_batch"})
# Arguments that may be False.
SWITCHES = frozenset(
    {"use_cache", "output_attentions", "output_hidden_states", "output_router_logits"}
)
# Options that add noise in training, and the module of a layer that reads them.
NOISE = {
    "attention_dropout": "self_attn",
    "residual_dropout": "self_attn",
    "resid_pdrop": "resid_attn_dropout",
    "router_jitter_noise": "mlp",
}
GENERATE = "generate with a rollmesh generator, "
INSTEAD = {
    "cache": GENERATE,
    "past_key_values": GENERATE,
    "use_cache": GENERATE,
    "output_router_logits": "train without a router loss (TRL: router_aux_loss_coef=0.0), ",
}
MODEL, BASE, HEAD = -3, -2, -1  # indices of the patched modules before the layers, as in _modules
ROPE_STEP = 1024  # the rope table grows by so many positions


class Scored(NamedTuple):
    """Results for each token of a batch but the first: entry [b, t] is for input_ids[b, t + 1]
    given the tokens before it. It is 0 for padding, for the first token of a sequence, and for
    tokens that are not wanted."""

    logprobs: Tensor  # float32 [B, T − 1]
    entropy: Tensor | None  # float32 [B, T − 1], of the distribution that the token is drawn from
    routed_experts: Tensor | None  # int16 [B, T, MoE layers, top_k], −1 for padding


@dataclass(eq=False)
class _Wanted:
    """A request of `logprobs` to the forward pass, and its results."""

    ids: Tensor
    wanted: Tensor
    temperature: float
    entropy: bool
    routed: bool = False
    kept_tokens: Tensor | None = None
    rows: Any = None  # Sequences: all but the last token of each sequence
    places: Any = None  # in the flattened batch, of rows whose next token is wanted
    made: Any = None  # the output of lm_head
    written: list[Any] | None = None  # marks of that output
    read: list[Any] | None = None  # marks of the model's inputs
    experts: dict[int, Tensor] = field(default_factory=dict)  # of MoE layers, [rows, top_k]


class _Call(threading.local):
    """Notes of the patched modules of one model during a call, for each thread."""

    wanted: _Wanted | None = None  # the request of a call of `logprobs`
    passed: Any = None  # input and output of the last forward method of a part


@dataclass(eq=False)
class Patch:
    """The state that the patched modules of one model share."""

    model: Any  # afterwards a weak reference
    spec: ModelSpec
    dtype: torch.dtype
    isa: str | None
    threads: int | None
    max_model_len: int | None

    def __post_init__(self) -> None:
        spec = self.spec
        self.model = weakref.ref(self.model)
        self.call = _Call()
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
        self._ropes: dict[tuple[torch.device, bool], tuple[Tensor, Tensor]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Returns the arguments of __init__; a loaded model makes its rope tables again."""
        return {f.name: getattr(self, f.name) for f in fields(self)} | {"model": self.model()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Patch.__init__(self, **state)

    def __deepcopy__(self, memo: dict[int, Any]) -> Patch:
        """A copied model gets a new patch; a copied part of a model keeps the model's patch."""
        copied = memo.get(id(self.model()))
        made = self if copied is None else Patch(**self.__getstate__() | {"model": copied})
        memo[id(self)] = made
        return made

    def check(self) -> None:
        """Raises a StateError or ConfigError if the model does not compute what the kernels do."""
        inner: Any = self.model()
        for module, by in _modules(inner):
            if not isinstance(module, by) or module._rollmesh[0] is not self:
                raise StateError(
                    f"model: expected its parts as patch left them, got a {type(module).__name__} "
                    "that is not patched; "
                    "unpatch, change the model, and patch it again"
                )
        parts.check(inner, self.spec)
        for layer in inner.model.layers:
            for name, part in NOISE.items():
                if getattr(layer, part, layer).training and (
                    noise := getattr(inner.config, name, 0)
                ):
                    raise ConfigError(
                        f"{name}: expected 0 in training, got {noise}; a rollout drops nothing"
                    )

    def how(self, x: Tensor) -> How:
        return functions.how_for(x, self.isa, self.threads)

    def rope(
        self, rows: Sequences, device: torch.device, local: bool = False
    ) -> tuple[Tensor, Tensor]:
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

    def check_generator(self, generator: Generator) -> None:
        """Raises a ConfigError if the generator computes another function of the same weights."""
        spec, length, state = generator.spec, generator.max_model_len, generator.metrics()
        differ = parts.differences(self.spec, spec)
        for local, name in enumerate(parts.ROPES):
            mine = self.spec.rope(self.max_model_len or length, local=bool(local))
            theirs = spec.rope(length, local=bool(local))
            if np.array_equal(mine[0], theirs[0]) and mine[1] == theirs[1]:
                continue
            differ.append((name, getattr(self.spec, name), getattr(spec, name)))
            differ.append(("max_model_len", self.max_model_len, length))
        differ.append(("dtype", packing.name_of(self.dtype), generator.dtype))
        if generator.dtype == "bfloat16":  # in which cuda_mma computes other bits
            own, other = (str(isa).startswith("cuda_mma") for isa in (self.isa, state["family"]))
            differ.append(("cuda_mma", own, other))
        differ.append(("fast", False, not state["invariant"]))
        if said := [f"{name}={shown(a)} and {shown(b)}" for name, a, b in differ if a != b]:
            raise ConfigError(
                "generator: expected the settings of the patched model, got others (patch and "
                f"generator): {', '.join(said)}; make both with the same"
            )

    # ------------------------------------------------------------------------------------- weights
    def in_halves(self, qkv: list[Tensor], turned: int) -> list[Tensor]:
        """Weights or biases of q, k and v, with rows of q and k in the order that the kernels turn:
        the first `turned` of each head."""
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
                weights[0], gate = layers.query_and_gate(attention, weights[0], spec)
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
        self, attention: Any, index: int, x: Tensor, rope: Any, rows: Sequences, how: How
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
        heads = self.heads[index]._replace(eps=EPS)
        interleaved = self.spec.rope_neighbours
        return functions.latent_attention(
            x, weights, rope, rows, heads, interleaved=interleaved, how=how
        )

    def recur(self, net: Any, x: Tensor, rows: Sequences, how: How) -> Tensor:
        made = functions.linear(x, *layers.delta_weights(net, self.spec), how=how)
        out = functions.delta_net(
            made, net.conv1d.weight, net.A_log, net.dt_bias, net.norm.weight, rows,
            layers.delta_heads(self.spec), how=how,
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
        bias = layers.router_bias(mlp, router)
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

    def logits(self, head: Any, hidden: Tensor) -> Tensor:
        """hidden [1, rows, hidden] of the tokens that `logprobs` wants → [1, rows, 2]; or [B, T,
        hidden] → logits."""
        x, wanted = hidden.flatten(0, -2).to(self.dtype), self.call.wanted
        how, weight = self.how(x), weight_of(head)
        if wanted is None:
            logits = functions.lm_head(x, weight, **self.spec.logit_options, how=how)
            return logits.view(*hidden.shape[:-1], -1)
        targets = wanted.ids.reshape(-1).index_select(0, wanted.places + 1)
        made = functions.token_logprobs(
            x, weight, targets, kept_tokens=wanted.kept_tokens, temperature=wanted.temperature,
            entropy=wanted.entropy, **self.spec.logit_options, how=how,
        )  # fmt: skip
        entropy = made.logprobs if made.entropy is None else made.entropy
        wanted.made = torch.stack([made.logprobs, entropy], -1)
        wanted.written = parts.mark(wanted.made)
        return wanted.made[None]  # type: ignore[no-any-return]


# -------------------------------------------------------------------------------- patched modules
class _Part:
    """The base class of patched modules. Copies and pickles stay patched, although the class cannot
    be found by its name."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        made: Any = super().__reduce_ex__(protocol)
        cls: Any = type(self)
        return (
            (_new_part, (cls._rollmesh_base, cls.__bases__[0]), *made[2:])
            if "_rollmesh_base" in vars(cls)
            else made
        )


class _Model(_Part):
    """A …ForCausalLM. Its forward method is transformers', or the one that a trainer of TRL
    sets."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(
            name, with_contract_logprobs(self, value, _score_labels) if name == "forward" else value
        )


class _ModelOfLogits(_Model):
    """A …ForCausalLM whose own forward method scales or caps logits. Here the kernels of lm_head do
    that, so this forward method returns their logits unchanged."""

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        logits_to_keep: Any = 0,
        **others: Any,
    ) -> Any:
        from transformers.modeling_outputs import CausalLMOutputWithPast

        me: Any = self
        given = {"attention_mask": attention_mask, "position_ids": position_ids, **others}
        hidden = me.model(input_ids=input_ids, **given).last_hidden_state
        is_count = isinstance(logits_to_keep, int)
        kept = slice(-logits_to_keep, None) if is_count else logits_to_keep
        logits, loss = me.lm_head(hidden[:, kept]), None
        if labels is not None:
            total = others.get("num_items_in_batch")
            vocab = me.config.vocab_size
            loss = me.loss_function(logits, labels, vocab, num_items_in_batch=total)
        output = CausalLMOutputWithPast(loss=loss, logits=logits)
        return output.to_tuple() if others.get("return_dict") is False else output


class _Rows(_Part):
    """An embedding whose own forward method scales the rows. Here the patched model scales them
    with the generator's kernels."""

    def forward(self, input: Tensor) -> Tensor:
        return torch.nn.Embedding.forward(self, input)  # type: ignore[arg-type]


class _Called(_Part):
    """A part whose hooks fire. A hook that changes the input or output raises a ConfigError."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        me: Any = self
        patch, index = me._rollmesh
        patch.call.passed, before = None, parts.mark([*args, *options.values()])
        made = super().__call__(*args, **options)  # type: ignore[misc]
        if patch.call.passed != (before, parts.mark(made)):
            name = {BASE: "model", HEAD: "lm_head"}.get(index, f"model.layers.{index}")
            raise ConfigError(
                f"{name}: expected its own forward method, and hooks that change no tensor, "
                "got others; remove them, or unpatch"
            )
        return made


def _watched(forward: Any) -> Any:
    """Makes the `forward` of a _Called record its input and output."""

    @wraps(forward)
    def watched(self: Any, *args: Any, **options: Any) -> Any:
        before = parts.mark([*args, *options.values()])
        made = forward(self, *args, **options)
        self._rollmesh[0].call.passed = before, parts.mark(made)
        return made

    return watched


class _Base(_Called):
    """The forward pass of a …Model."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @_watched
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        **others: Any,
    ) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPast, MoeModelOutputWithPast

        me: Any = self
        patch: Patch = me._rollmesh[0]
        known = IGNORED_KEYS | (PACKED_KEYS if position_ids is not None else frozenset())
        for name, value in others.items():
            is_off = value is None or (value is False and name in SWITCHES)
            if name not in known and not is_off:
                what = INSTEAD.get(name, "")
                raise ConfigError(
                    f"{name}: expected none with a patched model, got {shown(value)}; {what}or "
                    "unpatch"
                )
        patch.check()
        input_ids = _check_ids(input_ids)
        batch, steps = input_ids.shape
        rows = Sequences.of_batch((batch, steps), attention_mask, position_ids)
        wanted = patch.call.wanted
        if wanted is not None:
            wanted.read = parts.mark([input_ids, attention_mask, position_ids])
            rows = wanted.rows = rows.without_last()
            if not rows.num_rows:
                raise RequestError(
                    "input_ids: expected a sequence of at least 2 tokens, got 1 token in each"
                )
        ids = rows.pick(input_ids)
        check_tokens("input_ids", ids, 0, patch.spec.vocab_size)
        hidden = me.embed_tokens(ids).to(patch.dtype)  # copies bits, as torch does
        how, scale = patch.how(hidden), patch.spec.embed_scale(packing.name_of(patch.dtype))
        if scale is not None:
            hidden = functions.add(torch.zeros_like(hidden), hidden, scale=scale, how=how)
        for layer in me.layers:
            hidden = layer(hidden, rows=rows)
        hidden = functions.rms_norm(
            hidden, me.norm.weight, patch.spec.rms_norm_eps,
            zero_centered=patch.spec.zero_centered_norms, how=how,
        )  # fmt: skip
        rows.forget_caches()
        if wanted is None:
            hidden = rows.pad(hidden)
        else:
            places = rows.rows.to(hidden.device)
            is_chosen = wanted.wanted.reshape(-1).index_select(0, places + 1)
            chosen = torch.nonzero(is_chosen)[:, 0]
            wanted.places = places.index_select(0, chosen)
            hidden = hidden.index_select(0, chosen)[None]
        has_experts = FAMILIES[patch.spec.model_type].has_experts
        output = MoeModelOutputWithPast if has_experts else BaseModelOutputWithPast
        return output(last_hidden_state=hidden)


class _Layer(_Called):
    """The forward pass of a decoder layer over packed rows."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @_watched
    def forward(self, hidden_states: Tensor, rows: Sequences | None = None) -> Tensor:
        me: Any = self
        patch, index = me._rollmesh
        if rows is None:
            raise StateError("expected a patched decoder layer to be called by its model")
        return patch.layer(me, index, hidden_states, rows)  # type: ignore[no-any-return]


class _Head(_Called):
    """lm_head."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @_watched
    def forward(self, input: Tensor) -> Tensor:
        me: Any = self
        patch: Patch = me._rollmesh[0]
        return patch.logits(me, input)


@cache
def _patched(cls: Any, by: Any) -> type:
    """A subclass with the same name: FSDP's and transformers' rules go by it."""
    return type(
        cls.__name__,
        (by, cls),
        {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "_rollmesh_base": cls},
    )


def _new_part(cls: Any, by: Any) -> Any:
    return object.__new__(_patched(cls, by))


def _check_ids(given: Any) -> Tensor:
    ids = check_tensor("input_ids", given)
    if ids.ndim != 2:
        raise ShapeError(f"input_ids: expected a tensor [batch, tokens], got {tuple(ids.shape)}")
    if ids.dtype not in (torch.int64, torch.int32):
        raise DTypeError(f"input_ids: expected torch.int64 or torch.int32, got {ids.dtype}")
    return ids


# ----------------------------------------------------------------------------------------- public
def _causal_lm(model: Any) -> Any:
    """The transformers model inside a peft model, or the model itself."""
    inner = getattr(model, "_orig_mod", model)  # torch.compile
    inner = getattr(inner, "module", inner)  # DDP
    inner = inner.get_base_model() if hasattr(inner, "get_base_model") else inner  # peft
    names = [cls.__name__ for cls in type(inner).__mro__]
    known = [family.architecture for family in FAMILIES.values()]
    if not any(name in names for name in known):
        raise ConfigError(
            f"model: expected a transformers {' or '.join(known)}, or a peft model of one, got a "
            f"{type(model).__name__}"
        )
    return inner


def _patch_of(model: Any, instead: str = "") -> Patch:
    inner = _causal_lm(model)
    if not hasattr(inner.model, "_rollmesh"):
        raise StateError(
            "model: expected a patched model, got one that is not; call rollmesh.torch.patch "
            f"first{instead}"
        )
    return inner.model._rollmesh[0]  # type: ignore[no-any-return]


def patch(
    model: Any,
    *,
    dtype: str | None = None,
    isa: str | None = None,
    threads: int | None = None,
    max_model_len: int | None = None,
) -> Any:
    """Makes `model` compute its forward pass by the generator's kernels; returns it.

    model          a transformers model of a family of docs/models.md, on the CPU or a CUDA device,
                   or a peft model of one
    dtype          of activations and of the weights as they are used: "bfloat16" or "float32";
                   None: the model's. With float32 weights and "bfloat16" the optimizer has float32
                   masters
    isa, threads   as in rollmesh.ops; threads None: torch's
    max_model_len  most tokens of a sequence; None: max_position_embeddings. The frequencies of the
                   rope types dynamic and longrope depend on it. For these, None takes the value of
                   the first generator that weights are pushed to

    ConfigError: a model or a config option that a generator refuses. StateError: the model is
    patched already."""
    inner = _causal_lm(model)
    if hasattr(inner.model, "_rollmesh"):
        raise StateError(
            "model: expected one that is not patched, got a patched one; unpatch it first"
        )
    spec = ModelSpec.from_hf(inner.config)
    parts.check(inner, spec)
    weight = inner.model.embed_tokens.weight
    known = "bfloat16" if weight.dtype == torch.bfloat16 else "float32"
    used = getattr(
        torch, choice("dtype", known if dtype is None else dtype, ("bfloat16", "float32"))
    )
    most = None if max_model_len is None else integer("max_model_len", max_model_len, 1, 2**31 - 1)
    if threads is not None:
        thread_count(threads)
    made = Patch(inner, spec, used, isa, threads, most)
    if not weight.is_cuda:
        ops.kernels(isa)  # ConfigError if this processor lacks it
    for index, (module, by) in enumerate(_modules(inner), MODEL):
        own: Any = type(module)
        module._rollmesh = (made, index)
        module.__class__ = _patched(own, by)
    if "forward" in vars(inner):
        inner.forward = inner.forward
    return model


def _modules(inner: Any) -> Iterator[tuple[Any, Any]]:
    keys = ("final_logit_softcapping", "logits_scaling")
    yield inner, _ModelOfLogits if any(hasattr(inner.config, key) for key in keys) else _Model
    yield inner.model, _Base
    yield inner.lm_head, _Head
    for layer in inner.model.layers:
        yield layer, _Layer
    rows = in_use(inner.model.embed_tokens)
    if hasattr(rows, "embed_scale"):
        yield rows, _Rows


def unpatch(model: Any) -> Any:
    """Restores the model's forward pass and returns the model. StateError: it is not patched."""
    inner = _causal_lm(model)
    _patch_of(model)
    if any("_rollmesh_base" not in vars(type(module)) for module, _ in _modules(inner)):
        raise StateError(
            "model: expected one that was not wrapped after patch, got one that fully_shard has "
            "wrapped"
        )
    for module, _ in _modules(inner):
        module.__class__ = module.__class__._rollmesh_base
        del module._rollmesh
    return model


def state_dict(model: Any) -> dict[str, Tensor]:
    """The model's weights by their Hugging Face names, for a weight sync: with LoRA the merged
    ones, without a graph."""
    inner = _causal_lm(model)
    patched = getattr(inner.model, "_rollmesh", None)
    parts.check(inner, patched[0].spec if patched else ModelSpec.from_hf(inner.config))
    with torch.no_grad():
        return state_of(inner)


def push(
    model: Any, generator: Generator, version: int | None = None, **options: Any
) -> SyncReport:
    """Calls generator.sync_weights with a patched model's weights (`state_dict`) and these options;
    cast is True. Model and generator share no memory, so a forward pass may run while another
    thread syncs, sleeps or closes the generator."""
    instead = (
        ", or generator.sync_weights(model.state_dict(), cast=True) sends the weights of any other"
    )
    made = _patch_of(model, instead)
    if not isinstance(generator, Generator):
        raise UnsupportedTensorError(
            f"generator: expected a rollmesh.Generator, got a {type(generator).__name__}"
        )
    made.check()
    made.check_generator(generator)
    report = generator.sync_weights(state_dict(model), version, **({"cast": True} | options))
    if made.max_model_len is None and made.spec.rope_settings.depends_on_length:
        made.max_model_len = generator.max_model_len
    return report


class WeightUse(NamedTuple):
    """Result of `weight_use`."""

    shared: int  # 0
    kept: int  # 0
    packed: int  # matrices that a forward pass packs
    version: int | None  # None


def weight_use(model: Any) -> WeightUse:
    """Deprecated: every forward pass packs all matrices, and drops the packed copies."""
    spec = _patch_of(model).spec
    experts = 5 + 2 * bool(spec.shared_intermediate_size) + spec.shared_switch
    return WeightUse(0, 0, 1 + sum(experts if is_moe else 4 for is_moe in spec.is_moe_layer), None)


def forget(model: Any) -> None:
    """Deprecated: does nothing, since a forward pass keeps no packed weights."""
    _patch_of(model)


def logprobs(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    position_ids: Tensor | None = None,
    wanted: Tensor | None = None,
    kept_tokens: Tensor | None = None,
    temperature: float = 1.0,
    entropy: bool = False,
    routed_experts: bool = False,
) -> Scored:
    """Logprobs of the tokens of a batch [B, T] under a patched model, with gradients: those that a
    rollout recorded for them, bit for bit, on the same weights. At temperature 1 they are
    `logprobs`, at any other, and with kept_tokens, `sampling_logprobs`.

    attention_mask, position_ids  as the model takes them
    wanted                        bool [B, T]: the tokens whose logprob is asked for, such as
                                  completions; None: all
    kept_tokens                   integers [n, k], a row for each of the n wanted tokens in their
                                  order: what the filters (top_p, top_k, min_p) of its draw kept, as
                                  SamplingParams(kept_tokens=True) records it. Logprobs and entropy
                                  are of the distribution over these tokens; the first token of a
                                  sequence has no row
    routed_experts                also the experts of each token (MoE)"""
    made = _patch_of(model)
    input_ids = _check_ids(input_ids)
    wanted = torch.ones_like(input_ids) if wanted is None else wanted
    if not isinstance(wanted, Tensor) or wanted.shape != input_ids.shape:
        raise ShapeError(
            f"wanted: expected a tensor of shape {tuple(input_ids.shape)}, got "
            f"{shown(getattr(wanted, 'shape', wanted))}"
        )
    given = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}
    return _score(
        made,
        model,
        _Wanted(
            input_ids,
            wanted,
            temperature,
            entropy,
            boolean("routed_experts", routed_experts),
            kept_tokens,
        ),
        given,
    )


def _score_labels(
    inner: Any, temperature: float, entropy: bool, labels: Tensor, given: dict[str, Any]
) -> Scored:
    """Computes `logprobs` of labels instead of tokens; −100 means no label. It calls the class's
    forward method: the one that TRL sets on the instance would, in a copy of the model, compute
    with the original model's weights."""
    if labels.shape != given["input_ids"].shape:
        raise ShapeError(
            f"labels: expected a tensor of shape {tuple(given['input_ids'].shape)}, got "
            f"{shown(labels.shape)}"
        )
    asked = _Wanted(labels, labels != -100, temperature, entropy)
    return _score(_patch_of(inner), partial(type(inner).forward, inner), asked, given)


def _score(made: Patch, forward: Any, asked: _Wanted, given: dict[str, Any]) -> Scored:
    with _scoring(made, asked):
        found = forward(**(given | {"use_cache": False, "return_dict": True})).logits[0]
        names = ("input_ids", "attention_mask", "position_ids")
        if asked.read != parts.mark([given.get(name) for name in names]):
            raise ConfigError(
                f"{', '.join(names)}: expected those of this call, got others; "
                "remove the hook or wrapper that changes them"
            )
        by_head = asked.made
        same = found.shape == by_head.shape and torch.allclose(
            found, by_head, rtol=0, atol=0, equal_nan=True
        )
        if not same or parts.mark(by_head) != asked.written:
            raise ConfigError(
                "logits: expected those of the patched lm_head, got others; "
                "remove the hook or wrapper that changes them"
            )
    size, (batch, steps) = asked.ids.numel(), asked.ids.shape

    def spread(values: Tensor) -> Tensor:
        return values.new_zeros(size).index_copy(0, asked.places, values).view(batch, steps)[:, :-1]

    experts = None
    if asked.routed and asked.experts:
        ids = torch.stack([asked.experts[i] for i in sorted(asked.experts)], 1).short()
        experts = (
            ids.new_full((size, *ids.shape[1:]), -1)
            .index_copy(0, asked.rows.rows.to(ids.device), ids)
            .view(batch, steps, *ids.shape[1:])
        )
    return Scored(spread(found[:, 0]), spread(found[:, 1]) if asked.entropy else None, experts)


@contextmanager
def _scoring(made: Patch, wanted: _Wanted) -> Iterator[None]:
    if made.call.wanted is not None:
        raise StateError("expected one call of logprobs at a time, got one inside another")
    made.call.wanted = wanted
    try:
        yield
    finally:
        made.call.wanted = None

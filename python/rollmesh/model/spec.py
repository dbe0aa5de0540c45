"""The description of a model. hf_config.py reads it from a Hugging Face config of a family in
families.py, torchtitan.py from a config of torchtitan."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollmesh import _core
from rollmesh.errors import ConfigError
from rollmesh.model import rope as _rope
from rollmesh.model import torchtitan as _torchtitan
from rollmesh.model.families import FAMILIES
from rollmesh.model.family import LAYER_KINDS, QK_NORMS, WQ_ROWS
from rollmesh.model.hf_config import (
    by_keys,
    checked_config,
    eos_ids,
    layer_kinds,
    spec_fields,
    tuple_of,
)
from rollmesh.model.reader import MAX_POSITION, Reader
from rollmesh.runtime.arguments import ACTIVATIONS, choice, fields_of
from rollmesh.runtime.messages import shown


class Parameter(NamedTuple):
    """One tensor of a checkpoint."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model. Made by `from_hf` or `from_torchtitan`; compares and hashes by value.

    The names are the config's. A dense model has 0 in num_experts, num_experts_per_tok and
    moe_intermediate_size; a model without dense layers has 0 in intermediate_size. router_bias:
    every sync has to bring the routers' biases; else they are optional.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    norm_topk_prob: bool
    # "none", "head": each head of q and k is normed, "whole": all heads of q, of k, together
    qk_norm: str
    norm_after: bool  # norms are of a block's output, before it is added
    attention_bias: bool  # of q, k and v
    o_bias: bool
    tie_word_embeddings: bool
    rms_norm_eps: float
    max_position_embeddings: int
    rope_settings: _rope.Rope
    is_moe_layer: tuple[bool, ...]  # of each layer
    rope_layers: tuple[bool, ...]  # of each layer: rope rotates its q and k
    sliding_windows: tuple[int, ...]  # of each layer, positions; 0: full attention
    eos_token_ids: tuple[int, ...]
    router_bias: bool = False
    score_func: str = "softmax"  # of the router; or "sigmoid"
    n_group: int = 1  # groups of experts, of which a row may choose from topk_group
    topk_group: int = 1
    routed_scaling_factor: float = 1.0  # of gates
    shared_intermediate_size: int = 0  # of the expert that all rows of a MoE layer pass; 0: none
    shared_switch: bool = False  # it is scaled by a row's sigmoid
    # The activation of MLPs and experts; or "gelu_tanh", "gelu" (by erf), "relu2" (the square of
    # ReLU), "swiglu_oai" (gpt-oss's, with swiglu_alpha and swiglu_limit).
    activation: str = "silu"
    ungated: bool = False  # dense MLPs have no gate: down(activation(up(x)))
    norm_before: bool = True  # norms are of a block's input; with norm_after of both
    layer_kinds: tuple[str, ...] = ()  # one of LAYER_KINDS for each layer; (): all "attention"
    sinks: bool = False  # attention has a sink for each head
    moe_bias: bool = False  # the router's logits and the experts have biases
    swiglu_alpha: float = 1.702  # of the activation "swiglu_oai"
    swiglu_limit: float = 7.0
    topk_sum_min: float | None = None  # with norm_topk_prob and softmax: lower bound of the divisor
    zero_centered_norms: bool = False  # norms multiply by 1 + weight
    qk_norm_last: bool = False  # q and k are normed after rope
    attention_gate: bool = False  # a sigmoid of a layer's input scales attention's output
    # Latent attention (kv_lora_rank 0: none). The cache has one kv head: the rotated key, then
    # kv_lora_rank elements. head_dim is the sum. q_lora_rank 0: q is computed from a layer's input.
    kv_lora_rank: int = 0
    q_lora_rank: int = 0
    qk_nope_head_dim: int = 0  # elements of a head of q that rope does not rotate
    v_head_dim: int = 0  # elements of a head of attention's output
    # False: rope rotates halves, in a family whose rope rotates neighbours.
    rope_interleave: bool = True
    local_rope_settings: _rope.Rope | None = None  # of layers with a window
    attention_multiplier: float | None = None  # of attention's scores; None: head_dim ** -0.5
    attn_logit_softcapping: float | None = None  # scores are cap · tanh(score / cap); None: no cap
    final_logit_softcapping: float | None = None  # the same for logits
    embedding_multiplier: float | None = None  # None: 1, likewise for the next two factors
    rounds_embedding_multiplier: bool = False  # embedding_multiplier is rounded to the dtype
    residual_multiplier: float | None = None  # of blocks' outputs, before they are added
    logits_scaling: float | None = None  # logits are divided by it
    # Sizes of layers of the kind "delta_net", under the config's names; 0 without such layers.
    linear_num_key_heads: int = 0
    linear_num_value_heads: int = 0
    linear_key_head_dim: int = 0
    linear_value_head_dim: int = 0
    linear_conv_kernel_dim: int = 0

    def __post_init__(self) -> None:
        c = Reader({f.name: getattr(self, f.name) for f in fields(self)})
        for f in fields(self):
            if f.type == "float | None" and c.given(f.name):
                c.positive(f.name, 1.0)
        _core.placement(self.engine_values(1), 1, 1, 1)  # ConfigError by the engine's rules

    @staticmethod
    def from_hf(config: Any, *, ignore: tuple[str, ...] = ()) -> ModelSpec:
        """From a transformers config object, its dict, a folder with config.json, or that file. Of
        a folder the ends that its generation_config.json lists are among eos_token_ids: chat models
        have more there than in config.json.

        `ignore` names keys of the config that do not matter; the model is read without them.
        "rope_scaling.attn_factor" is a key of the table rope_scaling. Names that the config does
        not have are allowed. Raises ConfigError naming the rule that is broken or the option that
        is not supported, FormatError for a file that is not a JSON object. An error about unknown
        keys has them in its attribute `names`, as `ignore` takes them.
        """
        values = checked_config(config, ignore)
        try:
            return ModelSpec(**spec_fields(values))
        except ConfigError as error:
            raise ConfigError(by_keys(str(error), FAMILIES[values["model_type"]])) from None

    @staticmethod
    def from_torchtitan(model: Any) -> ModelSpec:
        """From torchtitan's Llama3Model.Config, Qwen3Model.Config or Qwen35Model.Config, dense or
        with experts, or the ModelSpec that has it (`model_registry(flavor)`). Of a Qwen3.5 the
        text model is read.

        ConfigError names every setting that the engine does not compute (a window, settings that
        differ among layers, forced routing, …), and every class and field that was not in
        torchtitan 0.3.0. Where load_balance_coeff is set, every sync has to bring expert_bias_E:
        the module's own state_dict() has it, torchtitan's to_hf drops it. End tokens are not in the
        config: give eos_token_ids to Generator.
        """
        values, beyond = _torchtitan.hf_config(model)
        return replace(ModelSpec.from_hf(values), **beyond)

    def rope(self, max_model_len: int, *, local: bool = False) -> tuple[NDArray[np.float32], float]:
        """(inv_freq [rotary_dim / 2] with torch's bits, the factor on cos and sin) of a generator
        for max_model_len positions. local: those of layers with a window, if they differ."""
        settings = (self.local_rope_settings if local else None) or self.rope_settings
        return settings.frequencies(max_model_len)

    @property
    def rope_neighbours(self) -> bool:
        """Whether rope rotates neighbouring elements in the rows of q and k of a checkpoint."""
        return FAMILIES[self.model_type].rope_neighbours and self.rope_interleave

    @property
    def value_dim(self) -> int:
        """The number of elements of V of a kv head in the cache."""
        return self.kv_lora_rank or self.head_dim

    @property
    def attended_width(self) -> int:
        """The number of elements of attention's output in a row."""
        return self.num_attention_heads * (self.v_head_dim or self.head_dim)

    @property
    def attention_scale(self) -> float:
        own = self.attention_multiplier
        return 1.0 / math.sqrt(self.head_dim) if own is None else own

    @property
    def logit_options(self) -> dict[str, Any]:
        """Scale and cap of logits, as arguments of ops.lm_head."""
        divisor = self.logits_scaling
        return {
            "scale": None if divisor is None else 1.0 / divisor,
            "softcap": self.final_logit_softcapping,
        }

    def embed_scale(self, dtype: str) -> float | None:
        """The factor of embeddings of a model of this dtype."""
        factor = self.embedding_multiplier
        if factor is None or not self.rounds_embedding_multiplier or dtype != "bfloat16":
            return factor
        word = int(np.float32(factor).view(np.uint32))
        return float(np.uint32((word + 0x7FFF + (word >> 16 & 1)) & 0xFFFF0000).view(np.float32))

    @property
    def gating(self) -> dict[str, Any]:
        """The activation, as arguments of ops.gemm_swiglu and torch.functions.moe."""
        return {
            "activation": self.activation,
            "alpha": self.swiglu_alpha,
            "limit": self.swiglu_limit,
        }

    @property
    def scoring(self) -> dict[str, Any]:
        """How routers choose and weigh, as arguments of ops.router and torch.functions.moe."""
        return {
            "renormalize": self.norm_topk_prob,
            "score": self.score_func,
            "num_groups": self.n_group,
            "top_groups": self.topk_group,
            "route_scale": self.routed_scaling_factor,
            "min_sum": self.topk_sum_min or 0.0,
        }

    def engine_values(self, max_model_len: int) -> SimpleNamespace:
        """Returns the spec as ext/spec.c reads it: the fields of the ModelSpec by name, and other
        values."""
        inv_freq, scale = self.rope(max_model_len)
        family = FAMILIES[self.model_type]
        own = (
            (("q_b", "self_attn.q_proj.weight"),)
            if self.kv_lora_rank and not self.q_lora_rank
            else ()
        )
        local = self.local_rope_settings and self.rope(max_model_len, local=True)
        ropes = [
            int(rotates) + bool(rotates and local and window)
            for rotates, window in zip(self.rope_layers, self.sliding_windows, strict=True)
        ]
        kinds = map(LAYER_KINDS.index, self.layer_kinds or ["attention"] * len(self.is_moe_layer))
        layers = zip(self.is_moe_layer, ropes, self.sliding_windows, kinds, strict=True)
        return SimpleNamespace(
            spec=self,
            sigmoid_scores=self.score_func == "sigmoid",
            qk_norm=QK_NORMS.index(self.qk_norm),
            wq_rows=WQ_ROWS.index(family.wq_rows),
            rope_neighbours=self.rope_neighbours,
            experts_interleaved=family.experts_interleaved,
            activation=ACTIVATIONS.index(self.activation),
            rope_scale=scale,
            inv_freq=inv_freq,  # float32, half of the elements of a head that rope rotates
            # int64 [num_hidden_layers][is MoE, rope of q and k (0: none, 1: rope_settings, 2:
            # local_rope_settings), window (0: none), kind]
            layers=np.array(list(layers), np.int64),
            # (kind of parameter, the family's own name for it)
            names=(*family.names.items(), *own),
            min_sum=self.scoring["min_sum"],  # lower bound of the divisor of gates; 0: none
            local_rope_scale=local[1] if local else 1.0,
            local_inv_freq=local[0] if local else None,
            # Factors and caps of numbers; 0: none.
            attention_scale=self.attention_multiplier or 0.0,
            attention_softcap=self.attn_logit_softcapping or 0.0,
            logits_softcap=self.final_logit_softcapping or 0.0,
            embed_scale=self.embed_scale("float32") or 0.0,
            embed_scale_bf16=self.embed_scale("bfloat16") or 0.0,
            residual_scale=self.residual_multiplier or 0.0,
            logits_scale=self.logit_options["scale"] or 0.0,
            gate_in_q=family.gate_in_q,
            delta_alternates=family.delta_alternates,
        )

    def parameters(self) -> Iterator[Parameter]:
        """The tensors of a checkpoint, by layer; those of experts one by one, gate and up apart
        also where a checkpoint has them in one tensor (GLM-4); the parts of kv_b_proj apart, keys
        transposed in each head; a tied lm_head and router biases are left out."""
        for _, name, shape in _core.parameters(self.engine_values(1)):
            yield Parameter(name, shape)

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(shape) for _, shape in self.parameters())

    def kv_elements_per_token(self) -> int:
        """Elements of K and V that one token adds over all layers, without the padding of the
        cache's layout."""
        of_head = self.head_dim + self.value_dim
        return self.num_attention_layers * self.num_key_value_heads * of_head

    @property
    def num_attention_layers(self) -> int:
        """The layers with KV pages."""
        return self.num_hidden_layers - self.layer_kinds.count("delta_net")

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; `from_dict` is the way back."""
        return json.loads(json.dumps(asdict(self)))  # type: ignore[no-any-return]

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> ModelSpec:
        """Creates a spec from to_dict's values. Fields that a later version added may be missing.
        Raises ConfigError, which names the field."""
        known = fields_of(ConfigError, "spec", ModelSpec, values)
        c = Reader(
            {**{f.name: f.default for f in fields(ModelSpec) if f.default is not MISSING}, **known}
        )
        of_type: dict[Any, Callable[[str], Any]] = {
            "int": lambda name: c.integer(name, int(name in _AT_LEAST_1)),
            "bool": lambda name: c.boolean(name, False),
            "float": lambda name: c.positive(name, 1.0),
            "float | None": lambda name: c.positive(name, 1.0) if c.given(name) else None,
        }
        read = {f.name: of_type[f.type](f.name) for f in fields(ModelSpec) if f.type in of_type}
        read |= {key: choice(key, c.values[key], words) for key, words in _CHOICES.items()}
        layers = read["num_hidden_layers"]
        for key in ("is_moe_layer", "rope_layers"):
            read[key] = tuple_of(
                key, c.values[key], layers, "a bool", lambda value: isinstance(value, bool)
            )
        whole = f"an integer in [0, {MAX_POSITION}]"
        read["sliding_windows"] = tuple_of(
            "sliding_windows",
            c.values["sliding_windows"],
            layers,
            whole,
            lambda value: type(value) is int and 0 <= value <= MAX_POSITION,
        )
        read["layer_kinds"] = layer_kinds(c.values["layer_kinds"], layers)
        eos = c.values["eos_token_ids"]
        if not isinstance(eos, (list, tuple)):
            raise ConfigError(f"eos_token_ids: expected a list of token ids, got {shown(eos)}")
        read["eos_token_ids"] = eos_ids(eos, read["vocab_size"])
        for key in ("rope_settings", "local_rope_settings"):
            if c.given(key) or key == "rope_settings":
                read[key] = _rope_from_dict(
                    c.values[key], read["head_dim"], read["max_position_embeddings"]
                )
        spec = ModelSpec(**read)
        _check_layers(spec)
        return spec


# ----------------------------------------------------------------------- reading a dict of a spec
_CHOICES = {
    "model_type": tuple(FAMILIES),
    "qk_norm": QK_NORMS,
    "score_func": ("softmax", "sigmoid"),
    "activation": ACTIVATIONS,
}


# Integers of a spec that the engine does not check in every model; the other ones may be 0 here.
_AT_LEAST_1 = ("max_position_embeddings", "n_group", "topk_group")


def _rope_from_dict(values: Any, head_dim: int, max_positions: int) -> _rope.Rope:
    """By from_config, which has to find nothing to change."""
    given = fields_of(ConfigError, "rope_settings", _rope.Rope, values)
    c = Reader({f"rope_settings.{name}": value for name, value in given.items()})
    turned = c.integer("rope_settings.head_dim", 2, head_dim)
    c.integer("rope_settings.max_positions")
    try:
        given["parameters"] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in given["parameters"]
        }
    except (TypeError, ValueError):
        raise ConfigError(
            "rope_settings.parameters: expected pairs of a name and a value, got "
            f"{shown(given['parameters'])}"
        ) from None
    config = {
        "rope_parameters": {
            **given["parameters"],
            "rope_type": given["type"],
            "rope_theta": given["theta"],
        }
    }
    rope = _rope.from_config(config, turned // 2 * 2, max_positions, 1.0, None)
    wanted = {**asdict(rope), "parameters": dict(rope.parameters)}
    if given != wanted:
        raise ConfigError(f"rope_settings: expected {shown(wanted)}, got {shown(given)}")
    return rope


def _check_layers(spec: ModelSpec) -> None:
    """Refuses sizes of a kind of layer that the model lacks."""
    for key, is_needed in {
        "intermediate_size": not all(spec.is_moe_layer),
        "num_experts": any(spec.is_moe_layer),
        **{
            f.name: "delta_net" in spec.layer_kinds
            for f in fields(spec)
            if f.name.startswith("linear_")
        },
    }.items():
        if not is_needed and getattr(spec, key):
            raise ConfigError(
                f"{key}: expected 0 with is_moe_layer={shown(spec.is_moe_layer)} and "
                f"layer_kinds={shown(spec.layer_kinds)}, got {getattr(spec, key)}"
            )

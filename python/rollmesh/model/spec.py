"""The description of a model, read from a Hugging Face config of a family in families.py.

Every option that the transformers code of a family reads is either taken over or refused by name;
an option that it does not read is on the list below. So a config that means something else than
what is computed here does not get through: unknown keys are refused unless they are switched off
(None or False).

Configs of transformers 4 (rope_theta and rope_scaling beside the rest, num_experts) and 5
(rope_parameters, num_local_experts) are understood, with the defaults of 5.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollmesh import _core
from rollmesh.errors import ConfigError, FormatError
from rollmesh.model import rope as _rope
from rollmesh.model import torchtitan as _torchtitan
from rollmesh.model.adapters import refuse_adapter
from rollmesh.model.families import FAMILIES, MULTIMODAL, SAME_AS
from rollmesh.model.family import LAYER_KINDS, QK_NORMS, WQ_ROWS, Experts, Family
from rollmesh.model.family_layers import num_experts
from rollmesh.model.reader import MAX_LAYERS, MAX_POSITION, Reader, key_name, without
from rollmesh.runtime.arguments import ACTIVATIONS, choice, fields_of
from rollmesh.runtime.messages import listed, plain, shown


def _keys(words: str) -> frozenset[str]:
    return frozenset(words.split())


# Read here, for every family.
_USED = _keys(
    "model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "num_key_value_heads head_dim hidden_act "
    "max_position_embeddings rms_norm_eps tie_word_embeddings rope_parameters rope_scaling "
    "rope_theta partial_rotary_factor "
    "original_max_position_embeddings eos_token_id is_causal"
)

# Keys of transformers 4.30 to 5.24 without effect on the logits of inference: bookkeeping, output
# formats, training, how parts are computed and placed, generation.
_IRRELEVANT = _keys(
    "transformers_version architectures dtype torch_dtype _name_or_path name_or_path "
    "_commit_hash _auto_class _post_init_done output_hidden_states output_attentions "
    "_output_attentions output_router_logits return_dict use_return_dict tie_last_hidden_states "
    "id2label label2id num_labels problem_type pad_token_id bos_token_id sep_token_id "
    "decoder_start_token_id tokenizer_class prefix task_specific_params finetuning_task "
    "custom_pipelines cross_attention_hidden_size is_decoder is_llama_config "
    "keys_to_ignore_at_inference ignore_keys_at_rope_validation max_sequence_length output_past "
    "transformers.js_config unsloth_version unsloth_fixed attention_dropout initializer_range "
    "router_aux_loss_coef gradient_checkpointing loss_type tie_encoder_decoder "
    "_attn_implementation attn_implementation _attn_implementation_internal "
    "_attn_implementation_autoset _flash_attn_2_enabled _experts_implementation "
    "experts_implementation _experts_implementation_internal chunk_size_feed_forward "
    "pretraining_tp base_model_tp_plan base_model_pp_plan base_model_ep_plan "
    "base_model_fsdp_plan distributed_config _pre_quantization_dtype torchscript use_bfloat16 "
    "tf_legacy_loss xla_device use_cache cache_implementation output_scores output_logits "
    "return_dict_in_generate do_sample temperature top_k top_p min_p typical_p epsilon_cutoff "
    "eta_cutoff max_length max_new_tokens min_length min_new_tokens max_time stop_strings "
    "early_stopping num_beams num_beam_groups diversity_penalty length_penalty "
    "repetition_penalty encoder_repetition_penalty no_repeat_ngram_size "
    "encoder_no_repeat_ngram_size bad_words_ids force_words_ids renormalize_logits constraints "
    "num_return_sequences penalty_alpha forced_bos_token_id forced_eos_token_id "
    "forced_decoder_ids remove_invalid_values exponential_decay_length_penalty suppress_tokens "
    "begin_suppress_tokens sequence_bias guidance_scale low_memory num_assistant_tokens "
    "num_assistant_tokens_schedule assistant_confidence_threshold assistant_lookbehind "
    "target_lookbehind prompt_lookup_num_tokens"
)

_UNSUPPORTED = {
    "quantization_config": "quantized weights are",
    "auto_map": "code that comes with the checkpoint is",
    "pruned_heads": "pruned heads are",
    "is_encoder_decoder": "encoder-decoder models are",
    "add_cross_attention": "cross attention is",
    "mlp_bias": "biases of the MLP are",
}
# transformers' names of the activations.
_HIDDEN_ACT = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh", "relu2": "relu2",
}  # fmt: skip

_OF_VISION = _keys(
    "text_config vision_config image_token_id video_token_id vision_start_token_id "
    "vision_end_token_id"
)


def _keys_of(family: Family) -> frozenset[str]:
    return _USED | _keys(f"{family.keys} {family.inert}") | family.fixed.keys()


_READ = frozenset[str]().union(*map(_keys_of, FAMILIES.values()))
_PLAIN = (type(None), bool, int, float, str, list, tuple, Mapping)


class Parameter(NamedTuple):
    """One tensor of a checkpoint."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EngineValues:
    """A spec as ext/spec.c reads it: the fields of the ModelSpec by name, and these values."""

    spec: ModelSpec
    sigmoid_scores: bool
    qk_norm: int
    wq_rows: int
    rope_neighbours: bool
    experts_interleaved: bool
    activation: int
    rope_scale: float
    inv_freq: NDArray[np.float32]  # half of the elements of a head that rope turns
    # [num_hidden_layers][is MoE, rope of q and k (0: none, 1: rope_settings, 2:
    # local_rope_settings), window (0: none), kind]
    layers: NDArray[np.int64]
    names: tuple[tuple[str, str], ...]  # (kind of parameter, the family's own name for it)
    min_sum: float  # lower bound of the divisor of gates; 0: none
    local_rope_scale: float
    local_inv_freq: NDArray[np.float32] | None
    # Factors and caps of numbers; 0: none.
    attention_scale: float
    attention_softcap: float
    logits_softcap: float
    embed_scale: float
    embed_scale_bf16: float
    residual_scale: float
    logits_scale: float
    gate_in_q: bool
    delta_alternates: bool


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
    rope_layers: tuple[bool, ...]  # of each layer: rope turns its q and k
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
    qk_nope_head_dim: int = 0  # elements of a head of q that rope does not turn
    v_head_dim: int = 0  # elements of a head of attention's output
    rope_interleave: bool = True  # False: rope turns halves in a family that turns neighbours
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
        if not isinstance(ignore, (tuple, list, set, frozenset)) or not all(
            isinstance(key, str) for key in ignore
        ):
            raise ConfigError(
                f"ignore: expected a tuple of keys of the config, got {shown(ignore)}"
            )
        values = without(text_config(_as_dict(config)), ignore)
        if "eos_token_id" in ignore:
            values["eos_token_id"] = None
        is_folder = isinstance(config, (str, os.PathLike)) and os.path.isdir(config)
        if is_folder and (given := _generation_eos(Path(config))):
            known = _ids_of(values.get("eos_token_id"))
            values["eos_token_id"] = known + [token for token in given if token not in known]
        _refuse_odd(values)
        model_type = choice("model_type", values.get("model_type"), [*FAMILIES, *SAME_AS])
        model_type = SAME_AS.get(model_type, model_type)
        family = FAMILIES[model_type]
        quantization = values.get("quantization_config")
        if (
            family.mxfp4
            and isinstance(quantization, Mapping)
            and quantization.get("quant_method") == "mxfp4"
        ):
            del values["quantization_config"]
        _refuse_unknown(values, _keys_of(family), family.ropes(values))
        try:
            return _read(Reader(values), model_type, family)
        except ConfigError as error:
            raise ConfigError(_by_keys(str(error), family.experts)) from None

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
        """Whether rope turns neighbouring elements in the rows of q and k of a checkpoint."""
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

    def engine_values(self, max_model_len: int) -> EngineValues:
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
        return EngineValues(
            spec=self,
            sigmoid_scores=self.score_func == "sigmoid",
            qk_norm=QK_NORMS.index(self.qk_norm),
            wq_rows=WQ_ROWS.index(family.wq_rows),
            rope_neighbours=self.rope_neighbours,
            experts_interleaved=family.experts_interleaved,
            activation=ACTIVATIONS.index(self.activation),
            rope_scale=scale,
            inv_freq=inv_freq,
            layers=np.array(list(layers), np.int64),
            names=(*family.names.items(), *own),
            min_sum=self.scoring["min_sum"],
            local_rope_scale=local[1] if local else 1.0,
            local_inv_freq=local[0] if local else None,
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
        return _from_dict(values)


# ----------------------------------------------------------------------- reading a dict of a spec
_CHOICES = {
    "model_type": tuple(FAMILIES),
    "qk_norm": QK_NORMS,
    "score_func": ("softmax", "sigmoid"),
    "activation": ACTIVATIONS,
}


# Integers of a spec that the engine does not check in every model; the other ones may be 0 here.
_AT_LEAST_1 = ("max_position_embeddings", "n_group", "topk_group")


def _from_dict(values: Any) -> ModelSpec:
    known = fields_of(ConfigError, "spec", ModelSpec, values)
    c = Reader(
        {**{f.name: f.default for f in fields(ModelSpec) if f.default is not MISSING}, **known}
    )
    read: dict[str, Any] = {
        f.name: c.integer(f.name, int(f.name in _AT_LEAST_1))
        for f in fields(ModelSpec)
        if f.type == "int"
    }
    read |= {key: choice(key, c.values[key], words) for key, words in _CHOICES.items()}
    read |= {f.name: c.boolean(f.name, False) for f in fields(ModelSpec) if f.type == "bool"}
    read |= {f.name: c.positive(f.name, 1.0) for f in fields(ModelSpec) if f.type == "float"}
    read |= {
        f.name: c.positive(f.name, 1.0) if c.given(f.name) else None
        for f in fields(ModelSpec)
        if f.type == "float | None"
    }
    layers = read["num_hidden_layers"]
    for key in ("is_moe_layer", "rope_layers"):
        read[key] = _tuple_of(
            key, c.values[key], layers, "a bool", lambda value: isinstance(value, bool)
        )
    whole = f"an integer in [0, {MAX_POSITION}]"
    read["sliding_windows"] = _tuple_of(
        "sliding_windows",
        c.values["sliding_windows"],
        layers,
        whole,
        lambda value: type(value) is int and 0 <= value <= MAX_POSITION,
    )
    read["layer_kinds"] = _layer_kinds(c.values["layer_kinds"], layers)
    eos = c.values["eos_token_ids"]
    if not isinstance(eos, (list, tuple)):
        raise ConfigError(f"eos_token_ids: expected a list of token ids, got {shown(eos)}")
    read["eos_token_ids"] = _eos(eos, read["vocab_size"])
    for key in ("rope_settings", "local_rope_settings"):
        if c.given(key) or key == "rope_settings":
            read[key] = _rope_from_dict(
                c.values[key], read["head_dim"], read["max_position_embeddings"]
            )
    spec = ModelSpec(**read)
    _check_layers(spec)
    return spec


def _layer_kinds(kinds: Any, layers: int) -> tuple[str, ...]:
    """Returns () if all layers are attention, so that equal models have equal specs."""
    words = " or ".join(LAYER_KINDS)
    if kinds not in ((), []):
        kinds = _tuple_of("layer_kinds", kinds, layers, words, LAYER_KINDS.__contains__)
    return () if set(kinds) <= {"attention"} else kinds


def _tuple_of(
    key: str, value: Any, count: int, what: str, fits: Callable[[Any], bool]
) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)) or len(value) != count or not all(map(fits, value)):
        raise ConfigError(
            f"{key}: expected {what} for each of num_hidden_layers={count}, got {shown(value)}"
        )
    return tuple(value)


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


# ------------------------------------------------------------------------------- reading a config
def _ids_of(eos: Any) -> list[Any]:
    return [] if eos is None else list(eos) if isinstance(eos, (list, tuple)) else [eos]


def _generation_eos(folder: Path) -> list[Any]:
    """Returns the unchecked eos_token_id of generation_config.json as a list."""
    file = folder / "generation_config.json"
    return _ids_of(_read_object(file).get("eos_token_id")) if file.is_file() else []


def _as_dict(config: Any) -> dict[str, Any]:
    if isinstance(config, Mapping):
        return dict(config)
    if callable(getattr(config, "to_dict", None)):
        return {
            "partial_rotary_factor": None,
            **config.to_dict(),
        }  # of an object it is in rope_parameters, or there is none
    try:
        path = Path(config)
    except TypeError:
        raise ConfigError(
            "config: expected a config object, a dict or a folder with config.json, got a "
            f"{type(config).__name__}"
        ) from None
    if not os.path.isdir(path):  # Path.is_dir raises if the name is too long
        return _read_object(path)
    refuse_adapter(path)
    return _read_object(path / "config.json")


def text_config(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the config of a multimodal model's text model, with the other keys of the multimodal
    model's config. Returns any other config as it is."""
    text, kind = values.get("text_config"), values.get("model_type")
    if not isinstance(text, Mapping) or not isinstance(kind, str) or kind not in MULTIMODAL:
        return values
    others = {
        key: value
        for key, value in values.items()
        if value is not None and key not in _IRRELEVANT | _OF_VISION
    } | {"model_type": MULTIMODAL[kind]}
    for key in others.keys() & (_READ | text.keys()):
        default = others[key] if key in ("model_type", "tie_word_embeddings") else None
        if text.get(key, default) != others[key]:
            raise ConfigError(
                f"text_config.{key}: expected {key}={shown(others[key])}, got "
                f"{shown(text.get(key))}"
            )
    return {**text, **others}


def _read_object(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{plain(file)}: {error.strerror}; expected a local folder with config.json, or that "
            "file"
        ) from error
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{plain(file)}: expected JSON: {error}") from error
    if not isinstance(values, dict):
        raise FormatError(f"{file}: expected a JSON object, got a {type(values).__name__}")
    return values


def _refuse_odd(values: Mapping[str, Any]) -> None:
    """Values that are compared and tested below as what JSON has; an array, say, has no truth
    value."""
    for key, value in values.items():
        if key in _READ and not isinstance(value, _PLAIN):
            raise ConfigError(
                f"{key}: expected a JSON value, got a {type(value).__name__}: {shown(value)}"
            )


def _refuse_unknown(
    values: Mapping[str, Any], used: frozenset[str], ropes: Sequence[tuple[str, Mapping[str, Any]]]
) -> None:
    """Refuses unsupported options that change the numbers, then unknown options."""
    for key, what in _UNSUPPORTED.items():
        value = values.get(key)
        if not isinstance(value, _PLAIN) or value:
            hint = "; ignore=('auto_map',) reads the config as transformers' own class does"
            raise ConfigError(
                f"{key}={shown(value)}: {what} not supported{hint if key == 'auto_map' else ''}"
            )
    unknown = [
        (key, value)
        for key, value in values.items()
        if key not in used
        and key not in _IRRELEVANT
        and key not in _UNSUPPORTED
        and value is not None
        and value is not False
    ]
    for path, config in ropes:
        unknown += _rope.unknown_keys(config, path)
    if unknown:
        names = tuple(key_name(key) for key, _ in unknown)
        error = ConfigError(
            f"unknown config keys: {listed(unknown)}; ignore={shown(names)} reads the config "
            "without them"
        )
        error.names = names  # type: ignore[attr-defined]
        raise error


def _read(c: Reader, model_type: str, family: Family) -> ModelSpec:
    act_key = family.activation_key
    activation = family.activation or choice(
        act_key, c.values.get(act_key, family.hidden_act), [*_HIDDEN_ACT]
    )
    if not c.boolean("is_causal", True):
        raise ConfigError("is_causal=False: attention to later tokens is not supported")
    layers = c.integer("num_hidden_layers", 1, MAX_LAYERS)
    hidden, heads = c.integer("hidden_size"), c.integer("num_attention_heads")
    kv_heads = c.values.get("num_key_value_heads", family.num_key_value_heads)
    head_dim = 0 if "head_dim" in c.values else family.head_dim  # None is HIDDEN_BY_HEADS
    head_dim = c.integer("head_dim") if c.given("head_dim") else head_dim or hidden // heads
    latent: dict[str, Any] = {}
    if family.latent is not None:
        latent = _latent(c, family.latent, heads, kv_heads)
        head_dim = latent.pop("qk_rope_head_dim")
    is_moe_layer = tuple(map(bool, family.moe_layers(c, layers)))
    max_positions = c.integer("max_position_embeddings", default=family.max_position_embeddings)
    vocab = c.integer("vocab_size")
    for key, value in family.fixed.items():
        given = _ids_of(c.values.get(key))
        if any(type(one) is not type(value) or one != value for one in given):
            raise ConfigError(f"{key}: expected {shown(value)}, got {shown(c.values[key])}")
    family.check(c, head_dim)
    partial = family.partial_rotary_factor
    if c.given("rotary_dim"):
        rotary = c.integer("rotary_dim", 2, head_dim)
        if rotary % 2:
            raise ConfigError(f"rotary_dim: expected an even number, got {rotary}")
        partial = rotary / head_dim
    rope, *local = (
        _rope.from_config(config, head_dim, max_positions, family.rope_theta, partial)
        for _, config in family.ropes(c.values)
    )
    if local and local[0].depends_on_length:
        raise ConfigError(
            f"rope_type={local[0].type!r} of sliding_attention: expected one that does not depend "
            "on the length"
        )
    attention_bias, o_bias = family.biases(c)
    if latent:
        latent["attention_multiplier"] = _latent_scale(latent, rope, head_dim)
        head_dim += latent["kv_lora_rank"]
    return ModelSpec(
        model_type=model_type,
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=0 if all(is_moe_layer) else c.integer("intermediate_size"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=1
        if latent
        else heads
        if kv_heads is None
        else c.integer("num_key_value_heads", default=kv_heads),
        head_dim=head_dim,
        qk_norm=family.qk_norm if isinstance(family.qk_norm, str) else family.qk_norm(c),
        norm_before=family.norm_before,
        norm_after=family.norm_after,
        attention_bias=attention_bias,
        o_bias=o_bias,
        tie_word_embeddings=c.boolean("tie_word_embeddings", family.tied),
        rms_norm_eps=c.positive("rms_norm_eps", family.rms_norm_eps),
        max_position_embeddings=max_positions,
        rope_settings=rope,
        local_rope_settings=local[0] if local else None,
        is_moe_layer=is_moe_layer,
        rope_layers=tuple(map(bool, family.rope_layers(c, layers))),
        sliding_windows=family.windows(c, layers),
        layer_kinds=_layer_kinds(family.layer_kinds(c, layers), layers),
        eos_token_ids=_eos(
            c.values.get(
                "eos_token_id", [token for token in _ids_of(family.eos_token_id) if token < vocab]
            ),
            vocab,
        ),
        activation=_HIDDEN_ACT.get(activation, activation),
        ungated=family.ungated,
        sinks=family.sinks,
        swiglu_alpha=c.positive("swiglu_alpha", 1.702),
        swiglu_limit=c.positive("swiglu_limit", 7.0),
        zero_centered_norms=family.zero_centered_norms,
        qk_norm_last=family.qk_norm_last,
        attention_gate=family.attention_gate,
        rope_interleave=c.boolean("rope_interleave", True),
        **(_experts(c, family.experts) if any(is_moe_layer) else _NO_EXPERTS)
        | family.factors(c)
        | latent,
    )


def _by_keys(message: str, experts: Experts) -> str:
    """Replaces the names of fields by the keys that the family's configs have for them."""
    keys = {
        "num_experts": experts.number[0],
        "num_experts_per_tok": experts.top_k_key,
        "moe_intermediate_size": experts.width,
    }
    return re.sub(rf"\b({'|'.join(keys)})\b", lambda name: keys[name[0]], message)


def _latent(
    c: Reader, defaults: Mapping[str, int], heads: int, kv_heads: int | None
) -> dict[str, Any]:
    """Returns the sizes of latent attention. Keys that repeat some of them must agree."""
    sizes = {key: c.integer(key, default=n) for key, n in defaults.items() if key != "q_lora_rank"}
    without = "q_lora_rank" in c.values and not c.given("q_lora_rank")
    rank = 0 if without else c.integer("q_lora_rank", default=defaults["q_lora_rank"])
    rope = sizes["qk_rope_head_dim"]
    repeated = {
        "head_dim": rope,
        "qk_head_dim": sizes["qk_nope_head_dim"] + rope,
        "num_key_value_heads": heads,
    }
    given = {"num_key_value_heads": heads if kv_heads is None else kv_heads}
    for key, wanted in repeated.items():
        if c.integer(key, default=given.get(key, wanted)) != wanted:
            raise ConfigError(
                f"{key}: expected {wanted} with latent attention, got "
                f"{c.values.get(key, given.get(key))}"
            )
    return sizes | {"q_lora_rank": rank}


def _latent_scale(latent: Mapping[str, int], rope: _rope.Rope, rope_dim: int) -> float:
    """Returns the factor of scores, with YaRN's mscale."""
    parameters = dict(rope.parameters)
    factor, weight = parameters.get("factor"), parameters.get("mscale_all_dim")
    mscale = 1.0
    if rope.type != "default" and factor and weight:
        mscale = _rope.mscale(float(factor), float(weight))
    return float((latent["qk_nope_head_dim"] + rope_dim) ** -0.5 * mscale * mscale)


_NO_EXPERTS: dict[str, Any] = {
    "num_experts": 0,
    "num_experts_per_tok": 0,
    "moe_intermediate_size": 0,
    "norm_topk_prob": False,
}


def _experts(c: Reader, experts: Experts) -> dict[str, Any]:
    """The fields of a model with experts."""
    groups, top_groups = experts.groups or (1, 1)
    n_group = c.integer("n_group", default=groups) if experts.groups else 1
    return {
        "num_experts": num_experts(c, *experts.number),
        "num_experts_per_tok": c.integer(experts.top_k_key, default=experts.top_k),
        "moe_intermediate_size": c.integer(experts.width),
        "norm_topk_prob": c.switch(experts.renormalize, experts.renormalize_default),
        "router_bias": experts.router_bias,
        "score_func": experts.score_func,
        "n_group": n_group,
        "topk_group": c.integer("topk_group", default=top_groups) if n_group > 1 else 1,
        "topk_sum_min": c.positive("moe_norm_min", 1e-12) if experts.min_sum else None,
        "routed_scaling_factor": c.positive(experts.scaling, experts.scaling_default),
        "shared_intermediate_size": experts.shared_width(c),
        "shared_switch": experts.shared_switch,
        "moe_bias": experts.bias,
    }


def _eos(eos: Any, vocab: int) -> tuple[int, ...]:
    ids = _ids_of(eos)
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab:
            raise ConfigError(
                f"eos_token_id={shown(token)} is not in [0, vocab_size={vocab}): config and "
                "vocabulary do not belong together"
            )
    return tuple(ids)

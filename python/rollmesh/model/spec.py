"""What a model is, read from a Hugging Face config of Qwen3 or Qwen3-MoE.

Every option that the transformers code of these models reads is either taken over or refused by name; an option that it does
not read is on the list below. So a config that means something else than what is computed here does not get through: unknown
keys are refused unless they are switched off (None or False).

Configs of transformers 4 (rope_theta and rope_scaling beside the rest, num_experts) and 5 (rope_parameters, num_local_experts)
are understood, with the defaults of 5.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollmesh.errors import ConfigError, FormatError
from rollmesh.model import rope as _rope
from rollmesh.model import torchtitan as _torchtitan
from rollmesh.model.rope import MAX_FLOAT
from rollmesh.runtime.messages import listed, plain, shown

MODEL_TYPES = ("qwen3", "qwen3_moe")

# The engine's (csrc/model/spec.c). Here too, because Python's integers have no end and plans are made without an engine.
MAX_VOCAB, MAX_WIDTH, MAX_LAYERS, MAX_HEADS, MAX_HEAD_DIM, MAX_EXPERTS = 1 << 26, 1 << 22, 1024, 1 << 14, 1024, 16384
MAX_POSITION = 2**62


def _keys(words: str) -> frozenset[str]:
    return frozenset(words.split())


# Read here. Each is checked below.
_USED = _keys(
    "model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim hidden_act "
    "max_position_embeddings rms_norm_eps tie_word_embeddings rope_parameters rope_scaling rope_theta partial_rotary_factor "
    "original_max_position_embeddings attention_bias use_sliding_window sliding_window max_window_layers layer_types decoder_sparse_step "
    "moe_intermediate_size num_experts_per_tok num_experts num_local_experts norm_topk_prob mlp_only_layers eos_token_id"
)

# Without effect on the logits of inference: training, generation, bookkeeping, output formats.
_IRRELEVANT = _keys(
    "transformers_version architectures dtype torch_dtype _name_or_path name_or_path _commit_hash _attn_implementation "
    "attn_implementation _attn_implementation_internal _experts_implementation experts_implementation attention_dropout "
    "initializer_range use_cache output_hidden_states output_attentions output_router_logits output_scores "
    "return_dict return_dict_in_generate router_aux_loss_coef chunk_size_feed_forward id2label label2id num_labels problem_type "
    "pad_token_id bos_token_id sep_token_id decoder_start_token_id tokenizer_class prefix task_specific_params finetuning_task "
    "torchscript use_bfloat16 tf_legacy_loss tie_encoder_decoder cross_attention_hidden_size max_length min_length do_sample "
    "early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty "
    "no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences forced_bos_token_id forced_eos_token_id "
    "remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens is_decoder"
)

_UNSUPPORTED = {
    "quantization_config": "quantized weights",
    "auto_map": "code that comes with the checkpoint",
    "pruned_heads": "pruned heads",
    "is_encoder_decoder": "encoder-decoder models",
    "add_cross_attention": "cross attention",
}
_PLAIN = (type(None), bool, int, float, str, list, tuple, Mapping)


class Parameter(NamedTuple):
    """One tensor of a checkpoint."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EngineValues:
    """The spec as ext/spec.c reads it; the fields are rm_spec's."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    top_k: int
    moe_intermediate_size: int
    norm_topk_prob: bool
    attention_bias: bool
    tie_word_embeddings: bool
    router_bias: bool
    rms_norm_eps: float
    rope_scale: float
    inv_freq: NDArray[np.float32]  # [head_dim / 2]
    layer_is_moe: NDArray[np.uint8]  # [num_layers]
    layer_windows: NDArray[np.int64]  # [num_layers], 0: full attention


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model. Made by `from_hf` or `from_torchtitan`; compares and hashes by value.

    The names are the config's. A dense model has 0 in num_experts, num_experts_per_tok and moe_intermediate_size; a model
    without dense layers has 0 in intermediate_size. router_bias: every sync has to bring the routers' biases; else they are optional.
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
    attention_bias: bool
    tie_word_embeddings: bool
    rms_norm_eps: float
    max_position_embeddings: int
    rope_settings: _rope.Rope
    is_moe_layer: tuple[bool, ...]  # of each layer
    sliding_windows: tuple[int, ...]  # of each layer, positions; 0: full attention
    eos_token_ids: tuple[int, ...]
    router_bias: bool = False

    @staticmethod
    def from_hf(config: Any, *, ignore: tuple[str, ...] = ()) -> ModelSpec:
        """From a transformers config object, its dict, a folder with config.json, or that file.

        `ignore` names keys of the config that are known not to matter. Raises ConfigError naming the rule that is broken
        or the option that is not supported, FormatError for a file that is not a JSON object.
        """
        if not isinstance(ignore, (tuple, list, set, frozenset)) or not all(isinstance(key, str) for key in ignore):
            raise ConfigError(f"ignore: expected a tuple of keys of the config, got {shown(ignore)}")
        values = {key: value for key, value in _as_dict(config).items() if key not in ignore}
        _refuse_odd(values)
        model_type = values.get("model_type")
        if model_type not in MODEL_TYPES:
            raise ConfigError(f"model_type: expected one of {', '.join(MODEL_TYPES)}, got {shown(model_type)}")
        _refuse_unknown(values)
        return _read(_Reader(values), model_type)

    @staticmethod
    def from_torchtitan(model: Any) -> ModelSpec:
        """From torchtitan's Qwen3Model.Config, dense or with experts, or the ModelSpec that has it (`model_registry(flavor)`).

        ConfigError names every setting that the engine does not compute (score_func="sigmoid", route_scale, expert groups, a window,
        settings that differ among layers, …), and every class and field that was not in torchtitan 0.3.0. Where load_balance_coeff is
        set, every sync has to bring expert_bias_E: the module's own state_dict() has it, torchtitan's to_hf drops it. End tokens
        are not in the config: give eos_token_ids to Generator.
        """
        values, router_bias = _torchtitan.hf_config(model)
        return replace(ModelSpec.from_hf(values), router_bias=router_bias)

    def rope(self, max_model_len: int) -> tuple[NDArray[np.float32], float]:
        """(inv_freq [head_dim / 2] with torch's bits, the factor on cos and sin) of a generator for max_model_len positions."""
        return self.rope_settings.frequencies(max_model_len)

    def engine_values(self, max_model_len: int) -> EngineValues:
        inv_freq, scale = self.rope(max_model_len)
        return EngineValues(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_layers=self.num_hidden_layers,
            num_heads=self.num_attention_heads,
            num_kv_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            num_experts=self.num_experts,
            top_k=self.num_experts_per_tok,
            moe_intermediate_size=self.moe_intermediate_size,
            norm_topk_prob=self.norm_topk_prob,
            attention_bias=self.attention_bias,
            tie_word_embeddings=self.tie_word_embeddings,
            router_bias=self.router_bias,
            rms_norm_eps=self.rms_norm_eps,
            rope_scale=scale,
            inv_freq=inv_freq,
            layer_is_moe=np.array(self.is_moe_layer, np.uint8),
            layer_windows=np.array(self.sliding_windows, np.int64),
        )

    def parameters(self) -> Iterator[Parameter]:
        """The tensors of a checkpoint, by layer; those of experts one by one; a tied lm_head and router biases are left out."""
        hidden, dim = self.hidden_size, self.head_dim
        query, kv = self.num_attention_heads * dim, self.num_key_value_heads * dim
        yield Parameter("model.embed_tokens.weight", (self.vocab_size, hidden))
        if not self.tie_word_embeddings:
            yield Parameter("lm_head.weight", (self.vocab_size, hidden))
        yield Parameter("model.norm.weight", (hidden,))
        for layer, is_moe in enumerate(self.is_moe_layer):
            at = f"model.layers.{layer}"
            yield Parameter(f"{at}.input_layernorm.weight", (hidden,))
            yield Parameter(f"{at}.post_attention_layernorm.weight", (hidden,))
            for name, rows in (("q", query), ("k", kv), ("v", kv)):
                yield Parameter(f"{at}.self_attn.{name}_proj.weight", (rows, hidden))
            yield Parameter(f"{at}.self_attn.o_proj.weight", (hidden, query))
            if self.attention_bias:
                for name, rows in (("q", query), ("k", kv), ("v", kv), ("o", hidden)):
                    yield Parameter(f"{at}.self_attn.{name}_proj.bias", (rows,))
            yield Parameter(f"{at}.self_attn.q_norm.weight", (dim,))
            yield Parameter(f"{at}.self_attn.k_norm.weight", (dim,))
            if is_moe:
                yield Parameter(f"{at}.mlp.gate.weight", (self.num_experts, hidden))
            width = self.moe_intermediate_size if is_moe else self.intermediate_size
            for mlp in (f"{at}.mlp.experts.{e}" for e in range(self.num_experts)) if is_moe else (f"{at}.mlp",):
                yield Parameter(f"{mlp}.gate_proj.weight", (width, hidden))
                yield Parameter(f"{mlp}.up_proj.weight", (width, hidden))
                yield Parameter(f"{mlp}.down_proj.weight", (hidden, width))

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(shape) for _, shape in self.parameters())

    def kv_elements_per_token(self) -> int:
        """Elements of K and V that one token adds over all layers, without the padding of the cache's layout."""
        return 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; `from_dict` is the way back."""
        return json.loads(json.dumps(asdict(self)))  # type: ignore[no-any-return]

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> ModelSpec:
        """Of to_dict's values."""

        def frozen(value: Any) -> Any:
            return tuple(frozen(v) for v in value) if isinstance(value, list) else value

        fields = {key: frozen(value) for key, value in values.items()}
        try:
            return ModelSpec(**{**fields, "rope_settings": _rope.Rope(**{k: frozen(v) for k, v in values["rope_settings"].items()})})
        except (KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"expected the values of ModelSpec.to_dict, got others: {error}") from error


# -------------------------------------------------------------------------------------------------- reading a config
def _as_dict(config: Any) -> dict[str, Any]:
    if isinstance(config, Mapping):
        return dict(config)
    if callable(getattr(config, "to_dict", None)):
        return dict(config.to_dict())
    try:
        path = Path(config)
    except TypeError:
        raise ConfigError(f"config: expected a config object, a dict or a folder with config.json, got a {type(config).__name__}") from None
    file = path / "config.json" if os.path.isdir(path) else path  # is_dir raises if the name is too long
    try:
        values = json.loads(file.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"{plain(file)}: {error.strerror}; expected a local folder with config.json, or that file") from error
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{plain(file)}: expected JSON: {error}") from error
    if not isinstance(values, dict):
        raise FormatError(f"{file}: expected a JSON object, got a {type(values).__name__}")
    return values


def _refuse_odd(values: Mapping[str, Any]) -> None:
    """Values that are compared and tested below as what JSON has; an array, say, has no truth value."""
    for key, value in values.items():
        if key in _USED and not isinstance(value, _PLAIN):
            raise ConfigError(f"{key}: expected a JSON value, got a {type(value).__name__}: {shown(value)}")


def _refuse_unknown(values: Mapping[str, Any]) -> None:
    """Options that change the numbers and are not supported, then everything that nobody here has heard of."""
    for key, what in _UNSUPPORTED.items():
        value = values.get(key)
        if not isinstance(value, _PLAIN) or value:
            raise ConfigError(f"{key}={shown(value)}: {what} are not supported")
    unknown = [
        (key, value)
        for key, value in values.items()
        if key not in _USED and key not in _IRRELEVANT and key not in _UNSUPPORTED and value is not None and value is not False
    ]
    if unknown:
        raise ConfigError(f"unknown config keys: {listed(unknown)} (ignore=(…) passes those that do not matter)")


class _Reader:
    """Typed access to a config; every failure names the key and the value."""

    def __init__(self, values: Mapping[str, Any]):
        self.values = values

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        value = self.values.get(key, default)
        if value is None:
            raise ConfigError(f"{key}: expected an integer, got {'none' if key not in self.values else 'None'}")
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ConfigError(f"{key}: expected an integer in [{low}, {high}], got {shown(value)}")
        return value

    def boolean(self, key: str, default: bool) -> bool:
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise ConfigError(f"{key}: expected a bool, got {shown(value)}")
        return value

    def positive(self, key: str, default: float) -> float:
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= MAX_FLOAT:
            raise ConfigError(f"{key}: expected a finite number > 0, got {shown(value)}")
        return float(value)

    def given(self, key: str) -> bool:
        return self.values.get(key) is not None


def _read(c: _Reader, model_type: str) -> ModelSpec:
    moe = model_type == "qwen3_moe"
    if c.values.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ConfigError(f"hidden_act: expected 'silu', got {shown(c.values['hidden_act'])}")
    layers, hidden = c.integer("num_hidden_layers", 1, MAX_LAYERS), c.integer("hidden_size", 1, MAX_WIDTH)
    heads = c.integer("num_attention_heads", 1, MAX_HEADS)
    kv_heads = c.integer("num_key_value_heads", 1, MAX_HEADS, heads) if c.given("num_key_value_heads") or moe else heads
    head_dim = c.integer("head_dim", 2, MAX_HEAD_DIM) if c.given("head_dim") else hidden // heads if moe else 128
    if heads * head_dim > MAX_WIDTH:
        raise ConfigError(f"num_attention_heads·head_dim: expected at most {MAX_WIDTH}, got {heads * head_dim}")
    if heads % kv_heads:
        raise ConfigError(f"num_key_value_heads={kv_heads} does not divide num_attention_heads={heads}")
    if not 2 <= head_dim <= MAX_HEAD_DIM or head_dim % 2:
        raise ConfigError(f"head_dim: expected an even number in [2, {MAX_HEAD_DIM}] (rope rotates pairs), got {head_dim}")
    is_moe_layer = _moe_layers(c, layers) if moe else (False,) * layers
    vocab, max_positions = c.integer("vocab_size", 1, MAX_VOCAB), c.integer("max_position_embeddings", 1, MAX_POSITION, 32768)
    spec = ModelSpec(
        model_type=model_type,
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=0 if all(is_moe_layer) else c.integer("intermediate_size", 1, MAX_WIDTH),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        num_experts=0,
        num_experts_per_tok=0,
        moe_intermediate_size=0,
        norm_topk_prob=moe and c.boolean("norm_topk_prob", False),
        attention_bias=c.boolean("attention_bias", False),
        tie_word_embeddings=c.boolean("tie_word_embeddings", False),
        rms_norm_eps=c.positive("rms_norm_eps", 1e-6),
        max_position_embeddings=max_positions,
        rope_settings=_rope.from_config(c.values, head_dim, max_positions),
        is_moe_layer=is_moe_layer,
        sliding_windows=_windows(c, layers, moe),
        eos_token_ids=_eos(c, vocab),
    )
    return _with_experts(c, spec) if any(is_moe_layer) else spec


def _with_experts(c: _Reader, spec: ModelSpec) -> ModelSpec:
    experts, top_k = _num_experts(c), c.integer("num_experts_per_tok", 1, MAX_EXPERTS)
    if top_k > experts:
        raise ConfigError(f"num_experts_per_tok={top_k} exceeds num_experts={experts}")
    width = c.integer("moe_intermediate_size", 1, MAX_WIDTH)
    return replace(spec, num_experts=experts, num_experts_per_tok=top_k, moe_intermediate_size=width)


def _num_experts(c: _Reader) -> int:
    both = [c.integer(key, 0, MAX_EXPERTS) for key in ("num_experts", "num_local_experts") if c.given(key)]
    if len(set(both)) > 1:
        raise ConfigError(f"num_experts={both[0]} and num_local_experts={both[1]} differ")
    return both[0] if both else c.integer("num_experts", 0, MAX_EXPERTS)


def _moe_layers(c: _Reader, layers: int) -> tuple[bool, ...]:
    """Every decoder_sparse_step-th layer, but for those in mlp_only_layers."""
    step, dense = c.integer("decoder_sparse_step", 1, MAX_POSITION, 1), c.values.get("mlp_only_layers") or []
    if not isinstance(dense, (list, tuple)) or not all(type(i) is int and 0 <= i < layers for i in dense):
        raise ConfigError(f"mlp_only_layers: expected a list of layers in [0, {layers}), got {shown(dense)}")
    has_experts, without = _num_experts(c) > 0, frozenset(dense)
    return tuple(has_experts and i not in without and (i + 1) % step == 0 for i in range(layers))


def _windows(c: _Reader, layers: int, moe: bool) -> tuple[int, ...]:
    """The sliding window of each layer. Qwen3 has it where layer_types says so, Qwen3-MoE in all layers or none."""
    use = c.boolean("use_sliding_window", False) and c.given("sliding_window" if "sliding_window" in c.values else "use_sliding_window")
    window = c.integer("sliding_window", 1, MAX_POSITION, 4096) if use else 0
    types = c.values.get("layer_types")
    if types is None:
        first = 0 if moe else c.integer("max_window_layers", 0, MAX_POSITION, 28)
        return tuple(window if i >= first else 0 for i in range(layers))
    if not isinstance(types, (list, tuple)) or len(types) != layers:
        raise ConfigError(f"layer_types: expected one entry for each of num_hidden_layers={layers}, got {shown(types)}")
    if other := [t for t in types if not isinstance(t, str) or t not in ("full_attention", "sliding_attention")]:
        raise ConfigError(f"layer_types: expected full_attention and sliding_attention, got {shown(other)}")
    if moe and set(types) != {"sliding_attention" if window else "full_attention"}:
        raise ConfigError(f"layer_types: expected one kind for all of Qwen3-MoE's layers, got {shown(types)}")
    if "sliding_attention" in types and not window:
        raise ConfigError("layer_types: expected use_sliding_window and sliding_window with sliding_attention, got one that is off")
    return tuple(window if t == "sliding_attention" else 0 for t in types)


def _eos(c: _Reader, vocab: int) -> tuple[int, ...]:
    value = c.values.get("eos_token_id")
    ids = [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab:
            raise ConfigError(
                f"eos_token_id={shown(token)} is not in [0, vocab_size={vocab}): config and vocabulary do not belong together"
            )
    return tuple(ids)

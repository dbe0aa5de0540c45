"""Reads the Hugging Face config of a family in families.py into the fields of a ModelSpec.

Every option that the transformers code of a family reads is either taken over or refused by name;
an option that it does not read is on the list below. So a config that means something else than
what is computed here does not get through: unknown keys are refused unless they are switched off
(None or False).

Configs of transformers 4 (rope_theta and rope_scaling beside the rest, num_experts) and 5
(rope_parameters, num_local_experts) are understood, with the defaults of 5.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollmesh.errors import ConfigError, FormatError
from rollmesh.model import rope as _rope
from rollmesh.model.adapters import refuse_adapter
from rollmesh.model.families import FAMILIES, MULTIMODAL, SAME_AS
from rollmesh.model.family import LAYER_KINDS, Experts, Family
from rollmesh.model.family_rules import num_experts
from rollmesh.model.reader import MAX_LAYERS, Reader, key_name, without
from rollmesh.runtime.arguments import choice
from rollmesh.runtime.messages import listed, plain, shown

Values = dict[str, Any]  # by key of a config, or by field of a ModelSpec


def _keys(words: str) -> frozenset[str]:
    return frozenset(words.split())


# Read here, for every family.
_USED = _keys(
    """
    model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads
    num_key_value_heads head_dim hidden_act
    max_position_embeddings rms_norm_eps tie_word_embeddings rope_parameters rope_scaling
    rope_theta partial_rotary_factor
    original_max_position_embeddings eos_token_id is_causal
    """
)

# Keys of transformers 4.30 to 5.24 without effect on the logits of inference: bookkeeping, output
# formats, training, how parts are computed and placed, generation.
_IRRELEVANT = _keys(
    """
    transformers_version architectures dtype torch_dtype _name_or_path name_or_path
    _commit_hash _auto_class _post_init_done output_hidden_states output_attentions
    _output_attentions output_router_logits return_dict use_return_dict tie_last_hidden_states
    id2label label2id num_labels problem_type pad_token_id bos_token_id sep_token_id
    decoder_start_token_id tokenizer_class prefix task_specific_params finetuning_task
    custom_pipelines cross_attention_hidden_size is_decoder is_llama_config
    keys_to_ignore_at_inference ignore_keys_at_rope_validation max_sequence_length output_past
    transformers.js_config unsloth_version unsloth_fixed attention_dropout initializer_range
    router_aux_loss_coef gradient_checkpointing loss_type tie_encoder_decoder
    _attn_implementation attn_implementation _attn_implementation_internal
    _attn_implementation_autoset _flash_attn_2_enabled _experts_implementation
    experts_implementation _experts_implementation_internal chunk_size_feed_forward
    pretraining_tp base_model_tp_plan base_model_pp_plan base_model_ep_plan
    base_model_fsdp_plan distributed_config _pre_quantization_dtype torchscript use_bfloat16
    tf_legacy_loss xla_device use_cache cache_implementation output_scores output_logits
    return_dict_in_generate do_sample temperature top_k top_p min_p typical_p epsilon_cutoff
    eta_cutoff max_length max_new_tokens min_length min_new_tokens max_time stop_strings
    early_stopping num_beams num_beam_groups diversity_penalty length_penalty
    repetition_penalty encoder_repetition_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids force_words_ids renormalize_logits constraints
    num_return_sequences penalty_alpha forced_bos_token_id forced_eos_token_id
    forced_decoder_ids remove_invalid_values exponential_decay_length_penalty suppress_tokens
    begin_suppress_tokens sequence_bias guidance_scale low_memory num_assistant_tokens
    num_assistant_tokens_schedule assistant_confidence_threshold assistant_lookbehind
    target_lookbehind prompt_lookup_num_tokens
    """
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


def checked_config(config: Any, ignore: Collection[str]) -> Values:
    """Returns the config of a text model of a family, without the keys in `ignore` and with the
    ends of generation_config.json. Refuses unsupported and unknown options."""
    if not isinstance(ignore, (tuple, list, set, frozenset)) or not all(
        isinstance(key, str) for key in ignore
    ):
        raise ConfigError(f"ignore: expected a tuple of keys of the config, got {shown(ignore)}")
    values = without(text_config(_as_dict(config)), ignore)
    if "eos_token_id" in ignore:
        values["eos_token_id"] = None
    is_folder = isinstance(config, (str, os.PathLike)) and os.path.isdir(config)
    if is_folder and (given := _generation_eos(Path(config))):
        known = _ids_of(values.get("eos_token_id"))
        values["eos_token_id"] = known + [token for token in given if token not in known]
    _refuse_odd(values)
    model_type = choice("model_type", values.get("model_type"), [*FAMILIES, *SAME_AS])
    values["model_type"] = SAME_AS.get(model_type, model_type)
    family = FAMILIES[values["model_type"]]
    quantization = values.get("quantization_config")
    if (
        family.mxfp4
        and isinstance(quantization, Mapping)
        and quantization.get("quant_method") == "mxfp4"
    ):
        del values["quantization_config"]
    _refuse_unknown(values, _keys_of(family), family.ropes(values))
    return values


def _ids_of(eos: Any) -> list[Any]:
    return [] if eos is None else list(eos) if isinstance(eos, (list, tuple)) else [eos]


def _generation_eos(folder: Path) -> list[Any]:
    """Returns the unchecked eos_token_id of generation_config.json as a list."""
    file = folder / "generation_config.json"
    return _ids_of(_read_object(file).get("eos_token_id")) if file.is_file() else []


def _as_dict(config: Any) -> Values:
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


def text_config(values: Values) -> Values:
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


def _read_object(file: Path) -> Values:
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


def spec_fields(values: Mapping[str, Any]) -> Values:
    """Returns the fields of the ModelSpec of a checked config. Raises ConfigError."""
    c, family = Reader(values), FAMILIES[values["model_type"]]
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
    latent: Values = {}
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
    return {
        "model_type": values["model_type"],
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 0 if all(is_moe_layer) else c.integer("intermediate_size"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 1
        if latent
        else heads
        if kv_heads is None
        else c.integer("num_key_value_heads", default=kv_heads),
        "head_dim": head_dim,
        "qk_norm": family.qk_norm if isinstance(family.qk_norm, str) else family.qk_norm(c),
        "norm_before": family.norm_before,
        "norm_after": family.norm_after,
        "attention_bias": attention_bias,
        "o_bias": o_bias,
        "tie_word_embeddings": c.boolean("tie_word_embeddings", family.tied),
        "rms_norm_eps": c.positive("rms_norm_eps", family.rms_norm_eps),
        "max_position_embeddings": max_positions,
        "rope_settings": rope,
        "local_rope_settings": local[0] if local else None,
        "is_moe_layer": is_moe_layer,
        "rope_layers": tuple(map(bool, family.rope_layers(c, layers))),
        "sliding_windows": family.windows(c, layers),
        "layer_kinds": layer_kinds(family.layer_kinds(c, layers), layers),
        "eos_token_ids": eos_ids(
            c.values.get(
                "eos_token_id", [token for token in _ids_of(family.eos_token_id) if token < vocab]
            ),
            vocab,
        ),
        "activation": _HIDDEN_ACT.get(activation, activation),
        "ungated": family.ungated,
        "sinks": family.sinks,
        "swiglu_alpha": c.positive("swiglu_alpha", 1.702),
        "swiglu_limit": c.positive("swiglu_limit", 7.0),
        "zero_centered_norms": family.zero_centered_norms,
        "qk_norm_last": family.qk_norm_last,
        "attention_gate": family.attention_gate,
        "rope_interleave": c.boolean("rope_interleave", True),
        **(_experts(c, family.experts) if any(is_moe_layer) else _NO_EXPERTS)
        | family.factors(c)
        | latent,
    }


def by_keys(message: str, family: Family) -> str:
    """Replaces the names of fields by the keys that the family's configs have for them."""
    experts = family.experts
    keys = {
        "num_experts": experts.number[0],
        "num_experts_per_tok": experts.top_k_key,
        "moe_intermediate_size": experts.width,
    }
    return re.sub(rf"\b({'|'.join(keys)})\b", lambda name: keys[name[0]], message)


def _latent(c: Reader, defaults: Mapping[str, int], heads: int, kv_heads: int | None) -> Values:
    """Returns the sizes of latent attention. Keys that repeat some of them must agree."""
    sizes = {key: c.integer(key, default=n) for key, n in defaults.items() if key != "q_lora_rank"}
    rope = c.integer("qk_rope_head_dim", 2, _rope.MAX_HEAD_DIM - 1, sizes["qk_rope_head_dim"])
    c.integer("kv_lora_rank", 1, _rope.MAX_HEAD_DIM - rope, sizes["kv_lora_rank"])
    without = "q_lora_rank" in c.values and not c.given("q_lora_rank")
    rank = 0 if without else c.integer("q_lora_rank", default=defaults["q_lora_rank"])
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


_NO_EXPERTS: Values = {
    "num_experts": 0,
    "num_experts_per_tok": 0,
    "moe_intermediate_size": 0,
    "norm_topk_prob": False,
}


def _experts(c: Reader, experts: Experts) -> Values:
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


def eos_ids(eos: Any, vocab: int) -> tuple[int, ...]:
    ids = _ids_of(eos)
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab:
            raise ConfigError(
                f"eos_token_id={shown(token)} is not in [0, vocab_size={vocab}): config and "
                "vocabulary do not belong together"
            )
    return tuple(ids)


def layer_kinds(kinds: Any, layers: int) -> tuple[str, ...]:
    """Returns () if all layers are attention, so that equal models have equal specs."""
    words = " or ".join(LAYER_KINDS)
    if kinds not in ((), []):
        kinds = tuple_of("layer_kinds", kinds, layers, words, LAYER_KINDS.__contains__)
    return () if set(kinds) <= {"attention"} else kinds


def tuple_of(
    key: str, value: Any, count: int, what: str, fits: Callable[[Any], bool]
) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)) or len(value) != count or not all(map(fits, value)):
        raise ConfigError(
            f"{key}: expected {what} for each of num_hidden_layers={count}, got {shown(value)}"
        )
    return tuple(value)

"""Reads a Qwen3, a Qwen3.5 or a Llama of torchtitan: its config as a Hugging Face config, for
ModelSpec.from_torchtitan.

torchtitan's config is a tree of dataclasses whose classes select the modules, and it has settings
that a Hugging Face config lacks. The state dict does not show these settings, so ignoring one would
give wrong numbers without an error. The tables below therefore list every class with its fields:

* a class that is not listed is refused (a converter's Float8Linear, a user's subclass);
* a field that is not listed must have its default;
* one error lists everything that the engine does not compute.

torchtitan itself is not imported. The tables follow torchtitan 0.3.0: models/qwen3, models/qwen3_5,
models/llama3, models/common. Of a Qwen3.5 the model of text is read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import Enum
from typing import Any

from rollmesh.errors import ConfigError
from rollmesh.model.rope import number
from rollmesh.runtime.messages import shown


class _Rule(Enum):
    READ = "the value is read"
    # Sizes, which every push checks, and settings of the trainer's communication or speed.
    ANY = "the value has no effect on the numbers"


# A rule of a field is a _Rule, the only value allowed, or a dict for another dataclass: its classes
# by name with the rules of their fields. The class None allows the value None.
_Fields = Mapping[str, Any]
Values = dict[str, Any]  # by field, or by key of a config
Faults = list[str]  # what is refused
READ, ANY = _Rule.READ, _Rule.ANY


def _each(names: str, rule: Any = READ) -> dict[Any, Any]:
    """Returns one rule for several fields, or for several classes."""
    return dict.fromkeys(names.split(), rule)


_LINEAR_FIELDS = {"bias": False, "in_features": ANY, "out_features": READ}
_LINEAR = _each("Linear RowParallelLinear", _LINEAR_FIELDS)
# CastLinear is TitanRL's: logits in float32, as the engine's are in every dtype.
_HEAD = {**_LINEAR, "CastLinear": {**_LINEAR_FIELDS, "compute_dtype": "float32"}}
_OFFSET_NORM = {"OffsetRMSNorm": {"dim": ANY, "eps": READ}}
_NORM = {"RMSNorm": {"elementwise_affine": True, "normalized_shape": ANY, "eps": READ}}
_CONV = {"Conv1d": {**_each("in_channels out_channels kernel_size groups", ANY), "bias": False}}
_MLP = _each("FeedForward AllGatherFusedFeedForward", _each("w1 w3 w2", _LINEAR))
_HEADS = _each("head_dim n_heads n_kv_heads", ANY)
_KERNEL = _each("block_size kernel_options", ANY)  # of FlexAttention
_ROPE = _each(
    "dim theta max_seq_len scaling rope_factor beta_fast beta_slow original_seq_len truncate "
    "low_freq_factor high_freq_factor original_max_position_embeddings scaling_factor"
)
_INNER = {
    **_each("FlexAttention ScaledDotProductAttention", _KERNEL),
    "VarlenAttention": {**_KERNEL, "window_size": (-1, 0)},
}
_ATTENTION = {
    **_each("n_heads dim n_kv_heads head_dim"),
    "qkv_linear": {
        "QKVLinear": {**_HEADS, **_each("wq wkv", _LINEAR)},
        **_each("FusedQKVLinear AllGatherFusedQKVLinear", {**_HEADS, "wqkv": _LINEAR}),
    },
    "wo": _LINEAR,
    "inner_attention": _INNER,
}
_DISPATCHER = {
    "top_k": READ,
    **_each(
        "num_experts pad_multiple cudagraphable num_max_tokens_per_rank hidden_dim dtype device",
        ANY,
    ),
}
_MOE = {
    **_each("num_experts load_balance_coeff"),
    "router": {
        "TokenChoiceTopKRouter": {
            **_each("score_func route_scale num_expert_groups num_limited_groups top_k route_norm"),
            "num_experts": ANY,
            "_debug_force_load_balance": False,
            "gate": _LINEAR,
        }
    },
    "routed_experts": {
        "RoutedExperts": {
            "inner_experts": {
                "GroupedExperts": {"hidden_dim": READ, **_each("num_experts dim", ANY)}
            },
            "token_dispatcher": {
                **_each(
                    "LocalTokenDispatcher AllToAllTokenDispatcher TorchAOTokenDispatcher "
                    "DeepEPTokenDispatcher MinimalAsyncEPTokenDispatcher",
                    _DISPATCHER,
                ),
                # Any other capacity factor drops tokens.
                "HybridEPTokenDispatcher": {**_DISPATCHER, "non_blocking_capacity_factor": None},
            },
        }
    },
    "shared_experts": {
        None: {},
        **_MLP,
        "SigmoidGatedFeedForward": _each("w1 w3 w2 gate", _LINEAR),
    },
}
_NORMS = _each("attention_norm ffn_norm", _NORM)
_LLAMA = {
    "attention": {"GQAttention": {**_ATTENTION, "rope": {"ComplexRoPE": _ROPE}, "qk_norm": None}},
    **_NORMS,
    "moe": None,
    "feed_forward": _MLP,
}
_QWEN = {
    "attention": {"GQAttention": {**_ATTENTION, "rope": {"CosSinRoPE": _ROPE}, "qk_norm": _NORM}},
    **_NORMS,
}
_QWEN35_NORMS = _each("attention_norm ffn_norm", _OFFSET_NORM)
_QWEN35_FULL = {
    "attention": {
        "Qwen35Attention": {
            **_each("n_heads n_kv_heads head_dim rotary_dim"),
            "rope": {"MRoPE": {**_ROPE, "mrope_section": ANY}},  # a text token has equal positions
            **_each("wq wk wv wo", _LINEAR),
            **_each("q_norm k_norm", _OFFSET_NORM),
            "inner_attention": _INNER,
        }
    },
    "delta_net": ANY,  # not built beside attention
    **_QWEN35_NORMS,
}
_QWEN35_DELTA = {
    "attention": None,
    "delta_net": {
        "GatedDeltaNet": {
            **_each("key_head_dim value_head_dim conv_kernel_size"),
            **_each("in_proj_q in_proj_k in_proj_v in_proj_z in_proj_a in_proj_b", _LINEAR),
            **_each("conv_q conv_k conv_v", _CONV),
            "kernel": {"GatedDeltaKernel": {"backend": ANY}},
            "norm": {"RMSNormGated": {"dim": ANY, "eps": READ}},
            "out_proj": _LINEAR,
        }
    },
    **_QWEN35_NORMS,
}
_DENSE = {"moe": {None: {}}, "feed_forward": _MLP}
_EXPERTS = {"moe": {"MoE": _MOE}, "feed_forward": ANY}  # its feed_forward is not built
_ROOT = {
    **_each("layers vocab_size dim enable_weight_tying"),
    "norm": _NORM,
    "lm_head": _HEAD,
    "tok_embeddings": {"Embedding": _each("num_embeddings embedding_dim", ANY)},
}
_ROOTS = {
    **_each("Qwen3Model Llama3Model", _ROOT),
    "Qwen35Model": {**_ROOT, "norm": _OFFSET_NORM, "vision_encoder": ANY},
}
BEYOND_HF = (
    "norm_topk_prob",
    "router_bias",
    "score_func",
    "n_group",
    "topk_group",
    "routed_scaling_factor",
    "shared_intermediate_size",
    "shared_switch",
)


def _read(value: Any, where: str, classes: Mapping[str | None, _Fields], faults: Faults) -> Values:
    """Returns the values that are read, by field; those of another dataclass as such a dict, with
    None instead of a class. where: the dataclass as a user would write it. Adds what is refused to
    `faults`."""
    kind = type(value)
    name = kind.__qualname__.removesuffix(".Config")
    if kind.__module__.split(".")[0] != "torchtitan" or name not in classes:
        wanted = " or ".join(f"{name}.Config" for name in classes if name is not None)
        raise ConfigError(
            f"{where}: expected torchtitan's {wanted or None}, got "
            f"{kind.__module__}.{kind.__qualname__}"
        )
    # Every module has these two fields: how its values are drawn, and how it is sharded.
    rules = {"param_init": ANY, "sharding_config": ANY, **classes[name]}
    fields = {field.name: field for field in dataclasses.fields(value)}
    read: Values = {}
    for field, rule in rules.items():
        if rule is ANY:
            continue
        if field not in fields:
            raise ConfigError(
                f"{where}: expected a field {field}, as torchtitan 0.3.0 has, got "
                f"{', '.join(fields)}"
            )
        its = getattr(value, field)
        if isinstance(rule, dict) and not (its is None and None in rule):
            read[field] = _read(its, f"{where}.{field}", rule, faults)
        elif rule is READ or isinstance(rule, dict):
            read[field] = its
        else:
            _want(f"{where}.{field}", its, rule, faults)
    for field in sorted(fields.keys() - rules.keys()):
        its, made = getattr(value, field), fields[field].default_factory
        default = fields[field].default if made is dataclasses.MISSING else made()
        if its != default:
            faults.append(
                f"{where}.{field}: expected no such field, as in torchtitan 0.3.0, or its default "
                f"{default!r}, got {shown(its)}"
            )
    return read


def hf_config(model: Any) -> tuple[Values, Values]:
    """Returns the config as transformers has it, and the fields of ModelSpec that such a config
    lacks. model: torchtitan's Qwen3Model.Config, Qwen35Model.Config or Llama3Model.Config, or its
    ModelSpec."""
    kind = type(model)
    if kind.__qualname__ == "ModelSpec" and kind.__module__.split(".")[0] == "torchtitan":
        model = model.model
    faults: Faults = []
    root = _read(model, "model", _ROOTS, faults)
    name = type(model).__qualname__.removesuffix("Model.Config")
    block = f"{name}TransformerBlock"
    if not isinstance(root["layers"], (list, tuple)) or not root["layers"]:
        raise ConfigError(
            f"model.layers: expected a list of {block}.Config, got {shown(root['layers'])}"
        )
    layers = []
    for i, layer in enumerate(root["layers"]):
        moe, attention = (getattr(layer, part, None) for part in ("moe", "attention"))
        rules = _LLAMA
        if name != "Llama3":
            qwen35 = _QWEN35_DELTA if attention is None else _QWEN35_FULL
            rules = (_QWEN if name == "Qwen3" else qwen35) | (_EXPERTS if moe else _DENSE)
        where = f"model.layers[{i}]"
        layers.append(_layer(_read(layer, where, {block: rules}, faults), where, faults))
    values = _alike(layers, faults)
    values |= {
        "model_type": {"Llama3": "llama", "Qwen3": "qwen3", "Qwen35": "qwen3_5_text"}[name],
        "vocab_size": root["vocab_size"],
        "hidden_size": root["dim"],
        "num_hidden_layers": len(layers),
        "tie_word_embeddings": root["enable_weight_tying"],
        "eos_token_id": None,
    }
    dense = [i for i, layer in enumerate(layers) if "num_experts" not in layer]
    if name == "Qwen35":
        values["layer_types"] = [
            f"{'full' if 'head_dim' in layer else 'linear'}_attention" for layer in layers
        ]
        if len(dense) < len(layers):
            values["model_type"] = "qwen3_5_moe_text"
            _want("model.layers without experts", dense, [], faults)
    elif "num_experts" in values:
        values["model_type"] = "qwen3_moe"
        values["mlp_only_layers"] = dense
    _want("model.norm.eps", root["norm"]["eps"], values["rms_norm_eps"], faults)
    if faults:
        rest = f"; and {len(faults) - 20} more" if len(faults) > 20 else ""
        raise ConfigError(f"not a model that rollmesh computes: {'; '.join(faults[:20])}{rest}")
    return values, {field: values.pop(field) for field in BEYOND_HF if field in values}


def _want(where: str, value: Any, wanted: Any, faults: Faults) -> None:
    if value != wanted:
        faults.append(f"{where}: expected {wanted!r}, got {shown(value)}")


def _alike(layers: list[Values], faults: Faults) -> Values:
    """Returns the values of all layers. Layers with experts and dense ones have different keys."""
    values: Values = {}
    first: dict[str, int] = {}
    for i, layer in enumerate(layers):
        for key, value in layer.items():
            if first.setdefault(key, i) == i:
                values[key] = value
            elif value != values[key]:
                faults.append(
                    f"{key}: expected one value for all layers, got {values[key]} in layer "
                    f"{first[key]} and {value} in layer {i}"
                )
    return values


def _size(values: Values, where: str, field: str) -> int:
    """Returns a size from which others are computed."""
    size = values[field]
    if not isinstance(size, int) or size < 1:
        raise ConfigError(f"{where}.{field}: expected an integer > 0, got {shown(size)}")
    return size


def _layer(layer: Values, where: str, faults: Faults) -> Values:
    eps = layer["attention_norm"]["eps"]
    _want(f"{where}.ffn_norm.eps", layer["ffn_norm"]["eps"], eps, faults)
    kind = "delta_net" if layer.get("delta_net") else "attention"
    for name, norm in layer[kind].items():
        if name.endswith("norm"):
            _want(f"{where}.{kind}.{name}.eps", norm["eps"], eps, faults)
    read = _delta_net if kind == "delta_net" else _attention
    return {
        "rms_norm_eps": eps,
        **read(layer[kind], f"{where}.{kind}", faults),
        **(
            _experts(layer["moe"], f"{where}.moe", faults)
            if layer.get("moe")
            else {"intermediate_size": layer["feed_forward"]["w1"]["out_features"]}
        ),
    }


def _delta_net(net: Values, where: str, faults: Faults) -> Values:
    sizes = {"linear_conv_kernel_dim": net["conv_kernel_size"]}
    for name in ("key", "value"):
        of_head, part = _size(net, where, f"{name}_head_dim"), f"in_proj_{name[0]}"
        sizes[f"linear_{name}_head_dim"] = of_head
        sizes[f"linear_num_{name}_heads"] = (
            _size(net[part], f"{where}.{part}", "out_features") // of_head
        )
    return sizes


def _attention(attention: Values, where: str, faults: Faults) -> Values:
    heads, kv_heads = attention["n_heads"], attention["n_kv_heads"]
    if "dim" in attention and attention["head_dim"] is None:
        attention["head_dim"] = _size(attention, where, "dim") // _size(attention, where, "n_heads")
    head_dim = _size(attention, where, "head_dim")
    turned = attention.get("rotary_dim", head_dim)
    is_llama = not any(name.endswith("norm") for name in attention)
    values = {
        "num_attention_heads": heads,
        "num_key_value_heads": heads if kv_heads is None else kv_heads,
        "head_dim": head_dim,
        **_rope(attention["rope"], f"{where}.rope", turned, is_llama, faults),
    }
    if "rotary_dim" in attention:
        values["partial_rotary_factor"] = _size(attention, where, "rotary_dim") / head_dim
    return values


def _rope(rope: Values, where: str, head_dim: int, is_llama: bool, faults: Faults) -> Values:
    """torchtitan's yarn only rotates; it lacks Hugging Face's factor on cos and sin."""
    _want(f"{where}.dim", rope["dim"], head_dim, faults)
    values = {"rope_theta": rope["theta"], "max_position_embeddings": rope["max_seq_len"]}
    scaling, factor = rope["scaling"], rope["rope_factor"]
    known = ("none", "yarn", "llama") if is_llama else ("none", "yarn")
    if scaling not in known:
        faults.append(
            f"{where}.scaling: expected {' or '.join(map(repr, known))}, got {shown(scaling)}"
        )
    if scaling == "llama":
        keys = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        values["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": rope["scaling_factor"],
            **{key: rope[key] for key in keys},
        }
    if scaling == "yarn" and not isinstance(factor, (int, float)):
        faults.append(f"{where}.rope_factor: expected a number, got {shown(factor)}")
    elif scaling == "yarn" and factor > 1:
        values["rope_scaling"] = {
            "rope_type": "yarn",
            "factor": factor,
            "attention_factor": 1.0,
            "original_max_position_embeddings": rope["original_seq_len"],
            **{key: rope[key] for key in ("beta_fast", "beta_slow", "truncate")},
        }
    return values


def _experts(moe: Values, where: str, faults: Faults) -> Values:
    router, experts = moe["router"], moe["routed_experts"]
    score, scale = router["score_func"], router["route_scale"]
    if score not in ("softmax", "sigmoid"):
        faults.append(
            f"{where}.router.score_func: expected 'softmax' or 'sigmoid', got {shown(score)}"
        )
    try:
        number(f"{where}.router.route_scale", scale, 0, strict=True)
    except ConfigError as error:
        faults.append(str(error))
    groups, limit = router["num_expert_groups"], router["num_limited_groups"]
    if groups is not None and (type(groups) is not int or type(limit) is not int):
        faults.append(
            f"{where}.router.num_expert_groups: expected integers, or None, got {shown(groups)} "
            f"with num_limited_groups={shown(limit)}"
        )
    top_k, dispatcher = router["top_k"], f"{where}.routed_experts.token_dispatcher"
    _want(f"{dispatcher}.top_k", experts["token_dispatcher"]["top_k"], top_k, faults)
    shared = moe["shared_experts"]
    return {
        "num_experts": moe["num_experts"],
        "num_experts_per_tok": top_k,
        "norm_topk_prob": bool(router["route_norm"]),
        "moe_intermediate_size": experts["inner_experts"]["hidden_dim"],
        "router_bias": moe["load_balance_coeff"] is not None,
        "score_func": score,
        "n_group": 1 if groups is None else groups,
        "topk_group": 1 if groups is None else limit,
        "routed_scaling_factor": scale,
        "shared_intermediate_size": shared["w1"]["out_features"] if shared else 0,
        "shared_switch": bool(shared) and "gate" in shared,
    }

"""Reads a Qwen3 or a Llama of torchtitan: its config as a Hugging Face config, for
ModelSpec.from_torchtitan.

torchtitan's config is a tree of dataclasses whose classes choose the modules, and has settings
that a Hugging Face config lacks. They do not show in the state dict, so ignoring one would give
wrong numbers without an error. Therefore:

* a class that is not named here is refused (a converter's Float8Linear, a subclass of one's own);
* of the classes that are named each field is read, or has to have its default;
* what the engine does not compute is refused by name, all of it in one message.

torchtitan itself is not imported. Its sources, 0.3.0: models/qwen3, models/llama3, models/common.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from rollmesh.errors import ConfigError
from rollmesh.model.rope import MAX_FLOAT
from rollmesh.runtime.messages import shown

_NOT_OF_INFERENCE = {
    "param_init",
    "sharding_config",
}  # of every module: its first values, its layout
_LINEAR, _NORM = ("Linear", "RowParallelLinear"), ("RMSNorm",)
_ATTENTION = ("FlexAttention", "VarlenAttention", "ScaledDotProductAttention")
_QKV, _MLP = (
    ("QKVLinear", "FusedQKVLinear", "AllGatherFusedQKVLinear"),
    ("FeedForward", "AllGatherFusedFeedForward"),
)
_DISPATCHERS = tuple(
    f"{kind}TokenDispatcher"
    for kind in ("Local", "AllToAll", "TorchAO", "DeepEP", "HybridEP", "MinimalAsyncEP")
)


class _Node:
    """One dataclass of the tree. `where`: its place, as a user would write it. `faults`: what was
    refused, of the whole tree."""

    def __init__(self, value: Any, where: str, faults: list[str], kinds: Sequence[str]):
        kind = type(value)
        name = kind.__qualname__.removesuffix(".Config")
        if (
            kind.__module__.split(".")[0] != "torchtitan"
            or name not in kinds
            or not dataclasses.is_dataclass(value)
        ):
            wanted = " or ".join(f"{kind}.Config" for kind in kinds)
            raise ConfigError(
                f"{where}: expected torchtitan's {wanted}, got "
                f"{kind.__module__}.{kind.__qualname__}"
            )
        self._value, self.where, self._faults = value, where, faults
        self._fields = {field.name: field for field in dataclasses.fields(value)}
        self._unread = self._fields.keys() - _NOT_OF_INFERENCE
        self.name = name

    def read(self, field: str) -> Any:
        if field not in self._fields:
            raise ConfigError(
                f"{self.where}: expected a field {field}, as torchtitan 0.3.0 has, got "
                f"{', '.join(self._fields)}"
            )
        self._unread -= {field}
        return getattr(self._value, field)

    def want(self, field: str, wanted: Any) -> None:
        """Refuses another value."""
        if (value := self.read(field)) != wanted:
            self.refuse(f"{field}: expected {wanted!r}, got {shown(value)}")

    def refuse(self, why: str) -> None:
        self._faults.append(f"{self.where}.{why}")

    def node(self, field: str, kinds: Sequence[str]) -> _Node:
        return _Node(self.read(field), f"{self.where}.{field}", self._faults, kinds)

    def skip(self, *fields: str) -> None:
        """Sizes, which every push checks, and what only the trainer's communication or speed
        depends on."""
        self._unread -= set(fields)

    def done(self) -> None:
        """Every field that was not read has to have its default."""
        for name in sorted(self._unread):
            field, value = self._fields[name], getattr(self._value, name)
            default = (
                field.default
                if field.default_factory is dataclasses.MISSING
                else field.default_factory()
            )
            if value != default:
                self.refuse(
                    f"{name}: expected no such field, as in torchtitan 0.3.0, or its default "
                    f"{default!r}, got {shown(value)}"
                )


BEYOND_HF = (
    "router_bias",
    "score_func",
    "n_group",
    "topk_group",
    "routed_scaling_factor",
    "shared_intermediate_size",
)


def hf_config(model: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the config as transformers has it, fields of ModelSpec that it cannot say). model:
    torchtitan's Qwen3Model.Config or Llama3Model.Config, or its ModelSpec."""
    if (
        type(model).__qualname__ == "ModelSpec"
        and type(model).__module__.split(".")[0] == "torchtitan"
    ):
        model = model.model
    faults: list[str] = []
    root = _Node(model, "model", faults, ["Qwen3Model", "Llama3Model"])
    block = root.name.removesuffix("Model") + "TransformerBlock"
    layers = root.read("layers")
    if not isinstance(layers, (list, tuple)) or not layers:
        raise ConfigError(f"model.layers: expected a list of {block}.Config, got {shown(layers)}")
    read = [
        _layer(_Node(layer, f"model.layers[{i}]", faults, [block]))
        for i, layer in enumerate(layers)
    ]
    values = _alike(read, faults)
    values |= {
        "model_type": "llama" if root.name == "Llama3Model" else "qwen3",
        "vocab_size": root.read("vocab_size"),
        "hidden_size": root.read("dim"),
        "num_hidden_layers": len(layers),
        "tie_word_embeddings": root.read("enable_weight_tying"),
        "eos_token_id": None,
    }
    if any("num_experts" in layer for layer in read):
        values["model_type"] = "qwen3_moe"
        values["mlp_only_layers"] = [
            i for i, layer in enumerate(read) if "num_experts" not in layer
        ]
    eps = _norm(root.node("norm", _NORM))
    if eps != values["rms_norm_eps"]:
        root.refuse(f"norm.eps: expected that of the layers, {values['rms_norm_eps']}, got {eps}")
    _linear(root.node("lm_head", (*_LINEAR, "CastLinear")))
    embedding = root.node("tok_embeddings", ["Embedding"])
    embedding.skip("num_embeddings", "embedding_dim")
    embedding.done()
    root.done()
    if faults:
        raise ConfigError(
            f"not a model that rollmesh computes: {'; '.join(faults[:20])}"
            + _rest(len(faults) - 20)
        )
    return values, {field: values.pop(field) for field in BEYOND_HF if field in values}


def _rest(count: int) -> str:
    return f"; and {count} more" if count > 0 else ""


def _alike(layers: list[dict[str, Any]], faults: list[str]) -> dict[str, Any]:
    """The values of all layers. Those of experts, or of a dense MLP, are of the layers that have
    them."""
    values: dict[str, Any] = {}
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


def _layer(layer: _Node) -> dict[str, Any]:
    attention = layer.node("attention", ["GQAttention"])
    heads, dim = attention.read("n_heads"), attention.read("dim")
    kv_heads, head_dim = attention.read("n_kv_heads"), attention.read("head_dim")
    values = {
        "num_attention_heads": heads,
        "num_key_value_heads": heads if kv_heads is None else kv_heads,
        "head_dim": _divided(attention, dim, heads) if head_dim is None else head_dim,
    }
    is_llama = layer.name == "Llama3TransformerBlock"
    values |= _rope(
        attention.node("rope", ["ComplexRoPE" if is_llama else "CosSinRoPE"]), values["head_dim"]
    )
    _qkv(attention.node("qkv_linear", _QKV))
    _linear(attention.node("wo", _LINEAR))
    _inner_attention(attention.node("inner_attention", _ATTENTION))
    eps = {norm: _norm(layer.node(norm, _NORM)) for norm in ("attention_norm", "ffn_norm")}
    if is_llama:
        attention.want("qk_norm", None)
    else:
        eps["attention.qk_norm"] = _norm(attention.node("qk_norm", _NORM))
    attention.done()
    values["rms_norm_eps"] = eps["attention_norm"]
    for norm, value in eps.items():
        if value != values["rms_norm_eps"]:
            layer.refuse(
                f"{norm}.eps: expected that of attention_norm, {values['rms_norm_eps']}, got "
                f"{value}"
            )
    if is_llama:
        layer.want("moe", None)
    has_experts = layer.read("moe") is not None and not is_llama
    values |= (
        _experts(layer.node("moe", ["MoE"]))
        if has_experts
        else _mlp(layer.node("feed_forward", _MLP))
    )
    layer.skip("feed_forward")  # of a layer with experts: not built
    layer.done()
    return values


def _divided(attention: _Node, dim: Any, heads: Any) -> int:
    """head_dim where the config has none."""
    for field, value in (("dim", dim), ("n_heads", heads)):
        if not isinstance(value, int) or value < 1:
            raise ConfigError(
                f"{attention.where}.{field}: expected an integer > 0, got {shown(value)}"
            )
    size: int = dim // heads
    return size


def _linear(linear: _Node) -> int:
    """Its rows."""
    linear.want("bias", False)
    if (
        linear.name == "CastLinear"
    ):  # of TitanRL: logits in float32, as the engine's are in every dtype
        linear.want("compute_dtype", "float32")
    linear.skip("in_features")
    rows: int = linear.read("out_features")
    linear.done()
    return rows


def _norm(norm: _Node) -> float:
    """Its eps."""
    norm.want("elementwise_affine", True)
    norm.skip("normalized_shape")
    eps: float = norm.read("eps")
    norm.done()
    return eps


def _qkv(qkv: _Node) -> None:
    for field in ("wq", "wkv") if qkv.name == "QKVLinear" else ("wqkv",):
        _linear(qkv.node(field, _LINEAR))
    qkv.skip("head_dim", "n_heads", "n_kv_heads")
    qkv.done()


def _inner_attention(attention: _Node) -> None:
    if attention.name == "VarlenAttention":
        attention.want("window_size", (-1, 0))
    attention.skip("block_size", "kernel_options")  # of FlexAttention's kernel
    attention.done()


def _rope(rope: _Node, head_dim: int) -> dict[str, Any]:
    """torchtitan's yarn is a rotation alone, without the factor that Hugging Face's has on cos and
    sin."""
    rope.want("dim", head_dim)
    values = {"rope_theta": rope.read("theta"), "max_position_embeddings": rope.read("max_seq_len")}
    scaling, factor = rope.read("scaling"), rope.read("rope_factor")
    yarn = {
        "beta_fast": rope.read("beta_fast"),
        "beta_slow": rope.read("beta_slow"),
        "original_max_position_embeddings": rope.read("original_seq_len"),
        "truncate": rope.read("truncate"),
    }
    llama3 = {
        key: rope.read(key)
        for key in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    }
    llama3["factor"] = rope.read("scaling_factor")
    known = ("none", "yarn", "llama") if rope.name == "ComplexRoPE" else ("none", "yarn")
    if scaling not in known:
        rope.refuse(f"scaling: expected {' or '.join(map(repr, known))}, got {shown(scaling)}")
    if scaling == "llama":
        values["rope_scaling"] = {"rope_type": "llama3", **llama3}
    if scaling == "yarn" and not isinstance(factor, (int, float)):
        rope.refuse(f"rope_factor: expected a number, got {shown(factor)}")
    elif scaling == "yarn" and factor > 1:
        values["rope_scaling"] = {
            "rope_type": "yarn",
            "factor": factor,
            "attention_factor": 1.0,
            **yarn,
        }
    rope.done()
    return values


def _mlp(mlp: _Node) -> dict[str, Any]:
    rows = {field: _linear(mlp.node(field, _LINEAR)) for field in ("w1", "w3", "w2")}
    mlp.done()
    return {"intermediate_size": rows["w1"]}


def _experts(moe: _Node) -> dict[str, Any]:
    router = moe.node("router", ["TokenChoiceTopKRouter"])
    if (score := router.read("score_func")) not in ("softmax", "sigmoid"):
        router.refuse(f"score_func: expected 'softmax' or 'sigmoid', got {shown(score)}")
    scale = router.read("route_scale")
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not 0 < scale <= MAX_FLOAT:
        router.refuse(f"route_scale: expected a finite number > 0, got {shown(scale)}")
    groups, limit = router.read("num_expert_groups"), router.read("num_limited_groups")
    if groups is not None and (type(groups) is not int or type(limit) is not int):
        router.refuse(
            f"num_expert_groups: expected integers, or None, got {shown(groups)} with "
            f"num_limited_groups={shown(limit)}"
        )
    router.want("_debug_force_load_balance", False)
    router.want("num_experts", moe.read("num_experts"))
    top_k, norm = router.read("top_k"), router.read("route_norm")
    _linear(router.node("gate", _LINEAR))
    router.done()
    experts = moe.node("routed_experts", ["RoutedExperts"])
    inner = experts.node("inner_experts", ["GroupedExperts"])
    inner.want("num_experts", moe.read("num_experts"))
    inner.skip("dim")
    width = inner.read("hidden_dim")
    inner.done()
    dispatcher = experts.node("token_dispatcher", _DISPATCHERS)
    if dispatcher.name == "HybridEPTokenDispatcher":
        dispatcher.want("non_blocking_capacity_factor", None)  # drops tokens
    dispatcher.want("top_k", top_k)
    dispatcher.skip(
        "num_experts",
        "pad_multiple",
        "cudagraphable",
        "num_max_tokens_per_rank",
        "hidden_dim",
        "dtype",
        "device",
    )
    dispatcher.done()
    experts.done()
    router_bias = moe.read("load_balance_coeff") is not None
    shared = moe.read("shared_experts")
    shared_width = (
        0 if shared is None else _mlp(moe.node("shared_experts", _MLP))["intermediate_size"]
    )
    moe.done()
    return {
        "num_experts": moe.read("num_experts"),
        "num_experts_per_tok": top_k,
        "norm_topk_prob": norm,
        "moe_intermediate_size": width,
        "router_bias": router_bias,
        "score_func": score,
        "n_group": 1 if groups is None else groups,
        "topk_group": 1 if groups is None else limit,
        "routed_scaling_factor": scale,
        "shared_intermediate_size": shared_width,
    }

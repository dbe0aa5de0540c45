"""The model families: what the config of each means, one entry of FAMILIES for each model_type of
transformers.

A key that changes the numbers of some family is read where the family's own code in transformers
reads it, with the default of the family's config class; elsewhere it is an unknown key. How a
family is added: docs/models.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rollmesh.errors import ConfigError
from rollmesh.model.reader import MAX_POSITION, Reader
from rollmesh.model.rope import KEYS as ROPE_KEYS
from rollmesh.model.rope import ROPE_TABLES, number, table_of
from rollmesh.runtime.arguments import choice
from rollmesh.runtime.messages import shown

Ropes = tuple[tuple[str, Mapping[str, Any]], ...]
PerLayer = Callable[[Reader, int], tuple[int, ...]]  # of a config and its number of layers
LayerKinds = Callable[[Reader, int], tuple[str, ...]]
Switch = str | bool | Callable[[Reader], bool]
HIDDEN_BY_HEADS = 0  # head_dim is hidden_size // num_attention_heads where the config has none


# ----------------------------------------------------------------------------------------- layers
def none(c: Reader, layers: int) -> tuple[int, ...]:
    return (0,) * layers


def every(c: Reader, layers: int) -> tuple[int, ...]:
    return (1,) * layers


def attention_layers(c: Reader, layers: int) -> tuple[str, ...]:
    return ("attention",) * layers


def _window(c: Reader, default: int | None) -> int:
    """Returns sliding_window, or `default` if the key is missing; 0 (full attention) if it is
    None."""
    if c.values.get("sliding_window", default) is None:
        return 0
    return c.integer("sliding_window", default=default)


def _switched_window(c: Reader, default: int | None = 4096) -> int:
    """Returns sliding_window where use_sliding_window is on, else 0."""
    return _window(c, default) if c.boolean("use_sliding_window", False) else 0


def _layer_types(
    c: Reader,
    layers: int,
    key: str = "layer_types",
    kinds: tuple[str, ...] = ("full_attention", "sliding_attention"),
) -> tuple[str, ...] | None:
    types = c.values.get(key)
    if types is None:
        return None
    if not isinstance(types, (list, tuple)) or len(types) != layers:
        raise ConfigError(
            f"{key}: expected one entry for each of num_hidden_layers={layers}, got {shown(types)}"
        )
    if other := [t for t in types if not isinstance(t, str) or t not in kinds]:
        raise ConfigError(f"{key}: expected {' and '.join(kinds)}, got {shown(other)}")
    return tuple(types)


def _windows(
    c: Reader, layers: int, has_window: Callable[[int], bool], window: int
) -> tuple[int, ...]:
    """The windows of layer_types, else a window in the layers for which has_window holds."""
    types = _layer_types(c, layers)
    if types is None:
        return tuple(window if window and has_window(i) else 0 for i in range(layers))
    if "sliding_attention" in types and not window:
        raise ConfigError(
            "layer_types: expected use_sliding_window and sliding_window with sliding_attention, "
            "got one that is off"
        )
    return tuple(window if t == "sliding_attention" else 0 for t in types)


def windows_from_a_layer_on(c: Reader, layers: int) -> tuple[int, ...]:
    """Qwen2, Qwen3: as layer_types says, else from max_window_layers on."""
    return _windows(
        c, layers, lambda i: i >= c.integer("max_window_layers", 0, default=28), _switched_window(c)
    )


def early_even_windows(c: Reader, layers: int) -> tuple[int, ...]:
    """Qwen2-MoE: as layer_types says, else in every second layer below max_window_layers."""
    return _windows(
        c,
        layers,
        lambda i: i % 2 == 0 and i < c.integer("max_window_layers", 0, default=28),
        _switched_window(c),
    )


def one_switched_window(c: Reader, layers: int) -> tuple[int, ...]:
    """Qwen3-MoE: all layers or none."""
    window, types = _switched_window(c), _layer_types(c, layers)
    if types is not None and set(types) != {"sliding_attention" if window else "full_attention"}:
        raise ConfigError(
            "layer_types: expected one kind for all of Qwen3-MoE's layers, got "
            f"{shown(c.values['layer_types'])}"
        )
    return (window,) * layers


def one_window(default: int | None) -> PerLayer:
    """Mistral, Mixtral: sliding_window in all layers; None: full attention."""
    return lambda c, layers: (_window(c, default),) * layers


def windows_where(has_window: Callable[[Reader, int], bool], default: int = 4096) -> PerLayer:
    """A window as layer_types says, else in the layers for which has_window holds."""
    return lambda c, layers: _windows(c, layers, lambda i: has_window(c, i), _window(c, default))


def rope_in_windows(c: Reader, layers: int) -> tuple[int, ...]:
    """EXAONE-4: rope turns q and k in layers with a window, or in all layers if sliding_window is
    None."""
    return tuple(int(w > 0 or not _window(c, 4096)) for w in _EXAONE_WINDOWS(c, layers))


def layers_with_rope(c: Reader, layers: int) -> tuple[int, ...]:
    """SmolLM3: no_rope_layers has a 1 where rope turns q and k; else all but every
    no_rope_layer_interval-th do."""
    given = c.values.get("no_rope_layers")
    if given is None:
        interval = c.integer("no_rope_layer_interval", default=4)
        return tuple(int((i + 1) % interval != 0) for i in range(layers))
    if (
        not isinstance(given, (list, tuple))
        or len(given) < layers
        or any(type(i) is not int or i not in (0, 1) for i in given)
    ):
        raise ConfigError(
            f"no_rope_layers: expected a 0 or 1 for each of num_hidden_layers={layers}, got "
            f"{shown(given)}"
        )
    return tuple(given[:layers])


def windows_without_rope(c: Reader, layers: int) -> tuple[int, ...]:
    """SmolLM3: as layer_types says, else in the layers without rope."""
    has_rope = layers_with_rope(c, layers)
    return _windows(c, layers, lambda i: not has_rope[i], _switched_window(c, None))


def patterned_windows(window: int, every: int, key: str = "") -> PerLayer:
    """A window as layer_types says, else in all layers but every n-th. n is the value of `key`, by
    default `every`."""
    return windows_where(lambda c, i: (i + 1) % c.integer(key, default=every) != 0, window)


def num_experts(
    c: Reader, key: str = "num_experts", low: int = 0, default: int | None = None
) -> int:
    """num_local_experts is transformers' other name for it."""
    both = [c.integer(name, low) for name in (key, "num_local_experts") if c.given(name)]
    if len(set(both)) > 1:
        raise ConfigError(f"{key}={both[0]} and num_local_experts={both[1]} differ")
    return both[0] if both else c.integer(key, low, default=default)


def sparse_layers(c: Reader, layers: int) -> tuple[int, ...]:
    """Qwen's: every decoder_sparse_step-th layer, but for those in mlp_only_layers."""
    step, dense = (
        c.integer("decoder_sparse_step", default=1),
        c.values.get("mlp_only_layers") or [],
    )
    if not isinstance(dense, (list, tuple)) or not all(
        type(i) is int and 0 <= i < layers for i in dense
    ):
        raise ConfigError(
            f"mlp_only_layers: expected a list of layers in [0, {layers}), got {shown(dense)}"
        )
    has_experts, without = num_experts(c) > 0, frozenset(dense)
    return tuple(
        int(has_experts and i not in without and (i + 1) % step == 0) for i in range(layers)
    )


def first_layers_dense(default: int) -> PerLayer:
    """GLM-4-MoE: experts as mlp_layer_types says, else from layer first_k_dense_replace on."""

    def rule(c: Reader, layers: int) -> tuple[int, ...]:
        types = _layer_types(c, layers, "mlp_layer_types", ("dense", "sparse"))
        first = c.integer("first_k_dense_replace", 0, default=default)
        return tuple(int(types[i] == "sparse" if types else i >= first) for i in range(layers))

    return rule


def ernie_layers(c: Reader, layers: int) -> tuple[int, ...]:
    """ERNIE-4.5: every moe_layer_interval-th layer from moe_layer_start_index to
    moe_layer_end_index."""
    step, start = (
        c.integer("moe_layer_interval", default=1),
        c.integer("moe_layer_start_index", 0, default=1),
    )
    end = c.integer("moe_layer_end_index", -1, default=-1)
    end = layers - 1 if end < 0 else end
    return tuple(int((i + 1) % step == 0 and start <= i <= end) for i in range(layers))


def shared_experts(key: str, default: int | None = 1) -> Callable[[Reader], int]:
    """The width of the shared expert: the number of shared experts times moe_intermediate_size."""
    return lambda c: min(
        c.integer(key, 0, default=default) * c.integer("moe_intermediate_size"), MAX_POSITION
    )


# --------------------------------------------------------------------------------------- families
@dataclass(frozen=True, slots=True)
class Experts:
    """The mixtures of experts of a family. What is left out is Qwen3-MoE's."""

    number: Callable[[Reader], int] = num_experts
    top_k: int | None = None  # where the config has none; None: it has to
    top_k_key: str = "num_experts_per_tok"
    width: str = "moe_intermediate_size"  # the key
    renormalize: str | bool = (
        # the chosen scores are divided by their sum: the key that says it, or always, or never
        "norm_topk_prob"
    )
    renormalize_default: bool = False
    score_func: str = "softmax"
    router_bias: bool = False  # every sync has to bring one
    has_groups: bool = False  # n_group and topk_group are read
    scaling: str = ""  # the key of the factor of gates
    scaling_default: float = 1.0
    min_sum: bool = False  # moe_norm_min is read: scores are divided by their sum or at least this
    shared_width: Callable[[Reader], int] = lambda c: 0
    shared_switch: bool = False  # a row's sigmoid scales the shared expert
    bias: bool = False  # the router's logits and the experts have biases


def _olmoe(c: Reader, head_dim: int) -> None:
    """Its norms of q and k are as wide as hidden_size, whatever head_dim."""
    if c.given("clip_qkv"):
        raise ConfigError(
            f"clip_qkv={shown(c.values['clip_qkv'])}: clipped q, k and v are not supported"
        )
    hidden, heads = c.values["hidden_size"], c.values["num_attention_heads"]
    if head_dim * heads != hidden:
        raise ConfigError(
            f"head_dim: expected hidden_size / num_attention_heads={hidden / heads:g}, got "
            f"{head_dim}"
        )


def _rope_is_given(c: Reader, head_dim: int) -> None:
    """CWM: transformers' default, a table of the type llama3, is not supported."""
    if not any(c.given(name) for name in ROPE_TABLES):
        raise ConfigError("rope_parameters: expected a table, got none")


def _phi3_rope(config: Mapping[str, Any]) -> Ropes:
    """Phi-3: "su" and "yarn" are older names of "longrope", the only type besides "default"."""
    name, table = table_of(config)
    given = table.get("rope_type", table.get("type", "default"))
    kind = choice("rope_type", given, ["default", "longrope", "su", "yarn"])
    table = {**table, "rope_type": "default" if kind == "default" else "longrope"}
    return (("", {"original_max_position_embeddings": 4096, **config, name: table}),)


def _gpt_oss_rope(config: Mapping[str, Any]) -> Ropes:
    """gpt-oss: a config without a rope table has this one."""
    if any(config.get(name) is not None for name in ROPE_TABLES):
        return (("", config),)
    table = {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    }
    return (("", {**config, ROPE_TABLES[-1]: table}),)


@dataclass(frozen=True, slots=True)
class Family:
    """A family. What is left out is Llama's."""

    architecture: str  # transformers' class
    keys: str = ""  # that its config has besides those of all (spec.py), separated by blanks
    inert: str = ""  # likewise, without effect
    head_dim: int = HIDDEN_BY_HEADS  # where the config has none
    num_key_value_heads: int | None = None  # where the key is missing; None: num_attention_heads
    max_position_embeddings: int = 32768  # likewise, and the next ones
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    eos_token_id: int | tuple[int, ...] | None = 2  # likewise, where the vocabulary has it
    partial_rotary_factor: float | None = (
        None  # of a family that turns the first elements of a head; None: it turns whole heads
    )
    tied: bool = False
    qk_norm: str | Callable[[Reader], str] = "none"  # of QK_NORMS
    hidden_act: str = "silu"  # where the key is missing
    ungated: bool = False  # dense MLPs have no gate
    norm_before: bool = True  # norms of a block's input
    norm_after: bool = False  # of its output, before it is added
    attention_bias: Switch = (
        "attention_bias"  # of q, k and v: the key that says it, or always, or never
    )
    o_bias: Switch = "attention_bias"
    layer_kinds: LayerKinds = attention_layers  # of LAYER_KINDS
    windows: PerLayer = none  # positions of each layer's sliding window; 0: full attention
    # Configs from which rope tables are read, each with the path of its keys inside the model's
    # table ("" if they are not nested): first the model's, then that of layers with a window, if
    # they have another one.
    ropes: Callable[[Mapping[str, Any]], Ropes] = lambda config: (("", config),)
    rope_layers: PerLayer = every  # 1 where rope turns q and k
    moe_layers: PerLayer = none  # 1 where a layer is a mixture of experts
    experts: Experts = Experts()
    names: tuple[
        tuple[str, str], ...
    ] = ()  # (kind of csrc/model/params.c, what a checkpoint calls it instead)
    rope_neighbours: bool = False  # rope turns neighbours of a head; else its halves
    activation: str | None = None  # of all MLPs, whatever hidden_act is; None: hidden_act names it
    sinks: bool = False  # attention has a sink for each head
    mxfp4: bool = False  # checkpoints may have experts in MXFP4, which SafetensorsFolder converts
    # A tensor of all experts is transposed, and rows of gate and up alternate in it.
    experts_interleaved: bool = False
    # of WQ_ROWS: what tensors with the names wq and wk hold, which Meta, Mistral and torchtitan use
    wq_rows: str = "none"
    activation_key: str = "hidden_act"
    zero_centered_norms: bool = False  # norms multiply by 1 + weight
    qk_norm_last: bool = False  # q and k are normed after rope
    attention_gate: bool = False  # a sigmoid of a layer's input scales attention's output
    # Returns further fields of ModelSpec, such as factors and caps.
    factors: Callable[[Reader], dict[str, Any]] = lambda c: {}
    check: Callable[[Reader, int], None] | None = (
        None  # a rule of this family alone, of its config and head_dim
    )
    # (key, value): transformers' code computes this value, whatever the config says. Another value,
    # also one in a list, is refused.
    fixed: tuple[tuple[str, Any], ...] = ()

    @property
    def has_experts(self) -> bool:
        return self.moe_layers is not none


def _factor(c: Reader, key: str) -> float | None:
    value = c.positive(key, 1.0)
    return None if value == 1 else value


def _cap(c: Reader, key: str, default: float | None) -> float | None:
    given = c.values.get(key, default)
    return None if given is None else c.positive(key, given)


def _gemma(attention_cap: float | None, logit_cap: float | None) -> Callable[[Reader], Any]:
    """Returns a Gemma's `factors`. The arguments are the defaults of its caps; attention_cap=None:
    the family has no cap of scores."""

    def factors(c: Reader) -> dict[str, Any]:
        key = "attn_logit_softcapping"
        return {
            "attention_multiplier": c.positive("query_pre_attn_scalar", 256) ** -0.5,
            key: None if attention_cap is None else _cap(c, key, attention_cap),
            "final_logit_softcapping": _cap(c, "final_logit_softcapping", logit_cap),
            "embedding_multiplier": c.integer("hidden_size") ** 0.5,
            "rounds_embedding_multiplier": True,
        }

    return factors


def _granite(c: Reader) -> dict[str, Any]:
    keys = ("embedding_multiplier", "residual_multiplier", "logits_scaling")
    return {
        "attention_multiplier": c.positive("attention_multiplier", 1.0),
        **{key: _factor(c, key) for key in keys},
    }


def _two_ropes(config: Mapping[str, Any], base: Any) -> Ropes:
    """rope_parameters has a table for each kind of layer. rope_scaling, of transformers 4, is for
    layers without a window. base: the default of rope_theta in layers with a window."""
    table = config.get("rope_parameters") or {}
    if not isinstance(table, Mapping) or table.keys() - {"full_attention", "sliding_attention"}:
        raise ConfigError(
            "rope_parameters: expected tables full_attention and sliding_attention, got "
            f"{shown(table)}"
        )
    full, local = (
        table_of({"rope_parameters": table.get(f"{kind}_attention")})[1]
        for kind in ("full", "sliding")
    )
    scaling = table_of({"rope_scaling": config.get("rope_scaling")})[1]
    unread = {*ROPE_TABLES, "original_max_position_embeddings"}  # the latter counts in tables alone
    rest = {key: config[key] for key in config if key not in unread}
    name, path = ("rope_scaling", "") if scaling else ("rope_parameters", ".full_attention")
    return (
        (path, {**rest, name: {**full, **scaling}}),
        (".sliding_attention", {**rest, "rope_theta": base, "rope_parameters": local}),
    )


def gemma3_ropes(config: Mapping[str, Any]) -> Ropes:
    return _two_ropes(config, config.get("rope_local_base_freq", 10000.0))


def olmo3_ropes(config: Mapping[str, Any]) -> Ropes:
    return _two_ropes(config, 500000.0)


def _afmoe(c: Reader) -> dict[str, Any]:
    is_scaled = c.boolean("mup_enabled", False)
    return {
        "routed_scaling_factor": c.positive("route_scale", 1.0),
        "embedding_multiplier": c.integer("hidden_size") ** 0.5 if is_scaled else None,
    }


def _hunyuan_moe(c: Reader) -> dict[str, Any]:
    """HunYuan: moe_topk may be a list of equal numbers, at least one for each layer."""
    key = "moe_topk" if c.given("moe_topk") else "num_experts_per_tok"
    given = c.values.get(key, 1)
    layers = c.integer("num_hidden_layers")
    each = list(given) if isinstance(given, (list, tuple)) else [given] * layers
    if len(each) < layers or each != [each[0]] * len(each):
        raise ConfigError(f"{key}: expected one number for all layers, got {shown(given)}")
    top_k = Reader({key: each[0]}).integer(key)
    if (other := c.integer("num_experts_per_tok", default=top_k)) != top_k:
        raise ConfigError(f"num_experts_per_tok: expected moe_topk={top_k}, got {other}")
    return {"num_experts_per_tok": top_k}


def hunyuan_ropes(config: Mapping[str, Any]) -> Ropes:
    """HunYuan: with `alpha`, the type "dynamic" is NTK scaling by alpha at every length."""
    name, table = table_of(config)
    alpha, kind = table.get("alpha"), table.get("rope_type", table.get("type"))
    if not alpha or kind != "dynamic":
        return (("", config),)
    dim = Reader(config).integer("head_dim", 4)
    theta = table.get("rope_theta", config.get("rope_theta", 10000.0))
    stretch = number(f"{name}.alpha", alpha, 0) ** (dim / (dim - 2))
    # The keys of the other types have no effect.
    kept = {key: value for key, value in table.items() if key not in ROPE_KEYS | {"alpha"}}
    kept |= {"rope_type": "default", "rope_theta": number("rope_theta", theta, 0) * stretch}
    return (("", {**config, name: kept}),)


# The kinds of csrc/model/layer_kinds.c, in its order.
LAYER_KINDS: tuple[str, ...] = ("attention",)
WQ_ROWS = (
    "none",
    "halves",
    "neighbours",
)  # there are none; rope turns halves of a head, or neighbours
# "head": each head of q and k; "whole": all heads of q, of k, together.
QK_NORMS: tuple[str, ...] = ("none", "head", "whole")
_QWEN = "use_sliding_window sliding_window max_window_layers layer_types"
_QWEN_MOE = (
    "decoder_sparse_step moe_intermediate_size num_experts_per_tok num_experts "
    "num_local_experts norm_topk_prob mlp_only_layers"
)
_GEMMA = (
    "attention_bias hidden_activation query_pre_attn_scalar final_logit_softcapping "
    "sliding_window layer_types"
)
_GEMMA_NAMES = (
    ("post_attn_norm", "post_attention_layernorm.weight"),
    ("pre_mlp_norm", "pre_feedforward_layernorm.weight"),
)
_AFMOE_WINDOWS = patterned_windows(1024, 4, "global_attn_every_n_layers")
_HUNYUAN_NAMES = (
    ("q_norm", "self_attn.query_layernorm.weight"),
    ("k_norm", "self_attn.key_layernorm.weight"),
)
_GRANITE = "embedding_multiplier residual_multiplier attention_multiplier logits_scaling"


def _shared(module: str) -> tuple[tuple[str, str], ...]:
    """The names of the shared expert's weights."""
    return tuple(
        (f"shared_{kind}", f"{module}.{kind}_proj.weight") for kind in ("gate", "up", "down")
    )


_MIXTRAL = (
    ("router", "block_sparse_moe.gate.weight"),
    ("expert_gate", "block_sparse_moe.experts.#.w1.weight"),
    ("expert_down", "block_sparse_moe.experts.#.w2.weight"),
    ("expert_up", "block_sparse_moe.experts.#.w3.weight"),
)
# The router and experts of DeepSeek-V3, as in GLM-4-MoE.
_DEEPSEEK_KEYS = (
    "moe_intermediate_size num_experts_per_tok n_shared_experts n_routed_experts num_local_experts "
    "routed_scaling_factor n_group topk_group first_k_dense_replace norm_topk_prob"
)
_DEEPSEEK = Experts(
    number=lambda c: num_experts(c, "n_routed_experts", 1, 128),
    top_k=8,
    renormalize_default=True,
    score_func="sigmoid",
    router_bias=True,
    has_groups=True,
    scaling="routed_scaling_factor",
    shared_width=shared_experts("n_shared_experts"),
)
_EXAONE = "sliding_window sliding_window_pattern layer_types"
_EXAONE_WINDOWS = patterned_windows(4096, 4, "sliding_window_pattern")

FAMILIES: dict[str, Family] = {
    "llama": Family(
        "LlamaForCausalLM", "attention_bias", max_position_embeddings=2048, wq_rows="neighbours"
    ),
    "mistral": Family(
        "MistralForCausalLM",
        "sliding_window",
        num_key_value_heads=8,
        max_position_embeddings=131072,
        attention_bias=False,
        o_bias=False,
        windows=one_window(4096),
        wq_rows="neighbours",
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        _QWEN,
        "num_nextn_predict_layers",
        eos_token_id=None,
        num_key_value_heads=32,
        attention_bias=True,
        o_bias=False,
        windows=windows_from_a_layer_on,
        fixed=(("attention_bias", True),),
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        f"attention_bias {_QWEN}",
        _QWEN_MOE,
        eos_token_id=None,
        head_dim=128,
        num_key_value_heads=32,
        qk_norm="head",
        wq_rows="halves",
        windows=windows_from_a_layer_on,
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        f"attention_bias use_sliding_window sliding_window {_QWEN_MOE}",
        "max_window_layers layer_types",
        eos_token_id=None,
        num_key_value_heads=4,
        qk_norm="head",
        wq_rows="halves",
        windows=one_switched_window,
        moe_layers=sparse_layers,
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        "attention_bias no_rope_layers no_rope_layer_interval use_sliding_window sliding_window "
        "layer_types",
        "max_window_layers",
        eos_token_id=128001,
        num_key_value_heads=4,
        rope_theta=2000000.0,
        tied=True,
        windows=windows_without_rope,
        rope_layers=layers_with_rope,
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        "attention_bias",
        eos_token_id=50279,
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        qk_norm="whole",
        norm_before=False,
        norm_after=True,
        names=(("post_attn_norm", "post_attention_layernorm.weight"),),
    ),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        "attention_bias sliding_window layer_types",
        eos_token_id=50279,
        max_position_embeddings=2048,
        rope_theta=500000.0,
        rms_norm_eps=1e-5,
        qk_norm="whole",
        norm_before=False,
        norm_after=True,
        windows=patterned_windows(4096, 4),
        ropes=olmo3_ropes,
        names=(("post_attn_norm", "post_attention_layernorm.weight"),),
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        "sliding_window num_local_experts num_experts num_experts_per_tok",
        "router_jitter_noise",
        num_key_value_heads=8,
        max_position_embeddings=131072,
        rope_theta=1000000.0,
        rms_norm_eps=1e-5,
        attention_bias=False,
        o_bias=False,
        windows=one_window(None),
        moe_layers=every,
        experts=Experts(top_k=2, width="intermediate_size", renormalize=True),
        wq_rows="neighbours",
        names=_MIXTRAL,
    ),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        f"qkv_bias shared_expert_intermediate_size {_QWEN} {_QWEN_MOE}",
        eos_token_id=None,
        num_key_value_heads=16,
        attention_bias=lambda c: c.boolean("qkv_bias", True),
        o_bias=False,
        windows=early_even_windows,
        moe_layers=sparse_layers,
        experts=Experts(
            top_k=4,
            shared_width=lambda c: c.integer("shared_expert_intermediate_size", default=5632),
            shared_switch=True,
        ),
        names=_shared("mlp.shared_expert"),
    ),
    "olmoe": Family(
        "OlmoeForCausalLM",
        "attention_bias clip_qkv num_experts num_local_experts num_experts_per_tok norm_topk_prob",
        eos_token_id=50279,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        qk_norm="whole",
        moe_layers=every,
        experts=Experts(top_k=8, width="intermediate_size"),
        check=_olmoe,
    ),
    "arcee": Family(
        "ArceeForCausalLM",
        "attention_bias",
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        eos_token_id=128001,
        hidden_act="relu2",
        ungated=True,
    ),
    "glm4": Family(
        "Glm4ForCausalLM",
        "attention_bias",
        head_dim=128,
        num_key_value_heads=2,
        max_position_embeddings=131072,
        rms_norm_eps=1.5625e-7,
        eos_token_id=(151329, 151336, 151338),
        partial_rotary_factor=0.5,
        norm_after=True,
        attention_bias=lambda c: c.boolean("attention_bias", True),
        o_bias=False,
        rope_neighbours=True,
        names=(("post_mlp_norm", "post_mlp_layernorm.weight"),),
    ),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM",
        f"attention_bias use_qk_norm {_DEEPSEEK_KEYS}",
        "num_experts num_mtp_layers num_nextn_predict_layers",
        eos_token_id=None,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        partial_rotary_factor=0.5,
        qk_norm=lambda c: "head" if c.boolean("use_qk_norm", False) else "none",
        o_bias=False,
        moe_layers=first_layers_dense(1),
        experts=_DEEPSEEK,
    ),
    "glm": Family(
        "GlmForCausalLM",
        "attention_bias",
        head_dim=128,
        num_key_value_heads=2,
        max_position_embeddings=131072,
        rms_norm_eps=1.5625e-7,
        eos_token_id=(151329, 151336, 151338),
        partial_rotary_factor=0.5,
        attention_bias=lambda c: c.boolean("attention_bias", True),
        o_bias=False,
        rope_neighbours=True,
    ),
    "seed_oss": Family(
        "SeedOssForCausalLM",
        "attention_bias attention_out_bias",
        "residual_dropout",
        head_dim=128,
        num_key_value_heads=8,
        max_position_embeddings=524288,
        attention_bias=lambda c: c.boolean("attention_bias", True),
        o_bias="attention_out_bias",
    ),
    "minimax_m2": Family(
        "MiniMaxM2ForCausalLM",
        "rotary_dim num_local_experts num_experts num_experts_per_tok",
        "router_jitter_noise use_mtp num_mtp_modules mtp_transformer_layers",
        head_dim=128,
        num_key_value_heads=8,
        max_position_embeddings=196608,
        rope_theta=5000000.0,
        eos_token_id=200020,
        partial_rotary_factor=1.0,
        qk_norm="whole",
        attention_bias=False,
        o_bias=False,
        moe_layers=every,
        experts=Experts(
            number=lambda c: num_experts(c, low=1, default=256),
            top_k=8,
            width="intermediate_size",
            renormalize=True,
            score_func="sigmoid",
            router_bias=True,
        ),
        names=(
            *_MIXTRAL,
            ("router_bias", "block_sparse_moe.e_score_correction_bias"),
        ),
        fixed=(
            ("attn_type_list", 1),
            ("qk_norm_type", "per_layer"),
            ("scoring_func", "sigmoid"),
            ("shared_intermediate_size", 0),
            ("use_qk_norm", True),
            ("use_routing_bias", True),
        ),
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        "attention_bias sliding_window layer_types num_local_experts num_experts "
        "num_experts_per_tok swiglu_alpha swiglu_limit",
        "experts_per_token initial_context_length",
        eos_token_id=None,
        head_dim=64,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        rope_theta=150000.0,
        ropes=_gpt_oss_rope,
        rms_norm_eps=1e-5,
        attention_bias=lambda c: c.boolean("attention_bias", True),
        o_bias=lambda c: c.boolean("attention_bias", True),
        windows=windows_where(lambda c, i: i % 2 == 0, 128),
        moe_layers=every,
        experts=Experts(
            number=lambda c: num_experts(c, low=1, default=128),
            top_k=4,
            width="intermediate_size",
            renormalize=True,
            bias=True,
        ),
        names=(("router", "mlp.router.weight"), ("router_logit_bias", "mlp.router.bias")),
        activation="swiglu_oai",
        sinks=True,
        mxfp4=True,
        experts_interleaved=True,
    ),
    "dots1": Family(
        "Dots1ForCausalLM",
        f"attention_bias sliding_window max_window_layers layer_types {_DEEPSEEK_KEYS}",
        eos_token_id=None,
        num_key_value_heads=32,
        max_position_embeddings=2048,
        qk_norm="head",
        windows=windows_where(lambda c, i: i >= c.integer("max_window_layers", 0, default=62)),
        moe_layers=first_layers_dense(0),
        experts=replace(
            _DEEPSEEK,
            number=lambda c: num_experts(c, "n_routed_experts", 1),
            top_k=None,
            renormalize_default=False,
            shared_width=shared_experts("n_shared_experts", None),
        ),
    ),
    "solar_open": Family(
        "SolarOpenForCausalLM",
        f"attention_bias {_DEEPSEEK_KEYS}",
        eos_token_id=None,
        head_dim=128,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        rope_theta=1000000.0,
        rms_norm_eps=1e-5,
        o_bias=False,
        moe_layers=every,
        experts=_DEEPSEEK,
        fixed=(("first_k_dense_replace", 0), ("use_qk_norm", False)),
    ),
    "hy_v3": Family(
        "HYV3ForCausalLM",
        "attention_bias moe_intermediate_size num_experts_per_tok num_experts num_local_experts "
        "num_shared_experts router_scaling_factor mlp_layer_types",
        "enable_moe_fp32_combine",
        eos_token_id=None,
        head_dim=128,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        rope_theta=11158840.0,
        rms_norm_eps=1e-5,
        qk_norm="head",
        moe_layers=first_layers_dense(1),
        experts=Experts(
            number=lambda c: num_experts(c, low=1, default=192),
            top_k=8,
            renormalize=True,
            score_func="sigmoid",
            router_bias=True,
            scaling="router_scaling_factor",
            scaling_default=2.826,
            shared_width=shared_experts("num_shared_experts"),
        ),
        names=(
            ("router", "mlp.router.gate.weight"),
            *_shared("mlp.shared_mlp"),
        ),
    ),
    "exaone4": Family(
        "Exaone4ForCausalLM",
        _EXAONE,
        num_key_value_heads=32,
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        qk_norm="head",
        norm_before=False,
        norm_after=True,
        attention_bias=False,
        o_bias=False,
        windows=_EXAONE_WINDOWS,
        rope_layers=rope_in_windows,
        names=(("post_attn_norm", "post_attention_layernorm.weight"),),
    ),
    "exaone_moe": Family(
        "ExaoneMoeForCausalLM",
        f"{_EXAONE} moe_intermediate_size num_experts_per_tok num_experts num_shared_experts "
        "routed_scaling_factor n_group topk_group first_k_dense_replace norm_topk_prob "
        "mlp_layer_types",
        eos_token_id=53,
        num_key_value_heads=32,
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        qk_norm="head",
        attention_bias=False,
        o_bias=False,
        windows=_EXAONE_WINDOWS,
        rope_layers=rope_in_windows,
        moe_layers=first_layers_dense(1),
        experts=replace(
            _DEEPSEEK,
            number=lambda c: num_experts(c, low=1, default=64),
            scaling_default=2.5,
            shared_width=shared_experts("num_shared_experts"),
        ),
    ),
    "flex_olmo": Family(
        "FlexOlmoForCausalLM",
        "attention_bias num_experts num_local_experts num_experts_per_tok norm_topk_prob",
        eos_token_id=100257,
        max_position_embeddings=4096,
        rope_theta=500000.0,
        qk_norm="whole",
        norm_before=False,
        norm_after=True,
        moe_layers=every,
        experts=Experts(
            number=lambda c: num_experts(c, low=1, default=7), top_k=5, width="intermediate_size"
        ),
        names=(("post_attn_norm", "post_attention_layernorm.weight"),),
    ),
    "ernie4_5": Family(
        "Ernie4_5ForCausalLM",
        head_dim=128,
        num_key_value_heads=2,
        max_position_embeddings=131072,
        rope_theta=500000.0,
        rms_norm_eps=1e-5,
        tied=True,
        attention_bias=False,
        o_bias=False,
        rope_neighbours=True,
        fixed=(("use_bias", False),),
    ),
    "cwm": Family(
        "CwmForCausalLM",
        "sliding_window layer_types",
        eos_token_id=(128001, 128008, 128009),
        head_dim=128,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        rope_theta=1000000.0,
        rms_norm_eps=1e-5,
        attention_bias=False,
        o_bias=False,
        windows=windows_where(lambda c, i: i % 4 != 0, 8192),
        check=_rope_is_given,
    ),
    "ernie4_5_moe": Family(
        "Ernie4_5_MoeForCausalLM",
        "moe_intermediate_size moe_k moe_num_experts moe_num_shared_experts moe_norm_min "
        "moe_layer_start_index moe_layer_end_index moe_layer_interval",
        "moe_capacity num_nextn_predict_layers",
        num_key_value_heads=4,
        max_position_embeddings=131072,
        rope_theta=500000.0,
        rms_norm_eps=1e-5,
        tied=True,
        attention_bias=False,
        o_bias=False,
        rope_neighbours=True,
        moe_layers=ernie_layers,
        experts=Experts(
            number=lambda c: c.integer("moe_num_experts", default=64),
            top_k=6,
            top_k_key="moe_k",
            renormalize=True,
            router_bias=True,
            min_sum=True,
            shared_width=shared_experts("moe_num_shared_experts", 2),
        ),
        names=(("router_bias", "mlp.moe_statics.e_score_correction_bias"),),
        fixed=(("use_bias", False), ("moe_use_aux_free", True)),
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        "sliding_window",
        "resid_pdrop embd_pdrop",
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        eos_token_id=32000,
        partial_rotary_factor=1.0,
        attention_bias=False,
        o_bias=False,
        windows=one_window(None),
        ropes=_phi3_rope,
    ),
    "ministral": Family(
        "MinistralForCausalLM",
        "sliding_window layer_types",
        num_key_value_heads=8,
        max_position_embeddings=131072,
        attention_bias=False,
        o_bias=False,
        windows=windows_where(lambda c, i: True),
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        f"{_GEMMA} attn_logit_softcapping",
        eos_token_id=1,
        head_dim=256,
        num_key_value_heads=4,
        max_position_embeddings=8192,
        tied=True,
        hidden_act="gelu_pytorch_tanh",
        activation_key="hidden_activation",
        norm_after=True,
        zero_centered_norms=True,
        windows=patterned_windows(4096, 2),
        factors=_gemma(50.0, 30.0),
        names=_GEMMA_NAMES,
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        f"{_GEMMA} sliding_window_pattern rope_local_base_freq",
        "_sliding_window_pattern",
        eos_token_id=1,
        head_dim=256,
        num_key_value_heads=4,
        max_position_embeddings=131072,
        rope_theta=1000000.0,
        tied=True,
        hidden_act="gelu_pytorch_tanh",
        activation_key="hidden_activation",
        qk_norm="head",
        norm_after=True,
        zero_centered_norms=True,
        windows=patterned_windows(4096, 6, "sliding_window_pattern"),
        factors=_gemma(None, None),
        ropes=gemma3_ropes,
        names=_GEMMA_NAMES,
    ),
    "granite": Family(
        "GraniteForCausalLM",
        f"attention_bias {_GRANITE}",
        max_position_embeddings=2048,
        factors=_granite,
    ),
    "granitemoe": Family(
        "GraniteMoeForCausalLM",
        f"attention_bias num_local_experts num_experts_per_tok {_GRANITE}",
        max_position_embeddings=2048,
        moe_layers=every,
        experts=Experts(
            number=lambda c: c.integer("num_local_experts", default=8),
            top_k=2,
            width="intermediate_size",
            renormalize=True,
        ),
        factors=_granite,
        names=(
            ("router", "block_sparse_moe.router.layer.weight"),
            *(
                (f"expert_{kind}", f"block_sparse_moe.experts.#.{kind}_proj.weight")
                for kind in ("gate", "up", "down")
            ),
        ),
    ),
    "afmoe": Family(
        "AfmoeForCausalLM",
        "attention_bias moe_intermediate_size num_dense_layers num_experts num_experts_per_tok "
        "num_local_experts num_shared_experts route_scale global_attn_every_n_layers "
        "sliding_window layer_types mup_enabled",
        eos_token_id=None,
        head_dim=128,
        max_position_embeddings=16384,
        rms_norm_eps=1e-5,
        qk_norm="head",
        norm_after=True,
        attention_gate=True,
        windows=_AFMOE_WINDOWS,
        rope_layers=lambda c, layers: tuple(int(w > 0) for w in _AFMOE_WINDOWS(c, layers)),
        moe_layers=lambda c, layers: tuple(
            int(i >= c.integer("num_dense_layers", 0, default=1)) for i in range(layers)
        ),
        experts=Experts(
            number=lambda c: num_experts(c, low=1, default=64),
            top_k=6,
            renormalize=True,
            score_func="sigmoid",
            router_bias=True,
            shared_width=shared_experts("num_shared_experts", 2),
        ),
        factors=_afmoe,
        names=(
            ("post_attn_norm", "post_attention_layernorm.weight"),
            ("pre_mlp_norm", "pre_mlp_layernorm.weight"),
            ("post_mlp_norm", "post_mlp_layernorm.weight"),
            ("router", "mlp.router.gate.weight"),
            ("router_bias", "mlp.expert_bias"),
        ),
    ),
    "hunyuan_v1_dense": Family(
        "HunYuanDenseV1ForCausalLM",
        "attention_bias",
        "eod_token_id",
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        qk_norm="head",
        qk_norm_last=True,
        ropes=hunyuan_ropes,
        names=_HUNYUAN_NAMES,
    ),
    "hunyuan_v1_moe": Family(
        "HunYuanMoEV1ForCausalLM",
        "attention_bias num_experts num_local_experts moe_topk num_experts_per_tok",
        "eod_token_id",
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        qk_norm="head",
        qk_norm_last=True,
        moe_layers=every,
        experts=Experts(
            number=lambda c: num_experts(c, low=1, default=1),
            top_k=1,
            width="intermediate_size",
            renormalize=True,
            shared_width=lambda c: c.integer("intermediate_size"),
        ),
        factors=_hunyuan_moe,
        ropes=hunyuan_ropes,
        names=(
            *_HUNYUAN_NAMES,
            ("router", "mlp.gate.wg.weight"),
            *_shared("mlp.shared_mlp"),
        ),
    ),
}
# model_types without a class in transformers, and the family that their checkpoints' code computes.
SAME_AS = {"mimo": "qwen2"}

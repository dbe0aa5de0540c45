"""Rules of model families, which read their configs: what each layer is, rope tables, factors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rollmesh.errors import ConfigError
from rollmesh.model.reader import MAX_WIDTH, Reader
from rollmesh.model.rope import KEYS as ROPE_KEYS
from rollmesh.model.rope import ROPE_TABLES, Config, number, table_of
from rollmesh.runtime.arguments import choice
from rollmesh.runtime.messages import shown

# ------------------------------------------------------------------------------- rules for layers
# A rule is a function of the config and of its number of layers.
Numbers = tuple[int, ...]  # one of each layer
PerLayer = Callable[[Reader, int], Numbers]
HasWindow = Callable[[Reader, int], bool]  # by the config and the index of a layer
LayerKinds = Callable[[Reader, int], tuple[str, ...]]


def none(c: Reader, layers: int) -> Numbers:
    return (0,) * layers


def every(c: Reader, layers: int) -> Numbers:
    return (1,) * layers


def attention_layers(c: Reader, layers: int) -> tuple[str, ...]:
    return ("attention",) * layers


def latent_layers(c: Reader, layers: int) -> tuple[str, ...]:
    return ("latent",) * layers


def hybrid_layers(c: Reader, layers: int) -> tuple[str, ...]:
    """Qwen3-Next: layer_types, else attention in every full_attention_interval-th layer."""
    types = _layer_types(c, layers, kinds=("full_attention", "linear_attention"))
    if types is None:
        interval = c.integer("full_attention_interval", default=4)
        is_full = [(i + 1) % interval == 0 for i in range(layers)]
    else:
        is_full = [t == "full_attention" for t in types]
    return tuple("attention" if full else "delta_net" for full in is_full)


def delta_net_sizes(c: Reader) -> dict[str, int]:
    """Returns the fields of ModelSpec for delta nets; {} if the model has none."""
    if "delta_net" not in hybrid_layers(c, c.integer("num_hidden_layers")):
        return {}
    sizes = {"key_head_dim": 128, "value_head_dim": 128, "conv_kernel_dim": 4}
    sizes |= {"num_key_heads": 16, "num_value_heads": 32}
    keys = {f"linear_{name}": default for name, default in sizes.items()}
    return {key: c.integer(key, default=default) for key, default in keys.items()}


def silu_in_delta_nets(c: Reader, head_dim: int) -> None:
    """Refuses other activations than silu: the convolution of a delta net uses that of MLPs."""
    given = c.values.get("hidden_act", "silu")
    if delta_net_sizes(c) and given not in ("silu", "swish"):
        raise ConfigError(f"hidden_act: expected silu with linear attention, got {shown(given)}")


def _window(c: Reader, default: int | None) -> int:
    """Returns sliding_window, or `default` if the key is missing; 0 (full attention) if it is
    None."""
    if c.values.get("sliding_window", default) is None:
        return 0
    return c.integer("sliding_window", default=default)


def _switched_window(c: Reader, default: int | None) -> int:
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


def _windows(c: Reader, layers: int, has_window: Callable[[int], bool], window: int) -> Numbers:
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


def from_a_layer_on(default: int) -> HasWindow:
    """Layers from max_window_layers on."""
    return lambda c, i: i >= c.integer("max_window_layers", 0, default=default)


def one_switched_window(c: Reader, layers: int) -> Numbers:
    """Qwen3-MoE: all layers or none."""
    window, types = _switched_window(c, 4096), _layer_types(c, layers)
    if types is not None and set(types) != {"sliding_attention" if window else "full_attention"}:
        raise ConfigError(
            "layer_types: expected one kind for all of Qwen3-MoE's layers, got "
            f"{shown(c.values['layer_types'])}"
        )
    return (window,) * layers


def one_window(default: int | None) -> PerLayer:
    """Mistral, Mixtral: sliding_window in all layers. default: of the key; None: full attention."""
    return lambda c, layers: (_window(c, default),) * layers


def windows_where(
    has_window: HasWindow,
    default: int | None = 4096,
    read: Callable[[Reader, int | None], int] = _window,
) -> PerLayer:
    """A window as layer_types says, else in the layers for which has_window holds."""
    return lambda c, layers: _windows(c, layers, lambda i: has_window(c, i), read(c, default))


def switched_windows_where(has_window: HasWindow, default: int | None = 4096) -> PerLayer:
    """The same where use_sliding_window is on; else full attention."""
    return windows_where(has_window, default, _switched_window)


def rope_in_windows(windows: PerLayer) -> PerLayer:
    """EXAONE-4: rope rotates q and k in layers with a window; in all layers if sliding_window is
    None."""
    return lambda c, layers: tuple(int(w > 0 or not _window(c, 4096)) for w in windows(c, layers))


def layers_with_rope(c: Reader, layers: int) -> Numbers:
    """SmolLM3: no_rope_layers has a 1 for each layer with rope; without this key all layers have
    rope, except every no_rope_layer_interval-th."""
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


def without_rope(c: Reader, i: int) -> bool:
    return not layers_with_rope(c, c.integer("num_hidden_layers"))[i]


def patterned_windows(window: int, every: int, key: str = "") -> PerLayer:
    """A window as layer_types says, else in all layers but every n-th. n is the value of `key`, by
    default `every`."""
    return windows_where(lambda c, i: (i + 1) % c.integer(key, default=every) != 0, window)


def num_experts(
    c: Reader, key: str = "num_experts", low: int = 0, default: int | None = None
) -> int:
    """Returns the number of experts: `key`, or num_local_experts, its other name."""
    both = [c.integer(name, low) for name in (key, "num_local_experts") if c.given(name)]
    if len(set(both)) > 1:
        raise ConfigError(f"{key}={both[0]} and num_local_experts={both[1]} differ")
    return both[0] if both else c.integer(key, low, default=default)


def sparse_layers(c: Reader, layers: int) -> Numbers:
    """Qwen: every decoder_sparse_step-th layer, except for those in mlp_only_layers."""
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


def first_layers_dense(default: int, key: str = "first_k_dense_replace") -> PerLayer:
    """GLM-4-MoE: experts as mlp_layer_types says, else from the layer on that `key` names."""

    def rule(c: Reader, layers: int) -> Numbers:
        types = _layer_types(c, layers, "mlp_layer_types", ("dense", "sparse"))
        first = c.integer(key, 0, default=default)
        return tuple(int(types[i] == "sparse" if types else i >= first) for i in range(layers))

    return rule


def ernie_layers(c: Reader, layers: int) -> Numbers:
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

    def width(c: Reader) -> int:
        one = c.integer("moe_intermediate_size")
        return one * c.integer(key, 0, max(MAX_WIDTH // one, 1), default)

    return width


# ------------------------------------------------------------------------------------ rope tables
# Each function takes a config and returns configs that rope.from_config can read, each with its
# path in the given config.
Ropes = tuple[tuple[str, Config], ...]


def phi3_ropes(config: Config) -> Ropes:
    """Phi-3: "su" and "yarn" are older names of "longrope", the only type besides "default"."""
    name, table = table_of(config)
    given = table.get("rope_type", table.get("type", "default"))
    kind = choice("rope_type", given, ["default", "longrope", "su", "yarn"])
    table = {**table, "rope_type": "default" if kind == "default" else "longrope"}
    return (("", {"original_max_position_embeddings": 4096, **config, name: table}),)


def text_ropes(config: Config) -> Ropes:
    """Qwen3.5: a multimodal model divides the frequencies among three positions of a token. These
    are equal for a token of text, so the keys of the division have no effect."""
    name, table = table_of(config)
    kept = {k: v for k, v in table.items() if k not in ("mrope_section", "mrope_interleaved")}
    return (("", {**config, name: kept}),)


def gpt_oss_ropes(config: Config) -> Ropes:
    """gpt-oss: uses the table below if the config has none."""
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


def _two_ropes(config: Config, base: Any) -> Ropes:
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
    unread = {*ROPE_TABLES, "original_max_position_embeddings"}  # the latter is read in tables only
    rest = {key: config[key] for key in config if key not in unread}
    name, path = ("rope_scaling", "") if scaling else ("rope_parameters", ".full_attention")
    return (
        (path, {**rest, name: {**full, **scaling}}),
        (".sliding_attention", {**rest, "rope_theta": base, "rope_parameters": local}),
    )


def gemma3_ropes(config: Config) -> Ropes:
    return _two_ropes(config, config.get("rope_local_base_freq", 10000.0))


def olmo3_ropes(config: Config) -> Ropes:
    return _two_ropes(config, 500000.0)


def hunyuan_ropes(config: Config) -> Ropes:
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


# ------------------------------------------------------------------------------- factors and caps
def olmoe_heads(c: Reader, head_dim: int) -> None:
    """OLMoE: the norms of q and k are as wide as hidden_size, whatever head_dim is."""
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


def rope_is_given(c: Reader, head_dim: int) -> None:
    """CWM: transformers' default, a table of the type llama3, is not supported."""
    if not any(c.given(name) for name in ROPE_TABLES):
        raise ConfigError("rope_parameters: expected a table, got none")


def _factor(c: Reader, key: str) -> float | None:
    value = c.positive(key, 1.0)
    return None if value == 1 else value


def _cap(c: Reader, key: str, default: float | None) -> float | None:
    given = c.values.get(key, default)
    return None if given is None else c.positive(key, given)


def gemma_factors(attention_cap: float | None, logit_cap: float | None) -> Callable[[Reader], Any]:
    """Returns a Gemma's `factors`. The arguments are the defaults of its caps. attention_cap=None:
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


def granite_factors(c: Reader) -> dict[str, Any]:
    keys = ("embedding_multiplier", "residual_multiplier", "logits_scaling")
    return {
        "attention_multiplier": c.positive("attention_multiplier", 1.0),
        **{key: _factor(c, key) for key in keys},
    }


def afmoe_factors(c: Reader) -> dict[str, Any]:
    is_scaled = c.boolean("mup_enabled", False)
    return {"embedding_multiplier": c.integer("hidden_size") ** 0.5 if is_scaled else None}


def hunyuan_moe_top_k(c: Reader) -> dict[str, Any]:
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

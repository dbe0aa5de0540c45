"""Rules of families for each layer of a config: windows, rope, experts. A rule is a function of the
config and of its number of layers."""

from __future__ import annotations

from collections.abc import Callable

from rollmesh.errors import ConfigError
from rollmesh.model.reader import MAX_WIDTH, Reader
from rollmesh.runtime.messages import shown

PerLayer = Callable[[Reader, int], tuple[int, ...]]
LayerKinds = Callable[[Reader, int], tuple[str, ...]]


def none(c: Reader, layers: int) -> tuple[int, ...]:
    return (0,) * layers


def every(c: Reader, layers: int) -> tuple[int, ...]:
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
    """Mistral, Mixtral: sliding_window in all layers. default: of the key; None: full attention."""
    return lambda c, layers: (_window(c, default),) * layers


def windows_where(has_window: Callable[[Reader, int], bool], default: int = 4096) -> PerLayer:
    """A window as layer_types says, else in the layers for which has_window holds."""
    return lambda c, layers: _windows(c, layers, lambda i: has_window(c, i), _window(c, default))


def rope_in_windows(windows: PerLayer) -> PerLayer:
    """EXAONE-4: rope rotates q and k in layers with a window; in all layers if sliding_window is
    None."""
    return lambda c, layers: tuple(int(w > 0 or not _window(c, 4096)) for w in windows(c, layers))


def layers_with_rope(c: Reader, layers: int) -> tuple[int, ...]:
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
    """Returns the number of experts: `key`, or num_local_experts, its other name."""
    both = [c.integer(name, low) for name in (key, "num_local_experts") if c.given(name)]
    if len(set(both)) > 1:
        raise ConfigError(f"{key}={both[0]} and num_local_experts={both[1]} differ")
    return both[0] if both else c.integer(key, low, default=default)


def sparse_layers(c: Reader, layers: int) -> tuple[int, ...]:
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

    def rule(c: Reader, layers: int) -> tuple[int, ...]:
        types = _layer_types(c, layers, "mlp_layer_types", ("dense", "sparse"))
        first = c.integer(key, 0, default=default)
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

    def width(c: Reader) -> int:
        one = c.integer("moe_intermediate_size")
        return one * c.integer(key, 0, max(MAX_WIDTH // one, 1), default)

    return width

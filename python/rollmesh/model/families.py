"""The model families: what the config of each means, one entry of FAMILIES for each model_type of
transformers.

A key that changes the numbers of some family is read where the family's own code in transformers
reads it, with the default of the family's config class; elsewhere it is an unknown key. How a
family is added: docs/models.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rollmesh.errors import ConfigError
from rollmesh.model.reader import MAX_POSITION, Reader
from rollmesh.runtime.messages import shown

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


def _layer_types(c: Reader, layers: int) -> tuple[str, ...] | None:
    types = c.values.get("layer_types")
    if types is None:
        return None
    if not isinstance(types, (list, tuple)) or len(types) != layers:
        raise ConfigError(
            f"layer_types: expected one entry for each of num_hidden_layers={layers}, got "
            f"{shown(types)}"
        )
    if other := [
        t
        for t in types
        if not isinstance(t, str) or t not in ("full_attention", "sliding_attention")
    ]:
        raise ConfigError(
            f"layer_types: expected full_attention and sliding_attention, got {shown(other)}"
        )
    return tuple(types)


def _windows(
    c: Reader, layers: int, has_window: Callable[[int], bool], default: int | None = 4096
) -> tuple[int, ...]:
    """The windows of layer_types, else a window in the layers for which has_window holds."""
    window, types = _switched_window(c, default), _layer_types(c, layers)
    if types is None:
        return tuple(window if has_window(i) else 0 for i in range(layers))
    if "sliding_attention" in types and not window:
        raise ConfigError(
            "layer_types: expected use_sliding_window and sliding_window with sliding_attention, "
            "got one that is off"
        )
    return tuple(window if t == "sliding_attention" else 0 for t in types)


def windows_from_a_layer_on(c: Reader, layers: int) -> tuple[int, ...]:
    """Qwen2, Qwen3: as layer_types says, else from max_window_layers on."""
    return _windows(c, layers, lambda i: i >= c.integer("max_window_layers", 0, default=28))


def early_even_windows(c: Reader, layers: int) -> tuple[int, ...]:
    """Qwen2-MoE: as layer_types says, else in every second layer below max_window_layers."""
    return _windows(
        c, layers, lambda i: i % 2 == 0 and i < c.integer("max_window_layers", 0, default=28)
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


def alternating_windows(c: Reader, layers: int) -> tuple[int, ...]:
    """gpt-oss: as layer_types says, else in every second layer from the first on."""
    window, types = c.integer("sliding_window", default=128), _layer_types(c, layers)
    if types is None:
        return tuple(window if i % 2 == 0 else 0 for i in range(layers))
    return tuple(window if t == "sliding_attention" else 0 for t in types)


def windows_without_rope(c: Reader, layers: int) -> tuple[int, ...]:
    """SmolLM3: as layer_types says, else in the layers without rope."""
    has_rope = layers_with_rope(c, layers)
    return _windows(c, layers, lambda i: not has_rope[i], None)


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


def first_layers_dense(c: Reader, layers: int) -> tuple[int, ...]:
    """GLM-4-MoE: experts from layer first_k_dense_replace on."""
    first = c.integer("first_k_dense_replace", 0, default=1)
    return tuple(int(i >= first) for i in range(layers))


# --------------------------------------------------------------------------------------- families
@dataclass(frozen=True, slots=True)
class Experts:
    """The mixtures of experts of a family. What is left out is Qwen3-MoE's."""

    number: Callable[[Reader], int] = num_experts
    top_k: int | None = None  # where the config has none; None: it has to
    width: str = "moe_intermediate_size"  # the key
    renormalize: str | bool = (
        # the chosen scores are divided by their sum: the key that says it, or always, or never
        "norm_topk_prob"
    )
    renormalize_default: bool = False
    score_func: str = "softmax"
    router_bias: bool = False  # every sync has to bring one
    has_groups: bool = False  # n_group, topk_group and routed_scaling_factor are read
    shared_width: Callable[[Reader], int] = lambda c: 0
    shared_switch: bool = False  # a row's sigmoid scales the shared expert
    bias: bool = False  # of the router's logits, and of experts


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
    rope_layers: PerLayer = every  # 1 where rope turns q and k
    moe_layers: PerLayer = none  # 1 where a layer is a mixture of experts
    experts: Experts = Experts()
    names: tuple[
        tuple[str, str], ...
    ] = ()  # (kind of csrc/model/params.c, what a checkpoint calls it instead)
    rope_neighbours: bool = False  # rope turns neighbours of a head; else its halves
    rope_table: Mapping[str, Any] | None = None  # rope_parameters where the config has none
    activation: str | None = None  # of all MLPs, whatever hidden_act; None: hidden_act says it
    sinks: bool = False  # attention has a sink for each head
    mxfp4: bool = False  # checkpoints may have experts in MXFP4, which SafetensorsFolder converts
    # Tensors of all experts are transposed, and rows of gate and up alternate in them.
    experts_interleaved: bool = False
    # of WQ_ROWS: what tensors with the names wq and wk hold, which Meta, Mistral and torchtitan use
    wq_rows: str = "none"
    check: Callable[[Reader, int], None] | None = (
        None  # a rule of this family alone, of its config and head_dim
    )

    @property
    def has_experts(self) -> bool:
        return self.moe_layers is not none


# Kinds of csrc/model/layer_kinds.c.
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
        eos_token_id=None,
        num_key_value_heads=32,
        attention_bias=True,
        o_bias=False,
        windows=windows_from_a_layer_on,
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
        names=(
            ("router", "block_sparse_moe.gate.weight"),
            ("expert_gate", "block_sparse_moe.experts.#.w1.weight"),
            ("expert_down", "block_sparse_moe.experts.#.w2.weight"),
            ("expert_up", "block_sparse_moe.experts.#.w3.weight"),
        ),
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
        names=tuple(
            (f"shared_{kind}", f"mlp.shared_expert.{kind}_proj.weight")
            for kind in ("gate", "up", "down")
        ),
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
        "attention_bias use_qk_norm moe_intermediate_size num_experts_per_tok n_shared_experts "
        "n_routed_experts routed_scaling_factor "
        "n_group topk_group first_k_dense_replace norm_topk_prob num_local_experts",
        "num_experts num_mtp_layers num_nextn_predict_layers",
        eos_token_id=None,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        partial_rotary_factor=0.5,
        qk_norm=lambda c: "head" if c.boolean("use_qk_norm", False) else "none",
        o_bias=False,
        moe_layers=first_layers_dense,
        experts=Experts(
            number=lambda c: num_experts(c, "n_routed_experts", 1, 128),
            top_k=8,
            renormalize_default=True,
            score_func="sigmoid",
            router_bias=True,
            has_groups=True,
            shared_width=lambda c: min(
                c.integer("n_shared_experts", 0, default=1) * c.integer("moe_intermediate_size"),
                MAX_POSITION,
            ),
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
        rope_table={
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        rms_norm_eps=1e-5,
        attention_bias=lambda c: c.boolean("attention_bias", True),
        o_bias=lambda c: c.boolean("attention_bias", True),
        windows=alternating_windows,
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
}

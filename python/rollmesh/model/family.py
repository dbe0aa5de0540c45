"""The description of a model family: the fields of an entry of families.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rollmesh.model.family_rules import LayerKinds, PerLayer, Ropes, attention_layers, every, none
from rollmesh.model.reader import Reader

HIDDEN_BY_HEADS = 0  # head_dim is hidden_size // num_attention_heads where the config has none


# The kinds of csrc/model/layer_kinds.c, in its order.
LAYER_KINDS: tuple[str, ...] = ("attention", "latent", "delta_net")
# Rows of tensors named wq and wk. "none": the family has no such tensors; "halves", "neighbours":
# rope rotates halves of a head, or neighbours.
WQ_ROWS = (
    "none",
    "halves",
    "neighbours",
)
# Norms of q and k. "head": of each head; "whole": of all heads of q, or of k, together.
QK_NORMS: tuple[str, ...] = ("none", "head", "whole")


@dataclass(frozen=True, slots=True)
class Experts:
    """The mixtures of experts of a family. The defaults are Qwen3-MoE's."""

    # The key of the number of experts, the least number, and the number where the config has none.
    number: tuple[str, int, int | None] = ("num_experts", 0, None)
    top_k: int | None = None  # where the config has none; None: the key is required
    top_k_key: str = "num_experts_per_tok"
    width: str = "moe_intermediate_size"  # the key
    renormalize: str | bool = (
        # The chosen scores are divided by their sum: the key of this option, or a bool.
        "norm_topk_prob"
    )
    renormalize_default: bool = False
    score_func: str = "softmax"
    router_bias: bool = False  # every sync must bring one
    # The defaults of n_group and topk_group; None: they are not read.
    groups: tuple[int, int] | None = None
    scaling: str = ""  # the key of the factor of gates
    scaling_default: float = 1.0
    min_sum: bool = False  # moe_norm_min is read: the least divisor of scores
    shared_width: Callable[[Reader], int] = lambda c: 0
    shared_switch: bool = False  # a sigmoid for each row scales the shared expert
    bias: bool = False  # the router's logits and the experts have biases


@dataclass(frozen=True, slots=True)
class Family:
    """A family. The defaults are Llama's."""

    architecture: str  # transformers' class
    # Keys that its config has besides those of all families (hf_config.py), separated by blanks:
    # `keys` are read, `inert` have no effect.
    keys: str = ""
    inert: str = ""
    head_dim: int = HIDDEN_BY_HEADS  # where the config has none
    num_key_value_heads: int | None = None  # where the key is missing; None: num_attention_heads
    max_position_embeddings: int = 32768  # where the key is missing; likewise the next fields
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    eos_token_id: int | tuple[int, ...] | None = 2  # of these, those in the vocabulary
    partial_rotary_factor: float | None = (
        None  # share of a head's elements that rope rotates, from the first on; None: all of them
    )
    tied: bool = False
    qk_norm: str | Callable[[Reader], str] = "none"  # of QK_NORMS
    hidden_act: str = "silu"  # where the key is missing
    ungated: bool = False  # dense MLPs have no gate
    norm_before: bool = True  # norms of a block's input
    norm_after: bool = False  # norms of a block's output, before it is added
    bias_key: str = "attention_bias"  # whether q, k and v have biases; read if it is among `keys`
    attention_bias: bool = False  # the same where the config does not tell
    o_bias: str | bool | None = None  # the key for o, or a bool; None: o has one if q, k and v have
    layer_kinds: LayerKinds = attention_layers  # of LAYER_KINDS
    windows: PerLayer = none  # positions of each layer's sliding window; 0: full attention
    # Returns the configs from which rope tables are read, each with the path of its keys inside the
    # model's table ("" if they are not nested): first the config of the model's table, then that of
    # the table of layers with a window, if it differs.
    ropes: Callable[[Mapping[str, Any]], Ropes] = lambda config: (("", config),)
    rope_layers: PerLayer = every  # 1 where rope rotates q and k
    moe_layers: PerLayer = none  # 1 where a layer is a mixture of experts
    experts: Experts = Experts()
    # Names of parameters in checkpoints that differ from a Llama's, by kind (csrc/model/params.c).
    names: dict[str, str] = field(default_factory=dict)
    rope_neighbours: bool = False  # rope rotates neighbours of a head, else halves of a head
    activation: str | None = None  # of all MLPs, whatever hidden_act is; None: hidden_act names it
    sinks: bool = False  # attention has a sink for each head
    mxfp4: bool = False  # checkpoints may have experts in MXFP4, which SafetensorsFolder converts
    # A tensor of all experts is transposed, and rows of gate and up alternate in it.
    experts_interleaved: bool = False
    # Of WQ_ROWS. Meta, Mistral and torchtitan use the names wq and wk.
    wq_rows: str = "none"
    activation_key: str = "hidden_act"
    zero_centered_norms: bool = False  # norms multiply by 1 + weight
    qk_norm_last: bool = False  # q and k are normed after rope
    attention_gate: bool = False  # a sigmoid of a layer's input scales attention's output
    # Latent attention in all layers: the keys of its sizes, with their defaults.
    latent: Mapping[str, int] | None = None
    gate_in_q: bool = False  # q_proj has the gate's rows too, after those of q in each head
    delta_alternates: bool = False  # in_proj_qkvz has the rows of one key head after another
    # Returns further fields of ModelSpec, such as factors and caps.
    factors: Callable[[Reader], dict[str, Any]] = lambda c: {}
    # Raises ConfigError by a rule of this family, from its config and head_dim.
    check: Callable[[Reader, int], None] = lambda c, head_dim: None
    # Values by key that transformers' code computes for every value in the config. Another value,
    # also one in a list, is refused.
    fixed: dict[str, Any] = field(default_factory=dict)

    @property
    def has_experts(self) -> bool:
        return self.moe_layers is not none

    def biases(self, c: Reader) -> tuple[bool, bool]:
        """Returns whether q, k and v have biases, and whether o has one."""
        given = self.attention_bias
        if self.bias_key in self.keys.split():
            given = c.boolean(self.bias_key, given)
        return given, given if self.o_bias is None else c.switch(self.o_bias)

"""Sizes of a model's parts and the bytes that each rank keeps, computed from the configuration."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from rollmesh import _core
from rollmesh.model.placement import Placement, placements
from rollmesh.model.spec import ModelSpec

TILE_ROWS, TILE_COLS = 16, 32


@dataclass(frozen=True)
class Matrix:
    """The parameters of one kind, all of one shape."""

    kind: str  # as csrc/model/params.c calls it: "q", "expert_gate"
    name: str
    count: int
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return self.count * math.prod(self.shape)


@dataclass(frozen=True)
class Parameters:
    total: int
    active_body: int  # used by one token, without embedding and lm_head
    lm_head: int
    dense_body: int  # the elements of active_body outside experts
    experts: int  # all experts' elements
    num_experts: int
    top_k: int

    @property
    def active(self) -> int:
        return self.active_body + self.lm_head

    def read_by(self, tokens: int) -> float:
        """Elements that a step of so many tokens reads: experts counted as touched under even
        routing."""
        share = 1.0 - (1.0 - self.top_k / self.num_experts) ** tokens if self.num_experts else 0.0
        return self.dense_body + self.lm_head + share * self.experts


def matrices(spec: ModelSpec) -> list[Matrix]:
    """Every parameter of the model, those of a kind together; routers' biases are left out, as in
    ModelSpec.parameters()."""
    kinds: dict[str, Matrix] = {}
    for kind, name, shape in _core.parameters(spec.engine_values(1)):
        plain = re.sub(r"^model\.(layers\.\d+\.)?|\.\d+(?=\.)|\.weight$", "", name)
        known = kinds.get(kind, Matrix(kind, plain, 0, shape))
        kinds[kind] = replace(known, count=known.count + 1)
    return list(kinds.values())


def count_parameters(spec: ModelSpec) -> Parameters:
    items = matrices(spec)
    total = sum(m.elements for m in items)
    experts = sum(m.elements for m in items if m.kind.startswith("expert_"))
    dense = total - experts - sum(m.elements for m in items if m.kind in ("embed", "lm_head"))
    active = experts * spec.num_experts_per_tok // spec.num_experts if spec.num_experts else 0
    return Parameters(
        total,
        dense + active,
        spec.vocab_size * spec.hidden_size,
        dense,
        experts,
        spec.num_experts,
        spec.num_experts_per_tok,
    )


def rank_bytes(
    spec: ModelSpec, dtype: str, tp: int = 1, dp: int = 1, ep: int = 1
) -> list[dict[str, int]]:
    """Returns for each rank the bytes of each kind of parameter that it stores."""
    values, held = spec.engine_values(1), dict[Placement, dict[str, int]]()
    ranks = placements(spec, tp, dp, ep)
    for index, rank in enumerate(ranks):
        if rank not in held:
            held[rank] = _core.parameter_bytes(values, tp, dp, ep, index, dtype == "bfloat16")
    return [held[rank] for rank in ranks]


def kv_bytes_per_token(spec: ModelSpec, kv_heads: int, bytes_each: int) -> int:
    """K rows are padded to 32 dims, V rows to 16."""
    row = _up(spec.head_dim, TILE_COLS) + _up(spec.value_dim, TILE_ROWS)
    return spec.num_attention_layers * kv_heads * row * bytes_each


def state_bytes(spec: ModelSpec, heads: int, bytes_each: int) -> int:
    """The state of a sequence over all layers, with so many value heads (rm_delta_state_bytes of
    kernels.h); 0 without delta nets."""
    k, v = spec.linear_key_head_dim, spec.linear_value_head_dim
    window = (spec.linear_conv_kernel_dim - 1) * (2 * k + v) * bytes_each
    each = 4 * _up(v, TILE_ROWS) * _up(k, TILE_COLS) + _up(window, 64)
    return (spec.num_hidden_layers - spec.num_attention_layers) * heads * each


def _up(n: int, to: int) -> int:
    return -(-n // to) * to

"""Sizes of a model's parts and the bytes that each rank keeps, computed from the configuration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rollmesh.model.placement import Placement
from rollmesh.model.spec import ModelSpec

TILE_ROWS, TILE_COLS = 16, 32


@dataclass(frozen=True)
class Matrix:
    """`count` parameters of this shape."""

    name: str
    count: int
    rows: int
    cols: int
    shard: str  # the part that a rank keeps: "whole", or the name of a range of Placement
    is_vector: bool = False  # rows = 1, of which a rank keeps a range of cols; else a range of rows

    @property
    def elements(self) -> int:
        return self.count * self.rows * self.cols


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


def _vectors(name: str, count: int, n: int, shard: str) -> Matrix:
    return Matrix(name, count, 1, n, shard, is_vector=True)


def matrices(spec: ModelSpec) -> Iterator[Matrix]:
    """Every parameter of the model, equal ones together; routers' biases are left out, as in
    ModelSpec.parameters()."""
    hidden, dim, layers = spec.hidden_size, spec.head_dim, spec.num_hidden_layers
    moe = sum(spec.is_moe_layer)
    query, kv = spec.num_attention_heads * dim, spec.num_key_value_heads * dim
    yield Matrix("embed_tokens", 1, spec.vocab_size, hidden, "vocab")
    if not spec.tie_word_embeddings:
        yield Matrix("lm_head", 1, spec.vocab_size, hidden, "vocab")
    yield _vectors(
        "layernorms", 2 * layers * (spec.norm_before + spec.norm_after) + 1, hidden, "whole"
    )
    yield Matrix("self_attn.q_proj", layers, query, hidden, "heads")
    yield Matrix("self_attn.k_proj, v_proj", 2 * layers, kv, hidden, "kv_heads")
    yield Matrix("self_attn.o_proj", layers, hidden, query, "hidden")
    if spec.attention_bias:
        yield _vectors("self_attn.q_proj.bias", layers, query, "heads")
        yield _vectors("self_attn.k_proj.bias, v_proj.bias", 2 * layers, kv, "kv_heads")
    if spec.o_bias:
        yield _vectors("self_attn.o_proj.bias", layers, hidden, "hidden")
    if spec.qk_norm == "head":
        yield _vectors("self_attn.q_norm, k_norm", 2 * layers, dim, "whole")
    if spec.qk_norm == "whole":
        yield _vectors("self_attn.q_norm", layers, query, "heads")
        yield _vectors("self_attn.k_norm", layers, kv, "kv_heads")
    if layers > moe:
        each = "mlp.up_proj" if spec.ungated else "mlp.gate_proj, up_proj"
        yield Matrix(
            each, (2 - spec.ungated) * (layers - moe), spec.intermediate_size, hidden, "inner"
        )
        yield Matrix("mlp.down_proj", layers - moe, hidden, spec.intermediate_size, "hidden")
    if moe:
        yield Matrix("mlp.gate (router)", moe, spec.num_experts, hidden, "whole")
        if spec.shared_intermediate_size:
            yield Matrix(
                "shared_experts.gate_proj, up_proj",
                2 * moe,
                spec.shared_intermediate_size,
                hidden,
                "shared_inner",
            )
            yield Matrix(
                "shared_experts.down_proj", moe, hidden, spec.shared_intermediate_size, "hidden"
            )
        if spec.shared_switch:
            yield Matrix("shared_expert_gate", moe, 1, hidden, "whole")
        yield Matrix(
            "mlp.experts.gate_proj, up_proj",
            2 * moe * spec.num_experts,
            spec.moe_intermediate_size,
            hidden,
            "expert_inner",
        )
        yield Matrix(
            "mlp.experts.down_proj",
            moe * spec.num_experts,
            hidden,
            spec.moe_intermediate_size,
            "expert_hidden",
        )


def count_parameters(spec: ModelSpec) -> Parameters:
    items = list(matrices(spec))
    total = sum(m.elements for m in items)
    experts = sum(m.elements for m in items if m.shard.startswith("expert"))
    dense = total - experts - sum(m.elements for m in items if m.shard == "vocab")
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


def rank_bytes(spec: ModelSpec, m: Matrix, rank: Placement, bytes_each: int) -> int:
    """Returns the bytes of one kind of parameter on one rank."""
    count, rows, cols = m.count, m.rows, m.cols
    if m.shard != "whole":
        held = len(getattr(rank, m.shard))
        held *= spec.head_dim if m.shard in ("heads", "kv_heads") else 1
        rows, cols = (1, held) if m.is_vector else (held, m.cols)
    if m.shard.startswith("expert"):
        count = count // spec.num_experts * len(rank.experts)
    if m.is_vector or (m.name == "embed_tokens" and not spec.tie_word_embeddings):
        return count * rows * cols * bytes_each
    return count * _up(rows, TILE_ROWS) * _up(cols, TILE_COLS) * bytes_each


def kv_bytes_per_token(spec: ModelSpec, kv_heads: int, bytes_each: int) -> int:
    """K rows are padded to 32 dims, V rows to 16."""
    row = _up(spec.head_dim, TILE_COLS) + _up(spec.head_dim, TILE_ROWS)
    layers: int = spec.num_hidden_layers
    return layers * kv_heads * row * bytes_each


def _up(n: int, to: int) -> int:
    return -(-n // to) * to

"""Number of bytes that a decode step sends between ranks, computed from the configuration: the sum
of the exchanges in csrc/model and csrc/step.

The numbers are for the whole world and one step, in which each of `rows` sequences of every replica
gets one token. A gather counts once for each receiver. Tokens are assumed to choose experts evenly;
everything else is exact for ranks in one process and is tested against the engine's own count. If
ranks are processes, each pair of ranks of a replica also compares a digest of the batch, 8 bytes.
GPU steps with few rows send more, in exchanges whose sizes do not depend on the routing
(csrc/model/moe/static_dispatch.c).
"""

from __future__ import annotations

from typing import NamedTuple

from rollmesh.distributed.mesh import Mesh
from rollmesh.model.placement import placements
from rollmesh.model.spec import ModelSpec

# Dispatchers that move rows between the ranks' home shards.
TRAVELLING = ("alltoall", "allgather_reducescatter")
VOCAB_BLOCK = 128


class Traffic(NamedTuple):
    tp: float  # between the ranks of a replica
    ep: float  # rows to experts and back


def step_traffic(
    spec: ModelSpec,
    mesh: Mesh,
    rows: int,
    *,
    dtype: str = "bfloat16",
    ep_backend: str = "alltoall",
    sequence_parallel: bool = False,
) -> Traffic:
    """Returns the bytes that one decode step sends."""
    elem = 2 if dtype == "bfloat16" else 4
    shards = sequence_parallel and mesh.tp > 1
    step = Step(spec, mesh, rows, elem, ep_backend, shards)
    return Traffic(mesh.dp * step.tp_bytes(), step.ep_bytes())


class Step(NamedTuple):
    spec: ModelSpec
    mesh: Mesh
    rows: int
    elem: int  # bytes of an element
    backend: str
    sp: bool

    @property
    def travels(self) -> bool:
        return self.mesh.ep > 1 and self.backend in TRAVELLING

    @property
    def num_moe(self) -> int:
        return sum(self.spec.is_moe_layer)

    @property
    def hidden(self) -> int:
        return self.spec.hidden_size

    def gathered(self, width: int, rows: int | None = None) -> int:
        """Returns the bytes to gather a [rows, width] activation on every rank of a replica."""
        return (self.rows if rows is None else rows) * width * self.elem * (self.mesh.tp - 1)

    def home_rows(self) -> list[int]:
        each = -(-self.rows // self.mesh.tp)
        return [max(0, min(each, self.rows - each * t)) for t in range(self.mesh.tp)]

    def output(self) -> int:
        """Returns the bytes to gather the columns of a block's output: to whole rows on every rank,
        or to the home rows with sequence parallelism."""
        if not self.sp:
            return self.gathered(self.hidden)
        return (self.rows * self.hidden - self.kept("hidden")) * self.elem

    def kept(self, cut: str) -> int:
        """Returns the number of elements of its home rows that a replica computes. cut: the
        field of Placement that divides the columns."""
        mesh = self.mesh
        ranks = placements(self.spec, *mesh.degrees)[: mesh.tp]
        return sum(
            rows * len(getattr(rank, cut))
            for rows, rank in zip(self.home_rows(), ranks, strict=True)
        )

    def tp_bytes(self) -> int:
        if self.mesh.tp == 1:
            return 0
        spec, rows, others = self.spec, self.rows, self.mesh.tp - 1
        hidden, output = self.gathered(self.hidden), self.output()
        before = hidden if self.sp else 0
        block = before + output  # of a block that computes columns, without its inner columns

        def dense(width: int) -> int:
            return block + self.gathered(width)

        attention = spec.num_attention_layers
        layers = attention * dense(spec.attended_width)
        if delta_nets := spec.num_hidden_layers - attention:
            width = spec.linear_num_value_heads * spec.linear_value_head_dim
            layers += delta_nets * dense(width)
        if spec.qk_norm == "whole":  # sums of squares, float32
            heads = spec.num_attention_heads + spec.num_key_value_heads
            layers += attention * rows * heads * 4 * others
        layers += (spec.num_hidden_layers - self.num_moe) * dense(spec.intermediate_size)
        moe = hidden - before if self.travels else block
        if self.mesh.ep == 1:
            moe += self.gathered(spec.moe_intermediate_size, rows * spec.num_experts_per_tok)
        if spec.shared_intermediate_size:
            inner = self.gathered(spec.shared_intermediate_size)
            moe += inner + (block if self.travels else output)
        if self.travels:  # the routing
            moe += rows * spec.num_experts_per_tok * 2 * others
        blocks = -(-spec.vocab_size // VOCAB_BLOCK)
        head = 4 * (rows * spec.vocab_size - self.kept("vocab")) + rows * (blocks * 8 + 16) * others
        pairs = self.mesh.tp * others
        return hidden + layers + self.num_moe * moe + before + head + rows * pairs

    def ep_bytes(self) -> float:
        mesh, top_k = self.mesh, self.spec.num_experts_per_tok
        if mesh.ep == 1:
            return 0.0
        groups, pairs = mesh.world // mesh.ep, mesh.ep * (mesh.ep - 1)
        # Bytes of a row, and number of rows in one ep group.
        row = self.hidden * self.elem
        rows = self.rows * (mesh.dp if mesh.ep > mesh.tp else 1)
        together = 8 * pairs if mesh.dp > 1 and mesh.ep > mesh.tp else 0
        away = rows * top_k * row * (1 - 1 / mesh.ep)
        if not self.travels:
            return groups * self.num_moe * away
        out = away if self.backend == "alltoall" else rows * (row + top_k * 4) * (mesh.ep - 1)
        return groups * (
            self.num_moe * ((self.spec.num_experts + 1) * 4 * pairs + out + away) + together
        )

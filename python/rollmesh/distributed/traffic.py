"""Number of bytes that a decode step sends between ranks, computed from the configuration: the sum
of the exchanges in csrc/model and csrc/step.

The numbers are for the whole world and one step, in which each of `rows` sequences of every replica
gets one token. A gather counts once for each receiver. Tokens are assumed to choose experts evenly;
everything else is exact for ranks in one process and is tested against the engine's own count. If
ranks are processes, each pair of ranks of a replica also compares a digest of the batch, 8 bytes.
`static`: GPU steps with few rows, whose exchanges have sizes that do not depend on the routing
(csrc/model/moe/static_dispatch.c). `captured`: steps that replay a CUDA graph over NCCL
(csrc/gpu/graphs.c); `rows` is then the padded batch size.
"""

from __future__ import annotations

from typing import NamedTuple

from rollmesh.distributed.mesh import Mesh
from rollmesh.model.placement import Placement, placements
from rollmesh.model.spec import ModelSpec

# Dispatchers that move rows between the ranks' home shards.
TRAVELLING = ("alltoall", "allgather_reducescatter")
VOCAB_BLOCK = 128
# Bytes that two ranks exchange once a step to compare their NCCL calls (csrc/comm/comm.c).
ACCOUNT = 32


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
    static: bool = False,
    captured: bool = False,
) -> Traffic:
    """Returns the bytes that one decode step sends."""
    step = _Step(
        spec,
        mesh,
        rows,
        2 if dtype == "bfloat16" else 4,
        ep_backend,
        sequence_parallel and mesh.tp > 1,
        static,
        captured,
    )
    return Traffic(mesh.dp * step.tp_bytes(), step.ep_bytes())


class _Step:
    def __init__(
        self,
        spec: ModelSpec,
        mesh: Mesh,
        rows: int,
        elem: int,
        backend: str,
        sequence_parallel: bool,
        static: bool,
        captured: bool,
    ):
        self.spec, self.mesh, self.rows, self.elem = spec, mesh, rows, elem
        self.backend, self.sp = backend, sequence_parallel
        self.static, self.captured = static or captured, captured
        self.travels = mesh.ep > 1 and backend in TRAVELLING
        self.replica: list[Placement] = placements(spec, mesh.tp, mesh.dp, mesh.ep)[: mesh.tp]
        self.num_moe, self.hidden = sum(spec.is_moe_layer), spec.hidden_size

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
        kept = sum(
            rows * len(rank.hidden)
            for rows, rank in zip(self.home_rows(), self.replica, strict=True)
        )
        return (self.rows * self.hidden - kept) * self.elem

    def tp_bytes(self) -> int:
        if self.mesh.tp == 1:
            return 0
        spec, tp = self.spec, self.mesh.tp
        pairs, before = tp * (tp - 1), self.gathered(self.hidden) if self.sp else 0
        attention = before + self.gathered(spec.num_attention_heads * spec.head_dim) + self.output()
        if spec.qk_norm == "whole":  # sums of squares, float32
            attention += (
                self.rows * (spec.num_attention_heads + spec.num_key_value_heads) * 4 * (tp - 1)
            )
        dense = before + self.gathered(spec.intermediate_size) + self.output()
        if self.travels:
            moe = 0 if self.sp else self.gathered(self.hidden)
        else:
            inside = (
                self.gathered(spec.moe_intermediate_size, self.rows * spec.num_experts_per_tok)
                if self.mesh.ep == 1
                else 0
            )
            moe = before + inside + self.output()
        if spec.shared_intermediate_size:
            moe += (
                self.gathered(spec.shared_intermediate_size)
                + self.output()
                + (before if self.travels else 0)
            )
        layers = (
            spec.num_hidden_layers * attention
            + (spec.num_hidden_layers - self.num_moe) * dense
            + self.num_moe * moe
        )
        routed = (
            self.rows * self.num_moe * spec.num_experts_per_tok * 2 * (tp - 1)
            if self.travels
            else 0
        )
        last = self.gathered(self.hidden) if self.sp else 0
        blocks = -(-spec.vocab_size // VOCAB_BLOCK)
        kept = sum(
            rows * len(rank.vocab)
            for rows, rank in zip(self.home_rows(), self.replica, strict=True)
        )
        head = 4 * (self.rows * spec.vocab_size - kept) + self.rows * (blocks * 8 + 16) * (tp - 1)
        compared = ACCOUNT if self.captured else 0
        looked_up = self.gathered(self.hidden) * (tp if self.static else 1)
        return looked_up + layers + routed + last + head + (compared + self.rows) * pairs

    def ep_bytes(self) -> float:
        mesh, top_k = self.mesh, self.spec.num_experts_per_tok
        if mesh.ep == 1:
            return 0.0
        groups, pairs = mesh.world // mesh.ep, mesh.ep * (mesh.ep - 1)
        # Bytes of a row, and number of rows in one ep group.
        row = self.hidden * self.elem
        rows = self.rows * (mesh.dp if mesh.ep > mesh.tp else 1)
        together = (8 + ACCOUNT * self.captured) * pairs if mesh.dp > 1 and mesh.ep > mesh.tp else 0
        if self.static:
            return groups * (self.num_moe * self.slots() + together)
        away = rows * top_k * row * (1 - 1 / mesh.ep)
        if not self.travels:
            return groups * self.num_moe * away
        out = away if self.backend == "alltoall" else rows * (row + top_k * 4) * (mesh.ep - 1)
        return groups * (
            self.num_moe * ((self.spec.num_experts + 1) * 4 * pairs + out + away) + together
        )

    def slots(self) -> int:
        """Returns the bytes of one layer in one ep group. Rows and their expert ids go to all
        ranks; each rank returns one slot for each of its experts that a row can choose."""
        ep, top_k, row = self.mesh.ep, self.spec.num_experts_per_tok, self.hidden * self.elem
        each, pairs = min(top_k, self.spec.num_experts // ep), ep * (ep - 1)
        if not self.travels:
            return self.rows * each * row * (ep - 1)
        unit = 2 if row % 4 else 1  # ids are words of four bytes
        home = -(-max(self.home_rows()) // unit) * unit
        pitch = -(-(home - (-home * top_k * 4 // row)) // unit) * unit
        return pairs * (pitch + home * each) * row

"""The bytes that a GPU step with few rows sends, for tests: its exchanges have sizes that do not
depend on the routing (csrc/model/moe/static_dispatch.c). `captured`: a step that replays a CUDA
graph over NCCL (csrc/gpu/graphs.c); `rows` is then the padded batch size."""

from __future__ import annotations

import rollmesh as rm
from rollmesh.distributed.traffic import Step

# Bytes that two ranks exchange once a step to compare their NCCL calls (csrc/comm/comm.c).
ACCOUNT = 24


def device_step_bytes(
    spec: rm.ModelSpec,
    mesh: rm.Mesh,
    rows: int,
    *,
    dtype: str = "bfloat16",
    ep_backend: str = "alltoall",
    sequence_parallel: bool = False,
    captured: bool = False,
) -> int:
    """Returns the bytes that one decode step sends, of the whole world."""
    elem = 2 if dtype == "bfloat16" else 4
    step = Step(spec, mesh, rows, elem, ep_backend, sequence_parallel and mesh.tp > 1)
    tp, ep, account = mesh.tp, mesh.ep, ACCOUNT * captured
    looked_up = step.gathered(step.hidden) * (tp - 1)  # rows of all ranks, once more
    sent = mesh.dp * (step.tp_bytes() + looked_up + account * tp * (tp - 1))
    if ep == 1:
        return sent
    spans = mesh.dp > 1 and ep > tp
    together = (8 + account) * ep * (ep - 1) if spans else 0
    return sent + mesh.world // ep * (step.num_moe * slot_bytes(step) + together)


def slot_bytes(step: Step) -> int:
    """Returns the bytes of one layer in one ep group. Rows and their expert ids go to all ranks;
    each rank returns one slot for each of its experts that a row can choose."""
    ep, top_k, row = step.mesh.ep, step.spec.num_experts_per_tok, step.hidden * step.elem
    each, pairs = min(top_k, step.spec.num_experts // ep), ep * (ep - 1)
    if not step.travels:
        return step.rows * each * row * (ep - 1)
    unit = 2 if row % 4 else 1  # ids are words of four bytes
    home = -(-max(step.home_rows()) // unit) * unit
    pitch = -(-(home - (-home * top_k * 4 // row)) // unit) * unit
    return pairs * (pitch + home * each) * row

"""Indices that change during an op: its output overlaps them, or another thread writes to them
while it computes.

An op checks its indices once and uses them later, so it must use the checked values. Input: index
arrays that become invalid after the check. Oracle: the result of a call with unchanged arrays.
Bound: bit equality, and the process survives."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from rollmesh import errors, ops

WILD = np.float32(1e30)  # as an int32 it points a gigabyte away


@pytest.mark.parametrize("isa", ops.available_isas())
def test_an_output_may_lie_over_the_indices(isa: str) -> None:
    memory = np.zeros(8, np.float32)
    ids, table = memory[2:6].view(np.int32), np.full((4, 2), WILD)
    want = ops.embed(ids.copy(), table, isa=isa)
    assert (ops.embed(ids, table, out=memory.reshape(4, 2), isa=isa) == want).all()
    memory[:] = 0
    assert (ops.gather_rows(table, ids, out=memory.reshape(4, 2), isa=isa) == want).all()

    x, w = np.full((4, 32), WILD), ops.pack(np.eye(32, dtype=np.float32), dtype="float32")
    memory = np.zeros(4 * 32, np.float32)
    bounds = memory[30:32].view(np.int32)
    bounds[:] = 0, 4
    want = ops.gemm(x, w, 32, group_rows=bounds.copy(), isa=isa)
    core = ops.kernels(isa, 1)
    out = memory.reshape(4, 32)
    core.run("gemm", {"x": x, "w": w, "n": 32, "group_rows": bounds, "out": out})
    assert (memory.reshape(4, 32) == want).all()


def test_another_thread_may_write_to_the_indices() -> None:
    """Runs in a separate process, because a failure is a crash."""
    script = """
import threading, numpy as np
from rollmesh import errors, ops
table, ids = np.ones((16, 4096), np.float32), np.zeros(4096, np.int32)
out, stop = np.empty((4096, 4096), np.float32), threading.Event()
def scribble():
    while not stop.is_set():
        ids[:] = 2**31 - 1
        ids[:] = 0
thread = threading.Thread(target=scribble)
thread.start()
refused = 0
for _ in range(30):
    try:
        ops.embed(ids, table, out=out, isa="ref")
        assert (out == 1).all()
    except errors.RequestError:
        refused += 1
stop.set()
thread.join()
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stderr}"


def test_combine_wants_distinct_experts() -> None:
    y, gates = np.array([[1e8], [-1e8], [1]], np.float32), np.ones((1, 3), np.float32)
    place = np.array([[0, 1, 2]], np.int32)
    with pytest.raises(
        errors.RequestError, match="ids: expected distinct experts in a row, got 1 twice in row 0"
    ):
        ops.combine(y, place, np.array([[1, 2, 1]], np.int32), gates, 4)
    assert ops.combine(y, place, np.array([[1, 2, 3]], np.int32), gates, 4).shape == (1, 1)

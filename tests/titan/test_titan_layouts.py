"""torchtitan's own models under its own parallelize_qwen3, on four ranks, pushed into generators of
several meshes.

Input: its state dicts as DTensors of FSDP2, HSDP, tensor and expert parallelism and combinations.
Oracle: the same weights without sharding, in one process; for the bytes sent, a count by element.
Bound: equal digests; each rank receives exactly the bytes that it needs and does not hold; tensors
are not gathered."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from typing import Any

import pytest
from paths import SUPPORT

pytest.importorskip("torch")
pytest.importorskip("torchtitan")

import rollmesh as rm

FSDP, HSDP = (
    {"data_parallel_shard_degree": 4},
    {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 2},
)
TP, EP4 = (
    {"data_parallel_shard_degree": 2, "tensor_parallel_degree": 2},
    {"expert_parallel_degree": 4},
)
# The last value: whether the layout makes _StridedShard.
LAYOUTS: dict[str, tuple[str, dict[str, int], tuple[int, int, int], bool]] = {
    "fsdp": ("debugmodel", FSDP, (2, 2, 1), False),
    "fsdp, unfused qkv": ("debugmodel_non_fused_qkv", FSDP, (4, 1, 1), False),
    "hsdp": ("debugmodel", HSDP, (2, 2, 1), False),
    "fsdp tp": ("debugmodel", TP, (2, 2, 1), True),
    "tp": (
        "debugmodel",
        {"data_parallel_shard_degree": 1, "tensor_parallel_degree": 4},
        (4, 1, 1),
        True,
    ),
    "moe fsdp": ("debugmodel_moe", FSDP, (2, 2, 4), False),
    "moe fsdp ep2": ("debugmodel_moe", FSDP | {"expert_parallel_degree": 2}, (2, 2, 2), True),
    "moe ep4": ("debugmodel_moe", FSDP | EP4, (2, 2, 4), True),
    "moe hsdp ep2": ("debugmodel_moe", HSDP | {"expert_parallel_degree": 2}, (2, 2, 4), True),
    "moe fsdp tp ep4": ("debugmodel_moe", TP | EP4, (4, 1, 4), True),
}


@pytest.fixture(scope="module")
def told() -> dict[str, list[Any]]:
    """Returns the results of all layouts in one run of four processes."""
    jobs = json.dumps([layout[:3] for layout in LAYOUTS.values()])
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "4",
    ]
    done = subprocess.run(
        [*command, str(SUPPORT / "titan_ranks.py"), jobs],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[[")]
    return dict(zip(LAYOUTS, lines, strict=True))


@functools.cache
def alone(flavor: str) -> str:
    """Returns the digest of the same weights without sharding."""
    import titan_cpu
    from titan_ranks import weights_of

    config = titan_cpu.model_registry(flavor, attn_backend="flex").model
    config.layers = config.layers[:1]
    module = config.build()
    weights_of(module)
    spec = rm.ModelSpec.from_torchtitan(config)
    with rm.Generator(
        spec, dtype="float32", max_model_len=64, kv_cache_gib=0.02, threads=1
    ) as generator:
        return generator.sync_weights(module.state_dict()).digest


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_rank_is_sent_what_it_needs(told: dict[str, list[Any]], layout: str) -> None:
    flavor, _, _, makes_strided = LAYOUTS[layout]
    digest = alone(flavor)
    for rank, (its, received, needed, gathered, strided) in enumerate(told[layout]):
        assert its == digest, f"rank {rank}"
        assert (received, gathered) == (needed, 0), f"rank {rank}"
        assert (strided > 0) == makes_strided, f"rank {rank}: {strided} tensors are _StridedShard"

"""Meshes of rollmesh under vLLM are bit-identical to one rank: tensor, expert and data parallelism,
with each executor that works without a GPU.

Input: as in test_vllm_engine. Oracle: rm.Generator on one rank. Bound: 0 differing bits. vLLM's
MultiprocExecutor starts the ranks of a replica, AsyncLLM the replicas, torchrun the ranks that
share a trainer's processes.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import vllm_support as support
from marks import SUMMARY
from paths import SUPPORT

from rollmesh.vllm.trainer import AsyncWeightSender, WeightSender

pytest.importorskip("vllm", reason="needs vLLM")
pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own


@dataclasses.dataclass(frozen=True)
class Setting:
    model: str
    dtype: str
    tp: int = 1
    dp: int = 1
    expert_parallel: bool = False
    v2: bool = False
    asynchronous: bool = True
    processes: bool = False  # the engine in a separate process, vLLM's default

    def __str__(self) -> str:
        how = f"tp{self.tp}-dp{self.dp}" + ("-ep" if self.expert_parallel else "")
        how += "-apart" if self.processes else ""
        runner, loop = "v2" if self.v2 else "v1", "async" if self.asynchronous else "sync"
        return f"{self.model}-{self.dtype}-{how}-{runner}-{loop}"

    @property
    def options(self) -> dict[str, Any]:
        return {
            "tensor_parallel_size": self.tp,
            "data_parallel_size": self.dp,
            "enable_expert_parallel": self.expert_parallel,
            "async_scheduling": self.asynchronous,
            "num_gpu_blocks_override": 16,
        }


def crowded(first: int) -> list[support.Request]:
    """More requests than the blocks can hold, so that some are preempted."""
    return [
        support.request(
            [first + i] * 12, seed=i, temperature=[0.0, 1.0][i % 2], logprobs=2, max_tokens=80
        )
        for i in range(6)
    ]


# --------------------------------------------------------------------------- ranks of one replica
ONE_REPLICA = (
    Setting("dense", "bfloat16", processes=True),
    Setting("dense", "float32", tp=2, processes=True),
    Setting("moe", "bfloat16", tp=2, v2=True, asynchronous=False),
    Setting("moe", "float32", tp=2, expert_parallel=True, asynchronous=False),
    Setting("moe", "bfloat16", tp=2, expert_parallel=True, v2=True),
    Setting("hybrid", "float32", tp=2, expert_parallel=True),
)


@pytest.fixture(scope="module", params=ONE_REPLICA, ids=str)
def served(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    pytestconfig: pytest.Config,
) -> Iterator[support.Served]:
    setting = request.param
    options = setting.options | {
        "distributed_executor_backend": "mp" if setting.tp > 1 else "uni",
        "processes": setting.processes,
    }
    with support.served(
        setting, tmp_path_factory.mktemp("vllm"), lambda llm: WeightSender(llm).send, **options
    ) as served:
        yield served
    pytestconfig.stash[SUMMARY].append(
        f"vllm, {setting}: {served.compared:,} tokens and logprobs compared, 0 differ"
    )


@pytest.mark.parametrize("seed", range(2))
def test_ranks_answer_as_one(served: support.Served, seed: int) -> None:
    served.hold(support.mixed(served.setting.model, seed, 16))


def test_ranks_under_preemption(served: support.Served) -> None:
    served.hold(crowded(20))


def test_ranks_after_updates_without_a_cache_reset(served: support.Served) -> None:
    requests = [
        support.request([*range(200, 270), i], seed=i, logprobs=4, prompt_logprobs=[None, 1][i % 2])
        for i in range(3)
    ]
    for _ in range(3):
        served.hold(requests)
        served.hold(requests)
        served.push()


# --------------------------------------------------------------------------------------- replicas
REPLICAS = (
    Setting("moe", "bfloat16", dp=2, expert_parallel=True, v2=True, asynchronous=False),
    Setting("moe", "bfloat16", tp=2, dp=2, expert_parallel=True),
    Setting("dense", "float32", dp=2),  # two independent engines
    pytest.param(Setting("moe", "float32", dp=2), marks=pytest.mark.slow),
    pytest.param(
        Setting("moe", "float32", tp=2, dp=2, expert_parallel=True, v2=True, asynchronous=False),
        marks=pytest.mark.slow,
    ),
)


@pytest.mark.parametrize("setting", REPLICAS, ids=str)
def test_replicas_answer_as_one(
    setting: Setting, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """Requests balanced by vLLM; one busy replica while the other steps without tokens; idle
    replicas that wake; an update in between and one while requests wait; both replicas
    preempting."""
    support.need_protocol(setting.v2)
    oracle = support.Oracle(setting.model, setting.dtype)
    compared = 0

    async def hold(
        llm: Any, requests: list[support.Request], name: str, ranks: list[int] | None = None
    ) -> None:
        nonlocal compared
        got = await support.async_generate(llm, requests, name, ranks)
        compared += support.agree(got, oracle.answers(requests))

    async def run() -> None:
        async with support.async_engine(
            tmp_path, setting.model, setting.dtype, setting.v2, **setting.options
        ) as llm:
            sender = AsyncWeightSender(llm)
            for version in range(1, 3):
                weights = support.weights_of(setting.model, setting.dtype, version)
                await sender.send(weights, version)
                oracle.serve(weights)
                requests = support.mixed(setting.model, version, 12)
                await hold(llm, requests, f"balanced-{version}")
                await hold(llm, requests[:4], f"right-{version}", [1] * 4)
                await hold(llm, requests[4:8], f"left-{version}", [0] * 4)
                await hold(llm, requests, f"three-to-one-{version}", [0, 0, 1, 0] * 3)
            await hold(llm, crowded(20) + crowded(40), "crowded", [0, 1] * 6)

    try:
        asyncio.run(asyncio.wait_for(run(), 400))
    finally:
        oracle.close()
    pytestconfig.stash[SUMMARY].append(
        f"vllm, {setting}: {compared:,} tokens and logprobs compared, 0 differ"
    )


# --------------------------------------------------------------------- ranks that torchrun starts
LAUNCHED = (
    pytest.param("dense", "float32", 2, {"tensor_parallel_size": 2}, marks=pytest.mark.slow),
    (
        "moe",
        "bfloat16",
        2,
        {
            "tensor_parallel_size": 2,
            "enable_expert_parallel": True,
            "logprobs_mode": "processed_logprobs",
        },
    ),
)


@pytest.mark.parametrize(
    "model, dtype, world, changes",
    LAUNCHED,
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_ranks_of_torchrun(
    model: str, dtype: str, world: int, changes: dict[str, Any], tmp_path: Path
) -> None:
    """Each process is a front end, an engine and a worker, and all of them answer."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(world),
        "--master-port",
        "0",
        "--standalone",
    ]
    command += [str(SUPPORT / "vllm_launched.py"), model, dtype, str(tmp_path), json.dumps(changes)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=400,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"rank"')]
    assert sorted(answer["rank"] for answer in answers) == list(range(world))
    assert min(answer["compared"] for answer in answers) > 100

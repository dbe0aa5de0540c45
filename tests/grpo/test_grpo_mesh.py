"""A GRPO run whose generator is a mesh of four processes, with the trainer on rank 0, equals the
run in one process, bit for bit.

Input: configs/qwen3_moe_debug_ep4.toml, started by torchrun. Oracle: the same configuration in one
process, on one rank. Bound: every metric of every step but the times, and every weight of the last
checkpoint, are equal. A short run is part of every test run: about 20 s of CPU time, most of it for
imports. The whole run, with the reward curve from chance to learned, takes some minutes:

    pytest -m slow tests/grpo/test_grpo_mesh.py"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import TIMES
from marks import SUMMARY
from paths import ROOT

pytest.importorskip("torch")
pytest.importorskip("transformers")

from rollmesh.run import metrics

CONFIG = ROOT / "configs/qwen3_moe_debug_ep4.toml"
ALONE = ["generator.tp=1", "generator.dp=1", "generator.ep=1"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
SHORT = [
    "train.steps=2",
    "rollout.prompts=8",
    "rollout.samples=8",
    "eval.prompts=8",
    "eval.every=1",
]


def grpo(
    out: Path, changes: list[str], launcher: list[str], seconds: float
) -> list[dict[str, Any]]:
    """Returns the lines of metrics.jsonl without times. Terminating torchrun ends its ranks."""
    command = [sys.executable, *launcher, "-m", "rollmesh", "grpo", str(CONFIG), "--out", str(out)]
    command += [word for change in changes for word in ("--set", change)]
    ranks = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"}
    environment = {key: value for key, value in os.environ.items() if key not in ranks}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        try:
            said = process.communicate(timeout=seconds)[0]
        except subprocess.TimeoutExpired:
            process.terminate()
            said = process.communicate(timeout=60)[0]
    assert process.returncode == 0, said
    return [
        {name: value for name, value in line.items() if name not in TIMES}
        for line in metrics.read(out / "metrics.jsonl")
    ]


def compare(tmp_path: Path, changes: list[str], seconds: float) -> list[dict[str, Any]]:
    one = grpo(tmp_path / "one", [*changes, *ALONE], [], seconds)
    four = grpo(tmp_path / "four", changes, TORCHRUN, seconds)
    for mine, theirs in zip(one, four, strict=True):
        assert mine == theirs, f"step {mine['step']}"
    ends = [
        next(iter(sorted((tmp_path / name / "checkpoints").iterdir(), reverse=True)))
        for name in ("one", "four")
    ]
    assert ends[0].name == ends[1].name == f"step_{one[-1]['step']:06}"
    assert (ends[0] / "model.safetensors").read_bytes() == (
        ends[1] / "model.safetensors"
    ).read_bytes()
    return one


@pytest.mark.full
def test_four_processes_learn_as_one_does(tmp_path: Path) -> None:
    lines = compare(tmp_path, SHORT, 300)
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert max(line["reward_mean"] for line in lines) > 0, (
        "rewards of zero teach nothing, and nothing would be compared"
    )
    assert len({line["entropy"] for line in lines if "entropy" in line}) == 2  # the weights moved


@pytest.mark.full
def test_a_version_in_flight_reaches_all_processes(tmp_path: Path) -> None:
    """Rank 0 pushes while its other thread generates. The run fails unless each logprob equals the
    trainer's under the version that drew the token."""
    changes = [
        *SHORT,
        "train.steps=4",
        "rollout.async_level=2",
        "sync.inflight=keep",
        "train.kernels=rollmesh",
    ]
    lines = grpo(tmp_path / "run", changes, TORCHRUN, 300)
    assert [line["step"] for line in lines] == list(range(5))
    assert all(0 <= line["staleness_mean"] <= line["staleness_max"] <= 2 for line in lines)


@pytest.mark.slow
def test_the_whole_reward_curve_is_that_of_one_process(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    lines = compare(tmp_path, [], 3000)
    rewards = [line["eval_reward"] for line in lines if "eval_reward" in line]
    curve = f"{rewards[0]:.3f} → {rewards[-1]:.3f} in {lines[-1]['step']} steps"
    pytestconfig.stash[SUMMARY].append(f"grpo on four processes: {curve}, the bits of one process")
    assert rewards[0] <= 0.1
    assert rewards[-1] >= 0.9

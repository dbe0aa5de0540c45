"""examples/trl_grpo.py: TRL's GRPOTrainer, colocated, on vLLM on rollmesh, on the CPU. Nothing of TRL's is changed.

Oracle: TRL itself, which computes the logprob of every sampled token with its own model and reports how far vLLM's are from them. Bound:
1e-4, as for float32 on both sides in test_grpo_learning.py (2.7e-5 was seen); weights of the step before would be 0.1 and more away, and
bfloat16 about 1. Whether it learns takes some minutes:

    pytest -m slow tests/test_trl.py
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from marks import SUMMARY

pytest.importorskip("trl", reason="needs TRL")
pytest.importorskip("vllm", reason="needs vLLM")

EXAMPLE = Path(__file__).resolve().parent.parent / "examples/trl_grpo.py"
ROUNDING = 1e-4


def train(out: Path, steps: int, seconds: float) -> list[dict[str, Any]]:
    """TRL's log, an object for each two optimizer steps: they share their completions."""
    command = [sys.executable, str(EXAMPLE), "--out", str(out), "--steps", str(steps)]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("VLLM_")} | {"VLLM_PLUGINS": "rollmesh"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
    )
    try:
        said = process.communicate(timeout=seconds)[0]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, said[-4000:]
    return [json.loads(line) for line in (out / "trl_metrics.jsonl").read_text().splitlines()]


def apart(lines: list[dict[str, Any]]) -> float:
    """The largest difference that TRL reports; asserts that its importance sampling ratio is as near to 1."""
    for line in lines:
        for end in ("min", "mean", "max"):
            assert abs(line[f"sampling/importance_sampling_ratio/{end}"] - 1.0) < ROUNDING
    return max(line["sampling/sampling_logp_difference/max"] for line in lines)


def test_every_rollout_is_of_the_weights_that_trl_pushed_last(tmp_path: Path) -> None:
    lines = train(tmp_path, 6, 400)
    assert len(lines) == 3
    assert len({line["entropy"] for line in lines}) == 3  # the weights moved
    assert 0.0 < apart(lines) < ROUNDING


@pytest.mark.slow
def test_the_reward_rises(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """From chance, at most 0.1, to at least 0.5, which the prompt has to be read for (test_grpo_learning.py)."""
    lines = train(tmp_path, 240, 1800)
    rewards, most = [line["reward"] for line in lines], apart(lines)
    request.config.stash[SUMMARY].append(
        f"TRL on vLLM on rollmesh: reward {rewards[0]:.3f} → {rewards[-1]:.3f} in 240 steps, sampling_logp_difference at most {most:.1e}"
    )
    assert rewards[0] <= 0.1
    assert max(rewards[-5:]) >= 0.5
    assert most < ROUNDING

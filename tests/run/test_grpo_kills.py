"""Runs of `rollmesh grpo` that are killed at random moments and resumed: the driver is
tests/support/grpo_kills.py."""

from __future__ import annotations

import sys

import pytest
from paths import SUPPORT
from test_native import note, run

DRIVER = SUPPORT / "grpo_kills.py"
pytest.importorskip("torch")
pytest.importorskip("transformers")


@pytest.mark.parametrize(
    "kills", [pytest.param(6, marks=pytest.mark.full), pytest.param(200, marks=pytest.mark.slow)]
)
def test_a_killed_run_that_is_resumed_ends_as_an_undisturbed_one(
    kills: int, seed: int, pytestconfig: pytest.Config
) -> None:
    done = run([sys.executable, DRIVER, "--kills", str(kills), "--seed", str(seed)], timeout=3600)
    assert done.returncode == 0, done.stdout + done.stderr
    note(pytestconfig, "kills", done.stdout)


@pytest.mark.full
def test_another_run_is_seen() -> None:
    """The driver injects a fault: AdamW's moments are not read."""
    done = run([sys.executable, DRIVER, "--kills", "30", "--plant", "1"])
    assert "model.safetensors" in done.stderr, done.stdout + done.stderr

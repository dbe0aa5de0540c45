"""The fuzzer of the inputs of `rollmesh grpo`. The driver is tests/support/grpo_fuzz.py; its head
states the mutations and the oracle.

The fuzzer runs for RM_FUZZ_SECONDS seconds (.ci/run: 30; else 2), from a seed fixed by the test's
id, which RM_TEST_SEED=n replaces. It must first detect the injected faults. An hour:
RM_FUZZ_SECONDS=3600 pytest -m full tests/run/test_grpo_fuzz.py"""

from __future__ import annotations

import os
import sys

import pytest
from paths import SUPPORT
from test_native import note, run

DRIVER = SUPPORT / "grpo_fuzz.py"
SECONDS = int(os.environ.get("RM_FUZZ_SECONDS", "2"))
pytest.importorskip("torch")
pytest.importorskip("transformers")


@pytest.mark.full
def test_nothing_that_is_wrong_breaks_a_run(seed: int, pytestconfig: pytest.Config) -> None:
    done = run(
        [sys.executable, DRIVER, "--planted", "--seconds", str(SECONDS), "--seed", str(seed)],
        timeout=SECONDS + 600,
    )
    assert done.returncode == 0, done.stderr[-8000:]
    note(pytestconfig, "fuzz", done.stdout)

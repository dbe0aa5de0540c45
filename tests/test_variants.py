"""Whole rollouts under every instruction set, from C: tests/native/variants.c, whose head says what is compared with what.

Bound: no word of logits, logprobs, tokens or routing differs from the reference kernels'. What this machine lacks runs in
emulation; what really ran is named in the summary of the test session. The long command is the emulated driver without --quick.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from marks import SUMMARY

NO_VARIANT = 3  # exit status: the reference had nothing to be compared with


def run(program: Path, *options: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([str(program), *options], capture_output=True, text=True, timeout=600, check=False)
    if done.returncode == NO_VARIANT:
        pytest.skip("no variant but the reference runs on this processor")
    return done


def check(config: pytest.Config, program: Path, *options: str) -> str:
    done = run(program, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1].startswith("0 of ")
    config.stash[SUMMARY].append("variants: " + "; ".join([lines[-1], *lines[:-1]]))
    return done.stdout


def test_rollouts_have_the_bits_of_the_reference(native: Callable[..., Path], pytestconfig: pytest.Config) -> None:
    check(pytestconfig, native("variants"))


@pytest.mark.full
def test_emulated_rollouts_have_the_bits_of_the_reference(native: Callable[..., Path], pytestconfig: pytest.Config) -> None:
    assert "did not run" not in check(pytestconfig, native("variants", emulate=True), "--quick", "1")


def test_one_wrong_bit_is_seen(native: Callable[..., Path]) -> None:
    done = run(native("variants"), "--quick", "1", "--plant", "1")
    assert done.returncode == 1
    assert "1 of " in done.stdout

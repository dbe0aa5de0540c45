"""Every op of every variant against the reference, from C: tests/support/native/checkops, whose
head lists its options.

Input: random shapes around lane and tile widths, hard numbers, unaligned buffers between guards and
beside inaccessible pages. Oracle: the reference table (for pack, plain loops). Bound: zero bits.
One run has a fixed seed, so its shapes are always the same; another run's seed is random and
printed. The summary of the test session lists the variants that could not run here. The long
command is `checkops --elements 1e9`."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from marks import SUMMARY, full

FIXED_SEED = "20261121"
NO_VARIANT = 3  # exit status: nothing to compare with
OPS = (
    *(
        "embed",
        "gather_rows",
        "rms_norm",
        "gemm",
        "gemm_swiglu",
        "activate",
        "sigmoid_gate",
        "head_squares",
        "qk_rope_kv",
        "attention",
        "delta_net",
        "router",
    ),
    *("permute", "static_dispatch", "combine"),
    *("lm_head", "merge_pairs", "sample", "top_logprobs", "ranks", "pack"),
)


def run(program: Path, *options: str, under: tuple[str, ...] = ()) -> tuple[int, str]:
    done = subprocess.run(
        [*under, str(program), *options], capture_output=True, text=True, timeout=600, check=False
    )
    sys.stdout.write(done.stdout + done.stderr)
    return done.returncode, done.stdout


def check(program: Path, *options: str, under: tuple[str, ...] = ()) -> str:
    status, output = run(program, *options, under=under)
    if status == NO_VARIANT:
        pytest.skip("no variant but the reference runs on this processor")
    assert status == 0, output
    assert "0 differences" in output
    return output


def summarize(config: pytest.Config, title: str, output: str) -> None:
    lines = output.splitlines()
    named = [line for line in lines if line.startswith(("ran: ", "did not run: "))]
    config.stash[SUMMARY].append("; ".join([f"checkops {title}: {lines[-1]}", *named]))


def test_all_ops_are_listed(native: Callable[..., Path]) -> None:
    status, output = run(native("checkops"), "--list")
    assert status == 0
    assert tuple(line.split()[1] for line in output.splitlines() if line.startswith("op ")) == OPS


@pytest.mark.parametrize("seed", [FIXED_SEED, full(None)])
def test_variants_give_the_bits_of_the_reference(
    native: Callable[..., Path], pytestconfig: pytest.Config, seed: str | None
) -> None:
    output = check(native("checkops"), "--quick", *(["--seed", seed] if seed else []))
    summarize(pytestconfig, "fixed" if seed else "random", output)


@pytest.mark.full
def test_emulated_variants_give_the_bits_of_the_reference(
    native: Callable[..., Path], pytestconfig: pytest.Config
) -> None:
    """Runs the sources of every variant with emulated instructions, which any machine can
    execute."""
    output = check(native("checkops", emulate=True), "--trials", "30")
    summarize(pytestconfig, "emulated", output)
    assert "did not run" not in output


@pytest.mark.parametrize("op", OPS)
def test_one_wrong_bit_is_seen(native: Callable[..., Path], op: str) -> None:
    status, output = run(native("checkops"), "--trials", "10", "--op", op, "--plant")
    if status == NO_VARIANT:
        pytest.skip("no variant but the reference runs on this processor")
    assert status == 1
    assert "FAIL" in output
    assert f"again: checkops --op {op} --trial" in output


@pytest.mark.full
@pytest.mark.skipif(
    not shutil.which("valgrind"),
    reason="valgrind is not installed: reads of uninitialised memory are not looked for",
)
def test_valgrind_sees_no_read_of_what_was_not_written(native: Callable[..., Path]) -> None:
    """Reference and AVX2 on exact allocations: outputs, workspace and the bytes after an input are
    uninitialised. The comparison branches on each output, so valgrind reports an output that was
    not stored."""
    under = ("valgrind", "-q", "--error-exitcode=9")
    check(native("checkops"), "--trials", "40", "--small", "--heap", "--isa", "avx2", under=under)

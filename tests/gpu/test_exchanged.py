"""csrc/gpu/exchange_sizes.h: the sizes of exchanges between ranks, and the memory of expert
exchanges over NCCL, without a device.

Input: models of the largest sizes, on meshes of 8 and 64 ranks, through
tests/support/native/exchanged.c. Oracle: sizes written out by hand. Bound: equality, and for
scratch two and a half times an exchange."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from marks import full

MIB = 1 << 20
# hidden, heads, head_dim, intermediate, moe_intermediate, experts, top_k, layers, vocab
QWEN_30B = (2048, 32, 128, 6144, 768, 128, 8, 48, 151936)
DEEPSEEK = (7168, 128, 128, 18432, 2048, 256, 8, 58, 129280)
LOGITS = 110 * 151936 * 4


class Sizes(NamedTuple):
    run_rows: int
    tp: int
    tp_apart: int
    ep: int
    ep_apart: int
    scratch: int
    held: int


@pytest.fixture(scope="module", params=["", full("address,undefined")])
def program(native: Callable[..., Path], request: pytest.FixtureRequest) -> Path:
    return native("exchanged", sanitize=request.param)


def sizes(
    program: Path,
    model: tuple[int, ...],
    tp: int,
    dp: int,
    ep: int,
    *,
    stays: bool = False,
    rows: int = 8192,
) -> Sizes:
    words = [*model, tp, dp, ep, int(stays), rows, 110, min(rows, 512)]
    return Sizes(
        *map(
            int,
            subprocess.run(
                [program, *map(str, words)], capture_output=True, text=True, check=True
            ).stdout.split(),
        )
    )


def test_experts_of_replicas(program: Path) -> None:
    """Each of eight homes has 512 rows of 4 KiB, whose 8 choices may all be on one rank. Blocks are
    contiguous, so NCCL does not pack."""
    got = sizes(program, QWEN_30B, tp=1, dp=8, ep=8)
    assert got.run_rows == 512
    assert (got.ep, got.ep_apart) == (8 * 512 * 8 * 4096, 0)
    assert got.ep == 128 * MIB
    assert 2 * got.ep < got.scratch < 2.6 * got.ep
    assert got.held < MIB


@pytest.mark.parametrize("stays", [False, True])
def test_experts_of_a_tp_group(program: Path, stays: bool) -> None:
    """Rows that are sent are packed for attention's heads only, 4096 of 2 bytes; for rows that
    stay, the outputs of a run are sent by columns."""
    got = sizes(program, QWEN_30B, tp=8, dp=1, ep=8, stays=stays)
    assert got.run_rows == 8 * 512
    assert got.tp_apart == (4096 * 8 * 4096 if stays else max(8192 * 4096 * 2, LOGITS))
    assert got.tp >= got.tp_apart
    assert got.held == (0 if stays else 512 * 8 * 4)


def test_experts_cut_by_columns(program: Path) -> None:
    """The inner columns are completed for every row and choice: 768 of 2 bytes, eight times."""
    got = sizes(program, QWEN_30B, tp=8, dp=1, ep=1)
    assert got.tp_apart == got.tp == 8192 * 8 * 768 * 2


def test_runs_are_bounded_by_bytes(program: Path) -> None:
    """64 homes with rows of 14 KiB, four experts on a rank: a row of each is 3.5 MiB, and 256 MiB
    hold 73 of them."""
    got = sizes(program, DEEPSEEK, tp=1, dp=64, ep=64)
    assert got.run_rows == 256 * MIB // (64 * 4 * 7168 * 2) == 73
    assert got.ep == 73 * 64 * 4 * 7168 * 2
    assert got.scratch < 2.6 * 256 * MIB


@pytest.mark.parametrize("rows", [1, 2, 73, 74, 512, 513])
def test_a_run_is_no_longer_than_a_step(program: Path, rows: int) -> None:
    assert sizes(program, QWEN_30B, tp=1, dp=8, ep=8, rows=rows).run_rows == min(rows, 512)
    assert sizes(program, DEEPSEEK, tp=1, dp=64, ep=64, rows=rows).run_rows == min(rows, 73)

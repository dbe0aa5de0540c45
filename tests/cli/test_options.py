"""Malformed command lines. A benchmark that guesses at a misspelt option or an invalid number runs
nothing or something else and reports success. So each one must refuse it with exit status 2 and a
message, before it does anything."""

from __future__ import annotations

import subprocess
import sys

import pytest
from marks import some
from paths import ROOT


def refused(command: list[str]) -> None:
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2, (command, done.returncode, done.stdout[:400], done.stderr[:400])
    assert done.stdout == ""
    said = done.stderr.splitlines()
    assert len(said) == 1 or said[0].startswith("usage:")
    assert len(said[-1]) < 200


WRONG_LINES = (
    *(
        "fuzz --processes -1",
        "fuzz --processes 0",
        "fuzz --processes x",
        "fuzz --seed -1",
        "fuzz --seed 99999999999999999999",
    ),
    *(
        "machine --threads 0",
        "machine --threads -1",
        "machine --threads 100000",
        "machine --gib nan",
        "machine --gib -1",
    ),
    *(
        "machine --gib 0",
        "machine --gib 1e9",
        "machine --seconds nan",
        "machine --seconds -1",
        "machine --seconds inf",
    ),
    *(
        "comm --ranks 0",
        "comm --ranks 2,65",
        "comm --ranks x",
        "comm --transports tcp",
        "comm --buffer-bytes 0",
        "comm --seconds nan",
    ),
    *(
        "gpu nothing",
        "gpu --context 17",
        "gpu --sequences 0",
        "gpu --layers dense-8b",
        "gpu --layers x=1",
        "gpu --set threads",
    ),
    *(
        "gpu --set threads=x",
        "gpu --families cuda",
        "gpu --shapes dense",
    ),
    *(
        "cpu --rounds 0",
        "cpu --steps 1000",
        "cpu --long-layers 29",
        "cpu --vllm-cpu no-such-python",
        "cpu --json no-such-folder/f.json",
    ),
    *("soak --syncs -1", "soak --seed -1", "soak --syncs 0 --lives 0 --requests 0"),
)


@pytest.mark.parametrize(
    "line", some(WRONG_LINES, lambda line: line.startswith(("fuzz --seed", "gpu ", "cpu --vllm")))
)
def test_benchmarks_refuse_what_nobody_meant(line: str) -> None:
    module, *words = line.split()
    refused([sys.executable, "-m", f"benchmarks.{module}", *words])


def test_a_benchmark_that_cannot_start_says_so() -> None:
    command = ["env", "CC=no-such-compiler", sys.executable, "-m", "benchmarks.machine"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert done.stderr == "benchmarks.machine: no-such-compiler: No such file or directory\n"

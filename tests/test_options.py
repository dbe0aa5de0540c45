"""Command lines that nobody meant. A driver or a benchmark that guesses at a misspelt option, or at a number that is none, runs
nothing or something else and reports success; so each refuses with exit status 2 and a sentence, before it does anything."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from marks import some

ROOT = Path(__file__).resolve().parent.parent
# Of each driver: an option that takes a number, and one beyond what it allows.
DRIVERS = {
    "alloc_fail": ("--adds", "0"),
    "checkops": ("--trials", "0"),
    "fuzz_calls": ("--cases", "0"),
    "fuzz_requests": ("--seconds", "-5"),
    "fuzz_weights": ("--first", "-1"),
    "mesh_attach": ("--rounds", "0"),
    "mesh_comm": ("--cases", "0"),
    "mesh_kill": ("--kills", "0"),
    "race_engine": ("--requests", "257"),
    "race_sync": ("--versions", "-1"),
    "race_team": ("--rounds", "0"),
    "second_line": ("", ""),
    "tiny_run": ("--requests", "-1"),
    "variants": ("--quick", "2"),
}
NO_NUMBERS = ("x", "", "1e8", "5x", "nan", "1" + 40 * "0")


def refused(command: list[str]) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2, (command, done.returncode, done.stdout[:400], done.stderr[:400])
    assert done.stdout == ""
    said = done.stderr.splitlines()
    assert len(said) == 1 or said[0].startswith("usage:")
    assert len(said[-1]) < 200


@pytest.mark.parametrize("driver", some(DRIVERS, ["checkops", "mesh_comm", "fuzz_calls"].__contains__))
def test_drivers_refuse_what_nobody_meant(native: Callable[..., Path], driver: str) -> None:
    program, (option, beyond) = str(native(driver)), DRIVERS[driver]
    for words in (["--nothing", "1"], ["--nothing"], ["nothing"], ["--", "1"]):
        refused([program, *words])
    if not option:
        return
    for words in ([option], [option + "s", "1"], [option[1:], "1"], [option, "1", "1"], [option, "1", option], [option, beyond]):
        refused([program, *words])
    for number in NO_NUMBERS:
        refused([program, option, number])


@pytest.mark.parametrize("seed", ["-1", "x", "", "1e3", str(2**64)])
def test_seeds_are_64_bits(native: Callable[..., Path], seed: str) -> None:
    for driver in ("checkops", "fuzz_requests", "race_team"):
        refused([str(native(driver)), "--seed", seed])
    last = subprocess.run([native("race_team"), "--rounds", "1", "--seed", str(2**64 - 1)], capture_output=True, check=False)
    assert last.returncode == 0


WRONG_LINES = (
    *("fuzz --processes -1", "fuzz --processes 0", "fuzz --processes x", "fuzz --seed -1", "fuzz --seed 99999999999999999999"),
    *("machine --threads 0", "machine --threads -1", "machine --threads 100000", "machine --gib nan", "machine --gib -1"),
    *("machine --gib 0", "machine --gib 1e9", "machine --seconds nan", "machine --seconds -1", "machine --seconds inf"),
    *("comm --ranks 0", "comm --ranks 2,65", "comm --ranks x", "comm --transports tcp", "comm --buffer-bytes 0", "comm --seconds nan"),
    *("gpu nothing", "gpu --context 17", "gpu --sequences 0", "gpu --layers dense-8b", "gpu --layers x=1", "gpu --set threads"),
    *("gpu --set threads=x", "gpu --families cuda", "gpu --shapes dense", "gpu_first --within 0", "gpu_first --again x"),
    *("soak --syncs -1", "soak --seed -1", "soak --syncs 0 --lives 0 --requests 0"),
)


@pytest.mark.parametrize("line", some(WRONG_LINES, lambda line: line.startswith(("fuzz --seed", "gpu "))))
def test_benchmarks_refuse_what_nobody_meant(line: str) -> None:
    module, *words = line.split()
    refused([sys.executable, "-m", f"benchmarks.{module}", *words])


def test_a_benchmark_that_cannot_start_says_so() -> None:
    command = ["env", "CC=no-such-compiler", sys.executable, "-m", "benchmarks.machine"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr == "benchmarks.machine: no-such-compiler: No such file or directory\n"

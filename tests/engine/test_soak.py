"""Memory does not grow: weight syncs, lives of generators and requests, repeated through the public
API (benchmarks/soak; its growth.py lists the measurements and when they count as growth). Each run
is a separate process, because memory left by other tests would count too. The test first checks
that a leak injected into the driver is detected, at smaller counts."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from collections.abc import Sequence

import pytest
from marks import SUMMARY
from paths import ROOT

PARTS = ("syncs", "lives", "requests")


def soak(
    *counts: int, plant: Sequence[str] = (), timeout: float = 600
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.soak"]
    for part, count in zip(PARTS, counts, strict=True):
        command += [f"--{part}", str(count)]
    if plant:
        command += ["--plant", *plant]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False
    )


def grown(*plant: str) -> list[set[str]]:
    """Returns the measures that each part reports with these injected faults."""
    done = soak(300, 300, 5000, plant=plant)
    assert done.returncode == 1, f"{done.stdout}\n{done.stderr[-4000:]}"
    parts = done.stdout.split("GROWTH")[1:]
    assert len(parts) == len(PARTS), done.stdout
    return [
        set(re.findall(r"^  (.+) grew by .+ per operation$", part, re.MULTILINE)) for part in parts
    ]


@pytest.mark.full
def test_planted_memory_is_reported() -> None:
    """Each part reports a leak of 64 bytes per operation, and no other measure grows. A glibc
    before 2.33 does not report the size of its heap."""
    for names in grown("leak-memory"):
        assert ("heap" if hasattr(ctypes.CDLL(None), "mallinfo2") else "rss") in names
        assert names <= {"heap", "rss"}


@pytest.mark.full
def test_planted_descriptors_threads_and_references_are_reported() -> None:
    for names in grown("leak-fd", "leak-thread", "leak-reference"):
        assert names >= {"fds", "threads", "references to objects handed in"}


def passes(config: pytest.Config, *counts: int, timeout: float = 600) -> None:
    done = soak(*counts, timeout=timeout)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-4000:]}"
    lines = [line for line in done.stdout.splitlines() if line.startswith(PARTS)]
    assert [line.partition(":")[0] for line in lines] == [*PARTS]
    for line, wanted in zip(lines, counts, strict=True):
        assert int(line.split()[1].replace(",", "")) >= wanted
        config.stash[SUMMARY].append(f"soak, {line}")


@pytest.mark.full
def test_nothing_grows(pytestconfig: pytest.Config) -> None:
    passes(pytestconfig, 1500, 1500, 60_000)


@pytest.mark.slow
def test_nothing_grows_over_the_full_counts(pytestconfig: pytest.Config) -> None:
    passes(pytestconfig, 10_000, 10_000, 1_000_000, timeout=3600)

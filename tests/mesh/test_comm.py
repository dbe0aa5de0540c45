"""The transports over shared memory: ranks that are threads, and ranks that are processes.

The drivers are tests/support/native/mesh_*.c; the head of each states its input and its oracle.
Bounds: bytes are equal, errors have the one expected code and name the one rank. The time from the
end of a process to the last survivor's error is asserted with a bound far above the goal of 0.1 s,
because test machines stall occasionally; the figure is printed."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from marks import full
from test_native import MEMORY, note, passes, run

import rollmesh as rm

Build = Callable[..., Path]


@pytest.mark.parametrize("fault", [1, 2, 3])
def test_planted_faults_are_seen(native: Build, fault: int) -> None:
    done = run([native("mesh_comm"), "--cases", "40", "--plant", str(fault)])
    assert done.returncode == 1, done.stdout


@pytest.mark.parametrize("cases", [100, full(300)])
def test_every_exchange_brings_what_was_sent(
    native: Build, cases: int, seed: int, pytestconfig: pytest.Config
) -> None:
    printed = passes([native("mesh_comm"), "--cases", str(cases), "--seed", str(seed)])
    note(pytestconfig, "threads", printed)


@pytest.mark.full
def test_exchanges_do_not_race(native: Build, pytestconfig: pytest.Config) -> None:
    program = native("mesh_comm", "thread")
    planted = run([program, "--cases", "20", "--plant", "4"])
    assert "WARNING: ThreadSanitizer: data race" in planted.stderr
    note(pytestconfig, "TSan, 0 reports", passes([program, "--cases", "60"]))


@pytest.mark.full
def test_exchanges_touch_only_their_memory(native: Build) -> None:
    passes([native("mesh_comm", MEMORY), "--cases", "60", "--seed", "3"])


@pytest.mark.full
def test_processes_come_together_or_say_why_not(native: Build) -> None:
    done = run([native("mesh_attach"), "--plant", "1"])
    assert done.returncode == 1, done.stdout
    passes([native("mesh_attach")])


@pytest.mark.full
def test_processes_that_come_together_touch_only_their_memory(native: Build) -> None:
    passes([native("mesh_attach", MEMORY)])


def kill(native: Build, config: pytest.Config, *arguments: str) -> None:
    printed = passes([native("mesh_kill"), *arguments], timeout=1200)
    found = re.search(r"(\d+) kills, (\d+) while attaching.*after ([\d.]+) ms \(median\)", printed)
    assert found, printed
    kills, attaching, median = int(found[1]), int(found[2]), float(found[3])
    assert kills > attaching
    assert median < 1000, printed
    note(config, " ".join(["shm", *arguments]), printed)


@pytest.mark.full
@pytest.mark.parametrize("fault", [1, 2])
def test_planted_survivors_are_seen(native: Build, fault: int) -> None:
    """1: the rank is stopped instead of killed; 2: a file stays behind."""
    done = run([native("mesh_kill"), "--kills", "2", "--plant", str(fault)])
    assert done.returncode == 1, done.stdout


@pytest.mark.parametrize("kills", [5, full(30)])
def test_a_killed_rank_is_named(
    native: Build, pytestconfig: pytest.Config, seed: int, kills: int
) -> None:
    kill(native, pytestconfig, "--kills", str(kills), "--seed", str(seed))


@pytest.mark.slow
def test_300_killed_ranks_are_named(native: Build, pytestconfig: pytest.Config) -> None:
    kill(native, pytestconfig, "--kills", "300", "--seed", "2")


@pytest.mark.parametrize(
    "name, bases",
    [
        ("MeshMismatchError", (rm.Error, ValueError)),
        ("CollectiveMismatchError", (rm.Error,)),
        ("CollectiveTimeoutError", (rm.Error, TimeoutError)),
        ("RankLostError", (rm.Error,)),
        ("SyncAbortedError", (rm.Error,)),
        ("AuthError", (rm.Error,)),
    ],
)
def test_the_codes_have_classes(name: str, bases: tuple[type, ...]) -> None:
    assert getattr(rm, name).__bases__ == bases

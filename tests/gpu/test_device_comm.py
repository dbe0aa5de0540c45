"""The transports for blocks in a device's memory, on devices that are threads: staged over a group
of the host, and nccl over a stand-in for NCCL that the tests build.

The drivers are tests/support/native/mesh_device*.c; the head of each states its input and its
oracle. Bounds: bytes equal those of the transport for threads; errors have the expected code and
words, and come in time."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from marks import full
from native_build import standin
from test_native import MEMORY, note, passes, run

Build = Callable[..., Path]
FAULTS = 34  # of mesh_device_faults.c


def beside(program: Path, sanitize: str = "") -> dict[str, str]:
    """Builds the stand-in with the driver's sanitizer into its folder."""
    return {"STANDIN_LIBRARY": str(standin(program.parent.parent, sanitize))}


@pytest.mark.parametrize("fault", [full(1), full(2)])
def test_planted_faults_are_seen(native: Build, fault: int) -> None:
    """1: a bit of what a rank sends is flipped; 2: a rank replays once less."""
    program = native("mesh_device")
    done = run([program, "--cases", "5", "--plant", str(fault)], **beside(program))
    assert done.returncode == 1, done.stdout
    assert ("other bytes than threads bring" if fault == 1 else "TimeoutError") in done.stderr


@pytest.mark.parametrize("cases", [12, full(40)])
def test_devices_get_what_threads_get(
    native: Build, cases: int, seed: int, pytestconfig: pytest.Config
) -> None:
    program = native("mesh_device")
    note(
        pytestconfig,
        "staged and nccl",
        passes([program, "--cases", str(cases), "--seed", str(seed)], **beside(program)),
    )


@pytest.mark.full
def test_a_device_group_does_not_race(native: Build, pytestconfig: pytest.Config) -> None:
    program = native("mesh_device", "thread")
    planted = run([program, "--cases", "3", "--plant", "3"], **beside(program, "thread"))
    assert "WARNING: ThreadSanitizer: data race" in planted.stderr
    note(
        pytestconfig,
        "TSan, 0 reports",
        passes([program, "--cases", "3"], **beside(program, "thread")),
    )


@pytest.mark.full
def test_a_device_group_touches_only_its_memory(native: Build) -> None:
    program = native("mesh_device", MEMORY)
    passes([program, "--cases", "6", "--seed", "3"], **beside(program, MEMORY))


@pytest.mark.parametrize("fault", range(1, FAULTS + 1))
def test_a_fault_that_is_left_out_is_missed(native: Build, fault: int) -> None:
    program = native("mesh_device_faults")
    done = run([program, "--cases", "1", "--plant", str(fault)], **beside(program))
    assert done.returncode == 1, done.stdout


@pytest.mark.full
def test_every_fault_of_nccl_is_an_error(
    native: Build, seed: int, pytestconfig: pytest.Config
) -> None:
    program = native("mesh_device_faults")
    printed = passes([program, "--cases", "3", "--seed", str(seed)], **beside(program))
    found = re.search(r"of (\d+) faults; a killed rank was named by all within (\d+) ms", printed)
    assert found, printed
    assert int(found[1]) == FAULTS
    assert int(found[2]) < 10_000
    note(pytestconfig, "nccl", printed)


@pytest.mark.full
@pytest.mark.parametrize("sanitize", ["thread", MEMORY])
def test_every_fault_under_the_sanitizers(native: Build, sanitize: str) -> None:
    program = native("mesh_device_faults", sanitize)
    passes([program, "--cases", "1", "--seed", "2"], **beside(program, sanitize))


def test_nothing_stays_in_shared_memory() -> None:
    """After the tests above, also those of injected faults, the shared memory of the stand-in's
    ranks is gone. A name contains the process that made it, because other test processes may run at
    the same time."""
    if not os.path.isdir("/dev/shm"):
        pytest.skip("no /dev/shm")
    made = (
        (name, re.match(r"(?:standin-nccl|rollmesh\.rollmesh-faults)-(\d+)-", name))
        for name in os.listdir("/dev/shm")
    )
    assert [name for name, found in made if found and not os.path.exists(f"/proc/{found[1]}")] == []

"""The C core without Python, under tools that find faults without a visible effect: races under
TSan, every allocation and thread refused under ASan, UBSan and the leak detector, and the whole
engine under valgrind. The drivers are tests/support/native/*.c; the head of each states its input
and its oracle. Each tool must first detect an injected fault."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from marks import SUMMARY, full

Build = Callable[..., Path]
MEMORY = "address,undefined"
REPORT = re.compile(r"WARNING: ThreadSanitizer|ERROR: (?:Address|Leak)Sanitizer|runtime error:")


# Messages of a sanitizer that cannot work on this machine: its shadow memory cannot be placed
# (randomised addresses, a memory limit), or it may not stop threads to look for leaks (under a
# debugger, or in a container that forbids it).
CANNOT = re.compile(
    r"unexpected memory mapping|Shadow memory range interleaves|memory layout is "
    r"incompatible|ReserveShadowMemoryRange"
    r"|failed to allocate 0x|CHECK failed: .*sanitizer_allocator|LeakSanitizer has encountered a "
    r"fatal error"
)


@functools.cache
def launchers() -> list[list[str]]:
    """Launchers of the program, first without randomised addresses if that is allowed: under strong
    randomisation the sanitizers of older compilers may not find room for their shadow memory, and
    ASan of gcc 12 may loop on its own trap without a message."""
    fixed = ["setarch", "-R"]
    try:
        allowed = subprocess.run([*fixed, "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        allowed = False
    return [fixed, []] if allowed else [[]]


def run(
    command: list[str | Path], timeout: float = 300, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs a driver; skips the test where its sanitizer cannot run."""
    env = {
        key: value for key, value in os.environ.items() if key not in {"LD_PRELOAD", "RM_ISA"}
    } | environment
    env |= {
        "ASAN_OPTIONS": "detect_leaks=1",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
        "TSAN_OPTIONS": "exitcode=66",
    }
    said = ""
    for prefix in launchers():
        line = [*prefix, *map(str, command)]
        done = subprocess.run(
            line, env=env, capture_output=True, text=True, timeout=timeout, check=False
        )
        if done.returncode == 0 or not (cannot := CANNOT.search(done.stderr)):
            return done
        said = done.stderr[cannot.start() :].strip()
    pytest.skip(f"no sanitizer can run here: {said[:200]}")


def passes(command: list[str | Path], timeout: float = 300, **environment: str) -> str:
    """Runs a driver that must find nothing; returns what it printed."""
    done = run(command, timeout, **environment)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-8000:]}"
    assert not REPORT.search(done.stderr), done.stderr[-8000:]
    return done.stdout


def note(config: pytest.Config, how: str, printed: str) -> None:
    """Adds the driver's last line, which has its counts, to the summary."""
    config.stash[SUMMARY].append(f"native, {how}: {printed.splitlines()[-1]}")


RACES = {"race_team": ["--rounds", "100"], "race_engine": [], "race_mesh": [], "race_sync": []}


@pytest.mark.full
@pytest.mark.parametrize("driver", RACES)
def test_no_data_race(native: Build, driver: str, pytestconfig: pytest.Config) -> None:
    program = native(driver, "thread")
    planted = run([program, "--plant", "1"])
    assert planted.returncode == 66
    assert "WARNING: ThreadSanitizer: data race" in planted.stderr
    printed = passes([program, *RACES[driver]])
    note(pytestconfig, "TSan, 0 reports", printed)


@pytest.mark.full
@pytest.mark.parametrize("driver", RACES)
def test_races_touch_only_their_memory(native: Build, driver: str) -> None:
    passes([native(driver, MEMORY), "--seed", "2"])


def test_second_lines_of_defence(native: Build) -> None:
    """Tests guards that no other test reaches: versions in the store, versions and zeroing in the
    page cache, the mode of workers."""
    assert passes([native("second_line")]) == "3 guards hold\n"


@pytest.mark.parametrize("sanitize", ["", full(MEMORY)])
def test_the_scheduler_alone(native: Build, pytestconfig: pytest.Config, sanitize: str) -> None:
    """Runs random requests, limits and page counts, without a model or a device; the head of the
    driver states oracle and faults."""
    program = native("scheduler", sanitize)
    for fault in ("1", "2", "3"):
        assert run([program, "--plant", fault]).returncode == 1
    note(pytestconfig, "ASan and UBSan" if sanitize else "no sanitizer", passes([program]))


@pytest.mark.full
def test_exp_never_rises_below_zero(native: Build) -> None:
    """Covers every float32 that is not above 0: so the tokens that the filters keep are the first
    of the row's top logprobs."""
    assert passes([native("exp_order")]) == "exp never rises over 2139095041 numbers\n"


def sites(printed: str) -> list[tuple[int, int]]:
    return [
        (int(a), int(t))
        for a, t in re.findall(
            r"(\d+) allocations and (\d+) threads failed once and for ever", printed
        )
    ]


@pytest.mark.full
def test_every_allocation_may_fail(native: Build, pytestconfig: pytest.Config) -> None:
    """The driver compares state, results and held blocks after each failure; this test checks the
    number of sites: some 20 of create, two or three of each sync, one of each of 91 requests."""
    printed = passes([native("alloc_fail")])
    assert len(sites(printed)) == 3
    assert all(allocations > 110 and threads == 3 for allocations, threads in sites(printed))
    note(pytestconfig, "allocations", printed)


@pytest.mark.full
def test_every_allocation_may_fail_under_the_sanitizers(
    native: Build, pytestconfig: pytest.Config
) -> None:
    few: list[str | Path] = ["--kind", "2", "--adds", "4"]  # 66 of the sites are one line of add
    plain = passes([native("alloc_fail"), *few])
    printed = passes([native("alloc_fail", MEMORY), *few])
    assert printed == plain  # the same sites, lives and bits
    note(pytestconfig, "ASan, UBSan and leaks, 0 reports", printed)


@pytest.mark.full
def test_sanitizers_and_instruction_sets_agree(native: Build) -> None:
    """Hashes six rollouts of tiny models: with one thread, three, each instruction set, and under
    the sanitizers."""
    program, checked = native("tiny_run"), native("tiny_run", MEMORY)
    for fault, report in (
        ("1", "LeakSanitizer: detected memory leaks"),
        ("2", "AddressSanitizer: heap-use-after-free"),
    ):
        planted = run([checked, "--requests", "1", "--plant", fault])
        assert planted.returncode != 0
        assert report in planted.stderr
    want = passes([program])
    assert len(set(want.split())) >= 6 + 3
    assert passes([checked, "--threads", "3"]) == want
    # The value is an upper limit: for a variant that this processor lacks, the next lower one is
    # used.
    for isa in ("ref", "avx2", "avx512f", "avx512bf16", "amx"):
        for threads in ("1", "3"):
            assert passes([program, "--threads", threads], RM_ISA=isa) == want, (isa, threads)


@pytest.mark.full
def test_emulated_instruction_sets_agree(native: Build) -> None:
    """Runs the sources of every variant, on any processor, and a model with sizes of several
    tiles."""
    program, every = native("tiny_run", emulate=True), ["--kinds", "4", "--requests", "6"]
    want = passes([program, *every], RM_ISA="ref")
    for isa in ("avx2", "avx512f", "avx512bf16", "amx"):
        assert passes([program, *every], RM_ISA=isa) == want, isa


VALGRIND = [
    "valgrind",
    "-q",
    "--error-exitcode=9",
    "--leak-check=full",
    "--errors-for-leak-kinds=definite,indirect,possible",
]


@pytest.mark.full
@pytest.mark.skipif(
    shutil.which("valgrind") is None,
    reason="valgrind is not installed; the engine was not run under it",
)
@pytest.mark.parametrize("isa", ["ref", "avx2"])
def test_valgrind_finds_nothing(native: Build, isa: str, pytestconfig: pytest.Config) -> None:
    program = native("tiny_run")
    for fault in ("1", "2"):
        planted = run(
            [
                *VALGRIND,
                program,
                "--requests",
                "1",
                "--threads",
                "1",
                "--plant",
                fault,
                "--kinds",
                "0",
            ],
            RM_ISA=isa,
        )
        assert planted.returncode == 9, planted.stderr
    work: list[str | Path] = ["--requests", "4"]
    want = passes([program, *work], RM_ISA=isa)
    printed = passes([*VALGRIND, "--fair-sched=yes", program, *work], RM_ISA=isa)
    assert printed == want
    note(
        pytestconfig,
        f"valgrind, {isa}, 0 errors, 0 leaks",
        f"{len(printed.splitlines())} rollouts with the bits of a run without it",
    )

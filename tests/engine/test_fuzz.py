"""Fuzzers of all external input: state dicts, requests, sequences of calls and configs. The drivers
are tests/support/native/fuzz_*.c and tests/support/config_fuzz.py; the head of each one states its
mutations and its oracle. Each driver must first detect its injected faults.

The config fuzzer runs for RM_FUZZ_SECONDS seconds (.ci/run: 30; else 2), each other one for half as
long, divided between the plain and the sanitized build. The seed is fixed by the test's id, because
acceptance of a change must not depend on chance. RM_TEST_SEED=n replaces the seed, and `python -m
benchmarks.fuzz --seed n` runs the drivers by count."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import config_fuzz
import pytest
from test_native import MEMORY, note, passes, run

Build = Callable[..., Path]
SECONDS = int(os.environ.get("RM_FUZZ_SECONDS", "2"))
# For each driver: the number of faults it can inject, and enough cases to detect each of them and
# to cover all kinds of mutations.
DRIVERS = {"fuzz_weights": (6, 400_000), "fuzz_requests": (4, 40_000), "fuzz_calls": (5, 300)}
REFUSALS = (
    *(
        "StateError",
        "UnexpectedKeyError",
        "DuplicateKeyError",
        "ShapeError",
        "DTypeError",
        "LayoutError",
        "UnsupportedTensorError",
    ),
    *("LimitError", "NonFiniteError", "TiedWeightError", "IncompleteSyncError", "MissingKeyError"),
)


@pytest.mark.full
@pytest.mark.parametrize("driver", DRIVERS)
def test_planted_faults_are_seen(native: Build, driver: str) -> None:
    faults, cases = DRIVERS[driver]
    for fault in range(1, faults + 1):
        done = run([native(driver), "--cases", str(cases), "--plant", str(fault)])
        assert done.returncode != 0, f"--plant {fault}: {done.stdout}"


@pytest.mark.parametrize("driver", DRIVERS)
def test_everything_is_tried(native: Build, driver: str, pytestconfig: pytest.Config) -> None:
    """Runs a fixed number of cases instead of a time: each refusal, each broken rule, each call
    with and without success must occur."""
    printed = passes([native(driver), "--cases", str(DRIVERS[driver][1])])
    met = {word: int(n) for word, n in re.findall(r"(\w+Error) (\d+)", printed)}
    assert driver != "fuzz_weights" or set(REFUSALS) <= {word for word, n in met.items() if n}
    rules = re.findall(
        r"([a-z_ ]+) (\d+)(?=,|\n)", printed.partition("rules broken:")[2].partition("\n")[0] + "\n"
    )
    assert all(int(n) for _, n in rules), rules
    assert driver != "fuzz_requests" or len(rules) > 15
    calls = re.findall(r"(\w+) (\d+) \+ (\d+) refused", printed)
    assert all(int(good) or int(bad) for _, good, bad in calls), calls
    assert driver != "fuzz_calls" or len(calls) > 15
    note(pytestconfig, "fuzz", printed)


@pytest.mark.parametrize(
    "sanitize", ["", pytest.param(MEMORY, marks=pytest.mark.full)], ids=["plain", "sanitized"]
)
@pytest.mark.parametrize("driver", DRIVERS)
def test_nothing_breaks_it(
    native: Build, driver: str, sanitize: str, seed: int, pytestconfig: pytest.Config
) -> None:
    seconds = max(1, SECONDS // 4)
    printed = passes([native(driver, sanitize), "--seconds", str(seconds), "--seed", str(seed)])
    note(pytestconfig, f"fuzz{', ASan and UBSan' if sanitize else ''}, {seconds} s", printed)


def test_configs_that_are_wrong(seed: int, pytestconfig: pytest.Config) -> None:
    for fault in (1, 2):
        with pytest.raises(config_fuzz.Failure):
            config_fuzz.run(seed=1, cases=2000, plant=fault)
    _, counts = config_fuzz.run(seed=1, cases=200)
    assert {
        "ConfigError",
        "FormatError",
        "accepted",
        "generators",
        "arguments refused",
        "arguments taken",
    } <= set(counts)
    done, counts = config_fuzz.run(seed=seed, seconds=SECONDS)
    note(pytestconfig, "fuzz", config_fuzz.line(done, counts, seed))

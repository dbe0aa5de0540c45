"""Runs the fuzzers of tests/engine/test_fuzz.py by count, on all cores.

    python -m benchmarks.fuzz            a hundredth: a minute
    python -m benchmarks.fuzz --full     10^8 descriptors of state dicts, 10^7 requests, 10^6
                                         sequences of calls, 10^5 configs
    python -m benchmarks.fuzz --full --only fuzz_weights --sanitize      of one kind, under ASan and
                                                                         UBSan

The cases of a kind are divided among processes by ranges of their numbers. A case depends only on
the seed and its number, and a failure prints both, so that the case can be run again alone. Prints
the counts of each process, then cases and cases per second. The exit status is 0 if every case
agreed with its oracle.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "support"))

import native_build  # noqa: E402 - a module of the tests

from benchmarks.options import SEEDS, whole  # noqa: E402

FULL = {"fuzz_weights": 10**8, "fuzz_requests": 10**7, "fuzz_calls": 10**6, "config_fuzz": 10**5}
SHORT = 100  # without --full, one part in this many


def command(kind: str, sanitize: bool) -> list[str]:
    if kind == "config_fuzz":
        return [sys.executable, str(ROOT / "tests" / "support" / "config_fuzz.py")]
    into = Path(os.environ.get("RM_NATIVE_BUILD", ROOT / "build" / "native"))
    return [str(native_build.build(kind, into, "address,undefined" if sanitize else ""))]


def deal(kind: str, cases: int, seed: int, processes: int, sanitize: bool) -> bool:
    """Runs `cases` cases of a kind; whether all went well."""
    line, each, begin = command(kind, sanitize), -(-cases // processes), time.monotonic()
    running = [
        subprocess.Popen(
            [
                *line,
                "--seed",
                str(seed),
                "--first",
                str(first),
                "--cases",
                str(min(each, cases - first)),
            ]
        )
        for first in range(0, cases, each)
    ]
    good = True
    for process in running:
        good &= process.wait() == 0
    seconds = time.monotonic() - begin
    sys.stdout.write(
        f"{kind}: {cases if good else f'fewer than {cases}'} cases in {seconds:.0f} s, "
        f"{processes} processes, "
    )
    sys.stdout.write(f"{cases / seconds:.0f} a second; {'no fault' if good else 'A FAULT'}\n")
    sys.stdout.flush()
    return good


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fuzz", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("--full", action="store_true", help="all of it; else a hundredth")
    parser.add_argument("--only", choices=FULL, nargs="+", default=list(FULL), help="these kinds")
    parser.add_argument(
        "--sanitize", action="store_true", help="build the drivers with ASan and UBSan"
    )
    parser.add_argument("--seed", type=whole(0, SEEDS), default=1)
    parser.add_argument("--processes", type=whole(1, 1024), default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    parts = 1 if options.full else SHORT
    results = [
        deal(kind, FULL[kind] // parts, options.seed, options.processes, options.sanitize)
        for kind in options.only
    ]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())

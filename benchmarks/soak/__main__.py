"""The same operations ten thousand and a million times: memory must not grow.

    python -m benchmarks.soak                    10,000 weight syncs, 10,000 generators, 1,000,000
                                                 requests; some minutes
    python -m benchmarks.soak --syncs 300 --lives 0 --requests 20000
    python -m benchmarks.soak --plant leak-fd    injected leaks: every part must report them

All operations use the public API, in rounds over every kind of call in syncs.py, lives.py and
requests.py, each round in another order. growth.py documents the measures that are read between
rounds and when they have grown. A part names the measures that grew, with the growth per operation,
and the exit status is 1. A count of 0 skips a part.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.options import SEEDS, whole
from benchmarks.soak.common import Work
from benchmarks.soak.growth import Meter, Verdict, quiet_malloc, watch
from benchmarks.soak.lives import Lives
from benchmarks.soak.requests import Requests
from benchmarks.soak.syncs import Syncs

WARM_UP_ROUNDS = 8
SHOWN = ("rss", "heap", "fds", "threads", "references to objects handed in", "python blocks")


class Plant:
    """Injected leaks of the driver, which show that the meter detects them: 64 bytes for each
    operation, a reference at each call, a file descriptor and a thread at every eighth, because the
    machine may limit them."""

    def __init__(self, faults: Sequence[str]):
        self._faults = frozenset(faults)
        self._calls = 0
        self._kept: list[Any] = []
        self._fds: list[int] = []
        self._end = threading.Event()
        self._malloc = ctypes.CDLL(None).malloc

    def __call__(self, work: Work, operations: int) -> None:
        self._calls += 1
        if "leak-memory" in self._faults:
            for _ in range(operations):
                self._malloc(ctypes.c_size_t(64))
        if "leak-reference" in self._faults:
            self._kept.append(work.handed[0])
        if "leak-fd" in self._faults and self._calls % 8 == 0:
            self._fds.append(os.dup(0))
        if "leak-thread" in self._faults and self._calls % 8 == 0:
            threading.Thread(target=self._end.wait, daemon=True).start()

    def close(self) -> None:
        self._end.set()
        for fd in self._fds:
            os.close(fd)


def soak(work: Work, count: int, rng: np.random.Generator, plant: Plant, folder: Path) -> bool:
    """Runs one part and prints its result; returns False if something grew."""

    def one_round() -> int:
        done = 0
        for index in rng.permutation(len(work.calls)):
            operations = work.calls[index]()
            plant(work, operations)
            done += operations
        return done + work.settle()

    begin = time.monotonic()
    verdict = watch(Meter(work.handed, folder), one_round, count, WARM_UP_ROUNDS)
    seconds = time.monotonic() - begin
    print(
        f"{work.name}: {verdict.operations:,} in {seconds:.0f} s, {len(work.calls)} kinds of "
        f"call, {report(verdict)}",
        flush=True,
    )
    return not verdict.grown


def report(verdict: Verdict) -> str:
    if not verdict.grown:
        return f"no growth: {verdict.spans(SHOWN)}"
    lines = [str(growth) for growth in verdict.grown]
    if verdict.types:
        lines.append(f"more objects than after warm-up: {', '.join(verdict.types)}")
    return "GROWTH\n  " + "\n  ".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--syncs", type=whole(0), default=10_000)
    parser.add_argument(
        "--lives", type=whole(0), default=10_000, help="generators created and closed"
    )
    parser.add_argument("--requests", type=whole(0), default=1_000_000)
    parser.add_argument(
        "--seed", type=whole(0, SEEDS), default=0, help="of the order of calls and of the prompts"
    )
    parser.add_argument(
        "--plant",
        nargs="+",
        default=[],
        choices=["leak-memory", "leak-fd", "leak-thread", "leak-reference"],
    )
    args = parser.parse_args()
    if not (args.syncs or args.lives or args.requests):
        parser.error("--syncs, --lives and --requests are all 0")
    quiet_malloc()
    parts: list[tuple[Callable[[np.random.Generator, Path], Work], int]] = [
        (Syncs, args.syncs),
        (Lives, args.lives),
        (Requests, args.requests),
    ]
    print(f"seed {args.seed}", flush=True)
    steady = True
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="rollmesh-soak-", dir=shared) as folder:
        for index, (make, count) in enumerate(parts):
            if not count:
                continue
            rng = np.random.default_rng([args.seed, index])
            work = make(rng, Path(folder))
            plant = Plant(args.plant)
            steady &= soak(work, count, rng, plant, Path(folder))
            plant.close()
            work.close()
    return 0 if steady else 1


if __name__ == "__main__":
    sys.exit(main())

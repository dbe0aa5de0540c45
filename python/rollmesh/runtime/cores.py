"""How many cores this process may use: its affinity, and the CPU quota of its control groups."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

GROUPS = "sys/fs/cgroup"


def usable_cores(root: Path = Path("/")) -> int:
    """At least 1. A quota is rounded down: a team of threads beyond it waits, all together, for the one that was stopped."""
    return max(1, math.floor(min(len(os.sched_getaffinity(0)), *_quotas(root), math.inf)))


def _quotas(root: Path) -> Iterator[float]:
    """Cores, of each control group that this process is in and of all above it; of versions 1 and 2."""
    with suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            names = controllers.split(",")
            if controllers and "cpu" not in names:
                continue
            mounts = [root / GROUPS / controllers, root / GROUPS / "cpu"] if controllers else [root / GROUPS, root / GROUPS / "unified"]
            inside = PurePosixPath(path.lstrip("/"))
            for level in (inside, *inside.parents):  # in a container only the last is there
                for mount in mounts:
                    yield from _of_group(mount / level)


def _of_group(group: Path) -> Iterator[float]:
    for words in (_words(group / "cpu.max"), _words(group / "cpu.cfs_quota_us") + _words(group / "cpu.cfs_period_us")):
        with suppress(ValueError):  # no such file; "max"
            quota, period = map(int, words)
            if quota > 0 and period > 0:
                yield quota / period


def _words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:
        return []

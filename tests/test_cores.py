"""How many threads there are by default: the cores of the affinity, and not more than the CPU quota of the control groups allows.

Input: the files of versions 1 and 2, nested as by systemd, Slurm and containers. Oracle: by hand.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rollmesh.runtime import cores

V2, V1 = "0::/system.slice/job_7/step_0\n", "5:memory:/x\n4:cpu,cpuacct:/docker/abc\n"


@pytest.mark.parametrize(
    "groups, files, expected",
    [
        (V2, {}, 64),
        (V2, {"cpu.max": "max 100000"}, 64),
        (V2, {"cpu.max": "300000 100000"}, 3),
        (V2, {"system.slice/job_7/step_0/cpu.max": "450000 100000"}, 4),
        (V2, {"system.slice/cpu.max": "50000 100000", "system.slice/job_7/cpu.max": "800000 100000"}, 1),
        (V2, {"unified/system.slice/cpu.max": "200000 100000"}, 2),
        (V2, {"other.slice/cpu.max": "100000 100000"}, 64),
        (V1, {"cpu,cpuacct/docker/abc/cpu.cfs_quota_us": "250000", "cpu,cpuacct/docker/abc/cpu.cfs_period_us": "50000"}, 5),
        (V1, {"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, 2),
        (V1, {"cpu/docker/abc/cpu.cfs_quota_us": "-1", "cpu/docker/abc/cpu.cfs_period_us": "100000"}, 64),
        (V1, {"memory/x/cpu.max": "100000 100000"}, 64),
        ("nonsense\n", {"cpu.max": "100000 100000"}, 64),
        (None, {"cpu.max": "100000 100000"}, 64),
    ],
)
def test_a_quota_bounds_the_threads(
    groups: str | None, files: dict[str, str], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    if groups is not None:
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/cgroup").write_text(groups)
    for name, text in files.items():
        file = tmp_path / cores.GROUPS / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    assert cores.usable_cores(tmp_path) == expected


def test_this_process_has_at_least_a_core() -> None:
    assert 1 <= cores.usable_cores() <= len(os.sched_getaffinity(0))

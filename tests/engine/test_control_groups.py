"""Limits from the control groups of this process: cores (the default of `threads`) and memory.

Input: artificial /proc and /sys/fs/cgroup of versions 1, 2 and both, nested as by systemd, Slurm
and containers, in a cgroup namespace, and malformed files. Oracle: values worked out by hand. If
this process may create control groups, a real one is tested too.
"""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import tiny_spec

import rollmesh as rm
from rollmesh import _core
from rollmesh._core import usable_cores
from rollmesh.runtime import arguments

Files = dict[str, str]
# /proc/self/cgroup, /proc/self/mountinfo
V2 = (
    "0::/job.slice/job_7/step_0\n",
    "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n",
)
V1 = (
    "9:name=systemd:/\n5:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n0::/\n",
    "22 1 0:21 / /proc rw - proc proc rw\n"
    "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n"
    "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw shared:1 master:2 - cgroup cgroup rw,cpu,cpuacct\n"
    "33 31 0:30 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    "34 31 0:31 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n",
)
IN_DOCKER = V1[0], V1[1].replace("0:29 /", "0:29 /docker/abc").replace("0:30 /", "0:30 /docker/abc")
BELOW_DOCKER = V1[0].replace("/docker/abc", "/docker/abc/step"), IN_DOCKER[1]
IN_NAMESPACE = "0::/\n", V2[1]
MOVED_OUT = "0::/../other\n", V2[1]  # of the namespace, by someone outside
OLD_MOUNT = "0::/\n", V2[1].replace(" / ", " /../.. ", 1)  # made before the namespace
ODD_PLACE = "0::/a b\n", "30 23 0:26 / /mnt/c\\040d\\134 rw - cgroup2 none rw\n"
LONG_LINE = (
    V2[0],
    f"29 23 0:25 / / rw - overlay overlay rw,lowerdir={'/var/lib/x:' * 3000}\n{V2[1]}",
)
NO_MOUNT = V2[0], V2[1].replace("cgroup2 cgroup2", "tmpfs tmpfs")
GARBAGE = (
    "\n::\nnonsense\n0:\n:::::\n",
    "\n - \n1 2 3 - cgroup2\n1 2 3 4 5 - cgroup2\n30 23 0:26 / /sys/fs/cgroup rw cgroup2 cgroup2 "
    "rw\n\0\n",
)
CPU, MEMORY = "sys/fs/cgroup/cpu,cpuacct/", "sys/fs/cgroup/memory/"
STEP = "sys/fs/cgroup/job.slice/job_7/step_0/"
HUGE = str(2**63 - 4096)


def tree(root: Path, places: tuple[str, str], files: Files) -> str:
    for name, text in {
        "proc/self/cgroup": places[0],
        "proc/self/mountinfo": places[1],
        **files,
    }.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return str(root)


# ------------------------------------------------------------------------------------------ cores
@pytest.mark.parametrize(
    "places, files, expected",
    [
        (V2, {}, math.inf),
        (V2, {f"{STEP}cpu.max": "max 100000\n"}, math.inf),
        (V2, {f"{STEP}cpu.max": "450000 100000\n"}, 4.5),
        (
            V2,
            {
                "sys/fs/cgroup/job.slice/cpu.max": "50000 100000\n",
                f"{STEP}cpu.max": "800000 100000\n",
            },
            0.5,
        ),
        (
            V2,
            {
                "sys/fs/cgroup/job.slice/cpu.max": "900000 100000\n",
                f"{STEP}cpu.max": "150000 100000\n",
            },
            1.5,
        ),
        (V2, {"sys/fs/cgroup/cpu.max": "300000 100000"}, 3),
        (V2, {"sys/fs/cgroup/other.slice/cpu.max": "100000 100000\n"}, math.inf),
        (
            V1,
            {
                f"{CPU}docker/abc/cpu.cfs_quota_us": "250000\n",
                f"{CPU}docker/abc/cpu.cfs_period_us": "50000\n",
            },
            5,
        ),
        (
            V1,
            {
                f"{CPU}docker/cpu.cfs_quota_us": "200000\n",
                f"{CPU}docker/cpu.cfs_period_us": "100000\n",
            },
            2,
        ),
        (
            V1,
            {
                f"{CPU}docker/abc/cpu.cfs_quota_us": "-1\n",
                f"{CPU}docker/abc/cpu.cfs_period_us": "100000\n",
            },
            math.inf,
        ),
        (V1, {f"{CPU}docker/abc/cpu.cfs_quota_us": "200000\n"}, math.inf),
        (
            V1,
            {
                f"{MEMORY}docker/abc/cpu.cfs_quota_us": "1\n",
                f"{MEMORY}docker/abc/cpu.cfs_period_us": "1\n",
            },
            math.inf,
        ),
        (V1, {"sys/fs/cgroup/unified/cpu.max": "200000 100000\n"}, 2),
        (
            BELOW_DOCKER,
            {f"{CPU}step/cpu.cfs_quota_us": "300000\n", f"{CPU}step/cpu.cfs_period_us": "100000\n"},
            3,
        ),
        (
            IN_DOCKER,
            {f"{CPU}cpu.cfs_quota_us": "300000\n", f"{CPU}cpu.cfs_period_us": "100000\n"},
            3,
        ),
        (IN_NAMESPACE, {"sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
        (
            MOVED_OUT,
            {"sys/fs/cgroup/cpu.max": "150000 100000\n", "sys/fs/other/cpu.max": "1 1\n"},
            math.inf,
        ),
        (OLD_MOUNT, {"sys/fs/cgroup/cpu.max": "250000 100000\n"}, 2.5),
        (ODD_PLACE, {"mnt/c d\\/a b/cpu.max": "100000 100000\n"}, 1),
        (LONG_LINE, {f"{STEP}cpu.max": "100000 100000\n"}, 1),
        (NO_MOUNT, {f"{STEP}cpu.max": "100000 100000\n"}, math.inf),
        (GARBAGE, {"sys/fs/cgroup/cpu.max": "100000 100000\n"}, math.inf),
        *(
            (V2, {f"{STEP}cpu.max": text}, math.inf)
            for text in ("", "\n", "7", "7 max", "-7 100000", "0 100000", "7 0", "x", f"1 {2**64}")
        ),
        (V2, {f"{STEP}cpu.max": f"{2**63} 1\n"}, 2.0**63),
    ],
)
def test_a_quota_bounds_the_threads(
    places: tuple[str, str], files: Files, expected: float, tmp_path: Path
) -> None:
    root = tree(tmp_path, places, files)
    assert _core.cpu_quota(root) == expected
    assert _core.usable_cores(root) == max(
        1, math.floor(min(len(os.sched_getaffinity(0)), expected))
    )


def test_the_default_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default, including a machine with more cores than the maximum number of threads."""
    assert 1 <= usable_cores() <= len(os.sched_getaffinity(0))
    for cores, threads in ((1, 1), (300, 256)):
        monkeypatch.setattr(arguments, "usable_cores", lambda cores=cores: cores)
        with rm.Generator(
            tiny_spec(), eos_token_ids=[], kv_cache_gib=0.004, max_model_len=128
        ) as gen:
            assert gen._engine.stats()["threads"] == threads


# ----------------------------------------------------------------------------------------- memory
def of_v2(folder: str, limit: str, used: int, cached: int = 0) -> Files:
    where = f"sys/fs/cgroup/{folder}"
    return {
        f"{where}memory.max": f"{limit}\n",
        f"{where}memory.current": f"{used}\n",
        f"{where}memory.stat": f"anon 1\ninactive_file {cached}\n",
    }


def of_v1(folder: str, limit: str, used: int, cached: int = 0) -> Files:
    stat = f"inactive_file 999\ntotal_inactive_file {cached}\n"
    files = {
        "memory.limit_in_bytes": f"{limit}\n",
        "memory.usage_in_bytes": f"{used}\n",
        "memory.stat": stat,
    }
    return {f"{MEMORY}{folder}{name}": text for name, text in files.items()}


INFO = {"proc/meminfo": "MemTotal: 9 kB\nMemAvailable:    5000 kB\n"}
UNREAD = {"proc/meminfo": ""}


@pytest.mark.parametrize(
    "places, files, expected",
    [
        (V2, INFO, [5000 * 1024]),
        (V2, UNREAD, [2**64 - 1]),
        (V2, {"proc/meminfo": f"MemAvailable: {2**60} kB\n"}, [2**64 - 1]),
        (V2, {**INFO, **of_v2("job.slice/job_7/step_0/", "max", 5)}, [5000 * 1024]),
        (V2, {**INFO, **of_v2("job.slice/job_7/step_0/", "4000", 1000, 300)}, [5000 * 1024, 3300]),
        (
            V2,
            {
                **INFO,
                **of_v2("job.slice/job_7/step_0/", "9000", 1000),
                **of_v2("job.slice/", "4000", 3900),
            },
            [5000 * 1024, 8000, 100],
        ),
        (V2, {**UNREAD, **of_v2("", "4000", 5000)}, [2**64 - 1, 0]),
        (V2, {**UNREAD, **of_v2("", "4000", 100, 200)}, [2**64 - 1, 3900]),
        (V2, {**UNREAD, **of_v2("other.slice/", "4000", 5)}, [2**64 - 1]),
        (V1, {**UNREAD, **of_v1("docker/abc/", HUGE, 5)}, [2**64 - 1]),
        (V1, {**UNREAD, **of_v1("docker/abc/", "4000", 1000, 300)}, [2**64 - 1, 3300]),
        (
            V1,
            {
                **UNREAD,
                **of_v1("docker/abc/", "4000", 1000),
                **of_v1("docker/", "2000", 1500),
                **of_v1("", HUGE, 5),
            },
            [2**64 - 1, 3000, 500],
        ),
        (IN_DOCKER, {**UNREAD, **of_v1("", "4000", 1000)}, [2**64 - 1, 3000]),
        (IN_NAMESPACE, {**UNREAD, **of_v2("", "4000", 1000)}, [2**64 - 1, 3000]),
        (
            MOVED_OUT,
            {**UNREAD, **of_v2("", "4000", 1000), **of_v2("../other/", "4000", 1000)},
            [2**64 - 1],
        ),
        (V2, {**UNREAD, "sys/fs/cgroup/memory.max": "4000"}, [2**64 - 1, 4000]),
        (
            V2,
            {**UNREAD, **of_v2("", "4000", 7), "sys/fs/cgroup/memory.current": "many"},
            [2**64 - 1, 4000],
        ),
        *(
            (V2, {**UNREAD, "sys/fs/cgroup/memory.max": text}, [2**64 - 1])
            for text in ("", "\n4000", "-4000", "lots", str(2**64), "9" * 99_999)
        ),
        (GARBAGE, {**UNREAD, **of_v2("", "4000", 1000)}, [2**64 - 1]),
    ],
)
def test_memory_has_a_pool_for_each_limit(
    places: tuple[str, str], files: Files, expected: list[int], tmp_path: Path
) -> None:
    """The first pool is the machine's, then come the groups' from the inside out; each has its own
    name."""
    pools = _core.memory_pools(tree(tmp_path, places, files))
    assert [available for _, available in pools] == expected
    assert len({name for name, _ in pools}) == len(pools)


def test_a_group_that_is_mounted_twice_counts_once(tmp_path: Path) -> None:
    twice = V2[1] + V2[1].replace("/sys/fs/cgroup", "/mnt/again")
    root = tree(tmp_path, (V2[0], twice), {**UNREAD, **of_v2("job.slice/", "4000", 1000)})
    (tmp_path / "mnt").mkdir()
    (tmp_path / "mnt/again").symlink_to(tmp_path / "sys/fs/cgroup")
    assert [available for _, available in _core.memory_pools(root)] == [2**64 - 1, 3000]


def test_of_many_limits_the_least_is_kept(tmp_path: Path) -> None:
    folders = [f"{'g/' * depth}" for depth in range(40)]
    files = {
        name: text
        for i, folder in enumerate(folders)
        for name, text in of_v2(folder, str(1000 - i % 37), 0).items()
    }
    pools = _core.memory_pools(
        tree(tmp_path, (f"0::/{folders[-1][:-1]}\n", V2[1]), {**UNREAD, **files})
    )
    assert len(pools) == 16
    assert min(available for _, available in pools) == 1000 - 36


def test_what_cannot_be_read_is_no_limit(tmp_path: Path) -> None:
    """Unreadable input: a missing /proc, folders and loops instead of files, names that are too
    long."""
    assert (
        _core.cpu_quota(str(tmp_path / "none")),
        len(_core.memory_pools(str(tmp_path / "none"))),
    ) == (math.inf, 1)
    assert _core.cpu_quota("/x" * 5000) == math.inf
    assert _core.memory_pools("/x" * 5000)[0][1] == 2**64 - 1
    root = tree(tmp_path, V2, UNREAD)
    (tmp_path / STEP / "cpu.max").mkdir(parents=True)
    (tmp_path / STEP / "memory.max").symlink_to("memory.max")
    assert (_core.cpu_quota(root), len(_core.memory_pools(root))) == (math.inf, 1)
    deep = f"0::{'/x' * 3000}\n"
    (tmp_path / "proc/self/cgroup").write_text(deep)
    (tmp_path / "sys/fs/cgroup/cpu.max").write_text("1 1\n")
    assert _core.cpu_quota(root) == 1
    (tmp_path / "proc/self/cgroup").write_text(deep * 3000)
    assert _core.cpu_quota(root) == 1


def test_files_of_random_bytes(tmp_path: Path) -> None:
    """The result is a number in range; AddressSanitizer detects accesses outside the buffers."""
    random_of = random.Random(7)
    files = {
        **INFO,
        **of_v2("", "4000", 1000, 300),
        **of_v1("docker/abc/", "4000", 1000),
        f"{CPU}cpu.cfs_quota_us": "3",
        "sys/fs/cgroup/cpu.max": "1 2",
    }
    root = tree(tmp_path, V1, files)
    originals = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for _ in range(300):
        path, content = random_of.choice(list(originals.items()))
        broken = bytearray(content)
        for _ in range(random_of.randint(1, 5)):
            at = random_of.randrange(len(broken) + 1)
            broken[at : at + 1] = random_of.choice(
                (b"", b"\0", b" ", b"/", b"..", b"\\", b"9" * 30, b"\xff", b"\n")
            )
        path.write_bytes(broken)
        assert _core.cpu_quota(root) > 0
        assert all(0 <= available < 2**64 for _, available in _core.memory_pools(root))
        path.write_bytes(content)


# ------------------------------------------------------------------------------------- a real one
def own_group(controller: str) -> Path | None:
    """Returns the path of this process's group of version 1, or None without permission to create
    groups in it."""
    lines = (line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines())
    own = [path for _, names, path in lines if controller in names.split(",")]
    mounts = (
        line.split()
        for line in Path("/proc/self/mountinfo").read_text().splitlines()
        if " - cgroup " in line
    )
    where = [words[4] for words in mounts if controller in words[-1].split(",")]
    folder = Path(where[0] + own[0]) if own and where else None
    return folder if folder is not None and os.access(folder, os.W_OK) else None


@pytest.fixture
def groups() -> Iterator[list[Path]]:
    """Makes new groups below this process's group, for the controllers cpu and memory."""
    made = [
        folder / f"rollmesh-{os.getpid()}"
        for controller in ("cpu", "memory")
        if (folder := own_group(controller))
    ]
    if len(made) < 2:
        pytest.skip("expected control groups of version 1 that this process may write to")
    try:
        for folder in made:
            folder.mkdir()
        yield made
    finally:
        for folder in made:
            folder.rmdir()


MOUNTED_ANEW = (
    "unshare --cgroup --mount sh -c 'mount -t tmpfs none /mnt; cd /mnt; mkdir cpu memory; "
    'for c in *; do mount -t cgroup -o $c none $c; done; cd "$OLDPWD"; exec "$@"\' x '
)


@pytest.mark.full
@pytest.mark.parametrize("how", ["", MOUNTED_ANEW], ids=["plain", "namespace"])
def test_a_real_group(groups: list[Path], how: str) -> None:
    """The process is in a group with a quota of 1.5 cores and a limit of 1 GiB."""
    cpu, memory = groups
    (cpu / "cpu.cfs_period_us").write_text("100000")
    (cpu / "cpu.cfs_quota_us").write_text("150000")
    (memory / "memory.limit_in_bytes").write_text(str(2**30))
    tell = (
        "from rollmesh import _core; print(_core.cpu_quota(), _core.usable_cores(), *[a for _, "
        "a in _core.memory_pools()][1:])"
    )
    command = (
        f"echo $$ > {cpu}/cgroup.procs; echo $$ > {memory}/cgroup.procs; exec "
        f"{how}{sys.executable} -c '{tell}'"
    )
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    if "unshare:" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"no namespace of its own: {done.stderr}")
    quota, cores, available = done.stdout.split()
    assert (quota, cores) == ("1.5", "1")
    assert 0.5 * 2**30 < int(available) < 2**30

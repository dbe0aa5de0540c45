"""This machine's limits, measured: memory read, copy, products.

    python -m benchmarks.machine

The program in machine.c is compiled, by gcc or the compiler in CC, into a temporary folder and run
with one thread and with all; a limit is the better of the two results. Products are float32 FMA,
vdpbf16ps and AMX's tdpbf16ps. The other benchmarks report fractions of these limits."""

from __future__ import annotations

import argparse
import atexit
import json
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

from benchmarks.options import THREADS, real, whole

SOURCE = Path(__file__).with_name("machine.c")
ROOT = SOURCE.parent.parent


@dataclass(frozen=True)
class Limits:
    """Rates in 1e9 per second: bytes read, bytes copied (counted once), operations (a product and
    its sum are two)."""

    threads: int
    read_gb_s: float
    copy_gb_s: float
    fma_gflop_s: float
    bf16_gflop_s: float = 0.0  # of vdpbf16ps; 0 where the processor has none
    amx_gflop_s: float = 0.0  # of tdpbf16ps, likewise
    no_amx: str = ""  # why that is 0

    def or_more(self, other: Limits) -> Limits:
        """The larger of both in each rate."""
        more = asdict(other)
        return replace(
            self,
            **{
                name: max(rate, more[name])
                for name, rate in asdict(self).items()
                if name.endswith("_s")
            },
        )


def run(command: list[str]) -> str:
    """Returns the command's output; if the command fails, ends this program with its message."""
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except OSError as error:
        raise SystemExit(f"benchmarks.machine: {command[0]}: {error.strerror}") from None
    except subprocess.CalledProcessError as error:
        raise SystemExit(
            f"benchmarks.machine: {Path(command[0]).name}: "
            f"{error.stderr.strip() or f'status {error.returncode}'}"
        ) from None


@cache
def program() -> str:
    """machine.c compiled, until this process ends."""
    folder = tempfile.mkdtemp(prefix="rollmesh-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    run(
        [
            *shlex.split(os.environ.get("CC", "gcc")),
            "-O2",
            "-o",
            f"{folder}/machine",
            str(SOURCE),
            "-pthread",
        ]
    )
    return f"{folder}/machine"


def measure(threads: int, *, gib: float = 1.0, seconds: float = 1.0) -> Limits:
    """The limits with up to `threads` threads; a buffer of `gib` GiB and `seconds` for each of five
    to eight measurements."""
    runs = [
        json.loads(run([program(), str(n), str(gib), str(seconds)])) for n in sorted({1, threads})
    ]
    return Limits(
        threads=threads,
        read_gb_s=max(one[key] for one in runs for key in one if key.startswith("read_")),
        copy_gb_s=max(one["copy_gb_s"] for one in runs),
        fma_gflop_s=max(one[key] for one in runs for key in one if key.startswith("fma")),
        bf16_gflop_s=max(one["bf16_gflop_s"] for one in runs),
        amx_gflop_s=max(one["amx_gflop_s"] for one in runs),
        no_amx=runs[-1]["no_amx"],
    )


def describe() -> dict[str, str]:
    """Describes the origin of a result: processor, memory, system, Python, date, commit."""
    info = Path("/proc/cpuinfo").read_text().splitlines()
    model = next(
        (line.partition(":")[2].strip() for line in info if line.startswith("model name")),
        platform.machine(),
    )
    memory = int(Path("/proc/meminfo").read_text().split()[1]) // (1 << 20)
    return {
        "processor": model,
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{memory} GiB",
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit(),
    }


def commit() -> str:
    """The commit of the tree, with a + when files differ from it; "unknown" outside a
    repository."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty=+"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def main() -> None:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / (1 << 30)
    parser = argparse.ArgumentParser(prog="python -m benchmarks.machine", description=__doc__)
    parser.add_argument("--threads", type=whole(1, THREADS), default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--gib", type=real(1 / 64, memory), default=1.0, help="size of the buffer that is swept"
    )
    parser.add_argument("--seconds", type=real(1e-3, 3600), default=1.0, help="of each measurement")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    limits = measure(args.threads, gib=args.gib, seconds=args.seconds)
    if args.json:
        print(json.dumps({"machine": describe(), "limits": asdict(limits)}))
        return
    print("\n".join(f"{key:10s} {value}" for key, value in describe().items()))
    print(f"read       {limits.read_gb_s:.1f} GB/s")
    print(f"copy       {limits.copy_gb_s:.1f} GB/s")
    print(f"fma        {limits.fma_gflop_s:.0f} GFLOP/s float32")
    print(f"vdpbf16ps  {limits.bf16_gflop_s:.0f} GFLOP/s")
    print(
        f"amx        {limits.amx_gflop_s:.0f} GFLOP/s"
        + (f" ({limits.no_amx})" if limits.no_amx else "")
    )


if __name__ == "__main__":
    main()

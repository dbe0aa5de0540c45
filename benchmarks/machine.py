"""What this machine can do at best, measured: memory read, copy, float32 FMA.  python -m benchmarks.machine

The program in machine.c is compiled with gcc into a temporary folder and run with one thread and with all; a limit is the best
that either saw. The figures are ceilings for the other benchmarks' fractions.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

SOURCE = Path(__file__).with_name("machine.c")
ROOT = SOURCE.parent.parent


@dataclass(frozen=True)
class Limits:
    """Rates in 1e9 per second: bytes read, bytes copied (counted once), float32 operations (an FMA is two)."""

    threads: int
    read_gb_s: float
    copy_gb_s: float
    fma_gflop_s: float


def measure(threads: int, *, gib: float = 1.0, seconds: float = 1.0) -> Limits:
    """The limits with up to `threads` threads; a buffer of `gib` GiB and `seconds` for each of five or six measurements."""
    with tempfile.TemporaryDirectory(prefix="rollmesh-") as folder:
        program = Path(folder) / "machine"
        subprocess.run(["gcc", "-O2", "-o", str(program), str(SOURCE), "-pthread"], check=True)
        runs = [
            json.loads(subprocess.run([program, str(n), str(gib), str(seconds)], check=True, capture_output=True).stdout)
            for n in sorted({1, threads})
        ]
    return Limits(
        threads=threads,
        read_gb_s=max(run[key] for run in runs for key in run if key.startswith("read_")),
        copy_gb_s=max(run["copy_gb_s"] for run in runs),
        fma_gflop_s=max(run[key] for run in runs for key in run if key.startswith("fma")),
    )


def describe() -> dict[str, str]:
    """Where and from what a result comes: processor, memory, system, Python, date, commit."""
    info = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in info if line.startswith("model name")), platform.machine())
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
    """The commit of the tree, with a + when files differ from it; "unknown" outside a repository."""
    try:
        done = subprocess.run(["git", "describe", "--always", "--dirty=+"], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.machine", description=__doc__)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--gib", type=float, default=1.0, help="size of the buffer that is swept")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement")
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


if __name__ == "__main__":
    main()

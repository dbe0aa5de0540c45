"""The cost of a collective by transport, ranks and size, beside torch.distributed's Gloo.

    python -m benchmarks.comm

The program in comm.c is compiled with the transports into a temporary folder and run for `threads`
and `shm`; then as many processes make the same exchanges over Gloo. The size is the block of one
rank for another rank, and the rate counts the bytes that a rank receives from the others. `memcpy`
is the time to copy the bytes that a rank receives, as a share of the exchange's time in the same
run. `Gloo` is Gloo's time as a multiple. Each figure is the best of several runs."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.options import real, whole

HERE = Path(__file__).parent
ROOT = HERE.parent
SIZES = (64, 1024, 16 << 10, 256 << 10, 4 << 20)
TRANSPORTS = ("threads", "shm", "gloo")
MAX_RANKS = 64  # that share a region
RUNS = 7
Row = dict[str, Any]


def measure(
    transport: str, ranks: int, buffer_bytes: int, seconds: float, folder: Path
) -> list[Row]:
    """`threads` or `shm`, by comm.c, which is compiled into `folder` on the first call."""
    program = folder / "comm"
    if not program.exists():
        core = [
            *ROOT.glob("csrc/mesh/*.c"),
            ROOT / "csrc/base/status.c",
            ROOT / "csrc/base/memory.c",
        ]
        flags = ["-std=gnu11", "-O3", "-pthread", f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'kernels'}"]
        subprocess.run(
            [
                *shlex.split(os.environ.get("CC", "gcc")),
                *flags,
                str(HERE / "comm.c"),
                *map(str, core),
                "-lm",
                "-o",
                str(program),
            ],
            check=True,
        )
    command = [str(program), transport, str(ranks), str(buffer_bytes), str(seconds)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


# ------------------------------------------------------------------------------------------- Gloo
def measure_gloo(ranks: int, seconds: float, folder: Path) -> list[Row]:
    """The same exchanges between processes of torch.distributed."""
    meeting = folder / f"gloo-{ranks}"
    command = [
        sys.executable,
        "-m",
        "benchmarks.comm",
        "--gloo-at",
        str(meeting),
        "--ranks",
        str(ranks),
        "--seconds",
        str(seconds),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        subprocess.Popen(
            [*command, "--rank", str(rank)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    printed = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise RuntimeError(f"Gloo with {ranks} ranks failed")
    return [json.loads(line) for line in printed[0].splitlines()]


def gloo_rank(rank: int, ranks: int, meeting: str, seconds: float) -> None:
    """One of the processes; rank 0 prints."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    for op, size in [
        ("barrier", 0),
        *((op, size) for size in SIZES for op in ("all_gather", "all_to_all")),
    ]:
        send = torch.ones(ranks * size, dtype=torch.uint8)
        recv = torch.zeros(ranks * size, dtype=torch.uint8)
        pieces = list(recv.split(size)) if size else []
        calls: dict[str, Callable[[], Any]] = {
            "barrier": dist.barrier,
            "all_gather": lambda pieces=pieces, send=send, size=size: dist.all_gather(
                pieces, send[:size]
            ),  # type: ignore[misc]
            "all_to_all": lambda recv=recv, send=send: dist.all_to_all_single(  # type: ignore[misc]
                recv, send
            ),
        }
        best = gloo_best(calls[op], seconds)
        if rank == 0:
            print(
                json.dumps(
                    {
                        "transport": "gloo",
                        "ranks": ranks,
                        "op": op,
                        "bytes": size,
                        "seconds": best,
                        "copy_seconds": 0.0,
                    }
                )
            )
    dist.destroy_process_group()


def gloo_best(call: Callable[[], Any], seconds: float) -> float:
    """Returns the seconds of one call; rank 0 decides how many calls make a run."""
    import torch
    import torch.distributed as dist

    def run(calls: int) -> float:
        dist.barrier()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - start) / calls

    count = torch.tensor([max(1, min(10_000, int(0.5 * seconds / run(3))))])
    dist.broadcast(count, 0)
    return min(run(int(count)) for _ in range(RUNS))


# -------------------------------------------------------------------------------------- the table
def table(rows: list[Row]) -> str:
    lines = [
        "| ranks | operation | bytes | transport | µs | GB/s a rank | memcpy | Gloo |",
        "|--:|---|--:|---|--:|--:|--:|--:|",
    ]
    gloo = {
        (row["ranks"], row["op"], row["bytes"]): row["seconds"]
        for row in rows
        if row["transport"] == "gloo"
    }
    order = {
        name: i for i, name in enumerate(("barrier", "all_gather", "all_to_all", "gather_columns"))
    }
    for row in sorted(
        rows, key=lambda row: (row["ranks"], order[row["op"]], row["bytes"], row["transport"])
    ):
        seconds, received = row["seconds"], (row["ranks"] - 1) * row["bytes"]
        rate = f"{received / seconds / 1e9:.2f}" if received else ""
        copy = f"{row['copy_seconds'] / seconds:.2f}" if row["copy_seconds"] else ""
        peer = gloo.get((row["ranks"], row["op"], row["bytes"]))
        ratio = f"{peer / seconds:.1f}×" if peer and row["transport"] != "gloo" else ""
        size = row["bytes"] or ""
        lines.append(
            f"| {row['ranks']} | {row['op']} | {size} | {row['transport']} | {1e6 * seconds:.1f} "
            f"| {rate} | {copy} | {ratio} |"
        )
    return "\n".join(lines)


def several(read: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Returns a list of values that `read` accepts, separated by commas."""
    return lambda text: [read(word) for word in text.split(",")]


def known_transport(text: str) -> str:
    if text not in TRANSPORTS:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not one of {', '.join(TRANSPORTS)}")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.comm", description=__doc__)
    parser.add_argument(
        "--ranks", type=several(whole(1, MAX_RANKS)), default=[2, 4, 8], help="separated by commas"
    )
    parser.add_argument(
        "--transports",
        type=several(known_transport),
        default=list(TRANSPORTS),
        help=f"of {', '.join(TRANSPORTS)}",
    )
    parser.add_argument("--buffer-bytes", type=whole(1), default=1 << 20, help="of a region")
    parser.add_argument("--seconds", type=real(1e-3, 60), default=0.05, help="of each run, about")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--gloo-at", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.gloo_at:
        gloo_rank(args.rank, args.ranks[0], args.gloo_at, args.seconds)
        return
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="rollmesh-") as name:
        folder = Path(name)
        for ranks in args.ranks:
            for kind in args.transports:
                if kind == "gloo":
                    rows += measure_gloo(ranks, args.seconds, folder)
                else:
                    rows += measure(kind, ranks, args.buffer_bytes, args.seconds, folder)
    if args.json:
        print(json.dumps({"machine": machine.describe(), "rows": rows}))
        return
    print("\n".join(f"{key:10s} {value}" for key, value in machine.describe().items()))
    print(table(rows))


if __name__ == "__main__":
    main()

"""Weight sync beside a plain copy.  python -m benchmarks.sync

A trainer's bf16 state dict of the dense 0.6B shape is pushed again and again into one generator, with every check on (names,
shapes, finiteness, digest) and the weights packed. The peer is machine.c's threaded memcpy. The first sync also makes the system map
the block that will serve and the second the staging one; from the third on both are there, and the best of those counts. On a mesh
each rank copies its own slices, and GB are those that all ranks read together.
"""

from __future__ import annotations

import argparse
import os

import torch

import rollmesh as rm
from benchmarks import machine
from benchmarks.generate import make_trainer
from benchmarks.options import THREADS, whole
from benchmarks.shapes import SHAPES


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sync", description=__doc__)
    parser.add_argument("--shape", choices=list(SHAPES), default="dense-0.6b")
    parser.add_argument("--repeats", type=whole(1), default=5, help="syncs after the first two")
    parser.add_argument("--threads", type=whole(1, THREADS), default=len(os.sched_getaffinity(0)))
    for axis in ("tp", "dp", "ep"):
        parser.add_argument(f"--{axis}", type=whole(1, 64), default=1, help="ranks, as threads that share --threads out")
    args = parser.parse_args()
    limits = machine.measure(args.threads)
    shape = SHAPES[args.shape]
    state_dict = make_trainer(shape, torch.bfloat16).state_dict()
    mesh = rm.Mesh(tp=args.tp, dp=args.dp, ep=args.ep)
    generator = rm.Generator(rm.ModelSpec.from_hf(shape.config()), mesh=mesh, threads=args.threads, max_model_len=256, kv_cache_gib=0.1)
    reports = [generator.sync_weights(state_dict) for _ in range(2 + args.repeats)]
    for i, report in enumerate(reports):
        print(f"sync {i + 1}: {report.bytes / 1e9:.2f} GB in {report.seconds:.3f} s, {report.bytes / report.seconds / 1e9:.2f} GB/s")
    best = max(report.bytes / report.seconds / 1e9 for report in reports[2:])
    print(f"best {best:.2f} GB/s, memcpy {limits.copy_gb_s:.2f} GB/s: {best / limits.copy_gb_s:.0%}")


if __name__ == "__main__":
    main()

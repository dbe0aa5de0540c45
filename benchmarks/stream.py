"""Weights from a trainer's process to a generator's, over each kind of group, on one GPU.  python
                                                                                         -m
                                                                                         benchmarks.stream

    nccl     rm.comm.nccl over shared memory: from GPU memory to GPU memory, without
             torch.distributed
    torch    a group of torch.distributed with NCCL: the same as torch's tensors. Gloo where torch
             has no GPU
    shm      rm.comm.shm: by way of the host, what the two are measured against

Each prints the bytes a second of a whole sync (staged, checked, swapped), the best of --runs, and
ends with status 1 unless the generator has the weights' digest. Two ranks on one GPU need NCCL
2.30.3 or later, which is put to either of them by NCCL_MULTI_RANK_GPU_ENABLE=1: torch's NCCL, where
that is older, fails by its own words. --smoke: a tiny model, for the simulated device too."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import secrets
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.options import whole
from benchmarks.shapes import SMOKE_SHAPES, Shape

WAYS = ("nccl", "torch", "shm")
MIDDLE = Shape("dense-1.7b", 2048, 28, 16, 8, 128, 151936, 6144)
SIZES = {"max_model_len": 256, "max_num_seqs": 4, "kv_cache_gib": 0.1}
TIMEOUT_S = 60.0


def state_of(shape: Shape) -> dict[str, Any]:
    """A trainer's state dict, on the GPU where torch has one."""
    import torch

    import rollmesh as rm

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(1)
    with rm.Generator(rm.ModelSpec.from_hf(shape.config()), **SIZES) as generator:
        wanted = {
            name: tuple(entry.shape)
            for name, entry in generator.manifest().items()
            if entry.required
        }
    return {
        name: torch.randn(size, device=device).mul_(0.02).to(torch.bfloat16)
        for name, size in wanted.items()
    }


def group_of(way: str, rank: int, name: str) -> Any:
    import rollmesh as rm

    if way != "torch":
        shm = rm.comm.shm(Path(name).name, rank, 2, TIMEOUT_S)
        return shm if way == "shm" else rm.comm.nccl(shm, os.environ.get("NCCL_LIBRARY"))
    from datetime import timedelta

    import torch
    from torch import distributed

    kind = "nccl" if torch.cuda.is_available() else "gloo"
    distributed.init_process_group(
        kind,
        init_method=f"file://{name}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    return None


def rank_of(
    rank: int, way: str, shape: Shape, runs: int, name: str, device: str, pipe: Connection
) -> None:
    """Rank 0 trains and tells the digest that its weights have by a sync in its own process; rank 1
    tells (seconds, bytes, digest)."""
    import rollmesh as rm
    from rollmesh import sources

    group = group_of(way, rank, name)
    place = {"device": "cuda:0"} if way == "nccl" else {}
    generator = rm.Generator(rm.ModelSpec.from_hf(shape.config()), device=device, **SIZES)
    if rank == 0:
        state = state_of(shape)
        pipe.send(generator.sync_weights(state).digest)
        generator.close()
        for _ in range(runs):
            sources.send_weights(state, group, **place)
    else:
        best, report = float("inf"), None
        for _ in range(runs):
            begin = time.perf_counter()
            report = generator.sync_weights(sources.receive_weights(group, src=0, **place))
            best = min(best, time.perf_counter() - begin)
        assert report is not None
        pipe.send((best, report.bytes, report.digest))
        generator.close()
    if group is not None:
        group.close()


def measured(way: str, shape: Shape, runs: int, device: str) -> bool:
    context = multiprocessing.get_context(
        "forkserver"
    )  # of a process that has imported these and opened no GPU: once for all ranks
    context.set_forkserver_preload(["torch", "rollmesh.sources"])
    with tempfile.TemporaryDirectory() as folder:
        name = str(Path(folder) / f"stream-{secrets.token_hex(8)}")
        pipes, processes = [], []
        for rank in range(2):
            pipe, end = context.Pipe()
            processes.append(
                context.Process(
                    target=rank_of, args=(rank, way, shape, runs, name, device, end), daemon=True
                )
            )
            processes[-1].start()
            end.close()
            pipes.append(pipe)
        try:
            want, (seconds, size, digest) = (pipe.recv() for pipe in pipes)
        except EOFError:
            print(f"{way:6s} {shape.name}: a rank has ended; what it said stands above")
            return False
        finally:
            for process in processes:
                process.join(TIMEOUT_S)
                process.kill()
    verdict = "as sent" if digest == want else "DIFFERS"
    print(
        f"{way:6s} {shape.name}: {size / 1e9:.3f} GB in {seconds:.3f} s, "
        f"{size / seconds / 1e9:.2f} GB/s, digest {verdict}",
        flush=True,
    )
    return bool(digest == want)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.stream",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("ways", nargs="*", metavar="WAY", help=", ".join(WAYS))
    parser.add_argument("--runs", type=whole(1), default=3)
    parser.add_argument("--smoke", action="store_true", help="a tiny model")
    parser.add_argument("--device", default="cuda", help="of both generators")
    options = parser.parse_args()
    if unknown := [way for way in options.ways if way not in WAYS]:
        parser.error(f"{unknown[0][:40]!r} is no way, wanted some of {', '.join(WAYS)}")
    os.environ.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    shape = next(iter(SMOKE_SHAPES.values())) if options.smoke else MIDDLE
    found = [measured(way, shape, options.runs, options.device) for way in options.ways or WAYS]
    return 0 if all(found) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Weight sync beside a plain copy.  python -m benchmarks.sync

A trainer's bf16 state dict is pushed repeatedly into one generator, with every check on (names,
shapes, finiteness, digest) and the weights packed. In the first sync the system also maps the block
that will serve, and in the second the staging block; from the third on both exist, and the best of
those syncs counts. On a mesh each rank copies its own slices, and GB counts the bytes that all
ranks read together. Peaks are of the resident set during a sync, minus its size before.

The peers are memcpy by as many threads, once between two large blocks in huge pages, which is the
fastest copy on this machine, and once of the trainer's own tensors, one after the other. Rounds
alternate between them and the sync, and the best of each counts, because other work on the machine
can only slow one down. Fractions are of the first peer; the median over the rounds includes the
effect of other work.

Then sequences decode alone and while the set is pushed with inflight="keep". Tokens are counted
from the beginning of a push to its end, and the longest time without a step is the report's.

Then a trainer in another process publishes its weights through shared memory
(rollmesh.weights.transport.store), and the generator syncs from there; this also compares a
checksum of each tensor's bytes. Those peaks include the mapped store, which both processes
share."""

from __future__ import annotations

import argparse
import ctypes
import gc
import mmap
import multiprocessing
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import numpy as np
import torch

import rollmesh as rm
from benchmarks.generate import make_trainer
from benchmarks.options import THREADS, real, whole
from benchmarks.shapes import SHAPES, Shape
from rollmesh._core import usable_cores
from rollmesh.weights.transport.store import SharedReader, SharedWriter

Part = tuple[int, int]  # address, bytes
HUGE_PAGE = 2 << 20
MOST = 64 << 20  # bytes of one memcpy of a tensor
SEQUENCES = 8  # that decode during a push


class Memcpy:
    """The peer: source and destination of `gib` GiB each, at least a huge page, and the threads
    that copy."""

    def __init__(self, threads: int, gib: float):
        size = max(1, int(gib * (1 << 30)) // HUGE_PAGE) * HUGE_PAGE
        self._blocks = [mmap.mmap(-1, size + HUGE_PAGE) for _ in range(2)]
        for block in self._blocks:
            block.madvise(mmap.MADV_HUGEPAGE)
            np.frombuffer(block, np.uint8).fill(1)
        self._source, self._to = (
            -(-np.frombuffer(block, np.uint8).ctypes.data // HUGE_PAGE) * HUGE_PAGE
            for block in self._blocks
        )
        self._size, self._threads = size, threads
        self._pool = ThreadPoolExecutor(threads)
        self.blocks()  # starts the threads

    def blocks(self) -> float:
        """GB/s of one large block to another."""
        share = self._size // self._threads
        return self._run([[(self._source + i * share, share)] for i in range(self._threads)])

    def tensors(self, state_dict: Mapping[str, torch.Tensor]) -> float:
        """GB/s of the tensors, copied by the threads in turn, each to the place after the one
        before it."""
        parts = [
            (tensor.data_ptr() + at, min(MOST, tensor.nbytes - at))
            for tensor in state_dict.values()
            for at in range(0, tensor.nbytes, MOST)
        ]
        return self._run([parts[i :: self._threads] for i in range(self._threads)])

    def _run(self, shares: list[list[Part]]) -> float:
        room = self._size // self._threads

        def copy(thread: int) -> None:
            at = 0
            for address, size in shares[thread]:
                at = 0 if at + size > room else at
                ctypes.memmove(self._to + thread * room + at, address, size)
                at += size

        start = time.perf_counter()
        list(self._pool.map(copy, range(self._threads)))
        return (
            sum(size for share in shares for _, size in share) / (time.perf_counter() - start) / 1e9
        )


def kib_of(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1])


def peak_of(call: Callable[[], rm.SyncReport]) -> tuple[rm.SyncReport, float, float]:
    """Returns the result of `call`, its seconds, and the GB by which the resident set's peak
    exceeded its size before."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    before, start = kib_of("VmRSS"), time.perf_counter()
    report = call()
    seconds = time.perf_counter() - start
    return report, seconds, max(0, kib_of("VmHWM") - before) * 1024 / 1e9


def trainer(shape: Shape, pipe: Connection) -> None:
    """The other process: publishes a version for each word that it receives and answers with the
    seconds."""
    state_dict = make_trainer(shape.config(), torch.bfloat16).state_dict()
    with SharedWriter() as writer:
        pipe.send(writer.address)
        while pipe.recv():
            start = time.perf_counter()
            writer.publish(state_dict)
            pipe.send(time.perf_counter() - start)


def measure_shared(args: argparse.Namespace, generator: rm.Generator) -> None:
    spawn = multiprocessing.get_context("spawn")
    pipe, far = spawn.Pipe()
    process = spawn.Process(target=trainer, args=(SHAPES[args.shape], far), daemon=True)
    process.start()
    far.close()
    reader = SharedReader(pipe.recv())
    best = 0.0
    for i in range(args.shared):
        pipe.send(True)
        put = pipe.recv()
        reader.refresh()
        report, seconds, peak = peak_of(lambda: generator.sync_weights(reader))
        gb = report.bytes / 1e9
        best = max(best, gb / seconds)
        print(
            f"from a process {i + 1}: put {put:.3f} s, sync {gb:.2f} GB in {seconds:.3f} s, "
            f"{gb / seconds:.2f} GB/s, peak +{peak:.2f} GB"
        )
    pipe.send(False)
    process.join()
    print(f"best from a process {best:.2f} GB/s")


def measure_running(
    generator: rm.Generator, state_dict: Mapping[str, torch.Tensor], pushes: int
) -> None:
    params = rm.SamplingParams(max_tokens=100, seed=1, ignore_eos=True)

    def tokens() -> int:
        return int(generator.metrics()["generated_tokens"])

    def decode() -> None:
        generator.generate([[1, 2, 3]] * SEQUENCES, params, use_tqdm=False)

    start = time.perf_counter()
    decode()
    alone = SEQUENCES * params.max_tokens / (time.perf_counter() - start)
    for _ in range(pushes):
        thread, before = threading.Thread(target=decode), tokens()
        thread.start()
        while tokens() == before:
            time.sleep(0.001)
        before = tokens()
        report = generator.sync_weights(state_dict, inflight="keep")
        during = (tokens() - before) / report.seconds
        thread.join()
        print(
            f"{SEQUENCES} sequences: {alone:.0f} tokens/s alone, {during:.0f} during a push of "
            f"{report.seconds:.3f} s, {during / alone:.0%}; longest pause "
            f"{1e3 * report.pause_s:.1f} ms"
        )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sync", description=__doc__)
    parser.add_argument("--shape", choices=list(SHAPES), default="dense-0.6b")
    parser.add_argument("--repeats", type=whole(1), default=5, help="syncs after the first two")
    parser.add_argument(
        "--shared", type=whole(0), default=3, help="syncs from a trainer in another process"
    )
    parser.add_argument("--running", type=whole(0), default=1, help="pushes while sequences decode")
    parser.add_argument("--threads", type=whole(1, THREADS), default=usable_cores())
    parser.add_argument(
        "--gib", type=real(1 / 64, 1024), default=0.5, help="size of the blocks that memcpy copies"
    )
    for axis in ("tp", "dp", "ep"):
        parser.add_argument(
            f"--{axis}",
            type=whole(1, 64),
            default=1,
            help="ranks, as threads that share --threads out",
        )
    args = parser.parse_args()
    peer = Memcpy(args.threads, args.gib)
    state_dict = make_trainer(SHAPES[args.shape].config(), torch.bfloat16).state_dict()
    mesh = rm.Mesh(tp=args.tp, dp=args.dp, ep=args.ep)
    spec = SHAPES[args.shape].spec
    generator = rm.Generator(
        spec, mesh=mesh, threads=args.threads, max_model_len=256, kv_cache_gib=0.1
    )
    sync, blocks, tensors = [], [], []
    for i in range(2 + args.repeats):
        blocks.append(peer.blocks())
        tensors.append(peer.tensors(state_dict))
        report, seconds, peak = peak_of(lambda: generator.sync_weights(state_dict))
        sync.append(report.bytes / 1e9 / seconds)
        print(
            f"sync {i + 1}: {report.bytes / 1e9:.2f} GB in {seconds:.3f} s, {sync[-1]:.2f} GB/s, "
            f"peak +{peak:.2f} GB;"
            f" memcpy {blocks[-1]:.2f} GB/s, of the tensors {tensors[-1]:.2f} GB/s"
        )
    best = max(sync[2:])
    print(
        f"best {best:.2f} GB/s, memcpy {max(blocks):.2f} GB/s: {best / max(blocks):.0%}; memcpy "
        f"of the tensors {max(tensors):.2f} GB/s"
    )
    rounds = median(ours / theirs for ours, theirs in zip(sync[2:], blocks[2:], strict=True))
    print(f"median of the rounds: {rounds:.0%} of memcpy")
    if args.running:
        measure_running(generator, state_dict, args.running)
    if args.shared:
        del state_dict
        gc.collect()
        measure_shared(args, generator)


if __name__ == "__main__":
    main()

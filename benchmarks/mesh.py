"""The cost of a mesh: a decode step and a prefill by degree and transport, beside one rank.

    python -m benchmarks.mesh

One rank and each mesh generate the same prompts, over threads of this process. All share the same
cores, so a mesh cannot be faster here: the benchmark measures the cost of dividing. The columns
beside the time are the share of it inside exchanges, the exchanges and bytes of a step, and the
bytes that ring all-reduces of the same activations would send (two a layer, 2·(n − 1)/n of rows ×
hidden each, from every rank), as in a mesh that adds partial sums. Runs are interleaved; the best
of each counts."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

import rollmesh as rm
from benchmarks.options import THREADS, whole
from rollmesh._core import usable_cores
from rollmesh.cli.weights import random_weights

CONFIG = {
    "model_type": "qwen3_moe", "vocab_size": 32768, "hidden_size": 1024, "intermediate_size": 3072,
    "moe_intermediate_size": 384,
    "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64,
    "num_experts": 32,
    "num_experts_per_tok": 4, "norm_topk_prob": True, "max_position_embeddings": 1024,
    "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
MESHES = (
    (rm.Mesh(), "alltoall", False),
    (rm.Mesh(tp=2), "alltoall", False),
    (rm.Mesh(tp=2), "alltoall", True),
    (rm.Mesh(tp=2, ep=2), "local_allreduce", False),
    (rm.Mesh(tp=2, ep=2), "allgather_reducescatter", False),
    (rm.Mesh(tp=2, ep=2), "alltoall", False),
    (rm.Mesh(dp=2), "alltoall", False),
    (rm.Mesh(dp=2, ep=2), "alltoall", False),
    (rm.Mesh(tp=2, dp=2, ep=4), "alltoall", True),
    (rm.Mesh(tp=4, ep=4), "alltoall", False),
)


class Timed:
    """One mesh, its weights synced, and the best times so far."""

    def __init__(
        self, mesh: rm.Mesh, backend: str, sequence_parallel: bool, threads: int, sequences: int
    ):
        self.mesh, self.sequences = mesh, sequences
        self.label = (
            f"tp={mesh.tp} dp={mesh.dp} ep={mesh.ep}"
            + (f" {backend}" if mesh.ep > 1 else "")
            + (" sp" if sequence_parallel else "")
        )
        self.generator = rm.Generator(
            rm.ModelSpec.from_hf(CONFIG), mesh=mesh, ep_backend=backend,
            sequence_parallel=sequence_parallel, threads=threads,
            max_model_len=640, kv_cache_gib=0.2, max_num_batched_tokens=512,
            enable_prefix_caching=False,
        )  # fmt: skip
        self.generator.sync_weights(random_weights(self.generator, 0), cast=True)
        self.decode = self.prefill = self.comm = float("inf")
        self.calls = self.sent = 0.0

    def round(self, tokens: int) -> None:
        prompts = [[i + 1] * 16 for i in range(self.sequences)]
        params = rm.SamplingParams(max_tokens=tokens, ignore_eos=True, seed=0)
        before, began = self.generator.metrics(), time.perf_counter()
        self.generator.generate(prompts, params, use_tqdm=False)
        seconds, after = time.perf_counter() - began, self.generator.metrics()
        steps = after["steps"] - before["steps"]
        if seconds / steps < self.decode:
            self.decode, self.comm = (
                seconds / steps,
                (after["comm_seconds"] - before["comm_seconds"]) / seconds,
            )
            self.calls, self.sent = (
                (after["comm_calls"] - before["comm_calls"]) / steps,
                (after["comm_bytes"] - before["comm_bytes"]) / steps,
            )
        began = time.perf_counter()
        self.generator.generate(
            [[7] * 512], rm.SamplingParams(max_tokens=1, ignore_eos=True), use_tqdm=False
        )
        self.prefill = min(self.prefill, time.perf_counter() - began)

    def ring_bytes(self) -> float:
        """Returns the bytes of a decode step, by all ranks of all replicas."""
        rows, tp = self.sequences, self.mesh.tp
        return (
            2
            * int(CONFIG["num_hidden_layers"])
            * rows
            * int(CONFIG["hidden_size"])
            * 2
            * 2
            * (tp - 1)
        )  # type: ignore[call-overload]


def lines(timed: list[Timed]) -> Iterator[str]:
    yield (
        "| mesh | decode step, ms | × one rank | in exchanges | exchanges | KB sent | ring "
        "all-reduce KB | prefill 512, ms | × one rank |"
    )
    yield "|---|--:|--:|--:|--:|--:|--:|--:|--:|"
    for t in timed:
        yield (
            f"| {t.label} | {t.decode * 1e3:.2f} | {t.decode / timed[0].decode:.2f} | "
            f"{t.comm:.0%} | {t.calls:.0f} | {t.sent / 1e3:.0f} | "
            f"{t.ring_bytes() / 1e3:.0f} | {t.prefill * 1e3:.0f} | "
            f"{t.prefill / timed[0].prefill:.2f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mesh", description=__doc__)
    parser.add_argument("--sequences", type=whole(1, 256), default=8)
    parser.add_argument("--tokens", type=whole(2, 500), default=24)
    parser.add_argument("--rounds", type=whole(1), default=5)
    parser.add_argument("--threads", type=whole(1, THREADS), default=usable_cores())
    args = parser.parse_args()
    timed = [Timed(*setting, args.threads, args.sequences) for setting in MESHES]
    for _ in range(args.rounds):
        for each in timed:
            each.round(args.tokens)
    print("\n".join(lines(timed)))


if __name__ == "__main__":
    main()

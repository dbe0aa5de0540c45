"""Four ranks: two replicas (dp=2) of two tensor parallel ranks (tp=2), with experts over all four
(ep=4).

    python examples/mesh.py                               ranks are threads of one process
    torchrun --nproc-per-node 4 examples/mesh.py          ranks are processes, over shared memory

Both print the same tokens as one rank: the mesh does not change a single bit."""

from __future__ import annotations

import os
from typing import Any

import rollmesh as rm

CONFIG = {
    "model_type": "qwen3_moe", "vocab_size": 1000, "hidden_size": 128, "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32,
}  # fmt: skip


def trained_weights() -> dict[str, Any]:
    """Returns the trainer's weights; only the trainer's rank needs torch."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**CONFIG)).state_dict()


def main() -> None:
    rank = int(os.environ.get("RANK", 0))
    # Across machines: rm.comm.torch(), after init_process_group("gloo").
    comm = rm.comm.shm() if "RANK" in os.environ else None
    mesh = rm.Mesh(tp=2, dp=2, ep=4)
    with rm.Generator.from_hf(
        CONFIG, mesh=mesh, comm=comm, max_model_len=256, kv_cache_gib=0.1
    ) as generator:
        source = trained_weights() if rank == 0 else None
        # Every rank makes the same calls in the same order.
        generator.sync_weights(source, cast=True)
        generator.submit([[1, 2, 3], [4, 5]], rm.SamplingParams(max_tokens=16, seed=7))
        outputs = generator.poll(min_outputs=2)  # complete on every rank
        tokens = [output.outputs[0].token_ids.tolist() for output in outputs]
        print(f"rank {rank}: {tokens}\n", end="")


if __name__ == "__main__":
    main()

"""vLLM's engine over a device, in a separate process because vLLM selects its platform once per
process:

    ROLLMESH_VLLM_DEVICE=cuda python tests/support/vllm_device.py moe bfloat16 FOLDER [EXCHANGE]

The worker receives the weights, and its answers are compared with those of rm.Generator on the CPU.
With EXCHANGE there are two workers, which exchange that way, and they read most of the weights on a
GPU of this process, which lends them. After each set the worker sleeps at level 1, which frees the
memory of the weights as well, and gives the same answers when it wakes. Prints one line of JSON,
{"platform", "device", "nccl", "compared"}, or ends with the assertion's status.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import gpu_trainer
import numpy as np
import vllm_support as support

from rollmesh import _core
from rollmesh.vllm.trainer import WeightSender


def nap(llm: Any) -> None:
    """Sleeps at level 1 and wakes by tag. The same weights serve as before; in between the device
    holds none of them."""
    known = [
        llm.collective_rpc(method) for method in ("weight_version", "compute_weight_checksums")
    ]
    held = llm.collective_rpc(device_memory)
    llm.sleep(1)
    for (before, weights, kv), (after, *_) in zip(
        held, llm.collective_rpc(device_memory), strict=True
    ):
        assert after >= before + weights + kv, (
            f"{after} bytes are free, wanted {weights} and {kv} more than {before}"
        )
    llm.wake_up(["weights"])
    llm.wake_up(["kv_cache"])
    assert [
        llm.collective_rpc(method) for method in ("weight_version", "compute_weight_checksums")
    ] == known


def dropped(llm: Any, weights: support.Weights, oracle: support.Oracle) -> None:
    """Sleeps at level 2 after level 1, of which vLLM's executor sees only one: the host's copy is
    gone, and a new set is needed."""
    llm.sleep(1)
    llm.collective_rpc("sleep", args=(2,))
    llm.wake_up()
    assert "NotSyncedError" in support.ended(llm, support.request([1, 2, 3]))[1]
    support.load(llm, weights)
    asked = [support.request([1, 2, 3])]
    support.agree(support.generate(llm, asked), oracle.answers(asked))


def lent(weights: support.Weights) -> support.Weights:
    """Lends all tensors but one on GPU 1 of this process, float32 if a model has bfloat16."""
    trainer = gpu_trainer.Trainer(Path(os.environ["ROLLMESH_CUDA_LIBRARY"]), 1)
    wide = {name: np.ascontiguousarray(array.astype(np.float32)) for name, array in weights.items()}
    return {**trainer.packed(wide), "model.norm.weight": weights["model.norm.weight"]}


def device_memory(worker: Any) -> tuple[int, int, int]:
    """In a worker: returns the free memory of its device, and the bytes of its weights and KV."""
    metrics = worker.metrics()
    ordinal = int(metrics["device"].removeprefix("cuda:"))
    return (
        _core.cuda_available(os.environ["ROLLMESH_CUDA_LIBRARY"], ordinal),
        metrics["weight_bytes"],
        metrics["kv_bytes"],
    )


def main() -> None:
    model, dtype, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    two: dict[str, Any] = {}
    if len(sys.argv) > 4:
        two = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
        two["additional_config"] = {"rollmesh": {"exchange": sys.argv[4]}}
    oracle = support.Oracle(model, dtype)
    compared = 0
    with support.engine(folder, model, dtype, **two) as llm:
        sender = WeightSender(llm, lend=True, cast=True, block_bytes=400_000) if two else None
        for seed in range(1 if two else 2):
            weights = support.weights_of(model, dtype, seed)
            if sender is None:
                support.load(llm, weights)
            else:
                sender.send(lent(weights), version=seed)
            oracle.serve(weights)
            requests = support.mixed(model, seed)[: 6 if two else 12]
            compared += support.agree(support.generate(llm, requests), oracle.answers(requests))
            nap(llm)
            again = support.mixed(model, seed)[:4]
            compared += support.agree(support.generate(llm, again), oracle.answers(again))
            llm.reset_prefix_cache()
        if sender is None:
            dropped(llm, weights, oracle)
        metrics = llm.collective_rpc("metrics")[0]
    oracle.close()
    from vllm.platforms import current_platform

    found = {
        "platform": type(current_platform).__name__,
        "device": metrics["device"],
        "nccl": metrics["nccl"],
        "compared": compared,
    }
    print(json.dumps(found), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()

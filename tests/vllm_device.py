"""vLLM's engine over a device, in a process of its own, since vLLM asks for its platform once a process:

    ROLLMESH_VLLM_DEVICE=cuda python tests/vllm_device.py moe bfloat16 FOLDER [EXCHANGE]

The worker gets the weights, and its answers are held to rm.Generator's on the CPU; with EXCHANGE there are two of them, which exchange so.
Prints one line of JSON, {"platform", "device", "nccl", "compared"}, or ends with the assertion's status.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import vllm_support as support

from rollmesh.vllm.trainer import WeightSender


def main() -> None:
    model, dtype, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    two: dict[str, Any] = {}
    if len(sys.argv) > 4:
        two = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
        two["additional_config"] = {"rollmesh": {"exchange": sys.argv[4]}}
    oracle = support.Oracle(model, dtype)
    compared = 0
    with support.engine(folder, model, dtype, **two) as llm:
        sender = WeightSender(llm) if two else None
        for seed in range(1 if two else 2):
            weights = support.weights_of(model, dtype, seed)
            if sender is None:
                support.load(llm, weights)
            else:
                sender.send(weights, version=seed)
            oracle.serve(weights)
            requests = support.mixed(model, seed)[: 6 if two else 12]
            compared += support.agree(support.generate(llm, requests), oracle.answers(requests))
            llm.reset_prefix_cache()
        metrics = llm.collective_rpc("metrics")[0]
    oracle.close()
    from vllm.platforms import current_platform

    found = {"platform": type(current_platform).__name__, "device": metrics["device"], "nccl": metrics["nccl"], "compared": compared}
    print(json.dumps(found), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()

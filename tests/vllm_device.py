"""vLLM's engine over a device, in a process of its own, since vLLM asks for its platform once a process:

    ROLLMESH_VLLM_DEVICE=cuda python tests/vllm_device.py moe bfloat16 FOLDER

The worker gets the weights, and its answers are held to rm.Generator's on the CPU; prints one line of JSON, {"platform", "device",
"compared"}, or ends with the assertion's status.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import vllm_support as support


def main() -> None:
    model, dtype, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    oracle = support.Oracle(model, dtype)
    compared = 0
    with support.engine(folder, model, dtype) as llm:
        for seed in range(2):
            weights = support.weights_of(model, dtype, seed)
            support.load(llm, weights)
            oracle.serve(weights)
            requests = support.mixed(model, seed)[:12]
            compared += support.agree(support.generate(llm, requests), oracle.answers(requests))
            llm.reset_prefix_cache()
        device = llm.collective_rpc("metrics")[0]["device"]
    oracle.close()
    from vllm.platforms import current_platform

    print(json.dumps({"platform": type(current_platform).__name__, "device": device, "compared": compared}), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()

"""A rank of an engine that torchrun starts, as RL trainers that share their processes with vLLM do:

    torchrun --nproc-per-node 2 tests/support/vllm_launched.py moe bfloat16 FOLDER
    '{"tensor_parallel_size": 2, …}'

Every rank gives its worker the weights, makes the same calls, and holds its answers to
rm.Generator's; it prints one line of JSON, {"rank", "compared"}, or ends with the assertion's
status.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import vllm_support as support


def main() -> None:
    model, dtype, at, changes = sys.argv[1], sys.argv[2], Path(sys.argv[3]), json.loads(sys.argv[4])
    folder = at / os.environ["RANK"]
    compared = 0
    oracle = support.Oracle(
        model, dtype, processed=changes.get("logprobs_mode") == "processed_logprobs"
    )
    with support.engine(
        folder, model, dtype, distributed_executor_backend="external_launcher", **changes
    ) as llm:
        for seed in range(2):
            weights = support.weights_of(model, dtype, seed)
            support.load(llm, weights)
            oracle.serve(weights)
            requests = (
                support.mixed(model, seed) if not oracle.processed else support.drawn(model, seed)
            )
            got, want = support.generate(llm, requests), oracle.answers(requests)
            if oracle.processed:
                got, want = support.without_ranks(got), support.without_ranks(want)
            compared += support.agree(got, want)
            llm.reset_prefix_cache()
    oracle.close()
    # One write for the whole line, because print writes the line's end separately.
    sys.stdout.write(json.dumps({"rank": int(os.environ["RANK"]), "compared": compared}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()

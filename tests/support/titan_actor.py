"""Child of test_titan_rl.py: one RollmeshGenerator actor with invalid calls of its endpoints, and
weights from torchstore. Prints a line of JSON for each call with its error, and after each failed
pull whether the old version still serves."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples/titan"))
os.environ["PYTHONPATH"] = os.pathsep.join(
    [sys.path[0], *filter(None, [os.environ.get("PYTHONPATH")])]
)

import grpo  # isort: skip
import on_cpu
import torch
import torchstore
from monarch.actor import this_host
from torchtitan.config import CompileConfig
from torchtitan.experiments.rl.actors.generator import SamplingConfig

from rollmesh.titan import RollmeshGenerator

GREEDY = SamplingConfig(temperature=0.0, top_p=1.0, max_tokens=8)


def tell(name: str, said: Any) -> None:
    sys.stdout.write(json.dumps([name, said]) + "\n")
    sys.stdout.flush()


async def told(name: str, call: Any) -> None:
    [raised] = await asyncio.gather(call, return_exceptions=True)
    tell(name, last_line(raised))


def last_line(raised: Any) -> str | None:
    """Returns the last line of an ActorError, which is the error that the actor raised."""
    return str(raised).strip().splitlines()[-1] if isinstance(raised, BaseException) else None


async def main() -> None:
    spec = grpo.small_model(True)
    torch.manual_seed(0)
    module = spec.model.build()
    module.init_states()
    config = RollmeshGenerator.Config(
        model_dtype="float32", kv_cache_gib=0.02, max_model_len=64, threads=1
    )
    procs = this_host().spawn_procs(per_host={"gpus": 1}, bootstrap=on_cpu.bootstrap)
    # fmt: off
    actor = procs.spawn(
        "generator", RollmeshGenerator, config, model_spec=spec, model_path=".",
        compile_config=CompileConfig(enable=False), max_num_seqs=4,
        output_dir=sys.argv[1],
    )
    # fmt: on
    await torchstore.initialize()

    def generate(prompt: list[int], request: str = "r", sampling: SamplingConfig = GREEDY) -> Any:
        return actor.generate.call_one(
            prompt, request_id=request, routing_session_id="s", sampling_config=sampling
        )

    await told("generate before start", generate([1, 2]))
    await told("start", actor.start_engine_loop.call())
    await told("start again", actor.start_engine_loop.call())
    await told("generate before weights", generate([1, 2]))
    await told("pull before push", actor.pull_model_state_dict.call_one(1))
    state = dict(module.state_dict())
    await torchstore.put_state_dict(state, "model_state_dict", direct_rdma=False)
    await told("pull", actor.pull_model_state_dict.call_one(1))
    first = await generate([1, 2, 3])
    tell("tokens", len(first.token_ids))

    async def still(name: str) -> None:
        now = await generate([1, 2, 3])
        tell(
            name,
            [now.token_ids, now.token_logprobs, now.max_policy_version]
            == [first.token_ids, first.token_logprobs, 1],
        )

    await told("older version", actor.pull_model_state_dict.call_one(0))
    await still("old serves after an older version")
    norm = state["norm.weight"].clone()
    norm[3] = float("nan")
    await torchstore.put_state_dict(
        {**state, "norm.weight": norm}, "model_state_dict", direct_rdma=False
    )
    await told("nan", actor.pull_model_state_dict.call_one(2))
    await still("old serves after nan")
    without = {name: value for name, value in state.items() if name != "norm.weight"}
    await torchstore.put_state_dict(without, "model_state_dict", direct_rdma=False)
    await told("missing", actor.pull_model_state_dict.call_one(3))
    await still("old serves after a missing tensor")
    await told("empty prompt", generate([]))
    await told("token out of range", generate([1, 100000]))
    await told("long prompt", generate([1] * 65))
    await told("temperature", generate([1], sampling=SamplingConfig(temperature=-1.0)))
    await still("old serves after bad requests")
    # Long, so that some of these overlap, however late they arrive.
    long = SamplingConfig(temperature=0.0, max_tokens=60)
    same = await asyncio.gather(
        *(generate([1, 2], "same", long) for _ in range(9)), return_exceptions=True
    )
    tell("same id", sorted(last_line(one) or "" for one in same))
    await torchstore.put_state_dict(state, "model_state_dict", direct_rdma=False)
    await told("good again", actor.pull_model_state_dict.call_one(4))
    running = asyncio.gather(
        *(generate([1, i], f"r{i}", SamplingConfig(max_tokens=60)) for i in range(8)),
        return_exceptions=True,
    )
    await told("close", actor.close.call())
    tell("in flight at close", [last_line(one) for one in await running])
    await told("close again", actor.close.call())
    await told("generate after close", generate([1]))
    await procs.stop()
    await asyncio.sleep(3)


asyncio.run(main())

"""An event loop with many concurrent rollouts, as for agents: each coroutine awaits its own
completions.

Every episode makes two requests; the second prompt contains the first answer. A version is pushed
when an odd episode has its first answer; the odd ones wait for it, the even ones may finish before.
astream returns tokens one by one; cancelling a coroutine removes its request from
the engine."""

from __future__ import annotations

import asyncio
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import rollmesh as rm

CONFIG = Qwen3Config(
    vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16,
)  # fmt: skip


async def episode(
    generator: rm.Generator, number: int, answered: asyncio.Event, pushed: asyncio.Event
) -> dict[str, Any]:
    prompt, versions = [1, 2, number], []
    for turn in range(2):
        params = rm.SamplingParams(max_tokens=24, seed=100 * number + turn, ignore_eos=True)
        [answer] = (await generator.agenerate(prompt, params)).outputs
        prompt = [*prompt, *answer.token_ids.tolist()]
        versions += answer.versions.tolist()
        if number % 2:
            answered.set()
            await pushed.wait()
    return {"tokens": len(prompt), "versions": sorted(set(versions))}


async def main() -> None:
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(CONFIG)
    with rm.Generator.from_hf(CONFIG, max_model_len=128, kv_cache_gib=0.05) as generator:
        generator.sync_weights(model.state_dict(), cast=True)
        answered, pushed = asyncio.Event(), asyncio.Event()
        running = [
            asyncio.create_task(episode(generator, number, answered, pushed))
            for number in range(16)
        ]
        await answered.wait()
        with torch.no_grad():
            model.lm_head.weight.mul_(1.1)
        # Calls that may wait run in a thread, so that the event loop is not blocked.
        await asyncio.to_thread(
            generator.sync_weights, model.state_dict(), cast=True, inflight="keep"
        )
        pushed.set()
        for number, told in enumerate(await asyncio.gather(*running)):
            print(f"episode {number}: {told['tokens']} tokens of versions {told['versions']}")
        async for output in generator.astream(
            [3, 1, 4], rm.SamplingParams(max_tokens=8, seed=1, ignore_eos=True)
        ):
            print("so far:", output.outputs[0].token_ids.tolist())


if __name__ == "__main__":
    asyncio.run(main())

"""An asynchronous loop: a thread generates without a pause while the trainer takes steps and pushes
each new version.

With `inflight="keep"` running requests continue: they keep their tokens, and their KV is computed
again with the new weights. Each token has its version, so that the trainer can correct for tokens
of an older policy."""

from __future__ import annotations

import queue
import threading

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import rollmesh as rm

CONFIG = Qwen3Config(
    vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16,
)  # fmt: skip


def rollouts(
    generator: rm.Generator, finished: queue.Queue[rm.RequestOutput], stop: threading.Event
) -> None:
    """Any thread may call a generator; calls alternate between engine steps. The trainer is at most
    16 samples behind."""
    running, seed = 0, 0
    while not stop.is_set():
        while running + finished.qsize() < 16:
            generator.submit(
                [[1, 2, 3]], rm.SamplingParams(max_tokens=40, ignore_eos=True, seed=seed)
            )
            running, seed = running + 1, seed + 1
        for output in generator.poll():  # one engine step
            running -= 1
            finished.put(output)
        if not running:
            stop.wait(0.001)  # the trainer is behind


def main() -> None:
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(CONFIG)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    finished, stop = queue.Queue[rm.RequestOutput](), threading.Event()
    with rm.Generator.from_hf(
        CONFIG, dtype="float32", max_model_len=64, kv_cache_gib=0.1
    ) as generator:
        generator.sync_weights(model.state_dict(), version=0)
        (thread := threading.Thread(target=rollouts, args=(generator, finished, stop))).start()
        try:
            for step in range(1, 11):
                samples = [finished.get(timeout=60).outputs[0] for _ in range(8)]
                tokens = torch.tensor(
                    np.array([sample.token_ids for sample in samples]), dtype=torch.int64
                )
                model(tokens, labels=tokens).loss.backward()  # a stand-in for your own loss
                optimizer.step()
                optimizer.zero_grad()
                generator.sync_weights(model.state_dict(), version=step, inflight="keep")
                seen = sorted({int(v) for sample in samples for v in sample.versions})
                print(f"step {step}  tokens of versions {seen}  now serving {generator.version}")
        finally:
            stop.set()
            thread.join()


if __name__ == "__main__":
    main()

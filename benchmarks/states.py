"""Prefix hits of a hybrid model by state_interval.

    python -m benchmarks.states [--gib 4] [--loads chats groups requests documents]

The model is small, but a state takes as many KV pages as in Qwen3.5-0.8B, and sizes are printed as
that model's: its token takes 12 KiB of KV, its state 19 MiB. Loads:

    chats     8 chats with a common system prompt of 411 tokens. In each of 4 turns all chats add a
              message of 30 to 600 tokens and get an answer of 128
    groups    64 prompts with a common beginning of 707 tokens, then 50 to 500 different ones; 8
              samples of 16 tokens each: one request with n=8
    requests  as groups, but 8 requests for each prompt
    documents 12 documents of 1500 to 3000 tokens, each with 4 questions of 20 to 60 tokens, which
              are asked 4 at a time in random order
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

import rollmesh as rm
from benchmarks.options import real, whole
from rollmesh.cli.weights import random_weights

TOKEN_BYTES = 12288  # KV of a token in Qwen3.5-0.8B
SMALL_TOKEN_BYTES = 128
MODEL: dict[str, Any] = {
    "model_type": "qwen3_5_text", "vocab_size": 300, "hidden_size": 32, "intermediate_size": 32,
    "num_hidden_layers": 4, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 32,
    "max_position_embeddings": 4096, "linear_num_key_heads": 2, "linear_num_value_heads": 14,
    "linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_conv_kernel_dim": 5,
}  # fmt: skip


def chats(gen: rm.Generator) -> None:
    rng = np.random.default_rng(1)
    system = rng.integers(0, 300, 411).tolist()
    talks = [list(system) for _ in range(8)]
    for _ in range(4):
        for talk in talks:
            talk += rng.integers(0, 300, int(rng.integers(30, 600))).tolist()
        for talk, out in zip(talks, generate(gen, talks, 128), strict=True):
            talk += out.outputs[0].token_ids.tolist()


def groups(gen: rm.Generator) -> None:
    generate(gen, prompts(), 16, n=8)


def requests(gen: rm.Generator) -> None:
    generate(gen, [prompt for prompt in prompts() for _ in range(8)], 16)


def documents(gen: rm.Generator) -> None:
    rng = np.random.default_rng(3)
    asked = []
    for _ in range(12):
        document = rng.integers(0, 300, int(rng.integers(1500, 3000))).tolist()
        for _ in range(4):
            asked.append(document + rng.integers(0, 300, int(rng.integers(20, 60))).tolist())
    order = rng.permutation(len(asked))
    for i in range(0, len(order), 4):
        generate(gen, [asked[j] for j in order[i : i + 4]], 16)


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(2)
    common = rng.integers(0, 300, 707).tolist()
    return [common + rng.integers(0, 300, int(rng.integers(50, 500))).tolist() for _ in range(64)]


def generate(gen: rm.Generator, ids: list[list[int]], tokens: int, n: int = 1) -> Any:
    params = rm.SamplingParams(n=n, max_tokens=tokens, ignore_eos=True)
    return gen.generate(ids, params, use_tqdm=False)


LOADS = {"chats": chats, "groups": groups, "requests": requests, "documents": documents}
INTERVALS = [16, 128, 256, 512, 1024, 1600]  # 1600: pages that take as much memory as a state


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", type=real(0.1, 1024), nargs="+", default=[4.0])
    parser.add_argument("--loads", choices=LOADS, nargs="+", default=list(LOADS))
    parser.add_argument("--intervals", type=whole(16), nargs="+", default=INTERVALS)
    args = parser.parse_args()
    print("| kv_cache_gib | state_interval | load | pages hold | states | hits | evicted states |")
    print("|--:|--:|---|--:|--:|--:|--:|")
    spec = rm.ModelSpec.from_hf(MODEL)
    for gib in args.gib:
        for load in args.loads:
            for interval in args.intervals:
                with rm.Generator(
                    spec,
                    dtype="bfloat16",
                    max_model_len=4096,
                    max_num_seqs=64,
                    kv_cache_gib=gib * SMALL_TOKEN_BYTES / TOKEN_BYTES,
                    state_interval=interval,
                ) as gen:
                    gen.sync_weights(random_weights(gen, 0), cast=True)
                    LOADS[load](gen)
                    seen = gen.metrics()
                hits = seen["cached_tokens"] / seen["prompt_tokens"]
                print(
                    f"| {gib:g} | {interval} | {load} | "
                    f"{seen['kv_pages'] * 16:,} tokens | {seen['states']} | {hits:.1%} | "
                    f"{seen['state_evictions']} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()

"""Shared by the tests in this folder: models whose heads fit vLLM's blocks without padding, engines
with rollmesh's classes in vLLM's own runner, and answers without ranks, because vLLM counts ranks
in logprobs and the oracle counts them in logits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import helpers
import numpy as np
import vllm_support
from vllm_support import Answer, Oracle, Request, Weights, request

SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
DENSE, MOE, TIED = "dense-oot", "moe-oot", "tied-oot"
CONFIGS = {
    DENSE: helpers.tiny_config(
        False, **SIZES, intermediate_size=160, tie_word_embeddings=False, attention_bias=True
    ),
    TIED: helpers.tiny_config(False, **SIZES, intermediate_size=160, tie_word_embeddings=True),
    MOE: helpers.tiny_config(
        True, **SIZES, num_experts=24, num_experts_per_tok=3, intermediate_size=160
    ),
}
vllm_support.CASES |= {name: helpers.Case(name, config) for name, config in CONFIGS.items()}


@contextlib.contextmanager
def engine(at: Path, model: str, dtype: str, **changes: Any) -> Iterator[Any]:
    """vllm.LLM in this process without weights. Chunks of 32 tokens."""
    chosen = {
        "weight_transfer_config": None,
        "load_format": "dummy",
        "enforce_eager": True,
        "kv_cache_memory_bytes": 1 << 24,
    }
    with vllm_support.engine(at, model, dtype, **chosen | changes) as llm:
        yield llm


def model_of(llm: Any) -> Any:
    return llm.llm_engine.model_executor.driver_worker.model_runner.model


def tensors(weights: Weights) -> Iterator[tuple[str, Any]]:
    import torch

    for name, value in weights.items():
        short = value.dtype.itemsize == 2
        yield (
            name,
            torch.from_numpy(value.view(np.int16)).view(torch.bfloat16)
            if short
            else torch.from_numpy(value),
        )


def checkpoint(at: Path, model: str, weights: Weights) -> None:
    """Writes weights to where engine(at, model, …, load_format="auto") finds them: for ranks that
    are processes, and for vLLM's own classes."""
    from safetensors.torch import save_file

    save_file(dict(tensors(weights)), Path(vllm_support.folder(at, model)) / "model.safetensors")


def greedy(
    seed: int, lengths: Iterable[int], max_tokens: int = 10, **settings: Any
) -> list[Request]:
    rng = np.random.default_rng([seed, 78])
    settings = {
        "temperature": 0.0,
        "logprobs": 4,
        "prompt_logprobs": 2,
        "max_tokens": max_tokens,
    } | settings
    return [request(rng.integers(0, SIZES["vocab_size"], n), **settings) for n in lengths]


def unranked(answers: Sequence[Sequence[Answer]]) -> list[list[Any]]:
    """(sample, tokens, [{token: bits of its logprob}])."""
    return [
        [
            (a.index, a.tokens, [{t: bits for t, (bits, _) in at.items()} for at in a.positions])
            for a in some
        ]
        for some in answers
    ]


def agree(llm: Any, oracle: Oracle, requests: Sequence[Request]) -> int:
    """Compares bit for bit; returns how many logprobs were compared."""
    got, want = unranked(vllm_support.generate(llm, requests)), unranked(oracle.answers(requests))
    for i, (ours, theirs) in enumerate(zip(want, got, strict=True)):
        assert ours == theirs, (
            f"request {i} of {len(requests)}, a prompt of {len(requests[i].prompt)} tokens"
        )
    return sum(len(at) for some in want for _, _, positions in some for at in positions)

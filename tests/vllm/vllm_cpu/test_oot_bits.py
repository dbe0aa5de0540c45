"""The logits of rollmesh's classes under vLLM's own model runner, and vLLM's results from them.

Input: random weights of small models, dense (with biases; tied) and MoE, in both dtypes; greedy
requests of one token to several chunks. Oracle: rm.Generator with the same weights. Bound: zero;
tokens and the bits of every logprob, of prompts too. The tests assert that chunks, prefix hits and
preemptions happened."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import oot
import pytest
from oot import DENSE, MOE, TIED
from vllm_support import Oracle, Trace, weights_of

LENGTHS = (1, 2, 15, 33, 64, 97)
Served = tuple[Any, Oracle, str]


@pytest.fixture(
    scope="module",
    params=[(DENSE, "float32"), (TIED, "bfloat16"), (MOE, "float32"), (MOE, "bfloat16")],
    ids="-".join,
)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """An engine with few blocks: six requests of a hundred tokens do not fit at once."""
    model, dtype = request.param
    with oot.engine(
        tmp_path_factory.mktemp("oot"), model, dtype, num_gpu_blocks_override=24
    ) as llm:
        oracle = Oracle(model, dtype)
        weights = weights_of(model, dtype)
        oracle.serve(weights)
        oot.model_of(llm).load_weights(oot.tensors(weights))
        yield llm, oracle, model
        oracle.close()


def test_chunks_and_prompts(served: Served) -> None:
    llm, oracle, _ = served
    with Trace(llm) as trace:
        assert oot.agree(llm, oracle, oot.greedy(0, LENGTHS)) > 500
    assert trace.chunks >= 3, "no prompt came in chunks"


def test_prefix_hits(served: Served) -> None:
    llm, oracle, _ = served
    requests = oot.greedy(1, (50, 81), prompt_logprobs=None)
    oot.agree(llm, oracle, requests)
    with Trace(llm) as trace:
        oot.agree(llm, oracle, requests)
    assert trace.hits == 2, "nothing was found in the prefix cache"


def test_preemption(served: Served) -> None:
    llm, oracle, _ = served
    with Trace(llm) as trace:
        oot.agree(
            llm,
            oracle,
            oot.greedy(2, (40, 41, 42, 43, 44, 45), max_tokens=60, prompt_logprobs=None),
        )
    assert trace.preempted > 0, "nothing was preempted"


def test_a_draw_is_of_the_same_logits(served: Served) -> None:
    """vLLM draws with its own random numbers; the logprob of the drawn token is the contract's."""
    llm, oracle, _ = served
    import vllm_support

    request = oot.greedy(3, (20,), temperature=1.0, prompt_logprobs=None)[0]
    answer = vllm_support.generate(llm, [request])[0][-1]
    text = list(request.prompt) + answer.tokens
    score = oracle.generator.score([text])[0][len(request.prompt) - 1 :]
    assert [
        at[token][0] for token, at in zip(answer.tokens, answer.positions, strict=True)
    ] == vllm_support.bits(score)


@pytest.mark.slow
@pytest.mark.parametrize(
    "model, ep",
    [(DENSE, False), (MOE, False), (MOE, True)],
    ids=["dense-tp2", "moe-tp2", "moe-ep2"],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_ranks(model: str, ep: bool, dtype: str, tmp_path: Path) -> None:
    """Each rank is a process, and sums are computed on one rank. With a vocabulary of 300, rank 0
    has two blocks of 128 and rank 1 the rest."""
    weights = weights_of(model, dtype)
    oot.checkpoint(tmp_path, model, weights)
    oracle = Oracle(model, dtype)
    oracle.serve(weights)
    parallel = {
        "tensor_parallel_size": 2,
        "enable_expert_parallel": ep,
        "distributed_executor_backend": "mp",
    }
    with oot.engine(tmp_path, model, dtype, load_format="auto", **parallel) as llm:
        assert oot.agree(llm, oracle, oot.greedy(4, LENGTHS)) > 500
    oracle.close()

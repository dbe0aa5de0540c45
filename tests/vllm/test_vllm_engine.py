"""One rank of rollmesh under vllm.LLM is bit-identical to rm.Generator: tokens, logprobs, top
logprobs, prompt logprobs.

Input: tiny models, requests of every kind (vllm_support.mixed) that vLLM cuts into steps of at most
32 tokens and 6 sequences. Oracle: rm.Generator with the same weights and its own scheduler. Bound:
0 differing bits, equal ranks and finish reasons. The tests read chunks, prefix hits and preemptions
from the output of vLLM's scheduler, so that a test fails if its case never occurs. Settings cover
both dtypes, models, resume protocols and kinds of scheduling; each setting has one engine for all
its tests.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import vllm_support as support
from marks import SUMMARY

pytest.importorskip("vllm", reason="needs vLLM")
pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own


@dataclasses.dataclass(frozen=True)
class Setting:
    model: str
    dtype: str
    v2: bool  # how a preempted request comes back: as a new one, with all its tokens
    asynchronous: bool  # a step is scheduled before the tokens of the last one are known

    def __str__(self) -> str:
        runner, loop = "v2" if self.v2 else "v1", "async" if self.asynchronous else "sync"
        return f"{self.model}-{self.dtype}-{runner}-{loop}"


SETTINGS = (
    Setting("dense", "float32", False, True),
    Setting("dense", "bfloat16", True, False),
    Setting("moe", "float32", True, True),
    Setting("moe", "bfloat16", False, False),
    Setting("moe", "bfloat16", True, True),
    Setting("dense", "float32", False, False),
    Setting("hybrid", "bfloat16", False, True),
)
FEW_BLOCKS = (
    16  # of 16 tokens, one of them vLLM's null block: too few for two of the longest requests
)


@pytest.fixture(scope="module", params=SETTINGS, ids=str)
def served(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    pytestconfig: pytest.Config,
) -> Iterator[support.Served]:
    setting, options = (
        request.param,
        {"async_scheduling": request.param.asynchronous, "num_gpu_blocks_override": FEW_BLOCKS},
    )

    def loading(llm: Any) -> Any:
        return lambda weights, version: support.load(llm, weights)

    with support.served(setting, tmp_path_factory.mktemp("vllm"), loading, **options) as served:
        assert (
            served.llm.llm_engine.vllm_config.scheduler_config.async_scheduling
            == setting.asynchronous
        )
        yield served
    pytestconfig.stash[SUMMARY].append(
        f"vllm, {setting}: {served.compared:,} tokens and logprobs compared, 0 differ"
    )


@pytest.mark.parametrize("seed", range(3))
def test_requests_of_every_kind(served: support.Served, seed: int) -> None:
    """All requests at once: chunks of long prompts beside decodes, with different filters and
    numbers of logprobs in one step."""
    trace = served.traced(support.mixed(served.setting.model, seed, 16))
    assert trace.chunks > 0


def test_one_after_another(served: support.Served) -> None:
    """The composition of a batch does not change the result: the same requests one by one, in
    reverse order."""
    for request in reversed(support.mixed(served.setting.model, 3, 8)):
        served.hold([request])


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 64, 97, support.MAX_MODEL_LEN - 1])
def test_prompts_of_lengths_around_pages_and_chunks(served: support.Served, length: int) -> None:
    prompt = [(7 * i + length) % 300 for i in range(length)]
    end = support.MAX_MODEL_LEN - length
    served.hold(
        [
            support.request(
                prompt, temperature=0.0, logprobs=2, prompt_logprobs=2, max_tokens=min(3, end)
            )
        ]
    )
    served.hold([support.request(prompt, seed=length, logprobs=2, max_tokens=min(20, end))])


def test_prefix_hits(served: support.Served) -> None:
    """The prompt is cached: vLLM starts after its cached blocks."""
    prompt = list(range(60, 130))
    served.hold([support.request(prompt, temperature=0.0, logprobs=3)])
    trace = served.traced(
        [support.request([*prompt[:64], i], seed=i, logprobs=3) for i in range(4)]
    )
    assert trace.hits >= 3
    assert (
        served.traced([support.request(prompt[:48] + [299] * 20, temperature=0.0, logprobs=1)]).hits
        == 1
    )


def test_preemption(served: support.Served) -> None:
    """Six requests together need three times the available blocks."""
    requests = [
        support.request(
            [i * 11 + j for j in range(12)],
            seed=i,
            temperature=[0.0, 1.0][i % 2],
            logprobs=2,
            max_tokens=90,
        )
        for i in range(6)
    ]
    trace = served.traced(requests)
    assert trace.preempted > 0
    assert trace.resumed >= trace.preempted  # all of them were resumed


def test_preemption_of_chunks(served: support.Served) -> None:
    """Long prompts with prompt logprobs are preempted before they are complete."""
    requests = [
        support.request(
            [(i * 31 + j * j) % 300 for j in range(60)],
            seed=i,
            logprobs=1,
            prompt_logprobs=2,
            max_tokens=40,
        )
        for i in range(6)
    ]
    assert served.traced(requests).preempted > 0


def test_an_update_without_a_cache_reset(served: support.Served) -> None:
    """vLLM reuses its cached blocks, which hold the KV of other weights: they must not change the
    result."""
    prompt = list(range(200, 270))
    requests = [
        support.request([*prompt, i], seed=i, logprobs=4, prompt_logprobs=[None, 1][i % 2])
        for i in range(3)
    ]
    served.hold(requests)
    for _ in range(3):
        served.push()
        trace = served.traced(requests)
        assert trace.hits >= 2
        assert served.traced(requests).hits >= 2  # blocks that the new weights have filled


def test_cached_tokens_are_counted(served: support.Served) -> None:
    """vLLM's own count is kept, with and without an update."""
    prompt = {"prompt_token_ids": [5, 250] * 20}
    params = support.request([], max_tokens=2).theirs
    served.llm.generate([prompt], [params], use_tqdm=False)
    assert served.llm.generate([prompt], [params], use_tqdm=False)[0].num_cached_tokens == 32


def test_an_update_while_requests_run(served: support.Served) -> None:
    """Tokens from before the update stay; later tokens equal those of the new weights with the
    whole text so far as the prompt."""
    engine, old = served.llm.llm_engine, served.version
    requests = [
        support.request(
            [i + 1] * (5 + 20 * i), seed=i, temperature=[1.0, 0.0][i % 2], logprobs=2, max_tokens=40
        )
        for i in range(3)
    ]
    before = served.oracle.answers(requests)
    for i, request in enumerate(requests):
        engine.add_request(str(i), {"prompt_token_ids": list(request.prompt)}, request.theirs)
    seen, done = {}, {}

    def step() -> None:
        for output in engine.step():
            seen[int(output.request_id)] = len(output.outputs[0].token_ids)
            if output.finished:
                done[int(output.request_id)] = support.vllm_answers(output)

    while min((seen.get(i, 0) for i in range(3)), default=0) < 8:
        step()
    held = dict(seen)
    served.push()
    while len(done) < 3:
        step()
    assert served.version == old + 1
    for i, request in enumerate(requests):
        (got,), (first,) = done[i], before[i]
        # A step or two may have been in flight.
        ahead = range(held[i], held[i] + (3 if served.setting.asynchronous else 1))
        wanted = [support.continued(served.oracle, request, first, cut) for cut in ahead]
        assert any(got.tokens == w.tokens and got.positions == w.positions for w in wanted), (
            f"request {i}, cut at one of {list(ahead)}"
        )
        assert first.tokens != got.tokens
        served.compared += len(got)


def test_aborted_requests_leave_nothing(served: support.Served) -> None:
    engine = served.llm.llm_engine
    for i in range(6):
        request = support.request([i] * 20, seed=i, max_tokens=90)
        engine.add_request(f"gone-{i}", {"prompt_token_ids": list(request.prompt)}, request.theirs)
    for _ in range(4):
        engine.step()
    engine.abort_request([f"gone-{i}" for i in range(0, 6, 2)])
    for _ in range(4):
        engine.step()
    engine.abort_request([f"gone-{i}" for i in range(1, 6, 2)])
    served.hold(support.mixed(served.setting.model, 5))


def test_sequences_that_reach_the_longest_length(served: support.Served) -> None:
    served.hold(
        [
            support.request([9] * n, seed=n, logprobs=1, max_tokens=500)
            for n in (1, 64, support.MAX_MODEL_LEN - 1)
        ]
    )


def test_the_whole_vocabulary_as_logprobs(served: support.Served) -> None:
    """-1 is vLLM's value for this."""
    request = support.request([3, 1, 4], logprobs=300, max_tokens=3)
    (answer,) = support.generate(
        served.llm, [support.Request(request.prompt, {**request.settings, "logprobs": -1})]
    )
    support.agree([answer], served.oracle.answers([request]))


@pytest.mark.parametrize("v2", [False, True], ids=["v1", "v2"])
def test_routed_experts(v2: bool, tmp_path: Path) -> None:
    """Experts are returned for every position, whether it was chunked, cached or preempted, and
    equal Generator's record."""
    support.need_protocol(v2)
    oracle = support.Oracle("moe", "float32")
    weights = support.weights_of("moe", "float32")
    oracle.serve(weights)
    options = {"enable_return_routed_experts": True, "num_gpu_blocks_override": FEW_BLOCKS}
    with support.engine(tmp_path, "moe", "float32", v2, **options) as llm:
        support.load(llm, weights)
        for requests in (
            support.mixed("moe", 1),
            support.mixed("moe", 1),
            [support.request([i] * 12, max_tokens=80) for i in range(6)],
        ):
            prompts = [list(request.prompt) for request in requests]
            given = llm.generate(
                [{"prompt_token_ids": prompt} for prompt in prompts],
                [r.theirs for r in requests],
                use_tqdm=False,
            )
            wanted = oracle.generator.generate(prompts, [r.ours for r in requests], use_tqdm=False)
            for output, want in zip(given, wanted, strict=True):
                for got, sample in zip(
                    sorted(output.outputs, key=lambda one: one.index), want.outputs, strict=True
                ):
                    assert np.array_equal(got.routed_experts, sample.routed_experts)
    oracle.close()

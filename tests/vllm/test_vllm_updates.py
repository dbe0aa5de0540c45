"""New weights for a running vLLM engine: the version that should serve is bit-identical to
rm.Generator with the same weights.

Input: small models; pushes by vLLM's official calls (through rollmesh.vllm's sender, over shared
memory) and by load_weights. Oracle: rm.Generator. Bound: 0 differing bits. Every scenario ends by
comparing a full set of requests with the version that should serve then: the new version after a
good push, the old version after a bad push."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import vllm_support as support
from helpers import push_entry
from vllm_releases import REFUSE_UNKNOWN_IDS

import rollmesh as rm
from rollmesh import vllm as plugin
from rollmesh.sources import DeltaWriter
from rollmesh.vllm.clients import client_of
from rollmesh.vllm.trainer import AsyncWeightSender, WeightSender

pytest.importorskip("vllm", reason="needs vLLM")
pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

MODEL, DTYPE = "moe", "bfloat16"
LATE = "model.layers.1.mlp.experts.17.down_proj.weight"  # comes when most of the set is staged
ENGINES = {
    "uniproc": {},
    "tp2": {
        "tensor_parallel_size": 2,
        "enable_expert_parallel": True,
        "distributed_executor_backend": "mp",
    },
}


class Served(support.Served):
    """An engine with its trainer's sender; the oracle always has the version that should serve."""

    def __init__(self, llm: Any):
        self.sender = WeightSender(llm)
        super().__init__(SimpleNamespace(model=MODEL, dtype=DTYPE), llm, self.sender.send)

    def weights(self, version: int) -> support.Weights:
        return support.weights_of(MODEL, DTYPE, version)

    def hold(self, requests: list[support.Request] | None = None) -> None:
        """Prompts repeat over versions without a reset of the caches, so that these requests would
        show stale cache contents."""
        super().hold(support.mixed(MODEL, 0) if requests is None else requests)


@pytest.fixture(scope="module", params=ENGINES)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    with support.engine(
        tmp_path_factory.mktemp("vllm"), MODEL, DTYPE, **ENGINES[request.param]
    ) as llm:
        served = Served(llm)
        unsynced = support.ended(llm, support.request([1, 2, 3]))
        assert unsynced[0] == "error"
        assert "NotSyncedError" in unsynced[1]
        served.push()
        try:
            yield served
        finally:
            served.oracle.close()


def test_ten_versions_in_a_row(served: Served) -> None:
    for _ in range(10):
        served.push()
        served.hold()
        assert served.llm.get_weight_version() == str(served.version)


def test_cached_tokens_are_those_of_the_new_weights(served: Served) -> None:
    """num_cached_tokens is 0 if the cached pages are from older weights; they are recomputed."""
    prompt, params = {"prompt_token_ids": list(range(2, 42))}, support.request([2], max_tokens=2)
    seen = []
    for _ in range(2):
        served.push()
        served.hold()
        for _ in range(2):
            [output] = served.llm.generate([prompt], [params.theirs], use_tqdm=False)
            seen.append(output.num_cached_tokens)
    assert seen == [0, 32, 0, 32]  # whole pages of 16 tokens


def test_a_trainer_that_ends_midway(served: Served) -> None:
    """The trainer calls only start_weight_update; then a whole push follows."""
    served.llm.start_weight_update()
    served.hold()
    served.push()
    served.hold()


@pytest.mark.parametrize("level", [2, 3])
def test_sleep_and_reload(served: Served, level: int) -> None:
    """Levels above 2 count as 2, like in vLLM's own workers."""
    served.llm.sleep(1)
    served.llm.wake_up()
    served.hold()
    served.llm.sleep(level)
    served.llm.wake_up(["weights"])
    served.push()
    served.llm.wake_up(["kv_cache"])
    served.hold()


@pytest.mark.parametrize(
    "method, args, options, words",
    [
        ("profile", (), {}, "use perf or py-spy"),
        ("add_lora", (1,), {}, "LoRA adapters are not supported"),
        (
            "load_model",
            (),
            {"load_dummy_weights": True},
            "load_dummy_weights: expected False, got True",
        ),
        ("init_device", (), {}, "call it once"),
        ("update_weights", (), {}, "missing 1 required positional argument"),
        ("sleep", ([],), {}, r"sleep level: expected 1 .*, got \[\]"),
        ("wake_up", ([[]],), {}, r"parts: expected .*, got \[\[\]\]"),
        ("discard", (5,), {}, "parts: expected .*, got 5"),
    ],
)
def test_a_call_that_all_workers_refuse(
    served: Served, method: str, args: tuple[Any, ...], options: dict[str, Any], words: str
) -> None:
    """vLLM's executor reads replies up to the first failure, and would take a second failure for
    the reply to its next call: a set with a missing tensor would appear committed."""
    with pytest.raises(Exception, match=words):
        served.llm.collective_rpc(method, args=args, kwargs=options)
    for _ in range(2):
        with pytest.raises(rm.IncompleteSyncError):
            served.sender.send(dict(list(served.weights(99).items())[:-1]), served.version + 1)
    served.push()
    served.hold()


def test_versions_in_a_folder(served: Served, tmp_path: Path) -> None:
    """vLLM's four calls with transport="folder": the workers read the versions of a DeltaWriter,
    which may be deltas."""
    writer, calls = DeltaWriter(tmp_path), client_of(served.llm, 60.0)

    def update(version: int | None = None) -> None:
        calls.start_weight_update()
        calls.update_weights({} if version is None else {"version": version})
        calls.finish_weight_update(str(served.version))
        served.oracle.serve(served.weights(served.version))

    calls.init_weight_transfer_engine({"transport": "folder", "folder": str(tmp_path)})
    with pytest.raises(Exception, match=r"NotSyncedError: .* expected a whole set, got none yet"):
        update()
    served.hold()
    # A whole set, a delta, and three deltas of which two were skipped by the reader.
    for missed in (0, 0, 2):
        for _ in range(missed + 1):
            served.version += 1
            writer.publish(served.weights(served.version), served.version)
        update(served.version)
        served.hold()
    with pytest.raises(
        Exception,
        match=f"VersionError: version: expected the newest in the folder, {served.version}, got 3",
    ):
        update(3)
    with pytest.raises(Exception, match="VersionError"):
        update()  # it serves already
    served.hold()
    writer.publish(served.weights(served.version + 1), served.version + 1)
    last = max(tmp_path.glob("*.delta"))
    message = bytearray(last.read_bytes())
    message[len(message) // 2] ^= 1
    last.write_bytes(message)
    with pytest.raises(Exception, match=f"FormatError: .*{last.name}"):
        update()
    served.hold()
    served.version += 2
    writer.close()
    DeltaWriter(tmp_path).publish(served.weights(served.version), served.version)
    update()
    served.hold()
    served.sender = WeightSender(served.llm)
    served._put = served.sender.send
    served.push()
    served.hold()


def test_load_weights(served: Served) -> None:
    """Loads one parameter a call, by TRL's path or by collective_rpc's. A set that stops early
    fails the requests that would need it, and the next set starts from the old version."""
    if served.llm.llm_engine.vllm_config.parallel_config.world_size > 1:
        pytest.skip("TRL reaches into a worker of this process")
    served.version += 1
    weights = served.weights(served.version)
    support.load(served.llm, weights)
    served.oracle.serve(weights)
    served.hold()
    part = dict(list(served.weights(97).items())[:-3])
    support.load(served.llm, part)
    finish, why = support.ended(served.llm, support.request([1, 2, 3]))
    assert finish == "error"
    assert "IncompleteSyncError" in why
    served.hold()
    served.push()
    served.hold()


@pytest.mark.parametrize("steps", [1, 6], ids=["in the prompt", "in the answer"])
def test_a_part_of_a_set_while_requests_run(
    served: Served, steps: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The requests end with the error, including those of a step that was scheduled meanwhile;
    their pages are not cached. The log has the error once."""
    if served.llm.llm_engine.vllm_config.parallel_config.world_size > 1:
        pytest.skip("TRL reaches into a worker of this process")
    engine, running, ends = served.llm.llm_engine, long_requests(), {}
    running.append(support.request([77] * 110, max_tokens=9))
    for i, request in enumerate(running):
        engine.add_request(
            f"{9000 + 10 * steps + i}", {"prompt_token_ids": list(request.prompt)}, request.theirs
        )
    for _ in range(steps):
        engine.step()
    support.load(served.llm, dict(list(served.weights(96).items())[:-3]))
    while engine.has_unfinished_requests():
        ends |= {
            output.request_id: output.outputs[0] for output in engine.step() if output.finished
        }
    assert len(ends) == len(running)
    failed = [end for end in ends.values() if end.finish_reason == "error"]
    # Requests that have not begun continue, with the version before.
    assert len(failed) >= (1 if steps == 1 else len(running))
    assert all("IncompleteSyncError" in str(end.stop_reason) for end in failed)
    [line] = [record.getMessage() for record in caplog.records if record.name == "vllm.rollmesh"]
    assert line.startswith(
        "the weights that load_weights was given are dropped: IncompleteSyncError: "
    )
    support.agree(support.generate(served.llm, running), served.oracle.answers(running))
    served.hold()


def test_ids_that_are_none(served: Served) -> None:
    """Requests that share pages with such a request are not affected, whether vLLM checks the ids
    or the engine ends the request."""
    stem = [9] * 48
    good = support.request([*stem, 3, 4], max_tokens=5)
    bad = [support.request([*stem, far], max_tokens=5) for far in (5000, 2**40)]
    for request in bad:
        if plugin.installed_version() in REFUSE_UNKNOWN_IDS:
            from vllm.exceptions import VLLMValidationError

            with pytest.raises(VLLMValidationError, match=r"Token id .* is out of vocabulary"):
                served.llm.generate(
                    {"prompt_token_ids": list(request.prompt)}, request.theirs, use_tqdm=False
                )
            support.agree(support.generate(served.llm, [good]), served.oracle.answers([good]))
            continue
        outputs = served.llm.generate(
            [{"prompt_token_ids": list(each.prompt)} for each in (request, good)],
            [request.theirs, good.theirs],
            use_tqdm=False,
        )
        assert outputs[0].outputs[0].finish_reason == "error"
        assert "token id" in str(outputs[0].outputs[0].stop_reason)
        support.agree([support.vllm_answers(outputs[1])], served.oracle.answers([good]))
        assert served.llm.reset_prefix_cache()


def test_a_row_that_is_not_finite(served: Served) -> None:
    """The request with the row ends alone, also beside requests whose logits the host edits: each
    of the others has the same answer as without it."""
    if served.llm.llm_engine.vllm_config.parallel_config.world_size > 1:
        pytest.skip("the weights go past vLLM into a worker of this process")
    poisoned = dict(served.weights(served.version))
    poisoned["model.embed_tokens.weight"] = poisoned["model.embed_tokens.weight"].copy()
    poisoned["model.embed_tokens.weight"][299] = np.nan
    served.version += 1
    engine = support.worker_of(
        served.llm
    ).runner.engine  # vLLM has no call that accepts such weights
    engine.sync_begin(served.version, allow_nonfinite=True)
    for name, tensor in poisoned.items():
        push_entry(engine, name, tensor)
    engine.sync_commit("keep")
    bad, *good = [
        support.request([5, first, 7], logit_bias={299: -100.0}, seed=first)
        for first in (299, 31, 32)
    ]
    alone = [support.generate(served.llm, [request])[0] for request in good]
    outputs = served.llm.generate(
        [{"prompt_token_ids": list(request.prompt)} for request in (bad, *good)],
        [request.theirs for request in (bad, *good)],
        use_tqdm=False,
    )
    assert outputs[0].outputs[0].finish_reason == "error"
    assert "NumericsError" in str(outputs[0].outputs[0].stop_reason)
    support.agree([support.vllm_answers(output) for output in outputs[1:]], alone)
    served.push()
    served.hold()


# -------------------------------------------------------------------- in the middle of generation
def long_requests() -> list[support.Request]:
    return [
        support.request(
            [50 + i] * (4 + 9 * i), seed=i, temperature=[1.0, 0.0][i % 2], logprobs=2, max_tokens=60
        )
        for i in range(4)
    ]


class Running:
    """Running requests of an AsyncLLM, and their output so far."""

    def __init__(self, llm: Any, requests: list[support.Request], name: str):
        self.requests, self.answers = (
            requests,
            [support.Answer(0, [], (None, None), []) for _ in requests],
        )
        self.tasks = [
            asyncio.create_task(self._follow(llm, i, r, f"{name}-{i}"))
            for i, r in enumerate(requests)
        ]

    async def _follow(self, llm: Any, i: int, request: support.Request, name: str) -> None:
        async for output in llm.generate(
            {"prompt_token_ids": list(request.prompt)}, request.theirs, name
        ):
            (self.answers[i],) = support.vllm_answers(output)

    async def until(self, tokens: int) -> None:
        while min(len(answer.tokens) for answer in self.answers) < tokens:
            assert not all(task.done() for task in self.tasks)
            await asyncio.sleep(0.001)


async def keep(
    llm: Any, push: Callable[[], Any], oracle: support.Oracle, clear_cache: bool, name: str
) -> int:
    """Pauses, pushes and resumes: each request continues as if its text so far had been a prompt of
    the new version. Returns the number of requests that did."""
    before = oracle.answers(long_requests())
    running = Running(llm, long_requests(), name)
    await running.until(6)
    await llm.pause_generation(mode="keep", clear_cache=clear_cache)
    held = [len(answer.tokens) for answer in running.answers]
    await push()
    await llm.resume_generation()
    await asyncio.gather(*running.tasks)
    for i, request in enumerate(running.requests):
        got, (first,) = running.answers[i], before[i]
        # Some tokens, on a slow machine all, may have been drawn but not returned yet.
        end, n = (held[i], len(first.tokens))
        while (
            end < n
            and got.tokens[end] == first.tokens[end]
            and got.positions[end] == first.positions[end]
        ):
            end += 1
        wanted = [
            first if cut == n else support.continued(oracle, request, first, cut)
            for cut in range(max(held[i], end - 2), end + 1)
        ]
        assert got in wanted, (
            f"request {i}: {got} is not {first} up to a cut between {held[i]} and {end}, and the "
            "new version's from there"
        )
    return sum(
        got.tokens != first.tokens for got, (first,) in zip(running.answers, before, strict=True)
    )


async def ended_by_pause(llm: Any, oracle: support.Oracle, mode: str, name: str) -> None:
    """abort: the output is the beginning of the answer; wait: the output is the whole answer."""
    want = oracle.answers(long_requests())
    running = Running(llm, long_requests(), name)
    await running.until(6)
    await llm.pause_generation(mode=mode)
    await asyncio.gather(*running.tasks)
    await llm.resume_generation()
    for got, (whole,) in zip(running.answers, want, strict=True):
        # On a slow machine the pause may come after the end.
        ends = {whole.end} | ({("abort", None)} if mode == "abort" else set())
        assert got.end in ends
        assert got.tokens == whole.tokens[: len(got.tokens)]
        assert got.positions == whole.positions[: len(got.positions)]


async def refused_streams(llm: Any) -> None:
    """Input that comes in parts ends at its first part, however the parts come; other requests are
    not affected."""
    from vllm import SamplingParams
    from vllm.engine.protocol import StreamingInput

    async def parts(delay: float) -> AsyncIterator[Any]:
        for i in range(3):
            yield StreamingInput(
                prompt={"prompt_token_ids": [1, 2, i]},
                sampling_params=SamplingParams(max_tokens=2, detokenize=False),
            )
            await asyncio.sleep(delay)

    for delay in (0.0, 0.05):
        params = SamplingParams(max_tokens=2, detokenize=False)
        outputs = [output async for output in llm.generate(parts(delay), params, f"stream-{delay}")]
        assert outputs[-1].outputs[0].finish_reason == "error"
        assert "streaming input" in outputs[-1].outputs[0].stop_reason


@pytest.mark.parametrize(
    "mesh",
    [{}, {"tensor_parallel_size": 2, "data_parallel_size": 2, "enable_expert_parallel": True}],
    ids=["one", "dp2-tp2"],
)
def test_a_push_during_generation(mesh: dict[str, Any], tmp_path: Path) -> None:
    oracle = support.Oracle(MODEL, DTYPE)

    async def run() -> None:
        async with support.async_engine(tmp_path, MODEL, DTYPE, **mesh) as llm:
            sender = AsyncWeightSender(llm)

            async def push(version: int) -> None:
                weights = support.weights_of(MODEL, DTYPE, version)
                await sender.send(weights, version)
                oracle.serve(weights)

            async def hold(name: str) -> None:
                requests = support.mixed(MODEL, 0)
                support.agree(
                    await support.async_generate(llm, requests, name), oracle.answers(requests)
                )

            await push(1)
            await hold("first")
            cut = 0
            for version in (2, 3):
                cut += await keep(
                    llm,
                    lambda version=version: push(version),
                    oracle,
                    version % 2 == 0,
                    f"kept-{version}",
                )
                await hold(f"after-{version}")
            assert cut > 0, "every request was over before its pause: nothing was shown"
            for mode in ("abort", "wait"):
                await ended_by_pause(llm, oracle, mode, mode)
                await hold(f"after-{mode}")
            bad = dict(support.weights_of(MODEL, DTYPE, 9))
            bad[LATE] = bad[LATE].copy()
            bad[LATE][-1, 3] = np.nan
            with pytest.raises(Exception, match="NonFiniteError"):
                await sender.send(bad, 6)
            await hold("after-bad")
            await push(7)
            await hold("last")
            await refused_streams(llm)
            await hold("after-streams")

    try:
        asyncio.run(asyncio.wait_for(run(), 400))
    finally:
        oracle.close()

"""agenerate and astream: the results are bit-identical to those of generate; cancellation, errors,
pauses, syncs and a close reach the coroutines."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest
from helpers import SMALL, numpy_state_dict, prompts, tiny_config
from paths import child_environment
from test_generator import make, same, word_tokenizer

import rollmesh as rm

STATES = [numpy_state_dict(tiny_config(), seed=seed) for seed in (0, 1)]
LONG = rm.SamplingParams(max_tokens=16000, ignore_eos=True, seed=3)  # a second and more


@pytest.fixture
def gen() -> Iterator[rm.Generator]:
    with make(max_model_len=16384, kv_cache_gib=0.06) as generator:
        generator.sync_weights(STATES[0], version=1)
        yield generator


async def begun(gen: rm.Generator, at_least: int = 1) -> None:
    """Waits until the given number of requests run."""
    while gen.metrics()["running"] < at_least:
        await asyncio.sleep(0.001)


def idle(gen: rm.Generator) -> bool:
    """Returns whether the engine becomes empty soon."""
    deadline = time.monotonic() + 20
    while (live := gen._loop.call(gen._engine.ids)) and time.monotonic() < deadline:
        time.sleep(0.005)
    return not live


def test_many_coroutines_get_the_bits_of_generate(gen: rm.Generator) -> None:
    ids = prompts(tiny_config(), range(1, 13))
    params = [
        rm.SamplingParams(n=1 + i % 3, max_tokens=5 + i, seed=i, logprobs=2) for i in range(12)
    ]

    async def all_at_once() -> list[rm.RequestOutput]:
        return await asyncio.gather(*map(gen.agenerate, ids, params))

    expected = gen.generate(ids, params, use_tqdm=False)
    for got, want in zip(asyncio.run(all_at_once()), expected, strict=True):
        assert got.finished
        assert got.prompt_token_ids.tolist() == want.prompt_token_ids.tolist()
        assert all(same(a, b) for a, b in zip(got.outputs, want.outputs, strict=True))
    assert idle(gen)


def test_a_stream_gives_every_prefix_in_order_and_then_the_whole(gen: rm.Generator) -> None:
    params = rm.SamplingParams(n=2, max_tokens=90, ignore_eos=True, seed=5)
    [want] = gen.generate([1, 2, 3], params, use_tqdm=False)

    async def read() -> list[rm.RequestOutput]:
        return [output async for output in gen.astream([1, 2, 3], params)]

    outputs = asyncio.run(read())
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert len(outputs) > 1  # a slow reader misses some
    before = [0, 0]
    for output in outputs:
        lengths = [len(sample.token_ids) for sample in output.outputs]
        assert lengths > before or output.finished
        for sample, whole in zip(output.outputs, want.outputs, strict=True):
            n = len(sample.token_ids)
            assert sample.token_ids.tolist() == whole.token_ids[:n].tolist()
            assert sample.logprobs.tobytes() == whole.logprobs[:n].tobytes()
        before = lengths
    assert all(same(a, b) for a, b in zip(outputs[-1].outputs, want.outputs, strict=True))


def test_a_stream_ends_with_the_routing() -> None:
    """The routing is the largest record, so only the last output of a request copies it."""
    config = tiny_config(moe=True)
    params = rm.SamplingParams(n=2, max_tokens=9, ignore_eos=True, seed=5)
    with rm.Generator(rm.ModelSpec.from_hf(config), dtype="float32", **SMALL) as moe:
        moe.sync_weights(numpy_state_dict(config, 0, "float32", False))
        [want] = moe.generate([1, 2, 3], params, use_tqdm=False)

        async def read() -> list[rm.RequestOutput]:
            return [output async for output in moe.astream([1, 2, 3], params)]

        running: list[rm.RequestOutput] = []
        while not running:  # a slow reader sees the last output alone
            *running, last = asyncio.run(read())
    assert all(sample.routed_experts is None for output in running for sample in output.outputs)
    assert all(same(a, b) for a, b in zip(last.outputs, want.outputs, strict=True))
    for a, b in zip(last.outputs, want.outputs, strict=True):
        assert a.routed_experts is not None
        assert b.routed_experts is not None
        assert a.routed_experts.tobytes() == b.routed_experts.tobytes()


@pytest.mark.parametrize("how", ["cancel", "aclose", "timeout"])
def test_who_no_longer_waits_aborts_the_request(gen: rm.Generator, how: str) -> None:
    async def leave() -> None:
        if how == "aclose":
            async with aclosing(gen.astream([1, 2], LONG)) as stream:
                async for _ in stream:
                    break
            await quiet()
            return
        task = asyncio.create_task(gen.agenerate([1, 2], LONG))
        other = asyncio.create_task(gen.agenerate([3], rm.SamplingParams(max_tokens=4)))
        if how == "timeout":
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(task, 0.05)
        else:
            await begun(gen)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert len((await other).outputs[0].token_ids) <= 4
        await quiet()

    # Waits while the loop still runs, because closing a loop drops its requests too.
    async def quiet() -> None:
        while (now := gen.metrics())["running"] + now["waiting"] > 0:
            await asyncio.sleep(0.001)
        assert now["generated_tokens"] < 10000

    asyncio.run(leave())
    assert idle(gen)


def test_a_loop_that_is_gone_keeps_nothing_running(gen: rm.Generator) -> None:
    """The loop was closed without cancelling its tasks."""
    loop = asyncio.new_event_loop()
    tasks = [
        loop.create_task(gen.agenerate([1], LONG)),
        loop.create_task(anext(gen.astream([2], LONG))),
    ]
    loop.run_until_complete(asyncio.sleep(0.02))
    loop.close()
    assert idle(gen)
    assert gen.metrics()["generated_tokens"] < 20000
    for task in tasks:
        task._log_destroy_pending = False  # type: ignore[attr-defined]
    [output] = gen.generate([[1]], rm.SamplingParams(max_tokens=2), use_tqdm=False)
    assert output.finished


@pytest.mark.parametrize(
    "prompt, params, error",
    [
        ([1, 10**6], None, rm.RequestError),
        ([], None, rm.RequestError),
        (["a", "b"], None, rm.RequestError),
        ([[1, 2], [3]], None, rm.RequestError),
        ("text", None, rm.RequestError),
        (b"12", None, rm.RequestError),
        ([1], rm.SamplingParams(stop=("x",)), rm.RequestError),
        ([1], "greedy", rm.RequestError),
        (list(range(60)) * 300, None, rm.Error),  # longer than max_model_len
    ],
)
def test_what_is_refused_raises_and_others_go_on(
    gen: rm.Generator, prompt: Any, params: Any, error: type[Exception]
) -> None:
    async def both() -> list[Any]:
        return await asyncio.gather(
            gen.agenerate([1, 2], rm.SamplingParams(max_tokens=8)),
            gen.agenerate(prompt, params),
            return_exceptions=True,
        )

    good, bad = asyncio.run(both())
    assert good.finished
    assert isinstance(bad, error)
    assert idle(gen)


def test_before_the_first_sync(gen: rm.Generator) -> None:
    del gen
    with make() as generator, pytest.raises(rm.NotSyncedError):
        asyncio.run(generator.agenerate([1]))


def test_a_tokenizer_that_raises(gen: rm.Generator) -> None:
    class Broken:
        def __init__(self) -> None:
            self.real, self.fails = word_tokenizer(), False

        def __getattr__(self, name: str) -> Any:
            return getattr(self.real, name)

        def decode(self, ids: Any, **options: Any) -> str:
            if self.fails:
                raise KeyError("no such piece")
            return self.real.decode(ids, **options)

    del gen
    broken = Broken()
    with make(tokenizer=broken) as generator:
        generator.sync_weights(STATES[0])
        broken.fails = True
        with pytest.raises(KeyError, match="no such piece"):
            asyncio.run(
                generator.agenerate([1, 2], rm.SamplingParams(max_tokens=3, ignore_eos=True))
            )
        broken.fails = False
        assert (
            asyncio.run(
                generator.agenerate([1, 2], rm.SamplingParams(max_tokens=3, ignore_eos=True))
            )
            .outputs[0]
            .text
        )
        assert idle(generator)


@pytest.mark.parametrize("kind", [KeyError, SystemExit, StopIteration, StopAsyncIteration])
@pytest.mark.parametrize("where", ["encode", "decode", "stop"])
def test_a_tokenizer_that_raises_ends_its_own_request_only(
    where: str, kind: type[BaseException]
) -> None:
    """By PEP 479, an exception that would end a coroutine like a return becomes a RuntimeError."""

    class Broken:
        def __init__(self) -> None:
            self.real, self.fails, self.bad = word_tokenizer(), False, -1

        def __getattr__(self, name: str) -> Any:
            return getattr(self.real, name)

        def encode(self, text: str, **options: Any) -> Any:
            if where == "encode":
                raise kind("piece")
            return self.real.encode(text, **options)

        def decode(self, ids: Any, **options: Any) -> str:
            if self.fails and self.bad in ids:
                raise kind("piece")
            return self.real.decode(ids, **options)

    broken = Broken()
    with make(tokenizer=broken) as generator:
        generator.sync_weights(STATES[0])

        def drawn(prompt: list[int], seed: int) -> rm.CompletionOutput:
            params = rm.SamplingParams(max_tokens=8, ignore_eos=True, seed=seed)
            return generator.generate([prompt], params, use_tqdm=False)[0].outputs[0]

        wanted = drawn([1], 0)
        spoilt, broken.bad = next(
            (seed, token)
            for seed in range(1, 100)
            for token in drawn([2], seed).token_ids[:4].tolist()
            if token not in wanted.token_ids
        )
        plain = rm.SamplingParams(max_tokens=8, ignore_eos=True, seed=0)
        stop = ("no such text",) if where == "stop" else ()
        spoiled = rm.SamplingParams(max_tokens=8, ignore_eos=True, seed=spoilt, stop=stop)
        broken.fails = where != "encode"

        async def both() -> list[Any]:
            tasks = [
                generator.agenerate([1], plain),
                generator.agenerate("a" if where == "encode" else [2], spoiled),
            ]
            return await asyncio.wait_for(asyncio.gather(*map(caught, tasks)), 30)

        good, bad = asyncio.run(both())
        if issubclass(kind, (StopIteration, StopAsyncIteration)):
            assert isinstance(bad, RuntimeError)
            bad = bad.__cause__
        assert isinstance(bad, kind)
        assert same(good.outputs[0], wanted)
        broken.fails = False
        assert idle(generator)


async def caught(awaitable: Any) -> Any:
    """Returns the result, or the exception; a SystemExit would end the loop."""
    try:
        return await awaitable
    except BaseException as error:  # noqa: BLE001
        return error


def test_requests_of_two_event_loops_and_a_thread_share_the_steps(gen: rm.Generator) -> None:
    got: dict[str, Any] = {}

    async def several(seed: int) -> list[rm.RequestOutput]:
        params = rm.SamplingParams(max_tokens=30, ignore_eos=True, seed=seed)
        return await asyncio.gather(*(gen.agenerate([seed, i], params) for i in range(1, 5)))

    def loop(name: str, seed: int) -> None:
        got[name] = asyncio.run(several(seed))

    threads = [threading.Thread(target=loop, args=(f"{seed}", seed)) for seed in (7, 8)]
    for thread in threads:
        thread.start()
    ours = gen.generate(
        [[9, 1]], rm.SamplingParams(max_tokens=30, ignore_eos=True, seed=9), use_tqdm=False
    )
    for thread in threads:
        thread.join()
    for seed in (7, 8):
        params = rm.SamplingParams(max_tokens=30, ignore_eos=True, seed=seed)
        want = gen.generate([[seed, i] for i in range(1, 5)], params, use_tqdm=False)
        assert all(
            same(a.outputs[0], b.outputs[0]) for a, b in zip(got[f"{seed}"], want, strict=True)
        )
    assert len(ours[0].outputs[0].token_ids) == 30


def test_a_sync_in_mid_flight(gen: rm.Generator) -> None:
    """Drawn tokens stay, and each token has its version. A coroutine pushes without blocking the
    loop."""

    async def run() -> rm.RequestOutput:
        stream, output = (
            gen.astream([1, 2, 3], rm.SamplingParams(max_tokens=400, ignore_eos=True, seed=3)),
            None,
        )
        async for output in stream:
            if len(output.outputs[0].token_ids) >= 5 and gen.version == 1:
                await asyncio.to_thread(gen.sync_weights, STATES[1], version=2, inflight="keep")
        assert output is not None
        return output

    versions = asyncio.run(run()).outputs[0].versions.tolist()
    assert versions == sorted(versions)
    assert set(versions) == {1, 2}


def test_a_pause_keeps_coroutines_waiting_and_an_abort_ends_them(gen: rm.Generator) -> None:
    async def run() -> tuple[Any, Any]:
        gen.pause("keep")
        first = asyncio.create_task(gen.agenerate([1], rm.SamplingParams(max_tokens=4, seed=1)))
        await asyncio.sleep(0.1)
        assert not first.done()
        gen.resume()
        finished = await first
        second = asyncio.create_task(gen.agenerate([1], LONG))
        await begun(gen)
        gen.abort()
        return finished, await second

    finished, aborted = asyncio.run(run())
    assert finished.outputs[0].finish_reason in ("length", "stop")
    assert aborted.outputs[0].finish_reason == "abort"


def test_sleep_and_wake(gen: rm.Generator) -> None:
    async def run() -> rm.RequestOutput:
        gen.sleep("kv")
        task = asyncio.create_task(gen.agenerate([4, 5], rm.SamplingParams(max_tokens=6, seed=2)))
        await asyncio.sleep(0.1)
        assert not task.done()
        gen.wake("kv")
        return await task

    got = asyncio.run(run())
    assert same(
        got.outputs[0],
        gen.generate([[4, 5]], rm.SamplingParams(max_tokens=6, seed=2), use_tqdm=False)[0].outputs[
            0
        ],
    )


def test_a_close_ends_all_with_a_state_error() -> None:
    async def run() -> list[Any]:
        gen = make(max_model_len=16384, kv_cache_gib=0.06)
        gen.sync_weights(STATES[0])
        tasks = [asyncio.create_task(gen.agenerate([1], LONG)) for _ in range(3)]
        await begun(gen, 3)
        gen.close()
        results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 20)
        with pytest.raises(rm.StateError, match="closed"):
            await gen.agenerate([1])
        return results

    for result in asyncio.run(run()):
        assert isinstance(result, rm.StateError)
    assert all(thread.name != "rollmesh-engine" for thread in threading.enumerate())


def test_a_sync_that_is_pushed_in_pieces_while_paused_is_left_alone(gen: rm.Generator) -> None:
    async def run() -> rm.RequestOutput:
        task = asyncio.create_task(
            gen.agenerate([1], rm.SamplingParams(max_tokens=3000, ignore_eos=True, seed=4))
        )
        await begun(gen)
        gen.pause("keep")
        sync = gen.begin_sync(version=2, inflight="keep")
        for i, (name, tensor) in enumerate(STATES[1].items()):
            sync.push(name, tensor)
            if i == 3:
                await asyncio.sleep(0.1)
        sync.commit()
        gen.resume()
        return await task

    assert set(asyncio.run(run()).outputs[0].versions.tolist()) == {1, 2}


def test_inside_another_call_of_its_thread_it_is_refused(gen: rm.Generator) -> None:
    def weights() -> Iterator[tuple[str, Any]]:
        with pytest.raises(rm.StateError, match="from inside one of its own calls"):
            asyncio.run(asyncio.wait_for(gen.agenerate([1]), 5))
        yield from STATES[1].items()

    assert gen.sync_weights(weights(), version=2).version == 2


def test_weights_that_sleep_refuse_requests(gen: rm.Generator) -> None:
    gen.sleep("weights")
    with pytest.raises(rm.StateError, match="weights: expected awake"):
        asyncio.run(gen.agenerate([1]))
    assert idle(gen)


def test_a_prompt_is_read_when_it_is_given(gen: rm.Generator) -> None:
    async def run() -> list[list[int]]:
        buffer, tasks = np.zeros(3, np.int32), []
        for token in (1, 2, 3):
            buffer[:] = token
            tasks.append(
                asyncio.create_task(gen.agenerate(buffer, rm.SamplingParams(max_tokens=1)))
            )
            await asyncio.sleep(0)
        return [(await task).prompt_token_ids.tolist() for task in tasks]

    assert asyncio.run(run()) == [[1, 1, 1], [2, 2, 2], [3, 3, 3]]


EXIT = """
import asyncio
from test_async import LONG, STATES, make
gen = make(max_model_len=16384, kv_cache_gib=0.06)
gen.sync_weights(STATES[0])
gen.pause("keep")
loop = asyncio.new_event_loop()
task = loop.create_task(gen.agenerate([1], LONG))
loop.run_until_complete(asyncio.sleep(0.05))
"""


def test_an_interpreter_exits_with_requests_that_nobody_reads() -> None:
    subprocess.run(
        [sys.executable, "-c", EXIT],
        check=True,
        timeout=60,
        env=child_environment(),
        capture_output=True,
    )

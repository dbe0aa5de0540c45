"""Scenarios for the server of mesh_ranks.py: rank 0 makes the calls and the others follow.
test_follow.py has the expected results."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from typing import Any

import numpy as np
from mesh_calls import Letters, params, told
from mesh_ranks import ENDLESS, PROMPTS, SAMPLED, Rank, answers, weights

import rollmesh as rm


async def of_an_event_loop(generator: rm.Generator) -> list[Any]:
    """Several requests at once: one is cancelled, one has a stop string, one is streamed."""
    waiting = [
        asyncio.ensure_future(generator.agenerate(PROMPTS[i % 6], params(i, 3 + 5 * i)))
        for i in range(5)
    ]
    endless = asyncio.ensure_future(generator.agenerate([7], ENDLESS))
    stopped = await generator.agenerate(
        "fad", rm.SamplingParams(max_tokens=30, seed=4, stop=["dd"], ignore_eos=True)
    )
    endless.cancel()
    outputs = [stopped, *await asyncio.gather(*waiting)]
    *_, last = [output async for output in generator.astream(PROMPTS[3], params(9, 7))]
    # Without the ids, whose order depends on the threads.
    return [told(output)[1:] for output in [*outputs, last]]


def every_call(rank: Rank) -> Any:
    """Returns the results of all kinds of calls on rank 0, and whether a rank that has followed is
    closed."""
    with rank.make(tokenizer=Letters(), max_model_len=4096, kv_cache_gib=0.05) as generator:
        generator.follow(lambda version: rank.source(0.75 if version == 2 else 1.0))
        if rank.rank > 0:
            return generator._loop.is_closed
        out: list[Any] = [
            generator.sync_weights(rank.source(), cast=True).digest,
            answers(generator),
        ]
        ids = generator.submit(PROMPTS, [params(i, 9 + i) for i in range(6)])
        first = generator.poll(min_outputs=2)
        out.append(
            generator.sync_weights(
                rank.source(0.75), 2, cast=True, inflight=rank.job["inflight"]
            ).digest
        )
        out.append(
            sorted(told(output) for output in [*first, *generator.poll(min_outputs=len(ids))])
        )
        try:
            generator.generate([[1], [999]], SAMPLED, use_tqdm=False)
        except rm.RequestError as error:
            out.append(str(error))
        generator.submit(PROMPTS[0], ENDLESS)
        generator.pause("keep")
        generator.resume()
        generator.abort()
        out.append([output.outputs[0].finish_reason for output in generator.poll(min_outputs=1)])
        generator.submit(PROMPTS, params(2, 4))
        generator.pause("wait")
        generator.resume()
        out.append(sorted(told(output) for output in generator.poll(min_outputs=6)))
        late = generator.generate(PROMPTS, ENDLESS, use_tqdm=False, on_error="return", timeout=0.01)
        out.append([type(output.error).__name__ for output in late])
        generator.reset_prefix_cache()
        generator.sleep("kv")
        generator.wake("kv")
        out.append(answers(generator))
        # Last, because the replicas of later requests depend on the order of these.
        out.append(asyncio.run(of_an_event_loop(generator)))
        return out


def refused(rank: Rank) -> Any:
    """Rank 0 returns the refusals, and whether the next call succeeds. Another rank returns the
    error of a call that it makes while it follows."""
    own: list[str] = []
    with rank.make() as generator:
        if rank.rank > 0:
            try:
                asyncio.run(generator.agenerate([1]))
            except rm.StateError as error:
                own.append(str(error))

        def meddle() -> None:
            for call in (
                lambda: generator.submit([[1]]),
                lambda: generator.sync_weights(rank.source()),
                generator.close,
                generator.follow,
            ):
                try:
                    call()
                except rm.StateError as error:
                    own.append(str(error))

        def source(version: int | None) -> Any:
            if version == 5:
                thread = threading.Thread(target=meddle)
                thread.start()
                time.sleep(0.2)  # its calls wait for the lock
                threading.Thread(target=thread.join).start()
                raise FileNotFoundError("no such shard")
            return rank.source()

        generator.follow(source)
        if rank.rank > 0:
            return own
        generator.follow()
        for call in (
            lambda: generator.sync_weights(rank.source(), 5, cast=True),
            lambda: generator.sync_weights(
                {"model.norm.weight": np.ones(96, np.float32)}, cast=True
            ),
            lambda: generator.begin_sync(),
            lambda: generator.sleep("all"),
        ):
            try:
                call()
            except rm.Error as error:
                own.append(f"{type(error).__name__}: {error}")
        generator.sync_weights(rank.source(), 6, cast=True)
        return [own, answers(generator)]


def endless(rank: Rank) -> Any:
    """Rank 0's iterator of weights, or the victim's, does not end; then the next set is
    accepted."""
    without_end = repeat(("model.norm.weight", np.ones(96, np.float32)))
    with rank.make() as generator:
        generator.follow(
            lambda version: without_end if version == 1 and rank.victim else rank.source()
        )
        if rank.rank > 0:
            return None
        try:
            generator.sync_weights(without_end if rank.victim else rank.source(), 1, cast=True)
        except rm.Error as error:
            return [
                f"{type(error).__name__}: {error}",
                generator.sync_weights(weights(rank.job["model"]), 2, cast=True).version,
            ]


def idle(rank: Rank) -> Any:
    """Rank 0 makes no call for several timeouts of the comm."""
    with rank.make() as generator:
        if rank.rank > 0 or rank.job.get("follow", True):
            generator.follow()
        if rank.rank > 0:
            return None
        generator.sync_weights(weights(rank.job["model"]), cast=True)
        time.sleep(rank.job["silent"])
        return answers(generator)


def handled(rank: Rank) -> Any:
    """A signal handler makes calls while its rank waits for the next call of rank 0."""
    own: list[str] = []
    with rank.make() as generator:

        def handler(*_: Any) -> None:
            if generator._loop.is_inside:
                signal.setitimer(signal.ITIMER_REAL, 0.05)
                return
            for call in (
                lambda: generator.submit([[1]]),
                lambda: generator.sleep("kv"),
                generator.begin_sync,
                generator.close,
            ):
                try:
                    call()
                except rm.StateError as error:
                    own.append(str(error))

        def source(version: int | None) -> Any:
            signal.signal(signal.SIGALRM, handler)
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            return rank.source()

        generator.follow(source)
        if rank.rank > 0:
            return own
        generator.sync_weights(rank.source(), cast=True)
        time.sleep(1.0)
        return answers(generator)


def ended(rank: Rank) -> Any:
    """A thread follows, rank 0 is lost, another thread closes."""
    generator = rank.make()
    with ThreadPoolExecutor() as pool:
        pool.submit(generator.follow).exception()
    if rank.victim:
        rank.end_itself()
    generator.close()
    return generator._loop.is_closed


def words(rank: Rank) -> Any:
    """Submits texts of a subclass of str, like the elements of an array or a table column."""
    text = {"str": str, "str_": np.str_}[rank.job["text"]]
    with rank.make(tokenizer=Letters()) as generator:
        generator.follow()
        if rank.rank > 0:
            return None
        generator.sync_weights(
            weights(rank.job["model"]), cast=True, mode=text("staged"), inflight=text("keep")
        )
        return [
            told(output)
            for output in generator.generate(
                [text("fad")], params(4, 30, stop=[text("dd")]), use_tqdm=False
            )
        ]


class Slow(Letters):
    def encode(self, text: str) -> list[int]:
        time.sleep(0.5)
        return super().encode(text)


def busy(rank: Rank) -> Any:
    """Rank 0 spends several timeouts of the comm in one call before its first step."""
    with rank.make(tokenizer=Slow()) as generator:
        generator.follow()
        if rank.rank > 0:
            return None
        generator.sync_weights(weights(rank.job["model"]), cast=True)
        return [
            told(output) for output in generator.generate(["fad"] * 6, params(1, 3), use_tqdm=False)
        ]


def dropped(rank: Rank) -> Any:
    """Rank 0 drops its generator, and lives on. Another rank returns its error."""
    generator, rank.generator = rank.make(), None
    told = None
    try:
        generator.follow()
    except rm.Error as error:
        told = [type(error).__name__, str(error)]
    del generator
    if rank.victim:
        os.read(rank.job["release"], 1)
    return told


def lost(rank: Rank) -> Any:
    """The victim exits, or is interrupted, while rank 0 generates."""
    if rank.job["signal"] == signal.SIGINT:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    with rank.make(max_model_len=4096, kv_cache_gib=0.05) as generator:
        rank.after(7, "step")
        told = ["closed"]
        try:
            generator.follow()
            if rank.rank > 0:
                return told
            generator.sync_weights(weights(rank.job["model"]), cast=True)
            if rank.job["how"] == "agenerate":
                asyncio.run(generator.agenerate(PROMPTS[1], ENDLESS))
            else:
                generator.generate(PROMPTS, ENDLESS, use_tqdm=False)
        except (rm.Error, KeyboardInterrupt) as error:
            told = [type(error).__name__, str(error)]
    if rank.victim:
        os.read(rank.job["release"], 1)  # the others are told by it, not by its end
    return told


def interrupted(rank: Rank) -> Any:
    """A Ctrl-C on rank 0 between the message of a call and the call. Returns the next error of each
    rank."""
    with rank.make() as generator:
        try:
            generator.follow()
            if rank.rank > 0:
                return None
            generator.sync_weights(weights(rank.job["model"]), cast=True)
            leader: Any = generator._engine
            send = leader._send

            def interrupt(*operations: Any) -> None:
                send(*operations)
                leader._send = send
                raise KeyboardInterrupt

            leader._send = interrupt
            try:
                if rank.job["how"] == "sync":
                    generator.sync_weights(weights(rank.job["model"]), cast=True)
                else:
                    generator.submit([7])
                    generator.pause("wait")
            except KeyboardInterrupt:
                generator.generate([7], use_tqdm=False)
        except rm.Error as error:
            return type(error).__name__


def unready(rank: Rank) -> Any:
    """Follows while a set is open. Returns the errors of a source that is none and of a push."""
    told: list[str] = []
    with rank.make() as generator:
        try:
            generator.follow(3)  # type: ignore[arg-type]
        except rm.ConfigError as error:
            told.append(str(error))
        sync = generator.begin_sync(cast=True)
        generator.follow()
        if rank.rank > 0:
            return told
        try:
            sync.push("model.norm.weight", np.ones(96, np.float32))
        except rm.StateError as error:
            told.append(str(error))
        generator.sync_weights(weights(rank.job["model"]), cast=True)
        return [[*told, sync.closed], answers(generator)]


def unlike(rank: Rank) -> Any:
    """One rank does not follow."""
    generator = rank.make()
    try:
        if rank.victim:
            generator.sync_weights(weights(rank.job["model"]), cast=True)
        else:
            generator.follow()
    except rm.Error as error:
        return [type(error).__name__, str(error)]

"""Scenarios for the server of mesh_ranks.py: rank 0 makes the calls and the others follow. test_follow.py says what has to come out."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from typing import Any

import numpy as np
from mesh_calls import Letters, params, told
from mesh_ranks import ENDLESS, PROMPTS, SAMPLED, Rank, answers, weights

import rollmesh as rm


async def of_an_event_loop(generator: rm.Generator) -> list[Any]:
    """Some requests at once, one that is cancelled, one with a stop string, one that is read as it comes."""
    waiting = [asyncio.ensure_future(generator.agenerate(PROMPTS[i % 6], params(i, 3 + 5 * i))) for i in range(5)]
    endless = asyncio.ensure_future(generator.agenerate([7], ENDLESS))
    stopped = await generator.agenerate("fad", rm.SamplingParams(max_tokens=30, seed=4, stop=["dd"], ignore_eos=True))
    endless.cancel()
    outputs = [stopped, *await asyncio.gather(*waiting)]
    *_, last = [output async for output in generator.astream(PROMPTS[3], params(9, 7))]
    return [told(output)[1:] for output in [*outputs, last]]  # without the ids, whose order is the threads'


def every_call(rank: Rank) -> Any:
    """What rank 0 gets from calls of every kind; whether a rank that has followed is closed."""
    with rank.make(tokenizer=Letters(), max_model_len=4096, kv_cache_gib=0.05) as generator:
        generator.follow(lambda version: rank.source(0.75 if version == 2 else 1.0))
        if rank.rank > 0:
            return generator._turn.closed
        out: list[Any] = [generator.sync_weights(rank.source(), cast=True).digest, answers(generator)]
        out.append(asyncio.run(of_an_event_loop(generator)))
        ids = generator.submit(PROMPTS, [params(i, 9 + i) for i in range(6)])
        first = generator.poll(min_outputs=2)
        out.append(generator.sync_weights(rank.source(0.75), 2, cast=True, inflight=rank.job["inflight"]).digest)
        out.append(sorted(told(output) for output in [*first, *generator.poll(min_outputs=len(ids))]))
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
        return out


def refused(rank: Rank) -> Any:
    """Rank 0: what is refused, and that the next call succeeds. Another rank: what a call of its own raises while it follows."""
    own: list[str] = []
    with rank.make() as generator:
        try:
            asyncio.run(generator.agenerate([1]))
        except rm.StateError as error:
            own.append(str(error))

        def meddle() -> None:
            for call in (lambda: generator.submit([[1]]), lambda: generator.sync_weights(rank.source()), generator.close, generator.follow):
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
        try:
            generator.follow()
        except rm.StateError as error:
            own.append(str(error))
        for call in (
            lambda: generator.sync_weights(rank.source(), 5, cast=True),
            lambda: generator.sync_weights({"model.norm.weight": np.ones(96, np.float32)}, cast=True),
            lambda: generator.begin_sync(),
            lambda: generator.sleep("all"),
        ):
            try:
                call()
            except rm.Error as error:
                own.append(f"{type(error).__name__}: {error}")
        generator.sync_weights(rank.source(), 6, cast=True)
        return [own, answers(generator)]


def idle(rank: Rank) -> Any:
    """Rank 0 is silent for several timeouts of the comm."""
    with rank.make() as generator:
        generator.follow()
        if rank.rank > 0:
            return None
        generator.sync_weights(weights(rank.job["model"]), cast=True)
        time.sleep(rank.job["silent"])
        return answers(generator)


def lost(rank: Rank) -> Any:
    """The victim ends, or is interrupted, while rank 0 generates."""
    if rank.job["signal"] == signal.SIGINT:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    with rank.make(max_model_len=4096, kv_cache_gib=0.05) as generator:
        rank.after(7, "step_with_all")
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

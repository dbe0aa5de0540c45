"""Scenarios for the server of mesh_ranks.py: typical calls of training scripts (submit and poll in
turns, stop strings, generate in between, a sync while requests run), and sets of weights that fail
on one rank. test_mesh_calls.py has the expected results."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from mesh_ranks import PROMPTS, SAMPLED, Rank, answers, digest, weights

import rollmesh as rm
from rollmesh import _core


class Letters:
    """A tokenizer with few letters, so that stop strings occur soon."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join("abcdefg"[token % 7] for token in ids)


def told(output: rm.RequestOutput) -> list[Any]:
    """Returns all fields of an output that the contract fixes."""
    return [
        output.request_id,
        [type(output.error).__name__, str(output.error or "")],
        [
            [s.finish_reason, s.stop_reason, s.text, repr(s.contract)]
            + [
                digest(a)
                for a in (
                    s.token_ids,
                    s.logprobs,
                    s.sampling_logprobs,
                    s.versions,
                    s.routed_experts,
                    s.kept_tokens,
                )
            ]
            for s in output.outputs
        ],
        digest(output.prompt_logprobs),
    ]


def params(number: int, tokens: int, **more: Any) -> rm.SamplingParams:
    return rm.SamplingParams(
        n=1 + number % 2, max_tokens=tokens, seed=number, ignore_eos=True, **more
    )


def rolling(rank: Rank) -> Any:
    """Returns the outputs of each poll in a script that submits while other requests run."""
    lengths = [3, 17, 9, 30, 5, 23, 12, 7]
    polls: list[list[Any]] = []
    with rank.make(tokenizer=Letters()) as generator:

        def poll(**how: Any) -> int:
            polls.append([told(output) for output in generator.poll(**how)])
            return len(polls[-1])

        generator.sync_weights(rank.source(), cast=True)
        ids = generator.submit(
            [PROMPTS[i % len(PROMPTS)] for i in range(8)],
            [params(i, n) for i, n in enumerate(lengths)],
        )
        poll(min_outputs=2)
        filtered = params(
            21, 25, stop=["dd"], prompt_logprobs=1, top_k=6, top_p=0.7, kept_tokens=True
        )
        generator.submit([[9, 8, 7], "abc"], [params(20, 11, stop=["ab", "gc"]), filtered])
        for _ in range(3):
            poll()
        generator.submit([[5] * 20], params(22, 40))
        generator.abort([ids[3], 10**6])
        poll()
        polls.append(
            [
                told(output)
                for output in generator.generate([[1, 2, 3], [4]], SAMPLED, use_tqdm=False)
            ]
        )
        poll(min_outputs=1)
        polls.append([[digest(row)] for row in generator.score([[1, 2, 3, 4]])])
        generator.sync_weights(rank.source(0.75), cast=True, inflight=rank.job["inflight"])
        for number in range(30, 34):
            generator.submit([[number] * (number % 5 + 1)], params(number, 15, stop=["ef", "a"]))
            poll()
        generator.pause("keep")
        generator.abort(generator.submit([[2, 2]], params(40, 5)))
        poll()
        generator.resume()
        while poll(min_outputs=1):
            pass
        polls.append(
            [told(output) for output in generator.generate(PROMPTS, SAMPLED, use_tqdm=False)]
        )
    return polls


def late(rank: Rank) -> Any:
    """Polls with a timeout that has expired at once, or never expires. One rank has a different
    clock."""
    with rank.make(max_model_len=4096, kv_cache_gib=0.05) as generator:
        generator.sync_weights(rank.source(), cast=True)
        generator.submit(PROMPTS, params(1, 60))
        counts = [len(generator.poll(min_outputs=3, timeout=0.0)) for _ in range(5)]
        timeout = 0.0 if rank.victim else 1000.0
        counts += [len(generator.poll(min_outputs=3, timeout=timeout)) for _ in range(5)]
        return [counts, [told(output) for output in generator.poll(min_outputs=len(PROMPTS))]]


def kept_weights(rank: Rank) -> Any:
    """On devices: the victim's host has no room for a copy of the weights, then the device has none
    for the weights. Returns the answers before and after, and each refusal with the parts that
    sleep then."""
    errors = {}
    with rank.make() as generator:

        def refused(call: Callable[[], Any]) -> list[Any]:
            try:
                call()
            except (rm.Error, MemoryError) as error:
                return [type(error).__name__, str(error), generator.metrics()["asleep"]]
            return ["nothing", "", []]

        generator.sync_weights(rank.source(), cast=True)
        first = answers(generator)
        rank.after(0, "offload_weights", lambda: _core.memory_fail_at(1, False))
        errors["sleep"] = refused(lambda: generator.sleep(keep_weights=True))
        _core.memory_fail_at(0)
        generator.reset_prefix_cache()
        assert answers(generator) == first
        for call, parts, keep in (
            ("wake", ["weights", "kv"], True),
            ("wake the cache", ["kv"], False),
        ):
            generator.sleep(parts, keep)
            if rank.victim:
                os.environ["ROLLMESH_SIMT_MEMORY"] = "4096"
            errors[call] = refused(generator.wake)
            os.environ.pop("ROLLMESH_SIMT_MEMORY", None)
            generator.wake()
        return [first, errors, answers(generator)]


def asleep(rank: Rank) -> Any:
    """A poll is refused while one replica has requests and the other none; afterwards it
    continues."""
    with rank.make() as generator:
        generator.sync_weights(rank.source(), cast=True)
        generator.submit([[1, 2, 3]], params(1, 9))
        generator.poll()
        generator.sleep("kv")
        errors = []
        for call in (
            generator.poll,
            lambda: generator.sync_weights(rank.source(), cast=True),
            lambda: generator.pause("wait"),
        ):
            try:
                call()
            except rm.Error as error:
                errors.append([type(error).__name__, str(error)])
        generator.wake("kv")
        return [
            errors,
            [told(output) for output in generator.poll(min_outputs=1)],
            answers(generator),
        ]


class Broken(Letters):
    """Raises on decoding the text after the prompt [1, 2, 3]."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        if {2, 3} <= set(ids):
            raise KeyError("no such letter")
        return super().decode(ids, skip_special_tokens)


def broken_tokenizer(rank: Rank) -> Any:
    """A tokenizer raises during the search for stop strings, on the ranks of one replica."""
    with rank.make(tokenizer=Broken()) as generator:
        generator.sync_weights(rank.source(), cast=True)
        generator.submit([[1, 2, 3], [9]], params(2, 9, stop=["a"]))
        outputs = generator.poll(min_outputs=2)
        return [
            [[type(output.error).__name__, str(output.error)] for output in outputs],
            [len(row) for row in generator.score([[1, 2, 3, 4]])],
        ]


# ----------------------------------------------------------------------------- sets that go wrong
def raised(call: Callable[[], Any]) -> list[Any]:
    """Calls `call` and returns the error that it raises, and when."""
    try:
        call()
    except (rm.Error, MemoryError, KeyError, RuntimeError, KeyboardInterrupt) as error:
        return [type(error).__name__, str(error), time.monotonic()]
    return [None, "", time.monotonic()]


def outcome(rank: Rank, call: Callable[[rm.Generator], Any]) -> Any:
    """Makes a call that must fail. Returns its error, whether the old version keeps serving
    unchanged, and whether the next sync works."""
    with rank.make() as generator:
        generator.sync_weights(rank.source(), cast=True, version=3)
        before = answers(generator)
        told = raised(lambda: call(generator))
        if told[0] in ("KeyboardInterrupt", "RankLostError"):
            return {"told": told}
        same, version = answers(generator) == before, generator.version
        report = generator.sync_weights(weights(rank.job["model"], 0.75), cast=True)
        # "about" contains the version.
        bits = {key: value for key, value in answers(generator).items() if key != "about"}
        return {"told": told, "same": same, "version": version, "after": [report.digest, bits]}


class Sharded:
    """A DTensor whose parts cannot be read."""

    def full_tensor(self) -> Any:
        raise RuntimeError("a trainer's rank is gone")


def arguments(rank: Rank) -> Any:
    """Arguments of a sync, or of a set that is pushed, that one rank refuses."""
    how = rank.job["how"] if rank.victim else ""
    version: Any = {"version": 3, "no version": "seven"}.get(how)
    source = 42 if how == "source" else weights(rank.job["model"], 0.5)

    def call(generator: rm.Generator) -> None:
        if rank.job["way"] == "sync":
            generator.sync_weights(source, cast=True, version=version)
            return
        with generator.begin_sync(version=version, cast=True) as sync:
            for name, value in weights(rank.job["model"], 0.5).items():
                sync.push(name, value)

    return outcome(rank, call)


def pieces(rank: Rank) -> Any:
    """Pushes tensors one by one; one rank fails at push number `at`."""
    how, at = rank.job["how"], rank.job["at"]

    def fail(generator: rm.Generator, sync: Any, name: str, value: Any) -> None:
        if how == "shape":
            sync.push(name, np.zeros(3, np.float32))
        elif how == "gather":
            sync.push(name, Sharded())
        elif how == "abort":
            sync.abort()
        elif how == "block":
            raise KeyError("the script's own")
        elif how == "Ctrl-C":
            raise KeyboardInterrupt
        elif how == "memory":

            def push(*args: Any) -> None:
                raise MemoryError("no room for it")

            setattr(generator._engine, "sync_push", push)  # noqa: B010 (of an instance)
            try:
                sync.push(name, value)
            finally:
                delattr(generator._engine, "sync_push")

    def call(generator: rm.Generator) -> None:
        items = list(weights(rank.job["model"], 0.5).items())
        number = range(len(items))[at]
        with generator.begin_sync(cast=True) as sync:
            for i, (name, value) in enumerate(items):
                if i == number and rank.victim:
                    fail(generator, sync, name, value)
                    break
                if not (rank.job.get("others_stop") and i == number):
                    sync.push(name, value)
        if rank.victim and how == "abort":
            raise KeyError("aborted")

    return outcome(rank, call)


def refused_by_all(rank: Rank) -> Any:
    """Every rank refuses a tensor: the set stays open, as in one process."""
    with rank.make() as generator:
        generator.sync_weights(rank.source(), cast=True)
        with generator.begin_sync(cast=True) as sync:
            told = []
            for name, value in weights(rank.job["model"], 0.75).items():
                told.append(raised(lambda name=name: sync.push(name, np.zeros(3, np.float32)))[:2])
                sync.push(name, value)
        return [told, sync.report.digest, answers(generator)]


def mapping_faults(rank: Rank) -> Any:
    """A state dict with several errors of one kind, on the ranks of `bad`; the others have a valid
    one, or none."""
    model, how = rank.job["model"], rank.job["how"]
    bad: dict[str, Any] = {name: np.array(value) for name, value in weights(model, 0.5).items()}
    if how in ("names", "missing"):
        del bad["model.norm.weight"], bad["model.layers.0.self_attn.q_proj.weight"]
    if how in ("names", "unexpected"):
        bad |= {"no.such.weight": np.zeros(3), "nor.this.one": np.zeros(3)}
    if how in ("names", "shapes"):
        for layer in range(2):
            bad[f"model.layers.{layer}.self_attn.k_proj.weight"] = np.zeros((5, 5), np.float32)
    if how == "values":  # rows that rank 0 has, whatever the mesh
        for layer in range(2):
            bad[f"model.layers.{layer}.self_attn.q_proj.weight"][0, 1] = np.nan
        bad["model.norm.weight"][5] = np.inf
    if rank.rank in rank.job["bad"]:
        source: Any = bad
    else:
        source = weights(model, 0.5) if rank.job["rest"] else None
    return outcome(rank, lambda generator: generator.sync_weights(source, cast=True))


def differs(rank: Rank) -> Any:
    """The set differs between ranks: the values of one tensor, the options, or only the timeout."""
    how, model = rank.job["how"], rank.job["model"]
    state = {name: np.array(value) for name, value in weights(model, 0.5).items()}
    if how == "values" and rank.victim:
        state[rank.job["name"]].reshape(-1)[0] += 1
    timeout = 60.0 if how == "timeout" and rank.victim else None
    options: dict[str, Any] = {"inflight": "keep"} if how == "options" and rank.victim else {}

    def call(generator: rm.Generator) -> None:
        if rank.job["way"] == "sync":
            generator.sync_weights(state, cast=True, timeout=timeout)
            return
        sync = generator.begin_sync(cast=True, **options)
        for name, value in state.items():
            sync.push(name, value)
        sync.commit(timeout)

    return outcome(rank, call)


def stops(rank: Rank) -> Any:
    """Only one rank has a stop string."""
    with rank.make(tokenizer=Letters()) as generator:
        generator.sync_weights(rank.source(), cast=True)
        stop = ["ab"] if rank.victim else ["cd"]
        return raised(lambda: generator.generate([[1, 2, 3], [4, 5]], params(0, 12, stop=stop)))[:2]


def rests(rank: Rank) -> Any:
    """Sleeps and wakes while the victim passes different arguments. Returns the errors, what is
    asleep afterwards, and whether the same version keeps serving."""
    told = []
    with rank.make() as generator:
        generator.sync_weights(rank.source(), cast=True, version=3)
        before = answers(generator)
        opened = generator.begin_sync(cast=True)

        def refused(method: Callable[..., None]) -> None:
            arguments = rank.job[method.__name__][0 if rank.victim else 1]
            told.append([*raised(lambda: method(*arguments)), generator.metrics()["asleep"]])

        refused(generator.sleep)
        opened.push(*next(iter(weights(rank.job["model"]).items())))  # the set is open as it was
        opened.abort()
        same = answers(generator) == before
        generator.sleep(keep_weights=True)
        refused(generator.wake)
        generator.wake()
        return [told, same, answers(generator) == before]


def aborted_asleep(rank: Rank) -> Any:
    """poll returns aborted requests although the generator cannot step. Unfinished requests are
    still refused."""
    with rank.make() as generator:
        generator.sync_weights(rank.source(), cast=True)
        polls = []
        for left in (0, 1):
            ids = generator.submit([[1, 2, 3], [4, 5], [6]], params(0, 40))
            generator.poll()
            generator.abort(ids[left:])
            generator.sleep("kv")
            polls.append(
                [told(output)[0] for output in generator.poll()]
                if not left
                else raised(generator.poll)[:2]
            )
            generator.wake()
            polls.append([told(output)[0] for output in generator.poll(min_outputs=3)])
        generator.submit([[1, 2, 3], [4, 5]], params(0, 40))
        generator.poll()
        generator.pause("abort")
        report = generator.sync_weights(rank.source(), cast=True)
        generator.resume()
        return [polls, report.digest, [told(output)[0] for output in generator.poll()]]

"""A server that forks the ranks of test_mesh_processes.py: one process imports rollmesh (and torch
where that is the transport), then each job is a fork of it per rank, so that a mesh of processes
costs milliseconds to start.

    python tests/support/mesh_ranks.py shm|torch

Each line of stdin is a job, each line of stdout the answer to one, both JSON:

    job       {"do": name of a scenario below (or "of" a module), "mesh": [tp, dp, ep], "order":
              ranks as they are forked, "environment": of all ranks, "victims": of the victim alone,
              "limit": seconds, …}
    answer    for each rank {"status": of its process, "result": of the scenario, "error": [type,
              message], "at": when it had it}

A rank that hangs is killed at LIMIT, and its status says so. Times are of time.monotonic, which all
processes share.
"""

from __future__ import annotations

import atexit
import gc
import hashlib
import importlib
import json
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import helpers
import numpy as np

import rollmesh as rm
from rollmesh.distributed import comm as comms
from rollmesh.distributed import leading
from rollmesh.runtime.arguments import PARTS

LIMIT = 120.0
Job = dict[str, Any]

SIZES: dict[str, Any] = {
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "hidden_size": 96,
    "head_dim": 8,
}
CASES = {
    "dense": helpers.Case(
        "dense", helpers.tiny_config(False, **SIZES, attention_bias=True, intermediate_size=160)
    ),
    "moe": helpers.Case(
        "moe",
        helpers.tiny_config(True, **SIZES, num_experts=24, num_experts_per_tok=3),
        router_bias=True,
    ),
}
PROMPTS = [[7], [1, 2], [3, 1, 4, 1, 5], list(range(100, 117)), list(range(250, 281)), [7] * 19]
FILTERED = rm.SamplingParams(
    n=2, max_tokens=5, seed=11, top_k=9, top_p=0.8, ignore_eos=True, kept_tokens=True
)
SAMPLED = rm.SamplingParams(
    n=2, max_tokens=5, seed=11, logprobs=3, prompt_logprobs=2, ignore_eos=True
)
EDITED = rm.SamplingParams(
    n=2, max_tokens=9, seed=12, ignore_eos=True, logit_bias={7: 2.0, 40: 1e-3},
    allowed_token_ids=range(0, 300, 3), repetition_penalty=1.2,
    frequency_penalty=0.3,
)  # fmt: skip
N_ENDLESS = 4000  # steps at least
ENDLESS = rm.SamplingParams(max_tokens=N_ENDLESS, seed=3, ignore_eos=True)
_weights: dict[str, dict[str, Any]] = {}


def weights(name: str, scale: float = 1.0) -> dict[str, Any]:
    if name not in _weights:
        _weights[name] = helpers.numpy_state_dict(
            CASES[name].config, 0, "float32", CASES[name].router_bias
        )
    return (
        {key: value * np.float32(scale) for key, value in _weights[name].items()}
        if scale != 1.0
        else _weights[name]
    )


# ----------------------------------------------------------------------------------------- a rank
class Rank:
    """The state of a scenario: this rank's number, its generator once it exists, and ways to end or
    stop this process."""

    def __init__(self, job: Job, rank: int):
        self.job, self.rank = job, rank
        self.world = job["mesh"][0] * job["mesh"][1]
        self.victim = job.get("victim") == rank
        self.generator: rm.Generator | None = None
        self.n_comms = 0

    def comm(self) -> rm.comm.Comm | None:
        self.n_comms += 1
        _, nccl, host = self.job["transport"].rpartition("nccl over ")
        made = self.host(host)
        return (
            rm.comm.nccl(made, os.environ.get("NCCL_LIBRARY"))
            if nccl and not (self.victim and self.job.get("without"))
            else made
        )

    def host(self, transport: str) -> rm.comm.Comm | None:
        timeout = self.job.get("timeout", 60.0)
        if transport == "none":
            return None
        if transport == "shm":
            return rm.comm.shm(f"{self.job['name']}.{self.n_comms}", self.rank, self.world, timeout)
        from torch import distributed

        if self.n_comms == 1:
            distributed.init_process_group(
                "gloo",
                init_method=f"file://{self.job['name']}",
                rank=self.rank,
                world_size=self.world,
            )
            atexit.register(distributed.destroy_process_group)
        return rm.comm.torch(timeout=timeout)

    def make(self, **options: Any) -> rm.Generator:
        tp, dp, ep = self.job["mesh"]
        case = CASES[self.job.get("model", "dense")]
        chosen = {
            "max_model_len": 64,
            "max_num_seqs": 5,
            "max_num_batched_tokens": 13,
            "kv_cache_gib": 0.01,
            "threads": 1,
        }
        chosen |= self.job.get("options", {}) | options
        self.generator = rm.Generator(
            rm.ModelSpec.from_hf(case.config),
            mesh=rm.Mesh(tp=tp, dp=dp, ep=ep),
            comm=self.comm(),
            **chosen,
        )
        return self.generator

    def source(self, scale: float = 1.0) -> Any:
        """Returns weights, if this rank has some."""
        has = self.job.get("source", "all") in ("all", self.rank)
        return weights(self.job.get("model", "dense"), scale) if has else None

    def end_itself(self) -> None:
        os.kill(os.getpid(), self.job.get("signal", signal.SIGKILL))

    def after(self, calls: int, method: str, do: Callable[[], None] | None = None) -> None:
        """The victim calls a function instead of a given call of a method of its engine."""
        if not self.victim:
            return
        assert self.generator is not None
        engine = self.generator._engine
        kept, count = getattr(engine, method), iter(range(calls + 1))

        def counted(*args: Any, **more: Any) -> Any:
            if next(count, calls + 1) == calls:
                (do or self.end_itself)()
            return kept(*args, **more)

        setattr(engine, method, counted)


def digest(*arrays: Any) -> str:
    hasher = hashlib.sha256()
    for array in arrays:
        hasher.update(
            b"none"
            if array is None
            else f"{array.dtype} {array.shape}".encode() + np.ascontiguousarray(array).tobytes()
        )
    return hasher.hexdigest()[:16]


def answers(generator: rm.Generator) -> dict[str, str]:
    """Returns a digest of each kind of result that the contract fixes, so that a failure shows the
    kind that differs."""
    outputs = generator.generate(PROMPTS, SAMPLED, use_tqdm=False)
    samples = [sample for output in outputs for sample in output.outputs]
    edited = [
        sample
        for output in generator.generate(PROMPTS, EDITED, use_tqdm=False)
        for sample in output.outputs
    ]
    return {
        "tokens": digest(*(s.token_ids for s in samples)),
        "logprobs": digest(*(s.logprobs for s in samples)),
        "sampling_logprobs": digest(*(s.sampling_logprobs for s in samples)),
        "top": digest(
            *(part for s in samples for part in (s.top_logprobs.ids, s.top_logprobs.logprobs))
        ),
        "kept": digest(
            *(
                s.kept_tokens
                for s in generator.generate(PROMPTS, FILTERED, use_tqdm=False)[0].outputs
            )
        ),
        "edited": digest(*(s.token_ids for s in edited), *(s.sampling_logprobs for s in edited)),
        "routed": digest(*(s.routed_experts for s in samples)),
        "prompt": digest(
            *(o.prompt_logprobs for o in outputs), *(o.prompt_top_logprobs.ids for o in outputs)
        ),
        "about": repr(
            [
                (o.finished, o.error, [(s.finish_reason, s.contract) for s in o.outputs])
                for o in outputs
            ]
        ),
        "logits": digest(*generator.logits(PROMPTS)),
        "scores": digest(
            *generator.score(PROMPTS),
            *generator.score(PROMPTS, rm.SamplingParams(temperature=0.7, top_k=9)),
        ),
    }


# -------------------------------------------------------------------------------------- scenarios
def bits(rank: Rank) -> Any:
    """Returns the answers of two versions."""
    with rank.make() as generator:
        first = generator.sync_weights(rank.source(), cast=True).digest
        out = {"digest": first, **answers(generator)}
        second = generator.sync_weights(rank.source(0.75), cast=True)
        return [out, {"digest": second.digest, "version": second.version, **answers(generator)}]


def replayed(rank: Rank) -> Any:
    """Returns the answers of one request and then of three, and the number of steps that this rank
    has replayed since its creation. `sleepers` sleep in between."""
    params, out = rm.SamplingParams(max_tokens=12, seed=2, ignore_eos=True), []
    with rank.make() as generator:
        generator.sync_weights(rank.source(), cast=True)
        for prompts in rank.job.get("prompts", ([[3, 1]], [[3, 1], [1, 2], [2, 9]])):
            outputs = generator.generate(prompts, params, use_tqdm=False)
            told = [
                part
                for output in outputs
                for sample in output.outputs
                for part in (sample.token_ids, sample.logprobs)
            ]
            out.append((digest(*told), generator.metrics()["graph_replays"]))
            if rank.rank in rank.job.get("sleepers", ()):
                # All ranks would refuse this in a call of Generator.sleep on one rank.
                generator._engine.sleep(PARTS["kv"])
                generator._engine.wake(PARTS["kv"])
    return out


def construct(rank: Rank) -> Any:
    """Ranks that are made as `each` says."""
    tp, dp, ep = rank.job["each"][rank.rank].pop("mesh", rank.job["mesh"])
    rank.job["mesh"], options = [tp, dp, ep], dict(rank.job["each"][rank.rank])
    model = options.pop("model", None)
    if model:
        rank.job["model"] = model
    rank.make(**options).close()


def bad_weight(rank: Rank) -> Any:
    """Only the victim has a weight that is not finite, lacks a weight, or has another version.
    Returns the error of the sync, the version that serves then, and the next sync."""
    with rank.make() as generator:
        generator.sync_weights(rank.source(), cast=True)
        before = answers(generator)
        bad = {name: np.array(value) for name, value in weights(rank.job["model"], 0.75).items()}
        if rank.job["how"] == "stream":  # one tensor of which the victim alone has a part
            bad["model.embed_tokens.weight"][rank.job["row"], 3] = np.nan
            source: Any = bad if rank.source() is not None else None
        try:
            if rank.job["how"] == "stream":
                generator.sync_weights(source, cast=True)
            else:
                versions = rank.job["how"] == "version"
                if versions:  # the ranks would find the difference before the vote
                    leading.call_text = lambda name, arguments: f"{name}()"
                with generator.begin_sync(8 + rank.victim if versions else None, cast=True) as sync:
                    for name, value in bad.items():
                        # The victim does not get this tensor.
                        if versions or not (rank.victim and name == "model.norm.weight"):
                            sync.push(name, value)
        except rm.Error as error:
            told = [type(error).__name__, str(error)]
        else:
            told = None
        same, version = answers(generator) == before, generator.version
        report = generator.sync_weights(rank.source(0.75), cast=True)
        return {
            "told": told,
            "same": same,
            "version": version,
            "next": report.digest,
            "bits": answers(generator),
        }


def source_raises(rank: Rank) -> Any:
    """The source raises in the middle, on the one rank that has it."""

    def broken() -> Iterator[tuple[str, Any]]:
        for index, item in enumerate(weights("dense", 0.5).items()):
            if index == 5:
                raise KeyError("no more")
            yield item

    with rank.make() as generator:
        generator.sync_weights(rank.source(), cast=True)
        before = answers(generator)
        try:
            generator.sync_weights(broken() if rank.victim else None, cast=True)
        except (rm.Error, KeyError) as error:
            told = [type(error).__name__, str(error)]
        return {
            "told": told,
            "same": answers(generator) == before,
            "next": generator.sync_weights(rank.source(0.75), cast=True).digest,
        }


def apart(rank: Rank) -> Any:
    """The victim makes another call than the rest. "unheard", "handed out": it makes the same call,
    but its engine gets another prompt, or no array for the logits."""
    with rank.make() as generator:
        generator.sync_weights(rank.source(), cast=True)
        prompt, how = [1, 2, 3], rank.job["how"] if rank.victim else ""
        add = generator._engine.add

        def altered(ids: Any, stop: Any, request: Any, logits: Any, edits: Any = None) -> int:
            ids, logits = (ids + 1, logits) if how == "unheard" else (ids, None)
            return add(ids, stop, request, logits, edits)

        if how in ("unheard", "handed out"):
            setattr(generator._engine, "add", altered)  # noqa: B010 (of an instance)
        if how == "logits" or rank.job["how"] == "handed out":
            generator.logits([prompt])
        elif how == "score":
            generator.score([prompt])
        elif how == "sync":
            generator.sync_weights(rank.source(0.5), cast=True)
        elif how == "prompts":
            generator.generate([[1, 2, 4]], SAMPLED, use_tqdm=False)
        elif how == "longer":
            generator.generate([[1, 2, 3, 4]], SAMPLED, use_tqdm=False)
        elif how == "more":
            generator.generate([prompt, prompt], SAMPLED, use_tqdm=False)
        elif how == "params":
            generator.generate(
                [prompt], rm.SamplingParams(n=2, max_tokens=5, seed=12), use_tqdm=False
            )
        elif rank.job["how"] == "bias":
            generator.generate(
                [prompt],
                rm.SamplingParams(logit_bias={3: 1.0 + rank.victim * 1e-3}),
                use_tqdm=False,
            )
        elif how == "version":
            generator.sync_weights(rank.source(0.5), cast=True, version=9)
        elif rank.job["how"] == "version":
            generator.sync_weights(rank.source(0.5), cast=True, version=8)
        else:
            generator.generate([prompt], SAMPLED, use_tqdm=False)


def lost(rank: Rank) -> Any:
    """The victim gets a signal in the middle of a call, or `delay` seconds after the beginning of
    one. The others return their errors, now and at the next call."""
    generator = rank.make()
    generator.sync_weights(rank.source(), cast=True)
    where, delay = rank.job["where"], rank.job.get("delay")

    def end() -> None:
        with open(f"/proc/self/fd/{rank.job['moment']}", "w") as file:
            file.write(repr(time.monotonic()))
        rank.end_itself()

    method = {"sync": "sync_push", "commit": "sync_commit", "exchange": "gather"}.get(where, "step")
    rank.after(
        rank.job.get("calls", 3),
        method,
        end if delay is None else lambda: threading.Timer(delay, end).start(),
    )
    params = {"prefill": rm.SamplingParams(max_tokens=1, seed=3), "generate": ENDLESS}.get(
        where, SAMPLED
    )
    try:
        while True:
            if where == "logits":
                generator.logits(PROMPTS)
            elif method in ("step", "gather"):
                generator.generate(PROMPTS, params, use_tqdm=False)
            else:
                generator.sync_weights(rank.source(0.5), cast=True)
    except rm.Error as error:
        at = time.monotonic()
        told = [type(error).__name__, str(error)]
    try:
        generator.generate([[1]], SAMPLED, use_tqdm=False)
        again = None
    except rm.Error as error:
        again = type(error).__name__
    version, steps, start = generator.version, generator.metrics()["steps"], time.monotonic()
    generator.close()
    return {
        "told": told,
        "at": at,
        "again": again,
        "version": version,
        "steps": steps,
        "close": time.monotonic() - start,
    }


def failing(rank: Rank) -> Any:
    """The environment makes the victim fail. Returns the error of each rank, now and at the next
    call, and the duration of the first call; then the answers of another generator without that
    environment."""
    generator, start = rank.make(), time.monotonic()
    try:
        generator.sync_weights(rank.source(), cast=True)
        start = time.monotonic()
        while True:
            generator.generate(PROMPTS, SAMPLED, use_tqdm=False)
    except rm.Error as error:
        told, seconds = [type(error).__name__, str(error)], time.monotonic() - start
    try:
        generator.generate([[1]], SAMPLED, use_tqdm=False)
        again = None
    except rm.Error as error:
        again = type(error).__name__
    generator.close()
    for name in rank.job["victims"]:
        os.environ.pop(name, None)
    with rank.make() as generator:
        generator.sync_weights(rank.source(), cast=True)
        return {
            "told": told,
            "again": again,
            "seconds": seconds,
            "next": digest(*generator.logits(PROMPTS)),
        }


def interrupted(rank: Rank) -> Any:
    """Ctrl-C in the victim, while it generates or syncs, or during an exchange of a step by
    torch."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    generator = rank.make()
    generator.sync_weights(rank.source(), cast=True)
    rank.job["signal"] = signal.SIGINT
    check = comms._Exchange._check

    def checked(*args: Any) -> None:
        comms._Exchange._check = check
        rank.end_itself()
        check(*args)

    def cut_short() -> None:
        comms._Exchange._check = checked

    method = "sync_push" if rank.job["where"] == "sync" else "step"
    rank.after(3, method, cut_short if rank.job["where"] == "exchange" else None)
    try:
        if method == "step":
            generator.generate(PROMPTS, ENDLESS, use_tqdm=False)
        else:
            generator.sync_weights(rank.source(0.5), cast=True)
    except KeyboardInterrupt as error:
        told = [type(error).__name__, str(error)]
    except rm.Error as error:
        told = [type(error).__name__, str(error)]
    if rank.victim:
        # This rank lives until the others are done: they must learn of the failure from a message,
        # not from its exit.
        os.read(rank.job["release"], 1)
    return {"told": told}


def forked(rank: Rank) -> Any:
    """Every rank forks a child that tries its copies of the ends and releases them, by close or
    with the last reference."""
    generator = rank.make()
    generator.sync_weights(rank.source(), cast=True)
    before = answers(generator)
    pid = os.fork()
    if pid == 0:
        told = []
        engine = generator._engine
        for call in (engine.control.look, lambda: engine.control.all_gather(b"child")):
            try:
                call()
            except rm.StateError as error:
                told.append(str(error))
        wanted = f"process {os.getppid()}, and this is process {os.getpid()}"
        engine.control.abort()
        engine._comm.abort()
        if rank.job["how"] == "close":
            engine.close()
            generator.close()
        rank.generator = call = None
        del engine, generator
        gc.collect()
        os._exit(0 if [wanted in text for text in told] == [True, True] else 1)
    refused = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    return {"refused": refused, "same": answers(generator) == before, "closed": generator.close()}


def timed(rank: Rank) -> Any:
    """generate with a timeout, short or long; then the same generator without a timeout."""
    with rank.make(max_model_len=4096, kv_cache_gib=0.05) as generator:
        generator.sync_weights(rank.source(), cast=True)
        out = []
        for timeout in rank.job["timeouts"]:
            params = [
                rm.SamplingParams(max_tokens=2 if i % 2 else 4000, seed=i, ignore_eos=True)
                for i in range(len(PROMPTS))
            ]
            outputs = generator.generate(
                PROMPTS, params, use_tqdm=False, on_error="return", timeout=timeout
            )
            out.append(
                [
                    [
                        type(o.error).__name__,
                        o.outputs[0].finish_reason,
                        digest(o.outputs[0].token_ids, o.outputs[0].logprobs),
                    ]
                    for o in outputs
                ]
            )
        return {"timed": out, "bits": answers(generator)}


def closed(rank: Rank) -> Any:
    """Returns the number of descriptors, threads and mapped segments of the process after each of
    several generators. Gloo closes some of its descriptors a moment later, in a background
    thread."""

    def now() -> list[int]:
        segments = sum(
            "/dev/shm" in line for line in Path("/proc/self/maps").read_text().splitlines()
        )
        return [len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), segments]

    held = []
    for _ in range(3):
        with rank.make() as generator:
            generator.sync_weights(rank.source(), cast=True)
            generator.generate(PROMPTS, SAMPLED, use_tqdm=False)
        held.append(now())
    deadline = time.monotonic() + 10
    while (
        any(after > before for after, before in zip(held[-1], held[0], strict=True))
        and time.monotonic() < deadline
    ):
        time.sleep(0.05)
        held[-1] = now()
    return held


def calls_in_a_row(rank: Rank) -> Any:
    """Several generators one after another, and calls of every kind, including refused ones: the
    results are equal on all ranks."""
    out: list[Any] = []
    with rank.make() as generator:
        try:
            generator.generate([[1]], use_tqdm=False)
        except rm.NotSyncedError as error:
            out.append(str(error))
        generator.sync_weights(rank.source(), cast=True)
        for bad in ([[]], [[1], [999]], [[1, 2], list(range(64)), [3]]):
            for on_error in ("raise", "return"):
                try:
                    outputs = generator.generate(bad, SAMPLED, use_tqdm=False, on_error=on_error)
                    out.append(
                        [
                            [type(o.error).__name__, [s.token_ids.tolist() for s in o.outputs]]
                            for o in outputs
                        ]
                    )
                except rm.RequestError as error:
                    out.append(str(error))
        try:
            generator.sync_weights(
                {"model.norm.weight": np.ones(96, np.float32)} if rank.rank == 0 else None,
                cast=True,
            )
        except rm.Error as error:
            out.append(
                "MissingKeyError" in (type(error).__name__, str(error).partition(": ")[2][:15])
            )
        ids = generator.submit(PROMPTS, SAMPLED)
        polled = generator.poll(min_outputs=len(ids))
        out.append([[o.request_id, [s.token_ids.tolist() for s in o.outputs]] for o in polled])
        generator.sleep("kv")
        generator.wake("kv")
        out.append(answers(generator))
    return out


# ------------------------------------------------------------------------------------- the server
def child(job: Job, rank: int, out: int) -> None:
    answer: dict[str, Any] = {"result": None, "error": None}
    os.environ.update(
        job.get("environment", {}) | (job.get("victims", {}) if job.get("victim") == rank else {})
    )
    try:
        scenarios = vars(importlib.import_module(job["of"])) if "of" in job else globals()
        answer["result"] = scenarios[job["do"]](Rank(job, rank))
    except BaseException as error:  # noqa: BLE001 (told to the test)
        answer["error"] = [type(error).__name__, str(error)]
        if not isinstance(error, rm.Error):
            traceback.print_exc()
    answer["at"] = time.monotonic()
    text = json.dumps(answer).encode()
    while text:
        text = text[os.write(out, text) :]


def run(job: Job) -> list[Any]:
    started: dict[int, tuple[int, int]] = {}  # rank → process, pipe
    if "of" in job:
        importlib.import_module(job["of"])  # once, and not in every rank
    job["release"], job["hold"] = os.pipe()
    job["moment"] = moment = os.memfd_create("moment")
    for rank in job.get("order") or range(job["mesh"][0] * job["mesh"][1]):
        take, give = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(take)
            child(json.loads(json.dumps(job)), rank, give)
            os._exit(0)
        os.close(give)
        started[rank] = (pid, take)
    gathered = gather(job, started)
    when = os.pread(moment, 100, 0).decode()
    for fd in (moment, job["release"], job["hold"]):
        os.close(fd)
    for answer in gathered:
        answer["moment"] = float(when) if when else None
    return gathered


def gather(job: Job, started: dict[int, tuple[int, int]]) -> list[Any]:
    texts = dict.fromkeys(started, b"")
    waiting, deadline = set(started), time.monotonic() + job.get("limit", LIMIT)
    while waiting:
        if waiting == {job.get("victim")}:  # all others are done
            os.write(job["hold"], b"x")
            os.kill(started[job["victim"]][0], signal.SIGCONT)
        if time.monotonic() > deadline:
            for rank in waiting:
                os.kill(started[rank][0], signal.SIGKILL)
        ready, _, _ = select.select([started[rank][1] for rank in waiting], [], [], 0.1)
        for rank in [rank for rank in waiting if started[rank][1] in ready]:
            text = os.read(started[rank][1], 1 << 16)
            texts[rank] += text
            if not text:
                waiting.discard(rank)
    out = []
    for rank in sorted(started):
        pid, pipe = started[rank]
        os.close(pipe)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        out.append(
            {
                "status": status,
                **(
                    json.loads(texts[rank])
                    if texts[rank]
                    else {"result": None, "error": None, "at": None}
                ),
            }
        )
    return out


def main() -> None:
    if sys.argv[1] == "torch":
        import torch
        import torch.distributed

        torch.set_num_threads(1)
    for name in CASES:
        weights(name)
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)  # noqa: T201 (the answer)


if __name__ == "__main__":
    main()

"""Bad requests and misuse: prompts and parameters, threads, re-entry, fork, exit, objects of the
caller. Oracle: after a refusal a generation is bit-identical to the one before."""

from __future__ import annotations

import gc
import math
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from helpers import numpy_state_dict, tiny_config, tiny_spec

import rollmesh as rm
from rollmesh.request.loop import Call

VOCAB = tiny_config()["vocab_size"]
PROMPT = [5, 9, 77, 3]
PARAMS = rm.SamplingParams(max_tokens=8, seed=7)
STATE = numpy_state_dict(tiny_config())
OTHER_STATE = numpy_state_dict(tiny_config(), seed=1)


def make(**options: Any) -> rm.Generator:
    settings = {
        "dtype": "float32",
        "threads": 1,
        "kv_cache_gib": 0.004,
        "max_model_len": 128,
        **options,
    }
    return rm.Generator(tiny_spec(), **settings)


@pytest.fixture
def gen() -> Iterator[rm.Generator]:
    with make() as generator:
        generator.sync_weights(STATE, version=3)
        yield generator


def fingerprint(generator: rm.Generator) -> tuple[Any, ...]:
    """Returns the state that a failed call must not change."""
    output = generator.generate(PROMPT, PARAMS, use_tqdm=False)[0].outputs[0]
    return (
        generator.version,
        output.token_ids.tobytes(),
        output.logprobs.tobytes(),
        output.versions.tobytes(),
    )


# --------------------------------------------------------------------- bad prompts and parameters
BAD_PROMPTS = {
    "negative id": [1, -1],
    "id = vocab": [1, VOCAB],
    "id beyond 32 bits": [2**40],
    "id beyond 64 bits": [2**70],
    "empty": [],
    "as long as max_model_len": [1] * 128,
    "longer than max_model_len": [1] * 1000,
    "floats": [0.5, 1.0],
    "bools": np.array([True, False]),
    "two dims": [[1, 2], [3, 4]],
    "None": None,
    "text without a tokenizer": "abc",
}


@pytest.mark.parametrize("prompt", BAD_PROMPTS.values(), ids=BAD_PROMPTS.keys())
def test_a_bad_prompt_is_refused_alone(gen: rm.Generator, prompt: Any) -> None:
    before = fingerprint(gen)
    outputs = gen.generate([PROMPT, prompt, PROMPT], PARAMS, use_tqdm=False, on_error="return")
    assert isinstance(outputs[1].error, rm.RequestError)
    assert outputs[1].outputs == []
    for good in (outputs[0], outputs[2]):
        assert good.error is None
        assert good.outputs[0].token_ids.tobytes() == before[1]
        assert good.outputs[0].logprobs.tobytes() == before[2]
    with pytest.raises(rm.RequestError) as caught:
        gen.generate([PROMPT, prompt, PROMPT], PARAMS, use_tqdm=False)
    carried = caught.value.outputs  # type: ignore[attr-defined]
    assert [output.error is None for output in carried] == [True, False, True]
    assert carried[2].outputs[0].token_ids.tobytes() == before[1]
    assert fingerprint(gen) == before


@pytest.mark.parametrize("prompt", BAD_PROMPTS.values(), ids=BAD_PROMPTS.keys())
def test_submit_takes_all_or_nothing(gen: rm.Generator, prompt: Any) -> None:
    before = fingerprint(gen)
    with pytest.raises(rm.RequestError):
        gen.submit([PROMPT, prompt], PARAMS)
    assert gen.poll() == []
    assert gen.metrics()["waiting"] == gen.metrics()["running"] == 0
    assert fingerprint(gen) == before


def test_score_refuses_bad_ids(gen: rm.Generator) -> None:
    before = fingerprint(gen)
    for bad in ([1, -1], [1, VOCAB], [], [1] * 129):
        with pytest.raises(rm.RequestError):
            gen.score([PROMPT, bad])
        with pytest.raises(rm.RequestError):
            gen.logits([PROMPT, bad])
    assert fingerprint(gen) == before


def test_stop_ids_out_of_the_vocabulary(gen: rm.Generator) -> None:
    output = gen.generate(
        PROMPT, rm.SamplingParams(stop_token_ids=[VOCAB]), use_tqdm=False, on_error="return"
    )[0]
    assert isinstance(output.error, rm.RequestError)
    assert str(VOCAB) in str(output.error)


BAD_PARAMS: list[dict[str, Any]] = [
    {"temperature": -0.1},
    {"temperature": math.nan},
    {"temperature": math.inf},
    {"temperature": "1"},
    {"top_p": 0.0},
    {"top_p": 1.0001},
    {"top_p": -0.5},
    {"top_p": math.nan},
    {"top_k": -2},
    {"top_k": 1.5},
    {"min_p": -0.01},
    {"min_p": 1.01},
    {"min_p": math.nan},
    {"n": 0},
    {"n": 2**40},
    {"n": 16385},
    {"n": True},
    {"max_tokens": 0},
    {"max_tokens": -3},
    {"max_tokens": 1.5},
    {"min_tokens": -1},
    {"min_tokens": 5, "max_tokens": 4},
    {"seed": -1},
    {"seed": 2**64},
    {"seed": 0.5},
    {"logprobs": -1},
    {"prompt_logprobs": -1},
    {"stop": ""},
    {"stop": ["a", ""]},
    {"stop": 3},
    {"stop_token_ids": [-1]},
    {"stop_token_ids": ["a"]},
    {"stop_token_ids": 3},
    {"ignore_eos": 1},
    {"kept_tokens": 1, "top_k": 3},
    {"kept_tokens": True},
    {"kept_tokens": True, "top_k": 3, "min_tokens": 2},
]


@pytest.mark.parametrize("fields", BAD_PARAMS, ids=lambda fields: str(fields)[:40])
def test_sampling_params(fields: dict[str, Any]) -> None:
    with pytest.raises(rm.RequestError) as caught:
        rm.SamplingParams(**fields)
    name, value = next(iter(fields.items()))
    assert name in str(caught.value)
    assert str(value).strip("[]") in str(caught.value)  # the value seen


def test_the_limits_themselves_are_fine(gen: rm.Generator) -> None:
    limits = [
        {"temperature": 0.0},
        {"top_p": 1e-3},
        {"top_p": 1.0},
        {"top_k": -1},
        {"top_k": 1},
        {"top_k": 2**31 - 1},
        {"min_p": 1.0},
    ]
    for fields in (*limits, {"seed": 0}, {"seed": 2**64 - 1}):
        output = gen.generate(
            PROMPT, rm.SamplingParams(max_tokens=2, n=2, **fields), use_tqdm=False
        )[0]
        assert [len(sample.token_ids) for sample in output.outputs] == [2, 2]


def test_more_logprobs_than_the_vocabulary_has(gen: rm.Generator) -> None:
    for name in ("logprobs", "prompt_logprobs"):
        with pytest.raises(rm.RequestError, match=name):
            gen.generate(PROMPT, rm.SamplingParams(**{name: VOCAB + 1}), use_tqdm=False)
    output = gen.generate(PROMPT, rm.SamplingParams(max_tokens=1, logprobs=VOCAB), use_tqdm=False)[
        0
    ].outputs[0]
    assert output.top_logprobs is not None
    assert sorted(output.top_logprobs.ids[0].tolist()) == list(range(VOCAB))


def test_stop_strings_need_a_tokenizer(gen: rm.Generator) -> None:
    with pytest.raises(rm.RequestError, match="tokenizer"):
        gen.generate(PROMPT, rm.SamplingParams(stop="a"), use_tqdm=False)


def test_exhaustion_a_request_that_can_never_fit(gen: rm.Generator) -> None:
    with make(kv_cache_gib=40 / 2**20, max_model_len=4096) as small:
        small.sync_weights(STATE)
        outputs = small.generate([[1] * 4000, PROMPT], PARAMS, use_tqdm=False, on_error="return")
        assert isinstance(outputs[0].error, rm.CapacityError)
        assert outputs[1].outputs[0].logprobs.tobytes() == fingerprint(gen)[2]


# ------------------------------------------------------------------ threads, re-entry, fork, exit
def test_many_threads_generate_and_sync(gen: rm.Generator) -> None:
    """Tokens of two versions may be in one request (inflight keep), but each token's logprob is its
    version's."""
    gen.sync_weights(STATE, version=10)
    problems: list[BaseException] = []
    outputs: list[rm.RequestOutput] = []

    def generate(seed: int) -> None:
        try:
            for round_ in range(3):
                outputs.extend(
                    gen.generate(
                        [PROMPT, [seed]],
                        rm.SamplingParams(max_tokens=20, seed=seed + round_, n=2),
                        use_tqdm=False,
                    )
                )
        except BaseException as error:  # noqa: BLE001  (reported below)
            problems.append(error)

    def sync() -> None:
        try:
            for version in range(11, 17):
                gen.sync_weights(
                    OTHER_STATE if version % 2 else STATE, version=version, inflight="keep"
                )
        except BaseException as error:  # noqa: BLE001
            problems.append(error)

    threads = [threading.Thread(target=generate, args=(seed,)) for seed in (1, 2, 3)] + [
        threading.Thread(target=sync)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert problems == []
    assert len(outputs) == 18
    for version, state in ((16, STATE), (17, OTHER_STATE)):
        if version == 17:
            gen.sync_weights(state, version=17)
        for output in outputs:
            for sample in output.outputs:
                scores = gen.score([np.concatenate([output.prompt_token_ids, sample.token_ids])])[
                    0
                ][len(output.prompt_token_ids) - 1 :]
                mine = sample.versions % 2 == version % 2
                assert scores[mine].tobytes() == sample.logprobs[mine].tobytes()


def test_calls_begin_in_the_order_of_arrival(gen: rm.Generator) -> None:
    """A call whose deadline passes before it begins leaves the queue."""
    order: list[int] = []
    inside, done = threading.Event(), threading.Event()

    def hold() -> None:
        inside.set()
        done.wait(30)

    def call(name: int) -> None:
        gen._loop.call(lambda: order.append(name))

    def give_up() -> None:
        with pytest.raises(rm.DeadlineError):
            gen.generate(PROMPT, PARAMS, use_tqdm=False, timeout=0.05)
        order.append(-1)

    threads = [threading.Thread(target=lambda: gen._loop.lend(hold))]
    threads[0].start()
    inside.wait(30)
    for name in range(5):
        threads.append(threading.Thread(target=call, args=(name,)))
        threads[-1].start()
        while gen._loop._inbox.qsize() <= name:
            time.sleep(0.001)
    threads.append(threading.Thread(target=give_up))
    threads[-1].start()
    time.sleep(0.1)
    done.set()
    for thread in threads:
        thread.join(10)
    assert [name for name in order if name >= 0] == [0, 1, 2, 3, 4]
    assert -1 in order
    assert gen._engine.ids() == []


def test_reentry_from_a_weights_iterator(gen: rm.Generator) -> None:
    before = fingerprint(gen)

    def weights() -> Iterator[tuple[str, Any]]:
        yield "model.norm.weight", OTHER_STATE["model.norm.weight"]
        gen.generate(PROMPT, PARAMS, use_tqdm=False)
        yield "lm_head.weight", OTHER_STATE["lm_head.weight"]

    with pytest.raises(rm.StateError, match="inside one of its own calls"):
        gen.sync_weights(weights())
    assert fingerprint(gen) == before


class ReentrantTokenizer:
    """Calls the generator while the generator decodes."""

    generator: rm.Generator

    def encode(self, text: str) -> list[int]:
        return [ord(c) % VOCAB for c in text]

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        self.generator.generate(PROMPT, PARAMS, use_tqdm=False)
        return "x" * len(ids)


def test_reentry_from_a_tokenizer() -> None:
    tokenizer = ReentrantTokenizer()
    with make(tokenizer=tokenizer) as generator:
        tokenizer.generator = generator
        generator.sync_weights(STATE)
        with pytest.raises(rm.StateError, match="inside one of its own calls"):
            generator.generate("abc", rm.SamplingParams(stop="y"), use_tqdm=False)
        assert generator.metrics()["running"] == generator.metrics()["waiting"] == 0


def engine_threads() -> int:
    return sum(thread.name == "rollmesh-engine" for thread in threading.enumerate())


def test_generators_that_are_dropped_leave_nothing() -> None:
    """Generators are dropped without close: their threads end and their memory is freed."""
    made = weakref.WeakSet[Any]()
    before = engine_threads()
    for _ in range(50):
        generator = make()
        generator.sync_weights(STATE)
        generator.generate(PROMPT, PARAMS, use_tqdm=False)
        made.add(generator._engine)
        del generator
    gc.collect()
    deadline = time.monotonic() + 20
    while (made or engine_threads() > before) and time.monotonic() < deadline:
        time.sleep(0.005)
    assert not made
    assert engine_threads() == before


def test_close_while_another_thread_generates(gen: rm.Generator) -> None:
    problems: list[BaseException] = []
    started = threading.Event()

    def generate() -> None:
        started.set()
        try:
            gen.generate([[1, 2, 3]] * 40, rm.SamplingParams(max_tokens=100), use_tqdm=False)
        except BaseException as error:  # noqa: BLE001
            problems.append(error)

    thread = threading.Thread(target=generate)
    thread.start()
    started.wait(10)
    gen.close()
    gen.close()
    thread.join(30)
    assert not thread.is_alive()
    assert [type(error) for error in problems] == [rm.StateError]


def test_the_engine_itself_refuses_a_second_thread(gen: rm.Generator) -> None:
    """A mistake of the layers above raises an exception instead of causing a race."""
    gen.submit([[1, 2, 3]] * 32, rm.SamplingParams(max_tokens=100))
    engine = gen._engine._engine
    refused: list[rm.StateError] = []

    def work() -> None:
        while engine_unfinished():
            try:
                engine.step()
            except rm.StateError as error:
                refused.append(error)

    def engine_unfinished() -> bool:
        try:
            return engine.unfinished() > 0
        except rm.StateError as error:
            refused.append(error)
            return True

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert refused
    assert all("another thread" in str(error) for error in refused)
    assert [len(output.outputs[0].token_ids) for output in gen.poll(min_outputs=32)] == [100] * 32


@pytest.mark.parametrize("call", ["generate", "submit", "score", "sync_weights"])
def test_an_interrupt_leaves_nothing_behind(gen: rm.Generator, call: str) -> None:
    """Ctrl-C at twelve moments of a call: between two requests of an add, in a step, between two
    tensors of a sync. The generator works afterwards."""
    before = fingerprint(gen)
    many = [[1, 2, 3]] * 300

    def slow_weights() -> Iterator[tuple[str, Any]]:
        for entry in OTHER_STATE.items():
            time.sleep(0.003)
            yield entry

    calls = {
        "generate": lambda: gen.generate(many, rm.SamplingParams(max_tokens=100), use_tqdm=False),
        "submit": lambda: gen.submit(many * 30, PARAMS),
        "score": lambda: gen.score([list(range(100))] * 300),
        "sync_weights": lambda: gen.sync_weights(slow_weights()),
    }
    interrupted = 0
    previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
    gc.disable()  # a signal in gc.callbacks (hypothesis has one) raises nothing
    try:
        for delay in np.linspace(0.0005, 0.03, 12):
            try:
                signal.setitimer(signal.ITIMER_REAL, delay)
                calls[call]()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                interrupted += 1
            gen.abort()
            gen.poll()
            assert gen.metrics()["running"] == gen.metrics()["waiting"] == 0
            assert gen._engine.ids() == []
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        gc.enable()
    assert interrupted >= 3
    assert fingerprint(gen) == before


def run_script(body: str) -> subprocess.CompletedProcess[str]:
    """Runs a program in a fresh interpreter with a synced generator `gen`."""
    head = """
        import os, sys, threading, warnings
        import numpy as np
        import rollmesh as rm
        from helpers import numpy_state_dict, tiny_config, tiny_spec
        gen = rm.Generator(tiny_spec(), dtype="float32", threads=2, kv_cache_gib=0.004,
            max_model_len=128)
        gen.sync_weights(numpy_state_dict(tiny_config()))
    """
    script = textwrap.dedent(head) + textwrap.dedent(body)
    paths = sys.path
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    command = [sys.executable, "-X", "faulthandler", "-c", script]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def test_fork() -> None:
    """The child cannot use the generator, can make another, and does not affect the parent's."""
    done = run_script("""
        before = gen.generate([[1, 2, 3]], use_tqdm=False)[0].outputs[0].logprobs
        warnings.simplefilter("ignore")
        child = os.fork()
        if child == 0:
            refused = 0
            generate = lambda: gen.generate([[1]], use_tqdm=False)
            sync = lambda: gen.sync_weights({})
            for call in (generate, sync, gen.metrics, gen.manifest, gen.begin_sync):
                try:
                    call()
                except rm.StateError as error:
                    refused += "child" in str(error)
            gen.close()
            own = rm.Generator(tiny_spec(), dtype="float32", threads=2, kv_cache_gib=0.004,
                max_model_len=128)
            own.sync_weights(numpy_state_dict(tiny_config()))
            same = own.generate([[1, 2, 3]], rm.SamplingParams(temperature=0.0), use_tqdm=False)
            own.close()
            del gen
            sys.exit(7 if refused == 5 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        gen.generate([[1, 2, 3]], use_tqdm=False)
    """)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.quick(2)
@pytest.mark.parametrize("how", ["plain", "cycle", "daemon", "requests", "sync", "many"])
def test_interpreter_exit_with_a_live_engine(how: str) -> None:
    body = {
        "plain": "",
        "cycle": "gen.self = gen",
        "daemon": """
            def work():
                while True:
                    gen.generate([[1, 2, 3]] * 8, rm.SamplingParams(max_tokens=100), use_tqdm=False)
            threading.Thread(target=work, daemon=True).start()
            gen.metrics()
        """,
        "requests": "gen.submit([[1, 2, 3]] * 4); gen.poll()",
        "sync": "sync = gen.begin_sync()",
        "many": """
            def dropped():
                for _ in range(50):
                    one = rm.Generator(tiny_spec(), kv_cache_gib=0.004, max_model_len=128)
                    one.metrics()
            warnings.simplefilter("error")
            dropped()
        """,
    }[how]
    done = run_script(body)
    assert (done.returncode, done.stderr) == (0, "")


# -------------------------------------------------------------------------- objects of the caller


def test_references_are_balanced(gen: rm.Generator) -> None:
    name = "model.norm.weight"
    state = {key: value.copy() for key, value in OTHER_STATE.items()}
    counts = {key: sys.getrefcount(value) for key, value in state.items()}
    gen.sync_weights(state)
    state[name] = state[name].astype(np.float64)
    with pytest.raises(rm.DTypeError):
        gen.sync_weights(state)
    counts[name] = counts["lm_head.weight"]
    assert {key: sys.getrefcount(value) for key, value in state.items()} == counts


def test_a_failed_sync_leaves_the_callers_frames(gen: rm.Generator) -> None:
    """The frames are for debuggers: the locals of an iterator that raises are still in the
    traceback."""

    def entries() -> Iterator[tuple[str, Any]]:
        here = next(iter(OTHER_STATE.items()))
        yield here
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone") as caught:
        gen.sync_weights(entries())
    assert caught.traceback[-1].locals["here"][0] in OTHER_STATE


def test_weights_may_go_away_after_the_push(gen: rm.Generator) -> None:
    """The engine keeps copies: later changes of the trainer's tensors have no effect."""
    state = {name: value.copy() for name, value in STATE.items()}
    gen.sync_weights(state)
    before = fingerprint(gen)
    for value in state.values():
        value.fill(np.nan)
    assert fingerprint(gen) == before


def test_a_call_that_arrives_after_the_end_is_refused() -> None:
    """Another thread may have passed the check of an open generator before `close` ended it."""
    generator = make()
    generator.close()
    call = Call(lambda: None)
    generator._loop.post(call)
    assert call.is_done
    assert isinstance(call.error, rm.StateError)
    call.news.get(timeout=1)  # the caller is woken

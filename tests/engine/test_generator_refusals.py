"""Calls that end early or are refused: aborted scores, a poll that fails half way, seeds after a
refusal, wrong arguments. The oracle is the same as in test_requests.py: the observable state is
unchanged, and results contain only computed values.
"""

from __future__ import annotations

import math
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from helpers import tiny_spec
from test_requests import OTHER_STATE, PARAMS, PROMPT, STATE, VOCAB, fingerprint, make

import rollmesh as rm
from rollmesh import ops


@pytest.fixture
def gen() -> Iterator[rm.Generator]:
    with make() as generator:
        generator.sync_weights(STATE, version=3)
        yield generator


# --------------------------------------------------------------- what ends early, what is refused
def after_steps(gen: rm.Generator, steps: int, act: Callable[[], Any]) -> threading.Thread:
    """A thread that acts once the generator has made that many more steps."""
    start = gen.metrics()["steps"]

    def wait_and_act() -> None:
        while gen.metrics()["steps"] < start + steps:
            time.sleep(0)
        act()

    thread = threading.Thread(target=wait_and_act)
    thread.start()
    return thread


@pytest.mark.parametrize("how", ["abort", "pause", "sync"])
@pytest.mark.parametrize("call", ["score", "logits"])
def test_an_aborted_score_is_an_error_not_zeros(how: str, call: str) -> None:
    acts: dict[str, Callable[[rm.Generator], Any]] = {
        "abort": lambda gen: gen.abort(),
        "pause": lambda gen: gen.pause("abort"),
        "sync": lambda gen: gen.sync_weights(OTHER_STATE, inflight="abort"),
    }
    # Some 2000 steps, so that the other thread calls in between.
    with make(max_num_batched_tokens=2, enable_prefix_caching=False) as gen:
        gen.sync_weights(STATE, version=3)
        thread = after_steps(gen, 5, lambda: acts[how](gen))
        with pytest.raises(rm.StateError, match="aborted"):
            getattr(gen, call)([list(range(100))] * 40)
        thread.join()
        assert gen._engine.ids() == []


def test_prompt_logprobs_of_an_aborted_prefill_are_nan_where_not_computed() -> None:
    with make(max_num_batched_tokens=16) as gen:
        gen.sync_weights(STATE, version=3)
        want = gen.score([list(range(100))])[0]
        gen.reset_prefix_cache()
        gen.submit(list(range(100)), rm.SamplingParams(prompt_logprobs=2))
        assert gen.poll() == gen.poll() == []
        gen.abort()
        (output,) = gen.poll()
        assert output.prompt_logprobs is not None
        assert output.prompt_top_logprobs is not None
        assert output.prompt_logprobs[:32].tobytes() == want[:32].tobytes()
        assert np.isnan(output.prompt_logprobs[32:]).all()
        assert np.isnan(output.prompt_top_logprobs.logprobs[32:]).all()
        assert (output.prompt_top_logprobs.ids[32:] == -1).all()
        assert not np.isnan(output.prompt_top_logprobs.logprobs[:32]).any()


class FailingTokenizer:
    """Decodes to "x"es; raises `error` on a text with the token `bad`."""

    bad = -1
    error: BaseException = ZeroDivisionError("user code")

    def encode(self, text: str) -> list[int]:
        return [ord(c) % VOCAB for c in text]

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        if self.bad in ids:
            raise self.error
        return "x" * len(ids)


def test_poll_loses_nothing_when_a_text_cannot_be_decoded() -> None:
    tokenizer = FailingTokenizer()
    with make(tokenizer=tokenizer) as gen:
        gen.sync_weights(STATE, version=3)
        prompts, counts = [PROMPT, [*PROMPT, VOCAB - 1], PROMPT], (3, 4, 3)
        params = [rm.SamplingParams(max_tokens=count, ignore_eos=True) for count in counts]
        ids = gen.submit(prompts, params)
        tokenizer.bad = VOCAB - 1
        outputs = gen.poll(min_outputs=3)
        assert [output.request_id for output in outputs] == ids
        assert [type(output.error) for output in outputs] == [
            type(None),
            ZeroDivisionError,
            type(None),
        ]
        assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 4, 3]
        tokenizer.error = KeyboardInterrupt()
        ids = gen.submit(prompts, params)
        with pytest.raises(KeyboardInterrupt):
            gen.poll(min_outputs=3)
        tokenizer.bad = -1
        assert [output.request_id for output in gen.poll(min_outputs=3)] == ids
        assert gen._engine.ids() == gen.poll() == []


SHORT_AND_LONG = [rm.SamplingParams(max_tokens=count, ignore_eos=True) for count in (2, 3000)]


@pytest.fixture
def long_gen() -> Iterator[rm.Generator]:
    """A generator with room for a request that runs long enough for another thread to call in
    between."""
    with make(max_model_len=4096, kv_cache_gib=0.1) as generator:
        generator.sync_weights(STATE, version=3)
        yield generator


def test_poll_loses_nothing_when_a_part_falls_asleep(long_gen: rm.Generator) -> None:
    """The KV cache goes to sleep, from another thread, while a poll holds one finished request and
    waits for a second."""
    gen = long_gen
    ids = gen.submit([PROMPT] * 2, SHORT_AND_LONG)
    thread = after_steps(gen, 5, lambda: gen.sleep("kv"))
    with pytest.raises(rm.StateError, match="asleep"):
        gen.poll(min_outputs=2)
    thread.join()
    gen.wake("kv")
    assert [output.request_id for output in gen.poll(min_outputs=2)] == ids


def test_poll_gives_what_it_has_when_its_turn_does_not_come_in_time(long_gen: rm.Generator) -> None:
    gen = long_gen
    ids = gen.submit([PROMPT] * 2, SHORT_AND_LONG)

    def weights() -> Iterator[tuple[str, Any]]:
        time.sleep(1.0)
        yield from OTHER_STATE.items()

    thread = after_steps(gen, 5, lambda: gen.sync_weights(weights(), inflight="keep"))
    outputs = gen.poll(min_outputs=2, timeout=0.5)
    thread.join()
    assert [output.request_id for output in outputs] == ids[:1]
    assert [output.request_id for output in gen.poll(min_outputs=2)] == ids[1:]


def test_what_is_refused_or_scored_does_not_move_the_seeds_of_later_requests() -> None:
    def refused_submit(gen: rm.Generator) -> None:
        with pytest.raises(rm.RequestError):
            gen.submit([PROMPT, PROMPT, [-1]])

    def refused_score(gen: rm.Generator) -> None:
        with pytest.raises(rm.RequestError):
            gen.score([PROMPT, [VOCAB]])

    def refused_generate(gen: rm.Generator) -> None:
        gen.generate([[VOCAB], []], use_tqdm=False, on_error="return")

    def interrupted_generate(gen: rm.Generator) -> None:
        previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with pytest.raises(KeyboardInterrupt):
                gen.generate(
                    [PROMPT] * 500,
                    rm.SamplingParams(max_tokens=100, ignore_eos=True),
                    use_tqdm=False,
                )
        finally:
            signal.signal(signal.SIGALRM, previous)

    calls: list[Callable[[rm.Generator], Any]] = [
        lambda gen: None,
        refused_submit,
        refused_score,
        refused_generate,
        interrupted_generate,
        lambda gen: gen.score([PROMPT, PROMPT]),
        lambda gen: gen.logits([PROMPT]),
    ]
    seen = []
    for call in calls:
        with make() as gen:
            gen.sync_weights(STATE, version=3)
            call(gen)
            outputs = gen.generate([PROMPT, PROMPT], use_tqdm=False)
            seen.append(
                [
                    output.outputs[0].token_ids.tobytes() + output.outputs[0].logprobs.tobytes()
                    for output in outputs
                ]
            )
    assert seen == seen[:1] * len(calls)
    assert seen[0][0] != seen[0][1]


# Any: many calls have an argument of a wrong type.
BAD_CALLS: dict[str, tuple[type[rm.Error], Callable[[Any], Any]]] = {
    "timeout 1e300": (rm.ConfigError, lambda gen: gen.poll(timeout=1e300)),
    "timeout 10**400": (rm.ConfigError, lambda gen: gen.generate(PROMPT, PARAMS, timeout=10**400)),
    "timeout nan": (rm.ConfigError, lambda gen: gen.poll(timeout=math.nan)),
    "version text": (rm.VersionError, lambda gen: gen.sync_weights(STATE, version="7")),
    "version 7.9": (rm.VersionError, lambda gen: gen.sync_weights(STATE, version=7.9)),
    "version nan": (rm.VersionError, lambda gen: gen.begin_sync(version=math.nan)),
    "cast 1": (rm.ConfigError, lambda gen: gen.sync_weights(STATE, cast=1)),
    "strict None": (rm.ConfigError, lambda gen: gen.sync_weights(STATE, strict=None)),
    "in place with restart": (
        rm.ConfigError,
        lambda gen: gen.sync_weights(STATE, mode="inplace", inflight="restart"),
    ),
    "in place with keep": (
        rm.ConfigError,
        lambda gen: gen.begin_sync(mode="inplace", inflight="keep"),
    ),
    "keep_kv text": (
        rm.ConfigError,
        lambda gen: gen.sync_weights(STATE, keep_kv="no", inflight="keep"),
    ),
    "prefix caching text": (rm.ConfigError, lambda gen: make(enable_prefix_caching="no")),
    "prompts without dims": (
        rm.RequestError,
        lambda gen: gen.generate(np.array(5), use_tqdm=False),
    ),
    "ids without dims": (rm.RequestError, lambda gen: gen.abort(np.array(5))),
    "stop tokens without dims": (rm.ConfigError, lambda gen: make(eos_token_ids=np.array(5))),
    "abort bytes": (rm.RequestError, lambda gen: gen.abort(b"x")),
    "stop tokens bytes": (rm.RequestError, lambda gen: rm.SamplingParams(stop_token_ids=b"x")),
    "end tokens bytearray": (rm.ConfigError, lambda gen: make(eos_token_ids=bytearray(b"x"))),
    "abort 1.5": (rm.RequestError, lambda gen: gen.abort(1.5)),
    "abort text": (rm.RequestError, lambda gen: gen.abort("x")),
    "sleep None": (rm.ConfigError, lambda gen: gen.sleep(None)),
    "sleep 5": (rm.ConfigError, lambda gen: gen.sleep(5)),
    "sleep without dims": (rm.ConfigError, lambda gen: gen.sleep(np.array(3))),
    "sleep nested": (rm.ConfigError, lambda gen: gen.sleep([["kv"]])),
    "poll text": (rm.ConfigError, lambda gen: gen.poll("x")),
    "bytes": (rm.RequestError, lambda gen: gen.generate(b"abc", PARAMS, use_tqdm=False)),
    "masked": (
        rm.RequestError,
        lambda gen: gen.generate(np.ma.masked_array([1, 2], [0, 1]), PARAMS, use_tqdm=False),
    ),
    "masked rows": (rm.RequestError, lambda gen: gen.score([np.ma.masked_array([1, 2])])),
    "bytearray": (
        rm.RequestError,
        lambda gen: gen.generate([bytearray(b"abc")], PARAMS, use_tqdm=False),
    ),
    "chat variables 3": (
        rm.RequestError,
        lambda gen: gen.chat([{"role": "user", "content": "a"}], chat_template_kwargs=3),
    ),
    "chat variables, an empty list": (
        rm.RequestError,
        lambda gen: gen.chat([{"role": "user", "content": "a"}], chat_template_kwargs=[]),
    ),
    "use_tqdm array": (
        rm.ConfigError,
        lambda gen: gen.generate(PROMPT, PARAMS, use_tqdm=np.arange(2)),
    ),
    "weights without dims": (
        rm.UnsupportedTensorError,
        lambda gen: gen.sync_weights(np.array(3)),
    ),
    "weights array": (rm.UnsupportedTensorError, lambda gen: gen.sync_weights(np.arange(3))),
    "scorer 3": (rm.ConfigError, lambda gen: gen.self_test(3)),
    "max_tokens None": (rm.ConfigError, lambda gen: gen.self_test(gen.score, max_tokens=None)),
    "no prompts": (rm.ConfigError, lambda gen: gen.self_test(gen.score, prompts=[])),
    "scorer None": (rm.ConfigError, lambda gen: gen.self_test(None)),
    **{
        f"scorer of {name}": (
            rm.ConfigError,
            lambda gen, scores=scores: gen.self_test(lambda ids: [scores] * len(ids)),
        )
        for name, scores in {
            "text": "a",
            "objects": object(),
            "rows of different lengths": [[1.0], [2.0, 3.0]],
            "dicts": {},
            "complex numbers": np.ones(39, complex),
        }.items()
    },
    "tokenizer array": (rm.ConfigError, lambda gen: make(tokenizer=np.array(1))),
    "tokenizer list": (rm.ConfigError, lambda gen: make(tokenizer=["a"])),
    "top_p underflow": (rm.RequestError, lambda gen: rm.SamplingParams(top_p=1e-50)),
    "min_p underflow": (rm.RequestError, lambda gen: rm.SamplingParams(min_p=1e-50)),
    "temperature underflow": (rm.RequestError, lambda gen: rm.SamplingParams(temperature=1e-50)),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_arguments_have_typed_errors_and_change_nothing(gen: rm.Generator, name: str) -> None:
    before = fingerprint(gen)
    kind, call = BAD_CALLS[name]
    with pytest.raises(kind):
        call(gen)
    assert fingerprint(gen) == before


@pytest.mark.parametrize("prompt", [{"prompt_token_ids": [1, 2]}, {"prompt": "a"}])
def test_a_prompt_in_vllms_form_says_what_to_give(
    gen: rm.Generator, prompt: dict[str, Any]
) -> None:
    with pytest.raises(
        rm.RequestError,
        match=r"^prompt 1: expected text or token ids, got a dict; give its prompt or "
        r"prompt_token_ids alone$",
    ):
        gen.generate([[1], prompt], PARAMS, use_tqdm=False)


class Long(Sequence[Any]):
    """A sequence that repeats one item. A read beyond the maximum length of a list counts as a read
    of all items."""

    def __init__(self, item: Any, length: int):
        self.item, self.length = item, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        assert index <= 2**24, "walked on"
        return self.item


def endless(item: Any, most: int) -> Iterator[Any]:
    for _ in range(most + 1):
        yield item
    raise AssertionError("walked on")


# The error, an item, the limit of their number, the call.
LISTS: dict[str, tuple[type[Exception], Any, int, Callable[[rm.Generator, Any], object]]] = {
    "parts": (rm.ConfigError, "kv", 2, lambda gen, value: gen.sleep(value)),
    "parts to wake": (rm.ConfigError, "kv", 2, lambda gen, value: gen.wake(value)),
    "eos_token_ids": (rm.ConfigError, 7, VOCAB, lambda gen, value: make(eos_token_ids=value)),
    "prompts": (
        rm.RequestError,
        [1, 2],
        2**24,
        lambda gen, value: gen.generate(value, use_tqdm=False),
    ),
    "one of the prompts": (rm.RequestError, 5, 0, lambda gen, value: gen.submit([[1], value])),
    "params": (
        rm.RequestError,
        PARAMS,
        2,
        lambda gen, value: gen.generate([[1], [2]], value, use_tqdm=False),
    ),
    "ids": (rm.RequestError, 3, 2**24, lambda gen, value: gen.abort(value)),
    "stop": (rm.RequestError, "a", 2**20, lambda gen, value: rm.SamplingParams(stop=value)),
    "stop_token_ids": (
        rm.RequestError,
        9,
        2**20,
        lambda gen, value: rm.SamplingParams(stop_token_ids=value),
    ),
    "banned": (rm.RequestError, 9, 2**20, lambda gen, value: ops.SampleParams(banned=value)),
    "params of rows": (
        rm.ConfigError,
        ops.SampleParams(),
        2,
        lambda gen, value: ops.sample(
            np.zeros((2, 8), np.float32), np.zeros((2, 2), np.float32), value
        ),
    ),
}


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", LISTS)
def test_a_list_without_end_is_refused_before_it_is_walked(gen: rm.Generator, name: str) -> None:
    before = fingerprint(gen)
    kind, item, most, call = LISTS[name]
    for values in (endless(item, most), Long(item, 10**9), Long(item, 10**30)):
        with pytest.raises(kind):
            call(gen, values)
    assert fingerprint(gen) == before


@pytest.mark.parametrize("share", [5e-324, 1e-310, np.float64(2e-308)])
def test_a_share_that_the_engine_would_take_for_none(share: float) -> None:
    with pytest.raises(
        rm.ConfigError,
        match=rf"memory_fraction: expected at least 2\.225.*got {re.escape(repr(share))}",
    ):
        make(kv_cache_gib=None, memory_fraction=share)


def test_unusual_arguments_that_are_fine(gen: rm.Generator) -> None:
    (request,) = gen.submit(PROMPT, PARAMS)
    gen.abort(np.int64(request))  # type: ignore[arg-type]
    (output,) = gen.poll(min_outputs=1, timeout=math.inf)
    assert output.outputs[0].finish_reason == "abort"
    gen.sync_weights(STATE, version=np.int64(9), strict=np.bool_(True), timeout=math.inf)  # type: ignore[arg-type]
    assert gen.version == 9


HUGE = (
    "x" * 10**6,
    10**5000,
    ["x" * 10**6] * 1000,
    "\x1b[31m\n",
    np.full(10**6, 7.5),
    np.arange(3),
)
CALLS_WITH_ANYTHING: dict[str, Callable[[rm.Generator, Any], Any]] = {
    "timeout": lambda gen, value: gen.poll(timeout=value),
    "on_error": lambda gen, value: gen.generate(PROMPT, PARAMS, on_error=value),
    "request id": lambda gen, value: gen.abort([[value]]),  # type: ignore[list-item]
    "parts": lambda gen, value: gen.sleep(value),
    "pause mode": lambda gen, value: gen.pause(value),
    "min_outputs": lambda gen, value: gen.poll(value),
    "version": lambda gen, value: gen.sync_weights(STATE, version=value),
    "cast": lambda gen, value: gen.sync_weights(STATE, cast=value),
    "mode": lambda gen, value: gen.sync_weights(STATE, mode=value),
    "inflight": lambda gen, value: gen.begin_sync(inflight=value),
    "threshold": lambda gen, value: gen.self_test(
        lambda ids: [], threshold=value if isinstance(value, str) else [value]
    ),
    "n": lambda gen, value: rm.SamplingParams(n=value),
    "temperature": lambda gen, value: rm.SamplingParams(temperature=value),
    "ignore_eos": lambda gen, value: rm.SamplingParams(ignore_eos=value),
    "stop": lambda gen, value: rm.SamplingParams(stop=[value, ""]),
    "stop_token_ids": lambda gen, value: rm.SamplingParams(stop_token_ids=[value]),
    "tp": lambda gen, value: rm.Mesh(tp=value),
    **{
        name: lambda gen, value, name=name: make(**{name: value})  # type: ignore[misc]
        for name in (
            "threads",
            "max_model_len",
            "kv_cache_gib",
            "dtype",
            "isa",
            "device",
            "ep_backend",
            "comm",
            "seed",
            "block_size",
        )
    },
}


@pytest.mark.parametrize("name", CALLS_WITH_ANYTHING)
def test_messages_are_short_whatever_was_given(gen: rm.Generator, name: str) -> None:
    for value in HUGE:
        with pytest.raises(rm.Error) as caught:
            CALLS_WITH_ANYTHING[name](gen, value)
        said = str(caught.value)
        assert name in said
        assert len(said) < 500
        assert said.isprintable()


@pytest.mark.parametrize(
    "given", [1.5, None, True, "x", [1.5], [[1]], 10**5000], ids=lambda given: type(given).__name__
)
def test_end_tokens_that_are_none(given: object) -> None:
    if given is None:
        make(eos_token_ids=given).close()
        return
    with pytest.raises(rm.ConfigError, match="eos_token_ids"):
        make(eos_token_ids=given)


SAID: dict[str, tuple[type[rm.Error], Callable[[rm.Generator], Any]]] = {
    "mode='inplace': expected inflight='wait', got 'abort'": (
        rm.ConfigError,
        lambda gen: gen.begin_sync(mode="inplace", inflight="abort"),
    ),
    "parts: expected 'weights', 'kv' or both, got array(3)": (
        rm.ConfigError,
        lambda gen: gen.sleep(np.array(3)),
    ),  # type: ignore[arg-type]
    "stop_token_ids: expected a list of items, got b'x'": (
        rm.RequestError,
        lambda gen: rm.SamplingParams(stop_token_ids=b"x"),
    ),
    "prompt 0: expected text or token ids, got bytes": (
        rm.RequestError,
        lambda gen: gen.submit([b"x"]),
    ),
    "prompt 1: expected ids in [0, vocab_size), got -1": (
        rm.RequestError,
        lambda gen: gen.submit([PROMPT, [-1]]),
    ),
}


@pytest.mark.parametrize("said", SAID)
def test_messages_say_each_name_once(gen: rm.Generator, said: str) -> None:
    kind, call = SAID[said]
    with pytest.raises(kind, match=f"^{re.escape(said)}$"):
        call(gen)


def test_messages_name_the_bound() -> None:
    with pytest.raises(rm.RequestError, match=str(2**62)):
        rm.SamplingParams(max_tokens=10**20)
    with pytest.raises(rm.ConfigError, match="below 1048576"):
        make(kv_cache_gib=1e9)
    with pytest.raises(
        rm.CapacityError, match=r"kv_cache_gib: expected at least a page of .* got 0 bytes"
    ):
        make(kv_cache_gib=1e-12)


def test_a_refused_version_leaves_an_open_set_alone(gen: rm.Generator) -> None:
    with gen.begin_sync() as sync:
        for name, tensor in OTHER_STATE.items():
            sync.push(name, tensor)
        for refused in (
            lambda: gen.begin_sync(version=3),
            lambda: gen.sync_weights(STATE, version=2),
        ):
            with pytest.raises(rm.VersionError):
                refused()
    assert sync.report is not None
    assert gen.version == sync.report.version == 4


@pytest.mark.parametrize(
    "mesh, backend, words",
    [
        (rm.Mesh(dp=2, ep=2), "local_allreduce", "expected ep=tp, got ep=2 and tp=1"),
        (rm.Mesh(tp=2, ep=2), "disabled", 'expected a token dispatcher for ep=2, got "disabled"'),
    ],
)
def test_a_dispatcher_that_does_not_fit_the_mesh_is_refused(
    mesh: rm.Mesh, backend: str, words: str
) -> None:
    with pytest.raises(rm.ConfigError, match=words):
        rm.Generator(tiny_spec(moe=True), mesh=mesh, ep_backend=backend, kv_cache_gib=0.004)

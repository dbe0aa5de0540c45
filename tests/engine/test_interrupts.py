"""A Ctrl-C at any moment of a call.

CPython checks for signals at the beginning of a Python function, after a call of a C function and
at the end of a loop's body. A profile function is called at the first two of these, and its
exception is raised there. So each call is repeated and interrupted at its first such place, its
second and so on, until it finishes. This covers with certainty what real signals (test_requests.py)
hit by chance."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from helpers import numpy_state_dict, tiny_config, tiny_spec

import rollmesh as rm
from rollmesh.sources import (
    DeltaDecoder,
    DeltaEncoder,
    DeltaReader,
    DeltaWriter,
    SharedReader,
    SharedWriter,
)
from rollmesh.vllm.trainer import WeightSender
from rollmesh.weights.transport import segment

PROMPT = [5, 9, 77, 3]
PARAMS = rm.SamplingParams(max_tokens=3, n=2, seed=7, stop=["never"])
STATE = numpy_state_dict(tiny_config())
OTHER_STATE = numpy_state_dict(tiny_config(), seed=1)


class Letters:
    def encode(self, text: str) -> list[int]:
        return [ord(c) % 64 for c in text]

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(chr(64 + i % 26) for i in ids)


class Workers:
    """vLLM's four calls, for workers that accept everything."""

    def init_weight_transfer_engine(self, info: Any) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, info: Any) -> None: ...

    def finish_weight_update(self, version: Any = None) -> None: ...


@pytest.fixture
def gen() -> Iterator[rm.Generator]:
    with rm.Generator(
        tiny_spec(),
        tokenizer=Letters(),
        eos_token_ids=[],
        dtype="float32",
        threads=1,
        kv_cache_gib=0.004,
        max_model_len=128,
    ) as generator:
        generator.sync_weights(STATE, version=3)
        yield generator


class Alarm(Exception):
    """An exception other than KeyboardInterrupt from a signal handler."""


PLACES = ("call", "c_return")  # where CPython 3.11 checks for signals


def interrupted_at(
    place: int,
    call: Callable[[], Any],
    error: type[BaseException] = KeyboardInterrupt,
    places: tuple[str, ...] = PLACES,
) -> bool:
    """Runs `call` with a Ctrl-C at that place. False: it has ended before."""
    left = place

    def count(frame: FrameType, event: str, what: Any) -> None:
        nonlocal left
        if event in places:
            left -= 1
            if left < 0:
                sys.setprofile(None)
                raise error

    # A collection calls gc.callbacks (hypothesis has one), which would count as places of some
    # calls only.
    gc.disable()
    try:
        sys.setprofile(count)
        call()
        sys.setprofile(None)
    except error:
        pass
    finally:
        sys.setprofile(None)
        gc.enable()
    return left < 0


def fingerprint(generator: rm.Generator) -> tuple[Any, ...]:
    output = generator.generate(PROMPT, PARAMS, use_tqdm=False)[0].outputs[0]
    return output.token_ids.tobytes(), output.logprobs.tobytes()


def submit_and_poll(gen: rm.Generator) -> None:
    ids = gen.submit([PROMPT, PROMPT[:2]], PARAMS)
    assert sorted(output.request_id for output in gen.poll(min_outputs=2)) == ids


def push(gen: rm.Generator) -> None:
    with gen.begin_sync() as sync:
        for name, tensor in STATE.items():
            sync.push(name, tensor)


def push_without_a_block(gen: rm.Generator) -> None:
    sync = gen.begin_sync()
    for name, tensor in STATE.items():
        sync.push(name, tensor)
    sync.commit()


def restart(gen: rm.Generator) -> None:
    gen.submit(PROMPT, PARAMS)
    gen.poll()
    gen.sync_weights(STATE, inflight="restart")
    gen.poll(min_outputs=1)


def rest(gen: rm.Generator) -> None:
    gen.pause("keep")
    gen.resume()
    gen.sleep("kv")
    gen.wake("kv")
    gen.sleep(keep_weights=True)
    gen.wake()


CALLS: dict[str, Callable[[rm.Generator], Any]] = {
    "generate": lambda gen: gen.generate(
        [PROMPT, "text", [1, -1]], PARAMS, use_tqdm=False, on_error="return"
    ),
    "submit": lambda gen: gen.submit([PROMPT, PROMPT[:2]], PARAMS),
    "submit and poll": submit_and_poll,
    "score": lambda gen: gen.score([PROMPT, PROMPT[:3]]),
    "logits": lambda gen: gen.logits([PROMPT]),
    "sync_weights": lambda gen: gen.sync_weights(STATE),
    "sync_weights of pairs": lambda gen: gen.sync_weights(iter(STATE.items())),
    "push": push,
    "push without a block": push_without_a_block,
    "restart": restart,
    "rest": rest,
}


@pytest.mark.quick(4)
@pytest.mark.parametrize("name", CALLS)
def test_an_interrupt_anywhere_leaves_nothing_behind(gen: rm.Generator, name: str) -> None:
    """Later calls are not refused as re-entry, the engine is empty, and it serves as before. The
    next poll returns what the interrupted poll had taken."""
    call = CALLS[name]
    call(gen)
    gen.abort()
    gen.poll()
    before = fingerprint(gen)
    place = 0
    while interrupted_at(place, lambda: call(gen)):
        assert gen.version == gen._engine.sync_state()[0], place
        gen.resume()
        gen.wake()
        gen.abort()
        gen.poll()
        assert gen._engine.ids() == [], place
        assert gen._requests._records == {}, place
        assert gen._requests._watched == set(), place
        assert gen.version == gen._engine.sync_state()[0], place
        if place % 16 == 0:
            assert fingerprint(gen) == before, place
        place += 1
    assert place > 20
    gen.abort()
    gen.poll()
    assert fingerprint(gen) == before
    gen.sync_weights(STATE)
    assert fingerprint(gen) == before


def test_a_handler_that_raises_undoes_a_submit(gen: rm.Generator) -> None:
    place, hit = 0, True
    while hit:
        ids: list[int] = []
        hit = interrupted_at(
            place,
            lambda: ids.extend(gen.submit([PROMPT, PROMPT[:2]], PARAMS)),  # noqa: B023
            Alarm,
        )
        assert gen._engine.ids() == ids, place
        gen.abort()
        gen.poll()
        place += 1
    assert place > 20


def test_an_interrupted_poll_loses_nothing(gen: rm.Generator) -> None:
    """The next poll returns, once, the outputs that the interrupted poll had taken, with the tokens
    of an uninterrupted poll, up to their stop strings."""
    prompts = [PROMPT, PROMPT[:2], PROMPT[:3]]
    free = [
        output.outputs[0].text
        for output in gen.generate(prompts, rm.SamplingParams(max_tokens=9, seed=7), use_tqdm=False)
    ]
    # One stop string ends with the last allowed token.
    params = rm.SamplingParams(max_tokens=9, seed=7, stop=[free[0][-3:], free[1][2:5]])

    def told(outputs: list[rm.RequestOutput]) -> list[Any]:
        return [
            (o.outputs[0].token_ids.tolist(), o.outputs[0].text, o.outputs[0].stop_reason)
            for o in outputs
        ]

    wanted = told(gen.generate(prompts, params, use_tqdm=False))
    assert [reason for _, _, reason in wanted] == [*params.stop, None]
    place, hit = 0, True
    while hit:
        taken: list[rm.RequestOutput] = []
        ids = gen.submit(prompts, params)
        hit = interrupted_at(place, lambda: taken.extend(gen.poll(min_outputs=3)))  # noqa: B023
        while len(taken) < 3:
            taken += gen.poll(min_outputs=3 - len(taken))
        assert [output.request_id for output in taken] == ids, place
        assert told(taken) == wanted, place
        assert gen.poll() == [], place
        place += 1
    assert place > 20


def test_an_interrupted_restart_is_one_or_none(gen: rm.Generator) -> None:
    """Whichever version serves then, a running request gives the same result as alone, with the
    stop string at the same place."""
    states = [OTHER_STATE, STATE]  # by the version's lowest bit
    free = rm.SamplingParams(max_tokens=12, seed=7)
    texts = []
    for version in (4, 5):
        gen.sync_weights(states[version % 2], version)
        texts.append(gen.generate(PROMPT, free, use_tqdm=False)[0].outputs[0].text)
    # The stop strings cannot end the request before the sync.
    letters = set("".join(texts)) - {letter for text in texts for letter in text[:5]}
    params = rm.SamplingParams(max_tokens=12, seed=7, stop=sorted(letters))
    wanted = []
    for version in (6, 7):
        gen.sync_weights(states[version % 2], version)
        wanted.append(gen.generate(PROMPT, params, use_tqdm=False)[0].outputs[0])
    assert {output.finish_reason for output in wanted} == {"stop"}
    assert wanted[0].text != wanted[1].text
    place, hit = 0, True
    while hit:
        gen.submit(PROMPT, params)
        for _ in range(3):
            gen.poll()
        assert gen.version is not None
        version = gen.version + 1
        hit = interrupted_at(
            place,
            lambda: gen.sync_weights(states[version % 2], version, inflight="restart"),  # noqa: B023
        )
        output, alone = gen.poll(min_outputs=1)[0].outputs[0], wanted[gen.version % 2]
        assert (output.token_ids.tolist(), output.text) == (alone.token_ids.tolist(), alone.text), (
            place
        )
        place += 1
    assert place > 100


# A folder that is being listed is closed as the listing goes, with a ResourceWarning.
@pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <posix.ScandirIterator:pytest.PytestUnraisableExceptionWarning"
)
# The interrupt may come between making the sender's coroutine and running it.
@pytest.mark.filterwarnings("ignore:coroutine '_Sending._send_paused' was never awaited")
@pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <coroutine object:pytest.PytestUnraisableExceptionWarning"
)
def test_an_interrupted_send_leaves_no_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sends to vLLM's workers, in blocks that grow. The sender keeps working."""
    monkeypatch.setattr(segment, "FOLDER", tmp_path)
    source = {f"t{i}": np.zeros((4, 5), np.float32) for i in range(3)}
    sender, place, hit = WeightSender(Workers(), block_bytes=170), 0, True
    cut_short = 0
    while hit:
        hit = interrupted_at(place, lambda: sender.send(source, 1))
        # Interrupted during its clean-up; the next send removes the file.
        cut_short += any(tmp_path.iterdir())
        sender.send(source, 2)
        assert not any(path for path in tmp_path.iterdir()), place
        place += 1
    assert cut_short < place // 20


# A folder that is being listed is closed as the listing goes, with a ResourceWarning.
@pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <posix.ScandirIterator:pytest.PytestUnraisableExceptionWarning"
)
def test_an_interrupted_publish_is_one_or_none(tmp_path: Path) -> None:
    """After the interrupt, the writer's version equals the readers' version, that version is
    complete, and the store contains nothing else and no closed store."""
    states = [
        {"x": np.full(3, value, np.float32), "y": np.full((2, 2), value, np.float64)}
        for value in range(2)
    ]
    with SharedWriter(tmp_path) as writer, SharedReader(writer.address) as reader:
        writer.publish(states[0], version=0)
        path = Path(writer.address.rpartition(":")[0])
        place, hit, cut_short = 0, True, 0
        while hit:
            before = writer.version
            assert before is not None
            hit = interrupted_at(place, lambda: writer.publish(states[(before + 1) % 2]))  # noqa: B023
            assert reader.refresh() == writer.version, place
            assert writer.version is not None
            assert (reader["x"] == writer.version % 2).all(), place
            assert (reader["y"] == writer.version % 2).all(), place
            assert list(tmp_path.iterdir()) == [path], place
            cut_short += hit and writer.version == before
            place += 1
        assert 0 < cut_short < place - 1  # some came when it was current already
    place, hit = 0, True
    while hit:
        other = SharedWriter(tmp_path)
        other.publish(states[0])
        hit = interrupted_at(place, other.close)
        other.close()
        assert not any(tmp_path.iterdir()), place
        place += 1


@pytest.mark.quick(1)
# Some interrupts hit inside finalizers.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("threads", [1, 2])
def test_an_interrupted_publish_of_a_folder_is_one_or_none(tmp_path: Path, threads: int) -> None:
    """The writer's version equals the readers' version. The call can be repeated, and the next
    publish is again a delta against a base that readers have."""
    pytest.importorskip("zstandard")
    states = [
        {"x": np.full(3, value, np.float32), "y": np.full((2, 2), float(value))}
        for value in range(2)
    ]
    with DeltaWriter(tmp_path, whole_every=3) as writer:
        writer._encoder._threads = threads
        reader = DeltaReader(tmp_path)
        place, hit, cut_short = 0, True, 0
        while hit:
            version = writer.publish(states[place % 2])
            hit = interrupted_at(place, lambda: writer.publish(states[(place + 1) % 2]))  # noqa: B023
            assert writer.version in (version, version + 1)
            expected = states[(place + (writer.version != version)) % 2]
            for each in (reader, DeltaReader(tmp_path)):
                assert each.refresh() == writer.version, place
                assert all(np.array_equal(each[name], expected[name]) for name in expected), place
            cut_short += hit and writer.version == version
            place += 1
        assert 0 < cut_short < place - 1  # some came when it was published already
    assert not list(tmp_path.glob("*.being-written"))


# Some interrupts hit inside finalizers.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("threads", [1, 2])
def test_an_interrupted_delta_is_applied_or_not(threads: int) -> None:
    """Each tensor is of one version, and the next delta fits."""
    pytest.importorskip("zstandard")
    encoder, decoder = DeltaEncoder(threads), DeltaDecoder(threads)
    states = [
        {
            "dense": np.full(64, value, np.float32),
            "sparse": np.arange(64.0) + 64 * value * (np.arange(64) == 7),
        }
        for value in range(2)
    ]
    decoder.apply(encoder.encode(states[0], 0))
    place, hit, cut_short = 0, True, 0
    while hit:
        before = decoder.version
        assert before is not None
        message = encoder.encode(states[(before + 1) % 2], before + 1)
        hit = interrupted_at(
            place,
            lambda: decoder.apply(message),  # noqa: B023
            places=(*PLACES, "return"),
        )
        cut_short += decoder.version == before
        for name, array in states[int(decoder.version or 0) % 2].items():
            assert np.array_equal(decoder[name], array), place
        if decoder.version == before:
            decoder.apply(message)
        place += 1
    assert cut_short > 3

"""Requests take steps between the copies of a push, which stops them for a moment only.

Input: a tiny random model whose copies are cut into single tasks. Oracle: the digest of the same
set pushed while no request runs, and the tokens of an uninterrupted run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
from helpers import numpy_state_dict, tiny_config

import rollmesh as rm
from rollmesh import _core
from rollmesh.request.loop import Loan
from rollmesh.weights import plan
from rollmesh.weights.sync import SyncOptions
from rollmesh.weights.updates import Weights

CONFIG = tiny_config(True, num_hidden_layers=3)
OLD, NEW = numpy_state_dict(CONFIG, seed=1), numpy_state_dict(CONFIG, seed=2)
LONG = rm.SamplingParams(max_tokens=1500, seed=3, ignore_eos=True)


@pytest.fixture
def generator(monkeypatch: pytest.MonkeyPatch) -> Iterator[rm.Generator]:
    monkeypatch.setattr(plan, "PART_BYTES", 1)
    monkeypatch.setattr(plan, "STEP_AFTER_S", 0.0)
    with rm.Generator(
        rm.ModelSpec.from_hf(CONFIG),
        dtype="float32",
        max_model_len=2048,
        kv_cache_gib=0.05,
        threads=2,
    ) as made:
        made.sync_weights(OLD, version=1)
        yield made


def while_running(generator: rm.Generator, call: Callable[[], object]) -> rm.CompletionOutput:
    """Makes a call while a request runs. Returns the request's sample."""
    outputs: list[Any] = []
    thread = threading.Thread(
        target=lambda: outputs.extend(generator.generate([1, 2], LONG, use_tqdm=False))
    )
    before = generator.metrics()["generated_tokens"]
    thread.start()
    while generator.metrics()["generated_tokens"] == before:
        pass
    try:
        call()
    finally:
        thread.join()
    sample: rm.CompletionOutput = outputs[0].outputs[0]
    assert len(sample.token_ids) == LONG.max_tokens
    return sample


@pytest.mark.parametrize("inflight", ["keep", "wait", "restart"])
def test_a_request_takes_steps_during_a_push(generator: rm.Generator, inflight: Any) -> None:
    digest = generator.sync_weights(NEW, version=2).digest
    generator.sync_weights(OLD, version=3)
    steps: list[int] = []
    reports: list[rm.SyncReport] = []

    def push() -> None:
        steps.append(generator.metrics()["steps"])
        reports.append(generator.sync_weights(NEW, version=4, inflight=inflight))
        steps.append(generator.metrics()["steps"])

    sample = while_running(generator, push)
    [report] = reports
    assert report.digest == digest
    # At least a step before each check and after each copy, but at the beginning and the end.
    assert steps[1] - steps[0] > 3 * len(NEW) // 2
    assert 0 < report.pause_s <= report.seconds
    versions = set(sample.versions.tolist())
    assert versions == {"keep": {3, 4}, "wait": {3}, "restart": {4}}[inflight]


def test_a_request_takes_steps_during_a_push_of_an_iterator(generator: rm.Generator) -> None:
    steps: list[int] = []

    def push() -> None:
        steps.append(generator.metrics()["steps"])
        generator.sync_weights(iter(NEW.items()), version=4, inflight="keep")
        steps.append(generator.metrics()["steps"])

    while_running(generator, push)
    assert steps[1] - steps[0] > len(NEW) // 2


def test_requests_do_not_get_the_time_that_a_source_takes(
    generator: rm.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A deadline and Ctrl-C would wait for these steps."""
    kept, given = Loan.let_step, []

    def noted(loan: Loan, seconds: float) -> None:
        given.append(seconds)
        kept(loan, seconds)

    def slow() -> Iterator[tuple[str, Any]]:
        for index, entry in enumerate(NEW.items()):
            time.sleep(2 * plan.MOST_STEPS_S if index == 1 else 0)
            yield entry

    monkeypatch.setattr(Loan, "let_step", noted)
    while_running(generator, lambda: generator.sync_weights(slow(), version=2, inflight="keep"))
    assert max(given) == plan.MOST_STEPS_S


def test_an_error_in_the_last_part_undoes_the_push(generator: rm.Generator) -> None:
    alone = generator.generate([1, 2], LONG, use_tqdm=False)[0].outputs[0]
    last = list(NEW)[-1]
    broken = {**NEW, last: np.full_like(NEW[last], np.nan)}

    def push() -> None:
        with pytest.raises(rm.NonFiniteError, match=last):
            generator.sync_weights(broken, version=2, inflight="keep")

    sample = while_running(generator, push)
    assert generator.version == 1
    assert np.array_equal(sample.token_ids, alone.token_ids)
    assert np.array_equal(sample.logprobs, alone.logprobs)


def test_an_interrupt_between_two_parts(
    generator: rm.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = generator.generate([1, 2], LONG, use_tqdm=False)[0].outputs[0]
    kept, calls = Loan.let_step, count()

    def interrupted(loan: Loan, seconds: float) -> None:
        kept(loan, seconds)
        if next(calls) == len(NEW) + 7:  # the first are during the check
            raise KeyboardInterrupt

    monkeypatch.setattr(Loan, "let_step", interrupted)

    def push() -> None:
        with pytest.raises(KeyboardInterrupt):
            generator.sync_weights(NEW, version=2, inflight="keep")

    sample = while_running(generator, push)
    assert np.array_equal(sample.logprobs, alone.logprobs)
    assert generator.version == 1
    assert generator.sync_weights(NEW, version=2).version == 2


def test_a_push_whose_callback_raises_is_undone(generator: rm.Generator) -> None:
    engine: _core.Engine = generator._engine._engine
    engine.sync_begin(2)
    entries = []
    for name, tensor in NEW.items():
        entries.append(engine.sync_resolve(name))
        engine.sync_take(entries[-1], tensor)
    with pytest.raises(ZeroDivisionError):
        engine.sync_push(entries, 1, lambda: 1 / 0)
    with pytest.raises(rm.IncompleteSyncError):
        engine.sync_commit("refuse")
    engine.sync_begin(2)
    for entry, tensor in zip(entries, NEW.values(), strict=True):
        engine.sync_take(entry, tensor)
    engine.sync_push(entries, 1, lambda: engine.stats())
    assert engine.sync_commit("refuse")["version"] == 2


def test_closing_in_the_callback_of_a_push(generator: rm.Generator) -> None:
    engine: _core.Engine = generator._engine._engine
    engine.sync_begin(2)
    entry = engine.sync_resolve("model.embed_tokens.weight")
    engine.sync_take(entry, np.zeros_like(NEW["model.embed_tokens.weight"]))
    big = [entry]
    for layer in range(3):
        name = f"model.layers.{layer}.self_attn.q_proj.weight"
        big.append(engine.sync_resolve(name))
        engine.sync_take(big[-1], NEW[name])
    with pytest.raises(rm.StateError, match="closed"):
        engine.sync_push(big, 1, engine.close)


@pytest.mark.parametrize("inflight, is_paused", [("wait", False), ("keep", True)])
def test_a_pause_is_of_running_requests(
    generator: rm.Generator, monkeypatch: pytest.MonkeyPatch, inflight: Any, is_paused: bool
) -> None:
    """The commit takes at least 0.5 s. No request waits for it if all have finished before."""
    kept, reports = Weights._follow, list[rm.SyncReport]()

    def slow(weights: Weights, before: int | None, options: SyncOptions) -> None:
        time.sleep(0.5)
        kept(weights, before, options)

    monkeypatch.setattr(Weights, "_follow", slow)
    assert generator.sync_weights(NEW, version=2).pause_s == 0
    while_running(
        generator,
        lambda: reports.append(generator.sync_weights(OLD, version=3, inflight=inflight)),
    )
    assert (reports[0].pause_s >= 0.5) == is_paused


class Interrupted(SimpleQueue[None]):
    """Raises a KeyboardInterrupt once, after an item was taken."""

    done = False

    def get(self, block: bool = True, timeout: float | None = None) -> None:
        super().get(block, timeout)
        if not self.done:
            self.done = True
            raise KeyboardInterrupt


def test_an_interrupt_that_takes_the_answer_of_the_steps(generator: rm.Generator) -> None:
    """The caller must not wait for a second answer."""
    loan = generator._loop.loan(None)
    loan._lent = Interrupted()
    loan.function = lambda: loan.let_step(0.0)
    with pytest.raises(KeyboardInterrupt):
        generator._loop.run(loan)
    assert len(generator.generate([1, 2], use_tqdm=False)) == 1

"""`[rollout] async_level`: rollouts that a thread generates while the trainer learns.

Oracles: the same schedule without a thread, an uninterrupted run, the trainer's logprobs under each
version. Bound: weights, metrics (except times) and logprobs are bit-identical. An engine that is
held between its steps makes "during a batch" certain."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import TIMES, TINY_RUN
from marks import full
from paths import ROOT
from rollouts import lists, rollout_of

import rollmesh as rm

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from test_grpo_learning import heldout, train  # noqa: E402
from test_grpo_mesh import compare  # noqa: E402
from test_interrupts import interrupted_at  # noqa: E402

from rollmesh.grpo import loop  # noqa: E402
from rollmesh.run import (  # noqa: E402
    async_rollouts,
    checkpoint,
    config,
    metrics,
    samples,
)
from rollmesh.run.async_rollouts import AsyncRollouts, staleness  # noqa: E402

MOE = ROOT / "configs/qwen3_moe_debug.toml"
TINY = [*TINY_RUN, "eval.temperature=0.7"]
LEVELS = pytest.mark.parametrize("level", [full(1), 2])
APART = 1e-3  # a logprob under two versions, at least
pytestmark = pytest.mark.usefixtures("torch_as_it_was")


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollmesh.run.folder.draw_curves", lambda lines, path: None)


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert rollout_threads() == []


def rollout_threads() -> list[threading.Thread]:
    """Returns the running rollout threads. A thread whose start was interrupted may never have
    begun, but stays in the list."""
    return [
        thread
        for thread in threading.enumerate()
        if thread.name == "rollouts" and thread.is_alive()
    ]


FILTERS = ["rollout.top_k=9", "rollout.top_p=0.9"]


def prepared(*changes: str, resume: Path | None = None) -> loop.Run:
    return loop.prepare(config.load(MOE, [*TINY, *changes]), resume)


def run(
    out: Path, *changes: str, resume: Path | None = None
) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    """Returns the lines without times, and the weights at the end."""
    this = prepared(*changes, resume=resume)
    try:
        loop.train(this, out)
        assert this.trainer is not None
        assert rollout_threads() == []
        weights = {
            name: t.detach().numpy().tobytes() for name, t in this.trainer.state_dict().items()
        }
    finally:
        this.close()
    return [
        {k: v for k, v in m.items() if k not in TIMES} for m in metrics.read(out / "metrics.jsonl")
    ], weights


# ---------------------------------------------------------------------------------- configuration
@pytest.mark.parametrize(
    "changes, message",
    [
        (["rollout.async_level=-1"], r"\[rollout\] async_level: expected at least 0, got -1"),
        (
            ["sync.inflight=keep"],
            r'\[sync\] inflight: expected "wait" with \[rollout\] async_level = 0, .*, got "keep"',
        ),
        (
            ["rollout.async_level=1", "sync.inflight=abort"],
            r'\[sync\] inflight: expected one of "wait", "keep", "restart", got "abort"',
        ),
        (
            ["rollout.async_level=1", "sync.inflight=keep", "generator.engine=vllm"],
            r'\[sync\] inflight: expected "wait" where .* engine is "vllm" .*, got "keep"',
        ),
    ],
)
def test_what_cannot_be_is_refused(changes: list[str], message: str) -> None:
    with pytest.raises(rm.ConfigError, match=message):
        config.load(MOE, changes)


# ----------------------------------------------------------------------------------- the schedule
class ByTurns(AsyncRollouts):
    """The same schedule without a thread: a batch is generated when it is ordered."""

    def order(self, batches: Any, version: int) -> None:
        for batch in batches:
            self._finished[batch] = self._generate(batch, version)


@LEVELS
def test_a_run_that_waits_is_the_schedule_by_turns_bit_for_bit(
    level: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = [f"rollout.async_level={level}", "train.steps=4", "train.updates=2"]
    lines, weights = run(tmp_path / "thread", *changes)
    monkeypatch.setattr(loop, "AsyncRollouts", ByTurns)
    assert (lines, weights) == run(tmp_path / "turns", *changes)
    assert (
        [m["staleness_mean"] for m in lines]
        == [m["staleness_max"] for m in lines]
        == [min(n, level) for n in range(5)]
    )
    assert ["eval_reward" in m for m in lines] == [True, False, True, False, True]
    assert lines[0]["logprob_diff_max"] == 0 < APART < lines[-1]["logprob_diff_max"]


@LEVELS
def test_a_resumed_run_is_the_same_run_bit_for_bit(level: int, tmp_path: Path) -> None:
    """The checkpoint holds the batches of earlier versions, with their routing and the kept
    tokens."""
    changes = [
        f"rollout.async_level={level}",
        "correction.routing_replay=true",
        "correction.importance_sampling=token_truncate",
        *FILTERS,
    ]
    whole = run(tmp_path / "whole", *changes, "train.steps=4")
    first = run(tmp_path / "parts", *changes, "train.steps=2")
    assert first[1] != whole[1]
    second = run(tmp_path / "parts", *changes, "train.steps=4", resume=tmp_path / "parts")
    assert second[0] == whole[0]
    assert second[1] == whole[1]


def test_a_checkpoint_holds_what_was_generated(tmp_path: Path) -> None:
    """Every field of the rollouts is restored. A run with another option generates again, and so
    does a run at level 0."""
    level = ["rollout.async_level=2", "correction.routing_replay=true", *FILTERS]
    this = prepared(*level)
    c = this.config
    try:
        assert this.trainer is not None
        this.generator.sync_weights(this.trainer.state_dict(), version=2)
        drawn = [loop._roll_out(this, step, 2) for step in (3, 4)]
        this.trainer.learn(drawn[0], np.linspace(-1, 1, 16), 2)  # AdamW has a state then
        folder = checkpoint.save(tmp_path, this.trainer, this.tokenizer, c, 3, drawn)
    finally:
        this.close()
    stored = checkpoint.read_rollouts(folder, c, this.data, this.tokenizer)
    for before, after in zip(drawn, stored, strict=True):
        assert before.seconds == after.seconds
        for a, b in zip(before.completions, after.completions, strict=True):
            assert (a.prompt, a.token_ids, a.text, a.stopped) == (
                b.prompt, b.token_ids, b.text, b.stopped,
            )  # fmt: skip
            for name in ("logprobs", "versions", "routed_experts", "kept_tokens"):
                x, y = getattr(a, name), getattr(b, name)
                assert (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes()), name
    for change in ("rollout.samples=8", "rollout.async_level=0", "rollout.async_level=1"):
        other = config.load(MOE, [*TINY, *level, change])
        assert checkpoint.read_rollouts(folder, other, this.data, this.tokenizer) == []
    (folder / checkpoint.ROLLOUTS).unlink()  # otherwise different batches would be generated
    with pytest.raises(
        rm.ConfigError, match=r"rollouts\.safetensors: expected rollouts, got FileNotFoundError"
    ):
        checkpoint.read_rollouts(folder, c, this.data, this.tokenizer)


def test_a_resume_at_another_level_starts_from_the_checkpoint(tmp_path: Path) -> None:
    run(tmp_path, "rollout.async_level=2", "train.steps=2")
    with pytest.raises(
        rm.ConfigError, match=r"rollout.async_level differ \(rollout.async_level: 2 there, 1 here\)"
    ):
        prepared("rollout.async_level=1", "train.steps=4", resume=tmp_path)
    changed = config.load(MOE, [*TINY, "rollout.async_level=1", "train.steps=4"])
    this = loop.prepare(changed, tmp_path, ["rollout.async_level"])
    try:
        lines = loop.train(this, tmp_path)
    finally:
        this.close()
    assert [m["staleness_max"] for m in lines] == [0, 1, 0, 1, 1]


def test_a_push_waits_for_the_batch_that_has_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread starts each batch long after the trainer has learned from the previous one."""

    def late(
        run: Any, step: int, version: int | None = None, generate: Any = loop._roll_out
    ) -> Any:
        time.sleep(0.2)
        return generate(run, step, version)

    monkeypatch.setattr(loop, "_roll_out", late)
    lines, _ = run(tmp_path, "rollout.async_level=1", "train.steps=2")
    assert [m["staleness_mean"] for m in lines] == [0, 1, 1]


def test_tokens_that_are_too_old_or_too_new_are_an_error() -> None:
    def of(*versions: int) -> samples.Rollout:
        each = [np.int64(versions[:1]), np.int64(versions[1:])]
        none = [[]] * 2
        return rollout_of(none, none, none, none, none, versions=each)

    assert staleness(of(7, 6, 5, 6), 7, 2) == {"staleness_mean": 1.0, "staleness_max": 2}
    with pytest.raises(
        rm.StateError,
        match=r"step 7: a token of weight version 4, expected 5 to 7 \(\[rollout\] async_level "
        r"= 2\)",
    ):
        staleness(of(7, 6, 4, 7), 7, 2)
    with pytest.raises(
        rm.StateError,
        match=r"step 7: a token of weight version 8, expected 6 to 7 \(\[rollout\] async_level "
        r"= 1\)",
    ):
        staleness(of(7, 8), 7, 1)


def test_a_run_refuses_batches_that_are_too_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        loop, "batches_of", lambda version, *_: range(5) if version == 0 else range(0)
    )
    with pytest.raises(
        rm.StateError,
        match=r"step 2: a token of weight version 0, expected 1 to 2 \(\[rollout\] async_level "
        r"= 1\)",
    ):
        run(tmp_path, "rollout.async_level=1", "train.steps=4")


# -------------------------------------------------------------------------------- syncs in flight
class Brake:
    """Slows a generator down: before each of its steps it calls `before(number of the step)`, which
    may return False to delay the step."""

    def __init__(self, generator: Any, before: Callable[[int], bool | None]) -> None:
        self.steps, self._step, self._before = 0, generator._loop._step, before
        generator._loop._step = self

    def __call__(self) -> None:
        if self._before(self.steps) is False:
            time.sleep(0.001)
            return
        self.steps += 1
        self._step()


def long_ones(drawn: samples.Rollout) -> list[int]:
    return [sample for sample, ids in enumerate(lists(drawn).token_ids) if len(ids) > 5]


@pytest.mark.parametrize("inflight", ["keep", "restart"])
def test_a_sync_in_flight_reaches_the_running_requests(inflight: str) -> None:
    """Version 1 comes after 5 tokens of batch 1. The recorded logprob of each token is the
    trainer's under the token's own version."""
    this = prepared(
        "rollout.async_level=1",
        f"sync.inflight={inflight}",
        "rollout.max_tokens=12",
        "train.lr=0.05",
    )
    waiting, synced = threading.Event(), threading.Event()

    def before(step: int) -> bool:
        if step < 5:  # of a batch of 16 samples whose prompts fit into one step
            return True
        waiting.set()
        return synced.is_set()

    try:
        assert this.trainer is not None
        with loop._async_rollouts(this, async_rollouts.Overlap()) as ahead:
            this.trainer.push(this.generator, 0)
            ahead.order([0], 0)
            [first] = ahead.take(range(1))
            Brake(this.generator, before)
            ahead.order([1], 0)
            assert waiting.wait(30)
            old = {name: tensor.clone() for name, tensor in this.trainer.state_dict().items()}
            this.trainer.learn(first, np.linspace(-1, 1, 16), 0)
            this.trainer.push(this.generator, 1)
            synced.set()
            [drawn] = ahead.take(range(1, 2))
        versions, recorded = np.concatenate(lists(drawn).versions), drawn.logprobs
        long = [lists(drawn).versions[sample].tolist() for sample in long_ones(drawn)]
        assert long
        assert all(
            v == ([0] * 5 + [1] * (len(v) - 5) if inflight == "keep" else [1] * len(v))
            for v in long
        )
        # [train] mismatch = "raise" compares the tokens of version 1 only.
        of_new = this.trainer.logprobs_of(drawn)
        for sample in long_ones(drawn)[:1]:
            drawn.completions[sample].logprobs[-1] += 1
            with pytest.raises(rm.NumericsError, match=f"; 1 of {(versions == 1).sum()} differ"):
                this.trainer.logprobs_of(drawn)
            drawn.completions[sample].logprobs[-1] -= 1
        this.trainer.model.load_state_dict(old)
        this.trainer.version = 0
        of_old = this.trainer.logprobs_of(drawn)
        assert np.array_equal(np.where(versions == 1, of_new, of_old), recorded)
        assert np.abs(np.where(versions == 1, of_old, of_new) - recorded).max() > APART
        behind = staleness(drawn, 1, 1)
        assert behind["staleness_max"] == (inflight == "keep")
        assert (0 < behind["staleness_mean"] < 1) == (inflight == "keep")
    finally:
        this.close()


@pytest.mark.parametrize("inflight", ["keep", full("restart")])
def test_runs_with_syncs_in_flight_stay_within_their_bound(inflight: str, tmp_path: Path) -> None:
    lines, _ = run(
        tmp_path,
        "rollout.async_level=2",
        f"sync.inflight={inflight}",
        "rollout.max_tokens=24",
        "train.steps=8",
    )
    assert [m["step"] for m in lines] == list(range(9))
    assert all(0 <= m["staleness_mean"] <= m["staleness_max"] <= 2 for m in lines)
    assert ["eval_reward" in m for m in lines] == [step % 2 == 0 for step in range(9)]


# ----------------------------------------------------------------------------- errors and the end
def test_an_error_of_the_thread_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = rm.NumericsError("batch 2 is cursed")

    def cursed(
        run: Any, step: int, version: int | None = None, generate: Any = loop._roll_out
    ) -> Any:
        if step == 2:
            raise error
        return generate(run, step, version)

    monkeypatch.setattr(loop, "_roll_out", cursed)
    with pytest.raises(rm.NumericsError) as caught:
        run(tmp_path, "rollout.async_level=1", "train.steps=8")
    assert caught.value is error
    assert len(metrics.read(tmp_path / "metrics.jsonl")) == 2


@pytest.mark.parametrize("what", [full("error"), full("interrupt"), "interrupted wait"])
def test_an_error_of_the_trainer_ends_the_rollouts(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batch 2 would take 30 s. Its requests are aborted, and the generator keeps serving. Without
    the second Ctrl-C, the checkpoint of step 2 would wait for batch 2; the checkpoint of step 1
    needs batch 1 only."""
    this = prepared("rollout.async_level=1", "rollout.max_tokens=40", "train.steps=8")
    slow, running = threading.Event(), threading.Event()

    def before(step: int) -> None:
        if slow.is_set():
            running.set()
            time.sleep(0.75)

    def learn(rollout: Any, advantage: Any, step: int, learn: Any = this.trainer.learn) -> Any:  # type: ignore[union-attr]
        if step == 1:
            assert running.wait(30)
            if what == "error":
                raise rm.NumericsError("no gradient")
            signal.setitimer(signal.ITIMER_REAL, 0.01 if what == "interrupt" else 0.5)
            if what == "interrupt":
                time.sleep(30)
        done = learn(rollout, advantage, step)
        slow.set()
        return done

    Brake(this.generator, before)
    assert this.trainer is not None
    monkeypatch.setattr(this.trainer, "learn", learn)
    interrupts = iter([0.5, 0])

    def interrupt(number: int, frame: Any) -> None:
        signal.setitimer(signal.ITIMER_REAL, next(interrupts))
        raise KeyboardInterrupt

    previous = signal.signal(
        signal.SIGALRM, interrupt if what == "interrupted wait" else signal.default_int_handler
    )
    began = time.monotonic()
    try:
        with pytest.raises(rm.NumericsError if what == "error" else KeyboardInterrupt):
            loop.train(this, tmp_path)
        assert time.monotonic() - began < 20
        assert [path.name for path in tmp_path.glob("checkpoints/*")] == (
            ["step_000001"] if what != "interrupted wait" else []
        )
        assert rollout_threads() == []
        assert isinstance(this.generator, rm.Generator)
        assert this.generator._engine.ids() == []
        assert (
            this.generator.generate([[5, 6]], rm.SamplingParams(max_tokens=2), use_tqdm=False)[
                0
            ].error
            is None
        )
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        this.close()


def ends_in_a_reward(this: loop.Run) -> None:
    """Ends in a reward of step 2: the rewards of 2 evaluations and 2 steps come before it."""
    [function], calls = this.rewards.functions, iter(range(100))
    this.rewards.functions = [
        lambda **columns: (
            signal.raise_signal(signal.SIGTERM) if next(calls) == 4 else function(**columns)
        )
    ]


def ends_in_an_update(this: loop.Run) -> None:
    """Ends in the update of step 1: the run stops after it."""
    calls = iter(range(100))
    this.trainer.optimizer.register_step_pre_hook(
        lambda *_: signal.raise_signal(signal.SIGTERM) if next(calls) == 2 else None
    )


def ends_by_an_error(this: loop.Run) -> None:
    """Ends by an error in the reward of step 2."""
    [function], calls = this.rewards.functions, iter(range(100))
    this.rewards.functions = [lambda **columns: None if next(calls) == 4 else function(**columns)]


def ends_before_a_push(this: loop.Run) -> None:
    """Ends before the push of version 2: step 2 has not begun, and its batch may be in the
    generator."""
    push = this.trainer.push
    this.trainer.push = lambda generator, step: (
        signal.raise_signal(signal.SIGTERM) if step == 2 else push(generator, step)
    )  # type: ignore[assignment, func-returns-value]


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "how, level",
    [
        full(ends_in_a_reward, 1),
        (ends_in_a_reward, 2),
        full(ends_in_an_update, 1),
        (ends_in_an_update, 2),
        full(ends_by_an_error, 2),
        (ends_before_a_push, 2),
    ],
)
def test_what_ends_a_run_leaves_its_last_finished_step(
    how: Callable[[loop.Run], None], level: int, tmp_path: Path
) -> None:
    """The checkpoint has the rollouts that the next step learns from: the resumed run is
    bit-identical to an uninterrupted run."""
    changes = [f"rollout.async_level={level}", "train.steps=4", "checkpoint.every=0"]
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    this = prepared(*changes)
    how(this)
    try:
        with pytest.raises(rm.ConfigError if how is ends_by_an_error else KeyboardInterrupt):
            loop.train(this, tmp_path / "parts")
    finally:
        this.close()
        signal.signal(signal.SIGTERM, before)
    assert [path.name for path in (tmp_path / "parts/checkpoints").iterdir()] == ["step_000002"]
    whole = run(tmp_path / "whole", *changes)
    assert run(tmp_path / "parts", *changes, resume=tmp_path / "parts") == whole
    assert whole[0][-1]["staleness_mean"] == level


@pytest.mark.parametrize("inflight", ["keep", full("restart")])
def test_an_early_end_with_syncs_in_flight_leaves_a_checkpoint(
    inflight: str, tmp_path: Path
) -> None:
    """The output of such a run depends on timing, so bits are not compared; the resumed run has the
    stored rollouts."""
    changes = [
        "rollout.async_level=2",
        f"sync.inflight={inflight}",
        "train.steps=4",
        "checkpoint.every=0",
    ]
    this = prepared(*changes)
    ends_by_an_error(this)
    try:
        with pytest.raises(rm.ConfigError):
            loop.train(this, tmp_path)
    finally:
        this.close()
    assert len(prepared(*changes, resume=tmp_path).ready) == 2
    lines, _ = run(tmp_path, *changes, resume=tmp_path)
    assert [line["step"] for line in lines] == list(range(5))


def test_the_last_checkpoint_has_its_rollouts_in_the_second_try_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes, calls, write = ["rollout.async_level=2"], iter(range(9)), checkpoint.save

    def save(*args: Any) -> Any:
        if next(calls) == 0:
            raise OSError(28, "No space left on device")
        return write(*args)

    monkeypatch.setattr(checkpoint, "save", save)
    run(tmp_path / "parts", *changes, "train.steps=2")
    assert next(calls) == 2
    second = run(tmp_path / "parts", *changes, "train.steps=4", resume=tmp_path / "parts")
    assert second == run(tmp_path / "whole", *changes, "train.steps=4")


def test_an_interrupt_anywhere_leaves_no_thread() -> None:
    """Interrupts from the first call to the end of the context; CPython's Thread.start itself is
    not safe."""

    def use(ahead: AsyncRollouts) -> None:
        try:
            ahead.order(range(2), 0)
            ahead.order(range(2, 3), 1)
            assert [r.seconds for r in ahead.take(range(2))] == [0, 1]
            ahead.wait()
            assert [r.seconds for r in ahead.take(range(1, 3))] == [1, 2]
            ahead.drop(1)
            assert not ahead.has(range(1, 3))
        finally:
            ahead.__exit__(None, None, None)

    place, hit = 0, True
    while hit:
        ahead = AsyncRollouts(
            lambda batch, version: samples.Rollout([], seconds=batch), lambda: None
        )
        ahead.__enter__()
        hit = interrupted_at(place, lambda: use(ahead))  # noqa: B023
        if rollout_threads():  # before `use` had a block, or in Thread.join
            ahead.__exit__(None, None, None)
        assert rollout_threads() == [], place
        place += 1
    assert place > 20


# ---------------------------------------------------------------------------------------- metrics
def test_shares_of_time_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(async_rollouts.time, "perf_counter", lambda: now)
    this = async_rollouts.Overlap()
    for seconds, by, side in (
        (1, 1, "generator"),
        (2, 1, "generator"),
        (1, 1, "trainer"),
        (4, -1, "generator"),
        (1, -1, "generator"),
        (3, -1, "trainer"),
        (4, 1, "trainer"),
    ):
        now += seconds
        this._change(side, by)
    assert this.shares() == {
        "both_share": 5 / 16,
        "trainer_only_share": 3 / 16,
        "generator_only_share": 3 / 16,
    }
    now += 2
    assert this.shares() == {"both_share": 0, "trainer_only_share": 1, "generator_only_share": 0}


def test_each_line_has_the_shares(tmp_path: Path) -> None:
    run(tmp_path / "one", "rollout.async_level=1", "train.steps=2")
    for line in metrics.read(tmp_path / "one/metrics.jsonl"):
        shares = [line[name] for name in async_rollouts.SHARES.values()]
        assert all(0 <= share <= 1 for share in shares)
        assert 0 < sum(shares) <= 1 + 1e-9
    run(tmp_path / "none", "train.steps=1")
    assert (
        not {"staleness_max", *async_rollouts.SHARES.values()}
        & metrics.read(tmp_path / "none/metrics.jsonl")[0].keys()
    )


# -------------------------------------------------------------------------------------- long ones
@pytest.mark.slow
@pytest.mark.parametrize("level, steps", [(1, 80), (2, 100)])
def test_it_learns_from_rollouts_that_are_behind(level: int, steps: int, tmp_path: Path) -> None:
    """tests/grpo/test_grpo_learning.py runs the same at level 0 and requires 0.5 after 80 steps;
    level 2 needs some more."""
    changes = [f"rollout.async_level={level}", f"train.steps={steps}", f"eval.every={steps}"]
    lines = train(
        "qwen3_moe_debug",
        tmp_path / "run",
        *(word for change in changes for word in ("--set", change)),
    )[0]
    learned = heldout(lines)
    assert learned[0] <= 0.1
    assert learned[-1] >= 0.5
    assert max(m["staleness_max"] for m in lines) == level
    assert np.mean([m["both_share"] for m in lines]) > 0


@pytest.mark.full
def test_four_processes_learn_as_one_does(tmp_path: Path) -> None:
    changes = [
        "train.steps=3",
        "rollout.prompts=8",
        "rollout.samples=8",
        "eval.prompts=8",
        "eval.every=1",
        "rollout.async_level=2",
    ]
    assert [line["staleness_max"] for line in compare(tmp_path, changes, 300)] == [0, 1, 2, 2]

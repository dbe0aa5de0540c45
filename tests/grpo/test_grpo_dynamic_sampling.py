"""[rollout] filter_groups: groups of equal rewards are dropped and replaced by new draws, which are
the same in a resumed run."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import TIMES, TINY_RUN
from paths import ROOT
from rollouts import lists, rollout_of

import rollmesh as rm

pytest.importorskip("torch")
pytest.importorskip("transformers")

from rollmesh.grpo import loop
from rollmesh.grpo.rollout import sample_groups
from rollmesh.run import config
from rollmesh.run.config import RolloutTable
from rollmesh.run.data import Dataset, Prompt
from rollmesh.run.samples import Rollout, Scores

CONFIGS = {"moe": ROOT / "configs/qwen3_moe_debug.toml", "dense": ROOT / "configs/qwen3_debug.toml"}
FILTER = "rollout.filter_groups=true"
TOLD = ("num_gen_batches", "groups_left_out", "drawn_reward_mean")
pytestmark = pytest.mark.usefixtures("torch_as_it_was", "no_pictures")

REWARD = """
def half(prompts, completions, **_):
    \"\"\"Of every second letter that a prompt may begin with, all completions are equal.\"\"\"
    return [0.0 if ord(p[0]) % 2 else float(sum(map(ord, c)) % 1009) for p, c in zip(prompts,
        completions)]
def other(prompts, completions, **_):
    return [float(sum(map(ord, c)) % 1009) for c in completions]
def none(completions, **_):
    return [0.5] * len(completions)
"""


@pytest.fixture(autouse=True)
def _rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "groups_of_test.py").write_text(REWARD)
    monkeypatch.chdir(tmp_path)


def ran(
    out: Path, reward: str, *changes: str, name: str = "dense", resume: Path | None = None
) -> list[dict[str, Any]]:
    sets = [
        *TINY_RUN,
        "train.steps=2",
        "checkpoint.every=1",
        "checkpoint.keep=9",
        f'reward.functions=["groups_of_test:{reward}"]',
    ]
    run = loop.prepare(config.load(CONFIGS[name], [*sets, *changes]), resume)
    try:
        lines = loop.train(run, out)
    finally:
        run.close()
    return [{k: v for k, v in line.items() if k not in TIMES} for line in lines]


def weights(out: Path) -> bytes:
    return (out / "checkpoints/step_000002/model.safetensors").read_bytes()


# --------------------------------------------------------------------------------------- one step
def prompts(count: int) -> list[Prompt]:
    return [Prompt(f"{i}", (i,), {}) for i in range(count)]


@pytest.mark.parametrize(
    "flat, limit, batches, taken",
    [
        ("", 9, [[0, 1, 2]], [0, 1, 2]),
        ("1", 9, [[0, 1, 2], [3]], [0, 2, 3]),
        ("023", 9, [[0, 1, 2], [3, 4], [5]], [1, 4, 5]),
        ("023", 2, [[0, 1, 2], [3, 4]], [0, 1, 4]),
        ("01235", 1, [[0, 1, 2]], [0, 1, 2]),
        ("0123456", 9, [[0, 1, 2], [3, 4, 5], [6]], [0, 1, 2]),
        ("012456", 9, [[0, 1, 2], [3, 4, 5], [6]], [0, 1, 3]),
    ],
)
def test_the_groups_of_a_step(
    flat: str, limit: int, batches: list[list[int]], taken: list[int]
) -> None:
    """Seven prompts in order, batches of three groups of two: checks the batches that are generated
    and the groups that are learned from, in the order of the draws."""
    every, seen = prompts(7), []

    def draw(count: int, drawn: Sequence[Prompt]) -> list[Prompt]:
        return every[len(drawn) :][:count]

    def roll_out(of: list[Prompt], batch: int) -> Rollout:
        assert batch == len(seen)
        seen.append([p.ids[0] for p in of])
        both = [p for p in of for _ in range(2)]
        logprobs = [np.zeros(1, np.float32) for _ in both]
        return rollout_of(
            both,
            [[p.ids[0]] for p in both],
            logprobs,
            ["t"] * len(both),
            [True] * len(both),
            seconds=1.0,
        )

    def score(rollout: Rollout) -> Scores:
        total = [
            float(i % 2) if p.source not in flat else 0.25
            for i, p in enumerate(lists(rollout).prompt)
        ]
        return Scores(total, {"f": total, "g": [None] * len(total)}, {"f": 1.0, "g": 2.0}, 3.0)

    rollout, scores, told = sample_groups(
        draw, roll_out, score, RolloutTable(prompts=3, samples=2, max_num_gen_batches=limit)
    )
    assert seen == batches
    assert lists(rollout).token_ids == [[i] for i in taken for _ in range(2)]
    assert [p.ids[0] for p in lists(rollout).prompt] == [i for i in taken for _ in range(2)]
    assert (
        scores.total
        == scores.values["f"]
        == [x for i in taken for x in ([0.25, 0.25] if str(i) in flat else [0.0, 1.0])]
    )
    generated = sum(map(len, batches))
    assert scores.metrics() == {
        "reward/f": sum(scores.total) / 6,
        "reward_s/f": len(batches),
        "reward_s/g": 2.0 * len(batches),
    }
    assert (scores.seconds, rollout.seconds) == (3.0 * len(batches), len(batches))
    shares = [0.25 if str(i) in flat else 0.5 for batch in batches for i in batch]
    assert told == {
        "num_gen_batches": len(batches),
        "groups_left_out": generated - 3,
        "drawn_reward_mean": pytest.approx(np.mean(shares)),
        "tokens_per_s": 2 * generated / len(batches),
    }


def test_groups_without_two_judged_rewards_that_differ_are_flat() -> None:
    """Five groups of three. The step needs one group and takes the first with judged rewards that
    differ."""
    nan, every = math.nan, prompts(5)
    groups = [[nan, nan, nan], [1.0, nan, nan], [1.0, nan, 1.0], [0.0, nan, 1.0], [0.0, 1.0, 2.0]]

    def roll_out(of: list[Prompt], _: int) -> Rollout:
        three = [p for p in of for _ in range(3)]
        logprobs = [np.zeros(1, np.float32) for _ in three]
        return rollout_of(
            three,
            [[p.ids[0]] for p in three],
            logprobs,
            ["t"] * len(three),
            [True] * len(three),
            seconds=1.0,
        )

    def score(rollout: Rollout) -> Scores:
        total = [number for p in lists(rollout).prompt[::3] for number in groups[p.ids[0]]]
        return Scores(total, {"f": total}, {"f": 1.0}, 1.0)

    table = RolloutTable(prompts=1, samples=3, max_num_gen_batches=9)
    rollout, scores, told = sample_groups(
        lambda count, drawn: every[len(drawn) :][:count], roll_out, score, table
    )
    assert lists(rollout).token_ids == [[3]] * 3
    assert np.array_equal(scores.total, groups[3], equal_nan=True)
    assert (told["num_gen_batches"], told["groups_left_out"]) == (4, 3)
    assert told["drawn_reward_mean"] == 0.8, "of 1, 1, 1, 0 and 1"


def test_a_step_draws_no_prompt_twice() -> None:
    """A step draws from the open stages only, draws the same prompts again for the same step, and
    draws fewer if prompts run out."""
    train = [dataclasses.replace(p, stage=i // 10) for i, p in enumerate(prompts(20))]
    data = Dataset(tuple(train), (), (5,))

    def drawn(step: int) -> list[list[Prompt]]:
        batches = [data.draw(7, step, 4)]
        for _ in range(7):
            batches.append(data.draw(7, step, 3, [p for batch in batches for p in batch]))
        return [batch for batch in batches if batch]

    for step, stages, sizes in ((0, 1, [4, 3, 3]), (5, 2, [4, 3, 3, 3, 3, 3, 1])):
        assert [len(batch) for batch in drawn(step)] == sizes
        assert {p.ids for batch in drawn(step) for p in batch} == {
            p.ids for p in train[: 10 * stages]
        }
        assert drawn(step) == drawn(step)
    assert drawn(6)[0] == data.draw(7, 6, 4)
    assert drawn(6) != drawn(7)


# ------------------------------------------------------------------------------------------- runs
def test_a_run_learns_from_groups_that_differ(tmp_path: Path) -> None:
    """The completions of the run are those groups, and the resumed run is bit-identical."""
    out, again = tmp_path / "out", tmp_path / "again"
    lines = ran(out, "half", FILTER)
    assert [line["flat_groups"] for line in lines[:-1]] == [0.0] * 2
    assert sum(line["groups_left_out"] for line in lines) > 3
    assert all(
        line["reward_mean"] > line["drawn_reward_mean"] > 0
        for line in lines
        if line["groups_left_out"]
    )
    assert all((line["num_gen_batches"] > 1) == (line["groups_left_out"] > 0) for line in lines)
    rows = [json.loads(row) for row in (out / "completions.jsonl").read_text().splitlines()]
    assert len(rows) == 3 * 16
    assert all(ord(row["prompt"][0]) % 2 == 0 for row in rows)
    (again / "checkpoints").mkdir(parents=True)
    (out / "checkpoints/step_000001").rename(again / "checkpoints/step_000001")
    (again / "metrics.jsonl").write_text((out / "metrics.jsonl").read_text())
    assert ran(again, "half", FILTER, resume=again) == lines
    assert weights(again) == weights(out)


def test_without_flat_groups_it_is_the_run_without(tmp_path: Path) -> None:
    lines = ran(tmp_path / "a", "other", FILTER)
    assert {line.pop("num_gen_batches") for line in lines} == {1}
    assert {line.pop("groups_left_out") for line in lines} == {0}
    assert [line.pop("drawn_reward_mean") for line in lines] == [
        line["reward_mean"] for line in lines
    ]
    assert lines == ran(tmp_path / "b", "other")
    assert weights(tmp_path / "a") == weights(tmp_path / "b")


@pytest.mark.quick(1)
@pytest.mark.parametrize("reward, limit", [("half", 1), ("none", 3)])
def test_at_the_limit_flat_groups_fill_the_step(reward: str, limit: int, tmp_path: Path) -> None:
    """So the result with a limit of one batch, and with only flat groups, equals the run without
    the filter."""
    lines = ran(tmp_path / "a", reward, FILTER, f"rollout.max_num_gen_batches={limit}")
    assert {line["num_gen_batches"] for line in lines} == {limit}
    assert {line["groups_left_out"] for line in lines} == {4 * (limit - 1)}
    assert [line["flat_groups"] > 0 for line in lines[:-1]] == [True] * 2
    assert [{k: v for k, v in line.items() if k not in TOLD} for line in lines] == ran(
        tmp_path / "b", reward
    )
    assert weights(tmp_path / "a") == weights(tmp_path / "b")


def test_all_records_of_a_completion_stay_together(tmp_path: Path) -> None:
    """Kept tokens, routed experts and versions stay with their completion; otherwise the trainer's
    logprobs would differ from the record."""
    changes = [
        FILTER,
        "rollout.top_k=20",
        "train.minibatches=true",
        "train.updates=2",
        "train.micro_batch=3",
    ]
    lines = ran(tmp_path / "a", "half", *changes, name="moe")
    assert sum(line["groups_left_out"] for line in lines) > 3
    assert {line["tokens_differ"] for line in lines} == {0.0}


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            ["rollout.async_level=2"],
            r"\[rollout\] filter_groups: expected false with async_level = 2, .*, got true",
        ),
        (
            ["reward.shuffle=true"],
            r"\[rollout\] filter_groups: expected false with \[reward\] shuffle, .*, got true",
        ),
        (
            ["rollout.max_num_gen_batches=0"],
            r"\[rollout\] max_num_gen_batches: expected at least 1, got 0",
        ),
        (
            ["rollout.filter_groups=false", "rollout.max_num_gen_batches=3"],
            r"\[rollout\] filter_groups: expected true with .*es = 3",
        ),
    ],
)
def test_settings_that_are_refused(changes: list[str], message: str) -> None:
    with pytest.raises(rm.ConfigError, match=f"^{message}"):
        config.load(CONFIGS["dense"], [FILTER, *changes])

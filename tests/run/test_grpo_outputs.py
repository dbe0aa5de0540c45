"""The output of `rollmesh grpo` besides its numbers: lines without delay, its completions, prompts
that are too long, a model without an eos."""

from __future__ import annotations

import io
import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
from helpers import TINY_RUN
from paths import ROOT

import rollmesh as rm
from rollmesh.cli import main

pytest.importorskip("torch")
pytest.importorskip("transformers")

from rollmesh.run import config, data, metrics, progress
from rollmesh.run.generator import make_generator
from rollmesh.run.models import model_config

DENSE = ROOT / "configs/qwen3_debug.toml"
SETS = [
    *TINY_RUN,
    "train.steps=2",
    "checkpoint.every=1",
    "rollout.log_completions=5",
    'reward.functions=["char_match", "contains"]',
]
pytestmark = pytest.mark.usefixtures("torch_as_it_was")


def test_a_run_says_and_writes_what_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run that is resumed from step 1 writes the lines from there again, and no more."""
    monkeypatch.setattr("rollmesh.run.folder.draw_curves", lambda lines, path: path.touch())
    sets = [word for change in SETS for word in ("--set", change)]
    assert main(["grpo", str(DENSE), "--out", str(tmp_path), *sets]) == 0
    assert capsys.readouterr().out.startswith(f"{DENSE} → {tmp_path}: reading data and model\n")
    file = tmp_path / "completions.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["step"] for row in rows] == [0] * 5 + [1] * 5 + [2] * 5
    assert all(row.keys() == {"step", "prompt", "completion", "reward", "stopped"} for row in rows)
    assert len({row["prompt"] for row in rows[:5]}) == 2, "four samples of the first prompt"
    for line in metrics.read(tmp_path / "metrics.jsonl"):
        assert line["reward_s/char_match"] + line["reward_s/contains"] <= line["reward_s"]
        assert line["reward_mean"] == pytest.approx(
            line["reward/char_match"] + line["reward/contains"]
        )
    before = file.read_bytes()
    with file.open("a") as more:
        more.write('{"step": 1')  # of a run that was killed
    assert (
        main(["grpo", str(DENSE), "--resume", str(tmp_path / "checkpoints/step_000001"), *sets])
        == 0
    )
    assert file.read_bytes() == before


def test_completions_are_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prints the first completions of each displayed step, even if the file gets none of them. Off
    by default. The reward is async, and the run closes its event loop."""
    (tmp_path / "async_run_of_test.py").write_text(
        "async def f(completions, **_):\n    return [float(len(c)) for c in completions]\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rollmesh.run.folder.draw_curves", lambda lines, path: path.touch())
    monkeypatch.setattr(progress, "PLAIN_SECONDS", 0.0)
    for count in (0, 3):
        sets = [*SETS, "rollout.log_completions=0", 'reward.functions=["async_run_of_test:f"]']
        sets += [f"rollout.num_completions_to_print={count}"] if count else []
        assert (
            main(
                [
                    "grpo",
                    str(DENSE),
                    "--out",
                    str(tmp_path / str(count)),
                    *(w for s in sets for w in ("--set", s)),
                ]
            )
            == 0
        )
        said = capsys.readouterr().out
        assert [line.rstrip() for line in said.splitlines()].count("step 1") == (count > 0)
        assert len(re.findall(r"\n│ \d+\.000 ", said)) == 3 * count
        assert (tmp_path / str(count) / "completions.jsonl").read_bytes() == b""


def test_what_nothing_judged_has_no_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Step 0 has no judged completion: its means are missing in every file and on the terminal.
    Half of step 1 is judged: its means are those of this half."""
    (tmp_path / "unjudged_run_of_test.py").write_text(
        "calls = []\n"
        "def f(completions, **_):\n"
        "    calls.append(1)\n"  # held-out, rollouts, held-out, rollouts
        "    numbers = [None, None] if len(calls) < 3 else [1.0, None, 3.0, None]\n"
        "    return (numbers * 8)[: len(completions)]\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(progress, "PLAIN_SECONDS", 0.0)
    sets = [
        *SETS,
        "train.steps=1",
        "eval.every=1",
        "loss.entropy=0.0",
        "rollout.log_completions=4",
        "rollout.num_completions_to_print=4",
    ]
    sets += ['reward.functions=["unjudged_run_of_test:f"]']
    with warnings.catch_warnings():
        # NumPy warns about the mean of an empty array.
        warnings.simplefilter("error", RuntimeWarning)
        assert (
            main(
                [
                    "grpo",
                    str(DENSE),
                    "--out",
                    str(tmp_path / "out"),
                    *(w for s in sets for w in ("--set", s)),
                ]
            )
            == 0
        )
    none, half = metrics.read(tmp_path / "out/metrics.jsonl")
    names = ("reward_mean", "reward_std", "eval_reward", "unjudged_share")
    assert [none[name] for name in names] == [None, None, None, 1.0]
    assert [half[name] for name in names] == [2.0, 1.0, 2.0, 0.5]
    assert (none["flat_groups"], none["policy_loss"], none["grad_norm"]) == (1.0, 0.0, 0.0)
    assert "kl_ref" not in none, "there is no reference model"
    assert "NaN" not in (tmp_path / "out/metrics.jsonl").read_text()
    rows = [
        json.loads(row) for row in (tmp_path / "out/completions.jsonl").read_text().splitlines()
    ]
    assert [row["reward"] for row in rows] == [None] * 4 + [1.0, None, 3.0, None]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "out/events")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward_mean")] == [(1, 2.0)]
    said = capsys.readouterr().out
    assert re.search(r"step 0/1  reward -  held-out -  ", said)
    assert re.search(r"step 1/1  reward 2\.000  held-out 2\.000  ", said)
    assert len(re.findall(r"\n│ -  ", said)) == 6
    assert "held-out reward - → 2.000 in 1 steps" in said


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_completion_moves_no_cursor(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control characters and markup are escaped, a long completion is cut in its middle, and an
    ASCII terminal can show it."""
    said = io.BytesIO()
    monkeypatch.setattr(
        "sys.stdout", io.TextIOWrapper(said, encoding=encoding, errors="backslashreplace")
    )
    monkeypatch.setenv("COLUMNS", "120")
    row = {"step": 7, "reward": 0.5, "stopped": True}
    chat = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "[red]x[/nothing]"},
    ]
    with progress.Display("run", 9) as display:
        metrics = dict.fromkeys(
            ("reward_mean", "kl_k3", "logprob_diff_max", "tokens_per_s", "sync_s"), 0.0
        ) | {"step": 7}
        display.show(
            metrics,
            [
                {**row, "prompt": chat, "completion": "\x1b[2J\ud800\r"},
                {**row, "prompt": "a", "completion": "qz" * 5000},
            ],
        )
    text = said.getvalue().decode(encoding)
    assert all(
        word in text for word in ("system: be brief", "user: [red]x[/nothing]", r"\x1b[2J\ud800\r")
    )
    assert "\x1b" not in text
    assert text.count("q") == progress.MOST_PRINTED // 2


def test_prompts_that_are_too_long(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = data.load_tokenizer(ROOT / "data/chars")
    rows = [{"prompt": "a" * n + "b", "answer": ""} for n in (8, 9, 10, 11)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "heldout.jsonl").write_text('{"prompt": "c"}\n')
    sets = [
        f'data.train=["{tmp_path}/train.jsonl"]',
        f'data.heldout=["{tmp_path}/heldout.jsonl"]',
        "generator.max_model_len=16",
    ]

    def lengths(overlong: str) -> list[int]:
        prompts = data.load_dataset(
            config.load(DENSE, [*SETS, *sets, f'data.overlong="{overlong}"']), tokenizer
        ).train
        assert {tokenizer.decode(p.ids[-1:]) for p in prompts} == {"b"}
        return [len(p.ids) for p in prompts]

    with pytest.raises(
        rm.ConfigError,
        match=r"a prompt of 12 tokens .* \[data\] overlong can drop or truncate such prompts$",
    ):
        lengths("raise")
    assert lengths("drop") == [9, 10]
    assert lengths("truncate") == [9, 10, 10, 10]
    told = "2 of 4 prompts have more than 10 tokens and were {} ([data] overlong)"
    assert [r.getMessage() for r in caplog.records] == list(
        map(told.format, ("dropped", "truncated to their last tokens"))
    )
    (tmp_path / "heldout.jsonl").write_text(json.dumps({"prompt": "c" + "a" * 9 + "b"}) + "\n")
    with pytest.raises(
        rm.ConfigError, match=r"^\[data\] heldout: 3 of its prompts are training prompts too$"
    ):
        lengths("truncate")  # then they are the same
    (tmp_path / "train.jsonl").write_text(
        "".join(json.dumps({"prompt": c + "a" * 9 + "b"}) + "\n" for c in "cdefghij")
    )
    sets += ["data.heldout=[]", "data.heldout_share=0.5"]
    with pytest.raises(
        rm.ConfigError, match=r"^\[data\] heldout: [1-7] of its prompts are training prompts too$"
    ):
        lengths("truncate")


def test_a_model_without_an_end_is_told(caplog: pytest.LogCaptureFixture) -> None:
    this, tokenizer = config.load(DENSE, SETS), data.load_tokenizer(ROOT / "data/chars")

    def told() -> list[Any]:
        make_generator(this, model_config(this, tokenizer), tokenizer).close()
        return [r.getMessage() for r in caplog.records]

    assert told() == []
    tokenizer.eos_token = None
    assert told() == [
        "no token ends a completion: neither tokenizer, config.json nor generation_config.json "
        "has an eos_token_id"
    ]


def test_the_curves_show_differences_of_zero(tmp_path: Path) -> None:
    """The panel "trainer against generator", at the top right, is not empty if the two agree."""
    from matplotlib.image import imread

    for values in ((0.0, 0.0), (0.0, 1e-3), (1e-3, 1e-2)):
        lines = [{"step": i, "logprob_diff_max": v, "kl_k3": v} for i, v in enumerate(values)]
        metrics.draw_curves(lines, tmp_path / "curves.png")
        height, width, _ = (image := imread(tmp_path / "curves.png")).shape
        panel = image[: height // 2, width // 2 :, :3]
        assert (panel.max(-1) - panel.min(-1) > 0.2).any()  # colors


@pytest.mark.parametrize("largest", [0.0, 1e-6])
def test_the_curves_say_how_many_logprobs_were_compared(largest: float) -> None:
    """The headline covers two steps of 700 and 800 tokens, and appears only if all differences are
    0."""
    lines = [
        {"step": i, "tokens": tokens, "logprob_diff_max": i * largest, "kl_k3": 0.0}
        for i, tokens in enumerate((700, 800))
    ]
    texts = [[text.get_text() for text in axes.texts] for axes in metrics.plot(lines).axes]
    headline = ["0 of 1,500 logprobs differ"] if largest == 0 else []
    assert texts == [[], headline, [], []]

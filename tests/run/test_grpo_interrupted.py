"""Runs of `rollmesh grpo` that a Ctrl-C or an error ends, and runs that continue although their
output is closed or an exporter fails.

A run that ends leaves its last finished step and prints how to continue."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import re
import shlex
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from grpo_runs import DENSE, SMALL, command, lines_of, run, state_of, whole  # noqa: F401
from paths import ROOT

import rollmesh as rm
from rollmesh.cli import main

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from rollmesh.grpo import loop  # noqa: E402
from rollmesh.run import (  # noqa: E402
    config,
    metrics,
)

pytestmark = pytest.mark.usefixtures("torch_as_it_was", "no_pictures")


# ------------------------------------------------------------------------------------- resuming
@pytest.mark.usefixtures("plain_signals")
def test_what_ends_a_run_says_how_to_go_on(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sends Ctrl-C in a reward. The printed command resumes from the checkpoint."""
    (tmp_path / "interrupted_reward_of_test.py").write_text(
        "import os, signal\nfrom rollmesh.grpo.rewards import char_match\ncalls = 0\n"
        "def f(prompts, completions, answer, **_):\n"
        "    global calls\n    calls += 1\n"
        "    if calls == 6:  # of step 3\n        os.kill(os.getpid(), signal.SIGINT)\n"
        "    return char_match(prompts, completions, answer=answer)\n"
    )
    file, out = tmp_path / "a run.toml", tmp_path / "out"
    text = (
        DENSE.read_text()
        .replace('"../data', f'"{ROOT}/data')
        .replace('"char_match"', '"interrupted_reward_of_test:f"')
    )
    file.write_text(text)
    sets = [word for change in SMALL for word in ("--set", change)]
    assert main(["grpo", str(file), "--out", str(out), *sets]) == 130
    said = capsys.readouterr().err.splitlines()
    assert said[:2] == ["rollmesh grpo: interrupted", "reward interrupted_reward_of_test:f ran"]
    words = re.fullmatch(r"to continue from step_000003: rollmesh (.*)", said[2])
    assert words is not None
    assert len(said) == 3
    assert main(shlex.split(words[1])) == 0
    assert lines_of(out) == lines_of(whole)
    assert state_of(out) == state_of(whole)


def kill(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def ends_in_a_reward(this: loop.Run, number: signal.Signals) -> None:
    """Sends the signal in a reward of step 3: the rewards of 2 evaluations and 3 steps come before
    it."""
    [function], calls = this.rewards.functions, iter(range(100))
    this.rewards.functions = [
        lambda **columns: kill(number) if next(calls) == 5 else function(**columns)
    ]


def ends_in_an_update(this: loop.Run, number: signal.Signals) -> None:
    """Sends the signal in the update of step 2, where the weights are between versions: the run
    ends after it."""
    calls = iter(range(100))
    this.trainer.optimizer.register_step_pre_hook(
        lambda *_: kill(number) if next(calls) == 4 else None
    )


def ends_by_an_error(this: loop.Run, number: signal.Signals) -> None:
    [function], calls = this.rewards.functions, iter(range(100))
    this.rewards.functions = [lambda **columns: None if next(calls) == 5 else function(**columns)]


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    "how, number, error",
    [
        (ends_in_a_reward, signal.SIGTERM, KeyboardInterrupt),
        (ends_in_an_update, signal.SIGINT, KeyboardInterrupt),
        (ends_in_an_update, signal.SIGHUP, KeyboardInterrupt),
        (ends_by_an_error, signal.SIGINT, rm.ConfigError),
    ],
)
@pytest.mark.usefixtures("plain_signals")
def test_what_ends_a_run_leaves_its_last_finished_step(
    how: Callable[[loop.Run, signal.Signals], None],
    number: signal.Signals,
    error: type[BaseException],
    whole: Path,
    tmp_path: Path,
) -> None:
    """The resumed run has the weights, moments and metrics of an uninterrupted run. All signal
    handlers are restored."""
    before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    this = loop.prepare(config.load(DENSE, [*SMALL, "checkpoint.every=0"]))
    how(this, number)
    try:
        with pytest.raises(error) as caught:
            loop.train(this, tmp_path)
    finally:
        this.close()
    assert error is not KeyboardInterrupt or caught.value.args == (number,)
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_000003"]
    run(tmp_path, resume=tmp_path)
    assert lines_of(tmp_path) == lines_of(whole)
    assert state_of(tmp_path) == state_of(whole)


def test_an_update_that_fails_half_way_leaves_no_checkpoint(tmp_path: Path) -> None:
    """A step has two updates: between them the weights do not belong to a step."""
    this, calls = loop.prepare(config.load(DENSE, SMALL)), iter(range(100))
    this.trainer.optimizer.register_step_pre_hook(lambda *_: 1 / 0 if next(calls) == 3 else None)
    try:
        with pytest.raises(ZeroDivisionError):
            loop.train(this, tmp_path)
    finally:
        this.close()
    assert not (tmp_path / "checkpoints").exists()


# --------------------------------------------------------------------------- what does not end it
def test_neither_a_display_nor_a_picture_ends_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Standard output goes to a closed pipe, as with `| head -1`, and a folder has the picture's
    name."""
    monkeypatch.setattr("rollmesh.run.folder.draw_curves", metrics.draw_curves)
    (tmp_path / "curves.png").mkdir()
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", buffering=1) as gone, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", gone)
        sets = [*SMALL, "rollout.num_completions_to_print=2"]
        assert command(tmp_path, sets) == 0
    assert len(lines_of(tmp_path)) == 5
    said = capsys.readouterr().err
    assert "rollmesh grpo: the display stops: BrokenPipeError: " in said
    assert "rollmesh grpo: curves.png was not drawn: IsADirectoryError: " in said


class Gone(io.StringIO):
    """A file that was closed, or whose reader has exited."""

    def __init__(self, error: type[Exception]) -> None:
        super().__init__()
        self.error = error

    def write(self, text: str) -> int:
        raise self.error


def test_output_that_is_closed_ends_no_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell closes it with >&-. If standard error is closed, only the exit status remains."""
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", None)
        assert main(["plan", str(DENSE)]) == 0
        sys.stdout.close()
    for error in (BrokenPipeError, ValueError):
        monkeypatch.setattr(sys, "stderr", Gone(error))
        assert main(["grpo", "nowhere.toml"]) == 2


@pytest.mark.parametrize("said", ["stop", 99999, []])
def test_an_interrupt_of_the_user_s_own(
    said: object,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt(said)

    monkeypatch.setattr(loop, "prepare", interrupted)
    monkeypatch.chdir(tmp_path)
    assert main(["grpo", str(DENSE)]) == 130
    assert capsys.readouterr().err.splitlines() == [
        "rollmesh grpo: interrupted",
        "no step was made; the same command begins again",
    ]


def test_an_ascii_terminal_ends_no_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.BytesIO()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="ascii"))
        assert command(tmp_path, SMALL) == 0
        assert b"max |\\u0394logp| 0.0e+00" in shown.getvalue()


def test_a_run_that_ends_before_its_first_checkpoint_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = [
        word
        for change in [*SMALL, 'reward.functions=["wrong_reward_of_test:f"]']
        for word in ("--set", change)
    ]
    (tmp_path / "wrong_reward_of_test.py").write_text(
        "def g(x):\n    return x['oops']\ndef f(**columns):\n    return g({})\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        assert main(["grpo", str(DENSE), "--out", str(tmp_path / "out"), *sets]) == 2
    said = capsys.readouterr().err.splitlines()
    assert (
        said[0]
        == "rollmesh grpo: ConfigError: reward wrong_reward_of_test:f raised KeyError: 'oops'"
    )
    assert [line.strip() for line in said if line.startswith("  File ")] == [
        f'File "{tmp_path}/wrong_reward_of_test.py", line {line}, in {name}'
        for line, name in ((4, "f"), (2, "g"))
    ]
    assert said[-2:] == ["KeyError: 'oops'", "no step was finished; the same command begins again"]


def leveldb_records(log: bytes) -> Iterator[bytes]:
    """Yields the records of W&B's file: a header of 7 bytes, then LevelDB's log format."""
    at, parts = 7, []
    while at + 7 <= len(log):
        if 32768 - at % 32768 < 7:  # a header does not fit into the rest of a block
            at += 32768 - at % 32768
        _, length, kind = struct.unpack_from("<IHB", log, at)
        if at + 7 + length > len(log):  # it is being written
            return
        parts.append(log[at + 7 : at + 7 + length])
        at += 7 + length
        if kind in (1, 4):  # full, last
            yield b"".join(parts)
            parts = []


@pytest.mark.full
def test_weights_and_biases_gets_the_lines_of_the_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offline, with the real library; the test reads its file back."""
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_MODE", "offline")
    out = tmp_path / "a-run"
    assert command(out, SMALL, "--wandb", "a project") == 0
    [file] = out.glob("wandb/offline-run-*/*.wandb")
    logged, names, axes = [], [], []
    deadline, records = time.monotonic() + 30, []
    # W&B's process may still write after finish().
    while not (records and records[-1].HasField("exit")) and time.monotonic() < deadline:
        records = [
            wandb_internal_pb2.Record.FromString(content)
            for content in leveldb_records(file.read_bytes())
        ]
    for record in records:
        names += [(record.run.project, record.run.display_name)] if record.HasField("run") else []
        axes += [record.metric.step_metric] if record.HasField("metric") else []
        if record.HasField("history"):
            logged.append(
                {
                    item.key or item.nested_key[0]: json.loads(item.value_json)
                    for item in record.history.item
                }
            )
    assert names[0] == ("a project", "a-run")
    assert "step" in axes
    lines = metrics.read(out / "metrics.jsonl")
    assert [{k: v for k, v in line.items() if not k.startswith("_")} for line in logged] == lines


def test_without_the_package_of_weights_and_biases(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "wandb" else find(name, *rest),
    )
    assert main(["grpo", str(DENSE), "--wandb", "p"]) == 2
    assert (
        capsys.readouterr().err
        == "rollmesh grpo: ConfigError: --wandb: expected the package wandb, got none here: pip "
        "install wandb\n"
    )

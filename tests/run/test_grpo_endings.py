"""Ends of `rollmesh grpo`: a signal at any moment from its first line to its last, and a run that
continues from an older checkpoint.

A signal's exit status is 128 + its number. The output is the signal's name and one line about the
saved state and how to resume, without a traceback, and files are complete. The resumed run is
bit-identical to an uninterrupted run.
"""

from __future__ import annotations

import multiprocessing
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from grpo_runs import DENSE, SMALL, lines_of, state_of, whole  # noqa: F401 (a fixture)
from grpo_runs import run as run_whole
from marks import full
from paths import ROOT

from rollmesh.cli import main
from rollmesh.run.signals import SIGNALS, Interrupts

pytest.importorskip("torch")
pytest.importorskip("transformers")


from rollmesh.grpo import loop
from rollmesh.run import config, metrics, progress
from rollmesh.run import folder as run_folder

SETS = [word for change in SMALL for word in ("--set", change)]
pytestmark = pytest.mark.usefixtures("torch_as_it_was", "plain_signals", "no_pictures")


def partial_files(folder: Path) -> list[str]:
    return [str(path.relative_to(folder)) for path in folder.rglob(".*")]


# ---------------------------------------------------------------------------------------- signals
BEGIN, MADE = "no step was made; the same command begins again", "all 4 steps are made: {out}"
LATER = "rollmesh grpo: {name}: the run ends after {what}; a second one ends it at once"
# (place of the function before whose call the signal arrives, number, the object that waits for it,
# the line about how to resume)
MOMENTS: dict[str, tuple[Any, str, signal.Signals, str, str]] = {
    "data": (loop, "load_dataset", signal.SIGTERM, "", BEGIN),
    "trainer": (loop, "Trainer", signal.SIGINT, "", BEGIN),
    "generator": (loop, "make_generator", signal.SIGHUP, "", BEGIN),
    "logs": (
        metrics,
        "MetricsLog",
        signal.SIGTERM,
        "the run has begun",
        "no step was finished; the same command begins again",
    ),
    "curves": (
        run_folder,
        "draw_curves",
        signal.SIGTERM,
        "its last files are written",
        "to continue from step_000004: {command}",
    ),
    "display": (
        progress.Display,
        "__exit__",
        signal.SIGINT,
        "",
        "to continue from step_000004: {command}",
    ),
    "close": (loop.Run, "close", signal.SIGTERM, "the generator is closed", MADE),
}


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    "moment",
    [name if name in ("data", "generator", "curves", "close") else full(name) for name in MOMENTS],
)
def test_a_signal_ends_the_command(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    where, name, number, waits, told = MOMENTS[moment]
    call, calls = getattr(where, name), iter(range(100))

    def after_a_signal(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == 0:
            signal.raise_signal(number)
        return call(*args, **kwargs)

    monkeypatch.setattr(where, name, after_a_signal)
    out, before = tmp_path / "out", [signal.getsignal(s) for s in SIGNALS]
    assert main(["grpo", str(DENSE), "--out", str(out), *SETS]) == 128 + number
    assert [signal.getsignal(s) for s in SIGNALS] == before
    command = shlex.join(["rollmesh", "grpo", str(DENSE), "--resume", str(out), *SETS])
    said = [LATER.format(name=number.name, what=waits)] if waits else []
    said += [
        f"rollmesh grpo: {'interrupted' if number == signal.SIGINT else signal.strsignal(number)}"
    ]
    assert capsys.readouterr().err.splitlines() == [*said, told.format(out=out, command=command)]
    assert out.exists() == (told != BEGIN)
    assert partial_files(tmp_path) == []
    if told != BEGIN and moment != "logs":
        assert len(metrics.read(out / "metrics.jsonl")) == 5
        assert (out / "curves.png").exists() == (moment in ("curves", "display", "close"))


def test_a_signal_before_a_checkpoint_is_renamed_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second signal does not wait: the partial checkpoint is removed, and the previous checkpoint
    stays."""
    replace, calls = os.replace, iter(range(100))
    hits = {1: 1, 2: 2}  # of the checkpoints of steps 2 and 3: so many signals

    def signalled(source: Any, target: Any) -> None:
        if "step_" in str(target):
            for _ in range(hits.get(next(calls), 0)):
                signal.raise_signal(signal.SIGTERM)
        replace(source, target)

    monkeypatch.setattr(os, "replace", signalled)
    changes = [*SMALL, "checkpoint.every=1"]
    for resume, first, left in (
        (None, 1, ["step_000001", "step_000002"]),
        (tmp_path, 3, ["step_000001", "step_000002"]),
    ):
        this = loop.prepare(config.load(DENSE, changes), resume)
        try:
            with pytest.raises(KeyboardInterrupt):
                loop.train(this, tmp_path)
        finally:
            this.close()
        assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == left, first


class Bearer:
    """An object that supports weak references."""


def test_no_signal_is_lost_where_nothing_can_be_raised() -> None:
    """In a callback of a weak reference Python prints the exception and continues."""
    with Interrupts():
        bearer, seen = Bearer(), []
        hook = sys.unraisablehook
        callback = weakref.ref(bearer, lambda _: signal.raise_signal(signal.SIGTERM))
        with pytest.raises(KeyboardInterrupt) as caught:  # noqa: PT012
            del bearer
            seen.append(callback())
            time.sleep(30)
        assert caught.value.args == (signal.SIGTERM,)
        assert seen == [None]
    assert sys.unraisablehook != hook


def swallow() -> None:
    with suppress(BaseException):
        signal.raise_signal(signal.SIGHUP)


def test_what_a_library_swallows_is_raised_again() -> None:
    raised: tuple[Any, ...] = ()
    with Interrupts() as interrupts:
        swallow()
        try:
            interrupts.release()
        except KeyboardInterrupt as error:
            raised = error.args
    assert raised == (signal.SIGHUP,)
    with Interrupts() as interrupts:
        interrupts.release()


def test_what_a_library_makes_of_a_signal_is_its_end() -> None:
    with pytest.raises(KeyboardInterrupt) as caught, Interrupts():  # noqa: PT012
        swallow()
        error = ImportError("numpy")
        error.add_note("a note")
        raise error
    assert (caught.value.args, caught.value.__cause__, caught.value.__notes__) == (
        (signal.SIGHUP,),
        error,
        ["a note"],
    )
    with pytest.raises(KeyboardInterrupt) as caught, Interrupts():  # noqa: PT012
        swallow()
        raise KeyboardInterrupt
    assert caught.value.args == (signal.SIGHUP,)
    with pytest.raises(ImportError), Interrupts():
        raise ImportError("numpy")


def test_one_context_inside_another() -> None:
    with Interrupts() as interrupts:
        with interrupts:
            interrupts.hold("a test")
            signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            interrupts.release()
        interrupts.hold("a test")
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        interrupts.hold("a test")
        signal.raise_signal(signal.SIGINT)
        interrupts.drop()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def one(text: str) -> int:
    return len(text)


def test_a_pool_of_forked_processes_ends(capfd: pytest.CaptureFixture[str]) -> None:
    """The pool ends its processes by SIGTERM, at any moment after their fork. With Python's
    handlers some processes would never handle it, and others would print a traceback."""
    with Interrupts():
        for _ in range(30):
            with multiprocessing.get_context("fork").Pool(2) as pool:
                assert pool.map(one, ["a", "bc"]) == [1, 2]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    assert capfd.readouterr().err == ""


@pytest.mark.full
def test_a_signal_at_any_moment_of_a_process(whole: Path, tmp_path: Path) -> None:
    """Sends SIGINT or SIGTERM a given number of seconds after the first line. The last ones arrive
    while the interpreter exits, or too late."""
    for moment in range(7):
        number = (signal.SIGINT, signal.SIGTERM)[moment % 2]
        out = tmp_path / f"out-{moment}"
        command = [sys.executable, "-m", "rollmesh", "grpo", str(DENSE), "--out", str(out), *SETS]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
        ) as process:
            assert process.stdout is not None
            assert "reading data and model" in process.stdout.readline()
            time.sleep(moment * 0.9)
            process.send_signal(number)
            said = process.communicate(timeout=60)[1]
        assert process.returncode in (128 + number, -number, 0), said
        assert moment > 0 or process.returncode == 128 + number
        assert "Traceback" not in said
        assert "Exception ignored" not in said
        if process.returncode == 128 + number:
            assert any(
                line.startswith(("to continue from", "no step was", "no checkpoint", "all 4"))
                for line in said.splitlines()
            ), said
        assert partial_files(tmp_path) == []
        if (out / "checkpoints").exists():
            run_whole(out, resume=out)
            assert lines_of(out) == lines_of(whole)
            assert state_of(out) == state_of(whole)


# ---------------------------------------------------------------------------- an older checkpoint
def checkpoints(out: Path) -> list[str]:
    return sorted(
        str(file.parent.parent.relative_to(out)) for file in out.glob("*/*/trainer/state.json")
    )


def trained(out: Path, *changes: str, resume: Path | None = None) -> None:
    this = loop.prepare(
        config.load(DENSE, [*SMALL, "checkpoint.every=1", "checkpoint.keep=9", *changes]),
        resume,
        ["train.lr"],
    )
    try:
        loop.train(this, out)
    finally:
        this.close()


def test_a_run_that_goes_back_leaves_the_later_checkpoints_aside(
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The later checkpoints are moved, so that --resume continues the new run, even if it ended
    before its first checkpoint. A second time they get other names, and a moved checkpoint can be
    resumed."""
    trained(tmp_path, "train.lr=0.01")
    older = [f"checkpoints/step_00000{step}" for step in (1, 2, 3, 4)]
    assert checkpoints(tmp_path) == older
    with monkeypatch.context() as patch:  # it ends before its first step
        patch.setattr(loop, "run_step", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            trained(tmp_path, "train.lr=0.02", resume=tmp_path / older[1])
    aside = ["abandoned/step_000003", "abandoned/step_000004"]
    assert checkpoints(tmp_path) == [*aside, *older[:2]]
    moved = [
        f"{tmp_path / old} belongs to a run that is not continued; it was moved to {tmp_path / new}"
        for old, new in zip(older[2:], aside, strict=True)
    ]
    assert [r.getMessage() for r in caplog.records] == moved
    trained(tmp_path, "train.lr=0.02", resume=tmp_path)
    assert checkpoints(tmp_path) == [*aside, *older]
    # The run is complete, and there is nothing to move.
    trained(tmp_path, "train.lr=0.02", resume=tmp_path)
    assert checkpoints(tmp_path) == [*aside, *older]
    trained(tmp_path, "train.lr=0.01", resume=tmp_path / aside[0])
    twice = [
        "abandoned/step_000003",
        "abandoned/step_000003-2",
        "abandoned/step_000004",
        "abandoned/step_000004-2",
    ]
    assert checkpoints(tmp_path) == [*twice, *(name for name in older if not name.endswith("3"))]


def test_a_new_run_leaves_checkpoints_without_metrics_aside(tmp_path: Path) -> None:
    trained(tmp_path)
    (tmp_path / "metrics.jsonl").unlink()
    trained(tmp_path, "train.steps=2")
    assert checkpoints(tmp_path) == [
        *(f"abandoned/step_00000{i}" for i in (1, 2, 3, 4)),
        "checkpoints/step_000001",
        "checkpoints/step_000002",
    ]


def resumed(*options: str) -> int:
    return main(["grpo", str(DENSE), "--resume", *options, *SETS])


def test_a_checkpoint_names_its_run(
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The run is found by any path: from its own folder, and by a link. A copy elsewhere has no
    run."""
    (tmp_path / "link").symlink_to("out/checkpoints/step_000002")
    places = (
        ("out", "checkpoints/step_000002"),
        ("out/checkpoints", "step_000002"),
        ("out/checkpoints/step_000002", "."),
        (".", "link"),
    )
    for where, path in places:
        shutil.copytree(whole, tmp_path / "out")
        shutil.rmtree(tmp_path / "out/checkpoints/step_000004")
        before = {entry.name for entry in tmp_path.iterdir()}
        with monkeypatch.context() as patch:
            patch.chdir(tmp_path / where)
            assert resumed(path) == 0
        assert {entry.name for entry in tmp_path.iterdir()} == before
        assert checkpoints(tmp_path / "out") == [
            "checkpoints/step_000002",
            "checkpoints/step_000004",
        ]
        assert state_of(tmp_path / "out") == state_of(whole)
        shutil.rmtree(tmp_path / "out")
    shutil.copytree(whole / "checkpoints/step_000002", tmp_path / "elsewhere/step_000002")
    capsys.readouterr()
    assert resumed(str(tmp_path / "elsewhere/step_000002")) == 2
    said = capsys.readouterr().err
    assert (
        f"step_000002: expected a checkpoint of a run folder, got one in {tmp_path}/elsewhere; "
        "--out names one" in said
    )
    assert resumed(str(tmp_path / "elsewhere/step_000002"), "--out", str(tmp_path / "new")) == 0


def test_no_run_goes_on_in_the_folder_of_another(
    whole: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The metrics would contain lines of both runs."""
    shutil.copytree(whole, tmp_path / "other")
    before = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))
    assert resumed(str(whole / "checkpoints/step_000002"), "--out", str(tmp_path / "other")) == 2
    assert (
        f"--out {tmp_path}/other: expected a folder without a run, got one; --resume "
        f"{tmp_path}/other continues it" in capsys.readouterr().err
    )
    assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*")) == before

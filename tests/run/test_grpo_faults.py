"""Failures in a run of `rollmesh grpo`: a full disk, a read-only folder, a Ctrl-C, malformed files.

Each failure ends with one line about its cause, the last checkpoint stays complete, and the run
that is resumed from it is bit-identical to an uninterrupted run."""

from __future__ import annotations

import errno
import importlib.util
import io
import json
import os
import re
import resource
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from helpers import TIMES, TINY_RUN
from paths import ROOT

import rollmesh as rm
from rollmesh.cli import main

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from rollmesh.grpo import loop  # noqa: E402
from rollmesh.run import (  # noqa: E402
    checkpoint,
    config,
    data,
    metrics,
)
from rollmesh.run.files import locked, writing  # noqa: E402
from rollmesh.run.generator import make_generator  # noqa: E402
from rollmesh.run.models import load_model  # noqa: E402

DENSE = ROOT / "configs/qwen3_debug.toml"
SMALL = [*TINY_RUN, "train.steps=4", "checkpoint.every=2", "rollout.log_completions=0"]
pytestmark = pytest.mark.usefixtures("torch_as_it_was")


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disables draw_curves, which takes longer than these runs."""
    monkeypatch.setattr("rollmesh.run.folder.draw_curves", lambda lines, path: path.touch())


def run(
    out: Path, resume: Path | None = None, show: Callable[[Any], None] = lambda _: None
) -> None:
    this = loop.prepare(config.load(DENSE, SMALL), resume)
    try:
        loop.train(this, out, lambda line, _: show(line))
    finally:
        this.close()


def lines_of(out: Path) -> list[dict[str, Any]]:
    return [
        {k: v for k, v in m.items() if k not in TIMES} for m in metrics.read(out / "metrics.jsonl")
    ]


def state_of(out: Path) -> dict[str, bytes]:
    """Returns the weights, moments, random state and config of the last checkpoint."""
    folder = out / "checkpoints/step_000004"
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in (*folder.rglob("*.safetensors"), folder / "config.json")
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run: the oracle."""
    out = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rollmesh.run.folder.draw_curves", lambda lines, path: path.touch())
        run(out)
    return out


@contextmanager
def disk() -> Iterator[Callable[[int], None]]:
    """Returns a function that limits the size of all files of this process: a larger write fails as
    on a full disk, with another errno."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        yield lambda num_bytes: resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# -------------------------------------------------------------------------------- what is written
# TensorBoard writes in a thread, which may reach the limit too.
@pytest.mark.quick(1)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    "file", ["config.json", "model.safetensors", "trainer/optimizer.safetensors"]
)
def test_a_checkpoint_that_does_not_fit_leaves_the_one_before(
    file: str, whole: Path, tmp_path: Path
) -> None:
    """The checkpoint fails in the first write of this file. A partial folder of a killed run is
    removed too. With the smallest limit the next line of metrics does not fit either; else the run
    ends in the second try, after the last step."""
    reference = whole / "checkpoints/step_000002"
    assert (reference / "model.safetensors").stat().st_size < (
        reference / "trainer/optimizer.safetensors"
    ).stat().st_size
    limit = (reference / file).stat().st_size - 1
    (tmp_path / "checkpoints/.step_000001.partial/trainer").mkdir(parents=True)
    with disk() as allow, pytest.raises(OSError) as caught:
        # The disk is full before the step's checkpoint.
        run(tmp_path, show=lambda line: allow(limit) if line["step"] == 3 else None)
    named = tmp_path / ("metrics.jsonl" if file == "config.json" else "checkpoints/step_000004")
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(named))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_000002"]
    run(tmp_path, resume=tmp_path)
    assert lines_of(tmp_path) == lines_of(whole)
    assert state_of(tmp_path) == state_of(whole)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_checkpoint_that_did_not_fit_is_tried_again(
    whole: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The run tries again after the next step, when there is room."""
    limit = (whole / "checkpoints/step_000002/model.safetensors").stat().st_size - 1
    with disk() as allow:
        run(
            tmp_path,
            show=lambda line: (
                allow({1: limit, 2: -1}[line["step"]]) if line["step"] in (1, 2) else None
            ),
        )
    assert [r.getMessage() for r in caplog.records] == [
        f"[Errno 27] File too large: '{tmp_path}/checkpoints/step_000002'; the checkpoint is "
        "tried again after the next step"
    ]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "step_000003",
        "step_000004",
    ]
    assert lines_of(tmp_path) == lines_of(whole)
    assert state_of(tmp_path) == state_of(whole)


# TensorBoard writes in a thread, which may reach the limit too.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_line_of_metrics_that_does_not_fit(whole: Path, tmp_path: Path) -> None:
    """The resumed run drops the partial line."""
    size = len(b"".join((whole / "metrics.jsonl").read_bytes().splitlines(keepends=True)[:3]))
    with disk() as allow, pytest.raises(OSError, match=r"metrics\.jsonl'$"):
        run(tmp_path, show=lambda line: allow(size + 99) if line["step"] == 2 else None)
    assert not (tmp_path / "metrics.jsonl").read_bytes().endswith(b"\n")
    run(tmp_path, resume=tmp_path)
    assert lines_of(tmp_path) == lines_of(whole)
    assert state_of(tmp_path) == state_of(whole)


def test_what_a_resumed_run_cannot_rewrite_stays(whole: Path, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text((whole / "metrics.jsonl").read_text())
    with disk() as allow:
        allow(100)
        with pytest.raises(OSError, match=r"metrics\.jsonl'$"):
            metrics.MetricsLog(tmp_path, first_step=4)
    assert lines_of(tmp_path) == lines_of(whole)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_errors_of_writing_name_a_file() -> None:
    """Python's own errors with and without a file name, and errors of the tokenizers library, get a
    file name; an exception that is not an OSError is passed on."""
    tokenizer = data.load_tokenizer(ROOT / "data/chars").backend_tokenizer
    with pytest.raises(OSError, match=r"No space left on device: 'here'$"), writing(Path("here")):
        tokenizer.save("/dev/full")
    with pytest.raises(OSError, match=r"No space left on device: 'here'$"), writing(Path("here")):
        Path("/dev/full").write_text("x")
    with pytest.raises(IsADirectoryError, match=r"'/dev'$"), writing(Path("here")):
        Path("/dev").write_text("x")
    with pytest.raises(ValueError, match=r"^other$"), writing(Path("here")):
        raise ValueError("other")
    with pytest.raises(OSError, match=r"^no number$"), writing(Path("here")):
        raise OSError("no number")


def test_a_read_only_folder_is_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "out"
    folder.mkdir(mode=0o555)
    if os.geteuid() == 0:  # file modes do not stop root
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "ro,size=4k", "tmpfs", str(folder)],
            capture_output=True,
            check=False,
        )
        if mounted.returncode:
            pytest.skip("root without the right to mount")
    try:
        for option in ("--out", "--resume"):
            assert main(["grpo", str(DENSE), option, str(folder)]) == 2
            assert (
                "out: expected a folder to write to, got a read-only one" in capsys.readouterr().err
            )
    finally:
        if os.geteuid() == 0:
            subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("name", ["metrics.jsonl", "completions.jsonl"])
def test_logs_that_cannot_be_read_stay_as_they_are(name: str, whole: Path, tmp_path: Path) -> None:
    """Tests both logs, although a resumed run rewrites them."""
    shutil.copytree(whole, tmp_path / "out")
    (tmp_path / "out/completions.jsonl").write_text('{"step": 2}\n')
    (tmp_path / "out" / name).unlink()
    (tmp_path / "out" / name).mkdir()
    before = {
        file: file.read_bytes() for file in (tmp_path / "out").glob("*.jsonl") if file.is_file()
    }
    with pytest.raises(IsADirectoryError, match=name):
        run(tmp_path / "out", resume=whole / "checkpoints/step_000002")
    assert {file: file.read_bytes() for file in before} == before


@pytest.mark.parametrize(
    "name",
    ["metrics.jsonl", "completions.jsonl", "trainer/optimizer.safetensors", "model.safetensors"],
)
def test_a_pipe_is_no_file(name: str, whole: Path, tmp_path: Path) -> None:
    """A pipe would block its reader for ever: in a run, and in a checkpoint that is resumed or
    started from."""
    is_log = name.endswith(".jsonl")
    shutil.copytree(whole, tmp_path / "out")
    folder = tmp_path / "out/checkpoints/step_000004"
    pipe = (tmp_path / "out" if is_log else folder) / name
    pipe.unlink()
    os.mkfifo(pipe)
    with pytest.raises(
        rm.ConfigError, match=rf"{name}: expected a file, got a pipe, a socket or a device$"
    ):
        run(tmp_path / "out", resume=whole / "checkpoints/step_000002" if is_log else folder)
    if name == "model.safetensors":
        with pytest.raises(
            rm.ConfigError, match=rf"{name}: expected a file, got a pipe, a socket or a device$"
        ):
            load_model(folder, "float32")


def test_an_older_checkpoint_that_cannot_be_removed_ends_no_run(
    whole: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Input: a link, for example to another disk."""
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/step_000001").symlink_to(whole / "checkpoints/step_000002")
    shutil.copytree(whole / "checkpoints/step_000002", tmp_path / "checkpoints/step_000002")
    this = loop.prepare(config.load(DENSE, [*SMALL, "checkpoint.keep=1"]), tmp_path)
    try:
        loop.train(this, tmp_path)
    finally:
        this.close()
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "step_000001",
        "step_000004",
    ]
    assert [r.getMessage() for r in caplog.records] == [
        f"{tmp_path}/checkpoints/step_000001, an older checkpoint, was not removed: Cannot call "
        "rmtree on a symbolic link"
    ]


def test_a_reward_may_change_its_process(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reward changes the working folder, to which the run folder is relative, also during its
    import; sys.path; torch's defaults; standard output."""
    (tmp_path / "careless_reward_of_test.py").write_text(
        "import os, sys, torch\nfrom rollmesh.grpo.rewards import "
        "char_match\nos.chdir('/')\nsys.path.pop(0)\n"
        "def f(**columns):\n    torch.set_grad_enabled(False)\n    "
        "torch.set_default_dtype(torch.bfloat16)\n    sys.stdout.close()\n"
        "    return char_match(**columns)\n"
    )
    sets = [
        word
        for change in [*SMALL, 'reward.functions=["careless_reward_of_test:f"]']
        for word in ("--set", change)
    ]
    for folder in ("--out", "--resume"):
        monkeypatch.chdir(tmp_path)
        monkeypatch.delitem(sys.modules, "careless_reward_of_test", raising=False)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", io.StringIO())
            try:
                assert main(["grpo", str(DENSE), folder, "out", *sets]) == 0
            finally:
                torch.set_grad_enabled(True)
                torch.set_default_dtype(torch.float32)
                sys.stdout.close()
        assert lines_of(tmp_path / "out") == lines_of(whole)
        assert state_of(tmp_path / "out") == state_of(whole)
        shutil.rmtree(tmp_path / "out/checkpoints/step_000004")


@pytest.mark.quick(1)
@pytest.mark.parametrize("change", ["removed", "replaced", "shortened"])
def test_metrics_that_another_program_touches_are_written_again(
    change: str, whole: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "metrics.jsonl"

    def touch(line: metrics.Metrics) -> None:
        if line["step"] == 1:
            if change == "shortened":
                os.truncate(file, 20)
            else:
                file.unlink()
            if change == "replaced":
                file.write_text("another\n")

    run(tmp_path, show=touch)
    assert lines_of(tmp_path) == lines_of(whole)
    assert [r.getMessage() for r in caplog.records] == [
        f"{file} was removed or changed by another program; it is written again"
    ]


# TensorBoard writes in a thread, which may report the error first.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_run_folder_that_is_moved_away_is_made_again(
    whole: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The new folder has the completions since then; TensorBoard gets no more lines, but the run
    continues."""
    out = tmp_path / "out"

    def move(line: metrics.Metrics) -> None:
        if line["step"] == 0:
            out.rename(tmp_path / "moved")

    this = loop.prepare(config.load(DENSE, [*SMALL, "rollout.log_completions=1"]))
    try:
        loop.train(this, out, lambda line, _: move(line))
    finally:
        this.close()
    assert lines_of(out) == lines_of(whole)
    assert state_of(out) == state_of(whole)
    texts = [(tmp_path / f"{name}/completions.jsonl").read_text() for name in ("moved", "out")]
    steps = [[json.loads(row)["step"] for row in text.splitlines()] for text in texts]
    assert steps == [[0], [1, 2, 3, 4]]
    said = [r.getMessage() for r in caplog.records]
    assert (
        f"{out}/completions.jsonl was removed or changed by another program; later rows are "
        "appended" in said
    )
    assert all(
        line.startswith(
            (
                f"{out}/completions",
                f"{out}/metrics",
                f"{out}/events: TensorBoard gets no more",
            )
        )
        for line in said
    )


def test_a_lock_that_cannot_be_removed_hides_no_error(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()

    def first() -> None:
        shutil.rmtree(folder)
        folder.touch()
        raise ValueError("first")

    with pytest.raises(ValueError, match="first"), locked(folder):
        first()


def forked(call: Callable[[], object]) -> int:
    """Returns the id of a process that makes the call."""
    pid = os.fork()
    if pid == 0:
        try:
            call()
        finally:
            os._exit(0)
    return pid


def test_a_forked_process_keeps_nobody_out(tmp_path: Path) -> None:
    """A process of a reward's pool may outlive a run that was killed. If it reaches the run's end,
    it does not release the lock."""
    reader, writer = os.pipe()

    def killed() -> None:
        with locked(tmp_path):
            os.write(writer, str(forked(lambda: time.sleep(60))).encode())
            time.sleep(60)

    run = forked(killed)
    worker = int(os.read(reader, 20))
    os.kill(run, signal.SIGKILL)
    os.waitpid(run, 0)
    try:
        lock = locked(tmp_path)
        with lock:
            os.waitpid(forked(lambda: lock.__exit__(None, None, None)), 0)
            assert (tmp_path / ".lock").exists()
    finally:
        os.kill(worker, signal.SIGKILL)
        os.close(reader)
        os.close(writer)


def test_a_run_keeps_others_out_of_its_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refuses --out and --resume immediately. A killed run leaves only the file, which does not
    lock anything."""
    (tmp_path / ".lock").write_text("process 1 on nowhere\n")
    with locked(tmp_path):
        for option in ("--out", "--resume"):
            assert main(["grpo", str(DENSE), option, str(tmp_path)]) == 2
            said = (
                f"StateError: {tmp_path}: expected a folder without another run, got one of "
                f"process {os.getpid()} on "
            )
            assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_fewer_steps_than_the_checkpoint_has_made(whole: Path) -> None:
    before = (whole / "metrics.jsonl").read_bytes()
    with pytest.raises(
        rm.ConfigError,
        match=r"^\[train\] steps: expected at least 4, which .*step_000004 has made, got 3$",
    ):
        loop.prepare(config.load(DENSE, [*SMALL, "train.steps=3"]), whole)
    assert (whole / "metrics.jsonl").read_bytes() == before


def test_a_million_steps_are_in_order(tmp_path: Path) -> None:
    """A copy that the user has made is not one of the run's checkpoints."""
    for name in ("step_999999", "step_1000000", "step_000002 (copy)", "step_000002.bak.bak"):
        (tmp_path / f"checkpoints/{name}/trainer").mkdir(parents=True)
        (tmp_path / f"checkpoints/{name}/trainer/state.json").touch()
    assert checkpoint.find(tmp_path).name == "step_1000000"


# ------------------------------------------------------------------------------------- resuming
@pytest.fixture
def plain_signals() -> Iterator[None]:
    """Restores signals that the parent process may have ignored, such as a shell for background
    jobs, or nohup."""
    plain = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
        signal.SIGHUP: signal.SIG_DFL,
    }
    before = {number: signal.signal(number, handler) for number, handler in plain.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


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
        assert (
            main(
                [
                    "grpo",
                    str(DENSE),
                    "--out",
                    str(tmp_path),
                    *(word for c in sets for word in ("--set", c)),
                ]
            )
            == 0
        )
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
        assert (
            main(
                [
                    "grpo",
                    str(DENSE),
                    "--out",
                    str(tmp_path),
                    *(word for c in SMALL for word in ("--set", c)),
                ]
            )
            == 0
        )
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
    assert (
        main(
            [
                "grpo",
                str(DENSE),
                "--out",
                str(out),
                "--wandb",
                "a project",
                *(word for c in SMALL for word in ("--set", c)),
            ]
        )
        == 0
    )
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


# -------------------------------------------------------------------------- files that are broken
def half(folder: Path, name: str) -> None:
    (folder / name).write_bytes((folder / name).read_bytes()[: (folder / name).stat().st_size // 2])


@pytest.mark.parametrize(
    "name, content, message",
    [
        (
            "tokenizer.json",
            None,
            "/tok: expected the files of a tokenizer, got ValueError: Couldn't instantiate",
        ),
        (
            "tokenizer.json",
            "half",
            "/tok: expected the files of a tokenizer, got JSONDecodeError: ",
        ),
        (
            "tokenizer.json",
            "{}",
            "/tok: expected the files of a tokenizer, got KeyError: 'added_tokens'",
        ),
        (
            "tokenizer_config.json",
            "half",
            "/tok: expected the files of a tokenizer, got JSONDecodeError: ",
        ),
        (
            "chat_template.jinja",
            "{% for m in",
            "chats.jsonl:1: expected a chat .* got TemplateSyntaxError: ",
        ),
        (
            "chat_template.jinja",
            "{{ raise_exception('no') }}",
            "chats.jsonl:1: expected a chat .* got TemplateError: no$",
        ),
        (
            "chat_template.jinja",
            "{{ messages + 1 }}",
            "chats.jsonl:1: expected a chat .* got TypeError: ",
        ),
    ],
)
def test_a_broken_tokenizer_is_named(
    name: str, content: str | None, message: str, tmp_path: Path
) -> None:
    """Input: a file that is missing (None), truncated, or something else, in the tokenizer of
    data/chars, saved with the chat template as a file."""
    folder, chats = tmp_path / "tok", tmp_path / "chats.jsonl"
    data.load_tokenizer(ROOT / "data/chars").save_pretrained(str(folder))
    chats.write_text('{"messages": [{"role": "user", "content": "ab"}]}\n')
    assert len(data.read_jsonl(chats, data.load_tokenizer(folder))) == 1
    if content == "half":
        half(folder, name)
    elif content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content)
    with pytest.raises(rm.ConfigError, match=message):
        data.read_jsonl(chats, data.load_tokenizer(folder))


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    """transformers would make an empty tokenizer, from the model_type of a config.json."""
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(
        rm.ConfigError,
        match=r"^\[tokenizer\] path: expected a tokenizer.json or tokenizer_config.json in .* got "
        r"neither$",
    ):
        data.load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "name, message",
    [
        ("model.safetensors", "model.safetensors: .*incomplete"),
        ("config.json", "config.json: "),
        ("trainer/state.json", "state.json: expected the state of a run, got JSONDecodeError: "),
        (
            "trainer/optimizer.safetensors",
            "optimizer.safetensors: expected the optimizer's state, got SafetensorError: ",
        ),
    ],
)
def test_a_checkpoint_cut_in_half_is_named(
    name: str, message: str, whole: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "step_000004"
    shutil.copytree(whole / "checkpoints/step_000004", folder)
    half(folder, name)
    with pytest.raises((rm.ConfigError, rm.FormatError), match=message):
        loop.prepare(config.load(DENSE, SMALL), folder)


@pytest.mark.parametrize("name", ["model.safetensors", "trainer/optimizer.safetensors"])
def test_a_flipped_bit_of_a_checkpoint_is_named(name: str, whole: Path, tmp_path: Path) -> None:
    """A change of a number's lowest bit cannot be seen without a digest. Older checkpoints have no
    digests."""
    folder = tmp_path / "step_000004"
    shutil.copytree(whole / "checkpoints/step_000004", folder)
    content = bytearray((folder / name).read_bytes())
    content[-4] ^= 1
    (folder / name).write_bytes(content)
    with pytest.raises(
        rm.FormatError,
        match=rf"{name}: expected the file that was written, of SHA-256 '\w+' in .*; it was "
        r"changed",
    ):
        loop.prepare(config.load(DENSE, SMALL), folder)
    state = json.loads((folder / "trainer/state.json").read_text())
    for wrong, message in (
        ([], "expected sha256, a table, got"),
        ({**state["sha256"], "a": 1}, "a: expected the file that was written"),
    ):
        edit_state(folder, sha256=wrong)
        with pytest.raises(rm.FormatError, match=message):
            checkpoint.verify(folder)
    shutil.copytree(folder, older := tmp_path / "step_000002")
    with pytest.raises(
        rm.FormatError,
        match=rf"it was changed or damaged since. The checkpoint before: --resume {older}$",
    ):
        checkpoint.verify(folder)
    del state["sha256"]
    (folder / "trainer/state.json").write_text(json.dumps(state))
    checkpoint.verify(folder)


def edit_state(folder: Path, **changes: Any) -> None:
    file = folder / "trainer/state.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit_config(folder: Path, table: str, **changes: Any) -> None:
    config = json.loads((folder / "trainer/state.json").read_text())["config"]
    edit_state(folder, config=config | {table: config[table] | changes})


def edit_optimizer(folder: Path, **changes: Any) -> None:
    """A value of None removes a tensor."""
    from safetensors.torch import load_file, save_file

    file = folder / "trainer/optimizer.safetensors"
    tensors = load_file(file) | {name: x for name, x in changes.items() if x is not None}
    save_file({name: x for name, x in tensors.items() if changes.get(name, x) is not None}, file)


MOMENT = "exp_avg:model.norm.weight"


@pytest.mark.parametrize(
    "change, message",
    [
        (
            lambda f: (f / "trainer/state.json").write_text("[]"),
            "expected the state of a run, got a list",
        ),
        (
            lambda f: edit_state(f, next_step="x"),
            "expected next_step, an integer from 0, .* got next_step='x'",
        ),
        (
            lambda f: edit_config(f, "rollout", **{"x" * 9999: 1}),
            r"run: .{200,300} differ \(rollout\.x{192}…: 1 there, None here\)",
        ),
        (
            lambda f: edit_config(f, "rollout", min_p={}),
            r"rollout\.min_p differ \(rollout\.min_p: {} there, 0\.0 here\)",
        ),
        (
            lambda f: edit_state(f, next_step=2),
            "expected next_step=4, as the folder is named, got 2$",
        ),
        (
            lambda f: edit_state(f, config=[]),
            "expected next_step, an integer from 0, and config, a table",
        ),
        (
            lambda f: edit_optimizer(f, rng=None),
            "expected the optimizer's state, got KeyError: 'rng'",
        ),
        (
            lambda f: edit_optimizer(f, rng=torch.zeros(3)),
            "expected the optimizer's state, got TypeError: RNG state",
        ),
        (
            lambda f: edit_optimizer(f, **{MOMENT: None}),
            rf"{MOMENT}: expected \[32\] of floats, .* got None$",
        ),
        (
            lambda f: edit_optimizer(f, **{MOMENT: torch.zeros(3)}),
            rf"{MOMENT}: expected \[32\] of floats, .* got \[3\] of torch\.float32$",
        ),
        (
            lambda f: edit_optimizer(f, **{MOMENT: torch.zeros(32, dtype=torch.int8)}),
            rf"{MOMENT}: expected .* of floats, .* got \[32\] of torch\.int8$",
        ),
        (
            lambda f: edit_optimizer(f, **{"step:model.norm.weight": torch.tensor(-1.0)}),
            r"step:.*: expected \[\] of floats, a step from 0, got ",
        ),
        (
            lambda f: edit_optimizer(f, more=torch.zeros(3)),
            r"more: expected no such key, got \[3\] of torch\.float32$",
        ),
    ],
)
def test_the_state_of_a_run_that_was_changed_is_named(
    change: Callable[[Path], None], message: str, whole: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "step_000004"
    shutil.copytree(whole / "checkpoints/step_000004", folder)
    change(folder)
    with pytest.raises((rm.ConfigError, rm.FormatError), match=message):
        loop.prepare(config.load(DENSE, SMALL), folder)


@pytest.mark.parametrize(
    "line", [b"garbage", b"[1]", b'{"a": 1}', b'{"step": "x"}', b"\xff", b"[" * 100_000]
)
def test_metrics_that_are_none_are_named(line: bytes, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 0}\n' + line + b"\n")
    with pytest.raises(rm.FormatError, match=r"metrics\.jsonl:2: expected a line of metrics"):
        metrics.read(tmp_path / "metrics.jsonl")


@pytest.mark.parametrize(
    "changes, message",
    [
        (["train.lr=1e300"], "[train] lr: expected at most 1e+18, got 1e+300"),
        (["loss.clip_high=1e308"], "[loss] clip_high: expected at most 1e+18, got 1e+308"),
        (
            [f"rollout.prompts={2**63 - 1}"],
            f"[rollout] prompts: expected at most {2**20}, got {2**63 - 1}",
        ),
        (["train.threads=100000"], "[train] threads: expected at most 1024, got 100000"),
        (
            [f"model.hidden_size={10**12}"],
            f"hidden_size: expected an integer in [1, 4194304], got {10**12}",
        ),
        (['generator.comm="torch"'], '[generator] comm="torch": expected RANK, WORLD_SIZE and '),
    ],
)
def test_settings_that_nothing_can_hold_are_refused(
    changes: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(
            [
                "grpo",
                str(DENSE),
                "--out",
                str(tmp_path / "out"),
                *(word for c in changes for word in ("--set", c)),
            ]
        )
        == 2
    )
    assert f"rollmesh grpo: ConfigError: {message}" in capsys.readouterr().err


@pytest.mark.parametrize("world", ["", "x", "-1"])
def test_a_world_that_is_no_number(
    world: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", world)
    assert main(["grpo", str(DENSE)]) == 2
    assert (
        f"ConfigError: WORLD_SIZE: expected the number of ranks, as torchrun sets it, got '{world}'"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("option", ["--out", "--resume"])
@pytest.mark.parametrize("path", ["", "a\0b"])
def test_a_path_that_names_no_folder(
    option: str, path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["grpo", str(DENSE), option, path])
    assert f"{option}: expected the path of a folder, got {path!r}" in capsys.readouterr().err


def test_a_tokenizer_with_more_tokens_than_the_model(whole: Path) -> None:
    folder = whole / "checkpoints/step_000004"
    tokenizer = data.load_tokenizer(folder)
    count = len(tokenizer)
    tokenizer.add_tokens(["<|more|>"])
    from transformers import AutoConfig

    this = config.load(DENSE, SMALL)
    with pytest.raises(
        rm.ConfigError,
        match=rf"^tokenizer: expected at most vocab_size = {count} tokens, got {count + 1}$",
    ):
        make_generator(this, AutoConfig.from_pretrained(str(folder)), tokenizer)

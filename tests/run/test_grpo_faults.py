"""Failures while a run of `rollmesh grpo` writes: a full disk, a read-only folder, files that
another program touches, another run in the folder.

Each failure ends with one line about its cause, the last checkpoint stays complete, and the run
that is resumed from it is bit-identical to an uninterrupted run."""

from __future__ import annotations

import errno
import io
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from grpo_runs import DENSE, SMALL, lines_of, run, state_of, whole  # noqa: F401
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
from rollmesh.run.models import load_model  # noqa: E402

pytestmark = pytest.mark.usefixtures("torch_as_it_was", "no_pictures")


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

"""examples/: each script runs unchanged, in a separate process, and prints what it promises.

test_trl.py runs examples/trl_grpo.py."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from paths import ROOT

EXAMPLES = ROOT / "examples"


def run(*command: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=EXAMPLES.parent,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_they_are_short() -> None:
    lengths = {
        path.name: len(path.read_text(encoding="utf-8").splitlines())
        for path in EXAMPLES.glob("*.py")
    }
    assert {name for name, lines in lengths.items() if lines > 80} == {"trl_grpo.py"}


def test_own_loop() -> None:
    lines = run("examples/own_loop.py").splitlines()
    rewards = [float(re.search(r"reward ([\d.]+)", line)[1]) for line in lines]  # type: ignore[index]
    assert rewards[0] < 0.6 < 0.9 < rewards[-1]
    assert all(line.endswith("  0 of 512 logprobs differ") for line in lines)


@pytest.mark.full
def test_async_loop() -> None:
    lines = run("examples/async_loop.py").splitlines()
    assert [line.split()[-1] for line in lines] == [str(version) for version in range(1, 11)]
    seen = [json.loads(re.search(r"\[.*\]", line)[0]) for line in lines]  # type: ignore[index]
    assert max(seen[-1]) > 0  # tokens of a version that came while their request ran, or before it
    assert all(
        max(versions) < int(line.split()[1]) for line, versions in zip(lines, seen, strict=True)
    )


def test_event_loop() -> None:
    *episodes, last = run("examples/event_loop.py").splitlines()
    told = [
        re.fullmatch(r"episode \d+: 51 tokens of versions (\[.*\])", line) for line in episodes[:16]
    ]
    assert [0, 1] in [json.loads(line[1]) for line in told if line]
    assert all(told)
    assert len(json.loads(last.removeprefix("so far: "))) == 8


@pytest.mark.full
def test_mesh_has_the_tokens_of_one_rank() -> None:
    threads = run("examples/mesh.py").splitlines()
    assert len(threads) == 1
    processes = run(
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "examples/mesh.py"
    ).splitlines()
    assert {line.split(": ")[1] for line in processes if line} == {threads[0].split(": ")[1]}
    assert len([line for line in processes if line]) == 4


@pytest.mark.full
def test_other_process() -> None:
    lines = run("examples/other_process.py").splitlines()
    assert [line.split(",")[0] for line in lines if line.startswith("generator")] == [
        f"generator: version {n}" for n in range(3)
    ]
    assert len({line.split("digest ")[1] for line in lines if "digest" in line}) == 3


@pytest.mark.quick(1)
@pytest.mark.parametrize("victim", ["trainer", "generator"])
def test_other_process_ends_when_either_side_dies(victim: str) -> None:
    """SIGKILL to one process after the first version: the other one ends with an error."""
    command = [sys.executable, "examples/other_process.py"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    example = subprocess.Popen(
        command,
        cwd=EXAMPLES.parent,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert example.stdout is not None
    while not (line := example.stdout.readline()).startswith("generator: version 0"):
        assert line, "the example ended before version 0"
    [trainer] = [
        pid
        for pid in map(int, filter(str.isdigit, os.listdir("/proc")))
        if _is_spawned(pid, example.pid)
    ]
    os.kill(trainer if victim == "trainer" else example.pid, signal.SIGKILL)
    try:
        said, _ = example.communicate(timeout=30)  # it ends when both processes have ended
    finally:
        example.kill()
        with suppress(ProcessLookupError):
            os.kill(trainer, signal.SIGKILL)
    assert example.returncode == (1 if victim == "trainer" else -signal.SIGKILL)
    assert "EOFError" in said or "BrokenPipeError" in said or "ConnectionResetError" in said


def _is_spawned(pid: int, parent: int) -> bool:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (
            int(fields[1]) == parent and b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
        )
    except OSError:  # a process that has just ended
        return False


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM")
def test_vllm_generate() -> None:
    lines = run(
        "examples/vllm_generate.py",
        VLLM_PLUGINS="rollmesh",
        VLLM_LOGGING_LEVEL="ERROR",
        VLLM_HOST_IP="127.0.0.1",
    ).splitlines()
    versions = [line for line in lines if line.startswith("version ")]
    assert [line.split(":")[0] for line in versions] == ["version 0", "version 1"]

"""`rollmesh grpo` in forks of a process that has imported what it needs and has not computed: a
tiny run takes about a second.

For the drivers tests/support/grpo_fuzz.py and tests/support/grpo_kills.py. They are programs and
import this module first, because the process must be single-threaded when it forks."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
SETTINGS |= {"TF_CPP_MIN_LOG_LEVEL": "3", "ATEN_CPU_CAPABILITY": "avx2"}
SETTINGS |= {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}  # as in conftest.py
os.environ.update(SETTINGS)  # before NumPy is imported, which starts threads

from helpers import TIMES  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
DENSE = ROOT / "configs/qwen3_debug.toml"
CLONE_NEWNS, MS_REC, MS_PRIVATE = 0x20000, 1 << 14, 1 << 18
SHM, _shm = Path("/dev/shm"), list[Path]()
HUNG = 124  # exit status of a run that was ended at its limit, as timeout(1) has it
UNTYPED = 99  # of one that raised what main does not explain
PLAIN = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
}


def prepare() -> None:
    """Imports all modules that a run imports. Gives this process a private /dev/shm if it is
    allowed to, because names of other processes would be counted as names of a run."""
    libc = ctypes.CDLL(None)
    if (
        not _shm
        and libc.unshare(CLONE_NEWNS) == 0
        and libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None) == 0
    ):
        _shm.extend(
            [SHM] if libc.mount(b"tmpfs", bytes(SHM), b"tmpfs", 0, b"size=64m") == 0 else []
        )
    import matplotlib.backends.backend_agg
    import matplotlib.figure  # noqa: F401
    import rich.console
    import rich.live  # noqa: F401
    import torch.utils.tensorboard  # noqa: F401
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401

    import rollmesh.cli.grpo
    import rollmesh.grpo.loop  # noqa: F401

    if (count := len(os.listdir("/proc/self/task"))) != 1:
        raise RuntimeError(f"expected one thread before the first fork, got {count}")


def left_in_shm() -> list[str]:
    """Names in the /dev/shm of this process and its children; empty where it has none of its
    own."""
    return sorted(path.name for folder in _shm for path in folder.iterdir())


@dataclass
class Child:
    pid: int
    said: Path  # standard output and error
    status: int | None = None

    def wait(self, limit: float) -> int | None:
        """Returns the exit status, or the negative number of a signal; None after the given number
        of seconds."""
        end = time.monotonic() + limit
        while self.status is None:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            if done:
                self.status = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > end:
                return None
            else:
                time.sleep(0.002)
        return self.status

    def end(self, number: int = signal.SIGKILL) -> None:
        """Sends a signal to its process group."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def text(self) -> str:
        return self.said.read_text(encoding="utf-8", errors="replace")


def start(argv: list[str], said: Path, before: Callable[[], object] = lambda: None) -> Child:
    """Runs `rollmesh ARGV` in a fork with a separate process group. before: called in the fork."""
    pid = os.fork()
    if pid == 0:
        status = UNTYPED
        try:
            os.setpgid(0, 0)
            for number, handler in PLAIN.items():  # whoever started this may have had them ignored
                signal.signal(number, handler)
            descriptor = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            sys.stdout, sys.stderr = (
                os.fdopen(1, "w", 1, closefd=False),
                os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False),
            )
            before()
            from rollmesh.cli import main

            status = main(argv)
        except SystemExit as error:  # of argparse
            status = error.code if isinstance(error.code, int) else UNTYPED
        except KeyboardInterrupt:  # before main heeds it
            status = 128 + signal.SIGINT
        except BaseException:  # noqa: BLE001 (shown, and the status says so)
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)
    with suppress(OSError):
        os.setpgid(pid, pid)  # before anything is sent to it, whichever of the two is first
    return Child(pid, said)


def start_command(argv: list[str], said: Path) -> Child:
    """Starts the same in a fresh interpreter, whose imports take seconds."""
    with said.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "rollmesh", *argv], stdout=file, stderr=file, process_group=0
        )
    process.returncode = 0  # Child waits for it
    return Child(process.pid, said)


def run(
    argv: list[str], said: Path, limit: float, before: Callable[[], object] = lambda: None
) -> int:
    """Returns the exit status, or HUNG if the run was killed after the given number of seconds."""
    child = start(argv, said, before)
    try:
        status = child.wait(limit)
    finally:
        child.end()
    if status is None:
        child.wait(10)
        return HUNG
    return status


def result(out: Path) -> dict[str, Any]:
    """Returns the results of a run without times: every file of its last checkpoint, and its
    logs."""
    from safetensors.numpy import load_file

    folder = max(file.parents[1] for file in out.glob("checkpoints/step_*/trainer/state.json"))
    files: dict[str, Any] = {
        str(file.relative_to(folder)): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file()
    }
    if (rollouts := "trainer/rollouts.safetensors") in files:
        tensors = load_file(folder / rollouts)
        files[rollouts] = {
            name: (x.dtype.str, x.shape, x.tobytes())
            for name, x in tensors.items()
            if not name.endswith(":seconds")
        }
        state = json.loads(files["trainer/state.json"])
        files["trainer/state.json"] = state | {
            "sha256": {**state["sha256"], rollouts: "of seconds too"}
        }
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    metrics = [{key: value for key, value in line.items() if key not in TIMES} for line in lines]
    return {
        **files,
        "step": folder.name,
        "metrics.jsonl": metrics,
        "completions.jsonl": (out / "completions.jsonl").read_bytes(),
    }


def sets(changes: list[str]) -> list[str]:
    return [word for change in changes for word in ("--set", change)]

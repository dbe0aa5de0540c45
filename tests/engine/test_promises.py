"""Promises of the library that a single rank could break: it does not end the process, print, or
use the network; it keeps deadlines, runs no code from data, and close() frees everything.
test_sync, test_requests and test_engine test that a failed call changes nothing and that every
token is of one whole version; test_layers tests the ban on functions that turn data into code.
"""

from __future__ import annotations

import gc
import io
import os
import re
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
from helpers import numpy_state_dict, tiny_config, tiny_spec

import rollmesh as rm
from rollmesh import _core
from rollmesh.sources import SafetensorsFolder

ENDS_OR_PRINTS = (
    "abort|exit|_exit|_Exit|quick_exit|raise|kill|v?f?printf|__v?f?printf_chk|"
    "puts|putchar|fputs|fputc|fwrite|perror|write"
)
LATE = 4.0  # seconds after a deadline, far above the duration of a call's end on a busy machine
REACHES_OUT = "socket|listen|bind|accept4?|connect|system|popen|exec[lv]p?e?|posix_spawnp?"


def make(**options: Any) -> rm.Generator:
    return rm.Generator(
        tiny_spec(),
        **{
            "dtype": "float32",
            "threads": 2,
            "kv_cache_gib": 0.004,
            "max_model_len": 256,
            **options,
        },
    )


def imported_symbols() -> set[str]:
    done = subprocess.run(
        ["nm", "-D", "--undefined-only", _core.__file__], capture_output=True, text=True, check=True
    )
    return {line.split()[-1].partition("@")[0] for line in done.stdout.splitlines()}


@pytest.mark.parametrize(
    ("promise", "banned"), [("ends or prints", ENDS_OR_PRINTS), ("reaches out", REACHES_OUT)]
)
def test_the_extension_cannot(promise: str, banned: str) -> None:
    """The extension cannot call functions that it does not import. An assertion (test builds only)
    is its only way to end the process."""
    names = imported_symbols()
    assert "pthread_create" in names  # nm found the right table
    assert sorted(name for name in names if re.fullmatch(banned, name)) == [], promise


def listening() -> set[str]:
    """Inodes of listening TCP sockets of this machine that this process holds."""
    held = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            held.add(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:  # the listing's own descriptor
            continue
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        if Path(table).exists():
            inodes |= {
                line.split()[9]
                for line in Path(table).read_text().splitlines()[1:]
                if line.split()[3] == "0A"
            }
    return {inode for inode in inodes if f"socket:[{inode}]" in held}


def test_nothing_listens() -> None:
    before = listening()
    with make() as gen:
        gen.sync_weights(numpy_state_dict(tiny_config()))
        gen.generate([[1, 2, 3]], rm.SamplingParams(max_tokens=4), use_tqdm=False)
        assert listening() == before
    import socket

    with socket.socket() as probe:  # the measure itself must see one
        probe.bind(("127.0.0.1", 0))
        probe.listen()
        assert len(listening()) == len(before) + 1


def test_generate_ends_at_its_deadline() -> None:
    """The work takes much longer than 0.3 s: the call ends with the error, and the generator keeps
    serving."""
    prompts = [[1, 2, 3]] * 64
    with make(max_model_len=4096, kv_cache_gib=0.2) as gen:
        gen.sync_weights(numpy_state_dict(tiny_config()))
        params = rm.SamplingParams(max_tokens=4000, ignore_eos=True, seed=1)
        start = time.monotonic()
        outputs = gen.generate(prompts, params, use_tqdm=False, timeout=0.3, on_error="return")
        assert time.monotonic() - start < 0.3 + LATE
        assert {type(output.error) for output in outputs} == {rm.DeadlineError}
        assert gen.metrics()["running"] == gen.metrics()["waiting"] == 0
        assert (
            len(
                gen.generate(
                    [[1, 2]], rm.SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False
                )[0]
                .outputs[0]
                .token_ids
            )
            == 3
        )


def test_a_sync_that_waits_ends_at_its_deadline() -> None:
    """inflight="wait" behind requests that take seconds: raises DeadlineError, keeps the old
    version and does not change the requests."""
    with make(max_model_len=4096, kv_cache_gib=0.2) as gen:
        gen.sync_weights(numpy_state_dict(tiny_config()))
        gen.submit([[1, 2, 3]] * 64, rm.SamplingParams(max_tokens=4000, ignore_eos=True))
        start = time.monotonic()
        with pytest.raises(rm.DeadlineError):
            gen.sync_weights(numpy_state_dict(tiny_config(), seed=2), inflight="wait", timeout=0.3)
        assert time.monotonic() - start < 0.3 + LATE
        assert gen.version == 0
        assert gen.metrics()["running"] + gen.metrics()["waiting"] == 64
        gen.abort()


# Written as bytes, because this module must not import the modules under test: unpickling it calls
# os.putenv("ROLLMESH_TRAP", "sprung").
TRAP = b"cposix\nputenv\n(S'ROLLMESH_TRAP'\nS'sprung'\ntR."
NPY_HEADER = b"{'descr': '|O', 'fortran_order': False, 'shape': (), }".ljust(117) + b"\n"


@pytest.mark.parametrize(
    "name", ["model.safetensors", "pytorch_model.bin", "weights.npy", "weights.npz"]
)
def test_a_folder_of_pickles_is_no_source(tmp_path: Path, name: str) -> None:
    """Files that torch.load or numpy.load would have executed are refused unread, whatever their
    names."""
    trapped = TRAP
    if name.endswith(".npy"):
        trapped = b"\x93NUMPY\x01\x00" + len(NPY_HEADER).to_bytes(2, "little") + NPY_HEADER + TRAP
    if name.endswith((".npz", ".bin")):
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("archive/data.pkl", trapped)
        trapped = file.getvalue()
    (tmp_path / name).write_bytes(trapped)
    (tmp_path / "config.json").write_text(
        '{"auto_map": {"AutoConfig": "trap.Trap"}, "model_type": "qwen3"}'
    )
    (tmp_path / "trap.py").write_text("import os; os.putenv('ROLLMESH_TRAP', 'sprung')\n")
    with (
        make() as gen,
        pytest.raises((rm.FormatError, rm.UnsupportedTensorError, rm.MissingKeyError)),
    ):
        gen.sync_weights(SafetensorsFolder(tmp_path))
    with pytest.raises(rm.ConfigError):
        rm.ModelSpec.from_hf(tmp_path)
    child = [sys.executable, "-c", "import os; print(os.environ.get('ROLLMESH_TRAP'))"]
    environment = subprocess.run(child, capture_output=True, text=True, check=True)
    assert environment.stdout == "None\n"


def is_leaving(task: Path) -> bool:
    """The kernel lists a thread for a moment after pthread_join has returned."""
    try:
        flags = int((task / "stat").read_text().rpartition(")")[2].split()[6])
    except OSError:
        return True
    return bool(flags & 4)  # PF_EXITING


def held() -> tuple[int, int, int, int]:
    gc.collect()
    running = [task for task in Path("/proc/self/task").iterdir() if not is_leaving(task)]
    return (
        _core.memory_mapped(),
        _core.memory_blocks(),
        len(os.listdir("/proc/self/fd")),
        len(running),
    )


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    "state", ["new", "synced", "syncing", "running", "asleep", "paused", "failed"]
)
def test_close_gives_everything_back(state: str) -> None:
    """Memory, file descriptors and threads are freed, from every state in which a generator can be
    closed."""
    weights = numpy_state_dict(tiny_config())
    with make() as warm:  # permanent allocations of the process
        warm.sync_weights(weights)
    before, threads = held(), threading.active_count()
    gen = make()
    assert held()[0] > before[0]
    assert held()[3] == before[3] + 2  # the engine's thread, and one worker of its team
    if state not in ("new", "failed"):
        gen.sync_weights(weights)
    if state == "syncing":
        gen.begin_sync().push("model.norm.weight", weights["model.norm.weight"])
    if state in ("running", "asleep", "paused"):
        gen.submit([[1, 2, 3]] * 8, rm.SamplingParams(max_tokens=100, n=2))
    if state == "asleep":
        gen.sleep("kv")
    if state == "paused":
        gen.pause("keep")
    if state == "failed":
        with pytest.raises(rm.MissingKeyError):
            gen.sync_weights({})
    gen.close()
    assert held() == before
    assert threading.active_count() == threads

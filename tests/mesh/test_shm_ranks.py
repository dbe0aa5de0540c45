"""Ranks that attach to shared memory: twice in one process, beside a stale file, and with a child.

Oracle: the valid ranks attach, and a rank that was killed is noticed in a second."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import rollmesh as rm

ATTACH = """
import os, signal, sys, time
import rollmesh as rm
rank, name, then = int(sys.argv[1]), sys.argv[2], sys.argv[3]
ends = rm.comm.shm(name, rank, 2, timeout=20).connect(rm.Mesh(tp=2))
if then == "fork" and os.fork() == 0:
    time.sleep(30)
    os._exit(0)
print("attached", flush=True)
time.sleep(30)
"""

# Two ranks attach and are freed; then new files take the numbers of their descriptors.
END = """
import os, sys
from concurrent.futures import ThreadPoolExecutor
import rollmesh as rm
connect = lambda rank: rm.comm.shm(sys.argv[1], rank, 2, timeout=20).connect(rm.Mesh(tp=2))
with ThreadPoolExecutor() as pool:
    list(pool.map(connect, (0, 1)))
files = [os.memfd_create("file") for _ in range(16)]
child = os.fork()
if child == 0:
    for file in files:
        os.write(file, b"word")
    os._exit(0)
os.waitpid(child, 0)
print([os.fstat(file).st_size for file in files])
"""


def attach(name: str, rank: int, timeout: float = 20.0) -> Any:
    return rm.comm.shm(name, rank, 2, timeout=timeout).connect(rm.Mesh(tp=2))


@pytest.fixture
def name() -> str:
    return f"ranks-{os.getpid()}-{time.monotonic_ns()}"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_refused_twin_does_not_disturb_the_ranks_of_its_process(name: str, rank: int) -> None:
    with ThreadPoolExecutor() as pool:
        first = pool.submit(attach, name, rank, 3.0 if rank else 20.0)
        path = f"/dev/shm/rollmesh.{name}"
        while rank == 0 and not os.path.exists(path):
            time.sleep(0.01)
        if rank == 0:
            with pytest.raises(rm.AuthError, match="which runs"):
                attach(name, 0, 1.0)
        others = [pool.submit(attach, name, 1 - rank)]
        if rank == 1:  # either of the twins is refused
            others.append(pool.submit(attach, name, 1, 3.0))
        errors = [future.exception() for future in (first, *others)]
    refused = [error for error in errors if error is not None]
    kinds = (rm.MeshMismatchError, rm.CollectiveTimeoutError)
    assert all(isinstance(error, kinds) for error in refused), refused
    assert len(refused) == rank
    assert errors[1] is None


def test_a_stale_file_with_this_process_id_is_replaced(name: str) -> None:
    path = f"/dev/shm/rollmesh.{name}"
    other = subprocess.Popen([sys.executable, "-c", ATTACH, "0", name, ""])
    while not os.path.exists(path):
        time.sleep(0.01)
    other.kill()
    other.wait()
    with open(path, "r+b") as file:
        data = file.read(256)
        at = data.index(struct.pack("<Q", other.pid))
        file.seek(at)
        file.write(struct.pack("<Q", os.getpid()))
    with ThreadPoolExecutor() as pool:
        both = [pool.submit(attach, name, rank) for rank in (0, 1)]
        assert [future.exception() for future in both] == [None, None]


def test_a_child_does_not_hide_the_end_of_a_rank(name: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", ATTACH, "1", name, "fork"],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as other:
        try:
            ends = attach(name, 0)
            assert other.stdout is not None
            assert other.stdout.readline() == "attached\n"
            threading.Timer(0.2, other.kill).start()
            began = time.monotonic()
            with pytest.raises(rm.RankLostError):
                ends.control.all_gather(b"")
            assert time.monotonic() - began < 5
        finally:
            os.killpg(other.pid, signal.SIGKILL)


def test_a_child_keeps_files_that_were_opened_after_the_ranks_ended(name: str) -> None:
    """A forked child closes its copies of the ranks' files, and no others."""
    done = subprocess.run(
        [sys.executable, "-c", END, name], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == f"{[4] * 16}\n"

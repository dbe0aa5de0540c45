"""The library's own threads (runtime/threads.py). If the system refuses threads, work runs in the
caller's thread or raises CapacityError."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from types import FrameType

import pytest

from rollmesh.runtime.threads import in_threads, starting, to_thread


@pytest.mark.parametrize("count", [0, 1, 2, 3, 8, 97])
@pytest.mark.parametrize("num_threads", [1, 2, 3, 8])
def test_results_are_in_order(count: int, num_threads: int) -> None:
    seen: set[int] = set()

    def square(number: int) -> int:
        seen.add(threading.get_ident())
        return number * number

    before = threading.active_count()
    assert in_threads(square, range(count), num_threads) == [
        number * number for number in range(count)
    ]
    assert len(seen) <= num_threads
    if num_threads == 1 and count:
        assert seen == {threading.get_ident()}
    assert threading.active_count() == before


@pytest.mark.parametrize("num_threads", [1, 2, 4])
@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_an_error_ends_all(num_threads: int, error: type[BaseException]) -> None:
    """The error is raised when all threads have stopped, and no further item begins."""
    begun: list[int] = []
    before = threading.enumerate()  # an interrupt of another test may have left a thread

    def fail(number: int) -> None:
        begun.append(number)
        if number == 3:
            raise error
        threading.Event().wait(0.001)

    with pytest.raises(error):
        in_threads(fail, range(1000), num_threads)
    assert 4 <= len(begun) < 1000
    assert set(threading.enumerate()) <= set(before)


def test_an_interrupt_while_the_caller_waits() -> None:
    """The caller has finished its part and waits when the signal comes. The exception is raised
    once the helper has ended."""
    ended: list[int] = []
    interrupted = threading.Event()

    def interrupt(number: int, frame: FrameType | None) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    def work(number: int) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.setitimer(signal.ITIMER_REAL, 0.1)
        else:
            assert interrupted.wait(20)
            time.sleep(0.1)
            ended.append(number)

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        together = threading.Barrier(2, timeout=20)
        with pytest.raises(KeyboardInterrupt):
            in_threads(lambda number: (together.wait(), work(number)), range(2), 2)
        assert len(ended) == 1
    finally:
        signal.signal(signal.SIGALRM, before)


def test_threads_work_at_the_same_time() -> None:
    together = threading.Barrier(3, timeout=20)
    assert sorted(in_threads(lambda _: together.wait(), range(3), 3)) == [0, 1, 2]


def test_other_errors_are_left_as_they_are() -> None:
    with pytest.raises(RuntimeError, match=r"^another$"), starting("x"):
        raise RuntimeError("another")
    assert asyncio.run(to_thread(lambda: 3)) == 3


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes a user without processes")
def test_a_system_without_threads() -> None:
    """With RLIMIT_NPROC deltas use the caller's thread; calls that need a thread raise
    CapacityError."""
    pytest.importorskip("zstandard")
    script = """
        import asyncio, concurrent.futures.thread, os, resource, threading
        import numpy as np
        import zstandard
        import rollmesh as rm
        from rollmesh.runtime.threads import in_threads, starting, to_thread
        from rollmesh.sources import DeltaDecoder, DeltaEncoder

        state = {name: np.ones(1000) for name in "abcdef"}
        os.setgid(65534)
        os.setuid(65534)
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
        encoder, decoder = DeltaEncoder(4), DeltaDecoder(4)
        for version in range(3):
            decoder.apply(encoder.encode(state, version))
            assert all((decoder[name] == state[name]).all() for name in state)
            state["c"] += 1
        def start():
            with starting("a thread"):
                threading.Thread(target=print).start()
        loop = asyncio.new_event_loop()  # asyncio.run starts a thread itself at its end
        for refused in (start, lambda: loop.run_until_complete(to_thread(print))):
            try:
                refused()
            except rm.CapacityError as error:
                print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    words = (
        "expected another thread, got none from the system; raise the limit on processes "
        "(ulimit -u, pids.max) or end others"
    )
    assert done.stdout.splitlines() == [f"a thread: {words}", f"a call in a thread: {words}"]

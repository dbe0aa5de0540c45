"""How captures and threads of a process affect one another (kernels/cuda/device.cu): a wait of
another thread that invalidates a capture, another thread's capture, and the thread's capture mode.
Runs on the simulated device, and on a GPU if there is one.

Bound: equality. An invalidated capture runs none of its work and does not end the process."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from cuda_device import BUSY, CAPTURE_INVALIDATED, FAULT, OK, Library
from test_cuda_device import library, seen, simt  # noqa: F401  (fixtures)

GLOBAL, THREAD_LOCAL, RELAXED = range(3)  # cudaStreamCaptureMode


@pytest.mark.parametrize("work", range(1, 6))
def test_a_recording_that_another_thread_spoils(
    simt: Library, monkeypatch: pytest.MonkeyPatch, work: int
) -> None:
    """The capture becomes invalid at a put, an op, a copy, one of the device's own calls, or a get.
    None of its work runs, and the next recording is complete."""
    monkeypatch.setenv("ROLLMESH_SIMT_SPOIL", str(work))
    with simt.open() as device:
        ids, table, out, host = (
            device.alloc(8),
            device.alloc(32),
            device.alloc(32),
            device.alloc_pinned(32),
        )
        device.write(table, np.arange(8, dtype=np.float32).tobytes())
        for spoilt in (True, False):
            assert device.begin_capture() == OK
            device.copy_to_device(ids, host, 8)
            device.embed(out, ids, table, 2, 4)
            device.copy_2d(out, 4, table, 4, 4, 1)
            device.copy_2d(out, 16, table, 8, 4, 2)
            device.copy_to_host(host, out, 32)
            status, recording = device.end_capture()
            assert (status, recording is None) == (
                (CAPTURE_INVALIDATED, True) if spoilt else (OK, False)
            )
            if spoilt:
                assert (
                    device.message()
                    == "cudaStreamEndCapture: operation failed due to a previous error during "
                    "capture"
                )
                assert device.read(out, 32) == seen(host, 32) == bytes(32)
        device.replay(recording)
        assert device.wait() == OK
        assert np.frombuffer(seen(host, 32), np.float32).tolist() == [0, 1, 2, 3, 2, 1, 2, 3]
        device.destroy_graph(recording)


def test_a_spoilt_recording_forgives_no_fault(
    simt: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLMESH_SIMT_SPOIL", "1")
    with simt.open() as device:
        block = device.alloc(4)
        assert device.begin_capture() == OK
        device.zero_2d(block, 4, 4, 1)
        device.embed(block, block, block, (1 << 32) - 1, 1)
        assert device.end_capture() == (FAULT, None)
        assert device.message() == "a launch: invalid argument"


def test_what_another_thread_captures_in_global_mode(library: Library) -> None:
    """torch.cuda.graph captures like this. It does not block a device's calls, and the calls do not
    end the capture."""
    driver, graph = library.driver(), ctypes.c_void_p()

    def work() -> None:
        with library.open() as device:
            block, host = device.alloc(64), device.alloc_pinned(64)
            device.record_event(0)
            asked = [device.query_event(0), device.poll()]
            waited = [device.wait_event(0), device.wait(), device.begin_capture()]
            status, recording = device.end_capture()
            assert {*asked} <= {OK, BUSY}, device.message()
            assert [*waited, status] == [OK] * 4, device.message()
            device.destroy_graph(recording)
            device.drop(block)
            device.drop(host)

    with library.open() as others, ThreadPoolExecutor(1) as pool:
        block, stream = others.alloc(4), ctypes.c_void_p(others.table.stream)
        assert driver.cuStreamBeginCapture_v2(stream, GLOBAL) == 0
        working = pool.submit(work)
        working.exception()
        others.zero_2d(block, 4, 4, 1)
        assert driver.cuStreamEndCapture(stream, ctypes.byref(graph)) == 0
        working.result()
        assert driver.cuGraphDestroy(graph) == 0


@pytest.mark.parametrize("had", [GLOBAL, THREAD_LOCAL, RELAXED])
def test_a_thread_gets_back_its_capture_mode(library: Library, had: int) -> None:
    driver = library.driver()

    def exchange(mode: int) -> int:
        word = ctypes.c_int(mode)
        assert driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(word)) == 0
        return word.value

    def modes() -> list[int]:
        exchange(had)
        with library.open() as outer, library.open(library.devices() - 1):
            inside = [exchange(THREAD_LOCAL)]
            outer.leave(outer.enter())
            inside.append(exchange(THREAD_LOCAL))
        return [*inside, exchange(GLOBAL)]

    with library.open(), ThreadPoolExecutor(1) as pool:
        assert pool.submit(modes).result() == [THREAD_LOCAL, THREAD_LOCAL, had]

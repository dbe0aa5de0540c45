"""The faults of a device (kernels/device.h): named, final and its own, on the fibres of
tests/gpu/simt and on a GPU if there is one; and what the fibres' lazy device refuses."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cuda_device import BUSY, FAULT, OK, Device, Library
from paths import SUPPORT
from test_cuda_device import alone, device, library, seen, simt  # noqa: F401  (fixtures)


# ----------------------------------------------------------------------------------------- faults
def test_a_fault_is_named_and_final(simt: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second launch fails some time after its call; the work before it is kept, and the work
    after it is dropped."""
    monkeypatch.setenv("ROLLMESH_SIMT_FAULT", "2")
    with simt.open() as device:
        block, host = device.alloc(64), device.alloc_pinned(64)
        device.write(block, b"x" * 64)
        device.zero_2d(block, 8, 4, 8)
        device.copy_to_host(host, block, 64)
        device.record_event(0)
        device.zero_2d(block + 4, 8, 4, 8)  # this one
        device.copy_to_host(host, block, 64)
        device.record_event(1)
        assert device.wait_event(0) == OK
        assert seen(host, 64) == (bytes(4) + b"x" * 4) * 8
        assert device.wait_event(1) == FAULT
        first = device.message()
        assert first == "cudaEventSynchronize: an illegal memory access was encountered"
        device.zero_2d(block, 64, 64, 1)
        device.copy_to_host(host, block, 64)
        device.replay(None)
        out = ctypes.c_void_p()
        assert device.table.alloc(device.table.self, 4, ctypes.byref(out)) == FAULT
        assert device.table.alloc_pinned(device.table.self, 4, ctypes.byref(out)) == FAULT
        marks = (device.wait_event(0), device.query_event(0), device.wait_event(3))
        for status in (
            device.wait(),
            device.poll(),
            *marks,
            device.begin_capture(),
            device.end_capture()[0],
        ):
            assert status == FAULT
        assert device.available() == 0
        assert device.message() == first
        assert seen(host, 64) == (bytes(4) + b"x" * 4) * 8
    monkeypatch.delenv("ROLLMESH_SIMT_FAULT")
    with simt.open() as device:  # a context lives from the first stream to the last
        device.drop(device.alloc(4))


def test_a_kernels_fault_is_named_and_final_on_a_gpu(library: Library) -> None:
    """CUDA destroys the context: the process can exit without a hang. The stand-in ends the
    program, which another test checks."""
    if library.is_simt:
        pytest.skip("on a GPU only")
    body = """block = device.alloc(64)
device.write(block, b"x" * 64)
device.embed(8, block, block, 1, 1)
print(device.wait() == FAULT, device.message())
device.zero_2d(block, 64, 64, 1)
print(device.wait() == FAULT, device.poll() == FAULT, device.available())"""
    first, second = alone(library, body).splitlines()
    assert re.fullmatch(
        r"True cudaStreamSynchronize: .*(illegal memory access|illegal address).*", first
    ), first
    assert second == "True True 0"


def test_a_refused_launch_is_seen_by_the_next_status(device: Device) -> None:
    """A grid of more than 2^31 − 1 rows: the call itself refuses it but cannot return a status."""
    assert device.wait() == OK
    device.embed(device.alloc(4), device.alloc(4), device.alloc(4), (1 << 32) - 1, 1)
    assert device.poll() == FAULT
    assert device.message() == "a launch: invalid argument"


def test_a_refused_launch_is_its_own_devices(library: Library) -> None:
    """Also if the thread leaves the device before a status is read."""
    with library.open() as device, library.open() as broken:
        block = broken.alloc(4)
        saved = broken.enter()
        broken.embed(block, block, block, (1 << 32) - 1, 1)
        broken.leave(saved)
        assert library.loaded.rm_cuda_error() is None
        assert (device.wait(), broken.wait()) == (OK, FAULT)
        assert broken.message() == "a launch: invalid argument"


def test_host_memory_is_no_place_on_the_device(simt: Library) -> None:
    there = ctypes.create_string_buffer(64)
    at = ctypes.addressof(there)
    for wrong in ("put", "get", "copy", "fetch", "fetch of its own", "zero", "beyond"):
        with simt.open() as device:
            block = device.alloc(64)
            calls = {
                "put": lambda d=device, b=block: d.copy_to_device(at, b, 8),
                "get": lambda d=device, b=block: d.copy_to_host(b, at, 8),
                "copy": lambda d=device, b=block: d.copy_2d(b, 8, at, 8, 8, 1),
                "fetch": lambda d=device, b=block: d.copy_2d_from_peer(b, 8, at, 1, 8, 8, 1),
                "fetch of its own": lambda d=device, b=block: d.copy_2d_from_peer(
                    b, 8, b + 8, 1, 8, 8, 1
                ),
                "zero": lambda d=device, b=block: d.zero_2d(at, 8, 8, 1),
                "beyond": lambda d=device, b=block: d.copy_to_device(b + 60, at, 8),
            }
            calls[wrong]()
            assert device.wait() == FAULT, wrong
            assert device.message().endswith(": invalid argument"), wrong


# -------------------------------------------------------------------------- the shim's strictness
def test_nothing_is_done_before_something_waits(simt: Library) -> None:
    """Reads before the wait see the old bytes, and a buffer that is written again too early sends
    the new ones."""
    with simt.open() as device:
        block, host, back = device.alloc(16), device.alloc_pinned(16), device.alloc_pinned(16)
        ctypes.memmove(host, b"first", 5)
        device.copy_to_device(block, host, 5)
        device.copy_2d(block + 8, 4, block, 4, 2, 1)
        device.copy_to_host(back, block, 16)
        device.record_event(0)
        assert seen(back, 16) == bytes(16)
        ctypes.memmove(host, b"later", 5)
        device.copy_to_host(back, block, 0)
        assert device.poll() == BUSY
        assert device.wait_event(0) == OK
        assert seen(back, 16) == b"later" + bytes(3) + b"la" + bytes(6)


SCRIPT = """
import ctypes, sys, threading
sys.path.insert(0, {tests!r})
from pathlib import Path
from cuda_device import Library
library = Library(Path({path!r}))
def body():
    with library.open(1) as other:
        elsewhere = other.alloc(100)
        with library.open(0) as device:
            block, host = device.alloc(100), device.alloc_pinned(100)
            device.wait()
            {body}
            device.wait()
            print("unseen")
thread = threading.Thread(target=body) if {threaded} else None
if thread: thread.start(); thread.join()
else: body()
"""


@pytest.mark.parametrize("threaded", [False, True])
@pytest.mark.parametrize(
    "body, message",
    [
        (
            "ctypes.memset(block, 0, 1)",
            "the host touched memory of a device, byte 0 of a block of 100",
        ),
        (
            "ctypes.string_at(block + 99, 1)",
            "the host touched memory of a device, byte 99 of a block of 100",
        ),
        (
            "ctypes.string_at(host + 300, 1)",
            "the host touched pinned memory, byte 300 of a block of 100",
        ),
        ("device.embed(block + 256, block, block, 1, 1)", "access outside"),
        ("device.embed(block, block, elsewhere, 1, 1)", "access outside"),
        (
            "device.copy_2d_from_peer(block, 8, elsewhere, 1, 8, 8, 1); device.embed(block, "
            "block, elsewhere, 1, 1)",
            "access outside",
        ),
        ("device.copy_2d_from_peer(block, 100, elsewhere, 1, 100, 100, 1)", "unseen"),
        ("device.embed(block, 8, block, 1, 1)", "access outside"),
        (
            "device.embed(block + 100, block, block, 1, 1)",
            "bytes beside a block of 100 bytes were written",
        ),
        (
            "device.embed(block - 4, block, block, 1, 1)",
            "bytes beside a block of 100 bytes were written",
        ),
        (
            "device.embed(host + 100, block, block, 1, 1)",
            "bytes beside a block of 100 bytes were written",
        ),
        ("device.copy_to_host(host, block, 100)", "unseen"),
    ],
)
def test_the_shim_ends_a_program_that_touches_what_it_must_not(
    simt_library: Path, body: str, message: str, threaded: bool
) -> None:
    """Runs inside Python, whose own signal handlers are installed, on its main thread and on
    another."""
    script = SCRIPT.format(tests=str(SUPPORT), path=str(simt_library), body=body, threaded=threaded)
    command = [sys.executable, "-X", "faulthandler", "-c", script]
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=False,
    )
    assert message in done.stdout, done.stdout
    assert done.returncode == (0 if message == "unseen" else 3), done.stdout
    assert ("simt: " in done.stdout) == (message != "unseen")

"""The promises of kernels/device.h about a device, tested on the fibres of tests/gpu/simt and on a
GPU if there is one.

The stand-in is lazy: enqueued work runs when a thread waits for it. So a test can see whether a
call that promises to wait has waited (the bytes are there), and whether the host reads or writes
too early: the bytes then differ from those of an eager machine.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import cuda_build
import numpy as np
import pytest
from cuda_device import (
    BUSY,
    EVENTS,
    FAULT,
    NO_MEMORY,
    OK,
    Device,
    Embed,
    Library,
    Refused,
    Table,
    no_gpu,
)
from paths import SUPPORT


@pytest.fixture(scope="module", params=["simt", "gpu"])
def library(request: pytest.FixtureRequest) -> Library:
    if request.param == "simt":
        return Library(request.getfixturevalue("simt_library"))
    if not shutil.which("nvcc"):
        no_gpu("no nvcc here: kernels/cuda not compiled")
    if not Path("/dev/nvidiactl").exists():
        no_gpu("no GPU here")
    found = Library(cuda_build.library(request.getfixturevalue("cuda_folder")))
    if found.devices() < 1:
        no_gpu("no GPU here")
    return found


@pytest.fixture
def device(library: Library) -> Iterator[Device]:
    with library.open() as opened:
        yield opened


@pytest.fixture
def simt(simt_library: Path) -> Library:
    return Library(simt_library)


def seen(at: int, size: int) -> bytes:
    """Returns the current contents of host memory."""
    return ctypes.string_at(at, size)


@pytest.mark.parametrize(
    "header, name, structure", [("device", "rm_device", Table), ("kernels", "rm_embed_args", Embed)]
)
def test_the_structures_of_these_tests_are_the_headers(
    header: str, name: str, structure: type[ctypes.Structure]
) -> None:
    text = (cuda_build.ROOT / "kernels" / f"{header}.h").read_text()
    body = re.sub(
        r"//[^\n]*",
        "",
        re.search(rf"typedef struct {name} {{(.*?)\n}} {name};", text, re.DOTALL)[1],
    )
    declared = [
        re.findall(r"\(\*(\w+)\)|(\w+)$", part.strip())[0]
        for line in body.split(";")
        for part in split_names(line)
        if part.strip()
    ]
    assert [a or b for a, b in declared] == [field for field, _ in structure._fields_]


def split_names(line: str) -> list[str]:
    """Returns the declared names of one line: "int64_t rows, hidden" declares two, a function
    pointer one."""
    return [line] if "(" in line else line.split(",")


# ----------------------------------------------------------------------------------------- memory
@pytest.mark.parametrize("size", [1, 2, 255, 256, 4095, 4096, 4097, 100_000])
def test_blocks_are_zeroed_and_aligned(device: Device, size: int) -> None:
    for call in ("alloc", "alloc_pinned"):
        for _ in range(2):  # the second block may lie where the first one was
            block = device.take(call, size)
            assert call == "alloc_pinned" or block % 256 == 0
            assert (device.read(block, size) if call == "alloc" else seen(block, size)) == bytes(
                size
            )
            if call == "alloc":
                device.write(block, b"\xaa" * size)
            else:
                ctypes.memset(block, 0xAA, size)
            device.drop(block)


def test_a_block_of_no_bytes_is_a_block(device: Device) -> None:
    device.drop(device.alloc(0))
    device.drop(device.alloc_pinned(0))


def test_available_follows_what_is_mapped(library: Library, device: Device) -> None:
    before = device.available()
    block = device.alloc(32 << 20)
    assert device.available() <= before - (32 << 20)
    device.drop(block)
    # A GPU's driver keeps some of the freed memory.
    assert before - (4 << 20 if library.is_simt else 64 << 20) <= device.available()


def test_out_of_memory_lives_on(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLMESH_SIMT_MEMORY", "1000000")
    with library.open() as device:
        block, too_much, out = (
            device.alloc(4),
            1_000_001 if library.is_simt else 1 << 50,
            ctypes.c_void_p(),
        )
        device.write(block, b"here")
        assert device.table.alloc(device.table.self, too_much, ctypes.byref(out)) == NO_MEMORY
        assert out.value is None
        assert device.message() == f"cudaMalloc of {too_much} bytes: out of memory"
        assert (device.wait(), device.poll()) == (OK, OK)
        assert device.read(block, 4) == b"here"
        device.drop(device.alloc(1000))


# -------------------------------------------------------------------------------------- the queue
@pytest.mark.parametrize("pinned", [False, True])
def test_put_and_get(device: Device, rng: np.random.Generator, pinned: bool) -> None:
    for size in (0, 1, 3, 4096, 70_001):
        data = rng.bytes(size)
        block = device.alloc(size + 2)
        host = (
            device.alloc_pinned(size + 1)
            if pinned
            else ctypes.addressof(keep := ctypes.create_string_buffer(size + 1))
        )
        ctypes.memmove(host, data, size)
        device.copy_to_device(block + 1, host, size)
        assert device.wait() == OK
        ctypes.memset(host, 0x55, size + 1)
        device.copy_to_host(host, block + 1, size)
        assert device.wait() == OK
        assert seen(host, size + 1) == data + b"\x55"
        assert device.read(block, size + 2) == b"\0" + data + b"\0"
        keep = None  # noqa: F841


def test_the_queue_keeps_its_order(device: Device) -> None:
    """Runs a chain in which every step undoes or moves the result of the step before."""
    a, b, host = device.alloc(64), device.alloc(64), device.alloc_pinned(64 * 4)
    for i, fill in enumerate((0x11, 0x22)):
        ctypes.memset(host + 64 * i, fill, 64)
    device.copy_to_device(a, host, 64)
    device.copy_2d(b, 16, a, 16, 16, 4)
    device.copy_to_device(a, host + 64, 64)
    device.zero_2d(b, 32, 8, 2)
    device.copy_2d(a + 1, 4, b, 4, 2, 16)
    device.copy_to_host(host + 128, a, 64)
    device.copy_to_host(host + 192, b, 64)
    device.zero_2d(a, 64, 64, 1)
    assert device.wait() == OK
    want_b = (bytes(8) + b"\x11" * 24) * 2
    want_a = bytearray(b"\x22" * 64)
    for row in range(16):
        want_a[4 * row + 1 : 4 * row + 3] = want_b[4 * row : 4 * row + 2]
    assert seen(host + 192, 64) == want_b
    assert seen(host + 128, 64) == want_a
    assert device.read(a, 64) == bytes(64)


def runs(rng: np.random.Generator) -> tuple[int, int, int]:
    """Returns width, rows, and a pitch that separates the runs."""
    width, rows = (
        int(rng.choice([1, 2, 3, 4, 8, 15, 16, 17, 31, 32, 48, 100, 257, 1024, 3000])),
        int(rng.choice([1, 2, 3, 7, 33, 130])),
    )
    return width, rows, width + int(rng.choice([0, 0, 1, 2, 4, 5, 8, 16, 64, 4096]))


def test_copies_of_any_pitch(device: Device, rng: np.random.Generator) -> None:
    """Compares both blocks completely: the bytes between the runs must not change."""
    size = 700_000
    a, b = device.alloc(size), device.alloc(size)
    for _ in range(40):
        width, rows, to_pitch = runs(rng)
        from_pitch = width + int(rng.choice([0, 1, 2, 4, 16, 32]))
        to, start = int(rng.choice([0, 1, 2, 4, 16, 33])), int(rng.choice([0, 1, 2, 4, 16, 48]))
        source, want = rng.integers(1, 256, size, np.uint8), rng.integers(1, 256, size, np.uint8)
        device.write(a, source.tobytes())
        device.write(b, want.tobytes())
        device.copy_2d(b + to, to_pitch, a + start, from_pitch, width, rows)
        for row in range(rows):
            want[to + row * to_pitch :][:width] = source[start + row * from_pitch :][:width]
        assert device.read(b, size) == want.tobytes(), (
            width,
            rows,
            to_pitch,
            from_pitch,
            to,
            start,
        )
        assert device.read(a, size) == source.tobytes()


@pytest.mark.parametrize("width, rows", [(65, 66_000), (300_001, 2)])
def test_copies_of_more_runs_or_words_than_a_grid_has(
    device: Device, rng: np.random.Generator, width: int, rows: int
) -> None:
    source = rng.integers(1, 256, (rows, width + 2), np.uint8)
    a, b = device.alloc(source.size), device.alloc(source.size)
    device.write(a, source.tobytes())
    device.copy_2d(b, width + 1, a, width + 2, width, rows)
    got = np.frombuffer(device.read(b, rows * (width + 1)), np.uint8).reshape(rows, width + 1)
    assert np.array_equal(got[:, :width], source[:, :width])
    assert not got[:, width].any()


def test_zeros_of_any_pitch(device: Device, rng: np.random.Generator) -> None:
    size = 700_000
    block = device.alloc(size)
    for _ in range(40):
        width, rows, pitch = runs(rng)
        at = int(rng.choice([0, 1, 2, 4, 16, 33]))
        want = rng.integers(1, 256, size, np.uint8)
        device.write(block, want.tobytes())
        device.zero_2d(block + at, pitch, width, rows)
        for row in range(rows):
            want[at + row * pitch :][:width] = 0
        assert device.read(block, size) == want.tobytes(), (width, rows, pitch, at)


def test_no_runs_are_nothing(device: Device) -> None:
    block = device.alloc(16)
    device.write(block, b"x" * 16)
    for width, rows in ((0, 4), (4, 0), (0, 0)):
        device.copy_2d(block, 4, block + 8, 4, width, rows)
        device.zero_2d(block, 4, width, rows)
    device.copy_to_device(block, None, 0)
    device.copy_to_host(None, block, 0)
    assert device.read(block, 16) == b"x" * 16


def test_an_op_is_enqueued_with_its_arguments(device: Device) -> None:
    ids, table, out = device.alloc(8), device.alloc(64), device.alloc(32)
    device.write(ids, np.array([3, 1], np.int32).tobytes())
    device.write(table, np.arange(16, dtype=np.float32).tobytes())
    device.embed(out, ids, table, 2, 4)
    assert np.frombuffer(device.read(out, 32), np.float32).tolist() == [12, 13, 14, 15, 4, 5, 6, 7]


# ----------------------------------------------------------------------------- events and waiting
def test_marks_are_reached_in_any_order(device: Device) -> None:
    for number in range(EVENTS):
        assert device.wait_event(number) == OK  # never set
    block, host = device.alloc(EVENTS * 1024), device.alloc_pinned(EVENTS * 1024)
    source = device.alloc_pinned(1024)
    ctypes.memset(source, 0x77, 1024)
    for number in range(EVENTS):
        device.copy_to_device(block + 1024 * number, source, 1024)
        device.copy_to_host(host + 1024 * number, block + 1024 * number, 1024)
        device.record_event(number)
    for number in (2, 0, 3, 1):
        assert device.wait_event(number) == OK
        assert seen(host, 1024 * (number + 1)) == b"\x77" * 1024 * (number + 1)
    ctypes.memset(host, 0, 1024)
    device.copy_to_host(host, block, 1024)
    device.record_event(0)  # a number refers to the place where it was set last
    assert device.wait_event(0) == OK
    assert seen(host, 1024) == b"\x77" * 1024


def test_a_mark_can_be_asked_after(device: Device) -> None:
    block, host, source = device.alloc(2048), device.alloc_pinned(1024), device.alloc_pinned(2048)
    for number in range(EVENTS):
        assert device.query_event(number) == OK  # never set
    assert device.wait() == OK
    ctypes.memset(source, 0x77, 1024)
    device.copy_to_device(block, source, 1024)
    device.copy_to_host(host, block, 1024)
    device.record_event(1)
    device.copy_to_device(block + 1024, source, 1024)
    device.record_event(2)
    statuses = [device.query_event(1)]
    while statuses[-1] == BUSY:
        statuses.append(device.query_event(1))
    assert statuses[-1] == OK
    assert seen(host, 1024) == b"\x77" * 1024
    while device.query_event(2) == BUSY:
        pass
    assert device.query_event(2) == device.poll() == OK


def test_poll_ends(device: Device) -> None:
    block, host = device.alloc(1 << 20), device.alloc_pinned(1 << 20)
    assert device.wait() == OK  # for the zeros of the block
    assert device.poll() == OK
    for _ in range(20):
        device.zero_2d(block, 1 << 20, 1 << 20, 1)
        device.copy_to_host(host, block, 1 << 20)
    device.copy_2d(block, 3, block + 99_999, 3, 2, 10_000)
    statuses = [device.poll()]
    while statuses[-1] == BUSY:
        statuses.append(device.poll())
    assert statuses[-1] == OK


def test_unmap_and_unpin_wait(device: Device) -> None:
    block, host = device.alloc(5000), device.alloc_pinned(5000)
    device.write(block, b"q" * 5000)
    device.copy_to_host(host, block, 5000)
    device.drop(block)
    assert seen(host, 5000) == b"q" * 5000
    block = device.alloc(5000)
    device.copy_to_device(block, host, 5000)
    device.drop(host)
    assert device.read(block, 5000) == b"q" * 5000


# ---------------------------------------------------------------------------------- graph capture
def test_a_recording_is_kept_and_replayed(device: Device) -> None:
    """Records ops, copies of any pitch, puts and gets; each replay reads the current contents of
    the recorded addresses."""
    ids, table, out, wide = device.alloc(8), device.alloc(64), device.alloc(32), device.alloc(64)
    host_ids, host_out = device.alloc_pinned(8), device.alloc_pinned(64)
    device.write(table, np.arange(16, dtype=np.float32).tobytes())
    assert device.begin_capture() == OK
    device.copy_to_device(ids, host_ids, 8)
    device.embed(out, ids, table, 2, 4)
    device.copy_2d(wide, 32, out, 16, 16, 2)
    device.zero_2d(wide + 16, 32, 4, 2)
    device.copy_to_host(host_out, wide, 64)
    status, recording = device.end_capture()
    assert status == OK, device.message()
    assert device.wait() == OK
    assert seen(host_out, 64) == bytes(64)  # the failed work has not run
    assert device.read(out, 32) == bytes(32)
    for pair in ([3, 1], [0, 2], [0, 0]):
        ctypes.memmove(host_ids, np.array(pair, np.int32).tobytes(), 8)
        device.replay(recording)
        assert device.wait() == OK
        got = np.frombuffer(seen(host_out, 64), np.float32)
        assert got[[0, 1, 2, 3, 8, 9, 10, 11]].tolist() == [
            4.0 * row + i for row in pair for i in range(4)
        ]
        assert got[[4, 12]].tolist() == [0, 0]
    device.replay(recording)
    device.destroy_graph(recording)  # waits for it
    device.destroy_graph(None)
    assert device.wait() == OK


def test_replays_stand_in_the_queue(device: Device) -> None:
    """Replays and the work enqueued between them run in that order, with one recording several
    times before a wait."""
    block, host = device.alloc(16), device.alloc_pinned(64)
    assert device.begin_capture() == OK
    device.copy_2d(block + 4, 4, block, 4, 4, 1)
    device.copy_2d(block + 8, 4, block + 4, 4, 4, 1)
    status, recording = device.end_capture()
    assert status == OK
    for i, word in enumerate((b"aaaa", b"bbbb")):
        ctypes.memmove(host + 4 * i, word, 4)
        device.copy_to_device(block, host + 4 * i, 4)
        device.replay(recording)
        device.copy_to_host(host + 32 + 16 * i, block, 16)
    assert device.wait() == OK
    assert seen(host + 32, 32) == b"aaaa" * 3 + bytes(4) + b"bbbb" * 3 + bytes(4)
    device.destroy_graph(recording)


def alone(library: Library, body: str) -> str:
    """Returns what `body` prints, with a device in a separate process, which has not launched a
    kernel before."""
    script = f"""
import sys
sys.path.insert(0, {str(SUPPORT)!r})
from pathlib import Path
from cuda_device import FAULT, OK, Library
with Library(Path({library.path!r})).open() as device:
    {body.replace(chr(10), chr(10) + "    ")}
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_an_op_that_was_never_launched_is_captured(library: Library) -> None:
    """CUDA loads a kernel at its first launch, here inside a recording: the launch must not fail or
    invalidate the recording."""
    body = """ids, table, out = device.alloc(4), device.alloc(8), device.alloc(8)
device.write(table, b"the bits")
assert device.begin_capture() == OK, device.message()
device.embed(out, ids, table, 1, 2)
device.copy_2d(out + 1, 4, out, 4, 1, 2)
status, recording = device.end_capture()
assert status == OK, device.message()
device.replay(recording)
print(device.read(out, 8))
device.destroy_graph(recording)"""
    assert alone(library, body) == "b'tte bbts'\n"


def test_two_recordings_and_an_empty_one(device: Device) -> None:
    block, made = device.alloc(16), []
    device.write(block, b"0123456789abcdef")
    for calls in ([], [(block + 8, block)], [(block, block + 12)]):
        assert device.begin_capture() == OK
        for to, start in calls:
            device.copy_2d(to, 4, start, 4, 4, 1)
        status, recording = device.end_capture()
        assert status == OK
        made.append(recording)
    for recording in (*made, made[1]):
        device.replay(recording)
    assert device.read(block, 16) == b"cdef4567cdefcdef"
    for recording in made:
        device.destroy_graph(recording)


@pytest.mark.parametrize("call", ["wait", "poll", "alloc", "alloc_pinned"])
def test_a_recording_that_waits_is_a_fault(library: Library, call: str) -> None:
    with library.open() as device:
        block = device.alloc(16)
        assert device.begin_capture() == OK
        device.zero_2d(block, 16, 16, 1)
        if call in ("alloc", "alloc_pinned"):
            out = ctypes.c_void_p()
            assert getattr(device.table, call)(device.table.self, 16, ctypes.byref(out)) == FAULT
        else:
            assert getattr(device, call)() == FAULT
        assert "capturing" in device.message()
        assert device.end_capture() == (FAULT, None)


# ------------------------------------------------------------------------ another device's memory
def test_fetch_brings_what_another_device_has(library: Library, rng: np.random.Generator) -> None:
    if library.devices() < 2:
        pytest.skip("one GPU here")
    data = rng.bytes(70_001)
    with library.open(1) as other:
        there = other.alloc(len(data))
        other.write(there, data)
        with library.open(0) as device:
            here, host = device.alloc(len(data)), device.alloc_pinned(len(data))
            device.copy_2d_from_peer(here + 1, 0, there, 1, 0, len(data) - 1, 1)
            device.copy_2d_from_peer(here, 0, there + 5, 1, 0, 1, 1)
            device.copy_2d_from_peer(here, 0, there, 1, 0, 0, 1)
            device.copy_to_host(host, here, len(data))  # behind them in the queue
            assert device.wait() == OK, device.message()
            assert seen(host, len(data)) == data[5:6] + data[:-1]


def test_fetch_brings_runs_with_any_pitch(library: Library, rng: np.random.Generator) -> None:
    if library.devices() < 2:
        pytest.skip("one GPU here")
    data = np.frombuffer(rng.bytes(64 * 100), np.uint8).reshape(64, 100)
    with library.open(1) as other:
        there = other.alloc(data.size)
        other.write(there, data.tobytes())
        shapes = [
            (13, 100, 13, 64),
            (20, 100, 13, 64),
            (40, 40, 40, 7),
            (50, 200, 50, 32),
            (16, 16, 1, 9),
        ]
        for to_pitch, from_pitch, width, rows in [
            *shapes,
            (13, -100, 13, 60),
            (8, 0, 8, 5),
            (9, 4, 9, 5),
        ]:
            first = 3 - min((rows - 1) * from_pitch, 0)
            with library.open(0) as device:  # each device asks for peer access again
                here, host = device.alloc(to_pitch * rows), device.alloc_pinned(to_pitch * rows)
                device.copy_2d_from_peer(
                    here, to_pitch, there + first, 1, from_pitch % 2**64, width, rows
                )
                device.copy_to_host(host, here, to_pitch * rows)
                assert device.wait() == OK, device.message()
                found = np.frombuffer(seen(host, to_pitch * rows), np.uint8).reshape(rows, to_pitch)
                wanted = np.lib.stride_tricks.as_strided(
                    data.reshape(-1)[first:], (rows, width), (from_pitch, 1)
                )
                assert np.array_equal(found[:, :width], wanted)
                assert not found[:, width:].any(), "what lies between runs stays"


def test_place_is_the_device_that_has_the_memory(library: Library) -> None:
    with library.open(0) as device:
        block, host, plain = (
            device.alloc(100),
            device.alloc_pinned(100),
            ctypes.create_string_buffer(8),
        )
        assert [device.ordinal_of(block), device.ordinal_of(block + 99)] == [0, 0]
        assert [
            device.ordinal_of(host),
            device.ordinal_of(ctypes.addressof(plain)),
            device.ordinal_of(8192),
        ] == [-1, -1, -1]
        if library.devices() > 1:
            with library.open(1) as other:
                assert [device.ordinal_of(other.alloc(100)), other.ordinal_of(block)] == [1, 0]


# ---------------------------------------------------------------------------------------- opening
def test_a_device_that_is_not_there_is_refused(library: Library) -> None:
    for ordinal in (-1, library.devices()):
        wanted = f"expected one of the driver's {library.devices()} devices, got cuda:{ordinal}"
        with pytest.raises(Refused, match=wanted):
            Device(library, ordinal)


def test_no_driver_is_said(simt: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLMESH_SIMT_DEVICES", "0")
    assert simt.devices() == -1
    with pytest.raises(Refused, match="no CUDA device: no CUDA-capable device is detected"):
        Device(simt, 0)
    for driver, count in (("0", -1), ("12080", -2)):
        monkeypatch.setenv("ROLLMESH_SIMT_DRIVER", driver)
        assert simt.devices() == count
        with pytest.raises(
            Refused,
            match="no CUDA device: CUDA driver version is insufficient for CUDA runtime version",
        ):
            Device(simt, 0)


def test_an_architecture_without_code_is_refused(
    simt: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLMESH_SIMT_SM", "86")
    with pytest.raises(
        Refused,
        match=r"1, .cuda:2 is an sm_86, for which this library has no code, but for simt \(",
    ):
        Device(simt, 2)
    assert simt.loaded.rm_cuda_error() is None


def test_a_device_without_memory_is_refused(simt: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLMESH_SIMT_MEMORY", "0")
    with pytest.raises(Refused, match=r"2, .cuda:0: cudaStreamCreateWithFlags: out of memory"):
        Device(simt, 0)
    assert simt.loaded.rm_cuda_error() is None


def test_what_a_device_is(library: Library) -> None:
    with library.open() as device:
        assert device.name == "cuda:0"
        assert not device.table.on_host
        assert device.table.stream
        assert device.table.kernels.contents.family == b"cuda_fma"


def test_a_thread_gets_back_what_it_had(simt_library: Path) -> None:
    """The thread gets back the context of its device, or none. Otherwise another runtime of the
    process would use our device as the thread's choice, and a context of its device 0 would waste
    some hundred MiB."""
    script = f"""
import sys
sys.path.insert(0, {str(SUPPORT)!r})
from pathlib import Path
from cuda_device import Library
library = Library(Path({str(simt_library)!r}))
seen = library.loaded.simt_current_device
NONE = -2  # in the place of a device's number
with library.open(3) as three:
    assert seen() == 3
    with library.open(1) as one:
        assert seen() == 1
        assert one.enter() >> 2 == 1
        saved = three.enter()
        assert (saved >> 2, seen()) == (1, 3)
        three.leave(saved)
        assert seen() == 1
    assert seen() == 3
assert seen() == 0
for _ in range(2):
    with library.open(1) as one:
        inner = one.enter()
        one.leave(NONE << 2)
        assert (inner >> 2, seen()) == (1, 0)
        assert one.enter() >> 2 == NONE
    assert seen() == 0
assert library.loaded.simt_contexts() == 10, library.loaded.simt_contexts()
"""
    subprocess.run([sys.executable, "-c", script], timeout=60, check=True)


def test_devices_of_several_threads(library: Library, rng: np.random.Generator) -> None:
    """Each thread uses a separate device at the same time: copies in both directions, ops,
    recordings, waits."""
    ordinals = [i % library.devices() for i in range(6)]
    failures: list[str] = []

    def work(ordinal: int, data: bytes) -> None:
        with library.open(ordinal) as device:
            ids, table, out, host = (
                device.alloc(4),
                device.alloc(len(data)),
                device.alloc(len(data)),
                device.alloc_pinned(len(data)),
            )
            for turn in range(8):
                device.copy_to_device(table, data, len(data))
                if turn % 2:
                    device.begin_capture()
                device.embed(out, ids, table, 1, len(data) // 4)
                device.copy_to_host(host, out, len(data))
                if turn % 2:
                    recording = device.end_capture()[1]
                    device.replay(recording)
                    device.destroy_graph(recording)
                if device.wait() != OK or seen(host, len(data)) != data:
                    failures.append(f"cuda:{ordinal} turn {turn}: {device.message()}")
                device.zero_2d(out, 16, 8, len(data) // 16)
                ctypes.memset(host, 0, len(data))

    threads = [
        Thread(target=work, args=(ordinal, rng.bytes(4000 + 400 * i)))
        for i, ordinal in enumerate(ordinals)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []

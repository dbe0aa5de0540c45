"""kernels/device.h for ctypes: a device of librollmesh_cuda.so, or of its stand-in on the fibres of
tests/gpu/simt."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import CFUNCTYPE, POINTER, Structure, byref, c_char_p, c_int, c_size_t, c_void_p
from pathlib import Path
from typing import Any, NoReturn

OK, BUSY, NO_MEMORY, FAULT, CAPTURE_INVALIDATED = range(5)
EVENTS = 4
HEADER = Path(__file__).resolve().parents[2] / "kernels" / "kernels.h"


class Embed(Structure):
    """rm_embed_args: an op that takes every kind of argument, and whose result is easy to check."""

    _fields_ = (
        ("out", c_void_p),
        ("ids", c_void_p),
        ("table", c_void_p),
        ("packed", c_int),
        ("rows", ctypes.c_int64),
        ("hidden", ctypes.c_int64),
        ("dtype", c_int),
        ("scale", ctypes.c_float),
    )


class Context(Structure):
    """rm_ctx."""

    _fields_ = (
        ("stream", c_void_p),
        ("workspace", c_void_p),
        ("workspace_bytes", c_size_t),
        ("n_threads", c_int),
        ("run", c_void_p),
        ("team", c_void_p),
    )


def op_names(of: str = "OPS") -> list[str]:
    """Returns the ops of a list of kernels/kernels.h; OPS has all of a table, in its order."""
    body = re.search(rf"#define RM_{of}\(X\)((?:.*\\\n)*.*)", HEADER.read_text())
    assert body, of
    return [
        name
        for op, other in re.findall(r"\bX\((\w+)|\bRM_(\w+)\(X\)", body[1])
        for name in ([op] if op else op_names(other))
    ]


def kernels_fields(**arguments: type[Structure]) -> list[tuple[str, Any]]:
    """Returns the fields of rm_kernels, of which those in `arguments` can be called."""
    calls = {op: CFUNCTYPE(None, POINTER(Context), POINTER(args)) for op, args in arguments.items()}
    ops = [*op_names(), "pack"]
    return [
        ("isa", c_char_p),
        ("family", c_char_p),
        ("workspace_bytes", c_void_p),
        *((op, calls.get(op, c_void_p)) for op in ops),
    ]


class Kernels(Structure):
    """rm_kernels."""

    _fields_ = kernels_fields(embed=Embed)


class Table(Structure):
    """rm_device."""

    _fields_ = (
        ("self", c_void_p),
        ("name", c_char_p),
        ("on_host", c_int),
        ("ordinal", c_int),
        ("kernels", POINTER(Kernels)),
        ("stream", c_void_p),
        ("alloc", CFUNCTYPE(c_int, c_void_p, c_size_t, POINTER(c_void_p))),
        ("free", CFUNCTYPE(None, c_void_p, c_void_p, c_size_t)),
        ("alloc_pinned", CFUNCTYPE(c_int, c_void_p, c_size_t, POINTER(c_void_p))),
        ("free_pinned", CFUNCTYPE(None, c_void_p, c_void_p, c_size_t)),
        ("available", CFUNCTYPE(c_size_t, c_void_p)),
        ("ordinal_of", CFUNCTYPE(c_int, c_void_p, c_void_p)),
        ("copy_to_device", CFUNCTYPE(None, c_void_p, c_void_p, c_void_p, c_size_t)),
        ("copy_to_host", CFUNCTYPE(None, c_void_p, c_void_p, c_void_p, c_size_t)),
        (
            "copy_2d_from_peer",
            CFUNCTYPE(
                None, c_void_p, c_void_p, c_size_t, c_void_p, c_int, c_size_t, c_size_t, c_size_t
            ),
        ),
        (
            "copy_2d",
            CFUNCTYPE(None, c_void_p, c_void_p, c_size_t, c_void_p, c_size_t, c_size_t, c_size_t),
        ),
        ("zero_2d", CFUNCTYPE(None, c_void_p, c_void_p, c_size_t, c_size_t, c_size_t)),
        ("record_event", CFUNCTYPE(None, c_void_p, c_int)),
        ("wait_event", CFUNCTYPE(c_int, c_void_p, c_int)),
        ("query_event", CFUNCTYPE(c_int, c_void_p, c_int)),
        ("wait", CFUNCTYPE(c_int, c_void_p)),
        ("poll", CFUNCTYPE(c_int, c_void_p)),
        ("wait_stream", CFUNCTYPE(None, c_void_p, c_void_p)),
        ("make_stream_wait", CFUNCTYPE(None, c_void_p, c_void_p)),
        ("check_stream", CFUNCTYPE(c_char_p, c_void_p, c_void_p)),
        ("begin_capture", CFUNCTYPE(c_int, c_void_p)),
        ("end_capture", CFUNCTYPE(c_int, c_void_p, POINTER(c_void_p))),
        ("replay", CFUNCTYPE(None, c_void_p, c_void_p)),
        ("destroy_graph", CFUNCTYPE(None, c_void_p, c_void_p)),
        ("enter", CFUNCTYPE(c_int, c_void_p)),
        ("leave", CFUNCTYPE(None, c_void_p, c_int)),
        ("message", CFUNCTYPE(c_char_p, c_void_p)),
        ("close", CFUNCTYPE(None, c_void_p)),
        ("open_vendor_gemm", c_void_p),  # vendor_gemm.py
    )


def no_gpu(reason: str) -> NoReturn:
    """Ends a test that needs a GPU: skipped, or with RM_NEEDS_GPU failed, where somebody has one
    and wants no test left out."""
    import pytest  # not at the top: benchmarks have this file too

    (pytest.fail if os.environ.get("RM_NEEDS_GPU") else pytest.skip)(reason)


class Refused(Exception):
    """rm_cuda_open failed: RM_DEVICE_NOT_SUCH 1, RM_DEVICE_FULL 2 or RM_DEVICE_FAILED 3, and the
    reason."""


class Library:
    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.loaded = ctypes.CDLL(self.path)
        self.loaded.rm_cuda_error.restype = c_char_p
        self.loaded.rm_cuda_archs.restype = c_char_p
        self.is_simt = hasattr(self.loaded, "simt_contexts")

    def driver(self) -> Any:
        """CUDA's driver. The stand-in implements its calls for captures under the same names."""
        return self.loaded if self.is_simt else ctypes.CDLL("libcuda.so.1")

    def devices(self) -> int:
        return int(self.loaded.rm_cuda_devices())

    @contextmanager
    def open(self, ordinal: int = 0) -> Iterator[Device]:
        """Opens a device between enter and leave, and frees what it still holds at the end."""
        device = Device(self, ordinal)
        saved = device.table.enter(device.table.self)
        try:
            yield device
        finally:
            device.give_back()
            device.table.leave(device.table.self, saved)
            device.table.close(device.table.self)


class Device:
    """Calls by name: device.copy_to_device(to, from, bytes). Addresses are ints."""

    def __init__(self, library: Library, ordinal: int) -> None:
        self.table = Table()
        why = ctypes.create_string_buffer(256)
        if status := library.loaded.rm_cuda_open(ordinal, None, byref(self.table), why):
            raise Refused(status, why.value.decode())
        self.name = self.table.name.decode()
        self.held: list[tuple[str, int, int]] = []

    def __getattr__(self, name: str) -> Any:
        call = getattr(self.table, name)
        return lambda *arguments: call(self.table.self, *arguments)

    def message(self) -> str:
        return str(self.table.message(self.table.self).decode())

    def take(self, call: str, size: int) -> int:
        """A block of alloc or of alloc_pinned."""
        out = c_void_p()
        status = getattr(self.table, call)(self.table.self, size, byref(out))
        assert status == OK, (status, self.message())
        assert out.value is not None
        self.held.append((call, out.value, size))
        return out.value

    def give_back(self) -> None:
        while self.held:
            self.drop(self.held[-1][1])

    def drop(self, block: int) -> None:
        call, at, size = next(entry for entry in self.held if entry[1] == block)
        self.held.remove((call, at, size))
        getattr(self.table, call.replace("alloc", "free"))(self.table.self, at, size)

    def alloc(self, size: int) -> int:
        return self.take("alloc", size)

    def alloc_pinned(self, size: int) -> int:
        return self.take("alloc_pinned", size)

    def end_capture(self) -> tuple[int, int | None]:
        out = c_void_p()
        return self.table.end_capture(self.table.self, byref(out)), out.value

    def write(self, to: int, data: bytes) -> None:
        """copy_to_device from ordinary memory, and a wait."""
        self.copy_to_device(to, data, len(data))
        assert self.wait() == OK, self.message()

    def read(self, at: int, size: int) -> bytes:
        """copy_to_host to ordinary memory, and a wait."""
        out = ctypes.create_string_buffer(size)
        self.copy_to_host(ctypes.addressof(out), at, size)
        assert self.wait() == OK, self.message()
        return out.raw

    def embed(self, out: int, ids: int, table: int, rows: int, hidden: int) -> None:
        """Enqueues the op out[r] = table[ids[r]] of float32."""
        context = Context(stream=self.table.stream, n_threads=1)
        arguments = Embed(out=out, ids=ids, table=table, rows=rows, hidden=hidden, dtype=1)
        self.table.kernels.contents.embed(byref(context), byref(arguments))
        # The op must not read its arguments after the call.
        ctypes.memset(byref(arguments), 0, ctypes.sizeof(arguments))

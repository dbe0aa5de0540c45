"""kernels/vendor_gemm.h for ctypes: a vendor library on a device of cuda_device.py."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    byref,
    c_char_p,
    c_float,
    c_int,
    c_int64,
    c_size_t,
    c_uint64,
    c_void_p,
)
from typing import NamedTuple

import cuda_device

FREE, PINNED, INVARIANT = range(3)
LIBRARY_BYTES = 32 << 20


class Shape(NamedTuple):
    """rm_gemm_shape, with ldx = k and ldy = n: with swiglu W is [2n][k], else [n][k]."""

    n: int
    k: int
    has_bias: bool = False
    swiglu: bool = False


class GemmShape(Structure):
    _fields_ = (
        ("n", c_int64),
        ("k", c_int64),
        ("ldx", c_int64),
        ("ldy", c_int64),
        ("has_bias", c_int),
        ("swiglu", c_int),
    )


class Options(Structure):
    _fields_ = (
        ("library", c_char_p),
        ("list", POINTER(GemmShape)),
        ("n", c_int),
        ("max_rows", c_int64),
        ("choice", c_int),
        ("workspace", c_void_p),
        ("workspace_bytes", c_size_t),
    )


class Gemm(Structure):
    """rm_gemm_args."""

    _fields_ = (
        ("y", c_void_p),
        ("gate_up", c_void_p),
        ("x", c_void_p),
        ("w", c_void_p),
        ("bias", c_void_p),
        ("group_rows", c_void_p),
        ("n_groups", c_int64),
        ("group_stride", c_int64),
        ("m", c_int64),
        ("n", c_int64),
        ("k", c_int64),
        ("ldx", c_int64),
        ("ldy", c_int64),
        ("dtype", c_int),
        ("y_dtype", c_int),
        ("activation", c_int),
        ("alpha", c_float),
        ("limit", c_float),
    )


class Pack(Structure):
    """rm_pack_args."""

    _fields_ = (
        ("src", c_void_p),
        ("src_dtype", c_int),
        ("rows", c_int64),
        ("cols", c_int64),
        ("row_stride", c_int64),
        ("col_stride", c_int64),
        ("dst", c_void_p),
        ("dst_dtype", c_int),
        ("layout", c_int),
        ("dst_row0", c_int64),
        ("dst_cols", c_int64),
        ("compare", c_int),
        ("index0", c_int64),
        ("digest", c_uint64),
        ("nonfinite_index", c_int64),
        ("diff_index", c_int64),
        ("found", c_void_p),
    )


class Kernels(Structure):
    """rm_kernels."""

    _fields_ = cuda_device.kernels_fields(gemm=Gemm, gemm_swiglu=Gemm, pack=Pack)


CALL = CFUNCTYPE(None, c_void_p, POINTER(Gemm))


class Opened(Structure):
    """rm_vendor_gemm."""

    _fields_ = (
        ("self", c_void_p),
        ("version", c_int),
        ("gemm", CALL),
        ("gemm_swiglu", CALL),
        ("close", CFUNCTYPE(None, c_void_p)),
    )


OPEN = CFUNCTYPE(c_char_p, POINTER(cuda_device.Table), POINTER(Options), POINTER(Opened))


class Refused(Exception):
    """The reason why the library was not opened."""


def arguments(shape: Shape, y: int, x: int, w: int, m: int, bias: int = 0) -> Gemm:
    return Gemm(
        y=y, x=x, w=w, bias=bias or None, m=m, n=shape.n, k=shape.k, ldx=shape.k, ldy=shape.n
    )


FOUND_BYTES = 24  # rm_pack_found


def differs(
    device: cuda_device.Device,
    kernels: Kernels,
    one: int,
    other: int,
    rows: int,
    cols: int,
    found: int,
) -> int:
    """Returns the first element in which two bf16 [rows][cols] on the device differ, or the first
    element of `one` that is not finite, or −1. `found`: FOUND_BYTES on the device."""
    args = Pack(
        src=one,
        rows=rows,
        cols=cols,
        row_stride=cols,
        col_stride=1,
        dst=other,
        dst_cols=cols,
        compare=1,
        found=found,
    )
    kernels.pack(byref(cuda_device.Context(stream=device.table.stream, n_threads=1)), byref(args))
    _, nonfinite, differing = struct.unpack("Qqq", device.read(found, FOUND_BYTES))
    return int(
        max(nonfinite, differing) if min(nonfinite, differing) < 0 else min(nonfinite, differing)
    )


def table(library: cuda_device.Library, family: str) -> Kernels:
    """Returns the kernel table of the family "cuda_fma" or "cuda_mma"."""
    door = (
        library.loaded.rm_kernels_cuda
        if family == "cuda_fma"
        else library.loaded.rm_kernels_cuda_mma
    )
    door.restype = POINTER(Kernels)
    return door().contents  # type: ignore[no-any-return]


class VendorGemm:
    def __init__(self, opened: Opened) -> None:
        self.opened, self.version = opened, int(opened.version)

    def multiply(self, shape: Shape, y: int, x: int, w: int, m: int, bias: int = 0) -> None:
        """Enqueues a product of device addresses."""
        args = arguments(shape, y, x, w, m, bias)
        (self.opened.gemm_swiglu if shape.swiglu else self.opened.gemm)(
            self.opened.self, byref(args)
        )


@contextmanager
def opened(
    device: cuda_device.Device,
    library: str,
    shapes: Sequence[Shape],
    max_rows: int,
    choice: int = FREE,
    room: int | None = None,
) -> Iterator[VendorGemm]:
    """room: bytes of the workspace for gate and up; None: for all rows. Raises Refused with the
    reason."""
    room = (
        4 * max_rows * max((shape.n for shape in shapes if shape.swiglu), default=0)
        if room is None
        else room
    )
    room += LIBRARY_BYTES + 256
    listed = (GemmShape * max(1, len(shapes)))(
        *[GemmShape(s.n, s.k, s.k, s.n, s.has_bias, s.swiglu) for s in shapes]
    )
    workspace, out = device.alloc(room), Opened()
    options = Options(library.encode(), listed, len(shapes), max_rows, choice, workspace, room)
    why = ctypes.cast(device.table.open_vendor_gemm, OPEN)(
        byref(device.table), byref(options), byref(out)
    )
    try:
        if why is not None:
            raise Refused(why.decode())
        yield VendorGemm(out)
    finally:
        if out.self:
            out.close(out.self)
        device.drop(workspace)

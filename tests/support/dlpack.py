"""DLPack producers with arbitrary contents: a capsule is built by hand, so that shape, strides,
type, device and data can disagree with each other and with the memory. `alive` counts the capsules
whose deleter has not run."""

from __future__ import annotations

import ctypes as C
from collections.abc import Sequence
from typing import Any

import numpy as np

FLOAT, BFLOAT, INT, COMPLEX, BOOL = 2, 4, 0, 5, 6


class _Tensor(C.Structure):
    _fields_ = (
        ("data", C.c_void_p),
        ("device_type", C.c_int32),
        ("device_id", C.c_int32),
        ("n_dims", C.c_int32),
        ("code", C.c_uint8),
        ("bits", C.c_uint8),
        ("lanes", C.c_uint16),
        ("shape", C.POINTER(C.c_int64)),
        ("strides", C.POINTER(C.c_int64)),
        ("byte_offset", C.c_uint64),
    )


class _Managed(C.Structure):
    _fields_ = (("tensor", _Tensor), ("context", C.c_void_p), ("deleter", C.c_void_p))


class _Versioned(C.Structure):
    _fields_ = (
        ("major", C.c_uint32),
        ("minor", C.c_uint32),
        ("context", C.c_void_p),
        ("deleter", C.c_void_p),
        ("flags", C.c_uint64),
        ("tensor", _Tensor),
    )


_DESTRUCTOR = C.CFUNCTYPE(None, C.c_void_p)
_new = C.pythonapi.PyCapsule_New
_new.restype, _new.argtypes = C.py_object, [C.c_void_p, C.c_char_p, _DESTRUCTOR]

alive = 0


@_DESTRUCTOR
def _gone(capsule: int) -> None:
    global alive
    alive -= 1


class Producer:
    """A tensor over `array`'s memory with any of its fields replaced."""

    def __init__(
        self,
        array: np.ndarray,
        *,
        shape: Sequence[int] | None = None,
        strides: Sequence[int] | None = (),
        dtype: tuple[int, int, int] | None = None,
        data: int | None = -1,
        n_dims: int | None = None,
        device: int = 1,
        said_device: Any = None,
        byte_offset: int = 0,
        version: tuple[int, int] | None = None,
        no_shape: bool = False,
        raises: BaseException | None = None,
        gives: Any = None,
    ):
        self.array = array
        shape = array.shape if shape is None else shape
        if strides == ():
            strides = [s // array.itemsize for s in array.strides]
        self._shape = (C.c_int64 * max(len(shape), 1))(*shape)
        self._strides = None if strides is None else (C.c_int64 * max(len(strides), 1))(*strides)
        code, bits, lanes = dtype or (FLOAT, 8 * array.itemsize, 1)
        tensor = _Tensor(
            array.ctypes.data if data == -1 else data,
            device,
            0,
            len(shape) if n_dims is None else n_dims,
            code,
            bits,
            lanes,
            C.cast(None if no_shape else self._shape, C.POINTER(C.c_int64)),
            C.cast(self._strides, C.POINTER(C.c_int64)),
            byte_offset,
        )
        self._managed = (
            _Versioned(*version, None, None, 0, tensor) if version else _Managed(tensor, None, None)
        )
        self._name = b"dltensor_versioned" if version else b"dltensor"
        self._said = (device, 0) if said_device is None else said_device
        self._raises, self._gives, self._takes_version = raises, gives, version is not None

    def __dlpack_device__(self) -> Any:
        return self._said

    def __dlpack__(self, **arguments: Any) -> Any:
        global alive
        if arguments and not self._takes_version:
            raise TypeError(f"__dlpack__ got {arguments}")  # a producer from before versions
        if self._raises is not None:
            # A new exception, because an exception keeps the frames that it went through.
            raise type(self._raises)(*self._raises.args)
        if self._gives is not None:
            return self._gives
        alive += 1
        return _new(C.addressof(self._managed), self._name, _gone)

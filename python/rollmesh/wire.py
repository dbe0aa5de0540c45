"""Outputs as bytes, for the ranks of a mesh that did not compute them. No code travels: a JSON header that says what there is,
and the arrays behind it, each from a multiple of 8 bytes on. Both ends are this file, so a version is not negotiated.

    encode(value) ──► bytes ──► decode(bytes) == value, to the last bit of every array
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollmesh import errors
from rollmesh.outputs import CompletionOutput, Contract, RequestOutput, TopLogprobs
from rollmesh.sources.arrays import DTYPES, dtype_name

Array = NDArray[Any]
RECORDS: dict[str, Callable[..., Any]] = {kind.__name__: kind for kind in (Contract, TopLogprobs, CompletionOutput, RequestOutput)}


def encode(value: Any) -> bytes:
    """None, bool, int, float, str, list, tuple, dict with str keys, NumPy arrays, exceptions and the records above, nested."""
    arrays: list[Array] = []
    header = json.dumps(_plain(value, arrays)).encode()
    parts = [len(header).to_bytes(8, "little"), header, bytes(-len(header) % 8)]
    for array in arrays:
        parts += [array.tobytes(), bytes(-array.nbytes % 8)]
    return b"".join(parts)


def decode(data: bytes) -> Any:
    """What was encoded. Arrays are copies."""
    size = int.from_bytes(data[:8], "little")
    return _Reader(data, 8 + size + -size % 8).value(json.loads(data[8 : 8 + size]))


def _plain(value: Any, arrays: list[Array]) -> Any:
    """JSON's own values as they are, but lists; anything else as {"kind": …}."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return {"kind": "float", "hex": value.hex()}
    if isinstance(value, (list, tuple)):
        return {"kind": type(value).__name__, "items": [_plain(item, arrays) for item in value]}
    if isinstance(value, dict):
        return {"kind": "dict", "items": {key: _plain(item, arrays) for key, item in value.items()}}
    if isinstance(value, np.ndarray):
        arrays.append(np.ascontiguousarray(value))
        return {"kind": "array", "dtype": dtype_name(value) if value.dtype.metadata else value.dtype.str, "shape": list(value.shape)}
    if isinstance(value, Exception):
        return {"kind": "error", "name": type(value).__name__, "message": str(value)}
    kind = type(value).__name__
    if kind not in RECORDS:
        raise TypeError(f"a {kind} cannot travel between ranks")
    return {"kind": kind, "items": {f.name: _plain(getattr(value, f.name), arrays) for f in fields(value)}}


class _Reader:
    def __init__(self, data: bytes, at: int):
        self._data, self._at = data, at

    def value(self, plain: Any) -> Any:
        if not isinstance(plain, dict):
            return plain
        kind = plain["kind"]
        if kind == "float":
            return float.fromhex(plain["hex"])
        if kind in ("list", "tuple"):
            items = [self.value(item) for item in plain["items"]]
            return items if kind == "list" else tuple(items)
        if kind == "array":
            return self._array(DTYPES.get(plain["dtype"]) or np.dtype(plain["dtype"]), tuple(plain["shape"]))
        if kind == "error":
            return _error(plain["name"], plain["message"])
        items = {name: self.value(item) for name, item in plain["items"].items()}
        return items if kind == "dict" else RECORDS[kind](**items)

    def _array(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        count = int(np.prod(shape, dtype=np.int64))
        array = np.frombuffer(self._data, dtype, count, self._at).reshape(shape).copy()
        self._at += array.nbytes + -array.nbytes % 8
        return array


def _error(name: str, message: str) -> Exception:
    """The exception of that name, of ours or one that a tokenizer may raise; another's name stands before its message."""
    if name in errors.__all__:
        return getattr(errors, name)(message)  # type: ignore[no-any-return]
    return MemoryError(message) if name == "MemoryError" else errors.Error(f"{name}: {message}")

"""Serialises values for messages between ranks, without pickle: a JSON header, then the arrays,
each aligned to 8 bytes. The ranks run the same release, so messages have no format version.

    encode(value) ──► bytes ──► decode(bytes) == value, to the last bit of every array
"""

from __future__ import annotations

import json
import math
from dataclasses import fields
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from rollmesh import errors
from rollmesh.runtime.dtypes import BF16

Array = NDArray[Any]
# Dtypes are looked up here by name, since NumPy's parser of dtype names accepts many more.
DTYPES = {
    np.dtype(order + code).str: np.dtype(order + code)
    for order in "<>"
    for code in "?bBhHiIlLqQefdg"
} | {"bfloat16": BF16}
# Classes of `sendable`, by name.
DATACLASSES: dict[str, type] = {}
T = TypeVar("T")
MAX_DEPTH = 64
MAX_DIMS = 32


def sendable(kind: type[T]) -> type[T]:
    """Marks a dataclass whose objects may be encoded."""
    DATACLASSES[kind.__name__] = kind
    return kind


def encode(value: Any) -> bytes:
    """Encodes nested values of the types None, bool, int, float, str, list, tuple, dict with str
    keys, NumPy arrays of numbers, exceptions, and dataclasses that are `sendable`. Raises TypeError
    for any other type."""
    arrays: list[Array] = []
    header = json.dumps(_plain(value, arrays, 0)).encode()
    parts = [len(header).to_bytes(8, "little"), header, bytes(-len(header) % 8)]
    for array in arrays:
        parts += [array.tobytes(), bytes(-array.nbytes % 8)]
    return b"".join(parts)


def decode(data: bytes) -> Any:
    """Returns the value that was encoded; its arrays are copies. Raises FormatError for bytes that
    `encode` did not make."""
    size = int.from_bytes(data[:8], "little")
    begin = 8 + size + -size % 8
    if len(data) < begin:
        raise errors.FormatError(f"expected a message of {begin} bytes at least, got {len(data)}")
    reader = _Reader(data, begin)
    try:
        value = reader.value(json.loads(data[8 : 8 + size]))
    except (
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as error:
        raise errors.FormatError(
            f"expected a message of rollmesh.distributed.wire: {type(error).__name__}: {error}"[
                :500
            ]
        ) from error
    if reader.at != len(data):
        raise errors.FormatError(f"expected a message of {reader.at} bytes, got {len(data)}")
    return value


def _plain(value: Any, arrays: list[Array], depth: int) -> Any:
    """Converts a value to JSON: None, bool, int and str are unchanged, and any other value becomes
    {"kind": …}. Appends arrays to `arrays`."""
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if isinstance(value, float) and not isinstance(value, np.generic):
        return {"kind": "float", "hex": value.hex()}
    if kind is np.ndarray and value.dtype.str in DTYPES:
        arrays.append(value)
        is_bf16 = value.dtype.metadata == BF16.metadata
        return {
            "kind": "array",
            "dtype": "bfloat16" if is_bf16 else value.dtype.str,
            "shape": list(value.shape),
        }
    if isinstance(value, Exception):
        return {"kind": "error", "name": kind.__name__, "message": str(value)}
    if depth == MAX_DEPTH:
        raise TypeError(f"a {kind.__name__} within {MAX_DEPTH} others cannot travel between ranks")
    if DATACLASSES.get(kind.__name__) is kind:
        members = ((field.name, getattr(value, field.name)) for field in fields(value))
        items = {name: _plain(member, arrays, depth + 1) for name, member in members}
        return {"kind": "object", "name": kind.__name__, "items": items}
    if kind in (list, tuple):
        return {"kind": kind.__name__, "items": [_plain(item, arrays, depth + 1) for item in value]}
    if kind is dict and all(type(key) is str for key in value):
        return {
            "kind": "dict",
            "items": {key: _plain(item, arrays, depth + 1) for key, item in value.items()},
        }
    raise TypeError(f"a {kind.__name__} cannot travel between ranks")


class _Reader:
    def __init__(self, data: bytes, at: int):
        self._data, self.at = data, at

    def value(self, plain: Any) -> Any:
        if isinstance(plain, (float, list)):
            raise TypeError(f"a {type(plain).__name__} as it is")
        if not isinstance(plain, dict):
            return plain
        kind = plain["kind"]
        if kind == "float":
            return float.fromhex(plain["hex"])
        if kind in ("list", "tuple"):
            items = [self.value(item) for item in plain["items"]]
            return items if kind == "list" else tuple(items)
        if kind == "array":
            return self._array(plain["dtype"], plain["shape"])
        if kind == "error":
            return _error(plain["name"], plain["message"])
        if kind not in ("dict", "object"):
            raise TypeError(f"a value of kind {kind!r:.80}")
        members = {name: self.value(item) for name, item in plain["items"].items()}
        return members if kind == "dict" else DATACLASSES[plain["name"]](**members)

    def _array(self, name: Any, shape: Any) -> Array:
        dtype = DTYPES.get(name) if isinstance(name, str) else None
        if dtype is None:
            raise TypeError(f"arrays of {name!r:.80}")
        if len(shape) > MAX_DIMS or not all(type(dim) is int and dim >= 0 for dim in shape):
            raise ValueError(f"shape {shape!r:.200}")
        count = math.prod(shape)
        if count * dtype.itemsize > len(self._data) - self.at:
            raise ValueError(
                f"an array of {count} elements where {len(self._data) - self.at} bytes are left"
            )
        array = np.frombuffer(self._data, dtype, count, self.at).reshape(shape).copy()
        self.at += array.nbytes + -array.nbytes % 8
        return array


def _error(name: str, message: str) -> Exception:
    """Returns an exception of the class `name` if it is one of rollmesh's or MemoryError; otherwise
    an Error whose message begins with the name."""
    if not isinstance(name, str) or not isinstance(message, str):
        raise TypeError(f"an error of name {name!r:.80} and message {message!r:.80}")
    if name in errors.__all__:
        return getattr(errors, name)(message)  # type: ignore[no-any-return]
    return MemoryError(message) if name == "MemoryError" else errors.Error(f"{name}: {message}")

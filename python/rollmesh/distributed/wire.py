"""Serialises values for messages between ranks, without pickle: a JSON header, then the bytes of
the arrays. The ranks run the same release, so messages have no format version.

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
KIND = "rollmesh"  # the key of a JSON object that stands for a value that JSON does not have


def sendable(kind: type[T]) -> type[T]:
    """Marks a dataclass whose objects may be encoded."""
    DATACLASSES[kind.__name__] = kind
    return kind


def encode(value: Any) -> bytes:
    """Encodes nested values of the types None, bool, int, float, str, list, dict with str keys,
    NumPy arrays of numbers, exceptions, and dataclasses that are `sendable`; a tuple becomes a
    list. Raises TypeError for other types."""
    arrays: list[Array] = []

    def described(value: Any) -> dict[str, Any]:
        kind = type(value)
        if kind is np.ndarray and value.dtype.str in DTYPES:
            arrays.append(value)
            is_bf16 = value.dtype.metadata == BF16.metadata
            return {KIND: ["array", "bfloat16" if is_bf16 else value.dtype.str, value.shape]}
        if isinstance(value, Exception):
            return {KIND: ["error", kind.__name__, str(value)]}
        if DATACLASSES.get(kind.__name__) is kind:
            members = [getattr(value, field.name) for field in fields(value)]
            return {KIND: ["object", kind.__name__, members]}
        raise TypeError(f"a {kind.__name__} cannot travel between ranks")

    header = json.dumps(value, default=described).encode()
    return b"".join(
        [len(header).to_bytes(8, "little"), header, *(array.tobytes() for array in arrays)]
    )


def decode(data: bytes) -> Any:
    """Returns the value that was encoded; its arrays are copies. Raises FormatError for bytes that
    `encode` did not make."""
    begin = at = 8 + int.from_bytes(data[:8], "little")

    def array(name: str, shape: list[int]) -> Array:
        nonlocal at
        if min(shape, default=0) < 0:
            raise ValueError(f"shape {shape!r:.200}")
        flat = np.frombuffer(data, DTYPES[name], math.prod(shape), at)
        at += flat.nbytes
        return flat.reshape(shape).copy()

    def value_of(item: dict[str, Any]) -> Any:
        if KIND not in item:
            return item
        kind, name, content = item[KIND]
        if kind == "array":
            return array(name, content)
        return _error(name, content) if kind == "error" else DATACLASSES[name](*content)

    try:
        value = json.loads(data[8:begin], object_hook=value_of)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise errors.FormatError(
            f"expected a message of a rank, got {len(data)} bytes: {type(error).__name__}: {error}"[
                :500
            ]
        ) from error
    if at != len(data):
        raise errors.FormatError(f"expected a message of {at} bytes, got {len(data)}")
    return value


def _error(name: str, message: str) -> Exception:
    """Returns an exception of the class `name` if it is one of rollmesh's or MemoryError; otherwise
    an Error whose message begins with the name."""
    if name in errors.__all__:
        return getattr(errors, name)(message)  # type: ignore[no-any-return]
    return MemoryError(message) if name == "MemoryError" else errors.Error(f"{name}: {message}")

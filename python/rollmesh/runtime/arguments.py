"""Checks of arguments: each returns the value in its plain form, or raises an error that names what
it expected and what it got."""

from __future__ import annotations

import functools
import math
import operator
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from rollmesh import _core
from rollmesh._core import usable_cores
from rollmesh.errors import ConfigError, Error, UnsupportedTensorError
from rollmesh.runtime.messages import listed, reason, shown

MAX_ITEMS = 2**24  # prompts of a call, tokens of a prompt, request ids
MAX_TOKENS = 2**20  # different ones: vocabularies are smaller
MAX_TIMEOUT_S = 10**6  # of one exchange between processes
MAX_TIMEOUT = 10**9  # 31 years: what every clock and lock can count
BYTES = (bytes, bytearray, memoryview)  # iterable, and of integers, but no list of ids
MAX_THREADS = _core.engine_limits()["threads"][1]
PARTS = {"weights": 1, "kv": 2}  # the bits of csrc/engine/engine.h, as the next
OFFLOAD = 4
# rm_activation of kernels/kernels.h, in its order.
ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "relu2", "swiglu_oai")
MAX_FLOAT32 = 3.4028234663852886e38
REAL = (int, float, np.integer, np.floating)
# The smallest normal float64; the engine takes smaller ones for 0.
MIN_FLOAT64 = 2.2250738585072014e-308


def is_unicode(text: str) -> bool:
    """False for half of a surrogate pair: no tokenizer encodes or decodes it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_path(value: Any) -> bool:
    """Whether the operating system can look for it: False for text with NUL or with half of a
    surrogate pair, unless os.fsdecode made it."""
    try:
        return isinstance(os.fspath(value), str) and b"\0" not in os.fsencode(value)
    except (TypeError, UnicodeEncodeError):
        return False


def existing_folder(folder: Any) -> Path:
    if not is_path(folder) or not os.path.isdir(folder):
        raise ConfigError(f"folder: expected a folder that exists, got {shown(str(folder))}")
    return Path(folder)


def is_real(value: Any) -> bool:
    return isinstance(value, REAL) and not isinstance(value, bool)


def is_integer(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def choice(name: str, value: Any, words: Sequence[str]) -> str:
    if not isinstance(value, str) or value not in words:
        raise ConfigError(f"{name}: expected one of {', '.join(words)}, got {shown(value)}")
    return str.__str__(value)


def integer(name: str, value: Any, low: int, high: int) -> int:
    return integer_of(ConfigError, name, value, low, high)


def integer_of(error: type[Error], name: str, value: Any, low: int, high: int) -> int:
    if not is_integer(value) or not low <= int(value) <= high:
        raise error(f"{name}: expected an integer in [{low}, {high}], got {shown(value)}")
    return int(value)


def thread_count(value: Any, name: str = "threads") -> int:
    """Checks a number of threads; None means all cores that this process may use."""
    most = MAX_THREADS
    return min(usable_cores(), most) if value is None else integer(name, value, 1, most)


def boolean(name: str, value: Any) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise ConfigError(f"{name}: expected a bool, got {shown(value)}")
    return bool(value)


def is_masked(array: Any) -> bool:
    """An array of numpy.ma, or of another class with a mask, which np.asarray would drop."""
    return isinstance(array, np.ndarray) and hasattr(type(array), "mask")


_CLASSES = {
    "FakeTensor": "a fake tensor, which has no data",
    "FunctionalTensor": "a fake tensor, which has no data",
    "MaskedTensor": "a masked tensor; send .to_tensor(value)",
    "DTensor": "a DTensor; send .full_tensor(), or .to_local() where it is replicated",
}
_KINDS = {
    "is_quantized": "a quantized tensor",
    "is_meta": "a meta tensor, which has no data",
    "is_sparse": "a sparse tensor",
    "is_nested": "a nested tensor",
    "is_neg": "a lazily negated view; send .resolve_neg()",
}


def exportable(name: Any, tensor: Any) -> Any:
    """Returns a tensor of any library as DLPack exports it: detached from autograd. Raises
    UnsupportedTensorError for a torch tensor without dense memory."""
    what = _CLASSES.get(type(tensor).__name__)
    for kind, text in _KINDS.items():
        value = getattr(tensor, kind, False)
        if what is None and (value() if callable(value) else value) is True:
            what = text
    if what is None and str(getattr(tensor, "layout", "torch.strided")) != "torch.strided":
        what = f"a tensor of layout {tensor.layout}"
    if what is not None:
        raise UnsupportedTensorError(f"{name:.200}: expected a dense tensor, got {what}")
    return tensor.detach() if getattr(tensor, "requires_grad", False) is True else tensor


def timeout_s(timeout: Any) -> float:
    """Checks how long a process waits for another one."""
    if not is_real(timeout) or not 0 < timeout <= MAX_TIMEOUT_S:
        raise ConfigError(
            f"timeout: expected seconds above 0, at most {MAX_TIMEOUT_S}, got {shown(timeout)}"
        )
    return float(timeout)


def deadline_of(timeout: float | None) -> float | None:
    if timeout is None:
        return None
    if not is_real(timeout) or not timeout >= 0:
        raise ConfigError(f"timeout: expected seconds >= 0 or None, got {shown(timeout)}")
    if timeout == math.inf:
        return None
    if timeout > MAX_TIMEOUT:
        raise ConfigError(
            f"timeout: expected at most {MAX_TIMEOUT} seconds, got more; inf and None mean no limit"
        )
    return time.monotonic() + float(timeout)


def part_mask(parts: Any) -> int:
    bit_of = PARTS | {"kv_cache": PARTS["kv"]}  # vLLM's word
    names = [parts] if isinstance(parts, str) else parts
    try:
        bits = [bit_of[name] for name in islice(names, len(PARTS) + 1)]
    except (TypeError, KeyError):  # not iterable (an array without dims has __iter__ too), or names
        bits = []
    if not 0 < len(bits) <= len(PARTS):
        raise ConfigError(f"parts: expected 'weights', 'kv' or both, got {shown(parts)}")
    return functools.reduce(operator.or_, bits)


def part_names(mask: int) -> str:
    return " and ".join(part for part, bit in PARTS.items() if mask & bit)


def is_longer_than(values: Any, most: int) -> bool:
    """Whether its length, if it has one, is above `most`. Reads no item."""
    try:
        return len(values) > most
    except OverflowError:  # beyond what Python counts with
        return True
    except (TypeError, ValueError):
        return False


def items_of(
    error: type[Error], name: str, values: Iterable[Any], most: int = MAX_ITEMS
) -> list[Any]:
    """All items; reads at most one more than allowed."""
    if isinstance(values, BYTES):
        raise error(f"{name}: expected a list of items, got {shown(values)}")
    try:
        walk = iter(values)
    except TypeError as wrong:  # an array without dims has __iter__ too
        raise error(
            f"{name}: expected an iterable, got a {type(values).__name__}: {reason(wrong)}"
        ) from wrong
    items = [] if (more := is_longer_than(values, most)) else list(islice(walk, most + 1))
    if more or len(items) > most:
        raise error(f"{name}: expected at most {most} items, got more")
    return items


def fields_of(error: type[Error], name: str, kind: type, values: Any) -> dict[str, Any]:
    """Returns a received dict whose keys are fields of a dataclass. Fields with a default may be
    missing."""
    if not isinstance(values, Mapping):
        raise error(f"{name}: expected a dict, got {shown(values)}")
    known = {field.name: field.default is MISSING for field in fields(kind)}
    if unknown := [entry for entry in values.items() if entry[0] not in known]:
        raise error(f"{name}: expected some of {', '.join(known)}, got {listed(unknown)}")
    if missing := [(key,) for key in known if known[key] and key not in values]:
        raise error(
            f"{name}: expected the fields of {kind.__name__}, got none for {listed(missing)}"
        )
    return dict(values)

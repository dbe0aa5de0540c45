"""Checks of arguments: each returns the value in its plain form, or raises an error that names what
it expected and what it got."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import numpy as np

from rollmesh import _core
from rollmesh._core import usable_cores
from rollmesh.errors import ConfigError, Error, UnsupportedTensorError
from rollmesh.runtime.messages import reason, shown

MAX_ITEMS = 2**24  # prompts of a call, tokens of a prompt, request ids
MAX_TOKENS = 2**20  # different ones: vocabularies are smaller
MAX_TIMEOUT = 10**9  # 31 years: what every clock and lock can count
BYTES = (bytes, bytearray, memoryview)  # iterable, and of integers, but no list of ids
MAX_THREADS = _core.engine_limits()["threads"][1]
PARTS = {"weights": 1, "kv": 2}  # the bits of csrc/engine/engine.h, as the next
OFFLOAD = 4
ACTIVATIONS = (
    "silu",
    "gelu_tanh",
    "gelu",
    "relu2",
)  # rm_activation of kernels/kernels.h, in its order
REAL = (int, float, np.integer, np.floating)
MIN_FLOAT64 = (
    2.2250738585072014e-308  # the smallest normal one; the engine takes smaller ones for 0
)


def is_unicode(text: str) -> bool:
    """False for half of a surrogate pair: no tokenizer encodes or decodes it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def choice(name: str, value: Any, words: Sequence[str]) -> str:
    if not isinstance(value, str) or value not in words:
        raise ConfigError(f"{name}: expected one of {', '.join(words)}, got {shown(value)}")
    return str.__str__(value)


def integer(name: str, value: Any, low: int, high: int) -> int:
    return integer_of(ConfigError, name, value, low, high)


def integer_of(error: type[Error], name: str, value: Any, low: int, high: int) -> int:
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, np.integer))
        or not low <= int(value) <= high
    ):
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


def deadline_of(timeout: float | None) -> float | None:
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, REAL) or not timeout >= 0:
        raise ConfigError(f"timeout: expected seconds >= 0 or None, got {shown(timeout)}")
    if timeout == math.inf:
        return None
    if timeout > MAX_TIMEOUT:
        raise ConfigError(
            f"timeout: expected at most {MAX_TIMEOUT} seconds, got more; inf and None mean no limit"
        )
    return time.monotonic() + float(timeout)


def part_mask(parts: Any) -> int:
    try:
        names = [parts] if isinstance(parts, str) else list(islice(parts, len(PARTS) + 1))
        names = [
            "kv" if isinstance(name, str) and name == "kv_cache" else name for name in names
        ]  # vLLM's word
    except TypeError:  # not iterable; an array without dims has __iter__ too
        names = []
    if not 0 < len(names) <= len(PARTS) or not all(
        isinstance(name, str) and name in PARTS for name in names
    ):
        raise ConfigError(f"parts: expected 'weights', 'kv' or both, got {shown(parts)}")
    mask = 0
    for name in names:
        mask |= PARTS[name]
    return mask


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

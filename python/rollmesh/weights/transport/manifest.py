"""The manifest of a segment or bucket: the offset of each copied tensor, and the GPU allocation of
each lent tensor. It is JSON; it is sent with the bytes, and the reader checks all of it.

    {"tensors": [{name, dtype, shape, offset, bytes, sum}, …],
     "lent": {number, process, allocations: [[GPU, handle, bytes], …], tensors: [[name, dtype,
     shape, strides, allocation, offset], …]}}

`sum` is a checksum; with "" the comparison is skipped. `lent` is present only if tensors are lent
(loans.py).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollmesh.errors import DuplicateKeyError, FormatError, LimitError
from rollmesh.runtime.messages import shown
from rollmesh.weights.transport.segment import ALIGN, Bytes, aligned
from rollmesh.weights.transport.tensors import DTYPES, bytes_of, checksum, dtype_name

MAX_ENTRIES = 1_000_000
MAX_NAME = 1024
NO_SUM = "0" * 16  # stands for a checksum that is not known yet
MAX_DIMS = 32  # NumPy's limit
MAX_LENT_DIMS = 4  # a generator's limit


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor in a segment or bucket."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    bytes: int
    sum: str


@dataclass(frozen=True, slots=True)
class Allocation:
    bus: str
    handle: bytes
    bytes: int


@dataclass(frozen=True, slots=True)
class LentTensor:
    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    allocation: int
    offset: int  # bytes


@dataclass(frozen=True, slots=True)
class Loan:
    """A loan as described by `loans.describe_loan`, after its checks."""

    number: int
    process: str
    allocations: tuple[Allocation, ...]
    tensors: dict[str, LentTensor]


@dataclass(frozen=True, slots=True)
class Manifest:
    entries: dict[str, Entry]
    loan: Loan | None
    values: dict[str, Any]  # the sender's other entries

    def names(self) -> list[str]:
        return [*self.entries, *(self.loan.tensors if self.loan else ())]


# ------------------------------------------------------------------------------------- the sender
def lay_out(arrays: Iterable[tuple[str, NDArray[Any]]]) -> tuple[list[Entry], int]:
    """Returns entries without checksums for arrays that are stored one after another, and the total
    number of bytes. Raises LimitError for entries that `parse` refuses."""
    entries, at = [], 0
    for name, array in arrays:
        check_name(name)
        entries.append(Entry(name, dtype_name(array), array.shape, at, array.nbytes, ""))
        at = aligned(at + array.nbytes)
    _check_count(len(entries))
    return entries, at


def fill(
    buffer: Bytes,
    entries: Iterable[Entry],
    arrays: Iterable[tuple[str, NDArray[Any]]],
    *,
    sums: bool,
) -> list[Entry]:
    """Copies the arrays into the buffer and returns their entries. sums: add checksums. They are
    checksums of the copies, since the arrays may be written to meanwhile."""
    filled = []
    for entry, (_, array) in zip(entries, arrays, strict=True):
        copy = buffer[entry.offset : entry.offset + entry.bytes]
        copy[...] = bytes_of(array)
        filled.append(replace(entry, sum=checksum(copy)) if sums else entry)
    return filled


def describe(entries: Iterable[Entry], lent: dict[str, Any] | None = None, **more: Any) -> bytes:
    loan = {} if lent is None else {"lent": lent}
    return json.dumps({**more, **loan, "tensors": [asdict(entry) for entry in entries]}).encode()


# ----------------------------------------------------------------------------------------- checks
def check_name(name: Any) -> None:
    if not isinstance(name, str) or not name:
        raise LimitError(
            f"a tensor's name: expected a str of 1 to {MAX_NAME} characters, got {shown(name)[:80]}"
        )
    if len(name) > MAX_NAME:
        raise LimitError(
            f"a tensor's name has {len(name)} characters ({name[:40]}…); the limit is {MAX_NAME}"
        )


def check_new_name(name: Any, seen: set[str]) -> None:
    """Checks a name and adds it to the names of its set."""
    check_name(name)
    if name in seen:
        raise DuplicateKeyError(f"{name} comes twice")
    _check_count(len(seen) + 1)
    seen.add(name)


def _check_count(count: int) -> None:
    if count > MAX_ENTRIES:
        raise LimitError(f"{count} weights in one set; the limit is {MAX_ENTRIES}")


def parse(text: bytes, num_bytes: int) -> Manifest:
    """Parses the text that `describe` made for a segment or bucket of num_bytes bytes. Raises
    FormatError, which names the first wrong entry, or DuplicateKeyError."""
    try:
        values = json.loads(text)
        tensors, lent = values.pop("tensors"), values.pop("lent", None)
        entries = [Entry(**{**tensor, "shape": tuple(tensor["shape"])}) for tensor in tensors]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FormatError(f"expected a manifest of weights: {error!r:.200}") from error
    _check_count(len(entries))
    for entry in entries:
        check_entry(entry, num_bytes)
    loan = None if lent is None else parse_loan(lent)
    _require_different([entry.name for entry in entries] + list(loan.tensors if loan else ()))
    return Manifest({entry.name: entry for entry in entries}, loan, values)


def _require_different(names: list[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise DuplicateKeyError(f"{name} comes twice")
        seen.add(name)


def check_entry(entry: Entry, num_bytes: int) -> None:
    check_name(entry.name)
    _check_dtype(entry.name, entry.dtype)
    sizes = (*entry.shape, entry.offset, entry.bytes)
    if not all(
        isinstance(size, int) and not isinstance(size, bool) and size >= 0 for size in sizes
    ):
        raise FormatError(
            f"{entry.name}: expected sizes that are integers >= 0, got {sizes!r:.200}"
        )
    if len(entry.shape) > MAX_DIMS or math.prod(size or 1 for size in entry.shape) >= 2**60:
        raise FormatError(
            f"{entry.name}: expected at most {MAX_DIMS} dims and 2^60 elements, got shape "
            f"{list(entry.shape)!r:.200}"
        )
    needed = math.prod(entry.shape) * DTYPES[entry.dtype].itemsize
    if entry.bytes != needed or entry.offset + entry.bytes > num_bytes or entry.offset % ALIGN:
        where = f"{entry.bytes} bytes at {entry.offset} of {num_bytes}"
        raise FormatError(
            f"{entry.name}: {where} do not hold {entry.dtype} {list(entry.shape)}, which takes "
            f"{needed}"
        )


def _check_dtype(name: str, dtype: Any) -> None:
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise FormatError(f"{name}: expected a dtype of {', '.join(DTYPES)}, got {dtype!r:.80}")


def parse_loan(value: Any) -> Loan:
    """Parses the loan's part of a manifest. Raises FormatError, which names the first wrong entry.
    Every tensor of the returned loan is inside its allocation."""
    try:
        number, process = value["number"], str(value["process"])
        allocations = tuple(
            Allocation(str(bus), bytes.fromhex(handle), int(size))
            for bus, handle, size in value["allocations"]
        )
        tensors = [
            LentTensor(n, d, tuple(shape), tuple(strides), at, offset)
            for n, d, shape, strides, at, offset in value["tensors"]
        ]
        if any("\0" in allocation.bus for allocation in allocations):
            raise ValueError("a NUL in the name of a GPU")
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise FormatError(f"expected a manifest of lent weights: {error!r:.200}") from error
    if not isinstance(number, int) or isinstance(number, bool) or not 1 <= number < 2**63:
        raise FormatError(
            f"the number of a loan: expected an integer in [1, 2^63), got {shown(number)}"
        )
    _check_count(len(tensors))
    for tensor in tensors:
        _check_lent(tensor, allocations)
    _require_different([tensor.name for tensor in tensors])
    return Loan(number, process, allocations, {tensor.name: tensor for tensor in tensors})


def _check_lent(tensor: LentTensor, allocations: tuple[Allocation, ...]) -> None:
    check_name(tensor.name)
    numbers = (*tensor.shape, *tensor.strides, tensor.allocation, tensor.offset)
    if not all(isinstance(n, int) and not isinstance(n, bool) and abs(n) < 2**60 for n in numbers):
        raise FormatError(f"{tensor.name}: expected integers below 2^60, got {numbers!r:.200}")
    _check_dtype(tensor.name, tensor.dtype)
    if (
        len(tensor.shape) != len(tensor.strides)
        or len(tensor.shape) > MAX_LENT_DIMS
        or min(tensor.shape, default=1) < 1
    ):
        what = f"shape {list(tensor.shape)} with strides {list(tensor.strides)}"
        raise FormatError(f"{tensor.name}: expected at most {MAX_LENT_DIMS} sizes >= 1, got {what}")
    if not 0 <= tensor.allocation < len(allocations):
        raise FormatError(
            f"{tensor.name}: expected one of {len(allocations)} allocations, got number "
            f"{tensor.allocation}"
        )
    each = DTYPES[tensor.dtype].itemsize
    reach = [
        (n - 1) * stride * each for n, stride in zip(tensor.shape, tensor.strides, strict=True)
    ]
    low = tensor.offset + sum(min(r, 0) for r in reach)
    high = tensor.offset + sum(max(r, 0) for r in reach) + each
    size = allocations[tensor.allocation].bytes
    if low < 0 or high > size:
        raise FormatError(
            f"{tensor.name}: expected bytes inside an allocation of {size}, got [{low}, {high})"
        )


def view(entry: Entry, buffer: NDArray[np.uint8], *, verify: bool) -> NDArray[Any]:
    """Returns a tensor as a view of the bytes. verify: raise FormatError if its checksum
    differs."""
    data = buffer[entry.offset : entry.offset + entry.bytes]
    if verify and (seen := checksum(data)) != entry.sum:
        raise FormatError(f"{entry.name}: expected checksum {entry.sum}, got {seen}")
    return data.view(DTYPES[entry.dtype]).reshape(entry.shape)

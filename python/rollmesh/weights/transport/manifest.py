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
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollmesh.errors import DuplicateKeyError, FormatError, LimitError, VersionError
from rollmesh.runtime.arguments import integer_of
from rollmesh.runtime.messages import shown
from rollmesh.weights.transport.segment import ALIGN, Bytes, aligned
from rollmesh.weights.transport.tensors import DTYPES, bytes_of, checksum, dtype_name

MAX_ENTRIES = 1_000_000
MAX_NAME = 1024
NO_SUM = "0" * 16  # stands for a checksum that is not known yet
MAX_DIMS = 32  # NumPy's limit
MAX_LENT_DIMS = 4  # a generator's limit
MAX_VERSION = 2**63 - 1


class Entry(NamedTuple):
    """One tensor in a segment or bucket."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    bytes: int
    sum: str


class Allocation(NamedTuple):
    bus: str
    handle: bytes
    bytes: int


class LentTensor(NamedTuple):
    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    allocation: int
    offset: int  # bytes


class Loan(NamedTuple):
    """A loan as described by `loans.describe_loan`, after its checks."""

    number: int
    process: str
    allocations: tuple[Allocation, ...]
    tensors: dict[str, LentTensor]


class Manifest(NamedTuple):
    entries: dict[str, Entry]
    loan: Loan | None
    values: dict[str, Any]  # the sender's other entries

    def names(self) -> list[str]:
        return [*self.entries, *(self.loan.tensors if self.loan else ())]


# ------------------------------------------------------------------------------------- the sender
def lay_out(arrays: Iterable[tuple[str, NDArray[Any]]]) -> tuple[list[Entry], int]:
    """Returns entries without checksums for arrays that are stored one after another, and the total
    number of bytes."""
    entries, at = [], 0
    for name, array in arrays:
        entries.append(Entry(name, dtype_name(array), array.shape, at, array.nbytes, ""))
        at = aligned(at + array.nbytes)
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
        filled.append(entry._replace(sum=checksum(copy)) if sums else entry)
    return filled


def describe(entries: Iterable[Entry], lent: dict[str, Any] | None = None, **more: Any) -> bytes:
    loan = {} if lent is None else {"lent": lent}
    return json.dumps({**more, **loan, "tensors": [entry._asdict() for entry in entries]}).encode()


# ----------------------------------------------------------------------------------------- checks
def check_new_name(name: Any, seen: set[str]) -> None:
    """Checks a name and adds it to the names of its set."""
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME:
        raise LimitError(
            f"a tensor's name: expected a str of 1 to {MAX_NAME} characters, got {shown(name)[:80]}"
        )
    if name in seen:
        raise DuplicateKeyError(f"{name}: expected it once in a set, got it twice")
    if len(seen) == MAX_ENTRIES:
        raise LimitError(f"a set of weights: expected at most {MAX_ENTRIES}, got more")
    seen.add(name)


def check_version(version: Any, last: int | None) -> int:
    """Returns the version number as an int, the next number if it is None. Raises VersionError
    unless it exceeds the last one."""
    if version is None:
        version = 0 if last is None else last + 1
    number = integer_of(VersionError, "version", version, 0, MAX_VERSION)
    if last is not None and number <= last:
        raise VersionError(f"version {number} does not exceed {last}, the last one")
    return number


def parse(text: bytes, num_bytes: int) -> Manifest:
    """Parses the text that `describe` made for a segment or bucket of num_bytes bytes. Raises
    FormatError, which names the first wrong entry, LimitError or DuplicateKeyError."""
    try:
        values = json.loads(text)
        tensors, lent = values.pop("tensors"), values.pop("lent", None)
        entries = [Entry(**{**tensor, "shape": tuple(tensor["shape"])}) for tensor in tensors]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FormatError(f"expected a manifest of weights: {error!r:.200}") from error
    seen: set[str] = set()
    for entry in entries:
        check_new_name(entry.name, seen)
        _check_entry(entry, num_bytes)
    loan = None if lent is None else parse_loan(lent, seen)
    return Manifest({entry.name: entry for entry in entries}, loan, values)


def bytes_needed(name: Any, dtype: Any, shape: Sequence[Any]) -> int:
    """Returns the bytes of a tensor, after a check of its dtype and shape."""
    _check_dtype(name, dtype)
    if (
        len(shape) > MAX_DIMS
        or not all(type(size) is int and size >= 0 for size in shape)
        or math.prod(size or 1 for size in shape) >= 2**60
    ):
        raise FormatError(
            f"{name}: expected at most {MAX_DIMS} dims and 2^60 elements, got shape "
            f"{list(shape)!r:.200}"
        )
    return int(math.prod(shape) * DTYPES[dtype].itemsize)


def _check_entry(entry: Entry, num_bytes: int) -> None:
    needed, offset = bytes_needed(entry.name, entry.dtype, entry.shape), entry.offset
    if (
        type(offset) is not int
        or type(entry.bytes) is not int
        or not 0 <= offset <= num_bytes - needed
        or offset % ALIGN
        or entry.bytes != needed
    ):
        raise FormatError(
            f"{entry.name}: expected {needed} bytes at a multiple of {ALIGN} in {num_bytes} bytes, "
            f"got {entry.bytes!r:.80} bytes at {offset!r:.80}"
        )


def _check_dtype(name: str, dtype: Any) -> None:
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise FormatError(f"{name}: expected a dtype of {', '.join(DTYPES)}, got {dtype!r:.80}")


def parse_loan(value: Any, seen: set[str]) -> Loan:
    """Parses the loan's part of a manifest. seen: the names of the copied tensors. Raises the
    errors of `parse`. Every tensor of the returned loan is inside its allocation."""
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
    integer_of(FormatError, "the number of a loan", number, 1, 2**63 - 1)
    for tensor in tensors:
        check_new_name(tensor.name, seen)
        _check_lent(tensor, allocations)
    return Loan(number, process, allocations, {tensor.name: tensor for tensor in tensors})


def _check_lent(tensor: LentTensor, allocations: tuple[Allocation, ...]) -> None:
    name, dtype, shape, strides, at, offset = tensor
    numbers = (*shape, *strides, at, offset)
    if not all(type(n) is int and abs(n) < 2**60 for n in numbers):
        raise FormatError(f"{name}: expected integers below 2^60, got {numbers!r:.200}")
    _check_dtype(name, dtype)
    if len(shape) != len(strides) or len(shape) > MAX_LENT_DIMS or min(shape, default=1) < 1:
        raise FormatError(
            f"{name}: expected at most {MAX_LENT_DIMS} sizes >= 1, got shape {list(shape)} with "
            f"strides {list(strides)}"
        )
    if not 0 <= at < len(allocations):
        raise FormatError(
            f"{name}: expected one of {len(allocations)} allocations, got number {at}"
        )
    each, size = DTYPES[dtype].itemsize, allocations[at].bytes
    reach = [(n - 1) * stride * each for n, stride in zip(shape, strides, strict=True)]
    low = offset + sum(min(r, 0) for r in reach)
    high = offset + sum(max(r, 0) for r in reach) + each
    if low < 0 or high > size:
        raise FormatError(
            f"{name}: expected bytes inside an allocation of {size}, got [{low}, {high})"
        )


def view(entry: Entry, buffer: NDArray[np.uint8], *, verify: bool) -> NDArray[Any]:
    """Returns a tensor as a view of the bytes. verify: raise FormatError if its checksum
    differs."""
    data = buffer[entry.offset : entry.offset + entry.bytes]
    if verify and (seen := checksum(data)) != entry.sum:
        raise FormatError(f"{entry.name}: expected checksum {entry.sum}, got {seen}")
    return data.view(DTYPES[entry.dtype]).reshape(entry.shape)

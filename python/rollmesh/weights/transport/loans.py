"""Tensors on GPUs, from a trainer to generators in other processes of the machine, where they are (CUDA IPC): shared.py's store names
the allocations and what lies where in them, and this opens them.

    trainer     lends: waits for what writes the tensors, keeps them, and holds a lock for as long as it lives
    reader      takes a lease (a locked file), opens each allocation once, reads, closes all, says so (a file `read-VERSION-TOKEN`)
    trainer     waits until as many readers as it lent to have said so; then the version is current no longer

Before a reader takes what it has read for good it looks whether the version is current still: then nobody had it back in the meantime.
Locks are POSIX record locks, which end with their process and are not inherited by a fork.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from rollmesh import _core
from rollmesh.errors import ConfigError, Error, FormatError, LimitError, RankLostError, UnsupportedTensorError
from rollmesh.runtime.devices import library_path
from rollmesh.weights.transport.tensors import DTYPES, MAX_ENTRIES, check_name

CUDA = (2, 13)  # DLPack's numbers of memory on a GPU
ALIVE = "alive"
MAX_DIMS = 4
REMEDY = (
    "torch must not use expandable segments (PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False) nor cudaMallocAsync; "
    "lend_to=0, or a WeightSender's lend=False, copies"
)

_TOKEN = secrets.token_hex(8)


def this_process() -> str:
    """A fork has another number, another container another token."""
    return f"{os.getpid()}-{_TOKEN}"


class LentSource:
    """A source whose tensors are there for a while only: a sync reads them inside of `lent()`, and calls what that gives before it
    commits, which raises when they were not there to the end."""

    def lent(self) -> AbstractContextManager[Callable[[], None]]:
        raise NotImplementedError


def gpus() -> _core.Gpus:
    path = library_path()
    if not path.exists():
        raise ConfigError(f"tensors on GPUs are lent and borrowed by {path.name}, which this build has not: it was made without nvcc")
    return _core.Gpus(str(path))


def is_on_gpu(tensor: Any) -> bool:
    """Says its producer; one that has no answer is not."""
    ask = getattr(tensor, "__dlpack_device__", None)
    if not callable(ask) or getattr(tensor, "is_meta", False):
        return False
    try:
        return ask()[0] in CUDA
    except (ValueError, BufferError, RuntimeError):  # torch, of a device that DLPack does not know
        return False


# -------------------------------------------------------------------------------------------------- the trainer
class Held(NamedTuple):
    """A tensor of this process that another may read, kept for as long as this is."""

    name: str
    ordinal: int
    address: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    owner: Any

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * DTYPES[self.dtype].itemsize


def hold(gpus: _core.Gpus, name: str, tensor: Any) -> Held:
    """A tensor on a GPU, which what writes it may still be doing."""
    check_name(name)
    return Held(name, *gpus.lend(name, tensor))


def describe_loan(gpus: _core.Gpus, tensors: Iterable[Held]) -> dict[str, Any]:
    """What `parse_loan` reads, of tensors that are written by now. UnsupportedTensorError for memory that no other process can open."""
    allocations: list[tuple[int, int, int]] = []  # ordinal, address, bytes
    handles: list[list[Any]] = []
    described, ordinals = [], set()
    for name, ordinal, address, dtype, shape, strides, _ in tensors:
        at = next((i for i, (o, a, n) in enumerate(allocations) if o == ordinal and a <= address < a + n), None)
        if at is None:
            at = len(allocations)
            bus, handle, start, size = _loan(gpus, name, ordinal, address)
            allocations.append((ordinal, start, size))
            handles.append([bus, handle.hex(), size])
        described.append([name, dtype, shape, strides, at, address - allocations[at][1]])
        ordinals.add(ordinal)
    for ordinal in ordinals:
        gpus.wait(ordinal)
    return {"process": this_process(), "allocations": handles, "tensors": described}


def _loan(gpus: _core.Gpus, name: str, ordinal: int, address: int) -> tuple[str, bytes, int, int]:
    try:
        return gpus.loan(ordinal, address)
    except UnsupportedTensorError as error:
        reason = f"its memory on cuda:{ordinal} cannot be opened by another process: {error}"
        raise UnsupportedTensorError(f"{name}: {reason}; {REMEDY}") from error


class Lender:
    """What is lent at the moment."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._gpus = gpus()
        # Not O_EXCL: a Ctrl-C may have left the file, in a folder that nobody else has.
        alive = os.open(folder / ALIVE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self._end = weakref.finalize(self, os.close, alive)
        self._end.atexit = False  # the end of the process does it
        fcntl.lockf(alive, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._kept: list[Any] = []

    def lend(self, tensors: Iterable[tuple[str, Any]], readers: int) -> dict[str, Any]:
        """The description of tensors that are written by now. UnsupportedTensorError for memory that no other process can open."""
        self._forget_ended()
        held = [hold(self._gpus, name, tensor) for name, tensor in tensors]
        described = describe_loan(self._gpus, held)
        self._kept = [each.owner for each in held]
        return {**described, "readers": readers}

    def read_by(self, version: int) -> int:
        return sum(1 for _ in self._folder.glob(f"read-{version}-*"))

    def _forget_ended(self) -> None:
        """Readers that had ended by now are not of those that this version is lent to."""
        for lease in self._folder.glob("reader-*"):
            if is_free(lease):
                lease.unlink(missing_ok=True)

    def lost_reader(self, version: int) -> bool:
        """Whether one that has a lease ended without having read it; told once."""
        for lease in self._folder.glob("reader-*"):
            if (self._folder / f"read-{version}-{lease.name.removeprefix('reader-')}").exists() or not is_free(lease):
                continue
            lease.unlink(missing_ok=True)
            return True
        return False

    def living(self) -> int:
        """Readers with a lease whose process lives."""
        return sum(1 for lease in self._folder.glob("reader-*") if not is_free(lease))

    def release(self, version: int) -> None:
        self._kept = []
        for mark in self._folder.glob(f"read-{version}-*"):
            mark.unlink(missing_ok=True)

    def close(self) -> None:
        self._kept = []
        self._end()


def is_free(path: Path) -> bool:
    """Whether nobody who holds the lock of a file lives. False where there is no file. Two that ask are not in each other's way."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):  # somebody has it
            return False
        raise
    finally:
        os.close(file)
    return True


# -------------------------------------------------------------------------------------------------- a reader
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
    """What `Lender.lend` wrote, checked."""

    process: str
    allocations: tuple[Allocation, ...]
    tensors: dict[str, LentTensor]


def parse_loan(value: Any) -> Loan:
    """FormatError names the first place that is wrong; what passes lies inside of its allocation."""
    try:
        process = str(value["process"])
        allocations = tuple(Allocation(str(bus), bytes.fromhex(handle), int(size)) for bus, handle, size in value["allocations"])
        tensors = [LentTensor(n, d, tuple(shape), tuple(strides), at, offset) for n, d, shape, strides, at, offset in value["tensors"]]
        if any("\0" in allocation.bus for allocation in allocations):
            raise ValueError("a NUL in the name of a GPU")
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise FormatError(f"a description of lent weights that is not one: {error!r:.200}") from error
    if len(tensors) > MAX_ENTRIES:
        raise LimitError(f"{len(tensors)} weights in one set; the limit is {MAX_ENTRIES}")
    for tensor in tensors:
        _check_tensor(tensor, allocations)
    by_name = {tensor.name: tensor for tensor in tensors}
    if len(by_name) != len(tensors):
        raise FormatError(f"{len(tensors)} lent tensors have {len(by_name)} names")
    return Loan(process, allocations, by_name)


def _check_tensor(tensor: LentTensor, allocations: tuple[Allocation, ...]) -> None:
    check_name(tensor.name)
    numbers = (*tensor.shape, *tensor.strides, tensor.allocation, tensor.offset)
    if not all(isinstance(n, int) and not isinstance(n, bool) and abs(n) < 2**60 for n in numbers):
        raise FormatError(f"{tensor.name}: sizes {numbers!r:.200} are not all integers below 2^60")
    if not isinstance(tensor.dtype, str) or tensor.dtype not in DTYPES:
        raise FormatError(f"{tensor.name}: dtype {tensor.dtype!r:.80} is not one of {', '.join(DTYPES)}")
    if len(tensor.shape) != len(tensor.strides) or len(tensor.shape) > MAX_DIMS or min(tensor.shape, default=1) < 1:
        what = f"shape {list(tensor.shape)} with strides {list(tensor.strides)}"
        raise FormatError(f"{tensor.name}: {what}, wanted at most {MAX_DIMS} sizes >= 1")
    if not 0 <= tensor.allocation < len(allocations):
        raise FormatError(f"{tensor.name}: allocation {tensor.allocation} of {len(allocations)}")
    each = DTYPES[tensor.dtype].itemsize
    reach = [(n - 1) * stride * each for n, stride in zip(tensor.shape, tensor.strides, strict=True)]
    low, high = tensor.offset + sum(min(r, 0) for r in reach), tensor.offset + sum(max(r, 0) for r in reach) + each
    if low < 0 or high > allocations[tensor.allocation].bytes:
        size = allocations[tensor.allocation].bytes
        raise FormatError(f"{tensor.name}: bytes [{low}, {high}) of an allocation of {size}")


class Borrowed:
    """The allocations of a loan, open; an array for each tensor that is asked for."""

    def __init__(self, loan: Loan):
        self._loan = loan
        self._gpus = gpus()
        self._open: list[tuple[int, int]] = []  # ordinal, address
        self._arrays: dict[str, _core.DeviceArray] = {}
        try:
            for allocation in loan.allocations:
                ordinal, address, size = self._gpus.borrow(allocation.bus, allocation.handle)
                self._open.append((ordinal, address))
                if size < allocation.bytes:  # more is how coarsely it is mapped
                    raise FormatError(f"an allocation of {size} bytes on cuda:{ordinal}, which its lender says has {allocation.bytes}")
        except BaseException:
            self.close()
            raise

    def array(self, name: str) -> _core.DeviceArray:
        if name not in self._arrays:
            tensor = self._loan.tensors[name]
            ordinal, address = self._open[tensor.allocation]
            self._arrays[name] = self._gpus.array(ordinal, address + tensor.offset, tensor.dtype, tensor.shape, tensor.strides)
        return self._arrays[name]

    def close(self) -> None:
        """All are given back, whatever becomes of one; then the first error is raised."""
        for array in self._arrays.values():
            array.drop()
        self._arrays = {}
        first: Error | None = None
        while self._open:
            try:
                self._gpus.give_back(*self._open.pop())
            except Error as error:
                first = first or error
        if first is not None:
            raise first


class Lease:
    """That this reader lives, to the trainer; kept until the reader is closed or ends. One that is dropped without either has ended:
    its lock goes and its file stays, for the trainer to see."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._token = secrets.token_hex(8)
        made = folder / f"new-{self._token}"
        try:
            self._file = os.open(made, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except FileNotFoundError as error:
            raise RankLostError(f"the trainer of {folder} has closed its store") from error
        self._let_go = weakref.finalize(self, os.close, self._file)
        self._let_go.atexit = False  # the end of the process does it
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            made.rename(folder / f"reader-{self._token}")
        except BaseException as error:
            self._let_go()
            made.unlink(missing_ok=True)
            if isinstance(error, FileNotFoundError):
                raise RankLostError(f"the trainer of {folder} has closed its store") from error
            raise

    def read(self, version: int) -> None:
        """Nothing of that version is looked at any more."""
        with suppress(FileNotFoundError):  # the trainer has closed its store: it does not wait
            os.close(os.open(self._folder / f"read-{version}-{self._token}", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))

    def close(self) -> None:
        (self._folder / f"reader-{self._token}").unlink(missing_ok=True)
        self._let_go()

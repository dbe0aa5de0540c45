"""Loans of tensors on GPUs, which other processes of the machine read in place (CUDA IPC). A loan
belongs to a segment (segment.py), which stores the number of the loan and the locks of its readers.
The manifest lists the allocations and the tensors in them.

    trainer   waits for kernels that write the tensors, keeps a reference, opens a loan of the
              segment, sends the manifest
    reader    locks its byte, checks the number, opens the allocations, reads, checks the number
              again, closes them, marks its byte
    trainer   (optionally waits until every reader has marked its byte,) sets the number to 0 and
              waits for the locks

A reader that finds another number drops what it has read. A lock ends with its process, so each
side notices when the other side dies.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

from numpy.typing import NDArray

from rollmesh import _core
from rollmesh.errors import ConfigError, Error, FormatError, StateError, UnsupportedTensorError
from rollmesh.runtime.arguments import exportable
from rollmesh.runtime.devices import library_path
from rollmesh.weights.transport.manifest import Loan, Manifest, view
from rollmesh.weights.transport.segment import Bytes, MappedSegment
from rollmesh.weights.transport.tensors import DTYPES, as_array, own_array

CUDA = (2, 13)  # DLPack's device types kDLCUDA and kDLCUDAManaged
REMEDY = (
    "torch must not use expandable segments (PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False) "
    "nor cudaMallocAsync; "
    "lend_to=0, or a WeightSender's lend=False, copies"
)

_TOKEN = secrets.token_hex(8)


def this_process() -> str:
    """Returns a unique name of this process. The pid differs in a forked child, and the token in
    another container."""
    return f"{os.getpid()}-{_TOKEN}"


class LentSource:
    """A source that must not change while a sync reads it. `lent()` keeps its tensors unchanged and
    yields a function that the sync calls before its commit; the function raises if a loan has
    ended."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._readers: list[object] = []

    @contextmanager
    def lent(self) -> Iterator[Callable[[], None]]:
        with self._reading():
            yield lambda: None

    @contextmanager
    def _reading(self) -> Iterator[None]:
        reader = object()
        try:
            with self._guard:
                self._readers.append(reader)
            yield
        finally:
            if reader in self._readers:
                self._readers.remove(reader)

    def _require_unread(self, what: str) -> None:
        """Raises StateError if there is a reader. Callers hold `self._guard`, which keeps readers
        out, in their own `with` statement: a context manager made from a generator could leave it
        locked after a Ctrl-C."""
        if self._readers:
            raise StateError(
                f"{what}: expected no sync that reads it, got {len(self._readers)}; "
                "call again after the sync"
            )


def gpus() -> _core.Gpus:
    path = library_path()
    if not path.exists():
        raise ConfigError(
            f"lending tensors on GPUs: expected {path.name}, got a build without it, made without "
            "nvcc"
        )
    return _core.Gpus(str(path))


def is_on_gpu(tensor: Any) -> bool:
    """Whether the tensor is on a GPU, according to its `__dlpack_device__` method."""
    ask = getattr(tensor, "__dlpack_device__", None)
    if not callable(ask) or getattr(tensor, "is_meta", False):
        return False
    try:
        return ask()[0] in CUDA
    except (ValueError, BufferError, RuntimeError):  # torch: the device has no number in DLPack
        return False


# ------------------------------------------------------------------------------------ the trainer
class OwnedTensor(NamedTuple):
    """A GPU tensor of this process that another process may read; keeps the tensor alive."""

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


class Lender:
    """Selects the tensors to lend and describes them."""

    @cached_property
    def _gpus(self) -> _core.Gpus:
        return gpus()

    def take(self, name: str, tensor: Any, copy: bool = False) -> NDArray[Any] | OwnedTensor:
        """Returns a tensor on a GPU as OwnedTensor, to be lent, and any other tensor as an array.
        copy: copy such an array. Gathers a DTensor. Kernels may still be writing the tensor."""
        whole = tensor.full_tensor() if callable(getattr(tensor, "full_tensor", None)) else tensor
        if not is_on_gpu(whole):
            return (own_array if copy else as_array)(name, whole)
        return OwnedTensor(name, *self._gpus.lend(name, exportable(name, whole)))

    def describe(self, tensors: Iterable[OwnedTensor], number: int) -> dict[str, Any]:
        """Returns the loan's part of a manifest. Waits for kernels that write the tensors. Raises
        UnsupportedTensorError for memory that other processes cannot open."""
        allocations: list[tuple[int, int, int]] = []  # ordinal, address, bytes
        handles: list[list[Any]] = []
        described, ordinals = [], set()
        for name, ordinal, address, dtype, shape, strides, _ in tensors:
            at = next(
                (
                    i
                    for i, (o, a, n) in enumerate(allocations)
                    if o == ordinal and a <= address < a + n
                ),
                len(allocations),
            )
            if at == len(allocations):
                try:
                    bus, handle, start, size = self._gpus.loan(ordinal, address)
                except UnsupportedTensorError as error:
                    raise UnsupportedTensorError(
                        f"{name}: its memory on cuda:{ordinal} cannot be opened by another "
                        f"process: {error}; {REMEDY}"
                    ) from error
                allocations.append((ordinal, start, size))
                handles.append([bus, handle.hex(), size])
            described.append([name, dtype, shape, strides, at, address - allocations[at][1]])
            ordinals.add(ordinal)
        for ordinal in ordinals:
            self._gpus.wait(ordinal)
        return {
            "number": number,
            "process": this_process(),
            "allocations": handles,
            "tensors": described,
        }


# --------------------------------------------------------------------------------------- a reader
class Borrowed:
    """The open allocations of a loan. Makes an array for each requested tensor."""

    def __init__(self, loan: Loan):
        self._loan = loan
        self._gpus = gpus()
        self._open: list[tuple[int, int]] = []  # ordinal, address
        self._arrays: dict[str, _core.DeviceArray] = {}
        try:
            for allocation in loan.allocations:
                ordinal, address, size = self._gpus.borrow(allocation.bus, allocation.handle)
                self._open.append((ordinal, address))
                if size < allocation.bytes:  # mappings are rounded up, so it may be larger
                    raise FormatError(
                        f"expected an allocation of {allocation.bytes} bytes on cuda:{ordinal}, "
                        f"got {size}"
                    )
        except BaseException:
            self.close()
            raise

    def array(self, name: str) -> _core.DeviceArray:
        if name not in self._arrays:
            tensor = self._loan.tensors[name]
            ordinal, address = self._open[tensor.allocation]
            self._arrays[name] = self._gpus.array(
                ordinal, address + tensor.offset, tensor.dtype, tensor.shape, tensor.strides
            )
        return self._arrays[name]

    def close(self) -> None:
        """Closes all allocations, then raises the first error."""
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


class ReceivedTensors(Mapping[str, Any], LentSource):
    """The tensors of a manifest by name. Copied tensors are views; lent tensors can be read only
    within `lent()`.

    remedy  text for error messages: what the user can do if lent tensors cannot be opened here
    """

    def __init__(self, *, verify: bool = True, remedy: str = ""):
        super().__init__()
        self._verify, self._remedy = verify, remedy

    def receive(
        self,
        manifest: Manifest | None,
        data: Bytes | None,
        segment: MappedSegment | None,
        what: str,
    ) -> None:
        """Replaces the tensors by those of a manifest (None: no tensors). what: a name of the set
        for messages, such as "version 3"."""
        verified: set[str] = set()
        self._borrowed: Borrowed | None = None
        # One assignment, so that a Ctrl-C cannot mix two versions.
        self._manifest, self._data, self._segment, self._what, self._verified, self._has_read = (
            manifest, data, segment, what, verified, False
        )  # fmt: skip

    @contextmanager
    def lent(self) -> Iterator[Callable[[], None]]:
        """Opens lent tensors for a `with` block; `sync_weights` does this itself. Yields a function
        to call after the last read has finished (on the GPU too); it raises if the loan has ended
        by then. If the block ends without an error, the reader returns the loan and cannot open it
        again.

        Raises RankLostError if the trainer has ended; StateError if the trainer took the loan back,
        if this reader has returned it, or if this process is the trainer; ConfigError if a GPU is
        not visible here; DeviceError with CUDA's message.
        """
        with self._reading(), self._loan_opened() as is_lent_still:
            yield is_lent_still

    @contextmanager
    def _loan_opened(self) -> Iterator[Callable[[], None]]:
        loan, segment = self._known().loan, self._segment
        if loan is None:
            yield lambda: None
            return
        assert segment is not None
        if self._has_read or self._borrowed is not None:
            raise StateError(
                f"{self._what}: expected a loan to open, got one that "
                f"{'was given back' if self._has_read else 'is being read'}; "
                "refresh() maps the next one"
            )
        if loan.process == this_process():
            raise StateError(
                f"{self._what}: expected a loan of another process, got one of this process: pass "
                f"the tensors themselves, to sync_weights or load_weights{self._remedy}"
            )
        with segment.reading(loan.number, self._what) as is_lent_still:
            self._borrowed = self._borrow(loan, is_lent_still)
            try:
                yield is_lent_still
            finally:
                borrowed, self._borrowed = self._borrowed, None
                borrowed.close()
        self._has_read = True

    def _borrow(self, loan: Loan, is_lent_still: Callable[[], None]) -> Borrowed:
        try:
            return Borrowed(loan)
        except Error as error:
            is_lent_still()  # raises RankLostError instead if the lender has ended
            raise type(error)(f"{error}{self._remedy}") from error

    def _known(self) -> Manifest:
        if self._manifest is None:
            raise StateError(f"{self._what}: expected a version, got none; call refresh()")
        return self._manifest

    def __getitem__(self, name: str) -> NDArray[Any] | _core.DeviceArray:
        manifest = self._known()
        if manifest.loan is not None and name in manifest.loan.tensors:
            if self._borrowed is None:
                raise StateError(
                    f"{name}: expected an open loan, got a tensor that is lent: read it by "
                    "sync_weights, or within `with reader.lent()`"
                )
            return self._borrowed.array(name)
        entry = manifest.entries[name]
        assert self._data is not None
        if self._segment is not None:
            self._segment.require_whole()
        array = view(
            entry,
            self._data,
            verify=self._verify and entry.sum != "" and name not in self._verified,
        )
        self._verified.add(name)
        return array

    def __iter__(self) -> Iterator[str]:
        return iter(self._known().names())

    def __len__(self) -> int:
        return len(self._known().names())

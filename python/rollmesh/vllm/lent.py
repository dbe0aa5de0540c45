"""Weights that stay on the trainer's GPUs while vLLM's workers read them (CUDA IPC, transport/loans.py): a loan for each block of an
update, that lasts for one call of update_weights.

    trainer   waits for what writes the tensors, keeps them, numbers the loan in the block's file, and makes the call
    worker    locks its byte of the file, opens the allocations, stages what it needs of the tensors, looks whether they are lent still,
              closes them, unlocks; whatever fails ends the update on all workers
    trainer   takes the number away once the call has ended, however it has, and waits for the locks: then all is its own again

vLLM returns from the call when all workers have, so nobody counts readers. A worker that a call has left behind (the trainer's timeout, an
end of its process) finds the number gone, and drops what it has read; a worker that dies leaves no lock. To lend the whole set until its
commit lost: a source may gather its tensors as they are asked for, and all of them together need not fit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from numpy.typing import NDArray

from rollmesh import _core
from rollmesh.errors import ConfigError, DuplicateKeyError, Error, StateError
from rollmesh.weights.transport.loans import Borrowed, Held, LentSource, Loan, describe_loan, gpus, hold, is_on_gpu, this_process
from rollmesh.weights.transport.segment import SharedBlock, SharedReader
from rollmesh.weights.transport.tensors import as_array

REMEDY = "the sender's lend=False copies by way of the host"


class Lending:
    """The trainer's side: what a block's tensors become."""

    def __init__(self) -> None:
        self._gpus: _core.Gpus | None = None  # from the first tensor on a GPU

    def take(self, name: str, tensor: Any) -> NDArray[Any] | Held:
        """A tensor on a GPU as it may be lent, another as an array. A DTensor is gathered."""
        whole = tensor.full_tensor() if callable(getattr(tensor, "full_tensor", None)) else tensor
        if not is_on_gpu(whole):
            return as_array(name, whole)
        if self._gpus is None:
            self._gpus = gpus()
        return hold(self._gpus, name, whole)

    def lend(self, shared: SharedBlock, tensors: list[Held]) -> str:
        """The loan of an UpdateInfo, current from now on. The caller keeps the tensors until `shared` has them back."""
        assert self._gpus is not None
        names: set[str] = set()
        for tensor in tensors:
            if tensor.name in names:
                raise DuplicateKeyError(f"{tensor.name} comes twice in one block")
            names.add(tensor.name)
        described = describe_loan(self._gpus, tensors)
        return json.dumps({"number": shared.lend(), **described})


class LentBlock(Mapping[str, Any], LentSource):
    """The worker's side: the tensors of one block by name, those on GPUs inside of `lent()` alone.

    ConfigError for a worker on the CPU, StateError when the trainer is this very process; DuplicateKeyError.
    """

    def __init__(self, reader: SharedReader, number: int, loan: Loan, entries: list[tuple[str, NDArray[Any]]], device: str):
        if device == "cpu":
            raise ConfigError(f"weights that a GPU lends for a worker on the CPU, wanted one on a GPU; {REMEDY}")
        if loan.process == this_process():
            raise StateError(f"weights that are lent by this very process: load_weights takes the tensors themselves; {REMEDY}")
        self._reader, self._number, self._loan, self._arrays = reader, number, loan, dict(entries)
        self._borrowed: Borrowed | None = None
        if both := self._arrays.keys() & loan.tensors.keys():
            raise DuplicateKeyError(f"{min(both)} comes twice in one block")

    @contextmanager
    def lent(self) -> Iterator[Callable[[], None]]:
        """As SharedReader.lent: gives what is to be called when all has been read."""
        with self._reader.reading(self._number) as is_lent_still:
            try:
                self._borrowed = Borrowed(self._loan)
            except Error as error:
                is_lent_still()  # what has no lender cannot be opened: that is the reason then
                raise type(error)(f"{error}; {REMEDY}") from error
            try:
                yield is_lent_still
            finally:
                borrowed, self._borrowed = self._borrowed, None
                borrowed.close()

    def __getitem__(self, name: str) -> NDArray[Any] | _core.DeviceArray:
        if name in self._arrays:
            return self._arrays[name]
        if self._borrowed is None:
            raise StateError(f"{name} is lent: it is open inside of `with block.lent()`")
        return self._borrowed.array(name)

    def __iter__(self) -> Iterator[str]:
        return iter((*self._arrays, *self._loan.tensors))

    def __len__(self) -> int:
        return len(self._arrays) + len(self._loan.tensors)

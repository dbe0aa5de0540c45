"""A trainer's tensors on a simulated GPU (tests/gpu/simt). The DLPack producers behave like torch's
CUDA tensors: their work is enqueued on the trainer's stream and may be unfinished. They live in
this process or in a process that a test drives."""

from __future__ import annotations

import ctypes
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import cuda_device
import dlpack
import helpers
import numpy as np

import rollmesh as rm
from rollmesh.sources import SharedReader, SharedWriter
from rollmesh.weights.transport.segment import MappedSegment


class Trainer:
    """A second library in this process that uses the same device with a separate stream."""

    def __init__(self, library: Path, ordinal: int) -> None:
        self.ordinal = ordinal
        self.loaded = ctypes.CDLL(str(library))
        self.loaded.simt_stream_device.argtypes = [ctypes.c_void_p]
        self.loaded.simt_stream_await.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        self.device = cuda_device.Device(cuda_device.Library(library), ordinal)

    @contextmanager
    def current(self) -> Iterator[None]:
        saved = self.device.enter()
        try:
            yield
        finally:
            self.device.leave(saved)

    def tensor(self, array: np.ndarray, **fields: Any) -> OnGpu:
        return OnGpu(self, array, **fields)

    def state(self, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
        return {name: self.tensor(array) for name, array in arrays.items()}

    def packed(self, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
        """All tensors in one allocation, like small tensors of torch's allocator."""
        with self.current():
            block = self.device.alloc(sum(array.nbytes + 64 for array in arrays.values()))
        tensors, at = {}, block + 64
        for name, array in arrays.items():
            tensors[name] = self.tensor(array, block=at)
            at += (array.nbytes + 63) // 64 * 64
        return tensors

    def close(self) -> None:
        with self.current():
            self.device.give_back()
            self.device.close()


class OnGpu(dlpack.Producer):
    """Exports DLPack as torch does for a CUDA tensor: with its device current, and after making the
    reader's stream wait for the producer's stream."""

    def __init__(
        self, trainer: Trainer, array: np.ndarray, *, block: int | None = None, **fields: Any
    ) -> None:
        base = array if array.base is None else array.base
        assert isinstance(base, np.ndarray)
        with trainer.current():
            block = trainer.device.alloc(max(base.nbytes, 1)) if block is None else block
            pinned = trainer.device.alloc_pinned(max(base.nbytes, 1))
            ctypes.memmove(pinned, base.ctypes.data, base.nbytes)
            trainer.device.copy_to_device(block, pinned, base.nbytes)
        data = block + array.ctypes.data - base.ctypes.data
        super().__init__(
            array, data=data, device=2, version=(1, 0), said_device=(2, trainer.ordinal), **fields
        )
        self._managed.tensor.device_id = trainer.ordinal
        self.trainer = trainer

    def __dlpack__(self, **arguments: Any) -> Any:
        loaded, stream = self.trainer.loaded, arguments["stream"]
        if (current := loaded.simt_current_device()) != self.trainer.ordinal:
            raise BufferError(
                f"Can't export tensors on a different CUDA device index. Current device: {current}."
            )
        assert loaded.simt_stream_device(stream) == self.trainer.ordinal
        loaded.simt_stream_await(stream, self.trainer.device.table.stream)
        return super().__dlpack__(**arguments)


# ------------------------------------------------------------------------ in a separate process
class Lender:
    """The commands that a test sends to its trainer's process: each method is a command and returns
    its answer. `held` is the tensors that the trainer lends."""

    def __init__(self, library: str, ordinal: int) -> None:
        self.trainer = Trainer(Path(library), ordinal)
        self.held: dict[str, Any] = {}

    def alive(self) -> int:
        """Capsules that are held."""
        return dlpack.alive

    def change(self) -> None:
        """Writes to every tensor, as an optimizer does."""
        with self.trainer.current():
            for tensor in self.held.values():
                self.trainer.device.zero_2d(tensor._managed.tensor.data, 4, 4, 1)
            assert self.trainer.device.wait() == cuda_device.OK

    def free(self) -> None:
        """Frees the tensors: a fault of the simulated device if a process has the memory open."""
        with self.trainer.current():
            self.trainer.device.give_back()


class Lending(Lender):
    """Lends with its own WeightWriter."""

    def __init__(self, library: str, ordinal: int, folder: str) -> None:
        super().__init__(library, ordinal)
        self.writer = SharedWriter(folder)

    def address(self) -> str:
        return self.writer.address

    def publish(
        self,
        config: Any,
        seed: int,
        version: int,
        lend_to: int,
        *,
        packed: bool = True,
        on_host: tuple[str, ...] = (),
    ) -> int:
        state = helpers.numpy_state_dict(config, seed=seed, dtype="float32")
        gpu = {name: array for name, array in state.items() if name not in on_host}
        self.held = self.trainer.packed(gpu) if packed else self.trainer.state(gpu)
        return self.writer.publish({**state, **self.held}, version, lend_to=lend_to)

    def wait(self, timeout: float) -> None:
        self.writer.wait_until_read(timeout)

    def take_back(self) -> None:
        self.writer.take_back()

    def environment(self, **settings: str) -> None:
        os.environ.update(settings)

    def die(self) -> None:
        os._exit(0)


def lend(
    pipe: Connection, library: str, ordinal: int, folder: str, settings: dict[str, str]
) -> None:
    """The process: answers (answer, None) or (None, error). Its publications are in `folder`, which
    stays when it is killed."""
    os.environ.update(settings)
    lending = Lending(library, ordinal, folder)
    with lending.writer:
        while (command := pipe.recv()) is not None:
            name, arguments, keywords = command
            try:
                pipe.send((getattr(lending, name)(*arguments, **keywords), None))
            except Exception as error:  # noqa: BLE001 (told to the test)
                traceback.print_exc()
                pipe.send((None, f"{type(error).__name__}: {error}"))


def borrow_and_die(address: str) -> None:
    """A reader's process that exits while it reads."""
    reader = SharedReader(address)
    reader.refresh()
    with reader.lent():
        os._exit(0)


def borrow_and_end(address: str) -> None:
    """A reader's process that reads and never closes."""
    reader = SharedReader(address)
    reader.refresh()
    with reader.lent():
        pass


# ---------------------------------------------------------------------------------------- readers
class Interrupted(SharedReader):
    """Calls a function when a given number of tensors has been read; or makes them impossible to
    return."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.left, self.happens = -1, lambda: None
        self.keeps = False

    def interrupt(self, asked: int, happens: Callable[[], None]) -> None:
        self.left, self.happens = asked, happens

    @contextmanager
    def lent(self) -> Iterator[Callable[[], None]]:
        with super().lent() as still:
            yield still
        if self.keeps:
            raise rm.DeviceError("cannot be given back")

    def __getitem__(self, name: str) -> Any:
        self.left -= 1
        if self.left == 0:
            self.happens()
        return super().__getitem__(name)


def end(address: str, victim: int) -> None:
    """Ends the trainer of a store permanently."""
    path, _, nonce = address.rpartition(":")
    segment = MappedSegment(Path(path), nonce)
    os.kill(victim, signal.SIGKILL)
    while segment.is_owned():
        time.sleep(0.001)
    segment.close()


def rank_of_two(
    pipe: Connection,
    name: str,
    rank: int,
    config: Any,
    options: dict[str, Any],
    address: str | None,
) -> None:
    """A process of a mesh of two, on the GPU of its number, until it receives None: syncs from a
    reader of `address` (None: it has no weights) and answers [digest, logits], or [error]. If it
    receives a trainer's process, rank 0 ends that process during the sync; if it receives -1, it
    cannot return what it has read."""
    mesh = {"mesh": rm.Mesh(tp=2), "comm": rm.comm.shm(name, rank, 2, 60)}
    generator = rm.Generator(rm.ModelSpec.from_hf(config), device="cuda", **mesh, **options)
    reader = None if address is None else Interrupted(address)
    while (victim := pipe.recv()) is not None:
        try:
            if reader is not None and address is not None:
                reader.refresh()
                reader.keeps = victim < 0 and rank == 0
                if victim > 0 and rank == 0:
                    # The reader checks each entry twice before this.
                    reader.interrupt(2 * len(reader) + 3, lambda: end(address, victim))
            digest = generator.sync_weights(reader, cast=True).digest
            pipe.send(
                [digest, [array.tobytes() for array in generator.logits([[3, 1, 2, 9], [4] * 40])]]
            )
        except rm.errors.Error as error:
            pipe.send([f"{type(error).__name__}: {error}"])
    generator.close()

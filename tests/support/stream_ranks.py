"""Ranks of a stream of weights (weights/transport/stream.py), each a process that test_stream.py
drives: one sends what it makes from a seed, the others receive into generators.

    nccl    rm.comm.nccl over shared memory: tensors on simulated GPUs, or on one GPU with torch
            where there is one
    shm     rm.comm.shm: the host, without torch
    gloo    torch.distributed on the host
    torch   as gloo, and each rank takes the CPU for its GPU: what a group of NCCL does on CUDA
            tensors, over a group that can be had here
"""

from __future__ import annotations

import atexit
import json
import os
import re
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import helpers
import numpy as np

import rollmesh as rm
from rollmesh import sources
from rollmesh.errors import Error
from rollmesh.runtime.devices import LIBRARY_SWITCH
from rollmesh.weights.transport import carriers, stream, tensors

PROMPTS = [[3, 1, 2, 9], [4] * 40]
State = dict[str, np.ndarray]


def seen(generator: rm.Generator) -> list[Any]:
    return [generator.version, *(array.tobytes() for array in generator.logits(PROMPTS))]


def spread(array: np.ndarray) -> np.ndarray:
    """The values of `array` as a view whose elements do not lie together, transposed where it has
    two dims."""
    if array.ndim < 2:
        base = np.full((*array.shape, 3), np.nan, array.dtype)
        base[..., 1] = array
        return base[..., 1]
    base = np.full((*array.shape[:-2], array.shape[-1], array.shape[-2] + 5), np.nan, array.dtype)
    view = np.swapaxes(base[..., 2:-3], -1, -2)
    view[...] = array
    return view


class Passing(np.ndarray):
    """A trainer's tensor that is gone as soon as nobody holds it: whoever looks then sees no
    number."""

    def __del__(self) -> None:
        if self.base is None:
            self.view(np.ndarray).fill(np.nan)


def passing(array: np.ndarray, trainer: Any) -> Any:
    """On the host, or on the GPU of a trainer whose allocator gives memory to the next at once, as
    torch's does."""
    if trainer is None:
        made = Passing(array.shape, array.dtype)
        made[...] = array
        return made
    from gpu_trainer import OnGpu

    class PassingOnGpu(OnGpu):
        def __del__(self) -> None:
            with self.trainer.current():
                self.trainer.device.zero_2d(
                    self._managed.tensor.data, array.nbytes, array.nbytes, 1
                )
                assert self.trainer.device.wait() == 0

    return PassingOnGpu(trainer, array)


class Rank:
    """A rank's side of each scenario; what a method returns, or raises, is told to the test."""

    def __init__(
        self, kind: str, rank: int, world: int, name: str, timeout: float, device: str | None
    ):
        self.kind, self.rank, self.world, self.timeout = kind, rank, world, timeout
        self.device = device if kind == "nccl" else None
        self.group = getattr(self, f"_{'torch' if kind in ('torch', 'gloo') else 'comm'}")(name)
        self.generator: rm.Generator | None = None
        self.trainers: dict[int, Any] = {}

    def _comm(self, name: str) -> Any:
        shared = rm.comm.shm(name, self.rank, self.world, self.timeout)
        return rm.comm.nccl(shared, os.environ["NCCL_LIBRARY"]) if self.kind == "nccl" else shared

    def _torch(self, name: str) -> None:
        from datetime import timedelta

        import torch
        import torch.distributed as dist

        limit = timedelta(seconds=self.timeout)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{name}",
            rank=self.rank,
            world_size=self.world,
            timeout=limit,
        )
        atexit.register(dist.destroy_process_group)
        if self.kind == "torch":
            carriers.gpu_of = lambda group: torch.device("cpu")  # type: ignore[assignment]

    def ready(self) -> None:
        """The process has come this far: what it loads is loaded."""

    # ---------------------------------------------------------------------------------- the sender
    def _given(self, state: State, where: str) -> dict[str, Any]:
        """host; gpu: on this rank's GPU; other: on another one; mixed: all three in turn; strided:
        on the GPU, not in C order; passing: on the GPU where there is one, and each gone when
        nobody holds it."""
        if where == "strided":
            state = {name: spread(array) for name, array in state.items()}
        if (self.kind == "torch" and where != "passing") or (
            self.kind == "gloo" and where not in ("host", "passing")
        ):
            import torch

            tensors: dict[str, Any] = {
                name: torch.from_numpy(array) for name, array in state.items()
            }
            return {
                n: state[n] if where == "mixed" and i % 2 else t
                for i, (n, t) in enumerate(tensors.items())
            }
        if self.kind != "nccl" or where in ("host", "passing"):
            return state
        places = {"mixed": (None, 0, 3), "other": (3,)}.get(where, (0,))
        turns = [None if ordinal is None else self._trainer(ordinal) for ordinal in places]
        return {
            n: a if (t := turns[i % len(turns)]) is None else t.tensor(a)
            for i, (n, a) in enumerate(state.items())
        }

    def send(
        self,
        config: helpers.Config,
        seed: int,
        *,
        where: str = "gpu",
        dtype: str = "float32",
        fails_at: int = -1,
        dies_at: int = -1,
        renamed: tuple[int, Any] = (-1, ""),
        lie: str = "",
        change: Callable[[State], State] = dict,
        **options: Any,
    ) -> int:
        state = change(helpers.numpy_state_dict(config, seed=seed, dtype=dtype))
        source = self._given(state, where)

        def entries() -> Iterator[tuple[str, Any]]:
            for i, entry in enumerate(source.items()):
                if i == fails_at:
                    raise KeyError("trainer")
                if i == dies_at:
                    os._exit(0)
                if i == renamed[0]:
                    yield renamed[1], entry[1]
                    continue
                yield (
                    (entry[0], passing(entry[1], self._trainer())) if where == "passing" else entry
                )

        honest = stream.describe
        if lie:
            stream.describe = lambda entries: LIES[lie](honest(entries))  # type: ignore[assignment]
        try:
            streams = max(fails_at, dies_at, renamed[0]) >= 0 or where == "passing"
            return sources.send_weights(
                entries() if streams else source, self.group, **self._options(options)
            )
        finally:
            stream.describe = honest

    def _trainer(self, ordinal: int = 0) -> Any:
        if self.kind != "nccl":
            return None
        from gpu_trainer import Trainer

        if ordinal not in self.trainers:
            self.trainers[ordinal] = Trainer(Path(os.environ[LIBRARY_SWITCH]), ordinal)
        return self.trainers[ordinal]

    def _options(self, options: dict[str, Any]) -> dict[str, Any]:
        return {"device": self.device, **options}

    # ---------------------------------------------------------------------------------- a receiver
    def make(self, config: helpers.Config, device: str, **options: Any) -> None:
        if self.generator is not None:
            self.generator.close()
        self.generator = rm.Generator(
            rm.ModelSpec.from_hf(config), device=device, **{**helpers.SMALL, **options}
        )

    def receive(
        self, *, cast: bool = True, src: int = 0, kinds: bool = False, **options: Any
    ) -> list[Any]:
        """[digest, version, logits]; with kinds the types of what came before these."""
        assert self.generator is not None
        found = set()

        def entries() -> Iterator[tuple[str, Any]]:
            for name, tensor in sources.receive_weights(
                self.group, src=src, **self._options(options)
            ):
                found.add(type(tensor).__name__)
                yield name, tensor

        report = self.generator.sync_weights(entries(), cast=cast)
        return [*([sorted(found)] if kinds else []), report.digest, *seen(self.generator)]

    def serves(self) -> list[Any]:
        assert self.generator is not None
        return seen(self.generator)

    def take(self, count: int, **options: Any) -> list[str]:
        """The names of the first so many entries; the rest is not asked for."""
        names = []
        for name, _ in sources.receive_weights(self.group, **{"src": 0, **self._options(options)}):
            names.append(name)
            if len(names) == count:
                break
        return names

    def interrupted(self, count: int) -> str:
        """By Ctrl-C, between two entries."""
        entries = sources.receive_weights(self.group, src=0, **self._options({}))
        for _ in range(count):
            next(entries)
        try:
            entries.throw(KeyboardInterrupt())  # type: ignore[attr-defined]
        except KeyboardInterrupt:
            return "interrupted"
        return "not interrupted"

    def keep(self, **options: Any) -> dict[str, bytes]:
        """All of a stream at once, looked at when it is over."""
        received = dict(sources.receive_weights(self.group, src=0, **self._options(options)))
        return {name: tensors.as_array(name, tensor).tobytes() for name, tensor in received.items()}

    def lags(self) -> dict[str, bytes]:
        """Each array is copied by another library's stream, which has not come to that when the
        array and its bucket are let go."""
        import ctypes

        import dlpack

        trainer, copies = self._trainer(self.rank), {}
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        for name, tensor in sources.receive_weights(self.group, src=0, **self._options({})):
            capsule = tensor.__dlpack__(max_version=(1, 0))
            data = dlpack._Versioned.from_address(
                pointer(capsule, b"dltensor_versioned")
            ).tensor.data
            with trainer.current():
                copies[name] = trainer.device.alloc(tensor.nbytes), tensor.nbytes
                trainer.device.copy_2d(copies[name][0], 0, data, 0, tensor.nbytes, 1)
            del capsule, tensor
        with trainer.current():
            return {name: trainer.device.read(*copy) for name, copy in copies.items()}

    def silent(self) -> None:
        """Hears of the first bucket, lives, and does not come to its broadcast before the others
        have given up."""
        carriers.NcclBucket.begin = lambda *_: time.sleep(2 * self.timeout)  # type: ignore[method-assign]
        self.take(1)

    def die(self, after: int) -> None:
        """While it receives."""
        for i, _ in enumerate(sources.receive_weights(self.group, src=0, **self._options({}))):
            if i == after:
                os._exit(0)

    def without_room(self, call: str, *arguments: Any, **options: Any) -> Any:
        """A call while this rank can allocate no bucket of its kind."""

        def none(*_: Any) -> Any:
            raise MemoryError("no room for a bucket")

        if self.kind == "nccl":
            os.environ["ROLLMESH_SIMT_MEMORY"] = "1"
            try:
                return getattr(self, call)(*arguments, **options)
            finally:
                del os.environ["ROLLMESH_SIMT_MEMORY"]
        kind = carriers.TorchBucket if self.kind == "torch" else carriers.HostBucket
        kept = kind.__init__
        kind.__init__ = none  # type: ignore[assignment]
        try:
            return getattr(self, call)(*arguments, **options)
        finally:
            kind.__init__ = kept  # type: ignore[method-assign]

    def fresh(self, name: str) -> None:
        """Another group in place of one that is dead."""
        self.group.close()
        self.group = self._comm(name)

    def close(self) -> None:
        if self.generator is not None:
            self.generator.close()
        if self.kind in ("nccl", "shm"):
            self.group.close()
        for trainer in self.trainers.values():
            trainer.close()


def longer(text: bytes) -> bytes:
    return text.replace(b'"shape": [', b'"shape": [7, ', 1)


def twice(text: bytes) -> bytes:
    tensors = json.loads(text)["tensors"]
    return json.dumps(
        {"tensors": [{**its, "name": tensors[0]["name"]} for its in tensors]}
    ).encode()


LIES: dict[str, Callable[[bytes], bytes]] = {
    "no json": lambda text: text[:-3],
    "shape": longer,
    "dims": lambda text: text.replace(b'"shape": [', b'"shape": [1, 1, 1, 1, ', 1),
    "dtype": lambda text: text.replace(b"float32", b"float99", 1),
    "place": lambda text: text.replace(b'"offset": 0,', b'"offset": 1099511627776,', 1),
    "twice": twice,
    "nameless": lambda text: re.sub(b'"name": "[^"]+"', b'"name": ""', text),
    "sum": lambda text: text.replace(b'"sum": "', b'"sum": "0', 1),
}


def serve(pipe: Connection, settings: dict[str, str], *arguments: Any) -> None:
    """The process: [method, arguments, keywords] in, [answer, error, seconds] out, until None
    comes."""
    os.environ.update(settings)
    rank = Rank(*arguments)
    while (command := pipe.recv()) is not None:
        method, given, options = command
        begin = time.monotonic()
        try:
            answer, error = getattr(rank, method)(*given, **options), None
        except (Error, MemoryError, KeyError) as raised:
            answer, error = None, f"{type(raised).__name__}: {raised}"
        except BaseException:
            traceback.print_exc()
            raise
        pipe.send([answer, error, time.monotonic() - begin])
    rank.close()

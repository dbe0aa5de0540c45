"""Workers of a vLLM engine without vLLM: for tests of the calls that vLLM makes on a worker
(rollmesh/vllm/weight_updates.py).

    Alone       one worker in this process: an exception is raised to the caller, as by vLLM's
                executor of one process
    Processes   ranks that are processes, called like by vLLM's multiprocess executor: the call goes
                to all, then replies are read rank by rank, and the first failure is raised
                immediately, with its words only; later replies stay unread

The engine is a Generator's, whose logits show the serving weights."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

os.environ.setdefault("VLLM_PLUGINS", "rollmesh")

import rollmesh as rm
from rollmesh.vllm.weight_updates import WeightUpdates, replies
from rollmesh.weights.transport.loans import Borrowed

PROMPTS = [[1, 2, 3, 4, 5], [140, 7]]
VOCAB = 150
IN_A_STEP = ("commit_open_sync", "load", "finish_load", "shutdown")  # vLLM does not call these
WAIT_S = 240  # a process begins by importing vLLM, on a machine that may be busy


def config_of(world: int, executor: str, backend: str | None = "rollmesh") -> Any:
    parallel = {
        "world_size": world,
        "data_parallel_index": 0,
        "data_parallel_size": 1,
        "distributed_executor_backend": executor,
    }
    parallel["worker_extension_cls"] = ""
    model = SimpleNamespace(get_vocab_size=lambda: VOCAB)
    transfer = None if backend is None else SimpleNamespace(backend=backend)
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**parallel),
        model_config=model,
        weight_transfer_config=transfer,
    )


class _Worker:
    def __init__(
        self,
        model: Any,
        dtype: str,
        world: int,
        rank: int,
        name: str,
        executor: str,
        backend: str | None = "rollmesh",
        device: str = "cpu",
    ):
        comm = rm.comm.shm(name, rank, world, timeout=WAIT_S) if world > 1 else None
        mesh = rm.Mesh(tp=world, ep=world) if world > 1 else None
        spec = rm.ModelSpec.from_hf(model)
        options = {
            "dtype": dtype,
            "device": device,
            "max_model_len": 32,
            "kv_cache_gib": 0.002,
            "threads": 1,
        }
        self.generator = rm.Generator(spec, mesh=mesh, comm=comm, **options)
        self.updates = WeightUpdates(
            self.generator._engine, config_of(world, executor, backend), rank
        )
        self.generator._weights = self.updates.weights

    def bits(self) -> bytes:
        self.updates.commit_open_sync()  # as vLLM's runner does before a step
        return b"".join(logits.tobytes() for logits in self.generator.logits(PROMPTS))

    def load(self, pairs: Any) -> set[str]:
        return self.updates.model.load_weights(pairs)

    def as_under_verl(self, on: bool) -> None:
        self.updates._waits_for_each = on

    def replace_compute_logits(self, add: float) -> None:
        self.updates.model.compute_logits = lambda logits: logits + add

    def load_cut(self, pairs: Any, rank: int, after: int) -> set[str]:
        """On one rank the trainer's iterator raises in the middle."""
        return self.load(_cut(pairs, after) if rank == self.updates.rank else pairs)

    def set(self, rank: int, name: str, value: str) -> None:
        """Sets a variable in one rank's environment."""
        if rank == self.updates.rank:
            os.environ[name] = value

    def end_reading(self, rank: int, after: int) -> None:
        """One rank's process exits after it has read a given number of lent tensors."""
        if rank == self.updates.rank:
            looked, array = iter(range(after)), Borrowed.array
            Borrowed.array = lambda self, name: (
                os._exit(3) if next(looked, None) is None else array(self, name)
            )  # type: ignore

    def __getattr__(self, name: str) -> Any:
        method = getattr(WeightUpdates, name)
        return partial(method if name in IN_A_STEP else replies(method), self.updates)


def _cut(pairs: Any, after: int) -> Iterator[Any]:
    yield from pairs[:after]
    raise OSError("the trainer's disk")


class Client:
    """vLLM's calls, over `rpc` to all workers. `label` is the engine core's."""

    label = "default"

    def rpc(self, method: str, *args: Any) -> Any:
        raise NotImplementedError

    def init_weight_transfer_engine(self, init_info: Any) -> None:
        self.rpc("init_weight_transfer_engine", init_info)

    def start_weight_update(self) -> None:
        self.rpc("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        self.rpc("update_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.rpc("finish_weight_update")
        self.label = weight_version or self.label

    def bits(self) -> bytes:
        every = self.rpc("bits")
        assert len(set(every)) == 1, "ranks differ"
        return bytes(every[0])


class Alone(Client):
    def __init__(
        self, model: Any, dtype: str, backend: str | None = "rollmesh", device: str = "cpu"
    ):
        self.worker = _Worker(model, dtype, 1, 0, "", "uni", backend, device)

    def rpc(self, method: str, *args: Any) -> list[Any]:
        return [getattr(self.worker, method)(*args)]

    def close(self) -> None:
        self.worker.shutdown()
        self.worker.generator.close()


def serve(pipe: Any, *made: Any) -> None:
    worker = _Worker(*made)
    while (call := pipe.recv()) is not None:
        method, args = call
        try:
            reply = (True, getattr(worker, method)(*args))
        except Exception as error:  # noqa: BLE001
            reply = (False, str(error))
        pipe.send(reply)
    worker.shutdown()
    worker.generator.close()


class Processes(Client):
    def __init__(
        self,
        model: Any,
        dtype: str,
        world: int,
        name: str,
        executor: str = "mp",
        device: str = "cpu",
    ):
        """On a GPU the processes are spawned with the current environment."""
        context = multiprocessing.get_context("forkserver" if device == "cpu" else "spawn")
        if device == "cpu":
            context.set_forkserver_preload(["vllm_ranks"])
        self._pipes, self._processes = [], []
        for rank in range(world):
            ours, theirs = context.Pipe()
            made = (theirs, model, dtype, world, rank, name, executor, "rollmesh", device)
            process = context.Process(target=serve, args=made, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def rpc(self, method: str, *args: Any) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((method, args))
        replies = []
        for pipe in self._pipes:
            assert pipe.poll(WAIT_S), f"no reply to {method}"
            done, reply = pipe.recv()
            if not done:
                raise RuntimeError(f"Worker failed with error '{reply}'")
            replies.append(reply)
        return replies

    def left_over(self) -> int:
        """Returns the number of unread replies."""
        return sum(pipe.poll(0.2) for pipe in self._pipes)

    def skip(self, replies: int) -> None:
        assert self.left_over() == replies
        for pipe in self._pipes:
            if pipe.poll():
                pipe.recv()

    def close(self) -> None:
        for pipe in self._pipes:
            with suppress(BrokenPipeError):  # the process has already exited
                pipe.send(None)
        for process in self._processes:
            process.join(WAIT_S)
            if process.is_alive():
                os.kill(process.pid, 9)


def float_words(state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Float32 copies of bfloat16 weights: casting them back gives the same bits."""
    return {
        name: (x.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(x.shape)
        for name, x in state.items()
    }

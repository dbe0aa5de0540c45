"""A trainer with tensors on a simulated GPU, in a separate process, whose WeightSender(lend=True)
makes vLLM's calls on a client in the test's process. Each call arrives through a pipe, as JSON like
over HTTP, and is answered by the client or by the test.

        remote.send(client, config, seed, version)        a whole set
        # by hand:
        remote.begin("send", …); remote.next() → Asked; remote.answer(…); …; remote.result()
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import dlpack
import gpu_trainer
import helpers
import numpy as np

import rollmesh as rm
from rollmesh.vllm import trainer as trainers
from rollmesh.vllm.trainer import WeightSender
from rollmesh.weights.transport.segment import FOLDER, MappedSegment

WAIT_S = 240
ENDS = "ends"


class Asked(NamedTuple):
    method: str
    args: list[Any]
    alive: int  # capsules that the trainer holds meanwhile


class _Forwarding:
    """vLLM's four calls."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def _ask(self, method: str, *args: Any) -> None:
        self._pipe.send(("asked", method, json.dumps(args), dlpack.alive))
        if (error := self._pipe.recv()) is not None:
            raise RuntimeError(error)

    def init_weight_transfer_engine(self, init_info: Any) -> None:
        self._ask("init_weight_transfer_engine", init_info)

    def start_weight_update(self) -> None:
        self._ask("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        self._ask("update_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._ask("finish_weight_update", weight_version)


class _Trainer(gpu_trainer.Lender):
    """A trainer with a sender to vLLM's workers."""

    def __init__(
        self, pipe: Connection, library: str, ordinal: int, options: dict[str, Any]
    ) -> None:
        super().__init__(library, ordinal)
        self.sender = WeightSender(_Forwarding(pipe), lend=True, **options)

    def send(
        self,
        config: Any,
        seed: int,
        version: int,
        *,
        packed: bool = True,
        on_host: tuple[str, ...] = (),
        changes: dict[str, Any] | None = None,
    ) -> None:
        """on_host: the tensors that are not on the GPU. changes: other arrays; None omits a
        tensor."""
        state = {**helpers.numpy_state_dict(config, seed=seed, dtype="float32"), **(changes or {})}
        # The arrays are copied, so that they own their memory.
        state = {name: np.array(array) for name, array in state.items() if array is not None}
        gpu = {name: array for name, array in state.items() if name not in on_host}
        self.held = self.trainer.packed(gpu) if packed else self.trainer.state(gpu)
        self.sender.send(
            {name: self.held.get(name, array) for name, array in state.items()}, version
        )

    def send_pairs(self, pairs: list[tuple[str, bool]], version: int) -> None:
        """(name, whether it is on the GPU)."""
        small = np.zeros((3, 4), np.float32)
        self.sender.send(
            [(name, self.trainer.tensor(small) if on_gpu else small) for name, on_gpu in pairs],
            version,
        )

    def environment(self, **settings: str) -> None:
        os.environ.update(settings)

    def patience(self, seconds: float) -> None:
        trainers.LENT_S = seconds


def _serve(
    pipe: Connection, library: str, ordinal: int, settings: dict[str, str], options: dict[str, Any]
) -> None:
    os.environ.update(settings)
    trainer = _Trainer(pipe, library, ordinal, options)
    while (command := pipe.recv()) is not None:
        name, args, keywords = command
        try:
            pipe.send((ENDS, getattr(trainer, name)(*args, **keywords), None))
        except Exception as error:  # noqa: BLE001 (told to the test)
            traceback.print_exc()
            notes = "".join(f"; {note}" for note in getattr(error, "__notes__", ()))
            pipe.send((ENDS, None, f"{type(error).__name__}: {error}{notes}"))


def read(end: Connection, name: str, nonce: str, number: int) -> None:
    """A worker that reads until it is told to close; returns its errors."""
    reader = MappedSegment(FOLDER / name, nonce)
    try:
        with reader.reading(number, f"bucket {number} of {reader.path}") as is_lent_still:
            end.send("reads")
            end.recv()
            is_lent_still()
        end.send("has read")
    except rm.errors.Error as error:
        end.send(f"{type(error).__name__}: {error}")
    finally:
        reader.close()


class Remote:
    def __init__(
        self,
        library: Path,
        ordinal: int = 0,
        settings: dict[str, str] | None = None,
        **options: Any,
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, end = context.Pipe()
        made = (end, str(library), ordinal, settings or {}, options)
        self.process = context.Process(target=_serve, args=made, daemon=True)
        self.process.start()
        end.close()
        self.segments: set[str] = set()  # files that its blocks were in
        self._is_asking = False

    # ------------------------------------------------------------------------------------- by hand
    def begin(self, command: str, *args: Any, **keywords: Any) -> None:
        self.pipe.send((command, args, keywords))
        self._is_asking = True

    def next(self) -> Asked | None:
        """The next of vLLM's calls; None at the command's end, which `result` gives."""
        assert self.pipe.poll(WAIT_S), "the trainer says nothing"
        told, *self._told = self.pipe.recv()
        if told == ENDS:
            self._is_asking = False
            return None
        asked = Asked(self._told[0], json.loads(self._told[1]), self._told[2])
        self.segments |= {
            info["segment"]
            for info in asked.args
            if asked.method == "update_weights" and info["segment"]
        }
        return asked

    def answer(self, error: str | None = None) -> None:
        self.pipe.send(error)

    def result(self) -> Any:
        answer, error = self._told
        if error is not None:
            raise RuntimeError(error)
        return answer

    def until(self, client: Any, method: str) -> Asked:
        """Calls are the client's up to one of this name, which it has not had."""
        while (asked := self.next()) is not None and asked.method != method:
            self.pass_on(client, asked)
        assert asked is not None, self._told
        return asked

    def pass_on(self, client: Any, asked: Asked) -> None:
        try:
            getattr(client, asked.method)(*asked.args)
        except Exception as error:  # noqa: BLE001 (the trainer's)
            self.answer(str(error) or type(error).__name__)
        else:
            self.answer()

    # ------------------------------------------------------------------------------ whole commands
    def send(self, client: Any, *args: Any, command: str = "send", **keywords: Any) -> None:
        self.begin(command, *args, **keywords)
        while (asked := self.next()) is not None:
            self.pass_on(client, asked)
        self.result()

    def do(self, command: str, *args: Any, **keywords: Any) -> Any:
        self.begin(command, *args, **keywords)
        assert self.next() is None
        return self.result()

    def kill(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(WAIT_S)

    def finish(self) -> None:
        """Expects exit status 0: the simulated device has detected no fault."""
        if self.process.is_alive() and self._is_asking:  # a test has ended in the middle
            self.kill()
        elif self.process.is_alive():
            self.pipe.send(None)
        self.process.join(WAIT_S)
        left = [FOLDER / name for name in self.segments if (FOLDER / name).exists()]
        for path in left:
            # that the next sender takes away a minute later, where this one was killed
            path.unlink()
        assert (self.process.exitcode, bool(left)) in (
            (0, False),
            (-signal.SIGKILL, False),
            (-signal.SIGKILL, True),
        )

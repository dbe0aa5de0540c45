"""Shared by test_vllm_weights.py and test_vllm_sender.py: workers that serve one small model, a
sender, and the version that should serve."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import vllm_ranks as ranks
from helpers import numpy_state_dict, tiny_config

import rollmesh as rm
from rollmesh.errors import Error
from rollmesh.vllm.trainer import WeightSender
from rollmesh.weights.transport import segment

CONFIG, DTYPE = tiny_config(True), "bfloat16"
SHM = Path("/dev/shm")
LATE = "model.layers.1.mlp.experts.7.down_proj.weight"
State = dict[str, np.ndarray]


def state(version: int) -> State:
    """Neighbours differ in every weight."""
    return numpy_state_dict(CONFIG, version % 3, DTYPE)


def bits(version: int) -> bytes:
    """Returns the answers of a generator with the weights of a version."""
    return _bits(version % 3)


@cache
def _bits(version: int) -> bytes:
    with rm.Generator(
        rm.ModelSpec.from_hf(CONFIG), dtype=DTYPE, max_model_len=32, kv_cache_gib=0.002, threads=1
    ) as generator:
        generator.sync_weights(state(version))
        return b"".join(logits.tobytes() for logits in generator.logits(ranks.PROMPTS))


def left_behind() -> list[Path]:
    """Segments that this process has open, or no process. Other tests of the machine have
    theirs."""
    mine = {os.path.realpath(path) for path in Path("/proc/self/fd").iterdir()}
    return [
        path for path in SHM.glob(segment.PREFIX + "*") if str(path) in mine or not _is_owned(path)
    ]


def _is_owned(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return True
    try:
        return segment.is_locked(descriptor, segment.OWNER)
    finally:
        os.close(descriptor)


class Served:
    """Workers, a sender, and the version that should serve."""

    def __init__(self, client: Any):
        self.client, self.version = client, 0
        self.sender = WeightSender(client, block_bytes=30_000)
        self.push()

    def push(self) -> None:
        self.version += 1
        self.sender.send(state(self.version), self.version)
        self.hold()
        assert self.client.label == str(self.version)

    def hold(self) -> None:
        assert self.client.bits() == bits(self.version)
        assert self.client.rpc("weight_version") == [self.version] * len(
            self.client.rpc("weight_version")
        )

    def still_works(self) -> None:
        """Checks after a refusal that the old version serves and a good set is accepted."""
        self.hold()
        self.push()


def nan(x: np.ndarray) -> np.ndarray:
    y = x.copy()
    y.view(np.uint16)[-1, 3] = 0x7FC0
    return y


SPOILED: dict[str, tuple[Callable[[State], State], type[Error]]] = {
    "not finite": (lambda s: s | {LATE: nan(s[LATE])}, rm.NonFiniteError),
    "transposed": (lambda s: s | {LATE: s[LATE].T.copy()}, rm.ShapeError),
    "float32": (lambda s: s | {LATE: s[LATE].astype(np.float32)}, rm.DTypeError),
    "missing": (
        lambda s: {name: x for name, x in s.items() if name != LATE},
        rm.IncompleteSyncError,
    ),
    "unexpected": (lambda s: s | {LATE + "s": s[LATE]}, rm.UnexpectedKeyError),
    "twice": (
        lambda s: s | {"model.layers.1.mlp.experts.down_proj": np.stack([s[LATE]] * 8)},
        rm.DuplicateKeyError,
    ),
    "int8": (lambda s: s | {LATE: s[LATE].astype(np.int8)}, rm.DTypeError),
    "none": (lambda s: {}, rm.IncompleteSyncError),
}


@pytest.fixture(scope="module")
def alone() -> Iterator[Served]:
    client = ranks.Alone(CONFIG, DTYPE)
    yield Served(client)
    client.close()


@pytest.fixture(scope="module")
def two() -> Iterator[Served]:
    client = ranks.Processes(CONFIG, DTYPE, 2, f"test.{secrets.token_hex(8)}")
    yield Served(client)
    client.close()


@pytest.fixture(params=["alone", "two"])
def served(request: pytest.FixtureRequest) -> Served:
    served: Served = request.getfixturevalue(request.param)
    return served

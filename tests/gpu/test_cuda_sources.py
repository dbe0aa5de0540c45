"""Weights on GPUs: on a GPU other than the engine's, or from one GPU into ranks on several. On the
simulated devices of tests/gpu/simt, where a device can read another's memory only through a peer
copy, and work runs only when a thread waits. A tensor is written by a copy that its producer has
enqueued on a separate stream without waiting for it.

Oracle: the same weights from the host, by digest (of every stored value) and by logits. Bound:
equality.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cuda_device
import helpers
import numpy as np
import pytest
from gpu_trainer import Trainer

import rollmesh as rm
from rollmesh import _core
from rollmesh.runtime.devices import LIBRARY_SWITCH

DENSE, MOE = helpers.tiny_config(), helpers.tiny_config(moe=True)
PROMPTS = [[3, 1, 2, 9], [4] * 40]


@pytest.fixture(autouse=True)
def library(simt_library: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Several devices that cannot access each other: always the simulated ones."""
    monkeypatch.setenv(LIBRARY_SWITCH, str(simt_library))
    return simt_library


@pytest.fixture
def on_gpu(library: Path) -> Iterator[Callable[[int], Trainer]]:
    opened: list[Trainer] = []

    def one(ordinal: int) -> Trainer:
        opened.append(Trainer(library, ordinal))
        return opened[-1]

    yield one
    for trainer in opened:
        trainer.close()


def logits(generator: rm.Generator) -> list[bytes]:
    return [array.tobytes() for array in generator.logits(PROMPTS)]


def from_the_host(
    make: Callable[..., rm.Generator], config: helpers.Config, state: dict[str, np.ndarray]
) -> tuple[str, list[bytes]]:
    generator = make(config, "cpu")
    return generator.sync_weights(state, cast=True).digest, logits(generator)


# ------------------------------------------------------------------------------------ another GPU
@pytest.mark.parametrize("config", [DENSE, MOE], ids=["dense", "moe"])
@pytest.mark.parametrize("where", [0, 1, 3])
def test_tensors_of_any_gpu(
    make: Callable[..., rm.Generator],
    on_gpu: Callable[[int], Trainer],
    config: helpers.Config,
    where: int,
) -> None:
    state = helpers.numpy_state_dict(config, seed=1, dtype="float32")
    gpu = make(config)
    digest = gpu.sync_weights(on_gpu(where).state(state), cast=True).digest
    assert (digest, logits(gpu)) == from_the_host(make, config, state)


def test_tensors_of_several_gpus_and_of_the_host(
    make: Callable[..., rm.Generator], on_gpu: Callable[[int], Trainer]
) -> None:
    state = helpers.numpy_state_dict(MOE, seed=1, dtype="float32")
    trainers = [on_gpu(ordinal) for ordinal in range(3)]
    mixed = {
        n: trainers[i % 4].tensor(array) if i % 4 < 3 else array
        for i, (n, array) in enumerate(state.items())
    }
    gpu = make(MOE, "cuda:1")
    digest = gpu.sync_weights(mixed, cast=True).digest
    assert (digest, logits(gpu)) == from_the_host(make, MOE, state)


@pytest.mark.parametrize("mesh", [rm.Mesh(dp=2), rm.Mesh(tp=2), rm.Mesh(dp=2, ep=2)], ids=str)
@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_one_gpus_tensors_into_ranks(
    make: Callable[..., rm.Generator], on_gpu: Callable[[int], Trainer], mesh: rm.Mesh, device: str
) -> None:
    """Each rank has a GPU, one of them the tensors' GPU; or all ranks are on another GPU."""
    state = helpers.numpy_state_dict(MOE, seed=1, dtype="float32")
    gpu = make(MOE, device, mesh=mesh)
    digest = gpu.sync_weights(on_gpu(1).state(state), cast=True).digest
    assert (digest, logits(gpu)) == from_the_host(make, MOE, state)


def spread(array: np.ndarray, how: str) -> np.ndarray:
    """Returns a view with the values of `array` and another layout in the memory of its base."""
    rows, cols = array.shape
    if how == "transposed":
        return np.ascontiguousarray(array.T).T
    if how == "backwards":
        return np.ascontiguousarray(array[::-1, ::-1])[::-1, ::-1]
    if how == "columns of a wide one":
        base = np.full((rows, 64 * cols), np.nan, array.dtype)
        view = base[:, cols : 2 * cols]
    elif how == "rows of a tall one":
        base = np.full((cols, 64 * rows), np.nan, array.dtype)
        view = base[:, rows : 2 * rows].T
    else:
        base = np.full((3 * rows, 2 * cols), np.nan, array.dtype)
        view = base[1::3, 1::2]
    view[...] = array
    return view


@pytest.mark.parametrize(
    "how", ["transposed", "backwards", "columns of a wide one", "rows of a tall one", "every other"]
)
def test_strides_of_another_gpu(
    make: Callable[..., rm.Generator], on_gpu: Callable[[int], Trainer], how: str
) -> None:
    """The wide and the tall view spread a matrix over more bytes than are transferred at once."""
    state: dict[str, Any] = helpers.numpy_state_dict(DENSE, seed=1, dtype="float32")
    trainer, gpu = on_gpu(1), make()
    names = [name for name, array in state.items() if array.ndim == 2]
    mixed = {**state, **{name: trainer.tensor(spread(state[name], how)) for name in names}}
    digest = gpu.sync_weights(mixed, cast=True).digest
    assert (digest, logits(gpu)) == from_the_host(make, DENSE, state)


def test_more_than_the_staging_buffer_holds(
    make: Callable[..., rm.Generator], on_gpu: Callable[[int], Trainer]
) -> None:
    """A vocabulary's matrix of float64 goes through both halves alternately, and so do the tensors
    after it."""
    config = helpers.tiny_config(vocab_size=40_000)
    state = {
        name: value.astype(np.float64)
        for name, value in helpers.numpy_state_dict(config, seed=1, dtype="float32").items()
    }
    gpu = make(config)
    digest = gpu.sync_weights(on_gpu(2).state(state), cast=True).digest
    assert (digest, logits(gpu)) == from_the_host(make, config, state)


def test_values_of_another_gpu_that_are_refused(
    make: Callable[..., rm.Generator], on_gpu: Callable[[int], Trainer]
) -> None:
    state = helpers.numpy_state_dict(DENSE, seed=1, dtype="float32")
    gpu, name = make(), "model.layers.0.mlp.down_proj.weight"
    gpu.sync_weights(state, cast=True)
    before = logits(gpu)
    bad = state[name].copy()
    bad[5, 7] = np.nan
    with pytest.raises(
        rm.NonFiniteError, match=r"down_proj\.weight: element \[5, 7\] is not finite"
    ):
        gpu.sync_weights({**state, name: on_gpu(1).tensor(bad)}, cast=True)
    assert logits(gpu) == before


@pytest.mark.parametrize(
    "how, kind, message",
    [
        (
            "a GPU that is not there",
            rm.UnsupportedTensorError,
            r"norm\.weight: .*got one on cuda:63: .* one of the driver's 8 devices, got cuda:63",
        ),
        (
            "no GPU's number",
            rm.UnsupportedTensorError,
            r"norm\.weight: .*got one on cuda:64: expected one of the first 64 GPUs",
        ),
        (
            "a number below 0",
            rm.UnsupportedTensorError,
            r"norm\.weight: .*got a __dlpack_device__ with an invalid number of a CUDA device",
        ),
        (
            "memory of another",
            rm.UnsupportedTensorError,
            r"norm\.weight: the tensor's address 0x[0-9a-f]+ is not in the memory of cuda:2",
        ),
        (
            "an odd address",
            rm.LayoutError,
            r"norm\.weight: the tensor's address 0x[0-9a-f]+ is not a multiple of the 4 bytes",
        ),
        (
            "spread too far",
            rm.LayoutError,
            r"strides \[\d+, 2\] spread \d+ elements on cuda:1 over \d+ bytes; send "
            r"\.contiguous\(\)",
        ),
    ],
)
def test_tensors_of_another_gpu_that_are_refused(
    make: Callable[..., rm.Generator],
    on_gpu: Callable[[int], Trainer],
    how: str,
    kind: type[Exception],
    message: str,
) -> None:
    gpu, trainer = make(), on_gpu(1)
    state: dict[str, Any] = dict(helpers.numpy_state_dict(DENSE, seed=1, dtype="float32"))
    gpu.sync_weights(state, cast=True)
    before = logits(gpu)
    name = "model.norm.weight"
    tensor = trainer.tensor(state[name])
    made = tensor._managed.tensor
    numbers = {"a GPU that is not there": 63, "no GPU's number": 64, "a number below 0": -1}
    if how in numbers:
        made.device_id, tensor._said = numbers[how], (2, numbers[how])
    elif how == "memory of another":
        tensor = on_gpu(2).tensor(state[name])
        tensor._managed.tensor.data = made.data
    elif how == "an odd address":
        made.data += 2
    else:
        name = "model.embed_tokens.weight"
        rows, cols = state[name].shape
        base = np.zeros((rows, 256 * cols), np.float32)
        tensor = trainer.tensor(base[:, : 2 * cols : 2])
    with pytest.raises(kind, match=message):
        gpu.sync_weights({**state, name: tensor}, cast=True)
    assert logits(gpu) == before


def test_a_gpu_that_fails_while_its_tensors_are_read(
    make: Callable[..., rm.Generator],
    on_gpu: Callable[[int], Trainer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The failing GPU loses its tensors, but the engine on the other GPU continues."""
    state = helpers.numpy_state_dict(DENSE, seed=1, dtype="float32")
    gpu, trainer = make(), on_gpu(1)
    gpu.sync_weights(state, cast=True)
    before = logits(gpu)
    tensors = trainer.state(state)
    with trainer.current():
        monkeypatch.setenv("ROLLMESH_SIMT_FAULT", "1")
        failing = cuda_device.Device(cuda_device.Library(Path(trainer.loaded._name)), 1)
        monkeypatch.delenv("ROLLMESH_SIMT_FAULT")
        block = failing.alloc(64)
        failing.embed(block, block, block, 1, 1)
        assert failing.wait() == cuda_device.FAULT
    with pytest.raises(rm.DeviceError, match=r"cuda:1: .*illegal"):
        gpu.sync_weights(tensors, cast=True)
    assert logits(gpu) == before
    gpu.sync_weights(state, cast=True)
    with trainer.current():
        failing.give_back()
        failing.close()


def test_close_gives_other_gpus_back(
    make: Callable[..., rm.Generator], on_gpu: Callable[[int], Trainer], library: Path
) -> None:
    trainer, blocks = on_gpu(1), _core.memory_blocks()
    before = [_core.cuda_available(str(library), ordinal) for ordinal in range(2)]
    tensors = trainer.state(helpers.numpy_state_dict(DENSE, seed=1))
    held = before[1] - _core.cuda_available(str(library), 1)
    gpu = make()
    gpu.sync_weights(tensors, cast=True)
    gpu.close()
    assert [_core.cuda_available(str(library), ordinal) for ordinal in range(2)] == [
        before[0],
        before[1] - held,
    ]
    assert _core.memory_blocks() == blocks

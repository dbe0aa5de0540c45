"""rollmesh.torch on CUDA tensors. This machine's torch has no CUDA, so on the simulated device
(tests/gpu/simt) a stand-in tensor says what torch's would, and goes through the one place where
tensors meet ops (rollmesh/torch/arrays.py). With a GPU and a torch that sees it the whole of
rollmesh.torch is held to the CPU's.

Input: the batches of dispatch_cases.py. Oracle: the same on the CPU. Bound: zero differing bits, of
float64 gradients 1e-12.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cuda_device
import dlpack
import numpy as np
import ops_cases
import pytest
import torch
from dispatch_cases import BACKENDS, EXPERTS, SIZES, Batch, random_rows, runs, same, together, train
from gpu_trainer import OnGpu, Trainer

from rollmesh import _core, errors, ops
from rollmesh.torch import arrays, token_dispatchers
from rollmesh.torch.dispatch import _on_one_device


# ------------------------------------------------------------------------------- the narrow place
class Tensor(OnGpu):
    """As much of a torch.Tensor on cuda:0 as the narrow place looks at."""

    is_cuda = True
    device = torch.device("cuda", 0)

    def detach(self) -> Tensor:
        return self


@pytest.fixture
def trainer(simt_library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trainer]:
    """torch, as it were: its current stream is the trainer's. It takes arrays without a word about
    streams, so that only the op's own turn is between the two."""
    monkeypatch.setenv("ROLLMESH_CUDA_LIBRARY", str(simt_library))
    free = _core.cuda_available(str(simt_library), 0)
    made = Trainer(simt_library, 0)
    stream = made.device.table.stream
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=stream)
    )

    def from_dlpack(array: Any) -> Any:
        assert array.__dlpack_device__() == (2, 0)
        array.__dlpack__(stream=-1, max_version=(1, 0))  # given back at once: the array is kept
        return SimpleNamespace(dtype=getattr(torch, array.dtype), array=array)

    monkeypatch.setattr(arrays, "from_dlpack", from_dlpack)
    yield made
    made.close()
    ops.release_devices()
    assert _core.cuda_available(str(simt_library), 0) == free
    assert dlpack.alive == 0


@pytest.mark.parametrize("dtype", ops_cases.DTYPES)
def test_a_sum_on_torchs_stream(trainer: Trainer, dtype: str, rng: np.random.Generator) -> None:
    """Its tensors are still being written when it is asked for, they are written again behind it,
    and nobody has waited."""
    rows, k, width = 5, 3, 40
    choices, gates = (
        ops_cases.normal(rng, (rows * k, width), dtype),
        rng.standard_normal((rows, k), np.float32),
    )
    ids = np.array([rng.permutation(8)[:k] for _ in range(rows)], np.int32)
    place = rng.permutation(rows * k).astype(np.int32).reshape(rows, k)
    kind = (dlpack.BFLOAT, 16, 1) if dtype == "bfloat16" else None
    there: Any = Tensor(trainer, choices, dtype=kind)
    there.dtype = getattr(torch, dtype)
    its_gates: Any = Tensor(trainer, gates)
    made: Any = arrays.combine(there, place, ids, its_gates, 8)
    with trainer.current():
        assert trainer.device.poll() == cuda_device.BUSY
        trainer.device.zero_2d(there._managed.tensor.data, choices.nbytes, choices.nbytes, 1)
    assert made.dtype == getattr(torch, dtype)
    assert (made.array.numpy() == ops.combine(choices, place, ids, gates, 8)).all()


def test_tensors_of_the_cpu_share_their_memory(rng: np.random.Generator) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int32):
        tensor = torch.from_numpy(rng.standard_normal((3, 4))).to(dtype)
        array = arrays.array_of(tensor.requires_grad_(dtype.is_floating_point))
        assert array.ctypes.data == tensor.data_ptr()
        assert arrays.tensor_of(array, dtype).data_ptr() == tensor.data_ptr()
        assert same(arrays.tensor_of(array, dtype), tensor.detach())
    with arrays.in_turn(tensor):
        assert ops.gather_rows(array.view(np.float32), np.zeros(1, np.int32)).shape == (1, 4)


def test_tensors_of_two_devices() -> None:
    one, other = torch.empty(1), torch.empty(1, device="meta")
    _on_one_device("ids", one, "x", one)
    with pytest.raises(
        errors.UnsupportedTensorError, match="tensors on one device, got ids on meta and x on cpu"
    ):
        _on_one_device("ids", other, "x", one)


# ------------------------------------------------------------------------------------- with a GPU
@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> str:
    if not torch.cuda.is_available():
        cuda_device.no_gpu("torch sees no GPU here")
    monkeypatch.delenv("ROLLMESH_CUDA_LIBRARY", raising=False)
    return "cuda:0"


def on(batch: Batch, device: str) -> Batch:
    return Batch(*(values.to(device) for values in batch))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    "ranks, backend", [(1, "disabled"), *((2, backend) for backend in BACKENDS)]
)
def test_dispatch_and_its_gradients_on_a_gpu(
    cuda: str, rng: np.random.Generator, ranks: int, backend: str, dtype: torch.dtype
) -> None:
    """Sums of the contract have the CPU's bits. What torch computes (tanh, the gradient of gates)
    is rounded otherwise on a GPU."""
    batch, weights = Batch.random(rng, 17, dtype), random_rows(rng, EXPERTS, dtype)
    ends = token_dispatchers(ranks, backend=backend, **SIZES)
    cut = runs(17, ranks, backend)
    try:
        for way in (forward, backward):
            of_cpu = together(ends, lambda r, end: way(end, batch.on(cut[r])))  # noqa: B023 (called here)
            of_gpu = together(ends, lambda r, end: way(end, on(batch.on(cut[r]), cuda)))  # noqa: B023
            for mine, its in zip(of_cpu, of_gpu):
                assert its.device.type == "cuda"
                assert same(mine, its.cpu()), way.__name__
        bound = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.1}[dtype]
        trained = [
            together(
                ends,
                lambda r, end: train(end, on(batch.on(cut[r]), device), weights.to(device)),  # noqa: B023
            )
            for device in ("cpu", cuda)
        ]
        for mine, its in zip(*trained):
            for a, b in zip(mine, its):
                torch.testing.assert_close(b.cpu(), a, rtol=bound, atol=bound)
    finally:
        for end in ends:
            end.close()


def forward(end: Any, batch: Batch) -> torch.Tensor:
    sent = end.dispatch(batch.x, batch.ids)
    return end.combine(sent.rows, batch.gates, sent.plan)


def backward(end: Any, batch: Batch) -> torch.Tensor:
    """Of x: what comes back by the tree. The rows go through as they are, so that torch computes
    nothing."""
    x = batch.x.clone().requires_grad_()
    end.combine(
        end.dispatch(x, batch.ids).rows,
        torch.ones_like(batch.gates),
        end.dispatch(batch.x, batch.ids).plan,
    ).backward(batch.pull)
    assert x.grad is not None
    return x.grad

"""rollmesh.torch on CUDA tensors. This machine's torch has no CUDA, so on the simulated device
(tests/gpu/simt) a stand-in tensor has the attributes of torch's tensor and passes through
rollmesh/torch/arrays.py, the only place where tensors reach ops.

Input: random rows. Oracle: the same op on the CPU. Bound: zero differing bits."""

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
from gpu_trainer import OnGpu, Trainer

import rollmesh.torch
from rollmesh import _core, errors, ops
from rollmesh.torch import arrays


class Tensor(OnGpu):
    """The attributes of a torch.Tensor on cuda:0 that rollmesh.torch.arrays reads."""

    is_cuda = True
    device = torch.device("cuda", 0)

    def detach(self) -> Tensor:
        return self


@pytest.fixture
def trainer(simt_library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trainer]:
    """A stand-in for torch: its current stream is the trainer's. It exports arrays without
    synchronizing streams, so that only the op's own ordering protects them."""
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
    """The op is called while its tensors are still being written, and they are overwritten after
    it, without a wait."""
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
    with arrays.in_turn(there):
        out = ops.combine(arrays.array_of(there), place, ids, arrays.array_of(its_gates), 8)
    made: Any = arrays.tensor_of(out)
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
        assert arrays.tensor_of(array).data_ptr() == tensor.data_ptr()
        assert torch.equal(arrays.tensor_of(array), tensor.detach())
    with arrays.in_turn(tensor):
        assert ops.gather_rows(array.view(np.float32), np.zeros(1, np.int32)).shape == (1, 4)


@pytest.mark.parametrize(
    "name", ["token_dispatcher", "token_dispatchers", "TokenDispatcher", "Dispatched"]
)
def test_a_removed_dispatcher_names_what_to_use(name: str) -> None:
    with pytest.raises(errors.ConfigError, match=r"torch.distributed.all_to_all_single"):
        getattr(rollmesh.torch, name)(2, num_experts=4)

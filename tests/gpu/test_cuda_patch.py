"""rollmesh.torch.patch with its ops on a CUDA device. This machine's torch has no CUDA, so on the
simulated device (tests/gpu/simt) the model's tensors stay on the CPU. rollmesh/torch/arrays.py, the
only place where tensors reach ops, copies them to the device and, when an op's turn ends, back.
With a GPU and a torch that supports it, the model itself is on the GPU.

Input: the models of test_torch_patch.py. Oracle: the same model on the CPU. Bound: 0 differing bits
of logprobs, entropies, logits and experts; 1e-5 of a gradient's norm."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cuda_device
import numpy as np
import pytest
import torch
from marks import full
from test_torch_patch import DENSE, MOE, model_of, worst
from torch import Tensor

import rollmesh as rm
from rollmesh import ops
from rollmesh.torch import arrays, functions, packing, sequences
from rollmesh.torch.functions import delta

IDS = torch.tensor([[5, 9, 2, 7, 1, 3], [4, 4, 8, 6, 0, 0], [0, 3, 1, 2, 9, 9]])
MASK = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1]])


class Place:
    """Replaces arrays.py: makes device copies of a turn's tensors, and copies them back when the
    turn ends."""

    def __init__(self) -> None:
        self.there: list[tuple[Any, Tensor]] = []
        self.turns = 0

    def array_of(self, tensor: Tensor) -> Any:
        plain = tensor.detach()
        array = (
            (plain.view(torch.uint16) if plain.dtype == torch.bfloat16 else plain)
            .contiguous()
            .numpy()
        )
        if plain.dtype == torch.int32 and array.ndim == 1:
            return array  # indices may stay on the host
        made = ops.to_device(array, "cuda:0")
        if plain.is_contiguous():
            self.there.append((made, plain))
        return made

    def tensor_of(self, array: Any, dtype: torch.dtype | None = None) -> Tensor:
        made = torch.from_numpy(
            np.array(array.numpy() if isinstance(array, ops.DeviceArray) else array)
        )
        dtype = dtype or (torch.bfloat16 if made.dtype == torch.uint16 else made.dtype)
        return made if made.dtype == dtype else made.view(dtype)

    def empty_array(self, shape: tuple[int, ...], like: Tensor) -> Any:
        return ops.to_device(
            np.zeros(shape, np.uint16 if like.dtype == torch.bfloat16 else np.float32), "cuda:0"
        )

    @contextmanager
    def in_turn(self, tensor: Tensor) -> Iterator[None]:
        yield
        self.turns += 1
        for array, plain in self.there:
            # Written without torch's knowledge, like the output of an op.
            plain.data.copy_(self.tensor_of(array, plain.dtype))
        self.there.clear()


@pytest.fixture
def place(simt_library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setenv("ROLLMESH_CUDA_LIBRARY", str(simt_library))
    made = Place()
    modules = [
        importlib.import_module(f"rollmesh.torch.functions.{name}")
        for name in ("attention", "common", "delta", "dense", "logits", "moe")
    ]
    for module in (*modules, packing, arrays):
        for name in ("array_of", "tensor_of", "empty_array", "in_turn"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, getattr(made, name))
        if hasattr(module, "weight_array"):
            monkeypatch.setattr(module, "weight_array", made.array_of)
    for module in (sequences, delta):
        monkeypatch.setattr(module, "device_name", lambda tensor: "cuda:0")
    yield made
    made.there.clear()
    ops.release_devices()


def results(model: Any, device: str = "cpu") -> tuple[list[Tensor], dict[str, Tensor]]:
    ids, mask = IDS.to(device), MASK.to(device)
    bits = []
    for temperature in (1.0, 0.7):
        got = rm.torch.logprobs(
            model, ids, mask, temperature=temperature, entropy=True, routed_experts=True
        )
        bits += [got.logprobs, *([] if got.routed_experts is None else [got.routed_experts])]
    model.zero_grad()
    (got.logprobs.sum() + 0.1 * got.entropy.sum()).backward()  # type: ignore[union-attr]
    bits.append(model(ids, attention_mask=mask).logits)
    return [tensor.detach().cpu() for tensor in bits], {
        name: p.grad.cpu() for name, p in model.named_parameters()
    }


@pytest.mark.parametrize("dtype", ["float32", full("bfloat16")])
@pytest.mark.parametrize("case", [full(DENSE), MOE], ids=["dense", "moe"])
def test_ops_on_a_simulated_device_give_the_cpus_bits(
    place: Place, monkeypatch: pytest.MonkeyPatch, case: Any, dtype: str
) -> None:
    model = model_of(case, dtype)
    rm.torch.unpatch(model)
    rm.torch.patch(model, dtype=dtype, threads=1, max_model_len=64)
    there, its = results(model)
    assert place.turns > 10
    monkeypatch.undo()
    here, mine = results(
        rm.torch.patch(
            rm.torch.unpatch(copy.deepcopy(model)), dtype=dtype, threads=1, max_model_len=64
        )
    )
    assert all((a == b).all() for a, b in zip(there, here, strict=True))
    assert worst(its, mine) < 1e-5


def test_a_delta_net_on_a_simulated_device(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    heads, rows = functions.DeltaHeads(1, 2, 8, 20, 1e-6), sequences.Sequences(np.array([1, 12]))
    shapes = [(13, sum(heads.widths)), (sum(heads.widths[:3]), 1, 4), (2,), (2,), (20,)]
    given = [torch.randn(shape) for shape in shapes]
    there = functions.delta_net(*given, rows, heads, how={"isa": None, "threads": 1})
    assert place.turns == 1
    monkeypatch.undo()
    assert torch.equal(there, functions.delta_net(*given, rows, heads))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", [DENSE, MOE], ids=["dense", "moe"])
def test_a_model_on_a_gpu_gives_the_cpus_bits(
    monkeypatch: pytest.MonkeyPatch, case: Any, dtype: str
) -> None:
    if not torch.cuda.is_available():
        cuda_device.no_gpu("torch sees no GPU here")
    monkeypatch.delenv("ROLLMESH_CUDA_LIBRARY", raising=False)
    model = model_of(case, dtype)
    here, mine = results(model)
    moved = rm.torch.patch(rm.torch.unpatch(copy.deepcopy(model)).cuda(), dtype=dtype)
    there, its = results(moved, "cuda:0")
    assert all((a == b).all() for a, b in zip(there, here, strict=True))
    assert worst(its, mine) < (1e-3 if dtype == "float32" else 0.1)

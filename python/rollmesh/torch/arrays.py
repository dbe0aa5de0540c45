"""Tensors as rollmesh.ops takes them, and what it gives as tensors: the one place where torch and ops meet. Nothing is copied.

A CUDA tensor goes through DLPack, on torch's current stream of its device: an op comes after what that stream has, and what torch puts
there later comes after the op, so that torch's allocator may hand a tensor's memory on as soon as it is dropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from rollmesh import ops


def array_of(tensor: Tensor) -> Any:
    """A contiguous tensor's memory: on the CPU a NumPy array, bfloat16 as words; on a GPU the tensor, which ops take by DLPack."""
    plain = tensor.detach()
    if plain.is_cuda:
        return plain
    return (plain.view(torch.uint16) if plain.dtype == torch.bfloat16 else plain).numpy()


def tensor_of(array: Any, dtype: torch.dtype) -> Tensor:
    """An op's output, which the tensor keeps alive."""
    made: Tensor = from_dlpack(array) if isinstance(array, ops.DeviceArray) else torch.from_numpy(array)
    return made if made.dtype == dtype else made.view(dtype)


@contextmanager
def in_turn(tensor: Tensor) -> Iterator[None]:
    """Ops inside take their turn on the current stream of the tensor's device; of the CPU nothing."""
    if not tensor.is_cuda:
        yield
        return
    with ops.on_stream(torch.cuda.current_stream(tensor.device).cuda_stream, f"cuda:{tensor.device.index}"):
        yield


def combine(choices: Tensor, place: NDArray[Any], ids: NDArray[Any], gates: Tensor, num_experts: int) -> Tensor:
    """ops.combine of contiguous tensors of one device; place and ids are the host's in any case, so that nothing waits for them."""
    with in_turn(choices):
        return tensor_of(ops.combine(array_of(choices), place, ids, array_of(gates), num_experts), choices.dtype)

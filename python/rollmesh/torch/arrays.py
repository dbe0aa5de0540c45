"""Tensors as arguments of rollmesh.ops, and its outputs as tensors. Nothing is copied.

A CUDA tensor goes through DLPack, and ops are ordered with torch's current stream of its device. So torch's allocator may reuse a
tensor's memory as soon as it is freed.
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
    """Ops inside are ordered with the current stream of the tensor's device; on the CPU it does nothing."""
    if not tensor.is_cuda:
        yield
        return
    with ops.on_stream(torch.cuda.current_stream(tensor.device).cuda_stream, f"cuda:{tensor.device.index}"):
        yield


def combine(choices: Tensor, place: NDArray[Any], ids: NDArray[Any], gates: Tensor, num_experts: int) -> Tensor:
    """ops.combine of contiguous tensors of one device; place and ids are on the host, so that nothing waits for them."""
    with in_turn(choices):
        return tensor_of(ops.combine(array_of(choices), place, ids, array_of(gates), num_experts), choices.dtype)

"""Passes tensors to rollmesh.ops and returns its outputs as tensors, without copies.

A CUDA tensor goes through DLPack, and ops are ordered with torch's current stream of its device. So
torch's allocator may reuse a tensor's memory as soon as it is freed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from rollmesh import ops
from rollmesh.errors import DTypeError, NumericsError, RequestError, UnsupportedTensorError
from rollmesh.runtime.arguments import exportable

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def array_of(tensor: Tensor) -> Any:
    """A contiguous tensor's memory: on the CPU a NumPy array, bfloat16 as words; on a GPU the
    tensor, which ops take by DLPack."""
    plain = tensor.detach()
    if plain.is_cuda:
        return plain
    return (plain.view(torch.uint16) if plain.dtype == torch.bfloat16 else plain).numpy()


def weight_array(weight: Tensor) -> Any:
    """array_of a weight, read-only. By DLPack on the CPU too: Tensor.numpy() would forbid FSDP to
    free the memory of gathered weights."""
    plain = weight.detach().contiguous()
    if plain.is_cuda:
        return plain
    return np.from_dlpack(plain.view(torch.uint16) if plain.dtype == torch.bfloat16 else plain)


def device_name(tensor: Tensor) -> str:
    """Returns the device as rollmesh's options spell it: "cpu" or "cuda:N"."""
    return f"cuda:{tensor.device.index}" if tensor.is_cuda else "cpu"


def tensor_of(array: Any) -> Tensor:
    """An op's output, which the tensor keeps alive; words are bfloat16."""
    made: Tensor = (
        from_dlpack(array) if isinstance(array, ops.DeviceArray) else torch.from_numpy(array)
    )
    return made.view(torch.bfloat16) if made.dtype == torch.uint16 else made


def host_of(array: Any) -> NDArray[Any]:
    """An op's small output, or a tensor of flags, on the host; waits for it."""
    if isinstance(array, Tensor):
        return array.cpu().numpy()
    return array.numpy() if isinstance(array, ops.DeviceArray) else array


def check_flags(what: str, flags: Any) -> None:
    """Raises NumericsError if an op flagged a row."""
    if (bad := host_of(flags)).any():
        raise NumericsError(f"{what} of row {int(bad.argmax())} of {len(bad)} are not finite")


def check_tokens(name: str, ids: Tensor, low: int, vocab: int, also: str = "") -> None:
    """Raises RequestError if a token is below `low`, or not in the vocabulary."""
    check_tensor(name, ids)
    if ids.dtype not in INTEGERS:
        raise DTypeError(f"{name}: expected integers, got {ids.dtype}")
    if not ids.numel():
        return
    least, most = int(ids.min()), int(ids.max())
    if least < low or most >= vocab:
        raise RequestError(f"{name}: expected tokens in [0, {vocab}){also}, got {least} to {most}")


def check_tensor(name: str, x: Any) -> Tensor:
    """Returns a torch tensor without its graph. Raises UnsupportedTensorError unless its memory is
    dense."""
    if not isinstance(x, Tensor):
        raise UnsupportedTensorError(f"{name}: expected a torch tensor, got a {type(x).__name__}")
    return exportable(name, x)  # type: ignore[no-any-return]


def call_op(op: Callable[..., Any], *args: Any, **options: Any) -> Tensor:
    """Calls an op of rollmesh.ops with tensors, and returns its output as a tensor."""
    with in_turn(args[0]):
        arrays = (array_of(x) if isinstance(x, Tensor) else x for x in args)
        return tensor_of(op(*arrays, **options))


@contextmanager
def in_turn(tensor: Tensor) -> Iterator[None]:
    """Ops inside are ordered with the current stream of the tensor's device; on the CPU it does
    nothing."""
    if not tensor.is_cuda:
        yield
        return
    stream = torch.cuda.current_stream(tensor.device).cuda_stream
    with ops.on_stream(stream, device_name(tensor)):
        yield

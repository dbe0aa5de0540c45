"""Weights of a trainer in the kernels' layout, converted to the dtype of the forward pass as a
weight sync converts them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollmesh.errors import DTypeError, NonFiniteError, ShapeError, UnsupportedTensorError
from rollmesh.ops.arguments import numpy_dtype, round_up
from rollmesh.ops.devices import op_over, zeros_in
from rollmesh.torch.arrays import check_tensor, host_of, in_turn, weight_array

SOURCES = (torch.bfloat16, torch.float32, torch.float16, torch.float64)
PACKED, GATE, UP = 1, 2, 3  # rm_layout of kernels.h
Piece = tuple[Tensor, int, int]  # a matrix [n, k], its layout, and its first row


def name_of(dtype: torch.dtype) -> str:
    """Returns the name of a dtype in rollmesh.ops. DTypeError unless it is bfloat16 or float32."""
    if dtype not in (torch.bfloat16, torch.float32):
        raise DTypeError(f"expected torch.bfloat16 or torch.float32, got {dtype}")
    return str(dtype).removeprefix("torch.")


def check_weight(name: str, weight: Any, dims: int = 2) -> Tensor:
    """A weight without its graph."""
    if hasattr(weight, "to_local"):
        raise UnsupportedTensorError(
            f"{name}: expected a whole tensor, got a {type(weight).__name__}; shard the decoder "
            "layers or the model "
            "(fully_shard), whose forward pass gathers their weights"
        )
    plain = check_tensor(name, weight)
    if plain.dtype not in SOURCES:
        raise DTypeError(
            f"{name}: expected one of {', '.join(map(str, SOURCES))}, got {plain.dtype}"
        )
    if plain.ndim != dims:
        raise ShapeError(f"{name}: expected {dims} dims, got {plain.ndim}")
    return plain


def pack(groups: Sequence[Sequence[Piece]], rows: int, dtype: torch.dtype, how: Any) -> Any:
    """Packed matrices of `rows` rows, one a group, each made of pieces; an array of one dim.
    NonFiniteError for a NaN or an infinity, also one that the conversion makes."""
    first = groups[0][0][0]
    k, kind = first.shape[1], name_of(dtype)
    size = round_up(rows, 16) * round_up(k, 32)
    with in_turn(first):
        op, _ = op_over(how["isa"], how["threads"], {"weight": weight_array(first)})
        out = zeros_in(op.op_device, (len(groups) * size,), numpy_dtype(kind))
        found = zeros_in(op.op_device, (3,), np.int64)
        for g, pieces in enumerate(groups):
            for weight, layout, row in pieces:
                source = {"weight": weight_array(weight)}
                (given,) = op_over(how["isa"], how["threads"], source)[1]
                op.run("pack", {
                    "weight": given, "layout": layout, "dst_row0": row, "index0": 0,
                    "dst_first": g * size, "dst": out, "found": found,
                })  # fmt: skip
                wrong = int(host_of(found)[1])
                if wrong >= 0:
                    at = [g, row + wrong // k, wrong % k][len(groups) == 1 :]
                    raise NonFiniteError(
                        f"weight: expected finite numbers in {kind}, got a NaN or an infinity at "
                        f"{at}"
                    )
    return out


def pack_rows(groups: Iterable[Sequence[Tensor]], dtype: torch.dtype, how: Any) -> Any:
    """One matrix for each group, which has the group's matrices [n, k] stacked, such as q, k and v.
    Several groups are for a grouped gemm."""
    stacked = []
    for weights in groups:
        starts = accumulate(map(len, weights), initial=0)
        pieces = zip(weights, starts, strict=False)
        stacked.append([(check_weight("weight", weight), PACKED, row) for weight, row in pieces])
    return pack(stacked, sum(map(len, weights)), dtype, how)


def pack_gate_up(pairs: Iterable[Sequence[Tensor]], dtype: torch.dtype, how: Any) -> Any:
    """One matrix for each pair of gate and up [n, k], as gemm_swiglu takes them."""
    interleaved = [
        ((check_weight("gate", gate), GATE, 0), (check_weight("up", up), UP, 0))
        for gate, up in pairs
    ]
    return pack(interleaved, 2 * round_up(len(interleaved[0][0][0]), 16), dtype, how)

"""Weights from torchstore, where TitanRL's trainer puts each version."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import torch
import torchstore
from torchstore.transport import TensorSlice

from rollmesh.errors import LayoutError
from rollmesh.generator import Shard
from rollmesh.weights.pieces import Piece

KEY = "model_state_dict"  # of PolicyTrainer.push_model_state_dict
AHEAD = 16  # tensors asked for at the same time


async def pull() -> dict[str, Any]:
    """The state dict in the store."""
    whole: dict[str, Any] = await torchstore.get_state_dict(KEY, direct_rdma=False)
    return whole


async def names() -> list[str]:
    """Lists the names of the stored tensors. torchstore raises RuntimeError or KeyError without
    any."""
    return list(await torchstore.get(f"{KEY}/MAPPING"))  # written last, so the tensors are there


async def pull_shards(shards: Mapping[str, Shard]) -> dict[str, Piece]:
    """By Generator.shard: the parts that a rank of several needs."""
    pieces: list[Piece] = []
    entries = list(shards.items())
    for start in range(0, len(entries), AHEAD):
        pieces += await asyncio.gather(
            *(_piece(*entry) for entry in entries[start : start + AHEAD])
        )
    return dict(zip(shards, pieces, strict=True))


async def _piece(name: str, shard: Shard) -> Piece:
    if 0 in shard.sizes:
        return Piece(torch.empty(shard.sizes), shard.shape, shard.offsets)
    box = TensorSlice(
        offsets=shard.offsets,
        coordinates=(),
        global_shape=shard.shape,
        local_shape=shard.sizes,
        mesh_shape=(),
    )
    tensor = await torchstore.get(f"{KEY}/{name}", tensor_slice_spec=box)
    if tuple(tensor.shape) != shard.sizes:
        raise LayoutError(
            f"{name}: expected {list(shard.sizes)} at {list(shard.offsets)} from torchstore, got "
            f"{list(tensor.shape)}"
        )
    return Piece(tensor, shard.shape, shard.offsets)

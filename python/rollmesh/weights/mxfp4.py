"""MXFP4 tensors of gpt-oss's checkpoints. `X_blocks`, uint8 [experts, rows, groups, 16], has two
numbers of 4 bits in each byte, the lower half first; `X_scales`, uint8 [experts, rows, groups], has
an exponent for each group of 32 numbers. Together they are the bfloat16 tensor X [experts,
32·groups, rows], without rounding: a number of 4 bits has at most 2 significant bits."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollmesh.errors import FormatError
from rollmesh.runtime.messages import plain

BLOCKS, SCALES = "_blocks", "_scales"
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BIAS, NOT_A_NUMBER = 127, 255  # of a scale


def joined(names: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Returns the names of a checkpoint's tensors, each with the names under which it is stored: a
    pair of blocks and scales is one tensor."""
    found: dict[str, tuple[str, ...]] = {}
    for name in names:
        base = name.removesuffix(BLOCKS).removesuffix(SCALES)
        parts = base + BLOCKS, base + SCALES
        if base != name and all(part in names for part in parts):
            if base in names:
                raise FormatError(f"{plain(base)}: expected it once, got {plain(parts[0])} too")
            found[base] = parts
        else:
            found[name] = (name,)
    return found


@cache
def _words() -> NDArray[np.uint16]:
    """Returns [256, 256, 2]: for each scale and byte, the bfloat16 words of the two numbers."""
    values = np.array([*E2M1, *(-value for value in E2M1)], np.float32)
    with np.errstate(over="ignore"):
        scaled = np.ldexp(values, np.arange(256)[:, None] - BIAS)
    scaled[NOT_A_NUMBER] = np.nan
    words = (scaled.view(np.uint32) >> 16).astype(np.uint16)
    byte = np.arange(256)
    return np.stack([words[:, byte & 15], words[:, byte >> 4]], -1)


def dequantized(name: str, blocks: Any, scales: Any) -> Any:
    """Returns the bfloat16 tensor of blocks and scales."""
    shapes = tuple(blocks.shape), tuple(scales.shape)
    dtypes = [str(part.dtype).removeprefix("torch.") for part in (blocks, scales)]
    fits = len(shapes[1]) == 3 and shapes[0] == (*shapes[1], 16)
    if not fits or dtypes != ["uint8"] * 2:
        raise FormatError(
            f"{plain(name)}: expected uint8 blocks of 16 bytes for each uint8 scale [experts, "
            f"rows, groups], got {dtypes[0]} {shapes[0]} and {dtypes[1]} {shapes[1]}"
        )
    blocks, scales = np.asarray(blocks), np.asarray(scales)
    experts, rows, groups = scales.shape
    out = np.empty((experts, rows, groups, 16, 2), np.uint16)
    for e in range(experts):  # indices take 8 bytes each
        out[e] = _words()[scales[e, ..., None], blocks[e]]
    words = out.reshape(experts, rows, groups * 32).transpose(0, 2, 1)
    if importlib.util.find_spec("torch"):
        import torch

        return torch.from_numpy(words.view(np.int16)).view(torch.bfloat16)
    import ml_dtypes

    return words.view(ml_dtypes.bfloat16)

"""rollmesh's attention as a backend of vLLM's own model runner. vLLM allocates the KV cache and its
blocks, and assigns the rows of a step to sequences. Two ops of the contract compute norms, RoPE,
the KV write and attention.

The ops use vLLM's KV tensor in place. For one layer it is [blocks, kv heads, block positions, 2 ·
head_dim], contiguous. A block has the bytes of one page of K and one page of V, so block b has its
K in page 2b and its V in page 2b + 1. The op's K cache is the tensor without its last page, its V
cache the tensor without its first page, and both are indexed by 2b. vLLM may zero or copy whole
blocks; with K and V in two halves of the tensor this would be wrong. head_dim must be a multiple of
32, since it is not padded.

q, k and v come straight from the projection; the op applies norms and RoPE.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    MultipleOf,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from rollmesh import ops
from rollmesh.errors import ConfigError, LayoutError
from rollmesh.torch.arrays import array_of, tensor_of

Array = NDArray[Any]
BLOCK_POSITIONS, HEAD_DIMS = 16, 32  # block_size and head_dim are multiples of these


@dataclass(frozen=True)
class Rope:
    """The rope table, shared by all layers. how: threads and isa of the ops."""

    cos: torch.Tensor  # float32 [positions, rotary_dim / 2]; [positions, 0] without rope
    sin: torch.Tensor
    options: Mapping[str, Any]  # of ops.qk_rope_kv: `how`, and the options of the norms
    softcap: float | None  # of scores
    how: Mapping[str, Any]


@dataclass
class PagedRows:
    """The arguments of the ops in one step, the same for all layers."""

    num_rows: int
    positions: NDArray[np.int32]  # [rows]
    slots: NDArray[np.int64]  # [rows] in the pages described above; −1: the KV is not stored
    seq_of_row: NDArray[np.int32]  # [rows]
    block_tables: NDArray[np.int32]  # [sequences, pages], the pages described above
    flags: NDArray[np.uint8]  # [rows] bit 0: a k or v was not finite; or-ed over the layers


class RollmeshMetadataBuilder(AttentionMetadataBuilder[PagedRows]):  # type: ignore[misc]
    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._block_positions = kv_cache_spec.block_size

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> PagedRows:
        common = common_attn_metadata
        starts = common.query_start_loc_cpu[: common.num_reqs + 1].numpy()
        lengths, rows = np.diff(starts), int(starts[-1])
        seq_of_row = np.repeat(np.arange(common.num_reqs, dtype=np.int32), lengths)
        ends = common.seq_lens[: common.num_reqs].numpy().astype(np.int64)
        positions = np.arange(rows) + (ends - starts[1:])[seq_of_row]
        slots = common.slot_mapping[:rows].numpy().astype(np.int64)
        slots += np.where(slots < 0, 0, slots // self._block_positions * self._block_positions)
        tables = common.block_table_tensor[: common.num_reqs].numpy().astype(np.int32) * np.int32(2)
        return PagedRows(
            rows, positions.astype(np.int32), slots, seq_of_row, tables, np.zeros(rows, np.uint8)
        )


class RollmeshAttention(AttentionImpl[PagedRows]):  # type: ignore[misc]
    """Attention of one layer. weights: returns the layer's serving arrays ("q_norm" and "k_norm",
    if the layer has them). group, head0: as in ops.attention. all_squares: gathers head_squares
    from all ranks; None: q and k are not normed over all heads."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: None,
        sliding_window: None,
        kv_cache_dtype: str,
        *others: Any,
        rope: Rope,
        weights: Callable[[], Mapping[str, Array]],
        group: int,
        head0: int,
        all_squares: Callable[[Array, Array], tuple[Array, Array]] | None = None,
    ) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale
        self.num_kv_heads, self.kv_cache_dtype = num_kv_heads, kv_cache_dtype
        self._rope, self._weights, self._group, self._head0 = rope, weights, group, head0
        self._all_squares = all_squares

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: PagedRows | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Computes attention of query [rows, heads, head_dim], key and value [rows, kv heads,
        head_dim], as the projection returns them. output has the shape of query.

        Without metadata (in vLLM's profiling pass) it does not read the cache and returns zeros."""
        if output_scale is not None or output_block_scale is not None:
            raise ConfigError(
                "output_scale: expected none, got a value; the output is not quantized"
            )
        output.zero_()
        if attn_metadata is None:
            return output
        step, weights, rope = attn_metadata, self._weights(), self._rope
        if not kv_cache.is_contiguous():
            raise LayoutError(
                f"expected a contiguous KV cache (layout LBHNC), got strides {kv_cache.stride()}"
            )
        n, (blocks, kv_heads, positions, _) = step.num_rows, kv_cache.shape
        qkv = array_of(torch.cat([part[:n].flatten(1) for part in (query, key, value)], 1))
        pages = array_of(kv_cache).reshape(2 * blocks, kv_heads, positions * self.head_size)
        caches = (pages[:-1], pages[1:])
        squares = None
        if self._all_squares is not None:
            squares = self._all_squares(
                *ops.head_squares(qkv, self.num_heads, self.head_size, **rope.how)
            )
        q = ops.qk_rope_kv(
            qkv, weights.get("q_norm"), weights.get("k_norm"), rope.cos.numpy(), rope.sin.numpy(),
            step.positions, step.slots, *caches,
            num_heads=self.num_heads, page_size=positions, squares=squares,
            row_flags=step.flags, **rope.options,
        )  # fmt: skip
        attended = ops.attention(
            q, *caches, step.positions, step.seq_of_row, step.block_tables,
            page_size=positions, scale=self.scale, softcap=rope.softcap, group=self._group,
            head0=self._head0, sinks=weights.get("sinks"), **rope.how,
        )  # fmt: skip
        output[:n] = tensor_of(attended)
        return output


class RollmeshAttentionBackend(AttentionBackend):  # type: ignore[misc]
    forward_includes_kv_cache_update = True
    supported_dtypes = [torch.bfloat16, torch.float32]  # noqa: RUF012 (vLLM's own attribute)
    supported_kv_cache_dtypes = ["auto", "bfloat16"]  # noqa: RUF012

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"  # vLLM's name for out-of-tree backends

    @staticmethod
    def get_impl_cls() -> type[RollmeshAttention]:
        return RollmeshAttention

    @staticmethod
    def get_builder_cls() -> type[RollmeshMetadataBuilder]:
        return RollmeshMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(BLOCK_POSITIONS)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % HEAD_DIMS == 0

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        return (KVCacheLayout.LBHNC,)

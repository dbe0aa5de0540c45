// packing.cuh: the layout of tensor core operands: packed weights and the caches of the family
// cuda_mma in bf16. float32 has the layout of the CPU (kernels.h) in both CUDA families, and so
// does the bf16 of cuda_fma.
//
// A matrix is tiles of 16 rows × 16 k, the A operand of mma.m16n8k16, in the order in which a warp
// holds it: 16 bytes for each lane in turn. So a fragment is one load of 16 bytes per lane and 512
// contiguous bytes, and a row of tiles is contiguous over all of k. Sizes are those of kernels.h
// (rows padded to 16, k to 32), so code that reserves memory does not depend on the packing. Gate
// and up of a SwiGLU alternate every 8 rows, not 16: rows g and g + 8 of a tile are in the same
// thread, so they are gate and up of one output. K pages are matrices of [position][head_dim]; V
// pages hold Vᵀ, rows of head_dim with positions as k.
#pragma once

#include "kernels.h"

typedef enum rm_packing { RM_PACKING_X86, RM_PACKING_MMA } rm_packing;

enum {
  RM_MMA_ROWS = 16, // of A, the weights
  RM_MMA_COLS = 8, // of B, the tokens
  RM_MMA_K = 16,
  RM_MMA_TILE = RM_MMA_ROWS * RM_MMA_K,
  RM_MMA_SPLIT = 512, // k of one chain of the instruction; a constant of the family's contract
  RM_MMA_STEPS = RM_MMA_SPLIT / RM_MMA_K,
};

// The lane of the warp that holds an element of A, its register, and the half of the register.
typedef struct rm_mma_place {
  int lane, word, half;
} rm_mma_place;

RM_INLINE rm_mma_place rm_mma_a_place(int row, int k) {
  const rm_mma_place place = {row % 8 * 4 + k % 8 / 2, row / 8 + k / 8 * 2, k % 2};
  return place;
}

// Steps of 16 k for k, including the zero padding up to RM_K_BLOCK.
RM_INLINE int64_t rm_mma_steps(int64_t k) { return rm_round_up(k, RM_K_BLOCK) / RM_MMA_K; }
RM_INLINE int64_t rm_mma_tile_rows(int64_t n) { return rm_round_up(n, RM_MMA_ROWS) / RM_MMA_ROWS; }

RM_INLINE int rm_mma_in_tile(int row, int k) {
  const rm_mma_place place = rm_mma_a_place(row, k);
  return place.lane * 8 + place.word * 2 + place.half;
}
RM_INLINE int64_t rm_mma_index(int64_t k_total, int64_t n, int64_t k) {
  const int64_t tile = n / RM_MMA_ROWS * rm_mma_steps(k_total) + k / RM_MMA_K;
  return tile * RM_MMA_TILE + rm_mma_in_tile((int)(n % RM_MMA_ROWS), (int)(k % RM_MMA_K));
}
RM_INLINE int64_t rm_mma_gate_up_row(int64_t row, int up) {
  return row / 8 * 16 + (up ? 8 : 0) + row % 8;
}
RM_INLINE int64_t rm_mma_v_index(int64_t head_dim, int64_t pos, int64_t d) {
  const int64_t tile = pos / RM_MMA_K * rm_mma_tile_rows(head_dim) + d / RM_MMA_ROWS;
  return tile * RM_MMA_TILE + rm_mma_in_tile((int)(d % RM_MMA_ROWS), (int)(pos % RM_MMA_K));
}

#ifdef __cplusplus
// The same indices for either packing.
template <rm_dtype DTYPE, rm_packing PACKING>
RM_INLINE int64_t rm_weight_index(int64_t k_total, int64_t n, int64_t k) {
  if constexpr (PACKING == RM_PACKING_MMA) return rm_mma_index(k_total, n, k);
  else return rm_packed_index(DTYPE, k_total, n, k);
}
template <rm_packing PACKING> RM_INLINE int64_t rm_gate_up_place(int64_t row, int up) {
  if constexpr (PACKING == RM_PACKING_MMA) return rm_mma_gate_up_row(row, up);
  else return rm_gate_up_row(row, up);
}
template <rm_dtype DTYPE, rm_packing PACKING>
RM_INLINE int64_t rm_value_index(int64_t head_dim, int64_t pos, int64_t d) {
  if constexpr (PACKING == RM_PACKING_MMA) return rm_mma_v_index(head_dim, pos, d);
  else return rm_v_index(DTYPE, head_dim, pos, d);
}
#endif

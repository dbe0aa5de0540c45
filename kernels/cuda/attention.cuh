// attention.cuh: shared by the two kernels that compute states of attention, in attention_decode.cu
// and attention_mma.cu. A state is the partial result of one split of positions.
#pragma once

#include "device.cuh"

struct rm_span {
  int first, last; // live positions, both included; first > last: none
};
// Whether one of the n positions from t on is live.
__device__ inline bool rm_is_live(rm_span s, int t, int n) {
  return s.first < t + n && s.last >= t;
}

__device__ inline rm_span rm_live_span(const rm_attention_args &a, int64_t row) {
  return {static_cast<int>(rm_first_position(&a, row)), a.positions[row]};
}

// A state is value_dim values A[d], then m, then l; states are [row of the pass][head][split].
// Splits without a live position of the row have undefined states.
RM_INLINE int64_t rm_state_floats(int64_t value_dim) { return value_dim + 2; }
// Bytes of the states of one row and split.
RM_INLINE size_t rm_states_bytes(int64_t n_heads, int64_t value_dim) {
  return (size_t)(n_heads * rm_state_floats(value_dim)) * sizeof(float);
}
RM_INLINE int64_t rm_count_splits(int64_t positions) {
  return (positions + RM_ATTN_SPLIT - 1) / RM_ATTN_SPLIT;
}

// The rows that one call computes by states: all rows in order, or those of listed tiles of
// tile_rows rows each.
struct rm_row_list {
  const int32_t *tiles; // on the device: their number, then their indices; NULL: no list
  int64_t tile_rows;
};
// The index-th row of the list; −1 after the last.
__device__ inline int64_t rm_row_of(const rm_row_list &list, const rm_attention_args &a,
                                    int64_t index) {
  if (!list.tiles) return index;
  const int64_t tile = index / list.tile_rows;
  const int64_t row = tile < list.tiles[0]
                          ? list.tiles[1 + tile] * list.tile_rows + index % list.tile_rows
                          : a.rows;
  return row < a.rows ? row : -1;
}

// Rows are computed in passes of as many as the workspace holds: here `rows` from the row0-th on.
struct rm_rows_pass {
  int64_t row0, rows, n_splits;
  rm_row_list list;
};
// Launches the kernels that compute the states of a pass.
using rm_states_fn = void (*)(const rm_ctx *, const rm_attention_args *, float *states,
                              rm_rows_pass);
// Attention of `rows` rows of the list: `states` computes the states, which are then merged in
// order. The caller uses the first `used` bytes of the workspace.
void rm_cuda_attention_by(const rm_ctx *ctx, const rm_attention_args *a, rm_states_fn states,
                          int64_t rows, rm_row_list list, size_t used);

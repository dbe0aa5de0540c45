// attention.cuh: what the two kernels that make attention's states share: attention_decode.cu's and attention_mma.cu's.
#pragma once

#include "device.cuh"

struct rm_span {
  int64_t first, last;  // live positions, both included
};

__device__ inline rm_span rm_live_span(const rm_attention_args &a, int64_t row) {
  const int64_t last = a.positions[row];
  return {a.window > 0 ? rm_max64(0, last - a.window + 1) : 0, last};
}

// A state is head_dim values A[d], then m, then l; states are [row of the turn][head][segment]. Of a segment in which nothing is live
// for the row there is none.
RM_INLINE int64_t rm_state_floats(int64_t head_dim) { return head_dim + 2; }
RM_INLINE int64_t rm_count_segments(int64_t positions) { return (positions + RM_ATTN_SEGMENT - 1) / RM_ATTN_SEGMENT; }

// Rows of one call, in turns of what the workspace holds: [row0, row0 + rows) now.
struct rm_rows_turn {
  int64_t row0, rows, n_segments;
};
// Launches what makes the states of a turn.
using rm_states_fn = void (*)(const rm_ctx *, const rm_attention_args *, float *states, rm_rows_turn);
// attention with `states` for its first half; the second merges them in order.
void rm_cuda_attention_by(const rm_ctx *ctx, const rm_attention_args *a, rm_states_fn states);

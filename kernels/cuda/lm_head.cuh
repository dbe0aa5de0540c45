// lm_head.cuh: shared by the two kernels that compute logits, in lm_head.cu and lm_head_mma.cu.
#pragma once

#include "device.cuh"

// A pass over the rows [row0, row0 + rows) of one call, as many as the workspace holds.
struct rm_logits_pass {
  float *pairs, *target_logits;  // [n_blocks][rows][2]; [rows] or NULL
  int64_t row0, rows;
};

// Launches the kernels that compute a pass's pairs and the logits that the arguments request.
using rm_logits_fn = void (*)(const rm_ctx *, const rm_lm_head_args *, rm_logits_pass);
// lm_head with `logits` for the logits and pairs.
void rm_cuda_lm_head_by(const rm_ctx *ctx, const rm_lm_head_args *a, rm_logits_fn logits);

// Called by one warp: computes the pair of n logits in shared memory. Both halves of the warp run
// the same 16 chains.
__device__ inline void rm_block_pair(float *pair, const float *logits, int n, int lane) {
  float max = -INFINITY, partial = 0.0f;
  bool bad = false;
  for (int i = lane; i < n; i += RM_WARP) {
    max = rm_max_f32(logits[i], max);
    bad |= !rm_is_finite(logits[i]);
  }
  max = rm_max_lanes(max);
  for (int i = lane % RM_LANES; i < n; i += RM_LANES) partial = partial + rm_exp(logits[i] - max);
  const float sum = rm_tree16_lanes(partial);
  const bool finite = __ballot_sync(RM_ALL_LANES, bad) == 0;
  if (lane != 0) return;
  pair[0] = max;
  pair[1] = finite ? sum : rm_float(0x7fc00000u);
}

// Stores logit `col` of one row of the pass, canonical, where the arguments request it.
__device__ inline void rm_keep_logit(const rm_lm_head_args &a, const rm_logits_pass &t, int64_t row,
                                     int64_t col, float logit) {
  if (row >= t.row0 + t.rows || col >= a.vocab) return;
  if (a.logits) a.logits[row * a.ld_logits + col] = logit;
  if (t.target_logits && a.targets && a.targets[row] == col) t.target_logits[row - t.row0] = logit;
}

// Computes the pairs of a block of threads: its vocabulary block of rows first … first + rows − 1,
// whose logits are in shared memory, `pitch` apart. Called by `warps` warps.
__device__ inline void rm_block_pairs(const rm_lm_head_args &a, const rm_logits_pass &t,
                                      const float *logits, int pitch, int64_t first, int rows,
                                      int warps) {
  __syncthreads(); // all logits are there
  const int n = static_cast<int>(
      rm_min64(RM_VOCAB_BLOCK, a.vocab - blockIdx.x * static_cast<int64_t>(RM_VOCAB_BLOCK)));
  for (int r = rm_warp(); r < rows && first + r < t.row0 + t.rows; r += warps)
    rm_block_pair(t.pairs + 2 * (blockIdx.x * t.rows + first + r - t.row0), logits + r * pitch, n,
                  rm_lane());
}

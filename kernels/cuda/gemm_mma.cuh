// gemm_mma.cuh: what the two gemms of the family cuda_mma share, and the shape of gemm_mma.cu's tiles.
#pragma once

#include "mma.cuh"

constexpr int RM_TILE_ROWS = 128, RM_TILE_COLS = 128, RM_TILE_K = 32;  // rows of W, tokens, k of a stage

// x in shared memory is rows of 64 bytes, four chunks of 8 k each, of which every second row's pair trades places: chunk `chunk` of
// row `row`, in chunks.
RM_INLINE int rm_tile_chunk(int row, int chunk) { return row * (RM_TILE_K / 8) + (chunk ^ (row / 2 & 3)); }
// Where a lane finds word 0 or 1 of B, for 8 tokens from `token` on and a step of 16 k.
RM_INLINE int rm_tile_word(int token, int step, int lane, int word) {
  return rm_tile_chunk(token + lane / 4, step * 2 + word) * 4 + lane % 4;
}

// Rows of W in its packing, those of its last row of tiles included.
template <bool SWIGLU> RM_INLINE int64_t rm_mma_w_rows(int64_t n) { return SWIGLU ? rm_round_up(n, 8) * 2 : rm_round_up(n, RM_MMA_ROWS); }

// From a warp's sums of one row of tiles and NT × 8 tokens, through shared memory of its own, so that neighbouring lanes store
// neighbouring columns. With swiglu a token's rows g and g + 8 are gate and up of one output.
constexpr int RM_PUT_PITCH = RM_MMA_ROWS + 4;
template <int NT> constexpr int RM_PUT_WORDS = NT * RM_MMA_COLS * RM_PUT_PITCH;
template <bool SWIGLU, int NT>
__device__ inline void rm_mma_put_outputs(const rm_gemm_args &a, float *mine, const float (&acc)[NT][4], int64_t tile_row, int64_t row0,
                                          int64_t end) {
  constexpr int WIDTH = SWIGLU ? RM_MMA_ROWS / 2 : RM_MMA_ROWS;
  const int lane = static_cast<int>(threadIdx.x) % RM_WARP;
  __syncwarp();  // what was there before has been read
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) mine[(n * RM_MMA_COLS + lane % 4 * 2 + i % 2) * RM_PUT_PITCH + lane / 4 + i / 2 * 8] = acc[n][i];
  __syncwarp();
#pragma unroll 1
  for (int i = lane; i < NT * RM_MMA_COLS * WIDTH; i += RM_WARP) {
    const int64_t row = row0 + i / WIDTH, col = tile_row * WIDTH + i % WIDTH;
    const float *from = mine + i / WIDTH * RM_PUT_PITCH + i % WIDTH;
    if (row < end && col < a.n) rm_put_output<RM_BF16, SWIGLU>(a, row, col, from[0], SWIGLU ? from[8] : 0.0f);
  }
}

// gemm_mma.cuh: shared by the two gemms of the family cuda_mma, and the tiles of gemm_mma.cu: their
// shapes, the choice of a shape, the mapping of blocks to tiles, and the layout of x in shared
// memory. tests/gpu/simt/check_mma.cpp tests all except the output by property.
#pragma once

#include "mma.cuh"

// The number of multiprocessors of the current device.
int64_t rm_cuda_processors();

// Up to this many rows gemm_mma_rows.cu is faster; with groups, the average rows of a group.
constexpr int64_t RM_FEW_ROWS = 64;

constexpr int RM_TILE_K = 32; // k of a stage
constexpr int RM_TILE_WARPS = 8;

// The tile of a block: `rows` of W × `cols` tokens, computed by warps_of_rows × warps_of_cols
// warps.
typedef struct rm_tile_shape {
  int rows, cols, warps_of_rows, warps_of_cols;
} rm_tile_shape;
constexpr int RM_N_TILES = 4;
constexpr rm_tile_shape RM_TILES[RM_N_TILES] = {
    {128, 192, 2, 4}, {192, 128, 4, 2}, {128, 128, 2, 4}, {128, 64, 4, 2}};

// Bytes that pass through shared memory for 16 k of a block: its warps' fragments, and the copies
// into it. Shared memory moves 128 bytes per clock. This estimates a block's time, since tensor
// cores are about as fast (sm_80: 1024 FMAs per clock) or faster.
RM_INLINE int rm_tile_bytes(rm_tile_shape t) {
  return (RM_TILE_WARPS * (t.rows / t.warps_of_rows + t.cols / t.warps_of_cols) + t.rows + t.cols) *
         RM_MMA_K * 2;
}

// Chooses the tile that finishes first: the time is the number of blocks of the busiest
// multiprocessor times the time of each. Assumes that a group's rows fill half of its last tile.
// For equal times it chooses the larger tile, which reads W or x less often.
inline int rm_choose_tile(int64_t w_rows, int64_t tokens, int64_t groups, int64_t processors) {
  int64_t least = INT64_MAX;
  int chosen = 0;
  for (int i = 0; i < RM_N_TILES; i++) {
    const rm_tile_shape t = RM_TILES[i];
    const int64_t down = (w_rows + t.rows - 1) / t.rows;
    const int64_t across =
        groups > 1 ? (2 * tokens + groups * t.cols) / (2 * t.cols) : (tokens + t.cols - 1) / t.cols;
    const int64_t time = (down * across + processors - 1) / processors * rm_tile_bytes(t);
    if (time < least) least = time, chosen = i;
  }
  return chosen;
}

// Blocks that run at the same time should share as much of W as of x, so that both come from the L2
// cache. So tiles are numbered in bands of RM_TILE_BAND columns that go down all of W; inside a
// band they are numbered row by row.
constexpr unsigned RM_TILE_BAND = 8;
typedef struct rm_tile_number {
  unsigned down, across;
} rm_tile_number;
RM_INLINE rm_tile_number rm_tile_of_block(unsigned block, unsigned down, unsigned across) {
  const unsigned band = block / (RM_TILE_BAND * down), first = band * RM_TILE_BAND,
                 in = block - first * down;
  const unsigned width = across - first < RM_TILE_BAND ? across - first : RM_TILE_BAND;
  const rm_tile_number number = {in / width, first + in % width};
  return number;
}

// x in shared memory is rows of 64 bytes, four vectors of 8 k each. Their order changes with each
// pair of rows, so that the same vector of 8 rows is in different banks. Returns the index of
// vector `vector` of row `row`, in vectors.
RM_INLINE int rm_tile_vector(int row, int vector) {
  return row * (RM_TILE_K / 8) + (vector ^ (row / 2 & 3));
}
// The vector that a lane passes to rm_load_matrices for B of 16 tokens from `token` on and a step
// of 16 k: words 0 and 1 of the first 8 tokens, then of the others.
RM_INLINE int rm_tile_lane_vector(int token, int step, int lane) {
  return rm_tile_vector(token + lane / 16 * 8 + lane % 8, step * 2 + lane / 8 % 2);
}

// Rows of W in its packing, including the padding of its last row of tiles.
RM_INLINE int64_t rm_mma_w_rows(int64_t n, bool swiglu) {
  return swiglu ? rm_round_up(n, 8) * 2 : rm_round_up(n, RM_MMA_ROWS);
}

// Stores columns col … col + 3 of row `row` of y; in bf16 as one word if y is aligned for it.
template <bool SWIGLU>
__device__ inline void rm_put_outputs(const rm_gemm_args &a, int64_t row, int64_t col,
                                      const float *acc, const float *up) {
  uint16_t *to = static_cast<uint16_t *>(a.y) + row * a.ldy + col;
  if (a.y_dtype != RM_BF16 || col + 4 > a.n || reinterpret_cast<uintptr_t>(to) % sizeof(uint2)) {
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (col + i < a.n) rm_put_output<RM_BF16, SWIGLU>(a, row, col + i, acc[i], up[i]);
    return;
  }
  uint32_t y[4];
#pragma unroll
  for (int i = 0; i < 4; i++)
    y[i] = rm_f32_to_bf16(rm_canon(rm_output<RM_BF16, SWIGLU>(a, row, col + i, acc[i], up[i])));
  *reinterpret_cast<uint2 *>(to) = {y[0] | y[1] << 16, y[2] | y[3] << 16};
}

// Stores a warp's sums of one row of tiles and NT × 8 tokens, through the warp's shared memory, so
// that adjacent lanes store adjacent columns. With swiglu a token's rows g and g + 8 are gate and
// up of one output.
constexpr int RM_PUT_PITCH = RM_MMA_ROWS + 4;
template <int NT> constexpr int RM_PUT_WORDS = NT * RM_MMA_COLS * RM_PUT_PITCH;
template <bool SWIGLU, int NT>
__device__ inline void rm_mma_put_outputs(const rm_gemm_args &a, float *mine,
                                          const float (&acc)[NT][4], int64_t tile_row, int64_t row0,
                                          int64_t end) {
  constexpr int WIDTH = SWIGLU ? RM_MMA_ROWS / 2 : RM_MMA_ROWS;
  const int lane = rm_lane();
  __syncwarp(); // all lanes have read the previous content
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int i = 0; i < 4; i++)
      mine[(n * RM_MMA_COLS + lane % 4 * 2 + i % 2) * RM_PUT_PITCH + lane / 4 + i / 2 * 8] =
          acc[n][i];
  __syncwarp();
#pragma unroll 1
  for (int i = lane * 4; i < NT * RM_MMA_COLS * WIDTH; i += RM_WARP * 4) {
    const int64_t row = row0 + i / WIDTH, col = tile_row * WIDTH + i % WIDTH;
    const float *from = mine + i / WIDTH * RM_PUT_PITCH + i % WIDTH;
    if (row < end && col < a.n) rm_put_outputs<SWIGLU>(a, row, col, from, SWIGLU ? from + 8 : from);
  }
}

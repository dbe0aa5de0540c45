// gemm_rows.cu: the gemm of few rows, whose time is that of reading W once. A tile of 16 columns
// has all its k in one run of memory. A block of threads walks that run with 16 half-warps; each
// takes its own block of 32 k, with one lane for each column, and loads the words of the next step
// during the current products. The contract adds the sums of blocks of 32 k one by one, and these
// sums are independent, so k may be split: the sums go to shared memory, and a thread for each
// output adds them in order. With swiglu the half-warps of a warp take gate and up of one block of
// k. gemm.cu chooses between the two kernels, which are bit-identical.
#include "device.cuh"

namespace {

constexpr int WARPS = 8, THREADS = WARPS * RM_WARP, SLOTS = 2 * WARPS,
              TILE = RM_N_TILE * RM_K_BLOCK;
template <bool SWIGLU> constexpr int BLOCKS = SWIGLU ? WARPS : SLOTS; // of k in a step

// Computes ROWS rows from row0 on of one tile of columns of y. w0: first element of the matrix.
template <rm_dtype DTYPE, bool SWIGLU, int ROWS>
__device__ void few_rows(float *shared, const rm_gemm_args &a, int64_t w0, int64_t row0,
                         int64_t end) {
  constexpr int STEP = BLOCKS<SWIGLU>, LENGTH = STEP * RM_K_BLOCK, PARTS = SLOTS * ROWS * RM_N_TILE;
  // Both are double buffers: one half is filled while the other is read.
  float *const xs = shared, *const parts = shared + 2 * ROWS * LENGTH;
  const int me = rm_thread(), half = me / RM_N_TILE, n = me % RM_N_TILE;
  const int block = SWIGLU ? half / 2 : half; // the half-warp's block of k in a step
  const int64_t tile_row = SWIGLU ? 2 * static_cast<int64_t>(blockIdx.x) + half % 2 : blockIdx.x;
  const int tiles = static_cast<int>(rm_round_up(a.k, RM_K_BLOCK) / RM_K_BLOCK);
  const int64_t first = w0 + (tile_row * tiles + block) * TILE;
  const auto stage = [&](int at, int turn) {
    rm_stage_rows<DTYPE, ROWS, LENGTH, THREADS>(xs + turn * ROWS * LENGTH, a.x, a.ldx, a.k, row0,
                                                end, at * RM_K_BLOCK);
  };
  rm_loaded_column<DTYPE> w;
  float acc = 0.0f, up = 0.0f; // thread r·16 + n has row r, column n
  if (block < tiles) w.load(rm_column_of<DTYPE>(a.w, first, n));
  stage(0, 0);
  __syncthreads();
  for (int at = 0, turn = 0; at < tiles; at += STEP, turn ^= 1) {
    float *const part = parts + turn * PARTS;
    if (at + block < tiles) {
      float sums[ROWS] = {};
      rm_add_block(sums, xs + turn * ROWS * LENGTH + block * RM_K_BLOCK, LENGTH, w);
#pragma unroll
      for (int r = 0; r < ROWS; r++) part[(half * ROWS + r) * RM_N_TILE + n] = sums[r];
    }
    const int next = at + STEP;
    if (next + block < tiles)
      w.load(rm_column_of<DTYPE>(a.w, first + static_cast<int64_t>(next) * TILE, n));
    if (next < tiles) stage(next, turn ^ 1);
    __syncthreads(); // one per step is enough: the next step fills the other half
    if (me >= ROWS * RM_N_TILE) continue;
    const int here = tiles - at < STEP ? tiles - at : STEP;
#pragma unroll 4
    for (int b = 0; b < here; b++) {
      acc = acc + part[(SWIGLU ? 2 * b : b) * ROWS * RM_N_TILE + me];
      if constexpr (SWIGLU) up = up + part[(2 * b + 1) * ROWS * RM_N_TILE + me];
    }
  }
  const int64_t row = row0 + me / RM_N_TILE, col = blockIdx.x * static_cast<int64_t>(RM_N_TILE) + n;
  if (me < ROWS * RM_N_TILE && row < end && col < a.n)
    rm_put_output<DTYPE, SWIGLU>(a, row, col, acc, up);
}

template <rm_dtype DTYPE, bool SWIGLU, int ROWS>
__global__ void __launch_bounds__(THREADS, DTYPE == RM_F32 ? 2 : 3) rows_kernel(rm_gemm_args a) {
  RM_SHARED(shared);
  const int64_t group = blockIdx.z;
  const auto [begin, end] = rm_rows_of_group(a, group);
  a.bias = rm_bias_of(DTYPE, &a, group, SWIGLU);
  for (int64_t row0 = begin + blockIdx.y * static_cast<int64_t>(ROWS); row0 < end;
       row0 += gridDim.y * static_cast<int64_t>(ROWS))
    few_rows<DTYPE, SWIGLU, ROWS>(shared, a, group * a.group_stride, row0, end);
}

template <bool SWIGLU, int ROWS> void launch(const rm_ctx *ctx, const rm_gemm_args *a) {
  constexpr int LENGTH = BLOCKS<SWIGLU> * RM_K_BLOCK;
  const size_t shared = 2 * (ROWS * LENGTH + SLOTS * ROWS * RM_N_TILE) * sizeof(float);
  rm_by_dtype(a->dtype, [&]<rm_dtype DTYPE>() {
    RM_LAUNCH((rows_kernel<DTYPE, SWIGLU, ROWS>), rm_gemm_grid(a, RM_N_TILE, ROWS), THREADS, shared,
              ctx->stream, *a);
  });
}

} // namespace

void rm_cuda_gemm_rows(const rm_ctx *ctx, const rm_gemm_args *a, bool swiglu) {
  if (swiglu && a->m == 1) launch<true, 1>(ctx, a);
  else if (swiglu) launch<true, 4>(ctx, a);
  else if (a->m == 1) launch<false, 1>(ctx, a);
  else launch<false, 4>(ctx, a);
}

// gemm.cu: y = x·Wᵀ on packed weights, the dot product of docs/numerics.md §2 with one thread for an output. A block of threads
// makes 16 rows × 64 columns; it shares x in blocks of 32 k, as float32, and reads W straight from its tiles: the 16 columns of a
// tile lie side by side, so a warp's loads are whole sectors. Each output's order of sums is its own, so no tile shape can change a
// bit. Groups are a grid dimension: their row counts stay on the device, every group gets the blocks that all m rows would need,
// and those past its end return at once, which is what a CUDA graph needs. Tensor cores lose here only for their order of sums.
#include "device.cuh"

namespace {

constexpr int ROWS = 16, COLS = 64, ROWS_PER_THREAD = 4, THREADS = COLS * ROWS / ROWS_PER_THREAD, MAX_GRID_Y = 65535;

template <rm_dtype DTYPE> __device__ void stage_x(float *tile, const rm_gemm_args &a, int64_t row0, int64_t end, int64_t k0) {
  for (int i = static_cast<int>(threadIdx.x); i < ROWS * RM_K_BLOCK; i += THREADS) {
    const int64_t row = row0 + i / RM_K_BLOCK, k = k0 + i % RM_K_BLOCK;
    tile[i] = row < end && k < a.k ? rm_get(DTYPE, a.x, row * a.ldx + k) : 0.0f;
  }
}

template <rm_dtype DTYPE> __global__ void __launch_bounds__(THREADS) gemm_kernel(rm_gemm_args a) {
  RM_SHARED(x);  // [ROWS][RM_K_BLOCK]
  const int64_t group = blockIdx.z, w0 = group * a.group_stride;
  const int64_t begin = a.group_rows ? a.group_rows[group] : 0, end = a.group_rows ? a.group_rows[group + 1] : a.m;
  const int64_t col = blockIdx.x * static_cast<int64_t>(COLS) + threadIdx.x % COLS;
  const int first = static_cast<int>(threadIdx.x) / COLS * ROWS_PER_THREAD;
  for (int64_t row0 = begin + blockIdx.y * static_cast<int64_t>(ROWS); row0 < end; row0 += gridDim.y * static_cast<int64_t>(ROWS)) {
    float acc[ROWS_PER_THREAD] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (int64_t k0 = 0; k0 < a.k; k0 += RM_K_BLOCK) {
      stage_x<DTYPE>(x, a, row0, end, k0);
      __syncthreads();
      const int64_t tile = w0 + rm_packed_index(DTYPE, a.k, col / RM_N_TILE * RM_N_TILE, k0);
      for (int r = 0; r < ROWS_PER_THREAD && col < a.n; r++)
        acc[r] = acc[r] + rm_block_dot<DTYPE>(x + (first + r) * RM_K_BLOCK, a.w, tile, static_cast<int>(col % RM_N_TILE));
      __syncthreads();  // before x is overwritten
    }
    for (int r = 0; r < ROWS_PER_THREAD; r++) {
      const int64_t row = row0 + first + r;
      if (row >= end || col >= a.n) continue;
      rm_put(a.y_dtype, a.y, row * a.ldy + col, a.bias ? acc[r] + rm_get(DTYPE, a.bias, col) : acc[r]);
    }
  }
}

}  // namespace

void rm_cuda_gemm(const rm_ctx *ctx, const rm_gemm_args *a) {
  if (a->m <= 0 || a->n <= 0 || (a->group_rows && a->n_groups <= 0)) return;  // an empty grid is an error
  const dim3 grid(static_cast<unsigned>((a->n + COLS - 1) / COLS), static_cast<unsigned>(rm_min64((a->m + ROWS - 1) / ROWS, MAX_GRID_Y)),
                  a->group_rows ? static_cast<unsigned>(a->n_groups) : 1u);
  const size_t shared = ROWS * RM_K_BLOCK * sizeof(float);
  if (a->dtype == RM_BF16) RM_LAUNCH(gemm_kernel<RM_BF16>, grid, dim3(THREADS), shared, ctx->stream, *a);
  else RM_LAUNCH(gemm_kernel<RM_F32>, grid, dim3(THREADS), shared, ctx->stream, *a);
}

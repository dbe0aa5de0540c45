// gemm.cu: y = x·Wᵀ on packed weights, the dot product of docs/numerics.md §2 with one thread for
// each output (with swiglu: for a gate and its up). A block of threads computes 16 rows × 64
// columns. It shares x in blocks of 32 k, as float32, and reads W directly from its tiles: the 16
// columns of a tile are adjacent, so a warp loads whole sectors. The order of an output's sums does
// not depend on other outputs, so the tile shape does not change the result. Groups are a grid
// dimension: their row counts stay on the device, and blocks after the last row of their group
// return at once, as a CUDA graph requires. Rejected: tensor cores, because of their order of sums.
// Few rows use gemm_rows.cu.
#include "device.cuh"

namespace {

constexpr int ROWS = 16, COLS = 64, ROWS_PER_THREAD = 4, THREADS = COLS * ROWS / ROWS_PER_THREAD;

// Up to this many rows gemm_rows.cu is faster; with groups, the average rows of a group.
constexpr int64_t FEW_ROWS = 8;

template <rm_dtype DTYPE, bool SWIGLU>
__global__ void __launch_bounds__(THREADS) gemm_kernel(rm_gemm_args a) {
  RM_SHARED(x); // [ROWS][RM_K_BLOCK]
  const int64_t group = blockIdx.z, w0 = group * a.group_stride;
  const auto [begin, end] = rm_rows_of_group(a, group);
  a.bias = rm_bias_of(DTYPE, &a, group, SWIGLU);
  const int64_t col = blockIdx.x * static_cast<int64_t>(COLS) + threadIdx.x % COLS;
  const int64_t w_row = SWIGLU ? rm_gate_up_row(col, 0) : col,
                up_tiles = rm_packed_elems(RM_N_TILE, a.k);
  const int first = rm_thread() / COLS * ROWS_PER_THREAD, n = static_cast<int>(col % RM_N_TILE);
  const float *mine = x + first * RM_K_BLOCK;
  for (int64_t row0 = begin + blockIdx.y * static_cast<int64_t>(ROWS); row0 < end;
       row0 += gridDim.y * static_cast<int64_t>(ROWS)) {
    float acc[ROWS_PER_THREAD] = {}, up[ROWS_PER_THREAD] = {};
    for (int64_t k0 = 0; k0 < a.k; k0 += RM_K_BLOCK) {
      rm_stage_rows<DTYPE, ROWS, RM_K_BLOCK, THREADS>(x, a.x, a.ldx, a.k, row0, end, k0);
      __syncthreads();
      if (col < a.n) {
        const int64_t tile = w0 + rm_packed_index(DTYPE, a.k, w_row / RM_N_TILE * RM_N_TILE, k0);
        rm_add_block(acc, mine, RM_K_BLOCK, rm_column_of<DTYPE>(a.w, tile, n));
        if constexpr (SWIGLU)
          rm_add_block(up, mine, RM_K_BLOCK, rm_column_of<DTYPE>(a.w, tile + up_tiles, n));
      }
      __syncthreads(); // before x is overwritten
    }
#pragma unroll
    for (int r = 0; r < ROWS_PER_THREAD; r++) {
      const int64_t row = row0 + first + r;
      if (row >= end || col >= a.n) continue;
      rm_put_output<DTYPE, SWIGLU>(a, row, col, acc[r], up[r]);
    }
  }
}

template <bool SWIGLU> void launch(const rm_ctx *ctx, const rm_gemm_args *a) {
  if (a->m <= FEW_ROWS * rm_groups(a)) return rm_cuda_gemm_rows(ctx, a, SWIGLU);
  rm_by_dtype(a->dtype, [&]<rm_dtype DTYPE>() {
    RM_LAUNCH((gemm_kernel<DTYPE, SWIGLU>), rm_gemm_grid(a, COLS, ROWS), THREADS,
              ROWS * RM_K_BLOCK * sizeof(float), ctx->stream, *a);
  });
}

} // namespace

void rm_cuda_gemm(const rm_ctx *ctx, const rm_gemm_args *a) { launch<false>(ctx, a); }
void rm_cuda_gemm_swiglu(const rm_ctx *ctx, const rm_gemm_args *a) { launch<true>(ctx, a); }

// gemm_mma_few.cu: the bf16 gemm of the family cuda_mma for up to 8 rows. A block computes one row
// of tiles, 16 rows of W, with one warp for each split of k (with more than 8 splits, for every
// eighth). The sums of splits are added in order in shared memory, which saves the second launch
// of gemm_mma_rows.cu, a noticeable time in decode at batch 1. Each warp stages its own part of x
// and does not wait for other warps until the end. x is read again for every 16 rows of W, half as
// many bytes as those rows; from 16 tokens on that would be more than W, and gemm_mma_rows.cu is
// faster. Groups work as in gemm_mma_rows.cu.
#include "gemm_mma.cuh"
#include "mma_rows.cuh"

namespace {

constexpr int MAX_WARPS = 8, STAGE = 128, STAGED_WORDS = RM_STAGED_WORDS<1, STAGE>,
              SUMS = RM_MMA_ROWS * RM_MMA_COLS;
constexpr int MAX_SHARED = 48 << 10; // the default limit of a kernel
static_assert(RM_PUT_WORDS<1> <= STAGED_WORDS);

template <bool SWIGLU>
__global__ void __launch_bounds__(MAX_WARPS *RM_WARP, 2) few_kernel(rm_gemm_args a, int warps) {
  RM_SHARED(shared);
  const int warp = rm_warp(), lane = rm_lane();
  const int64_t group = rm_group_of_slot(a, blockIdx.z);
  if (group < 0) return; // the whole block returns
  const auto [begin, end] = rm_rows_of_group(a, group);
  a.bias = rm_bias_of(RM_BF16, &a, group, SWIGLU);
  const int splits = static_cast<int>(rm_mma_splits(a.k));
  const uint4 *w = rm_mma_row(a.w, group * a.group_stride, blockIdx.x, a.k);
  float *mine = shared + warp * STAGED_WORDS,
        *parts = shared + warps * STAGED_WORDS + lane; // [split][4][32]: one column per lane
  for (int64_t row0 = begin + blockIdx.y * static_cast<int64_t>(RM_MMA_COLS); row0 < end;
       row0 += gridDim.y * static_cast<int64_t>(RM_MMA_COLS)) {
    const rm_tokens x = rm_tokens_of(a.x, a.ldx, a.k, row0, end);
    for (int split = warp; split < splits; split += warps) {
      float acc[1][4] = {};
      rm_mma_rows<1, RM_WARP, STAGE>(acc, reinterpret_cast<uint32_t *>(mine), x, w, true,
                                     split * RM_MMA_STEPS,
                                     static_cast<int>(rm_split_steps(a.k, split)));
#pragma unroll
      for (int i = 0; i < 4; i++) parts[split * SUMS + i * RM_WARP] = acc[0][i];
    }
    __syncthreads();
    if (warp == 0) {
      float acc[1][4] = {};
#pragma unroll
      for (int i = 0; i < 4; i++)
        for (int split = 0; split < splits; split++)
          acc[0][i] = acc[0][i] + parts[split * SUMS + i * RM_WARP];
      rm_mma_put_outputs<SWIGLU, 1>(a, mine, acc, blockIdx.x, row0, end);
    }
    __syncthreads(); // before the next rows' sums
  }
}

} // namespace

bool rm_cuda_gemm_mma_few(const rm_ctx *ctx, const rm_gemm_args *a, bool swiglu) {
  const int splits = static_cast<int>(rm_mma_splits(a->k)),
            turns = (splits + MAX_WARPS - 1) / MAX_WARPS;
  const int warps = (splits + turns - 1) / turns;
  const size_t shared = static_cast<size_t>(warps * STAGED_WORDS + splits * SUMS) * sizeof(float);
  if (shared > MAX_SHARED) return false;
  const dim3 grid = rm_grid(rm_blocks(rm_mma_w_rows(a->n, swiglu), RM_MMA_ROWS),
                            rm_row_blocks(a, RM_MMA_COLS), rm_group_slots(a));
  const dim3 threads = rm_grid(warps * RM_WARP);
  if (swiglu) RM_LAUNCH(few_kernel<true>, grid, threads, shared, ctx->stream, *a, warps);
  else RM_LAUNCH(few_kernel<false>, grid, threads, shared, ctx->stream, *a, warps);
  return true;
}

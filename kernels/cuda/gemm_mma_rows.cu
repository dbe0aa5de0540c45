// gemm_mma_rows.cu: the bf16 gemm of the family cuda_mma for few rows, whose time is that of
// reading W once. A block multiplies 64 rows of W, 16 per warp, by up to 64 tokens (gemm_mma_few.cu
// takes up to 8 tokens). If these are fewer than two blocks per multiprocessor, each takes one
// split of k and writes its sums to the workspace; a second launch adds them in the order of the
// splits, the same order as in a block with all of k. So the split and the number of tokens do not
// change the result. Rejected: a counter and the last block instead of the second launch, because
// it needs memory that is zero between ops; and a cluster of blocks over the splits, because it
// needs sm_90.
//
// Groups without rows take no time: a block finds the group of its slot among the groups that have
// rows, so there are at most as many slots as rows.
#include "gemm_mma.cuh"
#include "mma_rows.cuh"

namespace {

constexpr int WARPS = 4, THREADS = WARPS * RM_WARP, MAX_GRID = 65535;
static_assert(WARPS * RM_PUT_WORDS<8> <= RM_STAGED_WORDS<8> &&
              WARPS * RM_PUT_WORDS<2> <= RM_STAGED_WORDS<2>);
constexpr int64_t ADD_THREADS = 128, MAX_WORKSPACE = 64 << 20;

// parts: [split][row of y][row of W]
template <int NT>
__device__ void put_parts(float *parts, int64_t pitch, const float (&acc)[NT][4], int64_t tile_row,
                          int64_t row0, int64_t end) {
  const int lane = rm_lane();
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int64_t row = row0 + n * RM_MMA_COLS + lane % 4 * 2 + i % 2;
      if (row < end) parts[row * pitch + tile_row * RM_MMA_ROWS + lane / 4 + i / 2 * 8] = acc[n][i];
    }
}

template <bool SWIGLU, int NT>
__global__ void __launch_bounds__(THREADS, 3) rows_kernel(rm_gemm_args a, float *parts) {
  RM_SHARED(shared);
  const int64_t splits = parts ? rm_mma_splits(a.k) : 1,
                tile_rows = rm_mma_tile_rows(rm_mma_w_rows(a.n, SWIGLU));
  const int64_t tile_row = blockIdx.x * static_cast<int64_t>(WARPS) + rm_warp(),
                split = blockIdx.z % splits, group = rm_group_of_slot(a, blockIdx.z / splits);
  if (group < 0) return; // the whole block returns
  const auto [begin, end] = rm_rows_of_group(a, group);
  a.bias = rm_bias_of(RM_BF16, &a, group, SWIGLU);
  const int64_t pitch = tile_rows * RM_MMA_ROWS;
  const bool live = tile_row < tile_rows;
  const uint4 *w = rm_mma_row(a.w, group * a.group_stride, tile_row, a.k);
  const int step0 = static_cast<int>(split * RM_MMA_STEPS);
  const int steps = static_cast<int>(parts ? rm_split_steps(a.k, split) : rm_mma_steps(a.k));
  constexpr int64_t ROWS = RM_MMA_COLS * NT;
  for (int64_t row0 = begin + blockIdx.y * ROWS; row0 < end; row0 += gridDim.y * ROWS) {
    float acc[NT][4] = {};
    rm_mma_rows<NT, THREADS>(acc, reinterpret_cast<uint32_t *>(shared),
                             rm_tokens_of(a.x, a.ldx, a.k, row0, end), w, live, step0, steps);
    __syncthreads(); // the outputs overwrite the staged tokens
    float *mine = shared + threadIdx.x / RM_WARP * RM_PUT_WORDS<NT>;
    if (live && parts) put_parts<NT>(parts + split * a.m * pitch, pitch, acc, tile_row, row0, end);
    else if (live) rm_mma_put_outputs<SWIGLU, NT>(a, mine, acc, tile_row, row0, end);
  }
}

__device__ float sum_of_parts(const float *parts, int64_t splits, int64_t stride) {
  float acc = 0.0f;
#pragma unroll 4
  for (int64_t s = 0; s < splits; s++) acc = acc + parts[s * stride];
  return acc;
}

template <bool SWIGLU>
__global__ void __launch_bounds__(ADD_THREADS) add_kernel(rm_gemm_args a, const float *parts) {
  const int64_t col = blockIdx.x * ADD_THREADS + threadIdx.x, row = blockIdx.y,
                pitch = rm_mma_w_rows(a.n, SWIGLU), splits = rm_mma_splits(a.k);
  if (col >= a.n || (a.group_rows && (row < a.group_rows[0] || row >= a.group_rows[a.n_groups])))
    return;
  int64_t group = 0;
  while (a.bias && a.group_rows && row >= a.group_rows[group + 1]) group++;
  a.bias = rm_bias_of(RM_BF16, &a, group, SWIGLU);
  const float *from = parts + row * pitch + (SWIGLU ? rm_mma_gate_up_row(col, 0) : col);
  const float acc = sum_of_parts(from, splits, a.m * pitch);
  rm_put_output<RM_BF16, SWIGLU>(a, row, col, acc,
                                 SWIGLU ? sum_of_parts(from + 8, splits, a.m * pitch) : 0.0f);
}

template <bool SWIGLU, int NT> void launch(const rm_ctx *ctx, const rm_gemm_args *a) {
  const int64_t slots = rm_group_slots(a), splits = rm_mma_splits(a->k),
                rows = rm_mma_w_rows(a->n, SWIGLU);
  const unsigned x = rm_blocks(rows, WARPS * RM_MMA_ROWS), y = rm_row_blocks(a, RM_MMA_COLS * NT);
  const bool fits =
      static_cast<uint64_t>(splits * a->m * rows) * sizeof(float) <= ctx->workspace_bytes &&
      slots * splits <= MAX_GRID;
  const bool is_split =
      splits > 1 && x * y * slots < 2 * rm_cuda_processors() && fits && a->m <= MAX_GRID;
  float *parts = is_split ? static_cast<float *>(ctx->workspace) : nullptr;
  const dim3 grid = rm_grid(x, y, slots * (is_split ? splits : 1));
  RM_LAUNCH((rows_kernel<SWIGLU, NT>), grid, THREADS, RM_STAGED_WORDS<NT> * sizeof(uint32_t),
            ctx->stream, *a, parts);
  if (!is_split) return;
  const dim3 adding = rm_grid(rm_blocks(a->n, ADD_THREADS), a->m);
  RM_LAUNCH(add_kernel<SWIGLU>, adding, ADD_THREADS, 0, ctx->stream, *a, parts);
}

template <bool SWIGLU> void of_rows(const rm_ctx *ctx, const rm_gemm_args *a) {
  const int64_t rows = rm_launched_rows(a);
  if (rows <= RM_MMA_COLS && rm_cuda_gemm_mma_few(ctx, a, SWIGLU)) return;
  if (rows <= 16) launch<SWIGLU, 2>(ctx, a);
  else if (rows <= 32) launch<SWIGLU, 4>(ctx, a);
  else launch<SWIGLU, 8>(ctx, a);
}

} // namespace

// Workspace of a call with too few blocks. With a smaller workspace, k is not split.
size_t rm_cuda_gemm_mma_workspace(const rm_limits *l) {
  const int64_t splits = rm_mma_splits(l->max_k),
                rows = rm_min64(l->max_rows, RM_FEW_ROWS) * rm_max64(1, l->top_k);
  if (splits == 1) return 0;
  return static_cast<size_t>(rm_min64(splits * rows * rm_round_up(l->max_n, 2 * RM_MMA_ROWS) *
                                          static_cast<int64_t>(sizeof(float)),
                                      MAX_WORKSPACE));
}

void rm_cuda_gemm_mma_rows(const rm_ctx *ctx, const rm_gemm_args *a, bool swiglu) {
  if (swiglu) of_rows<true>(ctx, a);
  else of_rows<false>(ctx, a);
}

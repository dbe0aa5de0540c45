// lm_head.cu: logits, the (max, sum) of each 128 of them, and the merge of those pairs:
// docs/numerics.md §6.
//
// A block of threads computes one vocabulary block of 128 columns for 8 rows (or for a single row),
// so a row's pair is computed in the block that has its logits, and logits that are not requested
// are not written. The merge is a chain over more than a thousand pairs, but only its fma has to be
// sequential: the running maxima are a prefix maximum, which is exact in any order and determines
// every exp. So a warp prepares 32 steps at once and then runs them one after the other.
#include "lm_head.cuh"

namespace {

using pass = rm_logits_pass;

constexpr int COLS = RM_VOCAB_BLOCK, THREADS = COLS, WARPS = THREADS / RM_WARP,
              WORKSPACE_ROWS = 256;

template <rm_dtype DTYPE, int ROWS>
__global__ void __launch_bounds__(THREADS) logits_kernel(rm_lm_head_args a, pass t) {
  RM_SHARED(shared);
  float *x = shared, *logits = shared + ROWS * RM_K_BLOCK; // [ROWS][RM_K_BLOCK], [ROWS][COLS]
  const int me = rm_thread();
  const int64_t col = blockIdx.x * static_cast<int64_t>(COLS) + me;
  const int64_t first = t.row0 + blockIdx.y * static_cast<int64_t>(ROWS), end = t.row0 + t.rows;
  float acc[ROWS] = {};
  for (int64_t k0 = 0; k0 < a.hidden; k0 += RM_K_BLOCK) {
    rm_stage_rows<DTYPE, ROWS, RM_K_BLOCK, THREADS>(x, a.x, a.ldx, a.hidden, first, end, k0);
    __syncthreads();
    if (col < a.vocab)
      rm_add_block(acc, x, RM_K_BLOCK,
                   rm_column_of<DTYPE>(
                       a.w, rm_packed_index(DTYPE, a.hidden, col / RM_N_TILE * RM_N_TILE, k0),
                       me % RM_N_TILE));
    __syncthreads(); // before x is overwritten
  }
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    const float logit = rm_logit(&a, acc[r]);
    logits[r * COLS + me] = logit;
    rm_keep_logit(a, t, first + r, col, logit);
  }
  rm_block_pairs(a, t, logits, COLS, first, ROWS, WARPS);
}

struct stats {
  float max, sum;
};

// Called by one warp; every lane gets the result.
__device__ stats merge_row(const float *pairs, int64_t n_blocks, int64_t rows, int64_t row) {
  const int lane = rm_lane();
  float m = pairs[2 * row], s = pairs[2 * row + 1];
  for (int64_t b0 = 1; b0 < n_blocks; b0 += RM_WARP) {
    const int64_t b = b0 + lane;
    const float *pair = pairs + 2 * (b * rows + row);
    const float mine = b < n_blocks ? pair[0] : -INFINITY, sum = b < n_blocks ? pair[1] : 0.0f;
    float upto = mine;
    for (int step = 1; step < RM_WARP; step *= 2) {
      const float lower = __shfl_up_sync(RM_ALL_LANES, upto, step);
      if (lane >= step) upto = rm_max_f32(upto, lower);
    }
    upto = rm_max_f32(upto, m);
    const float shifted = __shfl_up_sync(RM_ALL_LANES, upto, 1), before = lane == 0 ? m : shifted;
    const float old = rm_exp(before - upto), add = sum * rm_exp(mine - upto);
    const int n = static_cast<int>(rm_min64(RM_WARP, n_blocks - b0));
    for (int i = 0; i < n; i++)
      s = fmaf(s, __shfl_sync(RM_ALL_LANES, old, i), __shfl_sync(RM_ALL_LANES, add, i));
    m = __shfl_sync(RM_ALL_LANES, upto, RM_WARP - 1);
  }
  return {m, s};
}

// Called by one warp: the stats, logprob and flags of a row.
__device__ void put_row(const rm_merge_pairs_args &a, int64_t row) {
  const stats all = merge_row(a.pairs, a.n_blocks, a.rows, row);
  if (rm_lane() == 0) rm_put_stats(&a, row, all.max, all.sum);
}

__global__ void __launch_bounds__(THREADS) merge_kernel(rm_merge_pairs_args a) {
  const int64_t row = blockIdx.x * static_cast<int64_t>(WARPS) + rm_warp();
  if (row < a.rows) put_row(a, row); // whole warps
}

// Runs after logits_kernel: computes the rest of a row. `merged`: of the pass, without a.pairs.
__global__ void __launch_bounds__(THREADS)
    finish_kernel(rm_lm_head_args a, pass t, rm_merge_pairs_args merged) {
  const int64_t in = blockIdx.x * static_cast<int64_t>(WARPS) + rm_warp(), row = t.row0 + in;
  const int lane = rm_lane();
  if (in >= t.rows) return; // whole warps
  if (lane == 0 && a.target_logits) {
    const int32_t target = a.targets ? a.targets[row] : -1;
    a.target_logits[row] = target >= 0 && target < a.vocab ? t.target_logits[in] : 0.0f;
  }
  if (!a.pairs) return put_row(merged, in);
  bool bad = false;
  for (int64_t b = lane; b < merged.n_blocks; b += RM_WARP)
    bad |= rm_is_nan(a.pairs[2 * (b * t.rows + in) + 1]) != 0;
  bad = __ballot_sync(RM_ALL_LANES, bad) != 0;
  if (lane == 0 && bad) a.row_flags[row] |= RM_ROW_LOGITS_NONFINITE;
}

int64_t count_blocks(int64_t vocab) { return (vocab + RM_VOCAB_BLOCK - 1) / RM_VOCAB_BLOCK; }
int64_t floats_of_row(int64_t vocab) { return 2 * count_blocks(vocab) + 1; }

template <int ROWS> void launch_logits(const rm_ctx *ctx, const rm_lm_head_args *a, pass t) {
  const dim3 grid = rm_grid(count_blocks(a->vocab), rm_blocks(t.rows, ROWS));
  const size_t shared = ROWS * (RM_K_BLOCK + COLS) * sizeof(float);
  rm_by_dtype(a->dtype, [&]<rm_dtype DTYPE>() {
    RM_LAUNCH((logits_kernel<DTYPE, ROWS>), grid, THREADS, shared, ctx->stream, *a, t);
  });
}

void fma_logits(const rm_ctx *ctx, const rm_lm_head_args *a, pass t) {
  if (t.rows == 1) launch_logits<1>(ctx, a, t);
  else launch_logits<8>(ctx, a, t);
}

void run_pass(const rm_ctx *ctx, const rm_lm_head_args *a, pass t, rm_logits_fn logits) {
  rm_merge_pairs_args merged = {};
  merged.pairs = t.pairs, merged.rows = t.rows, merged.n_blocks = count_blocks(a->vocab);
  merged.stats = a->stats + 2 * t.row0, merged.row_flags = a->row_flags + t.row0;
  merged.target_logits = t.target_logits;
  if (a->target_logprobs)
    merged.target_logprobs = a->target_logprobs + t.row0, merged.targets = a->targets + t.row0;
  logits(ctx, a, t);
  RM_LAUNCH(finish_kernel, rm_blocks(t.rows, WARPS), THREADS, 0, ctx->stream, *a, t, merged);
}

} // namespace

size_t rm_cuda_lm_head_workspace(const rm_limits *l) {
  return static_cast<size_t>(rm_min64(l->max_rows, WORKSPACE_ROWS) * floats_of_row(l->vocab)) *
         sizeof(float);
}

void rm_cuda_lm_head_by(const rm_ctx *ctx, const rm_lm_head_args *a, rm_logits_fn logits) {
  if (a->pairs) return run_pass(ctx, a, {a->pairs, a->target_logits, 0, a->rows}, logits);
  float *pairs = static_cast<float *>(ctx->workspace);
  const size_t per_row = static_cast<size_t>(floats_of_row(a->vocab)) * sizeof(float);
  const int64_t at_once = rm_max64(1, static_cast<int64_t>(ctx->workspace_bytes / per_row));
  for (int64_t row0 = 0; row0 < a->rows; row0 += at_once) {
    const int64_t rows = rm_min64(at_once, a->rows - row0);
    run_pass(ctx, a, {pairs, pairs + 2 * count_blocks(a->vocab) * rows, row0, rows}, logits);
  }
}

void rm_cuda_lm_head(const rm_ctx *ctx, const rm_lm_head_args *a) {
  rm_cuda_lm_head_by(ctx, a, fma_logits);
}

void rm_cuda_merge_pairs(const rm_ctx *ctx, const rm_merge_pairs_args *a) {
  RM_LAUNCH(merge_kernel, rm_blocks(a->rows, WARPS), THREADS, 0, ctx->stream, *a);
}

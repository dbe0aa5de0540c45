// lm_head_mma.cu: lm_head of the family cuda_mma in bf16. A block of threads computes one
// vocabulary block of 128 entries, 16 per warp, for up to 32 rows. Its logits go to shared memory,
// where the warps compute the pairs as in lm_head.cu. Rejected: keeping the sum of exp in the
// registers that hold the logits, because reading them back takes almost no time compared with
// reading W.
#include "lm_head.cuh"
#include "mma_rows.cuh"

namespace {

constexpr int COLS = RM_VOCAB_BLOCK, WARPS = COLS / RM_MMA_ROWS, THREADS = WARPS * RM_WARP;
constexpr int PITCH = COLS + 4; // the four columns of a warp's sums are in different banks

template <int NT>
__global__ void __launch_bounds__(THREADS) logits_kernel(rm_lm_head_args a, rm_logits_pass t) {
  RM_SHARED(shared);
  constexpr int ROWS = RM_MMA_COLS * NT;
  uint32_t *staged = reinterpret_cast<uint32_t *>(shared);
  float *logits = shared + RM_STAGED_WORDS<NT>; // [ROWS][PITCH]
  const int warp = rm_warp(), lane = rm_lane();
  const int64_t col0 = blockIdx.x * static_cast<int64_t>(COLS),
                first = t.row0 + blockIdx.y * static_cast<int64_t>(ROWS), end = t.row0 + t.rows,
                tile_row = col0 / RM_MMA_ROWS + warp;
  float acc[NT][4] = {};
  rm_mma_rows<NT, THREADS>(acc, staged, rm_tokens_of(a.x, a.ldx, a.hidden, first, end),
                           rm_mma_row(a.w, 0, tile_row, a.hidden), tile_row * RM_MMA_ROWS < a.vocab,
                           0, static_cast<int>(rm_mma_steps(a.hidden)));
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int in = warp * RM_MMA_ROWS + lane / 4 + i / 2 * 8,
                r = n * RM_MMA_COLS + lane % 4 * 2 + i % 2;
      const float logit = rm_logit(&a, acc[n][i]);
      logits[r * PITCH + in] = logit;
      rm_keep_logit(a, t, first + r, col0 + in, logit);
    }
  rm_block_pairs(a, t, logits, PITCH, first, ROWS, WARPS);
}

template <int NT> void launch(const rm_ctx *ctx, const rm_lm_head_args *a, rm_logits_pass t) {
  const dim3 grid = rm_grid(rm_blocks(a->vocab, COLS), rm_blocks(t.rows, RM_MMA_COLS * NT));
  const size_t shared = (RM_STAGED_WORDS<NT> + RM_MMA_COLS * NT * PITCH) * sizeof(float);
  RM_LAUNCH(logits_kernel<NT>, grid, THREADS, shared, ctx->stream, *a, t);
}

void mma_logits(const rm_ctx *ctx, const rm_lm_head_args *a, rm_logits_pass t) {
  if (t.rows <= 8) launch<1>(ctx, a, t);
  else if (t.rows <= 16) launch<2>(ctx, a, t);
  else launch<4>(ctx, a, t);
}

} // namespace

void rm_cuda_mma_lm_head(const rm_ctx *ctx, const rm_lm_head_args *a) {
  rm_cuda_lm_head_by(ctx, a, mma_logits);
}

// lm_head.c: logits in float32, their (max, sum) and a target's logprob, in one pass over the
// head's weights. Threads take whole blocks of 128 vocabulary entries, eight tiles, and reduce each
// row's logits of a block to a pair while they are in the cache, so that logits are written only on
// request. merge_pairs then merges the pairs of a row in ascending order; on a mesh it merges the
// pairs of all ranks.
#include "panel.h"
#include "tables.h"
#include "variant.h"

enum { BLOCK_TILES = RM_VOCAB_BLOCK / RM_N_TILE };

typedef struct head_job {
  const rm_lm_head_args *a;
  int64_t row0, rows; // the ≤ PANEL_ROWS rows of this pass
  int64_t n_vocab_blocks;
  float *pairs; // [n_vocab_blocks][pair_rows][2]; the pass uses the first rows
  int64_t pair_rows;
  float *target_logits; // [rows]
  float *scratch; // of panel.h, per thread
  rm_work work; // blocks of the vocabulary
} head_job;

// The number of lanes of a block's vector i that are entries of the vocabulary.
VEC int64_t entries(int64_t n, int i) { return rm_min64(RM_LANES, n - i * RM_LANES); }

// Computes row r of a block from its dot products, acc [tile][row][16].
VEC void block_of_row(const head_job *job, const float *acc, int64_t r, int64_t block) {
  float logits[RM_VOCAB_BLOCK];
  const rm_lm_head_args *a = job->a;
  const int64_t v0 = block * RM_VOCAB_BLOCK, n = rm_min64(RM_VOCAB_BLOCK, a->vocab - v0);
  const vf none = vf_set1(-INFINITY);
  vf max = none, partial = vf_zero();
  int bad = 0;
  for (int i = 0; entries(n, i) > 0; i++) {
    const vi present = vi_first(entries(n, i));
    vf logit = vf_load(acc + (i * job->rows + r) * RM_LANES);
    if (a->scale != 0.0f) logit = vf_mul(logit, vf_set1(a->scale));
    logit = vf_canon(vf_softcap(logit, a->softcap));
    bad |= vf_any_nonfinite(vf_keep(logit, present));
    max = vf_max(vf_pick(present, logit, none), max);
    vf_store(logits + i * RM_LANES, logit);
  }
  const float block_max = vf_max16(max);
  for (int i = 0; entries(n, i) > 0; i++) {
    const vf e = vf_exp(vf_sub(vf_load(logits + i * RM_LANES), vf_set1(block_max)));
    partial = vf_add(partial, vf_keep(e, vi_first(entries(n, i))));
  }
  float *pair = job->pairs + 2 * (block * job->pair_rows + r);
  pair[0] = block_max;
  pair[1] = bad ? NAN : vf_tree16(partial);
  const int64_t row = job->row0 + r;
  if (a->logits) memcpy(a->logits + row * a->ld_logits + v0, logits, (size_t)n * sizeof *logits);
  if (a->targets && a->targets[row] >= v0 && a->targets[row] < v0 + n)
    job->target_logits[r] = logits[a->targets[row] - v0];
}

VEC void head_blocks(rm_dtype T, head_job *job, float *memory, int n_threads) {
  const rm_lm_head_args *a = job->a;
  const int64_t n_blocks = rm_round_up(a->hidden, RM_K_BLOCK) / RM_K_BLOCK,
                n_tiles_all = (a->vocab + RM_N_TILE - 1) / RM_N_TILE;
  float *acc = memory + PANEL_ROWS * n_blocks * RM_K_BLOCK;
  int64_t from, to;
  const panel_rows x =
      fill_panel(T, memory, rm_at(T, a->x, job->row0 * a->ldx), a->ldx, job->rows, a->hidden);
  while (rm_take(&job->work, n_threads, &from, &to))
    for (int64_t block = from; block < to; block++) {
      const int64_t tile = block * BLOCK_TILES, n_tiles = rm_min64(BLOCK_TILES, n_tiles_all - tile);
      panel_dots(T, x, job->rows, rm_at(T, a->w, tile * n_blocks * TILE), n_tiles, n_blocks, acc);
      for (int64_t r = 0; r < job->rows; r++) block_of_row(job, acc, r, block);
    }
}

static void blocks_task(void *arg, int thread, int n_threads) {
  head_job *job = arg;
  SPECIALIZE(job->a->dtype,
             head_blocks(T, job, job->scratch + thread * dots_floats(job->a->hidden), n_threads));
}

// ----------------------------------------------------------------------------------------- the op
static void merge_pass(const rm_ctx *ctx, const head_job *job) {
  const rm_lm_head_args *a = job->a;
  const rm_merge_pairs_args pass = {.stats = a->stats + 2 * job->row0,
                                    .target_logprobs =
                                        a->target_logprobs ? a->target_logprobs + job->row0 : NULL,
                                    .targets = a->targets ? a->targets + job->row0 : NULL,
                                    .row_flags = a->row_flags + job->row0,
                                    .pairs = job->pairs,
                                    .target_logits = job->target_logits,
                                    .rows = job->rows,
                                    .n_blocks = job->n_vocab_blocks};
  rm_merge_pairs_ref(ctx, &pass);
}

static void flag_pass(const head_job *job) {
  for (int64_t b = 0; b < job->n_vocab_blocks; b++)
    for (int64_t r = 0; r < job->rows; r++)
      if (rm_is_nan(job->pairs[2 * (b * job->pair_rows + r) + 1]))
        job->a->row_flags[job->row0 + r] |= RM_ROW_LOGITS_NONFINITE;
}

static int64_t count_blocks(int64_t vocab) {
  return rm_round_up(vocab, RM_VOCAB_BLOCK) / RM_VOCAB_BLOCK;
}

// Floats for the pairs and target logits of a pass.
static int64_t pass_floats(int64_t vocab) { return (count_blocks(vocab) * 2 + 1) * PANEL_ROWS; }

void RM_FN(lm_head)(const rm_ctx *ctx, const rm_lm_head_args *a) {
  head_job job = {.a = a, .n_vocab_blocks = count_blocks(a->vocab)};
  float *own = ctx->workspace;
  job.scratch = own + pass_floats(a->vocab);
  for (job.row0 = 0; job.row0 < a->rows; job.row0 += PANEL_ROWS) {
    job.rows = rm_min64(PANEL_ROWS, a->rows - job.row0);
    job.pairs = a->pairs ? a->pairs + 2 * job.row0 : own;
    job.pair_rows = a->pairs ? a->rows : job.rows;
    job.target_logits =
        a->target_logits ? a->target_logits + job.row0 : own + job.n_vocab_blocks * 2 * PANEL_ROWS;
    if (a->target_logits)
      memset(job.target_logits, 0, (size_t)job.rows * sizeof *job.target_logits);
    job.work = (rm_work){.n = job.n_vocab_blocks, .least = 1};
    rm_parallel(ctx, a->vocab / RM_N_TILE * (job.rows + 4) * a->hidden, blocks_task, &job);
    if (a->pairs) flag_pass(&job);
    else merge_pass(ctx, &job);
  }
}

size_t RM_FN(lm_head_workspace)(const rm_limits *l) {
  return (size_t)(pass_floats(l->vocab) + l->n_threads * dots_floats(l->max_k)) * sizeof(float);
}

// head.c: trials of what stands over the vocabulary: lm_head, merge_pairs, sample, top_logprobs,
// ranks.
#include <math.h>
#include <string.h>

#include "trial.h"

static int64_t draw_vocab(trial *t, int64_t most) {
  const int64_t edge = PICK(t, 1, 2, 15, 16, 17, 31, 33, 64, 127, 128, 129, 144, 255, 256, 257, 383,
                            385, 1023, 1024, 1025, 2047, 2049);
  return rm_min64(one_in(t, 5) ? between(t, 1, most) : edge, most);
}

// ---------------------------------------------------------------------------------------- lm_head
enum {
  HEAD_LOGITS = 1,
  HEAD_TARGETS = 2,
  HEAD_STRIDES = 4,
  HEAD_PAIRS = 8,
  HEAD_TARGET_LOGITS = 16
};

static void draw_lm_head(trial *t) {
  shape *s = &t->s;
  *s = (shape){.rows = draw_rows(t, t->small ? 17 : 1025),
               .vocab = draw_vocab(t, t->small ? 257 : 3000),
               .k = draw_depth(t, 300)};
  if (s->rows > 100) s->k = rm_min64(s->k, 33);
  if (!t->small && one_in(t, 20)) { // more blocks than a warp of a GPU has lanes
    s->rows = between(t, 1, 2);
    s->vocab = PICK(t, 4096, 4500);
    s->k = rm_min64(s->k, 64);
  }
  while (s->rows * s->vocab * s->k > (t->small ? 300000 : 8000000)) s->vocab = (s->vocab + 1) / 2;
  s->option = (int)between(t, 0, 31);
  if (s->option & HEAD_PAIRS && one_in(t, 12)) s->vocab = 0; // a rank that has no block
  s->dtype = draw_dtype(t);
}

// stats and the targets' logprobs, which a call that asks for pairs must leave alone.
static void *stats_output(trial *t, const char *name, int64_t n) {
  return t->s.option & HEAD_PAIRS ? partial_output(t, name, n, sizeof(float), 0)
                                  : output(t, name, n, sizeof(float));
}

static void build_lm_head(trial *t) {
  const shape *s = &t->s;
  rm_lm_head_args *a = &t->args.lm_head;
  const kind what = draw_kind(t, SPOILED);
  *a = (rm_lm_head_args){
      .rows = s->rows, .vocab = s->vocab, .hidden = s->k, .ldx = s->k, .dtype = s->dtype};
  a->scale = draw_factor(t);
  a->softcap = draw_factor(t);
  a->ldx = draw_stride(t, s->k, s->option & HEAD_STRIDES);
  a->x = strided_input(t, "x", s->dtype, s->rows, s->k, a->ldx, what);
  const packing p = {.as = MATRICES, .n = 1, .rows = s->vocab, .k = s->k};
  a->w = packed_input(t, "w", s->dtype, p, one_in(t, 2) ? what : PLAIN);
  if (s->option & HEAD_LOGITS) {
    a->ld_logits = s->vocab + (s->option & HEAD_STRIDES ? between(t, 0, 40) : 0);
    const int64_t room = s->rows ? (s->rows - 1) * a->ld_logits + s->vocab : 0;
    a->logits = partial_output(t, "logits", room, sizeof *a->logits, s->rows * s->vocab);
  }
  a->stats = stats_output(t, "stats", s->rows * 2);
  if (s->option & HEAD_PAIRS)
    a->pairs = output(t, "pairs", (s->vocab + RM_VOCAB_BLOCK - 1) / RM_VOCAB_BLOCK * s->rows * 2,
                      sizeof *a->pairs);
  if (s->option & (HEAD_TARGETS | HEAD_TARGET_LOGITS)) {
    int32_t *targets = input(t, "targets", s->rows, sizeof *targets);
    for (int64_t r = 0; r < s->rows; r++) targets[r] = (int32_t)between(t, -1, s->vocab - 1);
    a->targets = targets;
  }
  if (s->option & HEAD_TARGETS) a->target_logprobs = stats_output(t, "target_logprobs", s->rows);
  if (s->option & HEAD_TARGET_LOGITS)
    a->target_logits = output(t, "target_logits", s->rows, sizeof *a->target_logits);
  a->row_flags = partial_output(t, "row_flags", s->rows, 1, s->rows);
  for (int64_t r = 0; r < s->rows; r++)
    a->row_flags[r] = (uint8_t)PICK(t, 0, 0, RM_ROW_KV_NONFINITE);
  t->limits = (rm_limits){.max_rows = s->rows, .max_k = s->k, .vocab = s->vocab};
  t->flops = 2.0 * (double)(s->rows * s->vocab) * (double)s->k;
}

static void call_lm_head(const rm_kernels *k, const rm_ctx *ctx, trial *t) {
  k->lm_head(ctx, &t->args.lm_head);
}

const op_test op_lm_head = {
    .name = "lm_head",
    .share = 80,
    .takes_passes = 1,
    .draw = draw_lm_head,
    .build = build_lm_head,
    .call = call_lm_head,
    .bench = {{.rows = 1, .vocab = 32768, .k = 2048, .option = HEAD_LOGITS},
              {.rows = 32, .vocab = 32768, .k = 2048, .option = HEAD_LOGITS},
              {.rows = 256, .vocab = 8192, .k = 2048, .option = HEAD_TARGETS},
              {.rows = 256, .vocab = 8192, .k = 2048, .option = HEAD_PAIRS | HEAD_TARGET_LOGITS}}};

// ------------------------------------------------------------------------------------ merge_pairs
static void draw_merge_pairs(trial *t) {
  t->s = (shape){.rows = draw_rows(t, t->small ? 33 : 1025),
                 .n = PICK(t, 1, 1, 2, 3, 4, 7, 17, 31, 32, 33, 40, 65, 130)};
  if (one_in(t, 12)) t->s = (shape){.rows = between(t, 1, 5), .n = 1187};
  t->s.option = (int)between(t, 0, 1) * HEAD_TARGETS;
}

// Pairs as blocks have them, sums of 1 to 128 among them NaNs; or any numbers at all.
static const float *draw_pairs(trial *t) {
  const int64_t n = t->s.n * t->s.rows;
  const kind what = draw_kind(t, SPOILED);
  const int any = !t->timed && one_in(t, 3), spoiled = !t->timed && one_in(t, 2);
  float *pairs = float_input(t, "pairs", RM_F32, 2 * n, what);
  // Contract of a GPU's kernels: a maximum is a number, and the sum of an infinite one is a NaN. The
  // CPU's variants are equal for all other inputs too.
  for (int64_t i = 0; i < n && check_device.is_gpu; i++) {
    if (isnan(pairs[2 * i])) pairs[2 * i] = INFINITY;
    if (isinf(pairs[2 * i])) pairs[2 * i + 1] = NAN;
  }
  for (int64_t i = 0; i < n && !any; i++) {
    pairs[2 * i] *= 8.0f;
    pairs[2 * i + 1] =
        spoiled && one_in(t, 200) ? NAN : 1.0f + 127.0f * (float)between(t, 0, 1 << 20) * 0x1p-20f;
  }
  return pairs;
}

static void build_merge_pairs(trial *t) {
  const shape *s = &t->s;
  rm_merge_pairs_args *a = &t->args.merge_pairs;
  *a = (rm_merge_pairs_args){.rows = s->rows, .n_blocks = s->n, .pairs = draw_pairs(t)};
  a->stats = output(t, "stats", s->rows * 2, sizeof *a->stats);
  if (s->option & HEAD_TARGETS) {
    int32_t *targets = input(t, "targets", s->rows, sizeof *targets);
    for (int64_t r = 0; r < s->rows; r++) targets[r] = (int32_t)between(t, -1, 3);
    a->targets = targets;
    a->target_logits = float_input(t, "target_logits", RM_F32, s->rows, draw_kind(t, SPOILED));
    a->target_logprobs = output(t, "target_logprobs", s->rows, sizeof *a->target_logprobs);
  }
  a->row_flags = partial_output(t, "row_flags", s->rows, 1, s->rows);
  for (int64_t r = 0; r < s->rows; r++)
    a->row_flags[r] = (uint8_t)PICK(t, 0, 0, RM_ROW_KV_NONFINITE);
  t->limits = (rm_limits){.max_rows = s->rows, .vocab = s->n * RM_VOCAB_BLOCK};
}

static void call_merge_pairs(const rm_kernels *k, const rm_ctx *ctx, trial *t) {
  k->merge_pairs(ctx, &t->args.merge_pairs);
}

const op_test op_merge_pairs = {.name = "merge_pairs",
                                .share = 4,
                                .draw = draw_merge_pairs,
                                .build = build_merge_pairs,
                                .call = call_merge_pairs,
                                .bench = {{.rows = 1, .n = 1187, .option = HEAD_TARGETS},
                                          {.rows = 96, .n = 1187, .option = HEAD_TARGETS}}};

// ------------------------------------------------------------------------ logits that others made
enum {
  LOGITS_SPREAD = 1,
  LOGITS_FEW = 2,
  LOGITS_FLAT = 3,
  LOGITS_HARD = 4,
  LOGITS_SPOILED = 5,
  SAMPLE_ALL = 16,
  ONE_ROW = 32
};

static void draw_logits(trial *t) {
  shape *s = &t->s;
  s->rows = t->small ? between(t, 0, 4) : draw_rows(t, 40);
  s->option = (int)between(t, 0, LOGITS_SPOILED);
  // These are slow in the reference.
  const int ties = s->option == LOGITS_FEW || s->option == LOGITS_FLAT || s->option == LOGITS_HARD;
  s->vocab = draw_vocab(t, t->small ? 300 : !ties ? 5000 : one_in(t, 50) ? 1100 : 300);
  if (!t->small && !ties && one_in(t, check_device.is_gpu ? 20 : 300))
    s->vocab = 17000; // a GPU's draw narrows twice
  if (s->vocab > 300) s->rows = rm_min64(s->rows, 2);
}

static void draw_logits_or_one(trial *t) {
  draw_logits(t);
  if (one_in(t, 3)) t->s.option |= ONE_ROW;
}

// Rows of logits that there are, and the stride that says so.
static int64_t logits_rows(const trial *t) {
  return t->s.option & ONE_ROW ? rm_min64(t->s.rows, 1) : t->s.rows;
}
static int64_t logits_stride(const trial *t, int64_t stride) {
  return t->s.option & ONE_ROW ? 0 : stride;
}

// Numbers of a few units, or: spread over many; of few values, so that ties decide; all equal;
// hard; not all finite.
static const float *logits_input(trial *t, int64_t stride) {
  const shape *s = &t->s;
  const int what = s->option & 15;
  const int64_t rows = logits_rows(t);
  float *x = strided_input(t, "logits", RM_F32, rows, s->vocab, stride,
                           what == LOGITS_HARD      ? HARD
                           : what == LOGITS_FLAT    ? EQUAL
                           : what == LOGITS_SPOILED ? SPOILED
                                                    : PLAIN);
  for (int64_t r = 0; r < rows; r++)
    for (int64_t v = 0; v < s->vocab; v++) {
      float *at = x + r * stride + v;
      if (what == LOGITS_SPREAD) *at *= (float)(1 << between(t, 0, 6));
      if (what == LOGITS_FEW) *at = (float)between(t, -3, 3) * 0.5f;
    }
  return x;
}

static const float *stats_input(trial *t) {
  const int64_t rows = logits_rows(t);
  float *stats = input(t, "stats", rows * 2, sizeof *stats);
  for (int64_t r = 0; r < rows; r++) {
    stats[2 * r] = (float)between(t, -8, 64) * 0.37f;
    stats[2 * r + 1] = one_in(t, 20) ? NAN : (float)between(t, 1, 1 << 20) * 0.731f;
  }
  return stats;
}

// ----------------------------------------------------------------------------------------- sample
// Ascending tokens; sometimes all, sometimes numbers that overflow.
static const rm_logit_edit *draw_edits(trial *t, int32_t *n) {
  const int64_t vocab = t->s.vocab, step = one_in(t, 3) ? 1 : between(t, 1, vocab),
                first = between(t, 0, step - 1);
  *n = (int32_t)((vocab - first + step - 1) / step);
  rm_logit_edit *edits = input(t, "edits", *n, sizeof *edits);
  for (int32_t i = 0; i < *n; i++)
    edits[i] = (rm_logit_edit){(int32_t)(first + i * step), (int32_t)between(t, -1, 4),
                               one_in(t, 2) ? 0 : (float)between(t, -40, 40) * 0.37f};
  if (*n && one_in(t, 20)) edits[between(t, 0, *n - 1)].bias = one_in(t, 2) ? 3e38f : -3e38f;
  return edits;
}

static void edit_params(trial *t, rm_sample_params *p, const rm_logit_edit *edits,
                        int32_t n_edits) {
  static const float repetitions[] = {1.0f, 1.3f, 0.7f, 2.0f, 1e-30f, 1e30f};
  p->edits = edits;
  p->n_edits = one_in(t, 4) ? (int32_t)between(t, 0, n_edits) : n_edits;
  p->repetition_penalty = repetitions[between(t, 0, one_in(t, 5) ? 5 : 3)];
  p->frequency_penalty = (float)between(t, -20, 20) * 0.1f;
  p->presence_penalty = (float)between(t, -20, 20) * 0.1f;
}

static void draw_params(trial *t, rm_sample_params *p, const int32_t *banned, int64_t n_banned) {
  static const float temperatures[] = {0.0f, 1.0f,   1.0f,      1.0f,      0.7f, 0.01f,
                                       1.9f, 100.0f, 0x1p-130f, 0x1p-100f, 1e30f};
  static const float top_ps[] = {1.0f,   1.0f,     0.9f,           0.5f,
                                 0.999f, 0x1p-30f, 0x1.fffffep-1f, 0x1p-126f};
  static const float min_ps[] = {0.0f, 0.0f, 0.0f, 0.05f, 0.5f, 1.0f, 0x1p-40f};
  const int64_t v = t->s.vocab;
  const int all = t->s.option & SAMPLE_ALL;
  *p = (rm_sample_params){.temperature = 1.0f,
                          .top_p = 1.0f,
                          .top_k = -1,
                          .forced = -1,
                          .seed = next64(t),
                          .counter = next64(t)};
  if (t->timed) {
    if (all) p->top_p = 0.9f;
    return;
  }
  p->temperature = temperatures[between(t, 0, 10)];
  if (one_in(t, 2)) p->top_p = top_ps[between(t, 0, 7)];
  if (one_in(t, 2)) p->min_p = min_ps[between(t, 0, 6)];
  if (one_in(t, 2))
    p->top_k = (int32_t)PICK(t, -1, 1, 2, 3, 15, 16, 17, 50, v, v + 1, rm_max64(1, v - 1),
                             rm_max64(1, v / 2));
  if (one_in(t, 3)) {
    p->banned = banned;
    p->n_banned = (int32_t)between(t, 0, n_banned);
  }
  if (one_in(t, 5)) p->forced = (int32_t)between(t, 0, v - 1);
  if (one_in(t, 8)) p->counter = (uint64_t)between(t, 0, 3) - 1;
}

static void build_sample(trial *t) {
  const shape *s = &t->s;
  rm_sample_args *a = &t->args.sample;
  const int64_t stride = s->vocab + (t->timed ? 0 : between(t, 0, 20));
  *a = (rm_sample_args){.rows = s->rows, .vocab = s->vocab, .ld_logits = logits_stride(t, stride)};
  a->logits = logits_input(t, stride);
  a->stats = stats_input(t);
  const int64_t n_banned = one_in(t, 4) ? s->vocab : rm_min64(s->vocab, 5);
  int32_t *banned = input(t, "banned", n_banned, sizeof *banned);
  for (int64_t i = 0; i < n_banned; i++)
    banned[i] = (int32_t)(n_banned == s->vocab ? i : between(t, 0, s->vocab - 1));
  rm_sample_params *params = input(t, "params", s->rows, sizeof *params);
  uint8_t *flags = input(t, "row_flags", logits_rows(t), 1);
  for (int64_t r = 0; r < s->rows; r++) draw_params(t, params + r, banned, n_banned);
  int32_t n_edits = 0;
  const rm_logit_edit *edits = t->timed || one_in(t, 2) ? NULL : draw_edits(t, &n_edits);
  for (int64_t r = 0; r < s->rows && edits; r++)
    if (one_in(t, 2)) edit_params(t, params + r, edits, n_edits);
  for (int64_t r = 0; r < logits_rows(t); r++)
    flags[r] = !t->timed && one_in(t, 12) ? RM_ROW_LOGITS_NONFINITE : 0;
  a->params = params;
  a->row_flags = flags;
  a->tokens = output(t, "tokens", s->rows, sizeof *a->tokens);
  a->logprobs = output(t, "logprobs", s->rows, sizeof *a->logprobs);
  a->sampling_logprobs = output(t, "sampling_logprobs", s->rows, sizeof *a->sampling_logprobs);
  if (!t->timed && one_in(t, 2)) a->kept = output(t, "kept", s->rows, sizeof *a->kept);
  t->limits = (rm_limits){.max_rows = s->rows, .vocab = s->vocab};
}

static void call_sample(const rm_kernels *k, const rm_ctx *ctx, trial *t) {
  k->sample(ctx, &t->args.sample);
}

const op_test op_sample = {
    .name = "sample",
    .share = 1,
    .takes_passes = 1,
    .draw = draw_logits_or_one,
    .build = build_sample,
    .call = call_sample,
    .bench = {{.rows = 16, .vocab = 151936, .option = LOGITS_SPREAD},
              {.rows = 16, .vocab = 151936, .option = LOGITS_SPREAD | SAMPLE_ALL}}};

// ----------------------------------------------------------------------------------- top_logprobs
static void draw_top(trial *t) {
  draw_logits(t);
  t->s.k = rm_min64(PICK(t, 0, 1, 2, 5, 15, 16, 17, 20, 33, 64, 100), t->s.vocab);
}

static void build_top(trial *t) {
  const shape *s = &t->s;
  rm_top_logprobs_args *a = &t->args.top;
  *a = (rm_top_logprobs_args){.rows = s->rows,
                              .vocab = s->vocab,
                              .k = s->k,
                              .ld_logits = s->vocab + (t->timed ? 0 : between(t, 0, 20))};
  a->logits = logits_input(t, a->ld_logits);
  a->stats = stats_input(t);
  a->ids = output(t, "ids", s->rows * s->k, sizeof *a->ids);
  a->logprobs = output(t, "logprobs", s->rows * s->k, sizeof *a->logprobs);
  t->limits = (rm_limits){.max_rows = s->rows, .vocab = s->vocab};
}

static void call_top(const rm_kernels *k, const rm_ctx *ctx, trial *t) {
  k->top_logprobs(ctx, &t->args.top);
}

const op_test op_top_logprobs = {
    .name = "top_logprobs",
    .share = 4,
    .draw = draw_top,
    .build = build_top,
    .call = call_top,
    .bench = {{.rows = 16, .vocab = 151936, .k = 20, .option = LOGITS_SPREAD}}};

// ------------------------------------------------------------------------------------------ ranks
static void build_ranks(trial *t) {
  const shape *s = &t->s;
  const int64_t stride = s->vocab + (t->timed ? 0 : between(t, 0, 20));
  rm_ranks_args *a = &t->args.ranks;
  *a = (rm_ranks_args){.rows = s->rows, .vocab = s->vocab, .ld_logits = logits_stride(t, stride)};
  a->logits = logits_input(t, stride);
  int32_t *tokens = input(t, "tokens", s->rows, sizeof *tokens);
  for (int64_t r = 0; r < s->rows; r++)
    tokens[r] = (int32_t)(t->timed || !one_in(t, 8) ? between(t, 0, s->vocab - 1) : -1);
  a->tokens = tokens;
  a->ranks = output(t, "ranks", s->rows, sizeof *a->ranks);
  t->limits = (rm_limits){.max_rows = s->rows, .vocab = s->vocab};
}

static void call_ranks(const rm_kernels *k, const rm_ctx *ctx, trial *t) {
  k->ranks(ctx, &t->args.ranks);
}

const op_test op_ranks = {.name = "ranks",
                          .share = 4,
                          .draw = draw_logits_or_one,
                          .build = build_ranks,
                          .call = call_ranks,
                          .bench = {{.rows = 16, .vocab = 151936, .option = LOGITS_SPREAD}}};

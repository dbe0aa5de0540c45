// logits.c: logits and the tokens that are drawn from them. See ops.h.
#include "ops.h"

#include <string.h>

// ---------------------------------------------------------------------------------------- lm_head
#define OP a.lm_head
static void head_sizes(rm_op_call *c) {
  rm_lm_head_args *a = &c->OP;
  c->s.elems = rm_op_packed_elems(c, "w", a->vocab, a->hidden);
  c->s.n_blocks = rm_round_up(a->vocab, RM_VOCAB_BLOCK) / RM_VOCAB_BLOCK;
  a->ldx = a->hidden;
  a->ld_logits = a->vocab;
  c->limits = (rm_limits){.max_rows = a->rows, .max_k = a->hidden, .vocab = a->vocab};
}

// Outputs of targets are computed from targets.
#define TARGETS(below_) \
  {OPTIONAL_AT(targets, I32, rows), .with = {"target_logprobs", "target_logits"}, .low = -1, \
   .below = AT(below_)}
// The first arguments of both ops.
#define HEAD(least) \
  SIZE(vocab, least), OPTIONAL_REAL(scale), OPTIONAL_REAL(softcap), IN(x, T, rows, hidden), \
      STEP(head_sizes), PACKED(w, elems), TARGETS(vocab), OPTIONAL_OUT(logits, F32, rows, vocab)
ARGUMENTS(lm_head) = {
    HEAD(1),
    OUT(stats, F32, rows, two),
    OPTIONAL_OUT(target_logprobs, F32, rows),
    ROW_FLAGS,
};

ARGUMENTS(lm_head_pairs) = {
    HEAD(0),
    OUT(pairs, F32, n_blocks, rows, two),
    OPTIONAL_OUT(target_logits, F32, rows),
    ROW_FLAGS,
};

// ------------------------------------------------------------------------------------ merge_pairs
#undef OP
#define OP a.merge_pairs
#define SIZE_block_count ~, a.merge_pairs.n_blocks
static void merge_sizes(rm_op_call *c) {
  const rm_merge_pairs_args *a = &c->OP;
  rm_op_at_least(c, "the blocks of pairs", a->n_blocks, 1);
  c->s.bounds = a->n_blocks * RM_VOCAB_BLOCK;
}

ARGUMENTS(merge_pairs) = {
    IN(pairs, F32, block_count, rows, two),
    STEP(merge_sizes),
    TARGETS(bounds),
    {OPTIONAL_AT(target_logits, F32, rows), .with = {"target_logprobs"}},
    OUT(stats, F32, rows, two),
    OPTIONAL_OUT(target_logprobs, F32, rows),
    ROW_FLAGS,
};

// ----------------------------------------------------------------------------------------- sample
#undef OP
#define OP a.sample
static void sample_sizes(rm_op_call *c) {
  rm_sample_args *a = &c->OP;
  rm_op_at_least(c, "vocab", a->vocab, 1);
  c->s.bounds = a->rows + 1;
}

static void check_columns(rm_op_call *c) {
  const rm_op_sizes *s = &c->s;
  const int32_t *starts = s->banned_starts;
  rm_op_in_range(c, "banned_starts", RM_OP_I32, starts, 0, s->bounds, 0, s->n_banned + 1);
  for (int64_t r = 0; r < c->OP.rows && !c->failed; r++) {
    if (starts[r + 1] < starts[r])
      rm_op_raise(c, RM_E_REQUEST, "banned_starts: expected ascending, at least %d, got %d",
                  starts[r], starts[r + 1]);
    if (!(s->temperature[r] >= 0.0f && s->top_p[r] > 0.0f && s->top_p[r] <= 1.0f &&
          s->min_p[r] >= 0.0f && s->min_p[r] <= 1.0f))
      rm_op_raise(c, RM_E_REQUEST,
                  "params: expected temperature >= 0, top_p in (0, 1] and min_p in [0, 1], got "
                  "others in row %zd",
                  r);
  }
}

// Makes the block of the parameters: of each row, and then the banned tokens of all rows.
static void sample_check(rm_op_call *c) {
  check_columns(c);
  c->s.params = rm_op_block_new(
      c, (size_t)c->s.bounds * sizeof *c->s.params + (size_t)c->s.n_banned * sizeof *c->s.banned,
      AT(params));
  c->OP.params = c->s.params;
}

// Fills the block from the columns.
static void sample_params(rm_op_call *c) {
  const rm_op_sizes *s = &c->s;
  const int32_t *starts = s->banned_starts, *banned = (const int32_t *)(c->OP.params + s->bounds);
  memcpy(s->params + s->bounds, s->banned, (size_t)s->n_banned * sizeof *banned);
  for (int64_t r = 0; r < c->OP.rows; r++)
    s->params[r] = (rm_sample_params){
        .temperature = s->temperature[r],
        .top_p = s->top_p[r],
        .min_p = s->min_p[r],
        .top_k = s->top_k[r],
        .seed = s->seed[r],
        .counter = s->counter[r],
        .banned = banned + starts[r],
        .n_banned = starts[r + 1] - starts[r],
        .forced = s->forced[r],
    };
}

#define COLUMN_AT(name_, type_, size) \
  .name = #name_, .type = RM_OP_##type_, .flags = RM_ARRAY_OF_HOST, \
  .value = offsetof(rm_op_call, s.name_), .dims = {AT(size)}
#define COLUMN(name, type, size) {COLUMN_AT(name, type, size)}
ARGUMENTS(sample) = {
    IN(logits, F32, rows, vocab),
    STEP(sample_sizes),
    IN(stats, F32, rows, two),
    ARRAY(row_flags, U8, RM_OP_NEW | RM_OP_ZERO, rows),
    OUT(tokens, I32, rows),
    OUT(logprobs, F32, rows),
    OUT(sampling_logprobs, F32, rows),
    OPTIONAL_OUT(kept, I32, rows),
    COLUMN(temperature, F32, rows),
    COLUMN(top_p, F32, rows),
    COLUMN(min_p, F32, rows),
    COLUMN(top_k, I32, rows),
    COLUMN(seed, U64, rows),
    COLUMN(counter, U64, rows),
    {COLUMN_AT(forced, I32, rows), .low = -1, .below = AT(vocab)},
    COLUMN(banned_starts, I32, bounds),
    COLUMN(banned, I32, n_banned),
    STEP(sample_check),
    COPY(ld_logits, vocab),
    LIMIT(max_rows, rows),
    LIMIT(vocab, vocab),
};

// ----------------------------------------------------------------------------------- top_logprobs
#undef OP
#define OP a.top_logprobs
static void top_check(rm_op_call *c) {
  rm_top_logprobs_args *a = &c->OP;
  if (a->k > a->vocab) rm_op_refuse(c, "k", a->k, "at most", a->vocab);
}

ARGUMENTS(top_logprobs) = {
    SIZE(k, 0),
    IN(logits, F32, rows, vocab),
    STEP(top_check),
    IN(stats, F32, rows, two),
    OUT(ids, I32, rows, k),
    OUT(logprobs, F32, rows, k),
    COPY(ld_logits, vocab),
    LIMIT(max_rows, rows),
    LIMIT(vocab, vocab),
};

// ------------------------------------------------------------------------------------------ ranks
#undef OP
#define OP a.ranks
ARGUMENTS(ranks) = {
    IN(logits, F32, rows, vocab), INDICES(tokens, I32, -1, vocab, rows),
    OUT(ranks, I32, rows),        COPY(ld_logits, vocab),
    LIMIT(max_rows, rows),        LIMIT(vocab, vocab),
};

const rm_op rm_ops_logits[] = {
    OP_OF_T(lm_head),
    OP_RUN(lm_head_pairs, run_lm_head, offsetof(rm_op_call, a.lm_head.dtype), NULL),
    OP_OF_F32(merge_pairs),
    OP_RUN(sample, run_sample, 0, sample_params),
    OP_OF_F32(top_logprobs),
    OP_OF_F32(ranks),
    {0},
};

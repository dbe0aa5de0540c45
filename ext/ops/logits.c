// logits.c: logits and the tokens that are drawn from them. See ops.h.
#include "ops.h"

#include <string.h>

#include "base/memory.h"

// ---------------------------------------------------------------------------------------- lm_head
static void head_sizes(rm_op_call *c) {
  c->v.elems = rm_op_packed_elems(c, "w", c->v.vocab, c->v.hidden);
  c->v.n_blocks = rm_round_up(c->v.vocab, RM_VOCAB_BLOCK) / RM_VOCAB_BLOCK;
}

static void head_targets(rm_op_call *c) {
  rm_op_in_range(c, "targets", c->v.targets, c->v.n_rows, -1, c->v.vocab);
}

// Outputs of targets are computed from targets.
static void targets_needed(rm_op_call *c, rm_op_argument *targets) {
  if (rm_op_given(c, "target_logprobs") || rm_op_given(c, "target_logits"))
    targets->flags = RM_ARRAY_IN;
}

#define TARGETS ADJUSTED(targets_needed, targets, I32, RM_ARRAY_OPTIONAL, n_rows)
static const rm_op_argument lm_head[] = {
    SIZE(vocab, 1),
    IN(x, T, n_rows, hidden),
    STEP(head_sizes),
    PACKED(w, elems),
    TARGETS,
    STEP(head_targets),
    OPTIONAL_OUT(logits, F32, n_rows, vocab),
    OUT(stats, F32, n_rows, two),
    OPTIONAL_OUT(target_logprobs, F32, n_rows),
    ROW_FLAGS,
    {0},
};

static const rm_op_argument lm_head_pairs[] = {
    SIZE(vocab, 0),
    IN(x, T, n_rows, hidden),
    STEP(head_sizes),
    PACKED(w, elems),
    TARGETS,
    STEP(head_targets),
    OPTIONAL_OUT(logits, F32, n_rows, vocab),
    OUT(pairs, F32, n_blocks, n_rows, two),
    OPTIONAL_OUT(target_logits, F32, n_rows),
    ROW_FLAGS,
    {0},
};
RUN(lm_head, rm_lm_head_args, .logits = v->logits, .stats = v->stats,
    .target_logprobs = v->target_logprobs, .pairs = v->pairs, .target_logits = v->target_logits,
    .targets = v->targets, .row_flags = v->row_flags, .x = v->x, .w = v->w, .rows = v->n_rows,
    .vocab = v->vocab, .hidden = v->hidden, .ldx = v->hidden, .ld_logits = v->vocab,
    .dtype = v->dtype)

// ------------------------------------------------------------------------------------ merge_pairs
static void merge_check(rm_op_call *c) {
  rm_op_at_least(c, "the blocks of pairs", c->v.n_blocks, 1);
  rm_op_in_range(c, "targets", c->v.targets, c->v.n_rows, -1, c->v.n_blocks * RM_VOCAB_BLOCK);
}

static void logits_needed(rm_op_call *c, rm_op_argument *target_logits) {
  if (rm_op_given(c, "target_logprobs")) target_logits->flags = RM_ARRAY_IN;
}

static const rm_op_argument merge_pairs[] = {
    IN(pairs, F32, n_blocks, n_rows, two),
    TARGETS,
    ADJUSTED(logits_needed, target_logits, F32, RM_ARRAY_OPTIONAL, n_rows),
    STEP(merge_check),
    OUT(stats, F32, n_rows, two),
    OPTIONAL_OUT(target_logprobs, F32, n_rows),
    ROW_FLAGS,
    {0},
};
RUN(merge_pairs, rm_merge_pairs_args, .stats = v->stats, .target_logprobs = v->target_logprobs,
    .targets = v->targets, .row_flags = v->row_flags, .pairs = v->pairs,
    .target_logits = v->target_logits, .rows = v->n_rows, .n_blocks = v->n_blocks)

// ----------------------------------------------------------------------------------------- sample
static void sample_sizes(rm_op_call *c) {
  rm_op_at_least(c, "vocab", c->v.vocab, 1);
  c->v.bounds = c->v.n_rows + 1;
}

static void check_columns(rm_op_call *c) {
  const rm_op_values *v = &c->v;
  const int32_t *starts = v->banned_starts;
  rm_op_in_range(c, "forced", v->forced, v->n_rows, -1, v->vocab);
  rm_op_in_range(c, "banned_starts", starts, v->bounds, 0, v->n_banned + 1);
  for (int64_t r = 0; r < v->n_rows && !c->failed; r++) {
    if (starts[r + 1] < starts[r])
      rm_op_refuse(c, RM_E_REQUEST, "banned_starts", starts[r + 1], "ascending, at least",
                   starts[r]);
    if (!(v->temperature[r] >= 0.0f && v->top_p[r] > 0.0f && v->top_p[r] <= 1.0f &&
          v->min_p[r] >= 0.0f && v->min_p[r] <= 1.0f))
      rm_op_raise(c, RM_E_REQUEST,
                  "params: expected temperature >= 0, top_p in (0, 1] and min_p in [0, 1], got "
                  "others in row %lld",
                  (long long)r);
  }
}

// The parameters of each row from their columns; on a device in a mirrored buffer.
static void sample_params(rm_op_call *c) {
  rm_op_values *v = &c->v;
  const int on_host = !c->self->op_device;
  const size_t of_params = (size_t)v->bounds * sizeof *v->params,
               of_banned = (size_t)v->n_banned * sizeof *v->banned;
  const int32_t *banned = v->banned, *starts = v->banned_starts;
  check_columns(c);
  if (c->failed) return;
  if (on_host) c->block = rm_alloc(of_params, 1);
  rm_sample_params *params = on_host ? c->block : rm_op_mirrored(c, of_params + of_banned);
  if (!params) {
    if (!c->failed) PyErr_NoMemory();
    c->failed = 1;
    return;
  }
  if (!on_host && of_banned)
    banned = rm_op_there(c, memcpy((char *)params + of_params, banned, of_banned));
  for (int64_t r = 0; r < v->n_rows; r++)
    params[r] = (rm_sample_params){
        .temperature = v->temperature[r],
        .top_p = v->top_p[r],
        .min_p = v->min_p[r],
        .top_k = v->top_ks[r],
        .seed = v->seed[r],
        .counter = v->counter[r],
        .banned = banned + starts[r],
        .n_banned = starts[r + 1] - starts[r],
        .forced = v->forced[r],
    };
  v->params = on_host ? params : rm_op_there(c, params);
}

#define COLUMN(name, type, size) ARRAY(name, type, RM_ARRAY_OF_HOST, size)
static const rm_op_argument sample[] = {
    IN(logits, F32, n_rows, vocab),
    STEP(sample_sizes),
    IN(stats, F32, n_rows, two),
    ARRAY(row_flags, U8, RM_OP_NEW | RM_OP_ZERO, n_rows),
    OUT(tokens, I32, n_rows),
    OUT(logprobs, F32, n_rows),
    OUT(sampling_logprobs, F32, n_rows),
    OPTIONAL_OUT(kept, I32, n_rows),
    COLUMN(temperature, F32, n_rows),
    COLUMN(top_p, F32, n_rows),
    COLUMN(min_p, F32, n_rows),
    {.name = "top_k",
     .type = RM_OP_I32,
     .flags = RM_ARRAY_OF_HOST,
     .value = AT(top_ks),
     .dims = {AT(n_rows)}},
    COLUMN(seed, U64, n_rows),
    COLUMN(counter, U64, n_rows),
    COLUMN(forced, I32, n_rows),
    COLUMN(banned_starts, I32, bounds),
    COLUMN(banned, I32, n_banned),
    STEP(sample_params),
    {0},
};
RUN(sample, rm_sample_args, .tokens = v->tokens, .logprobs = v->logprobs,
    .sampling_logprobs = v->sampling_logprobs, .kept = v->kept, .logits = v->logits,
    .stats = v->stats, .params = v->params, .row_flags = v->row_flags, .rows = v->n_rows,
    .vocab = v->vocab, .ld_logits = v->vocab)

// ---------------------------------------------------------------------------- top_logprobs, ranks
static void top_check(rm_op_call *c) {
  if (c->v.k > c->v.vocab) rm_op_refuse(c, RM_E_SHAPE, "k", c->v.k, "at most", c->v.vocab);
}

static const rm_op_argument top_logprobs[] = {
    SIZE(k, 0),
    IN(logits, F32, n_rows, vocab),
    STEP(top_check),
    IN(stats, F32, n_rows, two),
    OUT(ids, I32, n_rows, k),
    OUT(logprobs, F32, n_rows, k),
    {0},
};
RUN(top_logprobs, rm_top_logprobs_args, .ids = v->ids, .logprobs = v->logprobs, .logits = v->logits,
    .stats = v->stats, .rows = v->n_rows, .vocab = v->vocab, .ld_logits = v->vocab, .k = v->k)

static void ranks_check(rm_op_call *c) {
  rm_op_in_range(c, "tokens", c->v.tokens, c->v.n_rows, -1, c->v.vocab);
}

static const rm_op_argument ranks[] = {
    IN(logits, F32, n_rows, vocab),
    IN(tokens, I32, n_rows),
    STEP(ranks_check),
    OUT(ranks, I32, n_rows),
    {0},
};
RUN(ranks, rm_ranks_args, .ranks = v->ranks, .logits = v->logits, .tokens = v->tokens,
    .rows = v->n_rows, .vocab = v->vocab, .ld_logits = v->vocab)

const rm_op rm_ops_logits[] = {
    OP(lm_head),
    {"lm_head_pairs", lm_head_pairs, run_lm_head},
    OP(merge_pairs),
    OP(sample),
    OP(top_logprobs),
    OP(ranks),
    {0},
};

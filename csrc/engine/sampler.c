// sampler.c: from the batch to tokens and logprobs. The forward gives hidden states of the wanted rows; they go through lm_head
// max_out_rows at a time, so that a long prompt with logprobs needs no logits for all of its rows at once, and rows
// whose target's logprob is all that is wanted never have their logits stored.
//
// A call of the sample op takes a run of draws: from consecutive rows (decoding), or from one row (the first tokens of the
// n samples of a prompt), which is the same call with a row stride of 0.
#include "engine/state.h"

// What one call of lm_head left: rows [first, first + n) of outs; indices below are relative to first.
typedef struct rm_chunk {
  int64_t first, n;
  int has_logits;
  int own_rows;                 // of this rank's share of the rows alone
} rm_chunk;

static const rm_out_row *out_row(const rm_plan *plan, const rm_chunk *chunk, int64_t i) { return &plan->outs[chunk->first + i]; }

static int needs_logits(const rm_out_row *out) {
  const rm_group *group = out->seq->group;
  return out->draws || group->wants_logits || group->score_sampling || group->prompt_top || group->want_ranks;
}

// Whether one rank of a tp group can do for all what is wanted of the row: draw from it. Whatever is recorded of logits is recorded
// by every rank.
static int one_rank_does(const rm_out_row *out) {
  const rm_group *group = out->seq->group;
  if (group->top_logprobs || group->wants_logits || group->score_sampling || group->prompt_top || group->host_draws) return 0;
  return out->draws || !group->want_ranks;
}

static rm_code run_lm_head(rm_engine *engine, const char *hidden, int64_t first, rm_chunk *chunk, rm_error *err) {
  rm_plan *plan = &engine->plan;
  *chunk = (rm_chunk){first, rm_min64(plan->n_out - first, engine->max_out_rows), 0, engine->options.rank.tp != NULL};
  for (int64_t i = 0; i < chunk->n; i++) {
    const rm_out_row *out = out_row(plan, chunk, i);
    plan->targets[i] = out->target;
    plan->out_flags[i] = plan->row_flags[plan->out_rows[first + i]];
    chunk->has_logits |= needs_logits(out);
    chunk->own_rows &= one_rank_does(out);
  }
  const rm_head head = {
      .hidden = hidden + (size_t)(first * engine->spec->hidden_size) * rm_dtype_bytes(engine->options.dtype),
      .rows = chunk->n,
      .ld_logits = engine->ld_logits,
      .own_rows = chunk->own_rows,
      .logits = chunk->has_logits ? plan->logits : NULL,
      .stats = plan->stats,
      .target_logprobs = plan->target_logprobs,
      .targets = plan->targets,
      .row_flags = plan->out_flags,
  };
  const rm_code code = rm_model_head(engine->model, rm_store_weights(engine->store), &head, err);
  for (int64_t i = 0; i < chunk->n; i++) plan->row_flags[plan->out_rows[first + i]] |= plan->out_flags[i];
  return code;
}

// ---------------------------------------------------------------------------------------------- records of prompts
// Rows [i, end) that belong to one prompt, positions ascending by one.
static int64_t prompt_run(const rm_plan *plan, const rm_chunk *chunk, int64_t i) {
  const rm_out_row *first = out_row(plan, chunk, i);
  int64_t end = i + 1;
  while (end < chunk->n && out_row(plan, chunk, end)->seq == first->seq && out_row(plan, chunk, end)->target >= 0) end++;
  return end;
}

// n draws from rows [row, row + n), or with ld_logits 0 from that row alone.
static void run_sample(rm_engine *engine, int64_t row, int64_t n, int64_t ld_logits, int32_t *tokens, float *logprobs,
                       float *sampling_logprobs) {
  const rm_sample_args args = {
      .tokens = tokens,
      .logprobs = logprobs,
      .sampling_logprobs = sampling_logprobs,
      .logits = engine->plan.logits + row * engine->ld_logits,
      .stats = engine->plan.stats + 2 * row,
      .params = engine->plan.params,
      .row_flags = engine->plan.out_flags + row,
      .rows = n,
      .vocab = engine->spec->vocab_size,
      .ld_logits = ld_logits,
  };
  engine->kernels->sample(rm_model_ctx(engine->model), &args);
}

static rm_sample_params plain_params(const rm_group *group) {
  return (rm_sample_params){
      .temperature = group->temperature,
      .top_p = group->top_p,
      .min_p = group->min_p,
      .top_k = group->top_k,
      .forced = -1,
  };
}

// For the next token of a sequence.
rm_sample_params rm_params_of(const rm_sequence *seq) {
  const rm_group *group = seq->group;
  rm_sample_params params = plain_params(group);
  params.seed = seq->seed;
  params.counter = (uint64_t)rm_sequence_length(seq);
  if (seq->n_tokens < group->min_tokens) {
    params.banned = group->banned;
    params.n_banned = (int32_t)group->n_banned;
  }
  return params;
}

void rm_take_ranks(const rm_engine *engine, const float *logits, int64_t ld_logits, const int32_t *tokens, int64_t n, int32_t *ranks) {
  const rm_ranks_args args = {ranks, logits, tokens, n, engine->spec->vocab_size, ld_logits};
  engine->kernels->ranks(rm_model_ctx(engine->model), &args);
}

// Sampling logprobs of rows [row, row + n) of a scored prompt, whose tokens are known.
static void score_sampling(rm_engine *engine, const rm_chunk *chunk, int64_t row, int64_t n) {
  rm_plan *plan = &engine->plan;
  const rm_out_row *out = out_row(plan, chunk, row);
  for (int64_t i = 0; i < n; i++) {
    plan->params[i] = plain_params(out->seq->group);
    plan->params[i].forced = out[i].target;
  }
  run_sample(engine, row, n, engine->ld_logits, plan->unused_tokens, plan->unused_logprobs,
             out->seq->group->prompt_sampling + out->position);
}

static void top_logprobs(rm_engine *engine, int64_t row, int64_t n, int32_t k, int32_t *ids, float *logprobs) {
  const rm_top_logprobs_args args = {
      .ids = ids,
      .logprobs = logprobs,
      .logits = engine->plan.logits + row * engine->ld_logits,
      .stats = engine->plan.stats + 2 * row,
      .rows = n,
      .vocab = engine->spec->vocab_size,
      .ld_logits = engine->ld_logits,
      .k = k,
  };
  engine->kernels->top_logprobs(rm_model_ctx(engine->model), &args);
}

static void record_prompt_run(rm_engine *engine, const rm_chunk *chunk, int64_t row, int64_t end) {
  rm_plan *plan = &engine->plan;
  const rm_out_row *out = out_row(plan, chunk, row);
  rm_group *group = out->seq->group;
  const int64_t n = end - row, k = group->prompt_top, at = out->position;
  memcpy(group->prompt_logprobs + at, plan->target_logprobs + row, (size_t)n * sizeof(float));
  if (k) top_logprobs(engine, row, n, (int32_t)k, group->prompt_top_ids + at * k, group->prompt_top_logprobs + at * k);
  if (group->want_ranks)
    rm_take_ranks(engine, plan->logits + row * engine->ld_logits, engine->ld_logits, plan->targets + row, n, group->prompt_ranks + at);
  if (!group->score_sampling) return;
  for (int64_t i = row; i < end; i += engine->max_draws) score_sampling(engine, chunk, i, rm_min64(end - i, engine->max_draws));
}

static void record_prompts(rm_engine *engine, const rm_chunk *chunk) {
  const rm_plan *plan = &engine->plan;
  const int64_t vocab = engine->spec->vocab_size;
  for (int64_t i = 0; i < chunk->n; i++) {
    const rm_out_row *out = out_row(plan, chunk, i);
    if (out->seq->group->logits_out)
      memcpy(out->seq->group->logits_out + out->position * vocab, plan->logits + i * engine->ld_logits, (size_t)vocab * sizeof(float));
  }
  for (int64_t i = 0, end; i < chunk->n; i = end) {
    end = i + 1;
    if (out_row(plan, chunk, i)->target < 0) continue;
    end = prompt_run(plan, chunk, i);
    record_prompt_run(engine, chunk, i, end);
  }
}

// ---------------------------------------------------------------------------------------------- draws
// The end of the longest run from draw d: rows that follow one another (*step 1) or are one (*step 0).
static int64_t draw_run(const rm_engine *engine, int64_t d, int64_t end, int *step) {
  const rm_draw *draws = engine->plan.draws;
  int64_t at = d + 1;
  *step = at < end && draws[at].out == draws[d].out ? 0 : 1;
  while (at < end && at - d < engine->max_draws && draws[at].out == draws[at - 1].out + *step) at++;
  return at;
}

static void run_draws(rm_engine *engine, const rm_chunk *chunk, int64_t d, int64_t end, int step) {
  rm_plan *plan = &engine->plan;
  const int64_t first = plan->draws[d].out - chunk->first, ld_logits = step ? engine->ld_logits : 0;
  int want_ranks = 0;
  for (int64_t i = d; i < end; i++) {
    plan->params[i - d] = rm_params_of(plan->draws[i].seq);
    want_ranks |= plan->draws[i].seq->group->want_ranks;
  }
  run_sample(engine, first, end - d, ld_logits, plan->tokens + d, plan->logprobs + d, plan->sampling_logprobs + d);
  if (want_ranks) rm_take_ranks(engine, plan->logits + first * engine->ld_logits, ld_logits, plan->tokens + d, end - d, plan->ranks + d);
}

// Top-k of the row that a draw came from, straight into the record of the token that will be appended.
static void record_top(rm_engine *engine, const rm_chunk *chunk, int64_t d) {
  const rm_draw *draw = &engine->plan.draws[d];
  rm_sequence *seq = draw->seq;
  const int64_t k = seq->group->top_logprobs, at = seq->n_tokens * k;
  if (!k) return;
  if (d > 0 && draw[-1].out == draw->out) {   // a sibling's: its first token, like this one
    memcpy(seq->top_ids + at, draw[-1].seq->top_ids + at, (size_t)k * sizeof *seq->top_ids);
    memcpy(seq->top_logprobs + at, draw[-1].seq->top_logprobs + at, (size_t)k * sizeof *seq->top_logprobs);
    return;
  }
  top_logprobs(engine, draw->out - chunk->first, 1, (int32_t)k, seq->top_ids + at, seq->top_logprobs + at);
}

static void draw(rm_engine *engine, const rm_chunk *chunk, int64_t d, int64_t end) {
  for (int64_t at = d, stop; at < end; at = stop) {
    int step;
    stop = draw_run(engine, at, end, &step);
    run_draws(engine, chunk, at, stop, step);
  }
}

static int64_t draws_before(const rm_plan *plan, int64_t d, int64_t out) {
  while (d < plan->n_draws && plan->draws[d].out < out) d++;
  return d;
}

// Each rank draws from the rows whose logits it has, and tells the others.
static rm_code draw_own(rm_engine *engine, const rm_chunk *chunk, int64_t d, int64_t end, rm_error *err) {
  rm_plan *plan = &engine->plan;
  const rm_comm *tp = engine->options.rank.tp;
  int64_t counts[RM_MAX_TP], from = d;
  for (int r = 0; r < rm_comm_size(tp); r++) {
    const rm_range rows = rm_model_own_rows(engine->model, chunk->n, r);
    const int64_t to = draws_before(plan, from, chunk->first + rows.first + rows.n);
    counts[r] = to - from;
    if (r == rm_comm_rank(tp)) draw(engine, chunk, from, to);
    for (int64_t i = from; r == rm_comm_rank(tp) && i < to; i++)
      plan->drawn[i - d] = (rm_drawn){plan->tokens[i], plan->ranks[i], plan->logprobs[i], plan->sampling_logprobs[i]};
    from = to;
  }
  const rm_code code = rm_model_share(engine->model, plan->drawn, counts, sizeof *plan->drawn, err);
  for (int64_t i = d; i < end && !code; i++) {
    plan->tokens[i] = plan->drawn[i - d].token;
    plan->ranks[i] = plan->drawn[i - d].rank;
    plan->logprobs[i] = plan->drawn[i - d].logprob;
    plan->sampling_logprobs[i] = plan->drawn[i - d].sampling_logprob;
  }
  return code;
}

static rm_code draw_tokens(rm_engine *engine, const rm_chunk *chunk, int64_t *d, rm_error *err) {
  const int64_t first = *d, end = draws_before(&engine->plan, first, chunk->first + chunk->n);
  *d = end;
  if (first == end) return RM_OK;
  if (chunk->own_rows) return draw_own(engine, chunk, first, end, err);
  draw(engine, chunk, first, end);
  for (int64_t at = first; at < end; at++) record_top(engine, chunk, at);
  return RM_OK;
}

// Rows that a host draws from: their logits as they are.
static void hand_out(rm_engine *engine, const rm_chunk *chunk) {
  const rm_plan *plan = &engine->plan;
  const int64_t vocab = engine->spec->vocab_size;
  for (int64_t i = 0; plan->n_host && i < chunk->n; i++) {
    const rm_out_row *out = out_row(plan, chunk, i);
    const rm_group *group = out->seq->group;
    const int64_t to = out->seq->host_row, k = group->top_logprobs, at = out->seq->n_tokens * k;
    if (!out->draws || !group->host_draws) continue;
    memcpy(plan->host_logits + to * vocab, plan->logits + i * engine->ld_logits, (size_t)vocab * sizeof(float));
    memcpy(plan->host_stats + 2 * to, plan->stats + 2 * i, 2 * sizeof(float));
    if (k) top_logprobs(engine, i, 1, (int32_t)k, out->seq->top_ids + at, out->seq->top_logprobs + at);
  }
}

// ---------------------------------------------------------------------------------------------- the other ranks of the tp group
// They were told the same and have scheduled alike, or what they exchange would be of different batches.
static rm_code agree_on_batch(rm_engine *engine, rm_error *err) {
  const rm_plan *plan = &engine->plan;
  rm_comm *tp = engine->options.rank.tp;
  if (!tp) return RM_OK;
  uint64_t digest = (uint64_t)plan->n_rows, all[RM_MAX_TP];
  size_t bytes[RM_MAX_TP];
  for (int64_t r = 0; r < plan->n_rows; r++)
    digest =
        (digest ^ (uint64_t)(uint32_t)plan->ids[r] ^ (uint64_t)plan->slots[r] << 32) * 0x9E3779B97F4A7C15u + (uint64_t)plan->positions[r];
  for (int r = 0; r < rm_comm_size(tp); r++) bytes[r] = sizeof digest;
  const rm_code code = rm_comm_all_gather(tp, &digest, all, bytes, err);
  for (int r = 0; r < rm_comm_size(tp) && !code; r++)
    if (all[r] != digest)
      return rm_fail(err, RM_E_COLLECTIVE_MISMATCH,
                     "tp rank %d steps with another batch than tp rank %d; all ranks of a tp group get the same calls", r,
                     rm_comm_rank(tp));
  return code;
}

// A row of K or V that is not finite is seen by the ranks that have its head, and ends its request on all.
static rm_code share_flags(rm_engine *engine, rm_error *err) {
  rm_comm *tp = engine->options.rank.tp;
  rm_plan *plan = &engine->plan;
  if (!tp || !plan->n_rows) return RM_OK;
  size_t bytes[RM_MAX_TP];
  for (int r = 0; r < rm_comm_size(tp); r++) bytes[r] = (size_t)plan->n_rows;
  const rm_code code = rm_comm_all_gather(tp, plan->row_flags, plan->all_flags, bytes, err);
  for (int64_t i = 0; i < plan->n_rows * rm_comm_size(tp) && !code; i++) plan->row_flags[i % plan->n_rows] |= plan->all_flags[i];
  return code;
}

rm_code rm_forward(rm_engine *engine, rm_error *err) {
  rm_plan *plan = &engine->plan;
  const void *hidden;
  const rm_batch batch = {
      .n_rows = plan->n_rows,
      .n_seqs = engine->options.max_num_seqs,
      .max_pages = engine->max_pages,
      .ids = plan->ids,
      .positions = plan->positions,
      .seq_of_row = plan->seq_of_row,
      .slots = plan->slots,
      .block_tables = engine->block_tables,
      .n_out = plan->n_out,
      .out_rows = plan->out_rows,
      .routed = plan->routed,
      .row_flags = plan->row_flags,
  };
  memset(plan->row_flags, 0, (size_t)plan->n_rows);
  rm_code code = agree_on_batch(engine, err);
  if (!code) code = rm_model_forward(engine->model, rm_store_weights(engine->store), engine->kv, engine->n_pages, &batch, &hidden, err);
  if (!code) code = share_flags(engine, err);
  for (int64_t first = 0, d = 0; first < plan->n_out && !code; first += engine->max_out_rows) {
    rm_chunk chunk;
    if ((code = run_lm_head(engine, hidden, first, &chunk, err))) break;
    record_prompts(engine, &chunk);
    hand_out(engine, &chunk);
    code = draw_tokens(engine, &chunk, &d, err);
  }
  return code;
}

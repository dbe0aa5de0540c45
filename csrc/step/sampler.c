// sampler.c: from hidden states of the wanted rows to tokens and logprobs. The rows go through lm_head max_out_rows at a time, so that a
// long prompt with logprobs needs no logits for all of its rows at once, and rows whose target's logprob is all that is wanted never
// have their logits stored. What an op gives to a record directly goes by results.h.
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

static void *there(const rm_engine *engine, const void *here) { return rm_paired_on_device(&engine->paired, here); }

static rm_code run_lm_head(rm_engine *engine, const char *hidden, int64_t first, rm_chunk *chunk, rm_error *err) {
  rm_plan *plan = &engine->plan;
  *chunk = (rm_chunk){first, rm_min64(plan->n_out - first, engine->max_out_rows), 0, engine->options.rank.tp != NULL};
  for (int64_t i = 0; i < chunk->n; i++) {
    const rm_out_row *out = out_row(plan, chunk, i);
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
      .target_logprobs = there(engine, plan->target_logprobs + first),
      .targets = there(engine, plan->targets + first),
      .host_targets = plan->targets + first,
      .row_flags = there(engine, plan->out_flags + first),
  };
  return rm_model_head(engine->model, rm_store_weights(engine->store), &head, err);
}

// ---------------------------------------------------------------------------------------------- ops over logits
// Rows of the lot at hand. stats and flags are those of its first row, tokens and the rest the draws'.
static void run_sample(rm_engine *engine, const rm_chunk *chunk, int64_t row, int64_t n, int64_t ld_logits, const rm_sample_params *params,
                       int32_t *tokens, float *logprobs, float *sampling_logprobs) {
  const rm_sample_args args = {
      .tokens = tokens,
      .logprobs = logprobs,
      .sampling_logprobs = sampling_logprobs,
      .logits = engine->plan.logits + row * engine->ld_logits,
      .stats = engine->plan.stats + 2 * row,
      .params = params,
      .row_flags = there(engine, engine->plan.out_flags + chunk->first + row),
      .rows = n,
      .vocab = engine->spec->vocab_size,
      .ld_logits = ld_logits,
  };
  engine->kernels->sample(rm_model_ctx(engine->model), &args);
}

static void run_ranks(rm_engine *engine, int64_t row, int64_t n, int64_t ld_logits, const int32_t *tokens, int32_t *ranks) {
  const rm_ranks_args args = {
      .ranks = ranks,
      .logits = engine->plan.logits + row * engine->ld_logits,
      .tokens = tokens,
      .rows = n,
      .vocab = engine->spec->vocab_size,
      .ld_logits = ld_logits,
  };
  engine->kernels->ranks(rm_model_ctx(engine->model), &args);
}

// Into the records at `ids` and `logprobs`, [n][k]: as many rows at a time as results have room for.
static rm_code top_logprobs(rm_engine *engine, int64_t row, int64_t n, int64_t k, int32_t *ids, float *logprobs, rm_error *err) {
  rm_results *results = &engine->results;
  const size_t each = (size_t)k * sizeof(float), most = (rm_results_room(results) - 4 * RM_RESULT_ALIGN) / (2 * each);
  for (int64_t done = 0, rows; done < n; done += rows) {
    rows = (size_t)(n - done) < most ? n - done : (int64_t)most;
    const size_t bytes = (size_t)rows * each;
    const rm_code code = rm_results_reserve(results, 2, 2 * bytes, err);
    if (code) return code;
    const rm_top_logprobs_args args = {
        .ids = rm_results_take(results, ids + done * k, bytes),
        .logprobs = rm_results_take(results, logprobs + done * k, bytes),
        .logits = engine->plan.logits + (row + done) * engine->ld_logits,
        .stats = engine->plan.stats + 2 * (row + done),
        .rows = rows,
        .vocab = engine->spec->vocab_size,
        .ld_logits = engine->ld_logits,
        .k = k,
    };
    engine->kernels->top_logprobs(rm_model_ctx(engine->model), &args);
  }
  return RM_OK;
}

// ---------------------------------------------------------------------------------------------- records of prompts
// Rows [i, end) that belong to one prompt, positions ascending by one.
static int64_t prompt_run(const rm_plan *plan, int64_t i, int64_t end) {
  const rm_out_row *first = &plan->outs[i];
  int64_t at = i + 1;
  while (at < end && plan->outs[at].seq == first->seq && plan->outs[at].target >= 0) at++;
  return at;
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

// Sampling logprobs of rows [row, row + n) of a scored prompt, whose tokens are known.
static rm_code score_sampling(rm_engine *engine, const rm_chunk *chunk, int64_t row, int64_t n, rm_error *err) {
  rm_plan *plan = &engine->plan;
  rm_results *results = &engine->results;
  const rm_out_row *out = out_row(plan, chunk, row);
  const size_t given = (size_t)n * sizeof *plan->params, taken = (size_t)n * sizeof(float);
  for (int64_t i = 0; i < n; i++) {
    plan->params[i] = plain_params(out->seq->group);
    plan->params[i].forced = out[i].target;
  }
  const rm_code code = rm_results_reserve(results, 2, given + taken, err);
  if (code) return code;
  const rm_sample_params *params = rm_results_give(results, plan->params, given);
  run_sample(engine, chunk, row, n, engine->ld_logits, params, plan->unused_tokens, plan->unused_logprobs,
             rm_results_take(results, out->seq->group->prompt_sampling + out->position, taken));
  return RM_OK;
}

static rm_code rank_prompt(rm_engine *engine, const rm_chunk *chunk, int64_t row, int64_t n, rm_error *err) {
  const rm_out_row *out = out_row(&engine->plan, chunk, row);
  const size_t bytes = (size_t)n * sizeof(int32_t);
  const rm_code code = rm_results_reserve(&engine->results, 1, bytes, err);
  if (code) return code;
  run_ranks(engine, row, n, engine->ld_logits, there(engine, engine->plan.targets + chunk->first + row),
            rm_results_take(&engine->results, out->seq->group->prompt_ranks + out->position, bytes));
  return RM_OK;
}

// What is wanted of the logits of rows [row, row + n) of one prompt.
static rm_code run_prompt(rm_engine *engine, const rm_chunk *chunk, int64_t row, int64_t n, rm_error *err) {
  const rm_out_row *out = out_row(&engine->plan, chunk, row);
  rm_group *group = out->seq->group;
  const int64_t k = group->prompt_top, at = out->position;
  const int64_t room = (int64_t)(rm_results_room(&engine->results) / (sizeof(rm_sample_params) + sizeof(float) + RM_RESULT_ALIGN));
  const int64_t most = rm_min64(engine->max_draws, rm_max64(room / 2, 1));
  rm_code code = RM_OK;
  if (k) code = top_logprobs(engine, row, n, k, group->prompt_top_ids + at * k, group->prompt_top_logprobs + at * k, err);
  if (!code && group->want_ranks) code = rank_prompt(engine, chunk, row, n, err);
  for (int64_t i = 0; i < n && !code && group->score_sampling; i += most)
    code = score_sampling(engine, chunk, row + i, rm_min64(n - i, most), err);
  return code;
}

static rm_code run_prompts(rm_engine *engine, const rm_chunk *chunk, rm_error *err) {
  const rm_plan *plan = &engine->plan;
  rm_code code = RM_OK;
  for (int64_t i = 0, end; i < chunk->n && !code; i = end) {
    end = i + 1;
    if (out_row(plan, chunk, i)->target < 0) continue;
    end = prompt_run(plan, chunk->first + i, chunk->first + chunk->n) - chunk->first;
    code = run_prompt(engine, chunk, i, end - i, err);
  }
  return code;
}

static void record_prompts(const rm_plan *plan) {
  for (int64_t i = 0, end; i < plan->n_out; i = end) {
    const rm_out_row *out = &plan->outs[i];
    end = i + 1;
    if (out->target < 0) continue;
    end = prompt_run(plan, i, plan->n_out);
    memcpy(out->seq->group->prompt_logprobs + out->position, plan->target_logprobs + i, (size_t)(end - i) * sizeof(float));
  }
}

// ---------------------------------------------------------------------------------------------- draws
static size_t banned_bytes(const rm_draw *draw) {
  const rm_sample_params params = rm_params_of(draw->seq);
  return params.n_banned ? (size_t)params.n_banned * sizeof *params.banned + RM_RESULT_ALIGN : 0;
}

// The end of the longest run from draw d: rows that follow one another (*step 1) or are one (*step 0), and whose parameters have room.
static int64_t draw_run(const rm_engine *engine, int64_t d, int64_t end, int *step, size_t *given) {
  const rm_draw *draws = engine->plan.draws;
  const size_t room = rm_results_room(&engine->results) - 2 * RM_RESULT_ALIGN;
  int64_t at = d + 1;
  *step = at < end && draws[at].out == draws[d].out ? 0 : 1;
  *given = sizeof(rm_sample_params) + banned_bytes(&draws[d]);
  while (at < end && at - d < engine->max_draws && draws[at].out == draws[at - 1].out + *step) {
    const size_t more = sizeof(rm_sample_params) + banned_bytes(&draws[at]);
    if (more > room - *given) break;
    *given += more;
    at++;
  }
  return at;
}

static rm_code run_draws(rm_engine *engine, const rm_chunk *chunk, int64_t d, int64_t end, int step, size_t given, rm_error *err) {
  rm_plan *plan = &engine->plan;
  rm_results *results = &engine->results;
  const int64_t first = plan->draws[d].out - chunk->first, n = end - d, ld_logits = step ? engine->ld_logits : 0;
  int wanted = 0;
  const rm_code code = rm_results_reserve(results, 1, given, err);
  if (code) return code;
  for (int64_t i = 0; i < n; i++) {
    rm_sample_params *params = &plan->params[i];
    *params = rm_params_of(plan->draws[d + i].seq);
    if (params->n_banned) params->banned = rm_results_give(results, params->banned, (size_t)params->n_banned * sizeof *params->banned);
    wanted |= plan->draws[d + i].seq->group->want_ranks;
  }
  const rm_sample_params *params = rm_results_give(results, plan->params, (size_t)n * sizeof *plan->params);
  int32_t *tokens = there(engine, plan->tokens + d);
  run_sample(engine, chunk, first, n, ld_logits, params, tokens, there(engine, plan->logprobs + d),
             there(engine, plan->sampling_logprobs + d));
  if (wanted) run_ranks(engine, first, n, ld_logits, tokens, there(engine, plan->ranks + d));
  return RM_OK;
}

// Tokens of draws [d, end); the host has them after the next fetch.
static rm_code draw(rm_engine *engine, const rm_chunk *chunk, int64_t d, int64_t end, rm_error *err) {
  const rm_plan *plan = &engine->plan;
  const size_t n = (size_t)(end - d);
  rm_code code = RM_OK;
  for (int64_t at = d, stop; at < end && !code; at = stop) {
    int step;
    size_t given;
    stop = draw_run(engine, at, end, &step, &given);
    code = run_draws(engine, chunk, at, stop, step, given, err);
  }
  rm_paired_get(&engine->paired, plan->tokens + d, n * sizeof *plan->tokens);
  rm_paired_get(&engine->paired, plan->logprobs + d, n * sizeof *plan->logprobs);
  rm_paired_get(&engine->paired, plan->sampling_logprobs + d, n * sizeof *plan->sampling_logprobs);
  rm_paired_get(&engine->paired, plan->ranks + d, n * sizeof *plan->ranks);
  return code;
}

// Draw d's row is another draw's too, whose record of the first token is this one's as well.
static int is_sibling(const rm_plan *plan, int64_t d) { return d > 0 && plan->draws[d - 1].out == plan->draws[d].out; }

// Top-k of the row that a draw came from, straight into the record of the token that will be appended.
static rm_code top_of_draw(rm_engine *engine, const rm_chunk *chunk, int64_t d, rm_error *err) {
  const rm_draw *draw = &engine->plan.draws[d];
  rm_sequence *seq = draw->seq;
  const int64_t k = seq->group->top_logprobs, at = seq->n_tokens * k;
  if (!k || is_sibling(&engine->plan, d)) return RM_OK;
  return top_logprobs(engine, draw->out - chunk->first, 1, k, seq->top_ids + at, seq->top_logprobs + at, err);
}

static void record_siblings(const rm_plan *plan) {
  for (int64_t d = 1; d < plan->n_draws; d++) {
    rm_sequence *seq = plan->draws[d].seq, *other = plan->draws[d - 1].seq;
    const int64_t k = seq->group->top_logprobs, at = seq->n_tokens * k;
    if (!k || !is_sibling(plan, d)) continue;
    memcpy(seq->top_ids + at, other->top_ids + at, (size_t)k * sizeof *seq->top_ids);
    memcpy(seq->top_logprobs + at, other->top_logprobs + at, (size_t)k * sizeof *seq->top_logprobs);
  }
}

static int64_t draws_before(const rm_plan *plan, int64_t d, int64_t out) {
  while (d < plan->n_draws && plan->draws[d].out < out) d++;
  return d;
}

rm_code rm_share_draws(rm_engine *engine, const int64_t *counts, int64_t n, const rm_draw_records *at, rm_error *err) {
  rm_drawn *drawn = engine->plan.drawn;
  for (int64_t i = 0; i < n; i++) drawn[i] = (rm_drawn){at->tokens[i], at->ranks[i], at->logprobs[i], at->sampling_logprobs[i]};
  const rm_code code = rm_model_share(engine->model, drawn, counts, sizeof *drawn, err);
  for (int64_t i = 0; i < n && !code; i++) {
    at->tokens[i] = drawn[i].token;
    at->ranks[i] = drawn[i].rank;
    at->logprobs[i] = drawn[i].logprob;
    at->sampling_logprobs[i] = drawn[i].sampling_logprob;
  }
  return code;
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
    if (r == rm_comm_rank(tp)) {
      rm_code code = draw(engine, chunk, from, to, err);
      if (!code) code = rm_results_fetch(&engine->results, err);
      if (code) return code;
    }
    from = to;
  }
  const rm_draw_records at = {plan->tokens + d, plan->ranks + d, plan->logprobs + d, plan->sampling_logprobs + d};
  return rm_share_draws(engine, counts, end - d, &at, err);
}

static rm_code draw_tokens(rm_engine *engine, const rm_chunk *chunk, int64_t *d, rm_error *err) {
  const int64_t first = *d, end = draws_before(&engine->plan, first, chunk->first + chunk->n);
  *d = end;
  if (first == end) return RM_OK;
  if (chunk->own_rows) return draw_own(engine, chunk, first, end, err);
  rm_code code = draw(engine, chunk, first, end, err);
  for (int64_t at = first; at < end && !code; at++) code = top_of_draw(engine, chunk, at, err);
  return code;
}

// ---------------------------------------------------------------------------------------------- rows of logits for others
static int is_handed_out(const rm_out_row *out) {
  return out->seq->group->logits_out != NULL || (out->draws && out->seq->group->host_draws);
}

static void get(rm_engine *engine, float *to, const float *from, int64_t n) {
  engine->device->get(engine->device->self, to, from, (size_t)n * sizeof *to);
}

// Rows that a host draws from are its own as they are, and their stats; what else is wanted of them goes into the records.
static rm_code hand_to_host(rm_engine *engine, const rm_chunk *chunk, int64_t i, rm_error *err) {
  const rm_plan *plan = &engine->plan;
  const int64_t vocab = engine->spec->vocab_size;
  rm_sequence *seq = out_row(plan, chunk, i)->seq;
  const int64_t to = seq->host_row, k = seq->group->top_logprobs, at = seq->n_tokens * k;
  get(engine, plan->host_logits + to * vocab, plan->logits + i * engine->ld_logits, vocab);
  get(engine, plan->host_stats + 2 * to, plan->stats + 2 * i, 2);
  return k ? top_logprobs(engine, i, 1, k, seq->top_ids + at, seq->top_logprobs + at, err) : RM_OK;
}

// A caller's memory is not pinned: a copy to it waits inside the driver for all that is enqueued, where no deadline reaches it and no lost
// rank is seen. So that is waited for first; what comes behind it waits for no rank until the next lm_head.
static rm_code hand_out(rm_engine *engine, const rm_chunk *chunk, rm_error *err) {
  const rm_plan *plan = &engine->plan;
  const int64_t vocab = engine->spec->vocab_size;
  int any = 0;
  for (int64_t i = 0; i < chunk->n && !any; i++) any = is_handed_out(out_row(plan, chunk, i));
  rm_code code = any ? rm_engine_wait(engine, err) : RM_OK;
  for (int64_t i = 0; any && i < chunk->n && !code; i++) {
    const rm_out_row *out = out_row(plan, chunk, i);
    float *to = out->seq->group->logits_out;
    if (to) get(engine, to + out->position * vocab, plan->logits + i * engine->ld_logits, vocab);
    if (out->draws && out->seq->group->host_draws) code = hand_to_host(engine, chunk, i, err);
  }
  return code;
}

// ---------------------------------------------------------------------------------------------- all of them
rm_code rm_sample_outs(rm_engine *engine, const void *hidden, rm_error *err) {
  const rm_plan *plan = &engine->plan;
  rm_code code = RM_OK;
  for (int64_t first = 0, d = 0; first < plan->n_out && !code; first += engine->max_out_rows) {
    rm_chunk chunk;
    code = run_lm_head(engine, hidden, first, &chunk, err);
    if (!code) code = rm_compare_outs(engine, err);
    if (!code) code = hand_out(engine, &chunk, err);
    if (!code) code = run_prompts(engine, &chunk, err);
    if (!code) code = draw_tokens(engine, &chunk, &d, err);
  }
  return code || plan->n_out ? code : rm_compare_outs(engine, err);
}

void rm_record_outs(const rm_plan *plan) {
  record_prompts(plan);
  record_siblings(plan);
}

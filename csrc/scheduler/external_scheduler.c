// external_scheduler.c: see external_scheduler.h. A step of the host becomes one plan, or several where more rows have to be fed than a batch has: positions
// whose KV is of another version come before the rows that were asked for.
//
// A page counts as of the serving version from the moment its rows are in a plan, since within a forward, layer by layer, all rows are
// written before any is read. So of two requests that share a stale page the first feeds it and the second reads it, in one
// batch; that the first comes to its end in an earlier batch, or in this one before the second, follows from their order.
#include "scheduler/external_scheduler.h"

#include <math.h>

#include "engine/state.h"

enum { NO_WORK, LAST_BATCH, MORE_BATCHES }; // what the ranks that step together tell one another

int rm_is_external(const rm_engine *engine) { return engine->options.host_pages > 0; }

void rm_external_distrust(rm_engine *engine, const rm_sequence *seq) {
  for (int64_t i = 0; i < seq->n_pages; i++) engine->page_versions[rm_block_table(engine, seq)[i]] = -1;
}

void rm_external_renew(rm_engine *engine, int pages) {
  for (int64_t i = 0; i < engine->n_pages && pages; i++) engine->page_versions[i] = -1;
  for (rm_link *at = engine->live.next; at != &engine->live; at = at->next) {
    rm_group *group = (rm_group *)at;
    if (!group->sequences->n_tokens) group->n_scored = group->n_prompt_routed = 0; // a prompt's records are of one version
  }
}

// ---------------------------------------------------------------------------------------------- what the host says
static rm_sequence *sequence_of(const rm_engine *engine, uint64_t id, rm_error *err) {
  rm_group *group = rm_find_group(engine, id, err);
  return group ? group->sequences : NULL;
}

static rm_code check_part(const rm_engine *engine, const rm_sequence *seq, const rm_external_part *part, rm_error *err) {
  const long long id = (long long)part->id, size = engine->options.page_size, end = part->n_computed + part->n_rows;
  const long long held = part->replace || seq->status != RM_ACTIVE ? 0 : seq->n_pages, pages = held + part->n_pages;
  const rm_group *group = seq->group;
  if (seq->host_end) return rm_fail(err, RM_E_REQUEST, "request %lld stands twice in a step", id);
  if (part->n_computed < 0 || part->n_rows < 1 || end > rm_sequence_length(seq))
    return rm_fail(err, RM_E_REQUEST, "request %lld: %lld computed positions and %lld rows, wanted at most the %lld tokens that it has", id,
                   (long long)part->n_computed, (long long)part->n_rows, (long long)rm_sequence_length(seq));
  if (end == rm_sequence_length(seq) && seq->n_tokens == group->capacity)
    return rm_fail(err, RM_E_REQUEST, "request %lld: a token after the last of %lld", id, (long long)group->capacity);
  if (part->n_pages < 0 || pages > engine->max_pages || pages * size < end)
    return rm_fail(err, RM_E_REQUEST, "request %lld: %lld pages of %lld positions, wanted as many as hold %lld, at most %lld", id, pages,
                   size, end, (long long)engine->max_pages);
  for (int64_t i = 0; i < part->n_pages; i++)
    if (part->pages[i] < 0 || part->pages[i] >= engine->n_pages)
      return rm_fail(err, RM_E_REQUEST, "request %lld: page %d is not in [0, %lld)", id, part->pages[i], (long long)engine->n_pages);
  return RM_OK;
}

static void leave_step(const rm_engine *engine, const rm_external_step *step) {
  for (int64_t i = 0; i < step->n_parts; i++) {
    rm_sequence *seq = sequence_of(engine, step->parts[i].id, NULL);
    if (seq) seq->host_end = seq->host_begun = 0;
  }
}

// Every part is good, or nothing is done. Those of requests that have ended pass.
static rm_code enter_step(rm_engine *engine, const rm_external_step *step, rm_error *err) {
  int64_t n_started = 0, n_drawn = 0;
  rm_code code = RM_OK;
  for (int64_t i = 0; i < step->n_parts && !code; i++) {
    const rm_external_part *part = &step->parts[i];
    rm_sequence *seq = sequence_of(engine, part->id, err);
    if (!seq) code = RM_E_REQUEST;
    else if (seq->status != RM_DONE && !(code = check_part(engine, seq, part, err))) {
      n_started += seq->status != RM_ACTIVE;
      seq->host_computed = part->n_computed;
      seq->host_end = part->n_computed + part->n_rows;
      seq->host_last = seq->host_end == rm_sequence_length(seq);
      seq->host_row = -1;
      n_drawn += seq->host_last && seq->group->host_draws;
    }
  }
  if (!code && n_started > engine->n_places)
    code = rm_fail(err, RM_E_REQUEST, "%lld requests at once, wanted at most max_num_seqs=%lld", (long long)(engine->n_active + n_started),
                   (long long)engine->options.max_num_seqs);
  if (!code && n_drawn > step->n_logits)
    code = rm_fail(err, RM_E_REQUEST, "the host draws for %lld requests, wanted room for their logits, not for %lld", (long long)n_drawn,
                   (long long)step->n_logits);
  if (code) leave_step(engine, step);
  return code;
}

// A page that begins behind what is computed is newly given, whatever it held before.
static void take_pages(rm_engine *engine, rm_sequence *seq, const rm_external_part *part) {
  const int fresh = seq->status != RM_ACTIVE;
  if (fresh) {
    rm_list_remove(&seq->link);
    engine->n_waiting--;
    rm_activate(engine, seq);
  }
  if (fresh || part->replace) seq->n_pages = 0;
  int32_t *table = rm_change_table(engine, seq);
  for (int64_t i = 0; i < part->n_pages; i++, seq->n_pages++) {
    table[seq->n_pages] = part->pages[i];
    if (seq->n_pages * engine->options.page_size >= part->n_computed) engine->page_versions[part->pages[i]] = -1;
  }
}

// ---------------------------------------------------------------------------------------------- batches
// The first position to feed.
static int64_t first_row(const rm_engine *engine, const rm_sequence *seq) {
  const int64_t size = engine->options.page_size, version = rm_store_version(engine->store);
  const int32_t *table = rm_block_table(engine, seq);
  const rm_group *group = seq->group;
  int64_t i = 0;
  while (i * size < seq->host_computed && engine->page_versions[table[i]] == version) i++;
  const int64_t from = rm_min64(i * size, seq->host_computed);
  return group->n_scored < group->n_targets ? rm_min64(from, group->n_scored) : from;
}

// After a batch, when the pages have it: the routing of a prompt whose beginning others have computed, perhaps in this batch.
static void take_routed(rm_engine *engine, rm_sequence *seq) {
  const int64_t size = engine->options.page_size, per_token = engine->routed_per_token;
  rm_group *group = seq->group;
  for (int64_t p = group->n_prompt_routed; per_token && p < rm_min64(seq->next, group->n_prompt); p++, group->n_prompt_routed++)
    memcpy(group->prompt_routed + p * per_token, rm_kv_routed(engine->cache, rm_block_table(engine, seq)[p / size]) + p % size * per_token,
           (size_t)per_token * sizeof(int16_t));
}

static void begin(rm_engine *engine, rm_sequence *seq) {
  rm_group *group = seq->group;
  seq->host_begun = 1;
  seq->next = seq->kv_len = first_row(engine, seq);
  if (group->started) return;
  group->started = 1;
  group->n_cached = rm_min64(seq->next, group->n_prompt);
  engine->stats.prompt_tokens += group->n_prompt;
  engine->stats.cached_tokens += group->n_cached;
}

static void plan_rows(rm_engine *engine, rm_sequence *seq, int64_t n_rows) {
  const int64_t size = engine->options.page_size, version = rm_store_version(engine->store), end = seq->next + n_rows;
  const int32_t *table = rm_block_table(engine, seq);
  for (int64_t i = seq->next / size; i * size < end; i++) {
    if (engine->page_versions[table[i]] == version) continue;
    rm_model_zero_page(engine->model, engine->kv, engine->n_pages, table[i]);
    engine->page_versions[table[i]] = version;
  }
  rm_plan_rows(engine, seq, n_rows);
}

static int plan_batch(rm_engine *engine, const rm_external_step *step) {
  rm_plan *plan = &engine->plan;
  const int64_t max_rows = engine->options.max_num_batched_tokens;
  int more = 0;
  plan->n_rows = plan->n_out = plan->n_scheduled = plan->n_draws = 0;
  for (int64_t i = 0; i < step->n_parts && !more; i++) {
    rm_sequence *seq = sequence_of(engine, step->parts[i].id, NULL);
    if (seq->status == RM_DONE) continue;
    if (!seq->host_begun && plan->n_rows < max_rows) begin(engine, seq);
    const int64_t left = seq->host_begun ? seq->host_end - seq->next : 1, n_rows = rm_min64(left, max_rows - plan->n_rows);
    if (n_rows) plan_rows(engine, seq, n_rows);
    more = n_rows < left;
  }
  return more ? MORE_BATCHES : plan->n_rows ? LAST_BATCH : NO_WORK;
}

static rm_external_result result_of(const rm_sequence *seq) {
  rm_external_result result = {.token = RM_EXTERNAL_NO_TOKEN, .row = -1};
  if (seq->status == RM_DONE) {
    result.token = RM_EXTERNAL_FAILED;
  } else if (seq->host_row >= 0) {
    result.token = RM_EXTERNAL_DRAWS;
    result.row = seq->host_row;
  } else if (seq->host_last) {
    const int64_t last = seq->n_tokens - 1;
    result.token = seq->ids[seq->group->n_prompt + last];
    result.logprob = seq->logprobs[last];
    result.sampling_logprob = seq->sampling_logprobs[last];
    result.rank = seq->group->want_ranks ? seq->ranks[last] : 0;
  }
  return result;
}

// A step that was found to be in order.
static rm_code run_step(rm_engine *engine, const rm_external_step *step, rm_external_result *results, int64_t *n_work, rm_error *err) {
  rm_code code = RM_OK;
  for (int64_t i = 0; i < step->n_parts; i++) {
    rm_sequence *seq = sequence_of(engine, step->parts[i].id, NULL);
    if (seq->status != RM_DONE) take_pages(engine, seq, &step->parts[i]);
    else rm_engine_external_forget(engine, step->parts[i].pages, step->parts[i].n_pages);
  }
  engine->plan.n_host = 0;
  engine->plan.host_logits = step->logits;
  engine->plan.host_stats = step->stats;
  int most = MORE_BATCHES;
  while (!code && most == MORE_BATCHES) {
    const double start = rm_now();
    const int mine = plan_batch(engine, step);
    engine->stats.schedule_seconds += rm_now() - start;
    code = rm_engine_ask_all(engine, mine, &most, err);
    if (!code && most) code = rm_engine_run(engine, rm_now(), err);
    for (int64_t i = 0; i < engine->plan.n_scheduled && !code; i++)
      if (engine->plan.scheduled[i]->status != RM_DONE) take_routed(engine, engine->plan.scheduled[i]);
    *n_work += code || !most ? 0 : engine->plan.n_rows;
  }
  for (int64_t i = 0; i < step->n_parts && !code; i++) results[i] = result_of(sequence_of(engine, step->parts[i].id, NULL));
  return code;
}

rm_code rm_engine_external_step(rm_engine *engine, const rm_external_step *step, rm_external_result *results, int64_t *n_work,
                                rm_error *err) {
  *n_work = 0;
  if (!rm_is_external(engine)) return rm_fail(err, RM_E_STATE, "a host's step in an engine that schedules for itself");
  rm_code code = rm_engine_ready(engine, err);
  if (code || (code = enter_step(engine, step, err))) return code;
  const rm_entered saved = rm_enter(engine);
  code = run_step(engine, step, results, n_work, err);
  rm_leave(engine, saved);
  leave_step(engine, step);
  return code;
}

// ---------------------------------------------------------------------------------------------- rows that the host edits
// The draw from a row that the host has.
static rm_code run_sample(rm_engine *engine, const float *logits, const float *stats, rm_sample_params params, rm_external_result *out,
                          float *logprob, float *sampling_logprob, rm_error *err) {
  static const uint8_t flags = 0;
  rm_results *results = &engine->results;
  const int64_t vocab = engine->spec->vocab_size;
  const size_t row = (size_t)vocab * sizeof *logits, banned = (size_t)params.n_banned * sizeof *params.banned;
  const rm_code code = rm_results_reserve(results, 8, row + banned + 256, err);
  if (code) return code;
  params.banned = rm_results_give(results, params.banned, banned);
  const rm_sample_args args = {
      .tokens = rm_results_take(results, &out->token, sizeof out->token),
      .logprobs = rm_results_take(results, logprob, sizeof *logprob),
      .sampling_logprobs = rm_results_take(results, sampling_logprob, sizeof *sampling_logprob),
      .logits = rm_results_give(results, logits, row),
      .stats = rm_results_give(results, stats, 2 * sizeof *stats),
      .params = rm_results_give(results, &params, sizeof params),
      .row_flags = rm_results_give(results, &flags, sizeof flags),
      .rows = 1,
      .vocab = vocab,
      .ld_logits = vocab,
  };
  engine->kernels->sample(rm_model_ctx(engine->model), &args);
  return rm_results_fetch(results, err);
}

static int32_t rank_of(const float *logits, int64_t vocab, int32_t token) {
  int32_t rank = 0;
  for (int64_t v = 0; v < vocab; v++) rank += logits[v] >= logits[token];
  return rank;
}

// A banned token that there is not: without one, and at temperature 1, the op takes the model's logprob for that of the draw, and here
// the two are of different logits.
static rm_code draw_row(rm_engine *engine, const rm_sequence *seq, const rm_external_draw *draw, rm_external_result *result,
                        rm_error *err) {
  static const int32_t nobody = -1;
  float unused;
  *result = (rm_external_result){.token = -1, .row = -1};
  for (int64_t v = 0; v < engine->spec->vocab_size; v++)
    if (isnan(draw->edited[v])) return RM_OK; // the sampler would pass over it
  rm_sample_params params = rm_params_of(seq);
  if (!params.n_banned) params.banned = &nobody, params.n_banned = 1;
  rm_code code = run_sample(engine, draw->edited, draw->stats, params, result, &unused, &result->sampling_logprob, err);
  if (code) return code;
  if (result->token >= 0 && draw->edited[result->token] == -INFINITY) result->token = -1; // the largest of a row of nothing
  if (result->token < 0) return RM_OK;
  const rm_sample_params model = {.temperature = 1, .top_p = 1, .top_k = -1, .forced = result->token};
  code = run_sample(engine, draw->raw, draw->stats, model, result, &result->logprob, &unused, err);
  if (!code && seq->group->want_ranks) result->rank = rank_of(draw->raw, engine->spec->vocab_size, result->token);
  return code;
}

rm_code rm_engine_external_draw(rm_engine *engine, const rm_external_draw *draws, int64_t n, rm_external_result *results, rm_error *err) {
  if (engine->lost.code) return rm_fail(err, engine->lost.code, "%s", rm_error_message(&engine->lost));
  for (int64_t i = 0; i < n; i++) {
    const rm_sequence *seq = sequence_of(engine, draws[i].id, err);
    if (!seq) return RM_E_REQUEST;
    if (seq->status != RM_ACTIVE || seq->host_row < 0)
      return rm_fail(err, RM_E_STATE, "request %llu has no logits that wait for a draw", (unsigned long long)draws[i].id);
  }
  const rm_entered saved = rm_enter(engine);
  rm_code code = RM_OK;
  for (int64_t i = 0; i < n && !code; i++) {
    rm_sequence *seq = sequence_of(engine, draws[i].id, NULL);
    seq->host_row = -1;
    if ((code = draw_row(engine, seq, &draws[i], &results[i], err))) break; // the device is dead, and the next step says so too
    if (results[i].token >= 0) {
      rm_append(engine, seq, &(rm_drawn){results[i].token, results[i].rank, results[i].logprob, results[i].sampling_logprob});
    } else {
      rm_fail_group(engine, seq, rm_sequence_length(seq) - 1, "logits that the host has edited leave nothing to draw; they are");
      results[i].token = RM_EXTERNAL_FAILED;
    }
  }
  rm_leave(engine, saved);
  return code;
}

// ---------------------------------------------------------------------------------------------- between steps
void rm_engine_external_forget(rm_engine *engine, const int32_t *pages, int64_t n) {
  for (int64_t i = 0; i < n && rm_is_external(engine); i++)
    if (pages[i] >= 0 && pages[i] < engine->n_pages) engine->page_versions[pages[i]] = -1;
}

rm_code rm_engine_external_fail(rm_engine *engine, uint64_t id, rm_error *err) {
  rm_sequence *seq = sequence_of(engine, id, err);
  if (!seq) return RM_E_REQUEST;
  if (seq->status == RM_ACTIVE) rm_external_distrust(engine, seq);
  rm_finish_group(engine, seq->group, RM_FINISH_ABORT);
  return RM_OK;
}

rm_code rm_engine_external_preempt(rm_engine *engine, uint64_t id, rm_error *err) {
  rm_sequence *seq = sequence_of(engine, id, err);
  if (!seq) return RM_E_REQUEST;
  if (seq->status != RM_ACTIVE) return RM_OK;
  rm_preempt(engine, seq);
  engine->stats.preemptions++;
  return RM_OK;
}

rm_code rm_engine_external_tokens(rm_engine *engine, uint64_t id, const int32_t *tokens, int64_t n, rm_error *err) {
  rm_sequence *seq = sequence_of(engine, id, err);
  if (!seq) return RM_E_REQUEST;
  if (seq->status == RM_DONE) return RM_OK;
  if (n < 0 || n > seq->n_tokens)
    return rm_fail(err, RM_E_REQUEST, "request %llu: %lld generated tokens are known to the host, wanted at most the %lld that there are",
                   (unsigned long long)id, (long long)n, (long long)seq->n_tokens);
  const int32_t *mine = seq->ids + seq->group->n_prompt;
  for (int64_t i = 0; i < n; i++)
    if (tokens[i] != mine[i])
      return rm_fail(err, RM_E_REQUEST, "request %llu: token %lld is %d to the host, wanted %d, which was drawn", (unsigned long long)id,
                     (long long)i, tokens[i], mine[i]);
  if (!n && seq->n_tokens) seq->group->n_scored = seq->group->n_prompt_routed = 0; // given out again, of the version that then serves
  seq->n_tokens = n;
  seq->n_routed = rm_min64(seq->n_routed, n);
  return RM_OK;
}

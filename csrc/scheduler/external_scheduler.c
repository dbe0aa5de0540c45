// external_scheduler.c: see external_scheduler.h. A step is one plan, or several plans if it has
// more rows than a batch, since positions whose KV is of another version are recomputed before the
// requested rows.
//
// A page has the serving version as soon as its rows are in a plan, since within a forward all rows
// of a layer are written before any row is read. So if two requests share a stale page, the first
// recomputes it and the second reads it, in the same batch or a later one.
//
// In models with states, the states belong to the engine, and the external scheduler does not count
// them. A page may keep the state at its end. A request whose prefix was computed by other requests
// starts after the last page of the prefix that keeps a state; later rows of the prefix are
// computed again. A state is read only in a later batch than the one that writes it.
#include "scheduler/external_scheduler.h"

// -------------------------------------------------------------------------------- checking a step
static rm_sequence *sequence_of(const rm_scheduler *scheduler, uint64_t id, rm_error *err) {
  rm_sequence_group *group = rm_find_sequence_group(scheduler, id, err);
  return group ? group->sequences : NULL;
}

// Checks request i of the step, whose pages are `pages`.
static rm_code check_part(const rm_scheduler *scheduler, const rm_sequence *seq,
                          const rm_external_step *step, int64_t i, const int32_t *pages,
                          rm_error *err) {
  const int64_t id = step->ids[i], size = rm_page_size(scheduler),
                most = scheduler->options.limits.n_pages;
  const int64_t end = step->computed[i] + step->rows[i], known = rm_sequence_length(seq);
  const int64_t n_pages =
      step->page_counts[i] + (step->replace[i] || seq->status != RM_ACTIVE ? 0 : seq->n_pages);
  REFUSE_UNLESS(seq->external_step != scheduler->external_steps,
                "request %ld: expected one part in a step, got two", id);
  REFUSE_UNLESS(
      step->computed[i] >= 0 && step->rows[i] >= 1 && end <= known,
      "request %ld: expected at most its %ld tokens, got %ld computed positions and %ld rows", id,
      known, step->computed[i], step->rows[i]);
  REFUSE_UNLESS(
      end < known || seq->n_tokens < seq->group->capacity,
      "request %ld: expected at most %ld generated tokens, got a step that draws one more", id,
      seq->group->capacity);
  REFUSE_UNLESS(n_pages <= scheduler->max_pages && n_pages * size >= end,
                "request %ld: expected pages for %ld positions, at most %ld pages, got %ld of "
                "%ld positions",
                id, end, scheduler->max_pages, n_pages, size);
  for (int64_t p = 0; p < step->page_counts[i]; p++)
    REFUSE_UNLESS(pages[p] >= 0 && pages[p] < most, "request %ld: expected pages 0 to %ld, got %d",
                  id, most - 1, pages[p]);
  return RM_OK;
}

// Checks all requests before anything changes. Requests that have ended are accepted and ignored.
static rm_code enter_step(rm_scheduler *scheduler, const rm_external_step *step, rm_error *err) {
  const int32_t *pages = step->pages;
  int64_t n_started = 0, n_drawn = 0;
  scheduler->external_steps++;
  for (int64_t i = 0; i < step->n; pages += step->page_counts[i++]) {
    rm_sequence *seq = sequence_of(scheduler, step->ids[i], err);
    if (!seq) return RM_E_REQUEST;
    if (seq->status == RM_DONE) continue;
    RM_TRY(check_part(scheduler, seq, step, i, pages, err));
    n_started += seq->status != RM_ACTIVE;
    seq->external_step = scheduler->external_steps;
    seq->external_end = step->computed[i] + step->rows[i];
    seq->external_last = seq->external_end == rm_sequence_length(seq);
    seq->external_row = -1;
    seq->external_begun = 0;
    n_drawn += seq->external_last && seq->group->external_draws;
  }
  REFUSE_UNLESS(n_started <= scheduler->n_free_table_rows,
                "max_num_seqs: expected at most %ld requests at once, got %ld",
                scheduler->options.max_num_seqs, scheduler->n_active + n_started);
  REFUSE_UNLESS(n_drawn <= step->n_logits,
                "logits: expected room for %ld requests with external_draws, got room for %ld",
                n_drawn, step->n_logits);
  return RM_OK;
}

// A page that begins after the computed positions is new: its old KV is invalid.
static void take_pages(rm_scheduler *scheduler, rm_sequence *seq, int64_t computed, int replace,
                       const int32_t *pages, int64_t n) {
  const int fresh = seq->status != RM_ACTIVE;
  if (fresh) rm_activate(scheduler, seq);
  if (fresh || replace) seq->n_pages = 0;
  int32_t *table = rm_change_table(scheduler, seq);
  for (int64_t p = 0; p < n; p++, seq->n_pages++) {
    table[seq->n_pages] = pages[p];
    if (seq->n_pages * rm_page_size(scheduler) >= computed) scheduler->page_versions[pages[p]] = -1;
  }
}

// ---------------------------------------------------------------------------------------- batches
// Returns the first position to compute.
static int64_t first_row(const rm_scheduler *scheduler, const rm_sequence *seq, int64_t computed) {
  const int64_t size = rm_page_size(scheduler), version = scheduler->version;
  const int32_t *table = rm_block_table(scheduler, seq);
  const rm_sequence_group *group = seq->group;
  int64_t i = 0;
  while (i * size < computed && scheduler->page_versions[table[i]] == version) i++;
  const int64_t from = rm_min64(i * size, computed);
  return group->n_scored < group->n_targets ? rm_min64(from, group->n_scored) : from;
}

// Returns whether a page may keep a state that a sequence also holds. The sequence then needs
// another state for its next rows, so this is allowed only while there is still one for each
// sequence.
static int may_share_state(const rm_scheduler *scheduler) {
  return rm_kv_shared_states(scheduler->cache) <
         scheduler->n_states - scheduler->options.max_num_seqs;
}

// Lets a sequence hold the last available state of its first `from` positions. Returns the number
// of positions that the state covers, or −1 if the current plan saves the state. Returns `from` in
// models without states.
static int64_t load_state(rm_scheduler *scheduler, rm_sequence *seq, int64_t from) {
  const int64_t size = rm_page_size(scheduler);
  const int32_t *table = rm_block_table(scheduler, seq);
  if (!scheduler->n_states || (seq->state >= 0 && seq->kv_len == from)) return from;
  rm_drop_state(scheduler, seq);
  int64_t i = may_share_state(scheduler) ? from / size : 0;
  while (i && rm_kv_state_of(scheduler->cache, table[i - 1]) < 0) i--;
  if (!i) return 0;
  const int32_t state = rm_kv_state_of(scheduler->cache, table[i - 1]);
  if (rm_kv_state_is_new(scheduler->cache, state)) return -1;
  rm_kv_retain_state(scheduler->cache, state);
  seq->state = state;
  return i * size;
}

static void keep_states(rm_scheduler *scheduler, const rm_sequence *seq) {
  const int64_t size = rm_page_size(scheduler), end = seq->next + seq->n_rows;
  for (int64_t p = (seq->next / size + 1) * size; p <= end; p += size) {
    const int32_t state = scheduler->plan.save_states[seq->first_row + p - 1 - seq->next];
    if (state >= 0 && rm_keeps_state(scheduler, seq, p) && may_share_state(scheduler))
      rm_kv_keep_state(scheduler->cache, rm_block_table(scheduler, seq)[p / size - 1], state);
  }
}

static void plan_rows(rm_scheduler *scheduler, rm_sequence *seq, int64_t n_rows) {
  const int64_t size = rm_page_size(scheduler), version = scheduler->version,
                end = seq->next + n_rows;
  const int32_t *table = rm_block_table(scheduler, seq);
  for (int64_t i = seq->next / size; i * size < end; i++) {
    if (scheduler->page_versions[table[i]] == version) continue;
    rm_kv_zero(scheduler->cache, table[i]);
    scheduler->page_versions[table[i]] = version;
  }
  rm_plan_rows(scheduler, seq, n_rows);
  keep_states(scheduler, seq);
}

rm_progress rm_external_schedule(rm_scheduler *scheduler) {
  const rm_external_step *step = scheduler->step;
  rm_plan *plan = &scheduler->plan;
  const int64_t max_rows = scheduler->options.max_num_batched_tokens;
  int more = 0;
  for (int64_t i = 0; i < step->n && !more; i++) {
    rm_sequence *seq = sequence_of(scheduler, step->ids[i], NULL);
    if (seq->status == RM_DONE) continue;
    if (!seq->external_begun && plan->n_rows < max_rows) {
      const int64_t from = load_state(scheduler, seq, first_row(scheduler, seq, step->computed[i]));
      if (from < 0) return RM_MORE_BATCHES;
      seq->external_begun = 1;
      seq->next = seq->kv_len = from;
      rm_count_start(scheduler, seq);
    }
    const int64_t left = seq->external_begun ? seq->external_end - seq->next : 1,
                  n_rows = rm_min64(left, max_rows - plan->n_rows);
    if (n_rows) plan_rows(scheduler, seq, n_rows);
    more = n_rows < left;
  }
  return more ? RM_MORE_BATCHES : plan->n_rows ? RM_LAST_BATCH : RM_NO_WORK;
}

static void set_result(const rm_external_results *out, int64_t i, const rm_drawn *drawn) {
  out->tokens[i] = drawn->token;
  out->ranks[i] = drawn->rank;
  out->logprobs[i] = drawn->logprob;
  out->sampling_logprobs[i] = drawn->sampling_logprob;
}

static rm_drawn result_of(const rm_sequence *seq) {
  const int64_t last = seq->n_tokens - 1;
  if (seq->status == RM_DONE) return (rm_drawn){.token = RM_EXTERNAL_FAILED};
  if (seq->external_row >= 0)
    return (rm_drawn){.token = RM_EXTERNAL_DRAWS, .rank = seq->external_row};
  if (!seq->external_last) return (rm_drawn){.token = RM_EXTERNAL_NO_TOKEN};
  return (rm_drawn){seq->ids[seq->group->n_prompt + last],
                    seq->group->want_token_ranks ? seq->ranks[last] : 0, seq->logprobs[last],
                    seq->sampling_logprobs[last]};
}

// ----------------------------------------------------------------------------------------- a step
rm_code rm_external_begin(rm_scheduler *scheduler, const rm_external_step *step, rm_error *err) {
  const int32_t *pages = step->pages;
  RM_TRY(enter_step(scheduler, step, err));
  for (int64_t i = 0; i < step->n; pages += step->page_counts[i++]) {
    rm_sequence *seq = sequence_of(scheduler, step->ids[i], NULL);
    if (seq->status != RM_DONE)
      take_pages(scheduler, seq, step->computed[i], step->replace[i], pages, step->page_counts[i]);
    else rm_external_invalidate_pages(scheduler, pages, step->page_counts[i]);
  }
  scheduler->step = step;
  scheduler->plan.n_external = 0;
  scheduler->plan.external_logits = step->logits;
  scheduler->plan.external_stats = step->stats;
  return RM_OK;
}

void rm_external_end(rm_scheduler *scheduler, rm_code code) {
  const rm_external_step *step = scheduler->step;
  for (int64_t i = 0; i < step->n && !code; i++) {
    const rm_drawn result = result_of(sequence_of(scheduler, step->ids[i], NULL));
    set_result(&step->results, i, &result);
  }
  scheduler->step = NULL;
}

// ---------------------------------------------------------------------------------- between steps
rm_code rm_external_drawing(const rm_scheduler *scheduler, uint64_t id, rm_error *err) {
  const rm_sequence *seq = sequence_of(scheduler, id, err);
  if (!seq) return RM_E_REQUEST;
  if (seq->status == RM_ACTIVE && seq->external_row >= 0) return RM_OK;
  return rm_fail(err, RM_E_STATE, "request %lu: expected logits that wait for a draw, got none",
                 id);
}

void rm_external_drawn(rm_scheduler *scheduler, rm_sequence *seq, const rm_drawn *drawn,
                       const rm_external_results *results, int64_t i) {
  seq->external_row = -1;
  set_result(results, i, drawn);
  if (drawn->token >= 0) {
    rm_append(scheduler, seq, drawn);
    return;
  }
  rm_fail_sequence_group(scheduler, seq, rm_sequence_length(seq) - 1,
                         "the edited logits leave no token to draw and are");
  results->tokens[i] = RM_EXTERNAL_FAILED;
}

void rm_external_invalidate_pages(rm_scheduler *scheduler, const int32_t *pages, int64_t n) {
  for (int64_t i = 0; i < n && scheduler->page_versions; i++)
    if (pages[i] >= 0 && pages[i] < scheduler->options.limits.n_pages)
      scheduler->page_versions[pages[i]] = -1;
}

void rm_external_invalidate(rm_scheduler *scheduler, const rm_sequence *seq) {
  if (seq->status == RM_ACTIVE)
    rm_external_invalidate_pages(scheduler, rm_block_table(scheduler, seq), seq->n_pages);
}

rm_code rm_external_fail(rm_scheduler *scheduler, uint64_t id, rm_error *err) {
  rm_sequence *seq = sequence_of(scheduler, id, err);
  if (!seq) return RM_E_REQUEST;
  rm_external_invalidate(scheduler, seq);
  rm_finish_sequence_group(scheduler, seq->group, RM_FINISH_ABORT);
  return RM_OK;
}

rm_code rm_external_preempt(rm_scheduler *scheduler, uint64_t id, rm_error *err) {
  rm_sequence *seq = sequence_of(scheduler, id, err);
  if (!seq) return RM_E_REQUEST;
  if (seq->status != RM_ACTIVE) return RM_OK;
  rm_preempt(scheduler, seq);
  scheduler->preemptions++;
  return RM_OK;
}

rm_code rm_external_tokens(rm_scheduler *scheduler, uint64_t id, const int32_t *tokens, int64_t n,
                           rm_error *err) {
  rm_sequence *seq = sequence_of(scheduler, id, err);
  if (!seq) return RM_E_REQUEST;
  if (seq->status == RM_DONE) return RM_OK;
  REFUSE_UNLESS(n <= seq->n_tokens,
                "request %lu: expected at most its %ld generated tokens, got %ld", id,
                seq->n_tokens, n);
  const int32_t *mine = seq->ids + seq->group->n_prompt;
  for (int64_t i = 0; i < n; i++)
    REFUSE_UNLESS(tokens[i] == mine[i],
                  "request %lu: expected generated token %ld to be %d, got %d", id, i, mine[i],
                  tokens[i]);
  if (!n && seq->n_tokens)
    // The records are returned again, of the version that serves then.
    seq->group->n_scored = seq->group->n_prompt_routed = 0;
  seq->n_tokens = n;
  seq->n_routed = rm_min64(seq->n_routed, n);
  return RM_OK;
}

// ---------------------------------------------------------------------------------------- records
rm_code rm_external_top(const rm_scheduler *scheduler, const uint64_t *ids, int64_t n, int64_t k,
                        int32_t *top_ids, float *top_logprobs, rm_error *err) {
  REFUSE_UNLESS(k >= 1, "k: expected at least 1, got %ld", k);
  for (int64_t i = 0; i < n; i++, top_ids += k, top_logprobs += k) {
    const rm_sequence *seq = sequence_of(scheduler, ids[i], err);
    if (!seq) return RM_E_REQUEST;
    const int64_t n_top = seq->group->top_logprobs, from = (seq->n_tokens - 1) * n_top;
    REFUSE_UNLESS(n_top >= k && seq->n_tokens,
                  "request %lu: expected a token with %ld logprobs, got %ld tokens with %ld each",
                  ids[i], k, seq->n_tokens, n_top);
    memcpy(top_ids, seq->top_ids + from, (size_t)k * sizeof *top_ids);
    memcpy(top_logprobs, seq->top_logprobs + from, (size_t)k * sizeof *top_logprobs);
  }
  return RM_OK;
}

rm_code rm_external_routed(const rm_scheduler *scheduler, uint64_t id, int64_t start, int16_t *out,
                           int64_t *n, rm_error *err) {
  const rm_sequence *seq = sequence_of(scheduler, id, err);
  if (!seq) return RM_E_REQUEST;
  const int64_t n_prompt = seq->group->n_prompt, row = scheduler->options.limits.routed_per_token;
  const int64_t n_fed = n_prompt + rm_max64(seq->n_tokens - 1, 0),
                from = rm_min64(rm_max64(start, 0), n_fed);
  const int64_t of_prompt = rm_max64(n_prompt - from, 0), first = rm_max64(from - n_prompt, 0);
  *n = n_fed - from;
  if (!out || !row) return RM_OK;
  if (of_prompt)
    memcpy(out, seq->group->prompt_routed + from * row, (size_t)(of_prompt * row) * sizeof *out);
  if (*n > of_prompt)
    memcpy(out + of_prompt * row, seq->routed + first * row,
           (size_t)((*n - of_prompt) * row) * sizeof *out);
  return RM_OK;
}

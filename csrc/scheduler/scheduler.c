// scheduler.c: selects the rows of the next step and their pages.
//
// Priority is the order of arrival. Active sequences are visited oldest first and allocate the
// pages that they need; if all pages are held, the newest sequence is preempted. Then waiting
// sequences are admitted, oldest first, while there are table rows, batch rows and pages for all of
// their known tokens. The oldest sequence can always continue (add has checked that it fits alone).
// A preempted sequence is recomputed with identical results.
//
// The prompt of n samples is computed by the first sample that becomes active, the leader. In the
// step that computes the prompt's last row, siblings become active, as far as there are table rows:
// they share the leader's pages and draw from the same row. The last, partly filled page is copied
// on the first write, except by the last sequence that holds it.
//
// In models with states, the first row of a sequence reads the state that the sequence holds, and
// the last row saves the state that it holds next. This is the same state if no other sequence
// holds it and no page keeps it, else a new one. The old one is released after the step, so no
// sequence writes a state that another one reads in the same step. The pages at an interval, the
// last full page of a prompt, and the last full page of a sequence keep the state at their end. A
// cached prefix ends with a page that keeps a state.
#include <assert.h>

#include "base/fields.h"
#include "clock.h"
#include "scheduler/external_scheduler.h"
#include "scheduler/logit_edits.h"

// --------------------------------------------------------------------------------------- creation
#define N_FIELDS(fields) (sizeof(fields) / sizeof *(fields))

rm_code rm_scheduler_create(rm_scheduler *scheduler, const rm_scheduler_options *options,
                            rm_error *err) {
  const rm_request_limits *limits = &options->limits;
  const int64_t rows = options->max_num_batched_tokens, seqs = options->max_num_seqs,
                max_pages = (limits->max_model_len + limits->page_size - 1) / limits->page_size;
  rm_plan *plan = &scheduler->plan;
  const rm_field fields[] = {
      RM_FIELD(scheduler->free_table_rows, seqs),
      RM_FIELD(scheduler->page_versions, options->external_pages),
      RM_FIELD(plan->scheduled, seqs),
      RM_FIELD(plan->ids, rows),
      RM_FIELD(plan->positions, rows),
      RM_FIELD(plan->seq_of_row, rows),
      RM_FIELD(plan->slots, rows),
      RM_FIELD(plan->load_states, seqs),
      RM_FIELD(plan->save_states, rows),
      RM_FIELD(plan->outs, rows),
      RM_FIELD(plan->out_rows, rows),
      RM_FIELD(plan->targets, rows),
      RM_FIELD(plan->params, rows),
      RM_FIELD_ROWS(plan->block_tables, seqs, max_pages),
      RM_FIELD(plan->table_changed, seqs),
  };
  scheduler->options = *options;
  scheduler->max_pages = max_pages;
  rm_list_init(&scheduler->waiting);
  rm_list_init(&scheduler->active);
  rm_list_init(&scheduler->live);
  rm_list_init(&scheduler->finished);
  scheduler->memory_bytes = rm_fields_bytes(fields, N_FIELDS(fields));
  scheduler->memory = scheduler->memory_bytes ? rm_map(scheduler->memory_bytes) : NULL;
  if (!scheduler->memory)
    return rm_no_memory(err, "a batch (max_num_batched_tokens, max_num_seqs)",
                        scheduler->memory_bytes);
  rm_fields_place(fields, N_FIELDS(fields), scheduler->memory);
  for (scheduler->n_free_table_rows = 0; scheduler->n_free_table_rows < options->max_num_seqs;
       scheduler->n_free_table_rows++)
    scheduler->free_table_rows[scheduler->n_free_table_rows] =
        (int32_t)(options->max_num_seqs - 1 - scheduler->n_free_table_rows);
  return RM_OK;
}

rm_code rm_scheduler_open_pages(rm_scheduler *scheduler, int64_t n_pages, int64_t n_states,
                                int64_t state_interval, rm_error *err) {
  rm_scheduler_options *options = &scheduler->options;
  const rm_kv_options kv = {n_pages, options->limits.page_size, options->limits.routed_per_token,
                            n_states};
  options->limits.n_pages = n_pages;
  scheduler->n_states = n_states;
  scheduler->state_interval = state_interval;
  for (int64_t i = 0; i < options->external_pages; i++) scheduler->page_versions[i] = -1;
  return rm_kv_create(&kv, &scheduler->cache, err);
}

void rm_scheduler_destroy(rm_scheduler *scheduler) {
  for (uint64_t b = 0; b < scheduler->n_buckets; b++)
    for (rm_sequence_group *group = scheduler->buckets[b], *next; group; group = next) {
      next = group->next_in_bucket;
      rm_free(group);
    }
  rm_free(scheduler->buckets);
  rm_kv_destroy(scheduler->cache);
  rm_unmap(scheduler->memory, scheduler->memory_bytes);
}

// -------------------------------------------------------------------------------- lists and pages
static uint64_t order_of(const rm_link *link) { return ((const rm_sequence *)link)->order; }

// A new sequence is the last, and a preempted one is nearly always among the first.
static void insert_by_order(rm_link *head, rm_sequence *seq) {
  rm_link *at = head;
  if (!rm_list_empty(head) && order_of(head->prev) > seq->order)
    for (at = head->next; order_of(at) < seq->order;) at = at->next;
  rm_list_insert_before(at, &seq->link);
}

void rm_enqueue(rm_scheduler *scheduler, rm_sequence *seq) {
  insert_by_order(&scheduler->waiting, seq);
  seq->status = RM_WAITING;
  scheduler->n_waiting++;
}

void rm_activate(rm_scheduler *scheduler, rm_sequence *seq) {
  assert(seq->status == RM_WAITING && scheduler->n_free_table_rows > 0);
  rm_list_remove(&seq->link);
  if (scheduler->blocked == seq) scheduler->blocked = NULL;
  scheduler->n_waiting--;
  seq->table_row = scheduler->free_table_rows[--scheduler->n_free_table_rows];
  seq->status = RM_ACTIVE;
  insert_by_order(&scheduler->active, seq);
  scheduler->n_active++;
}

void rm_drop_state(rm_scheduler *scheduler, rm_sequence *seq) {
  rm_kv_release_state(scheduler->cache, seq->state);
  seq->state = -1;
}

void rm_leave_lists(rm_scheduler *scheduler, rm_sequence *seq) {
  rm_list_remove(&seq->link);
  if (seq->status == RM_WAITING) scheduler->n_waiting--;
  if (seq->status == RM_ACTIVE) {
    const int32_t *table = rm_block_table(scheduler, seq);
    while (seq->n_pages > 0 && !rm_is_external(scheduler))
      rm_kv_release(scheduler->cache, table[--seq->n_pages]);
    seq->n_pages = 0;
    rm_drop_state(scheduler, seq);
    scheduler->free_table_rows[scheduler->n_free_table_rows++] = seq->table_row;
    scheduler->n_active--;
  }
  if (seq->group->leader == seq) seq->group->leader = NULL;
  if (scheduler->blocked == seq) scheduler->blocked = NULL;
  seq->table_row = -1;
  seq->kv_len = seq->next = seq->n_indexed = seq->n_rows = 0;
  seq->stale = 0;
}

void rm_preempt(rm_scheduler *scheduler, rm_sequence *seq) {
  rm_leave_lists(scheduler, seq);
  rm_enqueue(scheduler, seq);
}

static int64_t pages_for(const rm_scheduler *scheduler, int64_t n_positions) {
  return (n_positions + rm_page_size(scheduler) - 1) / rm_page_size(scheduler);
}

// Allocates pages for n_positions. The caller has checked that there are enough.
static void extend(rm_scheduler *scheduler, rm_sequence *seq, int64_t n_positions) {
  const int64_t n = pages_for(scheduler, n_positions);
  if (seq->n_pages >= n) return;
  for (int32_t *table = rm_change_table(scheduler, seq); seq->n_pages < n; seq->n_pages++) {
    table[seq->n_pages] = rm_kv_alloc(scheduler->cache);
    assert(table[seq->n_pages] >= 0);
  }
}

// Returns the index of a shared page that is about to be written, or −1. It can only be the page at
// kv_len.
static int64_t shared_page(const rm_scheduler *scheduler, const rm_sequence *seq,
                           int64_t n_positions) {
  const int64_t index = seq->kv_len / rm_page_size(scheduler);
  if (n_positions <= seq->kv_len || index >= seq->n_pages) return -1;
  return rm_kv_references(scheduler->cache, rm_block_table(scheduler, seq)[index]) > 1 ? index : -1;
}

// Copy on write. Logprobs are not copied: they are written when the page is full.
static void copy_page(rm_scheduler *scheduler, rm_sequence *seq, int64_t index) {
  int32_t *entry = &rm_change_table(scheduler, seq)[index];
  *entry = rm_kv_copy(scheduler->cache, *entry);
}

// Returns whether computing the next positions up to n_positions needs a new state.
static int needs_state(const rm_scheduler *scheduler, const rm_sequence *seq, int64_t n_positions) {
  return scheduler->n_states && n_positions > seq->kv_len &&
         !rm_kv_owns_state(scheduler->cache, seq->state);
}

// Allocates and copies pages, so that the next positions up to n_positions can be written. Preempts
// newer sequences until there are enough pages and, if a new state is needed, a free one. Returns 0
// if seq itself was preempted.
static int reserve(rm_scheduler *scheduler, rm_sequence *seq, int64_t n_positions) {
  for (;;) {
    const int64_t shared = shared_page(scheduler, seq, n_positions);
    const int64_t wanted =
        rm_max64(pages_for(scheduler, n_positions) - seq->n_pages, 0) + (shared >= 0);
    if (wanted <= rm_kv_free_pages(scheduler->cache) &&
        needs_state(scheduler, seq, n_positions) <= rm_kv_free_states(scheduler->cache)) {
      if (shared >= 0) copy_page(scheduler, seq, shared);
      extend(scheduler, seq, n_positions);
      return 1;
    }
    rm_sequence *newest = (rm_sequence *)scheduler->active.prev;
    rm_preempt(scheduler, newest);
    scheduler->preemptions++;
    if (newest == seq) return 0;
  }
}

// -------------------------------------------------------------------------------------- admission
void rm_count_start(rm_scheduler *scheduler, const rm_sequence *seq) {
  rm_sequence_group *group = seq->group;
  if (group->times.scheduled > 0) return;
  group->times.scheduled = rm_now();
  group->n_cached = rm_min64(seq->next, group->n_prompt);
  scheduler->prompt_tokens += group->n_prompt;
  scheduler->cached_tokens += group->n_cached;
}

// Returns whether the group can use a cached page without losing records: 2 yes, 1 if the page has
// logprobs, 0 no. Row p gives the logprob of token p + 1, so the logprobs of page i come from the
// rows up to its last but one.
static int page_serves(const rm_scheduler *scheduler, const rm_sequence_group *group,
                       int64_t page) {
  const int64_t rows = rm_min64((page + 1) * rm_page_size(scheduler) - 1, group->n_targets);
  if (group->n_scored >= rows) return 2;
  return !group->prompt_top && !group->score_sampling && !group->logits_out;
}

static void take_logprobs(rm_scheduler *scheduler, rm_sequence_group *group, int64_t index,
                          int32_t page) {
  const int64_t size = rm_page_size(scheduler), start = index * size;
  for (int64_t position = rm_max64(start, group->n_scored + 1);
       position < start + size && position <= group->n_targets; position++) {
    group->prompt_logprobs[position - 1] = rm_kv_logprobs(scheduler->cache, page)[position - start];
    group->n_scored = position;
  }
}

// Releases the last pages of a prefix until it ends with a page that keeps a state from which all
// missing rows can be computed.
static void end_at_state(rm_scheduler *scheduler, rm_sequence *seq) {
  rm_sequence_group *group = seq->group;
  const int64_t size = rm_page_size(scheduler), length = rm_sequence_length(seq);
  const int32_t *table = rm_block_table(scheduler, seq);
  for (; seq->n_pages; rm_kv_release(scheduler->cache, table[--seq->n_pages])) {
    const int64_t end = seq->n_pages * size;
    const int32_t state = rm_kv_state_of(scheduler->cache, table[seq->n_pages - 1]);
    if (state < 0 || end >= length || (group->n_scored < group->n_targets && group->n_scored < end))
      continue;
    rm_kv_retain_state(scheduler->cache, state);
    seq->state = state;
    return;
  }
}

// Takes the cached pages of the longest cached prefix, and copies their logprobs: also from pages
// that end_at_state releases, because the logprob of a page's last row belongs to the next page.
static void match_prefix(rm_scheduler *scheduler, rm_sequence *seq) {
  int32_t *table = rm_change_table(scheduler, seq), parent = -1;
  const int64_t size = rm_page_size(scheduler), n = rm_sequence_length(seq) / size;
  seq->n_pages = 0;
  if (!scheduler->options.prefix_caching) return;
  for (int64_t i = 0; i < n; i++) {
    const int serves = page_serves(scheduler, seq->group, i);
    if (!serves) break;
    parent =
        rm_kv_find(scheduler->cache, scheduler->version, parent, seq->ids + i * size, serves == 1);
    if (parent < 0) break;
    table[seq->n_pages++] = parent;
    take_logprobs(scheduler, seq->group, i, parent);
  }
  if (scheduler->n_states) end_at_state(scheduler, seq);
}

// Activates a waiting sequence, with pages for all of its known tokens. Returns 0 if there are too
// few pages; the sequence then keeps waiting.
static int start(rm_scheduler *scheduler, rm_sequence *seq) {
  const int64_t length = rm_sequence_length(seq), size = rm_page_size(scheduler);
  rm_sequence_group *group = seq->group;
  if (scheduler->blocked == seq && scheduler->n_active &&
      rm_kv_free_pages(scheduler->cache) <= scheduler->blocked_free)
    return 0;
  // The prefix may take one state, and the first rows save another one.
  if (scheduler->n_states && rm_kv_free_states(scheduler->cache) < 2) return 0;
  rm_activate(scheduler, seq);
  match_prefix(scheduler, seq);
  if (pages_for(scheduler, length) - seq->n_pages > rm_kv_free_pages(scheduler->cache)) {
    rm_preempt(scheduler, seq);
    scheduler->blocked = seq;
    scheduler->blocked_free = rm_kv_free_pages(scheduler->cache);
    return 0;
  }
  seq->kv_len = seq->n_pages * size;
  rm_take_routed(scheduler, seq, seq->kv_len);
  seq->n_indexed = seq->n_pages;
  seq->next = rm_min64(seq->kv_len, length - 1);
  if (group->n_scored < group->n_targets) seq->next = rm_min64(seq->next, group->n_scored);
  rm_count_start(scheduler, seq);
  if (!seq->n_tokens) group->leader = seq;
  extend(scheduler, seq, length);
  return 1;
}

// -------------------------------------------------------------------------------------- the batch
// Returns how many rows the batch can still take. Each may have an out, and siblings have outs
// without rows.
static int64_t rows_left(const rm_scheduler *scheduler) {
  const rm_plan *plan = &scheduler->plan;
  return scheduler->options.max_num_batched_tokens - rm_max64(plan->n_rows, plan->n_out);
}

static void add_out(rm_plan *plan, int64_t row, rm_out_row out) {
  plan->out_rows[plan->n_out] = (int32_t)row;
  plan->targets[plan->n_out] = out.target;
  plan->outs[plan->n_out++] = out;
}

// Lets siblings that have not started draw from the leader's last row, with the leader's pages, as
// far as there is room. The others start after this step.
static void join_siblings(rm_scheduler *scheduler, const rm_sequence *leader, int64_t row) {
  rm_plan *plan = &scheduler->plan;
  const rm_sequence_group *group = leader->group;
  const int32_t *from = rm_block_table(scheduler, leader);
  for (int32_t i = 0; i < group->n && scheduler->n_free_table_rows && rows_left(scheduler); i++) {
    rm_sequence *seq = &group->sequences[i];
    if (seq->status != RM_WAITING || seq->n_tokens) continue;
    rm_activate(scheduler, seq);
    int32_t *table = rm_change_table(scheduler, seq);
    for (; seq->n_pages < leader->n_pages; seq->n_pages++) {
      rm_kv_retain(scheduler->cache, from[seq->n_pages]);
      table[seq->n_pages] = from[seq->n_pages];
    }
    seq->kv_len = seq->next = group->n_prompt;
    if ((seq->state = plan->save_states[row]) >= 0)
      rm_kv_retain_state(scheduler->cache, seq->state);
    seq->n_indexed = group->n_prompt / rm_page_size(scheduler); // by the leader
    add_out(plan, row, (rm_out_row){seq, seq->next - 1, -1, 1, 1});
  }
}

// Returns the state that is saved after position p, for rows that end before position `end`; −1:
// none. The caller's plan gets a reference to it.
static int32_t state_after(rm_scheduler *scheduler, const rm_sequence *seq, int64_t p,
                           int64_t end) {
  rm_kv_cache *cache = scheduler->cache;
  const int is_last = p + 1 == end;
  if (!scheduler->n_states) return -1;
  if (is_last && rm_kv_owns_state(cache, seq->state)) {
    rm_kv_retain_state(cache, seq->state);
    return seq->state;
  }
  // Leaves a free state for each active sequence, which may need one in this step.
  if (!is_last &&
      (!rm_keeps_state(scheduler, seq, p + 1) || rm_kv_free_states(cache) <= scheduler->n_active))
    return -1;
  const int32_t state = rm_kv_alloc_state(cache);
  assert(state >= 0);
  return state;
}

void rm_plan_rows(rm_scheduler *scheduler, rm_sequence *seq, int64_t n_rows) {
  rm_plan *plan = &scheduler->plan;
  const rm_sequence_group *group = seq->group;
  const int64_t end = seq->next + n_rows, size = rm_page_size(scheduler), first = plan->n_rows;
  const int32_t *table = rm_block_table(scheduler, seq);
  seq->first_row = first;
  seq->n_rows = n_rows;
  plan->scheduled[plan->n_scheduled++] = seq;
  plan->load_states[seq->table_row] = seq->state;
  for (int64_t p = seq->next; p < end; p++, plan->n_rows++) {
    plan->ids[plan->n_rows] = seq->ids[p];
    plan->positions[plan->n_rows] = (int32_t)p;
    plan->seq_of_row[plan->n_rows] = seq->table_row;
    plan->slots[plan->n_rows] = p < seq->kv_len ? -1 : table[p / size] * size + p % size;
    plan->save_states[plan->n_rows] = state_after(scheduler, seq, p, end);
  }
  for (int64_t p = rm_max64(seq->next, group->n_scored); p < rm_min64(end, group->n_targets); p++) {
    const int32_t target = p + 1 < group->n_prompt ? seq->ids[p + 1] : -1;
    const uint8_t samples = group->score_sampling && target >= 0;
    add_out(plan, first + p - seq->next, (rm_out_row){seq, p, target, 0, samples});
  }
  if (group->kind != RM_GENERATE || end < rm_sequence_length(seq)) return;
  add_out(plan, plan->n_rows - 1, (rm_out_row){seq, end - 1, -1, 1, !group->external_draws});
  if (group->external_draws) seq->external_row = (int32_t)plan->n_external++;
  if (group->leader == seq) join_siblings(scheduler, seq, plan->n_rows - 1);
}

// A sequence that computes its first token waits for the leader of its group, if there is one.
static int must_wait(const rm_sequence *seq) { return !seq->n_tokens && seq->group->leader; }

static void admit(rm_scheduler *scheduler) {
  for (rm_link *at = scheduler->waiting.next; at != &scheduler->waiting;) {
    rm_sequence *seq = (rm_sequence *)at;
    if (!rows_left(scheduler) || !scheduler->n_free_table_rows) return;
    if (must_wait(seq)) {
      at = at->next;
      continue;
    }
    rm_link *before = at->prev;
    if (!start(scheduler, seq)) return;
    rm_plan_rows(scheduler, seq,
                 rm_min64(rm_sequence_length(seq) - seq->next, rows_left(scheduler)));
    // Siblings that joined have left the list; the element before was skipped and is still in it.
    at = before->next;
  }
}

static rm_progress schedule(rm_scheduler *scheduler) {
  const int64_t preemptions = scheduler->preemptions;
  if (!scheduler->n_live) return RM_NO_WORK;
  for (rm_link *at = scheduler->active.next; at != &scheduler->active && rows_left(scheduler);) {
    rm_sequence *seq = (rm_sequence *)at;
    const int64_t n_rows = rm_min64(rm_sequence_length(seq) - seq->next, rows_left(scheduler));
    if (!reserve(scheduler, seq, seq->next + n_rows)) break;
    at = seq->link.next;
    if (n_rows) rm_plan_rows(scheduler, seq, n_rows); // 0: it has joined its leader in this step
  }
  if (scheduler->preemptions == preemptions) admit(scheduler);
  assert(scheduler->plan.n_rows > 0); // the oldest can always continue
  return RM_LAST_BATCH;
}

rm_progress rm_schedule(rm_scheduler *scheduler) {
  rm_plan *plan = &scheduler->plan;
  plan->n_rows = plan->n_out = plan->n_scheduled = 0;
  const rm_progress progress =
      rm_is_external(scheduler) ? rm_external_schedule(scheduler) : schedule(scheduler);
  plan->writes = rm_kv_take_writes(scheduler->cache, &plan->n_writes);
  for (int64_t i = 0; i < plan->n_out; i++) {
    if (!plan->outs[i].samples) continue;
    plan->params[i] = rm_params_of(plan->outs[i].seq);
    plan->params[i].forced = plan->outs[i].target;
  }
  return progress;
}

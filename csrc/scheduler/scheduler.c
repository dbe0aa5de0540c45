// scheduler.c: which rows the next step computes, and on which pages.
//
// Priority is the order of arrival, and everything follows from it. The active are visited oldest first and take what they
// need; one that finds no page preempts the newest. Then the waiting are admitted, oldest first, while there are places, rows
// and pages for all of a sequence's known tokens. The oldest can always go on (add has checked that it fits alone), so
// something always moves, and a preempted sequence, whose pages are gone, is recomputed from its tokens to the same bits.
//
// A prompt with n samples is computed by the first that gets a place, the leader. Meanwhile its siblings wait; in the step that
// computes the prompt's last row they join: as many as there are places draw from that row and share the leader's pages. The
// last page, where they part, is copied by each when it first writes there, except by the last one left.
#include <assert.h>

#include "engine/state.h"

// ---------------------------------------------------------------------------------------------- lists and pages
static void insert_by_order(rm_link *head, rm_sequence *seq, int from_the_end) {
  rm_link *at = head;
  if (from_the_end)
    while (at->prev != head && ((rm_sequence *)at->prev)->order > seq->order) at = at->prev;
  else
    for (at = head->next; at != head && ((rm_sequence *)at)->order < seq->order;) at = at->next;
  rm_list_insert_before(at, &seq->link);
}

// From the end when it is new, from the front when it was preempted: both are where it belongs, nearly always.
void rm_enqueue(rm_engine *engine, rm_sequence *seq) {
  const rm_link *last = engine->waiting.prev;
  insert_by_order(&engine->waiting, seq, last == &engine->waiting || ((const rm_sequence *)last)->order < seq->order);
  seq->status = RM_WAITING;
  engine->n_waiting++;
}

void rm_activate(rm_engine *engine, rm_sequence *seq) {
  assert(engine->n_places > 0);
  seq->place = engine->places[--engine->n_places];
  seq->status = RM_ACTIVE;
  insert_by_order(&engine->active, seq, 1);
  engine->n_active++;
}

void rm_release_places(rm_engine *engine, rm_sequence *seq) {
  rm_list_remove(&seq->link);
  if (seq->status == RM_WAITING) engine->n_waiting--;
  if (seq->status == RM_JOINING) engine->n_joining--;
  if (seq->status == RM_ACTIVE) {
    const int32_t *table = rm_block_table(engine, seq);
    while (!rm_is_external(engine) && seq->n_pages > 0) rm_kv_release(engine->cache, table[--seq->n_pages]);
    seq->n_pages = 0;
    engine->places[engine->n_places++] = seq->place;
    engine->n_active--;
  }
  if (seq->group->leader == seq) seq->group->leader = NULL;
  if (engine->blocked == seq) engine->blocked = NULL;
  seq->place = -1;
  seq->kv_len = seq->next = seq->n_indexed = seq->n_rows = 0;
  seq->stale = 0;
}

void rm_preempt(rm_engine *engine, rm_sequence *seq) {
  rm_release_places(engine, seq);
  rm_enqueue(engine, seq);
}

void rm_share_pages(rm_engine *engine, rm_sequence *seq, const rm_sequence *leader) {
  engine->n_joining--;
  rm_activate(engine, seq);
  int32_t *table = rm_change_table(engine, seq);
  const int32_t *from = rm_block_table(engine, leader);
  for (seq->n_pages = 0; seq->n_pages < leader->n_pages; seq->n_pages++) {
    rm_kv_retain(engine->cache, from[seq->n_pages]);
    table[seq->n_pages] = from[seq->n_pages];
  }
  seq->kv_len = seq->next = leader->kv_len;
  seq->n_indexed = leader->n_indexed;
  seq->n_rows = 0;
}

static int64_t pages_for(const rm_engine *engine, int64_t n_positions) {
  return (n_positions + engine->options.page_size - 1) / engine->options.page_size;
}

// Takes pages until n_positions fit. There are enough.
static void extend(rm_engine *engine, rm_sequence *seq, int64_t n_positions) {
  const int64_t n = pages_for(engine, n_positions);
  if (seq->n_pages >= n) return;
  for (int32_t *table = rm_change_table(engine, seq); seq->n_pages < n; seq->n_pages++) {
    table[seq->n_pages] = rm_kv_alloc(engine->cache);
    assert(table[seq->n_pages] >= 0);
  }
}

// Index of a page that is shared and about to be written, −1: none. Only where the KV ends can that be.
static int64_t shared_page(const rm_engine *engine, const rm_sequence *seq, int64_t n_positions) {
  const int64_t index = seq->kv_len / engine->options.page_size;
  if (n_positions <= seq->kv_len || index >= seq->n_pages) return -1;
  return rm_kv_references(engine->cache, rm_block_table(engine, seq)[index]) > 1 ? index : -1;
}

// Logprobs need no copy: they are written when the page is full.
static void copy_page(rm_engine *engine, rm_sequence *seq, int64_t index) {
  int32_t *entry = &rm_change_table(engine, seq)[index];
  const int32_t to = rm_kv_alloc(engine->cache), from = *entry;
  assert(to >= 0);
  rm_model_copy_page(engine->model, engine->kv, engine->n_pages, to, from);
  if (engine->routed_per_token)
    memcpy(rm_kv_routed(engine->cache, to), rm_kv_routed(engine->cache, from),
           (size_t)(engine->options.page_size * engine->routed_per_token) * sizeof(int16_t));
  rm_kv_release(engine->cache, from);
  *entry = to;
}

// Makes the pages of [0, n_positions) writable where they will be written, preempting newer sequences. 0: seq itself went.
static int reserve(rm_engine *engine, rm_sequence *seq, int64_t n_positions) {
  for (;;) {
    const int64_t shared = shared_page(engine, seq, n_positions);
    const int64_t wanted = rm_max64(pages_for(engine, n_positions) - seq->n_pages, 0) + (shared >= 0);
    if (wanted <= rm_kv_free_pages(engine->cache)) {
      if (shared >= 0) copy_page(engine, seq, shared);
      extend(engine, seq, n_positions);
      return 1;
    }
    rm_sequence *newest = (rm_sequence *)engine->active.prev;
    rm_preempt(engine, newest);
    engine->stats.preemptions++;
    if (newest == seq) return 0;
  }
}

// ---------------------------------------------------------------------------------------------- admission
// Whether a cached page would lose nothing that the group must record: 2 yes, 1 if the page has logprobs, 0 no. Row p gives
// the logprob of token p + 1, so the tokens of page i come from the rows up to its last but one.
static int page_serves(const rm_engine *engine, const rm_group *group, int64_t page) {
  const int64_t rows = rm_min64((page + 1) * engine->options.page_size - 1, group->n_targets);
  if (group->n_scored >= rows) return 2;
  return !group->prompt_top && !group->score_sampling && !group->wants_logits;
}

static void take_records(rm_engine *engine, rm_sequence *seq, int64_t index, int32_t page) {
  rm_group *group = seq->group;
  const int64_t size = engine->options.page_size, start = index * size, per_token = engine->routed_per_token;
  for (int64_t position = rm_max64(start, group->n_scored + 1); position < start + size && position <= group->n_targets; position++) {
    group->prompt_logprobs[position - 1] = rm_kv_logprobs(engine->cache, page)[position - start];
    group->n_scored = position;
  }
  for (int64_t p = rm_max64(start, group->n_prompt_routed); per_token && p < rm_min64(start + size, group->n_prompt); p++) {
    memcpy(group->prompt_routed + p * per_token, rm_kv_routed(engine->cache, page) + (p - start) * per_token,
           (size_t)per_token * sizeof(int16_t));
    group->n_prompt_routed = p + 1;
  }
}

// Takes the cached pages that its tokens begin with. Records are taken over later, when it is sure to start.
static void match_prefix(rm_engine *engine, rm_sequence *seq) {
  int32_t *table = rm_change_table(engine, seq), parent = -1;
  const int64_t size = engine->options.page_size, n = rm_sequence_length(seq) / size;
  seq->n_pages = 0;
  if (!engine->options.prefix_caching) return;
  for (int64_t i = 0; i < n; i++) {
    const int serves = page_serves(engine, seq->group, i);
    if (!serves) break;
    parent = rm_kv_find(engine->cache, rm_store_version(engine->store), parent, seq->ids + i * size, serves == 1);
    if (parent < 0) break;
    table[seq->n_pages++] = parent;
  }
}

// Gives a waiting sequence its place and all pages of its known tokens, or changes nothing and returns 0.
static int start(rm_engine *engine, rm_sequence *seq) {
  const int64_t length = rm_sequence_length(seq), size = engine->options.page_size;
  rm_group *group = seq->group;
  if (engine->blocked == seq && engine->n_active && rm_kv_free_pages(engine->cache) <= engine->blocked_free) return 0;
  rm_link *next = seq->link.next;
  rm_list_remove(&seq->link);
  rm_activate(engine, seq);
  match_prefix(engine, seq);
  if (pages_for(engine, length) - seq->n_pages > rm_kv_free_pages(engine->cache)) {
    rm_release_places(engine, seq);
    rm_list_insert_before(next, &seq->link);
    seq->status = RM_WAITING;
    engine->blocked = seq;
    engine->blocked_free = rm_kv_free_pages(engine->cache);
    return 0;
  }
  engine->n_waiting--;
  for (int64_t i = 0; i < seq->n_pages; i++) take_records(engine, seq, i, rm_block_table(engine, seq)[i]);
  seq->kv_len = seq->n_pages * size;
  seq->n_indexed = seq->n_pages;
  seq->next = rm_min64(seq->kv_len, length - 1);
  if (group->n_scored < group->n_targets) seq->next = rm_min64(seq->next, group->n_scored);
  if (!group->started) {
    group->started = 1;
    group->n_cached = rm_min64(seq->next, group->n_prompt);
    engine->stats.prompt_tokens += group->n_prompt;
    engine->stats.cached_tokens += group->n_cached;
  }
  if (!seq->n_tokens) group->leader = seq;
  extend(engine, seq, length);
  return 1;
}

// ---------------------------------------------------------------------------------------------- the batch
static void add_out(rm_plan *plan, rm_sequence *seq, int64_t position, int32_t target, int draws) {
  const int64_t row = seq->first_row + position - seq->next;
  plan->out_rows[plan->n_out] = (int32_t)row;
  plan->targets[plan->n_out] = target;
  plan->outs[plan->n_out++] = (rm_out_row){seq, position, target, draws};
}

static void add_draw(rm_plan *plan, rm_sequence *seq) { plan->draws[plan->n_draws++] = (rm_draw){seq, (int32_t)plan->n_out - 1}; }

// Siblings that have not begun join while there are places.
static void join_siblings(rm_engine *engine, rm_group *group) {
  for (int32_t i = 0; i < group->n && engine->n_active + engine->n_joining < engine->options.max_num_seqs; i++) {
    rm_sequence *seq = &group->sequences[i];
    if (seq->status != RM_WAITING || seq->n_tokens) continue;
    rm_release_places(engine, seq);
    seq->status = RM_JOINING;
    engine->n_joining++;
    add_draw(&engine->plan, seq);
  }
}

void rm_plan_rows(rm_engine *engine, rm_sequence *seq, int64_t n_rows) {
  rm_plan *plan = &engine->plan;
  const rm_group *group = seq->group;
  const int64_t end = seq->next + n_rows, size = engine->options.page_size;
  const int32_t *table = rm_block_table(engine, seq);
  seq->first_row = plan->n_rows;
  seq->n_rows = n_rows;
  plan->scheduled[plan->n_scheduled++] = seq;
  for (int64_t p = seq->next; p < end; p++, plan->n_rows++) {
    plan->ids[plan->n_rows] = seq->ids[p];
    plan->positions[plan->n_rows] = (int32_t)p;
    plan->seq_of_row[plan->n_rows] = seq->place;
    plan->slots[plan->n_rows] = p < seq->kv_len ? -1 : table[p / size] * size + p % size;
  }
  for (int64_t p = rm_max64(seq->next, group->n_scored); p < rm_min64(end, group->n_targets); p++)
    add_out(plan, seq, p, p + 1 < group->n_prompt ? seq->ids[p + 1] : -1, 0);
  if (group->kind != RM_GENERATE || end < rm_sequence_length(seq)) return;
  add_out(plan, seq, end - 1, -1, 1);
  if (group->host_draws) seq->host_row = (int32_t)plan->n_host++;
  else add_draw(plan, seq);
  if (group->leader == seq) join_siblings(engine, seq->group);
}

// A sequence that computes its first token waits for the leader of its group, if there is one.
static int must_wait(const rm_sequence *seq) { return !seq->n_tokens && seq->group->leader; }

static void admit(rm_engine *engine) {
  const int64_t max_rows = engine->options.max_num_batched_tokens;
  for (rm_link *at = engine->waiting.next; at != &engine->waiting;) {
    rm_sequence *seq = (rm_sequence *)at;
    if (engine->plan.n_rows == max_rows || engine->n_active + engine->n_joining == engine->options.max_num_seqs) return;
    if (must_wait(seq)) {
      at = at->next;
      continue;
    }
    rm_link *before = at->prev;
    if (!start(engine, seq)) return;
    rm_plan_rows(engine, seq, rm_min64(rm_sequence_length(seq) - seq->next, max_rows - engine->plan.n_rows));
    at = before->next;   // siblings that joined are gone from the list; what stood before was passed over and is still there
  }
}

void rm_schedule(rm_engine *engine) {
  rm_plan *plan = &engine->plan;
  const int64_t max_rows = engine->options.max_num_batched_tokens, preemptions = engine->stats.preemptions;
  plan->n_rows = plan->n_out = plan->n_scheduled = plan->n_draws = 0;
  for (rm_link *at = engine->active.next; at != &engine->active && plan->n_rows < max_rows;) {
    rm_sequence *seq = (rm_sequence *)at;
    const int64_t n_rows = rm_min64(rm_sequence_length(seq) - seq->next, max_rows - plan->n_rows);
    if (!reserve(engine, seq, seq->next + n_rows)) break;
    at = seq->link.next;
    rm_plan_rows(engine, seq, n_rows);
  }
  if (engine->stats.preemptions == preemptions) admit(engine);
}

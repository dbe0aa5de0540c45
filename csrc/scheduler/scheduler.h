// scheduler.h: the requests of a replica, their records, the pages of its KV cache, and the plan of
// the next step. It only uses host memory: no device, no other ranks, no threads.
//
//   add … ─► schedule (fills `plan`) ─► the workers compute it ─► commit (their output) ─► find
//               ▲                                                   │
//               └───────────────────────────────────────────────────┘
//
// The owner (the engine) makes one call at a time. scheduler.c decides what a step computes: in
// order of arrival, preempting the newest. With external_pages an external scheduler decides
// instead, ends requests and owns the pages (external_scheduler.h).
#pragma once

#include <string.h>

#include "base/memory.h"
#include "kernels.h"
#include "scheduler/kv_cache.h"
#include "scheduler/plan.h"

typedef struct rm_scheduler rm_scheduler;
typedef struct rm_external_step rm_external_step;

// The work of a rank for the next forward. A lockstep group takes the maximum.
typedef enum rm_progress { RM_NO_WORK, RM_LAST_BATCH, RM_MORE_BATCHES } rm_progress;

typedef struct rm_scheduler_options {
  // Limits of requests; eos_ids is a view, and rm_scheduler_open_pages sets n_pages.
  rm_request_limits limits;
  int64_t max_num_seqs, max_num_batched_tokens;
  int prefix_caching;
  int64_t external_pages; // pages of an external scheduler; 0: no external scheduler
} rm_scheduler_options;

struct rm_scheduler {
  rm_scheduler_options options;
  int64_t max_pages; // largest number of pages of one sequence
  int64_t n_states; // 0: the model's layers have no states
  int64_t state_interval; // positions from one kept state to the next, a multiple of page_size
  int64_t version; // version of the serving weights; the engine sets it before calls that read it
  rm_plan plan;
  rm_kv_cache *cache; // owned
  void *memory; // owned: the arrays below and the plan's
  size_t memory_bytes;
  int32_t *free_table_rows; // stack of free rows of the block tables
  int64_t n_free_table_rows;
  // scheduler.c
  rm_link waiting, active; // sequences
  int64_t n_waiting, n_active;
  const rm_sequence *blocked; // head of the queue when it last found too few free pages …
  int64_t blocked_free; // … and the number of free pages then
  // external_scheduler.c
  int64_t *page_versions; // [external_pages] version of the weights of a page's KV; −1: none
  const rm_external_step *step; // the current step, a view
  int64_t external_steps; // number of steps that were checked
  // requests.c
  rm_link live, finished; // unfinished requests by arrival; finished ones until release
  int64_t n_live;
  rm_sequence_group **buckets; // [n_buckets] all requests by id
  uint64_t n_buckets;
  int64_t n_groups;
  uint64_t next_order;
  // counts since creation
  int64_t generated_tokens, prompt_tokens, cached_tokens, preemptions;
};

// Makes a scheduler without pages in zeroed memory; `options` is copied.
rm_code rm_scheduler_create(rm_scheduler *scheduler, const rm_scheduler_options *options,
                            rm_error *err);
// Makes the bookkeeping of the KV cache. With states at least 2: a sequence loads one and saves
// another.
rm_code rm_scheduler_open_pages(rm_scheduler *scheduler, int64_t n_pages, int64_t n_states,
                                int64_t state_interval, rm_error *err);
void rm_scheduler_destroy(rm_scheduler *scheduler); // frees all requests; safe on zeroed memory

// Fills the plan with the next batch. `version` must be set.
rm_progress rm_schedule(rm_scheduler *scheduler);
// commit.c: writes the output of the plan to the records of its requests, and ends finished ones.
void rm_commit(rm_scheduler *scheduler, const rm_step_output *output);
// Copies the routing of positions before `end` from the pages to the records that do not have it
// yet: other requests may have computed it.
void rm_take_routed(rm_scheduler *scheduler, rm_sequence *seq, int64_t end);
// Appends a token of an active sequence that was drawn outside of a plan.
void rm_append(rm_scheduler *scheduler, rm_sequence *seq, const rm_drawn *drawn);

// ------------------------------------------------------------------------------------- requests.c
rm_sequence_group *rm_find_sequence_group(const rm_scheduler *scheduler, uint64_t id,
                                          rm_error *err); // NULL: RM_E_REQUEST
// The request has passed rm_sequence_group_check, and its id is new.
rm_code rm_scheduler_add(rm_scheduler *scheduler, const rm_request *request, uint64_t id,
                         rm_error *err);
// A sample of a request; NULL: RM_E_REQUEST. Its results, and those of its group, are valid until
// the next commit or release.
rm_sequence *rm_find_sample(const rm_scheduler *scheduler, uint64_t id, int32_t sample,
                            rm_error *err);
// Releases a finished request.
rm_code rm_scheduler_release(rm_scheduler *scheduler, uint64_t id, rm_error *err);
// Aborts a request. Its generated tokens stay readable.
rm_code rm_scheduler_abort(rm_scheduler *scheduler, uint64_t id, rm_error *err);
// Ends one sample at n_tokens, where a stop string matched; finish = stop. The sample may have
// ended already. RM_E_STATE: it was aborted or failed.
rm_code rm_scheduler_stop_sample(rm_scheduler *scheduler, uint64_t id, int32_t sample,
                                 int64_t n_tokens, rm_error *err);
// Makes a sequence DONE, and finishes its group if it was the last one.
void rm_finish_sequence(rm_scheduler *scheduler, rm_sequence *seq, rm_finish finish);
// Finishes all sequences of a group that are not DONE.
void rm_finish_sequence_group(rm_scheduler *scheduler, rm_sequence_group *group, rm_finish finish);
void rm_fail_sequence_group(rm_scheduler *scheduler, const rm_sequence *seq, int64_t position,
                            const char *what); // with RM_E_NUMERICS

// ------------------------------------------------------ scheduler.c, for the files of this folder
void rm_enqueue(rm_scheduler *scheduler, rm_sequence *seq); // into `waiting`, by order
// Makes a WAITING sequence ACTIVE, with a table row.
void rm_activate(rm_scheduler *scheduler, rm_sequence *seq);
void rm_drop_state(rm_scheduler *scheduler, rm_sequence *seq); // which then holds none
// Removes a sequence from its list and releases its pages and table row.
void rm_leave_lists(rm_scheduler *scheduler, rm_sequence *seq);
// Makes an ACTIVE sequence WAITING and releases its pages.
void rm_preempt(rm_scheduler *scheduler, rm_sequence *seq);
// Counts the prompt of a group when the first row of a sequence is known, once.
void rm_count_start(rm_scheduler *scheduler, const rm_sequence *seq);
// Plans n_rows rows from seq->next on, and the draw from the last one.
void rm_plan_rows(rm_scheduler *scheduler, rm_sequence *seq, int64_t n_rows);
static inline int64_t rm_page_size(const rm_scheduler *scheduler) {
  return scheduler->options.limits.page_size;
}
// Whether a page that ends at a position keeps the state there, wherever the sequence ends.
static inline int rm_keeps_state(const rm_scheduler *scheduler, const rm_sequence *seq,
                                 int64_t position) {
  const int64_t size = rm_page_size(scheduler);
  return scheduler->n_states && scheduler->options.prefix_caching && !seq->stale &&
         (position % scheduler->state_interval == 0 ||
          position == (seq->group->n_prompt - 1) / size * size);
}
// inflight.c. After a commit; when the weights or the KV cache go to sleep.
void rm_weights_changed(rm_scheduler *scheduler, rm_inflight inflight);
void rm_pages_lost(rm_scheduler *scheduler);

static inline int rm_is_external(const rm_scheduler *scheduler) {
  return scheduler->options.external_pages > 0;
}
static inline int32_t *rm_block_table(const rm_scheduler *scheduler, const rm_sequence *seq) {
  return scheduler->plan.block_tables + seq->table_row * scheduler->max_pages;
}
// Returns the block table for writing; it is copied to devices before the next batch.
static inline int32_t *rm_change_table(const rm_scheduler *scheduler, const rm_sequence *seq) {
  scheduler->plan.table_changed[seq->table_row] = 1;
  return rm_block_table(scheduler, seq);
}

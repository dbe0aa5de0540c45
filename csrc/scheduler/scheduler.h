// scheduler.h: the requests of an engine, the pages of its KV cache, and what the next step
// computes. No call here waits for a device or talks to another rank; page contents are zeroed and
// copied by two callbacks of the runner.
//
// The policy decides: the engine's own scheduler (scheduler.c: in order of arrival, preempting the
// newest) or an external one (external_scheduler.h: vLLM decides). The engine and commit only call
// the policy's functions.
#pragma once

#include <string.h>

#include "base/memory.h"
#include "kernels.h"
#include "scheduler/kv_cache.h"
#include "scheduler/plan.h"

typedef struct rm_scheduler rm_scheduler;
typedef struct rm_external_step rm_external_step;

// What a rank has for the next forward; a lockstep group takes the maximum.
typedef enum rm_progress { RM_NO_WORK, RM_LAST_BATCH, RM_MORE_BATCHES } rm_progress;

// Functions marked optional may be NULL.
typedef struct rm_policy {
  rm_progress (*schedule)(rm_scheduler *scheduler); // fills the plan
  void (*committed)(rm_scheduler *scheduler); // optional: the plan's results are in the records
  void (*token_added)(rm_scheduler *scheduler,
                      rm_sequence *seq); // optional: ends a sequence that has all its tokens
  void (*release_pages)(rm_scheduler *scheduler,
                        rm_sequence *seq); // optional: an active sequence becomes inactive
  void (*invalidate_pages)(
      rm_scheduler *scheduler,
      const rm_sequence *seq); // optional: one of the sequence's rows was not finite
  void (*weights_changed)(rm_scheduler *scheduler, rm_inflight inflight); // a version was committed
  void (*pages_lost)(rm_scheduler *scheduler); // the weights or the KV cache go to sleep
} rm_policy;

extern const rm_policy rm_own_policy, rm_external_policy;

typedef struct rm_scheduler_options {
  const rm_policy *policy;
  rm_request_limits
      // of requests; limits.eos_ids is a view, limits.n_pages comes with rm_scheduler_open_pages
      limits;
  int64_t max_num_seqs, max_num_batched_tokens;
  int prefix_caching;
  int64_t external_pages; // an external scheduler's; 0: there is none
  // writes to pages, in the order of the calls and before the next forward's
  void (*zero_page)(void *pages, int32_t page);
  void (*copy_page)(void *pages, int32_t to, int32_t from);
  void *pages;
} rm_scheduler_options;

struct rm_scheduler {
  rm_scheduler_options options;
  int64_t max_pages; // of one sequence
  int64_t version; // of the weights that serve; set by the engine before each call that reads it
  int paused; // schedules nothing
  rm_plan plan;
  rm_kv_cache *cache; // owned
  void *memory; // owned: the arrays below and the plan's
  size_t memory_bytes;
  int32_t *free_table_rows; // stack of free rows of the block tables
  int64_t n_free_table_rows;
  // scheduler.c
  rm_link waiting, active; // sequences
  int64_t n_waiting, n_active, n_joining;
  const rm_sequence *blocked; // the head of the queue when it last found too few free pages …
  int64_t blocked_free; // … and how many were free
  // external_scheduler.c
  int64_t *page_versions; // [external_pages] of the weights that computed a page's KV, −1: none
  const rm_external_step *step; // the one that runs, a view
  // requests.c
  rm_link live, finished; // unfinished requests by arrival; finished and not yet reported
  int64_t n_live;
  rm_sequence_group **buckets; // [n_buckets] all requests by id
  uint64_t n_buckets;
  int64_t n_groups;
  uint64_t next_id, next_order;
  // counts since creation
  int64_t generated_tokens, prompt_tokens, cached_tokens, preemptions;
};

// Zeroed memory becomes a scheduler without pages; `options` is copied. block_tables is set by the
// caller.
rm_code rm_scheduler_create(rm_scheduler *scheduler, const rm_scheduler_options *options,
                            rm_error *err);
rm_code rm_scheduler_open_pages(rm_scheduler *scheduler, int64_t n_pages,
                                rm_error *err); // makes the KV cache's bookkeeping
void rm_scheduler_destroy(rm_scheduler *scheduler); // frees all requests; safe on a zeroed one

// ------------------------------------------------------------------------------------- requests.c
rm_sequence_group *rm_find_sequence_group(const rm_scheduler *scheduler, uint64_t id,
                                          rm_error *err); // NULL: RM_E_REQUEST
rm_code rm_scheduler_add(rm_scheduler *scheduler, const rm_request *request, uint64_t *id,
                         rm_error *err);
int64_t rm_scheduler_finished(rm_scheduler *scheduler, uint64_t *ids, int64_t capacity);
rm_code rm_scheduler_view(const rm_scheduler *scheduler, uint64_t id, rm_request_view *out,
                          rm_error *err);
rm_code rm_scheduler_sample_view(const rm_scheduler *scheduler, uint64_t id, int32_t sample,
                                 rm_sample_view *out, rm_error *err);
rm_code rm_scheduler_release(rm_scheduler *scheduler, uint64_t id, rm_error *err);
rm_code rm_scheduler_stop_sample(rm_scheduler *scheduler, uint64_t id, int32_t sample,
                                 int64_t n_tokens, rm_error *err);
void rm_finish_sequence(rm_scheduler *scheduler, rm_sequence *seq,
                        rm_finish finish); // → DONE; the group too when it was the last
void rm_finish_sequence_group(rm_scheduler *scheduler, rm_sequence_group *group,
                              rm_finish finish); // all that are not DONE
void rm_fail_sequence_group(rm_scheduler *scheduler, const rm_sequence *seq, long long position,
                            const char *what); // with RM_E_NUMERICS

// ------------------------------------------------------ scheduler.c, for the files of this folder
void rm_enqueue(rm_scheduler *scheduler, rm_sequence *seq); // into `waiting`, by order
void rm_activate(rm_scheduler *scheduler,
                 rm_sequence *seq); // → ACTIVE, with a place; it is in no list
void rm_leave_lists(rm_scheduler *scheduler,
                    rm_sequence *seq); // leaves its list; pages and place are free again
void rm_preempt(rm_scheduler *scheduler,
                rm_sequence *seq); // ACTIVE → WAITING, its pages given back
void rm_plan_rows(rm_scheduler *scheduler, rm_sequence *seq,
                  int64_t n_rows); // from seq->next on, and the draw from the last
// For commit: JOINING → ACTIVE, on the pages of the leader's prompt.
void rm_share_pages(rm_scheduler *scheduler, rm_sequence *seq, const rm_sequence *leader);
// inflight.c: the own policy's weights_changed and pages_lost
void rm_apply_inflight(rm_scheduler *scheduler, rm_inflight inflight);
void rm_preempt_all(rm_scheduler *scheduler);

static inline int32_t *rm_block_table(const rm_scheduler *scheduler, const rm_sequence *seq) {
  return scheduler->plan.block_tables + seq->table_row * scheduler->max_pages;
}
// The same, to be written: the device gets it before the next forward.
static inline int32_t *rm_change_table(const rm_scheduler *scheduler, const rm_sequence *seq) {
  scheduler->plan.table_changed[seq->table_row] = 1;
  return rm_block_table(scheduler, seq);
}

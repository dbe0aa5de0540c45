// scheduler.h: the requests of a replica, their records, the pages of its KV cache, and what the
// next step computes. Pure bookkeeping in host memory: no device, no other rank, no thread.
//
//   add … ─► schedule (fills `plan`) ─► whoever computes the plan ─► commit (its output) ─► view
//               ▲                                                      │
//               └──────────────────────────────────────────────────────┘
//
// The owner (the engine) makes one call at a time. A policy decides what a step computes: the own
// one (scheduler.c: in order of arrival, preempting the newest) or that for an external scheduler
// (external_scheduler.h: vLLM decides).
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
  // Optional: ends a sequence that has all its tokens.
  void (*token_added)(rm_scheduler *scheduler, rm_sequence *seq);
  // Optional: an active sequence becomes inactive.
  void (*release_pages)(rm_scheduler *scheduler, rm_sequence *seq);
  // Optional: one of the sequence's rows was not finite.
  void (*invalidate_pages)(rm_scheduler *scheduler, const rm_sequence *seq);
  void (*weights_changed)(rm_scheduler *scheduler, rm_inflight inflight); // a version was committed
  void (*pages_lost)(rm_scheduler *scheduler); // the weights or the KV cache go to sleep
} rm_policy;

extern const rm_policy rm_own_policy, rm_external_policy;

typedef struct rm_scheduler_options {
  const rm_policy *policy;
  // of requests; eos_ids is a view, n_pages comes with rm_scheduler_open_pages
  rm_request_limits limits;
  int64_t max_num_seqs, max_num_batched_tokens;
  int prefix_caching;
  int64_t external_pages; // an external scheduler's; 0: there is none
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
  uint64_t next_order;
  // counts since creation
  int64_t generated_tokens, prompt_tokens, cached_tokens, preemptions;
};

// Zeroed memory becomes a scheduler without pages; `options` is copied.
rm_code rm_scheduler_create(rm_scheduler *scheduler, const rm_scheduler_options *options,
                            rm_error *err);
rm_code rm_scheduler_open_pages(rm_scheduler *scheduler, int64_t n_pages,
                                rm_error *err); // makes the KV cache's bookkeeping
void rm_scheduler_destroy(rm_scheduler *scheduler); // frees all requests; safe on a zeroed one

// Fills the plan with the next batch. `version` is set.
rm_progress rm_schedule(rm_scheduler *scheduler);
// commit.c: writes the output of the plan to the records of its requests, which ends some.
void rm_commit(rm_scheduler *scheduler, const rm_step_output *output);
// A token of an active sequence, drawn outside of a plan.
void rm_append(rm_scheduler *scheduler, rm_sequence *seq, const rm_drawn *drawn);

// ------------------------------------------------------------------------------------- requests.c
rm_sequence_group *rm_find_sequence_group(const rm_scheduler *scheduler, uint64_t id,
                                          rm_error *err); // NULL: RM_E_REQUEST
// The request was checked (rm_sequence_group_check); no other one here has the id.
rm_code rm_scheduler_add(rm_scheduler *scheduler, const rm_request *request, uint64_t id,
                         rm_error *err);
// Views are valid until the next commit or release.
rm_code rm_scheduler_view(const rm_scheduler *scheduler, uint64_t id, rm_request_view *out,
                          rm_error *err);
rm_code rm_scheduler_sample_view(const rm_scheduler *scheduler, uint64_t id, int32_t sample,
                                 rm_sample_view *out, rm_error *err);
rm_code rm_scheduler_release(rm_scheduler *scheduler, uint64_t id,
                             rm_error *err); // of a finished one
rm_code rm_scheduler_abort(rm_scheduler *scheduler, uint64_t id,
                           rm_error *err); // what was generated stays readable
// Ends one sample at n_tokens (a stop string matched there); finish = stop. Also of one that has
// ended by itself meanwhile; RM_E_STATE for one that was aborted or failed.
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
// The same, to be written: devices get it before the next batch.
static inline int32_t *rm_change_table(const rm_scheduler *scheduler, const rm_sequence *seq) {
  scheduler->plan.table_changed[seq->table_row] = 1;
  return rm_block_table(scheduler, seq);
}

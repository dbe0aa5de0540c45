// state.h: the inside of an engine, shared by the files of this folder and nobody else. A step is three calls:
//
//   rm_schedule   (scheduler.c)   which rows of which sequences; fills the plan's inputs, hands out pages
//                 (external_scheduler.c)      the same where a host decides
//   rm_forward    (forward.c)     model, lm_head, draws, logprobs of prompts (sampler.c); fills the plan's results
//                                 Only here does a step touch the device: inputs are put, ops enqueued, results waited for once.
//   rm_commit     (commit.c)      results into the records; pages indexed, prompts shared, the finished put away
//
// A plan is one step's batch. Its arrays are made once, for the largest step.
#pragma once

#include "base/clock.h"
#include "base/fields.h"
#include "scheduler/kv_cache.h"
#include "scheduler/sequence.h"
#include "step/graph_replay.h"
#include "step/results.h"

// A row of logits that is wanted: the last row of a sequence, from which tokens are drawn, or a row of a prompt.
typedef struct rm_out_row {
  rm_sequence *seq;
  int64_t position;
  int32_t target;               // the token whose logprob is wanted, −1: none
  int draws;                    // tokens are drawn from it
} rm_out_row;

// One token to draw. Draws stand in the order of their rows; several may share one.
typedef struct rm_draw {
  rm_sequence *seq;
  int32_t out;                  // index in outs
} rm_draw;

// What a draw gave, for the other ranks of the tp group.
typedef struct rm_drawn {
  int32_t token, rank;
  float logprob, sampling_logprob;
} rm_drawn;

typedef struct rm_plan {
  int64_t n_rows, n_out, n_scheduled, n_draws;
  int64_t most_rows;            // n_rows of the rank that has most, of those that step together
  int is_recorded, with_ranks;  // it goes by graph_replay.h; of some draw the rank is wanted. The same on all that step together
  // the host's alone
  rm_out_row *outs;             // [max_rows]
  rm_sequence **scheduled;      // [max_num_seqs]
  rm_draw *draws;               // [max_num_seqs]
  uint8_t *all_flags;           // [tp][max_rows] scratch; where tp > 1, as is the next
  rm_drawn *drawn;              // [max_num_seqs]
  rm_sample_params *params;     // [max_draws] scratch
  float *host_logits, *host_stats;   // the scheduling host's, or NULL: [n_host][vocab] raw logits of what it draws from, [n_host][2]
  int64_t n_host;
  // in `paired`, filled by the scheduler and put
  int32_t *ids, *positions, *seq_of_row;   // [max_rows], see rm_batch
  int64_t *slots;
  int32_t *out_rows, *targets;  // [max_rows] of the outs
  // in `paired`, made by the device and got
  int16_t *routed;              // [max_rows][routed_per_token]
  uint8_t *row_flags;           // [max_rows]
  uint8_t *out_flags;           // [max_rows] of the outs
  float *target_logprobs;       // [max_rows] of the outs
  int32_t *tokens;              // [max_num_seqs] of the draws
  float *logprobs, *sampling_logprobs;
  int32_t *ranks;               // 0: not asked for
  // the device's alone
  float *logits;                // [max_out_rows][ld_logits]
  float *stats;                 // [max_out_rows][2]
  float *unused_logprobs;       // [max_draws], as is the next
  int32_t *unused_tokens;
} rm_plan;

struct rm_engine {
  // set at creation
  const rm_spec *spec;          // view
  rm_engine_options options;    // eos_ids: owned
  rm_device cpu;                // what `device` is where the options name none
  const rm_device *device;      // view
  const rm_kernels *kernels;    // its
  int64_t routed_per_token;     // n_moe_layers · top_k
  int64_t max_pages;            // of one sequence
  int64_t n_pages;              // of the KV cache
  size_t kv_bytes;
  int64_t max_out_rows, ld_logits;
  int64_t max_draws;            // tokens of one call of the sample op
  rm_comm *tp_there, *ep_there; // owned, as all below: of blocks in the device's memory; NULL on the CPU. May be one (device_comms.c)
  rm_team *team;
  rm_params *params;
  rm_model *model;
  rm_store *store;
  rm_kv_cache *cache;
  void *kv;                     // of the device, NULL while asleep
  int64_t *page_versions;       // [n_pages] hosted: of the weights that made a page's KV, −1: none
  int32_t *block_tables;        // [max_num_seqs][max_pages], in `paired`
  uint8_t *table_changed;       // [max_num_seqs] since it was put
  int32_t *places;              // stack of free rows of block_tables
  int64_t n_places;
  void *block, *scratch;        // the plan's arrays that are the host's alone, and those that are the device's alone
  size_t block_bytes, scratch_bytes;
  rm_paired paired;             // those that both have
  rm_results results;
  rm_plan plan;
  rm_decode decode;
  // scheduler.c
  rm_link waiting, active;      // sequences
  int64_t n_waiting, n_active, n_joining;
  const rm_sequence *blocked;   // the head of the queue when it last found too few pages free …
  int64_t blocked_free;         // … and how many those were
  // engine.c
  rm_link live, finished;       // groups: unfinished by arrival; finished and not yet reported
  int64_t n_live;
  rm_group **buckets;           // [n_buckets] all groups by id
  uint64_t n_buckets;
  int64_t n_groups;
  uint64_t next_id, next_order;
  int paused;
  int had_work;                 // in the last step, this rank or one that steps together with it
  rm_error lost;                // RM_OK, or why this engine cannot step any more
  unsigned asleep;
  rm_engine_stats stats;
};

// scheduler.c
void rm_schedule(rm_engine *engine);
void rm_preempt(rm_engine *engine, rm_sequence *seq);              // ACTIVE → WAITING, its pages given back
void rm_enqueue(rm_engine *engine, rm_sequence *seq);              // into `waiting`, by order
void rm_release_places(rm_engine *engine, rm_sequence *seq);       // leaves its list; pages and place given back
void rm_share_pages(rm_engine *engine, rm_sequence *seq, const rm_sequence *leader);   // JOINING → ACTIVE on the leader's prompt

void rm_activate(rm_engine *engine, rm_sequence *seq);             // → ACTIVE, with a place; it is in no list
void rm_plan_rows(rm_engine *engine, rm_sequence *seq, int64_t n_rows);            // from seq->next on, and what is drawn from the last

// What a call into the engine changes of its thread, and leaves as it was: the floating-point environment and the current device.
typedef struct rm_entered {
  uint32_t fp;
  int device;
} rm_entered;
static inline rm_entered rm_enter(const rm_engine *engine) {
  return (rm_entered){rm_fp_enter(), engine->device->enter(engine->device->self)};
}
static inline void rm_leave(const rm_engine *engine, rm_entered entered) {
  engine->device->leave(engine->device->self, entered.device);
  rm_fp_leave(entered.fp);
}

// engine.c
rm_model_options rm_model_options_of(const rm_engine *engine);
uint64_t rm_engine_workspace(const rm_engine *engine);             // bytes that it has mapped, without weights and KV cache
rm_code rm_engine_ready(const rm_engine *engine, rm_error *err);   // whether a step may be made
// Of those who step together the largest word; and, into the plan, which has its rows, what all of theirs come to.
rm_code rm_engine_ask_all(rm_engine *engine, int mine, int *most, rm_error *err);
rm_code rm_engine_run(rm_engine *engine, double scheduled, rm_error *err);         // forward and commit of the plan

// kv_size.c
// Pages of the KV cache. With memory_fraction all ranks of the mesh meet here, each with all but its cache made; they get the same number
// or the same error.
rm_code rm_kv_pages(rm_engine *engine, int64_t *n_pages, rm_error *err);

// device_comms.c
rm_code rm_join_peers(rm_engine *engine, rm_error *err);           // makes tp_there and ep_there
void rm_leave_peers(rm_engine *engine);
rm_code rm_engine_wait(rm_engine *engine, rm_error *err);          // for all that is enqueued: a step waits in no other way
// Calls compare nothing themselves, so all ranks of a group do, before one of them waits for what stands in its queue. The group of
// experts after a forward, where it is not the tp group: it has no call behind that. The tp group after each lm_head, or where a step
// has none.
rm_code rm_compare_forward(rm_engine *engine, rm_error *err);
rm_code rm_compare_outs(rm_engine *engine, rm_error *err);
void rm_abandon_peers(rm_engine *engine, rm_code why);             // all groups of this rank are dead
void rm_settle_peers(rm_engine *engine);   // after it: until the device is through, or, where ranks are, the deadline of a group
void rm_peers_traffic(const rm_engine *engine, rm_engine_stats *out);

// external_scheduler.c
int rm_is_external(const rm_engine *engine);
void rm_external_distrust(rm_engine *engine, const rm_sequence *seq);  // what its pages hold is not to be used
void rm_external_renew(rm_engine *engine, int pages);                  // records of prompts begin again; with `pages` no page's KV counts

// forward.c
rm_code rm_forward(rm_engine *engine, rm_error *err);

// sampler.c
rm_sample_params rm_params_of(const rm_sequence *seq);
// What is wanted of the plan's outs, from their hidden states, T [n_out][hidden] on the device.
rm_code rm_sample_outs(rm_engine *engine, const void *hidden, rm_error *err);
void rm_record_outs(const rm_plan *plan);   // of the host alone, after the step was waited for
// Where draws of a step lie, one after another; views.
typedef struct rm_draw_records {
  int32_t *tokens, *ranks;
  float *logprobs, *sampling_logprobs;
} rm_draw_records;
// Of n draws, of which rank r of the tp group has made the next counts[r]: each rank gets all.
rm_code rm_share_draws(rm_engine *engine, const int64_t *counts, int64_t n, const rm_draw_records *at, rm_error *err);

// requests.c
rm_group *rm_find_group(const rm_engine *engine, uint64_t id, rm_error *err);   // NULL: RM_E_REQUEST

// commit.c
void rm_commit(rm_engine *engine);
void rm_append(rm_engine *engine, rm_sequence *seq, const rm_drawn *drawn);       // a token
void rm_fail_group(rm_engine *engine, const rm_sequence *seq, long long position, const char *what);   // by RM_E_NUMERICS
void rm_finish_sequence(rm_engine *engine, rm_sequence *seq, rm_finish finish);   // → DONE; the group too when it was the last
void rm_finish_group(rm_engine *engine, rm_group *group, rm_finish finish);       // all that are not DONE

static inline int32_t *rm_block_table(const rm_engine *engine, const rm_sequence *seq) {
  return engine->block_tables + seq->place * engine->max_pages;
}
// The same, for whoever writes to it: the device's is put before the next step.
static inline int32_t *rm_change_table(const rm_engine *engine, const rm_sequence *seq) {
  engine->table_changed[seq->place] = 1;
  return rm_block_table(engine, seq);
}

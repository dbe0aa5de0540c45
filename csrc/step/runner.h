// runner.h: what computes a plan on a device (vLLM's model runner). A step is three calls:
//
//   schedule    (scheduler.h)   which rows of which sequences: fills the plan, hands out pages
//   rm_forward  (forward.c)     model, lm_head, draws, logprobs of prompts (sampler.c): fills the
//               plan's results. Copies inputs to the
//                               device, enqueues ops or replays a captured graph (graph_replay.c),
//                               waits for results once
//   rm_commit   (commit.c)      results into the records of the requests
//
// Of these only rm_forward waits for the device and exchanges with other ranks; schedule enqueues
// what the runner gave it to zero and copy pages. All memory is allocated at creation.
#pragma once

#include "model/model.h"
#include "scheduler/external_scheduler.h"
#include "step/commit.h"
#include "step/graph_replay.h"
#include "step/results.h"
#include "weights/sync.h"

// The arrays of one step in the mirrored buffer, ordered by use: read by the device, read and
// written, written. So a step needs one copy to the device and one back.
typedef struct rm_step_buffer {
  int64_t *slots; // [n_rows]
  rm_sample_params *params; // [n_draws]
  int32_t *ids, *positions, *seq_of_row; // [n_rows]
  int32_t *out_rows, *targets; // [n_out]
  uint8_t *row_flags; // [n_rows] zeros at first
  uint8_t *out_flags; // [n_out] zeros at first
  int32_t *tokens, *ranks, *kept; // [n_draws]
  float *logprobs, *sampling_logprobs; // [n_draws]
  float *target_logprobs; // [n_out]
  int16_t *routed; // [n_rows][routed_per_token]
  char *end;
} rm_step_buffer;

typedef struct rm_runner_options { // all pointers are views; the strings during creation
  const rm_spec *spec;
  const rm_device *device;
  rm_model_options
      model; // rm_runner_init sets max_out_rows and static_rows; `rank` is copied into the runner
  int64_t max_num_seqs, max_pages; // max_pages: of one sequence
  int enforce_eager; // no graphs
  const char *nccl_library, *nccl_gpu; // as rm_engine_options
} rm_runner_options;

typedef struct rm_runner {
  rm_runner_options options;
  const rm_device *device; // views, as the next four
  const rm_kernels *kernels; // of the device
  rm_plan *plan; // the scheduler's
  rm_store *store;
  rm_model *model;
  void *kv; // view: [n_pages] in the device's memory; NULL while asleep
  int64_t n_pages;
  rm_rank rank; // device_tp and device_ep are owned (device_comms.c), the rest views
  int64_t routed_per_token, max_out_rows,
      ld_logits; // ld_logits: elements from one row of logits to the next
  int64_t max_draws; // tokens of one call of the sample op
  // owned
  rm_mirrored_buffer mirrored; // the block tables and the step buffer
  rm_results results; // results that are copied to records directly
  void *host, *scratch; // hold the arrays of the host only, and of the device only
  size_t host_bytes, scratch_bytes;
  char *buffer; // in `mirrored`; holds the arrays of `step`, laid out for each step
  size_t buffer_bytes;
  rm_step_buffer step;
  rm_graphs graphs;
  // the host's
  uint8_t *all_flags; // [tp][max_rows] scratch; where tp > 1, as is the next
  rm_drawn *drawn; // [max_num_seqs] scratch
  rm_sample_params *params; // [max_draws] scratch
  // the device's
  float *logits; // [max_out_rows][ld_logits]
  float *stats; // [max_out_rows][2]
  float *unused_logprobs; // [max_draws], as is the next
  int32_t *unused_tokens;
  // counts since creation: replays, and their exchanges, which the comms do not count
  int64_t replays, comm_calls;
  uint64_t comm_bytes;
} rm_runner;

// --------------------------------------------------------------------------------------- runner.c
// Creation in zeroed memory, in this order: init, rm_comms_join, model and store (by the engine),
// create.
void rm_runner_init(rm_runner *runner, const rm_runner_options *options); // the sizes
rm_code rm_runner_create(rm_runner *runner, rm_model *model, rm_store *store, rm_plan *plan,
                         rm_error *err); // the memory
void rm_runner_destroy(rm_runner *runner); // before its model; safe on a zeroed one
uint64_t rm_runner_workspace(
    const rm_runner *runner); // bytes mapped, the model's included, without weights and KV cache
// Enqueued, so before the next forward's ops. `runner` is a void * for rm_scheduler_options.
void rm_runner_zero_page(void *runner, int32_t page);
void rm_runner_copy_page(void *runner, int32_t to, int32_t from);
static inline void *rm_on_device(const rm_runner *runner, const void *here) {
  return rm_mirrored_on_device(&runner->mirrored, here);
}

// ----------------------------------------------------------------------------------------- a step
// Sets the plan's most_rows, is_captured and with_token_ranks. In a lockstep group (lockstep.c) the
// ranks agree on them, and *progress becomes the maximum over the group.
rm_code rm_lockstep_agree(rm_runner *runner, rm_progress *progress, rm_error *err);
rm_code rm_forward(rm_runner *runner, rm_error *err);
size_t rm_step_buffer_bytes(const rm_runner *runner, size_t rows, size_t outs, size_t draws);

// -------------------------------------------------------------------------------------- sampler.c
rm_code rm_sample_outs(rm_runner *runner, const void *hidden,
                       rm_error *err); // enqueues logits, draws and logprobs of the plan's outs
rm_code rm_share_draws(
    rm_runner *runner,
    rm_error *err); // exchanges the tokens drawn within the tp group; after the wait
void rm_record_outs(const rm_plan *plan); // copies results into records, after the wait
rm_sample_params rm_params_of(const rm_sequence *seq); // of its next token
// The draw from one row of logits that an external scheduler has edited. token < 0: the row leaves
// nothing to draw.
rm_code rm_draw_edited(rm_runner *runner, const rm_sequence *seq, const rm_external_draw *draw,
                       rm_external_result *out, rm_error *err);

// --------------------------------------------------------------------------------- device_comms.c
rm_code rm_comms_join(
    rm_runner *runner,
    rm_error *err); // creates rank.device_tp and rank.device_ep; called by all ranks
void rm_comms_leave(rm_runner *runner);
void rm_comms_set_epoch(
    const rm_runner *runner,
    int64_t version); // a rank that serves another version fails at its next exchange
rm_code rm_runner_wait(rm_runner *runner,
                       rm_error *err); // for all enqueued work, with the groups' timeout
// NCCL's calls carry no headers, so each group compares its ranks' calls before a rank waits for
// the queue: the ep group after a forward (where it is not the tp group), the tp group after each
// lm_head, or after the forward of a step without any.
rm_code rm_compare_forward(rm_runner *runner, rm_error *err);
rm_code rm_compare_outs(rm_runner *runner, rm_error *err);
void rm_comms_abort(rm_runner *runner,
                    rm_code why); // all groups of this rank: ranks that wait for it get an error
void rm_comms_settle(
    rm_runner *runner); // after it: waits until the device is done, or for a group's timeout
typedef struct rm_traffic {
  uint64_t bytes; // sent to other ranks
  int64_t calls;
  double seconds;
} rm_traffic;
rm_traffic rm_comms_traffic(
    const rm_runner *runner); // since creation; includes replays, except for seconds

// runner.h: one rank computes the plan of its replica (vLLM's model runner). A step (forward.c)
// prepares the plan's inputs, enqueues the model, lm_head, draws and logprobs of prompts
// (sampler.c) or replays a captured graph of them (gpu/graphs.c), and waits for the results.
//
// Ranks of one process share a plan and its requests, which do not change during a forward. Only
// the rank with keeps_records writes to the requests' records. All memory is allocated at creation.
// A runner is used by one thread at a time.
#pragma once

#include "gpu/gpu.h"
#include "model/model.h"
#include "scheduler/external_scheduler.h"
#include "step/results.h"
#include "weights/store.h"

// The arrays of one step in the mirrored buffer, ordered by use: read by the device, read and
// written, written. A step then needs only one copy to the device and one back.
typedef struct rm_step_buffer {
  int64_t *slots; // [n_rows]
  int32_t *load_states; // [max_num_seqs]
  rm_sample_params *params; // [n_out]
  int32_t *ids, *positions, *seq_of_row, *save_states; // [n_rows]
  int32_t *out_rows, *targets; // [n_out]
  uint8_t *out_flags; // [n_out] initially zeros, like the output's row flags
  rm_step_output output;
  char *end;
} rm_step_buffer;

// How a step runs: with as many rows as the plan, or padded to the size of a graph (gpu/gpu.h).
typedef struct rm_step_shape {
  int64_t n_rows, n_out;
  int64_t most_rows; // the largest n_rows of the lockstep group's ranks
  int64_t padded; // the size; 0: the step runs without a graph
  int with_token_ranks; // of a padded step: whether it computes ranks of tokens
} rm_step_shape;

typedef struct rm_runner_options { // all pointers are views; the strings during creation
  const rm_spec *spec;
  const rm_device *device;
  // rm_runner_init sets max_out_rows and static_rows; `rank` is copied into the runner.
  rm_model_options model;
  int64_t max_num_seqs, max_pages; // max_pages: largest number of pages of one sequence
  int keeps_records; // whether this rank writes to the records of requests
  int compares_batches; // whether the tp group spans processes, which schedule separately
  int enforce_eager; // do not use graphs
} rm_runner_options;

typedef struct rm_runner {
  rm_runner_options options;
  const rm_device *device; // views, like the next four
  const rm_kernels *kernels; // kernels of the device
  const rm_plan *plan; // the scheduler's
  rm_store *store;
  rm_model *model;
  rm_cache cache; // pages are NULL while asleep
  rm_rank rank; // device_tp and device_ep are owned (gpu/device_comms.c), the rest views
  // ld_logits: number of elements from one row of logits to the next
  int64_t routed_per_token, max_out_rows, ld_logits;
  // owned
  rm_mirrored_buffer mirrored; // the block tables and the step buffer
  rm_results results; // results that are copied to records directly
  void *host, *scratch; // memory of the arrays only on the host, and of those only on the device
  size_t host_bytes, scratch_bytes;
  char *buffer; // in `mirrored`; holds the arrays of `step`, laid out for each step
  size_t buffer_bytes;
  rm_step_buffer step;
  rm_step_shape shape;
  int32_t *block_tables; // in `mirrored`: a copy of the plan's; NULL on the CPU
  rm_graphs *graphs; // NULL: this device captures no steps
  // on the host
  uint8_t *all_flags; // [tp][max_rows] scratch; only if tp > 1, like the next
  rm_drawn *drawn; // [max_out_rows] scratch
  rm_sample_params *params; // [max_out_rows] scratch
  // on the device
  float *logits; // [max_out_rows][ld_logits]
  float *stats; // [max_out_rows][2]
} rm_runner;

// --------------------------------------------------------------------------------------- runner.c
// Creation in zeroed memory, in this order: init, rm_device_comms_create, model and store (by the
// engine), create.
void rm_runner_init(rm_runner *runner, const rm_runner_options *options); // the sizes
rm_code rm_runner_create(rm_runner *runner, rm_model *model, rm_store *store, const rm_plan *plan,
                         rm_error *err); // the memory
void rm_runner_destroy(rm_runner *runner); // before its model; safe on a zeroed runner
// Returns the mapped bytes, including the model's, without weights and KV cache.
uint64_t rm_runner_workspace(const rm_runner *runner);
static inline void *rm_on_device(const rm_runner *runner, const void *here) {
  return rm_mirrored_on_device(&runner->mirrored, here);
}

// ----------------------------------------------------------------------------------------- a step
// Sets the shape of the next step. In a lockstep group (lockstep.c) the ranks agree on it, and
// *progress becomes the maximum over the group.
rm_code rm_lockstep_agree(rm_runner *runner, rm_progress *progress, rm_error *err);
// Then, in this order: prepare lays out the plan's inputs; enqueue, or the replay of its capture,
// copies them to the device and enqueues all work without waiting; finish waits, and step.output
// has the results.
rm_code rm_step_prepare(rm_runner *runner, rm_error *err);
rm_code rm_step_enqueue(void *runner, rm_error *err);
rm_code rm_step_finish(rm_runner *runner, rm_error *err);
size_t rm_step_buffer_bytes(const rm_runner *runner, size_t rows, size_t outs);

// -------------------------------------------------------------------------------------- sampler.c
// Enqueues logits, draws and logprobs of the plan's outs.
rm_code rm_sample_outs(rm_runner *runner, const void *hidden, rm_error *err);
// Exchanges the drawn tokens within the tp group, after the wait.
rm_code rm_share_draws(rm_runner *runner, rm_error *err);
// Draws from one row of logits that an external scheduler has edited. token < 0: all tokens of the
// row are excluded.
rm_code rm_draw_edited(rm_runner *runner, rm_sequence *seq, const float *raw, const float *stats,
                       const float *edited, rm_drawn *out, rm_error *err);

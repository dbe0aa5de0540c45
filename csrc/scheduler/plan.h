// plan.h: the plan of a step (vLLM's SchedulerOutput) and its output (vLLM's ModelRunnerOutput).
// The scheduler fills the plan; all ranks of the replica compute it (step/runner.h); rm_commit
// reads the output of one rank. The plan's arrays are in host memory, allocated once for the
// largest step.
#pragma once

#include "scheduler/kv_cache.h"
#include "scheduler/sequence.h"

// A row whose logits are computed: a row of a prompt, or the last row of a sequence, from which a
// token is drawn here or by an external scheduler. The first tokens of a prompt's samples are drawn
// from several outs of one row.
typedef struct rm_out_row {
  rm_sequence *seq;
  int64_t position;
  int32_t target; // the token whose logprob is recorded; −1: no token
  uint8_t draws; // whether a token is drawn from this row
  uint8_t samples; // whether the op `sample` runs: to draw, or for the target's sampling logprob
} rm_out_row;

typedef struct rm_plan {
  int64_t n_rows, n_out, n_scheduled;
  const rm_page_write *writes; // [n_writes] view of the cache's; done in order before the rows
  int64_t n_writes;
  rm_sequence **scheduled; // [max_num_seqs]
  int32_t *ids, *positions, *seq_of_row; // [max_num_batched_tokens], as rm_batch's
  int64_t *slots;
  int32_t *load_states, *save_states; // as rm_batch's; the plan holds those that are saved
  rm_out_row *outs; // [max_num_batched_tokens], like the next three
  int32_t *out_rows, *targets; // rows and targets of the outs
  rm_sample_params *params; // of the outs that sample, with views of their sequences' lists
  int32_t *block_tables; // [max_num_seqs][max_pages]
  uint8_t *table_changed; // [max_num_seqs] since the last commit
  // Rows that an external scheduler draws from are copied to the caller's memory.
  float *external_logits, *external_stats; // [n_external][vocab] and [n_external][2]
  int64_t n_external;
} rm_plan;

// Views of a runner's buffer, valid until its next step.
typedef struct rm_step_output {
  int16_t *routed; // [n_rows][routed_per_token]
  uint8_t *row_flags; // [n_rows]
  float *target_logprobs; // [n_out], like the rest
  int32_t *tokens; // of the outs that sample
  int32_t *ranks; // ranks of the tokens or targets, if requested
  int32_t *kept; // number of tokens kept by the filters, if a draw of the same op call needs it
  float *logprobs, *sampling_logprobs; // of the outs that sample
} rm_step_output;

typedef struct rm_drawn { // the result of one draw
  int32_t token, rank;
  float logprob, sampling_logprob;
} rm_drawn;

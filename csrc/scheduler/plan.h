// plan.h: one step's batch. The scheduler fills it, rm_lockstep_agree decides how it runs,
// rm_forward (step/runner.h) computes it, rm_commit reads the results. All arrays are in host
// memory, allocated once for the largest step.
#pragma once

#include "scheduler/sequence.h"

// A row whose logits are computed: the last row of a sequence, from which tokens are drawn, or a
// row of a prompt.
typedef struct rm_out_row {
  rm_sequence *seq;
  int64_t position;
  int32_t target; // the token whose logprob is recorded, −1: none
  int draws; // tokens are drawn from it
} rm_out_row;

// One token to draw. Draws are in the order of their rows; the first tokens of a prompt's samples
// share one row.
typedef struct rm_draw {
  rm_sequence *seq;
  int32_t out; // index in outs
} rm_draw;

typedef struct rm_plan {
  // filled by the scheduler; for a captured graph rm_forward appends padding rows
  int64_t n_rows, n_out, n_scheduled, n_draws;
  rm_sequence **scheduled; // [max_num_seqs]
  int32_t *ids, *positions, *seq_of_row; // [max_num_batched_tokens], as rm_batch's
  int64_t *slots;
  rm_out_row *outs; // [max_num_batched_tokens], as are the next two
  int32_t *out_rows, *targets; // of the outs
  rm_draw *draws; // [max_num_seqs]
  int32_t *block_tables; // [max_num_seqs][max_pages] view of the runner's
  uint8_t *table_changed; // [max_num_seqs] since it was copied to the device
  float *external_logits,
      // [n_external][vocab] and [·][2]: rows that the external scheduler draws from; the caller's
      *external_stats;
  int64_t n_external;
  // filled by rm_lockstep_agree (step/lockstep.c)
  int64_t most_rows; // the largest n_rows of the lockstep group's ranks
  int is_captured,
      // the step runs as a captured graph (step/graph_replay.h), with ranks of its tokens
      with_token_ranks;
  // results: views of the runner's buffer, valid until the next step
  int16_t *routed; // [n_rows][routed_per_token]
  uint8_t *row_flags; // [n_rows]
  uint8_t *out_flags; // [n_out]
  float *target_logprobs; // [n_out]
  int32_t *tokens, *ranks; // [n_draws]; ranks: token ranks, 0 where none was requested
  int32_t *
      // [n_draws] tokens that the filters kept, where a draw of the same call of the op wants it
      kept;
  float *logprobs, *sampling_logprobs;
} rm_plan;

static inline void rm_plan_clear(rm_plan *plan) {
  plan->n_rows = plan->n_out = plan->n_scheduled = plan->n_draws = 0;
}

// external_scheduler.h: the policy for an external scheduler (vLLM's), which decides in every step
// which requests compute how many tokens on which pages. Tokens, draws, records and block tables
// are kept here. Requests are added by rm_engine_add with one sample each, and ended by
// rm_scheduler_abort; a request ends by itself only with an error.
//
// Pages and the prefix cache belong to the external scheduler: many requests may share a page. For
// each page this keeps the version of the weights that computed its KV. Computed positions in a
// page of another version (or one that slept, or held a failed request) are recomputed in place
// before the request's own rows, in separate forwards if they are many. So KV of one version never
// serves another.
//
//   add ─► step … step (tokens drawn, or rows of logits ─► draw) ─► abort ─► release
//             ▲   │
//             └───┴─ preempt (its pages are free again; the next step brings others)
#pragma once

#include "scheduler/scheduler.h"

enum { RM_EXTERNAL_NO_TOKEN = -1, RM_EXTERNAL_FAILED = -2, RM_EXTERNAL_DRAWS = -3 };

typedef struct rm_external_results { // [n] each, of the requests of a step or a draw
  int32_t *tokens; // or one of the above; the others are of a token
  float *logprobs, *sampling_logprobs;
  int32_t *ranks; // where asked for; RM_EXTERNAL_DRAWS: the row of logits and stats
} rm_external_results;

// A step of n requests, in the scheduler's order: one may read pages that an earlier one writes.
// Views during the call.
struct rm_external_step {
  int64_t n;
  const uint64_t *ids; // [n], as are the next four
  const int64_t *computed; // leading positions that are computed already
  // Positions after them to compute, 1 or more. A token is drawn if they end with the last known
  // token.
  const int64_t *rows;
  const int64_t *page_counts; // 0 or more
  const uint8_t *replace; // its pages replace those that it had, else they are appended
  const int32_t *pages; // [sum of page_counts]
  // Of requests with external_draws that are at their last row, in this order.
  float *logits; // [n_logits][vocab]
  float *stats; // [n_logits][2] the largest logit, and the sum of exp(logit − it)
  int64_t n_logits; // at least the number of those requests
  rm_external_results results;
};

// Checks a step and makes it the current one until rm_external_end, which fills the results unless
// the step has failed. RM_E_REQUEST: a request breaks a rule, and nothing has changed.
rm_code rm_external_begin(rm_scheduler *scheduler, const rm_external_step *step, rm_error *err);
void rm_external_end(rm_scheduler *scheduler, rm_code code);

typedef struct rm_external_draws { // of n requests whose logits the last step returned
  int64_t n;
  const uint64_t *ids; // [n]
  const float *raw, *stats; // [n][vocab], [n][2] as the step returned them
  // [n][vocab] sampled with the request's parameters; −inf is never drawn, a NaN fails the draw
  const float *edited;
  rm_external_results results;
} rm_external_draws;
// RM_OK if the request's logits wait for a draw, else RM_E_REQUEST or RM_E_STATE.
rm_code rm_external_drawing(const rm_scheduler *scheduler, uint64_t id, rm_error *err);
// Records a draw and fills result i. Without a token the request fails.
void rm_external_drawn(rm_scheduler *scheduler, rm_sequence *seq, const rm_drawn *drawn,
                       const rm_external_results *results, int64_t i);

// ---------------------------------------------------------------------------------- between steps
// The KV of these pages is not valid, since their request was not computed. Numbers out of range
// are ignored.
void rm_external_invalidate_pages(rm_scheduler *scheduler, const int32_t *pages, int64_t n);
// Ends a request whose step was not run, and invalidates its pages.
rm_code rm_external_fail(rm_scheduler *scheduler, uint64_t id, rm_error *err);
rm_code rm_external_preempt(rm_scheduler *scheduler, uint64_t id,
                            rm_error *err); // its pages are not used any more
// Of the last token of each of n requests: its k likeliest tokens and their logprobs, [n][k].
// RM_E_REQUEST: one was added with fewer.
rm_code rm_external_top(const rm_scheduler *scheduler, const uint64_t *ids, int64_t n, int64_t k,
                        int32_t *top_ids, float *top_logprobs, rm_error *err);
// The routing of a request's positions from `start` on, prompt and generated, to the last one fed:
// *n rows of routed_per_token, which are copied to `out`; with NULL they are only counted.
rm_code rm_external_routed(const rm_scheduler *scheduler, uint64_t id, int64_t start, int16_t *out,
                           int64_t *n, rm_error *err);
// Drops generated tokens after the first n, which must be these; they are drawn again.
rm_code rm_external_tokens(rm_scheduler *scheduler, uint64_t id, const int32_t *tokens, int64_t n,
                           rm_error *err);

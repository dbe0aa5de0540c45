// external_scheduler.h: the policy for an external scheduler (vLLM's), which decides in every step
// which requests compute how many tokens on which pages. Tokens, draws, records and block tables
// are kept here. Requests are added and removed by rm_engine_add, _abort and _release, with one
// sample each; a request ends by itself only with an error.
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

typedef struct rm_external_part { // of a step: one request
  uint64_t id;
  int64_t n_computed; // leading positions that are computed already
  int64_t
      // positions after them to compute, 1 or more; a token is drawn if they end with the last
      // known token
      n_rows;
  const int32_t
      *pages; // [n_pages] appended to its pages, or with `replace` instead of them; a view
  int64_t n_pages;
  int replace;
} rm_external_part;

struct rm_external_step { // views during the call
  const rm_external_part *
      // [n_parts] in the scheduler's order: a part may read pages that an earlier part writes
      parts;
  int64_t n_parts;
  float *
      // [n_logits][vocab] of requests with external_draws that are at their last row, in the order
      // of the parts
      logits;
  float *stats; // [n_logits][2] of those rows: the largest logit, and the sum of exp(logit − it)
  int64_t n_logits; // at least the number of those rows
};

enum { RM_EXTERNAL_NO_TOKEN = -1, RM_EXTERNAL_FAILED = -2, RM_EXTERNAL_DRAWS = -3 };

typedef struct rm_external_result { // of a part
  int32_t token; // or one of the above; the next three are of a token
  float logprob, sampling_logprob;
  int32_t rank; // where asked for
  int32_t row; // RM_EXTERNAL_DRAWS: of logits and stats
} rm_external_result;

// Checks a step and makes it the current one until rm_external_end. RM_E_REQUEST: a part breaks a
// rule, and nothing has changed. results: [n_parts], or NULL.
rm_code rm_external_begin(rm_scheduler *scheduler, const rm_external_step *step, rm_error *err);
void rm_external_end(rm_scheduler *scheduler, rm_external_result *results);

typedef struct rm_external_draw { // one row of the last step's logits
  uint64_t id;
  const float *raw, *stats; // as the step gave them
  // [vocab] sampled with the request's parameters; −inf is never drawn, a NaN fails the draw
  const float *edited;
} rm_external_draw;
// RM_OK if the request's logits wait for a draw, else RM_E_REQUEST or RM_E_STATE.
rm_code rm_external_drawing(const rm_scheduler *scheduler, uint64_t id, rm_error *err);
// Records a draw. Without a token the request fails, and the result says so.
void rm_external_drawn(rm_scheduler *scheduler, rm_sequence *seq, rm_external_result *result);

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

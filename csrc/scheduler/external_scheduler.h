// external_scheduler.h: steps of an external scheduler (vLLM's), which selects in every step the
// requests, their number of tokens and their pages. Tokens, draws, records and block tables are
// kept here. rm_engine_add adds requests with one sample each, and rm_scheduler_abort ends them;
// the engine ends a request only with an error.
//
// Pages and the prefix cache belong to the external scheduler, and many requests may share a page.
// For each page this file keeps the version of the weights that computed its KV. Computed
// positions in a page with another version (or in a page that slept or belonged to a failed
// request) are recomputed in place before the request's own rows, in separate forwards if there are
// many. So KV of one version is never used with another. States of sequences belong to the engine:
// where it has none for a request's computed positions, it recomputes the last ones of them.
//
//   add ─► step … step (tokens drawn, or rows of logits ─► draw) ─► abort ─► release
//             ▲   │
//             └───┴─ preempt (its pages are free again; the next step has new pages)
#pragma once

#include "scheduler/scheduler.h"

enum { RM_EXTERNAL_NO_TOKEN = -1, RM_EXTERNAL_FAILED = -2, RM_EXTERNAL_DRAWS = -3 };

typedef struct rm_external_results { // [n] each, of the requests of a step or a draw
  int32_t *tokens; // or one of the above; the other results belong to a token
  float *logprobs, *sampling_logprobs;
  int32_t *ranks; // if requested; with RM_EXTERNAL_DRAWS: the row of logits and stats
} rm_external_results;

// A step of n requests, in the scheduler's order: a request may read pages that an earlier request
// writes. Views during the call.
struct rm_external_step {
  int64_t n;
  const uint64_t *ids; // [n], like the next four
  const int64_t *computed; // number of leading positions that are already computed
  // Number of positions to compute after them, 1 or more. A token is drawn if they end with the
  // last known token.
  const int64_t *rows;
  const int64_t *page_counts; // 0 or more
  const uint8_t *replace; // 1: the pages replace its earlier pages; 0: they are appended
  const int32_t *pages; // [sum of page_counts]
  // Rows of the requests with external_draws that reach their last row, in the order of requests.
  float *logits; // [n_logits][vocab]
  float *stats; // [n_logits][2] the largest logit, and the sum of exp(logit − it)
  int64_t n_logits; // at least the number of these requests
  rm_external_results results;
};

// Checks a step and makes it the current one until rm_external_end, which fills the results unless
// the step has failed. RM_E_REQUEST: a request is not valid, and the scheduler is unchanged.
rm_code rm_external_begin(rm_scheduler *scheduler, const rm_external_step *step, rm_error *err);
rm_progress rm_external_schedule(rm_scheduler *scheduler); // fills the plan, for rm_schedule
void rm_external_end(rm_scheduler *scheduler, rm_code code);

typedef struct rm_external_draws { // of n requests whose logits the last step returned
  int64_t n;
  const uint64_t *ids; // [n]
  const float *raw, *stats; // [n][vocab], [n][2] as the step returned them
  // [n][vocab] sampled with the request's parameters; −inf is never drawn, a NaN fails the draw
  const float *edited;
  rm_external_results results;
} rm_external_draws;
// Returns RM_OK if the request's logits wait for a draw, otherwise RM_E_REQUEST or RM_E_STATE.
rm_code rm_external_drawing(const rm_scheduler *scheduler, uint64_t id, rm_error *err);
// Records a draw and fills result i. Without a token the request fails.
void rm_external_drawn(rm_scheduler *scheduler, rm_sequence *seq, const rm_drawn *drawn,
                       const rm_external_results *results, int64_t i);

// ---------------------------------------------------------------------------------- between steps
// Marks the KV of these pages as invalid, since their request was not computed. Ignores numbers out
// of range.
void rm_external_invalidate_pages(rm_scheduler *scheduler, const int32_t *pages, int64_t n);
void rm_external_invalidate(rm_scheduler *scheduler, const rm_sequence *seq); // all its pages
// Ends a request whose step was not run, and invalidates its pages.
rm_code rm_external_fail(rm_scheduler *scheduler, uint64_t id, rm_error *err);
// Stops using the pages of a request.
rm_code rm_external_preempt(rm_scheduler *scheduler, uint64_t id, rm_error *err);
// Returns the k likeliest tokens and their logprobs at the last token of each of n requests,
// [n][k]. RM_E_REQUEST: a request was added with fewer logprobs.
rm_code rm_external_top(const rm_scheduler *scheduler, const uint64_t *ids, int64_t n, int64_t k,
                        int32_t *top_ids, float *top_logprobs, rm_error *err);
// Copies the routing of a request's positions from `start` to its last input token, of prompt and
// generated tokens, to `out`: *n rows of routed_per_token. With out NULL it only counts the rows.
rm_code rm_external_routed(const rm_scheduler *scheduler, uint64_t id, int64_t start, int16_t *out,
                           int64_t *n, rm_error *err);
// Drops the generated tokens after the first n, which must equal `tokens`. They are drawn again.
rm_code rm_external_tokens(rm_scheduler *scheduler, uint64_t id, const int32_t *tokens, int64_t n,
                           rm_error *err);

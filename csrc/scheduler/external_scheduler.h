// external_scheduler.h: an engine whose requests a host schedules. The host (vLLM) decides in every step which requests are fed how many tokens
// and on which pages; here stay the tokens, the draws, the records and the block tables. Requests come and go by rm_engine_add,
// _abort and _release, each with one sample; none ends by itself but by an error.
//
// The pages are the host's numbers, and so is the prefix cache: a page may belong to many requests, and to none. The engine keeps
// for each the version of the weights that made its KV. Positions that the host counts as computed but whose page is of another
// version (or slept, or held a request that failed) are fed again, in place, before the request's own rows: KV of one version never
// serves another. That takes forwards of their own where the rows are many; they are inside of one call.
//
//   add ─► step … step (tokens drawn, or rows of logits ─► host_draw) ─► abort ─► release
//             ▲   │
//             └───┴─ preempt (the pages are the host's again; the next step brings others)
#pragma once

#include "scheduler/scheduler.h"

typedef struct rm_external_part { // of a step: one request
  uint64_t id;
  int64_t n_computed; // leading positions that the host counts as computed, on the pages that it has given
  int64_t n_rows; // positions after them to feed, 1 or more; a token is drawn when they end with the last known one
  const int32_t *pages; // [n_pages] that come behind those it has, or (replace) instead of them; a view
  int64_t n_pages;
  int replace;
} rm_external_part;

struct rm_external_step { // views during the call
  const rm_external_part *parts; // [n_parts] in the order of the host's decisions: a page may be read behind who writes it
  int64_t n_parts;
  float *logits; // [n_logits][vocab] of requests with host_draws that are at their last row, in the order of the parts
  float *stats; // [n_logits][2] of those rows: the largest logit, and the sum of exp(logit − it)
  int64_t n_logits; // as many as there are of those rows, or more
};

enum { RM_EXTERNAL_NO_TOKEN = -1, RM_EXTERNAL_FAILED = -2, RM_EXTERNAL_DRAWS = -3 };

typedef struct rm_external_result { // of a part
  int32_t token; // or one of the above; the next two are of a token
  float logprob, sampling_logprob;
  int32_t rank; // with ranks
  int32_t row; // RM_EXTERNAL_DRAWS: of logits and stats
} rm_external_result;

// Checks a step, which then runs as the plans that the policy makes of it, until rm_external_end. RM_E_REQUEST for a part that breaks a rule:
// nothing was done. end: results [n_parts] or NULL.
rm_code rm_external_begin(rm_scheduler *scheduler, const rm_external_step *step, rm_error *err);
void rm_external_end(rm_scheduler *scheduler, rm_external_result *results);

typedef struct rm_external_draw { // one row of the last step's logits
  uint64_t id;
  const float *raw, *stats; // as the step gave them
  const float *edited; // [vocab] what is drawn from, by the request's own parameters; −inf and NaN are never drawn
} rm_external_draw;
// The sequence of a request whose logits wait for this draw. NULL: RM_E_REQUEST or RM_E_STATE, in *code.
rm_sequence *rm_external_drawing(const rm_scheduler *scheduler, uint64_t id, rm_code *code, rm_error *err);

// ---------------------------------------------------------------------------------------------- between steps
// What these pages hold is not what the host believes: they were given to a request that was not fed. Numbers that are none are passed.
void rm_external_forget(rm_scheduler *scheduler, const int32_t *pages, int64_t n);
// The request ends, and what its pages hold is not to be used: a step that was to feed it was not made.
rm_code rm_external_fail(rm_scheduler *scheduler, uint64_t id, rm_error *err);
// The host has taken its pages back.
rm_code rm_external_preempt(rm_scheduler *scheduler, uint64_t id, rm_error *err);
// What it has generated is this, as the host knows it: tokens that the host dropped are drawn again.
rm_code rm_external_tokens(rm_scheduler *scheduler, uint64_t id, const int32_t *tokens, int64_t n, rm_error *err);

// request.h: the caller's interface of a request: one prompt with n samples. sequence.h has its
// results. A malformed request is refused with RM_E_REQUEST, and a request that can never fit with
// RM_E_CAPACITY.
#pragma once

#include "base/status.h"

#define REFUSE_UNLESS(condition, ...) RM_FAIL_IF(!(condition), RM_E_REQUEST, __VA_ARGS__)

typedef enum rm_request_kind { RM_GENERATE, RM_SCORE } rm_request_kind;

// Pointers are views while the request is added, except logits_out: until it has finished.
typedef struct rm_request {
  rm_request_kind kind;
  const int32_t *prompt; // [n_prompt] token ids
  int64_t n_prompt;
  int32_t n; // number of samples, 1 … 16384; only for RM_GENERATE, like the next two
  int64_t max_tokens;
  int64_t min_tokens; // > 0: requires a token that is neither eos nor a stop
  float temperature, top_p, min_p;
  int32_t top_k;
  int has_seed; // 0: `seed` is the caller's count of such requests, mixed with the engine's seed
  uint64_t seed;
  const int32_t *stop_ids; // [n_stop_ids] in addition to eos
  int64_t n_stop_ids;
  int ignore_eos;
  int32_t logprobs; // top-k for generated tokens; 0: only of the sampled token
  int32_t prompt_logprobs; // −1: none; k ≥ 0: for the prompt, with top-k
  float *logits_out; // RM_SCORE: float32 [n_prompt][vocab] or NULL
  int score_sampling; // RM_SCORE: also logprobs under (temperature, top_p, …)
  int ranks; // also the rank of each sampled token, and of prompt tokens with prompt_logprobs ≥ 0
  int external_draws; // rm_engine_external_draw draws; only with an external scheduler
  // RM_GENERATE: also the tokens that the filters kept in each draw; top_k in [1, vocab),
  // min_tokens 0
  int kept_tokens;
  // Changes of logits before a draw (logit_edits.h); not with kept_tokens or an external scheduler.
  // A score accepts only biases and banned, since the end of its prompt is not known.
  float repetition_penalty; // > 0, or 0 for 1: none
  float frequency_penalty, presence_penalty; // [−2, 2]
  const int32_t *bias_ids; // [n_biases] distinct
  const float *biases; // [n_biases] finite
  const int32_t *banned; // [n_banned] never drawn
  // Words, one after the other. The last token of a word is not drawn after its other tokens.
  const int32_t *bad_words;
  const int32_t *bad_word_ends; // [n_bad_words] ascending: the end of each word in bad_words
  int64_t n_biases, n_banned, n_bad_words;
} rm_request;

typedef enum rm_finish {
  RM_RUNNING,
  RM_FINISH_STOP,
  RM_FINISH_LENGTH,
  RM_FINISH_ABORT,
  RM_FINISH_ERROR
} rm_finish;

typedef struct rm_request_times { // seconds of rm_now; 0: not yet
  double queued, scheduled; // request added; first row planned
  double first_token, last_token; // first and last token of any sample
} rm_request_times;

// How running requests are treated when new weights are committed.
typedef enum rm_inflight {
  RM_INFLIGHT_REFUSE,
  RM_INFLIGHT_RESTART,
  RM_INFLIGHT_ABORT,
  RM_INFLIGHT_KEEP,
  RM_INFLIGHT_KEEP_KV
} rm_inflight;
// REFUSE: RM_E_STATE if a request is unfinished, and the sync stays open (the Python layer's "wait"
// finishes requests first). RESTART: all samples start again from the prompt, including those that
// had ended. KEEP: tokens stay, and their KV is recomputed under the new version. KEEP_KV: the old
// KV stays in use, and tokens have no contract. With KEEP and KEEP_KV a request without a token
// starts again, so that the records of a score or a prompt are of one version.

// request.h: a request as its caller sees it: one prompt and n samples of it, and views of its
// results. A malformed request is refused (RM_E_REQUEST), and one that can never fit
// (RM_E_CAPACITY).
#pragma once

#include "base/status.h"

typedef enum rm_request_kind { RM_GENERATE, RM_SCORE } rm_request_kind;

// Pointers are views while it is added, except logits_out: until it has finished.
typedef struct rm_request {
  rm_request_kind kind;
  const int32_t *prompt; // [n_prompt] token ids
  int64_t n_prompt;
  int32_t n; // samples, 1 … 16384; RM_GENERATE, as are the next two
  int64_t max_tokens;
  int64_t min_tokens; // > 0: some token of the vocabulary is neither eos nor a stop
  float temperature, top_p, min_p;
  int32_t top_k;
  int has_seed; // 0: the engine's seed is mixed with `seed`, the caller's count of such requests
  uint64_t seed;
  const int32_t *stop_ids; // [n_stop_ids] besides eos
  int64_t n_stop_ids;
  int ignore_eos;
  int32_t logprobs; // top-k of generated tokens, 0: only the sampled one
  int32_t prompt_logprobs; // −1: none; k ≥ 0: of the prompt, with top-k
  float *logits_out; // RM_SCORE: float32 [n_prompt][vocab] or NULL
  int score_sampling; // RM_SCORE: also logprobs under (temperature, top_p, …)
  int ranks; // also the rank of each sampled token, and of each of the prompt if that has logprobs
  int external_draws; // rm_engine_external_draw draws; with an external scheduler only
  // RM_GENERATE: also the tokens that the filters kept in each draw; top_k in [1, vocab),
  // min_tokens 0
  int kept_tokens;
  // What changes logits before a draw (logit_edits.h); none of it with kept_tokens or an external
  // scheduler. A score takes biases and banned only, since it does not know where the prompt ends.
  float repetition_penalty; // > 0, or 0 for 1: none
  float frequency_penalty, presence_penalty; // [−2, 2]
  const int32_t *bias_ids; // [n_biases] distinct
  const float *biases; // [n_biases] finite
  const int32_t *banned; // [n_banned] never drawn
  // One word after the other: its last token is not drawn after the others were generated.
  const int32_t *bad_words;
  const int32_t *bad_word_ends; // [n_bad_words] ascending: where each ends in bad_words
  int64_t n_biases, n_banned, n_bad_words;
} rm_request;

typedef enum rm_finish {
  RM_RUNNING,
  RM_FINISH_STOP,
  RM_FINISH_LENGTH,
  RM_FINISH_ABORT,
  RM_FINISH_ERROR
} rm_finish;

typedef struct rm_sample_view { // of one sample; valid until the next step or release
  rm_finish finish;
  int32_t stop_token; // the id that ended it, −1: none
  int64_t n_tokens;
  const int32_t *tokens; // [n_tokens]
  const float *logprobs, *sampling_logprobs; // [n_tokens]
  const int64_t *versions; // [n_tokens]
  const uint8_t *no_contract; // [n_tokens] 1 where stale KV was used (keep_kv)
  const int32_t *ranks; // [n_tokens] with ranks: tokens at least as likely, itself included
  int32_t n_top; // logprobs of the request; with kept_tokens at least its top_k
  const int32_t *top_ids; // [n_tokens][n_top]
  const float *top_logprobs;
  const int32_t *kept; // [n_tokens] with kept_tokens: the filters kept so many of top_ids
  const int16_t *routed; // [n_tokens − 1][moe_layers][k]: of generated tokens that were fed back
} rm_sample_view;

typedef struct rm_request_times { // seconds of rm_now; 0: not yet
  double queued, scheduled; // added; its first row was planned
  double first_token, last_token; // of any sample
} rm_request_times;

typedef struct rm_request_view {
  uint64_t id;
  int finished; // all samples are
  rm_code error; // RM_OK, or what ended it (RM_FINISH_ERROR)
  const char *message;
  int64_t n_prompt, n_cached; // prompt tokens served by the prefix cache
  int64_t n_scored; // entries of the next five that were computed: all, unless it ended early
  const float *prompt_logprobs; // [n_prompt − 1]; NULL when not asked for
  const float *prompt_sampling_logprobs; // [n_prompt − 1] with score_sampling
  const int32_t *prompt_ranks; // [n_prompt − 1] with ranks
  const int32_t *prompt_top_ids; // [n_prompt − 1][k]
  const float *prompt_top_logprobs;
  const int16_t *prompt_routed; // [n_prompt][moe_layers][k]; NULL in a dense model
  int32_t n;
  rm_request_times times;
} rm_request_view;

// What happens to running requests when new weights are committed.
typedef enum rm_inflight {
  RM_INFLIGHT_REFUSE,
  RM_INFLIGHT_RESTART,
  RM_INFLIGHT_ABORT,
  RM_INFLIGHT_KEEP,
  RM_INFLIGHT_KEEP_KV
} rm_inflight;
// REFUSE: RM_E_STATE if a request is unfinished, and the sync stays open (the Python layer's "wait"
// finishes them first). RESTART: all samples start again from the prompt, also those that had
// ended. KEEP: their tokens stay, and their KV is recomputed under the new version. KEEP_KV: the
// old KV stays in use, and tokens lose their contract. With KEEP and KEEP_KV a request without a
// token starts again, so that the records of a score or a prompt are of one version.

// views.h: the results of a request, copied from its group and sequences so that drivers can
// compare them by one struct. Valid until the next step or release.
#pragma once

#include "scheduler/scheduler.h"

typedef struct tiny_sample_view { // of one sample; valid until the next step or release
  rm_finish finish;
  int32_t stop_token; // the id that ended it; −1: none
  int64_t n_tokens;
  const int32_t *tokens; // [n_tokens]
  const float *logprobs, *sampling_logprobs; // [n_tokens]
  const int64_t *versions; // [n_tokens]
  const uint8_t *no_contract; // [n_tokens] 1 if stale KV was used (keep_kv)
  const int32_t *ranks; // [n_tokens] with ranks: number of tokens at least as likely, with itself
  int32_t n_top; // logprobs of the request; with kept_tokens at least its top_k
  const int32_t *top_ids; // [n_tokens][n_top]
  const float *top_logprobs;
  const int32_t *kept; // [n_tokens] with kept_tokens: how many of top_ids the filters kept
  const int16_t *routed; // [n_tokens − 1][moe_layers][k]: of generated tokens that were fed back
} tiny_sample_view;

typedef struct tiny_request_view {
  uint64_t id;
  int finished; // whether all samples are finished
  rm_code error; // RM_OK, or the error that ended it (RM_FINISH_ERROR)
  const char *message;
  int64_t n_prompt, n_cached; // prompt tokens served by the prefix cache
  int64_t n_scored; // computed entries of the next five: all, unless the request ended early
  const float *prompt_logprobs; // [n_prompt − 1]; NULL if not requested
  const float *prompt_sampling_logprobs; // [n_prompt − 1] with score_sampling
  const int32_t *prompt_ranks; // [n_prompt − 1] with ranks
  const int32_t *prompt_top_ids; // [n_prompt − 1][k]
  const float *prompt_top_logprobs;
  const int16_t *prompt_routed; // [n_prompt][moe_layers][k]; NULL in a dense model
  int32_t n;
  rm_request_times times;
} tiny_request_view;

static inline rm_code tiny_view_request(const rm_scheduler *scheduler, uint64_t id,
                                        tiny_request_view *out, rm_error *err) {
  const rm_sequence_group *group = rm_find_sequence_group(scheduler, id, err);
  *out = (tiny_request_view){0};
  if (!group) return RM_E_REQUEST;
  *out = (tiny_request_view){
      .id = id,
      .finished = group->n_done == group->n,
      .error = group->error,
      .message = group->message,
      .n_prompt = group->n_prompt,
      .n_cached = group->n_cached,
      .n_scored = group->n_scored,
      .prompt_logprobs = group->prompt_logprobs,
      .prompt_sampling_logprobs = group->prompt_sampling,
      .prompt_ranks = group->want_token_ranks ? group->prompt_ranks : NULL,
      .prompt_top_ids = group->prompt_top_ids,
      .prompt_top_logprobs = group->prompt_top_logprobs,
      .prompt_routed = group->prompt_routed,
      .n = group->n,
      .times = group->times,
  };
  return RM_OK;
}

static inline rm_code tiny_view_sample(const rm_scheduler *scheduler, uint64_t id, int32_t sample,
                                       tiny_sample_view *out, rm_error *err) {
  const rm_sequence *seq = rm_find_sample(scheduler, id, sample, err);
  *out = (tiny_sample_view){0};
  if (!seq) return RM_E_REQUEST;
  *out = (tiny_sample_view){
      .finish = seq->finish,
      .stop_token = seq->stop_token,
      .n_tokens = seq->n_tokens,
      .tokens = seq->ids + seq->group->n_prompt,
      .logprobs = seq->logprobs,
      .sampling_logprobs = seq->sampling_logprobs,
      .versions = seq->versions,
      .no_contract = seq->no_contract,
      .ranks = seq->group->want_token_ranks ? seq->ranks : NULL,
      .n_top = seq->group->top_logprobs,
      .top_ids = seq->top_ids,
      .top_logprobs = seq->top_logprobs,
      .kept = seq->group->want_kept ? seq->kept : NULL,
      .routed = seq->routed,
  };
  return RM_OK;
}

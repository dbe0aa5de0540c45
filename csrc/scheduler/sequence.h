// sequence.h: a request inside the engine, and the file that writes each field. A request becomes a
// group of sequences: one prompt and its n samples. Sequences are scheduled; groups are added,
// viewed and released. A group is one allocation, made when it is added and large enough for all
// records, so that steps do not allocate.
//
//   WAITING ──► ACTIVE ──► DONE     WAITING: holds no page and no row of the block tables
//      ▲          │                 ACTIVE: has a row of the block tables, and pages
//      └──────────┘ preempt
//
// Fields are listed under the file that writes them. sequence_group.c writes all of them once.
#pragma once

#include "kernels.h"
#include "scheduler/list.h"
#include "scheduler/request.h"

typedef enum rm_sequence_state { RM_WAITING, RM_ACTIVE, RM_DONE } rm_sequence_state;

typedef struct rm_sequence_group rm_sequence_group;

typedef struct rm_sequence {
  // scheduler.c
  rm_link link; // first member; in `waiting` or `active`, both ordered by `order`
  rm_sequence_state status;
  int32_t table_row; // row of the block tables while ACTIVE
  int64_t n_pages; // entries of that row
  int64_t kv_len; // number of positions whose KV is in the pages, computed from ids[0 … kv_len)
  int64_t next; // first position to compute; < kv_len if a row is computed again for its logits
  int64_t first_row, n_rows; // rows in this step
  // Index of the state after kv_len positions, held while ACTIVE; −1: none. In models with
  // states `next` equals kv_len: every row is computed once.
  int32_t state;
  // commit.c
  int64_t n_tokens; // number of generated tokens
  int64_t n_routed; // number of generated tokens whose routing is recorded
  int64_t n_indexed; // number of leading pages that were indexed
  int stale; // whether KV of an older version is in use (keep_kv)
  rm_finish finish;
  int32_t stop_token; // the id that ended it; −1: none
  int32_t *ids; // [n_prompt + capacity] the prompt, then the generated tokens
  float *logprobs, *sampling_logprobs; // [capacity]
  int64_t *versions; // [capacity]
  uint8_t *no_contract; // [capacity] 1 if stale KV was used (keep_kv)
  int16_t *routed; // [capacity][routed_per_token] of generated tokens that were fed back
  int32_t *ranks; // [capacity] with ranks: number of tokens at least as likely, with itself
  // external_scheduler.c
  int64_t external_step; // number of the last step that it was in
  int64_t external_end; // end of its rows in this step
  int external_last; // whether its rows end with the last known token, so that a token is drawn
  int32_t external_row; // row of its logits that are copied to the host; −1: none
  int external_begun; // whether its first row is known
  // logit_edits.c
  rm_logit_edit *edits; // [n_edits] for the next draw; without penalties those of the group
  int64_t n_edits, n_counted; // n_counted: number of generated tokens that are in edits
  int32_t *banned; // with bad words: room for the tokens that may not be drawn next
  // sampler.c
  int32_t *top_ids; // [capacity][top_logprobs]
  float *top_logprobs;
  // commit.c
  int32_t *kept; // [capacity] with kept_tokens: how many of top_ids the filters kept
  // sequence_group.c only
  rm_sequence_group *group;
  int32_t index; // number of the sample
  uint64_t order; // order of arrival among all sequences: the priority
  uint64_t seed;
} rm_sequence;

struct rm_sequence_group {
  rm_link link; // first member; in `live` while unfinished, then in `finished`
  // sequence_group.c only
  uint64_t id;
  rm_sequence_group *next_in_bucket;
  rm_request_kind kind;
  int64_t n_prompt, capacity; // capacity: number of tokens that each sequence may generate
  int64_t n_targets; // rows [0, n_targets) of the prompt have requested logprobs or logits
  int32_t n;
  int64_t min_tokens;
  rm_sample_params params; // of all draws
  int32_t top_logprobs, prompt_top;
  int want_prompt_logprobs, score_sampling, want_token_ranks, want_kept, external_draws;
  float *logits_out;
  int32_t *stops; // [n_stops] ascending: tokens that end a sequence
  int32_t *banned; // [n_early] tokens banned before min_tokens, then [n_never] tokens always banned
  int64_t n_stops, n_early, n_never;
  rm_logit_edit *edits; // [n_edits] for the first draw, by ascending tokens
  int32_t *bad_words, *bad_word_ends; // as rm_request's
  int64_t n_edits, n_bad_words;
  rm_sequence *sequences; // [n]
  // scheduler.c
  rm_sequence *leader; // ACTIVE and computing the prompt for all, or NULL
  int64_t n_cached;
  rm_request_times times; // queued: sequence_group.c; tokens: commit.c
  // sampler.c and commit.c: records of the prompt
  int64_t n_scored; // number of target rows that are recorded
  int64_t n_prompt_routed; // number of positions whose routing is recorded
  float *prompt_logprobs; // [n_prompt − 1], like the next four
  float *prompt_sampling;
  int32_t *prompt_ranks;
  int32_t *prompt_top_ids; // × prompt_top
  float *prompt_top_logprobs;
  int16_t *prompt_routed; // [n_prompt][routed_per_token]
  // Records and KV may be of different versions (keep), so pages do not copy logprobs from records.
  int mixed;
  // commit.c
  int32_t n_done;
  rm_code error;
  char message[192];
};

static inline int64_t rm_sequence_length(const rm_sequence *seq) {
  return seq->group->n_prompt + seq->n_tokens;
}

// The limits for the checks of requests.
typedef struct rm_request_limits {
  int64_t vocab, max_model_len, page_size, n_pages;
  int64_t routed_per_token;
  int external; // external scheduler: one sample per request, which may end one token late
  const int32_t *eos_ids; // [n_eos]
  int64_t n_eos;
  uint64_t engine_seed;
} rm_request_limits;

// sequence_group.c: makes the group of a checked request. Its sequences are WAITING and not in a
// list. The caller owns the group and frees it with rm_free.
rm_code rm_sequence_group_create(const rm_request *request, const rm_request_limits *limits,
                                 uint64_t id, uint64_t first_order, rm_sequence_group **out,
                                 rm_error *err);
rm_code rm_sequence_group_check(const rm_request *request, const rm_request_limits *limits,
                                rm_error *err);
rm_code rm_check_token_ids(const char *what, const int32_t *ids, int64_t n, int64_t vocab,
                           rm_error *err); // each is in [0, vocab)
// Resets a group to its state after create, without generated tokens and records.
void rm_sequence_group_rewind(rm_sequence_group *group);
int rm_sequence_group_stops_at(const rm_sequence_group *group, int32_t token);

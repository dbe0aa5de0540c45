// sequence_group.c: checks a request, and makes one allocation for the request and its records. It
// is sized for the longest completion; pages that are never written take only address space.
#include <float.h>
#include <stdlib.h>

#include "base/fields.h"
#include "base/hash.h"
#include "clock.h"
#include "kernels.h"
#include "scheduler/logit_edits.h"

enum { MAX_SAMPLES = 16384 };

rm_code rm_check_token_ids(const char *what, const int32_t *ids, int64_t n, int64_t vocab,
                           rm_error *err) {
  REFUSE_UNLESS(n == 0 || (n > 0 && ids), "%s: expected an array of %ld, got none", what, n);
  for (int64_t i = 0; i < n; i++)
    REFUSE_UNLESS(ids[i] >= 0 && ids[i] < vocab, "%s[%ld]: expected 0 to %ld, got %d", what, i,
                  vocab - 1, ids[i]);
  return RM_OK;
}

// draws: whether the request draws tokens or scores them under the distribution of draws.
static rm_code check_numbers(const rm_request *request, int draws, rm_error *err) {
  const struct {
    const char *name, *expected;
    float value, least, most;
  } rows[] = {
      {"frequency_penalty", "a number in [-2, 2]", request->frequency_penalty, -2, 2},
      {"presence_penalty", "a number in [-2, 2]", request->presence_penalty, -2, 2},
      {"repetition_penalty", "a finite number of at least 0", request->repetition_penalty, 0,
       FLT_MAX},
      {"temperature", "a finite number of at least 0", request->temperature, 0, FLT_MAX},
      {"top_p", "a number in (0, 1]", request->top_p, FLT_TRUE_MIN, 1},
      {"min_p", "a number in [0, 1]", request->min_p, 0, 1},
  };
  for (int i = 0; i < (draws ? 6 : 3); i++)
    REFUSE_UNLESS(rows[i].value >= rows[i].least && rows[i].value <= rows[i].most,
                  "%s: expected %s, got %g", rows[i].name, rows[i].expected, (double)rows[i].value);
  REFUSE_UNLESS(!draws || request->top_k >= -1,
                "top_k: expected -1 or 0 (all), or 1 or more, got %d", request->top_k);
  return RM_OK;
}

// The kept tokens are the first of a row's top logprobs. So banned tokens are not allowed, and
// top_k bounds the number of kept tokens.
static rm_code check_kept(const rm_request *request, int64_t vocab, rm_error *err) {
  if (!request->kept_tokens) return RM_OK;
  REFUSE_UNLESS(request->kind == RM_GENERATE,
                "kept_tokens=True: expected a generation, got a score; score without kept_tokens");
  REFUSE_UNLESS(
      request->top_k >= 1 && request->top_k < vocab,
      "kept_tokens=True: expected top_k in [1, %ld), got %d; set top_k, which bounds the tokens "
      "kept",
      vocab, request->top_k);
  REFUSE_UNLESS(request->min_tokens == 0,
                "kept_tokens=True: expected min_tokens=0, got %ld; leave one of the two out",
                request->min_tokens);
  REFUSE_UNLESS(
      !request->external_draws,
      "kept_tokens=True: expected draws of the engine, got external_draws=True; leave kept_tokens "
      "out");
  return RM_OK;
}

static rm_code check_lengths(const rm_request *request, const rm_request_limits *limits,
                             rm_error *err) {
  const int64_t n_prompt = request->n_prompt, longest = limits->max_model_len;
  REFUSE_UNLESS(n_prompt >= 1 && request->prompt, "prompt: expected 1 token or more, got none");
  if (request->kind == RM_SCORE) {
    REFUSE_UNLESS(n_prompt <= longest, "prompt: expected at most max_model_len=%ld tokens, got %ld",
                  longest, n_prompt);
    return RM_OK;
  }
  REFUSE_UNLESS(n_prompt < longest, "prompt: expected fewer tokens than max_model_len=%ld, got %ld",
                longest, n_prompt);
  RM_TRY(rm_check_range(err, RM_E_REQUEST, "n", request->n, 1, MAX_SAMPLES));
  RM_TRY(rm_check_range(err, RM_E_REQUEST, "max_tokens", request->max_tokens, 1, INT64_MAX));
  return rm_check_range(err, RM_E_REQUEST, "min_tokens", request->min_tokens, 0,
                        request->max_tokens);
}

// Returns the number of tokens that each sample may generate. An external scheduler may end a
// request one step late.
static int64_t capacity_of(const rm_request *request, const rm_request_limits *limits) {
  const int64_t left = limits->max_model_len - request->n_prompt;
  return request->kind == RM_SCORE    ? 0
         : request->max_tokens < left ? request->max_tokens + (limits->external != 0)
                                      : left;
}

// Checks the number of positions with KV. The last generated token is never an input.
static rm_code check_capacity(const rm_request *request, const rm_request_limits *limits,
                              rm_error *err) {
  const int64_t n_positions = request->n_prompt + rm_max64(capacity_of(request, limits) - 1, 0);
  const int64_t n_pages = (n_positions + limits->page_size - 1) / limits->page_size;
  RM_FAIL_IF(n_pages > limits->n_pages, RM_E_CAPACITY,
             "KV cache: expected a request of at most %ld pages of %ld positions, got one of "
             "%ld pages (%ld tokens)",
             limits->n_pages, limits->page_size, n_pages, n_positions);
  return RM_OK;
}

rm_code rm_sequence_group_check(const rm_request *request, const rm_request_limits *limits,
                                rm_error *err) {
  REFUSE_UNLESS(request->kind == RM_GENERATE || request->kind == RM_SCORE,
                "kind: expected generate or score, got %d", (int)request->kind);
  const int64_t vocab = limits->vocab;
  const int draws = request->kind == RM_GENERATE || request->score_sampling;
  RM_TRY(check_lengths(request, limits, err));
  RM_TRY(rm_check_token_ids("prompt", request->prompt, request->n_prompt, vocab, err));
  RM_TRY(check_numbers(request, draws, err));
  RM_TRY(rm_check_range(err, RM_E_REQUEST, "logprobs", request->logprobs, 0, vocab));
  RM_TRY(rm_check_range(err, RM_E_REQUEST, "prompt_logprobs", request->prompt_logprobs, -1, vocab));
  RM_TRY(check_kept(request, vocab, err));
  RM_TRY(rm_logit_edits_check(request, limits, err));
  RM_TRY(rm_check_token_ids("stop_token_ids", request->stop_ids, request->n_stop_ids, vocab, err));
  REFUSE_UNLESS(
      limits->external || !request->external_draws,
      "external_draws=True: expected an engine with an external scheduler (external_pages > 0)");
  REFUSE_UNLESS(!limits->external || (request->kind == RM_GENERATE && request->n == 1),
                "with an external scheduler: expected a generation with n=1, got %s with n=%d",
                request->kind == RM_GENERATE ? "one" : "a score", request->n);
  return limits->external ? RM_OK : check_capacity(request, limits, err);
}

// ------------------------------------------------------------------------------------- token sets
static int compare_ids(const void *a, const void *b) {
  const int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
  return (x > y) - (x < y);
}

static int64_t sort_unique(int32_t *ids, int64_t n) {
  int64_t kept = 0;
  if (n) qsort(ids, (size_t)n, sizeof *ids, compare_ids);
  for (int64_t i = 0; i < n; i++)
    if (!kept || ids[kept - 1] != ids[i]) ids[kept++] = ids[i];
  return kept;
}

static int64_t fill_set(int32_t *out, const rm_request *request, const rm_request_limits *limits,
                        int with_eos) {
  if (request->n_stop_ids)
    memcpy(out, request->stop_ids, (size_t)request->n_stop_ids * sizeof *out);
  if (with_eos && limits->n_eos)
    memcpy(out + request->n_stop_ids, limits->eos_ids, (size_t)limits->n_eos * sizeof *out);
  return sort_unique(out, request->n_stop_ids + (with_eos ? limits->n_eos : 0));
}

int rm_sequence_group_stops_at(const rm_sequence_group *group, int32_t token) {
  return group->n_stops &&
         bsearch(&token, group->stops, (size_t)group->n_stops, sizeof token, compare_ids);
}

// --------------------------------------------------------------------------------- the allocation
enum { GROUP_FIELDS = 12, SEQUENCE_FIELDS = 12 };

static void group_fields(rm_sequence_group *group, const rm_request *request,
                         const rm_request_limits *limits, rm_field fields[GROUP_FIELDS]) {
  // One more than needed, so that a prompt of one token has arrays that are not NULL.
  const int64_t targets = group->want_prompt_logprobs ? group->n_prompt : 0,
                n_bad = request->n_bad_words, top = group->prompt_top ? targets : 0,
                set = request->n_stop_ids + limits->n_eos;
  const rm_field all[GROUP_FIELDS] = {
      RM_FIELD(group->sequences, group->n),
      RM_FIELD(group->stops, set),
      RM_FIELD(group->banned, set + request->n_banned),
      RM_FIELD(group->edits, rm_logit_edits_most(request)),
      RM_FIELD(group->bad_words, n_bad ? request->bad_word_ends[n_bad - 1] : 0),
      RM_FIELD(group->bad_word_ends, n_bad),
      RM_FIELD(group->prompt_logprobs, targets),
      RM_FIELD(group->prompt_sampling, group->score_sampling ? targets : 0),
      RM_FIELD(group->prompt_ranks, group->want_token_ranks ? targets : 0),
      RM_FIELD_ROWS(group->prompt_top_ids, top, group->prompt_top),
      RM_FIELD_ROWS(group->prompt_top_logprobs, top, group->prompt_top),
      RM_FIELD_ROWS(group->prompt_routed, limits->routed_per_token ? group->n_prompt : 0,
                    limits->routed_per_token),
  };
  memcpy(fields, all, sizeof all);
}

static void sequence_fields(rm_sequence *seq, const rm_sequence_group *group,
                            const rm_request *request, const rm_request_limits *limits,
                            rm_field fields[SEQUENCE_FIELDS]) {
  const int64_t capacity = group->capacity, top = group->top_logprobs ? capacity : 0,
                banned = request->n_stop_ids + limits->n_eos + request->n_banned;
  const rm_field all[SEQUENCE_FIELDS] = {
      RM_FIELD(seq->ids, group->n_prompt + capacity),
      RM_FIELD(seq->logprobs, capacity),
      RM_FIELD(seq->sampling_logprobs, capacity),
      RM_FIELD(seq->versions, capacity),
      RM_FIELD(seq->no_contract, capacity),
      RM_FIELD_ROWS(seq->routed, limits->routed_per_token ? capacity : 0, limits->routed_per_token),
      RM_FIELD(seq->ranks, group->want_token_ranks ? capacity : 0),
      RM_FIELD_ROWS(seq->top_ids, top, group->top_logprobs),
      RM_FIELD_ROWS(seq->top_logprobs, top, group->top_logprobs),
      RM_FIELD(seq->kept, group->want_kept ? capacity : 0),
      RM_FIELD(seq->edits, rm_has_penalties(group) ? rm_logit_edits_most(request) + capacity : 0),
      RM_FIELD(seq->banned, request->n_bad_words ? banned + request->n_bad_words : 0),
  };
  memcpy(fields, all, sizeof all);
}

// Allocates the group, its records, then n equal parts for the sequences.
static rm_sequence_group *allocate(const rm_sequence_group *values, const rm_request *request,
                                   const rm_request_limits *limits) {
  rm_sequence_group model = *values;
  rm_sequence sample = {0};
  rm_field fields[GROUP_FIELDS + SEQUENCE_FIELDS];
  size_t total, parts;
  group_fields(&model, request, limits, fields);
  sequence_fields(&sample, &model, request, limits, fields + GROUP_FIELDS);
  const size_t own = rm_fields_bytes(fields, GROUP_FIELDS),
               part = rm_fields_bytes(fields + GROUP_FIELDS, SEQUENCE_FIELDS);
  if (!own || !part || !rm_mul_size(part, (size_t)model.n, &parts) ||
      !rm_add_size(own, parts, &total) || !rm_add_size(total, sizeof model, &total))
    return NULL;
  rm_sequence_group *group = rm_alloc(1, total);
  if (!group) return NULL;
  *group = model;
  char *at = (char *)(group + 1);
  group_fields(group, request, limits, fields);
  rm_fields_place(fields, GROUP_FIELDS, at);
  at += own;
  for (int32_t i = 0; i < group->n; i++, at += part) {
    sequence_fields(&group->sequences[i], group, request, limits, fields);
    rm_fields_place(fields, SEQUENCE_FIELDS, at);
  }
  return group;
}

static uint64_t splitmix(uint64_t x) { return rm_hash_finish(x + RM_HASH_STEP); }

static rm_sequence_group values_of(const rm_request *request, int64_t capacity) {
  const int score = request->kind == RM_SCORE;
  rm_sequence_group group = {
      .kind = request->kind,
      .n_prompt = request->n_prompt,
      .capacity = capacity,
      .n = score ? 1 : request->n,
      .min_tokens = score ? 0 : request->min_tokens,
      .params = {.temperature = request->temperature,
                 .top_p = request->top_p,
                 .min_p = request->min_p,
                 .top_k = request->top_k == 0 ? -1 : request->top_k,
                 .forced = -1,
                 .repetition_penalty =
                     request->repetition_penalty == 0 ? 1 : request->repetition_penalty,
                 .frequency_penalty = request->frequency_penalty,
                 .presence_penalty = request->presence_penalty},
      .top_logprobs = request->kept_tokens ? (int32_t)rm_max64(request->logprobs, request->top_k)
                                           : request->logprobs,
      .prompt_top = rm_max64(request->prompt_logprobs, 0),
      .want_prompt_logprobs = score || request->prompt_logprobs >= 0,
      .score_sampling = score && request->score_sampling,
      .want_token_ranks = request->ranks,
      .want_kept = request->kept_tokens,
      .external_draws = request->external_draws,
      .logits_out = score ? request->logits_out : NULL,
  };
  if (group.want_prompt_logprobs)
    group.n_targets = group.logits_out ? group.n_prompt : group.n_prompt - 1;
  return group;
}

rm_code rm_sequence_group_create(const rm_request *request, const rm_request_limits *limits,
                                 uint64_t id, uint64_t first_order, rm_sequence_group **out,
                                 rm_error *err) {
  *out = NULL;
  const int64_t capacity = capacity_of(request, limits);
  const rm_sequence_group values = values_of(request, capacity);
  rm_sequence_group *group = allocate(&values, request, limits);
  if (!group) return rm_no_memory(err, "the records of a request", 0);
  group->n_stops = fill_set(group->stops, request, limits, !request->ignore_eos);
  group->n_early = fill_set(group->banned, request, limits, 1);
  if (group->min_tokens && group->n_early >= limits->vocab) {
    rm_free(group);
    return rm_fail(
        err, RM_E_REQUEST,
        "min_tokens: expected 0, since every token of the vocabulary is a stop token, got %ld",
        request->min_tokens);
  }
  if (request->n_banned)
    memcpy(group->banned + group->n_early, request->banned,
           (size_t)request->n_banned * sizeof *group->banned);
  group->n_never = sort_unique(group->banned + group->n_early, request->n_banned);
  rm_logit_edits_init(group, request);
  group->id = id;
  group->times.queued = rm_now();
  rm_list_init(&group->link);
  const uint64_t seed =
      request->has_seed ? request->seed : splitmix(limits->engine_seed ^ splitmix(request->seed));
  for (int32_t i = 0; i < group->n; i++) {
    rm_sequence *seq = &group->sequences[i];
    seq->group = group;
    seq->index = i;
    seq->order = first_order + (uint64_t)i;
    seq->seed = seed + (uint64_t)i;
    rm_list_init(&seq->link);
    memcpy(seq->ids, request->prompt, (size_t)request->n_prompt * sizeof *seq->ids);
  }
  rm_sequence_group_rewind(group);
  *out = group;
  return RM_OK;
}

void rm_sequence_group_rewind(rm_sequence_group *group) {
  group->n_done = 0;
  group->n_scored = group->n_prompt_routed = group->n_cached = 0;
  group->mixed = 0;
  group->times = (rm_request_times){.queued = group->times.queued};
  for (int32_t i = 0; i < group->n; i++) {
    rm_sequence *seq = &group->sequences[i];
    seq->status = RM_WAITING;
    seq->finish = RM_RUNNING;
    seq->stop_token = seq->table_row = seq->external_row = seq->state = -1;
    seq->n_tokens = seq->n_routed = 0;
    rm_logit_edits_rewind(seq);
  }
}

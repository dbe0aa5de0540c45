// logit_edits.c: see logit_edits.h.
#include "scheduler/logit_edits.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_BAD_WORDS = 16384 };

// ----------------------------------------------------------------------------------------- checks
static rm_code check_biases(const rm_request *request, int64_t vocab, rm_error *err) {
  REFUSE_UNLESS(request->n_biases <= vocab && (request->n_biases == 0 || request->biases),
                "logit_bias: expected at most %ld tokens with a number each, got %ld", vocab,
                request->n_biases);
  for (int64_t i = 0; i < request->n_biases; i++)
    REFUSE_UNLESS(isfinite(request->biases[i]), "logit_bias: expected finite numbers, got %g",
                  (double)request->biases[i]);
  return rm_check_token_ids("logit_bias", request->bias_ids, request->n_biases, vocab, err);
}

static rm_code check_bad_words(const rm_request *request, int64_t vocab, rm_error *err) {
  const int64_t n = request->n_bad_words;
  REFUSE_UNLESS(n >= 0 && n <= MAX_BAD_WORDS,
                "bad_words: expected at most %d of several tokens, got %ld", MAX_BAD_WORDS, n);
  REFUSE_UNLESS(n == 0 || request->bad_word_ends,
                "bad_words: expected an array of %ld ends, got none", n);
  for (int64_t i = 0; i < n; i++)
    REFUSE_UNLESS(request->bad_word_ends[i] > (i ? request->bad_word_ends[i - 1] : 0),
                  "bad_words: expected 1 token or more in each, got none in word %ld", i);
  return rm_check_token_ids("bad_words", request->bad_words, n ? request->bad_word_ends[n - 1] : 0,
                            vocab, err);
}

// Whether tokens of the prompt are penalized too.
static int repeats(const rm_request *request) {
  return request->repetition_penalty != 0 && request->repetition_penalty != 1;
}

rm_code rm_logit_edits_check(const rm_request *request, const rm_request_limits *limits,
                             rm_error *err) {
  const int64_t vocab = limits->vocab;
  RM_TRY(check_biases(request, vocab, err));
  RM_TRY(rm_check_token_ids("banned", request->banned, request->n_banned, vocab, err));
  RM_TRY(check_bad_words(request, vocab, err));
  const int by_tokens = repeats(request) || request->frequency_penalty != 0 ||
                        request->presence_penalty != 0 || request->n_bad_words,
            any = by_tokens || request->n_biases || request->n_banned;
  REFUSE_UNLESS(!by_tokens || request->kind == RM_GENERATE,
                "penalties and bad_words: expected none in a score, got some");
  REFUSE_UNLESS(
      !any || !request->kept_tokens,
      "kept_tokens=True: expected no penalties, logit_bias, bad_words or banned tokens; leave one "
      "of the two out");
  REFUSE_UNLESS(
      !any || !limits->external,
      "with an external scheduler: expected no penalties, logit_bias, bad_words or banned tokens, "
      "which it applies itself");
  return RM_OK;
}

// -------------------------------------------------------------------------------------- the lists
int64_t rm_logit_edits_most(const rm_request *request) {
  return request->n_biases + (repeats(request) ? request->n_prompt : 0);
}

static int compare_edits(const void *a, const void *b) {
  const rm_logit_edit *x = a, *y = b;
  return (x->token > y->token) - (x->token < y->token);
}

// Merges the edits of the same token: a bias and an occurrence in the prompt become one edit.
static int64_t merge(rm_logit_edit *edits, int64_t n) {
  int64_t kept = 0;
  if (n) qsort(edits, (size_t)n, sizeof *edits, compare_edits);
  for (int64_t i = 0; i < n; i++) {
    if (!kept || edits[kept - 1].token != edits[i].token) {
      edits[kept++] = edits[i];
      continue;
    }
    rm_logit_edit *same = &edits[kept - 1];
    same->bias += edits[i].bias;
    if (edits[i].count > same->count) same->count = edits[i].count;
  }
  return kept;
}

void rm_logit_edits_init(rm_sequence_group *group, const rm_request *request) {
  const int64_t n_bad = request->n_bad_words, most = rm_logit_edits_most(request);
  for (int64_t i = 0; i < request->n_biases; i++)
    group->edits[i] = (rm_logit_edit){request->bias_ids[i], -1, request->biases[i]};
  for (int64_t i = request->n_biases; i < most; i++)
    group->edits[i] = (rm_logit_edit){request->prompt[i - request->n_biases], 0, 0};
  group->n_edits = merge(group->edits, most);
  group->n_bad_words = n_bad;
  if (!n_bad) return;
  memcpy(group->bad_word_ends, request->bad_word_ends,
         (size_t)n_bad * sizeof *group->bad_word_ends);
  memcpy(group->bad_words, request->bad_words,
         (size_t)request->bad_word_ends[n_bad - 1] * sizeof *group->bad_words);
}

void rm_logit_edits_rewind(rm_sequence *seq) {
  const rm_sequence_group *group = seq->group;
  seq->n_counted = 0;
  seq->n_edits = group->n_edits;
  if (!rm_has_penalties(group)) seq->edits = group->edits;
  else if (group->n_edits)
    memcpy(seq->edits, group->edits, (size_t)group->n_edits * sizeof *seq->edits);
}

static void count(rm_sequence *seq, int32_t token) {
  int64_t low = 0, high = seq->n_edits;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (seq->edits[middle].token < token) low = middle + 1;
    else high = middle;
  }
  rm_logit_edit *edit = &seq->edits[low];
  if (low == seq->n_edits || edit->token != token) {
    memmove(edit + 1, edit, (size_t)(seq->n_edits - low) * sizeof *edit);
    seq->n_edits++;
    *edit = (rm_logit_edit){token, -1, 0};
  }
  edit->count = edit->count < 0 ? 1 : edit->count + 1;
}

// Counts the tokens generated since the last draw.
static void count_generated(rm_sequence *seq) {
  if (!rm_has_penalties(seq->group)) return;
  while (seq->n_counted < seq->n_tokens)
    count(seq, seq->ids[seq->group->n_prompt + seq->n_counted++]);
}

// Appends the last tokens of bad words whose other tokens were generated last. Returns the new
// number.
static int64_t ban_words(const rm_sequence *seq, int64_t n) {
  const rm_sequence_group *group = seq->group;
  const int32_t *end = seq->ids + group->n_prompt + seq->n_tokens;
  for (int64_t i = 0; i < group->n_bad_words; i++) {
    const int64_t from = i ? group->bad_word_ends[i - 1] : 0,
                  before = group->bad_word_ends[i] - from - 1;
    const int32_t *word = group->bad_words + from;
    if (before > seq->n_tokens ||
        (before && memcmp(end - before, word, (size_t)before * sizeof *word)))
      continue;
    seq->banned[n++] = word[before];
  }
  return n;
}

rm_sample_params rm_params_of(rm_sequence *seq) {
  const rm_sequence_group *group = seq->group;
  const int is_early = seq->n_tokens < group->min_tokens;
  const int32_t *banned = is_early ? group->banned : group->banned + group->n_early;
  int64_t n = group->n_never + (is_early ? group->n_early : 0);
  if (group->n_bad_words) {
    if (n) memcpy(seq->banned, banned, (size_t)n * sizeof *banned);
    n = ban_words(seq, n);
    banned = seq->banned;
  }
  count_generated(seq);
  rm_sample_params params = group->params;
  params.seed = seq->seed;
  params.counter = (uint64_t)rm_sequence_length(seq);
  params.banned = banned;
  params.n_banned = (int32_t)n;
  params.edits = seq->edits;
  params.n_edits = (int32_t)seq->n_edits;
  return params;
}

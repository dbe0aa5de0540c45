// fuzz_requests.c: tests every field of rm_request with values at and beyond its limits. The oracle
// implements the rules of the documentation (engine.h, the docstring of SamplingParams) and shares
// no code with the engine.
//
//   - the verdict is the oracle's: accepted, RM_E_REQUEST when malformed, else RM_E_CAPACITY when
//     the request can never fit; and the message names a field that is wrong
//   - a refused request does not change any statistic, byte for byte; ids continue without a gap
//   - an accepted request that is aborted and released does not change them either and frees all
//     its memory
//   - one in 100 of the accepted requests runs to its end, half of them beside another request, and
//     its answer is bit-identical to that of another engine (ref kernels, no prefix cache, no
//     chunks); tokens, logprobs, ends and top-k obey their definitions
//
// Arrays end where a heap block ends, so that ASan detects a read past the end. Three of the six
// engines can run; in the others the KV cache or the weights sleep, or the weights have not
// arrived.
//
//   fuzz_requests [--cases 100000] [--seconds 0] [--seed 1] [--first 0]
//       [--plant 1: the oracle allows top_p = 0, 2: a page too few counts as enough,
//        3: a request is not released, 4: another seed]
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/memory.h"
#include "common/fuzz.h"

enum {
  VOCAB = 131,
  LONGEST = 64,
  PAGE = 16,
  MAX_SAMPLES = 16384,
  RUN_ONE_IN = 100,
  RUN_SAMPLES = 8,
  PLACES = 6,
  RUNNING_PLACES = 3
};

// ------------------------------------------------------------------------------------------ rules
// clang-format off
typedef enum rule {
  KIND, PROMPT_EMPTY, PROMPT_NULL, PROMPT_LONG, PROMPT_ID, SAMPLES, MAX_TOKENS, MIN_TOKENS,
  TEMPERATURE, TOP_P, MIN_P, TOP_K, LOGPROBS,
  PROMPT_LOGPROBS, KEPT_TOKENS, STOP_COUNT, STOP_NULL, STOP_ID, ALL_BANNED, CAPACITY,
  PENALTIES, BIASES, BANNED, BAD_WORDS, EDITS_KEPT, EDITS_SCORED, N_RULES,
} rule;

static const struct {
  const char *name, *said;      // `said` is in the message of a request that breaks this rule alone
} rules[N_RULES] = {
  {"kind", "kind:"}, {"empty prompt", "prompt: expected 1 token"},
  {"no prompt", "prompt: expected 1 token"}, {"long prompt", "max_model_len="},
  {"prompt id", "prompt["}, {"n", "n: "}, {"max_tokens", "max_tokens: "},
  {"min_tokens", "min_tokens: "},
  {"temperature", "temperature:"}, {"top_p", "top_p:"}, {"min_p", "min_p:"}, {"top_k", "top_k:"},
  {"logprobs", "logprobs:"},
  {"prompt_logprobs", "prompt_logprobs:"}, {"kept_tokens", "kept_tokens=True"},
  {"stop count", "stop_token_ids:"}, {"no stop ids", "stop_token_ids"},
  {"stop id", "stop_token_ids["}, {"all banned", "every token"}, {"capacity", "pages"},
  {"penalties", "_penalty:"}, {"logit_bias", "logit_bias"}, {"banned", "banned"},
  {"bad_words", "bad_words"},
  {"edits with kept_tokens", "kept_tokens=True"}, {"edits of a score", "in a score"},
};
// clang-format on

typedef struct place { // an engine and the oracle's knowledge of it
  tiny_model *model;
  tiny_weights *weights;
  rm_engine *engine, *lone; // lone: NULL if the engine cannot run
  rm_engine_options options;
  rm_code closed; // the code of every request here, or RM_OK if requests are accepted
  int64_t n_pages;
  uint64_t next_id;
} place;

typedef struct scene {
  fuzz f;
  place places[PLACES];
  int32_t *prompt, *stops; // [LONGEST], [VOCAB]; used from the end
  int32_t *bias_ids, *banned, *words, *ends; // [VOCAB], as the next; used from the end
  float *biases;
  float *logits, *lone_logits; // [LONGEST][VOCAB]
  size_t blocks;
  long broken[N_RULES], codes[RM_N_CODE], runs, stopped, full, scored;
} scene;

static _Noreturn void wrong(scene *s, const char *what) {
  tiny_die("%s: %s", fuzz_where(&s->f), what);
}

static int in_vocab(const int32_t *ids, int64_t n) {
  for (int64_t i = 0; i < n; i++)
    if ((uint32_t)ids[i] >= VOCAB) return 0;
  return 1;
}

static int everything_stops(const place *at, const rm_request *r) {
  uint8_t stops[VOCAB] = {0};
  int n = 0;
  for (int64_t i = 0; i < r->n_stop_ids; i++) stops[r->stop_ids[i]] = 1;
  for (int64_t i = 0; i < at->options.n_eos; i++) stops[at->options.eos_ids[i]] = 1;
  for (int i = 0; i < VOCAB; i++) n += stops[i];
  return n == VOCAB;
}

static int is_list(const int32_t *ids, int64_t n) { return n == 0 || (n > 0 && ids); }

static int are_finite(const float *values, int64_t n) {
  for (int64_t i = 0; i < n; i++)
    if (!isfinite(values[i])) return 0;
  return 1;
}

static int words_are_good(const rm_request *r) {
  for (int64_t i = 0; i < r->n_bad_words; i++)
    if (r->bad_word_ends[i] <= (i ? r->bad_word_ends[i - 1] : 0)) return 0;
  return r->bad_words && in_vocab(r->bad_words, r->bad_word_ends[r->n_bad_words - 1]);
}

// Whether it certainly runs to its end: some token can always be drawn, and logits do not overflow.
static int is_tame(const place *at, const rm_request *r) {
  uint8_t out[VOCAB] = {0};
  int n = 0;
  for (int64_t i = 0; i < r->n_stop_ids; i++) out[r->stop_ids[i]] = 1;
  for (int64_t i = 0; i < at->options.n_eos; i++) out[at->options.eos_ids[i]] = 1;
  for (int64_t i = 0; i < r->n_banned; i++) out[r->banned[i]] = 1;
  for (int64_t i = 0; i < r->n_bad_words; i++) out[r->bad_words[r->bad_word_ends[i] - 1]] = 1;
  for (int i = 0; i < VOCAB; i++) n += out[i];
  for (int64_t i = 0; i < r->n_biases; i++)
    if (fabsf(r->biases[i]) > 1000) return 0;
  const float repetition = r->repetition_penalty;
  return (repetition == 0 || (repetition >= 0.01f && repetition <= 100)) &&
         (n < VOCAB || !(r->n_banned || r->n_bad_words));
}

// The number of tokens that a sample can reach.
static int64_t room_for(const rm_request *r) {
  const int64_t room = LONGEST - r->n_prompt;
  return r->kind == RM_SCORE ? 0 : r->max_tokens < room ? r->max_tokens : room;
}

// The rules that a request breaks, a bit each. The conditions of a rule are checked before the
// rule.
static uint32_t oracle(const place *at, const rm_request *r, long plant) {
  const int generates = r->kind == RM_GENERATE, samples = generates || r->score_sampling;
  uint32_t broken = 0;
#define RULE(which, holds) broken |= (holds) ? 0u : 1u << (which)
  RULE(KIND, generates || r->kind == RM_SCORE);
  RULE(PROMPT_EMPTY, r->n_prompt > 0);
  RULE(PROMPT_NULL, r->prompt != NULL || r->n_prompt <= 0);
  RULE(PROMPT_LONG, r->n_prompt <= (generates ? LONGEST - 1 : LONGEST));
  if (!broken) RULE(PROMPT_ID, in_vocab(r->prompt, r->n_prompt));
  RULE(SAMPLES, !generates || (r->n > 0 && r->n <= MAX_SAMPLES));
  RULE(MAX_TOKENS, !generates || r->max_tokens > 0);
  RULE(MIN_TOKENS, !generates || (r->min_tokens >= 0 &&
                                  (r->min_tokens <= r->max_tokens || r->max_tokens <= 0)));
  RULE(TEMPERATURE, !samples || (r->temperature >= 0 && r->temperature <= FLT_MAX));
  RULE(TOP_P,
       !samples || (plant == 1 ? r->top_p >= 0 && r->top_p <= 1 : r->top_p > 0 && r->top_p <= 1));
  RULE(MIN_P, !samples || (r->min_p >= 0 && r->min_p <= 1));
  RULE(TOP_K, !samples || r->top_k > -2);
  RULE(LOGPROBS, r->logprobs >= 0 && r->logprobs <= VOCAB);
  RULE(PROMPT_LOGPROBS, r->prompt_logprobs >= -1 && r->prompt_logprobs <= VOCAB);
  RULE(KEPT_TOKENS,
       !r->kept_tokens || (generates && r->top_k >= 1 && r->top_k < VOCAB && r->min_tokens == 0));
  RULE(PENALTIES, r->repetition_penalty >= 0 && r->repetition_penalty <= FLT_MAX &&
                      fabsf(r->frequency_penalty) <= 2 && fabsf(r->presence_penalty) <= 2);
  RULE(BIASES, is_list(r->bias_ids, r->n_biases) && (r->n_biases == 0 || r->biases) &&
                   r->n_biases <= VOCAB);
  if (r->n_biases > 0 && !(broken >> BIASES & 1))
    RULE(BIASES, are_finite(r->biases, r->n_biases) && in_vocab(r->bias_ids, r->n_biases));
  RULE(BANNED, is_list(r->banned, r->n_banned) && in_vocab(r->banned, r->n_banned));
  RULE(BAD_WORDS, is_list(r->bad_word_ends, r->n_bad_words) && r->n_bad_words <= 16384);
  if (r->n_bad_words > 0 && !(broken >> BAD_WORDS & 1)) RULE(BAD_WORDS, words_are_good(r));
  const int penalties = !(r->repetition_penalty == 0 || r->repetition_penalty == 1) ||
                        r->frequency_penalty != 0 || r->presence_penalty != 0;
  RULE(EDITS_KEPT, !r->kept_tokens || !(penalties || r->n_biases || r->n_banned || r->n_bad_words));
  RULE(EDITS_SCORED, generates || !(penalties || r->n_bad_words));
  RULE(STOP_COUNT, r->n_stop_ids >= 0);
  RULE(STOP_NULL, r->stop_ids || r->n_stop_ids <= 0);
  if (r->stop_ids && r->n_stop_ids > 0) RULE(STOP_ID, in_vocab(r->stop_ids, r->n_stop_ids));
  if (!broken) { // the last token is never fed back
    const int64_t positions = r->n_prompt + room_for(r) - (generates ? 1 : 0);
    RULE(CAPACITY, positions <= (at->n_pages - (plant == 2)) * PAGE);
  }
  if (!broken)
    // This message is only for requests that could run otherwise.
    RULE(ALL_BANNED, !generates || !r->min_tokens || !everything_stops(at, r));
#undef RULE
  return broken;
}

static rm_code verdict(uint32_t broken) {
  return !broken ? RM_OK : broken == 1u << CAPACITY ? RM_E_CAPACITY : RM_E_REQUEST;
}

// --------------------------------------------------------------------------------------- requests
static void put_prompt(scene *s, rm_request *r, int64_t n) {
  r->n_prompt = n;
  r->prompt = s->prompt + (n >= 0 && n <= LONGEST ? LONGEST - n : LONGEST - 1);
  for (int64_t i = 0; n <= LONGEST && i < n; i++)
    s->prompt[LONGEST - 1 - i] = (int32_t)fuzz_below(&s->f, VOCAB);
}

static void put_stops(scene *s, rm_request *r, int64_t n, int all) {
  r->n_stop_ids = n;
  r->stop_ids = s->stops + VOCAB - n;
  for (int64_t i = 0; i < n; i++)
    s->stops[VOCAB - 1 - i] = (int32_t)(all ? i : fuzz_below(&s->f, VOCAB));
}

static void put_banned(scene *s, rm_request *r, int64_t n) {
  r->n_banned = n;
  r->banned = s->banned + VOCAB - n;
  for (int64_t i = 0; i < n; i++) s->banned[VOCAB - 1 - i] = (int32_t)fuzz_below(&s->f, VOCAB);
}

static void put_biases(scene *s, rm_request *r, int64_t n) {
  const int64_t first = fuzz_below(&s->f, VOCAB);
  r->n_biases = n;
  r->bias_ids = s->bias_ids + VOCAB - n;
  r->biases = s->biases + VOCAB - n;
  for (int64_t i = 0; i < n; i++) {
    s->bias_ids[VOCAB - 1 - i] = (int32_t)((first + i) % VOCAB);
    s->biases[VOCAB - 1 - i] = (float)(fuzz_below(&s->f, 80) - 40) / 8;
  }
}

static void put_words(scene *s, rm_request *r, int64_t n) {
  int32_t length = 0;
  r->n_bad_words = n;
  r->bad_word_ends = s->ends + VOCAB - n;
  for (int64_t i = 0; i < n; i++)
    s->ends[VOCAB - n + i] = length += 1 + (int32_t)fuzz_below(&s->f, 3);
  r->bad_words = s->words + VOCAB - length;
  for (int32_t i = 0; i < length; i++)
    s->words[VOCAB - 1 - i] = (int32_t)fuzz_below(&s->f, fuzz_one_in(&s->f, 2) ? 9 : VOCAB);
}

// Logit edits that the kind of the request may have.
static void put_edits(scene *s, rm_request *r) {
  fuzz *f = &s->f;
  if (fuzz_one_in(f, 3)) put_banned(s, r, fuzz_below(f, 20));
  if (fuzz_one_in(f, 3)) put_biases(s, r, fuzz_below(f, fuzz_one_in(f, 3) ? VOCAB + 1 : 6));
  if (r->kind != RM_GENERATE) return;
  if (fuzz_one_in(f, 3)) put_words(s, r, fuzz_below(f, 30));
  if (fuzz_one_in(f, 2)) r->repetition_penalty = (float)(1 + fuzz_below(f, 30)) / 10;
  if (fuzz_one_in(f, 2)) r->frequency_penalty = (float)(fuzz_below(f, 41) - 20) / 10;
  if (fuzz_one_in(f, 2)) r->presence_penalty = (float)(fuzz_below(f, 41) - 20) / 10;
}

static rm_request valid(scene *s) {
  fuzz *f = &s->f;
  rm_request r = {.kind = fuzz_one_in(f, 4) ? RM_SCORE : RM_GENERATE};
  r.n = 1 + (int32_t)fuzz_below(f, 3);
  put_prompt(s, &r, 1 + fuzz_below(f, fuzz_one_in(f, 3) ? LONGEST - 1 : 20));
  put_stops(s, &r, fuzz_one_in(f, 3) ? fuzz_below(f, 20) : 0, 0);
  r.max_tokens = 1 + fuzz_below(f, fuzz_one_in(f, 4) ? 70 : 10);
  r.min_tokens = fuzz_one_in(f, 3) ? fuzz_below(f, r.max_tokens + 1) : 0;
  r.temperature = fuzz_one_in(f, 3) ? 0.0f : (float)fuzz_below(f, 30) / 10;
  r.top_p = fuzz_one_in(f, 3) ? (float)(1 + fuzz_below(f, 100)) / 100 : 1.0f;
  r.min_p = fuzz_one_in(f, 4) ? (float)fuzz_below(f, 100) / 100 : 0.0f;
  r.top_k = fuzz_one_in(f, 3) ? (int32_t)fuzz_below(f, 140) : -1;
  r.has_seed = fuzz_one_in(f, 2);
  r.seed = fuzz_bits(f);
  r.ignore_eos = fuzz_one_in(f, 2);
  r.logprobs = fuzz_one_in(f, 4) ? (int32_t)fuzz_below(f, 6) : 0;
  r.prompt_logprobs = fuzz_one_in(f, 4) ? (int32_t)fuzz_below(f, 6) : -1;
  r.score_sampling = fuzz_one_in(f, 2);
  r.kept_tokens =
      r.kind == RM_GENERATE && r.top_k > 0 && r.top_k < VOCAB && !r.min_tokens && fuzz_one_in(f, 2);
  if (!r.kept_tokens && fuzz_one_in(f, 3)) put_edits(s, &r);
  return r;
}

static float hostile_float(fuzz *f) {
  static const float values[] = {
      NAN,           -NAN,           INFINITY, -INFINITY, 0.0f,    -0.0f,    0x1p-149f,
      -0x1p-149f,    0x1p-127f,      FLT_MIN,  -1.0f,     FLT_MAX, -FLT_MAX, 1.0f,
      0x1.000002p0f, 0x1.fffffep-1f, 0.5f,     2.0f,      1e-20f,  1e20f};
  const uint32_t bits = (uint32_t)fuzz_bits(f);
  float value;
  memcpy(&value, &bits, sizeof value);
  return fuzz_one_in(f, 4) ? value : values[fuzz_below(f, sizeof values / sizeof *values)];
}

static int32_t hostile_small(fuzz *f, int32_t limit) {
  const int32_t values[] = {-2,    -1,        0,         1,         limit - 1,
                            limit, limit + 1, INT32_MIN, INT32_MAX, (int32_t)fuzz_integer(f)};
  return values[fuzz_below(f, sizeof values / sizeof *values)];
}

static int64_t hostile_length(fuzz *f, int64_t limit) {
  const int64_t values[] = {limit - 1, limit, limit + 1, 0, -1, 1, fuzz_integer(f)};
  return values[fuzz_below(f, sizeof values / sizeof *values)];
}

static void hostile_samples(scene *s, rm_request *r) {
  r->n = hostile_small(&s->f, MAX_SAMPLES);
  if (r->n <= RUN_SAMPLES || r->n > MAX_SAMPLES) return;
  if (!fuzz_one_in(&s->f, 500)) r->n = 1 + (int32_t)fuzz_below(&s->f, RUN_SAMPLES);
}

static void hostile_stops(scene *s, rm_request *r) {
  fuzz *f = &s->f;
  switch (fuzz_below(f, 6)) {
    case 0: put_stops(s, r, fuzz_below(f, VOCAB + 1), 0); break;
    case 1: put_stops(s, r, VOCAB, 1); break;
    case 2: r->stop_ids = NULL, r->n_stop_ids = fuzz_integer(f); break;
    case 3: r->n_stop_ids = -1 - (fuzz_integer(f) & INT64_MAX); break;
    case 4:
      put_stops(s, r, 1 + fuzz_below(f, 5), 0);
      s->stops[VOCAB - 1 - fuzz_below(f, r->n_stop_ids)] = hostile_small(f, VOCAB);
      break;
    default: put_stops(s, r, 0, 0);
  }
}

static void hostile_edits(scene *s, rm_request *r) {
  fuzz *f = &s->f;
  switch (fuzz_below(f, 14)) {
    case 0: r->repetition_penalty = hostile_float(f); break;
    case 1: r->frequency_penalty = hostile_float(f); break;
    case 2: r->presence_penalty = hostile_float(f); break;
    case 3: put_banned(s, r, fuzz_below(f, VOCAB + 1)); break;
    case 4: r->banned = NULL, r->n_banned = fuzz_integer(f); break;
    case 5: put_banned(s, r, 1), s->banned[VOCAB - 1] = hostile_small(f, VOCAB); break;
    case 6: r->biases = NULL, r->n_biases = fuzz_integer(f); break;
    case 7: put_biases(s, r, 3), r->bias_ids = NULL; break;
    case 8: put_biases(s, r, 1), s->bias_ids[VOCAB - 1] = hostile_small(f, VOCAB); break;
    case 9: put_biases(s, r, 2), s->biases[VOCAB - 2] = hostile_float(f); break;
    case 10: r->bad_word_ends = NULL, r->n_bad_words = fuzz_integer(f); break;
    case 11: put_words(s, r, 2), s->words[VOCAB - 1] = hostile_small(f, VOCAB); break;
    case 12:
      put_words(s, r, 3), s->ends[VOCAB - 3 + fuzz_below(f, 2)] = -(int32_t)fuzz_below(f, 2);
      break;
    default: put_words(s, r, 2), r->bad_words = NULL;
  }
}

static void mutate(scene *s, rm_request *r) {
  fuzz *f = &s->f;
  switch (fuzz_below(f, 22)) {
    case 0: r->kind = (rm_request_kind)fuzz_integer(f); break;
    case 1: put_prompt(s, r, hostile_length(f, r->kind == RM_SCORE ? LONGEST : LONGEST - 1)); break;
    case 2: r->prompt = fuzz_one_in(f, 2) ? NULL : r->prompt; break;
    case 3:
      if (r->n_prompt > 0 && r->n_prompt <= LONGEST)
        s->prompt[LONGEST - 1 - fuzz_below(f, r->n_prompt)] = hostile_small(f, VOCAB);
      break;
    case 4: hostile_samples(s, r); break;
    case 5: r->max_tokens = hostile_length(f, LONGEST - (r->n_prompt & 63)); break;
    case 6: r->min_tokens = hostile_length(f, r->max_tokens & 1023); break;
    case 7: r->temperature = hostile_float(f); break;
    case 8: r->top_p = hostile_float(f); break;
    case 9: r->min_p = hostile_float(f); break;
    case 10: r->top_k = hostile_small(f, VOCAB); break;
    case 11:
    case 12: hostile_stops(s, r); break;
    case 13: r->logprobs = hostile_small(f, VOCAB); break;
    case 14: r->prompt_logprobs = hostile_small(f, VOCAB); break;
    case 15: r->score_sampling = (int)fuzz_integer(f); break;
    case 16:
      r->ignore_eos = (int)fuzz_integer(f), r->has_seed = (int)fuzz_integer(f),
      r->seed = (uint64_t)fuzz_integer(f);
      break;
    case 17: r->kept_tokens = fuzz_one_in(f, 2) ? 1 : (int)fuzz_integer(f); break;
    case 18: put_edits(s, r); break;
    case 19:
    case 20: hostile_edits(s, r); break;
    default:
      // The other kinds do not use it.
      r->logits_out =
          r->kind == RM_SCORE && r->n_prompt <= LONGEST ? s->logits : (float *)(uintptr_t)64;
  }
}

// ---------------------------------------------------------------------------------------- answers
// Logprobs of drawn tokens, or of given tokens, which filters may have excluded.
static void check_logprobs(scene *s, const float *values, int64_t n, int excluded) {
  for (int64_t i = 0; i < n; i++)
    if (!(values[i] <= 0) || (isinf(values[i]) && !excluded))
      wrong(s, "a logprob is not a number ≤ 0");
}

static void check_top(scene *s, const int32_t *ids, const float *logprobs, int64_t n, int32_t k,
                      const int32_t *tokens, const float *chosen) {
  for (int64_t i = 0; i < n; i++, ids += k, logprobs += k) {
    uint8_t seen[VOCAB] = {0};
    for (int32_t j = 0; j < k; j++) {
      if (!in_vocab(&ids[j], 1) || seen[ids[j]]++) wrong(s, "a top id is no token, or comes twice");
      if (j && logprobs[j] > logprobs[j - 1]) wrong(s, "top logprobs do not descend");
      if (ids[j] == tokens[i] && memcmp(&logprobs[j], &chosen[i], sizeof(float)))
        wrong(s, "a token has two logprobs");
    }
    if (k && chosen[i] > logprobs[0]) wrong(s, "a token is likelier than the likeliest");
    if (k && !seen[tokens[i]] && chosen[i] > logprobs[k - 1])
      wrong(s, "a token is missing in the top");
  }
}

// The drawn token is among the kept tokens, which are the first of the top ids.
static void check_kept(scene *s, const rm_request *r, const tiny_sample_view *w) {
  if (!w->kept != !r->kept_tokens) wrong(s, "kept tokens without being asked for, or none");
  for (int64_t i = 0; w->kept && i < w->n_tokens; i++) {
    const int32_t *ids = w->top_ids + i * w->n_top;
    int found = 0;
    for (int32_t j = 0; j < w->kept[i] && j < w->n_top; j++) found |= ids[j] == w->tokens[i];
    if (!found || w->kept[i] > r->top_k)
      wrong(s, "a token that was not kept, or more kept than top_k");
  }
}

static int stops_at(const place *at, const rm_request *r, int32_t token, int with_eos) {
  int found = 0;
  for (int64_t i = 0; i < r->n_stop_ids; i++) found |= r->stop_ids[i] == token;
  for (int64_t i = 0; with_eos && i < at->options.n_eos; i++)
    found |= at->options.eos_ids[i] == token;
  return found;
}

static void check_sample(scene *s, const place *at, const rm_request *r,
                         const tiny_sample_view *w) {
  if (!in_vocab(w->tokens, w->n_tokens)) wrong(s, "a token is not in the vocabulary");
  if (w->n_tokens > room_for(r) || (w->finish == RM_FINISH_LENGTH && w->n_tokens != room_for(r)))
    wrong(s, "a sample of another length");
  if (w->finish != RM_FINISH_STOP && w->finish != RM_FINISH_LENGTH)
    wrong(s, "a sample ended by neither stop nor length");
  for (int64_t i = 0; i < w->n_tokens; i++) {
    const int last = i == w->n_tokens - 1, stops = stops_at(at, r, w->tokens[i], !r->ignore_eos);
    if (stops != (last && w->finish == RM_FINISH_STOP))
      wrong(s, "a stop token did not end the sample, or another did");
    if (i < r->min_tokens && stops_at(at, r, w->tokens[i], 1))
      wrong(s, "a stop token before min_tokens");
    for (int64_t b = 0; b < r->n_banned; b++)
      if (r->banned[b] == w->tokens[i]) wrong(s, "a banned token was drawn");
    if (w->versions[i] != 0 || w->no_contract[i]) wrong(s, "a token of another version");
  }
  const int32_t last = w->n_tokens ? w->tokens[w->n_tokens - 1] : -1;
  if (w->stop_token != (w->finish == RM_FINISH_STOP ? last : -1)) wrong(s, "a wrong stop token");
  check_logprobs(s, w->logprobs, w->n_tokens, 0);
  check_logprobs(s, w->sampling_logprobs, w->n_tokens, 0);
  check_top(s, w->top_ids, w->top_logprobs, w->n_tokens, w->n_top, w->tokens, w->logprobs);
  check_kept(s, r, w);
  s->stopped += w->finish == RM_FINISH_STOP;
  s->full += w->finish == RM_FINISH_LENGTH;
}

static void same(scene *s, const void *a, const void *b, int64_t n, size_t bytes) {
  if (!a != !b || (a && n > 0 && memcmp(a, b, (size_t)n * bytes)))
    wrong(s, "the answer differs from another engine's");
}

static void compare_samples(scene *s, const place *at, const rm_request *r, uint64_t id,
                            uint64_t lone_id, int32_t sample) {
  const int64_t routed = at->model->spec->n_moe_layers * at->model->spec->top_k;
  rm_error err = RM_ERROR_INIT;
  tiny_sample_view a, b;
  tiny_must(tiny_view_sample(rm_engine_scheduler(at->engine, id), id, sample, &a, &err), &err);
  tiny_must(tiny_view_sample(rm_engine_scheduler(at->lone, lone_id), lone_id, sample, &b, &err),
            &err);
  check_sample(s, at, r, &a);
  if (a.n_tokens != b.n_tokens || a.finish != b.finish)
    wrong(s, "another engine ends a sample elsewhere");
  same(s, a.tokens, b.tokens, a.n_tokens, sizeof *a.tokens);
  same(s, a.logprobs, b.logprobs, a.n_tokens, sizeof(float));
  same(s, a.sampling_logprobs, b.sampling_logprobs, a.n_tokens, sizeof(float));
  same(s, a.top_ids, b.top_ids, a.n_tokens * a.n_top, sizeof(int32_t));
  same(s, a.kept, b.kept, a.n_tokens, sizeof(int32_t));
  same(s, a.routed, b.routed, (a.n_tokens - 1) * routed, sizeof(int16_t));
}

static void compare(scene *s, const place *at, const rm_request *r, uint64_t id, uint64_t lone_id) {
  const int64_t targets = r->n_prompt - 1, k = rm_max64(r->prompt_logprobs, 0);
  rm_error err = RM_ERROR_INIT;
  tiny_request_view a, b;
  tiny_must(tiny_view_request(rm_engine_scheduler(at->engine, id), id, &a, &err), &err);
  tiny_must(tiny_view_request(rm_engine_scheduler(at->lone, lone_id), lone_id, &b, &err), &err);
  if (!a.finished || a.error) wrong(s, "a request ended with an error");
  if (!a.prompt_logprobs != (r->kind == RM_GENERATE && r->prompt_logprobs < 0))
    wrong(s, "prompt logprobs without being asked for, or none");
  same(s, a.prompt_logprobs, b.prompt_logprobs, targets, sizeof(float));
  same(s, a.prompt_sampling_logprobs, b.prompt_sampling_logprobs, targets, sizeof(float));
  same(s, a.prompt_top_ids, b.prompt_top_ids, targets * k, sizeof(int32_t));
  same(s, a.prompt_top_logprobs, b.prompt_top_logprobs, targets * k, sizeof(float));
  same(s, a.prompt_routed, b.prompt_routed,
       r->n_prompt * at->model->spec->n_moe_layers * at->model->spec->top_k, sizeof(int16_t));
  if (a.prompt_logprobs) check_logprobs(s, a.prompt_logprobs, targets, 0);
  if (a.prompt_sampling_logprobs) check_logprobs(s, a.prompt_sampling_logprobs, targets, 1);
  if (a.prompt_top_ids)
    check_top(s, a.prompt_top_ids, a.prompt_top_logprobs, targets, (int32_t)k, r->prompt + 1,
              a.prompt_logprobs);
  if (r->kind == RM_SCORE && r->logits_out)
    same(s, s->logits, s->lone_logits, r->n_prompt * VOCAB, sizeof(float));
  for (int32_t sample = 0; sample < a.n; sample++) compare_samples(s, at, r, id, lone_id, sample);
  s->scored += r->kind == RM_SCORE;
}

// The request is accepted; it runs to its end, sometimes with another request.
static void run(scene *s, place *at, const rm_request *r, uint64_t id) {
  rm_request alone = *r;
  tiny_room room;
  const rm_request other = tiny_request(at->model, s->f.seed, (int)fuzz_below(&s->f, 32), &room);
  uint64_t lone_id, other_id = 0;
  rm_error err = RM_ERROR_INIT;
  rm_engine_reset_prefix_cache(at->engine); // a case depends on its number alone
  if (fuzz_one_in(&s->f, 2) && rm_engine_add(at->engine, &other, &other_id, &err))
    rm_error_clear(&err), other_id = 0;
  if (alone.kind == RM_SCORE && alone.logits_out) alone.logits_out = s->lone_logits;
  if (s->f.plant == 4) alone.seed++;
  tiny_must(rm_engine_add(at->lone, &alone, &lone_id, &err), &err);
  tiny_must(tiny_drain(at->engine, &err), &err);
  tiny_must(tiny_drain(at->lone, &err), &err);
  compare(s, at, r, id, lone_id);
  if (other_id)
    tiny_must(rm_scheduler_release(rm_engine_scheduler(at->engine, other_id), other_id, &err),
              &err),
        at->next_id++;
  tiny_must(rm_scheduler_release(rm_engine_scheduler(at->lone, lone_id), lone_id, &err), &err);
  s->runs++;
}

// ----------------------------------------------------------------------------------------- a case
static rm_engine_stats look(const rm_engine *engine) {
  rm_engine_stats stats;
  memset(&stats, 0, sizeof stats);
  rm_engine_statistics(engine, &stats);
  return stats;
}

static void check_refusal(scene *s, const place *at, rm_code code, uint32_t broken,
                          const rm_error *err) {
  const char *message = rm_error_message(err);
  int named = 0;
  s->codes[code]++;
  if (code != err->code || !*message) wrong(s, "a refusal without its code or a message");
  if (code == at->closed) return;
  for (int i = 0; i < N_RULES; i++) {
    if (!(broken >> i & 1)) continue;
    s->broken[i]++;
    named |= strstr(message, rules[i].said) != NULL;
  }
  if (!named)
    tiny_die("%s: the message names nothing that is wrong: %s", fuzz_where(&s->f), message);
}

static void check_entry(scene *s, place *at, const rm_request *r, uint64_t id,
                        const rm_engine_stats *before) {
  const int32_t n = r->kind == RM_SCORE ? 1 : r->n;
  tiny_request_view view;
  rm_error err = RM_ERROR_INIT;
  if (id != at->next_id++) wrong(s, "ids do not go on where they stopped");
  if (look(at->engine).waiting != before->waiting + n || rm_engine_unfinished(at->engine) != 1)
    wrong(s, "an accepted request does not wait");
  tiny_must(tiny_view_request(rm_engine_scheduler(at->engine, id), id, &view, &err), &err);
  if (view.finished || view.n != n || view.n_prompt != r->n_prompt || view.n_scored)
    wrong(s, "a view of another request");
  s->codes[RM_OK]++;
}

static void leave(scene *s, place *at, uint64_t id, int ran, const rm_engine_stats *before) {
  rm_error err = RM_ERROR_INIT;
  uint64_t ended[3] = {0};
  if (!ran) tiny_must(rm_scheduler_abort(rm_engine_scheduler(at->engine, id), id, &err), &err);
  if (s->f.plant != 3)
    tiny_must(rm_scheduler_release(rm_engine_scheduler(at->engine, id), id, &err), &err);
  if (rm_engine_finished(at->engine, ended, 3) && s->f.plant != 3)
    wrong(s, "a released request is still reported");
  const rm_engine_stats after = look(at->engine);
  if (!ran && memcmp(before, &after, sizeof after))
    wrong(s, "a request that came and went left its mark in the statistics");
  if (after.kv_pages_free != after.kv_pages || after.running || after.waiting)
    wrong(s, "pages or places are held by no request");
}

static void one_case(scene *s) {
  fuzz *f = &s->f;
  place *at = &s->places[fuzz_one_in(f, 8) ? fuzz_below(f, PLACES) : fuzz_below(f, RUNNING_PLACES)];
  rm_request r = valid(s);
  for (int64_t n = (const int64_t[]){0, 1, 1, 1, 2, 2, 3, 8}[fuzz_below(f, 8)]; n > 0; n--)
    mutate(s, &r);
  if (r.kind == RM_SCORE && r.logits_out) r.logits_out = s->logits;
  if (r.n > RUN_SAMPLES && r.logprobs > 2) r.logprobs = 2; // n · capacity · k · 8 bytes
  if (r.n > RUN_SAMPLES && r.top_k > 2) r.kept_tokens = 0;
  const uint32_t broken = oracle(at, &r, f->plant);
  const rm_code want = verdict(broken);
  const rm_engine_stats before = look(at->engine);
  rm_error err = RM_ERROR_INIT;
  uint64_t id = 0;
  const rm_code code = rm_engine_add(at->engine, &r, &id, &err);
  if (code != want && (code != at->closed || !code))
    tiny_die("%s: %s, wanted %s (rules broken %x): %s", fuzz_where(f), rm_code_name(code),
             rm_code_name(want), broken, rm_error_message(&err));
  if (code) {
    const rm_engine_stats after = look(at->engine);
    check_refusal(s, at, code, broken, &err);
    if (id || memcmp(&before, &after, sizeof after))
      wrong(s, "a refused request changed the statistics or gave an id");
    rm_error_clear(&err);
  } else {
    const int runs = fuzz_one_in(f, RUN_ONE_IN) && at->lone && is_tame(at, &r) &&
                     (r.kind == RM_SCORE || r.n <= RUN_SAMPLES);
    check_entry(s, at, &r, id, &before);
    if (runs) run(s, at, &r, id);
    leave(s, at, id, runs, &before);
  }
  if (rm_memory_blocks() != s->blocks) wrong(s, "a block of memory was left behind");
}

// ----------------------------------------------------------------------------------------- places
static void warm(rm_engine *engine,
                 uint64_t *next_id) { // the table of requests is allocated for the first one
  rm_error err = RM_ERROR_INIT;
  const int32_t prompt[1] = {1};
  uint64_t id;
  tiny_must(rm_engine_add(engine, &(rm_request){.kind = RM_SCORE, .prompt = prompt, .n_prompt = 1},
                          &id, &err),
            &err);
  tiny_must(rm_scheduler_abort(rm_engine_scheduler(engine, id), id, &err), &err);
  tiny_must(rm_scheduler_release(rm_engine_scheduler(engine, id), id, &err), &err);
  *next_id = id + 1;
}

static void furnish(place *at, int i) {
  static const tiny_kind kinds[PLACES] = {TINY_DENSE, TINY_TIED, TINY_MOE,
                                          TINY_DENSE, TINY_TIED, TINY_MOE};
  static const rm_dtype dtypes[PLACES] = {RM_BF16, RM_F32, RM_BF16, RM_F32, RM_BF16, RM_F32};
  static const int32_t eos[3] = {7, 0, VOCAB - 1};
  rm_error err = RM_ERROR_INIT;
  at->model = tiny_model_create(kinds[i], dtypes[i]);
  at->weights = tiny_weights_create(at->model, 3);
  at->options = tiny_options(at->model, 1);
  at->n_pages = i == 1 ? 2 : 12; // 2 hold half of the longest sequence
  at->options.kv_bytes = at->options.kv_bytes / 12 * (uint64_t)at->n_pages;
  at->options.max_num_batched_tokens = i == 2 ? 5 : 24;
  at->options.n_eos = (const int64_t[]){1, 0, 3, 1, 1, 1}[i];
  at->options.eos_ids = eos;
  tiny_must(rm_engine_create(at->model->spec, &at->options, &at->engine, &err), &err);
  at->closed = i == 4 ? RM_E_STATE : i == 5 ? RM_E_NOT_SYNCED : RM_OK;
  if (at->closed != RM_E_NOT_SYNCED)
    tiny_must(tiny_sync(at->engine, at->weights, RM_INFLIGHT_REFUSE, &err), &err);
  if (!at->closed) warm(at->engine, &at->next_id);
  if (i >= 3 && i < 5)
    tiny_must(rm_engine_sleep(at->engine, i == 3 ? RM_PART_KV : RM_PART_WEIGHTS, &err), &err);
  if (i >= RUNNING_PLACES) return;
  rm_engine_options options = at->options;
  uint64_t unused;
  options.kernels = rm_kernels_for(RM_ISA_REF);
  options.prefix_caching = 0;
  options.max_num_batched_tokens = LONGEST;
  tiny_must(rm_engine_create(at->model->spec, &options, &at->lone, &err), &err);
  tiny_must(tiny_sync(at->lone, at->weights, RM_INFLIGHT_REFUSE, &err), &err);
  warm(at->lone, &unused);
}

static void *block_of(size_t count, size_t bytes) {
  void *block = calloc(count, bytes);
  if (!block) tiny_die("no memory for %zu × %zu bytes of a test", count, bytes);
  return block;
}

static void report(const scene *s, long cases) {
  printf("rules broken:");
  for (int i = 0; i < N_RULES; i++)
    printf(" %s %ld%s", rules[i].name, s->broken[i], i == N_RULES - 1 ? "\n" : ",");
  printf("fuzz_requests: %ld requests, seed %" PRIu64 ", %.1f s:", cases, s->f.seed,
         fuzz_seconds(&s->f));
  for (int c = 0; c < RM_N_CODE; c++)
    if (s->codes[c]) printf(" %s %ld,", rm_code_name((rm_code)c), s->codes[c]);
  printf(" %ld ran (%ld scores, %ld samples stopped, %ld at their length)\n", s->runs, s->scored,
         s->stopped, s->full);
}

// With enough cases, each of these must have occurred.
static void check_counts(const scene *s) {
  for (int i = 0; i < N_RULES; i++)
    if (!s->broken[i]) tiny_die("no request broke the rule on %s", rules[i].name);
  if (!s->codes[RM_OK] || !s->codes[RM_E_NOT_SYNCED] || !s->codes[RM_E_STATE] || !s->runs ||
      !s->scored || !s->stopped || !s->full)
    tiny_die("a verdict or an end never came");
}

int main(int argc, char **argv) {
  static scene s;
  s.f = fuzz_begin(argc, argv, 100000, 4);
  s.prompt = block_of(LONGEST, sizeof *s.prompt);
  int32_t **const lists[] = {&s.stops, &s.bias_ids, &s.banned, &s.words, &s.ends};
  for (int i = 0; i < 5; i++) *lists[i] = block_of(VOCAB, sizeof **lists[i]);
  s.biases = block_of(VOCAB, sizeof *s.biases);
  s.logits = block_of((size_t)LONGEST * VOCAB, sizeof *s.logits);
  s.lone_logits = block_of((size_t)LONGEST * VOCAB, sizeof *s.lone_logits);
  const size_t outside = rm_memory_blocks();
  for (int i = 0; i < PLACES; i++) furnish(&s.places[i], i);
  s.blocks = rm_memory_blocks();
  while (fuzz_next_case(&s.f)) one_case(&s);
  const long cases = s.f.at - s.f.first;
  report(&s, cases);
  for (int i = 0; i < PLACES; i++) {
    rm_engine_destroy(s.places[i].engine);
    rm_engine_destroy(s.places[i].lone);
    tiny_weights_destroy(s.places[i].weights);
    tiny_model_destroy(s.places[i].model);
  }
  if (rm_memory_blocks() != outside)
    tiny_die("%zu blocks were not given back", rm_memory_blocks() - outside);
  for (int i = 0; i < 5; i++) free(*lists[i]);
  free(s.prompt), free(s.biases), free(s.logits), free(s.lone_logits);
  if (cases >= 100000) check_counts(&s);
  return 0;
}

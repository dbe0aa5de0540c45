// check_sample.cpp: sample, top_logprobs and ranks over random rows of every kind and random
// combinations of parameters.
#include "check.h"

namespace {

enum row_kind { SPREAD, TIES, EQUAL, PEAKED, BROKEN, LOWEST, N_ROW_KINDS };

void fill_row(float *logits, int64_t vocab, row_kind kind_of) {
  for (int64_t v = 0; v < vocab; v++) {
    const float x = number();
    logits[v] = kind_of == SPREAD   ? 8.0f * x
                : kind_of == TIES   ? static_cast<float>(pick(5)) - 2.0f
                : kind_of == EQUAL  ? 1.25f
                : kind_of == PEAKED ? 60.0f * x
                : kind_of == BROKEN ? number(WILD)
                                    : -INFINITY;
  }
}

float *random_logits(int64_t rows, int64_t vocab, int64_t ld) {
  float *logits = array<float>(rows * ld);
  for (int64_t r = 0; r < rows; r++)
    fill_row(logits + r * ld, vocab, static_cast<row_kind>(pick(pick(3) ? 4 : N_ROW_KINDS)));
  return logits;
}

float *random_stats(int64_t rows) {
  float *stats = array<float>(2 * rows);
  for (int64_t r = 0; r < rows; r++)
    stats[2 * r] = 4.0f * number(), stats[2 * r + 1] = 1.0f + fabsf(100.0f * number());
  return stats;
}

const int32_t *random_bans(int64_t vocab, int32_t *n) {
  *n = static_cast<int32_t>(pick(3) ? 0 : pick(3) ? 1 + pick(4) : pick(2) ? vocab : vocab / 2 + 1);
  int32_t *banned = array<int32_t>(*n);
  const bool all = *n == vocab && pick(2);
  for (int32_t i = 0; i < *n; i++) banned[i] = static_cast<int32_t>(all ? i : pick(vocab));
  return banned;
}

// Ascending tokens, each with some probability: none, a few or most of them.
const rm_logit_edit *random_edits(int64_t vocab, int32_t *n) {
  rm_logit_edit *edits = array<rm_logit_edit>(vocab);
  const int64_t one_of = pick(2) ? vocab + 1 : 1 + pick(3) * vocab / 3;
  *n = 0;
  for (int64_t v = 0; v < vocab; v++) {
    if (pick(one_of)) continue;
    const float bias = pick(2) ? 0.0f : pick(30) ? 9.0f * number() : 3e38f;
    edits[(*n)++] = {static_cast<int32_t>(v), static_cast<int32_t>(pick(5) - 1), bias};
  }
  return edits;
}

rm_sample_params random_params(int64_t vocab) {
  const float temperatures[] = {0.0f, 1.0f, 0.7f, 1e-40f, 5.0f, 1e-3f, 1.0f, 0.9f},
              top_ps[] = {1.0f, 1.0f, 0.95f, 0.5f, 0.1f, 1e-6f};
  const float min_ps[] = {0.0f, 0.0f, 0.0f, 0.05f, 1.0f};
  const int64_t top_ks[] = {-1, -1, 1, 5, vocab, vocab + 1, 1 + pick(vocab), 50};
  rm_sample_params p = {};
  p.temperature = temperatures[pick(8)], p.top_p = top_ps[pick(6)], p.min_p = min_ps[pick(5)];
  p.top_k = static_cast<int32_t>(top_ks[pick(8)]);
  p.seed = static_cast<uint64_t>(random_bits()) << 32 | random_bits(),
  p.counter = static_cast<uint64_t>(random_bits()) << pick(20);
  p.banned = random_bans(vocab, &p.n_banned);
  p.edits = random_edits(vocab, &p.n_edits);
  p.repetition_penalty = pick(2) ? 1.0f : 0.5f + static_cast<float>(pick(20)) / 10.0f;
  p.frequency_penalty = number(), p.presence_penalty = number();
  p.forced = static_cast<int32_t>(pick(4) ? -1 : pick(vocab));
  return p;
}

bool sample_case(int64_t rows, int64_t vocab, bool one_row = false) {
  const int64_t sampled = one_row ? 1 : rows;
  rm_sample_params *params = array<rm_sample_params>(rows);
  uint8_t *flags = array<uint8_t>(sampled);
  for (int64_t r = 0; r < rows; r++) params[r] = random_params(vocab);
  for (int64_t r = 0; r < sampled; r++) flags[r] = static_cast<uint8_t>(pick(12) ? 0 : 1 + pick(3));
  rm_sample_args a = {};
  a.rows = rows, a.vocab = vocab, a.ld_logits = one_row ? 0 : vocab + pick(3), a.params = params,
  a.row_flags = flags;
  a.stats = random_stats(sampled),
  a.logits = random_logits(sampled, vocab, one_row ? vocab : a.ld_logits);
  rm_limits limits = {}; // the workspace holds three rows: the others wait for their turn
  limits.max_rows = 3, limits.vocab = vocab;
  char what[100];
  snprintf(what, sizeof what, "sample rows=%ld vocab=%ld one_row=%d", rows, vocab, one_row);
  const size_t bytes = static_cast<size_t>(rows) * 4;
  return held(what,
              {{&a.tokens, bytes, rows},
               {&a.logprobs, bytes, rows},
               {&a.sampling_logprobs, bytes, rows},
               {pick(3) ? &a.kept : nullptr, bytes, rows}},
              limits, [&](const rm_kernels *table, const rm_ctx *ctx) { table->sample(ctx, &a); });
}

bool top_case(int64_t rows, int64_t vocab, int64_t k) {
  rm_top_logprobs_args a = {};
  a.rows = rows, a.vocab = vocab, a.ld_logits = vocab + pick(3), a.k = k,
  a.stats = random_stats(rows);
  a.logits = random_logits(rows, vocab, a.ld_logits);
  char what[100];
  snprintf(what, sizeof what, "top_logprobs rows=%ld vocab=%ld k=%ld", rows, vocab, k);
  const size_t bytes = static_cast<size_t>(rows * k) * 4;
  return held(what, {{&a.ids, bytes, rows * k}, {&a.logprobs, bytes, rows * k}}, {},
              [&](const rm_kernels *table, const rm_ctx *ctx) { table->top_logprobs(ctx, &a); });
}

bool ranks_case(int64_t rows, int64_t vocab, bool one_row) {
  int32_t *tokens = array<int32_t>(rows);
  for (int64_t r = 0; r < rows; r++)
    tokens[r] = static_cast<int32_t>(pick(8) ? pick(vocab) : -1 - pick(2));
  rm_ranks_args a = {};
  a.rows = rows, a.vocab = vocab, a.ld_logits = one_row ? 0 : vocab + pick(3), a.tokens = tokens;
  a.logits = random_logits(one_row ? 1 : rows, vocab, one_row ? vocab : a.ld_logits);
  char what[100];
  snprintf(what, sizeof what, "ranks rows=%ld vocab=%ld one_row=%d", rows, vocab, one_row);
  return held(what, {{&a.ranks, static_cast<size_t>(rows) * 4, rows}}, {},
              [&](const rm_kernels *table, const rm_ctx *ctx) { table->ranks(ctx, &a); });
}

} // namespace

bool check_sample() {
  for (const int64_t vocab : {1, 2, 31, 32, 33, 100, 511, 513, 1023, 1024, 1025, 1500})
    for (int again = 0; again < 8; again++)
      if (!sample_case(10, vocab) || !sample_case(5, vocab, true)) return false;
  for (int again = 0; again < 3; again++)
    if (!sample_case(4, 17000)) return false; // the draw narrows twice
  return sample_case(0, 100) && sample_case(0, 100, true);
}

bool check_top_logprobs() {
  for (const int64_t vocab : {1, 2, 31, 33, 511, 513, 1300})
    for (const int64_t k : {0, 1, 2, 5, 20, 64})
      if (!top_case(4, vocab, rm_min64(k, vocab))) return false;
  return top_case(2, 100, 100) && top_case(0, 100, 5);
}

bool check_ranks() {
  for (const int64_t vocab : {1, 2, 31, 33, 511, 512, 513, 1300})
    for (int again = 0; again < 10; again++)
      if (!ranks_case(7, vocab, pick(3) == 0)) return false;
  return ranks_case(0, 100, false);
}

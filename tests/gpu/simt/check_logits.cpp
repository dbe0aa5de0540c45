// check_logits.cpp: lm_head, whole and as a rank's part, and merge_pairs.
#include "check.h"

namespace {

int32_t *random_targets(int64_t rows, int64_t vocab) {
  int32_t *targets = array<int32_t>(rows);
  for (int64_t r = 0; r < rows; r++)
    targets[r] = static_cast<int32_t>(vocab && pick(4) ? pick(vocab) : -1);
  return targets;
}

uint8_t *random_flags(int64_t rows) {
  uint8_t *flags = array<uint8_t>(rows);
  for (int64_t r = 0; r < rows; r++) flags[r] = static_cast<uint8_t>(pick(2) * RM_ROW_KV_NONFINITE);
  return flags;
}

struct wanted {
  bool logits, pairs, targets;
};

bool lm_head_case(rm_dtype dtype, int64_t rows, int64_t vocab, int64_t hidden, wanted want,
                  kind wild) {
  const int64_t n_blocks = (vocab + RM_VOCAB_BLOCK - 1) / RM_VOCAB_BLOCK;
  const size_t of_rows = static_cast<size_t>(rows) * sizeof(float);
  rm_lm_head_args a = {};
  a.ldx = hidden + pick(3), a.ld_logits = vocab + pick(3);
  a.x = numbers(dtype, rows * a.ldx, wild);
  const packed w = weights(dtype, 1, vocab, hidden);
  a.rows = rows, a.vocab = vocab, a.hidden = hidden, a.dtype = dtype,
  a.row_flags = random_flags(rows);
  a.targets = want.targets ? random_targets(rows, vocab) : nullptr;
  rm_limits limits = {};  // the workspace holds two rows: the others wait for their turn
  limits.max_rows = 2, limits.vocab = vocab;
  const bool logprobs = want.targets && !want.pairs,
             target_logits = want.targets && (want.pairs || pick(2));
  char what[140];
  snprintf(what, sizeof what,
           "lm_head dtype=%d rows=%ld vocab=%ld hidden=%ld logits=%d pairs=%d targets=%d wild=%d",
           dtype, rows, vocab, hidden, want.logits, want.pairs, want.targets, wild);
  return held(what,
              {{want.logits ? &a.logits : nullptr, static_cast<size_t>(rows * a.ld_logits) * 4,
                rows * vocab},
               {want.pairs ? &a.pairs : &a.stats,
                (want.pairs ? static_cast<size_t>(n_blocks) : 1) * 2 * of_rows, rows},
               {logprobs ? &a.target_logprobs : nullptr, of_rows, rows},
               {target_logits ? &a.target_logits : nullptr, of_rows, rows},
               {&a.row_flags, static_cast<size_t>(rows), rows}},
              limits, [&](const rm_kernels *table, const rm_ctx *ctx) {
                a.w = w.of(table), table->lm_head(ctx, &a);
              });
}

bool merge_case(int64_t n_blocks, int64_t rows, bool flat) {
  float *pairs = array<float>(2 * n_blocks * rows);
  for (int64_t i = 0; i < n_blocks * rows; i++) {
    pairs[2 * i] = rm_canon(flat ? 3.5f : 60.0f * number());
    pairs[2 * i + 1] = 1.0f + 127.0f * fabsf(number());
    if (pick(100 * n_blocks) != 0) continue;
    pairs[2 * i] = pick(2) ? INFINITY : pick(2) ? -INFINITY : 1.0f;
    pairs[2 * i + 1] = rm_float(0x7fc00000u);
  }
  rm_merge_pairs_args a = {};
  const bool logprobs = pick(2);
  a.pairs = pairs, a.row_flags = random_flags(rows), a.rows = rows, a.n_blocks = n_blocks;
  a.targets = logprobs ? random_targets(rows, 1000) : nullptr;
  a.target_logits = logprobs ? static_cast<float *>(numbers(RM_F32, rows)) : nullptr;
  char what[100];
  snprintf(what, sizeof what, "merge_pairs blocks=%ld rows=%ld flat=%d", n_blocks, rows, flat);
  const size_t of_rows = static_cast<size_t>(rows) * sizeof(float);
  return held(what,
              {{&a.stats, 2 * of_rows, rows},
               {logprobs ? &a.target_logprobs : nullptr, of_rows, rows},
               {&a.row_flags, static_cast<size_t>(rows), rows}},
              {}, [&](const rm_kernels *table, const rm_ctx *ctx) { table->merge_pairs(ctx, &a); });
}

}  // namespace

bool check_lm_head() {
  const wanted all[] = {{true, false, false},
                        {false, false, true},
                        {true, false, true},
                        {false, true, true},
                        {true, true, false}};
  for (const rm_dtype dtype : {RM_BF16, RM_F32})
    for (const int64_t vocab : {1, 2, 15, 127, 128, 129, 255, 257, 640})
      for (const int64_t hidden : {1, 32, 65})
        for (const wanted &w : all)
          if (!lm_head_case(dtype, 1 + pick(4) * pick(6), vocab, hidden, w, pick(3) ? TAME : WILD))
            return false;
  for (const wanted &w : all)
    if (!lm_head_case(RM_BF16, 2, 4500, 32, w, TAME))
      return false;  // a merge of more than a warp of blocks
  return lm_head_case(RM_BF16, 5, 0, 32, {false, true, true}, TAME) &&
         lm_head_case(RM_BF16, 0, 100, 32, {true, false, true}, TAME);
}

bool check_merge_pairs() {
  for (const int64_t n_blocks : {1, 2, 31, 32, 33, 34, 65, 100, 1187})
    for (const int64_t rows : {1, 3, 4, 5})
      for (int again = 0; again < 4; again++)
        if (!merge_case(n_blocks, rows, again == 0)) return false;
  return merge_case(3, 0, false);
}

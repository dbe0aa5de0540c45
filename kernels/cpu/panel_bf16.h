// panel_bf16.h: bf16 dot products by vdpbf16ps, which takes two k per step: acc ← fma(low·low,
// fma(high·high, acc)), each rounded. The contract's even chain k0, k2, k4 … is such a chain when a
// word holds (low k2, high k0), and the odd one with (k3, k1). So the words of rows and weights are
// permuted inside each block of 32: activations when the panel is filled, weights in registers when
// they are loaded (a shift and a blend for each vector), in parallel with the products. float32
// uses FMA.
//
// Rejected: a separate packed layout, permuted when weights are packed. It would save those four
// instructions per two vectors, but their cost is not measurable, and one layout works for every
// instruction set, the KV cache and the weight digest.
#pragma once

#include "dots.h"

// Words of a row's block: 8 of the even chain, then 8 of the odd one.
enum { PAIR_WORDS = RM_K_BLOCK / 2 };

// acc[r][0 … 16) += E + O of one k block, for R rows of x [R][PAIR_WORDS]. R is a constant.
VEC void pair_block(const int R, const uint32_t *x, const k_block *w, float *acc) {
  vf even[MOST_ROWS], odd[MOST_ROWS];
  for (int r = 0; r < R; r++) even[r] = odd[r] = vf_zero();
#pragma GCC unroll 8
  for (int j = 0; j < PAIR_WORDS / 2; j++) {
    const uint16_t *pairs = (const uint16_t *)w->half[j / 4] + j % 4 * 2 * w->step;
    const vi first = vi_load(pairs), second = vi_load(pairs + w->step), we = vp_even(first, second),
             wo = vp_odd(first, second);
    for (int r = 0; r < R; r++) {
      const uint32_t *word = x + r * PAIR_WORDS + j;
      even[r] = vp_dot(even[r], vi_set1((int32_t)word[0]), we);
      odd[r] = vp_dot(odd[r], vi_set1((int32_t)word[PAIR_WORDS / 2]), wo);
    }
  }
  for (int r = 0; r < R; r++) add_to(acc + r * RM_LANES, even[r], odd[r]);
}

VEC void pair_fill(void *to, const uint16_t *x, int64_t n) {
  uint16_t block[RM_K_BLOCK] = {0};
  const void *from = n >= RM_K_BLOCK ? x : memcpy(block, x, (size_t)n * sizeof *x);
  vi_store(to, vp_permute(vi_load(from)));
}

VEC int64_t block_words(rm_dtype dtype) { return dtype == RM_BF16 ? PAIR_WORDS : RM_K_BLOCK; }

VEC void block_dots(rm_dtype dtype, const int R, const float *x, const k_block *w, float *acc) {
  if (dtype == RM_BF16) pair_block(R, (const uint32_t *)x, w, acc);
  else fma_block(dtype, R, x, w, acc);
}
VEC void fill_block(rm_dtype dtype, float *to, const void *x, int64_t n) {
  if (dtype == RM_BF16) pair_fill(to, x, n);
  else fma_fill(dtype, to, x, n);
}
VEC void store_probabilities(rm_dtype dtype, float *p, vf p0, vf p1) {
  if (dtype == RM_BF16) vi_store(p, vp_permute(vp_round(p0, p1)));
  else fma_probabilities(dtype, p, p0, p1);
}

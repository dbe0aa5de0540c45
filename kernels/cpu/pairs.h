// pairs.h: bf16 dot products by vdpbf16ps, which takes two k per step: acc ← fma(low·low,
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

#include "panel_fma.h"

// Words of a row's block: 8 of the even chain, then 8 of the odd one.
enum { PAIR_WORDS = RM_K_BLOCK / 2 };

// sum[r] += E + O of one k block; rows of x are `ldx` words apart.
VEC void pair_block(const int R, const uint32_t *x, const int ldx, const k_block *w, vf *sum) {
  vf even[MOST_ROWS], odd[MOST_ROWS];
  for (int r = 0; r < R; r++) even[r] = odd[r] = vf_zero();
#pragma GCC unroll 8
  for (int j = 0; j < PAIR_WORDS / 2; j++) {
    const uint16_t *pairs = (const uint16_t *)w->half[j / 4] + j % 4 * 2 * w->step;
    const vi first = vi_load(pairs), second = vi_load(pairs + w->step), we = vp_even(first, second),
             wo = vp_odd(first, second);
    for (int r = 0; r < R; r++) {
      even[r] = vp_dot(even[r], vi_set1((int32_t)x[r * ldx + j]), we);
      odd[r] = vp_dot(odd[r], vi_set1((int32_t)x[r * ldx + PAIR_WORDS / 2 + j]), wo);
    }
  }
  for (int r = 0; r < R; r++) sum[r] = vf_add(sum[r], vf_add(even[r], odd[r]));
}

// R rows of x times n_blocks blocks of a tile column; blocks of x are `next` words apart. The sums
// stay in registers.
VEC void pair_rows_dots(const int R, const uint32_t *x, int64_t next, const uint16_t *w,
                        int64_t n_blocks, float *acc, const int lda, const fetch f) {
  vf sum[MOST_ROWS];
  for (int r = 0; r < R; r++) sum[r] = vf_load(acc + r * lda);
  for (int64_t b = 0; b < n_blocks; b++, x += next) {
    const k_block block = packed_block(RM_BF16, w + b * TILE);
    fetch_block(&f, b);
    pair_block(R, x, PAIR_WORDS, &block, sum);
  }
  for (int r = 0; r < R; r++) vf_store(acc + r * lda, sum[r]);
}

VEC void pair_dots_of(const uint32_t *x, int64_t rows, const uint16_t *w, int64_t n_blocks,
                      float *acc, const int lda, const fetch *soon) {
  for (int64_t r = 0; r < rows;) {
    const int n = rows_at_once(rows - r);
    const fetch share = fetch_share(*soon, r, n, rows);
    WITH_ROWS(n, pair_rows_dots(R, x + r * PAIR_WORDS, rows * PAIR_WORDS, w, n_blocks,
                                acc + r * lda, lda, share));
    r += n;
  }
}
DOTS_FUNCTION void pair_tile_dots(const float *x, int64_t rows, const void *w, int64_t n_blocks,
                                  float *acc, const fetch *soon) {
  pair_dots_of((const uint32_t *)x, rows, w, n_blocks, acc, RM_N_TILE, soon);
}
DOTS_FUNCTION void pair_score_dots(const uint32_t *x, int64_t rows, const uint16_t *w,
                                   int64_t n_blocks, float *acc, const fetch *soon) {
  pair_dots_of(x, rows, w, n_blocks, acc, RM_ATTN_BLOCK, soon);
}

// One k block times n_tiles adjacent tile columns, like columns_dots of dots.h; rows of x have the
// form that store_probabilities writes.
VEC void pair_columns_dots(const int R, const uint32_t *x, k_block w, int64_t n_tiles, float *acc,
                           int64_t next, const fetch f0, const fetch f1) {
  for (int64_t t = 0; t < n_tiles; t++, acc += next) {
    fetch_block(&f0, t);
    fetch_block(&f1, t);
    vf sum[MOST_ROWS];
    for (int r = 0; r < R; r++) sum[r] = vf_load(acc + r * RM_LANES);
    pair_block(R, x, RM_ATTN_BLOCK, &w, sum);
    for (int r = 0; r < R; r++) vf_store(acc + r * RM_LANES, sum[r]);
    for (int half = 0; half < 2; half++)
      w.half[half] = (const uint16_t *)w.half[half] + 2 * RM_N_TILE;
  }
}
DOTS_FUNCTION void pair_value_dots(const uint32_t *x, int64_t rows, const k_block *w,
                                   int64_t n_tiles, float *acc, const fetch *soon) {
  for (int64_t r = 0; r < rows;) {
    const int n = rows_at_once(rows - r);
    const fetch f0 = fetch_share(soon[0], r, n, rows), f1 = fetch_share(soon[1], r, n, rows);
    WITH_ROWS(n, pair_columns_dots(R, x + r * RM_ATTN_BLOCK, *w, n_tiles, acc + r * RM_LANES,
                                   rows * RM_LANES, f0, f1));
    r += n;
  }
}

// Copies one row into row r of a panel of `rows` rows, with +0 after k.
VEC void pair_fill_row(uint32_t *panel, int64_t rows, int64_t r, const uint16_t *x, int64_t k) {
  for (int64_t i = 0; i < k; i += RM_K_BLOCK) {
    uint16_t block[RM_K_BLOCK] = {0};
    const void *from =
        k - i >= RM_K_BLOCK ? x + i : memcpy(block, x + i, (size_t)(k - i) * sizeof *x);
    vi_store(panel + (i / RM_K_BLOCK * rows + r) * PAIR_WORDS, vp_permute(vi_load(from)));
  }
}

// -------------------------------------------------------------------- the products of attention.c
VEC void fill_query(rm_dtype dtype, float *panel, int64_t rows, int64_t r, const void *x,
                    int64_t k) {
  if (dtype == RM_BF16) pair_fill_row((uint32_t *)panel, rows, r, x, k);
  else fill_row(dtype, panel, rows, r, x, k);
}
VEC void score_dots(rm_dtype dtype, const float *queries, int64_t rows, const void *keys,
                    int64_t n_blocks, float *p, const fetch *soon) {
  if (dtype == RM_BF16) pair_score_dots((const uint32_t *)queries, rows, keys, n_blocks, p, soon);
  else fma_score_dots(dtype, queries, rows, keys, n_blocks, p, soon);
}
VEC void store_probabilities(rm_dtype dtype, float *p, vf p0, vf p1) {
  if (dtype == RM_BF16) vi_store(p, vp_permute_halves(vf_to_bf16(p0), vf_to_bf16(p1)));
  else fma_store_probabilities(dtype, p, p0, p1);
}
VEC void value_dots(rm_dtype dtype, const float *p, int64_t rows, const k_block *values,
                    int64_t n_tiles, float *acc, const fetch *soon) {
  if (dtype == RM_BF16) pair_value_dots((const uint32_t *)p, rows, values, n_tiles, acc, soon);
  else fma_value_dots(dtype, p, rows, values, n_tiles, acc, soon);
}

// panel_bf16.h: bf16 dot products by vdpbf16ps, which takes two k a step: acc ← fma(low·low, fma(high·high, acc)), each rounded.
// The contract's even chain k0, k2, k4 … is such a chain when a word holds (low k2, high k0), and the odd one with (k3, k1). So
// the words of rows and weights are permuted inside each block of 32: activations when the panel is filled, weights in registers
// as they come from memory (a shift and a blend for each vector), which hides behind the products. float32 goes by FMA.
//
// A packed layout of its own, permuted when weights are packed, would save those four instructions per two vectors. It was rejected:
// they cost nothing that can be measured, and one layout serves every instruction set, the KV cache and the weight digest.
#pragma once

#include "panel_fma.h"

enum { PAIR_WORDS = RM_K_BLOCK / 2 };  // of a row's block: 8 of the even chain, then 8 of the odd one

// R rows of x, `next` words from a block to the next, against n_blocks blocks of a tile column. The sums stay in registers.
VEC void pair_dots_rows(const int R, const uint32_t *x, int64_t next, const uint16_t *w, int64_t n_blocks, float *acc, const fetch f) {
  vf sum[MOST_ROWS];
  for (int r = 0; r < R; r++) sum[r] = vf_load(acc + r * RM_N_TILE);
  for (int64_t b = 0; b < n_blocks; b++, x += next, w += TILE) {
    vf even[MOST_ROWS], odd[MOST_ROWS];
    fetch_block(&f, b);
    for (int r = 0; r < R; r++) even[r] = odd[r] = vf_zero();
#pragma GCC unroll 8
    for (int j = 0; j < PAIR_WORDS / 2; j++) {
      const vi first = vi_load(w + 4 * RM_N_TILE * j), second = vi_load(w + 4 * RM_N_TILE * j + 2 * RM_N_TILE);
      const vi we = vp_even(first, second), wo = vp_odd(first, second);
      for (int r = 0; r < R; r++) {
        even[r] = vp_dot(even[r], vi_set1((int32_t)x[r * PAIR_WORDS + j]), we);
        odd[r] = vp_dot(odd[r], vi_set1((int32_t)x[r * PAIR_WORDS + PAIR_WORDS / 2 + j]), wo);
      }
    }
    for (int r = 0; r < R; r++) sum[r] = vf_add(sum[r], vf_add(even[r], odd[r]));
  }
  for (int r = 0; r < R; r++) vf_store(acc + r * RM_N_TILE, sum[r]);
}

DOTS_FUNCTION void pair_tile_dots(const uint32_t *x, int64_t rows, const uint16_t *w, int64_t n_blocks, float *acc) {
  const fetch soon = fetch_ahead(RM_BF16, w, rows);
  for (int64_t r = 0; r < rows;) {
    const int n = rows_at_once(rows - r);
    const fetch share = fetch_share(soon, r, n, rows);
    WITH_ROWS(n, pair_dots_rows(R, x + r * PAIR_WORDS, rows * PAIR_WORDS, w, n_blocks, acc + r * RM_N_TILE, share));
    r += n;
  }
}

VEC void pair_fill_panel(uint32_t *panel, const uint16_t *x, int64_t ldx, int64_t rows, int64_t k) {
  for (int64_t r = 0; r < rows; r++)
    for (int64_t i = 0; i < k; i += RM_K_BLOCK) {
      uint16_t block[RM_K_BLOCK] = {0};
      const uint16_t *from = x + r * ldx + i;
      if (k - i >= RM_K_BLOCK) vp_permute(panel + (i / RM_K_BLOCK * rows + r) * PAIR_WORDS, from);
      else vp_permute(panel + (i / RM_K_BLOCK * rows + r) * PAIR_WORDS, memcpy(block, from, (size_t)(k - i) * sizeof *from));
    }
}

VEC void pair_panel_dots(const uint32_t *panel, int64_t rows, const uint16_t *w, int64_t n_tiles, int64_t n_blocks, float *acc) {
  const int64_t span = blocks_at_once(rows, PAIR_WORDS * (int64_t)sizeof *panel);
  memset(acc, 0, (size_t)(n_tiles * rows * RM_N_TILE) * sizeof *acc);
  for (int64_t b0 = 0; b0 < n_blocks; b0 += span)
    for (int64_t t = 0; t < n_tiles; t++)
      for (int64_t b = b0; b < rm_min64(b0 + span, n_blocks); b += CHUNK_BLOCKS)
        pair_tile_dots(panel + b * rows * PAIR_WORDS, rows, w + (t * n_blocks + b) * TILE, rm_min64(CHUNK_BLOCKS, n_blocks - b),
                       acc + t * rows * RM_N_TILE);
}

VEC void fill_panel(rm_dtype dtype, float *panel, const void *x, int64_t ldx, int64_t rows, int64_t k) {
  if (dtype == RM_BF16) pair_fill_panel((uint32_t *)panel, x, ldx, rows, k);
  else fma_fill_panel(dtype, panel, x, ldx, rows, k);
}

// acc [n_tiles][rows][16] = panel · columns of n_tiles tiles that stand one after another from w.
VEC void panel_dots(rm_dtype dtype, const float *panel, int64_t rows, const void *w, int64_t n_tiles, int64_t n_blocks, float *acc) {
  if (dtype == RM_BF16) pair_panel_dots((const uint32_t *)panel, rows, w, n_tiles, n_blocks, acc);
  else fma_panel_dots(dtype, panel, rows, w, n_tiles, n_blocks, acc);
}

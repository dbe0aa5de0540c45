// panel_bf16.h: bf16 dot products by vdpbf16ps, which takes two k a step: acc ← fma(low·low, fma(high·high, acc)), each rounded.
// The contract's even chain k0, k2, k4 … is such a chain when a word holds (low k2, high k0), and the odd one with (k3, k1). So
// the words of rows and weights are permuted inside each block of 32: activations when the panel is filled, weights in registers
// as they come from memory (a shift and a blend for each vector), or once for all rows in the L1 cache when rows are many.
//
// A packed layout of its own, permuted when weights are packed, would save those four instructions per two vectors. It was rejected:
// with one row they hide behind memory, with many they are paid once, and one layout serves every instruction set, the KV cache
// and the weight digest. float32 goes by FMA.
#pragma once

#include "panel_fma.h"

enum {
  PAIR_WORDS = RM_K_BLOCK / 2,    // of a row's block: 8 of the even chain, then 8 of the odd one
  PERMUTE_ROWS = 17,              // from here on weights are permuted into the cache
};

// One block of 16 columns: even[j], odd[j] from pair rows 2j and 2j + 1, or as permute_tiles left them.
VEC void pair_rows(const uint16_t *w, int j, int permuted, vi *even, vi *odd) {
  const vi first = vi_load(w + 4 * RM_N_TILE * j), second = vi_load(w + 4 * RM_N_TILE * j + 2 * RM_N_TILE);
  *even = permuted ? first : vp_even(first, second);
  *odd = permuted ? second : vp_odd(first, second);
}

VEC void pair_dots_rows(const int R, const int permuted, const uint32_t *x, int64_t next, const uint16_t *w, int64_t n_blocks, float *acc,
                        int64_t ahead) {
  for (int64_t b = 0; b < n_blocks; b++, x += next, w += TILE) {
    vf even[MOST_ROWS], odd[MOST_ROWS];
    for (int r = 0; r < R; r++) even[r] = odd[r] = vf_zero();
#pragma GCC unroll 8
    for (int j = 0; j < PAIR_WORDS / 2; j++) {
      vi we, wo;
      if (ahead)
        for (int line = 0; line < 2; line++) prefetch_row(RM_BF16, w, ahead, 2 * j + line);
      pair_rows(w, j, permuted, &we, &wo);
      for (int r = 0; r < R; r++) {
        even[r] = vp_dot(even[r], vi_set1((int32_t)x[r * PAIR_WORDS + j]), we);
        odd[r] = vp_dot(odd[r], vi_set1((int32_t)x[r * PAIR_WORDS + PAIR_WORDS / 2 + j]), wo);
      }
    }
    for (int r = 0; r < R; r++) add_to(acc + r * RM_N_TILE, even[r], odd[r]);
  }
}

VEC void pair_tile_dots_of(const int permuted, const uint32_t *x, int64_t rows, const uint16_t *w, int64_t n_blocks, float *acc,
                           int64_t ahead) {
  for (int64_t r = 0; r < rows;) {
    const int n = rows_at_once(rows - r);
    WITH_ROWS(n, pair_dots_rows(R, permuted, x + r * PAIR_WORDS, rows * PAIR_WORDS, w, n_blocks, acc + r * RM_N_TILE, ahead));
    r += n;
    ahead = 0;
  }
}

DOTS_FUNCTION void pair_tile_dots(const uint32_t *x, int64_t rows, const uint16_t *w, int64_t n_blocks, float *acc) {
  pair_tile_dots_of(0, x, rows, w, n_blocks, acc, PREFETCH);
}
DOTS_FUNCTION void permuted_tile_dots(const uint32_t *x, int64_t rows, const uint16_t *w, int64_t n_blocks, float *acc) {
  pair_tile_dots_of(1, x, rows, w, n_blocks, acc, 0);
}

VEC void permute_tiles(uint16_t *to, const uint16_t *w, int64_t n_tiles, const uint16_t *ahead) {
  for (int64_t i = 0; i < n_tiles * TILE; i += 4 * RM_N_TILE) {
    vec_prefetch(ahead + i);
    vec_prefetch(ahead + i + 2 * RM_N_TILE);
    vi even, odd;
    pair_rows(w + i, 0, 0, &even, &odd);
    vi_store(to + i, even);
    vi_store(to + i + 2 * RM_N_TILE, odd);
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
  uint16_t permuted[CHUNK_BLOCKS * TILE] __attribute__((aligned(64)));
  const int64_t chunk = rows < PERMUTE_ROWS ? n_blocks : CHUNK_BLOCKS;
  memset(acc, 0, (size_t)(n_tiles * rows * RM_N_TILE) * sizeof *acc);
  for (int64_t b = 0; b < n_blocks; b += chunk)
    for (int64_t t = 0; t < n_tiles; t++) {
      const int64_t n = rm_min64(chunk, n_blocks - b);
      const uint32_t *x = panel + b * rows * PAIR_WORDS;
      const uint16_t *from = w + (t * n_blocks + b) * TILE;
      float *to = acc + t * rows * RM_N_TILE;
      if (rows < PERMUTE_ROWS) {
        pair_tile_dots(x, rows, from, n, to);
        continue;
      }
      const int64_t ahead = t + 1 < n_tiles ? n_blocks : b + n < n_blocks ? n - t * n_blocks : n;  // the next column, piece, or group
      permute_tiles(permuted, from, n, from + ahead * TILE);
      permuted_tile_dots(x, rows, permuted, n, to);
    }
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

// panel_fma.h: a panel of rows times tile columns, by FMA on floats: used by avx2 and avx512f, and for float32 by all. bf16 activations are
// widened once per panel; bf16 weights in registers for few rows, and for many rows once into the L1 cache.
#pragma once

#include "dots.h"

enum {
  CHUNK_BLOCKS = 8, // k blocks of such a piece: 16 KB of widened weights, half an L1 cache
  WIDEN_ROWS = 10, // from here on widening pays, and arithmetic takes longer than reading the weights
};

VEC void fma_fill_panel(rm_dtype dtype, float *panel, const void *x, int64_t ldx, int64_t rows, int64_t k) {
  for (int64_t r = 0; r < rows; r++) fill_row(dtype, panel, rows, r, at(dtype, x, r * ldx), k);
}

// bf16 tiles as float tiles; meanwhile `ahead`, as many tiles, is on its way into the cache.
VEC void widen_tiles(float *to, const uint16_t *w, int64_t n_tiles, const uint16_t *ahead) {
  for (int64_t i = 0; i < n_tiles * TILE; i += 2 * RM_LANES) {
    vec_prefetch(ahead + i);
    const vi pairs = vi_load(w + i);
    vf_store(to + i, vf_even(pairs));
    vf_store(to + i + RM_LANES, vf_odd(pairs));
  }
}

// acc [n_tiles][rows][16] = panel · columns of n_tiles tiles that stand one after another from w.
VEC void fma_panel_dots(rm_dtype dtype, const float *panel, int64_t rows, const void *w, int64_t n_tiles, int64_t n_blocks, float *acc) {
  memset(acc, 0, (size_t)(n_tiles * rows * RM_N_TILE) * sizeof *acc);
  if (rows < WIDEN_ROWS) { // column by column, as they lie in memory
    const int64_t chunk = rows <= RM_VEC_ROWS ? n_blocks : CHUNK_BLOCKS;
    for (int64_t t = 0; t < n_tiles; t++)
      for (int64_t b = 0; b < n_blocks; b += chunk)
        tile_dots(dtype, panel + b * rows * RM_K_BLOCK, rows, at(dtype, w, (t * n_blocks + b) * TILE), rm_min64(chunk, n_blocks - b),
                  acc + t * rows * RM_N_TILE, PREFETCH);
    return;
  }
  float wide[CHUNK_BLOCKS * TILE] __attribute__((aligned(64)));
  for (int64_t b = 0; b < n_blocks; b += CHUNK_BLOCKS)
    for (int64_t t = 0; t < n_tiles; t++) {
      const int64_t tile = t * n_blocks + b, n = rm_min64(CHUNK_BLOCKS, n_blocks - b);
      const float *x = panel + b * rows * RM_K_BLOCK;
      float *to = acc + t * rows * RM_N_TILE;
      if (dtype == RM_F32) {
        tile_dots(RM_F32, x, rows, (const float *)w + tile * TILE, n, to, PREFETCH);
        continue;
      }
      const uint16_t *from = (const uint16_t *)w + tile * TILE;
      const int64_t ahead = t + 1 < n_tiles ? n_blocks : b + n < n_blocks ? n - t * n_blocks : n; // the next column, piece, or group
      widen_tiles(wide, from, n, from + ahead * TILE);
      tile_dots(RM_F32, x, rows, wide, n, to, 0);
    }
}

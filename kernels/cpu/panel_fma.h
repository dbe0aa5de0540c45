// panel_fma.h: a panel of rows times tile columns, by FMA on floats: used by avx2 and avx512f, and for float32 by all. bf16 activations are
// widened once per panel, bf16 weights in registers. And how a panel meets the weights, by whatever instruction:
//
// A piece of a tile column, CHUNK_BLOCKS long, meets all rows while it is in the L1 cache; meanwhile the piece behind it is fetched into
// the L2 cache, each register block of rows asking for its share of the lines. So memory and arithmetic do not wait for each other.
// Fewer than FEW_ROWS wait for memory anyway: what they read is fetched a KB ahead, into L1.
#pragma once

#include "dots.h"

enum {
  CHUNK_BLOCKS = 8,
  PANEL_BYTES = 256 << 10, // of a panel, k after k, that all tile columns meet before the next: part of an L2 cache
  FEW_ROWS = 4,
  NEAR = 1024,
  FAR = 8192, // bytes that a stream of weights is fetched ahead, for few rows and for more
};

// k blocks of a panel that stay in the cache, whole pieces.
VEC int64_t blocks_at_once(int64_t rows, int64_t row_bytes) {
  return rm_max64(1, PANEL_BYTES / (rows * row_bytes * CHUNK_BLOCKS)) * CHUNK_BLOCKS;
}

VEC fetch fetch_ahead(rm_dtype dtype, const void *w, int64_t rows) {
  return fetch_all(dtype, (const char *)w + (rows < FEW_ROWS ? NEAR : FAR), rows < FEW_ROWS);
}

VEC void fma_fill_panel(rm_dtype dtype, float *panel, const void *x, int64_t ldx, int64_t rows, int64_t k) {
  for (int64_t r = 0; r < rows; r++) fill_row(dtype, panel, rows, r, at(dtype, x, r * ldx), k);
}

// acc [n_tiles][rows][16] = panel · columns of n_tiles tiles that stand one after another from w.
VEC void fma_panel_dots(rm_dtype dtype, const float *panel, int64_t rows, const void *w, int64_t n_tiles, int64_t n_blocks, float *acc) {
  const int64_t span = blocks_at_once(rows, RM_K_BLOCK * (int64_t)sizeof *panel);
  memset(acc, 0, (size_t)(n_tiles * rows * RM_N_TILE) * sizeof *acc);
  for (int64_t b0 = 0; b0 < n_blocks; b0 += span)
    for (int64_t t = 0; t < n_tiles; t++)
      for (int64_t b = b0; b < rm_min64(b0 + span, n_blocks); b += CHUNK_BLOCKS) {
        const void *piece = at(dtype, w, (t * n_blocks + b) * TILE);
        const fetch soon = fetch_ahead(dtype, piece, rows);
        float *to = acc + t * rows * RM_N_TILE;
        tile_dots(dtype, panel + b * rows * RM_K_BLOCK, rows, piece, rm_min64(CHUNK_BLOCKS, n_blocks - b), to, &soon);
      }
}

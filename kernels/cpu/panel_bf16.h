// panel_bf16.h: a panel is of permuted pairs for vdpbf16ps, see pairs.h; float32 goes by FMA.
#pragma once

#include "pairs.h"

VEC void pair_panel_dots(const uint32_t *panel, int64_t rows, const uint16_t *w, int64_t n_tiles, int64_t n_blocks, float *acc) {
  const int64_t span = blocks_at_once(rows, PAIR_WORDS * (int64_t)sizeof *panel);
  memset(acc, 0, (size_t)(n_tiles * rows * RM_N_TILE) * sizeof *acc);
  for (int64_t b0 = 0; b0 < n_blocks; b0 += span)
    for (int64_t t = 0; t < n_tiles; t++)
      for (int64_t b = b0; b < rm_min64(b0 + span, n_blocks); b += CHUNK_BLOCKS) {
        const uint16_t *piece = w + (t * n_blocks + b) * TILE;
        const fetch soon = fetch_ahead(RM_BF16, piece, rows);
        float *to = acc + t * rows * RM_N_TILE;
        pair_tile_dots(panel + b * rows * PAIR_WORDS, rows, piece, rm_min64(CHUNK_BLOCKS, n_blocks - b), to, &soon);
      }
}

VEC void fill_panel(rm_dtype dtype, float *panel, const void *x, int64_t ldx, int64_t rows, int64_t k) {
  if (dtype == RM_F32) fma_fill_panel(dtype, panel, x, ldx, rows, k);
  else
    for (int64_t r = 0; r < rows; r++) pair_fill_row((uint32_t *)panel, rows, r, (const uint16_t *)x + r * ldx, k);
}

// acc [n_tiles][rows][16] = panel · columns of n_tiles tiles that stand one after another from w.
VEC void panel_dots(rm_dtype dtype, const float *panel, int64_t rows, const void *w, int64_t n_tiles, int64_t n_blocks, float *acc) {
  if (dtype == RM_BF16) pair_panel_dots((const uint32_t *)panel, rows, w, n_tiles, n_blocks, acc);
  else fma_panel_dots(dtype, panel, rows, w, n_tiles, n_blocks, acc);
}

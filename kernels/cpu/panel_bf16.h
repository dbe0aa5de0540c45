// panel_bf16.h: a panel of permuted pairs for vdpbf16ps, see pairs.h; float32 uses FMA.
#pragma once

#include "pairs.h"

VEC void fill_panel(rm_dtype dtype, float *panel, const void *x, int64_t ldx, int64_t rows,
                    int64_t k) {
  if (dtype == RM_F32) fma_fill_panel(dtype, panel, x, ldx, rows, k);
  else
    for (int64_t r = 0; r < rows; r++)
      pair_fill_row((uint32_t *)panel, rows, r, (const uint16_t *)x + r * ldx, k);
}

// acc [n_tiles][rows][16] = panel · the columns of n_tiles consecutive tiles from w.
VEC void panel_dots(rm_dtype dtype, const float *panel, int64_t rows, const void *w,
                    int64_t n_tiles, int64_t n_blocks, float *acc) {
  if (dtype == RM_BF16)
    pieces_dots(RM_BF16, pair_tile_dots, PAIR_WORDS, panel, rows, w, n_tiles, n_blocks, acc);
  else fma_panel_dots(dtype, panel, rows, w, n_tiles, n_blocks, acc);
}

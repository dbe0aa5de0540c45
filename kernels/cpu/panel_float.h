// panel_float.h: a panel is of floats for every dtype; see panel_fma.h.
#pragma once

#include "panel_fma.h"

VEC void fill_panel(rm_dtype dtype, float *panel, const void *x, int64_t ldx, int64_t rows, int64_t k) {
  fma_fill_panel(dtype, panel, x, ldx, rows, k);
}

// acc [n_tiles][rows][16] = panel · columns of n_tiles tiles that stand one after another from w.
VEC void panel_dots(rm_dtype dtype, const float *panel, int64_t rows, const void *w, int64_t n_tiles, int64_t n_blocks, float *acc) {
  fma_panel_dots(dtype, panel, rows, w, n_tiles, n_blocks, acc);
}

// panel_float.h: a panel of floats for every dtype; see panel_fma.h.
#pragma once

#include "panel_fma.h"

VEC void fill_panel(rm_dtype dtype, float *panel, const void *x, int64_t ldx, int64_t rows,
                    int64_t k) {
  fma_fill_panel(dtype, panel, x, ldx, rows, k);
}

// acc [n_tiles][rows][16] = panel · the columns of n_tiles consecutive tiles from w.
VEC void panel_dots(rm_dtype dtype, const float *panel, int64_t rows, const void *w,
                    int64_t n_tiles, int64_t n_blocks, float *acc) {
  fma_panel_dots(dtype, panel, rows, w, n_tiles, n_blocks, acc);
}

// -------------------------------------------------------------------- the products of attention.c
VEC void fill_query(rm_dtype dtype, float *panel, int64_t rows, int64_t r, const void *x,
                    int64_t k) {
  fill_row(dtype, panel, rows, r, x, k);
}
VEC void score_dots(rm_dtype dtype, const float *queries, int64_t rows, const void *keys,
                    int64_t n_blocks, float *p, const fetch *soon) {
  fma_score_dots(dtype, queries, rows, keys, n_blocks, p, soon);
}
VEC void store_probabilities(rm_dtype dtype, float *p, vf p0, vf p1) {
  fma_store_probabilities(dtype, p, p0, p1);
}
VEC void value_dots(rm_dtype dtype, const float *p, int64_t rows, const k_block *values,
                    int64_t n_tiles, float *acc, const fetch *soon) {
  fma_value_dots(dtype, p, rows, values, n_tiles, acc, soon);
}

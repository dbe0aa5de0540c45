// panel_fma.h: a panel of rows times tile columns, by FMA on floats: used by avx2 and avx512f, and
// for float32 by all. bf16 activations are widened once per panel, bf16 weights in registers. This
// file also has the loop over pieces of weights for any instruction (pieces_dots):
//
// All rows use a piece of a tile column while it is in the L1 cache. Meanwhile the next piece is
// fetched into the L2 cache; each register block of rows fetches its share of the lines. So memory
// and arithmetic overlap. Fewer than FEW_ROWS rows are limited by memory: their weights are fetched
// a KB ahead, into L1.
#pragma once

#include "dots.h"

enum {
  LONG_PIECE_BLOCKS = 8, // k blocks of a piece for one register block; for several RM_PIECE_BLOCKS
  PANEL_BYTES = 256 << 10, // part of a panel that all tile columns use in turn: fits the L2 cache
  FEW_ROWS = 4,
  NEAR = 1024, // bytes that weights are fetched ahead for few rows
};

// The k blocks of a panel that stay in the cache, rounded to whole pieces.
VEC int64_t blocks_at_once(int64_t rows, int64_t row_bytes, int64_t piece) {
  return rm_max64(1, PANEL_BYTES / (rows * row_bytes * piece)) * piece;
}

VEC fetch fetch_near(rm_dtype dtype, const void *w) {
  return fetch_all(dtype, (const char *)w + NEAR, 1);
}

VEC void fma_fill_panel(rm_dtype dtype, float *panel, const void *x, int64_t ldx, int64_t rows,
                        int64_t k) {
  for (int64_t r = 0; r < rows; r++) fill_row(dtype, panel, rows, r, at(dtype, x, r * ldx), k);
}

// Adds the products of a piece for all rows.
typedef void (*piece_dots)(const float *panel, int64_t rows, const void *w, int64_t n_blocks,
                           float *acc, const fetch *soon);

// acc [n_tiles][rows][16] = panel · the columns of n_tiles consecutive tiles from w; a row's block
// has `words` words in the panel.
VEC void pieces_dots(rm_dtype dtype, piece_dots dots, int64_t words, const float *panel,
                     int64_t rows, const void *w, int64_t n_tiles, int64_t n_blocks, float *acc) {
  const int64_t piece = rows <= RM_LAST_ROWS ? LONG_PIECE_BLOCKS : RM_PIECE_BLOCKS;
  const int64_t span = blocks_at_once(rows, words * (int64_t)sizeof *panel, piece);
  memset(acc, 0, (size_t)(n_tiles * rows * RM_N_TILE) * sizeof *acc);
  for (int64_t b0 = 0; b0 < n_blocks; b0 += span) {
    const int64_t b1 = rm_min64(b0 + span, n_blocks),
                  skip = b1 < n_blocks ? b1 : n_tiles * n_blocks;
    for (int64_t t = 0; t < n_tiles; t++)
      for (int64_t b = b0; b < b1; b += piece) {
        const int64_t here = t * n_blocks + b,
                      below = b + piece < b1 ? here + piece : here - b + b0 + n_blocks;
        const int64_t next = below < n_tiles * n_blocks ? below : skip;
        const void *from = at(dtype, w, here * TILE);
        const fetch soon = rows < FEW_ROWS ? fetch_near(dtype, from)
                                           : fetch_all(dtype, at(dtype, w, next * TILE), 0);
        dots(panel + b * rows * words, rows, from, rm_min64(piece, n_blocks - b),
             acc + t * rows * RM_N_TILE, &soon);
      }
  }
}

VEC void fma_panel_dots(rm_dtype dtype, const float *panel, int64_t rows, const void *w,
                        int64_t n_tiles, int64_t n_blocks, float *acc) {
  if (dtype == RM_BF16)
    pieces_dots(dtype, tile_dots_bf16, RM_K_BLOCK, panel, rows, w, n_tiles, n_blocks, acc);
  else pieces_dots(dtype, tile_dots_f32, RM_K_BLOCK, panel, rows, w, n_tiles, n_blocks, acc);
}

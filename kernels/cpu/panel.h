// panel.h: the products of gemm, lm_head and attention: a panel of rows times 16 columns at a time.
//
// A panel is [k block][row][block_words]. The build's RM_PANEL_HEADER defines its form and the
// product of a register block of rows with one k block: floats for FMA, permuted pairs for
// vdpbf16ps, bf16 for AMX, which also has its own products. In each the sums are those of
// docs/numerics.md §2 and §4.
//
// Except by AMX, all rows use a piece of a tile column while it is in the L1 cache. Meanwhile the
// next piece is fetched into the L2 cache; each register block of rows fetches its share of the
// lines. So memory and arithmetic overlap. Fewer than FEW_ROWS rows are limited by memory: their
// weights are fetched RM_FETCH_AHEAD bytes ahead, into L1.
#pragma once

#include "vec.h"

enum {
  PANEL_ROWS = 96, // rows that share a pass over the weights; a panel should fit the L2 cache
  PANEL_TILES = 8, // tile columns of one panel_dots
  LONG_PIECE_BLOCKS = 8, // k blocks of a piece for one register block; for several RM_PIECE_BLOCKS
  PANEL_BYTES = 256 << 10, // part of a panel that all tile columns use in turn: fits the L2 cache
  FEW_ROWS = 4,
};

// Rows that a product reads: a panel, or x itself. The steps are in elements, for bf16 by AMX.
typedef struct panel_rows {
  const void *rows;
  int64_t row_step, block_step;
} panel_rows;

#include RM_PANEL_HEADER

// Called before and after the products of attention with panels of `rows` rows.
VEC void begin_products(rm_dtype dtype, int64_t rows) {
#ifdef RM_TILES
  if (dtype == RM_BF16) configure_tiles(rows);
#endif
  (void)dtype, (void)rows;
}
VEC void end_products(rm_dtype dtype) {
#ifdef RM_TILES
  if (dtype == RM_BF16) _tile_release();
#endif
  (void)dtype;
}

// Floats of one thread's workspace: a panel, and the sums of its rows.
static inline int64_t dots_floats(int64_t k) {
  return PANEL_ROWS * (rm_round_up(k, RM_K_BLOCK) + PANEL_TILES * RM_N_TILE);
}

// Copies one row x[0 … k) into row r of a panel of `rows` rows, with +0 after k.
VEC void fill_row(rm_dtype dtype, float *panel, int64_t rows, int64_t r, const void *x, int64_t k) {
  for (int64_t i = 0; i < k; i += RM_K_BLOCK)
    fill_block(dtype, panel + (i / RM_K_BLOCK * rows + r) * block_words(dtype), rm_at(dtype, x, i),
               k - i);
}

// ------------------------------------------------------------------------ products with 16 columns
_Static_assert(RM_VEC_ROWS <= RM_LAST_ROWS && (int)RM_LAST_ROWS <= (int)MOST_ROWS,
               "WITH_ROWS names every size of a register block");

// Calls `call` with R, the rows of a register block, as a constant.
#define ROWS_CASE(n, call) \
  case n: { \
    enum { R = n }; \
    call; \
    break; \
  }
#define WITH_ROWS(n, call) \
  switch ((n) <= RM_LAST_ROWS ? (n) : RM_LAST_ROWS) { \
    ROWS_CASE(1, call) \
    ROWS_CASE(2, call) \
    ROWS_CASE(3, call) \
    ROWS_CASE(4, call) \
    ROWS_CASE(5, call) \
    ROWS_CASE(6, call) \
    ROWS_CASE(7, call) \
    ROWS_CASE(8, call) \
  }

// Rows of the next register block when `left` rows are left: full blocks, but never a block of one
// row at the end.
VEC int rows_at_once(int64_t left) {
  if (left <= RM_LAST_ROWS) return (int)left;
  return left < 2 * RM_VEC_ROWS ? (int)((left + 1) / 2) : RM_VEC_ROWS;
}

VEC void rows_products(rm_dtype dtype, const int R, const float *x, int64_t rows, k_block w,
                       float *acc, const products p, const fetch f0, const fetch f1) {
  for (int64_t t = 0; t < p.n_columns; t++, acc += rows * RM_LANES) {
    float kept[MOST_ROWS * RM_LANES], *sums = RM_KEEP_SUMS ? kept : acc;
    for (int i = 0; i < R * RM_LANES; i += RM_LANES) vf_store(sums + i, vf_load(acc + i));
    for (int64_t b = 0; b < p.n_blocks; b++, x += p.x_step) {
      fetch_block(&f0, t + b);
      fetch_block(&f1, t + b);
      block_dots(dtype, R, x, &w, sums);
      for (int half = 0; half < 2; half++) w.half[half] = rm_at(dtype, w.half[half], p.w_step);
    }
    for (int i = 0; i < R * RM_LANES; i += RM_LANES) vf_store(acc + i, vf_load(sums + i));
  }
}

VEC void all_products(rm_dtype dtype, const float *x, int64_t rows, k_block w, float *acc,
                      const products p, const fetch f0, const fetch f1) {
#ifdef RM_TILES
  if (dtype == RM_BF16) {
    tile_products((const uint16_t *)x, rows, w, acc, p, f0, f1);
    return;
  }
#endif
  for (int64_t r = 0; r < rows;) {
    const int n = rows_at_once(rows - r);
    const float *xr = x + r * block_words(dtype);
    float *to = acc + r * RM_LANES;
    const fetch s0 = fetch_share(f0, r, n, rows), s1 = fetch_share(f1, r, n, rows);
    WITH_ROWS(n, rows_products(dtype, R, xr, rows, w, to, p, s0, s1));
    r += n;
  }
}

// tile_dots: acc [rows][16] += x · a tile column of n_blocks k blocks, which are adjacent in the
// panel and in w. value_dots: acc [n_tiles][rows][16] += x · one k block of n_tiles adjacent tile
// columns; soon[0] and soon[1] fetch the two halves of the next block, tile by tile.
//
// One function for each dtype in a source, called once for tens of thousands of multiplications.
// Rejected: inlining every size of a register block into every caller, because it takes ten times
// as long to compile and is not faster.
#define DOTS_FUNCTION static __attribute__((noinline, unused))
#define DOTS(name, dtype) \
  DOTS_FUNCTION void tile_dots_##name(const float *x, int64_t rows, const void *w, \
                                      int64_t n_blocks, float *acc, const fetch *soon) { \
    const products p = {1, n_blocks, rows * block_words(dtype), TILE}; \
    all_products(dtype, x, rows, packed_block(dtype, w), acc, p, *soon, (fetch){0}); \
  } \
  DOTS_FUNCTION void value_dots_##name(const float *x, int64_t rows, const k_block *w, \
                                       int64_t n_tiles, float *acc, const fetch *soon) { \
    const products p = {n_tiles, 1, 0, packed_step(dtype)}; \
    all_products(dtype, x, rows, *w, acc, p, soon[0], soon[1]); \
  }
DOTS(bf16, RM_BF16)
DOTS(f32, RM_F32)
#define tile_dots(dtype, ...) ((dtype) == RM_BF16 ? tile_dots_bf16 : tile_dots_f32)(__VA_ARGS__)
#define value_dots(dtype, ...) ((dtype) == RM_BF16 ? value_dots_bf16 : value_dots_f32)(__VA_ARGS__)

// -------------------------------------------------------------------------------- gemm and lm_head
VEC panel_rows fill_panel(rm_dtype dtype, float *memory, const void *x, int64_t ldx, int64_t rows,
                          int64_t k) {
#ifdef RM_TILES
  if (dtype == RM_BF16 && are_whole_tiles(rows, k)) return (panel_rows){x, ldx, RM_K_BLOCK};
#endif
  for (int64_t r = 0; r < rows; r++) fill_row(dtype, memory, rows, r, rm_at(dtype, x, r * ldx), k);
  return (panel_rows){memory, RM_K_BLOCK, rows * RM_K_BLOCK};
}

// acc [n_tiles][rows][16] = x · the columns of n_tiles consecutive tiles from w.
VEC void panel_dots(rm_dtype dtype, const panel_rows x, int64_t rows, const void *w,
                    int64_t n_tiles, int64_t n_blocks, float *acc) {
#ifdef RM_TILES
  if (dtype == RM_BF16) {
    tile_panel_dots(x, rows, w, n_tiles, n_blocks, acc);
    return;
  }
#endif
  const float *panel = x.rows;
  const int64_t words = rows * block_words(dtype);
  const int64_t piece = rows <= RM_LAST_ROWS ? LONG_PIECE_BLOCKS : RM_PIECE_BLOCKS;
  // The k blocks of the panel that stay in the cache, in whole pieces.
  const int64_t piece_bytes = words * piece * (int64_t)sizeof *panel,
                span = rm_max64(1, PANEL_BYTES / piece_bytes) * piece;
  memset(acc, 0, (size_t)(n_tiles * rows * RM_N_TILE) * sizeof *acc);
  for (int64_t b0 = 0; b0 < n_blocks; b0 += span) {
    const int64_t b1 = rm_min64(b0 + span, n_blocks),
                  skip = b1 < n_blocks ? b1 : n_tiles * n_blocks;
    for (int64_t t = 0; t < n_tiles; t++)
      for (int64_t b = b0; b < b1; b += piece) {
        const int64_t here = t * n_blocks + b,
                      below = b + piece < b1 ? here + piece : here - b + b0 + n_blocks;
        const int64_t next = below < n_tiles * n_blocks ? below : skip;
        const void *from = rm_at(dtype, w, here * TILE);
        const fetch soon = rows < FEW_ROWS ? fetch_near(dtype, from)
                                           : fetch_all(dtype, rm_at(dtype, w, next * TILE), 0);
        tile_dots(dtype, panel + b * words, rows, from, rm_min64(piece, n_blocks - b),
                  acc + t * rows * RM_N_TILE, &soon);
      }
  }
}

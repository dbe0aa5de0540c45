// dots.h: the dot product of docs/numerics.md §2 for blocks of rows × one tile of 16 packed
// columns, the inner loop of gemm, lm_head and attention. Rows come from a panel of floats [k
// block][row][32], so that a bf16 activation is widened once and not once per tile, and every
// operand of a register block has a constant offset from one pointer. Weights are widened in
// registers: odd k by a mask, even k by a shift or, on AVX2, by a mask of the words one place to
// the left.
//
// There are two inner loops with the same sums. With more than RM_FLAT_ROWS rows, the loop takes
// the 16 even steps first, then the 16 odd ones: rows × 2 registers hold the chains and each weight
// vector is used for every row. With fewer rows it keeps both chains in flight, to hide the latency
// of FMA; the processor overlaps one k block with the next, since each block begins new chains, and
// a decode step runs at the rate of memory. Rejected: two blocks side by side by hand, because it
// is a third slower.
//
// A chain begins with a product, not with fma from +0, which would need a register of zeros. So a
// chain of zeros may end as −0. Stored values cannot differ, since round_T and canonical float32
// add +0, and exp(−0) is exp(+0).
#pragma once

#include "vec.h"

enum {
  TILE = RM_N_TILE * RM_K_BLOCK, // elements of a tile: 16 columns of one k block
  LINE = 64, // bytes of a cache line
  MOST_ROWS = 8, // of a register block, on any instruction set
};

// A k block of 16 columns in memory: packed tiles, or V, whose rows of pairs are `step` elements
// apart, with 16 positions in `half[0]` and 16 in `half[1]` (which may be in different pages).
typedef struct k_block {
  const void *half[2];
  int64_t step; // elements between pairs of k (bf16) or between single k (f32)
} k_block;

VEC vf even_of(rm_dtype dtype, const k_block *w, int p) {
  if (dtype == RM_BF16)
    return vf_even_at((const uint16_t *)w->half[p / 8] + p % 8 * w->step, p % 8 > 0);
  return vf_load((const float *)w->half[p / 8] + (p % 8 * 2) * w->step);
}
VEC vf odd_of(rm_dtype dtype, const k_block *w, int p) {
  if (dtype == RM_BF16) return vf_odd(vi_load((const uint16_t *)w->half[p / 8] + p % 8 * w->step));
  return vf_load((const float *)w->half[p / 8] + (p % 8 * 2 + 1) * w->step);
}
VEC k_block packed_block(rm_dtype dtype, const void *w) {
  return (k_block){{w, at(dtype, w, TILE / 2)}, dtype == RM_BF16 ? 2 * RM_N_TILE : RM_N_TILE};
}
VEC int64_t tile_bytes(rm_dtype dtype) { return TILE * (dtype == RM_BF16 ? 2 : 4); }

// Cache lines to fetch during a loop over blocks: `lines` lines for each block, `block` bytes
// apart.
typedef struct fetch {
  const char *from;
  int64_t block, lines;
  int near; // into the L1 cache; else into L2
} fetch;

VEC fetch fetch_lines(const void *from, int64_t block, int near) {
  return (fetch){(const char *)from, block, block / LINE, near};
}
VEC fetch fetch_all(rm_dtype dtype, const void *from, int near) {
  return fetch_lines(from, tile_bytes(dtype), near);
}
// The part of the lines that rows [r, r + n) of `rows` fetch. Fetches are spread evenly, since a
// processor has only a few memory requests in flight.
VEC fetch fetch_share(fetch f, int64_t r, int64_t n, int64_t rows) {
  const int64_t first = f.lines * r / rows;
  return (fetch){f.from + first * LINE, f.block, f.lines * (r + n) / rows - first, f.near};
}
VEC void fetch_block(const fetch *f, int64_t b) {
  for (int64_t i = 0; i < f->lines; i++) {
    const char *line = f->from + b * f->block + i * LINE;
    if (f->near) vec_prefetch(line);
    else vec_prefetch_l2(line);
  }
}

// Step p of a chain for one row; x points to that step's element.
VEC vf step_of(const int p, const float *x, vf w, vf chain) {
  return p == 0 ? vf_mul_at(x, w) : vf_fma_at(x, w, chain);
}

VEC void add_to(float *acc, vf even, vf odd) { vf_add_to(acc, vf_add(even, odd)); }

// acc[r][0 … 16) += E + O of one k block, for R rows of x [R][32], even steps before odd ones. lda
// and R are constants.
VEC void block_tall(rm_dtype dtype, const int R, const float *x, const k_block *w, float *acc,
                    const int lda) {
  vf chain[MOST_ROWS];
  float even[MOST_ROWS][RM_LANES];
#pragma GCC unroll 16
  for (int p = 0; p < 16; p++) {
    const vf wv = even_of(dtype, w, p);
    for (int r = 0; r < R; r++) chain[r] = step_of(p, x + r * RM_K_BLOCK + 2 * p, wv, chain[r]);
  }
  for (int r = 0; r < R; r++) vf_store(even[r], chain[r]);
#pragma GCC unroll 16
  for (int p = 0; p < 16; p++) {
    const vf wv = odd_of(dtype, w, p);
    for (int r = 0; r < R; r++) chain[r] = step_of(p, x + r * RM_K_BLOCK + 2 * p + 1, wv, chain[r]);
  }
  for (int r = 0; r < R; r++) add_to(acc + r * lda, vf_load(even[r]), chain[r]);
}

// The same sums with both chains in flight.
VEC void block_flat(rm_dtype dtype, const int R, const float *x, const k_block *w, float *acc,
                    const int lda) {
  vf even[MOST_ROWS], odd[MOST_ROWS];
#pragma GCC unroll 16
  for (int p = 0; p < 16; p++) {
    const vf we = even_of(dtype, w, p);
    for (int r = 0; r < R; r++) even[r] = step_of(p, x + r * RM_K_BLOCK + 2 * p, we, even[r]);
    const vf wo = odd_of(dtype, w, p);
    for (int r = 0; r < R; r++) odd[r] = step_of(p, x + r * RM_K_BLOCK + 2 * p + 1, wo, odd[r]);
  }
  for (int r = 0; r < R; r++) add_to(acc + r * lda, even[r], odd[r]);
}

VEC void block_rows(rm_dtype dtype, const int R, const float *x, const k_block *w, float *acc,
                    const int lda) {
  if (R <= RM_FLAT_ROWS) block_flat(dtype, R, x, w, acc, lda);
  else block_tall(dtype, R, x, w, acc, lda);
}

// All blocks of a tile column; blocks of x are `next` floats apart.
VEC void rows_dots(rm_dtype dtype, const int R, const float *x, int64_t next, const void *w,
                   int64_t n_blocks, float *acc, const int lda, const fetch f) {
  for (int64_t b = 0; b < n_blocks; b++, x += next) {
    const k_block block = packed_block(dtype, at(dtype, w, b * TILE));
    fetch_block(&f, b);
    block_rows(dtype, R, x, &block, acc, lda);
  }
}

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

// acc[r][0 … 16) += x[r] · 16 columns over n_blocks blocks, for any number of rows. x points to a
// block of a panel.
VEC void tile_dots_of(rm_dtype dtype, const float *x, int64_t rows, const void *w, int64_t n_blocks,
                      float *acc, const int lda, const fetch *soon) {
  const int64_t next = rows * RM_K_BLOCK;
  for (int64_t r = 0; r < rows;) {
    const int n = rows_at_once(rows - r);
    const float *xr = x + r * RM_K_BLOCK;
    float *to = acc + r * lda;
    WITH_ROWS(n,
              rows_dots(dtype, R, xr, next, w, n_blocks, to, lda, fetch_share(*soon, r, n, rows)));
    r += n;
  }
}

// One function for each dtype and row stride of acc in a source, called once for tens of thousands
// of multiplications. Rejected: inlining every size of a register block into every caller, because
// it takes ten times as long to compile and is not faster.
#define DOTS_FUNCTION static __attribute__((noinline, unused))
#define TILE_DOTS(name, dtype, lda) \
  DOTS_FUNCTION void name(const float *x, int64_t rows, const void *w, int64_t n_blocks, \
                          float *acc, const fetch *soon) { \
    tile_dots_of(dtype, x, rows, w, n_blocks, acc, lda, soon); \
  }
TILE_DOTS(tile_dots_bf16, RM_BF16, RM_N_TILE)
TILE_DOTS(tile_dots_f32, RM_F32, RM_N_TILE)
TILE_DOTS(fma_score_dots_bf16, RM_BF16, RM_ATTN_BLOCK)
TILE_DOTS(fma_score_dots_f32, RM_F32, RM_ATTN_BLOCK)

// Scores of attention: acc is [rows][32], and w's 16 columns are one half of it.
VEC void fma_score_dots(rm_dtype dtype, const float *x, int64_t rows, const void *w,
                        int64_t n_blocks, float *acc, const fetch *soon) {
  if (dtype == RM_BF16) fma_score_dots_bf16(x, rows, w, n_blocks, acc, soon);
  else fma_score_dots_f32(x, rows, w, n_blocks, acc, soon);
}

// p·V: one k block times n_tiles adjacent tile columns. acc is [tile][rows][16], its tiles `next`
// floats apart. f0 and f1 fetch the two halves of the next block, tile by tile.
VEC void columns_dots(rm_dtype dtype, const int R, const float *x, k_block w, int64_t n_tiles,
                      float *acc, int64_t next, const fetch f0, const fetch f1) {
  const int64_t beside = dtype == RM_BF16 ? 2 * RM_N_TILE : RM_N_TILE;
  for (int64_t t = 0; t < n_tiles; t++, acc += next) {
    fetch_block(&f0, t);
    fetch_block(&f1, t);
    block_rows(dtype, R, x, &w, acc, RM_LANES);
    for (int half = 0; half < 2; half++) w.half[half] = at(dtype, w.half[half], beside);
  }
}

VEC void value_dots_of(rm_dtype dtype, const float *x, int64_t rows, const k_block *w,
                       int64_t n_tiles, float *acc, const fetch *soon) {
  const int64_t next = rows * RM_LANES;
  for (int64_t r = 0; r < rows;) {
    const int n = rows_at_once(rows - r);
    const float *xr = x + r * RM_K_BLOCK;
    float *to = acc + r * RM_LANES;
    const fetch f0 = fetch_share(soon[0], r, n, rows), f1 = fetch_share(soon[1], r, n, rows);
    WITH_ROWS(n, columns_dots(dtype, R, xr, *w, n_tiles, to, next, f0, f1));
    r += n;
  }
}
DOTS_FUNCTION void fma_value_dots_bf16(const float *x, int64_t rows, const k_block *w,
                                       int64_t n_tiles, float *acc, const fetch *soon) {
  value_dots_of(RM_BF16, x, rows, w, n_tiles, acc, soon);
}
DOTS_FUNCTION void fma_value_dots_f32(const float *x, int64_t rows, const k_block *w,
                                      int64_t n_tiles, float *acc, const fetch *soon) {
  value_dots_of(RM_F32, x, rows, w, n_tiles, acc, soon);
}
VEC void fma_value_dots(rm_dtype dtype, const float *x, int64_t rows, const k_block *w,
                        int64_t n_tiles, float *acc, const fetch *soon) {
  if (dtype == RM_BF16) fma_value_dots_bf16(x, rows, w, n_tiles, acc, soon);
  else fma_value_dots_f32(x, rows, w, n_tiles, acc, soon);
}

// Stores a query's probabilities of one block in the form that fma_value_dots reads.
VEC void fma_store_probabilities(rm_dtype dtype, float *p, vf p0, vf p1) {
  vf_store(p, dtype == RM_BF16 ? vf_to_bf16(p0) : p0);
  vf_store(p + RM_LANES, dtype == RM_BF16 ? vf_to_bf16(p1) : p1);
}

// Widens one row x[0 … k) into row r of a panel of `rows` rows, with +0 after k.
VEC void fill_row(rm_dtype dtype, float *panel, int64_t rows, int64_t r, const void *x, int64_t k) {
  float *to = panel + r * RM_K_BLOCK;
  for (int64_t i = 0; i < k; i += RM_K_BLOCK, to += rows * RM_K_BLOCK) {
    const int64_t second = i + RM_LANES;
    vf_store(to, vt_load_n(dtype, x, i, k - i));
    vf_store(to + RM_LANES, second < k ? vt_load_n(dtype, x, second, k - second) : vf_zero());
  }
}

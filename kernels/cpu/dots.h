// dots.h: the dot product of docs/numerics.md §2 for a register block of rows × one k block of 16
// columns, by FMA: the innermost loop of gemm, lm_head and attention. Rows are a panel of floats [k
// block][row][32] (panel.h), so that a bf16 activation is widened once and not once per tile, and
// every operand of a register block has a constant offset from one pointer. Weights are widened in
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

// Step p of the even chain, or of the odd one.
VEC vf weights_of(rm_dtype dtype, const k_block *w, int p, const int odd) {
  const void *half = w->half[p / 8];
  if (dtype == RM_F32) return vf_load((const float *)half + (p % 8 * 2 + odd) * w->step);
  const uint16_t *pairs = (const uint16_t *)half + p % 8 * w->step;
  return odd ? vf_odd(vi_load(pairs)) : vf_even_at(pairs, p % 8 > 0);
}
// Products of rows with n_columns tile columns of n_blocks k blocks each, one column after the
// other. One of the two numbers is 1. The steps of x are in words, those of w in elements.
typedef struct products {
  int64_t n_columns, n_blocks, x_step, w_step;
} products;

// Elements between pairs of k in a packed tile, and between the tile columns of V.
VEC int64_t packed_step(rm_dtype dtype) { return dtype == RM_BF16 ? 2 * RM_N_TILE : RM_N_TILE; }
VEC k_block packed_block(rm_dtype dtype, const void *w) {
  return (k_block){{w, rm_at(dtype, w, TILE / 2)}, packed_step(dtype)};
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
VEC fetch fetch_near(rm_dtype dtype, const void *w) {
  return fetch_all(dtype, (const char *)w + RM_FETCH_AHEAD, 1);
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
    if (f->near) _mm_prefetch(line, _MM_HINT_T0);
    else _mm_prefetch(line, _MM_HINT_T1);
  }
}

// Step p of a chain for one row; x points to that step's element.
VEC vf step_of(const int p, const float *x, vf w, vf chain) {
  return p == 0 ? vf_mul_at(x, w) : vf_fma_at(x, w, chain);
}

VEC void add_to(float *acc, vf even, vf odd) { vf_add_to(acc, vf_add(even, odd)); }

// acc[r][0 … 16) += E + O of one k block, for R rows of x [R][32], even steps before odd ones. R is
// a constant.
VEC void block_tall(rm_dtype dtype, const int R, const float *x, const k_block *w, float *acc) {
  vf chain[MOST_ROWS];
  float even[MOST_ROWS][RM_LANES];
#pragma GCC unroll 16
  for (int p = 0; p < 16; p++) {
    const vf wv = weights_of(dtype, w, p, 0);
    for (int r = 0; r < R; r++) chain[r] = step_of(p, x + r * RM_K_BLOCK + 2 * p, wv, chain[r]);
  }
  for (int r = 0; r < R; r++) vf_store(even[r], chain[r]);
#pragma GCC unroll 16
  for (int p = 0; p < 16; p++) {
    const vf wv = weights_of(dtype, w, p, 1);
    for (int r = 0; r < R; r++) chain[r] = step_of(p, x + r * RM_K_BLOCK + 2 * p + 1, wv, chain[r]);
  }
  for (int r = 0; r < R; r++) add_to(acc + r * RM_LANES, vf_load(even[r]), chain[r]);
}

// The same sums with both chains in flight.
VEC void block_flat(rm_dtype dtype, const int R, const float *x, const k_block *w, float *acc) {
  vf even[MOST_ROWS], odd[MOST_ROWS];
#pragma GCC unroll 16
  for (int p = 0; p < 16; p++) {
    const vf we = weights_of(dtype, w, p, 0);
    for (int r = 0; r < R; r++) even[r] = step_of(p, x + r * RM_K_BLOCK + 2 * p, we, even[r]);
    const vf wo = weights_of(dtype, w, p, 1);
    for (int r = 0; r < R; r++) odd[r] = step_of(p, x + r * RM_K_BLOCK + 2 * p + 1, wo, odd[r]);
  }
  for (int r = 0; r < R; r++) add_to(acc + r * RM_LANES, even[r], odd[r]);
}

VEC void fma_block(rm_dtype dtype, const int R, const float *x, const k_block *w, float *acc) {
  if (R <= RM_FLAT_ROWS) block_flat(dtype, R, x, w, acc);
  else block_tall(dtype, R, x, w, acc);
}

// Widens the first n of 32 elements, all of them if n ≥ 32; the others are +0.
VEC void fma_fill(rm_dtype dtype, float *to, const void *x, int64_t n) {
  vf_store(to, vt_load_n(dtype, x, 0, n));
  vf_store(to + RM_LANES, n > RM_LANES ? vt_load_n(dtype, x, RM_LANES, n - RM_LANES) : vf_zero());
}

// The probabilities of one query and block, as a row of a panel.
VEC void fma_probabilities(rm_dtype dtype, float *p, vf p0, vf p1) {
  vf_store(p, vt_round(dtype, p0));
  vf_store(p + RM_LANES, vt_round(dtype, p1));
}

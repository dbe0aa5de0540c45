// panel_amx.h: the bf16 products of gemm, lm_head and attention by AMX. One tdpbf16ps is one block
// of the contract for 16 rows × 16 columns: it sums the even k and the odd k in chains from +0 and
// adds their sum to the accumulator. Its second operand is a packed tile of weights or a block of
// keys or values, which is loaded without conversion. Prefill and decode share the code: up to 16
// rows cost as much as one, so decode runs at the rate of memory. float32 uses FMA.
//
// The panel is [k block][row][32] bf16; whole tiles are loaded from x itself. With fewer than 16
// rows, tiles have that many rows. Otherwise the last tile of a panel may read past the last row;
// the sums of these rows are not stored. Tiles are configured and released in each panel_dots of
// gemm and lm_head and in each unit of attention, because a configured tile state is saved at every
// context switch. This takes some hundred of the thousands of cycles of such a call.
#pragma once

#include "dots.h"

#define RM_TILES // panel.h uses tile_products and tile_panel_dots for bf16

enum { TILE_ROWS = 16 };

// Whether the tiles of these rows are loaded from x itself, without a panel.
VEC int are_whole_tiles(int64_t rows, int64_t k) {
  return k % RM_K_BLOCK == 0 && (rows < TILE_ROWS || rows % TILE_ROWS == 0);
}

VEC int64_t block_words(rm_dtype dtype) { return dtype == RM_BF16 ? RM_K_BLOCK / 2 : RM_K_BLOCK; }
#define block_dots fma_block
VEC void fill_block(rm_dtype dtype, float *to, const void *x, int64_t n) {
  uint16_t block[RM_K_BLOCK] = {0};
  if (dtype == RM_F32) fma_fill(dtype, to, x, n);
  else vi_store(to, vi_load(n >= RM_K_BLOCK ? x : memcpy(block, x, (size_t)n * sizeof *block)));
}
VEC void store_probabilities(rm_dtype dtype, float *p, vf p0, vf p1) {
  if (dtype == RM_BF16) vi_store(p, vp_round(p0, p1));
  else fma_probabilities(dtype, p, p0, p1);
}

typedef struct tile_config { // palette 1, the operand of ldtilecfg
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
} tile_config;

// Tiles 0 … 3: sums [row tile][column tile]; 4 and 5: rows of the panel; 6 and 7: weights.
VEC void configure_tiles(int64_t rows) {
  tile_config config = {.palette = 1};
  for (int i = 0; i < 8; i++) {
    config.row_bytes[i] = 64;
    config.rows[i] = (uint8_t)(i < 6 ? rm_min64(rows, TILE_ROWS) : RM_K_BLOCK / 2);
  }
  // gcc's intrinsic declares only 8 bytes as read, and its tile loads none.
  __asm__ volatile("" : : "r"(&config) : "memory");
  _tile_loadconfig(&config);
}

// gcc's intrinsics do not declare that a load of a tile reads memory. Before a load, this makes the
// compiler complete all stores.
#define STORE_BEFORE_LOADS() __asm__ volatile("" : : : "memory")

// Stores the sums of one tile to acc [rows][16], of which only `left` rows exist.
#define STORE_SUMS(tile, acc, left) \
  do { \
    float sums[TILE_ROWS * RM_N_TILE] __attribute__((aligned(64))); \
    if ((left) >= TILE_ROWS) { \
      _tile_stored(tile, acc, 64); \
    } else { \
      _tile_stored(tile, sums, 64); \
      memcpy(acc, sums, (size_t)((left) * RM_N_TILE) * sizeof *sums); \
    } \
  } while (0)

// acc [n_columns][rows][16] += x · k blocks, like all_products (panel.h), with configured tiles.
VEC void tile_products(const uint16_t *x, int64_t rows, const k_block w, float *acc,
                       const products p, const fetch f0, const fetch f1) {
  uint16_t both[TILE] __attribute__((aligned(64)));
  const uint16_t *half[2] = {w.half[0], w.half[1]};
  const int adjacent = half[1] == half[0] + RM_K_BLOCK / 4 * w.step;
  for (int64_t row = 0; row < rows; row += 2 * TILE_ROWS)
    for (int64_t t = 0; t < p.n_columns; t++) {
      const int two = rows - row > TILE_ROWS;
      float *to = acc + (t * rows + row) * RM_N_TILE, *below = to + TILE_ROWS * RM_N_TILE;
      STORE_BEFORE_LOADS();
      _tile_loadd(0, to, 64);
      if (two) _tile_loadd(2, below, 64);
      for (int64_t b = 0; b < p.n_blocks; b++) {
        const uint16_t *from = half[0] + (t + b) * p.w_step,
                       *rows_at = x + 2 * b * p.x_step + row * RM_K_BLOCK;
        for (int i = 0; i < RM_K_BLOCK / 2 && !adjacent; i++)
          vi_store(both + i * RM_K_BLOCK,
                   vi_load(half[i / 8] + (t + b) * p.w_step + i % 8 * w.step));
        STORE_BEFORE_LOADS();
        if (row == 0) fetch_block(&f0, t + b);
        if (row == 0) fetch_block(&f1, t + b);
        _tile_loadd(4, rows_at, 64);
        if (adjacent) _tile_loadd(6, from, 2 * w.step);
        else _tile_loadd(6, both, 64);
        _tile_dpbf16ps(0, 4, 6);
        if (!two) continue;
        _tile_loadd(5, rows_at + TILE_ROWS * RM_K_BLOCK, 64);
        _tile_dpbf16ps(2, 5, 6);
      }
      STORE_SUMS(0, to, rows - row);
      if (two) STORE_SUMS(2, below, rows - row - TILE_ROWS);
    }
}

// The products of M row tiles and N tile columns, each 1 or 2: rows from `row` on times the columns
// at w and, n_blocks tiles later, at the next one.
VEC void tile_block(const int M, const int N, const panel_rows x, int64_t rows, int64_t row,
                    const uint16_t *w, int64_t n_blocks, float *acc, const fetch *soon) {
  const int64_t column = n_blocks * TILE;
  float *beside = acc + rows * RM_N_TILE, *below = acc + TILE_ROWS * RM_N_TILE;
  STORE_BEFORE_LOADS();
  _tile_zero(0);
  if (N > 1) _tile_zero(1);
  if (M > 1) _tile_zero(2);
  if (M > 1 && N > 1) _tile_zero(3);
  for (int64_t b = 0; b < n_blocks; b++, w += TILE) {
    const uint16_t *from = (const uint16_t *)x.rows + b * x.block_step + row * x.row_step;
    for (int t = 0; t < N; t++) {
      const fetch near = fetch_near(RM_BF16, w + t * column);
      if (row == 0) fetch_block(&near, 0);
      fetch_block(&soon[t], b);
    }
    _tile_loadd(4, from, 2 * x.row_step);
    _tile_loadd(6, w, 64);
    _tile_dpbf16ps(0, 4, 6);
    if (N > 1) {
      _tile_loadd(7, w + column, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if (M > 1) {
      _tile_loadd(5, from + TILE_ROWS * x.row_step, 2 * x.row_step);
      _tile_dpbf16ps(2, 5, 6);
    }
    if (M > 1 && N > 1) _tile_dpbf16ps(3, 5, 7);
  }
  STORE_SUMS(0, acc, rows - row);
  if (N > 1) STORE_SUMS(1, beside, rows - row);
  if (M > 1) STORE_SUMS(2, below, rows - row - TILE_ROWS);
  if (M > 1 && N > 1) STORE_SUMS(3, beside + TILE_ROWS * RM_N_TILE, rows - row - TILE_ROWS);
}

// All rows are multiplied by two tile columns, 32 rows at a time. Each pass over the two columns
// fetches its share of the next two.
static __attribute__((noinline)) void tile_panel_dots(const panel_rows x, int64_t rows,
                                                      const uint16_t *w, int64_t n_tiles,
                                                      int64_t n_blocks, float *acc) {
  configure_tiles(rows);
  for (int64_t t = 0; t < n_tiles; t += 2)
    for (int64_t row = 0; row < rows; row += 2 * TILE_ROWS) {
      const uint16_t *columns = w + t * n_blocks * TILE;
      float *to = acc + (t * rows + row) * RM_N_TILE;
      const int two_rows = rows - row > TILE_ROWS, two_columns = n_tiles - t > 1;
      fetch soon[2];
      for (int i = 0; i < 2; i++)
        soon[i] = fetch_share(fetch_all(RM_BF16, columns + (2 + i) * n_blocks * TILE, 0), row,
                              rm_min64(2 * TILE_ROWS, rows - row), rows);
#define BLOCK(M, N) tile_block(M, N, x, rows, row, columns, n_blocks, to, soon)
      if (two_rows && two_columns) BLOCK(2, 2);
      else if (two_rows) BLOCK(2, 1);
      else if (two_columns) BLOCK(1, 2);
      else BLOCK(1, 1);
#undef BLOCK
    }
  _tile_release();
}

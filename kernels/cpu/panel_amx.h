// panel_amx.h: the bf16 dot products of gemm and lm_head by AMX. One tdpbf16ps is one block of the
// contract for 16 rows × 16 columns: it sums the even k and the odd k in chains from +0 and adds
// their sum to the accumulator; its second operand is a packed tile of weights, loaded as it is.
// Prefill and decode share the code: up to 16 rows cost as much as one, so decode runs at the rate
// of memory.
//
// The panel is [k block][rows↑16][32] bf16 with rows of zeros at the end; with fewer than 16 rows,
// tiles have that many rows. Each call configures and releases the tiles, which takes some hundred
// cycles of thousands. Otherwise every context switch would have to save the tile state. float32
// uses FMA, attention vdpbf16ps.
#pragma once

#include "panel_bf16.h"

#define RM_TILES // panel.h uses tile_fill_panel and tile_panel_dots for bf16

enum { TILE_ROWS = 16 };

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

static inline int64_t panel_rows(int64_t rows) {
  return rows < TILE_ROWS ? rows : rm_round_up(rows, TILE_ROWS);
}

VEC void tile_fill_panel(uint16_t *panel, const uint16_t *x, int64_t ldx, int64_t rows, int64_t k) {
  const int64_t all = panel_rows(rows), row_bytes = RM_K_BLOCK * (int64_t)sizeof *panel;
  for (int64_t i = 0; i < k; i += RM_K_BLOCK, panel += all * RM_K_BLOCK) {
    const int64_t n = rm_min64(RM_K_BLOCK, k - i) * (int64_t)sizeof *x;
    for (int64_t r = 0; r < rows; r++) {
      char *to = (char *)(panel + r * RM_K_BLOCK);
      memcpy(to, x + r * ldx + i, (size_t)n);
      memset(to + n, 0, (size_t)(row_bytes - n));
    }
    memset(panel + rows * RM_K_BLOCK, 0, (size_t)((all - rows) * row_bytes));
  }
}

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

// M × N tiles, each 1 or 2: rows [row, …) of the panel times tile columns w and w + n_blocks tiles.
VEC void tile_block(const int M, const int N, const uint16_t *panel, int64_t rows, int64_t row,
                    const uint16_t *w, int64_t n_blocks, float *acc, const int ahead) {
  const int64_t all = panel_rows(rows), column = n_blocks * TILE;
  _tile_zero(0);
  if (N > 1) _tile_zero(1);
  if (M > 1) _tile_zero(2);
  if (M > 1 && N > 1) _tile_zero(3);
  for (int64_t b = 0; b < n_blocks; b++, w += TILE) {
    const uint16_t *x = panel + (b * all + row) * RM_K_BLOCK;
    for (int t = 0; ahead && t < N; t++) {
      const fetch f = fetch_near(RM_BF16, w + t * column);
      fetch_block(&f, 0);
    }
    _tile_loadd(4, x, 64);
    _tile_loadd(6, w, 64);
    _tile_dpbf16ps(0, 4, 6);
    if (N > 1) {
      _tile_loadd(7, w + column, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if (M > 1) {
      _tile_loadd(5, x + TILE_ROWS * RM_K_BLOCK, 64);
      _tile_dpbf16ps(2, 5, 6);
    }
    if (M > 1 && N > 1) _tile_dpbf16ps(3, 5, 7);
  }
  float *beside = acc + rows * RM_N_TILE, *below = acc + TILE_ROWS * RM_N_TILE;
  STORE_SUMS(0, acc, rows - row);
  if (N > 1) STORE_SUMS(1, beside, rows - row);
  if (M > 1) STORE_SUMS(2, below, rows - row - TILE_ROWS);
  if (M > 1 && N > 1) STORE_SUMS(3, beside + TILE_ROWS * RM_N_TILE, rows - row - TILE_ROWS);
}

static __attribute__((noinline)) void tile_panel_dots(const uint16_t *panel, int64_t rows,
                                                      const uint16_t *w, int64_t n_tiles,
                                                      int64_t n_blocks, float *acc) {
  configure_tiles(rows);
  for (int64_t t = 0; t < n_tiles; t += 2)
    for (int64_t row = 0; row < rows; row += 2 * TILE_ROWS) {
      const uint16_t *columns = w + t * n_blocks * TILE;
      float *to = acc + (t * rows + row) * RM_N_TILE;
      const int two_rows = rows - row > TILE_ROWS, two_columns = n_tiles - t > 1, ahead = row == 0;
      if (two_rows && two_columns) tile_block(2, 2, panel, rows, row, columns, n_blocks, to, ahead);
      else if (two_rows) tile_block(2, 1, panel, rows, row, columns, n_blocks, to, ahead);
      else if (two_columns) tile_block(1, 2, panel, rows, row, columns, n_blocks, to, ahead);
      else tile_block(1, 1, panel, rows, row, columns, n_blocks, to, ahead);
    }
  _tile_release();
}

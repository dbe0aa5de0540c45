// panel.h: the products of gemm and lm_head: fill_panel copies up to PANEL_ROWS rows to a panel,
// and panel_dots multiplies it by a few tile columns of packed weights at a time. The build's
// RM_PANEL_HEADER defines the panel's layout: floats for FMA, permuted pairs for vdpbf16ps, rows of
// bf16 for AMX tiles. It also has the products of attention (fill_query, score_dots,
// store_probabilities, value_dots). In each the sums are those of docs/numerics.md §2 and §4.
#pragma once

#include "vec.h"

enum {
  PANEL_ROWS = 96, // rows that share a pass over the weights; a panel should fit the L2 cache
  PANEL_TILES = 8, // tile columns of one panel_dots
};

#include RM_PANEL_HEADER

// Floats of one thread's workspace: a panel, and the sums of its rows.
static inline int64_t dots_floats(int64_t k) {
  return PANEL_ROWS * (rm_round_up(k, RM_K_BLOCK) + PANEL_TILES * RM_N_TILE);
}

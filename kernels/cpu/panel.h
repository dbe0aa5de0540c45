// panel.h: how gemm and lm_head multiply: up to PANEL_ROWS rows are copied to a panel (fill_panel),
// which is then multiplied by a few tile columns of packed weights at a time (panel_dots). The
// panel's layout is defined by the build's RM_PANEL_HEADER: floats for FMA, permuted pairs for
// vdpbf16ps, rows of bf16 for AMX tiles. It also has the products of attention (fill_query,
// score_dots, store_probabilities, value_dots). The sums are those of docs/numerics.md §2 and §4 in
// each.
#pragma once

#include "vec.h"

enum {
  PANEL_ROWS =
      96, // rows that share a pass over the weights; their panel should stay in the L2 cache
  PANEL_TILES = 8, // tile columns worked on together, whose sums stand side by side
};

#include RM_PANEL_HEADER

// Workspace of one thread: a panel, and the sums of its rows.
static inline int64_t dots_floats(int64_t k) {
  return PANEL_ROWS * (rm_round_up(k, RM_K_BLOCK) + PANEL_TILES * RM_N_TILE);
}

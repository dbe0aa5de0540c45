// check_gemm.cpp: gemm and gemm_swiglu, with and without groups.
#include "check.h"

#include "gemm_mma.cuh"

namespace {

constexpr int CHOSEN = -1;  // by the op itself

// `tile`: one of the tiles of gemm_mma.cuh, for which rows of x and y are aligned.
bool gemm_case(bool swiglu, rm_dtype dtype, rm_dtype y_dtype, int64_t m, int64_t n, int64_t k,
               int64_t groups, kind wild, int tile = CHOSEN) {
  const int64_t ldx = tile == CHOSEN ? k + pick(3) : rm_round_up(k, 8) + pick(2) * 8;
  const int64_t ldy = tile == CHOSEN ? n + pick(3) : rm_round_up(n, 4) + pick(2) * 4,
                stride = rm_packed_elems(swiglu ? rm_gate_up_rows(n) : n, k);
  int32_t *group_rows = array<int32_t>(groups + 1);
  // The last group has all rows: a block has several tiles of them.
  const bool skewed = m % 12 == 0;
  for (int64_t g = 0; g <= groups; g++)
    group_rows[g] = static_cast<int32_t>(g == groups        ? m
                                         : g == 0 || skewed ? 0
                                                            : m * g * g / (groups * groups));
  rm_gemm_args a = {};
  a.x = numbers(dtype, m * ldx, wild);
  const packed w = weights(dtype, rm_max64(groups, 1), n, k, swiglu, wild);
  a.bias = !swiglu && !groups && pick(2) ? numbers(dtype, n) : nullptr;
  a.group_rows = groups ? group_rows : nullptr;
  a.n_groups = groups, a.group_stride = stride, a.m = m, a.n = n, a.k = k, a.ldx = ldx, a.ldy = ldy,
  a.dtype = dtype, a.y_dtype = y_dtype;
  if (swiglu) a.activation = static_cast<rm_activation>(pick(4));
  char what[192];
  snprintf(
      what, sizeof what,
      "gemm swiglu=%d activation=%d dtype=%d y=%d m=%ld n=%ld k=%ld groups=%ld bias=%d wild=%d tile=%d",
      swiglu, a.activation, dtype, y_dtype, m, n, k, groups, a.bias != nullptr, wild, tile);
  rm_limits limits = {};  // without it, k is not split over blocks
  if (pick(3))
    limits.max_rows = m, limits.max_n = swiglu ? rm_gate_up_rows(n) : n, limits.max_k = k,
    limits.top_k = groups;
  const auto call = [&](const rm_kernels *table, const rm_ctx *ctx) {
    a.w = w.of(table);
    if (tile != CHOSEN && table != oracle()) rm_cuda_gemm_mma_tiles(ctx, &a, swiglu, tile);
    else (swiglu ? table->gemm_swiglu : table->gemm)(ctx, &a);
  };
  const size_t y_bytes = static_cast<size_t>(m * ldy) * rm_dtype_bytes(y_dtype),
               both = static_cast<size_t>(2 * m * n);
  if (!swiglu || pick(3)) return held(what, {{&a.y, y_bytes, m * n}}, limits, call);
  return held(what, {{&a.y, y_bytes, m * n}, {&a.gate_up, both * rm_dtype_bytes(dtype), 2 * m * n}},
              limits, call);
}

// Tokens and rows of W at the edges of a tile; k at the edges of a stage, of a split and of the
// prefetched stages.
bool tile_cases(int tile, bool swiglu) {
  const int64_t rows = RM_TILES[tile].rows / (swiglu ? 2 : 1), cols = RM_TILES[tile].cols;
  const int64_t sizes[][4] = {{1, rows, 32, 0},           {cols - 1, rows - 1, 40, 0},
                              {cols, 2 * rows, 64, 0},    {cols + 1, rows + 1, 8, 0},
                              {2 * cols + 1, 20, 104, 0}, {cols / 2, rows / 2, 520, 0},
                              {33, 24, 1048, 0},          {9 * cols + 5, 2 * rows - 17, 16, 0},
                              {cols + 9, 30, 100, 0},     {60, rows + 9, 96, 3},
                              {3 * cols + 6, 17, 40, 2},  {16, 40, 0, 0}};
  for (const auto &s : sizes)
    if (!gemm_case(swiglu, RM_BF16, pick(2) ? RM_BF16 : RM_F32, s[0], s[1], s[2], s[3],
                   pick(4) ? TAME : WILD, tile))
      return false;
  return true;
}

bool gemms(bool swiglu) {
  const int64_t sizes[][3] = {
      {0, 16, 32},   {1, 1, 1},     {1, 16, 32},    {1, 64, 96},   {3, 17, 31},    {4, 15, 33},
      {5, 63, 64},   {15, 64, 65},  {16, 65, 32},   {17, 80, 7},   {31, 127, 128}, {33, 128, 34},
      {1, 131, 200}, {16, 16, 0},   {1, 33, 512},   {2, 16, 513},  {4, 20, 300},   {5, 17, 800},
      {8, 40, 1100}, {1, 16, 1060}, {9, 16, 520},   {64, 24, 96},  {66, 130, 40},  {70, 16, 1056},
      {200, 24, 64}, {300, 16, 32}, {40, 70, 1100}, {2, 20, 4700}, {3, 16, 15000}, {24, 24, 560}};
  for (int dtype = 0; dtype < 2; dtype++)
    for (const auto &s : sizes)
      for (int64_t groups = 0; groups < (s[0] % 12 == 0 ? 10 : 4); groups += groups ? 6 : 3)
        for (const rm_dtype y : {static_cast<rm_dtype>(dtype), RM_F32})
          if (!gemm_case(swiglu, static_cast<rm_dtype>(dtype), y, s[0], s[1], s[2], groups,
                         pick(4) ? TAME : WILD))
            return false;
  return true;
}

}  // namespace

// The op selects one of them; the test runs all, including those that the op would not select.
bool check_mma_tiles() {
  for (int tile = 0; tile < RM_N_TILES; tile++)
    for (int swiglu = 0; swiglu < 2; swiglu++)
      if (!tile_cases(tile, swiglu)) return false;
  return true;
}
bool check_gemm() { return gemms(false); }
bool check_gemm_swiglu() { return gemms(true); }

// attention_mma.cuh: shared by the two bf16 attention kernels of the family cuda_mma:
// attention_mma.cu (single rows) and attention_mma_tiles.cu (tiles of consecutive rows of a
// sequence).
#pragma once

#include "attention.cuh"
#include "mma.cuh"

constexpr float RM_LOWEST = -INFINITY;
// Pitch of q in shared memory, in words, for rows of `steps` steps of 16 k: padded so that lanes
// use different banks.
RM_INLINE int rm_q_pitch(int64_t steps) { return static_cast<int>(steps) * (RM_MMA_K / 2) + 4; }

// y, or 0 if x is below `least`. Written in assembly, since the compiler would turn a condition
// into a branch around the computation of y.
RM_INLINE float rm_zero_below(float x, float least, float y) {
#ifndef __CUDA_ARCH__
  return x < least ? 0.0f : y;
#else
  float z;
  asm("{\n.reg .pred is_below;\nsetp.lt.ftz.f32 is_below, %1, %2;\nselp.f32 %0, 0f00000000, %3, "
      "is_below;\n}"
      : "=f"(z)
      : "f"(x), "f"(least), "f"(y));
  return z;
#endif
}

// rm_exp of a number that is at most 0, or of a NaN, bit-identical, in 16 instructions instead of
// 26: for a normal result 2^i is one addition to the exponent, and below RM_EXP_NORMAL the result
// is 0. tests/gpu/simt/check_mma.cpp compares the two.
constexpr float RM_EXP_NORMAL = -0x1.5d589ep+6f;
RM_INLINE float rm_exp_not_above_0(float x) {
  float t;
  const float p = rm_exp_rest(x, &t);
  const float y = rm_float((rm_bits(t) << 23) + rm_bits(p)); // shifts the magic number's bits out
  return rm_zero_below(x, RM_EXP_NORMAL, fmaf(x, 0.0f, y)); // a NaN stays a NaN
}

// The work of a block: its columns are the query heads of one kv head, `heads` of each of rows row0
// … end − 1.
struct rm_attn_work {
  int64_t row0, end, kv_head, head0, head_end;
  int heads;
};
// The row and query head of a column; some: false if the column is unused.
struct rm_attn_owner {
  int64_t row, head;
  bool some;
};

// y: kv_head · head_tiles + the tile of its query heads.
__device__ inline rm_attn_work rm_attn_work_of(const rm_attention_args &a, int64_t row0,
                                               int64_t end, int heads, int head_tiles, unsigned y) {
  rm_attn_work w;
  w.row0 = row0;
  w.end = end;
  w.kv_head = y / static_cast<unsigned>(head_tiles);
  const int64_t first = rm_max64(0, w.kv_head * a.group - a.head0);
  w.head0 = first + y % static_cast<unsigned>(head_tiles) * heads;
  w.head_end = rm_min64(rm_min64((w.kv_head + 1) * a.group - a.head0, a.n_heads), w.head0 + heads);
  w.heads = heads;
  return w;
}
__device__ inline rm_attn_owner rm_attn_owner_of(const rm_attn_work &w, int column) {
  const rm_attn_owner o = {w.row0 + column / w.heads, w.head0 + column % w.heads, false};
  return {o.row, o.head, o.row < w.end && o.head < w.head_end};
}

// Loads the queries of COLS columns, in rows of rm_q_pitch(steps) words; zeros for unused columns.
template <int COLS, int THREADS>
__device__ inline void rm_load_queries(uint32_t *to, const rm_attention_args &a,
                                       const rm_attn_work &w, int steps) {
  const rm_tokens q = rm_tokens_of(a.q, a.head_dim, a.head_dim, 0, a.rows * a.n_heads);
  const int vectors = steps * 2;
  for (int i = rm_thread(); i < COLS * vectors; i += THREADS) {
    const int column = i / vectors, vector = i % vectors;
    const rm_attn_owner o = rm_attn_owner_of(w, column);
    const uint4 words =
        o.some ? rm_load_tokens(q, static_cast<int>(o.row * a.n_heads + o.head), vector * 8)
               : uint4{0, 0, 0, 0};
    *reinterpret_cast<uint4 *>(to + column * rm_q_pitch(steps) + vector * 4) = words;
  }
}

// Index in the caches of the 16 positions from t on, in units of 16 bytes: of K's tiles, one for
// every 16 k of head_dim, and of Vᵀ's, one for every 16 rows of value_dim.
struct rm_attn_tile {
  int64_t k, v;
};
__device__ inline rm_attn_tile rm_attn_tile_of(const rm_attention_args &a, int64_t kv_head,
                                               const int32_t *pages, int t) {
  const uint32_t page_size = static_cast<uint32_t>(a.page_size), at = static_cast<uint32_t>(t);
  const int64_t page = pages[at / page_size] * a.n_kv_heads + kv_head,
                tile = at % page_size / RM_MMA_ROWS;
  return {page * (rm_k_page_elems(a.page_size, a.head_dim) / 8) +
              tile * rm_mma_steps(a.head_dim) * RM_WARP,
          page * (rm_v_page_elems(a.page_size, a.value_dim) / 8) +
              tile * rm_mma_tile_rows(a.value_dim) * RM_WARP};
}

// The rows that remain to be computed by states: `rows` rows of the list, which is in the first
// `used` bytes of the workspace.
struct rm_attn_left {
  rm_row_list list;
  int64_t rows;
  size_t used;
};
// Computes attention for the tiles whose rows belong to one sequence, unless the call is a decode
// step. Returns the other rows.
rm_attn_left rm_cuda_attention_mma_tiles(const rm_ctx *ctx, const rm_attention_args *a);

// mma_rows.cuh: multiplies 16 rows of packed W per warp by up to 64 tokens of the block: the inner
// loop of the kernels that read W once, the gemm of few rows and lm_head. A lane's share of a tile
// is one load of 16 bytes into registers, AHEAD tiles before the product; only x passes through
// shared memory, two stages of [token][STAGE of k], with rows padded by 16 bytes so that lanes use
// different banks. The next stage is copied during the products of the current one.
#pragma once

#include "mma.cuh"

RM_INLINE int64_t rm_mma_splits(int64_t k) {
  return rm_max64(1, (k + RM_MMA_SPLIT - 1) / RM_MMA_SPLIT);
}
RM_INLINE int64_t rm_split_steps(int64_t k, int64_t split) {
  return rm_min64(RM_MMA_STEPS, rm_mma_steps(k) - split * RM_MMA_STEPS);
}

// k of a stage for NT × 8 tokens: two stages fit in 48 KB of shared memory.
template <int NT> constexpr int RM_STAGE = NT <= 2 ? 256 : 128;
template <int STAGE> constexpr int RM_STAGED_PITCH = STAGE / 2 + 4; // words
template <int NT, int STAGE = RM_STAGE<NT>>
constexpr int RM_STAGED_WORDS = 2 * RM_MMA_COLS * NT * RM_STAGED_PITCH<STAGE>; // of two stages

// Index of a lane's word 0 or 1 of B, for 8 tokens from `token` on and a step of 16 k.
template <int STAGE> RM_INLINE int rm_staged_word(int token, int step, int lane, int word) {
  return (token + lane / 4) * RM_STAGED_PITCH<STAGE> + step * (RM_MMA_K / 2) + word * 4 + lane % 4;
}

// Starts to copy a stage, with all of a thread's loads in flight; writes zeros after k.
template <int NT, int THREADS, int STAGE>
__device__ inline void rm_stage_tokens(uint32_t *to, const rm_tokens &t, int64_t k0) {
  constexpr int EIGHTS = STAGE / 8, EACH = THREADS / EIGHTS, ROWS = RM_MMA_COLS * NT;
  static_assert(THREADS % EIGHTS == 0 && ROWS % EACH == 0);
  const int own = rm_thread() % THREADS, first = own / EIGHTS;
  const int64_t k = k0 + own % EIGHTS * 8;
  const uint16_t *from = t.x + (t.row0 + first) * t.ldx + k;
  to += first * RM_STAGED_PITCH<STAGE> + own % EIGHTS * 4;
  if (t.wide) {
#pragma unroll
    for (int r = 0; r < ROWS; r += EACH)
      rm_copy_async(to + r * RM_STAGED_PITCH<STAGE>, from + r * t.ldx,
                    t.row0 + first + r < t.end && k < t.k);
  } else {
#pragma unroll 1
    for (int r = 0; r < ROWS; r += EACH)
      *reinterpret_cast<uint4 *>(to + r * RM_STAGED_PITCH<STAGE>) = rm_load_tokens(t, first + r, k);
  }
  rm_copies_commit();
}

// Multiplies steps [step0, step0 + steps) of W's row of tiles at w by NT × 8 tokens, in each warp;
// step0 begins a split. live: the warp has such a row. THREADS threads stage together: the whole
// block, or each warp on its own. The sums have the layout of rm_mma16, and acc begins as zeros.
template <int NT, int THREADS, int STAGE = RM_STAGE<NT>>
__device__ inline void rm_mma_rows(float (&acc)[NT][4], uint32_t *staged, const rm_tokens &t,
                                   const uint4 *w, bool live, int step0, int steps) {
  constexpr int OF_STAGE = STAGE / RM_MMA_K, AHEAD = NT == 8 ? 4 : 8,
                WORDS = RM_STAGED_WORDS<NT, STAGE> / 2;
  const int lane = rm_lane();
  w += static_cast<int64_t>(step0) * RM_WARP + lane;
  const auto load = [&](uint4(&of)[AHEAD], int from) {
#pragma unroll
    for (int i = 0; i < AHEAD; i++)
      of[i] = live && from + i < steps
                  ? rm_load_stream(w + static_cast<int64_t>(from + i) * RM_WARP)
                  : uint4{0, 0, 0, 0};
  };
  const auto sync = [] {
    if constexpr (THREADS == RM_WARP) __syncwarp();
    else __syncthreads();
  };
  uint4 a[AHEAD], next[AHEAD];
  load(a, 0);
  const auto stage = [&](int at) {
    if (at < steps)
      rm_stage_tokens<NT, THREADS, STAGE>(staged + at / OF_STAGE % 2 * WORDS, t,
                                          static_cast<int64_t>(step0 + at) * RM_MMA_K);
  };
  float sums[NT][4] = {};
  sync(); // before the staged tokens are overwritten
  stage(0);
  for (int at = 0; at < steps; at += OF_STAGE) {
    rm_copies_wait<0>();
    sync(); // all have this stage, and have read the previous one
    stage(at + OF_STAGE);
    const uint32_t *tokens = staged + at / OF_STAGE % 2 * WORDS;
    for (int from = 0; from < OF_STAGE && at + from < steps; from += AHEAD) {
      load(next, at + from + AHEAD);
#pragma unroll
      for (int i = 0; i < AHEAD; i++) {
        if (!live || at + from + i >= steps) continue;
#pragma unroll
        for (int n = 0; n < NT; n++) {
          const uint2 b = {tokens[rm_staged_word<STAGE>(n * RM_MMA_COLS, from + i, lane, 0)],
                           tokens[rm_staged_word<STAGE>(n * RM_MMA_COLS, from + i, lane, 1)]};
          rm_mma16(sums[n], a[i], b);
        }
      }
#pragma unroll
      for (int i = 0; i < AHEAD; i++) a[i] = next[i];
    }
    if ((at + OF_STAGE) % RM_MMA_STEPS != 0 && at + OF_STAGE < steps) continue;
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) acc[n][i] = acc[n][i] + sums[n][i], sums[n][i] = 0.0f;
  }
}

// Groups without rows take no time: a gemm is launched for as many slots as groups can have rows.
inline int64_t rm_group_slots(const rm_gemm_args *a) {
  return a->group_rows ? rm_min64(a->m, a->n_groups) : 1;
}
// Returns the slot-th group that has rows, or −1. Called by a whole warp.
__device__ inline int64_t rm_group_of_slot(const rm_gemm_args &a, int64_t slot) {
  if (!a.group_rows) return 0;
  const int lane = rm_lane();
  for (int64_t from = 0; from < a.n_groups; from += RM_WARP) {
    const int64_t g = from + lane;
    unsigned live =
        __ballot_sync(RM_ALL_LANES, g < a.n_groups && a.group_rows[g + 1] > a.group_rows[g]);
    const int n = __popc(live);
    if (slot >= n) {
      slot -= n;
      continue;
    }
    for (; slot > 0; slot--) live &= live - 1;
    return from + __ffs(static_cast<int>(live)) - 1;
  }
  return -1;
}

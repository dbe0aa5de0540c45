// attention_mma.cu: attention of the family cuda_mma in bf16, docs/numerics.md §4 with its two dot
// products on tensor cores: K·qᵀ is one chain over head_dim, Vᵀ·P two steps from +0 for each block
// of 32 positions. This file computes single rows, as in decode, where the cache is read once;
// attention_mma_tiles.cu computes tiles of adjacent rows. A block of threads computes the state of
// one split of 1024 positions for up to 8 columns, the query heads of one row and kv head. It
// takes 64 positions at a time: each warp computes the scores of 16 positions, then the softmax of
// a quarter of the columns, then the sums of a quarter of value_dim. Scores and P pass through
// shared memory, since a row of K's product is a k of V's. A K or V tile of 16 positions is read
// only if one of them is live.
//
// A warp computes the softmax of its columns together: one lane, not all lanes, holds the values
// with one number per column (m, l, alpha), and each step of the trees over positions halves the
// remaining work. Values are loaded before the softmax.
#include "attention_mma.cuh"

namespace {

constexpr int WARPS = 4, THREADS = WARPS * RM_WARP, AT_ONCE = 64, BLOCKS = AT_ONCE / RM_ATTN_BLOCK;
constexpr int COLS = RM_MMA_COLS; // columns of a block
constexpr int EACH = COLS / WARPS; // columns whose softmax a warp computes
constexpr int LANES = RM_WARP / EACH; // lanes per column for values with one number per column
constexpr int AHEAD = 8; // loads of K before the first product
// In floats and in words, padded so that lanes use different banks.
constexpr int SCORE_PITCH = AT_ONCE + 4, P_PITCH = AT_ONCE / 2 + 4;

struct shape {
  rm_rows_pass pass;
  int heads; // columns of a block: query heads of its row
  int head_tiles; // blocks that share the query heads of a kv head
  int d_tile0; // first row of V's tiles; a value_dim of more than WARPS × DT takes several launches
};

// In shared memory. All columns have the live positions of the block's row; an unused column has a
// query of zeros and is not stored.
struct columns {
  float scores[COLS][SCORE_PITCH];
  uint32_t p[COLS][P_PITCH]; // pairs of bf16
  float alpha[BLOCKS][COLS];
  alignas(16) uint32_t q[]; // [COLS][rm_q_pitch] pairs of bf16
};

// The tiles of 16 positions among AT_ONCE positions; lane l holds the address of tile l % TILES.
constexpr int TILES = AT_ONCE / RM_MMA_ROWS;
struct tiles {
  rm_span live;
  int t0;
  rm_attn_tile at;
  __device__ bool has(int tile) const {
    return rm_is_live(live, t0 + tile * RM_MMA_ROWS, RM_MMA_ROWS);
  }
};
__device__ tiles tiles_of(rm_span live, const rm_attention_args &a, const rm_attn_work &w,
                          const int32_t *pages, int t0) {
  const int mine = rm_thread() % TILES;
  tiles found = {live, t0, {}};
  if (!found.has(mine)) return found; // its page may not exist
  found.at = rm_attn_tile_of(a, w.kv_head, pages, t0 + mine * RM_MMA_ROWS);
  return found;
}

// Loads B for the columns and two steps of 16 k, from rows of `pitch` words.
__device__ uint4 load_columns_of(const uint32_t *rows, int pitch, int step) {
  const int lane = rm_lane();
  return rm_load_matrices(rows + lane % 8 * pitch + step * (RM_MMA_K / 2) + lane / 8 * 4);
}

// Computes the scores of the warp's tile.
__device__ void make_scores(columns &c, const rm_attention_args &a, const tiles &t) {
  const int lane = rm_lane(), warp = rm_warp();
  const int steps = static_cast<int>(rm_mma_steps(a.head_dim)), pitch = rm_q_pitch(steps);
  static_assert(TILES == WARPS);
  const uint4 *k =
      static_cast<const uint4 *>(a.k_cache) + __shfl_sync(RM_ALL_LANES, t.at.k, warp) + lane;
  if (!t.has(warp)) return;
  float acc[4] = {}, sums[4] = {};
  for (int step0 = 0; step0 < steps; step0 += AHEAD) {
    uint4 of[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; i++)
      of[i] = step0 + i < steps ? k[(step0 + i) * RM_WARP] : uint4{0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < AHEAD; i += 2) {
      if (step0 + i >= steps) break; // the number of steps is even
      const uint4 q = load_columns_of(c.q, pitch, step0 + i);
      rm_mma16(sums, of[i], {q.x, q.y});
      rm_mma16(sums, of[i + 1], {q.z, q.w});
    }
    if ((step0 + AHEAD) % RM_MMA_STEPS && step0 + AHEAD < steps) continue;
#pragma unroll
    for (int i = 0; i < 4; i++) acc[i] = acc[i] + sums[i], sums[i] = 0.0f;
  }
#pragma unroll
  for (int i = 0; i < 4; i++)
    c.scores[lane % 4 * 2 + i % 2][warp * RM_MMA_ROWS + lane / 4 + i / 2 * 8] =
        rm_softcap(acc[i] * a.scale, a.softcap);
}

// Reduces EACH numbers of every lane over the lanes; a lane gets the result of its column. Each
// step with more than one column left halves the columns, so it takes EACH + 1 exchanges instead of
// 5 · EACH. A column's tree is the tree over 32 lanes.
template <class F> __device__ float over_columns(float (&v)[EACH], F both) {
  const int lane = rm_lane();
  int n = EACH;
#pragma unroll
  for (int step = RM_WARP / 2; step > 0; step /= 2) {
    const bool upper = lane & step;
    if (n == 1) v[0] = both(__shfl_xor_sync(RM_ALL_LANES, v[0], step), v[0]);
    else n /= 2;
#pragma unroll
    for (int i = 0; i < EACH / 2; i++)
      if (i < n && step >= LANES) {
        const float give = upper ? v[i] : v[n + i], keep = upper ? v[n + i] : v[i];
        v[i] = both(__shfl_xor_sync(RM_ALL_LANES, give, step), keep);
      }
  }
  return v[0];
}

// The running state of the lane's column.
struct running {
  float m, l;
};

// Computes P, alpha and the running m and l of one block of 32 positions for a warp's columns, with
// one lane for each position. ALL: every position is live.
template <bool ALL>
__device__ void soften(columns &c, rm_span live, int column0, int t0, int block, running &own) {
  const int lane = rm_lane(), in = block * RM_ATTN_BLOCK + lane;
  const int from = t0 + block * static_cast<int>(RM_ATTN_BLOCK), t = from + lane;
  float scores[EACH], v[EACH];
  const bool is_live = ALL || rm_is_live(live, t, 1);
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    scores[i] = c.scores[column0 + i][in];
    v[i] = is_live ? rm_max_f32(scores[i], RM_LOWEST) : RM_LOWEST;
  }
  const float next = rm_max_f32(over_columns(v, rm_max_f32), own.m);
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const float top = __shfl_sync(RM_ALL_LANES, next, i * LANES);
    v[i] = is_live ? rm_exp(scores[i] - top) : 0.0f;
    reinterpret_cast<uint16_t *>(c.p[column0 + i])[in] = rm_f32_to_bf16(v[i]);
  }
  // p_j + p_{j+16}, then the tree over 16.
  const float sum = over_columns(v, [](float a, float b) { return a + b; });
  float scaled = 1.0f;
  if (rm_is_live(live, from, RM_ATTN_BLOCK)) { // else the state does not change
    scaled = rm_bits(own.m) == rm_bits(RM_LOWEST) ? 0.0f : rm_exp(own.m - next);
    own.l = fmaf(own.l, scaled, sum);
    own.m = next;
  }
  if (lane % LANES == 0) c.alpha[block][column0 + lane / LANES] = scaled;
}

// Vᵀ's tiles of AT_ONCE positions for the warp's rows of d: tiles warp, warp + WARPS, … Loaded
// before they are needed.
template <int DT> struct values {
  uint4 of[BLOCKS][DT][2];
  bool some[BLOCKS]; // the block has a live tile; else A[d] does not change
};
template <int DT>
__device__ void load_values(values<DT> &v, const rm_attention_args &a, const tiles &t,
                            int d_tile0) {
  const int warp = rm_warp(), lane = rm_lane();
  const int d_tiles = static_cast<int>(rm_mma_tile_rows(a.value_dim));
#pragma unroll
  for (int block = 0; block < BLOCKS; block++) {
    v.some[block] = false;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int tile = block * 2 + half;
      const bool wanted = t.has(tile);
      const uint4 *from =
          static_cast<const uint4 *>(a.v_cache) + __shfl_sync(RM_ALL_LANES, t.at.v, tile) + lane;
#pragma unroll
      for (int i = 0; i < DT; i++) {
        const int d = d_tile0 + warp + i * WARPS;
        v.of[block][i][half] = wanted && d < d_tiles ? from[d * RM_WARP] : uint4{0, 0, 0, 0};
      }
      v.some[block] |= wanted;
    }
  }
}

template <int DT>
__device__ void add_values(float (&acc)[DT][4], const columns &c, const values<DT> &v) {
  const int lane = rm_lane();
#pragma unroll
  for (int block = 0; block < BLOCKS; block++) {
    if (!v.some[block]) continue;
    const uint4 p = load_columns_of(c.p[0], P_PITCH, block * 2);
    const float *alpha = c.alpha[block] + lane % 4 * 2;
    const float of[2] = {alpha[0], alpha[1]};
#pragma unroll
    for (int i = 0; i < DT; i++) {
      float sums[4] = {};
      rm_mma16(sums, v.of[block][i][0], {p.x, p.y});
      rm_mma16(sums, v.of[block][i][1], {p.z, p.w});
#pragma unroll
      for (int j = 0; j < 4; j++) acc[i][j] = acc[i][j] * of[j % 2] + sums[j];
    }
  }
}

__device__ float *state_of(const rm_attention_args &a, const rm_attn_work &w, const shape &s,
                           float *states, int column) {
  const rm_attn_owner o = rm_attn_owner_of(w, column);
  return o.some ? states + ((blockIdx.x * a.n_heads + o.head) * s.pass.n_splits + blockIdx.z) *
                               rm_state_floats(a.value_dim)
                : nullptr;
}

// Computes a split of one row's columns.
template <int DT>
__device__ void split_of_row(columns &c, const rm_attention_args &a, const rm_attn_work &w,
                             rm_span live, int begin, const shape &s, float *states) {
  const int warp = rm_warp(), lane = rm_lane(), end = begin + static_cast<int>(RM_ATTN_SPLIT);
  const int32_t *pages = a.block_tables + a.seq_of_row[w.row0] * a.max_pages;
  rm_load_queries<COLS, THREADS>(c.q, a, w, static_cast<int>(rm_mma_steps(a.head_dim)));
  __syncthreads();
  float acc[DT][4] = {};
  const int column0 = warp * EACH, column = column0 + lane / LANES;
  running own = {RM_LOWEST, 0.0f};
  for (int t0 = begin; t0 < end; t0 += AT_ONCE) {
    if (!rm_is_live(live, t0, AT_ONCE)) continue;
    const tiles at = tiles_of(live, a, w, pages, t0);
    make_scores(c, a, at);
    values<DT> v;
    load_values<DT>(v, a, at, s.d_tile0);
    __syncthreads();
    for (int block = 0; block < BLOCKS; block++) {
      const int from = t0 + block * static_cast<int>(RM_ATTN_BLOCK);
      if (live.first <= from && live.last >= from + RM_ATTN_BLOCK - 1)
        soften<true>(c, live, column0, t0, block, own);
      else soften<false>(c, live, column0, t0, block, own);
    }
    __syncthreads(); // P is read until the next scores' barrier, and written after it
    add_values<DT>(acc, c, v);
  }
#pragma unroll
  for (int j = 0; j < 4; j++) {
    float *state = state_of(a, w, s, states, lane % 4 * 2 + j % 2);
#pragma unroll
    for (int i = 0; i < DT; i++) {
      const int64_t d = (s.d_tile0 + warp + i * WARPS) * RM_MMA_ROWS + lane / 4 + j / 2 * 8;
      if (state && d < a.value_dim) state[d] = acc[i][j];
    }
  }
  float *state = lane % LANES == 0 ? state_of(a, w, s, states, column) : nullptr;
  if (!state) return;
  state[a.value_dim] = own.m;
  state[a.value_dim + 1] = own.l;
}

// Blocks per multiprocessor that the registers allow.
template <int DT> constexpr int AT_LEAST = 6 - DT / 2;

template <int DT>
__global__ void __launch_bounds__(THREADS, AT_LEAST<DT>)
    split_kernel(rm_attention_args a, shape s, float *states) {
  RM_SHARED(shared);
  const int64_t row = rm_row_of(s.pass.list, a, s.pass.row0 + blockIdx.x);
  const int begin = static_cast<int>(blockIdx.z) * static_cast<int>(RM_ATTN_SPLIT);
  if (row < 0) return; // the whole block returns, here and below
  const rm_span live = rm_live_span(a, row);
  if (!rm_is_live(live, begin, RM_ATTN_SPLIT)) return;
  const rm_attn_work w = rm_attn_work_of(a, row, row + 1, s.heads, s.head_tiles, blockIdx.y);
  if (w.head0 >= w.head_end) return;
  split_of_row<DT>(*reinterpret_cast<columns *>(shared), a, w, live, begin, s, states);
}

template <int DT>
void launch(const rm_ctx *ctx, const rm_attention_args *a, float *states, rm_rows_pass pass) {
  shape s = {};
  s.pass = pass;
  s.heads = static_cast<int>(rm_min64(a->group, COLS));
  s.head_tiles = static_cast<int>((a->group + s.heads - 1) / s.heads);
  const dim3 grid = rm_grid(pass.rows, a->n_kv_heads * s.head_tiles, pass.n_splits);
  const size_t shared =
      sizeof(columns) + COLS * rm_q_pitch(rm_mma_steps(a->head_dim)) * sizeof(uint32_t);
  for (; s.d_tile0 < rm_mma_tile_rows(a->value_dim); s.d_tile0 += WARPS * DT)
    RM_LAUNCH((split_kernel<DT>), grid, THREADS, shared, ctx->stream, *a, s, states);
}

void mma_states(const rm_ctx *ctx, const rm_attention_args *a, float *states, rm_rows_pass pass) {
  constexpr int64_t OF_WARPS = WARPS * RM_MMA_ROWS;
  if (a->value_dim <= OF_WARPS) launch<1>(ctx, a, states, pass);
  else if (a->value_dim <= 2 * OF_WARPS) launch<2>(ctx, a, states, pass);
  else launch<4>(ctx, a, states, pass);
}

} // namespace

void rm_cuda_mma_attention(const rm_ctx *ctx, const rm_attention_args *a) {
  const rm_attn_left left = rm_cuda_attention_mma_tiles(ctx, a);
  rm_cuda_attention_by(ctx, a, mma_states, left.rows, left.list, left.used);
}

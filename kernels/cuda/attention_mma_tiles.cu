// attention_mma_tiles.cu: attention of the family cuda_mma in bf16 for adjacent rows of one
// sequence, as in prefill. A block takes up to 128 columns, the query heads of one kv head times a
// tile of rows, and iterates over all positions that are live for them, 32 at a time; it copies
// their K and Vᵀ to shared memory while it computes the previous 32. Each warp has 32 columns:
// scores, softmax and P·V stay in its registers. A row of K's product is a k of V's, so P is
// transposed in registers, 8 × 8 at a time. The order of the elements makes the sum over 32
// positions the contract's tree, two levels in a lane and three between lanes. All operations on a
// column and their order are those of attention_mma.cu, so the two are bit-identical.
//
// At the end of a split of 1024 positions a column's state is merged into the state of the
// previous splits, which is in the workspace. A context of one split does not use the
// workspace.
//
// The device determines which rows belong to one sequence. Tiles with rows of several sequences are
// listed and computed row by row, like decode, whose long contexts should spread over the GPU.
// Tiles that do not fit on the list are computed here, one run of rows after the other.
#include "attention_mma.cuh"

namespace {

constexpr int WARPS = 4, THREADS = WARPS * RM_WARP, CT = 4, WARP_COLS = CT * RM_MMA_COLS,
              COLS = WARPS * WARP_COLS;
constexpr int KEYS = static_cast<int>(RM_ATTN_BLOCK), HALVES = KEYS / RM_MMA_K,
              SPLIT = static_cast<int>(RM_ATTN_SPLIT);
constexpr int LIST_THREADS = 256, PUT_TILES = 4, PUT_PITCH = PUT_TILES * RM_MMA_ROWS + 4;
constexpr int PUT_WORDS = RM_MMA_COLS * PUT_PITCH; // per warp, padded: lanes use different banks
constexpr int64_t MOST_BY_ROWS = 512; // rows of listed tiles: launches are sized for them
static_assert(THREADS == COLS && WARP_COLS == RM_WARP, "each thread has a column of its warp");

// Takes DT tiles of 16 rows of Vᵀ at a time, and STEPS steps of 16 k of head_dim (0: not a
// constant). Constants do not use registers.
template <int DT_, int STEPS> struct shape {
  static constexpr int DT = DT_;
  RM_INLINE int steps(int64_t head_dim) {
    return STEPS ? STEPS : static_cast<int>(rm_mma_steps(head_dim));
  }
  RM_INLINE int pitch(int64_t head_dim) { return rm_q_pitch(steps(head_dim)); }
  RM_INLINE int stage_bytes(int64_t head_dim) {
    return HALVES * (steps(head_dim) + DT) * RM_WARP * 16;
  }
};
using shape_128 = shape<8, 8>; // head_dim 97 … 128
using shape_any = shape<4, 0>; // any head_dim, 64 at a time

struct tiles {
  const int32_t *by_rows; // [all tiles] whether the tile is on the list
  int64_t tile0; // first tile of the pass
  int rows_each, heads, head_tiles, d_tile0;
};

using span = rm_span;
constexpr span NONE = {INT32_MAX, -INT32_MAX};

// A column, and m and l of its state; A[d] is in registers.
struct alignas(16) column {
  span live;
  float m, l;
};

// How a column's state is merged at the end of a split.
struct alignas(16) joined {
  float old, add; // factors of the previous sums and of the split's sums
  float l; // the divisor of the row
  int place; // row · n_heads + head of the column; −1: the split has no live position
  float last; // factor of the sums of all splits
};

// In shared memory.
struct alignas(16) block {
  float put[WARPS][PUT_WORDS];
  column columns[COLS];
  joined merges[COLS];
  int seqs[COLS]; // sequences of the tile's rows; −1: no row
  // Fields of the rows that are computed together:
  rm_attn_work w;
  const int32_t *pages;
  span all; // positions that are live for some column
  span live[WARPS]; // positions that are live for some column of a warp
  span whole[WARPS]; // positions that are live for all used columns of a warp
  // Followed by [COLS][pitch] pairs of bf16 of q, then two stages.
  __device__ uint32_t *q() { return reinterpret_cast<uint32_t *>(this + 1); }
  template <class S> __device__ char *stage(int64_t head_dim, int t0) {
    return reinterpret_cast<char *>(q() + COLS * S::pitch(head_dim)) +
           t0 / KEYS % 2 * S::stage_bytes(head_dim);
  }
};
template <class S> RM_INLINE int shared_bytes(int64_t head_dim) {
  return static_cast<int>(sizeof(block)) + COLS * S::pitch(head_dim) * 4 +
         2 * S::stage_bytes(head_dim);
}

template <class S>
__device__ void load_queries(block &b, const rm_attention_args &a, const rm_attn_work &w) {
  rm_load_queries<COLS, THREADS>(b.q(), a, w, S::steps(a.head_dim));
  const int64_t row = w.row0 + threadIdx.x;
  b.seqs[threadIdx.x] = row < w.end ? a.seq_of_row[row] : -1;
}

// The least first and the greatest last.
__device__ span union_of(span a, span b) {
  return {a.first < b.first ? a.first : b.first, a.last > b.last ? a.last : b.last};
}
__device__ span over_lanes(span all) {
  for (int step = RM_WARP / 2; step > 0; step /= 2)
    all = union_of(all, {__shfl_xor_sync(RM_ALL_LANES, all.first, step),
                         __shfl_xor_sync(RM_ALL_LANES, all.last, step)});
  return all;
}

// Copies K and Vᵀ of the 32 positions from t0 on. If 16 of them are not live for any column of the
// block, and so may not have a page, they are zeros.
template <class S>
__device__ void fill(char *stage, const rm_attention_args &a, const block &b, span all, int t0,
                     int d_tile0) {
  const int steps = S::steps(a.head_dim),
            d_tiles = static_cast<int>(rm_mma_tile_rows(a.value_dim)) - d_tile0;
  const int thread = rm_thread();
#pragma unroll
  for (int half = 0; half < HALVES; half++) {
    const int t = t0 + half * RM_MMA_K;
    const bool is_there = rm_is_live(all, t, RM_MMA_K);
    const rm_attn_tile from =
        is_there ? rm_attn_tile_of(a, b.w.kv_head, b.pages, t) : rm_attn_tile{};
    const uint4 *k = static_cast<const uint4 *>(a.k_cache) + from.k,
                *v = static_cast<const uint4 *>(a.v_cache) + from.v + d_tile0 * RM_WARP;
    char *keys = stage + half * steps * RM_WARP * 16,
         *values = stage + (HALVES * steps + half * S::DT) * RM_WARP * 16;
    for (int i = thread; i < steps * RM_WARP; i += THREADS)
      rm_copy_async(keys + i * 16, k + i, is_there);
#pragma unroll
    for (int turn = 0; turn < S::DT * RM_WARP / THREADS; turn++) {
      const int i = turn * THREADS + thread;
      rm_copy_async(values + i * 16, v + i, is_there && i / RM_WARP < d_tiles);
    }
  }
}

// Begins a new state for each of the warp's columns.
template <int DT> __device__ void begin_split(float (&acc)[DT][CT][4], block &b) {
#pragma unroll
  for (int i = 0; i < DT; i++)
#pragma unroll
    for (int n = 0; n < CT; n++) acc[i][n][0] = acc[i][n][1] = acc[i][n][2] = acc[i][n][3] = 0.0f;
  __syncwarp(); // m and l have been read
  b.columns[threadIdx.x].m = RM_LOWEST;
  b.columns[threadIdx.x].l = 0.0f;
  __syncwarp();
}

template <class S>
__device__ void make_scores(float (&scores)[HALVES][CT][4], block &b, const char *stage,
                            int64_t head_dim, float scale) {
  const int lane = rm_lane(), warp = rm_warp();
  const int steps = S::steps(head_dim), pitch = S::pitch(head_dim);
  const uint4 *keys = reinterpret_cast<const uint4 *>(stage) + lane;
  // The lane's row for rm_load_matrices: the first or second 8 k of column 8·(lane / 16) + lane %
  // 8.
  const uint32_t *q =
      b.q() + (warp * WARP_COLS + lane / 16 * 8 + lane % 8) * pitch + lane / 8 % 2 * 4;
#pragma unroll 2
  for (int step = 0; step < steps; step++) {
    uint4 k[HALVES];
#pragma unroll
    for (int half = 0; half < HALVES; half++) k[half] = keys[(half * steps + step) * RM_WARP];
#pragma unroll
    for (int n = 0; n < CT; n += 2) {
      const uint4 two = rm_load_matrices(q + n * 8 * pitch + step * 8);
#pragma unroll
      for (int half = 0; half < HALVES; half++) {
        rm_mma16(scores[half][n], k[half], {two.x, two.y});
        rm_mma16(scores[half][n + 1], k[half], {two.z, two.w});
      }
    }
  }
#pragma unroll
  for (int half = 0; half < HALVES; half++)
#pragma unroll
    for (int n = 0; n < CT; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) scores[half][n][i] = (0.0f + scores[half][n][i]) * scale;
}

// Turns the scores of one column into weights, updates its m and l and returns alpha. The lane has
// the scores of positions t0 + 16·half + 8·h + lane / 4 at [half][n][e + 2·h]. ALL: all of these
// positions are live.
template <bool ALL>
__device__ float soften(float (&scores)[HALVES][CT][4], int n, int e, column *of, int t0) {
  const int lane = rm_lane(), t = t0 + lane / 4;
  const column c = *of;
  const auto live = [&](int half, int h) {
    return ALL || rm_is_live(c.live, t + half * RM_MMA_K + h * 8, 1);
  };
  // fmaxf is enough: a NaN is not greater either, and exp does not depend on the sign of a zero.
  float next = c.m;
#pragma unroll
  for (int h = 0; h < 2; h++)
#pragma unroll
    for (int half = 0; half < HALVES; half++)
      if (live(half, h)) next = fmaxf(scores[half][n][e + 2 * h], next);
  for (int step = RM_WARP / 2; step >= 4; step /= 2)
    next = fmaxf(__shfl_xor_sync(RM_ALL_LANES, next, step), next);
  float sums[2]; // p_j + p_{j+16}
#pragma unroll
  for (int h = 0; h < 2; h++) {
#pragma unroll
    for (int half = 0; half < HALVES; half++) {
      float &score = scores[half][n][e + 2 * h];
      score = live(half, h) ? rm_exp_not_above_0(score - next) : 0.0f;
    }
    sums[h] = scores[0][n][e + 2 * h] + scores[1][n][e + 2 * h];
  }
  float sum = sums[0] + sums[1];
  for (int step = RM_WARP / 2; step >= 4; step /= 2)
    sum = sum + __shfl_xor_sync(RM_ALL_LANES, sum, step);
  __syncwarp(); // eight lanes have read m and l
  if (!ALL && !rm_is_live(c.live, t0, KEYS)) return 1.0f; // the state does not change
  const float alpha =
      rm_exp_not_above_0(rm_bits(c.m) == rm_bits(RM_LOWEST) ? RM_LOWEST : c.m - next);
  if (lane / 4 == 0) of->m = next, of->l = fmaf(c.l, alpha, sum);
  return alpha;
}

// For the warp's columns: multiplies A[d] by alpha, and writes P as B of Vᵀ·P.
template <bool ALL, int DT>
__device__ void soften_all(float (&acc)[DT][CT][4], uint2 (&p)[HALVES][CT],
                           float (&scores)[HALVES][CT][4], block &b, int t0) {
  const int lane = rm_lane(), warp = rm_warp();
#pragma unroll
  for (int n = 0; n < CT; n++) {
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const float alpha =
          soften<ALL>(scores, n, e, b.columns + warp * WARP_COLS + n * 8 + lane % 4 * 2 + e, t0);
#pragma unroll
      for (int i = 0; i < DT; i++)
        acc[i][n][e] = acc[i][n][e] * alpha, acc[i][n][e + 2] = acc[i][n][e + 2] * alpha;
    }
#pragma unroll
    for (int half = 0; half < HALVES; half++) {
      p[half][n].x = rm_transposed(rm_bf16_pair(scores[half][n][0], scores[half][n][1]));
      p[half][n].y = rm_transposed(rm_bf16_pair(scores[half][n][2], scores[half][n][3]));
    }
  }
}

// Adds the 32 positions of a stage.
template <class S>
__device__ void add_positions(float (&acc)[S::DT][CT][4], block &b, const char *stage,
                              const rm_attention_args &a, int t0) {
  const int lane = rm_lane(), warp = rm_warp();
  float scores[HALVES][CT][4] = {};
  make_scores<S>(scores, b, stage, a.head_dim, a.scale);
  uint2 p[HALVES][CT];
  const span whole = b.whole[warp];
  if (whole.first <= t0 && whole.last >= t0 + KEYS - 1) soften_all<true>(acc, p, scores, b, t0);
  else soften_all<false>(acc, p, scores, b, t0);
  const span live = b.live[warp];
  const uint4 *values =
      reinterpret_cast<const uint4 *>(stage) + HALVES * S::steps(a.head_dim) * RM_WARP + lane;
#pragma unroll
  for (int i = 0; i < S::DT; i++) {
    __syncwarp(); // keeps the compiler from starting the next early, which would need registers
    float sums[CT][4] = {};
#pragma unroll
    for (int half = 0; half < HALVES; half++) {
      const uint4 v = rm_is_live(live, t0 + half * RM_MMA_K, RM_MMA_K)
                          ? values[(half * S::DT + i) * RM_WARP]
                          : uint4{0, 0, 0, 0};
#pragma unroll
      for (int n = 0; n < CT; n++) rm_mma16(sums[n], v, p[half][n]);
    }
#pragma unroll
    for (int n = 0; n < CT; n++)
#pragma unroll
      for (int j = 0; j < 4; j++) acc[i][n][j] = acc[i][n][j] + sums[n][j];
  }
}

// Called by the column's lane. Writes m and l to the workspace unless the column is complete.
__device__ void join(block &b, const rm_attention_args &a, float *states, int64_t place0,
                     int split) {
  const column c = b.columns[threadIdx.x];
  joined of = {0.0f, 1.0f, c.l, -1, 1.0f};
  if (rm_is_live(c.live, split * SPLIT, SPLIT)) {
    const rm_attn_owner o = rm_attn_owner_of(b.w, rm_thread());
    of.place = static_cast<int>(o.row * a.n_heads + o.head);
    float *state = states + (of.place - place0) * rm_state_floats(a.value_dim) + a.value_dim,
          m = c.m;
    if (split != c.live.first / SPLIT) {
      const rm_merged all = rm_merge(state[0], state[1], c.m, c.l);
      m = all.max, of.l = all.sum, of.old = all.old, of.add = all.add;
    }
    if (split != c.live.last / SPLIT) state[0] = m, state[1] = of.l;
    else of.last = rm_add_sink(&a, o.head, m, &of.l);
  }
  b.merges[threadIdx.x] = of;
}

// Merges the states of a split into those of the previous splits, in the workspace. After its
// last split, writes a column's row. Sums go through shared memory, 64 of 8 columns at a time, so
// that adjacent lanes have adjacent sums.
template <class S>
__device__ void end_split(const float (&acc)[S::DT][CT][4], block &b, const rm_attention_args &a,
                          const tiles &t, float *states, int split) {
  const int lane = rm_lane(), warp = rm_warp();
  const int64_t place0 = t.tile0 * t.rows_each * a.n_heads;
  float *mine = b.put[warp];
  join(b, a, states, place0, split);
#pragma unroll
  for (int n = 0; n < CT; n++)
#pragma unroll
    for (int i0 = 0; i0 < S::DT; i0 += PUT_TILES) {
#pragma unroll
      for (int i = 0; i < PUT_TILES; i++)
#pragma unroll
        for (int j = 0; j < 4; j++)
          mine[(lane % 4 * 2 + j % 2) * PUT_PITCH + i * RM_MMA_ROWS + lane / 4 + j / 2 * 8] =
              acc[i0 + i][n][j];
      __syncwarp();
#pragma unroll 1
      for (int turn = 0; turn < RM_MMA_COLS * PUT_TILES * RM_MMA_ROWS / RM_WARP; turn++) {
        const int at = turn / 2, in = turn % 2 * RM_WARP + lane,
                  column = warp * WARP_COLS + n * RM_MMA_COLS + at;
        const joined of = b.merges[column];
        const span live = b.columns[column].live;
        const int64_t d = (t.d_tile0 + i0) * RM_MMA_ROWS + in;
        if (of.place < 0 || d >= a.value_dim) continue;
        float *state = states + (of.place - place0) * rm_state_floats(a.value_dim),
              sum = mine[at * PUT_PITCH + in];
        if (split != live.first / SPLIT) sum = fmaf(state[d], of.old, sum * of.add);
        if (split == live.last / SPLIT)
          rm_put(RM_BF16, a.out, of.place * a.value_dim + d, sum * of.last / of.l);
        else state[d] = sum;
      }
      __syncwarp(); // before the next sums
    }
}

// Computes the rows of the tile from `from` on that belong to the same sequence. Returns the first
// row after them.
template <class S>
__device__ int make_rows(block &b, const rm_attention_args &a, const tiles &t, float *states,
                         int from) {
  int to = from + 1;
  while (to < t.rows_each && b.seqs[to] == b.seqs[from]) to++;
  const rm_attn_owner o = rm_attn_owner_of(b.w, rm_thread());
  const bool is_one = o.some && o.row >= b.w.row0 + from && o.row < b.w.row0 + to;
  const span own = is_one ? rm_live_span(a, o.row) : NONE;
  const int warp = rm_warp();
  const span live = over_lanes(own),
             whole = over_lanes(is_one ? span{-own.first, -own.last} : NONE);
  b.columns[threadIdx.x].live = own;
  if (rm_lane() == 0) b.live[warp] = live, b.whole[warp] = {-whole.first, -whole.last};
  if (threadIdx.x == 0) b.pages = a.block_tables + b.seqs[from] * a.max_pages;
  __syncthreads();
  span all = b.live[0];
  for (int w = 1; w < WARPS; w++) all = union_of(all, b.live[w]);
  if (threadIdx.x == 0) b.all = all; // read after the next barrier
  const auto stage = [&](int t0) { return b.stage<S>(a.head_dim, t0); };
  float acc[S::DT][CT][4];
  begin_split(acc, b);
  const int begin = all.first / KEYS * KEYS;
  fill<S>(stage(begin), a, b, all, begin, t.d_tile0);
  rm_copies_commit();
  bool is_end = false;
  for (int t0 = begin; !is_end; t0 += KEYS) {
    rm_copies_wait<0>();
    __syncthreads(); // all copies are complete, and all threads have read the other stage
    is_end = t0 + KEYS > b.all.last;
    if (!is_end) fill<S>(stage(t0 + KEYS), a, b, b.all, t0 + KEYS, t.d_tile0);
    rm_copies_commit();
    if (rm_is_live(b.live[warp], t0, KEYS)) add_positions<S>(acc, b, stage(t0), a, t0);
    if ((t0 + KEYS) % SPLIT != 0 && !is_end) continue;
    __syncwarp(); // m and l have been written
    end_split<S>(acc, b, a, t, states, t0 / SPLIT);
    begin_split(acc, b);
  }
  rm_copies_wait<0>(); // a block must not end with an open group, even an empty one
  __syncthreads(); // before the next rows' columns and stages
  return to;
}

template <class S>
__global__ void __launch_bounds__(THREADS, 2)
    tile_kernel(rm_attention_args a, tiles t, float *states) {
  RM_SHARED(shared);
  // In reverse: the last tile has the most work and begins first.
  const int64_t tile = t.tile0 + (gridDim.x - 1 - blockIdx.x), row0 = tile * t.rows_each;
  if (t.by_rows[tile]) return; // the whole block returns, here and below
  const rm_attn_work w = rm_attn_work_of(a, row0, rm_min64(row0 + t.rows_each, a.rows), t.heads,
                                         t.head_tiles, blockIdx.y);
  if (w.head0 >= w.head_end) return;
  block &b = *reinterpret_cast<block *>(shared);
  load_queries<S>(b, a, w);
  if (threadIdx.x == 0) b.w = w;
  __syncthreads();
  for (int from = 0; from < t.rows_each && b.seqs[from] >= 0;)
    from = make_rows<S>(b, a, t, states, from);
}

// One block: lists the tiles with rows of several sequences, as many as fit on the list. The order
// of the list depends on timing, but the results do not.
__global__ void __launch_bounds__(LIST_THREADS)
    list_kernel(rm_attention_args a, int32_t *list, int32_t *by_rows, int64_t n_tiles,
                int64_t rows_each, int room) {
  RM_SHARED(shared);
  auto *const taken = reinterpret_cast<unsigned long long *>(shared);
  if (threadIdx.x == 0) *taken = 0;
  __syncthreads();
  for (int64_t tile = threadIdx.x; tile < n_tiles; tile += LIST_THREADS) {
    const int64_t end = rm_min64((tile + 1) * rows_each, a.rows);
    bool is_mixed = false;
    for (int64_t row = tile * rows_each + 1; row < end; row++)
      is_mixed |= a.seq_of_row[row] != a.seq_of_row[row - 1];
    const int place = is_mixed ? static_cast<int>(atomicAdd(taken, 1)) : room;
    by_rows[tile] = place < room;
    if (place < room) list[1 + place] = static_cast<int32_t>(tile);
  }
  __syncthreads();
  if (threadIdx.x == 0)
    list[0] = static_cast<int32_t>(rm_min64(static_cast<int64_t>(*taken), room));
}

template <class S>
void launch(const rm_ctx *ctx, const rm_attention_args *a, tiles t, int64_t n_tiles,
            float *states) {
  const dim3 grid = rm_grid(n_tiles, a->n_kv_heads * t.head_tiles);
  const size_t shared = static_cast<size_t>(shared_bytes<S>(a->head_dim));
  for (; t.d_tile0 < rm_mma_tile_rows(a->value_dim); t.d_tile0 += S::DT)
    RM_LAUNCH((tile_kernel<S>), grid, THREADS, shared, ctx->stream, *a, t, states);
}

} // namespace

// Bytes of the list, and of a flag for each tile on it.
static size_t list_bytes(int64_t n_tiles) {
  return static_cast<size_t>(
      rm_round_up((1 + 2 * n_tiles) * static_cast<int64_t>(sizeof(int32_t)), 256));
}

// The list and the flags of tiles of two rows, which are the smallest, and the states.
size_t rm_cuda_mma_attention_workspace(const rm_limits *l) {
  return list_bytes((l->max_rows + 1) / 2) + rm_cuda_attention_workspace(l);
}

rm_attn_left rm_cuda_attention_mma_tiles(const rm_ctx *ctx, const rm_attention_args *a) {
  const rm_attn_left all = {{}, a->rows, 0};
  // Another kernel computes decode, and capped scores, whose tanh would take registers from the
  // products.
  if (a->rows <= a->n_seqs || a->n_heads <= 0 || a->softcap != 0.0f) return all;
  tiles t = {};
  t.heads = static_cast<int>(rm_min64(a->group, COLS));
  t.head_tiles = static_cast<int>((a->group + t.heads - 1) / t.heads);
  t.rows_each = COLS / t.heads;
  const bool is_128 = rm_mma_steps(a->head_dim) == shape_128::steps(a->head_dim);
  const int64_t n_tiles = (a->rows + t.rows_each - 1) / t.rows_each,
                n_splits = rm_count_splits(a->max_pages * a->page_size);
  const size_t used = list_bytes(n_tiles), of_row = rm_states_bytes(a->n_heads, a->value_dim),
               of_tile = of_row * static_cast<size_t>(t.rows_each);
  // A listed row needs the states of all its splits, and a tile of several splits one of each row.
  const size_t least = rm_max64(n_splits, n_splits > 1 ? t.rows_each : 1) * of_row;
  if (t.rows_each < 2 || (!is_128 && shared_bytes<shape_any>(a->head_dim) > RM_MAX_SHARED) ||
      ctx->workspace_bytes < used + least)
    return all;
  const int64_t at_once =
      n_splits > 1 ? static_cast<int64_t>((ctx->workspace_bytes - used) / of_tile) : n_tiles;
  int32_t *list = static_cast<int32_t *>(ctx->workspace), *by_rows = list + 1 + n_tiles;
  float *states = reinterpret_cast<float *>(static_cast<char *>(ctx->workspace) + used);
  const int64_t room = rm_min64(n_tiles, (MOST_BY_ROWS + t.rows_each - 1) / t.rows_each);
  RM_LAUNCH(list_kernel, 1, LIST_THREADS, sizeof(unsigned long long), ctx->stream, *a, list,
            by_rows, n_tiles, static_cast<int64_t>(t.rows_each), static_cast<int>(room));
  t.by_rows = by_rows;
  for (; t.tile0 < n_tiles; t.tile0 += at_once) {
    const int64_t now = rm_min64(at_once, n_tiles - t.tile0);
    if (is_128) launch<shape_128>(ctx, a, t, now, states);
    else launch<shape_any>(ctx, a, t, now, states);
  }
  return {{list, t.rows_each}, room * t.rows_each, used};
}

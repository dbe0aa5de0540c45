// attention_mma.cu: attention of the family cuda_mma in bf16, docs/numerics.md §4 with its two dot products on tensor cores: K·qᵀ is one
// chain over head_dim, Vᵀ·P two steps from +0 for each block of 32 positions. A block of threads makes the states of one segment of
// 1024 positions for up to 32 columns: the query heads of one kv head, times rows that stand together. Of 64 positions at a time each
// warp makes the scores of 16, then the softmax of a quarter of the columns, then the sums of a quarter of head_dim; scores and P pass
// through shared memory, since what is a row of K's result is a k of V's. A column knows nothing of the others: decode has the heads
// of one row for columns, prefill 32, and the bits are the same.
//
// What limits it is issue, of the softmax above all: 1.5 thousand instructions a warp for 64 positions, of which the tensor cores' are 64.
// So a warp softens its columns together: what is one number a column (m, l, alpha) is one lane's, not all lanes', and the trees over
// positions halve what is left with each step. A column at a time took twice the instructions. Values are asked for before the softmax.
//
// Which rows are of one sequence is read on the device. Where some may be, one launch makes all tiles of rows that are, 32 columns each,
// and a second one the rows of the other tiles, one by one, as in decode; the blocks of either return where the other has the work. A K
// or V tile of 16 positions is read when one of them is live for one of the columns.
#include "attention.cuh"
#include "mma.cuh"

namespace {

constexpr int WARPS = 4, THREADS = WARPS * RM_WARP, AT_ONCE = 64, BLOCKS = AT_ONCE / RM_ATTN_BLOCK;
constexpr int SCORE_PITCH = AT_ONCE + 4, P_PITCH = AT_ONCE / 2 + 4;  // floats, words: no two lanes in a bank
constexpr int MAX_SHARED = 48 << 10;  // what a kernel may have without asking
constexpr float LOWEST = -INFINITY;

struct shape {
  int64_t row0, rows;   // of the turn
  int n_segments, heads, rows_each, head_tiles;  // columns of a block: `heads` of each of rows_each rows
  int tile_rows;        // rows of a tile of the launch for tiles, in the launch for the rows of mixed ones; else 0
  int d_tile0;          // first row of V's tiles: a head_dim of more than WARPS × DT of them takes several launches
};

// In shared memory. first > last: the column is nothing.
template <int COLS> struct columns {
  uint32_t *q;         // [COLS][pitch] pairs of bf16
  float *scores;       // [COLS][SCORE_PITCH]
  uint32_t *p;         // [COLS][P_PITCH] pairs of bf16
  float *alpha;        // [BLOCKS][COLS]
  int *first, *last;   // [COLS] live positions
  int pitch;
};
RM_INLINE int q_pitch(int64_t head_dim) { return static_cast<int>(rm_round_up(head_dim, RM_K_BLOCK) / 2) + 4; }
template <int COLS> RM_INLINE int shared_words(int64_t head_dim) { return COLS * (q_pitch(head_dim) + SCORE_PITCH + P_PITCH + BLOCKS + 2); }
template <int COLS> __device__ columns<COLS> columns_in(float *shared, int64_t head_dim) {
  columns<COLS> c;
  c.pitch = q_pitch(head_dim);
  c.q = reinterpret_cast<uint32_t *>(shared);
  c.scores = shared + COLS * c.pitch;
  c.p = reinterpret_cast<uint32_t *>(c.scores + COLS * SCORE_PITCH);
  c.alpha = reinterpret_cast<float *>(c.p + COLS * P_PITCH);
  c.first = reinterpret_cast<int *>(c.alpha + BLOCKS * COLS);
  c.last = c.first + COLS;
  return c;
}

// What a column is: a row and a query head, or nothing.
struct owner {
  int64_t row, head;
  bool some;
};

struct work {  // of a block
  int64_t row0, end, kv_head, head0, head_end;
  int heads;
};

__device__ work work_of(const rm_attention_args &a, const shape &s) {
  const int64_t group = a.group > 0 ? a.group : static_cast<uint32_t>(a.n_heads) / static_cast<uint32_t>(a.n_kv_heads);
  work w;
  w.row0 = s.row0 + blockIdx.x * static_cast<int64_t>(s.rows_each);
  w.end = rm_min64(w.row0 + s.rows_each, s.row0 + s.rows);
  w.kv_head = blockIdx.y / static_cast<unsigned>(s.head_tiles);
  const int64_t first = rm_max64(0, w.kv_head * group - a.head0);
  w.head0 = first + blockIdx.y % static_cast<unsigned>(s.head_tiles) * s.heads;
  w.head_end = rm_min64(rm_min64((w.kv_head + 1) * group - a.head0, a.n_heads), w.head0 + s.heads);
  w.heads = s.heads;
  return w;
}

__device__ owner owner_of(const work &w, int column) {
  const owner o = {w.row0 + column / w.heads, w.head0 + column % w.heads, false};
  return {o.row, o.head, o.row < w.end && o.head < w.head_end};
}

// The queries and live positions of the columns; those that are nothing get zeros.
template <int COLS> __device__ void load_columns(const columns<COLS> &c, const rm_attention_args &a, const work &w) {
  const int words = c.pitch - 4;
  for (int i = static_cast<int>(threadIdx.x); i < COLS * words; i += THREADS) {
    const int column = i / words, d = i % words * 2;
    const owner o = owner_of(w, column);
    const uint16_t *q = static_cast<const uint16_t *>(a.q) + (o.row * a.n_heads + o.head) * a.head_dim + d;
    const uint32_t even = o.some && d < a.head_dim ? q[0] : 0u, odd = o.some && d + 1 < a.head_dim ? q[1] : 0u;
    c.q[column * c.pitch + i % words] = even | odd << 16;
  }
  if (threadIdx.x >= COLS) return;
  const owner o = owner_of(w, static_cast<int>(threadIdx.x));
  const rm_span live = o.some ? rm_live_span(a, o.row) : rm_span{0, -1};
  c.first[threadIdx.x] = static_cast<int>(live.first);
  c.last[threadIdx.x] = static_cast<int>(live.last);
}

// Live positions of a column, a lane's.
struct reach {
  int first, last;
};
template <int COLS> __device__ reach reach_of_lane(const columns<COLS> &c) {
  const int lane = static_cast<int>(threadIdx.x) % RM_WARP;
  return lane < COLS ? reach{c.first[lane], c.last[lane]} : reach{0, -1};
}
// Whether one of `n` positions from t on is live for a column. By a whole warp.
__device__ bool is_wanted(reach of_lane, int t, int n) {
  return __ballot_sync(RM_ALL_LANES, of_lane.first < t + n && of_lane.last >= t) != 0;
}

// Of AT_ONCE positions the tiles of 16, lane l having the l % TILES-th: where it begins in K's and V's cache, in words of 16 bytes.
constexpr int TILES = AT_ONCE / RM_MMA_ROWS;
struct tiles {
  bool wanted[TILES];
  int64_t k, v;
};
__device__ tiles tiles_of(reach of_lane, const rm_attention_args &a, const work &w, const int32_t *pages, int t0) {
  const int mine = static_cast<int>(threadIdx.x) % TILES;
  tiles found = {};
  bool is_mine_wanted = false;
#pragma unroll
  for (int i = 0; i < TILES; i++) {
    found.wanted[i] = is_wanted(of_lane, t0 + i * RM_MMA_ROWS, RM_MMA_ROWS);
    if (i == mine) is_mine_wanted = found.wanted[i];
  }
  if (!is_mine_wanted) return found;  // its page may not be there
  const uint32_t page_size = static_cast<uint32_t>(a.page_size), at = static_cast<uint32_t>(t0 + mine * RM_MMA_ROWS);
  const int64_t page = pages[at / page_size] * a.n_kv_heads + w.kv_head, tile = at % page_size / RM_MMA_ROWS;
  found.k = page * (rm_k_page_elems(a.page_size, a.head_dim) / 8) + tile * rm_mma_steps(a.head_dim) * RM_WARP;
  found.v = page * (rm_v_page_elems(a.page_size, a.head_dim) / 8) + tile * rm_mma_tile_rows(a.head_dim) * RM_WARP;
  return found;
}

// B of 8 columns and two steps of 16 k, of rows of `pitch` words.
__device__ uint4 load_columns_of(const uint32_t *rows, int pitch, int n, int step) {
  const int lane = static_cast<int>(threadIdx.x) % RM_WARP;
  return rm_load_matrices(rows + (n * 8 + lane % 8) * pitch + step * (RM_MMA_K / 2) + lane / 8 * 4);
}

// Of the warp's tile.
template <int CT> __device__ void make_scores(const columns<CT * 8> &c, const rm_attention_args &a, const tiles &at) {
  const int lane = static_cast<int>(threadIdx.x) % RM_WARP, warp = static_cast<int>(threadIdx.x) / RM_WARP;
  const int steps = static_cast<int>(rm_mma_steps(a.head_dim));
  static_assert(TILES == WARPS);
  const uint4 *k = static_cast<const uint4 *>(a.k_cache) + __shfl_sync(RM_ALL_LANES, at.k, warp) + lane;
  bool wanted = false;
#pragma unroll
  for (int i = 0; i < TILES; i++)
    if (i == warp) wanted = at.wanted[i];
  if (!wanted) return;
  float acc[CT][4] = {};
  for (int step0 = 0; step0 < steps; step0 += RM_MMA_STEPS) {
    float sums[CT][4] = {};
#pragma unroll 4
    for (int step = step0; step < steps && step < step0 + RM_MMA_STEPS; step += 2) {  // they are even
      const uint4 even = k[step * RM_WARP], odd = k[(step + 1) * RM_WARP];
#pragma unroll
      for (int n = 0; n < CT; n++) {
        const uint4 q = load_columns_of(c.q, c.pitch, n, step);
        rm_mma16(sums[n], even, {q.x, q.y});
        rm_mma16(sums[n], odd, {q.z, q.w});
      }
    }
#pragma unroll
    for (int n = 0; n < CT; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) acc[n][i] = acc[n][i] + sums[n][i];
  }
#pragma unroll
  for (int n = 0; n < CT; n++)
#pragma unroll
    for (int i = 0; i < 4; i++)
      c.scores[(n * 8 + lane % 4 * 2 + i % 2) * SCORE_PITCH + warp * RM_MMA_ROWS + lane / 4 + i / 2 * 8] = acc[n][i] * a.scale;
}

// The EACH columns that a warp softens, WARP_LANES / EACH lanes to each for what is one number a column.
template <int EACH> constexpr int LANES_OF = RM_WARP / EACH;

// Over the lanes, of EACH numbers in each of them; a lane gets the result of its own column. What is left to do is halved with every step
// that leaves more columns than one, so it takes EACH + 1 exchanges and not 5 · EACH; a column's tree is the one over 32 lanes.
template <int EACH, class F> __device__ float over_columns(float (&v)[EACH], F both) {
  const int lane = static_cast<int>(threadIdx.x) % RM_WARP;
  int n = EACH;
#pragma unroll
  for (int step = RM_WARP / 2; step > 0; step /= 2) {
    const bool upper = lane & step;
    if (n == 1) v[0] = both(__shfl_xor_sync(RM_ALL_LANES, v[0], step), v[0]);
    else n /= 2;
#pragma unroll
    for (int i = 0; i < EACH / 2; i++)
      if (i < n && step >= LANES_OF<EACH>) {
        const float give = upper ? v[i] : v[n + i], keep = upper ? v[n + i] : v[i];
        v[i] = both(__shfl_xor_sync(RM_ALL_LANES, give, step), keep);
      }
  }
  return v[0];
}

// The running state of the lane's column, and what is live of it.
struct running {
  float m, l;
  int first, last;
};

// One block of 32 positions of a warp's columns, a lane for a position: P, alpha and the running m and l. ALL: every position is live for
// every one of them.
template <int COLS, bool ALL> __device__ void soften(const columns<COLS> &c, int column0, int t0, int block, running &own) {
  constexpr int EACH = COLS / WARPS;
  const int lane = static_cast<int>(threadIdx.x) % RM_WARP, in = block * RM_ATTN_BLOCK + lane;
  const int from = t0 + block * static_cast<int>(RM_ATTN_BLOCK), t = from + lane;
  float scores[EACH], v[EACH];
  bool live[EACH];
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    live[i] = ALL || (t >= c.first[column0 + i] && t <= c.last[column0 + i]);
    scores[i] = c.scores[(column0 + i) * SCORE_PITCH + in];
    v[i] = live[i] ? rm_max_f32(scores[i], LOWEST) : LOWEST;
  }
  const float next = rm_max_f32(over_columns<EACH>(v, rm_max_f32), own.m);
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const float top = __shfl_sync(RM_ALL_LANES, next, i * LANES_OF<EACH>);
    v[i] = live[i] ? rm_exp(scores[i] - top) : 0.0f;
    reinterpret_cast<uint16_t *>(c.p)[(column0 + i) * P_PITCH * 2 + in] = rm_f32_to_bf16(v[i]);
  }
  const float sum = over_columns<EACH>(v, [](float a, float b) { return a + b; });  // p_j + p_{j+16}, then the tree over 16
  float scaled = 1.0f;
  if (from <= own.last && from + RM_ATTN_BLOCK > own.first) {  // else the state stays as it was
    scaled = rm_bits(own.m) == rm_bits(LOWEST) ? 0.0f : rm_exp(own.m - next);
    own.l = fmaf(own.l, scaled, sum);
    own.m = next;
  }
  if (lane % LANES_OF<EACH> == 0) c.alpha[block * COLS + column0 + lane / LANES_OF<EACH>] = scaled;
}

// Vᵀ's tiles of AT_ONCE positions, of the warp's rows of d: tiles warp, warp + WARPS, … Asked for before they are needed.
template <int DT> struct values {
  uint4 of[BLOCKS][DT][2];
  bool some[BLOCKS];  // a block without any leaves A[d] as it is
};
template <int DT> __device__ void load_values(values<DT> &v, const rm_attention_args &a, const tiles &at, int d_tile0) {
  const int warp = static_cast<int>(threadIdx.x) / RM_WARP, lane = static_cast<int>(threadIdx.x) % RM_WARP;
  const int d_tiles = static_cast<int>(rm_mma_tile_rows(a.head_dim));
#pragma unroll
  for (int block = 0; block < BLOCKS; block++) {
    v.some[block] = false;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int tile = block * 2 + half;
      const bool wanted = at.wanted[tile];
      const uint4 *from = static_cast<const uint4 *>(a.v_cache) + __shfl_sync(RM_ALL_LANES, at.v, tile) + lane;
#pragma unroll
      for (int i = 0; i < DT; i++) {
        const int d = d_tile0 + warp + i * WARPS;
        v.of[block][i][half] = wanted && d < d_tiles ? from[d * RM_WARP] : uint4{0, 0, 0, 0};
      }
      v.some[block] |= wanted;
    }
  }
}

template <int CT, int DT> __device__ void add_values(float (&acc)[DT][CT][4], const columns<CT * 8> &c, const values<DT> &v) {
  const int lane = static_cast<int>(threadIdx.x) % RM_WARP;
#pragma unroll
  for (int block = 0; block < BLOCKS; block++) {
    if (!v.some[block]) continue;
#pragma unroll
    for (int n = 0; n < CT; n++) {
      const uint4 p = load_columns_of(c.p, P_PITCH, n, block * 2);
      const float *alpha = c.alpha + block * CT * 8 + n * 8 + lane % 4 * 2;
      const float of[2] = {alpha[0], alpha[1]};
#pragma unroll
      for (int i = 0; i < DT; i++) {
        float sums[4] = {};
        rm_mma16(sums, v.of[block][i][0], {p.x, p.y});
        rm_mma16(sums, v.of[block][i][1], {p.z, p.w});
#pragma unroll
        for (int j = 0; j < 4; j++) acc[i][n][j] = acc[i][n][j] * of[j % 2] + sums[j];
      }
    }
  }
}

template <int COLS>
__device__ float *state_of(const columns<COLS> &c, const rm_attention_args &a, const work &w, const shape &s, float *states, int column) {
  const int begin = static_cast<int>(blockIdx.z) * static_cast<int>(RM_ATTN_SEGMENT);
  if (c.first[column] >= begin + RM_ATTN_SEGMENT || c.last[column] < begin) return nullptr;
  const owner o = owner_of(w, column);
  return states + (((o.row - s.row0) * a.n_heads + o.head) * s.n_segments + blockIdx.z) * rm_state_floats(a.head_dim);
}

// The rows of the block, all of one sequence.
template <int CT, int DT>
__device__ void segment_of_rows(const columns<CT * 8> &c, const rm_attention_args &a, const work &w, const shape &s, float *states) {
  constexpr int COLS = CT * 8, EACH = COLS / WARPS;
  const int warp = static_cast<int>(threadIdx.x) / RM_WARP, lane = static_cast<int>(threadIdx.x) % RM_WARP;
  const int begin = static_cast<int>(blockIdx.z) * static_cast<int>(RM_ATTN_SEGMENT), end = begin + RM_ATTN_SEGMENT;
  const int32_t *pages = a.block_tables + a.seq_of_row[w.row0] * a.max_pages;
  load_columns<COLS>(c, a, w);
  __syncthreads();
  float acc[DT][CT][4] = {};
  const int column0 = warp * EACH, column = column0 + lane / LANES_OF<EACH>;
  const reach of_lane = reach_of_lane<COLS>(c);
  running own = {LOWEST, 0.0f, c.first[column], c.last[column]};
  for (int t0 = begin; t0 < end; t0 += AT_ONCE) {
    if (!is_wanted(of_lane, t0, AT_ONCE)) continue;  // the same for all warps
    const tiles at = tiles_of(of_lane, a, w, pages, t0);
    make_scores<CT>(c, a, at);
    values<DT> v;
    load_values<DT>(v, a, at, s.d_tile0);
    __syncthreads();
    for (int block = 0; block < BLOCKS; block++) {
      const int from = t0 + block * static_cast<int>(RM_ATTN_BLOCK);
      const bool whole = own.first <= from && own.last >= from + RM_ATTN_BLOCK - 1;
      if (__ballot_sync(RM_ALL_LANES, whole) == RM_ALL_LANES) soften<COLS, true>(c, column0, t0, block, own);
      else soften<COLS, false>(c, column0, t0, block, own);
    }
    __syncthreads();  // P is read until the next scores' barrier, and written after it
    add_values<CT, DT>(acc, c, v);
  }
#pragma unroll
  for (int n = 0; n < CT; n++)
#pragma unroll
    for (int j = 0; j < 4; j++) {
      float *state = state_of<COLS>(c, a, w, s, states, n * 8 + lane % 4 * 2 + j % 2);
#pragma unroll
      for (int i = 0; i < DT; i++) {
        const int64_t d = (s.d_tile0 + warp + i * WARPS) * RM_MMA_ROWS + lane / 4 + j / 2 * 8;
        if (state && d < a.head_dim) state[d] = acc[i][n][j];
      }
    }
  float *state = lane % LANES_OF<EACH> == 0 ? state_of<COLS>(c, a, w, s, states, column) : nullptr;
  if (!state) return;
  state[a.head_dim] = own.m;
  state[a.head_dim + 1] = own.l;
}

// Whether rows [from, to) are of one sequence.
__device__ bool is_one_sequence(const rm_attention_args &a, int64_t from, int64_t to) {
  for (int64_t row = from + 1; row < to; row++)
    if (a.seq_of_row[row] != a.seq_of_row[from]) return false;
  return true;
}

// Blocks of a multiprocessor that the registers allow.
template <int CT, int DT> constexpr int AT_LEAST = CT == 1 ? 6 - DT / 2 : 3 - DT / 4;

template <int CT, int DT>
__global__ void __launch_bounds__(THREADS, AT_LEAST<CT, DT>) segment_kernel(rm_attention_args a, shape s, float *states) {
  RM_SHARED(shared);
  const work w = work_of(a, s);
  if (w.head0 >= w.head_end) return;  // all of the block, here and below
  const int64_t each = s.tile_rows > 0 ? s.tile_rows : s.rows_each, tile = s.row0 + (w.row0 - s.row0) / each * each;
  const bool whole = is_one_sequence(a, tile, rm_min64(tile + each, s.row0 + s.rows));
  if (whole == (s.tile_rows > 0)) return;
  segment_of_rows<CT, DT>(columns_in<CT * 8>(shared, a.head_dim), a, w, s, states);
}

template <int CT, int DT> void launch(const rm_ctx *ctx, const rm_attention_args *a, float *states, shape s) {
  const int64_t group = rm_query_group(a->group, a->n_heads, a->n_kv_heads);
  s.heads = static_cast<int>(rm_min64(group, CT * 8));
  s.head_tiles = static_cast<int>((group + s.heads - 1) / s.heads);
  const dim3 grid(rm_blocks(s.rows, s.rows_each), static_cast<unsigned>(a->n_kv_heads * s.head_tiles), static_cast<unsigned>(s.n_segments));
  const size_t shared = static_cast<size_t>(shared_words<CT * 8>(a->head_dim)) * sizeof(float);
  for (; s.d_tile0 < rm_mma_tile_rows(a->head_dim); s.d_tile0 += WARPS * DT)
    RM_LAUNCH((segment_kernel<CT, DT>), grid, dim3(THREADS), shared, ctx->stream, *a, s, states);
}

template <int CT> void of_head_dim(const rm_ctx *ctx, const rm_attention_args *a, float *states, const shape &s) {
  constexpr int64_t EACH = WARPS * RM_MMA_ROWS;
  if (a->head_dim <= EACH) launch<CT, 1>(ctx, a, states, s);
  else if (a->head_dim <= 2 * EACH) launch<CT, 2>(ctx, a, states, s);
  else launch<CT, 4>(ctx, a, states, s);
}

// More rows than sequences: some of them are a prefill's and stand together.
void mma_states(const rm_ctx *ctx, const rm_attention_args *a, float *states, rm_rows_turn t) {
  constexpr int COLS = 32;
  const int64_t tile_rows = COLS / rm_min64(COLS, rm_query_group(a->group, a->n_heads, a->n_kv_heads));
  const bool fits = shared_words<COLS>(a->head_dim) * static_cast<int>(sizeof(float)) <= MAX_SHARED;
  shape s = {};
  s.row0 = t.row0, s.rows = t.rows, s.n_segments = static_cast<int>(t.n_segments), s.rows_each = 1;
  if (a->rows > a->n_seqs && tile_rows > 1 && fits) {
    s.rows_each = static_cast<int>(tile_rows);
    of_head_dim<COLS / 8>(ctx, a, states, s);
    s.rows_each = 1, s.tile_rows = static_cast<int>(tile_rows);
  }
  of_head_dim<1>(ctx, a, states, s);
}

}  // namespace

void rm_cuda_mma_attention(const rm_ctx *ctx, const rm_attention_args *a) {
  if (a->dtype == RM_BF16) rm_cuda_attention_by(ctx, a, mma_states);
  else rm_cuda_attention(ctx, a);
}

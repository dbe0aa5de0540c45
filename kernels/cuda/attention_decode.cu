// attention_decode.cu: paged attention with one block of threads for (row, query head, split of
// 1024 positions), then one block that merges the splits in order: docs/numerics.md §4. Splits
// are counted from position 0, so a long context spreads over the GPU and the result does not
// depend on the batch; states are in ctx->workspace. The kernel also computes prefill rows, but
// reads keys again for each row, as decode has to. The host does not have the positions: it
// launches for the longest context that the block tables can hold, and blocks without a live
// position return. Rejected: a split by load, because it would change the order of sums.
#include <cassert>

#include "attention.cuh"

namespace {

constexpr int THREADS = 128, WARPS = THREADS / RM_WARP, WORKSPACE_ROWS = 64, MAX_GRID_Z = 65535;
using span = rm_span;
static_assert(RM_WARP == static_cast<int>(RM_ATTN_BLOCK),
              "a lane is a position of a softmax block");

struct head_view { // one query head of one row
  const int32_t *pages;
  int64_t kv_head, q_at;
};

// A position's page of the kv head, and its index there. In 32 bits, since a 64-bit division is a
// function call with its own registers.
struct place {
  int64_t page, pos;
};
__device__ place place_of(const rm_attention_args &a, head_view h, int64_t t) {
  const uint32_t at = static_cast<uint32_t>(t), size = static_cast<uint32_t>(a.page_size);
  return {h.pages[at / size] * a.n_kv_heads + h.kv_head, at % size};
}

__device__ head_view view(const rm_attention_args &a, int64_t row, int64_t head) {
  return {a.block_tables + a.seq_of_row[row] * a.max_pages,
          static_cast<uint32_t>(a.head0 + head) / static_cast<uint32_t>(a.group),
          (row * a.n_heads + head) * a.head_dim};
}

// Warp w takes every WARPS-th block of 32 k; `soften` adds the sums of the blocks in order.
template <rm_dtype DTYPE>
__device__ void partial_scores(float *part, const float *q, const rm_attention_args &a, head_view h,
                               int64_t t, span s) {
  const int lane = rm_lane();
  if (!rm_is_live(s, static_cast<int>(t), 1)) return;
  const auto [page, pos] = place_of(a, h, t);
  for (int64_t kb = threadIdx.x / RM_WARP; kb * RM_K_BLOCK < a.head_dim; kb += WARPS) {
    const int64_t tile =
        rm_packed_index(DTYPE, a.head_dim, pos / RM_N_TILE * RM_N_TILE, kb * RM_K_BLOCK);
    float sum[1] = {};
    rm_add_block(sum, q + kb * RM_K_BLOCK, 0,
                 rm_column_of<DTYPE>(a.k_cache,
                                     page * rm_k_page_elems(a.page_size, a.head_dim) + tile,
                                     static_cast<int>(pos % RM_N_TILE)));
    part[kb * RM_WARP + lane] = sum[0];
  }
}

// Called by the first warp, with one lane for each position: computes the running (m, l), p and
// alpha of one block.
template <rm_dtype DTYPE>
__device__ void soften(float *p, float *alpha, const float *part, const rm_attention_args &a,
                       bool is_live, float *m, float *l) {
  const int lane = rm_thread();
  float score = 0.0f;
  for (int64_t kb = 0; is_live && kb * RM_K_BLOCK < a.head_dim; kb++)
    score = score + part[kb * RM_WARP + lane];
  score = rm_softcap(score * a.scale, a.softcap);
  float next = is_live ? rm_max_f32(score, *m) : *m;
  next = rm_max_lanes(next);
  const float weight = is_live ? rm_exp(score - next) : 0.0f;
  float sum = weight; // p_j + p_{j+16}, then the tree over 16: both lanes of a step add the same
  for (int step = RM_WARP / 2; step > 0; step /= 2)
    sum = sum + __shfl_xor_sync(RM_ALL_LANES, sum, step);
  const float scaled = rm_bits(*m) == rm_bits(-INFINITY) ? 0.0f : rm_exp(*m - next);
  *l = fmaf(*l, scaled, sum);
  *m = next;
  p[lane] = rm_round_to(DTYPE, weight);
  if (lane == 0) *alpha = scaled;
}

template <rm_dtype DTYPE>
__device__ void add_values(float *acc, const float *p, float alpha, const rm_attention_args &a,
                           head_view h, int64_t t0, span s) {
  const int64_t from = rm_max64(t0, s.first), to = rm_min64(t0 + RM_ATTN_BLOCK - 1, s.last);
  for (int64_t d = threadIdx.x; d < a.value_dim; d += THREADS) {
    float even = 0.0f, odd = 0.0f;
    for (int64_t t = from; t <= to; t++) {
      const auto [page, pos] = place_of(a, h, t);
      const float v = rm_get(DTYPE, a.v_cache,
                             page * rm_v_page_elems(a.page_size, a.value_dim) +
                                 rm_v_index(DTYPE, a.value_dim, pos, d));
      if (t & 1) odd = fmaf(p[t - t0], v, odd);
      else even = fmaf(p[t - t0], v, even);
    }
    acc[d] = acc[d] * alpha + (even + odd);
  }
}

template <rm_dtype DTYPE>
__global__ void __launch_bounds__(THREADS, 8)
    split_kernel(rm_attention_args a, float *states, int64_t row0) {
  const int64_t row = row0 + blockIdx.x, head = blockIdx.y, split = blockIdx.z;
  const span s = rm_live_span(a, row);
  const int64_t begin = split * RM_ATTN_SPLIT, k_padded = rm_round_up(a.head_dim, RM_K_BLOCK);
  if (!rm_is_live(s, static_cast<int>(begin), RM_ATTN_SPLIT)) return;
  RM_SHARED(shared);
  float *q = shared, *part = q + k_padded, *p = part + k_padded, *alpha = p + RM_ATTN_BLOCK,
        *acc = alpha + 1;
  const head_view h = view(a, row, head);
  for (int64_t d = threadIdx.x; d < k_padded; d += THREADS)
    q[d] = d < a.head_dim ? rm_get(DTYPE, a.q, h.q_at + d) : 0.0f;
  for (int64_t d = threadIdx.x; d < a.value_dim; d += THREADS) acc[d] = 0.0f;
  __syncthreads();
  float m = -INFINITY, l = 0.0f; // used by the first warp only
  const int64_t first_block = rm_max64(begin, s.first / RM_ATTN_BLOCK * RM_ATTN_BLOCK);
  for (int64_t t0 = first_block; t0 <= s.last && t0 < begin + RM_ATTN_SPLIT; t0 += RM_ATTN_BLOCK) {
    const int64_t t = t0 + rm_lane();
    partial_scores<DTYPE>(part, q, a, h, t, s);
    __syncthreads();
    if (threadIdx.x < RM_WARP)
      soften<DTYPE>(p, alpha, part, a, rm_is_live(s, static_cast<int>(t), 1), &m, &l);
    __syncthreads(); // p is read until the next block's first barrier, and written after it
    add_values<DTYPE>(acc, p, *alpha, a, h, t0, s);
  }
  float *state =
      states + ((blockIdx.x * a.n_heads + head) * gridDim.z + split) * rm_state_floats(a.value_dim);
  for (int64_t d = threadIdx.x; d < a.value_dim; d += THREADS) state[d] = acc[d];
  if (threadIdx.x == 0) {
    state[a.value_dim] = m;
    state[a.value_dim + 1] = l;
  }
}

template <rm_dtype DTYPE>
__global__ void __launch_bounds__(THREADS)
    merge_kernel(rm_attention_args a, const float *states, rm_rows_pass t) {
  const int64_t row = rm_row_of(t.list, a, t.row0 + blockIdx.x), head = blockIdx.y,
                words = rm_state_floats(a.value_dim);
  if (row < 0) return;
  const span s = rm_live_span(a, row);
  const int64_t from = s.first / RM_ATTN_SPLIT, to = s.last / RM_ATTN_SPLIT;
  const float *of_head = states + (blockIdx.x * a.n_heads + head) * t.n_splits * words;
  for (int64_t d = threadIdx.x; d < a.value_dim; d += THREADS) {
    const float *state = of_head + from * words;
    float sum = state[d], m_all = state[a.value_dim], l_all = state[a.value_dim + 1];
    for (int64_t split = from + 1; split <= to; split++) {
      state = of_head + split * words;
      const rm_merged all = rm_merge(m_all, l_all, state[a.value_dim], state[a.value_dim + 1]);
      m_all = all.max;
      l_all = all.sum;
      sum = fmaf(sum, all.old, state[d] * all.add);
    }
    const float factor = rm_add_sink(&a, head, m_all, &l_all);
    rm_put(DTYPE, a.out, (row * a.n_heads + head) * a.value_dim + d, sum * factor / l_all);
  }
}

void fma_states(const rm_ctx *ctx, const rm_attention_args *a, float *states, rm_rows_pass t) {
  const dim3 grid = rm_grid(t.rows, a->n_heads, t.n_splits);
  const size_t shared =
      (2 * rm_round_up(a->head_dim, RM_K_BLOCK) + RM_ATTN_BLOCK + 1 + a->value_dim) * sizeof(float);
  rm_by_dtype(a->dtype, [&]<rm_dtype DTYPE>() {
    RM_LAUNCH(split_kernel<DTYPE>, grid, THREADS, shared, ctx->stream, *a, states, t.row0);
  });
}

} // namespace

size_t rm_cuda_attention_workspace(const rm_limits *l) {
  return static_cast<size_t>(rm_min64(l->max_rows, WORKSPACE_ROWS) *
                             rm_count_splits(l->max_positions + RM_ATTN_SPLIT)) *
         rm_states_bytes(l->n_heads, l->head_dim);
}

// If the workspace cannot hold all rows, they are computed in several passes; the stream orders
// their use of the states. The workspace holds all splits of a position within the limits.
// Splits at the end of the last page, when a page is longer than a split, are never live.
void rm_cuda_attention_by(const rm_ctx *ctx, const rm_attention_args *a, rm_states_fn states_fn,
                          int64_t rows, rm_row_list list, size_t used) {
  if (rows <= 0 || a->n_heads <= 0) return;
  const int64_t room = static_cast<int64_t>((ctx->workspace_bytes - used) /
                                            rm_states_bytes(a->n_heads, a->value_dim)),
                n_splits = rm_min64(rm_count_splits(a->max_pages * a->page_size),
                                    rm_min64(room, MAX_GRID_Z));
  assert(n_splits > 0);
  const int64_t at_once = room / n_splits;
  float *states = reinterpret_cast<float *>(static_cast<char *>(ctx->workspace) + used);
  for (int64_t row0 = 0; row0 < rows; row0 += at_once) {
    const rm_rows_pass t = {row0, rm_min64(at_once, rows - row0), n_splits, list};
    const dim3 grid = rm_grid(t.rows, a->n_heads);
    states_fn(ctx, a, states, t);
    rm_by_dtype(a->dtype, [&]<rm_dtype DTYPE>() {
      RM_LAUNCH(merge_kernel<DTYPE>, grid, THREADS, 0, ctx->stream, *a, states, t);
    });
  }
}

void rm_cuda_attention(const rm_ctx *ctx, const rm_attention_args *a) {
  rm_cuda_attention_by(ctx, a, fma_states, a->rows, {}, 0);
}

// rope.cu: head_squares, and qk_rope_kv: norm, rotation, and the write of a kv head's k and v into
// their slot. One warp computes one head of one row: even one row has many heads, and warps do not
// wait for a block. The norm's 16 chains run in the lanes of both halves of the warp. One lane
// rotates a pair (i, i + rotary_dim/2), from shared memory, since other lanes may have normed it.
#include "device.cuh"
#include "packing.cuh"

namespace {

constexpr int WARPS = 4, THREADS = WARPS * RM_WARP;

template <rm_dtype DTYPE>
__global__ void __launch_bounds__(THREADS) squares_kernel(rm_head_squares_args a) {
  const int lane = rm_lane(), warp = rm_warp();
  const int64_t row = blockIdx.x, head = blockIdx.y * static_cast<int64_t>(WARPS) + warp,
                kv_head = head - a.n_heads;
  if (head >= a.n_heads + a.n_kv_heads) return; // whole warps
  const int64_t from = (row * (a.n_heads + 2 * a.n_kv_heads) + head) * a.head_dim;
  float partial = 0.0f;
  for (int64_t i = lane % RM_LANES; i < a.head_dim; i += RM_LANES) {
    const float x = rm_get(DTYPE, a.qkv, from + i);
    partial = fmaf(x, x, partial);
  }
  const float squares = rm_canon(rm_tree16_lanes(partial));
  if (lane == 0)
    (kv_head < 0 ? a.q_out[row * a.n_heads + head] : a.k_out[row * a.n_kv_heads + kv_head]) =
        squares;
}

// Copies n elements to shared memory.
template <rm_dtype DTYPE>
__device__ void load_head(float *head_at, const rm_qk_rope_kv_args &a, int64_t from, int n,
                          int lane) {
  for (int i = lane; i < n; i += RM_WARP) head_at[i] = rm_get(DTYPE, a.qkv, from + i);
  __syncwarp();
}

// Norms a head in shared memory: round_T(weight · round_T(x · scale)), or x without a weight.
template <rm_dtype DTYPE>
__device__ void norm_head(float *normed, const rm_qk_rope_kv_args &a, int64_t row, int64_t head,
                          int head_dim, int lane) {
  const int64_t kv_head = head - a.n_heads;
  const void *weight = kv_head < 0 ? a.q_weight : a.k_weight;
  if (!weight) return;
  float scale;
  int64_t weight_at = 0;
  if (a.q_squares) {
    scale = kv_head < 0 ? rm_scale_of_heads(&a, a.q_squares + row * a.all_heads, a.all_heads)
                        : rm_scale_of_heads(&a, a.k_squares + row * a.all_kv_heads, a.all_kv_heads);
    weight_at = (kv_head < 0 ? head : kv_head) * head_dim;
  } else {
    float partial = 0.0f;
    for (int i = lane % RM_LANES; i < head_dim; i += RM_LANES)
      partial = fmaf(normed[i], normed[i], partial);
    scale = rm_rms_scale(rm_tree16_lanes(partial), head_dim, a.eps);
    __syncwarp(); // all chains have read their values; a shuffle does not order memory
  }
  for (int i = lane; i < head_dim; i += RM_WARP)
    normed[i] =
        rm_round_to(DTYPE, rm_weighted(DTYPE, a.zero_centered, rm_get(DTYPE, weight, weight_at + i),
                                       normed[i] * scale));
  __syncwarp();
}

// Rotates in place: each lane reads and writes its own pairs.
template <rm_dtype DTYPE>
__device__ void rotate_head(float *normed, const rm_qk_rope_kv_args &a, int64_t row, int lane) {
  const int half = static_cast<int>(a.rotary_dim) / 2;
  const int64_t at = static_cast<int64_t>(a.positions[row]) * half;
  for (int i = lane; i < half; i += RM_WARP) {
    const float c = a.cos[at + i], s = a.sin[at + i], lo = normed[i], hi = normed[i + half];
    normed[i] = rm_round_to(DTYPE, rm_round_to(DTYPE, lo * c) + rm_round_to(DTYPE, -hi * s));
    normed[i + half] = rm_round_to(DTYPE, rm_round_to(DTYPE, hi * c) + rm_round_to(DTYPE, lo * s));
  }
  __syncwarp();
}

// Whether of(0) … of(n − 1) are finite.
template <class F> __device__ bool all_finite(int64_t n, int lane, F of) {
  bool bad = false;
  for (int64_t i = lane; i < n; i += RM_WARP) bad |= !rm_is_finite(of(i));
  return __ballot_sync(RM_ALL_LANES, bad) == 0;
}

// Stores k from shared memory and a copy of v, which may be there too; zeros instead of one that is
// not finite.
template <rm_dtype DTYPE, rm_packing PACKING>
__device__ void store_kv(const rm_qk_rope_kv_args &a, int64_t row, int64_t head, const float *k,
                         int64_t v_at, int lane) {
  // In 32 bits: a 64-bit division is a function call.
  const uint32_t slot = static_cast<uint32_t>(a.slots[row]),
                 page_size = static_cast<uint32_t>(a.page_size);
  const int64_t page = slot / page_size, pos = slot % page_size;
  const int64_t k_base = (page * a.n_kv_heads + head) * rm_k_page_elems(a.page_size, a.head_dim);
  const int64_t value_dim = rm_value_dim(a.value_dim, a.head_dim);
  const int64_t v_base = (page * a.n_kv_heads + head) * rm_v_page_elems(a.page_size, value_dim);
  const float *latent = a.value_dim ? k + a.rotary_dim : nullptr;
  const bool k_ok = all_finite(a.head_dim, lane, [&](int64_t d) { return k[d]; });
  const bool v_ok = all_finite(value_dim, lane, [&](int64_t d) {
    return latent ? latent[d] : rm_get(DTYPE, a.qkv, v_at + d);
  });
  for (int64_t d = lane; d < a.head_dim; d += RM_WARP)
    rm_put(DTYPE, a.k_cache, k_base + rm_weight_index<DTYPE, PACKING>(a.head_dim, pos, d),
           k_ok ? k[d] : 0.0f);
  for (int64_t d = lane; d < value_dim; d += RM_WARP) {
    const int64_t to = v_base + rm_value_index<DTYPE, PACKING>(value_dim, pos, d);
    if (v_ok && !latent) rm_copy_elem(DTYPE, a.v_cache, to, a.qkv, v_at + d);
    else rm_put(DTYPE, a.v_cache, to, v_ok ? latent[d] : 0.0f);
  }
  // Several heads of one row may do this at the same time: they write the same value.
  if (lane == 0 && !(k_ok && v_ok)) a.row_flags[row] |= RM_ROW_KV_NONFINITE;
}

// A head of q, or the only kv head, of a row of latent attention.
template <rm_dtype DTYPE, rm_packing PACKING>
__device__ void latent_head(float *made, const rm_qk_rope_kv_args &a, int64_t row, int64_t head,
                            int lane) {
  const int64_t q = a.n_heads * a.q_dim, base = row * (q + a.head_dim);
  const int rotary = static_cast<int>(a.rotary_dim), value_dim = static_cast<int>(a.value_dim);
  const bool is_q = head < a.n_heads;
  load_head<DTYPE>(made, a, base + (is_q ? (head + 1) * a.q_dim - rotary : q + value_dim), rotary,
                   lane);
  rotate_head<DTYPE>(made, a, row, lane);
  for (int d = lane; is_q && d < rotary; d += RM_WARP)
    rm_put(DTYPE, a.q_out, (row * a.n_heads + head) * a.head_dim + d, made[d]);
  if (is_q) return;
  load_head<DTYPE>(made + rotary, a, base + q, value_dim, lane);
  norm_head<DTYPE>(made + rotary, a, row, head, value_dim, lane);
  store_kv<DTYPE, PACKING>(a, row, 0, made, 0, lane);
}

template <rm_dtype DTYPE, rm_packing PACKING>
__global__ void __launch_bounds__(THREADS) rope_kernel(rm_qk_rope_kv_args a) {
  RM_SHARED(shared); // head_dim of each warp
  const int lane = rm_lane(), warp = rm_warp();
  const int head_dim = static_cast<int>(a.head_dim);
  const int64_t row = blockIdx.x, head = blockIdx.y * static_cast<int64_t>(WARPS) + warp,
                kv_head = head - a.n_heads;
  if (head >= a.n_heads + a.n_kv_heads || (kv_head >= 0 && a.slots[row] < 0)) return; // whole warps
  float *normed = shared + warp * head_dim;
  if (a.value_dim) { // in all warps
    latent_head<DTYPE, PACKING>(normed, a, row, head, lane);
    return;
  }
  const int64_t of_row = row * (a.n_heads + 2 * a.n_kv_heads);
  load_head<DTYPE>(normed, a, (of_row + head) * head_dim, head_dim, lane);
  if (!a.norm_last) norm_head<DTYPE>(normed, a, row, head, head_dim, lane);
  rotate_head<DTYPE>(normed, a, row, lane);
  if (a.norm_last) norm_head<DTYPE>(normed, a, row, head, head_dim, lane);
  if (kv_head >= 0) {
    store_kv<DTYPE, PACKING>(a, row, kv_head, normed, (of_row + head + a.n_kv_heads) * head_dim,
                             lane);
    return;
  }
  for (int d = lane; d < head_dim; d += RM_WARP)
    rm_put(DTYPE, a.q_out, (row * a.n_heads + head) * head_dim + d, normed[d]);
}

dim3 grid_of(int64_t rows, int64_t heads) { return rm_grid(rows, rm_blocks(heads, WARPS)); }

template <rm_dtype DTYPE, rm_packing PACKING>
void launch(const rm_ctx *ctx, const rm_qk_rope_kv_args *a) {
  RM_LAUNCH((rope_kernel<DTYPE, PACKING>), grid_of(a->rows, a->n_heads + a->n_kv_heads), THREADS,
            static_cast<size_t>(WARPS * a->head_dim) * sizeof(float), ctx->stream, *a);
}

} // namespace

void rm_cuda_head_squares(const rm_ctx *ctx, const rm_head_squares_args *a) {
  rm_by_dtype(a->dtype, [&]<rm_dtype DTYPE>() {
    RM_LAUNCH(squares_kernel<DTYPE>, grid_of(a->rows, a->n_heads + a->n_kv_heads), THREADS, 0,
              ctx->stream, *a);
  });
}

void rm_cuda_qk_rope_kv(const rm_ctx *ctx, const rm_qk_rope_kv_args *a) {
  rm_by_dtype(a->dtype, [&]<rm_dtype DTYPE>() { launch<DTYPE, RM_PACKING_X86>(ctx, a); });
}

void rm_cuda_mma_qk_rope_kv(const rm_ctx *ctx, const rm_qk_rope_kv_args *a) {
  launch<RM_BF16, RM_PACKING_MMA>(ctx, a);
}

// rows.cu: embed, gather_rows, activate, sigmoid_gate and rms_norm, with one block of threads for
// each row.
//
// The norm's 16 partial sums are 16 chains for any length of the row, so 16 lanes of one warp run
// them while the others wait. All threads copy the row to shared memory in stages; a step of a
// chain is then one fma. A thread loads all its elements of a stage before it stores one, so a
// stage takes the latency of one load. A finer split would change the order of sums. Both halves of
// that warp run the same chains, since the tree's shuffles need whole warps.
#include "device.cuh"
#include "packing.cuh"

namespace {

constexpr int THREADS = 256, STAGE = 2048, OWN = STAGE / THREADS; // OWN: elements of a thread
static_assert(STAGE % THREADS == 0,
              "a thread that writes an element of the residual reads it again");

template <rm_packing PACKING>
__global__ void __launch_bounds__(THREADS) embed_kernel(rm_embed_args a) {
  const int64_t row = blockIdx.x, id = a.ids[row];
  void *out = rm_at_mut(a.dtype, a.out, row * a.hidden);
  for (int64_t k = threadIdx.x; k < a.hidden; k += THREADS) {
    const int64_t from = !a.packed                   ? id * a.hidden + k
                         : PACKING == RM_PACKING_MMA ? rm_mma_index(a.hidden, id, k)
                                                     : rm_packed_index(a.dtype, a.hidden, id, k);
    if (a.scale == 0.0f) rm_copy_elem(a.dtype, out, k, a.table, from);
    else rm_put(a.dtype, out, k, a.scale * rm_get(a.dtype, a.table, from));
  }
}

__global__ void __launch_bounds__(THREADS) gather_kernel(rm_gather_rows_args a) {
  const int64_t row = blockIdx.x, bytes = static_cast<int64_t>(a.row_bytes);
  if (a.from[row] < 0) return;
  rm_copy_row(static_cast<char *>(a.out) + row * bytes,
              static_cast<const char *>(a.x) + a.from[row] * bytes, bytes, THREADS);
}

__global__ void __launch_bounds__(THREADS) activate_kernel(rm_activate_args a) {
  const int64_t at = blockIdx.x * a.ld;
  for (int64_t i = threadIdx.x; i < a.n; i += THREADS)
    rm_put(a.dtype, a.out, at + i, rm_activate(a.activation, rm_get(a.dtype, a.x, at + i)));
}

__global__ void __launch_bounds__(THREADS) gate_kernel(rm_sigmoid_gate_args a) {
  const int64_t at = blockIdx.x * a.n;
  for (int64_t i = at + threadIdx.x; i < at + a.n; i += THREADS)
    rm_put(a.dtype, a.out, i,
           rm_round_to(a.dtype, rm_sigmoid(rm_get(a.dtype, a.gate, i))) * rm_get(a.dtype, a.x, i));
}

template <rm_dtype DTYPE>
__device__ void load_stage(float (&own)[OWN], const void *row, int64_t from, int n) {
#pragma unroll
  for (int j = 0; j < OWN; j++)
    if (const int i = rm_thread() + j * THREADS; i < n) own[j] = rm_get(DTYPE, row, from + i);
}

template <rm_dtype DTYPE>
__global__ void __launch_bounds__(THREADS) norm_kernel(rm_rms_norm_args a) {
  RM_SHARED(shared); // a stage of h, then the row's scale
  const int64_t at = blockIdx.x * a.n;
  const int me = rm_thread();
  float partial = 0.0f; // of the first warp: lanes j and j + 16 have partial sum j
  const bool is_scaled = a.x_gate || a.x_scale != 0.0f;
  const float factor =
      a.x_gate ? rm_round_to(DTYPE, rm_sigmoid(rm_get(DTYPE, a.x_gate, blockIdx.x))) : a.x_scale;
  for (int64_t from = 0; from < a.n; from += STAGE) {
    const int n = static_cast<int>(rm_min64(STAGE, a.n - from));
    float own[OWN], x[OWN];
    load_stage<DTYPE>(own, a.residual, at + from, n);
    if (a.x) load_stage<DTYPE>(x, a.x, at + from, n);
#pragma unroll
    for (int j = 0; j < OWN; j++) {
      const int i = me + j * THREADS;
      if (i >= n) break;
      float h = own[j];
      if (a.x) {
        h = rm_round_to(DTYPE, h + (is_scaled ? rm_round_to(DTYPE, factor * x[j]) : x[j]));
        rm_put(DTYPE, a.residual, at + from + i, h);
      }
      if (a.out && !a.weight) {
        if (a.x) rm_put(DTYPE, a.out, at + from + i, h);
        else rm_copy_elem(DTYPE, a.out, at + from + i, a.residual, at + from + i);
      }
      shared[i] = h;
    }
    if (!a.weight) continue; // all threads
    __syncthreads();
    if (me < RM_WARP)
      for (int i = me % RM_LANES; i < n; i += RM_LANES)
        partial = fmaf(shared[i], shared[i], partial);
    __syncthreads(); // before the next stage
  }
  if (!a.weight) return;
  if (me < RM_WARP) {
    const float sum = rm_tree16_lanes(partial);
    if (me == 0) shared[STAGE] = rm_rms_scale(sum, a.n, a.eps);
  }
  __syncthreads();
  const float scale = shared[STAGE];
  for (int64_t from = 0; from < a.n; from += STAGE) {
    const int n = static_cast<int>(rm_min64(STAGE, a.n - from));
    float own[OWN], weight[OWN];
    load_stage<DTYPE>(own, a.residual, at + from, n);
    load_stage<DTYPE>(weight, a.weight, from, n);
#pragma unroll
    for (int j = 0; j < OWN; j++) {
      const int i = me + j * THREADS;
      if (i < n)
        rm_put(DTYPE, a.out, at + from + i,
               rm_weighted(DTYPE, a.zero_centered, weight[j], own[j] * scale));
    }
  }
}

} // namespace

void rm_cuda_embed(const rm_ctx *ctx, const rm_embed_args *a) {
  RM_LAUNCH(embed_kernel<RM_PACKING_X86>, a->rows, THREADS, 0, ctx->stream, *a);
}

void rm_cuda_mma_embed(const rm_ctx *ctx, const rm_embed_args *a) {
  RM_LAUNCH(embed_kernel<RM_PACKING_MMA>, a->rows, THREADS, 0, ctx->stream, *a);
}

void rm_cuda_gather_rows(const rm_ctx *ctx, const rm_gather_rows_args *a) {
  RM_LAUNCH(gather_kernel, a->rows, THREADS, 0, ctx->stream, *a);
}

void rm_cuda_activate(const rm_ctx *ctx, const rm_activate_args *a) {
  RM_LAUNCH(activate_kernel, a->rows, THREADS, 0, ctx->stream, *a);
}

void rm_cuda_sigmoid_gate(const rm_ctx *ctx, const rm_sigmoid_gate_args *a) {
  RM_LAUNCH(gate_kernel, a->rows, THREADS, 0, ctx->stream, *a);
}

void rm_cuda_rms_norm(const rm_ctx *ctx, const rm_rms_norm_args *a) {
  rm_by_dtype(a->dtype, [&]<rm_dtype DTYPE>() {
    RM_LAUNCH(norm_kernel<DTYPE>, a->rows, THREADS, (STAGE + 1) * sizeof(float), ctx->stream, *a);
  });
}

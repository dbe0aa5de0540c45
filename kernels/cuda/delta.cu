// delta.cu: delta_net. A block computes one value head of the rows of one sequence, with the state
// in registers. Four threads share a column, one for each chain of its sums, so that a sum takes
// k_dim / 4 steps and two shuffles. Columns do not depend on each other: between the convolution
// and the norm of ROWS rows, no warp waits for another. The block reads its slot once and writes a
// slot only where a row is saved. Rejected: several blocks for a head, because the norm needs all
// columns, and a batch of sequences fills the device. Loops outside the recurrence are not
// unrolled, because the state needs the registers.
#include "device.cuh"

namespace {

constexpr int ROWS = 8, CHAINS = RM_DELTA_CHAINS, LENGTH = RM_MAX_DELTA_DIM / CHAINS,
              COLUMNS = RM_WARP / CHAINS; // of a warp
// Shared memory has q and k chain by chain, so that a thread reads four steps at a time. The pitch
// puts the chains into different banks.
constexpr int PITCH = LENGTH + 4, VECTOR = CHAINS * PITCH;
__device__ int chain_at(int i) { return i % CHAINS * PITCH + i / CHAINS; }

__host__ __device__ int threads_of(const rm_delta_net_args &a) {
  return CHAINS * static_cast<int>(rm_round_up(a.v_dim, RM_N_TILE));
}

// Called by a warp.
__device__ void l2_norm(float *x, int n, float factor) {
  float partial = 0.0f;
#pragma unroll 1
  for (int i = rm_lane() % RM_LANES; i < n; i += RM_LANES)
    partial = fmaf(x[chain_at(i)], x[chain_at(i)], partial);
  const float scale = 1.0f / sqrtf(rm_tree16_lanes(partial) + RM_L2_EPS);
  __syncwarp(); // all chains have read x; a shuffle does not order memory
#pragma unroll 1
  for (int i = rm_lane(); i < n; i += RM_WARP) x[chain_at(i)] = x[chain_at(i)] * scale * factor;
}

// Called by a warp.
template <rm_dtype DTYPE>
__device__ void put_normed(const rm_delta_run &of, int64_t row, const float *o) {
  const rm_delta_net_args &a = *of.a;
  const int v_dim = static_cast<int>(a.v_dim);
  float partial = 0.0f;
#pragma unroll 1
  for (int j = rm_lane() % RM_LANES; j < v_dim; j += RM_LANES) partial = fmaf(o[j], o[j], partial);
  // rm_rms_scale with an int: a 64-bit n would spill registers.
  const float scale = 1.0f / sqrtf(rm_tree16_lanes(partial) / static_cast<float>(v_dim) + a.eps);
#pragma unroll 1
  for (int j = rm_lane(); j < v_dim; j += RM_WARP) {
    const float z = rm_get(DTYPE, a.x, row * of.columns + rm_delta_z(&of) + j);
    rm_put(DTYPE, a.out, (row * a.n_v_heads + of.head) * a.v_dim + j,
           o[j] * scale * rm_get(DTYPE, a.norm, j) * rm_activate(RM_SILU, z));
  }
}

// Returns the sum of the four chains of a column.
__device__ float over_chains(float sum) {
  sum = sum + __shfl_xor_sync(RM_ALL_LANES, sum, COLUMNS);
  return sum + __shfl_xor_sync(RM_ALL_LANES, sum, 2 * COLUMNS);
}

// Calls f(i, k[i], q[i]) for the steps of a chain. FULL: k_dim is RM_MAX_DELTA_DIM.
template <bool FULL, class F>
__device__ void each_step(const float *q, const float *k, int steps, F f) {
#pragma unroll
  for (int i = 0; i < LENGTH; i += 4) {
    const uint4 k4 = *reinterpret_cast<const uint4 *>(k + i),
                q4 = *reinterpret_cast<const uint4 *>(q + i);
    if (FULL || i < steps) f(i, rm_float(k4.x), rm_float(q4.x));
    if (FULL || i + 1 < steps) f(i + 1, rm_float(k4.y), rm_float(q4.y));
    if (FULL || i + 2 < steps) f(i + 2, rm_float(k4.z), rm_float(q4.z));
    if (FULL || i + 3 < steps) f(i + 3, rm_float(k4.w), rm_float(q4.w));
  }
}

// Computes q, k and v of n rows and their gates in shared memory. A barrier must follow.
__device__ void load_rows(const rm_delta_run &of, int64_t row, int n, float *rows, float *gates,
                          int threads) {
  const int v_pad = threads / CHAINS, pitch = 2 * VECTOR + v_pad, warps = threads / RM_WARP,
            k_dim = static_cast<int>(of.a->k_dim), width = 2 * k_dim + v_pad;
#pragma unroll 1
  for (int each = rm_thread(); each < n * width; each += threads) {
    const int r = each / width, i = each % width;
    const int to = i < k_dim       ? chain_at(i)
                   : i < 2 * k_dim ? VECTOR + chain_at(i - k_dim)
                                   : 2 * VECTOR + i - 2 * k_dim;
    rows[r * pitch + to] = i < of.n ? rm_delta_convolved(&of, row + r, i) : 0.0f;
  }
  if (rm_thread() < n) rm_delta_gates(&of, row + rm_thread(), gates + 2 * rm_thread());
  __syncthreads();
#pragma unroll 1
  for (int i = rm_warp(); i < 2 * n; i += warps)
    l2_norm(rows + i / 2 * pitch + i % 2 * VECTOR, k_dim,
            i % 2 ? 1.0f : 1.0f / sqrtf(static_cast<float>(k_dim)));
}

template <rm_dtype DTYPE, bool FULL>
__global__ void __launch_bounds__(CHAINS *RM_MAX_DELTA_DIM, 1) delta_kernel(rm_delta_net_args a) {
  RM_SHARED(shared); // ROWS times q, k and v (o replaces v); then decay and beta of the rows
  const int64_t first = blockIdx.x;
  const int32_t seq = a.seq_of_row[first];
  if (first > 0 && a.seq_of_row[first - 1] == seq) return; // the whole block
  const int threads = threads_of(a), warps = threads / RM_WARP, lane = rm_lane(), warp = rm_warp(),
            pitch = 2 * VECTOR + threads / CHAINS, k_dim = static_cast<int>(a.k_dim);
  const int chain = lane / COLUMNS, column = warp * COLUMNS + lane % COLUMNS,
            steps = (k_dim - chain + CHAINS - 1) / CHAINS;
  const rm_delta_run of = rm_delta_run_at(&a, first, blockIdx.y);
  float *gates = shared + ROWS * pitch;
  const int64_t at = rm_packed_index(RM_F32, k_dim, column, chain); // then CHAINS rows at a time
  float state[LENGTH];
#pragma unroll
  for (int i = 0; i < LENGTH; i++)
    state[i] = of.loaded && (FULL || i < steps) ? of.loaded[at + i * CHAINS * RM_N_TILE] : 0.0f;
  for (int64_t row = first; row < a.rows && a.seq_of_row[row] == seq; row += ROWS) {
    int n = 1;
    while (n < ROWS && row + n < a.rows && a.seq_of_row[row + n] == seq) n++;
    load_rows(of, row, n, shared, gates, threads);
    __syncthreads();
#pragma unroll 1
    for (int r = 0; r < n; r++) {
      const float *q = shared + r * pitch + chain * PITCH, *k = q + VECTOR;
      float *v = shared + r * pitch + 2 * VECTOR + column, sum = 0.0f;
      const float decay = gates[2 * r], beta = gates[2 * r + 1];
      each_step<FULL>(q, k, steps,
                      [&](int i, float k_i, float) { sum = fmaf(state[i], k_i, sum); });
      const float delta = (*v - decay * over_chains(sum)) * beta;
      sum = 0.0f;
      each_step<FULL>(q, k, steps, [&](int i, float k_i, float q_i) {
        state[i] = fmaf(k_i, delta, decay * state[i]);
        sum = fmaf(state[i], q_i, sum);
      });
      const float o = over_chains(sum);
      if (chain == 0) *v = o; // the column's four lanes have read v before the shuffles
      float *saved = rm_delta_state(&a, a.save_slots[row + r], of.head);
      if (!saved) continue; // the whole block
#pragma unroll
      for (int i = 0; i < LENGTH; i++)
        if (FULL || i < steps) saved[at + i * CHAINS * RM_N_TILE] = rm_canon(state[i]);
#pragma unroll 1
      for (int i = rm_thread(); i < of.n; i += threads)
        rm_delta_save_inputs(&of, row + r, saved, i, 1);
    }
    __syncthreads();
#pragma unroll 1
    for (int r = warp; r < n; r += warps)
      put_normed<DTYPE>(of, row + r, shared + r * pitch + 2 * VECTOR);
    __syncthreads(); // before the rows in shared memory are replaced
  }
}

template <rm_dtype DTYPE, bool FULL> void launch(const rm_ctx *ctx, const rm_delta_net_args *a) {
  const int threads = threads_of(*a);
  RM_LAUNCH((delta_kernel<DTYPE, FULL>), rm_grid(a->rows, a->n_v_heads), threads,
            static_cast<size_t>(ROWS * (2 * VECTOR + threads / CHAINS + 2)) * sizeof(float),
            ctx->stream, *a);
}

} // namespace

void rm_cuda_delta_net(const rm_ctx *ctx, const rm_delta_net_args *a) {
  rm_by_dtype(a->dtype, [&]<rm_dtype DTYPE>() {
    if (a->k_dim == RM_MAX_DELTA_DIM) launch<DTYPE, true>(ctx, a);
    else launch<DTYPE, false>(ctx, a);
  });
}

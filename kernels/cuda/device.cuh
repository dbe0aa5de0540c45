// device.cuh: shared by the .cu files: the scalar arithmetic of the contract for device code,
// helpers for warps and blocks, and macros for the two constructs in which CUDA's syntax is not
// C++. tests/gpu/simt/simt.h defines the macros for a CPU (RM_SIMT), so that every kernel also runs
// without a GPU.
//
// Compiler flags that affect results: -fmad=false (operations are not contracted; fused operations
// are written fmaf), -ftz=true (denormals are zeros), -prec-div=true -prec-sqrt=true (IEEE
// quotients and roots).
#pragma once

#ifdef RM_SIMT
#include <simt.h> // tests/gpu/simt, by -I
#else
#include <cuda_runtime.h>
#define RM_ENQUEUE(kernel, grid, block, shared_bytes, stream, ...) \
  kernel<<<grid, block, shared_bytes, static_cast<cudaStream_t>(stream)>>>(__VA_ARGS__)
#define RM_SHARED(name) extern __shared__ __align__(16) float name[] // dynamic shared memory
#endif

#include "cpu/scalar.h"
#include "device.h"

// A list of every kernel that RM_LAUNCH names, built when the library is loaded; rm_cuda_open loads
// all of them. Otherwise CUDA loads a kernel at its first launch and waits until the device is
// idle, while it holds a lock that other threads' launches need. That is a deadlock if a running
// kernel waits for another rank's kernel, as NCCL's kernels do on one GPU.
struct rm_listed_kernel {
  const void *kernel;
  const rm_listed_kernel *next;
  explicit rm_listed_kernel(const void *kernel_);
};
template <auto *KERNEL>
inline const rm_listed_kernel rm_list_entry{reinterpret_cast<const void *>(KERNEL)};
#define RM_LAUNCH(kernel, grid, threads, ...) \
  (static_cast<void>(&rm_list_entry<kernel>), \
   RM_ENQUEUE(kernel, rm_grid(grid), rm_grid(threads), __VA_ARGS__))
inline dim3 rm_grid(int64_t x, int64_t y = 1, int64_t z = 1) {
  return dim3(static_cast<unsigned>(x), static_cast<unsigned>(y), static_cast<unsigned>(z));
}
inline dim3 rm_grid(const dim3 &grid) { return grid; }

#define RM_EXPORT extern "C" __attribute__((visibility("default"))) // a function of rm_cuda.h

#define RM_DECLARE(name, args) void rm_cuda_##name(const rm_ctx *ctx, const args *a);
RM_OPS(RM_DECLARE)
#undef RM_DECLARE
void rm_cuda_gemm_rows(const rm_ctx *ctx, const rm_gemm_args *a, bool swiglu);
void rm_cuda_pack(const rm_ctx *ctx, rm_pack_args *a);

// Ops of the family cuda_mma that differ: in bf16 they use tensor cores or another packing
// (packing.cuh); in float32 they call the ops above.
void rm_cuda_mma_embed(const rm_ctx *ctx, const rm_embed_args *a);
void rm_cuda_mma_gemm(const rm_ctx *ctx, const rm_gemm_args *a);
void rm_cuda_mma_gemm_swiglu(const rm_ctx *ctx, const rm_gemm_args *a);
// of: index of the tiles' shape (gemm_mma.cuh).
void rm_cuda_gemm_mma_tiles(const rm_ctx *ctx, const rm_gemm_args *a, bool swiglu, int of);
// These two return false without computing if there are too many rows, or k is too long.
bool rm_cuda_gemm_mma_rows(const rm_ctx *ctx, const rm_gemm_args *a, bool swiglu);
bool rm_cuda_gemm_mma_few(const rm_ctx *ctx, const rm_gemm_args *a, bool swiglu);
void rm_cuda_mma_qk_rope_kv(const rm_ctx *ctx, const rm_qk_rope_kv_args *a);
void rm_cuda_mma_attention(const rm_ctx *ctx, const rm_attention_args *a);
void rm_cuda_mma_router(const rm_ctx *ctx, const rm_router_args *a);
void rm_cuda_mma_lm_head(const rm_ctx *ctx, const rm_lm_head_args *a);
void rm_cuda_mma_pack(const rm_ctx *ctx, rm_pack_args *a);

// Copies `rows` runs of `width` bytes, at any pitch. from NULL: writes zeros.
void rm_cuda_copy(void *stream, void *to, size_t to_pitch, const void *from, size_t from_pitch,
                  size_t width, size_t rows);

// device.cu: whether a device (its `self`) is alive. rm_cuda_kill makes it dead, with `why` as its
// message, unless the failure is the consequence of an invalidated capture.
bool rm_cuda_lives(void *self);
void rm_cuda_kill(void *self, const char *why);
// vendor_gemm.cu: rm_device.open_vendor_gemm.
const char *rm_cuda_open_vendor_gemm(const rm_device *device, const rm_vendor_gemm_options *options,
                                     rm_vendor_gemm *out);

// Bytes of ctx->workspace that the ops need.
size_t rm_cuda_attention_workspace(const rm_limits *limits);
size_t rm_cuda_router_workspace(const rm_limits *limits);
size_t rm_cuda_lm_head_workspace(const rm_limits *limits);
size_t rm_cuda_sample_workspace(const rm_limits *limits);
size_t rm_cuda_gemm_mma_workspace(const rm_limits *limits);
size_t rm_cuda_mma_router_workspace(const rm_limits *limits);

// Raises a kernel's limit of dynamic shared memory on the current device above the default; sm_86
// and sm_89 have 99 KB per block, others more. Called before each launch, since the current device
// may differ.
template <class KERNEL> void rm_allow_shared(KERNEL *kernel, size_t bytes) {
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                       static_cast<int>(bytes));
}

constexpr int RM_WARP = 32;
constexpr unsigned RM_ALL_LANES = 0xffffffffu;

// The calling thread in its block, its warp there, and its lane in the warp.
__device__ inline int rm_thread() { return static_cast<int>(threadIdx.x); }
__device__ inline int rm_warp() { return rm_thread() / RM_WARP; }
__device__ inline int rm_lane() { return rm_thread() % RM_WARP; }

inline unsigned rm_blocks(int64_t n, int64_t each) {
  return static_cast<unsigned>((n + each - 1) / each);
}

// Rows [begin, end) of x that belong to a group of a gemm; all rows without groups.
struct rm_group_range {
  int64_t begin, end;
};
__device__ inline rm_group_range rm_rows_of_group(const rm_gemm_args &a, int64_t group) {
  if (!a.group_rows) return {0, a.m};
  return {a.group_rows[group], a.group_rows[group + 1]};
}

// Blocks in y for the rows of a gemm, `each` rows per block; a block continues with the rows one
// grid height further down. With groups: twice the blocks of an equal share of the rows; blocks of
// a group with more rows loop.
inline unsigned rm_row_blocks(const rm_gemm_args *a, int64_t each) {
  const int64_t rows =
      a->group_rows ? rm_min64(a->m, 2 * (a->m + a->n_groups - 1) / a->n_groups) : a->m;
  return static_cast<unsigned>(rm_min64((rows + each - 1) / each, 65535));
}

// ----------------------------------------------------------------------------------- dot products
// Index of column n at the even k of pair `pair` in its tile; the odd k is RM_ODD words further.
template <rm_dtype DTYPE> __device__ inline int64_t rm_tile_place(int n, int pair) {
  return DTYPE == RM_BF16 ? pair * 2 * RM_N_TILE + n * 2 : 2 * pair * RM_N_TILE + n;
}
template <rm_dtype DTYPE> constexpr int RM_ODD = DTYPE == RM_BF16 ? 1 : static_cast<int>(RM_N_TILE);

// The weights of an even k and of the next odd k; in bf16 they are one word.
struct rm_weights {
  float even, odd;
};
template <rm_dtype DTYPE> __device__ inline rm_weights rm_load_weights(const void *w, int64_t at) {
  if constexpr (DTYPE == RM_BF16) {
    const uint32_t word =
        *reinterpret_cast<const uint32_t *>(static_cast<const uint16_t *>(w) + at);
    return {rm_float(word << 16), rm_float(word & 0xffff0000u)};
  } else {
    const float *p = static_cast<const float *>(w) + at;
    return {p[0], p[RM_ODD<DTYPE>]};
  }
}

// acc[r] += E + O of one block of 32 k, for ROWS rows of x, float32 and 32 apart. Each weight is
// read once for all rows.
template <rm_dtype DTYPE, int ROWS>
__device__ inline void rm_add_block(float (&acc)[ROWS], const float *x, const void *w, int64_t tile,
                                    int n) {
  float even[ROWS], odd[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; r++) even[r] = odd[r] = 0.0f;
#pragma unroll 4
  for (int pair = 0; pair < RM_K_BLOCK / 2; pair++) {
    const rm_weights both = rm_load_weights<DTYPE>(w, tile + rm_tile_place<DTYPE>(n, pair));
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      even[r] = fmaf(x[r * RM_K_BLOCK + 2 * pair], both.even, even[r]);
      odd[r] = fmaf(x[r * RM_K_BLOCK + 2 * pair + 1], both.odd, odd[r]);
    }
  }
#pragma unroll
  for (int r = 0; r < ROWS; r++) acc[r] = acc[r] + (even[r] + odd[r]);
}

// Copies block k0 of rows [row0, row0 + rows) of x to shared memory as float32; zeros from row
// `end` on and after k.
template <rm_dtype DTYPE>
__device__ inline void rm_stage_rows(float *to, const void *x, int64_t ldx, int64_t k, int64_t row0,
                                     int rows, int64_t end, int64_t k0, int threads) {
  for (int i = rm_thread(); i < rows * RM_K_BLOCK; i += threads) {
    const int64_t row = row0 + i / RM_K_BLOCK, at = k0 + i % RM_K_BLOCK;
    to[i] = row < end && at < k ? rm_get(DTYPE, x, row * ldx + at) : 0.0f;
  }
}

// E + O of one block of 32 k: x in float32, w the tile of column n.
template <rm_dtype DTYPE>
__device__ inline float rm_block_dot(const float *x, const void *w, int64_t tile, int n) {
  float acc[1] = {0.0f};
  rm_add_block<DTYPE, 1>(acc, x, w, tile, n);
  return acc[0];
}

// Computes column col of a row of y before it is stored, from its dot product; with swiglu from
// gate's and up's, which it also stores if a.gate_up is set.
template <rm_dtype DTYPE, bool SWIGLU>
__device__ inline float rm_output(const rm_gemm_args &a, int64_t row, int64_t col, float acc,
                                  float up) {
  if constexpr (SWIGLU) {
    const float g = rm_round_to(DTYPE, acc), u = rm_round_to(DTYPE, up);
    if (a.gate_up) {
      rm_put(DTYPE, a.gate_up, 2 * row * a.n + col, g);
      rm_put(DTYPE, a.gate_up, (2 * row + 1) * a.n + col, u);
    }
    return rm_round_to(DTYPE, rm_activate(a.activation, g)) * u;
  } else {
    return a.bias ? acc + rm_get(DTYPE, a.bias, col) : acc;
  }
}
template <rm_dtype DTYPE, bool SWIGLU>
__device__ inline void rm_put_output(const rm_gemm_args &a, int64_t row, int64_t col, float acc,
                                     float up) {
  rm_put(a.y_dtype, a.y, row * a.ldy + col, rm_output<DTYPE, SWIGLU>(a, row, col, acc, up));
}

// ------------------------------------------------------------------------------- warps and blocks
// tree16 of the values of lanes 0 … 15, which lanes 16 … 31 hold too; every lane gets the result.
// Both lanes of a step add the same two numbers.
__device__ inline float rm_tree16_lanes(float sum) {
  for (int step = RM_LANES / 2; step > 0; step /= 2)
    sum = sum + __shfl_xor_sync(RM_ALL_LANES, sum, step);
  return sum;
}

__device__ inline float rm_max_lanes(float max) {
  for (int step = RM_WARP / 2; step > 0; step /= 2)
    max = rm_max_f32(__shfl_xor_sync(RM_ALL_LANES, max, step), max);
  return max;
}

// Reductions of integers, whose order does not matter.
struct rm_sum_of {
  __device__ uint64_t operator()(uint64_t a, uint64_t b) const { return a + b; }
};
struct rm_most_of {
  __device__ uint64_t operator()(uint64_t a, uint64_t b) const { return a > b ? a : b; }
};
struct rm_least_of {
  __device__ uint64_t operator()(uint64_t a, uint64_t b) const { return a < b ? a : b; }
};
template <class F> __device__ inline uint64_t rm_over_lanes(uint64_t value, F both) {
  for (int step = RM_WARP / 2; step > 0; step /= 2)
    value = both(value, __shfl_xor_sync(RM_ALL_LANES, value, step));
  return value;
}
// Reduces over all threads of a block; by_warp: shared memory for THREADS / 32 values.
template <int THREADS, class F>
__device__ inline uint64_t rm_over_block(uint64_t value, uint64_t *by_warp, F both) {
  value = rm_over_lanes(value, both);
  if (threadIdx.x % RM_WARP == 0) by_warp[threadIdx.x / RM_WARP] = value;
  __syncthreads();
  value = by_warp[0];
  for (int w = 1; w < THREADS / RM_WARP; w++) value = both(value, by_warp[w]);
  __syncthreads(); // before by_warp is used again
  return value;
}

// A token, or an expert, as a number that is larger the earlier it comes: by larger key, then by
// lower id. Never 0.
__device__ inline uint64_t rm_rank_of(uint32_t key, int64_t id) {
  return static_cast<uint64_t>(key) << 32 | (0xffffffffu - static_cast<uint32_t>(id));
}
__device__ inline int32_t rm_ranked_id(uint64_t rank) {
  return static_cast<int32_t>(0xffffffffu - static_cast<uint32_t>(rank));
}

template <class WORD>
__device__ inline void rm_copy_words(void *to, const void *from, int64_t bytes, int threads) {
  const int n = static_cast<int>(bytes / static_cast<int64_t>(sizeof(WORD)));
#pragma unroll 2
  for (int i = rm_thread(); i < n; i += threads)
    static_cast<WORD *>(to)[i] = static_cast<const WORD *>(from)[i];
}
// Copies a row with all threads of a block, in words as long as the addresses allow. bytes is even.
__device__ inline void rm_copy_row(void *to, const void *from, int64_t bytes, int threads) {
  const uint64_t odd = reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from) |
                       static_cast<uint64_t>(bytes);
  if (odd % sizeof(uint4) == 0) rm_copy_words<uint4>(to, from, bytes, threads);
  else if (odd % sizeof(uint32_t) == 0) rm_copy_words<uint32_t>(to, from, bytes, threads);
  else rm_copy_words<uint16_t>(to, from, bytes, threads);
}

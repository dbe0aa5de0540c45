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
// Enqueues a kernel; does nothing if the grid is empty, for which CUDA would return an error.
#define RM_LAUNCH(kernel, grid, threads, ...) \
  do { \
    const dim3 rm_blocks_of = rm_grid(grid); \
    static_cast<void>(&rm_list_entry<kernel>); \
    if (rm_blocks_of.x && rm_blocks_of.y && rm_blocks_of.z) \
      RM_ENQUEUE(kernel, rm_blocks_of, rm_grid(threads), __VA_ARGS__); \
  } while (0)
inline dim3 rm_grid(int64_t x, int64_t y = 1, int64_t z = 1) {
  return dim3(static_cast<unsigned>(x), static_cast<unsigned>(y), static_cast<unsigned>(z));
}
inline dim3 rm_grid(const dim3 &grid) { return grid; }

// Calls f<DTYPE>() for a dtype that is known at run time.
template <class F> void rm_by_dtype(rm_dtype dtype, F f) {
  if (dtype == RM_BF16) f.template operator()<RM_BF16>();
  else f.template operator()<RM_F32>();
}

#define RM_EXPORT extern "C" __attribute__((visibility("default"))) // a function of rm_cuda.h

#define RM_DECLARE(name, args) void rm_cuda_##name(const rm_ctx *ctx, const args *a);
RM_OPS(RM_DECLARE)
#undef RM_DECLARE
void rm_cuda_gemm_rows(const rm_ctx *ctx, const rm_gemm_args *a, bool swiglu);
void rm_cuda_pack(const rm_ctx *ctx, rm_pack_args *a);

// Ops of the family cuda_mma that differ in bf16: they use tensor cores or another packing
// (packing.cuh). Only for bf16, except pack.
#define RM_MMA_OPS(X) \
  X(embed, rm_embed_args) \
  X(gemm, rm_gemm_args) \
  X(gemm_swiglu, rm_gemm_args) \
  X(qk_rope_kv, rm_qk_rope_kv_args) \
  X(attention, rm_attention_args) \
  X(router, rm_router_args) \
  X(lm_head, rm_lm_head_args)
#define RM_DECLARE(name, args) void rm_cuda_mma_##name(const rm_ctx *ctx, const args *a);
RM_MMA_OPS(RM_DECLARE)
#undef RM_DECLARE
void rm_cuda_mma_pack(const rm_ctx *ctx, rm_pack_args *a);
// of: index of the tiles' shape (gemm_mma.cuh). x is wide (rm_is_wide).
void rm_cuda_gemm_mma_tiles(const rm_ctx *ctx, const rm_gemm_args *a, bool swiglu, int of);
// For few rows, or for an x that the tiles cannot read.
void rm_cuda_gemm_mma_rows(const rm_ctx *ctx, const rm_gemm_args *a, bool swiglu);
// Returns false without computing if k is too long.
bool rm_cuda_gemm_mma_few(const rm_ctx *ctx, const rm_gemm_args *a, bool swiglu);

// Copies `rows` runs of `width` bytes, at any pitch. from NULL: writes zeros.
void rm_cuda_copy(void *stream, void *to, size_t to_pitch, const void *from, size_t from_pitch,
                  size_t width, size_t rows);

// The driver's function of this name and type; NULL: none.
template <class F> F *rm_cuda_driver(const char *name) {
  void *entry = nullptr;
  cudaDriverEntryPointQueryResult found;
  if (cudaGetDriverEntryPointByVersion(name, &entry, 12000, cudaEnableDefault, &found) !=
      cudaSuccess)
    cudaGetLastError(); // else the next launch would report it
  return reinterpret_cast<F *>(entry);
}

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
size_t rm_cuda_mma_attention_workspace(const rm_limits *limits);
size_t rm_cuda_mma_router_workspace(const rm_limits *limits);

// Bytes of dynamic shared memory that rm_cuda_open allows every kernel, above CUDA's default: those
// that every architecture has for a block, as sm_86 and sm_89.
constexpr int RM_MAX_SHARED = 99 << 10;

constexpr int RM_WARP = 32;
constexpr unsigned RM_ALL_LANES = 0xffffffffu;

// The calling thread in its block, its warp there, and its lane in the warp.
__device__ inline int rm_thread() { return static_cast<int>(threadIdx.x); }
__device__ inline int rm_warp() { return rm_thread() / RM_WARP; }
__device__ inline int rm_lane() { return rm_thread() % RM_WARP; }

RM_INLINE unsigned rm_blocks(int64_t n, int64_t each) {
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

inline int64_t rm_groups(const rm_gemm_args *a) { return a->group_rows ? a->n_groups : 1; }
// The rows of a group for which a gemm is launched: twice an equal share, since a group's rows are
// on the device.
inline int64_t rm_launched_rows(const rm_gemm_args *a) {
  return a->group_rows ? rm_min64(a->m, 2 * rm_blocks(a->m, rm_max64(1, a->n_groups))) : a->m;
}
// Blocks in y for the rows of a gemm, `each` rows per block; a block continues with the rows one
// grid height further down.
inline unsigned rm_row_blocks(const rm_gemm_args *a, int64_t each) {
  return static_cast<unsigned>(rm_min64(rm_blocks(rm_launched_rows(a), each), 65535));
}
// The grid of blocks that each compute `rows` rows × `cols` columns of a group.
inline dim3 rm_gemm_grid(const rm_gemm_args *a, int64_t cols, int64_t rows) {
  return rm_grid(rm_blocks(a->n, cols), rm_row_blocks(a, rows), rm_groups(a));
}

// ----------------------------------------------------------------------------------- dot products
// The weights of one column of a tile of 32 k, in memory. A word has two k in bf16, one in float32.
template <rm_dtype DTYPE> struct rm_column {
  static constexpr int WORDS = DTYPE == RM_BF16 ? RM_K_BLOCK / 2 : RM_K_BLOCK, UNROLL = 4;
  const uint32_t *words;
  __device__ uint32_t word(int i) const { return words[i * RM_N_TILE]; }
};
// The same in registers.
template <rm_dtype DTYPE> struct rm_loaded_column {
  static constexpr int WORDS = rm_column<DTYPE>::WORDS, UNROLL = RM_K_BLOCK / 2;
  uint32_t words[WORDS];
  __device__ uint32_t word(int i) const { return words[i]; }
  __device__ void load(const rm_column<DTYPE> &from) {
#pragma unroll
    for (int i = 0; i < WORDS; i++) words[i] = from.word(i);
  }
};
// Column n of the tile that begins at element `tile`.
template <rm_dtype DTYPE>
__device__ inline rm_column<DTYPE> rm_column_of(const void *w, int64_t tile, int n) {
  const int64_t words = DTYPE == RM_BF16 ? tile / 2 : tile;
  return {static_cast<const uint32_t *>(w) + words + n};
}

// acc[r] += E + O of one block of 32 k, for ROWS rows of x, float32 and `pitch` apart. Each weight
// is read once for all rows.
template <rm_dtype DTYPE, int ROWS, template <rm_dtype> class COLUMN>
__device__ inline void rm_add_block(float (&acc)[ROWS], const float *x, int pitch,
                                    const COLUMN<DTYPE> &w) {
  float even[ROWS] = {}, odd[ROWS] = {};
#pragma unroll(COLUMN<DTYPE>::UNROLL)
  for (int pair = 0; pair < RM_K_BLOCK / 2; pair++) {
    const uint32_t first = w.word(DTYPE == RM_BF16 ? pair : 2 * pair);
    const float w_even = rm_float(DTYPE == RM_BF16 ? first << 16 : first),
                w_odd = rm_float(DTYPE == RM_BF16 ? first & 0xffff0000u : w.word(2 * pair + 1));
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      even[r] = fmaf(x[r * pitch + 2 * pair], w_even, even[r]);
      odd[r] = fmaf(x[r * pitch + 2 * pair + 1], w_odd, odd[r]);
    }
  }
#pragma unroll
  for (int r = 0; r < ROWS; r++) acc[r] = acc[r] + (even[r] + odd[r]);
}

// Copies k0 … k0 + LENGTH of rows [row0, row0 + ROWS) of x to shared memory as float32; zeros from
// row `end` on and after k.
template <rm_dtype DTYPE, int ROWS, int LENGTH, int THREADS>
__device__ inline void rm_stage_rows(float *to, const void *x, int64_t ldx, int64_t k, int64_t row0,
                                     int64_t end, int64_t k0) {
#pragma unroll 2
  for (int i = rm_thread(); i < ROWS * LENGTH; i += THREADS) {
    const int64_t row = row0 + i / LENGTH, at = k0 + i % LENGTH;
    to[i] = row < end && at < k ? rm_get(DTYPE, x, row * ldx + at) : 0.0f;
  }
}

// Computes column col of a row of y before it is stored, from its dot product; with swiglu from
// gate's and up's, which it also stores if a.gate_up is set. a.bias is that of the row's group.
template <rm_dtype DTYPE, bool SWIGLU>
__device__ inline float rm_output(const rm_gemm_args &a, int64_t row, int64_t col, float acc,
                                  float up) {
  if constexpr (SWIGLU) {
    if (a.bias) {
      acc = acc + rm_get(DTYPE, a.bias, col);
      up = up + rm_get(DTYPE, a.bias, a.n + col);
    }
    const float g = rm_round_to(DTYPE, acc), u = rm_round_to(DTYPE, up);
    if (a.gate_up) {
      rm_put(DTYPE, a.gate_up, 2 * row * a.n + col, g);
      rm_put(DTYPE, a.gate_up, (2 * row + 1) * a.n + col, u);
    }
    return rm_gated(DTYPE, &a, g, u);
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

// bench_wgmma.cu: measures on a Hopper card what gemm_mma.cu would gain from wgmma: the same
// product of the packed W and x, with the same splits of k. Prints for each shape and tile
// whether the result is bit-identical to gemm_mma.cu's, and its time. If all results are identical
// (and in probe_mma's P5), the kernel below can replace gemm_mma.cu's.
//
// W's fragments go from shared memory to registers, as for mma.sync: the fragments of wgmma's A are
// the same, one warp for every 16 of 64 rows. The tensor core reads x directly from shared memory,
// in rows of 64 k whose eight chunks of 16 bytes are swizzled by the row.
#include "gemm_mma.cuh"
#include "open_kernels.h"
#include "rm_cuda.h"
#include "wgmma.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cuda_runtime.h>

namespace {

constexpr int GROUPS = 2, THREADS = GROUPS * 128, STAGES = 4, STAGE_K = 64;
constexpr int W_ROWS = GROUPS * 64, W_BYTES = W_ROWS * STAGE_K * 2;
template <int COLS> constexpr int STAGE_BYTES = W_BYTES + COLS * STAGE_K * 2;

struct product {
  const uint4 *w; // packed, n rows
  const uint16_t *x; // [m][k]
  float *y; // [m][n]
  int64_t m, n, k; // n a multiple of W_ROWS, k of RM_MMA_SPLIT
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr int STEPS = STAGE_K / RM_MMA_K, OF_SPLIT = RM_MMA_SPLIT / STAGE_K;

// x: rows of 128 bytes swizzled by 128, 8 rows to the next 1024.
__device__ uint64_t descriptor(uint32_t at) {
  return static_cast<uint64_t>((at & 0x3ffff) >> 4) | uint64_t{1} << 16 |
         uint64_t{1024 >> 4} << 32 | uint64_t{1} << 62;
}

// The part of every stage that a thread copies: a chunk of each second row of tiles, and chunk % 8
// of every 32nd row of x.
struct copies {
  const uint4 *w;
  const uint16_t *x;
  int64_t w_step, x_step; // to the next in the same stage, in elements
  int rows; // rows of x from this thread's first on that there are
  int to_w, to_x; // bytes
};

__device__ copies copies_of(const product &p, int64_t first_tile, int64_t row0) {
  const int thread = static_cast<int>(threadIdx.x), row = thread / 8, chunk = thread % 8;
  const int64_t steps = p.k / RM_MMA_K;
  copies c;
  c.w = p.w + (first_tile + thread / (STEPS * RM_WARP)) * steps * RM_WARP +
        thread % (STEPS * RM_WARP);
  c.w_step = THREADS / (STEPS * RM_WARP) * steps * RM_WARP;
  c.x = p.x + (row0 + row) * p.k + chunk * 8;
  c.x_step = THREADS / 8 * p.k;
  c.rows = static_cast<int>(rm_min64(p.m - row0 - row, 1 << 20));
  c.to_w = thread * 16;
  c.to_x = W_BYTES + row * 128 + (chunk ^ row % 8) * 16;
  return c;
}

template <int COLS> __device__ void fill(char *stage, const copies &c, int at) {
  const uint4 *w = c.w + at * STEPS * RM_WARP;
  const uint16_t *x = c.x + at * STAGE_K;
#pragma unroll
  for (int turn = 0; turn < W_BYTES / 16 / THREADS; turn++)
    rm_copy_async(stage + c.to_w + turn * THREADS * 16, w + turn * c.w_step);
#pragma unroll
  for (int turn = 0; turn < COLS * STAGE_K / 8 / THREADS; turn++) {
    char *to = stage + c.to_x + turn * THREADS * 16;
    if (turn * (THREADS / 8) < c.rows) rm_copy_async(to, x + turn * c.x_step);
    else *reinterpret_cast<uint4 *>(to) = uint4{0, 0, 0, 0};
  }
}

// One stage: adds its four steps to the chain of sums, in pairs; the last pair may still run when
// this returns. Fragments are loaded while the previous two are multiplied, into the registers of
// the two before those.
template <int COLS>
__device__ void multiply(float (&sums)[COLS / 2], uint4 (&a)[2][2], const char *stage) {
  const int lane = static_cast<int>(threadIdx.x) % RM_WARP,
            warp = static_cast<int>(threadIdx.x) / RM_WARP;
  const uint4 *w = reinterpret_cast<const uint4 *>(stage) + warp * STEPS * RM_WARP + lane;
  const uint64_t b = descriptor(static_cast<uint32_t>(__cvta_generic_to_shared(stage + W_BYTES)));
#pragma unroll
  for (int pair = 0; pair < 2; pair++) {
#pragma unroll
    for (int i = 0; i < 2; i++) a[pair][i] = w[(pair * 2 + i) * RM_WARP];
    rm_wgmma_arrive();
#pragma unroll
    for (int i = 0; i < 2; i++)
      rm_wgmma(sums, a[pair][i], b + static_cast<uint64_t>((pair * 2 + i) * RM_MMA_K * 2 / 16));
    rm_wgmma_commit();
    rm_wgmma_wait<1>();
  }
}
#endif

template <int COLS> __global__ void __launch_bounds__(THREADS, 1) wgmma_kernel(product p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) char stages[];
  const int64_t first_tile = static_cast<int64_t>(blockIdx.x) * (W_ROWS / RM_MMA_ROWS),
                row0 = static_cast<int64_t>(blockIdx.y) * COLS;
  const copies c = copies_of(p, first_tile, row0);
  const int blocks = static_cast<int>(p.k / STAGE_K);
  const auto stage = [&](int at) { return stages + at % STAGES * STAGE_BYTES<COLS>; };
  float acc[COLS / 2] = {}, sums[COLS / 2] = {};
  uint4 a[2][2];
  for (int s = 0; s < STAGES - 2; s++) {
    if (s < blocks) fill<COLS>(stage(s), c, s);
    rm_copies_commit();
  }
  for (int split = 0; split < blocks; split += OF_SPLIT) {
#pragma unroll 1
    for (int at = split; at < split + OF_SPLIT; at++) {
      rm_copies_wait<STAGES - 3>();
      asm volatile("fence.proxy.async.shared::cta;" ::
                       : "memory"); // copies are threads' writes, which the tensor core reads
      // This stage has arrived, and the stage before the last is no longer multiplied.
      __syncthreads();
      if (at + STAGES - 2 < blocks) fill<COLS>(stage(at + STAGES - 2), c, at + STAGES - 2);
      rm_copies_commit();
      multiply<COLS>(sums, a, stage(at));
    }
    rm_wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < COLS / 2; i++) {
      acc[i] = acc[i] + sums[i];
      sums[i] = 0.0f;
    }
  }
  const int lane = static_cast<int>(threadIdx.x) % RM_WARP,
            warp = static_cast<int>(threadIdx.x) / RM_WARP;
  const int64_t col = (first_tile + warp) * RM_MMA_ROWS + lane / 4;
#pragma unroll
  for (int i = 0; i < COLS / 2; i++) {
    const int64_t row = row0 + i / 4 * RM_MMA_COLS + lane % 4 * 2 + i % 2;
    if (row < p.m) p.y[row * p.n + col + i % 4 / 2 * 8] = acc[i];
  }
#else
  (void)p;
#endif
}

void must(cudaError_t error) {
  if (error == cudaSuccess) return;
  printf("CUDA: %s\n", cudaGetErrorString(error));
  exit(4);
}

// Numbers between 1 and 2 with either sign, times 2^-7.
__global__ void fill_kernel(uint16_t *p, size_t n, uint32_t salt) {
  for (size_t i = blockIdx.x * size_t{256} + threadIdx.x; i < n; i += gridDim.x * size_t{256}) {
    const uint32_t bits = (static_cast<uint32_t>(i) * 2654435761u ^ salt) * 2246822519u >> 16;
    p[i] = static_cast<uint16_t>((bits & 0x807fu) | 120u << 7);
  }
}
__global__ void compare_kernel(const uint32_t *a, const uint32_t *b, size_t n,
                               unsigned long long *differ) {
  for (size_t i = blockIdx.x * size_t{256} + threadIdx.x; i < n; i += gridDim.x * size_t{256})
    if (a[i] != b[i]) atomicAdd(differ, 1ull);
}

template <class T> T *memory(size_t n) {
  void *p;
  must(cudaMalloc(&p, n * sizeof(T)));
  return static_cast<T *>(p);
}

// Returns the minimum of several runs, in milliseconds.
template <class F> double time_of(F call) {
  cudaEvent_t from, to;
  must(cudaEventCreate(&from));
  must(cudaEventCreate(&to));
  double least = 1e9;
  for (int i = 0; i < 12; i++) {
    must(cudaEventRecord(from));
    call();
    must(cudaEventRecord(to));
    must(cudaEventSynchronize(to));
    float ms;
    must(cudaEventElapsedTime(&ms, from, to));
    least = std::min(least, static_cast<double>(ms));
  }
  must(cudaEventDestroy(from));
  must(cudaEventDestroy(to));
  return least;
}

template <int COLS> void launch(const product &p) {
  constexpr int BYTES = STAGES * STAGE_BYTES<COLS>;
  must(
      cudaFuncSetAttribute(wgmma_kernel<COLS>, cudaFuncAttributeMaxDynamicSharedMemorySize, BYTES));
  const dim3 grid(static_cast<unsigned>(p.n / W_ROWS),
                  static_cast<unsigned>((p.m + COLS - 1) / COLS));
  wgmma_kernel<COLS><<<grid, THREADS, BYTES>>>(p);
  must(cudaGetLastError());
}

// Prints whether all bits are equal.
template <int COLS> void ask(const product &p, const float *wanted, double of_mma) {
  unsigned long long *differ = memory<unsigned long long>(1), found;
  const size_t n = static_cast<size_t>(p.m * p.n);
  must(cudaMemset(p.y, 0xff, n * sizeof(float)));
  const double ms = time_of([&] { launch<COLS>(p); });
  must(cudaMemset(differ, 0, sizeof *differ));
  compare_kernel<<<1024, 256>>>(reinterpret_cast<const uint32_t *>(p.y),
                                reinterpret_cast<const uint32_t *>(wanted), n, differ);
  must(cudaMemcpy(&found, differ, sizeof found, cudaMemcpyDeviceToHost));
  must(cudaFree(differ));
  const double flops = 2e-9 * static_cast<double>(p.m * p.n) * static_cast<double>(p.k);
  printf(
      "tokens=%ld n=%ld k=%ld: wgmma 128 x %d %8.1f TFLOP/s, mma.sync %8.1f; %llu of %zu outputs "
      "differ\n",
      static_cast<long>(p.m), static_cast<long>(p.n), static_cast<long>(p.k), COLS, flops / ms,
      flops / of_mma, found, n);
  fflush(stdout);
}

void shape(const rm_ctx &ctx, int64_t m, int64_t n, int64_t k) {
  const size_t n_w = static_cast<size_t>(rm_packed_elems(n, k)), n_x = static_cast<size_t>(m * k),
               n_y = static_cast<size_t>(m * n);
  uint16_t *w = memory<uint16_t>(n_w), *x = memory<uint16_t>(n_x);
  float *wanted = memory<float>(n_y);
  fill_kernel<<<4096, 256>>>(w, n_w, 1);
  fill_kernel<<<4096, 256>>>(x, n_x, 2);
  rm_gemm_args a = {};
  a.y = wanted, a.x = x, a.w = w, a.m = m, a.n = n, a.k = a.ldx = k, a.ldy = n, a.dtype = RM_BF16,
  a.y_dtype = RM_F32;
  const double of_mma = time_of([&] { rm_kernels_cuda_mma()->gemm(&ctx, &a); });
  must(cudaGetLastError());
  const product p = {reinterpret_cast<const uint4 *>(w), x, memory<float>(n_y), m, n, k};
  ask<128>(p, wanted, of_mma);
  ask<192>(p, wanted, of_mma);
  must(cudaFree(w)), must(cudaFree(x)), must(cudaFree(wanted)), must(cudaFree(p.y));
}

} // namespace

int main() {
  int major = 0;
  must(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
  if (major != 9) {
    printf("no wgmma here\n");
    return 0;
  }
  if (!open_kernels()) return 1;
  const rm_ctx ctx = {}; // the legacy stream; k is not split without a workspace
  shape(ctx, 200, 256, 512);
  for (const int64_t m : {512, 4096, 16384}) {
    shape(ctx, m, 6144, 4096);
    shape(ctx, m, 24576, 4096);
    shape(ctx, m, 4096, 12288);
  }
  return 0;
}

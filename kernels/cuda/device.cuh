// device.cuh: what the .cu files share: the scalar arithmetic of the contract for device code, and the two words in which CUDA's
// syntax is not C++. tests/simt/simt.h defines those words for a CPU (RM_SIMT), so that every kernel here also runs without a GPU.
//
// Flags that the bits depend on: -fmad=false (nothing is contracted; a fused operation is written fmaf), -ftz=true (denormals are
// zeros), -prec-div=true -prec-sqrt=true (IEEE quotients and roots).
#pragma once

#ifdef RM_SIMT
#include <simt.h>  // tests/simt, by -I
#else
#include <cuda_runtime.h>
#define RM_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
  kernel<<<grid, block, shared_bytes, static_cast<cudaStream_t>(stream)>>>(__VA_ARGS__)
#define RM_SHARED(name) extern __shared__ float name[]  // dynamic shared memory
#endif

#include "cpu/scalar.h"

void rm_cuda_gemm(const rm_ctx *ctx, const rm_gemm_args *a);
void rm_cuda_attention(const rm_ctx *ctx, const rm_attention_args *a);
size_t rm_cuda_attention_workspace(const rm_limits *limits);

// Place of column n at the even k of pair `pair` in its tile; the odd k is RM_ODD words on.
template <rm_dtype DTYPE> __device__ inline int64_t rm_tile_place(int n, int pair) {
  return DTYPE == RM_BF16 ? pair * 2 * RM_N_TILE + n * 2 : 2 * pair * RM_N_TILE + n;
}
template <rm_dtype DTYPE> constexpr int RM_ODD = DTYPE == RM_BF16 ? 1 : static_cast<int>(RM_N_TILE);

// E + O of one block of 32 k: x as float32, w the tile of column n.
template <rm_dtype DTYPE> __device__ inline float rm_block_dot(const float *x, const void *w, int64_t tile, int n) {
  float even = 0.0f, odd = 0.0f;
#pragma unroll 4
  for (int pair = 0; pair < RM_K_BLOCK / 2; pair++) {
    const int64_t at = tile + rm_tile_place<DTYPE>(n, pair);
    even = fmaf(x[2 * pair], rm_get(DTYPE, w, at), even);
    odd = fmaf(x[2 * pair + 1], rm_get(DTYPE, w, at + RM_ODD<DTYPE>), odd);
  }
  return even + odd;
}

// gpu.cu: gpu.h over the CUDA runtime, and one output of the family cuda_mma by its instruction, for the oracle.
#include "gpu.h"
#include "mma.cuh"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cuda_runtime.h>

static void must(cudaError_t error) {
  if (error == cudaSuccess) return;
  printf("CUDA: %s\n", cudaGetErrorString(error));
  exit(4);
}

void simt_order(bool) {}

void simt_finish() {
  must(cudaGetLastError());
  must(cudaDeviceSynchronize());
}

void *simt_buffer(size_t bytes) {
  void *p = nullptr;
  must(cudaMallocManaged(&p, bytes ? bytes : 1));
  memset(p, 0xff, bytes);
  return p;
}

// Row 0 of A and column 0 of B are the operands, the others zeros: no other place for a product, no other layout than PTX's.
__global__ void chain_kernel(float *out, const uint32_t *a, const uint32_t *b, int steps) {
  const int t = static_cast<int>(threadIdx.x);
  const bool mine = t < 4;
  float acc = 0.0f, sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  for (int step = 0; step < steps; step++) {
    const uint32_t *p = a + step * 8 + t, *q = b + step * 8 + t;
    rm_mma16(sums, {mine ? p[0] : 0, 0, mine ? p[4] : 0, 0}, {mine ? q[0] : 0, mine ? q[4] : 0});
    if ((step + 1) % RM_MMA_STEPS != 0 && step + 1 < steps) continue;
    acc = acc + sums[0];
    sums[0] = 0.0f;
  }
  if (t == 0) *out = acc;
}

extern "C" float gpu_mma_chain(const uint16_t *a, const uint16_t *b, int64_t k) {
  static char *room = nullptr;
  constexpr size_t MOST = 1 << 15;
  if (!room) must(cudaMallocManaged(&room, 2 * MOST + sizeof(float)));
  const size_t bytes = static_cast<size_t>(k) * sizeof *a;
  if (bytes > MOST) must(cudaErrorInvalidValue);
  memcpy(room, a, bytes);
  memcpy(room + MOST, b, bytes);
  float *out = reinterpret_cast<float *>(room + 2 * MOST);
  *out = 0.0f;
  if (k)
    chain_kernel<<<1, 32>>>(out, reinterpret_cast<uint32_t *>(room), reinterpret_cast<uint32_t *>(room + MOST), static_cast<int>(k / 16));
  must(cudaGetLastError());
  must(cudaDeviceSynchronize());
  return *out;
}

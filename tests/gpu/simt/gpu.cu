// gpu.cu: gpu.h over the CUDA runtime, and one output of the family cuda_mma by its instruction,
// for the oracle on a card that differs from the model.
#include "gpu.h"
#include "mma_cases.cuh"

void simt_order(bool) {}

void simt_finish() {
  must(cudaGetLastError());
  must(cudaDeviceSynchronize());
}

void *simt_buffer(size_t bytes) {
  constexpr size_t SMALL = 1 << 20; // managed memory costs page faults at each change of sides
  void *p = nullptr;
  if (bytes < SMALL) must(cudaHostAlloc(&p, bytes ? bytes : 1, cudaHostAllocMapped));
  else must(cudaMallocManaged(&p, bytes));
  memset(p, 0xff, bytes);
  return p;
}

extern "C" int gpu_is_mma_oracle;
int gpu_is_mma_oracle;

void gpu_choose_mma_oracle() {
  const bool differs = compare_model(782, 1).differ != 0;
  const char *chosen = getenv("RM_MMA_ORACLE");
  gpu_is_mma_oracle = chosen ? !strcmp(chosen, "card") : differs;
  if (gpu_is_mma_oracle) printf("the oracle of cuda_mma uses the card's instruction\n");
}

// Row 0 of A and column 0 of B are the operands, the others are zero: the product has one place,
// and the only layout is PTX's. A split of both is copied through shared memory, so that the
// chain waits for memory once instead of at every step.
__global__ void chain_kernel(float *out, const uint32_t *a, const uint32_t *b, int words) {
  __shared__ uint32_t x[RM_MMA_SPLIT / 2], y[RM_MMA_SPLIT / 2];
  const int t = static_cast<int>(threadIdx.x);
  const bool mine = t < 4;
  float acc = 0.0f;
  for (int from = 0; from < words; from += RM_MMA_SPLIT / 2) {
    const int here = words - from < RM_MMA_SPLIT / 2 ? words - from : RM_MMA_SPLIT / 2;
    for (int i = t; i < here; i += RM_WARP) x[i] = a[from + i], y[i] = b[from + i];
    __syncwarp();
    float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (int at = 0; at < here; at += RM_MMA_K / 2) {
      const uint32_t *p = x + at + t % 4, *q = y + at + t % 4;
      rm_mma16(sums, {mine ? p[0] : 0, 0, mine ? p[4] : 0, 0}, {mine ? q[0] : 0, mine ? q[4] : 0});
    }
    acc = acc + sums[0];
    __syncwarp(); // before the next split is laid there
  }
  if (t == 0) *out = acc;
}

// Transferring the operands takes most of the time, a million of them in a run: pinned memory, one
// copy, one store.
extern "C" float gpu_mma_chain(const uint16_t *a, const uint16_t *b, int64_t k) {
  constexpr size_t MOST = 1 << 15;
  static char *here = nullptr, *there = nullptr;
  static float *out = nullptr;
  if (!here) {
    must(cudaHostAlloc(&here, 2 * MOST, cudaHostAllocDefault));
    must(cudaHostAlloc(&out, sizeof *out, cudaHostAllocMapped));
    must(cudaMalloc(&there, 2 * MOST));
  }
  const size_t bytes = static_cast<size_t>(k) * sizeof *a;
  if (bytes > MOST) must(cudaErrorInvalidValue);
  if (!k) return 0.0f;
  memcpy(here, a, bytes);
  memcpy(here + bytes, b, bytes);
  must(cudaMemcpyAsync(there, here, 2 * bytes, cudaMemcpyHostToDevice));
  const uint32_t *words = reinterpret_cast<const uint32_t *>(there);
  chain_kernel<<<1, RM_WARP>>>(out, words, words + k / 2, static_cast<int>(k / 2));
  must(cudaGetLastError());
  must(cudaDeviceSynchronize());
  return *out;
}

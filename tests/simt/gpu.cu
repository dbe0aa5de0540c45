// gpu.cu: gpu.h over the CUDA runtime.
#include "gpu.h"

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

// table.cu: the CUDA table, and what a caller asks of the library. The arithmetic is the contract's own, E and O chains of fma, so
// the bits should be x86's; the family has a name of its own until a GPU has shown that, and for the tensor cores to come.
#include "rm_cuda.h"

#include "device.cuh"

#ifndef RM_SIMT
#define RM_EXPORT extern "C" __attribute__((visibility("default")))
#else
#define RM_EXPORT extern "C"
#endif

static const rm_kernels TABLE = {
    .isa = "cuda_sm90",
    .family = "cuda_fma",
    .workspace_bytes = rm_cuda_attention_workspace,
    .embed = nullptr,
    .rms_norm = nullptr,
    .gemm = rm_cuda_gemm,
    .gemm_swiglu = nullptr,
    .qk_rope_kv = nullptr,
    .attention = rm_cuda_attention,
    .router = nullptr,
    .permute = nullptr,
    .combine = nullptr,
    .lm_head = nullptr,
    .merge_pairs = nullptr,
    .sample = nullptr,
    .top_logprobs = nullptr,
    .pack = nullptr,
};

RM_EXPORT const rm_kernels *rm_kernels_cuda(void) { return &TABLE; }

#ifndef RM_SIMT
RM_EXPORT const char *rm_cuda_archs(void) { return RM_CUDA_ARCHS; }

RM_EXPORT const char *rm_cuda_error(void) {
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

RM_EXPORT int rm_cuda_devices(void) {
  int n = 0;
  return cudaGetDeviceCount(&n) == cudaSuccess ? n : -1;
}
#endif

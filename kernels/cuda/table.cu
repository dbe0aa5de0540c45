// table.cu: the CUDA tables, and the functions that return them. cuda_fma uses the contract's
// arithmetic, E and O chains of fma, so it should be bit-identical to x86; it is a separate family
// until that is verified on a GPU. cuda_mma uses tensor cores for bf16, whose sums differ from
// x86's; its float32 ops, and its ops without products, are those of cuda_fma.
#include "rm_cuda.h"

#include <initializer_list>

#include "device.cuh"

static size_t most_of(std::initializer_list<size_t> asked) {
  size_t most = 0;
  for (const size_t bytes : asked) most = bytes > most ? bytes : most;
  return most;
}

static size_t workspace_bytes(const rm_limits *limits) {
  return most_of({rm_cuda_attention_workspace(limits), rm_cuda_router_workspace(limits),
                  rm_cuda_lm_head_workspace(limits), rm_cuda_sample_workspace(limits)});
}

static size_t mma_workspace_bytes(const rm_limits *limits) {
  return most_of({workspace_bytes(limits), rm_cuda_mma_attention_workspace(limits),
                  rm_cuda_mma_router_workspace(limits), rm_cuda_gemm_mma_workspace(limits)});
}

#define ENTRY(name, args) .name = rm_cuda_##name,
static const rm_kernels TABLE = {
    .isa = "cuda",
    .family = "cuda_fma",
    .workspace_bytes = workspace_bytes,
    RM_OPS(ENTRY).pack = rm_cuda_pack,
};

template <auto BF16, auto F32, class ARGS> void by_dtype(const rm_ctx *ctx, const ARGS *a) {
  (a->dtype == RM_BF16 ? BF16 : F32)(ctx, a);
}

#define MMA_ENTRY(name, args) table.name = by_dtype<rm_cuda_mma_##name, rm_cuda_##name, args>;
static rm_kernels mma_table() {
  rm_kernels table = TABLE;
  table.family = "cuda_mma";
  table.workspace_bytes = mma_workspace_bytes;
  RM_MMA_OPS(MMA_ENTRY)
  table.pack = rm_cuda_mma_pack;
  return table;
}
static const rm_kernels MMA_TABLE = mma_table();

RM_EXPORT const rm_kernels *rm_kernels_cuda(void) { return &TABLE; }
RM_EXPORT const rm_kernels *rm_kernels_cuda_mma(void) { return &MMA_TABLE; }

RM_EXPORT const char *rm_cuda_archs(void) { return RM_CUDA_ARCHS; }

// cublaslt_header.c: compares kernels/cuda/cublaslt.h with NVIDIA's own cublasLt.h by compiling
// with both: values, layouts, and the number and sizes of each function's arguments. It is
// compiled, never run.
#include <cublasLt.h>

#include "cuda/cublaslt.h"

#define SAME(a, b) _Static_assert((int)(a) == (int)(b), #a " is not " #b)
SAME(RM_LT_SUCCESS, CUBLAS_STATUS_SUCCESS);
SAME(RM_LT_F32, CUDA_R_32F);
SAME(RM_LT_BF16, CUDA_R_16BF);
SAME(RM_LT_COMPUTE_F32, CUBLAS_COMPUTE_32F);
SAME(RM_LT_TRANSPOSED, CUBLAS_OP_T);
SAME(RM_LT_EPILOGUE_BIAS, CUBLASLT_EPILOGUE_BIAS);
SAME(RM_LT_LAYOUT_COLS, CUBLASLT_MATRIX_LAYOUT_COLS);
SAME(RM_LT_TRANSA, CUBLASLT_MATMUL_DESC_TRANSA);
SAME(RM_LT_EPILOGUE, CUBLASLT_MATMUL_DESC_EPILOGUE);
SAME(RM_LT_BIAS_POINTER, CUBLASLT_MATMUL_DESC_BIAS_POINTER);
SAME(RM_LT_MAX_WORKSPACE, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES);
SAME(RM_LT_SCHEMES, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK);
SAME(RM_LT_SCHEME_COMPUTE, CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE);
SAME(RM_LT_ALIGNMENT_A, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES);
SAME(RM_LT_ALIGNMENT_D, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES);
#ifdef CHECK_INVARIANCE // younger than the rest
SAME(RM_LT_INVARIANCE, CUBLASLT_MATMUL_DESC_BATCH_INVARIANCE_FLAGS);
SAME(RM_LT_INVARIANT_16B, CUBLASLT_BATCH_INVARIANCE_ALIGN_16B);
#endif
SAME(sizeof(int), sizeof(cublasStatus_t));
SAME(sizeof(rm_lt_algorithm), sizeof(cublasLtMatmulAlgo_t));
SAME(sizeof(rm_lt_candidate), sizeof(cublasLtMatmulHeuristicResult_t));
SAME(offsetof(rm_lt_candidate, workspace_bytes),
     offsetof(cublasLtMatmulHeuristicResult_t, workspaceSize));
SAME(offsetof(rm_lt_candidate, status), offsetof(cublasLtMatmulHeuristicResult_t, state));
SAME(offsetof(rm_lt_candidate, waves), offsetof(cublasLtMatmulHeuristicResult_t, wavesCount));

// The functions' types, but for the names of what is pointed at and of enumerations, which are as
// large as an int.
int call_all(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t layout,
             cublasLtMatmulPreference_t preference, const void *at, void *to, cudaStream_t stream) {
  cublasLtMatmulHeuristicResult_t result;
  int found;
  size_t (*version)(void) = cublasLtGetVersion;
  const char *(*text)(cublasStatus_t) = cublasLtGetStatusString;
  cublasLtMatmulDescCreate(&desc, (cublasComputeType_t)RM_LT_COMPUTE_F32,
                           (cudaDataType_t)RM_LT_F32);
  cublasLtMatmulDescSetAttribute(desc, (cublasLtMatmulDescAttributes_t)RM_LT_TRANSA, at,
                                 sizeof(int32_t));
  cublasLtMatrixLayoutCreate(&layout, (cudaDataType_t)RM_LT_BF16, (uint64_t)1, (uint64_t)1,
                             (int64_t)1);
  cublasLtMatrixLayoutSetAttribute(layout, (cublasLtMatrixLayoutAttribute_t)RM_LT_LAYOUT_COLS, at,
                                   sizeof(uint64_t));
  cublasLtMatmulPreferenceSetAttribute(
      preference, (cublasLtMatmulPreferenceAttributes_t)RM_LT_MAX_WORKSPACE, at, sizeof(uint64_t));
  cublasLtMatmulAlgoGetHeuristic(handle, desc, layout, layout, layout, layout, preference, 1,
                                 &result, &found);
  cublasLtMatmulAlgoCheck(handle, desc, layout, layout, layout, layout, &result.algo, &result);
  return (int)cublasLtMatmul(handle, desc, at, at, layout, at, layout, at, at, layout, to, layout,
                             &result.algo, to, (size_t)1, stream) +
         (int)version() + (text(CUBLAS_STATUS_SUCCESS) != NULL);
}

// cublaslt.h: the cuBLASLt functions that vendor_gemm.cu calls. The library is loaded when a
// generator first uses it; rollmesh is built without it. The declarations are those of cublasLt.h
// 13.10 and are valid since 12.0; tests/support/native/standin/cublaslt_header.c compares them with
// the header. The library creates the descriptors, so their sizes do not matter here.
#pragma once

#include <stddef.h>
#include <stdint.h>

enum { RM_LT_SUCCESS = 0 }; // cublasStatus_t
enum { RM_LT_LEAST = 120000 }; // the oldest supported version
enum { RM_LT_F32 = 0, RM_LT_BF16 = 14 }; // cudaDataType_t
enum {
  RM_LT_COMPUTE_F32 = 68,
  RM_LT_TRANSPOSED = 1,
  RM_LT_EPILOGUE_BIAS = 4,
  RM_LT_INVARIANT_16B = 4
};
enum { RM_LT_LAYOUT_COLS = 3 }; // cublasLtMatrixLayoutAttribute_t
enum {
  RM_LT_TRANSA = 3,
  RM_LT_EPILOGUE = 7,
  RM_LT_BIAS_POINTER = 8,
  RM_LT_INVARIANCE = 41
}; // cublasLtMatmulDescAttributes_t
// cublasLtMatmulPreferenceAttributes_t; B's and C's are between the last two.
enum { RM_LT_MAX_WORKSPACE = 1, RM_LT_SCHEMES = 3, RM_LT_ALIGNMENT_A = 5, RM_LT_ALIGNMENT_D = 8 };
// cublasLtReductionScheme_t: partial sums in float32, added in a separate step.
enum { RM_LT_SCHEME_COMPUTE = 2 };

typedef struct rm_lt_context rm_lt_context; // cublasLtHandle_t points to one; same below
typedef struct rm_lt_desc rm_lt_desc;
typedef struct rm_lt_layout rm_lt_layout;
typedef struct rm_lt_preference rm_lt_preference;
typedef struct rm_lt_algorithm { // cublasLtMatmulAlgo_t
  uint64_t data[8];
} rm_lt_algorithm;
typedef struct rm_lt_candidate { // cublasLtMatmulHeuristicResult_t
  rm_lt_algorithm algorithm;
  size_t workspace_bytes;
  int status;
  float waves;
  int reserved[4];
} rm_lt_candidate;

// The functions, without their prefix cublasLt: name, result, arguments. `stream` is
// rm_device.stream.
#define RM_LT_CALLS(X) \
  X(GetVersion, size_t, (void)) \
  X(GetStatusString, const char *, (int status)) \
  X(Create, int, (rm_lt_context * *context)) \
  X(Destroy, int, (rm_lt_context * context)) \
  X(MatmulDescCreate, int, (rm_lt_desc * *desc, int compute, int scale)) \
  X(MatmulDescDestroy, int, (rm_lt_desc * desc)) \
  X(MatmulDescSetAttribute, int, \
    (rm_lt_desc * desc, int attribute, const void *value, size_t bytes)) \
  X(MatrixLayoutCreate, int, \
    (rm_lt_layout * *layout, int type, uint64_t rows, uint64_t cols, int64_t ld)) \
  X(MatrixLayoutDestroy, int, (rm_lt_layout * layout)) \
  X(MatrixLayoutSetAttribute, int, \
    (rm_lt_layout * layout, int attribute, const void *value, size_t bytes)) \
  X(MatmulPreferenceCreate, int, (rm_lt_preference * *preference)) \
  X(MatmulPreferenceDestroy, int, (rm_lt_preference * preference)) \
  X(MatmulPreferenceSetAttribute, int, \
    (rm_lt_preference * preference, int attribute, const void *value, size_t bytes)) \
  X(MatmulAlgoGetHeuristic, int, \
    (rm_lt_context * context, rm_lt_desc * desc, rm_lt_layout * a, rm_lt_layout * b, \
     rm_lt_layout * c, rm_lt_layout * d, rm_lt_preference * preference, int wanted, \
     rm_lt_candidate *candidates, int *found)) \
  X(MatmulAlgoCheck, int, \
    (rm_lt_context * context, rm_lt_desc * desc, rm_lt_layout * a, rm_lt_layout * b, \
     rm_lt_layout * c, rm_lt_layout * d, const rm_lt_algorithm *algorithm, \
     rm_lt_candidate *result)) \
  X(Matmul, int, \
    (rm_lt_context * context, rm_lt_desc * desc, const void *alpha, const void *a, \
     rm_lt_layout *a_layout, const void *b, rm_lt_layout *b_layout, const void *beta, \
     const void *c, rm_lt_layout *c_layout, void *d, rm_lt_layout *d_layout, \
     const rm_lt_algorithm *algorithm, void *workspace, size_t workspace_bytes, void *stream))

#define RM_LT_FIELD(name, result, arguments) result(*name) arguments;
typedef struct rm_lt {
  RM_LT_CALLS(RM_LT_FIELD)
} rm_lt;

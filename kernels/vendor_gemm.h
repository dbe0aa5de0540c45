// vendor_gemm.h: y = x·Wᵀ by cuBLASLt instead of an op of the table. The order of its sums is
// unspecified and may depend on the number of rows, so it does not keep the contract of
// docs/numerics.md. W is plain rows, as in a checkpoint.
//
// Opened by rm_device.open_vendor_gemm, used by the thread that uses the device, closed before the
// device. open takes all shapes and chooses an algorithm for each: a call only enqueues, so a graph
// can capture it. After a failed call the device is dead (device.h).
#pragma once

#include "kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { RM_MAX_GEMM_SHAPES = 8 };

// A shape of later calls, with up to max_rows rows. With swiglu W is [2n][k], with gate's rows
// before up's.
typedef struct rm_gemm_shape {
  int64_t n, k;
  int64_t ldx, ldy;
  int has_bias, swiglu;
} rm_gemm_shape;

// How to choose an algorithm for a shape.
typedef enum rm_vendor_gemm_choice {
  RM_VENDOR_GEMM_FREE, // the fastest for each power of two of rows
  // One algorithm for all row counts, the fastest at max_rows; results may still depend on the
  // rows.
  RM_VENDOR_GEMM_PINNED,
  // An algorithm that the library documents as independent of the rows; open fails without one.
  RM_VENDOR_GEMM_INVARIANT,
} rm_vendor_gemm_choice;

typedef struct rm_vendor_gemm_options {
  const char *library; // path of cuBLASLt; like list a view during open
  const rm_gemm_shape *list; // [n]
  int n;
  int64_t max_rows;
  rm_vendor_gemm_choice choice;
  void *workspace; // of the device, aligned to 64 bytes, kept by the caller until close
  size_t workspace_bytes; // see rm_vendor_gemm_workspace
} rm_vendor_gemm_options;

typedef struct rm_vendor_gemm {
  void *self; // NULL: not open
  int version; // 131000 is 13.10.0
  // Same arguments as the table's gemm (bf16, no groups), with plain w and one of the shapes.
  void (*gemm)(void *self, const rm_gemm_args *args);
  void (*gemm_swiglu)(void *self, const rm_gemm_args *args);
  void (*close)(void *self);
} rm_vendor_gemm;

enum { RM_VENDOR_GEMM_LIBRARY_BYTES = 32 << 20 }; // NVIDIA's recommendation for sm_90

// Bytes of gate and up of one row of a swiglu of width n. They are stored after the library's
// workspace, for as many rows as fit.
RM_INLINE size_t rm_vendor_gemm_gate_up_bytes(int64_t n) { return (size_t)n * 4; }
// Recommended bytes of workspace, for calls of up to max_rows rows.
RM_INLINE size_t rm_vendor_gemm_workspace(const rm_gemm_shape *list, int n, int64_t max_rows) {
  size_t most = 0;
  for (int i = 0; i < n; i++) {
    const size_t row = list[i].swiglu ? rm_vendor_gemm_gate_up_bytes(list[i].n) : 0,
                 enough = (size_t)64 << 20;
    const size_t all = row * (size_t)max_rows, some = row > enough ? row : enough,
                 each = all < some ? all : some;
    most = each > most ? each : most;
  }
  return (size_t)RM_VENDOR_GEMM_LIBRARY_BYTES + most + 256;
}

#ifdef __cplusplus
}
#endif

// tables.h: the CPU's tables, one per variant of the build, the ops that the fast variants share,
// and the checks of select_isa.c.
#pragma once

#include "kernels.h"

extern const rm_kernels rm_table_ref, rm_table_avx2, rm_table_avx512f, rm_table_avx512bf16,
    rm_table_amx;

// pack of all fast variants, which memory limits.
void rm_cpu_pack(const rm_ctx *, rm_pack_args *);
#define RM_DECLARE(name, args) void rm_##name##_ref(const rm_ctx *, const args *);
RM_SHARED_OPS(RM_DECLARE)
#undef RM_DECLARE

// verify.c: returns the name of the first op whose results are not bit-identical to ref's on a
// fixed set of small inputs, or NULL. Takes milliseconds. One thread at a time may call it.
const char *rm_verify(const rm_kernels *kernels);
// Measures GFLOP/s of the bf16 gemm on one thread, with weights in the L2 cache: for one row, and
// for 64 rows. Called after rm_verify.
void rm_measure(const rm_kernels *kernels, double *one_row, double *many_rows);

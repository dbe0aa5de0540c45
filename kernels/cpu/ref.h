// ref.h: declarations shared by the files of the reference variant.
#pragma once

#include "scalar.h"

// The dot product of docs/numerics.md §2: x[0 … k_total) times row n of a packed matrix.
float rm_ref_dot(rm_dtype dtype, const void *x, const void *w, int64_t n, int64_t k_total);
// The sum of squares of n numbers: 16 chains, which a tree adds (§1).
float rm_ref_sum_of_squares(rm_dtype dtype, const void *x, int64_t n);
// P·V over one block of RM_ATTN_BLOCK positions; v: values of T, zeros at positions that are not
// live.
float rm_ref_values_dot(rm_dtype dtype, const float *p, const float *v);

#define RM_DECLARE(name, args) void rm_##name##_ref(const rm_ctx *, const args *);
RM_OPS(RM_DECLARE)
#undef RM_DECLARE
void rm_pack_ref(const rm_ctx *, rm_pack_args *);

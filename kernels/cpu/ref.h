// ref.h: declarations shared by the files of the reference variant.
#pragma once

#include "scalar.h"

// The dot product of docs/numerics.md §2: x[0 … k_total) times row n of a packed matrix.
float rm_ref_dot(rm_dtype dtype, const void *x, const void *w, int64_t n, int64_t k_total);
// P·V over one block of RM_ATTN_BLOCK positions; v: values of T, zeros at positions that are not
// live.
float rm_ref_values_dot(rm_dtype dtype, const float *p, const float *v);

static inline const void *rm_at(rm_dtype dtype, const void *p, int64_t i) {
  return (const char *)p + i * (int64_t)rm_dtype_bytes(dtype);
}
static inline void *rm_at_mut(rm_dtype dtype, void *p, int64_t i) {
  return (char *)p + i * (int64_t)rm_dtype_bytes(dtype);
}

void rm_attention_ref(const rm_ctx *, const rm_attention_args *);
void rm_router_ref(const rm_ctx *, const rm_router_args *);
void rm_permute_ref(const rm_ctx *, const rm_permute_args *);
void rm_static_dispatch_ref(const rm_ctx *, const rm_static_dispatch_args *);
void rm_combine_ref(const rm_ctx *, const rm_combine_args *);
void rm_sample_ref(const rm_ctx *, const rm_sample_args *);
void rm_top_logprobs_ref(const rm_ctx *, const rm_top_logprobs_args *);
void rm_ranks_ref(const rm_ctx *, const rm_ranks_args *);
void rm_pack_ref(const rm_ctx *, rm_pack_args *);

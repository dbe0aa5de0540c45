// mma_dot.c: the sums of products of the family cuda_mma over the reference's layouts, in the place of ref_dot.c: linked with the other
// ref*.c they are the oracle of rm_kernels_cuda_mma. float32 keeps the sums of ref_dot.c, and so does the family.
#define rm_ref_dot fma_dot
#define rm_ref_values_dot fma_values_dot
#include "cpu/ref_dot.c"
#undef rm_ref_dot
#undef rm_ref_values_dot

#include "mma_model.h"

enum { STEP = 16, SEGMENT = 512 };

float rm_ref_dot(rm_dtype dtype, const void *x, const void *w, int64_t n, int64_t k_total) {
  if (dtype == RM_F32) return fma_dot(dtype, x, w, n, k_total);
  const uint16_t *xs = x, *ws = w;
  float acc = 0.0f;
  for (int64_t k0 = 0; k0 < k_total; k0 += SEGMENT) {
    const int64_t end = rm_min64(k0 + SEGMENT, rm_round_up(k_total, RM_K_BLOCK));
    float s = 0.0f;
    for (int64_t k = k0; k < end; k += STEP) {
      uint16_t a[STEP], b[STEP];
      for (int64_t i = 0; i < STEP; i++) {
        a[i] = ws[rm_packed_index(dtype, k_total, n, k + i)];
        b[i] = k + i < k_total ? xs[k + i] : 0;
      }
      s = mma_model(s, a, b);
    }
    acc = acc + s;
  }
  return acc;
}

float rm_ref_values_dot(rm_dtype dtype, const float *p, const float *v) {
  if (dtype == RM_F32) return fma_values_dot(dtype, p, v);
  float s = 0.0f;
  for (int from = 0; from < RM_ATTN_BLOCK; from += STEP) {
    uint16_t a[STEP], b[STEP];
    for (int i = 0; i < STEP; i++) {
      a[i] = rm_f32_to_bf16(v[from + i]);
      b[i] = rm_f32_to_bf16(p[from + i]);
    }
    s = mma_model(s, a, b);
  }
  return s;
}

// mma_dot.c: the sums of products of the family cuda_mma over the reference's layouts, instead of
// ref_dot.c: linked with the other ref*.c they are the oracle of rm_kernels_cuda_mma. float32 uses
// the sums of ref_dot.c, like the family.
#define rm_ref_dot fma_dot
#define rm_ref_values_dot fma_values_dot
#include "cpu/ref_dot.c"
#undef rm_ref_dot
#undef rm_ref_values_dot

#include "mma_model.h"

enum { STEP = 16, SPLIT = 512, MAX_K = 1 << 14 };

#ifdef RM_ON_GPU // gpu.cu
extern int gpu_is_mma_oracle; // whether sums come from the card's own instruction
float gpu_mma_chain(const uint16_t *a, const uint16_t *b, int64_t k);
#endif

// Σ a·b over k, which is a multiple of STEP, in the family's order.
static float mma_chain(const uint16_t *a, const uint16_t *b, int64_t k) {
#ifdef RM_ON_GPU
  if (gpu_is_mma_oracle) return gpu_mma_chain(a, b, k);
#endif
  float acc = 0.0f;
  for (int64_t k0 = 0; k0 < k; k0 += SPLIT) {
    float s = 0.0f;
    for (int64_t at = k0; at < k && at < k0 + SPLIT; at += STEP) s = mma_model(s, a + at, b + at);
    acc = acc + s;
  }
  return acc;
}

float rm_ref_dot(rm_dtype dtype, const void *x, const void *w, int64_t n, int64_t k_total) {
  if (dtype == RM_F32) return fma_dot(dtype, x, w, n, k_total);
  static uint16_t a[MAX_K], b[MAX_K];
  const int64_t padded = rm_round_up(k_total, RM_K_BLOCK);
  const uint16_t *xs = x, *ws = w;
  if (padded > MAX_K) return NAN;
  for (int64_t k = 0; k < padded; k++) {
    a[k] = ws[rm_packed_index(dtype, k_total, n, k)];
    b[k] = k < k_total ? xs[k] : 0;
  }
  return mma_chain(a, b, padded);
}

float rm_ref_values_dot(rm_dtype dtype, const float *p, const float *v) {
  if (dtype == RM_F32) return fma_values_dot(dtype, p, v);
  uint16_t a[RM_ATTN_BLOCK], b[RM_ATTN_BLOCK];
  // Both are bfloat16 already. A conversion would flush denormals, which the instruction keeps.
  for (int i = 0; i < RM_ATTN_BLOCK; i++) {
    a[i] = (uint16_t)(rm_bits(v[i]) >> 16);
    b[i] = (uint16_t)(rm_bits(p[i]) >> 16);
  }
  return mma_chain(a, b, RM_ATTN_BLOCK);
}

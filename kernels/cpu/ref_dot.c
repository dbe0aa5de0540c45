// ref_dot.c: the two sums of products of docs/numerics.md, the dot product of §2 and P·V of §4.
// Other families differ only in these, so their tests link the other ref*.c with their own sums
// (tests/gpu/simt/mma_dot.c).
#include "ref.h"

float rm_ref_dot(rm_dtype dtype, const void *x, const void *w, int64_t n, int64_t k_total) {
  float acc = 0.0f;
  for (int64_t k0 = 0; k0 < k_total; k0 += RM_K_BLOCK) {
    const int64_t tile = rm_packed_index(dtype, k_total, n, k0);
    float chain[2] = {0.0f, 0.0f}; // even k, odd k
    for (int64_t kk = 0; kk < RM_K_BLOCK; kk++) {
      const float xv = k0 + kk < k_total ? rm_get(dtype, x, k0 + kk) : 0.0f;
      const float wv =
          rm_get(dtype, w, tile + (dtype == RM_BF16 ? (kk / 2) * 32 + (kk & 1) : kk * RM_N_TILE));
      chain[kk & 1] = fmaf(xv, wv, chain[kk & 1]);
    }
    acc = acc + (chain[0] + chain[1]);
  }
  return acc;
}

float rm_ref_values_dot(rm_dtype, const float *p, const float *v) {
  float chain[2] = {0.0f, 0.0f}; // even positions, odd positions
  for (int j = 0; j < RM_ATTN_BLOCK; j++) chain[j & 1] = fmaf(p[j], v[j], chain[j & 1]);
  return chain[0] + chain[1];
}

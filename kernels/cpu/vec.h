// vec.h: shared by the sources of a fast variant: the lanes of the build's vector header, elements
// of type T as lanes, exp, and symbol names with the variant's name.
//
// always_inline functions take dtype as a constant: SPECIALIZE turns one generic body into the bf16
// and the f32 code.
#pragma once

#include RM_VEC_HEADER
#include "threads.h"

#define RM_CAT_(a, b) a##_##b
#define RM_CAT(a, b) RM_CAT_(a, b)
#define RM_FN(name) RM_CAT(rm_##name, RM_ISA) // rm_gemm_avx2
#define RM_STRING_(x) #x
#define RM_STRING(x) RM_STRING_(x)

// An op whose rows are independent.
#define ROW_OP(name, cost, compute) RM_ROW_OP(RM_FN(name), name, cost, compute)

#define SPECIALIZE(dtype, call_with_T) \
  do { \
    if ((dtype) == RM_BF16) { \
      const rm_dtype T = RM_BF16; \
      call_with_T; \
    } else { \
      const rm_dtype T = RM_F32; \
      call_with_T; \
    } \
  } while (0)

// Flips the sign bit.
VEC vf vf_neg(vf x) { return vi_floats(vi_add(vf_bits(x), vi_set1(INT32_MIN))); }

// +0 instead of −0, and every NaN the same NaN.
VEC vf vf_canon(vf x) { return vf_one_nan(vf_add(x, vf_zero())); }

#ifndef RM_NEAR_BF16
// The bf16 nearest to each canonical lane, as a float. Its denormals are zeros already.
VEC vf vf_near_bf16(vf x) {
  const vi u = vf_bits(x), odd = vi_and(vi_srl(u, 16), vi_set1(1));
  return vi_floats(vi_and(vi_add(u, vi_add(odd, vi_set1(0x7fff))), vi_set1((int32_t)0xffff0000)));
}
#endif

VEC int vi_any(vi mask) { return vi_lanes(mask) != 0; }
VEC int vf_any_nonfinite(vf x) {
  const vi exponent = vi_set1(0x7f800000);
  return vi_any(vi_eq(vi_and(vf_bits(x), exponent), exponent));
}

// tree16 of the lanes, and the largest lane (a NaN only if a lane is a NaN).
#define VF_FOLD(name, op) \
  VEC float name(vf x) { \
    const __m256 s8 = _mm256_##op##_ps(vf_lower(x), vf_upper(x)); \
    const __m128 s4 = _mm_##op##_ps(_mm256_castps256_ps128(s8), _mm256_extractf128_ps(s8, 1)); \
    const __m128 s2 = _mm_##op##_ps(s4, _mm_movehl_ps(s4, s4)); \
    return _mm_cvtss_f32(_mm_##op##_ss(s2, _mm_movehdup_ps(s2))); \
  }
VF_FOLD(vf_tree16, add)
VF_FOLD(vf_max16, max)

// ------------------------------------------------------------------------------------- lanes of T
// A row of bf16 pairs is 16 words of (k even, k odd). Returns the upper halves as floats;
// vf_even_at returns the lower ones.
VEC vf vf_odd(vi pairs) { return vi_floats(vi_and(pairs, vi_set1((int32_t)0xffff0000))); }
VEC vf vt_load(rm_dtype dtype, const void *p, int64_t i) {
  return dtype == RM_BF16 ? vf_load_bf16((const uint16_t *)p + i) : vf_load((const float *)p + i);
}
// Loads the first n lanes, all of them if n ≥ 16; the others are +0. (A masked load of 16-bit lanes
// would need AVX512BW.)
VEC vf vt_load_n(rm_dtype dtype, const void *p, int64_t i, int64_t n) {
  uint16_t lanes[RM_LANES] = {0};
  if (n >= RM_LANES) return vt_load(dtype, p, i);
  if (dtype == RM_F32) return vf_load_n((const float *)p + i, n);
  for (int64_t j = 0; j < n; j++) lanes[j] = ((const uint16_t *)p)[i + j];
  return vf_load_bf16(lanes);
}
VEC float vt_sum_of_squares(rm_dtype dtype, const void *x, int64_t n) {
  vf squares = vf_zero();
  for (int64_t i = 0; i < n; i += RM_LANES) {
    const vf v = vt_load_n(dtype, x, i, n - i);
    squares = vf_fma(v, v, squares);
  }
  return vf_tree16(squares);
}
VEC vf vt_round(rm_dtype dtype, vf x) {
  const vf y = vf_canon(x);
  return dtype == RM_BF16 ? vf_near_bf16(y) : y;
}
// Stores lanes that are rounded to T already.
VEC void vt_store(rm_dtype dtype, void *p, int64_t i, vf x) {
  if (dtype == RM_BF16) vf_store_bf16((uint16_t *)p + i, x);
  else vf_store((float *)p + i, x);
}
// Stores the first n lanes, all of them if n ≥ 16. (A masked store is slow on common processors.)
VEC void vt_store_n(rm_dtype dtype, void *p, int64_t i, vf x, int64_t n) {
  float lanes[RM_LANES];
  if (n >= RM_LANES) {
    vt_store(dtype, p, i, x);
    return;
  }
  vt_store(dtype, lanes, 0, x);
  for (int64_t j = 0; j < n; j++) rm_copy_elem(dtype, p, i + j, lanes, j);
}

// rm_weighted, rounded.
VEC vf vt_weighted(rm_dtype dtype, int zero_centered, vf weight, vf t) {
  return vt_round(dtype, zero_centered ? vf_mul(vf_add(vf_set1(1.0f), weight), t)
                                       : vf_mul(weight, vt_round(dtype, t)));
}

// rm_polynomial for 16 lanes.
VEC vf vf_polynomial(const float *c, const int n, vf x) {
  vf sum = vf_set1(c[n - 1]);
  for (int i = n - 2; i >= 0; i--) sum = vf_fma(sum, x, vf_set1(c[i]));
  return sum;
}

VEC vf vf_exp(vf x) {
  x = vf_max(vf_set1(RM_EXP_LO), x); // in this order a NaN in x stays
  x = vf_min(vf_set1(RM_EXP_HI), x);
  const vf magic = vf_set1(RM_ROUND_MAGIC);
  const vf t = vf_fma(x, vf_set1(RM_LOG2E), magic), n = vf_sub(t, magic);
  const vi i = vi_sub(vf_bits(t), vf_bits(magic));
  vf r = vf_fma(n, vf_set1(-RM_LN2_HI), x);
  r = vf_fma(n, vf_set1(-RM_LN2_LO), r);
  const float q[] = {RM_EXP_Q};
  const vf p = vf_add(vf_fma(vf_polynomial(q, 6, r), vf_mul(r, r), r), vf_set1(1.0f));
  return vf_scale(p, n, i);
}

// x / (1 + exp(−z)), which is x·sigmoid(z).
VEC vf vf_times_sigmoid(vf x, vf z) { return vf_div(x, vf_add(vf_set1(1.0f), vf_exp(vf_neg(z)))); }

VEC vf vf_tanh(vf x) {
  const vf a = vf_max(x, vf_neg(x)), z = vf_mul(x, x), one = vf_set1(1.0f);
  const float q[] = {RM_TANH_Q};
  const vf near = vf_fma(vf_mul(x, z), vf_polynomial(q, 5, z), x),
           far = vf_sub(one, vf_div(vf_set1(2.0f), vf_add(vf_exp(vf_add(a, a)), one)));
  return vf_pick(vf_gt(vf_set1(RM_TANH_SMALL), a), near,
                 vf_pick(vf_gt(vf_zero(), x), vf_neg(far), far));
}

VEC vf vf_softcap(vf x, float cap) {
  return cap != 0.0f ? vf_mul(vf_set1(cap), vf_tanh(vf_div(x, vf_set1(cap)))) : x;
}

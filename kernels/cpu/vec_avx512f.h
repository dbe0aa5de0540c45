// vec_avx512f.h: sixteen lanes as one 512-bit register. The names and steps are those of
// vec_avx2.h. It uses only AVX512F, so that every processor with 512-bit registers can run it.
// Masks are lanes of ones and zeros, as the sources expect; the compiler turns them into mask
// registers if they are used at once.
#pragma once

#include <immintrin.h>

#include "scalar.h"

#ifndef RM_FETCH_AHEAD
#define RM_FETCH_AHEAD 2048 // on a Xeon, decode of one sequence is 7 % faster than with 1024
#endif

enum {
  RM_VEC_ROWS = 8, // rows of a register block: 16 chains, twice as many as two FMA units need
  RM_LAST_ROWS = 8,
  RM_FLAT_ROWS = 8, // the chains take 16 of 32 registers, so both kinds are always in flight
  RM_KEEP_SUMS = 1, // whether the sums of a register block fit in registers
  RM_PIECE_BLOCKS = 8,
};

typedef __m512 vf;
typedef __m512i vi;

#define VEC static inline __attribute__((always_inline))
#define VF_OF_TWO(name, op) \
  VEC vf name(vf x, vf y) { return op(x, y); }
#define VI_OF_TWO(name, op) \
  VEC vi name(vi x, vi y) { return op(x, y); }

VEC vf vf_zero(void) { return _mm512_setzero_ps(); }
VEC vf vf_set1(float x) { return _mm512_set1_ps(x); }
VEC vf vf_load(const float *p) { return _mm512_loadu_ps(p); }
VEC void vf_store(float *p, vf x) { _mm512_storeu_ps(p, x); }
VF_OF_TWO(vf_add, _mm512_add_ps)
VF_OF_TWO(vf_sub, _mm512_sub_ps)
VF_OF_TWO(vf_mul, _mm512_mul_ps)
VF_OF_TWO(vf_div, _mm512_div_ps)
VEC vf vf_fma(vf x, vf y, vf z) { return _mm512_fmadd_ps(x, y, z); }
VEC vf vf_fma_at(const float *x, vf w, vf z) { return vf_fma(vf_set1(*x), w, z); }
VEC vf vf_mul_at(const float *x, vf w) { return vf_mul(vf_set1(*x), w); }
VEC void vf_add_to(float *sum, vf x) { vf_store(sum, vf_add(vf_load(sum), x)); }
VF_OF_TWO(vf_max, _mm512_max_ps) // x > y ? x : y
VF_OF_TWO(vf_min, _mm512_min_ps) // x < y ? x : y

VEC vi vi_set1(int32_t x) { return _mm512_set1_epi32(x); }
VEC vi vi_load(const void *p) { return _mm512_loadu_si512(p); }
VI_OF_TWO(vi_add, _mm512_add_epi32)
VI_OF_TWO(vi_sub, _mm512_sub_epi32)
VI_OF_TWO(vi_and, _mm512_and_si512)
VEC vi vf_bits(vf x) { return _mm512_castps_si512(x); }
VEC vf vi_floats(vi x) { return _mm512_castsi512_ps(x); }
#define vi_sll(x, n) _mm512_slli_epi32(x, n)
#define vi_srl(x, n) _mm512_srli_epi32(x, n)

// Conversion of a mask register to lanes of ones, and back.
VEC vi vi_of(__mmask16 bits) { return _mm512_maskz_set1_epi32(bits, -1); }
VEC __mmask16 vi_lanes(vi mask) { return _mm512_test_epi32_mask(mask, mask); }
VEC __mmask16 first_bits(int64_t n) { return (__mmask16)((1u << n) - 1); } // 0 ≤ n ≤ 16

// Mask of the first n of 16 lanes, 0 ≤ n ≤ 16. vf_load_n reads the other lanes as +0.
VEC vi vi_first(int64_t n) { return vi_of(first_bits(n)); }
VEC vf vf_keep(vf x, vi mask) { return vi_floats(vi_and(vf_bits(x), mask)); }
VEC vf vf_pick(vi mask, vf yes, vf no) { return _mm512_mask_blend_ps(vi_lanes(mask), no, yes); }
VEC vf vf_load_n(const float *p, int64_t n) { return _mm512_maskz_loadu_ps(first_bits(n), p); }

// The last step of exp by one instruction. Of the two products in vec_avx2.h the first is exact, so
// only the second rounds, like this instruction.
VEC vf vf_scale(vf p, vf n, vi) { return _mm512_scalef_ps(p, n); }

// Masks of comparisons, false with a NaN.
VEC vi vf_gt(vf x, vf y) { return vi_of(_mm512_cmp_ps_mask(x, y, _CMP_GT_OQ)); }
VEC vi vf_ge(vf x, vf y) { return vi_of(_mm512_cmp_ps_mask(x, y, _CMP_GE_OQ)); }
VEC vi vi_eq(vi x, vi y) { return vi_of(_mm512_cmpeq_epi32_mask(x, y)); }

VEC __m256 vf_lower(vf x) { return _mm512_castps512_ps256(x); }
VEC __m256 vf_upper(vf x) {
  return _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x), 1));
}

// bf16.
VEC vf vf_load_bf16(const uint16_t *p) {
  return vi_floats(vi_sll(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
}
// Every NaN becomes the same NaN.
VEC vf vf_one_nan(vf x) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), x, vf_set1(NAN));
}
// The low words of 16 pairs as floats. (vec_avx2.h uses `inside`.)
VEC vf vf_even_at(const uint16_t *pairs, int) { return vi_floats(vi_sll(vi_load(pairs), 16)); }
// Stores lanes that are rounded to bf16 already.
VEC void vf_store_bf16(uint16_t *p, vf x) {
  _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(vi_srl(vf_bits(x), 16)));
}

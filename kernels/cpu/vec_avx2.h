// vec_avx2.h: sixteen lanes as two 256-bit registers, AVX2 and FMA. The sources of the fast
// variants use only the names below; another vec_<isa>.h with the same names makes another variant.
// Each name is one step of docs/numerics.md for 16 lanes, so the sources round only where the
// contract does.
#pragma once

#include <immintrin.h>

#include "scalar.h"

enum {
  RM_VEC_ROWS = 4, // rows of a register block: 8 chains fill two FMA units of latency 4
  RM_LAST_ROWS = 6, // of the last block, instead of two smaller ones: 12 chains fill 16 registers
  RM_FLAT_ROWS = 3, // up to this many rows even and odd chains run side by side: also 12 chains
  RM_KEEP_SUMS = 0, // whether the sums of a register block fit in registers
  RM_FETCH_AHEAD = 1024, // bytes that weights are fetched ahead for few rows
  RM_PIECE_BLOCKS = 2, // k blocks of a piece of weights that several register blocks use in turn
};

typedef struct vf {
  __m256 a, b; // lanes 0 … 7, 8 … 15
} vf;
typedef struct vi {
  __m256i a, b;
} vi;

#define VEC static inline __attribute__((always_inline))

VEC vf vf_make(__m256 a, __m256 b) { return (vf){a, b}; }
// An operation of two vectors is that of their halves.
#define VF_OF_TWO(name, op) \
  VEC vf name(vf x, vf y) { return vf_make(op(x.a, y.a), op(x.b, y.b)); }
#define VI_OF_TWO(name, op) \
  VEC vi name(vi x, vi y) { return (vi){op(x.a, y.a), op(x.b, y.b)}; }
VEC vf vf_zero(void) { return vf_make(_mm256_setzero_ps(), _mm256_setzero_ps()); }
VEC vf vf_set1(float x) { return vf_make(_mm256_set1_ps(x), _mm256_set1_ps(x)); }
VEC vf vf_load(const float *p) { return vf_make(_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)); }
VEC void vf_store(float *p, vf x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
VF_OF_TWO(vf_add, _mm256_add_ps)
VF_OF_TWO(vf_sub, _mm256_sub_ps)
VF_OF_TWO(vf_mul, _mm256_mul_ps)
VF_OF_TWO(vf_div, _mm256_div_ps)
VEC vf vf_fma(vf x, vf y, vf z) {
  return vf_make(_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b));
}

// z + x·w, and below x·w, for one x in memory. Written in assembly, since gcc would load the x of
// several steps ahead and spill the chains. Operands written before w.b is read (&) must not share
// its register.
VEC vf vf_fma_at(const float *x, vf w, vf z) {
  __m256 all;
  __asm__("vbroadcastss %3, %2\n\tvfmadd231ps %2, %4, %0\n\tvfmadd231ps %2, %5, %1"
          : "+&x"(z.a), "+x"(z.b), "=&x"(all)
          : "m"(*x), "x"(w.a), "x"(w.b));
  return z;
}
VEC vf vf_mul_at(const float *x, vf w) {
  vf y;
  __m256 all;
  __asm__("vbroadcastss %3, %2\n\tvmulps %2, %4, %0\n\tvmulps %2, %5, %1"
          : "=&x"(y.a), "=&x"(y.b), "=&x"(all)
          : "m"(*x), "x"(w.a), "x"(w.b));
  return y;
}
// *sum += x, in memory: gcc would keep a second copy of a sum in registers on the stack.
VEC void vf_add_to(float *sum, vf x) {
  vf_store(sum, vf_add(vf_load(sum), x));
  __asm__ volatile("" : : : "memory");
}

VF_OF_TWO(vf_max, _mm256_max_ps) // x > y ? x : y
VF_OF_TWO(vf_min, _mm256_min_ps) // x < y ? x : y

VEC vi vi_set1(int32_t x) { return (vi){_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
VEC vi vi_load(const void *p) {
  return (vi){_mm256_loadu_si256((const __m256i *)p), _mm256_loadu_si256((const __m256i *)p + 1)};
}
VI_OF_TWO(vi_add, _mm256_add_epi32)
VI_OF_TWO(vi_sub, _mm256_sub_epi32)
VI_OF_TWO(vi_and, _mm256_and_si256)
VI_OF_TWO(vi_eq, _mm256_cmpeq_epi32)
VEC vi vf_bits(vf x) { return (vi){_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
VEC vf vi_floats(vi x) { return vf_make(_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)); }
#define vi_sll(x, n) ((vi){_mm256_slli_epi32((x).a, n), _mm256_slli_epi32((x).b, n)})
#define vi_srl(x, n) ((vi){_mm256_srli_epi32((x).a, n), _mm256_srli_epi32((x).b, n)})
#define vi_sra(x, n) ((vi){_mm256_srai_epi32((x).a, n), _mm256_srai_epi32((x).b, n)})

// Mask of the first n of 16 lanes, 0 ≤ n ≤ 16. vf_load_n reads the other lanes as +0.
VEC vi vi_first(int64_t n) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7),
                limit = _mm256_set1_epi32((int32_t)n);
  return (vi){_mm256_cmpgt_epi32(limit, lane),
              _mm256_cmpgt_epi32(limit, _mm256_add_epi32(lane, _mm256_set1_epi32(8)))};
}
VEC vf vf_keep(vf x, vi mask) {
  return vf_make(_mm256_and_ps(x.a, _mm256_castsi256_ps(mask.a)),
                 _mm256_and_ps(x.b, _mm256_castsi256_ps(mask.b)));
}
VEC vf vf_pick(vi mask, vf yes, vf no) {
  return vf_make(_mm256_blendv_ps(no.a, yes.a, _mm256_castsi256_ps(mask.a)),
                 _mm256_blendv_ps(no.b, yes.b, _mm256_castsi256_ps(mask.b)));
}
VEC vf vf_load_n(const float *p, int64_t n) {
  const vi mask = vi_first(n);
  return vf_make(_mm256_maskload_ps(p, mask.a), _mm256_maskload_ps(p + 8, mask.b));
}
// (p·2^(i>>1))·2^(i−(i>>1)), the last step of exp; n is i as a float.
VEC vf vf_scale(vf p, vf, vi i) {
  const vi half = vi_sra(i, 1), bias = vi_set1(127);
  const vf lo = vi_floats(vi_sll(vi_add(half, bias), 23)),
           hi = vi_floats(vi_sll(vi_add(vi_sub(i, half), bias), 23));
  return vf_mul(vf_mul(p, lo), hi);
}

// Masks of comparisons, false with a NaN.
#define VF_COMPARED(x, y, how) \
  ((vi){_mm256_castps_si256(_mm256_cmp_ps((x).a, (y).a, how)), \
        _mm256_castps_si256(_mm256_cmp_ps((x).b, (y).b, how))})
VEC vi vf_gt(vf x, vf y) { return VF_COMPARED(x, y, _CMP_GT_OQ); }
VEC vi vf_ge(vf x, vf y) { return VF_COMPARED(x, y, _CMP_GE_OQ); }
VEC uint32_t vi_lanes(vi mask) {
  return (uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(mask.a)) |
         (uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(mask.b)) << 8;
}

VEC __m256 vf_lower(vf x) { return x.a; }
VEC __m256 vf_upper(vf x) { return x.b; }

// bf16.
VEC vf vf_load_bf16(const uint16_t *p) {
  const __m256i lo = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
  const __m256i hi = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p + 1));
  return vi_floats(vi_sll(((vi){lo, hi}), 16));
}
// Every NaN becomes the same NaN.
VEC vf vf_one_nan(vf x) { return vf_pick(VF_COMPARED(x, x, _CMP_UNORD_Q), vf_set1(NAN), x); }
// The low words of 16 pairs as floats. A shift would compete with FMA for a port; a load one word
// to the left does not. inside: that word may be read.
VEC vf vf_even_at(const uint16_t *pairs, int inside) {
  if (!inside) return vi_floats(vi_sll(vi_load(pairs), 16));
  return vi_floats(vi_and(vi_load(pairs - 1), vi_set1((int32_t)0xffff0000)));
}
// Stores lanes that are rounded to bf16 already.
VEC void vf_store_bf16(uint16_t *p, vf x) {
  const vi u = vi_srl(vf_bits(x), 16);
  _mm256_storeu_si256((__m256i *)p, _mm256_permute4x64_epi64(_mm256_packus_epi32(u.a, u.b), 0xd8));
}

// vec_avx512bf16.h: the lanes of vec_avx512f.h and the steps of panel_bf16.h: vdpbf16ps and the
// permutation of its operands. Both instructions of AVX512-BF16 round to nearest even and flush
// denormals for any MXCSR, as the contract does.
#pragma once

#define RM_FETCH_AHEAD 1024 // measured on a Zen 4, not with AMX
#include "vec_avx512f.h"

VEC void vi_store(void *p, vi x) { _mm512_storeu_si512(p, x); }

// acc ← fma(low(x)·low(w), fma(high(x)·high(w), acc)) in each lane.
VEC vf vp_dot(vf acc, vi x, vi w) { return _mm512_dpbf16_ps(acc, (__m512bh)x, (__m512bh)w); }

// From words (k0, k1) and (k2, k3), low half first: (k2, k0), and below (k3, k1).
enum { LOW_HALVES = 0x55555555 };
VEC vi vp_even(vi first, vi second) {
  return _mm512_mask_mov_epi16(vi_sll(first, 16), LOW_HALVES, second);
}
VEC vi vp_odd(vi first, vi second) {
  return _mm512_mask_mov_epi16(first, LOW_HALVES, vi_srl(second, 16));
}

// The same for one row: permutes x[0 … 32) to 8 words of the even chain and 8 of the odd one.
VEC vi vp_permute(vi x) {
  static const uint16_t FROM[RM_K_BLOCK] = {2,  0,  6,  4,  10, 8,  14, 12, 18, 16, 22,
                                            20, 26, 24, 30, 28, 3,  1,  7,  5,  11, 9,
                                            15, 13, 19, 17, 23, 21, 27, 25, 31, 29};
  return _mm512_permutexvar_epi16(vi_load(FROM), x);
}
// The bf16 nearest to each canonical lane, as a float.
#define RM_NEAR_BF16
VEC vf vf_near_bf16(vf x) {
  return vi_floats(vi_sll(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x)), 16));
}
// The bf16 nearest to each of 32 lanes, as words. A NaN stays a NaN.
VEC vi vp_round(vf x0, vf x1) { return (vi)_mm512_cvtne2ps_pbh(x1, x0); }

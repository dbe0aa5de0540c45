// immintrin.h: includes the real header and adds the AVX-512, AVX512-BF16 and AMX intrinsics that
// kernels/cpu uses, in plain C, so that these variants run, are compared and are sanitized on any
// processor with AVX2. It comes first on the include path of a build with ROLLMESH_EMULATE=1. An
// intrinsic that is missing here does not compile.
//
// The results of vdpbf16ps and tdpbf16ps were measured on processors that have them: two fused
// steps, the odd half first, and a sum of an even and an odd chain from +0; nearest even, denormals
// flushed, independent of MXCSR (the kernels set MXCSR to the same mode, which fmaf obeys). Tiles
// follow their configuration: a load or store accesses the configured rows and bytes only. A use
// without a configuration, or with shapes that do not match, ends the program, as on the processor.
#pragma once

#include_next <immintrin.h>

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define EMU static inline __attribute__((always_inline, unused))
#define EMU_CALL \
  static __attribute__((noinline, unused)) // frequent ones; otherwise compiling takes minutes
#define EMU_LANES for (int i = 0; i < 16; i++)

typedef float emu_f __attribute__((vector_size(64)));
typedef int32_t emu_i __attribute__((vector_size(64)));
typedef uint32_t emu_u __attribute__((vector_size(64)));
typedef uint16_t emu_h __attribute__((vector_size(64)));

EMU __m512 emu_ps_set1(float x) {
  return (__m512)(emu_f){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x};
}
EMU __m512i emu_epi32_set1(int x) {
  return (__m512i)(emu_i){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x};
}
EMU __m512 emu_ps_load(const void *p) {
  __m512 x;
  memcpy(&x, p, sizeof x);
  return x;
}
EMU __m512i emu_si_load(const void *p) {
  __m512i x;
  memcpy(&x, p, sizeof x);
  return x;
}
EMU void emu_ps_store(void *p, __m512 x) { memcpy(p, &x, sizeof x); }
EMU void emu_si_store(void *p, __m512i x) { memcpy(p, &x, sizeof x); }

#define _mm512_setzero_ps() emu_ps_set1(0.0f)
#define _mm512_set1_ps(x) emu_ps_set1(x)
#define _mm512_set1_epi32(x) emu_epi32_set1(x)
#define _mm512_loadu_ps(p) emu_ps_load(p)
#define _mm512_loadu_si512(p) emu_si_load(p)
#define _mm512_storeu_ps(p, x) emu_ps_store(p, x)
#define _mm512_storeu_si512(p, x) emu_si_store(p, x)
#define _mm512_castps_si512(x) ((__m512i)(x))
#define _mm512_castsi512_ps(x) ((__m512)(x))
#define _mm512_castps_pd(x) ((__m512d)(x))

// ------------------------------------------------------------------------------------- arithmetic
#define _mm512_add_ps(x, y) ((__m512)((emu_f)(x) + (emu_f)(y)))
#define _mm512_sub_ps(x, y) ((__m512)((emu_f)(x) - (emu_f)(y)))
#define _mm512_mul_ps(x, y) ((__m512)((emu_f)(x) * (emu_f)(y)))
#define _mm512_div_ps(x, y) ((__m512)((emu_f)(x) / (emu_f)(y)))

// Two halves through an instruction that AVX2 has, which gives the same result in each lane.
#define EMU_HALVES_2(name, op) \
  EMU_CALL __m512 name(__m512 x, __m512 y) { \
    __m256 a[2], b[2]; \
    __m512 z; \
    memcpy(a, &x, sizeof x); \
    memcpy(b, &y, sizeof y); \
    for (int i = 0; i < 2; i++) a[i] = op(a[i], b[i]); \
    memcpy(&z, a, sizeof z); \
    return z; \
  }
EMU_HALVES_2(emu_max, _mm256_max_ps)
EMU_HALVES_2(emu_min, _mm256_min_ps)
#define _mm512_max_ps(x, y) emu_max(x, y)
#define _mm512_min_ps(x, y) emu_min(x, y)
EMU_CALL __m512 emu_fma(__m512 x, __m512 y, __m512 z) {
  __m256 a[2], b[2], c[2];
  memcpy(a, &x, sizeof x);
  memcpy(b, &y, sizeof y);
  memcpy(c, &z, sizeof z);
  for (int i = 0; i < 2; i++) a[i] = _mm256_fmadd_ps(a[i], b[i], c[i]);
  memcpy(&z, a, sizeof z);
  return z;
}
#define _mm512_fmadd_ps(x, y, z) emu_fma(x, y, z)
EMU_CALL __m512 emu_scalef(__m512 x, __m512 y) {
  emu_f z = (emu_f)x;
  const emu_f n = (emu_f)y;
  EMU_LANES if (!isnan(z[i])) z[i] =
      isnan(n[i]) ? n[i] : (float)ldexp((double)z[i], (int)floorf(n[i]));
  return (__m512)z;
}
#define _mm512_scalef_ps(x, y) emu_scalef(x, y)

#define _mm512_add_epi32(x, y) ((__m512i)((emu_u)(x) + (emu_u)(y)))
#define _mm512_sub_epi32(x, y) ((__m512i)((emu_u)(x) - (emu_u)(y)))
#define _mm512_and_si512(x, y) ((__m512i)((emu_u)(x) & (emu_u)(y)))
#define _mm512_andnot_si512(x, y) ((__m512i)(~(emu_u)(x) & (emu_u)(y)))
#define _mm512_slli_epi32(x, n) ((__m512i)((emu_u)(x) << (n)))
#define _mm512_srli_epi32(x, n) ((__m512i)((emu_u)(x) >> (n)))
#define _mm512_srai_epi32(x, n) ((__m512i)((emu_i)(x) >> (n)))

// ------------------------------------------------------------------------------------------ masks
EMU_CALL __mmask16 emu_mask(emu_i lanes) {
  unsigned bits = 0;
  EMU_LANES bits |= (unsigned)(lanes[i] != 0) << i;
  return (__mmask16)bits;
}
#define _mm512_test_epi32_mask(x, y) emu_mask(((emu_i)(x) & (emu_i)(y)) != 0)
#define _mm512_cmpeq_epi32_mask(x, y) emu_mask((emu_i)(x) == (emu_i)(y))
#undef _mm512_cmp_ps_mask
#define _mm512_cmp_ps_mask(x, y, op) emu_mask(emu_compare(x, y, op))
EMU emu_i emu_compare(__m512 x, __m512 y, int op) {
  const emu_f a = (emu_f)x, b = (emu_f)y;
  if (op == _CMP_GT_OQ) return a > b;
  if (op == _CMP_GE_OQ) return a >= b;
  if (op == _CMP_UNORD_Q) return (a != a) | (b != b);
  abort(); // the kernels do not use other predicates
}
EMU_CALL __m512 emu_blend(__mmask16 mask, __m512 no, __m512 yes) {
  emu_u a = (emu_u)no, b = (emu_u)yes;
  EMU_LANES a[i] = mask >> i & 1 ? b[i] : a[i];
  return (__m512)a;
}
#define _mm512_mask_blend_ps(mask, no, yes) emu_blend(mask, no, yes)
#define _mm512_maskz_set1_epi32(mask, x) \
  ((__m512i)emu_blend(mask, emu_ps_set1(0.0f), (__m512)emu_epi32_set1(x)))
EMU __m512 emu_ps_load_n(__mmask16 mask, const float *p) {
  emu_f x = {0};
  EMU_LANES if (mask >> i & 1) x[i] = p[i];
  return (__m512)x;
}
#define _mm512_maskz_loadu_ps(mask, p) emu_ps_load_n(mask, p)
EMU __m512i emu_mov16(__m512i no, __mmask32 mask, __m512i yes) {
  emu_h a = (emu_h)no, b = (emu_h)yes;
  for (int i = 0; i < 32; i++) a[i] = mask >> i & 1 ? b[i] : a[i];
  return (__m512i)a;
}
#define _mm512_mask_mov_epi16(no, mask, yes) emu_mov16(no, mask, yes)
EMU __m512i emu_permute16(__m512i from, __m512i x) {
  const emu_h a = (emu_h)from, b = (emu_h)x;
  emu_h y;
  for (int i = 0; i < 32; i++) y[i] = b[a[i] & 31];
  return (__m512i)y;
}
#define _mm512_permutexvar_epi16(from, x) emu_permute16(from, x)

// ------------------------------------------------------------------------------ halves and widths
EMU __m256i emu_half(__m512i x, int half) {
  __m256i y[2];
  memcpy(y, &x, sizeof x);
  return y[half];
}
#define _mm512_castps512_ps256(x) ((__m256)emu_half((__m512i)(x), 0))
#undef _mm512_extractf64x4_pd
#define _mm512_extractf64x4_pd(x, half) ((__m256d)emu_half((__m512i)(x), half))
EMU __m512i emu_widen16(__m256i x) {
  uint16_t h[16];
  emu_u y;
  memcpy(h, &x, sizeof h);
  EMU_LANES y[i] = h[i];
  return (__m512i)y;
}
EMU __m256i emu_narrow32(__m512i x) {
  const emu_u y = (emu_u)x;
  uint16_t h[16];
  __m256i z;
  EMU_LANES h[i] = (uint16_t)y[i];
  memcpy(&z, h, sizeof z);
  return z;
}
#define _mm512_cvtepu16_epi32(x) emu_widen16(x)
#define _mm512_cvtepi32_epi16(x) emu_narrow32(x)

// ------------------------------------------------------------------------------------------- bf16
typedef __m512i emu_bh;
#define __m512bh emu_bh
EMU float emu_low(uint32_t word) {
  float x;
  word <<= 16;
  memcpy(&x, &word, sizeof x);
  return x;
}
EMU float emu_high(uint32_t word) { return emu_low(word >> 16); }
EMU_CALL __m512 emu_dpbf16(__m512 acc, __m512i x, __m512i y) {
  emu_f sum = (emu_f)acc;
  const emu_u a = (emu_u)x, b = (emu_u)y;
  EMU_LANES sum[i] =
      fmaf(emu_low(a[i]), emu_low(b[i]), fmaf(emu_high(a[i]), emu_high(b[i]), sum[i]));
  return (__m512)sum;
}
#define _mm512_dpbf16_ps(acc, x, y) emu_dpbf16(acc, x, y)
// Nearest even, independent of MXCSR; denormals become zeros, a NaN stays a quiet NaN.
EMU_CALL __m256i emu_to_bf16(__m512 x) {
  const emu_u u = (emu_u)x;
  uint16_t h[16];
  __m256i y;
  EMU_LANES {
    const uint32_t magnitude = u[i] & 0x7fffffff;
    if (magnitude > 0x7f800000) h[i] = (uint16_t)(u[i] >> 16 | 0x40);
    else if (magnitude < 0x00800000) h[i] = (uint16_t)(u[i] >> 16 & 0x8000);
    else h[i] = (uint16_t)((u[i] + 0x7fff + (u[i] >> 16 & 1)) >> 16);
  }
  memcpy(&y, h, sizeof y);
  return y;
}
EMU __m512i emu_both_to_bf16(__m512 high, __m512 low) {
  const __m256i halves[2] = {emu_to_bf16(low), emu_to_bf16(high)};
  __m512i y;
  memcpy(&y, halves, sizeof y);
  return y;
}
#define _mm512_cvtne2ps_pbh(high, low) emu_both_to_bf16(high, low)
#define _mm512_cvtneps_pbh(x) emu_to_bf16(x)

// ------------------------------------------------------------------------------------------ tiles
typedef struct emu_tiles {
  uint8_t configured, rows[8];
  uint16_t row_bytes[8];
  uint32_t word[8][16][16];
} emu_tiles;
static _Thread_local emu_tiles emu_tile __attribute__((unused));

static inline __attribute__((unused)) void emu_need(int holds) {
  if (!holds) abort();
}
static inline __attribute__((unused)) void emu_loadconfig(const void *p) {
  const uint8_t *c = p;
  emu_need(c[0] == 1 && c[1] == 0);
  memset(&emu_tile, 0, sizeof emu_tile);
  emu_tile.configured = 1;
  for (int i = 0; i < 8; i++) {
    memcpy(&emu_tile.row_bytes[i], c + 16 + 2 * i, 2);
    emu_tile.rows[i] = c[48 + i];
    emu_need(emu_tile.rows[i] <= 16 && emu_tile.row_bytes[i] <= 64);
  }
}
static inline __attribute__((unused)) void emu_load(int t, const void *p, int64_t stride) {
  emu_need(emu_tile.configured && emu_tile.rows[t] > 0);
  memset(emu_tile.word[t], 0, sizeof emu_tile.word[t]);
  for (int r = 0; r < emu_tile.rows[t]; r++)
    memcpy(emu_tile.word[t][r], (const char *)p + r * stride, emu_tile.row_bytes[t]);
}
static inline __attribute__((unused)) void emu_store(int t, void *p, int64_t stride) {
  emu_need(emu_tile.configured && emu_tile.rows[t] > 0);
  for (int r = 0; r < emu_tile.rows[t]; r++)
    memcpy((char *)p + r * stride, emu_tile.word[t][r], emu_tile.row_bytes[t]);
}
static inline __attribute__((unused)) void emu_tile_dots(int c, int a, int b) {
  const int M = emu_tile.rows[c], N = emu_tile.row_bytes[c] / 4, K = emu_tile.row_bytes[a] / 4;
  emu_need(emu_tile.configured && M == emu_tile.rows[a] && N == emu_tile.row_bytes[b] / 4 &&
           K == emu_tile.rows[b]);
  for (int m = 0; m < M; m++)
    for (int n = 0; n < N; n++) {
      float even = 0.0f, odd = 0.0f, sum;
      for (int k = 0; k < K; k++) {
        const uint32_t x = emu_tile.word[a][m][k], y = emu_tile.word[b][k][n];
        even = fmaf(emu_low(x), emu_low(y), even);
        odd = fmaf(emu_high(x), emu_high(y), odd);
      }
      memcpy(&sum, &emu_tile.word[c][m][n], sizeof sum);
      sum = sum + (even + odd);
      memcpy(&emu_tile.word[c][m][n], &sum, sizeof sum);
    }
}
#undef _tile_loadconfig
#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_release
#define _tile_loadconfig(p) emu_loadconfig(p)
#define _tile_release() memset(&emu_tile, 0, sizeof emu_tile)
#define _tile_loadd(t, p, stride) emu_load(t, p, stride)
#define _tile_stored(t, p, stride) emu_store(t, p, stride)
#define _tile_zero(t) \
  (emu_need(emu_tile.configured && emu_tile.rows[t] > 0), \
   memset(emu_tile.word[t], 0, sizeof emu_tile.word[t]))
#define _tile_dpbf16ps(c, a, b) emu_tile_dots(c, a, b)

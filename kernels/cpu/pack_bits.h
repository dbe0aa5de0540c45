// pack_bits.h: the conversion of one element and its contribution to the digest. Shared by the
// plain loops, the fast pack and CUDA.
//
// All arithmetic on values is integer: conversions must keep denormals, like torch's, while threads
// run with denormals flushed.
//
// The digest is Σ weight(word index)·word mod 2^64, where a word is one float or two neighbouring
// bf16 of a row. One element contributes weight·(bits << 16·parity), a function of its index and
// bits, so any split, order or layout has the same sum. A change of a single element always changes
// the digest, since the weight is not 0.
#pragma once

#include <stdint.h>
#include <string.h>

#include "kernels.h"

static inline uint16_t load16(const void *p) {
  uint16_t v;
  memcpy(&v, p, sizeof v);
  return v;
}
static inline uint32_t load32(const void *p) {
  uint32_t v;
  memcpy(&v, p, sizeof v);
  return v;
}
static inline uint64_t load64(const void *p) {
  uint64_t v;
  memcpy(&v, p, sizeof v);
  return v;
}

static inline int64_t src_bytes(rm_src_dtype dtype) { return (int64_t)rm_src_bytes(dtype); }

// ------------------------------------------------------------------------------------ conversions
#ifdef __CUDA_ARCH__
#define RM_LEADING_ZEROS(x) ((uint32_t)__clz((int)(x)))
#else
#define RM_LEADING_ZEROS(x) ((uint32_t)__builtin_clz(x))
#endif

RM_INLINE uint16_t bf16_from_f32(uint32_t bits) {
  const uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
  return (uint16_t)((bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : rounded);
}

RM_INLINE uint32_t f32_from_f16(uint16_t bits) {
  const uint32_t sign = (uint32_t)(bits & 0x8000) << 16, exponent = bits >> 10 & 0x1F,
                 fraction = bits & 0x3FF;
  if (exponent == 0x1F) return sign | 0x7F800000 | fraction << 13;
  if (exponent > 0) return sign | (exponent + 112) << 23 | fraction << 13;
  if (fraction == 0) return sign;
  const uint32_t top = 31 - RM_LEADING_ZEROS(fraction); // value = fraction · 2^-24
  return sign | (top + 103) << 23 | (fraction << (23 - top) & 0x7FFFFF);
}

RM_INLINE uint32_t f32_from_f64(uint64_t bits) {
  const uint32_t sign = (uint32_t)(bits >> 63) << 31;
  const int biased = (int)(bits >> 52 & 0x7FF), exponent = biased - 1023 + 127;
  const uint64_t fraction = bits & 0xFFFFFFFFFFFFF;
  if (biased == 0x7FF)
    return sign | 0x7F800000 | (fraction ? 0x400000 | (uint32_t)(fraction >> 29) : 0);
  if (exponent >= 0xFF) return sign | 0x7F800000;
  if (exponent < -24) return sign;
  const uint64_t whole =
      exponent > 0 ? (uint64_t)exponent << 52 | fraction : fraction | (uint64_t)1 << 52;
  const int shift = exponent > 0 ? 29 : 30 - exponent;
  const uint64_t kept = whole >> shift, rest = whole & (((uint64_t)1 << shift) - 1),
                 half = (uint64_t)1 << (shift - 1);
  // A carry into the exponent is right.
  return sign | (uint32_t)(kept + (rest > half || (rest == half && (kept & 1))));
}

static inline uint32_t f32_from(const void *src, rm_src_dtype from) {
  switch (from) {
    case RM_SRC_BF16: return (uint32_t)load16(src) << 16;
    case RM_SRC_F16: return f32_from_f16(load16(src));
    case RM_SRC_F64: return f32_from_f64(load64(src));
    default: return load32(src);
  }
}

RM_INLINE int is_nonfinite(uint32_t stored, rm_dtype dtype) {
  const uint32_t exponent = dtype == RM_BF16 ? 0x7F80 : 0x7F800000;
  return (stored & exponent) == exponent;
}

// ----------------------------------------------------------------------------------------- digest
// Odd, so that multiplying permutes the 2^32 indices; the result is 0 only for the last index.
enum { RM_PACK_WEYL = (int)0x9E3779B1u };

RM_INLINE uint32_t weight_seed(int64_t word) {
  return ((uint32_t)word + 1) * (uint32_t)RM_PACK_WEYL;
}
RM_INLINE uint32_t weight(int64_t word) {
  const uint32_t w = weight_seed(word);
  return w ^ w >> 15;
}

RM_INLINE uint64_t element_digest(int64_t index, uint32_t stored, rm_dtype dtype) {
  if (dtype == RM_F32) return (uint64_t)weight(index) * stored;
  return (uint64_t)weight(index >> 1) * ((uint64_t)stored << (index & 1 ? 16 : 0));
}

// mma_model.h: the model of one output of mma.m16n8k16 on sm_90 for the shim and the oracle, after
// F. A. Khattak and M. Mikaitis, "Accurate Models of NVIDIA Tensor Cores", arXiv 2512.07004. The
// accumulator and the 16 exact products are aligned to the largest of their exponents, where the
// exponent of a product is the sum of its operands', and are cut 25 bits below it. The sum of what
// remains is exact and is cut to a float32. Zeros take no part; denormals do. probe_mma.cu
// compares the model with a card.
#pragma once

#include <math.h>

#include "cpu/scalar.h"

enum {
  MMA_BELOW = 25,
  MMA_LEAST = -133, // terms are aligned to no exponent below that of the smallest bf16
  MMA_NO_TERM = -10000
};

// A sum with infinities or NaNs, as in IEEE 754, whatever the CPU does with denormals.
RM_INLINE float mma_model_not_finite(float c, const uint16_t *a, const uint16_t *b) {
  float sum = (rm_bits(c) & 0x7f800000u) == 0x7f800000u ? c : 0.0f;
  for (int k = 0; k < 16; k++) {
    const int x = a[k] & 0x7fff, y = b[k] & 0x7fff;
    if (x < 0x7f80 && y < 0x7f80) continue;
    const int is_nan = x > 0x7f80 || y > 0x7f80 || !x || !y;
    sum += is_nan ? NAN : (a[k] ^ b[k]) >> 15 ? -INFINITY : INFINITY;
  }
  return sum;
}

// A sum in units of 2^(top − MMA_BELOW), cut to a float32.
RM_INLINE float mma_model_cut(int64_t sum, int top) {
  if (sum == 0) return 0.0f;
  const uint32_t sign = sum < 0 ? 0x80000000u : 0;
  const uint64_t bits = (uint64_t)(sum < 0 ? -sum : sum);
  const int exponent = top - MMA_BELOW + 63 - __builtin_clzll(bits);
  if (exponent > 127) return rm_float(sign | 0x7f800000u);
  const int normal = exponent >= -126, drop = (normal ? exponent - 23 : -149) - (top - MMA_BELOW);
  const uint32_t cut = (uint32_t)(drop >= 0 ? bits >> drop : bits << -drop);
  return rm_float(sign | (normal ? (uint32_t)(exponent + 127) << 23 | (cut & 0x7fffffu) : cut));
}

RM_INLINE float mma_model(float c, const uint16_t *a, const uint16_t *b) {
  const uint32_t c_bits = rm_bits(c);
  const int of_c = c_bits >> 23 & 0xff;
  int finite = of_c != 0xff, exponents[16];
  uint32_t products[16];
  // A denormal has the exponent of the smallest normal number.
  const int c_exponent = c_bits << 1 ? of_c + !of_c - 127 : MMA_NO_TERM;
  int top = c_exponent > MMA_LEAST ? c_exponent : MMA_LEAST;
  for (int k = 0; k < 16; k++) {
    const int of_a = a[k] >> 7 & 0xff, of_b = b[k] >> 7 & 0xff;
    finite &= (of_a != 0xff) & (of_b != 0xff);
    products[k] =
        ((a[k] & 0x7fu) | (uint32_t)!!of_a << 7) * ((b[k] & 0x7fu) | (uint32_t)!!of_b << 7);
    exponents[k] = products[k] ? of_a + !of_a + of_b + !of_b - 254 : MMA_NO_TERM;
    top = exponents[k] > top ? exponents[k] : top;
  }
  if (!finite) return mma_model_not_finite(c, a, b);
  // 23 bits of c and 14 of a product are below the exponent.
  const int c_shift = top - c_exponent < 31 ? top - c_exponent : 31;
  const uint32_t c_term = ((c_bits & 0x7fffffu) | (uint32_t)!!of_c << 23) << (MMA_BELOW - 23);
  int64_t sum = c_bits >> 31 ? -(int64_t)(c_term >> c_shift) : (int64_t)(c_term >> c_shift);
  for (int k = 0; k < 16; k++) {
    const int shift = top - exponents[k] < 31 ? top - exponents[k] : 31;
    const int64_t term = products[k] << (MMA_BELOW - 14) >> shift;
    sum += (a[k] ^ b[k]) >> 15 ? -term : term;
  }
  return mma_model_cut(sum, top);
}

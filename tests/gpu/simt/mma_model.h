// mma_model.h: what the shim and the oracle take for one output of mma.m16n8k16: exact products,
// added in double by ascending k behind the accumulator, rounded once. The hardware cuts where this
// rounds; what the tests hold to bits is the order round the instruction.
#pragma once

#include "cpu/scalar.h"

RM_INLINE float mma_model(float c, const uint16_t *a, const uint16_t *b) {
  double sum = (double)c;
  for (int k = 0; k < 16; k++) sum += (double)rm_bf16_to_f32(a[k]) * (double)rm_bf16_to_f32(b[k]);
  return (float)sum;
}

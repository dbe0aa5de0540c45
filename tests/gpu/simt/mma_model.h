// mma_model.h: the model of one output of mma.m16n8k16 for the shim and the oracle: exact products,
// added in double by ascending k after the accumulator, rounded once. The hardware truncates where
// this rounds; the tests compare the order around the instruction bit for bit.
#pragma once

#include "cpu/scalar.h"

RM_INLINE float mma_model(float c, const uint16_t *a, const uint16_t *b) {
  double sum = (double)c;
  for (int k = 0; k < 16; k++) sum += (double)rm_bf16_to_f32(a[k]) * (double)rm_bf16_to_f32(b[k]);
  return (float)sum;
}

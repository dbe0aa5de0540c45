// mma_places.h: where lanes hold the operands that only the tests place.
#pragma once

#include "packing.cuh"

// The places of the other operands, as rm_mma_a_place: B, and the float32 sums (half is 0).
inline rm_mma_place rm_mma_b_place(int k, int col) { return {col * 4 + k % 8 / 2, k / 8, k % 2}; }
inline rm_mma_place rm_mma_c_place(int row, int col) {
  return {row % 8 * 4 + col / 2, row / 8 * 2 + col % 2, 0};
}

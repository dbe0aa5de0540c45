// simt_mma.h: mma.cuh's instructions on the fibres of simt.h: an operation of a warp whose sums are
// mma_model.h's, and copies that happen when they are waited for. Until then their target is 0xff,
// so that a missing wait is visible, and so is a missing barrier after it.
#pragma once

#include "mma_places.h"
#include "simt.h"

struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(8) int2 {
  int x, y;
};

void simt_mma16(float *c, uint4 a, uint2 b);
uint4 simt_load_matrices(const void *shared_row);
void simt_copy_async(void *to, const void *from, bool there = true); // 16 bytes, or zeros
void simt_copies_commit();
void simt_copies_wait(int left);

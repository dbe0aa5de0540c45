// strided_copy.h: copies a strided GPU tensor to contiguous device memory, in C order, with as few
// copies as its strides allow.
#pragma once

#include "device/devices.h"

enum { RM_STRIDED_DIMS = 4 };

// A tensor as contiguous runs of bytes: dims of size 1 are left out, and neighbouring dims that
// continue one another are merged.
typedef struct rm_strided {
  int64_t size[RM_STRIDED_DIMS],
      // of runs; the last ones are used, those before have size 1; steps in bytes
      step[RM_STRIDED_DIMS];
  size_t width; // bytes of one run
} rm_strided;

// Strides in elements of `each` bytes; at most RM_STRIDED_DIMS dims.
rm_strided rm_strided_of(int n_dims, const int64_t shape[], const int64_t strides[], int64_t each);
// Enqueues the copies. `from` lies on the device of `ordinal`, `to` on `device`.
void rm_strided_copy(const rm_device *device, int ordinal, const rm_strided *r, char *to,
                     const char *from);

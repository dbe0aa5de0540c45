// strided_copy.h: copies a strided GPU tensor to contiguous device memory, in C order, with as few
// copies as its strides allow.
#pragma once

#include "device/devices.h"

enum { RM_STRIDED_DIMS = 4 };

// A tensor as contiguous runs of bytes: dims of size 1 are dropped, and neighbouring dims that
// continue one another are merged.
typedef struct rm_strided {
  int64_t size[RM_STRIDED_DIMS]; // runs in each dim; unused dims come first and have size 1
  int64_t step[RM_STRIDED_DIMS]; // bytes
  size_t width; // bytes of one run
} rm_strided;

// `strides` are in elements of `each` bytes; n_dims ≤ RM_STRIDED_DIMS.
rm_strided rm_strided_of(int n_dims, const int64_t shape[], const int64_t strides[], int64_t each);
// Enqueues the copies. `from` lies on the device of `ordinal`, `to` on `device`.
void rm_strided_copy(const rm_device *device, int ordinal, const rm_strided *r, char *to,
                     const char *from);

// check.h: checks of a pushed tensor: its exact shape, its element type, and strides that stay
// inside its buffer. They run before any byte of the tensor is read.
#pragma once

#include "weights/sync.h"

// Returns RM_E_SHAPE, RM_E_DTYPE, RM_E_UNSUPPORTED_TENSOR (no data) or RM_E_LAYOUT. `name` appears
// in the message.
rm_code rm_tensor_check(const rm_params *params, const rm_target *want, const rm_tensor *tensor,
                        int cast, const char *name, rm_error *err);

const char *rm_dtype_name(rm_dtype dtype); // "bfloat16", "float32"

typedef struct rm_dims_text {
  char text[96];
} rm_dims_text;
rm_dims_text rm_show_dims(const int64_t *dims, int n); // "[2, 3]"

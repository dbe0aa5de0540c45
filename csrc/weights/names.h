// names.h: maps a name of a state dict to parameters: Hugging Face checkpoints, the modules of
// transformers 5 (packed experts), torchtitan and fused projections. names.c has the table, one
// line a spelling.
#pragma once

#include "model/params.h"

// The rows of a tensor that are one parameter: element (r, c) of the parameter is element (outer,
// row0 + r, c) of the tensor, viewed as [outer][rows][cols]. In a 1-D tensor row0 is the first
// element. Where rope turns neighbours in the tensor, row h·head_dim + i of the parameter is the
// tensor's row h·head_dim + 2i, and row h·head_dim + turned/2 + i the one behind it.
typedef struct rm_param_rows {
  int64_t param; // index in params->list
  int64_t outer, row0;
  int64_t head_dim,
      // of such a tensor: elements of a head, and of these the first ones, that rope turns; turned
      // 0: in order
      turned;
} rm_param_rows;

enum { RM_FEW_PIECES = 3 }; // q, k and v in one tensor

typedef struct rm_target { // not to be copied: pieces may point into it
  rm_param_rows *pieces; // `few`, or owned; rm_target_clear
  int64_t n_pieces, capacity;
  int64_t shape[4]; // the shape that the tensor must have
  int n_dims;
  rm_param_rows few[RM_FEW_PIECES]; // so that most names need no memory
} rm_target;

enum { RM_NAME_MAX = 1024 };

// RM_E_UNEXPECTED_KEY: not a parameter of this model; RM_E_LIMIT: a name over RM_NAME_MAX bytes,
// with NUL bytes, or not UTF-8. `out` can be reused without clearing.
rm_code rm_names_resolve(const rm_params *params, const char *name, size_t length, rm_target *out,
                         rm_error *err);
void rm_target_clear(rm_target *target);

// names.h: from a name in somebody's state dict to parameters. Understood are Hugging Face checkpoints, the modules of
// transformers 5 (packed experts), torchtitan and fused projections; names.c holds the table, one line a spelling.
#pragma once

#include "model/params.h"

// One run of rows of the tensor that is one parameter: element (r, c) of the parameter is element (outer, row0 + r, c) of the
// tensor, which is seen as [outer][rows][cols]. In a 1-D tensor row0 is the first element.
typedef struct rm_piece {
  int64_t param;                // index in params->list
  int64_t outer, row0;
} rm_piece;

typedef struct rm_target {
  rm_piece *pieces;             // owned; rm_target_clear
  int64_t n_pieces, capacity;
  int64_t shape[4];             // what the tensor must be
  int n_dims;
} rm_target;

enum { RM_NAME_MAX = 1024 };

// RM_E_UNEXPECTED_KEY when the name is no parameter of this model; RM_E_LIMIT for a name over RM_NAME_MAX bytes, with NUL
// bytes, or not UTF-8. `out` may be used again and again without clearing.
rm_code rm_names_resolve(const rm_params *params, const char *name, size_t length, rm_target *out, rm_error *err);
void rm_target_clear(rm_target *target);

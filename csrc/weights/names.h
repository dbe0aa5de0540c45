// names.h: from a name in somebody's state dict to parameters. Understood are Hugging Face checkpoints, the modules of
// transformers 5 (packed experts) and torchtitan; names.c holds the table, one line a spelling.
#pragma once

#include "model/params.h"

// One run of rows of the tensor that is one parameter: parameter `param` is tensor element (row0 + r, c) for each row r,
// where the tensor is seen as [outer][rows][cols] and outer index `outer`. `transposed`: the tensor stores [cols][rows].
typedef struct rm_piece {
  int64_t param;
  int64_t outer, row0;
  int transposed;
} rm_piece;

typedef struct rm_target {
  rm_piece *pieces;             // owned; rm_target_clear
  int64_t n_pieces, capacity;
  int64_t shape[4];             // what the tensor must be
  int n_dims;
} rm_target;

// RM_E_UNEXPECTED_KEY when the name is no parameter of this model; RM_E_LIMIT for a name over 1,024 bytes.
rm_code rm_names_resolve(const rm_params *params, const char *name, size_t length, rm_target *out, rm_error *err);
void rm_target_clear(rm_target *target);

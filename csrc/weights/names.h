// names.h: maps a name of a state dict to parameters. It knows the names of Hugging Face
// checkpoints, the modules of transformers 5 (packed experts), torchtitan and fused projections.
// The table in names.c has one line for each spelling. Pure functions, callable from any thread.
#pragma once

#include "model/params.h"

// The rows of a tensor that are one parameter: element (r, c) of the parameter is element (outer,
// row0 + r, c) of the tensor, viewed as [outer][rows][cols]. In a 1-D tensor row0 is the first
// element. If rope rotates adjacent elements in the tensor, row h·head_dim + i of the parameter is
// the tensor's row h·head_dim + 2i, and row h·head_dim + turned/2 + i is the row after that. Then
// row0 is a multiple of head_dim. If rows of gate and up alternate in the tensor, the tensor is one
// such head, with gate and up as its halves.
//
// If heads of several parameters alternate in the tensor, row h·head_dim + i of the parameter is
// the tensor's row row0 + h·stride + i. If the parameter is also transposed (k_b in kv_b_proj), its
// element (h·head_dim + i, c) is element (h·stride + c, i) of the tensor, and row0 is 0.
typedef struct rm_param_rows {
  int64_t param; // index in params->list
  int64_t outer, row0; // outer −1: the tensor is [rows][1][cols]
  // If rope rotates adjacent elements: the elements of a head, and how many of them, from the first
  // on, are rotated. turned 0: the rows are in order.
  int64_t head_dim, turned;
  int64_t unturned; // elements of a head before the first that is rotated
  int64_t stride; // the tensor's rows from a parameter's head to its next; 0: not alternating
  int transposed; // rows of the tensor are its last dim
} rm_param_rows;
// Returns the position of a parameter's row among the rotated rows of its head, in the order of the
// parameter; negative for rows before the rotated ones, 0 if all rows are in order.
static inline int64_t rm_place_in_head(const rm_param_rows *at, int64_t row) {
  return at->turned ? (at->row0 + row) % at->head_dim - at->unturned : 0;
}

typedef struct rm_target { // not to be copied: pieces may point into it
  rm_param_rows *pieces; // `few`, or owned; rm_target_clear
  int64_t n_pieces;
  int64_t shape[4]; // the shape that the tensor must have
  int n_dims;
  rm_param_rows few[4]; // q, k, v and z in one tensor: most names need no memory
} rm_target;

enum { RM_NAME_MAX = 1024 };

// Finds the parameters of a name: UTF-8, [length] and a NUL. RM_E_UNEXPECTED_KEY: not a parameter
// of this model; with skip_unknown `out` stays empty instead. RM_E_LIMIT: a name over RM_NAME_MAX
// bytes or with NUL bytes. `out` must be empty.
rm_code rm_names_resolve(const rm_params *params, const char *name, size_t length, int skip_unknown,
                         rm_target *out, rm_error *err);
void rm_target_clear(rm_target *target);

// placement.h: which part of a model each rank holds. Since no sum crosses a rank, every matrix is cut along its output features,
// the rows of the checkpoint's tensor, and a part is one run of rows: of q, k and v whole heads; of gate and up columns of
// the MLP; of o_proj and down_proj columns of the stream that flows on; of the vocabulary whole blocks of 128.
//
// A run is n units of some size shared out as evenly as whole units allow; with more ranks than units some hold none. A KV head
// is held by every rank that has a query head of its group, so it may be on several ranks, and fewer KV heads than ranks are
// no special case. Norms, the router and its bias are whole on every rank. Pure functions.
#pragma once

#include "mesh/mesh.h"
#include "model/params.h"

typedef struct rm_range {
  int64_t first, n;             // [first, first + n)
} rm_range;

typedef struct rm_placement {   // of one rank
  rm_range heads, kv_heads;
  rm_range hidden;              // rows of o_proj and of a dense layer's down_proj
  rm_range inner;               // rows of a dense layer's gate_proj and up_proj
  rm_range vocab;               // rows of embed_tokens and lm_head
  rm_range experts;             // those it holds a part of
  rm_range expert_inner, expert_hidden;   // of each of them: rows of gate and up, of down
} rm_placement;

enum { RM_SHARD_WIDTH = 32, RM_SHARD_VOCAB = 128 };

// RM_E_CONFIG: tp does not divide the heads, ep not the experts, or ep > 1 in a model without any.
rm_code rm_placement_check(const rm_spec *spec, const rm_mesh *mesh, rm_error *err);
// For a mesh that was checked.
rm_placement rm_placement_of(const rm_spec *spec, const rm_mesh *mesh, int32_t rank);
// The rows (of a vector: the elements) of a parameter that the rank holds; n = 0: none.
rm_range rm_placement_rows(const rm_spec *spec, const rm_placement *placement, const rm_param *param);

// Part `index` of `parts` of [0, n) in units of `unit`, the last of which may be cut.
rm_range rm_share(int64_t n, int64_t unit, int64_t parts, int64_t index);

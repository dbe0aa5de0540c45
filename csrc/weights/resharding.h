// resharding.h: plans the copies of a tensor between ranks, when a trainer's ranks hold pieces of
// it and a generator's ranks need shards. Both are boxes in the tensor's index space, for any pair
// of meshes. Each copy goes directly from a rank that holds the elements to a rank that needs them.
//
// A rank copies elements that it holds itself. Otherwise the holder with the next higher rank
// (cyclically) sends, so that replicas share the load. Pure functions, callable from any thread:
// ranks with the same arguments compute the same plan.
#pragma once

#include "mesh/mesh.h"
#include "model/params.h"
#include "weights/names.h"

enum { RM_BOX_DIMS = 4 };

// Indices [first[d], first[d] + n[d]) of each dim; first 0 and n 1 in dims that the tensor does not
// have. The box is empty when any n is 0.
typedef struct rm_box {
  int64_t first[RM_BOX_DIMS], n[RM_BOX_DIMS];
} rm_box;

typedef struct rm_part { // a box of a tensor on a rank
  int64_t rank;
  rm_box box;
} rm_part;

typedef struct rm_parts {
  rm_part *list; // owned: rm_parts_clear
  int64_t n, capacity;
} rm_parts;

typedef struct rm_copy {
  int64_t from, to; // may be the same rank
  rm_box box;
} rm_copy;

typedef struct rm_copies {
  rm_copy *list; // owned: rm_copies_clear; ordered by `to`, the wanted part, `from`
  int64_t n, capacity;
} rm_copies;

typedef struct rm_pieces { // the held and the wanted parts of one tensor over `n_ranks` ranks
  const char *name; // for messages
  int n_dims; // 0 … 4
  int64_t shape[RM_BOX_DIMS];
  int64_t n_ranks;
  // Views, each ordered by rank. Held parts may overlap; the wanted parts of one rank may not.
  const rm_part *held, *wanted; // [n_held], [n_wanted]
  int64_t n_held, n_wanted;
} rm_pieces;

// Plans the copies; each wanted element is in exactly one. RM_E_LAYOUT: a part outside the tensor
// or the ranks; RM_E_INCOMPLETE_SYNC: a wanted element that no rank holds, the message names the
// first; RM_E_LIMIT: more than 2^20 copies. `out` can be reused without clearing; it is undefined
// after an error.
rm_code rm_plan_copies(const rm_pieces *pieces, rm_copies *out, rm_error *err);

// Lists the boxes of a tensor that each rank of a mesh needs: the rows of its placement, merged
// into as few boxes as possible.
rm_code rm_plan_wanted(const rm_params *params, const rm_target *target, const rm_mesh *mesh,
                       rm_parts *out, rm_error *err);

void rm_copies_clear(rm_copies *copies);
void rm_parts_clear(rm_parts *parts);

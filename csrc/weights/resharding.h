// resharding.h: the boxes of a tensor that each rank of a mesh needs, for a trainer whose ranks hold
// pieces of it. rollmesh.weights.reshard_plan plans the copies. Pure functions, callable from any
// thread.
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

// Lists the boxes of a tensor that each rank of a mesh needs: the rows of its placement, merged
// into as few boxes as possible.
rm_code rm_plan_wanted(const rm_params *params, const rm_target *target, const rm_mesh *mesh,
                       rm_parts *out, rm_error *err);

void rm_parts_clear(rm_parts *parts);

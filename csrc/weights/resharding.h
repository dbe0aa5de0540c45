// resharding.h: the rows of a tensor that each rank of a mesh needs, for a trainer whose ranks hold
// pieces of it. rollmesh.weights.reshard_plan plans the copies. Pure, callable from any thread.
#pragma once

#include "mesh/mesh.h"
#include "model/params.h"
#include "weights/names.h"

enum { RM_BOX_DIMS = 4 };

// Indices [first[d], first[d] + n[d]) of each dim; first 0 and n 1 in dims that the tensor does not
// have. Empty if any n is 0.
typedef struct rm_part {
  int64_t rank, first[RM_BOX_DIMS], n[RM_BOX_DIMS];
} rm_part;

// Writes [world][target->n_pieces] parts: what each rank needs of each parameter in the tensor (the
// elements, if the parameter is a vector).
void rm_list_wanted(const rm_params *params, const rm_target *target, const rm_mesh *mesh,
                    rm_part *out);

// mesh.h: coordinates of ranks. A world has dp × tp ranks, numbered rank = dp·tp_degree + tp, so
// the ranks of a tensor parallel group are adjacent. Experts are distributed over a third axis of
// the same ranks:
//
//   ep = 1       each expert is sharded over tp, like a dense MLP
//   ep = tp      experts are distributed over a tp group; every dp replica has all of them
//   ep = dp·tp   experts are distributed over all ranks
//
// Axes of size 1 exist too. All functions are pure: any thread may call them.
#pragma once

#include <stdint.h>

#include "base/status.h"

typedef struct rm_mesh {
  int32_t tp, dp, ep;
} rm_mesh;

typedef struct rm_coords { // of one rank
  int32_t tp, dp, ep; // 0 … degree − 1 on each axis
} rm_coords;

typedef enum rm_axis { RM_AXIS_TP, RM_AXIS_DP, RM_AXIS_EP } rm_axis;

enum { RM_MAX_WORLD = 4096, RM_MAX_TP = 256 };

// RM_E_CONFIG states the rule that is broken.
rm_code rm_mesh_create(int64_t tp, int64_t dp, int64_t ep, rm_mesh *out, rm_error *err);

static inline int32_t rm_mesh_world(const rm_mesh *mesh) { return mesh->tp * mesh->dp; }

// Coordinates of a rank of 0 to world − 1, and the rank at given coordinates.
rm_coords rm_mesh_coords(const rm_mesh *mesh, int32_t rank);
int32_t rm_mesh_rank(const rm_mesh *mesh, int32_t dp, int32_t tp);

// The group of `rank` along an axis, with `rank` itself: ranks first, first + step, …, `count` in
// all, in the order of their coordinate.
typedef struct rm_peers {
  int32_t first, step, count;
} rm_peers;
rm_peers rm_mesh_peers(const rm_mesh *mesh, int32_t rank, rm_axis axis);

// mesh.h: which rank is where. A world of dp × tp ranks, numbered rank = dp·tp_degree + tp, so that the ranks of one tensor
// parallel group are neighbours. Experts are spread over a third axis that is laid over the same ranks:
//
//   ep = 1       no rank has experts of its own: each expert is sharded over tp, like a dense MLP
//   ep = tp      the ranks of a tp group share the experts out; every dp replica has them all
//   ep = dp·tp   all ranks share them out
//
// Every axis is there at size 1 too. Pure functions: nothing is owned, nothing is remembered.
#pragma once

#include <stdint.h>

#include "base/status.h"

typedef struct rm_mesh {
  int32_t tp, dp, ep;
} rm_mesh;

typedef struct rm_coords {      // of one rank
  int32_t tp, dp, ep;           // 0 … degree − 1 on each axis
} rm_coords;

typedef enum rm_axis { RM_AXIS_TP, RM_AXIS_DP, RM_AXIS_EP } rm_axis;

enum { RM_MAX_WORLD = 4096, RM_MAX_TP = 256 };

// RM_E_CONFIG names the rule that is broken. Context and pipeline degrees exist to be refused by name.
rm_code rm_mesh_create(int64_t tp, int64_t dp, int64_t ep, int64_t cp, int64_t pp, rm_mesh *out, rm_error *err);

static inline int32_t rm_mesh_world(const rm_mesh *mesh) { return mesh->tp * mesh->dp; }

// Of a rank in 0 … world − 1, and back from its place in dp and tp.
rm_coords rm_mesh_coords(const rm_mesh *mesh, int32_t rank);
int32_t rm_mesh_rank(const rm_mesh *mesh, int32_t dp, int32_t tp);

// The ranks that `rank` shares an axis with, itself among them: `count` of them, from `first` on, `step` apart, in the order of
// their coordinate on that axis.
typedef struct rm_peers {
  int32_t first, step, count;
} rm_peers;
rm_peers rm_mesh_peers(const rm_mesh *mesh, int32_t rank, rm_axis axis);

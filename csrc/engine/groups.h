// groups.h: the groups of a mesh over shared memory: which ranks are in each, and this rank's
// endpoint of it.
#pragma once

#include "comm/shm/region.h"
#include "mesh/mesh.h"

// The first three are of the model. CONTROL: what Python sends.
enum { RM_GROUP_TP, RM_GROUP_EP, RM_GROUP_WORLD, RM_GROUP_CONTROL, RM_N_GROUPS };
enum { RM_GROUP_BUFFER_BYTES = 1 << 20 };

// The endpoint of `rank` in a group, whose number is its index in the region. A group of one rank
// leaves *out as it is.
rm_code rm_groups_comm(rm_region *region, const rm_mesh *mesh, int group, int rank, rm_comm **out,
                       rm_error *err);
// All groups of a rank that is a process: attaches to the region of that name. out: [RM_N_GROUPS]
// of NULL; the caller owns what is in it, on an error too.
rm_code rm_groups_attach(const rm_mesh *mesh, const char *name, int rank, uint64_t nonce,
                         double timeout, rm_comm *out[], rm_error *err);

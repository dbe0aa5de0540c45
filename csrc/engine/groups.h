// groups.h: the groups of a mesh over shared memory: their ranks, and this rank's endpoint of each.
#pragma once

#include "comm/shm/region.h"
#include "mesh/mesh.h"

// The model uses the first three. CONTROL: messages of the Python layer.
enum { RM_GROUP_TP, RM_GROUP_EP, RM_GROUP_WORLD, RM_GROUP_CONTROL, RM_N_GROUPS };
enum { RM_GROUP_BUFFER_BYTES = 1 << 20 };

// Makes the endpoint of `rank` in a group; the number of the group is its index in the region. Does
// not change *out for a group of one rank.
rm_code rm_groups_comm(rm_region *region, const rm_mesh *mesh, int group, int rank, rm_comm **out,
                       rm_error *err);
// Makes all endpoints of a rank that is a process: attaches to the region of this name. out:
// [RM_N_GROUPS], initially NULL; the caller owns its comms, also after an error.
rm_code rm_groups_attach(const rm_mesh *mesh, const char *name, int rank, uint64_t nonce,
                         double timeout, rm_comm *out[], rm_error *err);

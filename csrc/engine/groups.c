// groups.c: see groups.h.
#include "engine/groups.h"

static rm_peers peers_of(const rm_mesh *mesh, int group, int rank) {
  switch (group) {
    case RM_GROUP_TP: return rm_mesh_peers(mesh, rank, RM_AXIS_TP);
    case RM_GROUP_EP: return rm_mesh_peers(mesh, rank, RM_AXIS_EP);
    default: return (rm_peers){0, 1, rm_mesh_world(mesh)};
  }
}

rm_code rm_groups_comm(rm_region *region, const rm_mesh *mesh, int group, int rank, rm_comm **out,
                       rm_error *err) {
  const rm_peers peers = peers_of(mesh, group, rank);
  int32_t ids[RM_MAX_WORLD];
  for (int32_t i = 0; i < peers.count; i++) ids[i] = peers.first + i * peers.step;
  return peers.count > 1 ? rm_region_comm(region, group, ids, peers.count, rank, out, err) : RM_OK;
}

rm_code rm_groups_attach(const rm_mesh *mesh, const char *name, int rank, uint64_t nonce,
                         double timeout, rm_comm *out[], rm_error *err) {
  const rm_region_options options = {.world = rm_mesh_world(mesh),
                                     .n_groups = RM_N_GROUPS,
                                     .buffer_bytes = RM_GROUP_BUFFER_BYTES,
                                     .timeout = timeout};
  rm_region *region;
  RM_TRY(rm_region_attach(name, rank, nonce, &options, &region, err));
  rm_code code = RM_OK;
  for (int group = 0; group < RM_N_GROUPS && !code; group++)
    code = rm_groups_comm(region, mesh, group, rank, &out[group], err);
  rm_region_release(region);
  return code;
}

// rank.c: see rank.h.
#include "model/rank.h"

#include "model/placement.h"

const char *rm_dispatcher_name(rm_dispatcher dispatcher) {
  static const char *const names[RM_N_DISPATCHER] = {"disabled", "local_allreduce", "allgather_reducescatter", "alltoall"};
  return dispatcher >= 0 && dispatcher < RM_N_DISPATCHER ? names[dispatcher] : "unknown";
}

rm_code rm_rank_check(const rm_rank *rank, const rm_spec *spec, rm_error *err) {
  const rm_mesh *mesh = &rank->mesh;
  const char *name = rm_dispatcher_name(rank->dispatcher);
  const rm_code code = rm_placement_check(spec, mesh, err);
  if (code) return code;
  if (rank->dispatcher < 0 || rank->dispatcher >= RM_N_DISPATCHER)
    return rm_fail(err, RM_E_CONFIG, "ep_backend %d is no token dispatcher", (int)rank->dispatcher);
  if (mesh->tp > RM_MAX_TP) return rm_fail(err, RM_E_CONFIG, "tp=%d, wanted at most %d", mesh->tp, RM_MAX_TP);
  if (mesh->ep > 1 && rank->dispatcher == RM_DISPATCH_DISABLED)
    return rm_fail(err, RM_E_CONFIG, "ep=%d with ep_backend=\"disabled\"; tokens need a dispatcher to reach their experts", mesh->ep);
  if (mesh->ep > 1 && mesh->ep != mesh->tp && rank->dispatcher == RM_DISPATCH_LOCAL_ALLREDUCE)
    return rm_fail(err, RM_E_CONFIG, "ep_backend=\"%s\" with ep=%d and tp=%d; it works where the ranks of a tp group share the experts out",
                   name, mesh->ep, mesh->tp);
  if (rank->index < 0 || rank->index >= rm_mesh_world(mesh))
    return rm_fail(err, RM_E_CONFIG, "rank %d is not in a world of %d", rank->index, rm_mesh_world(mesh));
  if ((mesh->tp > 1 && !rank->tp) || (mesh->ep > 1 && !rank->ep) || (rm_mesh_world(mesh) > 1 && !rank->world))
    return rm_fail(err, RM_E_CONFIG, "tp=%d, dp=%d, ep=%d without a way to reach the other ranks", mesh->tp, mesh->dp, mesh->ep);
  return RM_OK;
}

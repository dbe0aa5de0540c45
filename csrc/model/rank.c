// rank.c: see rank.h.
#include "model/rank.h"

#include <string.h>

#include "model/placement.h"

const char *rm_dispatcher_name(rm_dispatcher dispatcher) {
  static const char *const names[RM_N_DISPATCHER] = {"disabled", "local_allreduce",
                                                     "allgather_reducescatter", "alltoall"};
  return dispatcher >= 0 && dispatcher < RM_N_DISPATCHER ? names[dispatcher] : "unknown";
}

rm_code rm_dispatcher_named(const char *name, rm_dispatcher *out, rm_error *err) {
  for (int i = 0; i < RM_N_DISPATCHER; i++) {
    *out = (rm_dispatcher)i;
    if (name && strcmp(rm_dispatcher_name(*out), name) == 0) return RM_OK;
  }
  return rm_fail(err, RM_E_CONFIG,
                 "ep_backend: expected a token dispatcher of this build, got '%.64s'",
                 name ? name : "None");
}

rm_code rm_rank_check(const rm_rank *rank, const rm_spec *spec, rm_error *err) {
  const rm_mesh *mesh = &rank->mesh;
  const char *name = rm_dispatcher_name(rank->dispatcher);
  rm_code code;
  if ((code = rm_placement_check(spec, mesh, err)) ||
      (code = rm_check_range(err, RM_E_CONFIG, "ep_backend", rank->dispatcher, 0,
                             RM_N_DISPATCHER - 1)) ||
      (code = rm_check_range(err, RM_E_CONFIG, "tp", mesh->tp, 1, RM_MAX_TP)) ||
      (code = rm_check_range(err, RM_E_CONFIG, "rank", rank->index, 0, rm_mesh_world(mesh) - 1)))
    return code;
  if (mesh->ep > 1 && rank->dispatcher == RM_DISPATCH_DISABLED)
    return rm_fail(err, RM_E_CONFIG,
                   "ep_backend: expected a token dispatcher for ep=%d, got \"disabled\"", mesh->ep);
  if (mesh->ep > 1 && mesh->ep != mesh->tp && rank->dispatcher == RM_DISPATCH_LOCAL_ALLREDUCE)
    return rm_fail(err, RM_E_CONFIG, "ep_backend=\"%s\": expected ep=tp, got ep=%d and tp=%d", name,
                   mesh->ep, mesh->tp);

  if ((mesh->tp > 1 && !rank->tp) || (mesh->ep > 1 && !rank->ep) ||
      (rm_mesh_world(mesh) > 1 && !rank->world))
    return rm_fail(err, RM_E_CONFIG,
                   "tp=%d, dp=%d, ep=%d: expected comms for the groups of several ranks, got none",
                   mesh->tp, mesh->dp, mesh->ep);
  return RM_OK;
}

// ---------------------------------------------------------------------------------------- waiting
// Lists the distinct device groups. Returns the longest of their timeouts.
static double device_groups(const rm_rank *rank, rm_comm *groups[2]) {
  groups[0] = rank->device_tp;
  groups[1] = rank->device_ep == rank->device_tp ? NULL : rank->device_ep;
  const double tp = groups[0] ? rm_comm_timeout(groups[0]) : 0,
               ep = groups[1] ? rm_comm_timeout(groups[1]) : 0;
  return tp > ep ? tp : ep;
}

rm_code rm_rank_wait(const rm_rank *rank, const rm_device *device, rm_error *err) {
  rm_comm *groups[2];
  const double seconds = device_groups(rank, groups);
  return rm_comm_wait(groups, 2, device, seconds, err);
}

rm_code rm_rank_wait_event(const rm_rank *rank, const rm_device *device, int event, rm_error *err) {
  rm_comm *groups[2];
  const double seconds = device_groups(rank, groups);
  return rm_comm_wait_event(groups, 2, device, event, seconds, err);
}

// rank.c: see rank.h.
#include "model/rank.h"

#include <string.h>

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

// ---------------------------------------------------------------------------------------- waiting
rm_code rm_rank_wait(const rm_rank *rank, const rm_device *device, int event, rm_error *err) {
  rm_comm *const tp = rank->device_tp, *const ep = rank->device_ep == tp ? NULL : rank->device_ep;
  const double tp_s = tp ? rm_comm_timeout(tp) : 0, ep_s = ep ? rm_comm_timeout(ep) : 0;
  return rm_comm_wait((rm_comm *const[]){tp, ep}, 2, device, event, tp_s > ep_s ? tp_s : ep_s, err);
}

// ------------------------------------------------------------------------------------- all groups
void rm_rank_set_epoch(const rm_rank *rank, int64_t version) {
  rm_comm *const groups[] = {rank->tp, rank->ep, rank->device_tp, rank->device_ep};
  for (size_t i = 0; i < sizeof groups / sizeof *groups; i++)
    if (groups[i]) rm_comm_set_epoch(groups[i], version);
}

void rm_rank_abort(const rm_rank *rank, rm_code why) {
  rm_comm *const groups[] = {rank->device_tp, rank->device_ep, rank->tp, rank->ep, rank->world};
  for (size_t i = 0; i < sizeof groups / sizeof *groups; i++)
    if (groups[i]) rm_comm_abort(groups[i], why);
}

// A staged comm is counted by its host comm.
rm_traffic rm_rank_traffic(const rm_rank *rank) {
  const rm_comm *const tp = rank->device_tp, *const ep =
                                                 rank->device_ep == tp ? NULL : rank->device_ep;
  const rm_comm *const groups[] = {rank->tp, rank->ep, rank->world,
                                   tp && rm_comm_can_be_captured(tp) ? tp : NULL,
                                   ep && rm_comm_can_be_captured(ep) ? ep : NULL};
  rm_traffic traffic = {0};
  for (size_t i = 0; i < sizeof groups / sizeof *groups; i++) {
    rm_comm_stats its;
    if (!groups[i]) continue;
    rm_comm_statistics(groups[i], &its);
    traffic.bytes += its.bytes_sent;
    traffic.seconds += its.seconds;
    traffic.calls += its.calls;
  }
  return traffic;
}

// rank.h: this rank's position on the mesh, its endpoints of its groups, and its token dispatcher.
// All pointers are views, owned by the model's owner.
#pragma once

#include "comm/comm.h"
#include "mesh/mesh.h"
#include "model/spec.h"

// Token dispatchers. They differ in what they move; results are the same bits.
typedef enum rm_dispatcher {
  RM_DISPATCH_DISABLED, // ep = 1 only: tokens do not move
  // ep = tp: every rank has all tokens of its tp group and computes its experts' part
  RM_DISPATCH_LOCAL_ALLREDUCE,
  // tokens are sharded over the ep group; each rank gets all and computes its experts' part
  RM_DISPATCH_ALLGATHER_REDUCESCATTER,
  // tokens are sharded over the ep group; each goes to the ranks of its experts and back
  RM_DISPATCH_ALLTOALL,
  RM_N_DISPATCHER
} rm_dispatcher;

typedef struct rm_rank {
  rm_mesh mesh;
  int32_t index; // 0 … world − 1
  rm_comm *tp, *ep,
      *world; // NULL where the group has one rank; ep also where ep = 1. For host memory
  rm_comm *device_tp,
      // the same groups for device memory; NULL: use tp and ep, or no group. May be equal
      *device_ep;
  rm_dispatcher dispatcher;
  int sequence_parallel; // no effect when tp = 1
} rm_rank;

// Whether experts are spread over replicas, whose ranks then form a lockstep group.
static inline int rm_rank_spans_dp(const rm_rank *rank) {
  return rank->mesh.dp > 1 && rank->mesh.ep > rank->mesh.tp;
}
// A rank alone: a mesh of one.
static inline rm_rank rm_rank_alone(void) { return (rm_rank){.mesh = {.tp = 1, .dp = 1, .ep = 1}}; }

// Called instead of device->wait and device->wait_event: also watches the groups whose calls are in
// the device's queue (rm_comm_wait), with their timeout.
rm_code rm_rank_wait(const rm_rank *rank, const rm_device *device, rm_error *err);
rm_code rm_rank_wait_event(const rm_rank *rank, const rm_device *device, int event, rm_error *err);

const char *rm_dispatcher_name(rm_dispatcher dispatcher); // "disabled", "local_allreduce", …
rm_code rm_dispatcher_named(const char *name, rm_dispatcher *out,
                            rm_error *err); // RM_E_CONFIG; NULL has no dispatcher
// RM_E_CONFIG names the rule that is broken: the placement's, or a dispatcher that does not fit ep.
rm_code rm_rank_check(const rm_rank *rank, const rm_spec *spec, rm_error *err);

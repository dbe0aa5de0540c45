// rank.h: this rank's position on the mesh, its endpoints of its groups, and its token dispatcher.
// All pointers are views of objects that the model's owner owns. The thread that uses the model
// calls these functions.
#pragma once

#include "comm/comm.h"
#include "mesh/mesh.h"
#include "model/spec.h"

// Token dispatchers. They move different bytes; their results are bit-identical.
typedef enum rm_dispatcher {
  RM_DISPATCH_DISABLED, // ep = 1 only: tokens do not move
  // ep = tp: every rank has all tokens of its tp group and computes its own experts.
  RM_DISPATCH_LOCAL_ALLREDUCE,
  // Tokens are sharded over the ep group; each rank gets all tokens and computes its own experts.
  RM_DISPATCH_ALLGATHER_REDUCESCATTER,
  // Tokens are sharded over the ep group; each token goes to the ranks of its experts and back.
  RM_DISPATCH_ALLTOALL,
  RM_N_DISPATCHER
} rm_dispatcher;

typedef struct rm_rank {
  rm_mesh mesh;
  int32_t index; // 0 to world − 1
  rm_comm *tp, *ep, *world; // for host memory; NULL: a group of one rank. ep also where ep = 1
  // The same groups for device memory; NULL: use tp and ep, or no group. May be the same comm.
  rm_comm *device_tp, *device_ep;
  rm_dispatcher dispatcher;
  int sequence_parallel; // no effect when tp = 1
} rm_rank;

// Whether experts are spread over replicas, whose ranks then form a lockstep group and take each
// step together.
static inline int rm_rank_spans_dp(const rm_rank *rank) {
  return rank->mesh.dp > 1 && rank->mesh.ep > rank->mesh.tp;
}
// The only rank of a mesh of one.
static inline rm_rank rm_rank_alone(void) { return (rm_rank){.mesh = {.tp = 1, .dp = 1, .ep = 1}}; }

// Called instead of device->wait and device->wait_event: also checks the groups whose calls are in
// the device's queue (rm_comm_wait), with their timeout.
rm_code rm_rank_wait(const rm_rank *rank, const rm_device *device, int event, rm_error *err);

// Sets the version of the weights that this rank serves. A rank with another version fails at its
// next exchange.
void rm_rank_set_epoch(const rm_rank *rank, int64_t version);
// Aborts all groups, since another rank may wait for this one in a group that did not fail. Ranks
// that wait get an error.
void rm_rank_abort(const rm_rank *rank, rm_code why);
typedef struct rm_traffic { // of all groups since creation
  uint64_t bytes; // sent to other ranks
  int64_t calls;
  double seconds;
} rm_traffic;
rm_traffic rm_rank_traffic(const rm_rank *rank);

const char *rm_dispatcher_name(rm_dispatcher dispatcher); // "disabled", "local_allreduce", …
// Finds a dispatcher by name; RM_E_CONFIG if there is none, also for NULL.
rm_code rm_dispatcher_named(const char *name, rm_dispatcher *out, rm_error *err);

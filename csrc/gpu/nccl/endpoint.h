// endpoint.h: one rank's endpoint of an NCCL group, shared by nccl.c (creation) and endpoint.c
// (calls, errors, destruction).
#pragma once

#include <pthread.h>

#include "comm/comm.h"
#include "device/devices.h"
#include "gpu/nccl/library.h"

typedef struct rm_nccl_endpoint { // the transport's self
  rm_nccl api;
  rm_comm *host; // view
  const rm_device *device; // view
  int rank, size;
  size_t capacity;
  double timeout; // seconds, for leaving the group
  char *out, *in; // owned: [capacity] of device memory each, for strided blocks
  // Owned: [3 · size] words of the first test. They are freed only with the endpoint: cudaFree
  // waits for the device, whose queue may hold a kernel of another group that waits for this rank.
  rm_mirrored_buffer words;
  char **from, **to; // [size] each, carved: addresses of a call's bytes for each rank
  // Held for microseconds only, since the communicator is non-blocking, also when another thread
  // aborts. Held from ncclGroupStart to ncclGroupEnd, so that no other call of this communicator
  // gets into the group.
  pthread_mutex_t lock;
  rm_nccl_comm *comm; // owned; NULL before creation and after an abort
  pthread_t aborter; // calls ncclCommAbort
  int has_aborter;
} rm_nccl_endpoint;

// Flags of error handling. ABORTS_HOST: abort the host group too. CREATING: during creation, where
// invalid arguments are RM_E_CONFIG.
enum { RM_NCCL_ABORTS_HOST = 1, RM_NCCL_CREATING = 2 };
// Converts NCCL's result; RM_OK for success and "in progress". Aborts the communicator on a
// failure.
rm_code rm_nccl_result(rm_nccl_endpoint *end, const char *what, int result, int how, rm_error *err);
// Waits while NCCL's state is "in progress". Aborts the communicator on a failure.
rm_code rm_nccl_wait_ready(rm_nccl_endpoint *end, const char *what, double seconds, int how,
                           rm_error *err);
// Aborts the communicator, which ends its work in the device's queue. Does not wait for
// ncclCommAbort, which returns only after every graph that has captured the communicator is
// destroyed.
void rm_nccl_abort_comm(rm_nccl_endpoint *end);
// The functions of rm_transport.
rm_code rm_nccl_exchange(void *self, rm_comm_op op, uint64_t sequence, int64_t epoch,
                         double timeout, const rm_block send[], const rm_block recv[],
                         rm_error *err);
void rm_nccl_abort(void *self, rm_code why);
rm_code rm_nccl_check(void *self, rm_error *err);
void rm_nccl_leave(void *self);
void rm_nccl_destroy(void *self);

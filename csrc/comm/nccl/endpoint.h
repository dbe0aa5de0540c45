// endpoint.h: one rank's endpoint of an NCCL group, shared by nccl.c (creation) and endpoint.c
// (calls, errors, destruction).
#pragma once

#include <pthread.h>

#include "comm/comm.h"
#include "comm/nccl/library.h"

typedef struct rm_nccl_endpoint { // the transport's self
  rm_nccl api;
  rm_comm *host; // view
  const rm_device *device; // view
  int rank, size;
  size_t capacity;
  double timeout; // of leaving the group
  char *out, *in; // owned: [capacity] of device memory each, for strided blocks
  // Owned: buffers of the first test, [3 · size] on the device and on the host. They are freed with
  // the endpoint only: cudaFree waits for the device, whose queue may hold a kernel of another
  // group that waits for this rank.
  uint64_t *words, *host_words;
  char **from, **to; // [size] each, carved: addresses of a call's bytes for each rank
  // The communicator is non-blocking, so the lock is held for microseconds only, also when another
  // thread aborts. It is held from ncclGroupStart to ncclGroupEnd: no other call of this
  // communicator may come in between.
  pthread_mutex_t lock;
  rm_nccl_comm *comm; // owned; NULL before creation and after an abort
  pthread_t aborter; // calls ncclCommAbort
  int has_aborter;
} rm_nccl_endpoint;

static inline size_t rm_nccl_words_bytes(const rm_nccl_endpoint *end) {
  return 3 * (size_t)end->size * sizeof *end->words;
}
// Flags of error handling. TELLS: abort the host group too. MAKING: during creation, where invalid
// arguments are RM_E_CONFIG.
enum { RM_NCCL_TELLS = 1, RM_NCCL_MAKING = 2 };
// Converts NCCL's result; RM_OK for success and "in progress". On a failure the communicator is
// aborted.
rm_code rm_nccl_result(rm_nccl_endpoint *end, const char *what, int result, int how, rm_error *err);
// Waits until NCCL's state is not "in progress" any more; on a failure as above.
rm_code rm_nccl_wait_ready(rm_nccl_endpoint *end, const char *what, double seconds, int how,
                           rm_error *err);
// Aborts the communicator, which ends its work in the device's queue. Does not wait for
// ncclCommAbort, which returns only after every graph that has captured the communicator was
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

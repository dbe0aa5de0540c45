// endpoint.h: one rank's endpoint of an NCCL group, shared by nccl.c (creation) and endpoint.c (calls, errors, destruction).
#pragma once

#include <pthread.h>

#include "comm/comm.h"
#include "comm/nccl/library.h"

typedef struct rm_nccl_endpoint {    // the transport's self
  rm_nccl api;
  rm_comm *host;                // view
  const rm_device *device;      // view
  int rank, size;
  size_t capacity;
  double timeout;               // of leaving
  char *out, *in;               // owned: [capacity] of the device each, for blocks with rows apart
  // Owned: what proved the group, [3 · size] of the device and of the host. They stay until the end goes: CUDA frees nothing before the
  // device is idle, and a rank of another group of this process may have its kernel there, which waits for this rank.
  uint64_t *words, *host_words;
  char **from, **to;            // [size] each, carved: where the bytes of a call lie for each rank
  // NCCL is told to block nowhere, so the lock is held for microseconds, and an abort from another thread gets it soon. A group of
  // calls is one hold: between its start and its end NCCL must not be told anything else of this communicator.
  pthread_mutex_t lock;
  rm_nccl_comm *comm;           // owned; NULL before it is made and after it was given up
  pthread_t aborter;            // gives it up
  int has_aborter;
} rm_nccl_endpoint;

static inline size_t rm_nccl_words_bytes(const rm_nccl_endpoint *end) { return 3 * (size_t)end->size * sizeof *end->words; }
// How a failure is taken: whether the host's group is told, and whether this is while the end is made, when a mistake is one of settings.
enum { RM_NCCL_TELLS = 1, RM_NCCL_MAKING = 2 };
// What NCCL's result means; RM_OK for success and "in progress". Where it is a failure the end is given up.
rm_code rm_nccl_result(rm_nccl_endpoint *end, const char *what, int result, int how, rm_error *err);
// Waits until what NCCL was told last is under way, "in progress" no more, or says why it never will be, as above.
rm_code rm_nccl_wait_ready(rm_nccl_endpoint *end, const char *what, double seconds, int how, rm_error *err);
// Aborts this end's communicator, so that what is in the device's queue ends. Does not wait for NCCL's abort, which returns only when
// every graph that has captured the communicator is destroyed.
void rm_nccl_abort_comm(rm_nccl_endpoint *end);
// The functions of rm_transport.
rm_code rm_nccl_exchange(void *self, rm_comm_op op, uint64_t sequence, int64_t epoch, double timeout, const rm_block send[],
                         const rm_block recv[], rm_error *err);
void rm_nccl_abort(void *self, rm_code why);
rm_code rm_nccl_check(void *self, rm_error *err);
void rm_nccl_leave(void *self);
void rm_nccl_destroy(void *self);

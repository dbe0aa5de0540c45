// endpoint.c: see endpoint.h. An exchange over NCCL, its errors, and how the endpoint is destroyed.
//
// The communicator is non-blocking: NCCL enqueues its kernel from its own thread. So a call waits
// for that thread (not for the device) before it enqueues more work. Rejected: a blocking
// communicator, because with a lost peer its creation and first calls never return.
//
// A gather with equal sizes on all ranks uses ncclAllGather. All ranks have all sizes, so all make
// the same choice.
#define _GNU_SOURCE
#include "gpu/nccl/endpoint.h"

#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "base/memory.h"
#include "clock.h"
#include "gpu/device_block.h"

static const double AWAKE_SECONDS = 100e-6, LOOK_SECONDS = 2e-3;
static const double LEAVING_SECONDS = 5; // the longest wait for the other ranks before leaving
// How long to wait for the name of a lost rank: a connection breaks before the system reports that
// the process has ended.
static const double NAMING_SECONDS = 0.2;

static void nap(double seconds) {
  nanosleep(&(struct timespec){.tv_nsec = (long)(1e9 * seconds)}, NULL);
}

// ----------------------------------------------------------------------------------------- errors
typedef struct abort_job {
  int (*abort)(rm_nccl_comm *comm);
  rm_nccl_comm *comm;
} abort_job;

static void *abort_comm(void *data) {
  abort_job job = *(abort_job *)data;
  rm_free(data);
  job.abort(job.comm);
  return NULL;
}

// Calls ncclCommAbort on a separate thread: it stops the kernels, then waits until every graph that
// has captured the communicator is destroyed, which happens later. Also, two communicators of one
// queue must both be aborted before the caller waits for either.
void rm_nccl_abort_comm(rm_nccl_endpoint *end) {
  pthread_mutex_lock(&end->lock);
  rm_nccl_comm *comm = end->comm;
  end->comm = NULL;
  if (comm) {
    abort_job *job = rm_alloc(1, sizeof *job);
    if (job) *job = (abort_job){end->api.abort, comm};
    end->has_aborter = job && pthread_create(&end->aborter, NULL, abort_comm, job) == 0;
    if (!end->has_aborter) {
      rm_free(job);
      end->api.abort(comm);
    }
  }
  pthread_mutex_unlock(&end->lock);
}

// If ncclCommAbort does not return in time, its thread and memory are leaked.
static void join_aborter(rm_nccl_endpoint *end) {
  struct timespec until;
  clock_gettime(CLOCK_REALTIME, &until);
  until.tv_sec += (time_t)LEAVING_SECONDS;
  if (end->has_aborter && pthread_timedjoin_np(end->aborter, NULL, &until))
    pthread_detach(end->aborter);
  end->has_aborter = 0;
}

static rm_code fail_and_abort(rm_nccl_endpoint *end, rm_code code, int how) {
  rm_nccl_abort_comm(end);
  if (how & RM_NCCL_ABORTS_HOST) rm_comm_abort(end->host, code);
  return code;
}

static rm_code code_of(int result, int how) {
  switch (result) {
    case RM_NCCL_CUDA: return RM_E_DEVICE;
    case RM_NCCL_TIMEOUT: return RM_E_COLLECTIVE_TIMEOUT;
    case RM_NCCL_ARGUMENT:
    case RM_NCCL_USAGE: return how & RM_NCCL_CREATING ? RM_E_CONFIG : RM_E_COLLECTIVE_MISMATCH;
    default: return RM_E_RANK_LOST;
  }
}

// Checks the host group for a rank that has ended or aborted; RM_OK if there is none after
// `seconds`.
static rm_code check_host_group(rm_nccl_endpoint *end, double seconds, rm_error *err) {
  const double until = rm_now() + seconds;
  rm_code code;
  while (!(code = rm_comm_check(end->host, err)) && rm_now() < until) nap(5e-3);
  return code;
}

rm_code rm_nccl_result(rm_nccl_endpoint *end, const char *what, int result, int how,
                       rm_error *err) {
  char detail[200] = "";
  if (result == RM_NCCL_SUCCESS || result == RM_NCCL_IN_PROGRESS) return RM_OK;
  pthread_mutex_lock(&end->lock);
  const char *last = end->api.last_error(end->comm);
  if (last) strncat(detail, last, sizeof detail - 1);
  pthread_mutex_unlock(&end->lock);
  detail[strcspn(detail, "\r\n")] = 0;
  const rm_code code = code_of(result, how);
  const rm_code named = code == RM_E_RANK_LOST && how & RM_NCCL_ABORTS_HOST
                            ? check_host_group(end, NAMING_SECONDS, err)
                            : RM_OK;
  if (named) return fail_and_abort(end, named, how);
  rm_fail(err, code, "%s: NCCL says \"%s\"%s%s", what, end->api.error_string(result),
          *detail ? ": " : "", detail);
  return fail_and_abort(end, code, how);
}

// Reads NCCL's asynchronous state. Returns 0 when the communicator was aborted.
static int read_state(rm_nccl_endpoint *end, int *state) {
  pthread_mutex_lock(&end->lock);
  const int lives = end->comm != NULL;
  const int result = lives ? end->api.get_async_error(end->comm, state) : RM_NCCL_SUCCESS;
  pthread_mutex_unlock(&end->lock);
  if (result) *state = result;
  return lives;
}

static rm_code aborted_error(rm_nccl_endpoint *end, rm_error *err) {
  const rm_code code = rm_comm_check(end->host, err);
  return code ? code : rm_fail(err, RM_E_RANK_LOST, "rank %d has aborted", end->rank);
}

rm_code rm_nccl_wait_ready(rm_nccl_endpoint *end, const char *what, double seconds, int how,
                           rm_error *err) {
  const double start = rm_now();
  double looked = start;
  for (int state;;) {
    if (!read_state(end, &state)) return aborted_error(end, err);
    if (state != RM_NCCL_IN_PROGRESS) return rm_nccl_result(end, what, state, how, err);
    const double now = rm_now();
    if (now - start > seconds) {
      rm_fail(
          err, RM_E_COLLECTIVE_TIMEOUT,
          "%s: NCCL was not done on rank %d within %.3g s; a rank that it waits for did not arrive",
          what, end->rank, seconds);
      return fail_and_abort(end, RM_E_COLLECTIVE_TIMEOUT, how);
    }
    if (now - looked > LOOK_SECONDS) {
      const rm_code code = rm_comm_check(end->host, err);
      if (code) return fail_and_abort(end, code, how);
      looked = now;
    }
    if (now - start < AWAKE_SECONDS) sched_yield();
    else nap(20e-6);
  }
}

// --------------------------------------------------------------------------------------- one call
typedef struct call {
  rm_comm_op op;
  const rm_block *send, *recv;
  size_t gathered; // bytes of each rank if the call uses NCCL's all_gather; else 0
  char *whole; // target of an all_gather: [size][gathered]
} call;

static size_t gathered_bytes(const rm_nccl_endpoint *end, rm_comm_op op, const rm_block send[],
                             const rm_block recv[]) {
  if (op != RM_COMM_GATHER || end->size < 2) return 0;
  const size_t bytes = rm_block_bytes(&send[(end->rank + 1) % end->size]);
  for (int r = 0; r < end->size; r++)
    if (r != end->rank && rm_block_bytes(&recv[r]) != bytes) return 0;
  return bytes;
}

// Returns the target of ncclAllGather if all blocks are contiguous and adjacent, in the order of
// ranks: then a buffer is not needed. Else returns NULL.
static char *whole_of(const rm_nccl_endpoint *end, const rm_block recv[], size_t bytes) {
  for (int r = 0; r < end->size; r++)
    if (rm_block_bytes(&recv[r]) != bytes || !rm_block_is_flat(&recv[r]) ||
        (char *)recv[r].base != (char *)recv[0].base + (size_t)r * bytes)
      return NULL;
  return recv[0].base;
}

static rm_code check_room(rm_nccl_endpoint *end, rm_comm_op op, size_t sent, size_t received,
                          rm_error *err) {
  const rm_code code = rm_device_check_room(op, "bytes of strided blocks", end->rank, end->capacity,
                                            sent, received, err);
  return code ? fail_and_abort(end, code, RM_NCCL_ABORTS_HOST) : RM_OK;
}

// Starts with the next rank, so that ranks do not all begin with the same peer.
static int send_and_receive(rm_nccl_endpoint *end, const call *c) {
  void *stream = end->device->stream;
  int result = RM_NCCL_SUCCESS;
  for (int step = 1; step < end->size && !result; step++) {
    const int to = (end->rank + step) % end->size,
              from = (end->rank + end->size - step) % end->size;
    if (end->from[to])
      result = end->api.send(end->from[to], rm_block_bytes(&c->send[to]), RM_NCCL_INT8, to,
                             end->comm, stream);
    if (end->to[from] && !result)
      result = end->api.recv(end->to[from], rm_block_bytes(&c->recv[from]), RM_NCCL_INT8, from,
                             end->comm, stream);
  }
  return result;
}

static rm_code issue(rm_nccl_endpoint *end, const call *c, const char *what, double timeout,
                     rm_error *err) {
  pthread_mutex_lock(&end->lock);
  const int lives = end->comm != NULL;
  int result = lives ? end->api.group_start() : RM_NCCL_SUCCESS;
  if (lives && !result) {
    if (c->gathered)
      result = end->api.all_gather(end->from[end->rank], c->whole, c->gathered, RM_NCCL_INT8,
                                   end->comm, end->device->stream);
    else result = send_and_receive(end, c);
    // Also after an error: otherwise this thread's next group would be part of this one.
    const int ended = end->api.group_end();
    if (!result || result == RM_NCCL_IN_PROGRESS) result = ended;
  }
  pthread_mutex_unlock(&end->lock);
  if (!lives) return aborted_error(end, err);
  const rm_code code = rm_nccl_result(end, what, result, RM_NCCL_ABORTS_HOST, err);
  return code ? code : rm_nccl_wait_ready(end, what, timeout, RM_NCCL_ABORTS_HOST, err);
}

static rm_code all_gather(rm_nccl_endpoint *end, call *c, const char *what, double timeout,
                          rm_error *err) {
  const rm_block *own = &c->send[(end->rank + 1) % end->size]; // what the others get
  if (!(c->whole = whole_of(end, c->recv, c->gathered))) {
    const rm_code code = check_room(end, c->op, 0, (size_t)end->size * c->gathered, err);
    if (code) return code;
    c->whole = end->in;
  }
  char *slot = c->whole + (size_t)end->rank * c->gathered;
  end->from[end->rank] = rm_block_is_flat(own) ? own->base : slot;
  if (!rm_block_is_flat(own)) rm_device_pack(end->device, own, slot);
  const rm_code code = issue(end, c, what, timeout, err);
  for (int r = 0; r < end->size && !code && c->whole == end->in; r++)
    if (r != end->rank)
      rm_device_unpack(end->device, end->in + (size_t)r * c->gathered, &c->recv[r]);
  return code;
}

// Runs a barrier over the host group with this timeout.
static rm_code meet(rm_nccl_endpoint *end, double seconds, rm_error *err) {
  const double kept = rm_comm_timeout(end->host);
  rm_comm_set_timeout(end->host, seconds);
  const rm_code code = rm_comm_barrier(end->host, err);
  rm_comm_set_timeout(end->host, kept);
  return code;
}

rm_code rm_nccl_exchange(void *self, rm_comm_op op, uint64_t sequence, int64_t epoch,
                         double timeout, const rm_block send[], const rm_block recv[],
                         rm_error *err) {
  rm_nccl_endpoint *end = self;
  call c = {.op = op, .send = send, .recv = recv, .gathered = gathered_bytes(end, op, send, recv)};
  char what[64];
  snprintf(what, sizeof what, "%s, call %llu", rm_comm_op_name(op), (unsigned long long)sequence);
  (void)epoch; // comm.c adds it to the digest
  rm_code code = RM_OK;
  int moves = 0;
  if (op == RM_COMM_BARRIER) {
    if ((code = meet(end, timeout, err))) rm_nccl_abort_comm(end);
    return code;
  }
  const int n = c.gathered ? 0 : end->size;
  const size_t sent =
      rm_device_place(send, n, end->rank, op == RM_COMM_GATHER, 1, end->out, end->from);
  const size_t received = rm_device_place(recv, n, end->rank, 0, 1, end->in, end->to);
  if ((code = check_room(end, op, sent, received, err))) return code;
  if (c.gathered) code = all_gather(end, &c, what, timeout, err);
  else {
    for (int r = 0; r < n; r++) moves |= end->from[r] || end->to[r];
    rm_device_pack_all(end->device, send, n, end->from);
    if (moves) code = issue(end, &c, what, timeout, err);
    if (!code) rm_device_unpack_all(end->device, recv, n, end->to);
  }
  if (!code && (!c.gathered || c.whole == end->in))
    rm_device_own(end->device, &send[end->rank], &recv[end->rank]);
  return code;
}

void rm_nccl_abort(void *self, rm_code why) {
  rm_nccl_endpoint *end = self;
  rm_comm_abort(end->host, why); // first, so that other ranks find this error when NCCL fails
  rm_nccl_abort_comm(end);
}

rm_code rm_nccl_check(void *self, rm_error *err) {
  rm_nccl_endpoint *end = self;
  int state;
  const rm_code code = rm_comm_check(end->host, err);
  if (code) return code;
  if (!read_state(end, &state)) return aborted_error(end, err);
  return rm_nccl_result(end, "enqueued work", state, RM_NCCL_ABORTS_HOST, err);
}

// ------------------------------------------------------------------------------------ destruction
// Leaves together with the other ranks: a barrier on the host, then NCCL's finalize, then another
// barrier. Without the first barrier, ranks could leave while another rank's queue still uses them;
// without the second, a slower rank would report a rank that has left the host group as lost. After
// an error here (another rank is late, or has ended) the caller aborts the communicator instead.
static rm_code finalize(rm_nccl_endpoint *end, rm_error *err) {
  const double patience = end->timeout < LEAVING_SECONDS ? end->timeout : LEAVING_SECONDS;
  rm_code code = meet(end, patience, err);
  if (code) return code;
  pthread_mutex_lock(&end->lock);
  const int result = end->comm ? end->api.finalize(end->comm) : RM_NCCL_SUCCESS;
  pthread_mutex_unlock(&end->lock);
  code = rm_nccl_result(end, "leaving", result, 0, err);
  if (!code) code = rm_nccl_wait_ready(end, "leaving", end->timeout, 0, err);
  if (!code) meet(end, patience, err); // its result does not matter: finalize has succeeded
  return code;
}

static void destroy_comm(rm_nccl_endpoint *end) {
  rm_error ignored = RM_ERROR_INIT;
  pthread_mutex_lock(&end->lock);
  const int lives = end->comm != NULL;
  pthread_mutex_unlock(&end->lock);
  const rm_code code = lives ? finalize(end, &ignored) : RM_OK;
  rm_error_clear(&ignored);
  if (code) rm_nccl_abort_comm(end);
  pthread_mutex_lock(&end->lock);
  if (end->comm) end->api.destroy(end->comm);
  end->comm = NULL;
  pthread_mutex_unlock(&end->lock);
}

// Not called in a forked child, where NCCL and the device cannot be used.
void rm_nccl_leave(void *self) {
  rm_nccl_endpoint *end = self;
  destroy_comm(end);
  join_aborter(end);
  rm_device_free(end->device, end->out, end->capacity);
  rm_device_free(end->device, end->in, end->capacity);
  rm_mirrored_destroy(&end->words);
  end->out = end->in = NULL;
}

void rm_nccl_destroy(void *self) {
  rm_nccl_endpoint *end = self;
  pthread_mutex_destroy(&end->lock);
  rm_free(end);
}

// comm.h: collectives between the ranks of a group (a mesh axis, or the world). They move bytes and
// never add, so they cannot change a result.
//
// There is one collective, rm_comm_exchange, in which every rank sends a block to every rank; the
// others are built on it. All ranks of a group make the same calls in the same order. Each call
// sends a header (op, sequence, epoch, bytes for each receiver), which the receiver checks before
// it reads data:
//
//   RM_E_COLLECTIVE_MISMATCH   ranks disagree on op, size or weight version (epoch)
//   RM_E_COLLECTIVE_TIMEOUT    a rank did not arrive within the deadline, which counts from this
//                              rank's arrival
//   RM_E_RANK_LOST             a rank's process ended, or a rank aborted (rm_comm_abort)
//
// After the first error the group is dead on all ranks: waiting and later calls fail with the first
// failing rank and its error, and received data is undefined. A dead group can only be destroyed.
//
// `err` is not NULL: a group keeps its first error.
//
// One thread at a time uses a rank's endpoint (rm_comm); rm_comm_abort may be called from any
// thread.
//
// Host transports (threads, shm, torch) take host addresses, and a call is complete at return.
// Device transports (staged.h, nccl.h) take device addresses (kernels/device.h) and only enqueue
// work, in order with the device's other work: success means enqueued, and rm_comm_wait returns
// when it is complete.
//
// An endpoint belongs to the process that created it. A forked child can destroy its copy, which
// frees memory without notifying other ranks; there rm_comm_abort does nothing and calls return
// RM_E_STATE.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "device.h"

typedef struct rm_comm rm_comm; // one rank's endpoint of one group

// The purpose of an exchange, for the header and for messages. All ranks must pass the same one.
typedef enum rm_comm_op {
  RM_COMM_BARRIER,
  RM_COMM_GATHER, // all_gather of rows or columns: every receiver gets the same block
  RM_COMM_ALL_TO_ALL,
  RM_COMM_DISPATCH, // tokens to experts
  RM_COMM_COMBINE, // expert outputs to tokens
  RM_COMM_STEP, // descriptions of a step
  RM_COMM_VOTE, // on a sync or a configuration
  RM_N_COMM_OP
} rm_comm_op;

const char *rm_comm_op_name(rm_comm_op op); // "all_gather", …

// `rows` runs of row_bytes each; each run begins ld bytes after the one before it.
typedef struct rm_block {
  void *base;
  int64_t rows;
  size_t row_bytes, ld;
} rm_block;

static inline size_t rm_block_bytes(const rm_block *block) {
  return (size_t)block->rows * block->row_bytes;
}

// Sends send[r] to rank r and receives recv[r] from it, for every rank r including this one.
// recv[r] has as many bytes as rank r sends here; its rows may have another length. This rank's own
// two blocks may be the same block; else one of them is flat, or their rows have the same length.
// Other blocks, and the rows of a block, must not overlap. With RM_COMM_GATHER all entries of send
// are the same block, sent once.
rm_code rm_comm_exchange(rm_comm *comm, rm_comm_op op, const rm_block send[], const rm_block recv[],
                         rm_error *err);

// all_gather: sends `mine` to every rank. It may be the same block as recv[rank].
rm_code rm_comm_gather(rm_comm *comm, rm_block mine, const rm_block recv[], rm_error *err);
// The endpoint's memory for the blocks of one call, [2][size]: to send, then to receive. A gather
// fills the first half. A view.
rm_block *rm_comm_blocks(rm_comm *comm);
// Concatenates counts[r] rows of `bytes` bytes of each rank r in `out` on every rank. mine NULL:
// this rank's rows are there already.
rm_code rm_comm_gather_rows(rm_comm *comm, const void *mine, void *out, const int64_t counts[],
                            size_t bytes, rm_error *err);
// Concatenates `bytes` bytes of each rank in `out` on every rank.
rm_code rm_comm_all_gather(rm_comm *comm, const void *send, void *out, size_t bytes, rm_error *err);
rm_code rm_comm_barrier(rm_comm *comm, rm_error *err);
// Ends the group with the error code `why`: waiting calls of the other ranks fail, or their next
// call fails.
void rm_comm_abort(rm_comm *comm, rm_code why);
// Returns the group's error if this rank can see that the group has failed. Takes microseconds and
// does not wait for other ranks: call it during long work between two calls. Always RM_OK on
// transports that cannot detect a failure.
rm_code rm_comm_check(rm_comm *comm, rm_error *err);

// Waits for an event of a device, or for its whole queue (RM_WAIT_QUEUE), which may hold calls of
// `comms` (NULL entries are skipped), and checks the groups meanwhile. If a group fails, or after
// `timeout` seconds, it aborts all of them, which ends their work in the queue. Returns the group's
// error, RM_E_COLLECTIVE_TIMEOUT, or RM_E_DEVICE when the device failed. Without a group that waits
// in the queue it is device->wait or device->wait_event.
enum { RM_WAIT_QUEUE = -1 };
rm_code rm_comm_wait(rm_comm *const comms[], int n, const rm_device *device, int event,
                     double timeout, rm_error *err);

// Whether calls only enqueue work, so that a graph can capture them. Barriers cannot be captured.
int rm_comm_can_be_captured(const rm_comm *comm);

// For transports without headers (nccl): compares all calls so far (op, sequence, epoch, bytes
// between each two ranks) over `host`, another group of the same ranks in
// the same order. Captured calls count once, at capture; the engine compares which graph a step
// replays. RM_E_COLLECTIVE_MISMATCH names two ranks that differ and ends `comm` on all ranks. All
// ranks call it at the same steps.
rm_code rm_comm_compare(rm_comm *comm, rm_comm *host, rm_error *err);

int rm_comm_rank(const rm_comm *comm); // in the group, 0 … size − 1
int rm_comm_size(const rm_comm *comm);
// Sets the weight version that this rank serves, which is part of every header.
void rm_comm_set_epoch(rm_comm *comm, int64_t epoch);
void rm_comm_set_timeout(rm_comm *comm, double seconds);
double rm_comm_timeout(const rm_comm *comm);

typedef struct rm_comm_stats {
  int64_t calls;
  uint64_t bytes_sent, bytes_received; // to and from other ranks
  double seconds; // inside calls
} rm_comm_stats;
void rm_comm_statistics(const rm_comm *comm, rm_comm_stats *out);
void rm_comm_destroy(rm_comm *comm); // safe on NULL

// ------------------------------------------------------------------------------------- transports
// The functions of a transport. comm.c checks arguments, counts, and copies this rank's block to
// itself.
typedef struct rm_transport {
  int moves_own; // for device memory: exchange also copies the block that this rank sends to itself
  // Calls wait for other ranks in the device's queue; rm_comm_wait checks the group.
  int waits_in_queue;
  void *self; // the transport's state; owned by the comm once created
  // rm_comm_exchange, without this rank's own block unless moves_own. `sequence` counts the calls
  // of the group from 1.
  rm_code (*exchange)(void *self, rm_comm_op op, uint64_t sequence, int64_t epoch, double timeout,
                      const rm_block send[], const rm_block recv[], rm_error *err);
  void (*abort)(void *self, rm_code why);
  rm_code (*check)(void *self, rm_error *err); // rm_comm_check; may be NULL
  // Notifies the other ranks that this rank has left. Called before destroy, except in a forked
  // child; may be NULL.
  void (*leave)(void *self);
  void (*destroy)(void *self);
} rm_transport;

rm_code rm_comm_create(const rm_transport *transport, int rank, int size, rm_comm **out,
                       rm_error *err);

// comm.h: moving bytes between the ranks of a group (an axis of the mesh, or the world). Data movement only: nothing here adds,
// so nothing here can change a bit.
//
// There is one collective, rm_comm_exchange: everyone gives a block of rows to everyone. The rest are ways to call it. All ranks of
// a group make the same calls in the same order; on the CPU a call is complete at return. Each call carries a header (op,
// sequence, epoch, bytes for each receiver), and the receiver compares it with what it expects before it reads a byte:
//
//   RM_E_COLLECTIVE_MISMATCH   ranks disagree on op, size or weight epoch
//   RM_E_COLLECTIVE_TIMEOUT    a rank did not come within the deadline
//   RM_E_RANK_LOST             a rank's process has ended, or a rank has given up (rm_comm_abort)
//
// After the first error of any rank the group is dead: every call on every rank of it fails, at once where it waits already, and
// says who failed first and why. What was received by a call that failed is undefined. A dead group can only be destroyed.
//
// One thread at a time may use an end of a group; rm_comm_abort may come from any. Deadlines are per call, counted from when this rank
// has come to it.
//
// The bases of blocks are addresses of the memory that the transport is for. Most are for the host's; those of staged.h and nccl.h are
// for a device's (kernels/device.h), and there a call has enqueued, in the device's one queue, what is done later: it reads what was
// enqueued before it has made, and what is enqueued after it reads what came. A call that went well says no more than that;
// rm_comm_wait says the rest, and so "is complete at return" means "was waited for" there.
//
// An end belongs to the process that made it. The copy in a forked child may be destroyed, which frees it there and tells nobody;
// rm_comm_abort does nothing on it, and calls are RM_E_STATE.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "device.h"

typedef struct rm_comm rm_comm;   // one rank's end of one group

// What the ranks are doing, for the header and for messages. An exchange of one kind meets only its own.
typedef enum rm_comm_op {
  RM_COMM_BARRIER,
  RM_COMM_BROADCAST,
  RM_COMM_GATHER,        // all_gather of rows or columns: every receiver gets the same block
  RM_COMM_ALL_TO_ALL,
  RM_COMM_DISPATCH,      // of tokens to experts
  RM_COMM_COMBINE,       // of expert outputs to tokens
  RM_COMM_STEP,          // what a step is going to do
  RM_COMM_VOTE,          // of a sync or a configuration
  RM_N_COMM_OP
} rm_comm_op;

const char *rm_comm_op_name(rm_comm_op op);   // "all_gather", …

// `rows` runs of row_bytes each, ld bytes from one to the next.
typedef struct rm_block {
  void *base;
  int64_t rows;
  size_t row_bytes, ld;
} rm_block;

static inline size_t rm_block_bytes(const rm_block *block) { return (size_t)block->rows * block->row_bytes; }

// Gives send[r] to rank r and takes recv[r] from it, for every r of the group, this rank too: recv[r] has as many bytes here as
// rank r's block for this rank has there, and may cut them into rows of another length. The blocks of this rank for itself may be
// the same memory; otherwise nothing that is received overlaps anything that is sent. Where `op` is RM_COMM_BROADCAST all of send is
// the same block (or empty), and it is moved once; where it is RM_COMM_GATHER too, and no other rank's is empty unless all are.
rm_code rm_comm_exchange(rm_comm *comm, rm_comm_op op, const rm_block send[], const rm_block recv[], rm_error *err);

// Rank r's bytes[r] bytes to everyone, one after another in `out`. `send` may be its own place in `out`.
rm_code rm_comm_all_gather(rm_comm *comm, const void *send, void *out, const size_t bytes[], rm_error *err);
// Of a matrix of `rows` rows, ld bytes apart, rank r has filled bytes [first[r], first[r] + bytes[r]) of each row; after the call all
// is filled on every rank.
rm_code rm_comm_gather_columns(rm_comm *comm, void *matrix, int64_t rows, size_t ld, const size_t first[], const size_t bytes[],
                               rm_error *err);
// `data` of rank `root` into everyone's.
rm_code rm_comm_broadcast(rm_comm *comm, void *data, size_t bytes, int root, rm_error *err);
rm_code rm_comm_barrier(rm_comm *comm, rm_error *err);
// The group is dead from now on, for the reason given: the others learn it where they wait, or at their next call.
void rm_comm_abort(rm_comm *comm, rm_code why);
// Whether the group lives, as far as one rank can see without meeting the others: else what its next call would fail with. For a rank
// that works for long between two calls; costs microseconds. RM_OK always where the transport cannot see it.
rm_code rm_comm_look(rm_comm *comm, rm_error *err);

// What the engine calls instead of device->wait where calls of `comms` may stand in the device's queue (NULL ones are left out): until
// all of it is done. Meanwhile it looks at the groups; where one has failed, or the queue is not at its end after `timeout` seconds,
// all of them are given up, which ends what stands in the queue. RM_E_RANK_LOST and the like, as the group says;
// RM_E_COLLECTIVE_TIMEOUT; RM_E_DEVICE where the device itself has failed. Without a group that waits there, it is device->wait.
rm_code rm_comm_wait(rm_comm *const comms[], int n, const rm_device *device, double timeout, rm_error *err);
// The same instead of device->reach: until what stands before that mark is done.
rm_code rm_comm_reach(rm_comm *const comms[], int n, const rm_device *device, int mark, double timeout, rm_error *err);

// Whether calls do no more than enqueue, so that a recording of the device may hold them; barriers never do.
int rm_comm_can_be_recorded(const rm_comm *comm);

// Transports that send no header (nccl) cannot compare what the ranks are doing. This does, once a step: a word for all calls of
// this end so far, the same on all ranks that made the same (op, sequence, epoch, and the sizes of gathers). What a recording replays
// was called once, when it was recorded: which one a step replays is for the engine to compare.
uint64_t rm_comm_digest(const rm_comm *comm);
// The whole comparison, over another group of the same ranks in the same order: each two ranks compare all calls so far and the bytes
// of each between them. RM_E_COLLECTIVE_MISMATCH on ranks that differ, which names two of them; `comm` is dead then, and the others
// hear it there. May be left out on any step, by all ranks alike.
rm_code rm_comm_compare(rm_comm *comm, rm_comm *host, rm_error *err);

int rm_comm_rank(const rm_comm *comm);                 // in the group, 0 … size − 1
int rm_comm_size(const rm_comm *comm);
// Weight version that this rank serves; part of every header.
void rm_comm_set_epoch(rm_comm *comm, int64_t epoch);
void rm_comm_set_timeout(rm_comm *comm, double seconds);
double rm_comm_timeout(const rm_comm *comm);

typedef struct rm_comm_stats {
  int64_t calls[RM_N_COMM_OP];
  uint64_t bytes_sent, bytes_received;                 // to and from other ranks
  double seconds;                                      // inside calls
} rm_comm_stats;
void rm_comm_statistics(const rm_comm *comm, rm_comm_stats *out);
void rm_comm_destroy(rm_comm *comm);                   // safe on NULL

// A group of one rank, for the axes that have no more: every exchange is a copy of this rank's block to itself.
rm_code rm_comm_create_alone(rm_comm **out, rm_error *err);

// ---------------------------------------------------------------------------------------------- transports
// What a transport provides; comm.c checks arguments, keeps the books and moves this rank's block for itself.
typedef struct rm_transport {
  const char *name;             // "threads", "shm", "torch", "staged", "nccl"
  int moves_own;                // of a device's memory: exchange moves this rank's block for itself too
  int waits_there;              // calls wait for the other ranks in the device's queue, where rm_comm_wait has to watch them
  void *self;                   // of the transport; owned by the comm from its creation on
  // rm_comm_exchange for all ranks but this one, or for all. `sequence` counts the calls of the group from 1.
  rm_code (*exchange)(void *self, rm_comm_op op, uint64_t sequence, int64_t epoch, double timeout, const rm_block send[],
                      const rm_block recv[], rm_error *err);
  void (*abort)(void *self, rm_code why);
  rm_code (*look)(void *self, rm_error *err);   // rm_comm_look; may be NULL
  void (*leave)(void *self);    // before destroy, but not in a forked child: the others learn that this rank will not come; may be NULL
  void (*destroy)(void *self);
} rm_transport;

rm_code rm_comm_create(const rm_transport *transport, int rank, int size, rm_comm **out, rm_error *err);

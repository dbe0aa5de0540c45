// region.h: the transport between ranks that share memory: threads of a process (`threads`) or
// processes of a machine (`shm`). A region is one allocation with two headers and two buffers for
// each rank in each of its groups.
//
// A call: the rank writes its blocks into one of its two buffers, adds its arrival, waits until all
// ranks of the group have arrived at the same call, compares headers, and copies the bytes sent to
// it. It writes that buffer again two calls later, when all ranks have arrived at the call in
// between and so have read it. Blocks larger than a buffer are sent in rounds. A wait spins for
// microseconds if there is a core for every rank, then sleeps on a futex of the group, and checks
// every 10 ms whether the other processes still run.
//
// One atomic word decides whether a round completes on all ranks of the group or fails on all,
// whichever rank is late or killed. So after one rank's call has succeeded, another rank's call can
// fail only because of the headers.
//
// Threads: the last rank to release the region frees the memory. Processes: the system frees it,
// since rm_region_attach removes the name before it returns, also when processes are killed.
#pragma once

#include "comm/comm.h"

typedef struct rm_region rm_region;

typedef struct rm_region_options {
  int world; // ranks, 1 … 64
  int n_groups; // groups per rank: `index` of rm_region_comm is below it
  size_t buffer_bytes; // of each of the two buffers of a rank in a group
  double timeout; // seconds, of attaching; each comm starts with it too
} rm_region_options;

// Creates an anonymous region, for threads of this process.
rm_code rm_region_create(const rm_region_options *options, rm_region **out, rm_error *err);
// Creates or attaches to a named region, for processes in one pid namespace: every rank calls it
// with the same name and options; rank 0 creates the file, the others wait for it. Name: 1 to 200
// letters, digits, '-', '_', '.'. The file has mode 0600; rank 0 replaces a file whose creator is
// dead. RM_E_AUTH: another owner, mode or nonce; RM_E_MESH_MISMATCH: options differ or a rank
// attaches twice; RM_E_COLLECTIVE_TIMEOUT names the missing ranks, RM_E_RANK_LOST the ranks whose
// process ended; RM_E_CAPACITY: no shared memory left. A world of one creates no file.
rm_code rm_region_attach(const char *name, int rank, uint64_t nonce,
                         const rm_region_options *options, rm_region **out, rm_error *err);
void rm_region_release(rm_region *region); // drops a reference; each comm holds one

// Creates this rank's endpoint of a group, once for each rank and index. `members`: the group's
// ranks of the world, distinct, in the group's order, with `rank` among them. All ranks of a group
// use the same index; groups that share a rank use different ones. When a group fails and its rank
// aborts its other groups, they report the first failure too.
rm_code rm_region_comm(rm_region *region, int index, const int32_t *members, int n_members,
                       int rank, rm_comm **out, rm_error *err);

// region.h: the transport for ranks that share memory, threads of one process (`threads`) or processes of one machine (`shm`). A
// region is one block of memory in which every rank has, for each group it may be in, two headers and two buffers.
//
// A call: the rank puts its blocks into one of its two buffers, says that it has come, waits until all of the group have come to the
// same call, compares headers and copies what is meant for it. A buffer is written again two calls later: by then everyone has come to
// the call between, hence has read it. What does not fit a buffer goes in rounds. A wait spins for microseconds when there is a core for
// every rank and then sleeps on a futex of the group, in slices, between which it looks whether the others' processes still live.
//
// Whether a round takes place is decided in one word: it does for every rank of the group or for none, whoever is late or killed. So
// where one rank's call has succeeded, another's fails only by what that rank itself found wrong in the headers.
//
// Owner of the memory: the last rank that lets go (threads), the system (shm: the name is gone before anyone has attached, so that
// nothing is left whoever is killed when).
#pragma once

#include "comm/comm.h"

typedef struct rm_region rm_region;

typedef struct rm_region_options {
  int world;                    // ranks, 1 … 64
  int n_groups;                 // groups that one rank may be in, 1 … 64: the index of rm_region_comm is below it
  size_t buffer_bytes;          // of each of the two buffers of a rank in a group
  double timeout;               // seconds: of attaching, and the first value of each comm's
} rm_region_options;

// Anonymous, for threads of this process.
rm_code rm_region_create(const rm_region_options *options, rm_region **out, rm_error *err);
// Named, for processes: every rank calls it with the same name and options, rank 0 makes it, the others wait for it. 1–200 letters,
// digits, '-', '_', '.'. The file has mode 0600; one of another owner, mode or nonce is RM_E_AUTH, one whose maker is dead is replaced.
// RM_E_MESH_MISMATCH when the options differ or a rank comes twice, RM_E_COLLECTIVE_TIMEOUT naming the ranks that did not come,
// RM_E_RANK_LOST naming those whose process ended; RM_E_CAPACITY when there is no room for it. Ranks have to see each other's processes:
// one pid namespace. A world of one needs no name.
rm_code rm_region_attach(const char *name, int rank, uint64_t nonce, const rm_region_options *options, rm_region **out, rm_error *err);
void rm_region_release(rm_region *region);   // one reference less; each comm holds one

// This rank's end of a group, once for each rank and index: `members` are the ranks of the world in the group, in the group's order,
// `rank` one of them. Groups that share a rank need different indices; the ranks of one group use the same. Any thread may call
// rm_comm_abort on it. A rank whose group has failed and that aborts its other groups for it passes the reason on: all its peers are told
// who failed first.
rm_code rm_region_comm(rm_region *region, int index, const int32_t *members, int n_members, int rank, rm_comm **out, rm_error *err);

// layout.h: the memory layout of a region, and declarations shared by the files of this folder. A
// region may be mapped at a different address in each process, so it contains no pointers.
//
//   rm_region_map      the ranks, the state of attaching, one error for each rank
//   rm_region_slot     [n_groups][world]: the group's barrier (in the slot of its first member) and
//                      this rank's headers
//   buffers            [n_groups][world][2][buffer_bytes], each slot's pair on separate pages
//
// A call: a rank fills its buffer and header, adds its arrival to the group's barrier and waits
// until all have arrived. The last rank to arrive wakes the others: one futex and one wake per call
// for any number of ranks. Rejected: one futex for each rank, because every rank was woken once for
// each other rank, which took most of the time with more ranks than cores.
//
// Headers and buffers are written by their rank, an error by its rank once, everything else by
// atomic operations. Plain memory is published by the barrier: its additions are read-modify-writes
// with release order, so a rank that sees the last arrival sees all writes before.
#pragma once

#include <stdatomic.h>
#include <stdint.h>
#include <sys/types.h>

#include "clock.h"
#include "comm/shm/region.h"

enum { RM_REGION_RANKS = 64, RM_REGION_LINE = 64, RM_REGION_TEXT = 360 };

// Seconds between two checks for late and lost ranks: a tenth of the time within which the other
// ranks must report a lost rank.
#define RM_REGION_SLICE 0.01

// The barrier word: the number of arrivals, in units of RM_BARRIER_ARRIVAL, and in the low bits the
// cause of a dead group: 1 + the rank whose error ended it, 0 while it lives. Ranks do not arrive
// at a dead group, so a round is completed by all ranks or not at all.
#define RM_BARRIER_ARRIVAL UINT32_C(128)
#define RM_BARRIER_CAUSE UINT32_C(127)

// State of rm_region_attach; values above RM_ATTACHED: RM_ATTACHED + 1 + the rank whose error ended
// it.
enum { RM_ATTACHING, RM_ATTACHED };

typedef struct rm_region_rank {
  _Alignas(RM_REGION_LINE) _Atomic int32_t pid; // 0: not attached
  _Atomic uint32_t cause; // 1 + the rank whose error this rank reports; 0: it has seen no error
  _Atomic uint32_t writing; // 1 once the error below is being written
  int32_t code; // rm_code; code and text are valid once a `cause` or a barrier refers to the rank
  char text[RM_REGION_TEXT];
} rm_region_rank;

typedef struct rm_region_head { // of a named region; constant once the file has its name
  char magic[16];
  uint64_t nonce, maker; // of rm_region_attach; pid of the process that created the file
  uint64_t world, n_groups, buffer_bytes;
} rm_region_head;

typedef struct rm_region_map {
  rm_region_head head;
  _Alignas(RM_REGION_LINE) _Atomic uint32_t n_attached; // ranks
  _Atomic uint32_t gathering; // futex: RM_ATTACHING, RM_ATTACHED, or the cause of a failure
  rm_region_rank ranks[RM_REGION_RANKS];
} rm_region_map;

typedef struct rm_region_header { // one round of one call
  uint64_t sequence, round, n_rounds;
  int64_t epoch;
  uint32_t op;
  uint64_t bytes[RM_REGION_RANKS]; // for each rank of the group
} rm_region_header;

typedef struct rm_region_slot {
  _Alignas(RM_REGION_LINE) _Atomic uint32_t barrier; // futex, see above
  _Atomic uint32_t sleepers;
  // Digest of the group's members as this rank has passed them; 0: the rank is not in the group.
  _Alignas(RM_REGION_LINE) _Atomic uint64_t members;
  _Atomic uint32_t came; // rounds at which this rank has arrived
  _Atomic uint32_t left; // 1 when it has destroyed its endpoint
  _Alignas(RM_REGION_LINE) rm_region_header headers[2];
} rm_region_slot;

struct rm_region {
  _Atomic int references;
  rm_region_map *map; // owned: the last reference unmaps it
  size_t map_bytes, slots_at, buffers_at;
  size_t buffer_bytes; // of one buffer
  size_t pair_bytes; // from a rank's first buffer to the next rank's
  // shm: the file, to allocate memory for a rank's buffers, and for the locks of process.c; −1:
  // threads
  int file;
  int lock; // shm: of rm_process_lock, or −1
  int most_spins; // the most polls of the barrier before a rank sleeps
  rm_region_options options;
};

// One rank's endpoint of a group: the transport's self.
typedef struct rm_region_endpoint {
  rm_region *region; // one reference
  int me, size, index; // me: in the group
  int32_t members[RM_REGION_RANKS];
  uint64_t member_set;
  rm_region_slot *group; // of the first member
  rm_region_slot *slots[RM_REGION_RANKS];
  char *buffers[RM_REGION_RANKS]; // two of each member
  uint64_t round; // of the current call, from 1
  int n_spins; // polls of the barrier before the next sleep
} rm_region_endpoint;

// A call, for messages and deadlines.
typedef struct rm_region_call {
  rm_comm_op op;
  uint64_t sequence;
  double seconds, deadline; // the timeout; the deadline by rm_now
} rm_region_call;

static inline rm_region_slot *rm_region_slot_of(const rm_region *region, int index, int rank) {
  const size_t at = (size_t)index * (size_t)region->options.world + (size_t)rank;
  return (rm_region_slot *)((char *)region->map + region->slots_at) + at;
}

// Offset of a rank's buffers from the beginning of the map.
static inline size_t rm_region_buffers_of(const rm_region *region, int index, int rank) {
  return region->buffers_at +
         ((size_t)index * (size_t)region->options.world + (size_t)rank) * region->pair_bytes;
}

// region.c: creates a region with one reference, sizes and offsets, before any memory is mapped.
// RM_E_CONFIG, RM_E_LIMIT, RM_E_MEMORY.
rm_code rm_region_new(const rm_region_options *options, rm_region **out, rm_error *err);
// Allocates memory for bytes [at, at + bytes) of a region's file. Returns 0 or an errno.
int rm_region_claim(int file, size_t at, size_t bytes);

// exchange.c: the transport's exchange.
rm_code rm_region_exchange(void *self, rm_comm_op op, uint64_t sequence, int64_t epoch,
                           double timeout, const rm_block send[], const rm_block recv[],
                           rm_error *err);

// wait.c
void rm_region_futex_wait(_Atomic uint32_t *word, uint32_t seen, double seconds);
void rm_region_futex_wake(_Atomic uint32_t *word);
// Arrives at `round`, which publishes this rank's writes, and waits until all have arrived. Fails
// if the group is dead; ends the group at the deadline or if a member is lost.
rm_code rm_region_barrier(rm_region_endpoint *end, const rm_region_call *call, rm_error *err);

// The transport's check: ends the group when a member has left it or its process has ended.
rm_code rm_region_check(void *self, rm_error *err);

// errors.c: each rank keeps its first error, and the first error of a group ends the group.
// Writes rank `me`'s error unless the rank already reports one. Returns 1 + the rank whose error it
// reports.
uint32_t rm_region_set_error(rm_region *region, int me, rm_code code, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
// Clears this rank's error before any other rank has seen it.
void rm_region_clear_error(rm_region *region, int me);
// Ends the group and wakes its waiting ranks, unless it is dead already.
void rm_region_fail_group(rm_region_endpoint *end, uint32_t cause);
// Returns the error that ended a dead group; this rank reports it from now on.
rm_code rm_region_group_error(rm_region_endpoint *end, rm_error *err);
rm_code rm_region_rank_error(rm_region *region, uint32_t cause, rm_error *err);
// "rank 2", "ranks 2, 3"
const char *rm_region_names(uint64_t ranks, char *text, size_t room);

// process.c: whether a rank's process runs.
// Takes rank's lock on the region's file and returns its descriptor; −1 if it is taken.
int rm_process_lock(int file, int rank);
void rm_process_unlock(int lock);
// Whether the process that took the lock has ended: the lock is free.
int rm_process_ended(int file, int rank);
// The ranks in `ranks`, a set, that have attached and whose processes have ended.
uint64_t rm_process_dead_ranks(const rm_region *region, uint64_t ranks);

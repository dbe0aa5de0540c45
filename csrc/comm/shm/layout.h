// layout.h: what lies where in a region, and what the files of this folder share. All of it is plain memory that may be mapped at
// a different address in each process, so nothing in it is a pointer.
//
//   rm_region_map      who the ranks are, how attaching stands, one verdict for each rank
//   rm_region_slot     [n_groups][world]: a group's barrier, in the slot of its first member; a rank's headers, in its own
//   buffers            [n_groups][world][2][buffer_bytes], each slot's pair on pages of its own
//
// How a call works: a rank fills its buffer and header, adds its arrival to the group's barrier and waits until the barrier says that all have.
// The last one to come wakes the others: one futex and one wake a call, however many ranks there are. The alternative, to wait for
// each rank on a futex of its own, woke every rank once for each other: with more ranks than cores most of the time went there.
//
// Who may write: a header and buffers their rank; a verdict its rank, once; the rest by atomic operations. What is plain memory is
// published by the barrier: its additions are read-modify-writes with release, so whoever sees the last has seen all.
#pragma once

#include <stdatomic.h>
#include <stdint.h>
#include <sys/types.h>

#include "base/clock.h"
#include "comm/shm/region.h"

enum { RM_REGION_RANKS = 64, RM_REGION_LINE = 64, RM_REGION_TEXT = 360 };

// Seconds between two looks at who is late, gone or dead; a tenth of the time in which the end of a rank has to be known.
#define RM_REGION_SLICE 0.01

// On the barrier: one rank's arrival at one round, and below it why the group is dead: 1 + the rank whose verdict ended it, 0 while it
// lives. Nobody arrives at a dead group, so a round whose arrivals are all there was completed while it lived: either every rank gets
// through a round or none does.
#define RM_BARRIER_ARRIVAL UINT32_C(128)
#define RM_BARRIER_CAUSE UINT32_C(127)

// rm_region_attach as all see it; beyond these two: RM_ATTACHED + 1 + the rank whose verdict ended it.
enum { RM_ATTACHING, RM_ATTACHED };

typedef struct rm_region_rank {
  _Alignas(RM_REGION_LINE) _Atomic uint64_t identity; // pid and low half of its start time; 0: has not come
  _Atomic uint32_t cause; // 1 + rank whose verdict this rank goes by; 0: no group of its has failed as far as it knows
  _Atomic uint32_t writing; // 1 once somebody writes the verdict below
  int32_t code; // rm_code; this and the text are valid where a `cause` or a barrier names the rank
  char text[RM_REGION_TEXT];
} rm_region_rank;

typedef struct rm_region_head { // of a named region; constant from when it has a name
  char magic[16];
  uint64_t nonce, maker; // of rm_region_attach; identity of the process that made it
  uint64_t world, n_groups, buffer_bytes;
} rm_region_head;

typedef struct rm_region_map {
  rm_region_head head;
  _Alignas(RM_REGION_LINE) _Atomic uint32_t n_attached; // ranks that have come
  _Atomic uint32_t gathering; // futex: RM_ATTACHING, RM_ATTACHED, or why it never will be
  rm_region_rank ranks[RM_REGION_RANKS];
} rm_region_map;

typedef struct rm_region_header { // of one round of one call
  uint64_t sequence, round, n_rounds;
  int64_t epoch;
  uint32_t op;
  uint64_t bytes[RM_REGION_RANKS]; // for each rank of the group
} rm_region_header;

typedef struct rm_region_slot {
  _Alignas(RM_REGION_LINE) _Atomic uint32_t barrier; // futex, see above
  _Atomic uint32_t sleepers;
  _Alignas(RM_REGION_LINE) _Atomic uint64_t members; // digest of the group as this rank sees it; 0: not in one
  _Atomic uint32_t came; // rounds that this rank has come to
  _Atomic uint32_t left; // 1 when it has let go of its end
  _Alignas(RM_REGION_LINE) rm_region_header headers[2];
} rm_region_slot;

struct rm_region {
  _Atomic int references;
  rm_region_map *map; // owned: the last reference unmaps it
  size_t map_bytes, slots_at, buffers_at;
  size_t buffer_bytes, pair_bytes; // of one buffer, and from a rank's first to the next rank's
  int file; // shm: the file, so that a rank can claim memory for its buffers; −1: threads
  int most_spins; // looks at the barrier before sleeping, at the most
  rm_region_options options;
  int pidfd[RM_REGION_RANKS]; // shm: of each rank's process, −1 where the system has none
};

// One rank's end of one group: a transport's self.
typedef struct rm_region_endpoint {
  rm_region *region; // one reference
  int me, size, index; // me: in the group
  int32_t members[RM_REGION_RANKS];
  rm_region_slot *group; // of the first member
  rm_region_slot *slots[RM_REGION_RANKS];
  char *buffers[RM_REGION_RANKS]; // of each member, two of them
  uint64_t turn; // rounds so far
  int n_spins; // looks at the barrier before the next sleep
} rm_region_endpoint;

// What a call is doing, for messages.
typedef struct rm_region_call {
  rm_comm_op op;
  uint64_t sequence;
  double seconds, deadline; // allowed; by rm_now
} rm_region_call;

static inline rm_region_slot *rm_region_slot_of(const rm_region *region, int index, int rank) {
  const size_t at = (size_t)index * (size_t)region->options.world + (size_t)rank;
  return (rm_region_slot *)((char *)region->map + region->slots_at) + at;
}

// From the beginning of the map.
static inline size_t rm_region_buffers_of(const rm_region *region, int index, int rank) {
  return region->buffers_at + ((size_t)index * (size_t)region->options.world + (size_t)rank) * region->pair_bytes;
}

// region.c: one reference, sizes and offsets; nothing mapped yet. RM_E_CONFIG, RM_E_LIMIT, RM_E_MEMORY.
rm_code rm_region_new(const rm_region_options *options, rm_region **out, rm_error *err);
// Takes memory for bytes [at, at + bytes) of a region's file: 0, or what errno would be.
int rm_region_claim(int file, size_t at, size_t bytes);

// exchange.c: the transport's exchange.
rm_code rm_region_exchange(void *self, rm_comm_op op, uint64_t sequence, int64_t epoch, double timeout, const rm_block send[],
                           const rm_block recv[], rm_error *err);

// wait.c
void rm_region_futex_wait(_Atomic uint32_t *word, uint32_t seen, double seconds);
void rm_region_futex_wake(_Atomic uint32_t *word);
// This rank has come to the round `turn`, what it has written is there for all; waits until all have come. Fails when the group is
// dead, and makes it so at the deadline and when a member is lost.
rm_code rm_region_meet(rm_region_endpoint *end, const rm_region_call *call, rm_error *err);

// The transport's look: ends the group when a member has let go of it or its process has ended.
rm_code rm_region_check(void *self, rm_error *err);

// verdict.c: the first failure of a rank is its verdict for good; the first of a group ends it.
// Writes rank `me`'s verdict unless it goes by one already; returns 1 + the rank whose verdict it goes by.
uint32_t rm_region_set_error(rm_region *region, int me, rm_code code, const char *format, ...) __attribute__((format(printf, 4, 5)));
void rm_region_clear_error(rm_region *region, int me); // this rank's verdict, which nobody has been told
// Ends the group and wakes all who wait in it, unless it is dead already.
void rm_region_fail_group(rm_region_endpoint *end, uint32_t cause);
// The verdict that ended the group, which is dead; this rank goes by it from now on.
rm_code rm_region_group_error(rm_region_endpoint *end, rm_error *err);
rm_code rm_region_rank_error(rm_region *region, uint32_t cause, rm_error *err);
// "rank 2", "ranks 2, 3"
const char *rm_region_names(uint64_t ranks, char *text, size_t room);

// process.c: processes by identity, since a pid may be another's by now.
uint64_t rm_process_self(void); // identity, never 0
int rm_process_pidfd(uint64_t identity); // a pidfd, −1 when there is none
// A set with a bit for each i < n whose process has ended.
uint64_t rm_process_ended(const uint64_t identities[], const int handles[], int n);

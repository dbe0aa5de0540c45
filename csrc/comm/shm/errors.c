// errors.c: the first error of a group, the same on every rank.
//
// Each rank can write one error into the region, once: a code and a message. A group refers to the
// error that ended it (its cause), and each rank to the first error that it has seen. A rank that
// aborts its other groups because one has failed reports that first error there too, so that every
// message names the lost rank.
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "comm/shm/layout.h"

uint32_t rm_region_set_error(rm_region *region, int me, rm_code code, const char *format, ...) {
  rm_region_rank *rank = &region->map->ranks[me];
  uint32_t cause;
  while (!(cause = atomic_load(&rank->cause)) && atomic_exchange(&rank->writing, 1))
    sched_yield(); // another thread is writing
  if (cause) return cause;
  va_list args;
  va_start(args, format);
  rank->code = (int32_t)code;
  vsnprintf(rank->text, sizeof rank->text, format, args);
  va_end(args);
  return atomic_compare_exchange_strong(&rank->cause, &cause, 1 + (uint32_t)me) ? 1 + (uint32_t)me
                                                                                : cause;
}

void rm_region_clear_error(rm_region *region, int me) {
  uint32_t own = 1 + (uint32_t)me;
  if (atomic_compare_exchange_strong(&region->map->ranks[me].cause, &own, 0))
    atomic_store(&region->map->ranks[me].writing, 0);
}

void rm_region_fail_group(rm_region_endpoint *end, uint32_t cause) {
  uint32_t barrier = atomic_load(&end->group->barrier);
  while (!(barrier & RM_BARRIER_CAUSE) &&
         !atomic_compare_exchange_weak(&end->group->barrier, &barrier, barrier | cause)) {}
  rm_region_futex_wake(&end->group->barrier);
}

rm_code rm_region_rank_error(rm_region *region, uint32_t cause, rm_error *err) {
  RM_FAIL_IF(cause < 1 || cause > RM_REGION_RANKS, RM_E_RANK_LOST,
             "the group has ended, and its error cannot be read");
  const rm_region_rank *rank = &region->map->ranks[cause - 1];
  const rm_code code =
      rank->code > RM_OK && rank->code < RM_N_CODE ? (rm_code)rank->code : RM_E_RANK_LOST;
  return rm_fail(err, code, "%.*s", (int)sizeof rank->text, rank->text);
}

rm_code rm_region_group_error(rm_region_endpoint *end, rm_error *err) {
  const uint32_t cause = atomic_load(&end->group->barrier) & RM_BARRIER_CAUSE;
  uint32_t none = 0;
  atomic_compare_exchange_strong(&end->region->map->ranks[end->members[end->me]].cause, &none,
                                 cause);
  return rm_region_rank_error(end->region, cause, err);
}

const char *rm_region_names(uint64_t ranks, char *text, size_t room) {
  size_t used = (size_t)snprintf(text, room,
                                 ranks == 0            ? "a rank"
                                 : ranks & (ranks - 1) ? "ranks"
                                                       : "rank");
  const char *between = " ";
  for (int rank = 0; rank < RM_REGION_RANKS && used < room; rank++) {
    if (!(ranks >> rank & 1)) continue;
    used += (size_t)snprintf(text + used, room - used, "%s%d", between, rank);
    between = ", ";
  }
  return text;
}

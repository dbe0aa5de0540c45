// wait.c: arriving at a round and waiting for the other ranks. A wait polls the barrier for some
// microseconds, if there is a core for every rank, and then sleeps on it in slices. The last rank
// to arrive wakes the sleepers, so a slice elapses only when a rank is late; then the waiting rank
// checks which ranks have left, which processes have ended and whether the deadline has passed.
//
// A missed wake-up (a rank killed between its arrival and its wake) costs the others one slice.
#define _GNU_SOURCE
#include <limits.h>
#include <linux/futex.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "comm/shm/layout.h"

enum { LEAST_SPINS = 64 }; // 2 µs: less than sleeping and waking costs

// Not the private kind of futex: the word may be shared with other processes.
void rm_region_futex_wait(_Atomic uint32_t *word, uint32_t seen, double seconds) {
  const struct timespec limit = {.tv_sec = (time_t)seconds,
                                 .tv_nsec = (long)(1e9 * (seconds - (double)(time_t)seconds))};
  syscall(SYS_futex, word, FUTEX_WAIT, seen, &limit, NULL, 0);
}

void rm_region_futex_wake(_Atomic uint32_t *word) {
  syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

static void cpu_relax(void) {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#endif
}

// Whether all have arrived at the round. The counter wraps around; compared values always differ by
// less than half its range.
static int all_came(const rm_region_endpoint *end, uint32_t barrier) {
  const uint32_t wanted = (uint32_t)end->round * (uint32_t)end->size * RM_BARRIER_ARRIVAL;
  return (int32_t)((barrier & ~RM_BARRIER_CAUSE) - wanted) >= 0;
}

// Adds this rank's arrival, unless the group is dead, and returns the barrier's new value.
static uint32_t arrive(rm_region_endpoint *end) {
  rm_region_slot *group = end->group;
  atomic_store_explicit(&end->slots[end->me]->came, (uint32_t)end->round, memory_order_relaxed);
  uint32_t barrier = atomic_load_explicit(&group->barrier, memory_order_relaxed);
  do {
    if (barrier & RM_BARRIER_CAUSE) return barrier;
    // seq_cst: the arrival is visible before `sleepers` is read.
  } while (!atomic_compare_exchange_weak(&group->barrier, &barrier, barrier + RM_BARRIER_ARRIVAL));
  barrier += RM_BARRIER_ARRIVAL;
  if (all_came(end, barrier) && atomic_load(&group->sleepers))
    rm_region_futex_wake(&group->barrier);
  return barrier;
}

// ---------------------------------------------------------------------------- lost and late ranks
static uint64_t bit(int32_t rank) { return UINT64_C(1) << rank; }

// State of the members, as sets of ranks of the world.
typedef struct absent {
  uint64_t left, other_members, late;
} absent;

static absent look(const rm_region_endpoint *end) {
  absent found = {0};
  const uint64_t mine = atomic_load_explicit(&end->slots[end->me]->members, memory_order_relaxed);
  for (int i = 0; i < end->size; i++) {
    rm_region_slot *slot = end->slots[i];
    const uint64_t theirs = atomic_load(&slot->members);
    if (atomic_load(&slot->left)) found.left |= bit(end->members[i]);
    if (theirs && theirs != mine) found.other_members |= bit(end->members[i]);
    if (atomic_load(&slot->came) != (uint32_t)end->round) found.late |= bit(end->members[i]);
  }
  return found;
}

// Returns the cause of an error if a member has left the group, or if its process has ended; else
// 0.
static uint32_t find_lost(rm_region_endpoint *end, uint64_t left, const char *when) {
  const uint64_t lost = left ? left : rm_process_dead_ranks(end->region, end->member_set);
  char who[4 * RM_REGION_RANKS + 8];
  if (!lost) return 0;
  return rm_region_set_error(end->region, end->members[end->me], RM_E_RANK_LOST, "lost %s: %s%s",
                             rm_region_names(lost, who, sizeof who),
                             left ? "it has left the group" : "the process has ended", when);
}

// Checks an incomplete round. Returns the cause of an error (1 + rank), or 0.
static uint32_t diagnose(rm_region_endpoint *end, const rm_region_call *call, double now) {
  const absent found = look(end);
  const char *op = rm_comm_op_name(call->op);
  const uint64_t n = call->sequence;
  const int me = end->members[end->me];
  char who[4 * RM_REGION_RANKS + 8], when[64];
  if (all_came(end, atomic_load(&end->group->barrier)))
    return 0; // the last rank to arrive may have left by now
  if (found.other_members)
    return rm_region_set_error(end->region, me, RM_E_MESH_MISMATCH,
                               "group %d has other members for %s than for rank %d", end->index,
                               rm_region_names(found.other_members, who, sizeof who), me);
  snprintf(when, sizeof when, " (%s, call %lu)", op, n);
  const uint32_t lost = find_lost(end, found.left, when);
  if (lost) return lost;
  if (now < call->deadline) return 0;
  return rm_region_set_error(end->region, me, RM_E_COLLECTIVE_TIMEOUT,
                             "%s, call %lu: %s did not arrive within %.3g s of rank %d", op, n,
                             rm_region_names(found.late, who, sizeof who), call->seconds, me);
}

static int is_over(const rm_region_endpoint *end, uint32_t barrier) {
  return all_came(end, barrier) || barrier & RM_BARRIER_CAUSE;
}

// Ends the group if a member is lost or the deadline has passed, unless the round has completed in
// the meantime.
static void check(rm_region_endpoint *end, const rm_region_call *call, double now) {
  _Atomic uint32_t *barrier = &end->group->barrier;
  const int me = end->members[end->me];
  const int had_error = atomic_load(&end->region->map->ranks[me].cause) != 0;
  const uint32_t cause = diagnose(end, call, now);
  uint32_t seen = atomic_load(barrier);
  if (!cause) return;
  while (!is_over(end, seen))
    if (atomic_compare_exchange_weak(barrier, &seen, seen | cause)) {
      rm_region_futex_wake(barrier);
      return;
    }
  if (!had_error) rm_region_clear_error(end->region, me);
}

rm_code rm_region_check(void *self, rm_error *err) {
  rm_region_endpoint *end = self;
  if (!(atomic_load(&end->group->barrier) & RM_BARRIER_CAUSE)) {
    const uint32_t lost = find_lost(end, look(end).left, "");
    if (!lost) return RM_OK;
    rm_region_fail_group(end, lost);
  }
  return rm_region_group_error(end, err);
}

// ---------------------------------------------------------------------------------------- waiting
static uint32_t sleep_on(rm_region_endpoint *end, const rm_region_call *call) {
  double next_look = rm_now() + RM_REGION_SLICE;
  uint32_t barrier;
  while (!is_over(end, barrier = atomic_load(&end->group->barrier))) {
    const double now = rm_now(), until = next_look < call->deadline ? next_look : call->deadline;
    if (now < until) rm_region_futex_wait(&end->group->barrier, barrier, until - now);
    else {
      check(end, call, now);
      next_look = now + RM_REGION_SLICE;
    }
  }
  return barrier;
}

// Polls the barrier without sleeping. Each unsuccessful spin halves the next one and each
// successful spin doubles it, since spinning does not help where ranks share cores.
static uint32_t spin(rm_region_endpoint *end, uint32_t barrier) {
  for (int i = 0; i < end->n_spins && !is_over(end, barrier); i++) {
    cpu_relax();
    barrier = atomic_load_explicit(&end->group->barrier, memory_order_acquire);
  }
  const int next = is_over(end, barrier) ? end->n_spins * 2 : end->n_spins / 2;
  const int most = end->region->most_spins, least = most < LEAST_SPINS ? most : LEAST_SPINS;
  end->n_spins = next > most ? most : next < least ? least : next;
  return barrier;
}

rm_code rm_region_barrier(rm_region_endpoint *end, const rm_region_call *call, rm_error *err) {
  uint32_t barrier = arrive(end);
  if (!is_over(end, barrier)) barrier = spin(end, barrier);
  if (!is_over(end, barrier)) {
    // Before FUTEX_WAIT reads the barrier: either the last arrival reads `sleepers` after this
    // addition, or FUTEX_WAIT reads the new barrier.
    atomic_fetch_add(&end->group->sleepers, 1);
    barrier = sleep_on(end, call);
    atomic_fetch_sub(&end->group->sleepers, 1);
  }
  return all_came(end, barrier) ? RM_OK : rm_region_group_error(end, err);
}

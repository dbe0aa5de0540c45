// memory.c: see memory.h. Its globals are atomic: counts of mapped bytes and of allocations, by
// which tests find leaks, and the countdown of the failure hook. Steps do not allocate, so counting
// does not slow them.
//
// Large allocations come from mmap, not malloc, because sleep must return them to the system at
// once, and because 2 MiB alignment allows huge pages: a decode step reads all weights, and 4 KiB
// pages would cost one TLB miss every 64 cache lines.
#define _GNU_SOURCE
#include "base/memory.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/checked.h"
#include "base/hash.h"

enum { HUGE_PAGE = 2 << 20 };

static _Atomic size_t mapped_bytes, blocks_held;
static _Atomic long fail_countdown; // 0: off
static _Atomic long n_failed; // allocations that the hook has failed
static _Atomic int fail_for_ever;

void rm_memory_fail_at(long n, int for_ever) {
  atomic_store(&n_failed, 0);
  atomic_store(&fail_for_ever, for_ever);
  atomic_store(&fail_countdown, n);
}

long rm_memory_failed(void) { return atomic_load(&n_failed); }

// Counts this allocation. Returns 1 if the hook fails it.
static int must_fail(void) {
  long left = atomic_load_explicit(&fail_countdown, memory_order_relaxed);
  while (left > 0) {
    const long next = left == 1 && atomic_load(&fail_for_ever) ? 1 : left - 1;
    if (!atomic_compare_exchange_weak(&fail_countdown, &left, next)) continue;
    atomic_fetch_add(&n_failed, left == 1);
    return left == 1;
  }
  return 0;
}

// Counts a new allocation unless it is NULL.
static void *count_block(void *block) {
  if (block) atomic_fetch_add_explicit(&blocks_held, 1, memory_order_relaxed);
  return block;
}

static void uncount_block(void) {
  atomic_fetch_sub_explicit(&blocks_held, 1, memory_order_relaxed);
}

void *rm_alloc(size_t count, size_t bytes) {
  if (must_fail()) return NULL;
  return count_block(calloc(count ? count : 1, bytes ? bytes : 1));
}

void *rm_realloc(void *old, size_t count, size_t bytes) {
  size_t total;
  if (!rm_mul_size(count, bytes, &total) || must_fail()) return NULL;
  void *block = realloc(old, total ? total : 1);
  return old ? block : count_block(block);
}

void rm_free(void *block) {
  if (block) uncount_block();
  free(block);
}

static size_t page_round(size_t bytes) {
  const size_t page = (size_t)sysconf(_SC_PAGESIZE);
  return (bytes + page - 1) / page * page;
}

void *rm_map(size_t bytes) {
  if (bytes == 0 || bytes > SIZE_MAX / 2 || must_fail()) return NULL;
  const size_t length = page_round(bytes), slack = length >= HUGE_PAGE ? HUGE_PAGE : 0;
  char *raw =
      mmap(NULL, length + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (raw == MAP_FAILED) return NULL;
  if (slack) { // keep the aligned part, unmap the ends
    const size_t head = (HUGE_PAGE - (uintptr_t)raw % HUGE_PAGE) % HUGE_PAGE;
    if (head) munmap(raw, head);
    if (slack > head) munmap(raw + head + length, slack - head);
    raw += head;
    madvise(raw, length, MADV_HUGEPAGE); // a hint: only the speed depends on it
  }
  atomic_fetch_add(&mapped_bytes, length);
  return count_block(raw);
}

void *rm_map_file(int file, size_t bytes) {
  if (bytes == 0 || bytes > SIZE_MAX / 2 || must_fail()) return NULL;
  void *block = mmap(NULL, page_round(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (block == MAP_FAILED) return NULL;
  atomic_fetch_add(&mapped_bytes, page_round(bytes));
  return count_block(block);
}

void rm_unmap(void *block, size_t bytes) {
  if (!block) return;
  const size_t length = page_round(bytes);
  munmap(block, length);
  uncount_block();
  atomic_fetch_sub(&mapped_bytes, length);
}

// The engine checks the available memory before it allocates weights, because mmap overcommits and
// the out-of-memory killer would end the process later.
size_t rm_memory_available(void) {
  rm_memory_pool pools[RM_MEMORY_POOLS];
  size_t least = SIZE_MAX;
  for (int i = rm_memory_pools("", pools); i-- > 0;)
    least = pools[i].available < least ? pools[i].available : least;
  return least;
}

// Uses the boot id: containers of one machine share its memory but have different host names.
uint64_t rm_memory_name(const char *card) {
  char machine[256] = "";
  FILE *file = fopen("/proc/sys/kernel/random/boot_id", "re");
  if ((!file || !fgets(machine, sizeof machine, file)) && gethostname(machine, sizeof machine - 1))
    machine[0] = 0;
  if (file) fclose(file);
  return rm_hash_bytes(rm_hash_bytes(RM_HASH_SEED, machine, strlen(machine)), card, strlen(card));
}

size_t rm_memory_mapped(void) { return atomic_load(&mapped_bytes); }
size_t rm_memory_blocks(void) { return atomic_load(&blocks_held); }

// memory.c: see memory.h. Its globals are atomic: counts of mapped bytes and of allocations, by
// which tests find leaks, and the countdown of the failure hook. Steps do not allocate, so counting
// does not slow them.
//
// Large allocations come from mmap, not malloc, because sleep must return them to the system at
// once, and because 2 MiB alignment allows huge pages: a decode step reads all weights, and 4 KiB
// pages would cost one TLB miss every 64 cache lines.
#define _GNU_SOURCE
#include "base/memory.h"

#include <limits.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/checked.h"
#include "base/control_groups.h"
#include "base/hash.h"

enum { CACHE_LINE = 64, HUGE_PAGE = 2 << 20 };

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

// Returns MemAvailable of the machine in bytes; SIZE_MAX: unknown.
static size_t machine_available(const char *root) {
  char path[PATH_MAX], line[128];
  if (snprintf(path, sizeof path, "%s/proc/meminfo", root) >= (int)sizeof path) return SIZE_MAX;
  FILE *file = fopen(path, "re");
  if (!file) return SIZE_MAX;
  unsigned long long kib = 0;
  int found = 0;
  while (!found && fgets(line, sizeof line, file))
    found = sscanf(line, "MemAvailable: %llu", &kib) == 1;
  fclose(file);
  size_t bytes;
  return found && kib && rm_mul_size((size_t)kib, 1024, &bytes) ? bytes : SIZE_MAX;
}

typedef struct pool_list {
  rm_memory_pool *pools;
  int n;
} pool_list;

// Adds a control group. In a full list it replaces the group with the most memory left, so that
// the group with the least is always listed.
static void add_group(void *opaque, rm_group_memory group) {
  pool_list *list = opaque;
  char name[48];
  snprintf(name, sizeof name, "control group %llu", (unsigned long long)group.inode);
  const rm_memory_pool pool = {rm_memory_name(name), group.available};
  int most = 0;
  for (int i = 0; i < list->n; i++) {
    if (list->pools[i].name == pool.name) return;
    if (list->pools[i].available > list->pools[most].available) most = i;
  }
  if (list->n < RM_MEMORY_POOLS) list->pools[list->n++] = pool;
  else if (pool.available < list->pools[most].available) list->pools[most] = pool;
}

int rm_memory_pools(const char *root, rm_memory_pool pools[RM_MEMORY_POOLS]) {
  pool_list list = {pools, 1};
  pools[0] = (rm_memory_pool){rm_memory_name(""), machine_available(root)};
  rm_each_memory_limit(root, add_group, &list);
  return list.n;
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

void *rm_carve(rm_arena *arena, size_t count, size_t bytes) {
  size_t wanted, end;
  const size_t start = (arena->used + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE;
  if (!rm_mul_size(count, bytes, &wanted) || !rm_add_size(start, wanted, &end) ||
      end > arena->capacity)
    return NULL;
  arena->used = end;
  return arena->base + start;
}

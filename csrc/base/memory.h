// memory.h: the allocations of the engine. Blocks are made when a thing is created, never inside a step.
//
// rm_map / rm_unmap: large page-aligned zeroed blocks straight from the system (weights, KV), with huge pages where there
// are any; rm_alloc / rm_free: zeroed small ones. Every allocation of the library goes through here, so that a test can
// fail the n-th one (rm_memory_fail_at).
#pragma once

#include <stddef.h>
#include <stdint.h>

void *rm_alloc(size_t count, size_t bytes);          // zeroed; NULL on overflow or no memory; owned, rm_free
void *rm_realloc(void *old, size_t count, size_t bytes);   // grown part not zeroed; old stays valid on NULL
void rm_free(void *block);
void *rm_map(size_t bytes);                          // zeroed, 2 MiB aligned when large; owned, rm_unmap; NULL on failure
void *rm_map_file(int file, size_t bytes);           // the file's first bytes, shared with whoever maps it; owned, rm_unmap
void rm_unmap(void *block, size_t bytes);
size_t rm_memory_mapped(void);                       // bytes mapped now by this process through rm_map
size_t rm_memory_blocks(void);                       // blocks, small and mapped, that were not given back yet
size_t rm_memory_available(void);                    // bytes the system can still give: the least of the pools; SIZE_MAX: it does not say
// Whom this process takes memory from: the machine, and the control group (a container's) that limits it, if one does. Processes for which
// a pool has the same name share it. Returns how many there are.
typedef struct rm_memory_pool {
  uint64_t name;
  size_t available;
} rm_memory_pool;
int rm_memory_pools(rm_memory_pool pools[2]);
// A name of this machine's memory, or with `card`, a PCI bus id, of that card's: the same in all processes and containers that have it.
uint64_t rm_memory_name(const char *card);

// Carves cache-line aligned pieces out of one block; they die with it.
typedef struct rm_arena {
  char *base;
  size_t used, capacity;
} rm_arena;
void *rm_carve(rm_arena *arena, size_t count, size_t bytes);  // NULL when it does not fit

// Test hook: the n-th allocation from now (1 = next) fails, and all after it when `for_ever`. 0 switches it off.
void rm_memory_fail_at(long n, int for_ever);
long rm_memory_failed(void);                         // allocations that the hook has failed since it was set

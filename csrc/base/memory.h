// memory.h: the allocations of the engine. Memory is allocated at creation, never inside a step.
// Any thread may call these functions.
//
// rm_map and rm_unmap: large page-aligned zeroed blocks straight from the system (weights, KV),
// with huge pages where the system has them. rm_alloc and rm_free: small zeroed blocks. Every
// allocation of the library goes through these functions, so that a test can fail the n-th one
// (rm_memory_fail_at).
#pragma once

#include <stddef.h>
#include <stdint.h>

void *rm_alloc(size_t count, size_t bytes); // zeroed; NULL on overflow or no memory; owned, rm_free
// The grown part is not zeroed. On NULL, `old` stays valid.
void *rm_realloc(void *old, size_t count, size_t bytes);
void rm_free(void *block);
void *rm_map(size_t bytes); // zeroed, 2 MiB aligned when large; owned, rm_unmap; NULL on failure
// Maps the file's first bytes, shared with every process that maps them; owned, rm_unmap.
void *rm_map_file(int file, size_t bytes);
void rm_unmap(void *block, size_t bytes);
size_t rm_memory_mapped(void); // bytes mapped now by this process through rm_map
size_t rm_memory_blocks(void); // allocations, small and mapped, not freed yet
size_t rm_memory_available(
    void); // bytes still available: the least of the pools; SIZE_MAX: unknown
// The memory pools of this process: the machine's, and one for each of its control groups that has
// a limit (a container's, a job's, a task's). Processes share the pools that have the same name.
// Returns the number of pools. root: control_groups.h.
enum { RM_MEMORY_POOLS = 16 };
typedef struct rm_memory_pool {
  uint64_t name;
  size_t available;
} rm_memory_pool;
int rm_memory_pools(const char *root, rm_memory_pool pools[RM_MEMORY_POOLS]);
// Returns a name of this machine's memory (card ""), or of the memory of the GPU with PCI bus id
// `card`. All processes and containers of the machine get the same name.
uint64_t rm_memory_name(const char *card);

// Test hook: the n-th allocation from now (1 = next) fails, and all after it when `for_ever`. 0
// switches it off.
void rm_memory_fail_at(long n, int for_ever);
long rm_memory_failed(void); // allocations that the hook has failed since it was set

// results.h: what ops write into the records of requests, and read from the host. On the CPU an op works in the records themselves, and
// nothing here does anything. On a GPU the bytes go through one paired buffer and are copied to the records after the step's wait.
#pragma once

#include "device/devices.h"
#include "model/rank.h"

enum { RM_MAX_RESULTS = 4096 };

typedef struct rm_result {
  void *to;
  size_t at, bytes;
} rm_result;

typedef struct rm_results {
  const rm_device *device;      // view
  const rm_rank *rank;          // view: a fetch waits for its groups too
  rm_paired paired;             // owned
  rm_result *list;              // owned, [RM_MAX_RESULTS]
  size_t used;
  int n;
} rm_results;

rm_code rm_results_create(const rm_device *device, const rm_rank *rank, size_t bytes, rm_results *out, rm_error *err);
void rm_results_destroy(rm_results *results);   // safe on a zeroed one
size_t rm_results_room(const rm_results *results);   // the most bytes of one reserve, SIZE_MAX where nothing is copied
// Room for n takes and gives of `bytes` together, which then cannot fail. Where none is left, it fetches what was taken and frees what was
// given. Each take or give costs RM_RESULT_ALIGN bytes more than it has.
enum { RM_RESULT_ALIGN = 64 };
rm_code rm_results_reserve(rm_results *results, int n, size_t bytes, rm_error *err);
// Where an op puts what the host finds at `to` after the next fetch.
void *rm_results_take(rm_results *results, void *to, size_t bytes);
// Where an op finds what the host has at `from` now; `from` stays as it is until the op was called.
const void *rm_results_give(rm_results *results, const void *from, size_t bytes);
void rm_results_drop(rm_results *results);   // what was taken and not fetched is not wanted any more
// Waits for the device, as rm_rank_wait does, whatever was taken.
rm_code rm_results_fetch(rm_results *results, rm_error *err);

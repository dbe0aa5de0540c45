// results.h: buffers for results of ops that go to the records of requests, and for inputs from the
// host. On the CPU an op uses the records directly, and these functions do nothing. On a GPU the
// bytes go through one mirrored buffer, and results are copied to the records after the wait.
#pragma once

#include "device/devices.h"
#include "model/rank.h"

enum { RM_MAX_RESULTS = 4096 };

typedef struct rm_result {
  void *to;
  size_t at, bytes;
} rm_result;

typedef struct rm_results {
  const rm_device *device; // view
  const rm_rank *rank; // view: copy_out also checks its groups
  rm_mirrored_buffer mirrored; // owned
  rm_result *list; // owned, [RM_MAX_RESULTS]
  size_t used;
  int n;
} rm_results;

rm_code rm_results_create(const rm_device *device, const rm_rank *rank, size_t bytes,
                          rm_results *out, rm_error *err);
void rm_results_destroy(rm_results *results); // safe on a zeroed one
// Returns the largest number of bytes of one reserve; SIZE_MAX on the CPU.
size_t rm_results_room(const rm_results *results);
// Reserves room for n outputs and inputs of `bytes` in total, which then cannot fail. If the buffer
// is full, it first calls copy_out. Each output or input uses up to RM_RESULT_ALIGN bytes more.
enum { RM_RESULT_ALIGN = 64 };
rm_code rm_results_reserve(rm_results *results, int n, size_t bytes, rm_error *err);
// Returns an address for the result of an op; the next copy_out copies it to `to`.
void *rm_results_output(rm_results *results, void *to, size_t bytes);
// Returns an address where an op can read a copy of `from`, which must not change until the op was
// called.
const void *rm_results_input(rm_results *results, const void *from, size_t bytes);
// Waits for the device (rm_rank_wait), then copies results; after an error it discards them.
rm_code rm_results_copy_out(rm_results *results, rm_error *err);

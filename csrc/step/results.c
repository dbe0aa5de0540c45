// results.c: see results.h.
#include "step/results.h"

#include <string.h>

#include "base/memory.h"

rm_code rm_results_create(const rm_device *device, const rm_rank *rank, size_t bytes,
                          rm_results *out, rm_error *err) {
  *out = (rm_results){.device = device, .rank = rank};
  if (device->on_host) return RM_OK;
  if (!(out->list = rm_alloc(RM_MAX_RESULTS, sizeof *out->list)))
    return rm_no_memory(err, "the results of a step", 0);
  return rm_mirrored_create(device, bytes, "results of a step", &out->mirrored, err);
}

void rm_results_destroy(rm_results *results) {
  rm_mirrored_destroy(&results->mirrored);
  rm_free(results->list);
  results->list = NULL;
}

size_t rm_results_room(const rm_results *results) {
  return results->device->on_host ? SIZE_MAX : results->mirrored.bytes;
}

rm_code rm_results_reserve(rm_results *results, int n, size_t bytes, rm_error *err) {
  if (results->device->on_host) return RM_OK;
  const size_t wanted = bytes + (size_t)n * RM_RESULT_ALIGN;
  RM_FAIL_IF(wanted > results->mirrored.bytes, RM_E_CAPACITY,
             "results of a step: expected at most %zu bytes, got %d results of %zu",
             results->mirrored.bytes, n, bytes);
  if (results->used + wanted <= results->mirrored.bytes && results->n + n <= RM_MAX_RESULTS)
    return RM_OK;
  return rm_results_copy_out(results, err);
}

static char *carve(rm_results *results, size_t bytes) {
  char *here = results->mirrored.host + results->used;
  results->used += (bytes + RM_RESULT_ALIGN - 1) / RM_RESULT_ALIGN * RM_RESULT_ALIGN;
  return here;
}

void *rm_results_output(rm_results *results, void *to, size_t bytes) {
  if (results->device->on_host) return to;
  char *here = carve(results, bytes);
  results->list[results->n++] = (rm_result){to, (size_t)(here - results->mirrored.host), bytes};
  return rm_mirrored_on_device(&results->mirrored, here);
}

const void *rm_results_input(rm_results *results, const void *from, size_t bytes) {
  if (results->device->on_host) return from;
  char *here = carve(results, bytes);
  if (bytes) memcpy(here, from, bytes);
  rm_mirrored_copy_to_device(&results->mirrored, here, bytes);
  return rm_mirrored_on_device(&results->mirrored, here);
}

rm_code rm_results_copy_out(rm_results *results, rm_error *err) {
  const size_t first = results->n ? results->list[0].at : 0,
               used = results->n ? results->used - first : 0;
  if (used) rm_mirrored_copy_to_host(&results->mirrored, results->mirrored.host + first, used);
  const rm_code code = rm_rank_wait(results->rank, results->device, RM_WAIT_QUEUE, err);
  for (int i = 0; i < results->n && !code; i++)
    memcpy(results->list[i].to, results->mirrored.host + results->list[i].at,
           results->list[i].bytes);
  results->n = 0;
  results->used = 0;
  return code;
}

// ready_queues.c: see ready_queues.h.
#include "device/ready_queues.h"

#include <string.h>

#include "base/memory.h"
#include "device/cuda.h"

rm_code rm_ready_queues_init(rm_ready_queues *queues, const char *library, rm_error *err) {
  if (!library) return RM_OK;
  const size_t bytes = strlen(library) + 1;
  queues->library = rm_alloc(bytes, 1);
  if (!queues->library) return rm_fail(err, RM_E_MEMORY, "no memory for the path of the CUDA library");
  memcpy(queues->library, library, bytes);
  return RM_OK;
}

void rm_ready_queues_destroy(rm_ready_queues *queues) {
  for (int i = 0; i < RM_MAX_GPUS; i++)
    if (queues->opened[i].self) queues->opened[i].close(queues->opened[i].self);
  rm_free(queues->library);
  *queues = (rm_ready_queues){0};
}

rm_code rm_ready_queues_find(rm_ready_queues *queues, int ordinal, const rm_device **out, rm_error *err) {
  *out = NULL;
  if (!queues->library || ordinal < 0 || ordinal >= RM_MAX_GPUS)
    return rm_fail(err, RM_E_CONFIG, "expected one of the first %d GPUs", queues->library ? RM_MAX_GPUS : 0);
  rm_device *opened = &queues->opened[ordinal];
  if (!queues->own[ordinal] && !opened->self) {
    const rm_code code = rm_cuda_device(queues->library, ordinal, NULL, opened, err);
    if (code) return code;
  }
  *out = queues->own[ordinal] ? queues->own[ordinal] : opened;
  return RM_OK;
}

rm_code rm_ready_queues_wait(rm_ready_queues *queues, int ordinal, rm_error *err) {
  const rm_device *device;
  rm_code code = rm_ready_queues_find(queues, ordinal, &device, err);
  if (code) return code;
  const int saved = device->enter(device->self);
  code = rm_device_wait(device, err);
  device->leave(device->self, saved);
  return code;
}

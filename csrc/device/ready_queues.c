// ready_queues.c: see ready_queues.h.
#include "device/ready_queues.h"

#include <string.h>

#include "base/memory.h"
#include "device/cuda.h"

rm_code rm_readers_init(rm_readers *readers, const char *library, rm_error *err) {
  if (!library) return RM_OK;
  const size_t bytes = strlen(library) + 1;
  readers->library = rm_alloc(bytes, 1);
  if (!readers->library) return rm_fail(err, RM_E_MEMORY, "no memory for the path of the CUDA library");
  memcpy(readers->library, library, bytes);
  return RM_OK;
}

void rm_readers_destroy(rm_readers *readers) {
  for (int i = 0; i < RM_MAX_GPUS; i++)
    if (readers->opened[i].self) readers->opened[i].close(readers->opened[i].self);
  rm_free(readers->library);
  *readers = (rm_readers){0};
}

rm_code rm_readers_find(rm_readers *readers, int ordinal, const rm_device **out, rm_error *err) {
  *out = NULL;
  if (!readers->library || ordinal < 0 || ordinal >= RM_MAX_GPUS)
    return rm_fail(err, RM_E_CONFIG, "expected one of the first %d GPUs", readers->library ? RM_MAX_GPUS : 0);
  rm_device *opened = &readers->opened[ordinal];
  if (!readers->own[ordinal] && !opened->self) {
    const rm_code code = rm_cuda_device(readers->library, ordinal, NULL, opened, err);
    if (code) return code;
  }
  *out = readers->own[ordinal] ? readers->own[ordinal] : opened;
  return RM_OK;
}

rm_code rm_readers_wait(rm_readers *readers, int ordinal, rm_error *err) {
  const rm_device *device;
  rm_code code = rm_readers_find(readers, ordinal, &device, err);
  if (code) return code;
  const int saved = device->enter(device->self);
  code = rm_device_wait(device, err);
  device->leave(device->self, saved);
  return code;
}

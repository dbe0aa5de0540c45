// ready_streams.c: the streams that DLPack producers synchronize with; see gpu.h.

#include <string.h>

#include "base/memory.h"
#include "gpu/gpu.h"

rm_code rm_ready_streams_init(rm_ready_streams *streams, const char *library, rm_error *err) {
  if (!library) return RM_OK;
  const size_t bytes = strlen(library) + 1;
  streams->library = rm_alloc(bytes, 1);
  if (!streams->library)
    return rm_fail(err, RM_E_MEMORY, "no memory for the path of the CUDA library");
  memcpy(streams->library, library, bytes);
  return RM_OK;
}

void rm_ready_streams_destroy(rm_ready_streams *streams) {
  for (int i = 0; i < RM_MAX_GPUS; i++)
    if (streams->opened[i].self) streams->opened[i].close(streams->opened[i].self);
  rm_free(streams->library);
  *streams = (rm_ready_streams){0};
}

rm_code rm_ready_streams_find(rm_ready_streams *streams, int ordinal, const rm_device **out,
                              rm_error *err) {
  *out = NULL;
  if (!streams->library || ordinal < 0 || ordinal >= RM_MAX_GPUS)
    return rm_fail(err, RM_E_CONFIG, "expected one of the first %d GPUs, got cuda:%d",
                   streams->library ? RM_MAX_GPUS : 0, ordinal);
  rm_device *opened = &streams->opened[ordinal];
  if (!streams->own[ordinal] && !opened->self) {
    const rm_code code = rm_cuda_device(streams->library, ordinal, NULL, opened, err);
    if (code) return code;
  }
  *out = streams->own[ordinal] ? streams->own[ordinal] : opened;
  return RM_OK;
}

rm_code rm_ready_streams_wait(rm_ready_streams *streams, int ordinal, rm_error *err) {
  const rm_device *device;
  rm_code code = rm_ready_streams_find(streams, ordinal, &device, err);
  if (code) return code;
  const int saved = device->enter(device->self);
  code = rm_device_wait(device, err);
  device->leave(device->self, saved);
  return code;
}

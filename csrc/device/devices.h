// devices.h: additions to a device's function table (kernels/device.h): the CPU as a device, memory
// and waits that return rm_code, and mirrored buffers. One thread at a time uses a device, after it
// has entered it.
#pragma once

#include "base/status.h"
#include "device.h"

// Returns the CPU as a device; it needs no close.
rm_device rm_device_cpu(const rm_kernels *kernels);

// RM_E_CAPACITY states what did not fit and how much the device has left (RM_E_MEMORY on the CPU);
// RM_E_DEVICE: the device failed. `what` is for the message: "the KV cache".
rm_code rm_device_alloc(const rm_device *device, size_t bytes, const char *what, void **out,
                        rm_error *err);
void rm_device_free(const rm_device *device, void *block, size_t bytes); // safe on NULL
// Pinned host memory of a device that is not the CPU. RM_E_MEMORY, RM_E_DEVICE.
rm_code rm_device_alloc_pinned(const rm_device *device, size_t bytes, const char *what, void **out,
                               rm_error *err);
rm_code rm_device_wait(const rm_device *device, rm_error *err);
// Returns RM_OK, or RM_E_DEVICE with the device's message.
rm_code rm_device_check(const rm_device *device, rm_device_status status, rm_error *err);
static inline void rm_device_zero(const rm_device *device, void *at, size_t bytes) {
  if (bytes) device->zero_2d(device->self, at, bytes, bytes, 1);
}
static inline void rm_device_copy(const rm_device *device, void *to, const void *from,
                                  size_t bytes) {
  if (bytes) device->copy_2d(device->self, to, bytes, from, bytes, bytes, 1);
}

// Events of a device: the two halves of a staging buffer, and indices from the host.
enum { RM_EVENT_STAGING, RM_EVENT_STAGING_SECOND, RM_EVENT_INDICES };

// A buffer with a host half and a device half of the same layout (vLLM's CpuGpuBuffer). The host
// fills a range of `host` and copies it to the device, or copies a range to the host and reads it
// after rm_device_wait. On the CPU both halves are the same memory, and copies are skipped.
typedef struct rm_mirrored_buffer {
  const rm_device *device; // view
  char *host, *on_device; // owned
  size_t bytes;
} rm_mirrored_buffer;

rm_code rm_mirrored_create(const rm_device *device, size_t bytes, const char *what,
                           rm_mirrored_buffer *out, rm_error *err);
void rm_mirrored_destroy(rm_mirrored_buffer *mirrored); // safe on a zeroed one
// The device address that corresponds to the host address `here`; NULL for NULL.
static inline void *rm_mirrored_on_device(const rm_mirrored_buffer *mirrored, const void *here) {
  return here ? mirrored->on_device + ((const char *)here - mirrored->host) : NULL;
}
static inline void rm_mirrored_copy_to_device(const rm_mirrored_buffer *mirrored, const void *here,
                                              size_t bytes) {
  const rm_device *device = mirrored->device;
  if (!device->on_host && bytes)
    device->copy_to_device(device->self, rm_mirrored_on_device(mirrored, here), here, bytes);
}
static inline void rm_mirrored_copy_to_host(const rm_mirrored_buffer *mirrored, void *here,
                                            size_t bytes) {
  const rm_device *device = mirrored->device;
  if (!device->on_host && bytes)
    device->copy_to_host(device->self, here, rm_mirrored_on_device(mirrored, here), bytes);
}

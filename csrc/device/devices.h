// devices.h: additions to a device's function table (kernels/device.h): the CPU as a device, memory and waits that return rm_code, and
// paired host/device buffers. A device is used by one thread at a time, which has entered it.
#pragma once

#include "base/status.h"
#include "device.h"

// The CPU as a device; nothing in it is owned.
rm_device rm_device_cpu(const rm_kernels *kernels);

// RM_E_CAPACITY names what did not fit and how much the device has left (RM_E_MEMORY on the CPU); RM_E_DEVICE: a fault. `what` is for
// the message: "the KV cache".
rm_code rm_device_map(const rm_device *device, size_t bytes, const char *what, void **out, rm_error *err);
void rm_device_unmap(const rm_device *device, void *block, size_t bytes);   // safe on NULL
rm_code rm_device_wait(const rm_device *device, rm_error *err);
rm_code rm_device_check(const rm_device *device, rm_device_status status, rm_error *err);   // RM_OK, or RM_E_DEVICE
static inline void rm_device_zero(const rm_device *device, void *at, size_t bytes) {
  if (bytes) device->zero(device->self, at, bytes, bytes, 1);
}
static inline void rm_device_copy(const rm_device *device, void *to, const void *from, size_t bytes) {
  if (bytes) device->copy(device->self, to, bytes, from, bytes, bytes, 1);
}

// Numbers of a device's events: the two halves of a staging buffer, and indices from the host.
enum { RM_EVENT_STAGING, RM_EVENT_STAGING_SECOND, RM_EVENT_INDICES };

// A paired host/device buffer. The host fills `host` and puts ranges of it, or gets ranges and reads them after rm_device_wait. On the
// CPU both are the same memory, and put and get do nothing.
typedef struct rm_paired {
  const rm_device *device;      // view
  char *host, *on_device;       // owned
  size_t bytes;
} rm_paired;

rm_code rm_paired_create(const rm_device *device, size_t bytes, const char *what, rm_paired *out, rm_error *err);
void rm_paired_destroy(rm_paired *paired);   // safe on a zeroed one
// The device address that corresponds to the host address `here`; NULL for NULL.
static inline void *rm_paired_on_device(const rm_paired *paired, const void *here) {
  return here ? paired->on_device + ((const char *)here - paired->host) : NULL;
}
static inline void rm_paired_put(const rm_paired *paired, const void *here, size_t bytes) {
  const rm_device *device = paired->device;
  if (!device->on_host && bytes) device->put(device->self, rm_paired_on_device(paired, here), here, bytes);
}
static inline void rm_paired_get(const rm_paired *paired, void *here, size_t bytes) {
  const rm_device *device = paired->device;
  if (!device->on_host && bytes) device->get(device->self, here, rm_paired_on_device(paired, here), bytes);
}

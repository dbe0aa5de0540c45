// devices.h: a device (kernels/device.h) as the engine uses it: its failures as codes, the CPU as one, and arrays that the host and the
// device both have.
#pragma once

#include "base/status.h"
#include "device.h"

// The host's own memory and one of its op tables; nothing in it is owned.
rm_device rm_device_cpu(const rm_kernels *kernels);

// RM_E_CAPACITY names what did not fit and what the device has left; RM_E_MEMORY on the CPU, which says so itself; RM_E_DEVICE: a
// fault. `what` is for the message: "the KV cache".
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

// Who uses which of a device's marks.
enum { RM_MARK_FERRY, RM_MARK_FERRY_TOO, RM_MARK_WORDS };

// One block that the host has, and the device has a second time at `there`. The host fills its own and puts runs of it, or gets runs
// and reads them. On the CPU both are one, and put and get are nothing.
typedef struct rm_mirror {
  const rm_device *device;      // view
  char *here, *there;           // owned
  size_t bytes;
} rm_mirror;

rm_code rm_mirror_create(const rm_device *device, size_t bytes, const char *what, rm_mirror *out, rm_error *err);
void rm_mirror_destroy(rm_mirror *mirror);   // safe on a zeroed one
// The device's address of what the host has at `here`; of NULL it is NULL.
static inline void *rm_mirror_there(const rm_mirror *mirror, const void *here) {
  return here ? mirror->there + ((const char *)here - mirror->here) : NULL;
}
static inline void rm_mirror_put(const rm_mirror *mirror, const void *here, size_t bytes) {
  const rm_device *device = mirror->device;
  if (!device->on_host && bytes) device->put(device->self, rm_mirror_there(mirror, here), here, bytes);
}
static inline void rm_mirror_get(const rm_mirror *mirror, void *here, size_t bytes) {
  const rm_device *device = mirror->device;
  if (!device->on_host && bytes) device->get(device->self, here, rm_mirror_there(mirror, here), bytes);
}

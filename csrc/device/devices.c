// devices.c: see devices.h. The CPU's functions complete at once; other devices enqueue the work.
#include "device/devices.h"

#include <stdio.h>
#include <string.h>

#include "base/memory.h"

// ---------------------------------------------------------------------------------------- the CPU
static rm_device_status cpu_alloc(void *, size_t bytes, void **out) {
  *out = rm_map(bytes);
  return *out ? RM_DEVICE_OK : RM_DEVICE_NO_MEMORY;
}

static void cpu_free(void *, void *block, size_t bytes) { rm_unmap(block, bytes); }

static size_t cpu_available(void *) { return rm_memory_available(); }

static void cpu_memcpy(void *, void *to, const void *from, size_t bytes) {
  memcpy(to, from, bytes);
}

static void cpu_copy_2d(void *, void *to, size_t to_pitch, const void *from, size_t from_pitch,
                        size_t width, size_t rows) {
  for (size_t r = 0; r < rows; r++)
    memcpy((char *)to + r * to_pitch, (const char *)from + r * from_pitch, width);
}

static void cpu_zero_2d(void *, void *at, size_t pitch, size_t width, size_t rows) {
  for (size_t r = 0; r < rows; r++) memset((char *)at + r * pitch, 0, width);
}

static void cpu_record_event(void *, int) {}

static rm_device_status cpu_wait_event(void *, int) { return RM_DEVICE_OK; }

static rm_device_status cpu_done(void *) { return RM_DEVICE_OK; }

static int cpu_enter(void *) { return 0; }

static void cpu_leave(void *, int) {}

static const char *cpu_message(void *) { return "no memory"; }

static void cpu_close(void *) {}

rm_device rm_device_cpu(const rm_kernels *kernels) {
  return (rm_device){
      .name = "cpu",
      .on_host = 1,
      .ordinal = -1,
      .kernels = kernels,
      .alloc = cpu_alloc,
      .free = cpu_free,
      .available = cpu_available,
      .copy_to_host = cpu_memcpy,
      .copy_2d = cpu_copy_2d,
      .zero_2d = cpu_zero_2d,
      .record_event = cpu_record_event,
      .wait_event = cpu_wait_event,
      .wait = cpu_done,
      .poll = cpu_done,
      .enter = cpu_enter,
      .leave = cpu_leave,
      .message = cpu_message,
      .close = cpu_close,
  };
}

// ------------------------------------------------------------------------------------- any device
rm_code rm_device_check(const rm_device *device, rm_device_status status, rm_error *err) {
  RM_FAIL_IF(status != RM_DEVICE_OK, RM_E_DEVICE, "%s: %s", device->name,
             device->message(device->self));
  return RM_OK;
}

rm_code rm_device_wait(const rm_device *device, rm_error *err) {
  return rm_device_check(device, device->wait(device->self), err);
}

rm_code rm_device_alloc(const rm_device *device, size_t bytes, const char *what, void **out,
                        rm_error *err) {
  *out = NULL;
  const rm_device_status status =
      bytes ? device->alloc(device->self, bytes, out) : RM_DEVICE_NO_MEMORY;
  if (status == RM_DEVICE_OK) return RM_OK;
  RM_FAIL_IF(device->on_host || !bytes, RM_E_MEMORY, "no memory for %zu bytes of %s", bytes, what);
  if (status != RM_DEVICE_NO_MEMORY) return rm_device_check(device, status, err);
  char why[160];
  // Copied before another call of the device replaces its message.
  snprintf(why, sizeof why, "%s", device->message(device->self));
  return rm_fail(err, RM_E_CAPACITY, "%s takes %s and %s has %s free (%s)", what,
                 rm_say_bytes((double)bytes).text, device->name,
                 rm_say_bytes((double)device->available(device->self)).text, why);
}

void rm_device_free(const rm_device *device, void *block, size_t bytes) {
  if (block) device->free(device->self, block, bytes);
}

rm_code rm_device_alloc_pinned(const rm_device *device, size_t bytes, const char *what, void **out,
                               rm_error *err) {
  const rm_device_status status = device->alloc_pinned(device->self, bytes, out);
  if (status != RM_DEVICE_NO_MEMORY) return rm_device_check(device, status, err);
  return rm_fail(err, RM_E_MEMORY, "no host memory for %zu bytes of %s: %s", bytes, what,
                 device->message(device->self));
}

// ------------------------------------------------------------------------------- mirrored buffers
rm_code rm_mirrored_create(const rm_device *device, size_t bytes, const char *what,
                           rm_mirrored_buffer *out, rm_error *err) {
  void *there = NULL;
  *out = (rm_mirrored_buffer){0};
  rm_code code = rm_device_alloc(device, bytes, what, &there, err);
  void *here = there;
  if (!code && !device->on_host) code = rm_device_alloc_pinned(device, bytes, what, &here, err);
  if (code) {
    rm_device_free(device, there, bytes);
    return code;
  }
  *out = (rm_mirrored_buffer){device, here, there, bytes};
  return RM_OK;
}

void rm_mirrored_destroy(rm_mirrored_buffer *mirrored) {
  const rm_device *device = mirrored->device;
  if (!device) return;
  device->free(device->self, mirrored->on_device, mirrored->bytes);
  if (!device->on_host) device->free_pinned(device->self, mirrored->host, mirrored->bytes);
  *mirrored = (rm_mirrored_buffer){0};
}

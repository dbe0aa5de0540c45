// devices.c: see devices.h. The CPU's functions do at once what another device enqueues.
#include "device/devices.h"

#include <stdio.h>
#include <string.h>

#include "base/memory.h"

// ---------------------------------------------------------------------------------------------- the CPU
static rm_device_status cpu_map(void *self, size_t bytes, void **out) {
  (void)self;
  *out = rm_map(bytes);
  return *out ? RM_DEVICE_OK : RM_DEVICE_NO_MEMORY;
}

static void cpu_unmap(void *self, void *block, size_t bytes) {
  (void)self;
  rm_unmap(block, bytes);
}

static size_t cpu_available(void *self) {
  (void)self;
  return rm_memory_available();
}

static int cpu_ordinal_of(void *self, const void *address) {
  (void)self, (void)address;
  return -1;
}

static void cpu_move(void *self, void *to, const void *from, size_t bytes) {
  (void)self;
  memcpy(to, from, bytes);
}

static void cpu_copy(void *self, void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t rows) {
  (void)self;
  for (size_t r = 0; r < rows; r++) memcpy((char *)to + r * to_pitch, (const char *)from + r * from_pitch, width);
}

static void cpu_fetch(void *self, void *to, size_t to_pitch, const void *from, int ordinal, size_t from_pitch, size_t width, size_t rows) {
  (void)ordinal;
  cpu_copy(self, to, to_pitch, from, from_pitch, width, rows);
}

static void cpu_zero(void *self, void *at, size_t pitch, size_t width, size_t rows) {
  (void)self;
  for (size_t r = 0; r < rows; r++) memset((char *)at + r * pitch, 0, width);
}

static void cpu_record_event(void *self, int number) { (void)self, (void)number; }

static rm_device_status cpu_wait_event(void *self, int number) {
  (void)self, (void)number;
  return RM_DEVICE_OK;
}

static rm_device_status cpu_done(void *self) {
  (void)self;
  return RM_DEVICE_OK;
}

static const char *cpu_refuses(void *self, void *stream) {
  (void)self, (void)stream;
  return NULL;
}

static void cpu_order(void *self, void *stream) { (void)self, (void)stream; }

static int cpu_enter(void *self) {
  (void)self;
  return 0;
}

static void cpu_leave(void *self, int saved) { (void)self, (void)saved; }

static const char *cpu_message(void *self) {
  (void)self;
  return "no memory";
}

static void cpu_close(void *self) { (void)self; }

rm_device rm_device_cpu(const rm_kernels *kernels) {
  return (rm_device){
      .name = "cpu",
      .on_host = 1,
      .ordinal = -1,
      .kernels = kernels,
      .map = cpu_map,
      .unmap = cpu_unmap,
      .pin = cpu_map,
      .unpin = cpu_unmap,
      .available = cpu_available,
      .ordinal_of = cpu_ordinal_of,
      .put = cpu_move,
      .get = cpu_move,
      .fetch = cpu_fetch,
      .copy = cpu_copy,
      .zero = cpu_zero,
      .record_event = cpu_record_event,
      .wait_event = cpu_wait_event,
      .query_event = cpu_wait_event,
      .wait = cpu_done,
      .poll = cpu_done,
      .follow = cpu_order,
      .lead = cpu_order,
      .refuses = cpu_refuses,
      .enter = cpu_enter,
      .leave = cpu_leave,
      .message = cpu_message,
      .close = cpu_close,
  };
}

// ---------------------------------------------------------------------------------------------- any device
rm_code rm_device_check(const rm_device *device, rm_device_status status, rm_error *err) {
  if (status == RM_DEVICE_OK) return RM_OK;
  return rm_fail(err, RM_E_DEVICE, "%s: %s", device->name, device->message(device->self));
}

rm_code rm_device_wait(const rm_device *device, rm_error *err) { return rm_device_check(device, device->wait(device->self), err); }

rm_code rm_device_map(const rm_device *device, size_t bytes, const char *what, void **out, rm_error *err) {
  *out = NULL;
  const rm_device_status status = bytes ? device->map(device->self, bytes, out) : RM_DEVICE_NO_MEMORY;
  if (status == RM_DEVICE_OK) return RM_OK;
  if (device->on_host || !bytes) return rm_fail(err, RM_E_MEMORY, "no memory for %zu bytes of %s", bytes, what);
  if (status != RM_DEVICE_NO_MEMORY) return rm_device_check(device, status, err);
  char why[160];
  snprintf(why, sizeof why, "%s", device->message(device->self));   // before it is asked anything else
  return rm_fail(err, RM_E_CAPACITY, "%s takes %s and %s has %s free (%s)", what, rm_say_bytes((double)bytes).text, device->name,
                 rm_say_bytes((double)device->available(device->self)).text, why);
}

void rm_device_unmap(const rm_device *device, void *block, size_t bytes) {
  if (block) device->unmap(device->self, block, bytes);
}

// ---------------------------------------------------------------------------------------------- paired buffers
rm_code rm_paired_create(const rm_device *device, size_t bytes, const char *what, rm_paired *out, rm_error *err) {
  void *there = NULL, *here = NULL;
  *out = (rm_paired){0};
  const rm_code code = rm_device_map(device, bytes, what, &there, err);
  if (code) return code;
  if (device->on_host) here = there;
  else if (device->pin(device->self, bytes, &here) != RM_DEVICE_OK) {
    device->unmap(device->self, there, bytes);
    return rm_fail(err, RM_E_MEMORY, "no host memory for %zu bytes of %s: %s", bytes, what, device->message(device->self));
  }
  *out = (rm_paired){device, here, there, bytes};
  return RM_OK;
}

void rm_paired_destroy(rm_paired *paired) {
  const rm_device *device = paired->device;
  if (!device) return;
  device->unmap(device->self, paired->on_device, paired->bytes);
  if (!device->on_host) device->unpin(device->self, paired->host, paired->bytes);
  *paired = (rm_paired){0};
}

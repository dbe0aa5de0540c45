// host_offload.c: weights that sleep on the host; see gpu.h.
//
// The host copy is pageable: pinning all of it would take longer than the copy, and pinned memory
// cannot be swapped out while the trainer uses the GPU. Both directions use two pinned halves: the
// device copies one while the threads copy the other. It uses the events of the staging buffer: a
// sync, which also uses them, cannot be open.
#include "base/checked.h"
#include "base/memory.h"
#include "gpu/gpu.h"

enum { MIN_HALF_BYTES = 64 << 10, MAX_HALF_BYTES = 16 << 20 };

typedef struct transfer {
  const rm_device *device;
  const rm_ctx *ctx;
  char *host, *there; // [bytes] each
  size_t bytes;
  char *halves; // [2][half_bytes], pinned
  size_t half_bytes;
} transfer;

static size_t n_pieces(const transfer *p) { return (p->bytes + p->half_bytes - 1) / p->half_bytes; }
static size_t piece_bytes(const transfer *p, size_t i) {
  return i + 1 < n_pieces(p) ? p->half_bytes : p->bytes - i * p->half_bytes;
}
static char *half(const transfer *p, size_t i) { return p->halves + i % 2 * p->half_bytes; }
static int event(size_t i) { return RM_EVENT_STAGING + (int)(i % 2); }

static rm_code out(const transfer *p, rm_error *err) {
  const rm_device *device = p->device;
  rm_code code = RM_OK;
  for (size_t i = 0, n = n_pieces(p); i <= n && !code; i++) {
    if (i < n) {
      device->copy_to_host(device->self, half(p, i), p->there + i * p->half_bytes,
                           piece_bytes(p, i));
      device->record_event(device->self, event(i));
    }
    if (i == 0) continue;
    code = rm_device_check(device, device->wait_event(device->self, event(i - 1)), err);
    if (!code)
      rm_copy_block(p->host + (i - 1) * p->half_bytes, half(p, i - 1), piece_bytes(p, i - 1),
                    p->ctx);
  }
  return code;
}

static rm_code back(const transfer *p, rm_error *err) {
  const rm_device *device = p->device;
  for (size_t i = 0, n = n_pieces(p); i < n; i++) {
    // The piece two before this one used the same half.
    const rm_code code = rm_device_check(device, device->wait_event(device->self, event(i)), err);
    if (code) return code;
    rm_copy_block(half(p, i), p->host + i * p->half_bytes, piece_bytes(p, i), p->ctx);
    device->copy_to_device(device->self, p->there + i * p->half_bytes, half(p, i),
                           piece_bytes(p, i));
    device->record_event(device->self, event(i));
  }
  return rm_device_wait(device, err);
}

// `way` is `out` or `back`.
static rm_code pass(const rm_device *device, const rm_ctx *ctx, const char *host, const char *there,
                    size_t bytes, rm_code (*way)(const transfer *, rm_error *), rm_error *err) {
  const size_t half_bytes =
      (size_t)rm_min64(rm_max64((int64_t)bytes / 4, MIN_HALF_BYTES), MAX_HALF_BYTES);
  void *halves;
  rm_code code = rm_device_alloc_pinned(device, 2 * half_bytes, "a staging buffer", &halves, err);
  if (code) return code;
  code = way(&(transfer){device, ctx, (char *)(uintptr_t)host, (char *)(uintptr_t)there, bytes,
                         halves, half_bytes},
             err);
  device->free_pinned(device->self, halves, 2 * half_bytes); // waits for enqueued copies
  return code;
}

rm_code rm_offload_block(const rm_device *device, const char *block, size_t bytes,
                         const rm_ctx *ctx, char **copy, rm_error *err) {
  const size_t available = rm_memory_available(); // mmap overcommits
  *copy = NULL;
  if (bytes > available)
    return rm_fail(err, RM_E_CAPACITY,
                   "keeping the weights takes %s of host memory, and %s is available",
                   rm_say_bytes((double)bytes).text, rm_say_bytes((double)available).text);
  char *host = rm_map(bytes);
  if (!host) return rm_no_memory(err, "the weights on the host", bytes);
  const rm_code code = pass(device, ctx, host, block, bytes, out, err);
  if (code) rm_unmap(host, bytes);
  else *copy = host;
  return code;
}

rm_code rm_restore_block(const rm_device *device, const char *copy, size_t bytes, const rm_ctx *ctx,
                         char **block, rm_error *err) {
  void *there;
  *block = NULL;
  rm_code code = rm_device_alloc(device, bytes, "waking the weights", &there, err);
  if (code) return code;
  code = pass(device, ctx, copy, there, bytes, back, err);
  if (code) rm_device_free(device, there, bytes);
  else *block = there;
  return code;
}

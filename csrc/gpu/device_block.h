// device_block.h: blocks (comm.h) of device memory for transports: packs rows into contiguous
// bytes, unpacks them, and copies this rank's own block. All functions only enqueue work.
#pragma once

#include "comm/block.h"
#include "device.h"

static inline void rm_device_pack(const rm_device *device, const rm_block *block, char *run) {
  if (rm_block_bytes(block) == 0) return;
  device->copy_2d(device->self, run, block->row_bytes, block->base,
                  block->rows > 1 ? block->ld : block->row_bytes, block->row_bytes,
                  (size_t)block->rows);
}

static inline void rm_device_unpack(const rm_device *device, const char *run,
                                    const rm_block *block) {
  if (rm_block_bytes(block) == 0) return;
  device->copy_2d(device->self, block->base, block->rows > 1 ? block->ld : block->row_bytes, run,
                  block->row_bytes, block->row_bytes, (size_t)block->rows);
}

// rm_block_copy in device memory.
static inline void rm_device_own(const rm_device *device, const rm_block *from,
                                 const rm_block *to) {
  const size_t width = rm_block_is_flat(to) ? from->row_bytes : to->row_bytes;
  if (rm_block_bytes(to) == 0 || from->base == to->base) return;
  device->copy_2d(device->self, to->base, rm_block_is_flat(to) ? width : to->ld, from->base,
                  rm_block_is_flat(from) ? width : from->ld, width, rm_block_bytes(to) / width);
}

// Sets at[r] to the contiguous bytes of the block of each other rank: a range of `run`, or the
// block itself if it is contiguous and in_place is set; NULL: no bytes. is_one: all are one block.
// Returns the bytes of `run` used.
static inline size_t rm_device_place(const rm_block blocks[], int n, int me, int is_one,
                                     int in_place, char *run, char *at[]) {
  size_t used = 0;
  char *shared = NULL;
  for (int r = 0; r < n; r++) {
    at[r] = NULL;
    if (r == me || rm_block_bytes(&blocks[r]) == 0) continue;
    if (in_place && rm_block_is_flat(&blocks[r])) at[r] = blocks[r].base;
    else if (shared) at[r] = shared;
    else {
      at[r] = run + used;
      used += rm_block_bytes(&blocks[r]);
      if (is_one) shared = at[r];
    }
  }
  return used;
}

// Pack what was placed in a run, once for all ranks if it is one block; unpack it.
static inline void rm_device_pack_all(const rm_device *device, const rm_block send[], int n,
                                      char *const at[]) {
  for (int r = 0; r < n; r++) {
    int is_packed = !at[r] || at[r] == send[r].base;
    for (int i = 0; i < r && !is_packed; i++) is_packed = at[i] == at[r];
    if (!is_packed) rm_device_pack(device, &send[r], at[r]);
  }
}
static inline void rm_device_unpack_all(const rm_device *device, const rm_block recv[], int n,
                                        char *const at[]) {
  for (int r = 0; r < n; r++)
    if (at[r] && at[r] != recv[r].base) rm_device_unpack(device, at[r], &recv[r]);
}

// RM_E_CAPACITY: one of the runs is longer than the capacity. what: "bytes", for the message.
static inline rm_code rm_device_check_room(rm_comm_op op, const char *what, int rank,
                                           size_t capacity, size_t sent, size_t received,
                                           rm_error *err) {
  const size_t most = sent > received ? sent : received;
  if (most <= capacity) return RM_OK;
  return rm_fail(
      err, RM_E_CAPACITY, "%s: expected at most %zu %s in one exchange, got %zu that rank %d %s",
      rm_comm_op_name(op), capacity, what, most, rank, sent == most ? "sends" : "receives");
}

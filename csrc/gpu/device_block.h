// device_block.h: blocks (comm.h) of device memory for transports: packs rows into contiguous
// bytes, unpacks them, and copies this rank's own block. All functions only enqueue work. A
// contiguous block needs no packing.
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

// Whether rm_device_own needs a buffer of the block's bytes: when both blocks are strided and their
// rows differ in length.
static inline int rm_device_own_needs_run(const rm_block *from, const rm_block *to) {
  return rm_block_bytes(to) > 0 && from->base != to->base && !rm_block_is_flat(from) &&
         !rm_block_is_flat(to) && from->row_bytes != to->row_bytes;
}

// rm_block_copy in device memory. `run`: the buffer, if rm_device_own_needs_run.
static inline void rm_device_own(const rm_device *device, const rm_block *from, const rm_block *to,
                                 char *run) {
  if (rm_block_bytes(to) == 0 || from->base == to->base) return;
  if (rm_block_is_flat(to)) rm_device_pack(device, from, to->base);
  else if (rm_block_is_flat(from)) rm_device_unpack(device, from->base, to);
  else if (from->row_bytes == to->row_bytes)
    device->copy_2d(device->self, to->base, to->ld, from->base, from->ld, to->row_bytes,
                    (size_t)to->rows);
  else {
    rm_device_pack(device, from, run);
    rm_device_unpack(device, run, to);
  }
}

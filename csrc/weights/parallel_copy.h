// parallel_copy.h: the copies of a push, rows of tensors into rows of parameters. They are collected first and made together, in units of
// a few hundred KiB that the threads take from a shared counter: many small tensors cost one wake-up of the threads, and a thread that
// is scheduled late delays one unit at most.
//
// On a device the device's pack op makes the units. Tensors in host memory reach it through a double-buffered staging buffer: while the
// device reads one half, the host fills the other. Tensors of another GPU are copied into the same halves by the device.
// Used by the thread that owns the store (sync.h).
#pragma once

#include "base/status.h"
#include "device/devices.h"
#include "weights/sync.h"

// Double-buffered pinned host-to-device staging. Unused on the CPU.
typedef struct rm_staging {
  const rm_device *device;      // view
  size_t half_bytes;            // most bytes of one unit's source
  rm_paired halves;             // owned, as the next; created at first use
  rm_paired found;              // rm_pack_found of each unit
  int half;                     // the half being filled
  size_t used;                  // bytes of it in use
} rm_staging;

size_t rm_staging_bytes(const rm_staging *staging);   // of device memory, once it was used
void rm_staging_free(rm_staging *staging);   // the device must be idle

typedef struct rm_unit {
  rm_pack_args args;            // inputs, and results once it was made; their indices count from args.index0
  const rm_entry *entry;        // view
  rm_piece piece;
  int64_t twin;                 // the tied parameter to compare with; −1: write
  int counted;                  // this rank counts it in the mesh's digest
  int ordinal;                  // CUDA device whose memory holds args.src; −1: the host
} rm_unit;

typedef struct rm_units {
  rm_unit *list;                // owned; in the order added, rows ascending
  int64_t n, capacity;
} rm_units;

// Cuts `whole` into units that share no tile of the destination, and adds them.
rm_code rm_units_add(rm_units *units, const rm_unit *whole, rm_error *err);
// Makes all of them and waits. RM_E_DEVICE, RM_E_MEMORY, RM_E_CAPACITY: on a device only; the destination is undefined then.
rm_code rm_units_make(const rm_units *units, rm_staging *staging, const rm_ctx *ctx, rm_error *err);
void rm_units_free(rm_units *units);

void rm_copy_block(char *to, const char *from, size_t bytes, const rm_ctx *ctx);   // memcpy by all threads

// parallel_copy.h: what a push has to copy, rows of tensors into rows of parameters. Copies are gathered first and made together, in units
// of some hundred KiB that the threads take one after the other: many small tensors then cost one meeting of the threads, and a
// thread that the system runs late costs no more than its unit.
//
// A device makes them itself. What it cannot read goes there through two halves of a pinned block by turns: while the device reads one,
// the host fills the other. Another device's tensors come into the same halves, without the host.
#pragma once

#include "base/status.h"
#include "device/devices.h"
#include "weights/sync.h"

// The way to a device for what is not in its memory; nothing where the memory is one.
typedef struct rm_ferry {
  const rm_device *device;      // view
  size_t half_bytes;            // a unit's tensor data at most
  rm_mirror halves;             // owned, as the next; made when first used
  rm_mirror found;              // rm_pack_found of each unit
  int half;                     // the one being filled …
  size_t used;                  // … so far
} rm_ferry;

size_t rm_ferry_bytes(const rm_ferry *ferry);   // of the device, once it was used
void rm_ferry_free(rm_ferry *ferry);   // the device has nothing left to do with it

typedef struct rm_unit {
  rm_pack_args args;            // its results too, once it was made; indices in them count from args.index0
  const rm_entry *entry;        // view
  rm_piece piece;
  int64_t twin;                 // the parameter that it is compared with, −1: it is written
  int counted;                  // this rank answers for it in the digest
  int ordinal;                  // of the device that has args.src; −1: the host has it
} rm_unit;

typedef struct rm_units {
  rm_unit *list;                // owned; in the order in which they were added, rows ascending
  int64_t n, capacity;
} rm_units;

// Cuts `whole` into units that share no tile of the destination, and adds them.
rm_code rm_units_add(rm_units *units, const rm_unit *whole, rm_error *err);
// RM_E_DEVICE, RM_E_MEMORY and RM_E_CAPACITY: of a device alone; what was written is undefined then.
rm_code rm_units_make(const rm_units *units, rm_ferry *ferry, const rm_ctx *ctx, rm_error *err);
void rm_units_free(rm_units *units);

void rm_copy_block(char *to, const char *from, size_t bytes, const rm_ctx *ctx);   // memcpy by all threads

// units.h: what a push has to copy, rows of tensors into rows of parameters. Copies are gathered first and made together, in units
// of some hundred KiB that the threads take one after the other: many small tensors then cost one meeting of the threads, and a
// thread that the system runs late costs no more than its unit.
#pragma once

#include "base/status.h"
#include "weights/sync.h"

typedef struct rm_unit {
  rm_pack_args args;            // its results too, once it was made; indices in them count from args.index0
  const rm_entry *entry;        // view
  rm_piece piece;
  int64_t twin;                 // the parameter that it is compared with, −1: it is written
  int counted;                  // this rank answers for it in the digest
} rm_unit;

typedef struct rm_units {
  rm_unit *list;                // owned; in the order in which they were added, rows ascending
  int64_t n, capacity;
} rm_units;

// Cuts `whole` into units that share no tile of the destination, and adds them.
rm_code rm_units_add(rm_units *units, const rm_unit *whole, rm_error *err);
void rm_units_make(const rm_units *units, const rm_kernels *kernels, const rm_ctx *ctx);
void rm_units_free(rm_units *units);

void rm_copy_block(char *to, const char *from, size_t bytes, const rm_ctx *ctx);   // memcpy by all threads

// block.h: copies of blocks (comm.h). A block's bytes are its rows, one after another; a range of
// them may begin and end inside a row, so that a transport can split a block wherever its buffer
// ends.
#pragma once

#include <string.h>

#include "base/checked.h"
#include "comm/comm.h"

enum { RM_COPY_PIECE = 2048 };

// memcpy in pieces of 2 KiB. For larger sizes memcpy uses `rep movsb`, which on AMD family 25
// copies 2 GB/s instead of 40 where the target is 1 to 63 bytes beyond the source modulo 4096, for
// example from a page of a buffer to a large array of malloc or NumPy.
static inline void rm_copy(void *to, const void *from, size_t n) {
  for (size_t at = 0, length; at < n; at += length) {
    length = n - at < RM_COPY_PIECE ? n - at : RM_COPY_PIECE;
    // Hides the bound from the compiler, which would inline `rep movsb` for it (and sanitizers
    // would not check that access).
    __asm__("" : "+r"(length));
    memcpy((char *)to + at, (const char *)from + at, length);
  }
}

static inline int rm_block_is_flat(const rm_block *block) {
  return block->rows == 1 || block->ld == block->row_bytes;
}

// Copies bytes [at, at + n) of the block from `flat` (into = 1) or to `flat` (into = 0). The range
// lies in the block.
static inline void rm_block_move(const rm_block *block, size_t at, char *flat, size_t n, int into) {
  if (n == 0) return;
  char *row = block->base;
  size_t column = at, length = n; // a flat block counts as one row
  const int is_flat = rm_block_is_flat(block);
  if (!is_flat) {
    row += at / block->row_bytes * block->ld;
    column = at % block->row_bytes;
  }
  for (; n > 0; n -= length, flat += length, row += block->ld, column = 0) {
    if (!is_flat) length = block->row_bytes - column < n ? block->row_bytes - column : n;
    if (into) rm_copy(row + column, flat, length);
    else rm_copy(flat, row + column, length);
  }
}

// Copies a block to another with the same number of bytes; does nothing if both have the same base.
static inline void rm_block_copy(const rm_block *from, const rm_block *to) {
  if (rm_block_bytes(to) == 0 || from->base == to->base) return;
  if (rm_block_is_flat(to)) {
    rm_block_move(from, 0, to->base, rm_block_bytes(to), 0);
    return;
  }
  for (int64_t row = 0; row < to->rows; row++)
    rm_block_move(from, (size_t)row * to->row_bytes, (char *)to->base + (size_t)row * to->ld,
                  to->row_bytes, 0);
}

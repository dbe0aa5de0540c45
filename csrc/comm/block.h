// block.h: what transports and comm.c do with the blocks of comm.h. A block's bytes are its rows laid end to end; a piece of them
// may begin and end inside a row, so that a transport can cut a block wherever its buffer ends.
#pragma once

#include <string.h>

#include "base/checked.h"
#include "comm/comm.h"

enum { RM_COPY_PIECE = 2048 };

// memcpy in pieces. From some thousand bytes on, memcpy is one string instruction on recent processors, and on AMD's family 25 that
// copies 2 GB/s instead of 40 where the target lies 1 … 63 bytes beyond the source modulo 4096: from a page of a buffer to what malloc
// or NumPy returns for large arrays. Below that size it is a loop of vectors.
static inline void rm_copy(void *to, const void *from, size_t n) {
  for (size_t at = 0, length; at < n; at += length) {
    length = n - at < RM_COPY_PIECE ? n - at : RM_COPY_PIECE;
    __asm__("" : "+r"(length));   // a compiler that knows how small it is writes the string instruction here, and no sanitizer sees it
    memcpy((char *)to + at, (const char *)from + at, length);
  }
}

static inline int rm_block_is_flat(const rm_block *block) { return block->rows == 1 || block->ld == block->row_bytes; }

// 1 when bytes [at, at + n) of the block are copied `into` the block from `flat`, 0 when out of it. The range lies in the block.
static inline void rm_block_move(const rm_block *block, size_t at, char *flat, size_t n, int into) {
  if (n == 0) return;
  char *row = block->base;
  size_t column = at, length = n;                 // a flat block is one row
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

static inline void rm_block_read(const rm_block *block, size_t at, void *to, size_t n) { rm_block_move(block, at, to, n, 0); }
static inline void rm_block_write(const rm_block *block, size_t at, const void *from, size_t n) {
  rm_block_move(block, at, (char *)(uintptr_t)from, n, 1);
}

// As many bytes from one block to another of the same size; nothing when they are the same memory.
static inline void rm_block_copy(const rm_block *from, const rm_block *to) {
  if (rm_block_bytes(to) == 0 || from->base == to->base) return;
  if (rm_block_is_flat(to)) {
    rm_block_read(from, 0, to->base, rm_block_bytes(to));
    return;
  }
  for (int64_t row = 0; row < to->rows; row++)
    rm_block_read(from, (size_t)row * to->row_bytes, (char *)to->base + (size_t)row * to->ld, to->row_bytes);
}

// Whether one block lies where the other does.
static inline int rm_block_same(const rm_block *a, const rm_block *b) {
  return a->base == b->base && a->rows == b->rows && a->row_bytes == b->row_bytes && a->ld == b->ld;
}

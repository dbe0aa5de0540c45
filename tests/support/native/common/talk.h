// talk.h: calls of a group that every rank can predict. The contents of call n (the operation, each
// block's size, its rows at either end, its bytes) are a function of a seed, n, the sender and the
// receiver. So each rank makes its own blocks, and knows what must arrive without communication.
//
//   talk t = talk_begin(comm, seed, 3000);            // blocks of up to 3000 bytes
//   while (!(code = talk_call(&t, n++, &err))) …      // ends the program when what came is not
//                                                     what was said talk_end(&t);
//
// Blocks are flat and strided, cut into other rows by another rank, empty, or larger than a buffer.
// Bytes between the rows of what is received and around it must stay as they were.
#pragma once

#include <stdlib.h>
#include <string.h>

#include "comm/shm/region.h"
#include "common/tiny.h"

enum { TALK_RANKS = 64, TALK_SLACK = 9, TALK_GUARD = 0xA5 };

typedef enum talk_kind {
  TALK_BARRIER,
  TALK_GATHER,
  TALK_COLUMNS,
  TALK_EXCHANGE,
  TALK_N_KIND
} talk_kind;

typedef struct talk {
  rm_comm *comm; // view
  uint64_t seed;
  size_t most, room; // bytes of a block; and of the memory of one with its gaps
  char *sent, *received; // owned: [size][room] each
  uint64_t bytes_sent, bytes_received; // that the comm should have counted
  long kinds[TALK_N_KIND];
  int lie; // plant: one byte of every call is wrong
} talk;

static inline uint64_t talk_bits(const talk *t, uint64_t n, uint64_t what, int from, int to) {
  return tiny_mix(tiny_mix(t->seed + n * 0x9E3779B97F4A7C15u) ^
                  (what << 48 | (uint64_t)from << 24 | (uint64_t)to));
}

static inline talk talk_begin(rm_comm *comm, uint64_t seed, size_t most) {
  talk t = {.comm = comm, .seed = seed, .most = most, .room = most * (1 + TALK_SLACK) + 64};
  t.sent = malloc((size_t)rm_comm_size(comm) * t.room);
  t.received = malloc((size_t)rm_comm_size(comm) * t.room);
  if (!t.sent || !t.received) tiny_die("no memory for %zu bytes", t.room);
  return t;
}

static inline void talk_end(talk *t) {
  free(t->sent);
  free(t->received);
}

// ----------------------------------------------------------------------------------- what is said
static inline char talk_byte(uint64_t key, size_t i) {
  return (char)(tiny_mix(key + i / 8) >> 8 * (i % 8));
}

static inline size_t talk_size(uint64_t bits, size_t most) {
  static const size_t edges[] = {0, 1, 63, 64, 65, 127};
  const size_t any = (size_t)(bits >> 8);
  switch (bits % 8) {
    case 0: return 0;
    case 1:
    case 2: return edges[any % 6] < most ? edges[any % 6] : most;
    case 3:
    case 4: return any % (most + 1);
    default: return any % (most < 200 ? most + 1 : 200);
  }
}

// The rows of a block of `bytes` bytes at one end: a divisor of it in a row, with a gap after each.
static inline rm_block talk_shape(uint64_t bits, size_t bytes, char *base) {
  size_t row = bytes;
  for (size_t d = 1 + bits % 13; d > 1 && row == bytes; d--)
    if (bytes % d == 0) row = bits >> 8 & 1 ? d : bytes / d;
  if (bytes == 0) return (rm_block){bits & 1 ? base : NULL, bits & 2 ? 3 : 0, 0, 0};
  return (rm_block){base, (int64_t)(bytes / row), row, row + (bits >> 9) % (TALK_SLACK + 1)};
}

static inline size_t talk_at(const rm_block *block, size_t i) {
  return i / block->row_bytes * block->ld + i % block->row_bytes;
}

static inline void talk_write(const rm_block *block, uint64_t key) {
  for (size_t i = 0; i < rm_block_bytes(block); i++)
    ((char *)block->base)[talk_at(block, i)] = talk_byte(key, i);
}

// `memory`, where the block begins, holds what was said in its rows and the guard elsewhere.
static inline void talk_check(const rm_block *block, uint64_t key, const char *memory, size_t room,
                              uint64_t n, int from) {
  size_t done = 0;
  const size_t last = rm_block_bytes(block) ? talk_at(block, rm_block_bytes(block) - 1) : 0;
  for (size_t at = 0; at < room && at < last + 64; at++) {
    const int inside = done < rm_block_bytes(block) && at == talk_at(block, done);
    const char want = inside ? talk_byte(key, done++) : (char)TALK_GUARD;
    if (memory[at] != want)
      tiny_die("call %llu: byte %zu of what rank %d sends is %d, wanted %d%s",
               (unsigned long long)n, at, from, memory[at], want,
               inside ? "" : " as it was before");
  }
}

// -------------------------------------------------------------------------------------- saying it
static inline rm_code talk_exchange(talk *t, uint64_t n, rm_error *err) {
  const int size = rm_comm_size(t->comm), me = rm_comm_rank(t->comm);
  static const rm_comm_op ops[] = {RM_COMM_ALL_TO_ALL, RM_COMM_DISPATCH, RM_COMM_COMBINE,
                                   RM_COMM_STEP, RM_COMM_VOTE};
  rm_block send[TALK_RANKS], recv[TALK_RANKS];
  memset(t->received, TALK_GUARD, (size_t)size * t->room);
  for (int r = 0; r < size; r++) {
    const size_t out = talk_size(talk_bits(t, n, 1, me, r), t->most),
                 in = talk_size(talk_bits(t, n, 1, r, me), t->most);
    send[r] = talk_shape(talk_bits(t, n, 2, me, r), out, t->sent + (size_t)r * t->room);
    recv[r] =
        talk_shape(talk_bits(t, n, r == me ? 2 : 3, r, me), in, t->received + (size_t)r * t->room);
    talk_write(&send[r], talk_bits(t, n, 4, me, r));
    if (t->lie && out) *(char *)send[r].base ^= 1;
    if (r == me) continue;
    t->bytes_sent += out;
    t->bytes_received += in;
  }
  const rm_code code =
      rm_comm_exchange(t->comm, ops[talk_bits(t, n, 5, 0, 0) % 5], send, recv, err);
  for (int r = 0; r < size && !code; r++)
    talk_check(&recv[r], talk_bits(t, n, 4, r, me), t->received + (size_t)r * t->room, t->room, n,
               r);
  return code;
}

// A group of one rank.
static inline rm_code talk_alone(rm_comm **out, rm_error *err) {
  const rm_region_options options = {.world = 1, .n_groups = 1, .buffer_bytes = 64, .timeout = 60};
  rm_region *region;
  *out = NULL;
  rm_code code = rm_region_create(&options, &region, err);
  if (code) return code;
  code = rm_region_comm(region, 0, (const int32_t[]){0}, 1, 0, out, err);
  rm_region_release(region);
  return code;
}

// all_gather of bytes[r] bytes of each rank r. `send` may point to this rank's range of `out`.
static inline rm_code talk_all_gather(rm_comm *comm, const void *send, void *out,
                                      const size_t bytes[], rm_error *err) {
  rm_block *recv = rm_comm_blocks(comm) + rm_comm_size(comm);
  const size_t own = bytes[rm_comm_rank(comm)];
  char *at = out;
  for (int r = 0; r < rm_comm_size(comm); at += bytes[r++])
    recv[r] = (rm_block){at, bytes[r] > 0, bytes[r], bytes[r]};
  return rm_comm_gather(comm, (rm_block){(void *)(uintptr_t)send, own > 0, own, own}, recv, err);
}

// all_gather of columns, in place: rank r has bytes [first[r], first[r] + bytes[r]) of each of
// `rows` rows, which are ld bytes apart.
static inline rm_code talk_gather_columns(rm_comm *comm, void *matrix, int64_t rows, size_t ld,
                                          const size_t first[], const size_t bytes[],
                                          rm_error *err) {
  rm_block *recv = rm_comm_blocks(comm) + rm_comm_size(comm);
  for (int r = 0; r < rm_comm_size(comm); r++)
    recv[r] = (rm_block){(char *)matrix + first[r], rows, bytes[r], ld};
  return rm_comm_gather(comm, recv[rm_comm_rank(comm)], recv, err);
}

// All of rank r's bytes one after another, or its columns of a matrix.
static inline rm_code talk_gather(talk *t, uint64_t n, int columns, rm_error *err) {
  const int size = rm_comm_size(t->comm), me = rm_comm_rank(t->comm);
  const int64_t rows = columns ? 1 + (int64_t)(talk_bits(t, n, 6, 0, 0) % 7) : 1;
  const size_t room = (size_t)size * t->room;
  size_t bytes[TALK_RANKS], first[TALK_RANKS], ld = 0;
  for (int r = 0; r < size; r++) {
    bytes[r] = talk_size(talk_bits(t, n, 7, r, 0), t->most) / (size_t)rows;
    first[r] = ld;
    ld += bytes[r];
  }
  ld += columns ? talk_bits(t, n, 8, 0, 0) % 5 : 0;
  memset(t->received, TALK_GUARD, room);
  const rm_block own = {t->received + first[me], rows, bytes[me], ld},
                 copy = {t->sent, 1, bytes[me], bytes[me]};
  const int in_place = columns || talk_bits(t, n, 9, me, 0) & 1;
  talk_write(in_place ? &own : &copy, talk_bits(t, n, 10, me, 0));
  if (t->lie && bytes[me]) *(char *)(in_place ? own.base : copy.base) ^= 1;
  const rm_code code =
      columns ? talk_gather_columns(t->comm, t->received, rows, ld, first, bytes, err)
              : talk_all_gather(t->comm, in_place ? own.base : t->sent, t->received, bytes, err);
  for (size_t at = 0; at < room && !code; at++) {
    const size_t row = ld ? at / ld : 0, column = ld ? at % ld : at;
    int r = 0;
    while (r < size && !(column >= first[r] && column < first[r] + bytes[r])) r++;
    const int inside = r < size && row < (size_t)rows;
    const char want = inside
                          ? talk_byte(talk_bits(t, n, 10, r, 0), row * bytes[r] + column - first[r])
                          : (char)TALK_GUARD;
    if (t->received[at] != want)
      tiny_die("call %llu: byte %zu of a gather is %d, wanted %d", (unsigned long long)n, at,
               t->received[at], want);
    if (row >= (size_t)rows && at % 64 == 0 && at + 4096 < room)
      at += 1021; // the rest of the memory by samples
  }
  for (int r = 0; r < size; r++) {
    t->bytes_sent += r == me ? 0 : (size_t)rows * bytes[me];
    t->bytes_received += r == me ? 0 : (size_t)rows * bytes[r];
  }
  return code;
}

static inline talk_kind talk_kind_of(const talk *t, uint64_t n) {
  return (talk_kind)(talk_bits(t, n, 14, 0, 0) % TALK_N_KIND);
}

static inline rm_code talk_call(talk *t, uint64_t n, rm_error *err) {
  const talk_kind kind = talk_kind_of(t, n);
  t->kinds[kind]++;
  switch (kind) {
    case TALK_BARRIER: return rm_comm_barrier(t->comm, err);
    case TALK_GATHER: return talk_gather(t, n, 0, err);
    case TALK_COLUMNS: return talk_gather(t, n, 1, err);
    default: return talk_exchange(t, n, err);
  }
}

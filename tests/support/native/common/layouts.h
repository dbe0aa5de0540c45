// layouts.h: tensors laid out in memory in every way that strides allow, in a buffer between two
// inaccessible pages, and the values of their elements by definition: one address per element,
// computed in 128 bits.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

#include "common/fuzz.h"

__extension__ typedef __int128 wide;

static inline int64_t element_bytes(rm_src_dtype dtype) {
  return dtype == RM_SRC_F64 ? 8 : dtype == RM_SRC_F32 ? 4 : 2;
}

// ----------------------------------------------------------------------------------------- memory
typedef struct room {
  char *low, *high; // may be used; the pages before and behind may not
} room;

static inline room room_create(size_t bytes) {
  const size_t page = 4096, size = (bytes + page - 1) / page * page;
  char *at = mmap(NULL, size + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED || mprotect(at + page, size, PROT_READ | PROT_WRITE))
    tiny_die("no guarded room of %zu bytes", size);
  return (room){at + page, at + page + size};
}

static inline void room_destroy(room r) { munmap(r.low - 4096, (size_t)(r.high - r.low) + 8192); }

// -------------------------------------------------------------------------------------- addresses
// The bytes before and from `data` on that hold elements. By definition: the least and the greatest
// of all elements' addresses, each the sum over the dims of index · stride. The sum is least where
// every index is at one of its ends.
typedef struct reach {
  wide before, after;
} reach;

static inline reach tensor_reach(const rm_tensor *t) {
  wide low = 0, high = 0;
  for (int i = 0; i < t->n_dims; i++) {
    const wide end = (wide)(t->shape[i] - 1) * t->strides[i];
    if (end < 0) low += end;
    else high += end;
  }
  const wide each = element_bytes(t->dtype);
  return (reach){-low * each, (high + 1) * each};
}

// The same by walking over all elements, as a check.
static inline reach tensor_walk(const rm_tensor *t) {
  wide low = 0, high = 0, n = 1, each = element_bytes(t->dtype);
  for (int i = 0; i < t->n_dims; i++) n *= t->shape[i];
  for (wide e = 0; e < n; e++) {
    wide at = 0, rest = e;
    for (int i = t->n_dims - 1; i >= 0; rest /= t->shape[i], i--)
      at += rest % t->shape[i] * t->strides[i];
    if (at < low) low = at;
    if (at > high) high = at;
  }
  return (reach){-low * each, (high + 1) * each};
}

// Dims in any order with any signs, gaps between rows, dims of stride 0. The spans are exact,
// wider, or not known.
static inline void tensor_lay_out(fuzz *f, rm_tensor *t) {
  int order[4] = {0, 1, 2, 3};
  const int plain = fuzz_one_in(f, 2);
  for (int i = t->n_dims - 1; i > 0 && !plain; i--) {
    const int64_t other = fuzz_below(f, i + 1);
    const int kept = order[i];
    order[i] = order[other], order[other] = kept;
  }
  int64_t step = !plain && fuzz_one_in(f, 8) ? 1 + fuzz_below(f, 3) : 1;
  for (int i = t->n_dims - 1; i >= 0; i--) {
    int64_t *stride = &t->strides[order[i]];
    *stride = step;
    step *= t->shape[order[i]];
    if (plain) continue;
    if (fuzz_one_in(f, 4)) step += fuzz_below(f, 5);
    if (fuzz_one_in(f, 4)) *stride = -*stride;
    if (fuzz_one_in(f, 16)) *stride = 0;
  }
  const reach r = tensor_reach(t);
  t->span_lo = (int64_t)r.before, t->span_hi = (int64_t)r.after;
  if (fuzz_one_in(f, 8)) t->span_lo = t->span_hi = 0;
  else if (fuzz_one_in(f, 4)) t->span_lo += fuzz_below(f, 9), t->span_hi += fuzz_below(f, 9);
}

// ----------------------------------------------------------------------------------------- values
static inline uint32_t float_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

static inline void element_store(char *to, rm_src_dtype dtype, double value) {
  const float single = (float)value;
  const _Float16 half = (_Float16)single;
  const uint16_t brain = (uint16_t)(float_bits(single) >> 16);
  if (dtype == RM_SRC_F64) memcpy(to, &value, 8);
  else if (dtype == RM_SRC_F32) memcpy(to, &single, 4);
  else if (dtype == RM_SRC_F16) memcpy(to, &half, 2);
  else memcpy(to, &brain, 2);
}

static inline double element_value(uint32_t bits, rm_src_dtype dtype) {
  const uint32_t whole = dtype == RM_SRC_F32 ? bits : bits << 16;
  float value;
  memcpy(&value, &whole, sizeof value);
  return (double)value;
}

// Returns the stored value: the bits of the nearest bfloat16 or float32, ties to even. A double is
// first rounded to float32, as in torch.
static inline uint32_t element_load(const char *from, rm_src_dtype dtype, rm_src_dtype as) {
  double d;
  float value = 0;
  _Float16 half;
  uint16_t brain;
  if (dtype == RM_SRC_F64) memcpy(&d, from, 8), value = (float)d;
  else if (dtype == RM_SRC_F32) memcpy(&value, from, 4);
  else if (dtype == RM_SRC_F16) memcpy(&half, from, 2), value = (float)half;
  else {
    memcpy(&brain, from, 2);
    const uint32_t high = (uint32_t)brain << 16;
    memcpy(&value, &high, 4);
  }
  const uint32_t bits = float_bits(value), up = bits >> 16, rest = bits & 0xFFFF;
  if (as == RM_SRC_F32) return bits;
  if ((bits & 0x7FFFFFFF) > 0x7F800000) return up | 0x40; // a NaN stays a NaN
  return up + (rest > 0x8000 || (rest == 0x8000 && (up & 1)));
}

static inline int is_nonfinite(uint32_t bits, rm_src_dtype as) {
  return as == RM_SRC_F32 ? (bits & 0x7F800000) == 0x7F800000 : (bits & 0x7F80) == 0x7F80;
}

// The address of element e in row-major order.
static inline char *element_at(const rm_tensor *t, int64_t e) {
  int64_t at = 0;
  for (int i = t->n_dims - 1; i >= 0; e /= t->shape[i], i--) at += e % t->shape[i] * t->strides[i];
  return (char *)t->data + at * element_bytes(t->dtype);
}

// Small; or, if wild, sometimes of any exponent.
static inline double any_value(fuzz *f, int wild) {
  const double unit = (double)(int64_t)fuzz_bits(f) * 0x1p-63;
  if (!wild || !fuzz_one_in(f, 16)) return unit * 0.3;
  const int power =
      (int)fuzz_below(f, 2) ? (int)fuzz_below(f, 300) - 150 : (int)fuzz_below(f, 2140) - 1080;
  return ldexp(unit, power);
}

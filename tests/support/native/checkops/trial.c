// trial.c: see trial.h: random numbers, buffers between guards, and hard numbers to fill them with.
#include "trial.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "cuda/packing.cuh"

// ----------------------------------------------------------------------------------------- chance
uint64_t next64(trial *t) { // splitmix64
  uint64_t z = t->random += 0x9e3779b97f4a7c15u;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return z ^ z >> 31;
}

int64_t between(trial *t, int64_t low, int64_t high) {
  return low + (int64_t)(next64(t) % (uint64_t)(high - low + 1));
}
int one_in(trial *t, int64_t n) { return between(t, 1, n) == 1; }
int64_t pick(trial *t, const int64_t *of, int64_t n) { return of[between(t, 0, n - 1)]; }

int64_t draw_width(trial *t, int64_t most) {
  const int64_t edge = PICK(t, 1, 2, 3, 7, 8, 15, 16, 17, 23, 31, 32, 33, 47, 48, 49, 61, 63, 64,
                            65, 95, 96, 97, 127, 128, 129, 131);
  const int64_t drawn = one_in(t, 6) ? between(t, 1, most) : edge;
  return rm_min64(drawn, most);
}

int64_t draw_depth(trial *t, int64_t most) {
  const int64_t width = draw_width(t, most);
  return t->is_aligned ? rm_round_up(width, 8) : width;
}

int64_t draw_rows(trial *t, int64_t most) {
  const int64_t edge =
      PICK(t, 0, 1, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 13, 15, 16, 17, 31, 32, 33, 40, 95, 96, 97);
  const int64_t drawn = one_in(t, 24) ? PICK(t, 127, 128, 129, 192, 193, 509, 1024, 1025) : edge;
  return rm_min64(drawn, most);
}

float draw_factor(trial *t) {
  static const float factors[] = {0x1p-126f, 0.0078125f, 0.22f, 1.0f, 12.0f, 30.0f, 1e30f};
  return t->timed || !one_in(t, 3) ? 0.0f : factors[between(t, 0, 6)];
}

rm_dtype draw_dtype(trial *t) { return one_in(t, 3) ? RM_F32 : RM_BF16; }

kind draw_kind(trial *t, kind last) {
  const kind drawn = (kind)PICK(t, PLAIN, PLAIN, PLAIN, PLAIN, PLAIN, HARD, HARD, HARD, HARD, EQUAL,
                                TINY, VAST, SPOILED);
  return drawn <= last && !t->timed ? drawn : PLAIN;
}

void shuffle(trial *t, int32_t *x, int64_t n) {
  for (int64_t i = n - 1; i > 0; i--) {
    const int64_t j = between(t, 0, i);
    const int32_t kept = x[i];
    x[i] = x[j];
    x[j] = kept;
  }
}

// ---------------------------------------------------------------------------------------- numbers
static uint32_t bits_of(int sign, int exponent, uint64_t mantissa) {
  return (uint32_t)sign << 31 | (uint32_t)exponent << 23 | (uint32_t)(mantissa & 0x7fffff);
}

static uint32_t draw_hard(trial *t, uint64_t r) {
  const int sign = r >> 63;
  switch (r >> 59 & 15) {
    case 0: return bits_of(sign, (int)between(t, 127 - 60, 127 + 60), r);
    case 1: return 0x80000000u;
    case 2: return bits_of(sign, 0, r); // denormal
    case 3: return bits_of(sign, (int)between(t, 1, 12), r); // products vanish
    case 4: return bits_of(sign, 127, r & 1 ? 0x7fffff : 1); // ±1 and an ulp, ±2 less an ulp
    case 5: return 0;
    case 6: return bits_of(sign, 127, r & 0x7f0000) + 0x8000u; // the middle between two bf16
    default: return bits_of(sign, 124 + (int)(r >> 40 & 3), r);
  }
}

uint32_t draw_float(trial *t, kind what) {
  const uint64_t r = next64(t);
  const int sign = r >> 63;
  switch (what) {
    case HARD: return draw_hard(t, r);
    case TINY: return bits_of(sign, (int)(r >> 40 & 3), r);
    case VAST:
      return bits_of(sign, r >> 40 & 7 ? 124 + (int)(r >> 44 & 3) : 254 - (int)(r >> 44 & 31), r);
    case SPOILED:
      if ((r >> 32 & 127) == 0)
        return PICK(t, 0x7f800000, 0xff800000, 0x7fc00000, 0xffc00000, 0x7f800001, 0xffffffff);
      return bits_of(sign, 124 + (int)(r >> 40 & 3), r);
    default: return bits_of(sign, 124 + (int)(r >> 40 & 3), r);
  }
}

// In HARD numbers one of seven is the negative of its neighbour, so that sums cancel.
void fill(trial *t, rm_dtype dtype, void *p, int64_t n, kind what) {
  uint32_t u = draw_float(t, what);
  for (int64_t i = 0; i < n; i++) {
    if (what == HARD && i % 7 == 1) u ^= 0x80000000u;
    else if (what != EQUAL) u = draw_float(t, what);
    if (dtype == RM_BF16) ((uint16_t *)p)[i] = (uint16_t)(u >> 16);
    else ((uint32_t *)p)[i] = u;
  }
}

// ---------------------------------------------------------------------------------------- buffers
enum { GPU_ALIGN = 16 }; // bytes that a GPU reads at a time

static int64_t page_bytes(void) { return sysconf(_SC_PAGESIZE); }

static void *must(void *p) {
  if (!p || p == MAP_FAILED) {
    perror("checkops: memory");
    exit(2);
  }
  return p;
}

// The memory of a card cannot be protected.
static void protect(const buffer *b, int protection) {
  if (!check_device.is_managed) mprotect(b->map, (size_t)b->map_bytes, protection);
}

static void unmap(char *map, int64_t bytes) {
  if (!check_device.is_managed) munmap(map, (size_t)(bytes + page_bytes()));
}

static char *map_of(int64_t bytes) {
  if (check_device.is_managed) return must(device_memory((size_t)bytes));
  char *map = must(mmap(NULL, (size_t)(bytes + page_bytes()), PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  mprotect(map + bytes, (size_t)page_bytes(), PROT_NONE);
  return map;
}

char *trial_scratch(int64_t bytes) {
  static char *map;
  static int64_t map_bytes;
  if (bytes > map_bytes) {
    if (map) unmap(map, map_bytes);
    map_bytes = rm_round_up(2 * bytes, page_bytes());
    map = map_of(map_bytes);
  }
  return map + map_bytes - bytes;
}

static void reserve(buffer *b, int64_t bytes) {
  if (b->map && b->map_bytes >= bytes) {
    protect(b, PROT_READ | PROT_WRITE);
    return;
  }
  if (b->map) unmap(b->map, b->map_bytes);
  b->map_bytes = rm_round_up(bytes + bytes / 2, page_bytes());
  b->map = map_of(b->map_bytes);
}

static buffer *place(trial *t, const char *name, int64_t elements, int64_t elem_bytes,
                     int is_output, int64_t align) {
  if (t->n_buffers == MAX_BUFFERS) must(NULL);
  buffer *b = &t->buffers[t->n_buffers++];
  const int64_t bytes = elements * elem_bytes;
  b->name = name;
  b->elements = b->counted = elements;
  b->elem_bytes = (int)elem_bytes;
  b->is_output = is_output;
  b->packed = (packing){0};
  if (t->heap) {
    b->room = b->data = must(malloc((size_t)(bytes ? bytes : 1)));
    b->room_bytes = bytes;
    return b;
  }
  if (t->is_aligned) align = rm_max64(align, GPU_ALIGN);
  const int64_t off = t->timed ? 0 : between(t, 0, rm_max64(64 / align, 1) - 1) * align;
  const int is_inside = t->timed || one_in(t, 2);
  reserve(b, bytes + 2 * GUARD_BYTES + 192);
  b->room_bytes = GUARD_BYTES + (is_inside ? bytes + GUARD_BYTES : rm_round_up(bytes, align));
  if (is_inside) b->room = b->map + off;
  else b->room = b->map + b->map_bytes - b->room_bytes; // the data ends where the map does
  b->data = b->room + GUARD_BYTES;
  memset(b->room, is_output ? OUT_GUARD : 0xff, (size_t)b->room_bytes);
  return b;
}

void *input(trial *t, const char *name, int64_t elements, int64_t elem_bytes) {
  t->moved_bytes += elements * elem_bytes;
  return place(t, name, elements, elem_bytes, 0, elem_bytes)->data;
}

void *output(trial *t, const char *name, int64_t elements, int64_t elem_bytes) {
  t->moved_bytes += elements * elem_bytes;
  return place(t, name, elements, elem_bytes, 1, elem_bytes)->data;
}

static void *place_partial(trial *t, const char *name, int64_t elements, int64_t elem_bytes,
                           int64_t counted, int64_t align) {
  buffer *b = place(t, name, elements, elem_bytes, 1, align);
  b->counted = counted;
  memset(b->data, OUT_GUARD, (size_t)(elements * elem_bytes));
  t->moved_bytes += counted * elem_bytes;
  return b->data;
}

void *partial_output(trial *t, const char *name, int64_t elements, int64_t elem_bytes,
                     int64_t counted) {
  return place_partial(t, name, elements, elem_bytes, counted, elem_bytes);
}

void *float_input(trial *t, const char *name, rm_dtype dtype, int64_t elements, kind what) {
  void *p = input(t, name, elements, (int64_t)rm_dtype_bytes(dtype));
  fill(t, dtype, p, elements, what);
  return p;
}

void *strided_input(trial *t, const char *name, rm_dtype dtype, int64_t rows, int64_t k,
                    int64_t stride, kind what) {
  const int64_t bytes = (int64_t)rm_dtype_bytes(dtype),
                elements = rows ? (rows - 1) * stride + k : 0;
  char *p = input(t, name, elements, bytes);
  for (int64_t r = 0; r < rows; r++) {
    fill(t, dtype, p + r * stride * bytes, k, what);
    if (r + 1 < rows) memset(p + (r * stride + k) * bytes, 0xff, (size_t)((stride - k) * bytes));
  }
  return p;
}

// --------------------------------------------------------------------------------- packed operands
static int64_t elements_of_one(packing p) {
  return p.as == VALUES    ? rm_v_page_elems(p.rows, p.k)
         : p.as == GATE_UP ? rm_packed_elems(rm_gate_up_rows(p.rows), p.k)
                           : rm_packed_elems(p.rows, p.k);
}
int64_t packing_elements(packing p) { return p.n ? (p.n - 1) * p.stride + elements_of_one(p) : 0; }

int64_t draw_stride(trial *t, int64_t least, int is_larger) {
  if (!is_larger) return least;
  const int64_t stride = least + between(t, 0, 40);
  return t->is_aligned ? rm_round_up(stride, GPU_ALIGN / 2) : stride;
}

void *packed_room(trial *t, const char *name, rm_dtype dtype, packing p, int64_t counted) {
  const int64_t bytes = (int64_t)rm_dtype_bytes(dtype), elements = packing_elements(p),
                align = check_device.is_gpu ? GPU_ALIGN : bytes;
  void *data;
  if (counted < 0) {
    data = place(t, name, elements, bytes, 0, align)->data;
    t->moved_bytes += elements * bytes;
  } else {
    data = place_partial(t, name, elements, bytes, counted, align);
  }
  t->buffers[t->n_buffers - 1].packed = p;
  return data;
}

void *packed_input(trial *t, const char *name, rm_dtype dtype, packing p, kind what) {
  const int64_t bytes = (int64_t)rm_dtype_bytes(dtype), one = elements_of_one(p);
  char *to = packed_room(t, name, dtype, p, -1), *row = must(malloc((size_t)(p.k * bytes + 1)));
  for (int64_t m = 0; m < p.n; m++) {
    char *matrix = to + m * p.stride * bytes;
    memset(matrix, 0, (size_t)(one * bytes));
    if (m + 1 < p.n) memset(matrix + one * bytes, 0xff, (size_t)((p.stride - one) * bytes));
    // a large matrix at the speed of memory; what the numbers are does not matter, but no denormals
    if (t->timed) {
      fill(t, dtype, row, p.k, PLAIN);
      for (int64_t i = 0; i < one; i++)
        memcpy(matrix + i * bytes, row + i % p.k * bytes, (size_t)bytes);
      continue;
    }
    for (int64_t r = 0; r < (p.as == GATE_UP ? 2 * p.rows : p.rows); r++) {
      const int64_t at = p.as == GATE_UP ? rm_gate_up_row(r / 2, r & 1) : r;
      fill(t, dtype, row, p.k, what);
      for (int64_t i = 0; i < p.k; i++)
        memcpy(matrix + rm_packed_index(dtype, p.k, at, i) * bytes, row + i * bytes, (size_t)bytes);
    }
  }
  free(row);
  return to;
}

// The operand `to` of cuda_mma from that of the CPU's layout, paddings included.
static void relay_one(packing p, uint16_t *to, const uint16_t *from) {
  const int is_values = p.as == VALUES, is_both = p.as == GATE_UP;
  const int64_t rows = rm_round_up(p.rows, RM_N_TILE) * (is_both ? 2 : 1),
                k = rm_round_up(p.k, is_values ? RM_N_TILE : RM_K_BLOCK);
  for (int64_t r = 0; r < rows; r++) {
    const int64_t there = is_both ? rm_mma_gate_up_row(r / 2, r & 1) : r,
                  here = is_both ? rm_gate_up_row(r / 2, r & 1) : r;
    for (int64_t i = 0; i < k; i++) {
      if (is_values) to[rm_mma_v_index(p.k, r, i)] = from[rm_v_index(RM_BF16, p.k, r, i)];
      else to[rm_mma_index(p.k, there, i)] = from[rm_packed_index(RM_BF16, p.k, here, i)];
    }
  }
}

static void relay(packing p, char *operands) {
  const size_t bytes = (size_t)packing_elements(p) * sizeof(uint16_t);
  uint16_t *from = must(malloc(bytes + 1));
  memcpy(from, operands, bytes);
  for (int64_t i = 0; i < p.n; i++)
    relay_one(p, (uint16_t *)operands + i * p.stride, from + i * p.stride);
  free(from);
}

void trial_relay(trial *t) {
  for (int i = 0; i < t->n_buffers && !t->is_relaid; i++) {
    buffer *b = &t->buffers[i];
    if (!b->packed.as || b->elem_bytes != sizeof(uint16_t)) continue;
    if (b->is_output) {
      relay(b->packed, b->first + (b->data - b->room));
      relay(b->packed, b->want + (b->data - b->room));
    } else {
      protect(b, PROT_READ | PROT_WRITE);
      relay(b->packed, b->data);
      protect(b, PROT_READ);
    }
  }
  t->is_relaid = 1;
}

// ---------------------------------------------------------------------------------------- a trial
void trial_begin(trial *t, uint64_t seed) {
  t->seed = t->random = seed;
  t->is_aligned = check_device.is_gpu && seed >> 24 & 1;
  t->n_buffers = t->is_relaid = 0;
  t->moved_bytes = 0;
  t->flops = 0;
  memset(&t->s, 0, sizeof t->s);
  memset(&t->limits, 0, sizeof t->limits);
  memset(&t->args, 0, sizeof t->args);
}

void trial_seal(trial *t) {
  for (int i = 0; i < t->n_buffers; i++) {
    buffer *b = &t->buffers[i];
    if (!b->is_output) {
      if (!t->heap && !t->timed) protect(b, PROT_READ);
      continue;
    }
    if (t->heap || b->image_bytes < b->room_bytes) {
      free(b->first);
      free(b->want);
      b->image_bytes = b->room_bytes + 1;
      b->first = must(malloc((size_t)b->image_bytes));
      b->want = must(malloc((size_t)b->image_bytes));
    }
    memcpy(b->first, b->room, (size_t)b->room_bytes);
  }
}

void trial_reset(trial *t) {
  for (int i = 0; i < t->n_buffers; i++)
    if (t->buffers[i].is_output)
      memcpy(t->buffers[i].room, t->buffers[i].first, (size_t)t->buffers[i].room_bytes);
}

void trial_keep(trial *t) {
  for (int i = 0; i < t->n_buffers; i++)
    if (t->buffers[i].is_output)
      memcpy(t->buffers[i].want, t->buffers[i].room, (size_t)t->buffers[i].room_bytes);
}

const buffer *trial_differs(const trial *t, int64_t *byte) {
  for (int i = 0; i < t->n_buffers; i++) {
    const buffer *b = &t->buffers[i];
    if (!b->is_output || memcmp(b->room, b->want, (size_t)b->room_bytes) == 0) continue;
    for (*byte = 0; b->room[*byte] == b->want[*byte]; ++*byte) continue;
    return b;
  }
  return NULL;
}

int64_t trial_elements(const trial *t) {
  int64_t sum = 0;
  for (int i = 0; i < t->n_buffers; i++) sum += t->buffers[i].is_output ? t->buffers[i].counted : 0;
  return sum;
}

void trial_free(trial *t) {
  for (int i = 0; i < MAX_BUFFERS; i++) {
    buffer *b = &t->buffers[i];
    if (t->heap && i < t->n_buffers) free(b->room);
    if (b->map) unmap(b->map, b->map_bytes);
    free(b->first);
    free(b->want);
    *b = (buffer){0};
  }
  t->n_buffers = 0;
}

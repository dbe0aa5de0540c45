// pack.c: trials of pack. The reference shares conversions and weights with the fast pack, so the
// oracle of both is here: kernels.h and docs/numerics.md §8 as one loop over elements, conversions
// by the compiler's own casts in an environment that keeps denormals.
#include <math.h>
#include <string.h>
#include <xmmintrin.h>

#include "trial.h"

enum {
  PACK_COMPARE = 1,
  PACK_TRANSPOSED = 2,
  PACK_REVERSED = 4,
  PACK_STRIDED = 8,
  PACK_LAYOUT_AT = 4,
  PACK_SRC_AT = 6
};

static int layout_of(const shape *s) { return s->option >> PACK_LAYOUT_AT & 3; }
static rm_src_dtype src_of(const shape *s) { return (rm_src_dtype)(s->option >> PACK_SRC_AT & 3); }
static int64_t src_size(rm_src_dtype src) {
  return src == RM_SRC_F64 ? 8 : src == RM_SRC_F32 ? 4 : 2;
}

static void draw_pack(trial *t) {
  shape *s = &t->s;
  *s = (shape){.rows = rm_max64(1, draw_rows(t, t->small ? 33 : 1025)),
               .n = draw_width(t, t->small ? 66 : 700)};
  if (!t->small && one_in(t, 6)) s->n = between(t, 500, 1100); // large enough for two threads
  s->k = PICK(t, 0, 0, 1, 5, 15, 16, 17, 33); // the row at which it begins
  s->option = (int)between(t, 0, 15) | (int)between(t, 0, 3) << PACK_LAYOUT_AT |
              (int)between(t, 0, 3) << PACK_SRC_AT;
  s->dtype = draw_dtype(t);
  // An even number, or a multiple of whole rows.
  if (one_in(t, 2))
    s->index0 = PICK(t, 1, 2, 3, 17, 100, 65536, INT32_MAX, (int64_t)1 << 33) * PICK(t, 2, s->n);
}

// ------------------------------------------------------------------------------------- the oracle
static uint32_t f32_of_f16(uint16_t h) {
  const int exponent = h >> 10 & 31, fraction = h & 1023;
  if (exponent == 31) return (uint32_t)(h & 0x8000) << 16 | 0x7f800000u | (uint32_t)fraction << 13;
  const float x =
      ldexpf((float)(exponent ? fraction + 1024 : fraction), (exponent ? exponent : 1) - 25);
  uint32_t u;
  memcpy(&u, &x, sizeof u);
  return u | (uint32_t)(h & 0x8000) << 16;
}

static uint32_t f32_of(const rm_pack_args *a, const char *at) {
  uint16_t half = 0;
  uint32_t u;
  double wide;
  switch (a->src_dtype) {
    case RM_SRC_BF16: memcpy(&half, at, 2); return (uint32_t)half << 16;
    case RM_SRC_F16: memcpy(&half, at, 2); return f32_of_f16(half);
    case RM_SRC_F32: memcpy(&u, at, 4); return u;
    default: break;
  }
  memcpy(&wide, at, 8);
  const float x = (float)wide;
  memcpy(&u, &x, sizeof u);
  return u;
}

static uint32_t stored_of(const rm_pack_args *a, int64_t row, int64_t col) {
  const char *at =
      (const char *)a->src + (row * a->row_stride + col * a->col_stride) * src_size(a->src_dtype);
  const uint32_t u = f32_of(a, at);
  if (a->dst_dtype == RM_F32) return u;
  if (a->src_dtype == RM_SRC_BF16) return u >> 16;
  if ((u & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
  const uint32_t low = u & 0xffffu, high = u >> 16;
  return low > 0x8000u || (low == 0x8000u && (high & 1)) ? high + 1 : high;
}

static int64_t place_of(const rm_pack_args *a, int64_t row, int64_t col) {
  const int64_t at = a->dst_row0 + row;
  if (a->layout == RM_PLAIN) return at * a->dst_cols + col;
  return rm_packed_index(
      a->dst_dtype, a->dst_cols,
      a->layout == RM_PACKED ? at : rm_gate_up_row(at, a->layout == RM_PACKED_UP), col);
}

static uint64_t digest_of(const rm_pack_args *a, int64_t i, uint32_t stored) {
  const int bf16 = a->dst_dtype == RM_BF16;
  const uint32_t c = (uint32_t)((bf16 ? i / 2 : i) + 1) * 0x9E3779B1u;
  return (uint64_t)(c ^ c >> 15) * ((uint64_t)stored << (bf16 ? 16 * (i & 1) : 0));
}

static void pack_loops(rm_pack_args *a) {
  const int64_t bytes = (int64_t)rm_dtype_bytes(a->dst_dtype),
                padded = a->layout == RM_PLAIN ? a->cols : rm_round_up(a->cols, RM_K_BLOCK);
  a->digest = 0;
  a->nonfinite_index = a->diff_index = -1;
  for (int64_t row = 0; row < a->rows; row++)
    for (int64_t col = 0; col < padded; col++) {
      const int64_t i = row * a->cols + col;
      char *to = (char *)a->dst + place_of(a, row, col) * bytes;
      const uint32_t stored = col < a->cols ? stored_of(a, row, col) : 0,
                     exponent = a->dst_dtype == RM_BF16 ? 0x7f80 : 0x7f800000;
      if (col < a->cols) {
        a->digest += digest_of(a, a->index0 + i, stored);
        if ((stored & exponent) == exponent && a->nonfinite_index < 0) a->nonfinite_index = i;
        if (a->compare && memcmp(to, &stored, (size_t)bytes) != 0 && a->diff_index < 0)
          a->diff_index = i;
      }
      if (!a->compare)
        memcpy(to, &stored, (size_t)bytes); // little-endian: the low bytes are the stored word
    }
}

// ----------------------------------------------------------------------------------------- trials
static void fill_source(trial *t, char *p, int64_t n, rm_src_dtype src) {
  const int finite = one_in(t, 2);
  for (int64_t i = 0; i < n; i++) {
    uint64_t r = next64(t);
    if (src == RM_SRC_F64) {
      if (!one_in(t, 8))
        r = (r & 0x800fffffffffffffu) |
            (uint64_t)between(t, 1023 - 152, finite ? 1023 + 126 : 1023 + 129) << 52;
      if (one_in(t, 4)) r &= ~(uint64_t)0x1fffffff; // a float32, or the middle between two
      if (one_in(t, 8)) r |= 0x10000000;
      if (finite && (r >> 52 & 0x7ff) > 1023 + 126) r &= ~((uint64_t)1 << 62);
    } else if (finite) {
      const uint64_t exponent = src == RM_SRC_F16    ? 0x7c00
                                : src == RM_SRC_BF16 ? 0x7f80
                                                     : 0x7f800000;
      if ((r & exponent) == exponent) r &= ~(exponent / 2);
      if (src == RM_SRC_F32 && (r & 0x7f000000) == 0x7f000000)
        r &= ~(uint64_t)0x40000000; // stays finite when rounded up
    }
    memcpy(p + i * src_size(src), &r, (size_t)src_size(src));
  }
}

static void build_pack(trial *t) {
  const shape *s = &t->s;
  rm_pack_args *a = &t->args.pack;
  *a = (rm_pack_args){.src_dtype = src_of(s),
                      .rows = s->rows,
                      .cols = s->n,
                      .dst_dtype = s->dtype,
                      .layout = (rm_layout)layout_of(s),
                      .dst_row0 = s->k,
                      .dst_cols = s->n,
                      .index0 = s->index0,
                      .compare = s->option & PACK_COMPARE};
  const int64_t gap = s->option & PACK_STRIDED && !t->timed ? between(t, 1, 9) : 0,
                step = s->option & PACK_STRIDED ? PICK(t, 1, 2) : 1;
  const int transposed = !!(s->option & PACK_TRANSPOSED);
  const int64_t inner = transposed ? s->rows : s->n, outer = transposed ? s->n : s->rows,
                stride = (inner - 1) * step + 1 + gap;
  const int64_t elements = (outer - 1) * stride + (inner - 1) * step + 1;
  char *src = input(t, "src", elements, src_size(a->src_dtype));
  fill_source(t, src, elements, a->src_dtype);
  a->row_stride = transposed ? step : stride;
  a->col_stride = transposed ? stride : step;
  a->src = src;
  if (s->option & PACK_REVERSED) { // the last row first
    a->src = src + (s->rows - 1) * a->row_stride * src_size(a->src_dtype);
    a->row_stride = -a->row_stride;
  }
  const int64_t end = s->k + s->rows, bytes = (int64_t)rm_dtype_bytes(s->dtype),
                written = a->compare ? 0 : s->rows * s->n;
  const packing p = {
      .as = layout_of(s) == RM_PACKED ? MATRICES : GATE_UP, .n = 1, .rows = end, .k = s->n};
  a->dst = layout_of(s) == RM_PLAIN ? partial_output(t, "dst", end * s->n, bytes, written)
                                    : packed_room(t, "dst", s->dtype, p, written);
  if (a->compare) { // what is there already differs in no element, in one, or in several
    rm_pack_args before = *a;
    before.compare = 0;
    pack_loops(&before);
    for (int64_t i = between(t, 0, 2); i > 0; i--)
      ((char *)a->dst)[place_of(a, between(t, 0, s->rows - 1), between(t, 0, s->n - 1)) * bytes +
                       between(t, 0, bytes - 1)] ^= 4;
  }
  output(t, "digest, nonfinite_index, diff_index", 3, sizeof(uint64_t));
}

// The findings of pack are the last output, written by the GPU.
static void *found_of(const trial *t) { return t->buffers[t->n_buffers - 1].data; }

static void report(trial *t) {
  const rm_pack_args *a = &t->args.pack;
  const rm_pack_found found = {a->digest, a->nonfinite_index, a->diff_index};
  memcpy(found_of(t), &found, sizeof found);
}

static void call_pack(const rm_kernels *k, const rm_ctx *ctx, trial *t) {
  t->args.pack.found = check_device.is_gpu ? found_of(t) : NULL;
  k->pack(ctx, &t->args.pack);
  if (!check_device.is_gpu) report(t);
}

static void plain_pack(trial *t) {
  const unsigned flushed = _mm_getcsr();
  _mm_setcsr(0x1f80);
  pack_loops(&t->args.pack);
  _mm_setcsr(flushed);
  report(t);
}

#define PACK_BENCH(layout, src) (layout) << PACK_LAYOUT_AT | (src) << PACK_SRC_AT
const op_test op_pack = {
    .name = "pack",
    .share = 100,
    .draw = draw_pack,
    .build = build_pack,
    .call = call_pack,
    .plain = plain_pack,
    .bench = {{.rows = 2048, .n = 2048, .option = PACK_BENCH(RM_PACKED, RM_SRC_BF16)},
              {.rows = 2048, .n = 2048, .option = PACK_BENCH(RM_PACKED, RM_SRC_F32)},
              {.rows = 2048, .n = 2048, .option = PACK_BENCH(RM_PLAIN, RM_SRC_BF16)}}};

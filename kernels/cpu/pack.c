// pack.c: the way of a trainer's tensor into a parameter. One pass converts, lays out, sums the digest and looks for
// non-finite values, because a pass over 16 GB costs seconds and the four together cost no more than the slowest: memory.
//
// Everything is done on 32-bit words, a word being one float or two neighbouring bf16 of a row. Then both packed layouts are
// the same thing: 16 rows × 16 words turned into 16 × 16 (bf16: one such square a tile; float32: two). A square is turned in a
// buffer of its own and then emitted: streamed out when it is whole, lane by lane where a tile is shared with another
// parameter (k after q in qkv), compared instead of written for a tied lm_head.
//
// The digest is Σ weight(word index)·word mod 2^64; for one element that is weight·(bits << 16·parity), a function of its index
// and bits, so any split, order or layout gives the same sum. A change of a single element always shows: the weight is not 0.
//
// All arithmetic on values is integer. Conversions must keep denormals, as torch's do, while threads run with them flushed.
// SSE2 is part of x86-64, so there is one variant of this op and nothing to choose.
#include <emmintrin.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "kernels.h"

enum {
  SQUARE = 16,                     // rows, and words, of a square
  TILE_ROW_BYTES = RM_K_BLOCK * 4, // at most, of a tile's row
  CHUNK = 512,                     // elements of a plain row worked on at a time
  SERIAL_ELEMENTS = 1 << 16,       // below this waking threads costs more than it saves
  MAX_PARTS = 256,
};

void rm_cpu_pack(const rm_ctx *ctx, rm_pack_args *args);

// ------------------------------------------------------------------------------------------------ conversions
static uint16_t load16(const void *p) {
  uint16_t v;
  memcpy(&v, p, sizeof v);
  return v;
}
static uint32_t load32(const void *p) {
  uint32_t v;
  memcpy(&v, p, sizeof v);
  return v;
}
static uint64_t load64(const void *p) {
  uint64_t v;
  memcpy(&v, p, sizeof v);
  return v;
}

static uint16_t bf16_from_f32(uint32_t bits) {
  const uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
  return (uint16_t)((bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : rounded);
}

static uint32_t f32_from_f16(uint16_t bits) {
  const uint32_t sign = (uint32_t)(bits & 0x8000) << 16, exponent = bits >> 10 & 0x1F, fraction = bits & 0x3FF;
  if (exponent == 0x1F) return sign | 0x7F800000 | fraction << 13;
  if (exponent > 0) return sign | (exponent + 112) << 23 | fraction << 13;
  if (fraction == 0) return sign;
  const uint32_t top = 31 - (uint32_t)__builtin_clz(fraction);    // value = fraction · 2^-24
  return sign | (top + 103) << 23 | (fraction << (23 - top) & 0x7FFFFF);
}

static uint32_t f32_from_f64(uint64_t bits) {
  const uint32_t sign = (uint32_t)(bits >> 63) << 31;
  const int biased = (int)(bits >> 52 & 0x7FF), exponent = biased - 1023 + 127;
  const uint64_t fraction = bits & 0xFFFFFFFFFFFFF;
  if (biased == 0x7FF) return sign | 0x7F800000 | (fraction ? 0x400000 | (uint32_t)(fraction >> 29) : 0);
  if (exponent >= 0xFF) return sign | 0x7F800000;
  if (exponent < -24) return sign;
  const uint64_t whole = exponent > 0 ? (uint64_t)exponent << 52 | fraction : fraction | (uint64_t)1 << 52;
  const int shift = exponent > 0 ? 29 : 30 - exponent;
  const uint64_t kept = whole >> shift, rest = whole & (((uint64_t)1 << shift) - 1), half = (uint64_t)1 << (shift - 1);
  return sign | (uint32_t)(kept + (rest > half || (rest == half && (kept & 1))));   // a carry runs into the exponent, rightly
}

static int64_t src_bytes(rm_src_dtype dtype) { return dtype == RM_SRC_F64 ? 8 : dtype == RM_SRC_F32 ? 4 : 2; }

// n elements from `src`, `step` bytes apart, to stored form.
static void convert_bf16(void *to, const char *src, int64_t step, int64_t n, rm_src_dtype from) {
  uint16_t *out = to;
  if (from == RM_SRC_F32 && step == 4) {           // the loop that gcc vectorises
    for (int64_t i = 0; i < n; i++) out[i] = bf16_from_f32(load32(src + i * 4));
    return;
  }
  switch (from) {
    case RM_SRC_BF16:
      for (int64_t i = 0; i < n; i++) out[i] = load16(src + i * step);
      break;
    case RM_SRC_F32:
      for (int64_t i = 0; i < n; i++) out[i] = bf16_from_f32(load32(src + i * step));
      break;
    case RM_SRC_F16:
      for (int64_t i = 0; i < n; i++) out[i] = bf16_from_f32(f32_from_f16(load16(src + i * step)));
      break;
    case RM_SRC_F64:
      for (int64_t i = 0; i < n; i++) out[i] = bf16_from_f32(f32_from_f64(load64(src + i * step)));
      break;
  }
}

static void convert_f32(void *to, const char *src, int64_t step, int64_t n, rm_src_dtype from) {
  uint32_t *out = to;
  switch (from) {
    case RM_SRC_BF16:
      for (int64_t i = 0; i < n; i++) out[i] = (uint32_t)load16(src + i * step) << 16;
      break;
    case RM_SRC_F32:
      for (int64_t i = 0; i < n; i++) out[i] = load32(src + i * step);
      break;
    case RM_SRC_F16:
      for (int64_t i = 0; i < n; i++) out[i] = f32_from_f16(load16(src + i * step));
      break;
    case RM_SRC_F64:
      for (int64_t i = 0; i < n; i++) out[i] = f32_from_f64(load64(src + i * step));
      break;
  }
}

// Elements [col, col + n) of a row as stored, zeros after them up to `padded`: the source itself when it is so already, else
// a copy in `buffer`.
static const void *row_view(const rm_pack_args *args, int64_t row, int64_t col, int64_t n, int64_t padded, void *buffer) {
  const int64_t bytes = src_bytes(args->src_dtype), step = args->col_stride * bytes;
  const char *src = (const char *)args->src + row * args->row_stride * bytes + col * step;
  const int same = args->dst_dtype == RM_BF16 ? args->src_dtype == RM_SRC_BF16 : args->src_dtype == RM_SRC_F32;
  if (same && args->col_stride == 1 && n == padded) return src;
  const int64_t stored = (int64_t)rm_dtype_bytes(args->dst_dtype);
  if (same && args->col_stride == 1) memcpy(buffer, src, (size_t)(n * stored));
  else if (args->dst_dtype == RM_BF16) convert_bf16(buffer, src, step, n, args->src_dtype);
  else convert_f32(buffer, src, step, n, args->src_dtype);
  memset((char *)buffer + n * stored, 0, (size_t)((padded - n) * stored));
  return buffer;
}

// The same for 16 lanes of a transposed view: column by column, so that each cache line of the source is fetched once.
static void gather_columns(const rm_pack_args *args, int64_t row, int lanes, int64_t col, int64_t n, char buffer[SQUARE][TILE_ROW_BYTES]) {
  const int64_t bytes = src_bytes(args->src_dtype), step = args->row_stride * bytes;
  const char *src = (const char *)args->src + (row * args->row_stride + col * args->col_stride) * bytes;
  memset(buffer, 0, (size_t)SQUARE * TILE_ROW_BYTES);
  for (int64_t c = 0; c < n; c++, src += args->col_stride * bytes) {
    _Alignas(16) char column[SQUARE * 4];
    if (args->dst_dtype == RM_BF16) {
      convert_bf16(column, src, step, lanes, args->src_dtype);
      for (int r = 0; r < lanes; r++) memcpy(buffer[r] + c * 2, column + r * 2, 2);
    } else {
      convert_f32(column, src, step, lanes, args->src_dtype);
      for (int r = 0; r < lanes; r++) memcpy(buffer[r] + c * 4, column + r * 4, 4);
    }
  }
}

static int is_transposed(const rm_pack_args *args) { return llabs(args->col_stride) > llabs(args->row_stride); }

// ------------------------------------------------------------------------------------------------ digest and finiteness
static const uint32_t weyl = 0x9E3779B1u;          // odd: a permutation of the 2^32 indices, 0 only for the last

static uint32_t weight_seed(int64_t word) { return ((uint32_t)word + 1) * weyl; }
static uint32_t weight(int64_t word) {
  const uint32_t w = weight_seed(word);
  return w ^ w >> 15;
}

typedef struct part {              // what one thread found
  uint64_t digest;
  int64_t nonfinite, diff;
  char pad[40];
} part;

typedef struct sums {
  __m128i digest;                  // two 64-bit sums
  __m128i bad;                     // ones where an exponent was all ones
  __m128i exponent, full;          // (x & exponent) == full, in 16-bit lanes, never true for the low half of a float32
  __m128i next;                    // four words on
} sums;

static sums sums_begin(rm_dtype dtype) {
  const int bf16 = dtype == RM_BF16;
  return (sums){
      .digest = _mm_setzero_si128(),
      .bad = _mm_setzero_si128(),
      .exponent = _mm_set1_epi32(bf16 ? 0x7F807F80 : 0x7F800000),
      .full = _mm_set1_epi32(bf16 ? 0x7F807F80 : 0x7F800001),
      .next = _mm_set1_epi32((int)(4 * weyl)),
  };
}

static inline __m128i weight_seeds(int64_t word) {
  const __m128i lanes = _mm_set_epi32((int)(3 * weyl), (int)(2 * weyl), (int)weyl, 0);
  return _mm_add_epi32(_mm_set1_epi32((int)weight_seed(word)), lanes);
}

static inline void sums_add(sums *s, __m128i *seeds, __m128i words) {
  const __m128i w = _mm_xor_si128(*seeds, _mm_srli_epi32(*seeds, 15));
  const __m128i even = _mm_mul_epu32(w, words), odd = _mm_mul_epu32(_mm_srli_epi64(w, 32), _mm_srli_epi64(words, 32));
  s->digest = _mm_add_epi64(s->digest, _mm_add_epi64(even, odd));
  s->bad = _mm_or_si128(s->bad, _mm_cmpeq_epi16(_mm_and_si128(words, s->exponent), s->full));
  *seeds = _mm_add_epi32(*seeds, s->next);
}

static uint64_t sums_digest(const sums *s) {
  uint64_t halves[2];
  _mm_storeu_si128((__m128i *)halves, s->digest);
  return halves[0] + halves[1];
}

static int sums_bad(const sums *s) { return _mm_movemask_epi8(s->bad) != 0; }

// Rows of an odd number of bf16 put words across row ends, and where the rows begin need not be even; they are summed element by
// element.
static int splits_words(const rm_pack_args *args) { return args->dst_dtype == RM_BF16 && (args->cols & 1); }

static uint64_t digest_elements(const char *x, int64_t first, int64_t n) {
  uint64_t sum = 0;
  for (int64_t i = first; i < first + n; i++, x += 2) sum += (uint64_t)weight(i >> 1) * ((uint64_t)load16(x) << (i & 1 ? 16 : 0));
  return sum;
}

static void find_nonfinite(part *found, const rm_pack_args *args, const void *x, int64_t first, int64_t n) {
  if (found->nonfinite >= 0 && found->nonfinite <= first) return;
  for (int64_t i = 0; i < n; i++) {
    const int bad = args->dst_dtype == RM_BF16 ? (load16((const char *)x + 2 * i) & 0x7F80) == 0x7F80
                                               : (load32((const char *)x + 4 * i) & 0x7F800000) == 0x7F800000;
    if (!bad) continue;
    if (found->nonfinite < 0 || first + i < found->nonfinite) found->nonfinite = first + i;
    return;
  }
}

static void note_diff(part *found, int64_t index) {
  if (found->diff < 0 || index < found->diff) found->diff = index;
}

// ------------------------------------------------------------------------------------------------ plain rows
static void plain_chunk(const rm_pack_args *args, part *found, int64_t row, int64_t col, int64_t n) {
  const int64_t stored = (int64_t)rm_dtype_bytes(args->dst_dtype), first = row * args->cols + col;
  _Alignas(16) char buffer[CHUNK * 4];
  const int64_t padded = rm_round_up(n * stored, 16) / stored;
  const char *x = row_view(args, row, col, n, padded, buffer);
  char *dst = (char *)args->dst + ((args->dst_row0 + row) * args->dst_cols + col) * stored;

  sums s = sums_begin(args->dst_dtype);
  __m128i seeds = weight_seeds((args->index0 + first) * stored / 4);
  for (int64_t at = 0; at < padded * stored; at += 16) sums_add(&s, &seeds, _mm_loadu_si128((const __m128i *)(x + at)));
  found->digest += splits_words(args) ? digest_elements(x, args->index0 + first, n) : sums_digest(&s);
  if (sums_bad(&s)) find_nonfinite(found, args, x, first, n);

  if (!args->compare) {
    memcpy(dst, x, (size_t)(n * stored));
  } else if (memcmp(dst, x, (size_t)(n * stored)) != 0) {
    int64_t i = 0;
    while (memcmp(dst + i * stored, x + i * stored, (size_t)stored) == 0) i++;
    note_diff(found, first + i);
  }
}

static void plain_rows(const rm_pack_args *args, part *found, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; row++)
    for (int64_t col = 0; col < args->cols; col += CHUNK) plain_chunk(args, found, row, col, rm_min64(CHUNK, args->cols - col));
}

// ------------------------------------------------------------------------------------------------ packed tiles
static inline void turn4(uint32_t *out, __m128i a, __m128i b, __m128i c, __m128i d) {
  const __m128i ab0 = _mm_unpacklo_epi32(a, b), cd0 = _mm_unpacklo_epi32(c, d);
  const __m128i ab1 = _mm_unpackhi_epi32(a, b), cd1 = _mm_unpackhi_epi32(c, d);
  _mm_store_si128((__m128i *)(out + 0 * SQUARE), _mm_unpacklo_epi64(ab0, cd0));
  _mm_store_si128((__m128i *)(out + 1 * SQUARE), _mm_unpackhi_epi64(ab0, cd0));
  _mm_store_si128((__m128i *)(out + 2 * SQUARE), _mm_unpacklo_epi64(ab1, cd1));
  _mm_store_si128((__m128i *)(out + 3 * SQUARE), _mm_unpackhi_epi64(ab1, cd1));
}

// square[word][row] ← rows[row][word], and the sums. `word` is the digest's index of rows[0][0], row_words that of a row.
static void turn_square(uint32_t *square, const char *const *rows, int64_t word, int64_t row_words, sums *total) {
  sums s = *total;
  for (int r = 0; r < SQUARE; r += 4) {
    __m128i seeds[4];
    for (int i = 0; i < 4; i++) seeds[i] = weight_seeds(word + (r + i) * row_words);
    for (int w = 0; w < SQUARE; w += 4) {
      __m128i x[4];
      for (int i = 0; i < 4; i++) {
        x[i] = _mm_loadu_si128((const __m128i *)(rows[r + i] + 4 * w));
        sums_add(&s, &seeds[i], x[i]);
      }
      turn4(square + w * SQUARE + r, x[0], x[1], x[2], x[3]);
    }
  }
  *total = s;
}

static void emit_square(char *dst, const uint32_t *square, int lane0, int lanes) {
  if (lanes == SQUARE && (uintptr_t)dst % 16 == 0) {
    // Past the cache: nothing reads the weights before the swap, and a line that is not fetched first is traffic saved.
    for (int i = 0; i < SQUARE * SQUARE; i += 4) _mm_stream_si128((__m128i *)(dst + 4 * i), _mm_load_si128((const __m128i *)(square + i)));
    return;
  }
  for (int w = 0; w < SQUARE; w++) memcpy(dst + 4 * (w * SQUARE + lane0), square + w * SQUARE + lane0, (size_t)lanes * 4);
}

// The lowest (lane, element of its 32) whose stored bits differ, as lane·32 + element, −1 for none. Pads are zero on both sides.
static int64_t compare_square(const char *dst, const uint32_t *square, int lane0, int lanes, rm_dtype dtype) {
  for (int lane = lane0; lane < lane0 + lanes; lane++) {
    for (int w = 0; w < SQUARE; w++) {
      const uint32_t differ = load32(dst + 4 * (w * SQUARE + lane)) ^ square[w * SQUARE + lane];
      if (differ) return (int64_t)(lane - lane0) * RM_K_BLOCK + (dtype == RM_BF16 ? 2 * w + !(differ & 0xFFFF) : w);
    }
  }
  return -1;
}

static int64_t packed_tile_row(const rm_pack_args *args, int64_t tile) {
  return args->layout == RM_PACKED ? tile : 2 * tile + (args->layout == RM_PACKED_UP);
}

// Source rows [row, row + lanes) in tile (tile_row, col / 32), from lane lane0 on.
static void packed_block(const rm_pack_args *args, part *found, int64_t tile_row, int64_t row, int lane0, int lanes, int64_t col) {
  static const uint32_t zeros[RM_K_BLOCK];
  const int64_t stored = (int64_t)rm_dtype_bytes(args->dst_dtype), n = rm_min64(RM_K_BLOCK, args->cols - col);
  const int64_t tiles_across = rm_round_up(args->dst_cols, RM_K_BLOCK) / RM_K_BLOCK, first = row * args->cols + col;
  char *dst = (char *)args->dst + (tile_row * tiles_across + col / RM_K_BLOCK) * RM_N_TILE * RM_K_BLOCK * stored;
  _Alignas(16) char buffer[SQUARE][TILE_ROW_BYTES];
  _Alignas(64) uint32_t square[SQUARE * SQUARE];
  const char *rows[SQUARE];
  const int transposed = is_transposed(args) && args->rows > 1;
  if (transposed) gather_columns(args, row, lanes, col, n, buffer);
  for (int lane = 0; lane < SQUARE; lane++) {
    const int in = lane - lane0;
    if (in < 0 || in >= lanes) rows[lane] = (const char *)zeros;
    else rows[lane] = transposed ? buffer[in] : row_view(args, row + in, col, n, RM_K_BLOCK, buffer[lane]);
  }

  sums s = sums_begin(args->dst_dtype);
  const int64_t per_word = 4 / stored, row_words = args->cols / per_word;
  for (int64_t half = 0; half < RM_K_BLOCK / per_word / SQUARE; half++) {
    turn_square(square, rows, (args->index0 + first) / per_word - lane0 * row_words + half * SQUARE, row_words, &s);
    if (!args->compare) {
      emit_square(dst + half * (int64_t)sizeof square, square, lane0, lanes);
    } else {
      const int64_t at = compare_square(dst + half * (int64_t)sizeof square, square, lane0, lanes, args->dst_dtype);
      if (at >= 0) note_diff(found, first + at / RM_K_BLOCK * args->cols + half * SQUARE + at % RM_K_BLOCK);
    }
    for (int lane = 0; lane < SQUARE; lane++)
      if (rows[lane] != (const char *)zeros) rows[lane] += SQUARE * 4;
  }
  const int moved = stored == 4 ? 2 * SQUARE * 4 : SQUARE * 4;
  const int bad = sums_bad(&s), split = splits_words(args);
  if (!split) found->digest += sums_digest(&s);
  for (int in = 0; (bad || split) && in < lanes; in++) {
    const char *x = rows[lane0 + in] - moved;
    if (bad) find_nonfinite(found, args, x, first + in * args->cols, n);
    if (split) found->digest += digest_elements(x, args->index0 + first + in * args->cols, n);
  }
}

static void packed_tile(const rm_pack_args *args, part *found, int64_t tile, int64_t col) {
  const int64_t low = rm_max64(tile * RM_N_TILE, args->dst_row0);
  const int64_t high = rm_min64((tile + 1) * RM_N_TILE, args->dst_row0 + args->rows);
  packed_block(args, found, packed_tile_row(args, tile), low - args->dst_row0, (int)(low % RM_N_TILE), (int)(high - low), col);
}

// Walks the source the way it lies in memory: along the rows, or down the columns of a transposed view.
static void packed_tiles(const rm_pack_args *args, part *found, int64_t begin, int64_t end) {
  if (is_transposed(args)) {
    for (int64_t col = 0; col < args->cols; col += RM_K_BLOCK)
      for (int64_t tile = begin; tile < end; tile++) packed_tile(args, found, tile, col);
  } else {
    for (int64_t tile = begin; tile < end; tile++)
      for (int64_t col = 0; col < args->cols; col += RM_K_BLOCK) packed_tile(args, found, tile, col);
  }
}

// ------------------------------------------------------------------------------------------------ the op
typedef struct job {
  const rm_pack_args *args;
  part parts[MAX_PARTS];
} job;

// Threads take whole destination tiles, so that no two write to one cache line.
static void pack_task(void *arg, int thread, int n_threads) {
  job *work = arg;
  const rm_pack_args *args = work->args;
  part *found = &work->parts[thread];
  *found = (part){.nonfinite = -1, .diff = -1};
  const int plain = args->layout == RM_PLAIN;
  const int64_t low = plain ? 0 : args->dst_row0 / RM_N_TILE;
  const int64_t n = (plain ? args->rows : rm_round_up(args->dst_row0 + args->rows, RM_N_TILE) / RM_N_TILE) - low;
  const int64_t begin = low + n * thread / n_threads, end = low + n * (thread + 1) / n_threads;
  if (plain) plain_rows(args, found, begin, end);
  else packed_tiles(args, found, begin, end);
  _mm_sfence();                    // streamed stores are ordered before the thread says it is done
}

static int64_t lowest(int64_t a, int64_t b) { return a < 0 ? b : b < 0 ? a : rm_min64(a, b); }

void rm_cpu_pack(const rm_ctx *ctx, rm_pack_args *args) {
  job work = {.args = args};
  args->digest = 0;
  args->nonfinite_index = args->diff_index = -1;
  if (args->rows <= 0 || args->cols <= 0) return;
  const int parallel = ctx->run && ctx->n_threads > 1 && ctx->n_threads <= MAX_PARTS && args->rows * args->cols >= SERIAL_ELEMENTS;
  for (int i = 0; i < MAX_PARTS; i++) work.parts[i] = (part){.nonfinite = -1, .diff = -1};
  if (parallel) ctx->run(ctx->team, pack_task, &work);
  else pack_task(&work, 0, 1);
  for (int i = 0; i < MAX_PARTS; i++) {
    args->digest += work.parts[i].digest;
    args->nonfinite_index = lowest(args->nonfinite_index, work.parts[i].nonfinite);
    args->diff_index = lowest(args->diff_index, work.parts[i].diff);
  }
}

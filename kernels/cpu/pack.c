// pack.c: copies a trainer's tensor into a parameter. One pass converts, changes the layout, sums
// the digest and finds non-finite values: each pass over 16 GB costs seconds, and memory bandwidth
// limits all four.
//
// It works on 32-bit words, one float or two neighbouring bf16 of a row, so both packed layouts are
// the same: squares of 16 rows × 16 words, transposed (bf16: one per tile; float32: two). The
// transpose is done in registers, four words of all rows at a time, and writes whole cache lines.
// Rows that have to be converted, gathered from columns or padded go through a small buffer first,
// as do tiles shared with another parameter (k after q in qkv), which are written lane by lane. A
// tied lm_head is compared instead of written.
//
// pack_bits.h has the digest. All fast tables use this one variant, compiled with -mavx2: in cache
// it is twice as fast as memory, so wider registers would not help.
#include <immintrin.h>
#include <stdlib.h>

#include "pack_bits.h"
#include "tables.h"
#include "threads.h"

enum {
  SQUARE = 16, // rows, and words, of a square
  SQUARE_BYTES = SQUARE * SQUARE * 4,
  LINE = SQUARE * 4, // bytes of a row of a square: one cache line
  CROWD = 4096, // rows a multiple of this apart are in the same set of the L1 cache
  RUN = 512, // bytes of each stored row that are processed at a time
  MAX_PARTS = 256,
};

#define INLINE static inline __attribute__((always_inline))

typedef struct part { // the results of one thread
  uint64_t digest;
  int64_t nonfinite, diff;
  char pad[40];
} part;

// ------------------------------------------------------------------------------------ stored rows
// Converts n elements from `src`, `step` bytes apart. The dtypes are constants.
INLINE void convert_as(rm_dtype stored, rm_src_dtype from, void *to, const char *src, int64_t step,
                       int64_t n) {
  for (int64_t i = 0; i < n; i++, src += step) {
    if (stored == RM_F32) ((uint32_t *)to)[i] = f32_from(src, from);
    else if (from == RM_SRC_BF16) ((uint16_t *)to)[i] = load16(src);
    else ((uint16_t *)to)[i] = bf16_from_f32(f32_from(src, from));
  }
}

// gcc vectorizes the loops of a constant step.
#define CONVERT_FROM(from) \
  case from: \
    if (step == src_bytes(from)) convert_as(stored, from, to, src, src_bytes(from), n); \
    else convert_as(stored, from, to, src, step, n); \
    break;

INLINE void convert_to(rm_dtype stored, void *to, const char *src, int64_t step, int64_t n,
                       rm_src_dtype from) {
  switch (from) {
    CONVERT_FROM(RM_SRC_BF16)
    CONVERT_FROM(RM_SRC_F32)
    CONVERT_FROM(RM_SRC_F16)
    CONVERT_FROM(RM_SRC_F64)
  }
}

static void convert(rm_dtype stored, void *to, const char *src, int64_t step, int64_t n,
                    rm_src_dtype from) {
  if (stored == RM_BF16) convert_to(RM_BF16, to, src, step, n, from);
  else convert_to(RM_F32, to, src, step, n, from);
}

static int is_transposed(const rm_pack_args *args) {
  return args->rows > 1 && llabs(args->col_stride) > llabs(args->row_stride);
}

// Whether the source's rows have the stored form.
static int is_direct(const rm_pack_args *args) {
  return args->col_stride == 1 &&
         args->src_dtype == (args->dst_dtype == RM_BF16 ? RM_SRC_BF16 : RM_SRC_F32);
}

static const char *source(const rm_pack_args *args, int64_t row, int64_t col) {
  return (const char *)args->src +
         (row * args->row_stride + col * args->col_stride) * src_bytes(args->src_dtype);
}

// Copies elements [col, col + n) of a row and pads with zeros up to `bytes`.
static void copy_row(const rm_pack_args *args, int64_t row, int64_t col, int64_t n, char *to,
                     int64_t bytes) {
  const int64_t step = args->col_stride * src_bytes(args->src_dtype),
                used = n * (int64_t)rm_dtype_bytes(args->dst_dtype);
  if (is_direct(args)) memcpy(to, source(args, row, col), (size_t)used);
  else convert(args->dst_dtype, to, source(args, row, col), step, n, args->src_dtype);
  memset(to + used, 0, (size_t)(bytes - used));
}

// The same for the lanes of a transposed view: goes column by column, so that each cache line of
// the source is fetched once.
static void copy_columns(const rm_pack_args *args, int64_t row, int lanes, int64_t col, int64_t n,
                         char *to, int64_t bytes) {
  const int64_t step = args->row_stride * src_bytes(args->src_dtype),
                stored = (int64_t)rm_dtype_bytes(args->dst_dtype);
  for (int lane = 0; lane < lanes; lane++) memset(to + lane * RUN, 0, (size_t)bytes);
  for (int64_t c = 0; c < n; c++) {
    _Alignas(32) char column[SQUARE * 4];
    convert(args->dst_dtype, column, source(args, row, col + c), step, lanes, args->src_dtype);
    for (int lane = 0; lane < lanes; lane++) {
      if (stored == 2) memcpy(to + lane * RUN + c * 2, column + lane * 2, 2);
      else memcpy(to + lane * RUN + c * 4, column + lane * 4, 4);
    }
  }
}

// -------------------------------------------------------------------------- digest and finiteness
typedef struct sums {
  __m256i even, odd; // of the digest, four 64-bit sums each
  __m256i largest; // of the 16 bits with the exponent, without sign; 0 for a float32's low half
  __m256i unsigned_high; // the mask for `largest`
} sums;

INLINE sums sums_begin(rm_dtype dtype) {
  const __m256i zero = _mm256_setzero_si256();
  return (sums){zero, zero, zero, _mm256_set1_epi32(dtype == RM_BF16 ? 0x7FFF7FFF : 0x7FFF0000)};
}

INLINE void sums_add(sums *s, __m256i seeds, __m256i words) {
  const __m256i w = _mm256_xor_si256(seeds, _mm256_srli_epi32(seeds, 15));
  s->even = _mm256_add_epi64(s->even, _mm256_mul_epu32(w, words));
  s->odd = _mm256_add_epi64(
      s->odd, _mm256_mul_epu32(_mm256_srli_epi64(w, 32), _mm256_srli_epi64(words, 32)));
  s->largest = _mm256_max_epi16(s->largest, _mm256_and_si256(words, s->unsigned_high));
}

static uint64_t sums_digest(const sums *s) {
  uint64_t four[4];
  _mm256_storeu_si256((__m256i *)four, _mm256_add_epi64(s->even, s->odd));
  return four[0] + four[1] + four[2] + four[3];
}

static int sums_bad(const sums *s) {
  return _mm256_movemask_epi8(_mm256_cmpgt_epi16(s->largest, _mm256_set1_epi16(0x7F7F))) != 0;
}

INLINE __m256i times_weyl(int64_t words) {
  return _mm256_set1_epi32((int)((uint32_t)words * (uint32_t)RM_PACK_WEYL));
}

// With an odd number of bf16 per row, words cross row ends and rows may begin at an odd index; such
// rows are summed element by element.
static int splits_words(const rm_pack_args *args) {
  return args->dst_dtype == RM_BF16 && (args->cols & 1);
}

static uint64_t digest_elements(const char *x, int64_t first, int64_t n) {
  uint64_t sum = 0;
  for (int64_t i = 0; i < n; i++) sum += element_digest(first + i, load16(x + 2 * i), RM_BF16);
  return sum;
}

// The lower of two indices; −1: none.
static int64_t lowest(int64_t a, int64_t b) { return a < 0 ? b : b < 0 ? a : rm_min64(a, b); }

static void find_nonfinite(part *found, rm_dtype dtype, const char *x, int64_t first, int64_t n) {
  if (found->nonfinite >= 0 && found->nonfinite <= first) return;
  for (int64_t i = 0; i < n; i++) {
    if (!is_nonfinite(dtype == RM_BF16 ? load16(x + 2 * i) : load32(x + 4 * i), dtype)) continue;
    found->nonfinite = first + i;
    return;
  }
}

// ------------------------------------------------------------------------------------- plain rows
// Copies x to dst and adds to its sums. bytes: a multiple of 32; word: the digest's index of the
// first word.
static void sum_plain(sums *total, const char *x, char *dst, int64_t bytes, int64_t word) {
  const int stream = dst && (uintptr_t)dst % 32 == 0;
  const __m256i lanes =
                    _mm256_mullo_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), times_weyl(1)),
                next = times_weyl(8);
  __m256i seeds = _mm256_add_epi32(_mm256_set1_epi32((int)weight_seed(word)), lanes);
  sums s = *total;
  for (int64_t at = 0; at < bytes; at += 32) {
    const __m256i words = _mm256_loadu_si256((const __m256i *)(x + at));
    sums_add(&s, seeds, words);
    seeds = _mm256_add_epi32(seeds, next);
    if (stream) _mm256_stream_si256((__m256i *)(dst + at), words);
    else if (dst) _mm256_storeu_si256((__m256i *)(dst + at), words);
  }
  *total = s;
}

static void plain_run(const rm_pack_args *args, part *found, int64_t row, int64_t col, int64_t n) {
  const int64_t stored = (int64_t)rm_dtype_bytes(args->dst_dtype), first = row * args->cols + col,
                word = (args->index0 + first) * stored / 4;
  const int64_t bytes = n * stored, whole = bytes / 32 * 32;
  _Alignas(32) char buffer[RUN], tail[32] = {0};
  const char *x = buffer;
  char *dst = (char *)args->dst + ((args->dst_row0 + row) * args->dst_cols + col) * stored;
  if (is_direct(args)) x = source(args, row, col);
  else copy_row(args, row, col, n, buffer, bytes);

  sums s = sums_begin(args->dst_dtype);
  sum_plain(&s, x, args->compare ? NULL : dst, whole, word);
  memcpy(tail, x + whole, (size_t)(bytes - whole));
  sum_plain(&s, tail, NULL, 32, word + whole / 4);
  found->digest +=
      splits_words(args) ? digest_elements(x, args->index0 + first, n) : sums_digest(&s);
  if (sums_bad(&s)) find_nonfinite(found, args->dst_dtype, x, first, n);
  if (!args->compare) {
    memcpy(dst + whole, tail, (size_t)(bytes - whole));
  } else if (memcmp(dst, x, (size_t)bytes) != 0) {
    int64_t i = 0;
    while (memcmp(dst + i * stored, x + i * stored, (size_t)stored) == 0) i++;
    found->diff = lowest(found->diff, first + i);
  }
}

static void plain_rows(const rm_pack_args *args, part *found, int64_t begin, int64_t end) {
  const int64_t at_once = RUN / (int64_t)rm_dtype_bytes(args->dst_dtype);
  for (int64_t row = begin; row < end; row++)
    for (int64_t col = 0; col < args->cols; col += at_once)
      plain_run(args, found, row, col, rm_min64(at_once, args->cols - col));
}

// ---------------------------------------------------------------------------------------- squares
// 16 rows, `pitch` bytes apart, and the seeds of their digest weights.
typedef struct rows16 {
  const char *at; // the current square in row 0
  int64_t pitch;
  const char *ahead; // the same square of the next run, to prefetch
  __m256i seeds; // of the next four words of rows 0 and 4
  // Steps of seeds: to the next row; four rows on; from row 16 to row 0, four words on.
  __m256i row, four_rows, back;
} rows16;

static rows16 rows_begin(const char *at, const char *ahead, int64_t pitch, int64_t word,
                         int64_t row_words) {
  const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 0, 1, 2, 3),
                upper = _mm256_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4);
  const __m256i row = times_weyl(row_words);
  const __m256i offsets =
      _mm256_add_epi32(_mm256_mullo_epi32(lanes, times_weyl(1)), _mm256_mullo_epi32(upper, row));
  return (rows16){
      .at = at,
      .pitch = pitch,
      .ahead = ahead,
      .seeds = _mm256_add_epi32(_mm256_set1_epi32((int)weight_seed(word)), offsets),
      .row = row,
      .four_rows = times_weyl(4 * row_words),
      .back = times_weyl(4 - 16 * row_words),
  };
}

// Reads each cache line once and whole: rows CROWD apart are all in one set of the L1 cache, which
// holds only half of them.
INLINE void copy_lines(char *lines, const rows16 *rows) {
  for (int i = 0; i < SQUARE; i++) {
    const __m256i *from = (const __m256i *)(rows->at + i * rows->pitch);
    const __m256i a = _mm256_loadu_si256(from), b = _mm256_loadu_si256(from + 1);
    _mm256_store_si256((__m256i *)(lines + i * LINE), a);
    _mm256_store_si256((__m256i *)(lines + i * LINE) + 1, b);
  }
}

// Transposes the next 16 words, out[word][row] ← row[word], and adds to their sums. out is aligned
// to 32; `stream` is a constant.
INLINE void transpose_tile(const int stream, char *out, rows16 *rows, sums *total) {
  _Alignas(64) char lines[SQUARE_BYTES];
  sums s = *total;
  __m256i seeds = rows->seeds;
  const int crowded = rows->pitch % CROWD == 0;
  const char *at = crowded ? lines : rows->at;
  const int64_t pitch = crowded ? LINE : rows->pitch;
  if (crowded) copy_lines(lines, rows);
  for (int word = 0; word < SQUARE; word += 4) {
    __m256i y[8];
    for (int i = 0; i < 4; i++) _mm_prefetch(rows->ahead + (word + i) * rows->pitch, _MM_HINT_T0);
    for (int half = 0; half < 2; half++) {
      __m256i x[4];
      for (int i = 0; i < 4; i++) {
        const char *from = at + (8 * half + i) * pitch + 4 * word;
        const __m256i low = _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)from));
        x[i] =
            _mm256_inserti128_si256(low, _mm_loadu_si128((const __m128i *)(from + 4 * pitch)), 1);
        sums_add(&s, seeds, x[i]);
        seeds = _mm256_add_epi32(seeds, rows->row);
      }
      seeds = _mm256_add_epi32(seeds, rows->four_rows);
      const __m256i ab0 = _mm256_unpacklo_epi32(x[0], x[1]),
                    cd0 = _mm256_unpacklo_epi32(x[2], x[3]);
      const __m256i ab1 = _mm256_unpackhi_epi32(x[0], x[1]),
                    cd1 = _mm256_unpackhi_epi32(x[2], x[3]);
      y[0 + half] = _mm256_unpacklo_epi64(ab0, cd0);
      y[2 + half] = _mm256_unpackhi_epi64(ab0, cd0);
      y[4 + half] = _mm256_unpacklo_epi64(ab1, cd1);
      y[6 + half] = _mm256_unpackhi_epi64(ab1, cd1);
    }
    seeds = _mm256_add_epi32(seeds, rows->back);
    for (int i = 0; i < 8; i++) {
      __m256i *to = (__m256i *)(out + word * LINE + i * 32);
      // Bypasses the cache: the weights are not read before the swap, and a streaming store does
      // not fetch the line first.
      if (stream) _mm256_stream_si256(to, y[i]);
      else _mm256_store_si256(to, y[i]);
    }
  }
  *total = s;
  rows->seeds = seeds;
  rows->at += LINE;
  rows->ahead += LINE;
}

// Writes some lanes of a square that is shared with another parameter or not aligned.
static void emit_lanes(char *dst, const uint32_t *square, int lane0, int lanes) {
  for (int w = 0; w < SQUARE; w++)
    memcpy(dst + 4 * (w * SQUARE + lane0), square + w * SQUARE + lane0, (size_t)lanes * 4);
}

// Returns the lowest (lane, element of its 32) whose stored bits differ, as lane·32 + element; −1
// if there is none. Padding is zero on both sides.
static int64_t compare_lanes(const char *dst, const uint32_t *square, int lane0, int lanes,
                             rm_dtype dtype) {
  for (int lane = lane0; lane < lane0 + lanes; lane++) {
    for (int w = 0; w < SQUARE; w++) {
      const uint32_t differ = load32(dst + 4 * (w * SQUARE + lane)) ^ square[w * SQUARE + lane];
      if (differ)
        return (int64_t)(lane - lane0) * RM_K_BLOCK +
               (dtype == RM_BF16 ? 2 * w + !(differ & 0xFFFF) : w);
    }
  }
  return -1;
}

// A copy of source rows [row, row + lanes) and columns [col, col + n) to a row of tiles, from lane
// lane0 on.
typedef struct packed_run {
  int64_t tile_row, row;
  int lane0, lanes;
  int64_t col, n;
  const char *ahead; // start of the next run in the source
} packed_run;

static int64_t packed_tile_row(const rm_pack_args *args, int64_t tile) {
  return args->layout == RM_PACKED ? tile : 2 * tile + (args->layout == RM_PACKED_UP);
}

static char *packed_dst(const rm_pack_args *args, const packed_run *run) {
  const int64_t tiles_across = rm_round_up(args->dst_cols, RM_K_BLOCK) / RM_K_BLOCK;
  const int64_t tile = run->tile_row * tiles_across + run->col / RM_K_BLOCK;
  return (char *)args->dst +
         tile * RM_N_TILE * RM_K_BLOCK * (int64_t)rm_dtype_bytes(args->dst_dtype);
}

// Transposes the run's squares to their places, or compares them.
static void pack_squares(const rm_pack_args *args, part *found, const packed_run *run, rows16 *rows,
                         int64_t squares, sums *total) {
  _Alignas(64) uint32_t square[SQUARE * SQUARE];
  char *dst = packed_dst(args, run);
  const int64_t first = run->row * args->cols + run->col,
                words = 4 / (int64_t)rm_dtype_bytes(args->dst_dtype);
  const int whole = run->lanes == SQUARE && (uintptr_t)dst % 32 == 0;
  for (int64_t i = 0; i < squares; i++, dst += SQUARE_BYTES) {
    if (whole && !args->compare) {
      transpose_tile(1, dst, rows, total);
      continue;
    }
    transpose_tile(0, (char *)square, rows, total);
    if (!args->compare) {
      emit_lanes(dst, square, run->lane0, run->lanes);
    } else if (!whole || memcmp(dst, square, SQUARE_BYTES) != 0) {
      const int64_t at = compare_lanes(dst, square, run->lane0, run->lanes, args->dst_dtype);
      if (at >= 0)
        found->diff = lowest(found->diff, first + at / RM_K_BLOCK * args->cols +
                                              i * SQUARE * words + at % RM_K_BLOCK);
    }
  }
}

// Fetches a row of the next run, since its rows are too short for the hardware prefetcher. Fetches
// into the L2 cache, since rows that are CROWD apart evict one another from L1.
static void fetch_ahead(const rm_pack_args *args, const char *ahead, int row, int64_t n) {
  const int64_t size = src_bytes(args->src_dtype);
  if (args->col_stride != 1) return;
  const char *from = ahead + row * args->row_stride * size;
  for (int64_t at = 0; at < n * size; at += LINE) _mm_prefetch(from + at, _MM_HINT_T1);
}

// Converts the rows of a run to their stored form, in a buffer of RUN bytes for each lane; the
// other lanes are zero.
static void copy_run(const rm_pack_args *args, const packed_run *run, char *buffer, int64_t bytes) {
  for (int lane = 0; lane < SQUARE; lane++)
    if (lane < run->lane0 || lane >= run->lane0 + run->lanes)
      memset(buffer + lane * RUN, 0, (size_t)bytes);
  char *to = buffer + run->lane0 * RUN;
  if (is_transposed(args)) copy_columns(args, run->row, run->lanes, run->col, run->n, to, bytes);
  else
    for (int in = 0; in < run->lanes; in++) {
      fetch_ahead(args, run->ahead, in, run->n);
      copy_row(args, run->row + in, run->col, run->n, to + in * RUN, bytes);
    }
}

static void pack_run(const rm_pack_args *args, part *found, const packed_run *run) {
  _Alignas(64) char buffer[SQUARE * RUN];
  const int64_t stored = (int64_t)rm_dtype_bytes(args->dst_dtype), per_word = 4 / stored,
                row_words = args->cols / per_word;
  const int64_t bytes = rm_round_up(run->n, RM_K_BLOCK) * stored,
                first = run->row * args->cols + run->col;
  const int direct = run->lanes == SQUARE && run->n % RM_K_BLOCK == 0 && is_direct(args);
  const char *at = direct ? source(args, run->row, run->col) : buffer;
  const int64_t pitch = direct ? args->row_stride * stored : RUN;
  if (!direct) copy_run(args, run, buffer, bytes);

  rows16 rows = rows_begin(at, direct ? run->ahead : at, pitch,
                           (args->index0 + first) / per_word - run->lane0 * row_words, row_words);
  sums s = sums_begin(args->dst_dtype);
  pack_squares(args, found, run, &rows, bytes / LINE, &s);

  const int bad = sums_bad(&s), split = splits_words(args);
  if (!split) found->digest += sums_digest(&s);
  for (int in = 0; (bad || split) && in < run->lanes; in++) {
    const char *x = at + (run->lane0 + in) * pitch;
    if (bad) find_nonfinite(found, args->dst_dtype, x, first + in * args->cols, run->n);
    if (split) found->digest += digest_elements(x, args->index0 + first + in * args->cols, run->n);
  }
}

// Packs a row of tiles: whole tiles, then a partial last one.
static void packed_tile(const rm_pack_args *args, part *found, int64_t tile, int64_t col,
                        int64_t end) {
  const int64_t at_once = RUN / (int64_t)rm_dtype_bytes(args->dst_dtype),
                whole = args->cols / RM_K_BLOCK * RM_K_BLOCK;
  const int64_t low = rm_max64(tile * RM_N_TILE, args->dst_row0);
  const int64_t high = rm_min64((tile + 1) * RM_N_TILE, args->dst_row0 + args->rows);
  packed_run run = {
      .tile_row = packed_tile_row(args, tile),
      .row = low - args->dst_row0,
      .lane0 = (int)(low % RM_N_TILE),
      .lanes = (int)(high - low),
  };
  for (run.col = col; run.col < end; run.col += run.n) {
    run.n = rm_min64(at_once, (run.col < whole ? rm_min64(whole, end) : end) - run.col);
    run.ahead = run.col + run.n < end ? source(args, run.row, run.col + run.n)
                                      : source(args, run.row + run.lanes, col);
    pack_run(args, found, &run);
  }
}

// Walks the source in memory order: along the rows, or down the columns of a transposed view.
static void packed_tiles(const rm_pack_args *args, part *found, int64_t begin, int64_t end) {
  const int64_t step = is_transposed(args) ? RM_K_BLOCK : args->cols;
  for (int64_t col = 0; col < args->cols; col += step)
    for (int64_t tile = begin; tile < end; tile++)
      packed_tile(args, found, tile, col, rm_min64(col + step, args->cols));
}

// ----------------------------------------------------------------------------------------- the op
typedef struct job {
  const rm_pack_args *args;
  part parts[MAX_PARTS];
} job;

// Each thread takes whole destination tiles, so that threads write different cache lines.
static void pack_task(void *arg, int thread, int n_threads) {
  job *work = arg;
  const rm_pack_args *args = work->args;
  part *found = &work->parts[thread];
  const int plain = args->layout == RM_PLAIN;
  const int64_t low = plain ? 0 : args->dst_row0 / RM_N_TILE;
  const int64_t n =
      (plain ? args->rows : rm_round_up(args->dst_row0 + args->rows, RM_N_TILE) / RM_N_TILE) - low;
  const int64_t begin = low + n * thread / n_threads, end = low + n * (thread + 1) / n_threads;
  if (plain) plain_rows(args, found, begin, end);
  else packed_tiles(args, found, begin, end);
  _mm_sfence(); // orders streamed stores before the signal that the thread is done
}

void rm_cpu_pack(const rm_ctx *ctx, rm_pack_args *args) {
  job work;
  work.args = args;
  args->digest = 0;
  args->nonfinite_index = args->diff_index = -1;
  if (args->rows <= 0 || args->cols <= 0) return;
  const int n = ctx->n_threads <= MAX_PARTS ? ctx->n_threads : 1;
  for (int i = 0; i < n; i++) work.parts[i] = (part){.nonfinite = -1, .diff = -1};
  rm_parallel(ctx, n > 1 ? args->rows * args->cols / 3 : 0, pack_task, &work);
  for (int i = 0; i < n; i++) {
    args->digest += work.parts[i].digest;
    args->nonfinite_index = lowest(args->nonfinite_index, work.parts[i].nonfinite);
    args->diff_index = lowest(args->diff_index, work.parts[i].diff);
  }
}

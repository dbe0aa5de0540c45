// pack.cu: packs a tensor on the device into a parameter, docs/numerics.md §8. A block of threads
// takes a part of 16 destination rows × 256 columns. It reads the source in memory order (along
// rows, or down the columns of a transposed view), eight elements in each thread at a time, and
// stores the converted elements to shared memory. Then it writes the tiles in memory order, a word
// of 32 bits in each thread at a time, sums the digest and finds non-finite values. So it reads and
// writes whole sectors. A block processes two parts and then reduces its results once. Results are
// sums mod 2^64 and minima of indices, so blocks may add theirs in any order, by integer atomics.
#include <type_traits>

#include "device.cuh"
#include "packing.cuh"

#include "cpu/pack_bits.h"

namespace {

constexpr int THREADS = 256, ROWS = RM_N_TILE, COLS = 256, PARTS = 2, MAX_GRID_Y = 65535;
constexpr int CHUNK = 8, CHUNKS = ROWS * COLS / CHUNK / THREADS; // elements; chunks per thread

template <rm_dtype DTYPE>
using stored_type = std::conditional_t<DTYPE == RM_BF16, uint16_t, uint32_t>;
template <rm_src_dtype SRC>
using source_type = std::conditional_t<SRC == RM_SRC_F64, uint64_t,
                                       std::conditional_t<SRC == RM_SRC_F32, uint32_t, uint16_t>>;
template <rm_dtype DTYPE> constexpr int PER_WORD = 4 / sizeof(stored_type<DTYPE>);
template <rm_dtype DTYPE> constexpr int PITCH = COLS + 4 * PER_WORD<DTYPE>; // keeps chunks aligned

// Adjacent elements of the source, which are loaded 16 bytes at a time.
template <class T> struct alignas(16) chunk {
  T of[CHUNK];
};

struct found {
  uint64_t digest, nonfinite, diff; // indices are ~0 (−1) if there is none
};

struct tile {
  int64_t row0, col0; // row of the destination, column of the source
};
struct place_in_tile {
  int row, col;
};

// How chunks lie in the source. down: along its columns, else along its rows; wide: whole chunks
// are adjacent and aligned, and are loaded at once.
struct order {
  bool down, wide;
};

template <rm_dtype DTYPE, rm_src_dtype SRC>
__device__ stored_type<DTYPE> stored_bits(source_type<SRC> x) {
  if constexpr (SRC == RM_SRC_BF16) return DTYPE == RM_BF16 ? x : static_cast<uint32_t>(x) << 16;
  uint32_t bits;
  if constexpr (SRC == RM_SRC_F16) bits = f32_from_f16(x);
  else if constexpr (SRC == RM_SRC_F64) bits = f32_from_f64(x);
  else bits = x;
  return DTYPE == RM_BF16 ? bf16_from_f32(bits) : bits;
}

template <rm_dtype DTYPE, rm_src_dtype SRC>
__device__ void read_tile(stored_type<DTYPE> *stored, const rm_pack_args &a, tile t, order o) {
  using T = source_type<SRC>;
  chunk<T> x[CHUNKS];
  const auto place = [o](int n) {
    const int i = rm_thread() + n * THREADS;
    return o.down ? place_in_tile{i % 2 * CHUNK, i / 2}
                  : place_in_tile{i * CHUNK / COLS, i * CHUNK % COLS};
  };
#pragma unroll
  for (int n = 0; n < CHUNKS; n++) {
    const place_in_tile at = place(n);
    const int64_t row = t.row0 + at.row - a.dst_row0, col = t.col0 + at.col;
    const T *from = static_cast<const T *>(a.src) + row * a.row_stride + col * a.col_stride;
    const int last = CHUNK - 1, right = o.down ? 0 : last;
    if (o.wide && row >= 0 && row + last - right < a.rows && col + right < a.cols) {
      x[n] = *reinterpret_cast<const chunk<T> *>(from);
      continue;
    }
    const int64_t step = o.down ? a.row_stride : a.col_stride;
    for (int j = 0; j < CHUNK; j++) {
      const int64_t r = row + (o.down ? j : 0), c = col + (o.down ? 0 : j);
      x[n].of[j] = r >= 0 && r < a.rows && c < a.cols ? from[j * step] : 0;
    }
  }
#pragma unroll
  for (int n = 0; n < CHUNKS; n++) {
    const place_in_tile at = place(n);
    stored_type<DTYPE> *to = stored + at.row * PITCH<DTYPE> + at.col;
    chunk<stored_type<DTYPE>> bits;
    for (int j = 0; j < CHUNK; j++) bits.of[j] = stored_bits<DTYPE, SRC>(x[n].of[j]);
    if (!o.down) *reinterpret_cast<chunk<stored_type<DTYPE>> *>(to) = bits;
    else
      for (int j = 0; j < CHUNK; j++) to[j * PITCH<DTYPE>] = bits.of[j];
  }
}

template <rm_dtype DTYPE, rm_packing PACKING>
__device__ int64_t place(const rm_pack_args &a, int64_t dst_row, int64_t col) {
  if (a.layout == RM_PLAIN) return dst_row * a.dst_cols + col;
  const int64_t row = a.layout == RM_PACKED
                          ? dst_row
                          : rm_gate_up_place<PACKING>(dst_row, a.layout == RM_PACKED_UP);
  return rm_weight_index<DTYPE, PACKING>(a.dst_cols, row, col);
}

// Writes or compares words; in bf16 a word has an even and an odd column. Columns after the last,
// up to a whole tile, are zero. In a packed matrix a part's words are contiguous. In mma tiles of
// gate and up, a part has every second word: of rows 0 to 7 from `first` on, and of rows 8 to 15
// from `below` on.
template <rm_dtype DTYPE, rm_packing PACKING>
__device__ void write_tile(const stored_type<DTYPE> *stored, found *f, const rm_pack_args &a,
                           tile t) {
  constexpr int PER = PER_WORD<DTYPE>;
  constexpr bool TILED = PACKING == RM_PACKING_MMA;
  stored_type<DTYPE> *dst = static_cast<stored_type<DTYPE> *>(a.dst);
  const bool plain = a.layout == RM_PLAIN;
  const int64_t limit = plain ? a.cols : rm_round_up(a.cols, RM_K_BLOCK);
  const int64_t first = place<DTYPE, PACKING>(a, t.row0, t.col0),
                below = place<DTYPE, PACKING>(a, t.row0 + 8, t.col0);
  const bool words = !plain || (reinterpret_cast<uintptr_t>(dst) % 4 == 0 && a.cols % PER == 0);
#pragma unroll 2
  for (int n = 0; n < ROWS * COLS / PER / THREADS; n++) {
    const int i = rm_thread() + n * THREADS;
    const int r = plain   ? i * PER / COLS
                  : TILED ? i % 128 / 16 + i % 2 * 8
                          : i % ROWS,
              c = plain   ? i * PER % COLS
                  : TILED ? i / 128 * 16 + i / 4 % 4 * 2 + i / 2 % 2 * 8
                          : i / ROWS * PER;
    const int64_t row = t.row0 + r - a.dst_row0, col = t.col0 + c, index = row * a.cols + col;
    if (row < 0 || row >= a.rows || col >= limit) continue;
    const uint32_t word = *reinterpret_cast<const uint32_t *>(stored + r * PITCH<DTYPE> + c);
    stored_type<DTYPE> *to = dst + (plain    ? first + r * a.dst_cols + c
                                    : !TILED ? first + i * PER
                                    : i % 2  ? below + (i - 1) * PER
                                             : first + i * PER);
    const bool pairs = PER == 2 && a.cols % 2 == 0; // then index0 is even, too
    if (pairs) f->digest += static_cast<uint64_t>(weight((a.index0 + index) >> 1)) * word;
    for (int j = 0; j < PER && col + j < a.cols; j++) {
      const stored_type<DTYPE> bits = static_cast<stored_type<DTYPE>>(word >> 16 * j);
      const uint64_t at = static_cast<uint64_t>(index + j);
      if (!pairs) f->digest += element_digest(a.index0 + index + j, bits, DTYPE);
      if (is_nonfinite(bits, DTYPE)) f->nonfinite = rm_least_of()(f->nonfinite, at);
      if (a.compare && to[j] != bits) f->diff = rm_least_of()(f->diff, at);
      if (!a.compare && !words) to[j] = bits;
    }
    if (!a.compare && words) *reinterpret_cast<uint32_t *>(to) = word;
  }
}

__device__ unsigned long long *word_of(void *p) { return static_cast<unsigned long long *>(p); }

template <rm_dtype DTYPE, rm_packing PACKING, rm_src_dtype SRC>
__global__ void __launch_bounds__(THREADS, SRC == RM_SRC_F64 ? 2 : 4)
    pack_kernel(rm_pack_args a, order o) {
  RM_SHARED(shared);
  uint64_t *by_warp = reinterpret_cast<uint64_t *>(shared);
  auto *stored = reinterpret_cast<stored_type<DTYPE> *>(by_warp + THREADS / RM_WARP);
  found f = {0, ~0ull, ~0ull};
  const int64_t end = a.dst_row0 + a.rows;
  tile t = {a.dst_row0 / ROWS * ROWS + blockIdx.y * static_cast<int64_t>(ROWS),
            blockIdx.x * static_cast<int64_t>(COLS)};
  for (; t.row0 < end; t.row0 += gridDim.y * static_cast<int64_t>(ROWS)) {
    read_tile<DTYPE, SRC>(stored, a, t, o);
    __syncthreads();
    write_tile<DTYPE, PACKING>(stored, &f, a, t);
    __syncthreads(); // before the next tile
  }
  f.digest = rm_over_block<THREADS>(f.digest, by_warp, rm_sum_of());
  f.nonfinite = rm_over_block<THREADS>(f.nonfinite, by_warp, rm_least_of());
  f.diff = rm_over_block<THREADS>(f.diff, by_warp, rm_least_of());
  if (threadIdx.x != 0) return;
  atomicAdd(word_of(&a.found->digest), f.digest);
  if (f.nonfinite != ~0ull) atomicMin(word_of(&a.found->nonfinite_index), f.nonfinite);
  if (f.diff != ~0ull) atomicMin(word_of(&a.found->diff_index), f.diff);
}

__global__ void begin_kernel(rm_pack_found *found) { *found = {0, -1, -1}; }

int64_t absolute(int64_t n) { return n < 0 ? -n : n; }

order order_of(const rm_pack_args *a) {
  const bool down = a->rows > 1 && absolute(a->col_stride) > absolute(a->row_stride);
  const int64_t along = down ? a->row_stride : a->col_stride, across = down          ? a->col_stride
                                                                       : a->rows > 1 ? a->row_stride
                                                                                     : 0;
  const int64_t bytes = static_cast<int64_t>(rm_src_bytes(a->src_dtype));
  const bool aligned = (reinterpret_cast<uintptr_t>(a->src) | across * bytes) % 16 == 0 &&
                       (!down || a->dst_row0 % CHUNK == 0);
  return {down, along == 1 && aligned};
}

template <rm_dtype DTYPE, rm_packing PACKING, rm_src_dtype SRC>
void launch(const rm_ctx *ctx, rm_pack_args *a) {
  RM_LAUNCH(begin_kernel, 1, 1, 0, ctx->stream, a->found);
  const int64_t tile_rows = (a->dst_row0 + a->rows + ROWS - 1) / ROWS - a->dst_row0 / ROWS;
  const dim3 grid =
      rm_grid(rm_blocks(a->cols, COLS), rm_min64((tile_rows + PARTS - 1) / PARTS, MAX_GRID_Y));
  const size_t shared =
      THREADS / RM_WARP * sizeof(uint64_t) + ROWS * PITCH<DTYPE> * sizeof(stored_type<DTYPE>);
  RM_LAUNCH((pack_kernel<DTYPE, PACKING, SRC>), grid, THREADS, shared, ctx->stream, *a,
            order_of(a));
}

template <rm_dtype DTYPE, rm_packing PACKING> void launch(const rm_ctx *ctx, rm_pack_args *a) {
  switch (a->src_dtype) {
    case RM_SRC_BF16: launch<DTYPE, PACKING, RM_SRC_BF16>(ctx, a); break;
    case RM_SRC_F16: launch<DTYPE, PACKING, RM_SRC_F16>(ctx, a); break;
    case RM_SRC_F64: launch<DTYPE, PACKING, RM_SRC_F64>(ctx, a); break;
    default: launch<DTYPE, PACKING, RM_SRC_F32>(ctx, a);
  }
}

} // namespace

void rm_cuda_pack(const rm_ctx *ctx, rm_pack_args *a) {
  rm_by_dtype(a->dst_dtype, [&]<rm_dtype DTYPE>() { launch<DTYPE, RM_PACKING_X86>(ctx, a); });
}

void rm_cuda_mma_pack(const rm_ctx *ctx, rm_pack_args *a) {
  if (a->dst_dtype == RM_BF16) launch<RM_BF16, RM_PACKING_MMA>(ctx, a);
  else rm_cuda_pack(ctx, a);
}

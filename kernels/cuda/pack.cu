// pack.cu: packs a tensor on the device into a parameter, docs/numerics.md §8. A block of threads
// takes 16 destination rows × 128 columns: it reads the source in memory order (along rows, or down
// the columns of a transposed view), converts it into shared memory while it sums the digest and
// finds non-finite values, then writes the tiles in memory order. So it reads and writes whole
// sectors. A block processes four such parts and then reduces its results once. Results are sums
// mod 2^64 and minima of indices, so blocks may add theirs in any order, by integer atomics.
#include <type_traits>

#include "device.cuh"
#include "packing.cuh"

#include "cpu/pack_bits.h"

namespace {

constexpr int THREADS = 256, ROWS = RM_N_TILE, COLS = 128, TILES = 4, MAX_GRID_Y = 65535;
constexpr int PITCH = COLS + 1; // no bank conflicts down columns

__device__ uint32_t f32_of(const rm_pack_args &a, int64_t at) {
  switch (a.src_dtype) {
    case RM_SRC_BF16: return static_cast<uint32_t>(static_cast<const uint16_t *>(a.src)[at]) << 16;
    case RM_SRC_F16: return f32_from_f16(static_cast<const uint16_t *>(a.src)[at]);
    case RM_SRC_F64: return f32_from_f64(static_cast<const uint64_t *>(a.src)[at]);
    default: return static_cast<const uint32_t *>(a.src)[at];
  }
}

template <rm_dtype DTYPE>
__device__ uint32_t stored_bits(const rm_pack_args &a, int64_t row, int64_t col) {
  const int64_t at = row * a.row_stride + col * a.col_stride;
  if (DTYPE == RM_F32) return f32_of(a, at);
  return a.src_dtype == RM_SRC_BF16 ? static_cast<const uint16_t *>(a.src)[at]
                                    : bf16_from_f32(f32_of(a, at));
}

template <rm_dtype DTYPE, rm_packing PACKING>
__device__ int64_t place(const rm_pack_args &a, int64_t dst_row, int64_t col) {
  if (a.layout == RM_PLAIN) return dst_row * a.dst_cols + col;
  const int64_t row = a.layout == RM_PACKED
                          ? dst_row
                          : rm_gate_up_place<PACKING>(dst_row, a.layout == RM_PACKED_UP);
  return rm_weight_index<DTYPE, PACKING>(a.dst_cols, row, col);
}

template <rm_dtype DTYPE>
using stored_type = std::conditional_t<DTYPE == RM_BF16, uint16_t, uint32_t>;

struct found {
  uint64_t digest, nonfinite, diff; // indices are ~0 (−1) if there is none
};

struct tile {
  int64_t row0, col0; // row of the destination, column of the source
};

template <rm_dtype DTYPE, rm_packing PACKING>
__device__ void read_tile(uint32_t *stored, found *f, const rm_pack_args &a, tile t, bool down) {
  for (int i = rm_thread(); i < ROWS * COLS; i += THREADS) {
    const int r = down ? i % ROWS : i / COLS, c = down ? i / ROWS : i % COLS;
    const int64_t row = t.row0 + r - a.dst_row0, col = t.col0 + c, index = row * a.cols + col;
    uint32_t bits = 0;
    if (row >= 0 && row < a.rows && col < a.cols) {
      bits = stored_bits<DTYPE>(a, row, col);
      f->digest += element_digest(a.index0 + index, bits, DTYPE);
      if (is_nonfinite(bits, DTYPE))
        f->nonfinite = rm_least_of()(f->nonfinite, static_cast<uint64_t>(index));
      if (a.compare && static_cast<const stored_type<DTYPE> *>(
                           a.dst)[place<DTYPE, PACKING>(a, t.row0 + r, col)] != bits)
        f->diff = rm_least_of()(f->diff, static_cast<uint64_t>(index));
    }
    stored[r * PITCH + c] = bits;
  }
}

template <rm_dtype DTYPE>
__device__ void write_plain(const uint32_t *stored, const rm_pack_args &a, tile t, int low,
                            int high) {
  for (int i = rm_thread(); i < ROWS * COLS; i += THREADS) {
    const int r = i / COLS, c = i % COLS;
    if (r >= low && r < high && t.col0 + c < a.cols)
      static_cast<stored_type<DTYPE> *>(a.dst)[(t.row0 + r) * a.dst_cols + t.col0 + c] =
          static_cast<stored_type<DTYPE>>(stored[r * PITCH + c]);
  }
}

// Writes words of 32 bits; in bf16 an even and an odd column. Columns after the last, up to a whole
// tile, are zero. Adjacent threads write adjacent words of a matrix; of gate or up, every second
// pair.
template <rm_dtype DTYPE, rm_packing PACKING>
__device__ void write_packed(const uint32_t *stored, const rm_pack_args &a, tile t, int low,
                             int high) {
  constexpr int PER_WORD = DTYPE == RM_BF16 ? 2 : 1;
  for (int i = rm_thread(); i < ROWS * COLS / PER_WORD; i += THREADS) {
    const bool tiled = PACKING == RM_PACKING_MMA;
    const int r = tiled ? i % 128 / 16 + i % 2 * 8 : i % ROWS,
              c = tiled ? i / 128 * 16 + i / 4 % 4 * 2 + i / 2 % 2 * 8 : i / ROWS * PER_WORD;
    if (r < low || r >= high || t.col0 + c >= rm_round_up(a.cols, RM_K_BLOCK)) continue;
    const uint32_t *from = stored + r * PITCH + c;
    const uint32_t word = DTYPE == RM_BF16 ? from[0] | from[1] << 16 : from[0];
    static_cast<uint32_t *>(a.dst)[place<DTYPE, PACKING>(a, t.row0 + r, t.col0 + c) / PER_WORD] =
        word;
  }
}

__device__ unsigned long long *word_of(void *p) { return static_cast<unsigned long long *>(p); }

template <rm_dtype DTYPE, rm_packing PACKING>
__global__ void __launch_bounds__(THREADS) pack_kernel(rm_pack_args a, bool down) {
  RM_SHARED(shared);
  uint64_t *by_warp = reinterpret_cast<uint64_t *>(shared);
  uint32_t *stored = reinterpret_cast<uint32_t *>(by_warp + THREADS / RM_WARP);
  found f = {0, ~0ull, ~0ull};
  const int64_t end = a.dst_row0 + a.rows;
  tile t = {a.dst_row0 / ROWS * ROWS + blockIdx.y * static_cast<int64_t>(ROWS),
            blockIdx.x * static_cast<int64_t>(COLS)};
  for (; t.row0 < end; t.row0 += gridDim.y * static_cast<int64_t>(ROWS)) {
    read_tile<DTYPE, PACKING>(stored, &f, a, t, down);
    __syncthreads();
    const int low = static_cast<int>(rm_max64(0, a.dst_row0 - t.row0)),
              high = static_cast<int>(rm_min64(ROWS, end - t.row0));
    if (!a.compare && a.layout == RM_PLAIN) write_plain<DTYPE>(stored, a, t, low, high);
    else if (!a.compare) write_packed<DTYPE, PACKING>(stored, a, t, low, high);
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

template <rm_dtype DTYPE, rm_packing PACKING> void launch(const rm_ctx *ctx, rm_pack_args *a) {
  RM_LAUNCH(begin_kernel, 1, 1, 0, ctx->stream, a->found);
  const int64_t tile_rows = (a->dst_row0 + a->rows + ROWS - 1) / ROWS - a->dst_row0 / ROWS;
  const dim3 grid =
      rm_grid(rm_blocks(a->cols, COLS), rm_min64((tile_rows + TILES - 1) / TILES, MAX_GRID_Y));
  const size_t shared = THREADS / RM_WARP * sizeof(uint64_t) + ROWS * PITCH * sizeof(uint32_t);
  const bool down = a->rows > 1 && absolute(a->col_stride) > absolute(a->row_stride);
  RM_LAUNCH((pack_kernel<DTYPE, PACKING>), grid, THREADS, shared, ctx->stream, *a, down);
}

} // namespace

void rm_cuda_pack(const rm_ctx *ctx, rm_pack_args *a) {
  rm_by_dtype(a->dst_dtype, [&]<rm_dtype DTYPE>() { launch<DTYPE, RM_PACKING_X86>(ctx, a); });
}

void rm_cuda_mma_pack(const rm_ctx *ctx, rm_pack_args *a) {
  if (a->dst_dtype == RM_BF16) launch<RM_BF16, RM_PACKING_MMA>(ctx, a);
  else rm_cuda_pack(ctx, a);
}

// gemm_mma.cu: the bf16 gemm of the family cuda_mma for many rows, and the entry point of both of
// its gemms. A block of 8 warps computes a tile of up to 128 × 192, with 32 k per stage;
// asynchronous copies load W's tiles and x up to three stages ahead. W's tiles have the same layout
// in shared memory as in global memory, so a fragment of A is one load of 16 bytes per lane; x is
// swizzled for ldmatrix, which loads B for 16 tokens.
//
// The limits are shared memory's 128 bytes per clock, then registers. The sums of a split and the
// sums of all previous splits are two sets of registers: the cost of the fixed split over k,
// which few rows need (gemm_mma_rows.cu). With 64 × 48 outputs per warp they take 192 of a thread's
// 255 registers, and shared memory can feed 1293 FMAs per clock: 128·192·16 of them for
// rm_tile_bytes = 38,912; 64 × 32 outputs allow 1024. The next fragments are loaded during the
// current products, also across the end of a stage, so the barrier of a stage is before its last 16
// k. rm_choose_tile chooses the launch's tile; each output has the same sums in all of them.
// Rejected: wgmma, because it is not verified that its results are bit-identical to mma.sync's.
#include "gemm_mma.cuh"

namespace {

constexpr int THREADS = RM_TILE_WARPS * RM_WARP, STAGES = 4, STEPS = RM_TILE_K / RM_MMA_K,
              OF_SPLIT = RM_MMA_SPLIT / RM_TILE_K;

template <int TILE> struct tile {
  static constexpr rm_tile_shape OF = RM_TILES[TILE];
  static constexpr int ROWS = OF.rows, COLS = OF.cols, WARPS_OF_COLS = OF.warps_of_cols;
  static constexpr int MT = ROWS / RM_MMA_ROWS / OF.warps_of_rows,
                       NT = COLS / RM_MMA_COLS / OF.warps_of_cols;
  static constexpr int W_BYTES = ROWS * RM_TILE_K * 2, STAGE_BYTES = W_BYTES + COLS * RM_TILE_K * 2,
                       SHARED = STAGES * STAGE_BYTES;
  static constexpr int BLOCKS = MT * NT <= 8 ? 2 : 1; // per multiprocessor
  // Copies of one thread for one stage.
  static constexpr int W_COPIES = W_BYTES / 16 / THREADS,
                       X_COPIES = COLS * RM_TILE_K * 2 / 16 / THREADS;
  static_assert(OF.warps_of_rows * OF.warps_of_cols == RM_TILE_WARPS && NT % 2 == 0 &&
                SHARED <= 99 << 10);
  static_assert(ROWS * RM_TILE_K * 2 % (16 * THREADS) == 0 &&
                COLS * RM_TILE_K * 2 % (16 * THREADS) == 0);
  static_assert(RM_TILE_WARPS * RM_PUT_WORDS<NT> * 4 <= SHARED);
};

constexpr unsigned X_THERE = 1 << 4; // flags share one word, since all registers are used

// The copies of one thread for a stage: 16 bytes each of W_COPIES rows of W's tiles, 4 tile rows
// apart, and of X_COPIES rows of x, 64 apart.
struct source {
  const char *w, *x; // of the next stage
  unsigned there; // bits: which of W's rows exist; from X_THERE on, which of x's
  int blocks; // stages with valid k
};

template <class T>
__device__ source source_of(const rm_gemm_args &a, const uint4 *w, int64_t steps, int tile_rows,
                            const rm_tokens &x) {
  const int t = rm_thread(), tile_row = t / (STEPS * RM_WARP), row = t / (RM_TILE_K / 8),
            vector = t % (RM_TILE_K / 8);
  source s;
  s.w = reinterpret_cast<const char *>(w + tile_row * steps * RM_WARP + t % (STEPS * RM_WARP));
  s.x = reinterpret_cast<const char *>(x.x + (x.row0 + row) * x.ldx + vector * 8);
  s.blocks = static_cast<int>((a.k - vector * 8 + RM_TILE_K - 1) / RM_TILE_K);
  s.there = 0;
  for (int i = 0; i < T::W_COPIES; i++) s.there |= tile_row + i * 4 < tile_rows ? 1u << i : 0;
  for (int i = 0; i < T::X_COPIES; i++) s.there |= x.row0 + row + i * 64 < x.end ? X_THERE << i : 0;
  return s;
}

// Copies a stage. WIDE: rows of x may be read 16 bytes at a time, to their ends. Rows after the end
// are not copied; their results are discarded. After k the stage is filled with zeros.
template <class T, bool WIDE>
__device__ void fill(char *stage, source &s, const rm_gemm_args &a, int64_t steps,
                     const rm_tokens &x, int block) {
  const int t = rm_thread(), row = t / (RM_TILE_K / 8), vector = t % (RM_TILE_K / 8);
  constexpr int STRIDE = THREADS * 16; // in the stage, between a thread's copies of W and of x
#pragma unroll
  for (int i = 0; i < T::W_COPIES; i++)
    rm_copy_async(stage + t * 16 + i * STRIDE, s.w + i * 4 * steps * RM_WARP * 16, s.there >> i & 1,
                  true);
#pragma unroll
  for (int i = 0; i < T::X_COPIES; i++) {
    char *to = stage + T::W_BYTES + rm_tile_vector(row, vector) * 16 + i * STRIDE;
    if constexpr (WIDE)
      rm_copy_async(to, s.x + i * 64 * a.ldx * 2, s.there & X_THERE << i, block < s.blocks);
    else if (s.there & X_THERE << i)
      *reinterpret_cast<uint4 *>(to) =
          rm_load_tokens(x, row + i * 64, static_cast<int64_t>(block) * RM_TILE_K + vector * 8);
  }
  s.w += STEPS * RM_WARP * 16;
  s.x += RM_TILE_K * 2;
}

// The operands of a warp: all of A for a step, and B of 16 tokens.
template <class T> struct fragments {
  uint4 a[T::MT], b;
};
struct lanes { // a lane's offsets of them in a stage
  int w, x[STEPS];
};

template <class T> __device__ lanes lanes_of(int warp, int lane) {
  lanes at;
  at.w = warp / T::WARPS_OF_COLS * T::MT * STEPS * RM_WARP * 16 + lane * 16;
#pragma unroll
  for (int step = 0; step < STEPS; step++)
    at.x[step] =
        T::W_BYTES +
        rm_tile_lane_vector(warp % T::WARPS_OF_COLS * T::NT * RM_MMA_COLS, step, lane) * 16;
  return at;
}

__device__ uint4 load_a(const char *stage, const lanes &at, int step, int m) {
  return *reinterpret_cast<const uint4 *>(stage + at.w + (m * STEPS + step) * RM_WARP * 16);
}
__device__ uint4 load_b(const char *stage, const lanes &at, int step, int pair) {
  return rm_load_matrices(stage + at.x[step] + rm_tile_vector(pair * 2 * RM_MMA_COLS, 0) * 16);
}

// Multiplies one step. Meanwhile loads into f the first fragments of the next step, `next_step` of
// the stage `next`.
template <class T, class MEANWHILE>
__device__ void multiply(float (&sums)[T::MT][T::NT][4], fragments<T> &f, const char *stage,
                         int step, const char *next, int next_step, const lanes &at,
                         MEANWHILE meanwhile) {
#pragma unroll
  for (int pair = 0; pair < T::NT / 2; pair++) {
    const bool is_last = pair + 1 == T::NT / 2;
    const uint4 b = f.b;
    if (pair == 0) meanwhile(); // before more registers are in use
    f.b = is_last ? load_b(next, at, next_step, 0) : load_b(stage, at, step, pair + 1);
#pragma unroll
    for (int m = 0; m < T::MT; m++) {
      rm_mma16(sums[m][2 * pair], f.a[m], {b.x, b.y});
      rm_mma16(sums[m][2 * pair + 1], f.a[m], {b.z, b.w});
      if (is_last) f.a[m] = load_a(next, at, next_step, m);
    }
  }
}

// Ends a split: acc ← acc + sums, and sums ← 0.
template <int MT, int NT>
__device__ void add_split(float (&acc)[MT][NT][4], float (&sums)[MT][NT][4]) {
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        acc[m][n][i] = acc[m][n][i] + sums[m][n][i];
        sums[m][n][i] = 0.0f;
      }
}

// acc ← the tile's sums over all of k; there is at least one stage.
template <class T, bool WIDE>
__device__ void make_tile(float (&acc)[T::MT][T::NT][4], char *stages, source s,
                          const rm_gemm_args &a, int64_t steps, const rm_tokens &x) {
  const int warp = rm_warp(), lane = rm_lane();
  const int blocks = static_cast<int>(steps / STEPS);
  const lanes at = lanes_of<T>(warp, lane);
  for (int block = 0; block < STAGES - 1; block++) {
    if (block < blocks) fill<T, WIDE>(stages + block * T::STAGE_BYTES, s, a, steps, x, block);
    rm_copies_commit();
  }
  rm_copies_wait<STAGES - 2>();
  __syncthreads();
  float sums[T::MT][T::NT][4] = {};
  fragments<T> f;
  f.b = load_b(stages, at, 0, 0);
#pragma unroll
  for (int m = 0; m < T::MT; m++) f.a[m] = load_a(stages, at, 0, m);
#pragma unroll 1
  for (int block = 0; block < blocks; block++) {
    const char *stage = stages + block % STAGES * T::STAGE_BYTES;
#pragma unroll
    for (int step = 0; step + 1 < STEPS; step++)
      multiply<T>(sums, f, stage, step, stage, step + 1, at, [] {});
    rm_copies_wait<STAGES - 3>();
    // All copies of the next stage are complete, and all threads have read the stage that is filled
    // now.
    __syncthreads();
    const int ahead = block + STAGES - 1;
    if (ahead >= blocks) s.there = 0; // instead of a branch, so that copies mix with products
    const char *next = block + 1 < blocks ? stages + (block + 1) % STAGES * T::STAGE_BYTES : stage;
    multiply<T>(sums, f, stage, STEPS - 1, next, 0, at, [&] {
      fill<T, WIDE>(stages + ahead % STAGES * T::STAGE_BYTES, s, a, steps, x, ahead);
      rm_copies_commit();
    });
    if ((block + 1) % OF_SPLIT == 0 || block + 1 == blocks) add_split(acc, sums);
  }
  rm_copies_wait<0>();
}

struct tiles { // of a launch
  unsigned down, across; // of a group; with more rows than `across` tiles hold, blocks loop
};

template <int TILE, bool SWIGLU, bool WIDE>
__global__ void __launch_bounds__(THREADS, tile<TILE>::BLOCKS)
    gemm_kernel(rm_gemm_args a, tiles all) {
  using T = tile<TILE>;
  RM_SHARED(shared);
  const int warp = rm_warp(), warp_row = warp / T::WARPS_OF_COLS,
            warp_col = warp % T::WARPS_OF_COLS;
  const rm_tile_number number = rm_tile_of_block(blockIdx.x, all.down, all.across);
  const int64_t group = blockIdx.z,
                first_tile = number.down * static_cast<int64_t>(T::ROWS / RM_MMA_ROWS),
                steps = rm_mma_steps(a.k);
  const int begin = a.group_rows ? a.group_rows[group] : 0,
            end = a.group_rows ? a.group_rows[group + 1] : static_cast<int>(a.m);
  const int tile_rows = static_cast<int>(
      rm_min64(T::ROWS / RM_MMA_ROWS, rm_mma_tile_rows(rm_mma_w_rows<SWIGLU>(a.n)) - first_tile));
  const uint4 *w =
      reinterpret_cast<const uint4 *>(static_cast<const uint16_t *>(a.w) + group * a.group_stride) +
      first_tile * steps * RM_WARP;
  for (int row0 = begin + static_cast<int>(number.across) * T::COLS; row0 < end;
       row0 += static_cast<int>(all.across) * T::COLS) {
    const rm_tokens x = rm_tokens_of(a.x, a.ldx, a.k, row0, end);
    float acc[T::MT][T::NT][4] = {};
    if (steps > 0)
      make_tile<T, WIDE>(acc, reinterpret_cast<char *>(shared),
                         source_of<T>(a, w, steps, tile_rows, x), a, steps, x);
    __syncthreads(); // the outputs overwrite the stages
    float *mine = shared + warp * RM_PUT_WORDS<T::NT>;
#pragma unroll
    for (int m = 0; m < T::MT; m++) {
      const int at = warp_row * T::MT + m;
      if (at < tile_rows)
        rm_mma_put_outputs<SWIGLU, T::NT>(a, mine, acc[m], first_tile + at,
                                          row0 + warp_col * T::NT * RM_MMA_COLS, end);
    }
    __syncthreads(); // before the next rows' stages
  }
}

template <int TILE, bool SWIGLU, bool WIDE> void launch(const rm_ctx *ctx, const rm_gemm_args *a) {
  using T = tile<TILE>;
  const tiles all = {rm_blocks(rm_mma_w_rows<SWIGLU>(a->n), T::ROWS), rm_row_blocks(a, T::COLS)};
  const dim3 grid = rm_grid(all.down * all.across, 1, a->group_rows ? a->n_groups : 1u);
  rm_allow_shared(gemm_kernel<TILE, SWIGLU, WIDE>, T::SHARED);
  RM_LAUNCH((gemm_kernel<TILE, SWIGLU, WIDE>), grid, THREADS, T::SHARED, ctx->stream, *a, all);
}

constexpr int NARROW = 2; // the tile for an x that cannot be read 16 bytes at a time

template <bool SWIGLU> void launch_as(const rm_ctx *ctx, const rm_gemm_args *a, int of) {
  static_assert(RM_N_TILES == 4);
  if (!rm_is_wide(a->x, a->ldx) || a->k % 8 != 0) launch<NARROW, SWIGLU, false>(ctx, a);
  else if (of == 0) launch<0, SWIGLU, true>(ctx, a);
  else if (of == 1) launch<1, SWIGLU, true>(ctx, a);
  else if (of == 2) launch<2, SWIGLU, true>(ctx, a);
  else launch<3, SWIGLU, true>(ctx, a);
}

// The number of multiprocessors of the current device.
int64_t processors() {
  int ordinal = 0, n = 0;
  if (cudaGetDevice(&ordinal) != cudaSuccess ||
      cudaDeviceGetAttribute(&n, cudaDevAttrMultiProcessorCount, ordinal) != cudaSuccess)
    return 1;
  return n;
}

void gemm(const rm_ctx *ctx, const rm_gemm_args *a, bool swiglu) {
  if (a->m <= 0 || a->n <= 0 || (a->group_rows && a->n_groups <= 0))
    return; // an empty grid is an error
  if (rm_cuda_gemm_mma_rows(ctx, a, swiglu)) return;
  const int64_t rows = swiglu ? rm_mma_w_rows<true>(a->n) : rm_mma_w_rows<false>(a->n);
  rm_cuda_gemm_mma_tiles(ctx, a, swiglu,
                         rm_choose_tile(rows, a->m, a->group_rows ? a->n_groups : 1, processors()));
}

} // namespace

void rm_cuda_gemm_mma_tiles(const rm_ctx *ctx, const rm_gemm_args *a, bool swiglu, int of) {
  if (swiglu) launch_as<true>(ctx, a, of);
  else launch_as<false>(ctx, a, of);
}
void rm_cuda_mma_gemm(const rm_ctx *ctx, const rm_gemm_args *a) {
  if (a->dtype == RM_BF16) gemm(ctx, a, false);
  else rm_cuda_gemm(ctx, a);
}
void rm_cuda_mma_gemm_swiglu(const rm_ctx *ctx, const rm_gemm_args *a) {
  if (a->dtype == RM_BF16) gemm(ctx, a, true);
  else rm_cuda_gemm_swiglu(ctx, a);
}

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
                       X_COPIES = (STAGE_BYTES - W_BYTES) / 16 / THREADS;
  static_assert(OF.warps_of_rows * OF.warps_of_cols == RM_TILE_WARPS && NT % 2 == 0 &&
                SHARED <= RM_MAX_SHARED);
  static_assert((W_COPIES + X_COPIES) * 16 * THREADS == STAGE_BYTES);
  static_assert(RM_TILE_WARPS * RM_PUT_WORDS<NT> * 4 <= SHARED);
};

constexpr unsigned X_THERE = 1 << 4; // flags share one word, since all registers are used

// The copies of one thread for a stage: 16 bytes each of W_COPIES rows of W's tiles, 4 tile rows
// apart, and of X_COPIES rows of x, 64 apart. Rows that do not exist, and x after k, are zeros.
struct source {
  const char *w, *x; // of the next stage
  unsigned there; // bits: which of W's rows exist; from X_THERE on, which of x's
  int blocks; // stages with valid k
};

template <class T>
__device__ source source_of(const rm_gemm_args &a, const uint4 *w, int64_t steps, int tile_rows,
                            int row0, int end) {
  const int t = rm_thread(), tile_row = t / (STEPS * RM_WARP), row = row0 + t / (RM_TILE_K / 8),
            k = t % (RM_TILE_K / 8) * 8;
  source s;
  s.w = reinterpret_cast<const char *>(w + tile_row * steps * RM_WARP + t % (STEPS * RM_WARP));
  s.x = static_cast<const char *>(a.x) + (row * a.ldx + k) * 2;
  s.blocks = static_cast<int>((a.k - k + RM_TILE_K - 1) / RM_TILE_K);
  s.there = 0;
  for (int i = 0; i < T::W_COPIES; i++) s.there |= tile_row + i * 4 < tile_rows ? 1u << i : 0;
  for (int i = 0; i < T::X_COPIES; i++) s.there |= row + i * 64 < end ? X_THERE << i : 0;
  return s;
}

template <class T>
__device__ void fill(char *stage, source &s, const rm_gemm_args &a, int64_t steps, int block) {
  const int t = rm_thread();
  constexpr int STRIDE = THREADS * 16; // in the stage, between a thread's copies of W and of x
#pragma unroll
  for (int i = 0; i < T::W_COPIES; i++)
    rm_copy_async(stage + t * 16 + i * STRIDE, s.w + i * 4 * steps * RM_WARP * 16,
                  s.there >> i & 1);
  char *to = stage + T::W_BYTES + rm_tile_vector(t / (RM_TILE_K / 8), t % (RM_TILE_K / 8)) * 16;
#pragma unroll
  for (int i = 0; i < T::X_COPIES; i++)
    rm_copy_async(to + i * STRIDE, s.x + i * 64 * a.ldx * 2,
                  block < s.blocks && s.there & X_THERE << i);
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
template <class T>
__device__ void make_tile(float (&acc)[T::MT][T::NT][4], char *stages, source s,
                          const rm_gemm_args &a, int64_t steps) {
  const int warp = rm_warp(), lane = rm_lane();
  const int blocks = static_cast<int>(steps / STEPS);
  const lanes at = lanes_of<T>(warp, lane);
  for (int block = 0; block < STAGES - 1; block++) {
    if (block < blocks) fill<T>(stages + block * T::STAGE_BYTES, s, a, steps, block);
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
    if (ahead >= blocks) s.there = 0; // zeros instead of a branch, so that copies mix with products
    const char *next = block + 1 < blocks ? stages + (block + 1) % STAGES * T::STAGE_BYTES : stage;
    multiply<T>(sums, f, stage, STEPS - 1, next, 0, at, [&] {
      fill<T>(stages + ahead % STAGES * T::STAGE_BYTES, s, a, steps, ahead);
      rm_copies_commit();
    });
    if ((block + 1) % OF_SPLIT == 0 || block + 1 == blocks) add_split(acc, sums);
  }
  rm_copies_wait<0>();
}

template <int TILE, bool SWIGLU>
__global__ void __launch_bounds__(THREADS, tile<TILE>::BLOCKS) gemm_kernel(rm_gemm_args a) {
  using T = tile<TILE>;
  RM_SHARED(shared);
  const int warp = rm_warp(), warp_row = warp / T::WARPS_OF_COLS,
            warp_col = warp % T::WARPS_OF_COLS;
  // With more rows than `across` tiles hold, blocks loop.
  const unsigned down = rm_blocks(rm_mma_w_rows(a.n, SWIGLU), T::ROWS), across = gridDim.x / down;
  const rm_tile_number number = rm_tile_of_block(blockIdx.x, down, across);
  const int64_t group = blockIdx.z,
                first_tile = number.down * static_cast<int64_t>(T::ROWS / RM_MMA_ROWS),
                steps = rm_mma_steps(a.k);
  const int begin = a.group_rows ? a.group_rows[group] : 0,
            end = a.group_rows ? a.group_rows[group + 1] : static_cast<int>(a.m);
  // The largest tile has no register left for the bias of a swiglu.
  a.bias = SWIGLU && TILE == 0 ? nullptr : rm_bias_of(RM_BF16, &a, group, SWIGLU);
  const int tile_rows = static_cast<int>(
      rm_min64(T::ROWS / RM_MMA_ROWS, rm_mma_tile_rows(rm_mma_w_rows(a.n, SWIGLU)) - first_tile));
  const uint4 *w = rm_mma_row(a.w, group * a.group_stride, first_tile, a.k);
  for (int row0 = begin + static_cast<int>(number.across) * T::COLS; row0 < end;
       row0 += static_cast<int>(across) * T::COLS) {
    float acc[T::MT][T::NT][4] = {};
    if (steps > 0)
      make_tile<T>(acc, reinterpret_cast<char *>(shared),
                   source_of<T>(a, w, steps, tile_rows, row0, end), a, steps);
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

template <int TILE, bool SWIGLU> void launch(const rm_ctx *ctx, const rm_gemm_args *a) {
  using T = tile<TILE>;
  const unsigned tiles =
      rm_blocks(rm_mma_w_rows(a->n, SWIGLU), T::ROWS) * rm_row_blocks(a, T::COLS);
  RM_LAUNCH((gemm_kernel<TILE, SWIGLU>), rm_grid(tiles, 1, rm_groups(a)), THREADS, T::SHARED,
            ctx->stream, *a);
}

template <bool SWIGLU> void launch_as(const rm_ctx *ctx, const rm_gemm_args *a, int of) {
  constexpr decltype(&launch<0, SWIGLU>) LAUNCHES[RM_N_TILES] = {
      launch<0, SWIGLU>, launch<1, SWIGLU>, launch<2, SWIGLU>, launch<3, SWIGLU>};
  LAUNCHES[of](ctx, a);
}

void gemm(const rm_ctx *ctx, const rm_gemm_args *a, bool swiglu) {
  // Copies of the tiles are 16 bytes of x.
  const bool is_wide = rm_is_wide(a->x, a->ldx, a->k);
  if (!is_wide || a->m <= RM_FEW_ROWS * rm_groups(a)) rm_cuda_gemm_mma_rows(ctx, a, swiglu);
  else
    rm_cuda_gemm_mma_tiles(
        ctx, a, swiglu,
        rm_choose_tile(rm_mma_w_rows(a->n, swiglu), a->m, rm_groups(a), rm_cuda_processors()));
}

} // namespace

int64_t rm_cuda_processors() {
  int ordinal = 0, n = 0;
  if (cudaGetDevice(&ordinal) != cudaSuccess ||
      cudaDeviceGetAttribute(&n, cudaDevAttrMultiProcessorCount, ordinal) != cudaSuccess)
    return 1;
  return n;
}

void rm_cuda_gemm_mma_tiles(const rm_ctx *ctx, const rm_gemm_args *a, bool swiglu, int of) {
  if (swiglu) launch_as<true>(ctx, a, a->bias && of == 0 ? 1 : of);
  else launch_as<false>(ctx, a, of);
}
void rm_cuda_mma_gemm(const rm_ctx *ctx, const rm_gemm_args *a) { gemm(ctx, a, false); }
void rm_cuda_mma_gemm_swiglu(const rm_ctx *ctx, const rm_gemm_args *a) { gemm(ctx, a, true); }

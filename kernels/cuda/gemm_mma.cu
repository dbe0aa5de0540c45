// gemm_mma.cu: the bf16 gemm of the family cuda_mma for many rows, and the door to both of its gemms. A block makes 128 rows of W ×
// 128 tokens, 32 k a stage; W's tiles and x come by asynchronous copies, STAGES − 1 ahead. 8 warps as 2 × 4 make 64 × 32 each. W's tiles
// lie in shared memory as they do in memory, so a fragment of A is one load of 16 bytes a lane; x is swizzled for B's words of 4 bytes.
// The sums of a segment and those of all segments before it are two sets of registers: the price of the fixed split over k, which few
// rows need (gemm_mma_rows.cu), is one addition for 32 instructions. wgmma lost until a GPU has shown that its bits are mma.sync's.
#include "gemm_mma.cuh"

namespace {

constexpr int WARPS = 8, THREADS = WARPS * RM_WARP, STAGES = 3, WARPS_OF_ROWS = 2, WARPS_OF_COLS = 4;
constexpr int TILE_ROWS = RM_TILE_ROWS / RM_MMA_ROWS, STEPS = RM_TILE_K / RM_MMA_K;
constexpr int MT = TILE_ROWS / WARPS_OF_ROWS, NT = RM_TILE_COLS / RM_MMA_COLS / WARPS_OF_COLS;
constexpr int W_BYTES = RM_TILE_ROWS * RM_TILE_K * 2, X_BYTES = RM_TILE_COLS * RM_TILE_K * 2, STAGE_BYTES = W_BYTES + X_BYTES;
constexpr int OF_SEGMENT = RM_MMA_SEGMENT / RM_TILE_K;
static_assert(STAGES * STAGE_BYTES <= 48 << 10, "what a kernel may have without asking");
static_assert(WARPS * RM_PUT_WORDS<NT> * 4 <= STAGES * STAGE_BYTES);

// What a block multiplies.
struct operands {
  const uint4 *w;  // the first row of tiles
  int64_t tile_rows, steps;  // rows of tiles that there are from w on; 16 k each
  rm_tokens x;
};

__device__ void fill(char *stage, const operands &o, int block) {
#pragma unroll
  for (int i = static_cast<int>(threadIdx.x); i < W_BYTES / 16; i += THREADS) {
    const int tile_row = i / (STEPS * RM_WARP), in = i % (STEPS * RM_WARP);
    if (tile_row < o.tile_rows) rm_copy_async(stage + i * 16, o.w + (tile_row * o.steps + block * STEPS) * RM_WARP + in);
  }
#pragma unroll
  for (int i = static_cast<int>(threadIdx.x); i < X_BYTES / 16; i += THREADS) {
    const int row = i / (RM_TILE_K / 8), chunk = i % (RM_TILE_K / 8);
    const int64_t k = static_cast<int64_t>(block) * RM_TILE_K + chunk * 8;
    char *to = stage + W_BYTES + rm_tile_chunk(row, chunk) * 16;
    if (o.x.wide && o.x.row0 + row < o.x.end && k + 8 <= o.x.k) rm_copy_async(to, o.x.x + (o.x.row0 + row) * o.x.ldx + k);
    else *reinterpret_cast<uint4 *>(to) = rm_load_tokens(o.x, row, k);
  }
}

__device__ void multiply(float (&sums)[MT][NT][4], const char *stage, int warp_row, int warp_col, int lane) {
  const uint4 *w = reinterpret_cast<const uint4 *>(stage);
  const uint32_t *x = reinterpret_cast<const uint32_t *>(stage + W_BYTES);
#pragma unroll
  for (int step = 0; step < STEPS; step++) {
    uint2 b[NT];
#pragma unroll
    for (int n = 0; n < NT; n++) {
      const int token = (warp_col * NT + n) * RM_MMA_COLS;
      b[n] = {x[rm_tile_word(token, step, lane, 0)], x[rm_tile_word(token, step, lane, 1)]};
    }
#pragma unroll
    for (int m = 0; m < MT; m++) {
      const uint4 a = w[((warp_row * MT + m) * STEPS + step) * RM_WARP + lane];
#pragma unroll
      for (int n = 0; n < NT; n++) rm_mma16(sums[m][n], a, b[n]);
    }
  }
}

// Ends a segment: acc ← acc + sums, and sums begin again.
__device__ void add_segment(float (&acc)[MT][NT][4], float (&sums)[MT][NT][4]) {
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

template <bool SWIGLU> __global__ void __launch_bounds__(THREADS, 1) gemm_kernel(rm_gemm_args a) {
  RM_SHARED(shared);
  char *stages = reinterpret_cast<char *>(shared);
  const int lane = static_cast<int>(threadIdx.x) % RM_WARP, warp = static_cast<int>(threadIdx.x) / RM_WARP;
  const int warp_row = warp / WARPS_OF_COLS, warp_col = warp % WARPS_OF_COLS, blocks = static_cast<int>(rm_mma_steps(a.k) / STEPS);
  const int64_t group = blockIdx.z, first_tile = blockIdx.x * static_cast<int64_t>(TILE_ROWS);
  const int64_t begin = a.group_rows ? a.group_rows[group] : 0, end = a.group_rows ? a.group_rows[group + 1] : a.m;
  operands o;
  o.steps = rm_mma_steps(a.k);
  o.tile_rows = rm_mma_tile_rows(rm_mma_w_rows<SWIGLU>(a.n)) - first_tile;
  o.w = reinterpret_cast<const uint4 *>(static_cast<const uint16_t *>(a.w) + group * a.group_stride) + first_tile * o.steps * RM_WARP;
  for (int64_t row0 = begin + blockIdx.y * static_cast<int64_t>(RM_TILE_COLS); row0 < end;
       row0 += gridDim.y * static_cast<int64_t>(RM_TILE_COLS)) {
    o.x = rm_tokens_of(a.x, a.ldx, a.k, row0, end);
    float acc[MT][NT][4] = {}, sums[MT][NT][4] = {};
    for (int s = 0; s < STAGES - 1; s++) {
      if (s < blocks) fill(stages + s * STAGE_BYTES, o, s);
      rm_copies_commit();
    }
    for (int block = 0; block < blocks; block++) {
      rm_copies_wait<STAGES - 2>();
      __syncthreads();  // everybody's copies of this stage are there, and the stage that is filled next was read by all
      const int ahead = block + STAGES - 1;
      if (ahead < blocks) fill(stages + ahead % STAGES * STAGE_BYTES, o, ahead);
      rm_copies_commit();
      multiply(sums, stages + block % STAGES * STAGE_BYTES, warp_row, warp_col, lane);
      if ((block + 1) % OF_SEGMENT == 0 || block + 1 == blocks) add_segment(acc, sums);
    }
    rm_copies_wait<0>();
    __syncthreads();  // the stages make room for what a warp puts out
    float *mine = shared + warp * RM_PUT_WORDS<NT>;
#pragma unroll
    for (int m = 0; m < MT; m++) {
      const int tile = warp_row * MT + m;
      if (tile < o.tile_rows) rm_mma_put_outputs<SWIGLU, NT>(a, mine, acc[m], first_tile + tile, row0 + warp_col * NT * RM_MMA_COLS, end);
    }
    __syncthreads();  // before the next rows' stages
  }
}

void gemm(const rm_ctx *ctx, const rm_gemm_args *a, bool swiglu) {
  if (a->m <= 0 || a->n <= 0 || (a->group_rows && a->n_groups <= 0)) return;  // an empty grid is an error
  if (rm_cuda_gemm_mma_rows(ctx, a, swiglu)) return;
  const int64_t rows = swiglu ? rm_mma_w_rows<true>(a->n) : rm_mma_w_rows<false>(a->n);
  const dim3 grid(rm_blocks(rows, RM_TILE_ROWS), rm_row_blocks(a, RM_TILE_COLS), a->group_rows ? static_cast<unsigned>(a->n_groups) : 1u);
  if (swiglu) RM_LAUNCH(gemm_kernel<true>, grid, dim3(THREADS), STAGES * STAGE_BYTES, ctx->stream, *a);
  else RM_LAUNCH(gemm_kernel<false>, grid, dim3(THREADS), STAGES * STAGE_BYTES, ctx->stream, *a);
}

}  // namespace

void rm_cuda_mma_gemm(const rm_ctx *ctx, const rm_gemm_args *a) {
  if (a->dtype == RM_BF16) gemm(ctx, a, false);
  else rm_cuda_gemm(ctx, a);
}
void rm_cuda_mma_gemm_swiglu(const rm_ctx *ctx, const rm_gemm_args *a) {
  if (a->dtype == RM_BF16) gemm(ctx, a, true);
  else rm_cuda_gemm_swiglu(ctx, a);
}

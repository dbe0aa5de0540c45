// gemm_rows.cu: the gemm of few rows, whose time is that of reading W once. A tile of 16 columns
// has all its k in one run of memory. A block of threads walks that run with 16 half-warps; each
// takes its own block of 32 k, with one lane for each column, and loads the words of the next step
// during the current products. The contract adds the sums of blocks of 32 k one by one, and these
// sums are independent, so k may be split: the sums go to shared memory, and a thread for each
// output adds them in order. With swiglu the half-warps of a warp take gate and up of one block of
// k. gemm.cu chooses between the two kernels, which are bit-identical.
#include "device.cuh"

namespace {

constexpr int WARPS = 8, THREADS = WARPS * RM_WARP, SLOTS = 2 * WARPS, PAIRS = RM_K_BLOCK / 2;

// The weights of one column in one tile, by pairs of k, as stored.
template <rm_dtype DTYPE> struct column;
template <> struct column<RM_BF16> {
  using word = uint32_t; // the pair
  word words[PAIRS];
  __device__ void load(const word *p) {
#pragma unroll
    for (int pair = 0; pair < PAIRS; pair++) words[pair] = p[pair * RM_N_TILE];
  }
  __device__ rm_weights both(int pair) const {
    return {rm_float(words[pair] << 16), rm_float(words[pair] & 0xffff0000u)};
  }
};
template <> struct column<RM_F32> {
  using word = float;
  word words[RM_K_BLOCK];
  __device__ void load(const word *p) {
#pragma unroll
    for (int k = 0; k < RM_K_BLOCK; k++) words[k] = p[k * RM_N_TILE];
  }
  __device__ rm_weights both(int pair) const { return {words[2 * pair], words[2 * pair + 1]}; }
};
template <rm_dtype DTYPE>
constexpr int TILE_WORDS = RM_N_TILE * RM_K_BLOCK / (DTYPE == RM_BF16 ? 2 : 1);

// E + O of ROWS rows; x: one block of 32 k of each row, `pitch` apart.
template <rm_dtype DTYPE, int ROWS>
__device__ void dot_tile(float *sums, const float *x, int pitch, const column<DTYPE> &w) {
  float even[ROWS], odd[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; r++) even[r] = odd[r] = 0.0f;
#pragma unroll
  for (int pair = 0; pair < PAIRS; pair++) {
    const rm_weights both = w.both(pair);
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      even[r] = fmaf(x[r * pitch + 2 * pair], both.even, even[r]);
      odd[r] = fmaf(x[r * pitch + 2 * pair + 1], both.odd, odd[r]);
    }
  }
#pragma unroll
  for (int r = 0; r < ROWS; r++) sums[r * RM_N_TILE] = even[r] + odd[r];
}

// Copies k0 … k0 + length of ROWS rows as float32; zeros from row `end` on and after k.
template <rm_dtype DTYPE, int ROWS>
__device__ void stage(float *to, const rm_gemm_args &a, int64_t row0, int64_t end, int k0,
                      int length) {
#pragma unroll 2
  for (int i = rm_thread(); i < ROWS * length; i += THREADS) {
    const int64_t row = row0 + i / length, k = k0 + i % length;
    to[i] = row < end && k < a.k ? rm_get(DTYPE, a.x, row * a.ldx + k) : 0.0f;
  }
}

// Computes ROWS rows from row0 on of one tile of columns of y. w0: offset of the matrix in bytes.
template <rm_dtype DTYPE, bool SWIGLU, int ROWS>
__device__ void few_rows(float *shared, const rm_gemm_args &a, int64_t w0, int64_t row0,
                         int64_t end) {
  constexpr int BLOCKS = SWIGLU ? WARPS : SLOTS, LENGTH = BLOCKS * RM_K_BLOCK,
                PARTS = SLOTS * ROWS * RM_N_TILE;
  // Both are double buffers: one half is filled while the other is read.
  float *const xs = shared, *const parts = shared + 2 * ROWS * LENGTH;
  const int me = rm_thread(), half = me / RM_N_TILE, n = me % RM_N_TILE;
  const int block = SWIGLU ? half / 2 : half; // the half-warp's block of k in a step
  const int64_t tile_row = SWIGLU ? 2 * static_cast<int64_t>(blockIdx.x) + half % 2 : blockIdx.x;
  const int tiles = static_cast<int>(rm_round_up(a.k, RM_K_BLOCK) / RM_K_BLOCK);
  const auto *from =
      reinterpret_cast<const typename column<DTYPE>::word *>(static_cast<const char *>(a.w) + w0) +
      (tile_row * tiles + block) * TILE_WORDS<DTYPE> + n;
  column<DTYPE> w;
  float acc = 0.0f, up = 0.0f; // thread r·16 + n has row r, column n
  if (block < tiles) w.load(from);
  stage<DTYPE, ROWS>(xs, a, row0, end, 0, LENGTH);
  __syncthreads();
  for (int at = 0, turn = 0; at < tiles; at += BLOCKS, turn ^= 1) {
    float *const part = parts + turn * PARTS;
    if (at + block < tiles)
      dot_tile<DTYPE, ROWS>(part + half * ROWS * RM_N_TILE + n,
                            xs + turn * ROWS * LENGTH + block * RM_K_BLOCK, LENGTH, w);
    from += BLOCKS * TILE_WORDS<DTYPE>;
    if (at + BLOCKS + block < tiles) w.load(from);
    if (at + BLOCKS < tiles)
      stage<DTYPE, ROWS>(xs + (turn ^ 1) * ROWS * LENGTH, a, row0, end, (at + BLOCKS) * RM_K_BLOCK,
                         LENGTH);
    __syncthreads(); // one per step is enough: the next step fills the other half
    if (me >= ROWS * RM_N_TILE) continue;
    const int here = tiles - at < BLOCKS ? tiles - at : BLOCKS;
#pragma unroll 4
    for (int b = 0; b < here; b++) {
      acc = acc + part[(SWIGLU ? 2 * b : b) * ROWS * RM_N_TILE + me];
      if constexpr (SWIGLU) up = up + part[(2 * b + 1) * ROWS * RM_N_TILE + me];
    }
  }
  const int64_t row = row0 + me / RM_N_TILE, col = blockIdx.x * static_cast<int64_t>(RM_N_TILE) + n;
  if (me < ROWS * RM_N_TILE && row < end && col < a.n)
    rm_put_output<DTYPE, SWIGLU>(a, row, col, acc, up);
}

template <rm_dtype DTYPE, bool SWIGLU, int ROWS>
__global__ void __launch_bounds__(THREADS, 3) rows_kernel(rm_gemm_args a) {
  RM_SHARED(shared);
  const int64_t group = blockIdx.z;
  const auto [begin, end] = rm_rows_of_group(a, group);
  for (int64_t row0 = begin + blockIdx.y * static_cast<int64_t>(ROWS); row0 < end;
       row0 += gridDim.y * static_cast<int64_t>(ROWS))
    few_rows<DTYPE, SWIGLU, ROWS>(
        shared, a, group * a.group_stride * static_cast<int64_t>(rm_dtype_bytes(DTYPE)), row0, end);
}

template <rm_dtype DTYPE, bool SWIGLU, int ROWS>
void launch(const rm_ctx *ctx, const rm_gemm_args *a) {
  constexpr int LENGTH = (SWIGLU ? WARPS : SLOTS) * RM_K_BLOCK;
  const dim3 grid =
      rm_grid(rm_blocks(a->n, RM_N_TILE), rm_row_blocks(a, ROWS), a->group_rows ? a->n_groups : 1u);
  const size_t shared = 2 * (ROWS * LENGTH + SLOTS * ROWS * RM_N_TILE) * sizeof(float);
  RM_LAUNCH((rows_kernel<DTYPE, SWIGLU, ROWS>), grid, THREADS, shared, ctx->stream, *a);
}

template <bool SWIGLU, int ROWS> void of_dtype(const rm_ctx *ctx, const rm_gemm_args *a) {
  if (a->dtype == RM_BF16) launch<RM_BF16, SWIGLU, ROWS>(ctx, a);
  else launch<RM_F32, SWIGLU, ROWS>(ctx, a);
}

} // namespace

void rm_cuda_gemm_rows(const rm_ctx *ctx, const rm_gemm_args *a, bool swiglu) {
  if (swiglu && a->m == 1) of_dtype<true, 1>(ctx, a);
  else if (swiglu) of_dtype<true, 4>(ctx, a);
  else if (a->m == 1) of_dtype<false, 1>(ctx, a);
  else of_dtype<false, 4>(ctx, a);
}

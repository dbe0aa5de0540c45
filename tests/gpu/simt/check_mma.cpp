// check_mma.cpp: the index arithmetic of the tensor-core kernels, by property: places, packings and
// units are bijections, and the words that the lanes of a warp read at once from shared memory are
// in different banks. It also tests the purpose of all this, without an oracle: a row's bits are
// the same alone and among other rows.
#include "check.h"

#include <cmath>
#include <cstdio>
#include <vector>

#include "attention_mma.cuh"
#include "gemm_mma.cuh"
#include "mma_places.h"
#include "mma_rows.cuh"
#include "random_bits.h"

namespace {

bool fails(const char *what, int64_t a, int64_t b) {
  printf("DIFFERS %s at %ld, %ld\n", what, a, b);
  return false;
}

// Returns whether each of the values 0 … n − 1 was counted once.
struct tally {
  std::vector<int> seen;
  explicit tally(int64_t n) : seen(static_cast<size_t>(n), 0) {}
  void add(int64_t value) {
    if (value < 0 || value >= static_cast<int64_t>(seen.size())) outside = true;
    else seen[static_cast<size_t>(value)]++;
  }
  bool once() const {
    for (const int n : seen)
      if (n != 1) return false;
    return !outside;
  }
  bool outside = false;
};

// Places as described in the PTX manual: a register is 2 k of a row of A or of a column of B, or
// one sum.
bool places() {
  for (int lane = 0; lane < 32; lane++) {
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 8; i++) {
      const rm_mma_place p =
          rm_mma_a_place(i % 4 < 2 ? g : g + 8, t * 2 + (i & 1) + (i < 4 ? 0 : 8));
      if (p.lane != lane || p.word != i / 2 || p.half != i % 2) return fails("A", lane, i);
    }
    for (int i = 0; i < 4; i++) {
      const rm_mma_place p = rm_mma_b_place(t * 2 + (i & 1) + (i < 2 ? 0 : 8), g);
      if (p.lane != lane || p.word != i / 2 || p.half != i % 2) return fails("B", lane, i);
    }
    for (int i = 0; i < 4; i++) {
      const rm_mma_place p = rm_mma_c_place(i < 2 ? g : g + 8, t * 2 + (i & 1));
      if (p.lane != lane || p.word != i || p.half != 0) return fails("C", lane, i);
    }
  }
  return true;
}

bool packings() {
  for (const int64_t n : {1, 15, 16, 17, 40})
    for (const int64_t k : {1, 16, 31, 32, 33, 100}) {
      const int64_t rows = rm_round_up(n, RM_N_TILE), cols = rm_round_up(k, RM_K_BLOCK);
      tally weights(rm_packed_elems(n, k)), values(rm_v_page_elems(rows, k)),
          gate_up(rm_gate_up_rows(n));
      for (int64_t r = 0; r < rows; r++) {
        for (int64_t c = 0; c < cols; c++) weights.add(rm_mma_index(k, r, c));
        for (int64_t d = 0; d < rm_round_up(k, RM_N_TILE); d++) values.add(rm_mma_v_index(k, r, d));
        for (int up = 0; up < 2; up++) gate_up.add(rm_mma_gate_up_row(r, up));
        if (rm_mma_gate_up_row(r, 1) != rm_mma_gate_up_row(r, 0) + 8)
          return fails("gate and up apart", r, n);
      }
      if (!weights.once()) return fails("packed weights", n, k);
      if (!values.once()) return fails("V page", n, k);
      if (!gate_up.once()) return fails("gate and up", n, k);
      // A warp's fragment is one run in the order of its lanes.
      if (rm_mma_index(k, 0, 0) != 0 || rm_mma_index(k, 0, 2) != 8 || rm_mma_index(k, 1, 0) != 32)
        return fails("fragment", n, k);
    }
  return true;
}

bool splits() {
  for (const int64_t k : {1, 512, 513, 2100}) {
    tally steps(rm_mma_steps(k));
    for (int64_t split = 0; split < rm_mma_splits(k); split++)
      for (int64_t i = 0; i < rm_split_steps(k, split); i++) steps.add(split * RM_MMA_STEPS + i);
    if (!steps.once()) return fails("steps of splits", k, 0);
  }
  return true;
}

// Words of shared memory that 32 lanes read at once.
template <class F> bool no_conflict(F word_of) {
  tally banks(32);
  for (int lane = 0; lane < 32; lane++) banks.add(word_of(lane) % 32);
  return banks.once();
}

bool banks() {
  for (int word = 0; word < 2; word++)
    for (int step = 0; step < 2; step++) {
      if (!no_conflict([&](int lane) { return rm_staged_word<128>(0, step, lane, word); }))
        return fails("banks, 128", step, word);
      if (!no_conflict([&](int lane) { return rm_staged_word<256>(8, step, lane, word); }))
        return fails("banks, 256", step, word);
    }
  return true;
}

// x of a tile: every vector has a place; rm_load_matrices makes B from the lanes' vectors; and the 8
// vectors of a phase, like the 8 that are written at once, are in different banks.
bool swizzle() {
  constexpr int COLS = 192, CHUNKS = RM_TILE_K / 8, EIGHT = 8;
  tally vectors(COLS * CHUNKS);
  for (int row = 0; row < COLS; row++)
    for (int vector = 0; vector < CHUNKS; vector++) vectors.add(rm_tile_vector(row, vector));
  if (!vectors.once()) return fails("vectors", 0, 0);
  for (int from = 0; from < COLS * CHUNKS; from += EIGHT) {
    tally banks(EIGHT);
    for (int i = from; i < from + EIGHT; i++)
      banks.add(rm_tile_vector(i / CHUNKS, i % CHUNKS) % EIGHT);
    if (!banks.once()) return fails("banks of what is written", from, 0);
  }
  for (int token = 0; token < COLS; token += 16)
    for (int step = 0; step < RM_TILE_K / RM_MMA_K; step++) {
      for (int phase = 0; phase < 32; phase += EIGHT) {
        tally banks(EIGHT);
        for (int lane = phase; lane < phase + EIGHT; lane++)
          banks.add(rm_tile_lane_vector(token, step, lane) % EIGHT);
        if (!banks.once()) return fails("banks of what is read", token, phase);
      }
      for (int col = 0; col < 16; col++)
        for (int k = 0; k < RM_MMA_K; k++) {
          // Register 2·(col / 8) + word of the lane is a word of the row of lane `giver`.
          const rm_mma_place at = rm_mma_b_place(k, col % 8);
          const int giver = (col / 8 * 2 + at.word) * 8 + at.lane / 4;
          if (rm_tile_lane_vector(token, step, giver) !=
                  rm_tile_vector(token + col, step * 2 + k / 8) ||
              at.lane % 4 * 2 + at.half != k % 8)
            return fails("B", token + col, step * RM_MMA_K + k);
        }
    }
  return true;
}

// Every tile of a launch belongs to one block, blocks that run at once use few columns, and the
// choice matches its comment.
bool tiles() {
  for (const unsigned down : {1u, 2u, 7u, 192u})
    for (const unsigned across : {1u, 5u, 8u, 9u, 16u, 43u}) {
      tally all(static_cast<int64_t>(down) * across);
      for (unsigned block = 0; block < down * across; block++) {
        const rm_tile_number n = rm_tile_of_block(block, down, across);
        if (n.down >= down) return fails("down", down, block);
        all.add(n.across * static_cast<int64_t>(down) + n.down);
        if (n.across / RM_TILE_BAND != block / (RM_TILE_BAND * down))
          return fails("band", across, block);
      }
      if (!all.once()) return fails("blocks", down, across);
    }
  const struct {
    int64_t w_rows, tokens, groups, processors;
    int rows, cols;
  } chosen[] =
      {
          {24576, 8192, 1, 132, 128, 192}, // with many rows the tile with most FMAs per byte
          {24576, 128, 1, 132, 192, 128}, // 128 blocks at once instead of 192 in turns
          {6144, 256, 1, 132, 128, 128},
          {4096, 256, 1, 132, 128, 64}, // more blocks where there are processors left
          {4096, 65, 1, 132, 128, 64},
          {1536, 32768, 128, 132, 192, 128}, // rows of groups, of which the last tile is half empty
          {1536, 65536, 128, 132, 192, 128},
          {16, 1 << 20, 1, 132, 128, 192},
          {1, 1, 1, 1, 128, 64}};
  for (const auto &c : chosen) {
    const rm_tile_shape t = RM_TILES[rm_choose_tile(c.w_rows, c.tokens, c.groups, c.processors)];
    if (t.rows != c.rows || t.cols != c.cols) return fails("chosen", t.rows, t.cols);
  }
  return true;
}

int64_t pick(int64_t n) { return static_cast<int64_t>(random_bits() % static_cast<uint32_t>(n)); }

// Numbers of −1 to 1 in bf16.
uint16_t *numbers(int64_t n) {
  uint16_t *x = static_cast<uint16_t *>(simt_buffer(static_cast<size_t>(n) * sizeof *x));
  for (int64_t i = 0; i < n; i++)
    x[i] = rm_f32_to_bf16(static_cast<float>(static_cast<int32_t>(random_bits())) * 0x1p-31f);
  return x;
}

// Row r of a gemm alone, and among `m` rows: with another kernel, or other tiles of the same
// kernel.
bool company_case(int64_t m, int64_t n, int64_t k, bool swiglu) {
  rm_gemm_args a = {};
  a.x = numbers(m * k), a.w = numbers(rm_packed_elems(swiglu ? rm_gate_up_rows(n) : n, k));
  a.m = m, a.n = n, a.k = k, a.ldx = k, a.ldy = n, a.dtype = RM_BF16, a.y_dtype = RM_F32;
  const size_t bytes = static_cast<size_t>(m * n) * sizeof(float);
  float *together = static_cast<float *>(simt_buffer(bytes)),
        *alone = static_cast<float *>(simt_buffer(bytes));
  rm_ctx ctx = {};
  ctx.workspace_bytes = static_cast<size_t>(16 * m * rm_gate_up_rows(n) * rm_mma_splits(k));
  ctx.workspace = simt_buffer(ctx.workspace_bytes);
  const rm_kernels *table = rm_kernels_cuda_mma();
  const auto op = swiglu ? table->gemm_swiglu : table->gemm;
  a.y = together;
  op(&ctx, &a);
  for (int64_t r = 0, rows; r < m; r += rows) {
    rows = rm_min64(m - r, r == 0 ? 1 : 1 + pick(m / 2 + 1));
    rm_gemm_args part = a;
    rm_ctx some = ctx;
    if (pick(2)) some.workspace_bytes = 0; // k is not split over blocks
    part.x = static_cast<const uint16_t *>(a.x) + r * k, part.y = alone + r * n, part.m = rows;
    op(&some, &part);
  }
  simt_finish();
  char what[100];
  snprintf(what, sizeof what, "rows alone m=%ld n=%ld k=%ld swiglu=%d", m, n, k, swiglu);
  return same(what, alone, together, bytes, m * n);
}

// Attention of alternating sequences, whose tiles are all listed, in a workspace of `bytes`: fewer
// rows at once, or no list, but the same bits. heads: of a group of 16, so that a tile has 8 rows.
bool workspace_case(int64_t rows, int64_t heads) {
  constexpr int64_t HEAD_DIM = 64, PAGE = 16;
  rm_attention_args a = {};
  const int64_t out = rows * heads * HEAD_DIM;
  int32_t *where = static_cast<int32_t *>(simt_buffer(static_cast<size_t>(2 * rows + 2) * 4)),
          *tables = where + 2 * rows;
  for (int64_t r = 0; r < rows; r++) {
    where[r] = static_cast<int32_t>(pick(PAGE));
    where[rows + r] = static_cast<int32_t>(r % 2);
  }
  tables[0] = 1, tables[1] = 0;
  a.q = numbers(out), a.k_cache = numbers(2 * rm_k_page_elems(PAGE, HEAD_DIM)),
  a.v_cache = numbers(2 * rm_v_page_elems(PAGE, HEAD_DIM));
  a.positions = where, a.seq_of_row = where + rows, a.block_tables = tables, a.rows = rows;
  a.n_seqs = 2, a.max_pages = 1, a.n_heads = heads, a.n_kv_heads = 1, a.group = 16;
  a.head_dim = a.value_dim = HEAD_DIM, a.page_size = PAGE, a.scale = 0.125f, a.dtype = RM_BF16;
  rm_limits limits = {};
  limits.max_rows = rows, limits.n_heads = heads, limits.n_kv_heads = 1, limits.group = 16;
  limits.head_dim = HEAD_DIM, limits.max_positions = PAGE;
  const rm_kernels *table = rm_kernels_cuda_mma();
  const size_t bytes = static_cast<size_t>(out) * sizeof(uint16_t),
               most = table->workspace_bytes(&limits),
               of_row = static_cast<size_t>(heads * (HEAD_DIM + 2)) * sizeof(float);
  void *whole = simt_buffer(bytes);
  const auto attention = [&](void *y, size_t workspace) {
    rm_ctx ctx = {};
    ctx.workspace_bytes = workspace, ctx.workspace = simt_buffer(workspace);
    a.out = y;
    table->attention(&ctx, &a);
  };
  attention(whole, most);
  for (size_t some = of_row; some < most; some += of_row) {
    void *y = simt_buffer(bytes);
    attention(y, some);
    simt_finish();
    if (!same("attention in a small workspace", y, whole, bytes, out)) return false;
  }
  return true;
}

// exp of values that are not above 0: every 97th float, the floats around the end of the range, and
// NaNs.
bool exps() {
  const auto bits_of = [](uint32_t at) { return rm_float(at); };
  for (uint64_t at = 0x80000000u; at <= 0xff800000u;
       at += at > 0xc2aea000u && at < 0xc2aeb000u ? 1 : 97) {
    const float x = bits_of(static_cast<uint32_t>(at));
    if (rm_bits(rm_exp(x)) != rm_bits(rm_exp_not_above_0(x)))
      return fails("exp", static_cast<int64_t>(at), 0);
  }
  for (const float x : {0.0f, -0.0f, -INFINITY})
    if (rm_bits(rm_exp(x)) != rm_bits(rm_exp_not_above_0(x))) return fails("exp", rm_bits(x), 1);
  return rm_is_nan(rm_exp_not_above_0(NAN)) || fails("exp of a NaN", 0, 0);
}

} // namespace

bool check_mma_company(uint64_t seed) {
  state = seed;
  for (const int64_t m : {2, 8, 9, 33, 64, 65, 130, 200})
    for (int swiglu = 0; swiglu < 2; swiglu++) {
      const int64_t k = 500 + pick(700);
      if (!company_case(m, 24 + pick(30), m % 2 ? k : k / 8 * 8, swiglu)) return false;
    }
  return workspace_case(40, 1) && workspace_case(9, 3);
}

bool check_mma_places() {
  int64_t bits = 0;
  const bool ok = exps() && places() && packings() && splits() && banks() && swizzle() && tiles();
  return same("properties", &bits, &bits, sizeof bits, 1) && ok;
}

// check_attention.cpp: attention over contexts around blocks and splits, windows, and heads cut
// by a mesh. Rows are three single rows; prefill chunks of two sequences and decode rows of others
// in one call; chunks that fill tiles of rows; or rows of alternating sequences, which fill more
// unshared tiles than the tensor cores' list can hold.
#include "check.h"

namespace {

// Query heads, KV heads, and for a part of a rank the model's group and the part's beginning in it.
struct heads_of {
  int64_t n, n_kv, group, head0;
};

// The rows of a call: two chunks of prefill, the first at the end of its context, the second at the
// beginning, then decode rows; or, without chunks, rows of alternating sequences.
struct layout {
  int64_t rows, first_chunk, chunks;
};
constexpr layout ALONE = {3, 0, 0}, MIX = {40, 20, 36}, TILES = {150, 75, 146}, TURNS = {700, 0, 0};
constexpr int64_t MOST_ROWS = 700;

void fill_rows(int32_t *positions, int32_t *seqs, int64_t context, layout l) {
  const int64_t alone[] = {context - 1, context / 2, 0};
  for (int64_t r = 0; r < l.rows; r++) {
    const int64_t of_chunk = r < l.first_chunk ? context - l.first_chunk + r : r - l.first_chunk;
    const int64_t at = r < l.chunks    ? of_chunk
                       : l.rows <= 3   ? alone[r]
                       : r == l.chunks ? context - 1
                                       : pick(context);
    positions[r] = static_cast<int32_t>(rm_min64(rm_max64(at, 0), context - 1));
    seqs[r] = static_cast<int32_t>(!l.chunks           ? r % 2
                                   : r < l.first_chunk ? 0
                                   : r < l.chunks      ? 1
                                                       : 2 + r % 2);
  }
}

bool attention_case(rm_dtype dtype, int64_t context, int64_t head_dim, heads_of h,
                    int64_t page_size, int64_t window, layout l, int64_t at_once) {
  const int64_t n_seqs = 4, max_pages = (context + page_size - 1) / page_size,
                n_pages = n_seqs * max_pages;
  int32_t *positions = array<int32_t>(MOST_ROWS), *seqs = array<int32_t>(MOST_ROWS),
          *tables = array<int32_t>(n_pages);
  const int64_t rows = l.rows, n_out = rows * h.n * head_dim;
  fill_rows(positions, seqs, context, l);
  for (int64_t i = 0; i < n_pages; i++) tables[i] = static_cast<int32_t>(n_pages - 1 - i);
  rm_attention_args a = {};
  a.q = numbers(dtype, n_out, pick(8) ? TAME : WILD);
  void *k = numbers(dtype, n_pages * h.n_kv * rm_k_page_elems(page_size, head_dim));
  void *v = numbers(dtype, n_pages * h.n_kv * rm_v_page_elems(page_size, head_dim));
  const packed keys = {k, relaid_pages(k, dtype, n_pages * h.n_kv, page_size, head_dim, false)};
  const packed values = {v, relaid_pages(v, dtype, n_pages * h.n_kv, page_size, head_dim, true)};
  a.positions = positions, a.seq_of_row = seqs, a.block_tables = tables, a.rows = rows,
  a.n_seqs = n_seqs, a.max_pages = max_pages;
  a.n_heads = h.n, a.n_kv_heads = h.n_kv, a.group = h.group ? h.group : h.n / h.n_kv,
  a.head0 = h.head0, a.head_dim = a.value_dim = head_dim, a.page_size = page_size,
  a.window = window, a.dtype = dtype;
  a.scale = 1.0f / sqrtf(static_cast<float>(head_dim));
  rm_limits limits = {}; // the workspace holds at_once rows: the others wait for their turn
  limits.max_rows = at_once, limits.n_heads = h.n, limits.n_kv_heads = h.n_kv,
  limits.group = a.group, limits.head_dim = head_dim, limits.max_positions = context;
  char what[140];
  snprintf(
      what, sizeof what,
      "attention dtype=%d context=%ld head_dim=%ld heads=%ld/%ld group=%ld head0=%ld page=%ld window=%ld rows=%ld at_once=%ld",
      dtype, context, head_dim, h.n, h.n_kv, h.group, h.head0, page_size, window, rows, at_once);
  return held(what, {{&a.out, static_cast<size_t>(n_out) * rm_dtype_bytes(dtype), n_out}}, limits,
              [&](const rm_kernels *table, const rm_ctx *ctx) {
                a.k_cache = keys.of(table), a.v_cache = values.of(table);
                table->attention(ctx, &a);
              });
}

} // namespace

bool check_attention() {
  const int64_t contexts[] = {1, 2, 31, 32, 33, 65, 1023, 1024, 1025, 2080},
                windows[] = {0, 1, 40, 1030};
  int turn = 0;
  for (int dtype = 0; dtype < 2; dtype++)
    for (const int64_t context : contexts)
      for (const int64_t window : windows) {
        const int64_t dims[] = {32, 128, 16, 80, 160}, pages[] = {16, 32, 48};
        const heads_of heads[] = {{2, 1, 0, 0}, {1, 1, 0, 0}, {3, 3, 0, 0},
                                  {4, 3, 2, 1}, {2, 1, 7, 5}, {3, 2, 4, 3}};
        const heads_of &h = heads[context > 1000 ? 1 + 3 * (turn % 2) : turn % 6];
        const bool mix = context < 100;
        const rm_dtype type = static_cast<rm_dtype>(dtype);
        if (!attention_case(type, context, dims[turn % 5], h, pages[turn % 3], window, ALONE, 2))
          return false;
        if (mix &&
            !attention_case(type, context, dims[turn % 3], h, pages[turn % 3], window, MIX, 2))
          return false;
        if (mix && !attention_case(type, context, dims[turn % 4], h, pages[turn % 3], window, MIX,
                                   turn / 2 % 2 ? 20 : MIX.rows))
          return false;
        turn++;
      }
  // Heads for several launches or several chains of the tensor cores.
  for (const rm_dtype dtype : {RM_BF16, RM_F32})
    for (const int64_t head_dim : {272, 544})
      if (!attention_case(dtype, 40, head_dim, {9, 1, 0, 0}, 16, 0, head_dim == 272 ? MIX : ALONE,
                          MIX.rows))
        return false;
  for (const rm_dtype dtype : {RM_BF16, RM_F32}) // pages that extend beyond the workspace; no heads
    if (!attention_case(dtype, 40, 32, {2, 1, 0, 0}, 4096, 0, ALONE, 1) ||
        !attention_case(dtype, 40, 32, {0, 0, 1, 0}, 16, 0, ALONE, 1))
      return false;
  // Whole tiles: 32, 18, 42 and 64 rows of them, contexts of one split and of several, windows,
  // heads of 128 and other sizes, alternating sequences.
  for (const int64_t context : {80, 1090, 2100}) {
    const int64_t window = context == 2100 ? 1030 : 0, at_once = context == 1090 ? 3 : MIX.rows;
    if (!attention_case(RM_BF16, context, 128, {4, 1, 0, 0}, 32, window, TILES, at_once) ||
        !attention_case(RM_BF16, context, 112, {3, 2, 4, 3}, 16, 0, TILES, at_once) ||
        !attention_case(RM_BF16, context, 80, {2, 1, 7, 5}, 48, 0, TILES, at_once) ||
        !attention_case(RM_BF16, context, 16, {2, 1, 0, 0}, 16, window, TILES, at_once))
      return false;
  }
  return attention_case(RM_BF16, 1100, 32, {2, 1, 0, 0}, 16, 0, MIX, MIX.rows) &&
         attention_case(RM_BF16, 1027, 64, {2, 2, 0, 0}, 32, 30, MIX, MIX.rows) &&
         attention_case(RM_BF16, 40, 16, {8, 1, 0, 0}, 16, 0, TURNS, MIX.rows);
}

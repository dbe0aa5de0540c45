// check_rows.cpp: embed, gather_rows, rms_norm, head_squares and qk_rope_kv.
#include "check.h"

namespace {

bool embed_case(rm_dtype dtype, int64_t rows, int64_t hidden, int packed) {
  const int64_t vocab = 37;
  int32_t *ids = array<int32_t>(rows);
  for (int64_t r = 0; r < rows; r++)
    ids[r] = static_cast<int32_t>(r == 0 ? vocab - 1 : pick(vocab));
  rm_embed_args a = {};
  a.ids = ids, a.packed = packed, a.rows = rows, a.hidden = hidden, a.dtype = dtype;
  const ::packed table_of = weights(dtype, 1, vocab, hidden, false, WILD);
  void *plain = numbers(dtype, vocab * hidden, WILD);
  char what[100];
  snprintf(what, sizeof what, "embed dtype=%d rows=%ld hidden=%ld packed=%d", dtype, rows, hidden,
           packed);
  return held(what,
              {{&a.out, static_cast<size_t>(rows * hidden) * rm_dtype_bytes(dtype), rows * hidden}},
              {}, [&](const rm_kernels *table, const rm_ctx *ctx) {
                a.table = packed ? table_of.of(table) : plain, table->embed(ctx, &a);
              });
}

// Rows of x in any order, or all of them in their order; aligned to two bytes only.
bool gather_case(int64_t rows, int64_t n_rows, int64_t row_bytes, int64_t skew) {
  int32_t *from = array<int32_t>(rows);
  const bool in_order = pick(3) == 0;
  const bool holes = pick(3) == 0;
  for (int64_t r = 0; r < rows; r++)
    from[r] = static_cast<int32_t>(in_order ? r % n_rows : r == 0 ? n_rows - 1 : pick(n_rows));
  for (int64_t r = 0; r < rows && holes; r++)
    if (pick(3) == 0) from[r] = -1;
  rm_gather_rows_args a = {};
  a.x = static_cast<char *>(numbers(RM_BF16, (n_rows * row_bytes + skew) / 2, WILD)) + skew;
  a.from = from, a.rows = rows, a.row_bytes = static_cast<size_t>(row_bytes);
  char what[100];
  snprintf(what, sizeof what, "gather_rows rows=%ld of %ld bytes=%ld skew=%ld", rows, n_rows,
           row_bytes, skew);
  return held(what, {{&a.out, static_cast<size_t>(rows * row_bytes), rows * row_bytes / 2}}, {},
              [&](const rm_kernels *table, const rm_ctx *ctx) { table->gather_rows(ctx, &a); });
}

bool activate_case(rm_dtype dtype, int64_t rows, int64_t n, int64_t ld, bool in_place, kind wild) {
  rm_activate_args a = {};
  const size_t bytes = static_cast<size_t>(rows ? (rows - 1) * ld + n : 0) * rm_dtype_bytes(dtype);
  void *x = numbers(dtype, rows * ld, wild);
  a.x = x, a.rows = rows, a.n = n, a.ld = ld, a.dtype = dtype,
  a.activation = static_cast<rm_activation>(pick(4));
  if (in_place) a.out = x;
  char what[100];
  snprintf(what, sizeof what, "activate %d dtype=%d rows=%ld n=%ld ld=%ld wild=%d", a.activation,
           dtype, rows, n, ld, wild);
  return held(what, {{&a.out, bytes, rows * n}}, {},
              [&](const rm_kernels *table, const rm_ctx *ctx) {
                if (in_place) a.x = a.out;
                table->activate(ctx, &a);
              });
}

enum norm_input { NO_X, OWN_X, OUT_IS_X };

bool norm_case(rm_dtype dtype, int64_t rows, int64_t n, norm_input input, kind wild) {
  rm_rms_norm_args a = {};
  const size_t bytes = static_cast<size_t>(rows * n) * rm_dtype_bytes(dtype);
  a.residual = numbers(dtype, rows * n, wild);
  if (pick(8) == 0) memset(a.residual, 0, bytes);
  void *x = numbers(dtype, rows * n, wild);
  a.x = input == NO_X ? nullptr : x;
  if (input == OUT_IS_X) a.out = x;
  if (input != NO_X && pick(3) == 0) a.x_gate = numbers(dtype, rows, wild);
  if (pick(4)) a.weight = numbers(dtype, n, wild);
  a.eps = pick(4) ? 1e-6f : 0.0f, a.rows = rows, a.n = n, a.dtype = dtype;
  char what[100];
  snprintf(what, sizeof what, "rms_norm dtype=%d rows=%ld n=%ld input=%d gate=%d weight=%d wild=%d",
           dtype, rows, n, input, a.x_gate != nullptr, a.weight != nullptr, wild);
  return held(what, {{&a.out, bytes, rows * n}, {&a.residual, bytes, rows * n}}, {},
              [&](const rm_kernels *table, const rm_ctx *ctx) {
                if (input == OUT_IS_X) a.x = a.out;
                table->rms_norm(ctx, &a);
              });
}

struct rope_shape {
  int64_t rows, n_heads, n_kv_heads, head_dim, page_size;
};

bool squares_case(rm_dtype dtype, rope_shape s, kind wild) {
  rm_head_squares_args a = {};
  a.qkv = numbers(dtype, s.rows * (s.n_heads + 2 * s.n_kv_heads) * s.head_dim, wild);
  a.rows = s.rows, a.n_heads = s.n_heads, a.n_kv_heads = s.n_kv_heads, a.head_dim = s.head_dim,
  a.dtype = dtype;
  const int64_t q = s.rows * s.n_heads, k = s.rows * s.n_kv_heads;
  char what[120];
  snprintf(what, sizeof what, "head_squares dtype=%d rows=%ld heads=%ld/%ld head_dim=%ld wild=%d",
           dtype, s.rows, s.n_heads, s.n_kv_heads, s.head_dim, wild);
  return held(what,
              {{&a.q_out, static_cast<size_t>(q) * sizeof(float), q},
               {&a.k_out, static_cast<size_t>(k) * sizeof(float), k}},
              {},
              [&](const rm_kernels *table, const rm_ctx *ctx) { table->head_squares(ctx, &a); });
}

// All heads of the model, some of which other ranks may hold.
const float *squares(int64_t rows, int64_t n_heads, kind wild, int64_t *all) {
  *all = n_heads + pick(3) * 7;
  float *x = static_cast<float *>(numbers(RM_F32, rows * *all, wild));
  for (int64_t i = 0; i < rows * *all; i++) x[i] = fabsf(x[i]);
  return x;
}

bool rope_case(rm_dtype dtype, rope_shape s, kind wild) {
  const int64_t n_pages = 5, n_slots = n_pages * s.page_size, positions = 50,
                per_row = (s.n_heads + 2 * s.n_kv_heads) * s.head_dim;
  const int64_t k_elems = n_pages * s.n_kv_heads * rm_k_page_elems(s.page_size, s.head_dim);
  const int64_t v_elems = n_pages * s.n_kv_heads * rm_v_page_elems(s.page_size, s.head_dim);
  const size_t word = rm_dtype_bytes(dtype),
               q_elems = static_cast<size_t>(s.rows * s.n_heads * s.head_dim);
  int32_t *at = array<int32_t>(s.rows);
  int64_t *slots = array<int64_t>(s.rows);
  uint8_t *flags = array<uint8_t>(s.rows);
  for (int64_t r = 0; r < s.rows; r++) {
    at[r] = static_cast<int32_t>(pick(positions));
    slots[r] = pick(5) ? (r * 7 + 3) % n_slots : -1;
    flags[r] = static_cast<uint8_t>(pick(2) * RM_ROW_LOGITS_NONFINITE);
  }
  rm_qk_rope_kv_args a = {};
  a.qkv = numbers(dtype, s.rows * per_row, wild);
  const int64_t norm = pick(4);  // 0: none, 3: over all heads
  if (norm == 3) {
    a.q_squares = squares(s.rows, s.n_heads, wild, &a.all_heads);
    a.k_squares = squares(s.rows, s.n_kv_heads, wild, &a.all_kv_heads);
  }
  if (norm) {
    a.q_weight = numbers(dtype, (norm == 3 ? s.n_heads : 1) * s.head_dim);
    a.k_weight = numbers(dtype, (norm == 3 ? s.n_kv_heads : 1) * s.head_dim);
  }
  a.rotary_dim = pick(3) ? s.head_dim : 2 * pick(s.head_dim / 2);
  a.cos = static_cast<float *>(numbers(RM_F32, positions * (s.head_dim / 2)));
  a.sin = static_cast<float *>(numbers(RM_F32, positions * (s.head_dim / 2)));
  a.positions = at, a.slots = slots, a.row_flags = flags, a.k_cache = numbers(dtype, k_elems),
  a.v_cache = numbers(dtype, v_elems);
  a.eps = 1e-6f, a.rows = s.rows, a.n_heads = s.n_heads, a.n_kv_heads = s.n_kv_heads,
  a.head_dim = s.head_dim, a.page_size = s.page_size;
  a.dtype = dtype;
  rm_limits limits = {};
  limits.head_dim = s.head_dim;
  const auto relaid = [&](bool values) {
    return [=](const void *from) {
      return relaid_pages(from, dtype, n_pages * s.n_kv_heads, s.page_size, s.head_dim, values);
    };
  };
  char what[120];
  snprintf(what, sizeof what,
           "qk_rope_kv dtype=%d rows=%ld heads=%ld/%ld head_dim=%ld page=%ld wild=%d", dtype,
           s.rows, s.n_heads, s.n_kv_heads, s.head_dim, s.page_size, wild);
  return held(what,
              {{&a.q_out, q_elems * word, static_cast<int64_t>(q_elems)},
               {&a.k_cache, static_cast<size_t>(k_elems) * word, k_elems, relaid(false)},
               {&a.v_cache, static_cast<size_t>(v_elems) * word, v_elems, relaid(true)},
               {&a.row_flags, static_cast<size_t>(s.rows), s.rows}},
              limits,
              [&](const rm_kernels *table, const rm_ctx *ctx) { table->qk_rope_kv(ctx, &a); });
}

}  // namespace

bool check_embed() {
  for (const rm_dtype dtype : {RM_BF16, RM_F32})
    for (const int64_t rows : {0, 1, 3, 33})
      for (const int64_t hidden : {1, 2, 7, 8, 31, 32, 34, 64, 257, 4096})
        for (int packed = 0; packed < 2; packed++)
          if (!embed_case(dtype, rows, hidden, packed)) return false;
  return true;
}

bool check_gather_rows() {
  for (const int64_t row_bytes : {0, 2, 4, 6, 16, 30, 32, 34, 64, 514, 4096, 8192, 10000})
    for (const int64_t rows : {0, 1, 3, 33})
      for (const int64_t n_rows : {1, 5, 40})
        for (const int64_t skew : {0, 2, 4})
          if (!gather_case(rows, n_rows, row_bytes, skew)) return false;
  return true;
}

bool check_activate() {
  for (const rm_dtype dtype : {RM_BF16, RM_F32})
    for (const int64_t rows : {0, 1, 4})
      for (const int64_t n : {1, 2, 15, 33, 255, 256, 257, 2049})
        for (const int64_t gap : {0, 3})
          for (const bool in_place : {false, true})
            if (!activate_case(dtype, rows, n, n + gap, in_place, pick(3) ? TAME : WILD))
              return false;
  return true;
}

bool check_rms_norm() {
  for (const rm_dtype dtype : {RM_BF16, RM_F32})
    for (const int64_t rows : {0, 1, 4})
      for (const int64_t n : {1, 2, 15, 16, 17, 31, 33, 64, 255, 257, 2047, 2048, 2049, 4100})
        for (const norm_input input : {NO_X, OWN_X, OUT_IS_X})
          if (!norm_case(dtype, rows, n, input, pick(3) ? TAME : WILD)) return false;
  return true;
}

bool check_head_squares() {
  for (const rm_dtype dtype : {RM_BF16, RM_F32})
    for (const int64_t rows : {0, 1, 9})
      for (const int64_t head_dim : {2, 16, 30, 64, 128, 130})
        for (const auto &h : {std::pair{1, 1}, {5, 2}, {16, 8}})
          for (const kind wild : {TAME, WILD})
            if (!squares_case(dtype, {rows, h.first, h.second, head_dim, 16}, wild)) return false;
  return true;
}

bool check_qk_rope_kv() {
  const int64_t heads[][2] = {{1, 1}, {2, 1}, {3, 3}, {5, 2}, {16, 8}};
  for (const rm_dtype dtype : {RM_BF16, RM_F32})
    for (const int64_t head_dim : {2, 16, 30, 32, 64, 128, 130})
      for (const auto &h : heads)
        for (const kind wild : {TAME, WILD})
          if (!rope_case(dtype, {1 + 8 * pick(2), h[0], h[1], head_dim, 16 + 32 * pick(2)}, wild))
            return false;
  return rope_case(RM_BF16, {0, 2, 1, 32, 16}, TAME);
}

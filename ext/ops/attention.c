// attention.c: q, k and v of rows, and attention over pages. See ops.h.
#include "ops.h"

#include <float.h>

typedef struct cache_shape {
  int64_t n_pages, n_kv_heads, k_elems, v_elems;
} cache_shape;

static void check_heads(rm_op_call *c, int64_t n_heads, int64_t n_kv_heads, int64_t head_dim,
                        int64_t page_size) {
  rm_op_at_least(c, "num_kv_heads", n_kv_heads, 1);
  rm_op_multiple_of(c, "page_size", page_size, 16);
  rm_op_multiple_of(c, "head_dim", head_dim, 2);
  rm_op_at_least(c, "num_heads", n_heads, 1);
  rm_op_size(c, "num_heads * head_dim", rm_op_product(c, "q", n_heads, head_dim), 0);
}

static void check_caches(rm_op_call *c, PyObject *k, PyObject *v, rm_dtype dtype, int64_t page_size,
                         int64_t head_dim, int flags, cache_shape *s, void **k_out, void **v_out) {
  rm_op_size(c, "head_dim", head_dim, 1);
  if (c->failed) return;
  s->k_elems = rm_op_product(c, "k_cache", page_size, rm_round_up(head_dim, RM_K_BLOCK));
  s->v_elems = rm_op_product(c, "v_cache", page_size, rm_round_up(head_dim, RM_N_TILE));
  *k_out = VIEW(c, k, "k_cache", rm_op_numpy_type(dtype), flags | RM_ARRAY_PACKED, &s->n_pages,
                &s->n_kv_heads, &s->k_elems);
  *v_out = VIEW(c, v, "v_cache", rm_op_numpy_type(dtype), flags | RM_ARRAY_PACKED, &s->n_pages,
                &s->n_kv_heads, &s->v_elems);
}

// (q_out, k_out, qkv, head_dim)
RM_KERNELS_METHOD(head_squares) {
  CALL(4);
  rm_head_squares_args a = {.rows = -1,
                            .n_heads = -1,
                            .n_kv_heads = -1,
                            .head_dim = rm_op_size_of(&c, o[3], "head_dim", 1)};
  a.dtype = rm_op_dtype_of(&c, o[2], "qkv");
  a.q_out = VIEW(&c, o[0], "q_out", NPY_FLOAT32, RM_ARRAY_WRITE, &a.rows, &a.n_heads);
  a.k_out = VIEW(&c, o[1], "k_out", NPY_FLOAT32, RM_ARRAY_WRITE, &a.rows, &a.n_kv_heads);
  check_heads(&c, a.n_heads, a.n_kv_heads, a.head_dim, 16);
  int64_t width = rm_op_product(&c, "qkv", a.n_heads + 2 * a.n_kv_heads, a.head_dim);
  a.qkv = VIEW(&c, o[2], "qkv", rm_op_numpy_type(a.dtype), RM_ARRAY_IN, &a.rows, &width);
  RUN(head_squares,
      ((rm_limits){.max_rows = a.rows,
                   .n_heads = a.n_heads,
                   .n_kv_heads = a.n_kv_heads,
                   .head_dim = a.head_dim}),
      &a);
}

// What a norm over all heads of the model takes: their squares, and weights of the heads that are
// here.
static void view_whole_norm(rm_op_call *c, PyObject *const *weights, PyObject *const *squares,
                            rm_qk_rope_kv_args *a) {
  int64_t q_width = rm_op_product(c, "q_weight", a->n_heads, a->head_dim);
  int64_t k_width = rm_op_product(c, "k_weight", a->n_kv_heads, a->head_dim);
  a->all_heads = a->all_kv_heads = -1;
  a->q_weight = VIEW(c, weights[0], "q_weight", rm_op_numpy_type(a->dtype), RM_ARRAY_IN, &q_width);
  a->k_weight = VIEW(c, weights[1], "k_weight", rm_op_numpy_type(a->dtype), RM_ARRAY_IN, &k_width);
  a->q_squares =
      VIEW(c, squares[0], "q_squares", NPY_FLOAT32, RM_ARRAY_IN, &a->rows, &a->all_heads);
  a->k_squares =
      VIEW(c, squares[1], "k_squares", NPY_FLOAT32, RM_ARRAY_IN, &a->rows, &a->all_kv_heads);
  rm_op_at_least(c, "q_squares.shape[1]", a->all_heads, a->n_heads);
  rm_op_at_least(c, "k_squares.shape[1]", a->all_kv_heads, a->n_kv_heads);
}

// (q_out, qkv, q_weight | None, k_weight | None, cos, sin, positions, slots, k_cache, v_cache,
// row_flags, num_heads, page_size, eps,
//  q_squares | None, k_squares | None)
RM_KERNELS_METHOD(qk_rope_kv) {
  CALL(16);
  const int64_t n_heads = rm_op_size_of(&c, o[11], "num_heads", 1),
                page_size = rm_op_size_of(&c, o[12], "page_size", 1);
  rm_qk_rope_kv_args a = {.rows = -1, .head_dim = -1, .eps = rm_op_real(&c, o[13], "eps", 0)};
  a.dtype = rm_op_dtype_of(&c, o[1], "qkv");
  const int type = rm_op_numpy_type(a.dtype);
  cache_shape s = {.n_pages = -1, .n_kv_heads = -1};
  int64_t width = -1, n_positions = -1, half = -1, heads = n_heads;
  const int whole = o[14] != Py_None || o[15] != Py_None;
  if (whole || (o[2] == Py_None && o[3] == Py_None)) {
    a.q_out = VIEW(&c, o[0], "q_out", type, RM_ARRAY_WRITE, &a.rows, &heads, &a.head_dim);
  } else {
    a.q_weight = VIEW(&c, o[2], "q_weight", type, RM_ARRAY_IN, &a.head_dim);
    a.k_weight = VIEW(&c, o[3], "k_weight", type, RM_ARRAY_IN, &a.head_dim);
  }
  if (!c.failed)
    check_caches(&c, o[8], o[9], a.dtype, page_size, a.head_dim, RM_ARRAY_WRITE, &s, &a.k_cache,
                 &a.v_cache);
  check_heads(&c, n_heads, s.n_kv_heads, a.head_dim, page_size);
  width = c.failed ? 0 : rm_op_product(&c, "qkv", n_heads + 2 * s.n_kv_heads, a.head_dim);
  a.qkv = VIEW(&c, o[1], "qkv", type, RM_ARRAY_IN, &a.rows, &width);
  a.q_out = VIEW(&c, o[0], "q_out", type, RM_ARRAY_WRITE, &a.rows, &heads, &a.head_dim);
  a.cos = VIEW(&c, o[4], "cos", NPY_FLOAT32, RM_ARRAY_IN, &n_positions, &half);
  a.sin = VIEW(&c, o[5], "sin", NPY_FLOAT32, RM_ARRAY_IN, &n_positions, &half);
  a.rotary_dim = 2 * half;
  if (!c.failed && half > a.head_dim / 2)
    rm_op_refuse(&c, RM_E_SHAPE, "cos.shape[1]", half, "at most head_dim / 2 =", a.head_dim / 2);
  a.positions = VIEW(&c, o[6], "positions", NPY_INT32, RM_ARRAY_IN, &a.rows);
  a.slots = VIEW(&c, o[7], "slots", NPY_INT64, RM_ARRAY_IN, &a.rows);
  a.row_flags = VIEW(&c, o[10], "row_flags", NPY_UINT8, RM_ARRAY_WRITE, &a.rows);
  rm_op_in_range(&c, "positions", a.positions, a.rows, 0, n_positions);
  const int64_t *slots = rm_op_seen(&c, a.slots);
  for (int64_t r = 0; slots && r < a.rows && !c.failed; r++)
    if (slots[r] < -1 || slots[r] >= s.n_pages * page_size)
      rm_op_refuse(&c, RM_E_REQUEST, "a slot", slots[r], "-1 or less than", s.n_pages * page_size);
  a.n_heads = n_heads;
  a.n_kv_heads = s.n_kv_heads;
  a.page_size = page_size;
  if (whole) view_whole_norm(&c, o + 2, o + 14, &a);
  RUN(qk_rope_kv,
      ((rm_limits){.max_rows = a.rows,
                   .n_heads = n_heads,
                   .n_kv_heads = s.n_kv_heads,
                   .head_dim = a.head_dim}),
      &a);
}

// The kv heads are those that the query heads read.
static void check_group(rm_op_call *c, const rm_attention_args *a) {
  if (c->failed) return;
  if (!a->group) {
    rm_op_multiple_of(c, "num_heads", a->n_heads, a->n_kv_heads);
    if (a->head0) rm_op_refuse(c, RM_E_SHAPE, "head0 without group", a->head0, "exactly", 0);
    return;
  }
  const int64_t read = (a->head0 + a->n_heads + a->group - 1) / a->group;
  if (a->head0 >= a->group)
    rm_op_refuse(c, RM_E_SHAPE, "head0", a->head0, "less than group,", a->group);
  if (a->n_kv_heads != read)
    rm_op_refuse(c, RM_E_SHAPE, "num_kv_heads", a->n_kv_heads, "as many as the query heads read,",
                 read);
}

// Every page that a row may look at exists.
static void check_tables(rm_op_call *c, const rm_attention_args *a, int64_t n_pages) {
  const int32_t *positions = rm_op_seen(c, a->positions), *seqs = rm_op_seen(c, a->seq_of_row);
  for (int64_t r = 0; r < a->rows && !c->failed; r++) {
    const int64_t last = positions[r],
                  first = a->window > 0 ? rm_max64(0, last - a->window + 1) : 0;
    if (last / a->page_size >= a->max_pages)
      rm_op_refuse(c, RM_E_REQUEST, "a position", last, "less than", a->max_pages * a->page_size);
    if (!c->failed)
      rm_op_in_range_from(c, "block_tables", a->block_tables,
                          seqs[r] * a->max_pages + first / a->page_size,
                          last / a->page_size - first / a->page_size + 1, 0, n_pages);
  }
}

// (out, q, k_cache, v_cache, positions, seq_of_row, block_tables, page_size, window, scale, group,
// head0)
RM_KERNELS_METHOD(attention) {
  CALL(12);
  const int64_t page_size = rm_op_size_of(&c, o[7], "page_size", 1);
  rm_attention_args a = {.rows = -1,
                         .n_heads = -1,
                         .head_dim = -1,
                         .n_seqs = -1,
                         .max_pages = -1,
                         .page_size = page_size};
  a.window = rm_op_size_of(&c, o[8], "window", 0);
  a.scale = rm_op_real(&c, o[9], "scale", -FLT_MAX);
  a.group = rm_op_size_of(&c, o[10], "group", 0);
  a.head0 = rm_op_size_of(&c, o[11], "head0", 0);
  a.dtype = rm_op_dtype_of(&c, o[1], "q");
  cache_shape s = {.n_pages = -1, .n_kv_heads = -1};
  void *k = NULL, *v = NULL;
  a.q =
      VIEW(&c, o[1], "q", rm_op_numpy_type(a.dtype), RM_ARRAY_IN, &a.rows, &a.n_heads, &a.head_dim);
  a.out = VIEW(&c, o[0], "out", rm_op_numpy_type(a.dtype), RM_ARRAY_WRITE, &a.rows, &a.n_heads,
               &a.head_dim);
  if (!c.failed)
    check_caches(&c, o[2], o[3], a.dtype, page_size, a.head_dim, RM_ARRAY_IN, &s, &k, &v);
  check_heads(&c, a.n_heads, s.n_kv_heads, a.head_dim, page_size);
  a.n_kv_heads = s.n_kv_heads;
  check_group(&c, &a);
  a.positions = VIEW(&c, o[4], "positions", NPY_INT32, RM_ARRAY_IN, &a.rows);
  a.seq_of_row = VIEW(&c, o[5], "seq_of_row", NPY_INT32, RM_ARRAY_IN, &a.rows);
  a.block_tables = VIEW(&c, o[6], "block_tables", NPY_INT32, RM_ARRAY_IN, &a.n_seqs, &a.max_pages);
  const int64_t positions = rm_op_product(&c, "a row of block_tables", a.max_pages, page_size);
  rm_op_size(&c, "block_tables' pages * page_size", positions, 0);
  rm_op_in_range(&c, "positions", a.positions, a.rows, 0, INT32_MAX);
  rm_op_in_range(&c, "seq_of_row", a.seq_of_row, a.rows, 0, a.n_seqs);
  a.k_cache = k;
  a.v_cache = v;
  check_tables(&c, &a, s.n_pages);
  RUN(attention,
      ((rm_limits){.max_rows = a.rows,
                   .n_heads = a.n_heads,
                   .n_kv_heads = a.n_kv_heads,
                   .head_dim = a.head_dim,
                   .group = a.group,
                   .max_positions = positions}),
      &a);
}

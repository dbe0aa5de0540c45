// attention.c: q, k and v of rows, and attention over pages. See ops.h.
#include "ops.h"

static void check_heads(rm_op_call *c, int64_t page_size) {
  const rm_op_values *v = &c->v;
  rm_op_at_least(c, "num_kv_heads", v->num_kv_heads, 1);
  rm_op_multiple_of(c, "page_size", page_size, 16);
  rm_op_multiple_of(c, "head_dim", v->head_dim, 2);
  rm_op_at_least(c, "num_heads", v->num_heads, 1);
  rm_op_size(c, "num_heads * head_dim", rm_op_product(c, "q", v->num_heads, v->head_dim), 0);
}

// Elements of a head in a page of each cache.
static void page_sizes(rm_op_call *c) {
  rm_op_values *v = &c->v;
  rm_op_size(c, "head_dim", v->head_dim, 1);
  if (c->failed) return;
  v->k_elems = rm_op_product(c, "k_cache", v->page_size, rm_round_up(v->head_dim, RM_K_BLOCK));
  v->v_elems = rm_op_product(c, "v_cache", v->page_size, rm_round_up(v->head_dim, RM_N_TILE));
}

static void same_size(rm_op_call *c, const char *name, int dim, int64_t seen, int64_t wanted) {
  if (seen != wanted)
    rm_op_raise(c, RM_E_SHAPE, "%s: expected size %lld in dim %d, got %lld", name,
                (long long)wanted, dim, (long long)seen);
}

// ----------------------------------------------------------------------------------- head_squares
static void split_heads(rm_op_call *c) {
  rm_op_values *v = &c->v;
  const int64_t of_kv = v->width - v->num_heads * v->head_dim, pair = 2 * v->head_dim;
  if (!pair || of_kv < pair || of_kv % pair) {
    rm_op_raise(c, RM_E_SHAPE,
                "qkv: expected (%lld + 2%skv_heads)%s%lld columns, kv_heads at least 1, got %lld",
                (long long)v->num_heads, "·", "·", (long long)v->head_dim, (long long)v->width);
    return;
  }
  v->num_kv_heads = of_kv / pair;
  check_heads(c, 16);
}

static const rm_op_argument head_squares[] = {
    SIZE(num_heads, 0),
    SIZE(head_dim, 0),
    IN(qkv, T, n_rows, width),
    STEP(split_heads),
    OUT(q_squares, F32, n_rows, num_heads),
    OUT(k_squares, F32, n_rows, num_kv_heads),
    {0},
};
RUN(head_squares, rm_head_squares_args, .q_out = v->q_squares, .k_out = v->k_squares, .qkv = v->qkv,
    .rows = v->n_rows, .n_heads = v->num_heads, .n_kv_heads = v->num_kv_heads,
    .head_dim = v->head_dim, .dtype = v->dtype)

// ------------------------------------------------------------------------------------- qk_rope_kv
static int is_whole(const rm_op_call *c) { // a norm over all heads of the model
  return rm_op_given(c, "q_squares") || rm_op_given(c, "k_squares");
}

// With a norm per head, head_dim is the size of its weight; otherwise it follows from the columns
// of qkv. All sizes were already taken from the arrays.
static void rope_sizes(rm_op_call *c) {
  rm_op_values *v = &c->v;
  const int whole = is_whole(c);
  const int64_t columns = v->num_heads + 2 * v->num_kv_heads, k_elems = v->k_elems,
                v_elems = v->v_elems;
  v->head_dim = v->q_weight && !whole ? v->q_width : v->width / rm_max64(columns, 1);
  if (v->q_weight) {
    same_size(c, "q_weight", 0, v->q_width, whole ? v->num_heads * v->head_dim : v->head_dim);
    same_size(c, "k_weight", 0, v->k_width, whole ? v->num_kv_heads * v->head_dim : v->head_dim);
  }
  page_sizes(c);
  same_size(c, "k_cache", 2, k_elems, v->k_elems);
  same_size(c, "v_cache", 2, v_elems, v->v_elems);
  check_heads(c, v->page_size);
  same_size(c, "qkv", 1, v->width, rm_op_product(c, "qkv", columns, v->head_dim));
}

static void rope_check(rm_op_call *c) {
  const rm_op_values *v = &c->v;
  const int64_t n_slots = v->n_pages * v->page_size;
  if (v->half > v->head_dim / 2)
    rm_op_refuse(c, RM_E_SHAPE, "cos.shape[1]", v->half, "at most head_dim / 2 =", v->head_dim / 2);
  rm_op_in_range(c, "positions", v->positions, v->n_rows, 0, v->n_positions);
  const int64_t *slots = rm_op_seen(c, v->slots);
  for (int64_t r = 0; slots && r < v->n_rows && !c->failed; r++)
    if (slots[r] < -1 || slots[r] >= n_slots)
      rm_op_refuse(c, RM_E_REQUEST, "a slot", slots[r], "-1 or less than", n_slots);
  if (v->q_squares) rm_op_at_least(c, "q_squares.shape[1]", v->all_heads, v->num_heads);
  if (v->k_squares) rm_op_at_least(c, "k_squares.shape[1]", v->all_kv_heads, v->num_kv_heads);
}

// A norm needs both weights; a norm over all heads also needs both sums of squares.
static void weight_needed(rm_op_call *c, rm_op_argument *weight) {
  if (is_whole(c) || rm_op_given(c, "q_weight") || rm_op_given(c, "k_weight"))
    weight->flags = RM_ARRAY_IN;
}
static void squares_needed(rm_op_call *c, rm_op_argument *squares) {
  if (is_whole(c)) squares->flags = RM_ARRAY_IN;
}

#define CACHE (RM_ARRAY_WRITE | RM_ARRAY_PACKED)
static const rm_op_argument qk_rope_kv[] = {
    SIZE(num_heads, 1),
    SIZE(page_size, 1),
    REAL(eps, 0),
    IN(qkv, T, n_rows, width),
    ADJUSTED(weight_needed, q_weight, T, RM_ARRAY_OPTIONAL, q_width),
    ADJUSTED(weight_needed, k_weight, T, RM_ARRAY_OPTIONAL, k_width),
    ARRAY(k_cache, T, CACHE, n_pages, num_kv_heads, k_elems),
    ARRAY(v_cache, T, CACHE, n_pages, num_kv_heads, v_elems),
    STEP(rope_sizes),
    OUT(out, T, n_rows, num_heads, head_dim),
    IN(cos, F32, n_positions, half),
    IN(sin, F32, n_positions, half),
    IN(positions, I32, n_rows),
    IN(slots, I64, n_rows),
    ROW_FLAGS,
    ADJUSTED(squares_needed, q_squares, F32, RM_ARRAY_OPTIONAL, n_rows, all_heads),
    ADJUSTED(squares_needed, k_squares, F32, RM_ARRAY_OPTIONAL, n_rows, all_kv_heads),
    STEP(rope_check),
    {0},
};
RUN(qk_rope_kv, rm_qk_rope_kv_args, .q_out = v->out, .qkv = v->qkv, .q_weight = v->q_weight,
    .k_weight = v->k_weight, .q_squares = v->q_squares, .k_squares = v->k_squares, .cos = v->cos,
    .sin = v->sin, .positions = v->positions, .slots = v->slots, .k_cache = v->k_cache,
    .v_cache = v->v_cache, .row_flags = v->row_flags, .eps = v->eps, .rows = v->n_rows,
    .n_heads = v->num_heads, .n_kv_heads = v->num_kv_heads, .head_dim = v->head_dim,
    .page_size = v->page_size, .rotary_dim = 2 * v->half, .all_heads = v->all_heads,
    .all_kv_heads = v->all_kv_heads, .dtype = v->dtype)

// -------------------------------------------------------------------------------------- attention
// The kv heads are those that the query heads read.
static void check_group(rm_op_call *c) {
  const rm_op_values *v = &c->v;
  if (c->failed) return;
  if (!v->group) {
    rm_op_multiple_of(c, "num_heads", v->num_heads, v->num_kv_heads);
    if (v->head0) rm_op_refuse(c, RM_E_SHAPE, "head0 without group", v->head0, "exactly", 0);
    return;
  }
  const int64_t read = (v->head0 + v->num_heads + v->group - 1) / v->group;
  if (v->head0 >= v->group)
    rm_op_refuse(c, RM_E_SHAPE, "head0", v->head0, "less than group,", v->group);
  if (v->num_kv_heads != read)
    rm_op_refuse(c, RM_E_SHAPE, "num_kv_heads", v->num_kv_heads, "as many as the query heads read,",
                 read);
}

// Checks that every page that a row may read exists.
static void check_tables(rm_op_call *c) {
  const rm_op_values *v = &c->v;
  const int32_t *positions = rm_op_seen(c, v->positions), *seqs = rm_op_seen(c, v->seq_of_row);
  for (int64_t r = 0; r < v->n_rows && !c->failed; r++) {
    const int64_t last = positions[r],
                  first = v->window > 0 ? rm_max64(0, last - v->window + 1) : 0;
    if (last / v->page_size >= v->max_pages)
      rm_op_refuse(c, RM_E_REQUEST, "a position", last, "less than", v->max_pages * v->page_size);
    if (!c->failed)
      rm_op_in_range(c, "block_tables",
                     (const int32_t *)v->block_tables + seqs[r] * v->max_pages +
                         first / v->page_size,
                     last / v->page_size - first / v->page_size + 1, 0, v->n_pages);
  }
}

static void attention_check(rm_op_call *c) {
  rm_op_values *v = &c->v;
  check_heads(c, v->page_size);
  check_group(c);
  v->max_positions = rm_op_product(c, "a row of block_tables", v->max_pages, v->page_size);
  rm_op_size(c, "block_tables' pages * page_size", v->max_positions, 0);
  rm_op_in_range(c, "positions", v->positions, v->n_rows, 0, INT32_MAX);
  rm_op_in_range(c, "seq_of_row", v->seq_of_row, v->n_rows, 0, v->n_seqs);
  check_tables(c);
}

static const rm_op_argument attention[] = {
    SIZE(page_size, 1),
    SIZE(window, 0),
    REAL(scale, -1),
    SIZE(group, 0),
    SIZE(head0, 0),
    IN(q, T, n_rows, num_heads, head_dim),
    STEP(page_sizes),
    PACKED(k_cache, n_pages, num_kv_heads, k_elems),
    PACKED(v_cache, n_pages, num_kv_heads, v_elems),
    IN(positions, I32, n_rows),
    IN(seq_of_row, I32, n_rows),
    IN(block_tables, I32, n_seqs, max_pages),
    OUT(out, T, n_rows, num_heads, head_dim),
    STEP(attention_check),
    {0},
};
RUN(attention, rm_attention_args, .out = v->out, .q = v->q, .k_cache = v->k_cache,
    .v_cache = v->v_cache, .positions = v->positions, .seq_of_row = v->seq_of_row,
    .block_tables = v->block_tables, .rows = v->n_rows, .n_seqs = v->n_seqs,
    .max_pages = v->max_pages, .n_heads = v->num_heads, .n_kv_heads = v->num_kv_heads,
    .head_dim = v->head_dim, .page_size = v->page_size, .group = v->group, .head0 = v->head0,
    .window = v->window, .scale = v->scale, .dtype = v->dtype)

const rm_op rm_ops_attention[] = {OP(head_squares), OP(qk_rope_kv), OP(attention), {0}};

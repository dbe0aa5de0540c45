// attention.c: q, k and v of rows, and attention over pages. See ops.h.
#include "ops.h"

static void check_heads(rm_op_call *c, int64_t n_heads, int64_t n_kv_heads, int64_t head_dim,
                        int64_t page_size) {
  rm_op_at_least(c, "num_kv_heads", n_kv_heads, 1);
  rm_op_multiple_of(c, "page_size", page_size, 16);
  rm_op_multiple_of(c, "head_dim", head_dim, 2);
  rm_op_at_least(c, "num_heads", n_heads, 1);
  rm_op_size(c, "num_heads * head_dim", rm_op_product(c, "q", n_heads, head_dim), 0);
}

// Elements of a head in a page of each cache.
static void page_elems(rm_op_call *c, int64_t page_size, int64_t head_dim, int64_t value_dim) {
  rm_op_size(c, "head_dim", head_dim, 1);
  if (value_dim > head_dim) rm_op_refuse(c, "value_dim", value_dim, "at most head_dim =", head_dim);
  if (c->failed) return;
  c->s.n_values = rm_value_dim(value_dim, head_dim);
  c->s.k_elems = rm_op_product(c, "k_cache", page_size, rm_round_up(head_dim, RM_K_BLOCK));
  c->s.v_elems = rm_op_product(c, "v_cache", page_size, rm_round_up(c->s.n_values, RM_N_TILE));
}

// ------------------------------------------------------------------------------------- rope_table
#define OP a.rope_table
static void run_rope_table(rm_op_call *c) {
  const rm_rope_table_args *a = &c->OP;
  rm_rope_table(a->cos, a->sin, a->inv_freq, c->s.n_positions, c->s.half, a->scale,
                a->bfloat16 ? RM_BF16 : RM_F32);
}

#define TABLE(name) ARRAY(name, F32, RM_OP_OUT | RM_ARRAY_OF_HOST, n_positions, half)
ARGUMENTS(rope_table) = {
    SIZE_AT(num_positions, n_positions, 0),       REAL(scale, -1), FLAG(bfloat16),
    ARRAY(inv_freq, F32, RM_ARRAY_OF_HOST, half), TABLE(cos),      TABLE(sin),
};

// ----------------------------------------------------------------------------------- head_squares
#undef OP
#define OP a.head_squares
static void split_heads(rm_op_call *c) {
  rm_head_squares_args *a = &c->OP;
  const int64_t of_kv = c->s.width - a->n_heads * a->head_dim, pair = 2 * a->head_dim;
  if (!pair || of_kv < pair || of_kv % pair) {
    rm_op_raise(c, RM_E_SHAPE,
                "qkv: expected (%zd + 2%skv_heads)%s%zd columns, kv_heads at least 1, got %zd",
                a->n_heads, "·", "·", a->head_dim, c->s.width);
    return;
  }
  a->n_kv_heads = of_kv / pair;
  check_heads(c, a->n_heads, a->n_kv_heads, a->head_dim, 16);
}

ARGUMENTS(head_squares) = {
    SIZE_AT(num_heads, n_heads, 0),
    SIZE(head_dim, 0),
    IN(qkv, T, rows, width),
    STEP(split_heads),
    OUT_AT(q_squares, q_out, F32, rows, n_heads),
    OUT_AT(k_squares, k_out, F32, rows, n_kv_heads),
    LIMIT(max_rows, rows),
    LIMIT(head_dim, head_dim),
};

// ------------------------------------------------------------------------------------- qk_rope_kv
#undef OP
#define OP a.qk_rope_kv
static int is_whole(const rm_op_call *c) { // a norm over all heads of the model
  return rm_op_given(c, "q_squares") || rm_op_given(c, "k_squares");
}

// head_dim follows from the columns of qkv.
static void rope_sizes(rm_op_call *c) {
  rm_qk_rope_kv_args *a = &c->OP;
  const int whole = is_whole(c);
  const int64_t columns = a->n_heads + 2 * a->n_kv_heads, taken = c->s.k_elems;
  a->head_dim = a->value_dim ? c->s.width - rm_op_product(c, "qkv", a->n_heads, a->q_dim)
                             : c->s.width / rm_max64(columns, 1);
  page_elems(c, a->page_size, a->head_dim, a->value_dim);
  if (taken != c->s.k_elems)
    rm_op_raise(c, RM_E_SHAPE, "k_cache: expected size %zd in dim 2, got %zd", c->s.k_elems, taken);
  check_heads(c, a->n_heads, a->n_kv_heads, a->head_dim, a->page_size);
  if (!a->value_dim && c->s.width != columns * a->head_dim)
    rm_op_refuse(c, "the columns of qkv", c->s.width, "a multiple of heads,", columns);
  c->s.q_width = whole ? a->n_heads * a->head_dim : a->head_dim;
  c->s.k_width = whole ? a->n_kv_heads * a->head_dim : c->s.n_values;
  c->s.n_slots = c->s.n_pages * a->page_size;
}

// A norm needs both weights, except in latent attention.
static void rope_q_weight(rm_op_call *c, rm_op_argument *q_weight) {
  if (!c->OP.value_dim && rm_op_given(c, "k_weight")) q_weight->flags &= ~RM_ARRAY_OPTIONAL;
}

static void rope_check(rm_op_call *c) {
  rm_qk_rope_kv_args *a = &c->OP;
  a->rotary_dim = 2 * c->s.half;
  if (!a->value_dim && a->q_dim) rm_op_refuse(c, "q_dim without value_dim", a->q_dim, "exactly", 0);
  if (a->value_dim && (a->n_kv_heads != 1 || a->head_dim != a->rotary_dim + a->value_dim ||
                       a->q_dim < a->rotary_dim || !a->k_weight || a->q_weight || a->q_squares ||
                       a->zero_centered || a->norm_last))
    rm_op_raise(c, RM_E_SHAPE,
                "value_dim: expected a kv head of 2 cos.shape[1] + value_dim elements, q_dim at "
                "least 2 cos.shape[1], and only the norm by k_weight, got a head of %zd",
                a->head_dim);
  if (c->s.half > a->head_dim / 2)
    rm_op_refuse(c, "cos.shape[1]", c->s.half, "at most head_dim / 2 =", a->head_dim / 2);
  if (a->q_squares) rm_op_at_least(c, "q_squares.shape[1]", a->all_heads, a->n_heads);
  if (a->k_squares) rm_op_at_least(c, "k_squares.shape[1]", a->all_kv_heads, a->n_kv_heads);
}

// A norm over all heads needs both sums of squares.
#define SQUARES "q_squares", "k_squares"
#define CACHE (RM_ARRAY_WRITE | RM_ARRAY_PACKED)
ARGUMENTS(qk_rope_kv) = {
    SIZE_AT(num_heads, n_heads, 1),
    SIZE(page_size, 1),
    REAL(eps, 0),
    FLAG(zero_centered),
    FLAG(norm_last),
    OPTIONAL_SIZE(value_dim),
    OPTIONAL_SIZE(q_dim),
    IN(qkv, T, rows, width),
    ARRAY(k_cache, T, CACHE, n_pages, n_kv_heads, k_elems),
    STEP(rope_sizes),
    ARRAY(v_cache, T, CACHE, n_pages, n_kv_heads, v_elems),
    {OPTIONAL_AT(q_weight, T, q_width), .with = {SQUARES}, .adjust = rope_q_weight},
    {OPTIONAL_AT(k_weight, T, k_width), .with = {"q_weight", "k_weight", SQUARES}},
    OUT_AT(out, q_out, T, rows, n_heads, head_dim),
    IN(cos, F32, n_positions, half),
    IN(sin, F32, n_positions, half),
    INDICES(positions, I32, 0, n_positions, rows),
    INDICES(slots, I64, -1, n_slots, rows),
    ROW_FLAGS,
    {OPTIONAL_AT(q_squares, F32, rows, all_heads), .with = {SQUARES}},
    {OPTIONAL_AT(k_squares, F32, rows, all_kv_heads), .with = {SQUARES}},
    STEP(rope_check),
    LIMIT(max_rows, rows),
    LIMIT(head_dim, head_dim),
};

// -------------------------------------------------------------------------------------- attention
#undef OP
#define OP a.attention
// The kv heads are those that the query heads read. group 0 becomes n_heads / n_kv_heads.
static void check_group(rm_op_call *c, int64_t *group, int64_t head0, int64_t n_heads,
                        int64_t n_kv_heads) {
  if (c->failed) return;
  if (!*group) {
    rm_op_multiple_of(c, "num_heads", n_heads, n_kv_heads);
    if (head0) rm_op_refuse(c, "head0 without group", head0, "exactly", 0);
    *group = n_heads / n_kv_heads;
    return;
  }
  const int64_t read = (head0 + n_heads + *group - 1) / *group;
  if (head0 >= *group) rm_op_refuse(c, "head0", head0, "less than group,", *group);
  if (n_kv_heads != read)
    rm_op_refuse(c, "num_kv_heads", n_kv_heads, "as many as the query heads read,", read);
}

// Checks that every page that a row may read exists.
static void check_tables(rm_op_call *c) {
  const rm_attention_args *a = &c->OP;
  for (int64_t r = 0; r < a->rows && !c->failed; r++) {
    const int64_t position = a->positions[r], last = position / a->page_size,
                  first = rm_first_position(a, r) / a->page_size;
    rm_op_in_range(c, "block_tables", RM_OP_I32, a->block_tables,
                   a->seq_of_row[r] * a->max_pages + first, last - first + 1, 0, c->s.n_pages);
  }
}

static void attention_pages(rm_op_call *c) {
  rm_attention_args *a = &c->OP;
  page_elems(c, a->page_size, a->head_dim, a->value_dim);
  a->value_dim = c->s.n_values;
}

static void attention_sizes(rm_op_call *c) {
  rm_attention_args *a = &c->OP;
  check_heads(c, a->n_heads, a->n_kv_heads, a->head_dim, a->page_size);
  check_group(c, &a->group, a->head0, a->n_heads, a->n_kv_heads);
  c->s.n_positions = rm_op_product(c, "a row of block_tables", a->max_pages, a->page_size);
  rm_op_size(c, "block_tables' pages * page_size", c->s.n_positions, 0);
}

ARGUMENTS(attention) = {
    SIZE(page_size, 1),
    SIZE(window, 0),
    REAL(scale, -1),
    OPTIONAL_REAL(softcap),
    SIZE(group, 0),
    SIZE(head0, 0),
    OPTIONAL_SIZE(value_dim),
    IN(q, T, rows, n_heads, head_dim),
    STEP(attention_pages),
    PACKED(k_cache, n_pages, n_kv_heads, k_elems),
    PACKED(v_cache, n_pages, n_kv_heads, v_elems),
    IN(block_tables, I32, n_seqs, max_pages),
    STEP(attention_sizes),
    INDICES(positions, I32, 0, n_positions, rows),
    INDICES(seq_of_row, I32, 0, n_seqs, rows),
    STEP(check_tables),
    OPTIONAL(sinks, T, n_heads),
    OUT(out, T, rows, n_heads, n_values),
    LIMIT(max_rows, rows),
    LIMIT(n_heads, n_heads),
    LIMIT(n_kv_heads, n_kv_heads),
    LIMIT(head_dim, head_dim),
    LIMIT(group, group),
    LIMIT(max_positions, n_positions),
};

// -------------------------------------------------------------------------------------- delta_net
#undef OP
#define OP a.delta_net
// The number of key heads follows from the channels of conv, which are those of q, k and v.
static void delta_sizes(rm_op_call *c) {
  rm_delta_net_args *a = &c->OP;
  const int64_t of_q_k = c->s.width - rm_op_product(c, "norm", a->n_v_heads, a->v_dim),
                pair = 2 * a->k_dim;
  rm_op_at_least(c, "norm.shape[0]", a->v_dim, 1);
  if (a->v_dim > RM_MAX_DELTA_DIM)
    rm_op_refuse(c, "norm.shape[0]", a->v_dim, "at most", RM_MAX_DELTA_DIM);
  rm_op_at_least(c, "a_log.shape[0]", a->n_v_heads, 1);
  rm_op_at_least(c, "conv.shape[1]", a->kernel, 1);
  rm_op_at_least(c, "conv.shape[0]", of_q_k, pair);
  rm_op_multiple_of(c, "conv.shape[0] - v_heads * v_dim", of_q_k, pair);
  if (c->failed) return;
  a->n_k_heads = of_q_k / pair;
  check_group(c, &a->group, a->head0, a->n_v_heads, a->n_k_heads);
  c->s.columns = rm_delta_columns(a->n_k_heads, a->n_v_heads, a->k_dim, a->v_dim);
  c->s.elems = rm_op_product(c, "states", a->n_v_heads,
                             rm_delta_head_bytes(a->k_dim, a->v_dim, a->kernel, c->dtype) / 4);
}

// The rows of a sequence are adjacent. No row may save to a slot that another row saves to, or that
// a sequence loads before its rows.
static void delta_slots(rm_op_call *c) {
  const rm_delta_net_args *a = &c->OP;
  const int32_t *seqs = a->seq_of_row;
  for (int64_t r = 0; r < a->rows; r++) {
    const int starts = r && seqs[r] != seqs[r - 1];
    const int32_t slot = a->save_slots[r];
    for (int64_t i = 0; i < a->rows && (starts || slot >= 0) && !c->failed; i++)
      if (starts && i < r && seqs[i] == seqs[r])
        rm_op_raise(c, RM_E_REQUEST,
                    "seq_of_row: expected adjacent rows of sequence %d, got rows %zd and %zd",
                    seqs[r], i, r);
      else if (slot >= 0 && i != r &&
               (a->save_slots[i] == slot ||
                (a->load_slots[seqs[i]] == slot && (i > r || seqs[i] != seqs[r]))))
        rm_op_raise(
            c, RM_E_REQUEST,
            "save_slots: expected a slot that no other row uses, got %d in rows %zd and %zd", slot,
            r, i);
  }
}

ARGUMENTS(delta_net) = {
    NUMBER(k_dim, k_dim, SIZE, 0, 1, RM_MAX_DELTA_DIM),
    SIZE(group, 0),
    SIZE(head0, 0),
    REAL(eps, 0),
    IN(conv, T, width, kernel),
    IN(a_log, F32, n_v_heads),
    IN(dt_bias, F32, n_v_heads),
    IN(norm, T, v_dim),
    STEP(delta_sizes),
    IN(x, T, rows, columns),
    ARRAY(states, F32, RM_ARRAY_WRITE, n_slots, elems),
    INDICES(load_slots, I32, -1, n_slots, n_seqs),
    INDICES(save_slots, I32, -1, n_slots, rows),
    INDICES(seq_of_row, I32, 0, n_seqs, rows),
    STEP(delta_slots),
    OUT(out, T, rows, n_v_heads, v_dim),
    LIMIT(max_rows, rows),
    LIMIT(k_dim, k_dim),
    LIMIT(v_dim, v_dim),
    LIMIT(kernel, kernel),
};

const rm_op rm_ops_attention[] = {
    OP_OF_F32(rope_table), OP_OF_T(head_squares), OP_OF_T(qk_rope_kv),
    OP_OF_T(attention),    OP_OF_T(delta_net),    {0},
};

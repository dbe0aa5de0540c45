// dense.c: rows, norms and matmuls. See ops.h.
#include "ops.h"

// ------------------------------------------------------------------------------------------ embed
#define OP a.embed
// A packed table has one dim, and its sizes are arguments.
static void embed_table(rm_op_call *c, rm_op_argument *table) {
  if (!c->OP.packed) return;
  rm_op_at_least(c, "vocab", c->s.x_rows, 0);
  rm_op_at_least(c, "hidden", c->OP.hidden, 0);
  c->s.elems = rm_op_packed_elems(c, "table", c->s.x_rows, c->OP.hidden);
  table->flags = RM_ARRAY_PACKED;
  table->dims[0] = AT(elems);
  table->dims[1] = 0;
}

ARGUMENTS(embed) = {
    FLAG(packed),
    OPTIONAL_REAL(scale),
    NUMBER(vocab, x_rows, SIZE, RM_ARRAY_OPTIONAL, 0, RM_OP_MAX_SIZE),
    OPTIONAL_SIZE(hidden),
    ADJUSTED(embed_table, table, T, RM_ARRAY_IN, x_rows, hidden),
    INDICES(ids, I32, 0, x_rows, rows),
    OUT(out, T, rows, hidden),
};

// ------------------------------------------------------------------------------------ gather_rows
#undef OP
#define OP a.gather_rows
static void gather_bytes(rm_op_call *c) {
  c->OP.row_bytes = (size_t)c->s.width * rm_dtype_bytes(c->dtype);
}

ARGUMENTS(gather_rows) = {
    IN(x, T, x_rows, width),
    {ARRAY_AT(rows, from, I32, RM_ARRAY_IN, rows), .below = AT(x_rows)},
    OUT(out, T, rows, width),
    STEP(gather_bytes),
};

// --------------------------------------------------------------------------------------- rms_norm
#undef OP
#define OP a.rms_norm
static void residual_written(rm_op_call *c, rm_op_argument *residual) {
  if (rm_op_given(c, "x")) residual->flags = RM_ARRAY_WRITE;
}

static void norm_check(rm_op_call *c) { rm_op_at_least(c, "the width of residual", c->OP.n, 1); }

ARGUMENTS(rms_norm) = {
    REAL(eps, 0),
    FLAG(zero_centered),
    OPTIONAL_REAL(x_scale),
    ADJUSTED(residual_written, residual, T, RM_ARRAY_IN, rows, n),
    ARRAY(x, T, RM_ARRAY_OPTIONAL | RM_OP_SAME, rows, n),
    OPTIONAL(x_gate, T, rows),
    OPTIONAL(weight, T, n),
    STEP(norm_check),
    ARRAY(out, T, RM_OP_OUT | RM_OP_SAME, rows, n),
};

// ------------------------------------------------------------------------------ gemm, gemm_swiglu
#undef OP
#define OP a.gemm
static void weights_of(rm_op_call *c, int64_t rows) {
  rm_gemm_args *a = &c->OP;
  if (a->group_rows) rm_op_at_least(c, "the length of group_rows", c->s.bounds, 1);
  a->n_groups = a->group_rows ? c->s.bounds - 1 : 1;
  a->group_stride = rm_op_packed_elems(c, "w", rows, a->k);
  c->s.elems = rm_op_product(c, "w", a->n_groups, a->group_stride);
}
static void gemm_weights(rm_op_call *c) { weights_of(c, c->OP.n); }
static void swiglu_weights(rm_op_call *c) {
  c->s.both = 2 * c->OP.n;
  c->out_dtype = c->dtype;
  weights_of(c, rm_gate_up_rows(c->OP.n));
}

static void gemm_out(rm_op_call *c, rm_op_argument *out) {
  rm_op_out_dtype(c, out);
  if (c->dtype == RM_F32 && c->out_dtype == RM_BF16)
    rm_op_raise(c, RM_E_DTYPE, "out: expected float32, got bfloat16: x is float32");
}

// Checks that every row belongs to a group; other rows would not be written.
static void check_groups(rm_op_call *c) {
  const int32_t *bounds = c->OP.group_rows;
  const int64_t n = c->OP.n_groups, rows = c->OP.m;
  if (!bounds) return;
  rm_op_in_range(c, "group_rows", RM_OP_I32, bounds, 0, n + 1, 0, rows + 1);
  if (bounds[0] != 0) rm_op_refuse(c, "the first of group_rows", bounds[0], "exactly", 0);
  if (bounds[n] != rows) rm_op_refuse(c, "the last of group_rows", bounds[n], "x's rows,", rows);
  for (int64_t g = 0; g < n && !c->failed; g++)
    if (bounds[g + 1] < bounds[g])
      rm_op_refuse(c, "group_rows", bounds[g + 1], "ascending, at least", bounds[g]);
}

// Sets the dims of a gemm's biases: a row for each group, if there are groups.
static void gemm_biases(rm_op_call *c, rm_op_argument *bias) {
  const size_t width = bias->dims[0];
  if (!c->OP.group_rows) return;
  bias->dims[0] = AT(n_groups);
  bias->dims[1] = width;
}

static void gemm_check(rm_op_call *c) {
  rm_gemm_args *a = &c->OP;
  a->ldx = a->k;
  a->ldy = a->n;
  a->y_dtype = c->out_dtype;
  c->limits = (rm_limits){.max_rows = a->m, .max_k = a->k, .max_n = a->n};
  check_groups(c);
}

ARGUMENTS(gemm) = {
    SIZE(n, 0),
    FLAG(float32_out),
    IN(x, T, m, k),
    OPTIONAL(group_rows, I32, bounds),
    STEP(gemm_weights),
    PACKED(w, elems),
    ADJUSTED(gemm_biases, bias, T, RM_ARRAY_OPTIONAL, n),
    // float32 with float32_out
    {ARRAY_AT(out, y, OUT_T, RM_OP_OUT, m, n), .adjust = gemm_out},
    STEP(gemm_check),
};

ARGUMENTS(gemm_swiglu) = {
    SIZE(n, 0),
    CHOICE(activation, RM_SWIGLU_OAI),
    REAL(alpha, -1),
    REAL(limit, 0),
    IN(x, T, m, k),
    OPTIONAL(group_rows, I32, bounds),
    STEP(swiglu_weights),
    PACKED(w, elems),
    ADJUSTED(gemm_biases, bias, T, RM_ARRAY_OPTIONAL, both),
    OUT_AT(out, y, T, m, n),
    OPTIONAL_OUT(gate_up, T, m, both),
    STEP(gemm_check),
};

// --------------------------------------------------------------------------------------- activate
#undef OP
#define OP a.activate
ARGUMENTS(activate) = {
    CHOICE(activation, RM_RELU2),
    IN(x, T, rows, n),
    ARRAY(out, T, RM_OP_OUT | RM_OP_SAME, rows, n),
    COPY(ld, n),
};

// ----------------------------------------------------------------------------------- sigmoid_gate
#undef OP
#define OP a.sigmoid_gate
ARGUMENTS(sigmoid_gate) = {
    IN(x, T, rows, n),
    IN(gate, T, rows, n),
    ARRAY(out, T, RM_OP_OUT | RM_OP_SAME, rows, n),
};

const rm_op rm_ops_dense[] = {
    OP_OF_T(embed),       OP_OF_F32(gather_rows), OP_OF_T(rms_norm),     OP_OF_T(gemm),
    OP_OF_T(gemm_swiglu), OP_OF_T(activate),      OP_OF_T(sigmoid_gate), {0},
};

// dense.c: rows, norms and matmuls. See ops.h.
#include "ops.h"

// ---------------------------------------------------------------------------------- embed, gather
// A packed table has one dim, and its sizes are arguments.
static void embed_table(rm_op_call *c, rm_op_argument *table) {
  if (!c->v.packed) return;
  rm_op_at_least(c, "vocab", c->v.x_rows, 0);
  rm_op_at_least(c, "hidden", c->v.hidden, 0);
  c->v.elems = rm_op_packed_elems(c, "table", c->v.x_rows, c->v.hidden);
  table->flags = RM_ARRAY_PACKED;
  table->dims[0] = AT(elems);
  table->dims[1] = 0;
}

static void embed_check(rm_op_call *c) {
  rm_op_in_range(c, "ids", c->v.ids, c->v.n_rows, 0, c->v.x_rows);
}

static const rm_op_argument embed[] = {
    FLAG(packed),
    {.name = "vocab",
     .type = RM_OP_SIZE,
     .flags = RM_ARRAY_OPTIONAL,
     .value = AT(x_rows),
     .high = RM_OP_MAX_SIZE},
    NUMBER(hidden, SIZE, RM_ARRAY_OPTIONAL, 0, RM_OP_MAX_SIZE),
    IN(ids, I32, n_rows),
    ADJUSTED(embed_table, table, T, RM_ARRAY_IN, x_rows, hidden),
    STEP(embed_check),
    OUT(out, T, n_rows, hidden),
    {0},
};
RUN(embed, rm_embed_args, .out = v->out, .ids = v->ids, .table = v->table, .packed = v->packed,
    .rows = v->n_rows, .hidden = v->hidden, .dtype = v->dtype)

static void gather_check(rm_op_call *c) {
  const size_t row = (size_t)c->v.width * rm_dtype_bytes(c->v.dtype);
  rm_op_in_range(c, "rows", c->v.rows, c->v.n_rows, 0, c->v.x_rows);
  rm_op_apart(c, "out", c->v.out, (size_t)c->v.n_rows * row, c->v.x, (size_t)c->v.x_rows * row);
}

static const rm_op_argument gather_rows[] = {
    IN(x, T, x_rows, width),
    IN(rows, I32, n_rows),
    OUT(out, T, n_rows, width),
    STEP(gather_check),
    {0},
};
RUN(gather_rows, rm_gather_rows_args, .out = v->out, .x = v->x, .from = v->rows, .rows = v->n_rows,
    .row_bytes = (size_t)v->width * rm_dtype_bytes(v->dtype))

// --------------------------------------------------------------------------------------- rms_norm
static void residual_written(rm_op_call *c, rm_op_argument *residual) {
  if (rm_op_given(c, "x")) residual->flags = RM_ARRAY_WRITE;
}

static void norm_check(rm_op_call *c) {
  rm_op_at_least(c, "the width of residual", c->v.hidden, 1);
}

static const rm_op_argument rms_norm[] = {
    REAL(eps, 0),
    ADJUSTED(residual_written, residual, T, RM_ARRAY_IN, n_rows, hidden),
    OPTIONAL(x, T, n_rows, hidden),
    OPTIONAL(x_gate, T, n_rows),
    OPTIONAL(weight, T, hidden),
    STEP(norm_check),
    OUT(out, T, n_rows, hidden),
    {0},
};
RUN(rms_norm, rm_rms_norm_args, .out = v->out, .residual = v->residual, .x = v->x,
    .x_gate = v->x_gate, .weight = v->weight, .eps = v->eps, .rows = v->n_rows, .n = v->hidden,
    .dtype = v->dtype)

// ------------------------------------------------------------------------------------------- gemm
static void weights_of(rm_op_call *c, int64_t rows) {
  if (c->v.group_rows) rm_op_at_least(c, "the length of group_rows", c->v.bounds, 1);
  c->v.n_groups = c->v.group_rows ? c->v.bounds - 1 : 1;
  c->v.group_stride = rm_op_packed_elems(c, "w", rows, c->v.k);
  c->v.elems = rm_op_product(c, "w", c->v.n_groups, c->v.group_stride);
}
static void gemm_weights(rm_op_call *c) { weights_of(c, c->v.n); }
static void swiglu_weights(rm_op_call *c) {
  c->v.both = 2 * c->v.n;
  c->v.out_dtype = c->v.dtype;
  weights_of(c, rm_gate_up_rows(c->v.n));
}

// A new output has the requested dtype; an existing output determines it.
static void gemm_out(rm_op_call *c, rm_op_argument *out) {
  PyObject *given = rm_op_given(c, out->name);
  const int is_new = !given || given == Py_Ellipsis;
  c->v.out_dtype = !is_new            ? rm_op_dtype_of(c, given, out->name)
                   : c->v.float32_out ? RM_F32
                                      : c->v.dtype;
  if (c->v.dtype == RM_F32 && c->v.out_dtype == RM_BF16)
    rm_op_raise(c, RM_E_DTYPE, "out: expected float32, got bfloat16: x is float32");
}

// Checks that every row belongs to a group; other rows would not be written.
static void check_groups(rm_op_call *c) {
  const int32_t *bounds = rm_op_seen(c, c->v.group_rows);
  const int64_t n = c->v.n_groups, rows = c->v.n_rows;
  if (!bounds) return;
  rm_op_in_range(c, "group_rows", c->v.group_rows, n + 1, 0, rows + 1);
  if (bounds[0] != 0)
    rm_op_refuse(c, RM_E_SHAPE, "the first of group_rows", bounds[0], "exactly", 0);
  if (bounds[n] != rows)
    rm_op_refuse(c, RM_E_SHAPE, "the last of group_rows", bounds[n], "x's rows,", rows);
  for (int64_t g = 0; g < n && !c->failed; g++)
    if (bounds[g + 1] < bounds[g])
      rm_op_refuse(c, RM_E_SHAPE, "group_rows", bounds[g + 1], "ascending, at least", bounds[g]);
}

static void gemm_check(rm_op_call *c) {
  const rm_op_values *v = &c->v;
  const size_t each = rm_dtype_bytes(v->dtype), rows = (size_t)v->n_rows,
               x = rows * (size_t)v->k * each,
               out = rows * (size_t)v->n * rm_dtype_bytes(v->out_dtype),
               both = v->gate_up ? rows * (size_t)v->both * each : 0;
  if (v->bias && v->group_rows) rm_op_refuse(c, RM_E_SHAPE, "bias with groups", 1, "at most", 0);
  rm_op_apart(c, "out", v->out, out, v->x, x);
  rm_op_apart(c, "gate_up", v->gate_up, both, v->x, x);
  rm_op_apart(c, "gate_up", v->gate_up, both, v->out, out);
  check_groups(c);
}

static const rm_op_argument gemm[] = {
    SIZE(n, 0),           FLAG(float32_out),
    IN(x, T, n_rows, k),  OPTIONAL(group_rows, I32, bounds),
    STEP(gemm_weights),   PACKED(w, elems),
    OPTIONAL(bias, T, n), ADJUSTED(gemm_out, out, OUT_T, RM_OP_OUT, n_rows, n),
    STEP(gemm_check),     {0},
};

static const rm_op_argument gemm_swiglu[] = {
    SIZE(n, 0),
    CHOICE(activation, RM_RELU2),
    IN(x, T, n_rows, k),
    OPTIONAL(group_rows, I32, bounds),
    STEP(swiglu_weights),
    PACKED(w, elems),
    OUT(out, T, n_rows, n),
    OPTIONAL_OUT(gate_up, T, n_rows, both),
    STEP(gemm_check),
    {0},
};

static rm_gemm_args gemm_args(const rm_op_values *v) {
  return (rm_gemm_args){
      .y = v->out,
      .gate_up = v->gate_up,
      .x = v->x,
      .w = v->w,
      .bias = v->bias,
      .group_rows = v->group_rows,
      .n_groups = v->n_groups,
      .group_stride = v->group_stride,
      .m = v->n_rows,
      .n = v->n,
      .k = v->k,
      .ldx = v->k,
      .ldy = v->n,
      .dtype = v->dtype,
      .y_dtype = v->out_dtype,
      .activation = (rm_activation)v->activation,
  };
}
static void run_gemm(const rm_kernels *kernels, const rm_ctx *ctx, const rm_op_values *v) {
  const rm_gemm_args args = gemm_args(v);
  kernels->gemm(ctx, &args);
}
static void run_gemm_swiglu(const rm_kernels *kernels, const rm_ctx *ctx, const rm_op_values *v) {
  const rm_gemm_args args = gemm_args(v);
  kernels->gemm_swiglu(ctx, &args);
}

// --------------------------------------------------------------------------------------- activate
static void activate_check(rm_op_call *c) {
  const size_t bytes = (size_t)(c->v.n_rows * c->v.n) * rm_dtype_bytes(c->v.dtype);
  if (c->v.out != c->v.x) rm_op_apart(c, "out", c->v.out, bytes, c->v.x, bytes);
}

static const rm_op_argument activate[] = {
    CHOICE(activation, RM_RELU2),
    IN(x, T, n_rows, n),
    OUT(out, T, n_rows, n),
    STEP(activate_check),
    {0},
};
RUN(activate, rm_activate_args, .out = v->out, .x = v->x, .rows = v->n_rows, .n = v->n, .ld = v->n,
    .dtype = v->dtype, .activation = (rm_activation)v->activation)

const rm_op rm_ops_dense[] = {
    OP(embed), OP(gather_rows), OP(rms_norm), OP(gemm), OP(gemm_swiglu), OP(activate), {0},
};

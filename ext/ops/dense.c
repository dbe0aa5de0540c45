// dense.c: rows, norms, matmuls, and the packing of weights. See ops.h.
#include "dlpack.h"
#include "ops.h"

static const int64_t MAX_INDEX =
    INT64_MAX / 16;  // of an element in a parameter: bytes and sums of two stay below 2^63

// (out, ids, table, packed, vocab, hidden)
RM_KERNELS_METHOD(embed) {
  CALL(6);
  rm_embed_args a = {.rows = -1, .packed = o[3] == Py_True};
  int64_t vocab = rm_op_size_of(&c, o[4], "vocab", 0);
  a.hidden = rm_op_size_of(&c, o[5], "hidden", 0);
  int64_t elems = rm_op_packed_elems(&c, "table", vocab, a.hidden);
  a.dtype = rm_op_dtype_of(&c, o[2], "table");
  a.ids = VIEW(&c, o[1], "ids", NPY_INT32, RM_ARRAY_IN, &a.rows);
  a.table =
      a.packed ? VIEW(&c, o[2], "table", rm_op_numpy_type(a.dtype), RM_ARRAY_PACKED, &elems)
               : VIEW(&c, o[2], "table", rm_op_numpy_type(a.dtype), RM_ARRAY_IN, &vocab, &a.hidden);
  a.out = VIEW(&c, o[0], "out", rm_op_numpy_type(a.dtype), RM_ARRAY_WRITE, &a.rows, &a.hidden);
  rm_op_in_range(&c, "ids", a.ids, a.rows, 0, vocab);
  RUN(embed, ((rm_limits){.max_rows = a.rows, .max_k = a.hidden}), &a);
}

// The op reads x while it writes `out`.
static void apart(rm_op_call *c, const char *name, const void *out, size_t out_bytes, const void *x,
                  size_t x_bytes) {
  const uintptr_t first = (uintptr_t)out, other = (uintptr_t)x;
  if (c->failed || !out_bytes || !x_bytes || first >= other + x_bytes || other >= first + out_bytes)
    return;
  rm_raise_code(c->module, RM_E_LAYOUT,
                "%s: expected memory of its own, got an array that overlaps another argument",
                name);
  c->failed = 1;
}

// (out, x, from)
RM_KERNELS_METHOD(gather_rows) {
  CALL(3);
  rm_gather_rows_args a = {.rows = -1};
  int64_t rows_of_x = -1, width = -1;
  const rm_dtype dtype = rm_op_dtype_of(&c, o[1], "x");
  a.x = VIEW(&c, o[1], "x", rm_op_numpy_type(dtype), RM_ARRAY_IN, &rows_of_x, &width);
  a.from = VIEW(&c, o[2], "from", NPY_INT32, RM_ARRAY_IN, &a.rows);
  a.out = VIEW(&c, o[0], "out", rm_op_numpy_type(dtype), RM_ARRAY_WRITE, &a.rows, &width);
  rm_op_in_range(&c, "from", a.from, a.rows, 0, rows_of_x);
  a.row_bytes = c.failed ? 0 : (size_t)width * rm_dtype_bytes(dtype);
  apart(&c, "out", a.out, (size_t)a.rows * a.row_bytes, a.x, (size_t)rows_of_x * a.row_bytes);
  RUN(gather_rows, ((rm_limits){.max_rows = a.rows}), &a);
}

// (out, residual, x | None, weight | None, eps, x_gate | None)
RM_KERNELS_METHOD(rms_norm) {
  CALL(6);
  rm_rms_norm_args a = {.rows = -1, .n = -1, .eps = rm_op_real(&c, o[4], "eps", 0)};
  a.dtype = rm_op_dtype_of(&c, o[1], "residual");
  const int type = rm_op_numpy_type(a.dtype);
  a.residual = VIEW(&c, o[1], "residual", type, o[2] == Py_None ? RM_ARRAY_IN : RM_ARRAY_WRITE,
                    &a.rows, &a.n);
  a.x = VIEW(&c, o[2], "x", type, RM_ARRAY_OPTIONAL, &a.rows, &a.n);
  a.x_gate = VIEW(&c, o[5], "x_gate", type, RM_ARRAY_OPTIONAL, &a.rows);
  a.weight = VIEW(&c, o[3], "weight", type, RM_ARRAY_OPTIONAL, &a.n);
  a.out = VIEW(&c, o[0], "out", type, RM_ARRAY_WRITE, &a.rows, &a.n);
  rm_op_at_least(&c, "the width of residual", a.n, 1);
  RUN(rms_norm, ((rm_limits){.max_rows = a.rows, .max_k = a.n}), &a);
}

// Every row belongs to a group: one of no group would not be written.
static void check_groups(rm_op_call *c, const rm_gemm_args *a) {
  const int32_t *bounds = rm_op_seen(c, a->group_rows);
  if (!bounds) return;
  rm_op_in_range(c, "group_rows", a->group_rows, a->n_groups + 1, 0, a->m + 1);
  const int32_t first = bounds[0], last = bounds[a->n_groups];
  if (first != 0) rm_op_refuse(c, RM_E_SHAPE, "the first of group_rows", first, "exactly", 0);
  if (last != a->m) rm_op_refuse(c, RM_E_SHAPE, "the last of group_rows", last, "x's rows,", a->m);
  for (int64_t g = 0; g < a->n_groups && !c->failed; g++)
    if (bounds[g + 1] < bounds[g])
      rm_op_refuse(c, RM_E_SHAPE, "group_rows", bounds[g + 1], "ascending, at least", bounds[g]);
}

static rm_activation activation_of(rm_op_call *c, PyObject *object) {
  const int64_t activation = rm_op_size_of(c, object, "activation", 0);
  if (activation > RM_RELU2)
    rm_op_refuse(c, RM_E_CONFIG, "activation", activation, "at most", RM_RELU2);
  return (rm_activation)activation;
}

// (y, x, w, bias | None, group_rows | None, n, swiglu, gate_up | None, activation)
RM_KERNELS_METHOD(gemm) {
  CALL(9);
  const int swiglu = o[6] == Py_True;
  rm_gemm_args a = {.m = -1, .k = -1, .n = rm_op_size_of(&c, o[5], "n", 0), .n_groups = -1};
  a.activation = activation_of(&c, o[8]);
  a.dtype = rm_op_dtype_of(&c, o[1], "x");
  a.y_dtype = rm_op_dtype_of(&c, o[0], "y");
  a.x = VIEW(&c, o[1], "x", rm_op_numpy_type(a.dtype), RM_ARRAY_IN, &a.m, &a.k);
  int64_t bounds = -1;
  a.group_rows = VIEW(&c, o[4], "group_rows", NPY_INT32, RM_ARRAY_OPTIONAL, &bounds);
  if (a.group_rows) rm_op_at_least(&c, "the length of group_rows", bounds, 1);
  a.n_groups = a.group_rows ? bounds - 1 : 1;
  a.group_stride =
      c.failed ? 0 : rm_op_packed_elems(&c, "w", swiglu ? rm_gate_up_rows(a.n) : a.n, a.k);
  int64_t elems = rm_op_product(&c, "w", a.n_groups, a.group_stride);
  a.w = VIEW(&c, o[2], "w", rm_op_numpy_type(a.dtype), RM_ARRAY_PACKED, &elems);
  a.bias = VIEW(&c, o[3], "bias", rm_op_numpy_type(a.dtype), RM_ARRAY_OPTIONAL, &a.n);
  if (a.bias && (swiglu || a.group_rows))
    rm_op_refuse(&c, RM_E_SHAPE, "bias with groups or swiglu", 1, "at most", 0);
  if (a.dtype == RM_F32 && a.y_dtype == RM_BF16 && !c.failed) {
    rm_raise_code(c.module, RM_E_DTYPE, "y: expected float32, got bfloat16: x is float32");
    c.failed = 1;
  }
  a.y = VIEW(&c, o[0], "y", rm_op_numpy_type(a.y_dtype), RM_ARRAY_WRITE, &a.m, &a.n);
  apart(&c, "out", a.y, (size_t)(a.m * a.n) * rm_dtype_bytes(a.y_dtype), a.x,
        (size_t)(a.m * a.k) * rm_dtype_bytes(a.dtype));
  int64_t both = 2 * a.n;
  a.gate_up = VIEW(&c, o[7], "gate_up", rm_op_numpy_type(a.dtype),
                   RM_ARRAY_WRITE | RM_ARRAY_OPTIONAL, &a.m, &both);
  if (a.gate_up && !swiglu) rm_op_refuse(&c, RM_E_SHAPE, "gate_up without swiglu", 1, "at most", 0);
  const size_t kept = a.gate_up ? (size_t)(a.m * both) * rm_dtype_bytes(a.dtype) : 0;
  apart(&c, "gate_up", a.gate_up, kept, a.x, (size_t)(a.m * a.k) * rm_dtype_bytes(a.dtype));
  apart(&c, "gate_up", a.gate_up, kept, a.y, (size_t)(a.m * a.n) * rm_dtype_bytes(a.y_dtype));
  check_groups(&c, &a);
  a.ldx = a.k;
  a.ldy = a.n;
  const rm_limits limits = {.max_rows = a.m, .max_k = a.k, .max_n = a.n};
  if (swiglu) RUN(gemm_swiglu, limits, &a);
  RUN(gemm, limits, &a);
}

// (out, x, activation)
RM_KERNELS_METHOD(activate) {
  CALL(3);
  rm_activate_args a = {.rows = -1, .n = -1, .activation = activation_of(&c, o[2])};
  a.dtype = rm_op_dtype_of(&c, o[1], "x");
  a.x = VIEW(&c, o[1], "x", rm_op_numpy_type(a.dtype), RM_ARRAY_IN, &a.rows, &a.n);
  a.out = VIEW(&c, o[0], "out", rm_op_numpy_type(a.dtype), RM_ARRAY_WRITE, &a.rows, &a.n);
  const size_t bytes = c.failed ? 0 : (size_t)(a.rows * a.n) * rm_dtype_bytes(a.dtype);
  if (a.out != a.x) apart(&c, "out", a.out, bytes, a.x, bytes);
  a.ld = a.n;
  RUN(activate, ((rm_limits){.max_rows = a.rows, .max_n = a.n}), &a);
}

// Waits until the host has the digest and the index.
static PyObject *packed_on_device(rm_op_call *c, rm_pack_found *found) {
  const rm_mirrored_buffer *mirrored = &c->self->op_device->mirrored[0];
  rm_error err = RM_ERROR_INIT;
  rm_mirrored_copy_to_host(mirrored, found, sizeof *found);
  const rm_code code = rm_device_wait(mirrored->device, &err);
  const rm_pack_found seen = *found;
  PyObject *none = rm_op_finish(c);
  if (!none || code) {
    Py_XDECREF(none);
    return none ? rm_raise(c->module, &err) : (rm_error_clear(&err), NULL);
  }
  Py_DECREF(none);
  return Py_BuildValue("KL", (unsigned long long)seen.digest, (long long)seen.nonfinite_index);
}

// (dst, src, layout, dst_row0, index0) → (digest, nonfinite_index). dst: 2 dims plain, 1 dim packed
// with dst_cols = src's columns.
RM_KERNELS_METHOD(pack) {
  CALL(5);
  const int64_t layout = rm_op_size_of(&c, o[2], "layout", RM_PLAIN),
                row0 = rm_op_size_of(&c, o[3], "dst_row0", 0);
  const int64_t index0 = rm_op_integer(&c, o[4], "index0", 0, MAX_INDEX);
  rm_pack_args a = {
      .rows = -1, .cols = -1, .layout = (rm_layout)layout, .dst_row0 = row0, .index0 = index0};
  const int type = PyArray_Check(o[1])                  ? PyArray_TYPE((PyArrayObject *)o[1])
                   : rm_is_device_array(c.module, o[1]) ? rm_device_array_type(o[1])
                                                        : -1;
  while (a.src_dtype < RM_SRC_F64 && rm_elements[a.src_dtype].type != type) a.src_dtype++;
  const int src_type = rm_elements[a.src_dtype].type;
  if (src_type != type)
    rm_op_refuse_dtype(&c, o[1], "the weight",
                       "bfloat16 (its words in uint16), float32, float16 or float64");
  a.dst_dtype = rm_op_dtype_of(&c, o[0], "dst");
  a.src = VIEW(&c, o[1], "src", src_type, RM_ARRAY_IN, &a.rows, &a.cols);
  if (layout > RM_PACKED_UP)
    rm_op_refuse(&c, RM_E_LAYOUT, "layout", layout, "one of rm_layout, at most", RM_PACKED_UP);
  if (a.cols % 2 == 0 && index0 % 2)
    rm_op_refuse(&c, RM_E_SHAPE, "index0 of rows of even width", index0, "even, such as",
                 index0 - 1);
  const int64_t end = c.failed ? 0 : row0 + a.rows,
                rows_of = layout >= RM_PACKED_GATE ? rm_gate_up_rows(end) : end;
  int64_t elems = -1, dst_rows = -1;
  a.dst = layout == RM_PLAIN ? VIEW(&c, o[0], "dst", rm_op_numpy_type(a.dst_dtype), RM_ARRAY_WRITE,
                                    &dst_rows, &a.cols)
                             : VIEW(&c, o[0], "dst", rm_op_numpy_type(a.dst_dtype),
                                    RM_ARRAY_WRITE | RM_ARRAY_PACKED, &elems);
  if (!c.failed && layout == RM_PLAIN) rm_op_at_least(&c, "dst's rows", dst_rows, rows_of);
  const int64_t packed = rm_op_packed_elems(&c, "dst", rows_of, a.cols);
  if (!c.failed && layout != RM_PLAIN) rm_op_at_least(&c, "dst's length", elems, packed);
  a.row_stride = a.dst_cols = a.cols;
  a.col_stride = 1;
  rm_pack_found *found = self->op_device ? rm_op_mirrored(&c, sizeof *found) : NULL;
  a.found = found ? (rm_pack_found *)(uintptr_t)rm_op_there(&c, found) : NULL;
  if (rm_op_begin(&c, (rm_limits){.max_rows = a.rows, .max_k = a.cols})) return NULL;
  self->table->pack(&c.ctx, &a);
  if (found) return packed_on_device(&c, found);
  Py_DECREF(rm_op_finish(&c));
  return Py_BuildValue("KL", (unsigned long long)a.digest, (long long)a.nonfinite_index);
}

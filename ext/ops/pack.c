// pack.c: Kernels.pack, the packing of weights. See ops.h.
#include "dlpack.h"
#include "ops.h"

// With this limit the byte offset of an element, and the sum of two offsets, stay below 2^63.
static const int64_t MAX_INDEX = INT64_MAX / 16;

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
PyObject *rm_op_pack(rm_kernels_object *self, PyObject *args) {
  rm_op_call c = {.self = self, .module = rm_module_of((PyObject *)self)};
  PyObject *dst, *src, *layout_object, *row0_object, *index0_object;
  if (!PyArg_ParseTuple(args, "OOOOO:pack", &dst, &src, &layout_object, &row0_object,
                        &index0_object))
    return NULL;
  const int64_t layout = rm_op_integer(&c, layout_object, "layout", RM_PLAIN, RM_OP_MAX_SIZE),
                row0 = rm_op_integer(&c, row0_object, "dst_row0", 0, RM_OP_MAX_SIZE);
  const int64_t index0 = rm_op_integer(&c, index0_object, "index0", 0, MAX_INDEX);
  rm_pack_args a = {
      .rows = -1, .cols = -1, .layout = (rm_layout)layout, .dst_row0 = row0, .index0 = index0};
  const int type = PyArray_Check(src)                  ? PyArray_TYPE((PyArrayObject *)src)
                   : rm_is_device_array(c.module, src) ? rm_device_array_type(src)
                                                       : -1;
  while (a.src_dtype < RM_SRC_F64 && rm_elements[a.src_dtype].type != type) a.src_dtype++;
  const int src_type = rm_elements[a.src_dtype].type;
  if (src_type != type)
    rm_op_refuse_dtype(&c, src, "the weight",
                       "bfloat16 (its words in uint16), float32, float16 or float64");
  a.dst_dtype = rm_op_dtype_of(&c, dst, "dst");
  a.src = VIEW(&c, src, "src", src_type, RM_ARRAY_IN, &a.rows, &a.cols);
  if (layout > RM_PACKED_UP)
    rm_op_refuse(&c, RM_E_LAYOUT, "layout", layout, "one of rm_layout, at most", RM_PACKED_UP);
  if (a.cols % 2 == 0 && index0 % 2)
    rm_op_refuse(&c, RM_E_SHAPE, "index0 of rows of even width", index0, "even, such as",
                 index0 - 1);
  const int64_t end = c.failed ? 0 : row0 + a.rows,
                rows_of = layout >= RM_PACKED_GATE ? rm_gate_up_rows(end) : end;
  int64_t elems = -1, dst_rows = -1;
  a.dst = layout == RM_PLAIN ? VIEW(&c, dst, "dst", rm_op_numpy_type(a.dst_dtype), RM_ARRAY_WRITE,
                                    &dst_rows, &a.cols)
                             : VIEW(&c, dst, "dst", rm_op_numpy_type(a.dst_dtype),
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

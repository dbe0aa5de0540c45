// run.c: takes the arguments of an op by the table, runs it and returns its outputs. See ops.h.
#include "dlpack.h"
#include "ops.h"

#include <float.h>
#include <math.h>
#include <string.h>

static const rm_op *const groups[] = {rm_ops_dense, rm_ops_attention, rm_ops_moe, rm_ops_logits,
                                      rm_ops_pack};
enum { N_GROUPS = RM_LENGTH(groups) };

static int is_array(const rm_op_argument *a) { return a->name && a->type < RM_OP_SIZE; }

static int n_dims_of(const rm_op_argument *a) {
  int n = 0;
  while (n < RM_OP_MAX_DIMS && a->dims[n]) n++;
  return n;
}

PyObject *rm_op_given(const rm_op_call *c, const char *name) {
  for (int i = 0; i < c->op->n_arguments; i++)
    if (c->op->arguments[i].name && strcmp(c->op->arguments[i].name, name) == 0)
      return c->objects[i] == Py_None ? NULL : c->objects[i];
  return NULL;
}

// ---------------------------------------------------------------------------------------- numbers
// Clears the exception of an object that is not a number. Returns 0 for any other exception
// (Ctrl-C, out of memory), which stays set.
static int is_refusal(void) {
  if (!PyErr_Occurred()) return 1;
  if (PyErr_ExceptionMatches(PyExc_TypeError) || PyErr_ExceptionMatches(PyExc_ValueError) ||
      PyErr_ExceptionMatches(PyExc_OverflowError))
    PyErr_Clear();
  return !PyErr_Occurred();
}

static int64_t integer_of(rm_op_call *c, PyObject *object, const char *name, int64_t low,
                          int64_t high) {
  int overflow = 0;
  if (c->failed) return -1;
  RM_OWNED *number = PyBool_Check(object) ? NULL : PyNumber_Index(object);
  const long long value = number ? PyLong_AsLongLongAndOverflow(number, &overflow) : -1;
  c->failed = !number || overflow || value < low || value > high;
  if (c->failed && is_refusal())
    rm_raise_code(RM_E_SHAPE,
                  overflow ? "%s: expected an integer in [%zd, %zd], got one of more than 64 bits"
                           : "%s: expected an integer in [%zd, %zd], got %.60R",
                  name, low, high, object);
  return c->failed ? -1 : value;
}

static float real_of(rm_op_call *c, PyObject *object, const char *name, float low) {
  if (c->failed) return 0;
  const int is_other =
      PyBool_Check(object) || PyArray_IsScalar(object, Bool) || PyArray_Check(object);
  const double value = is_other ? NAN : PyFloat_AsDouble(object);
  const int overflow = PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_OverflowError);
  c->failed = PyErr_Occurred() || !(value >= (double)low && value <= (double)FLT_MAX);
  if (c->failed && is_refusal())
    rm_raise_code(RM_E_CONFIG,
                  overflow ? "%s: expected a finite float32%s, got an integer beyond it"
                           : "%s: expected a finite float32%s, got %.60R",
                  name, low == 0 ? " >= 0" : "", object);
  return c->failed ? 0 : (float)value;
}

static void take_number(rm_op_call *c, const rm_op_argument *a, PyObject *object) {
  void *to = rm_op_value(c, a->value);
  const int is_absent = !object || (object == Py_None && a->type == RM_OP_REAL);
  if (is_absent && (a->flags & RM_ARRAY_OPTIONAL)) return;
  if (!object) object = Py_None;
  if (a->type == RM_OP_REAL) {
    *(float *)to = real_of(c, object, a->name, a->low ? -FLT_MAX : 0.0f);
  } else if (a->type == RM_OP_FLAG) {
    if (!PyBool_Check(object) && !PyArray_IsScalar(object, Bool))
      rm_op_raise(c, RM_E_CONFIG, "%s: expected a bool, got %.60R", a->name, object);
    *(int *)to = !c->failed && PyObject_IsTrue(object);
  } else {
    const int64_t value = integer_of(c, object, a->name, a->low, a->high);
    if (a->type == RM_OP_CHOICE) *(int *)to = (int)value;
    else *(int64_t *)to = value;
  }
}

// ----------------------------------------------------------------------------------------- arrays
static int type_of(rm_dtype dtype) { return dtype == RM_BF16 ? NPY_UINT16 : NPY_FLOAT32; }

static int numpy_type(rm_op_call *c, const rm_op_argument *a, PyObject *object) {
  static const int types[] = {[RM_OP_F32] = NPY_FLOAT32,
                              [RM_OP_I32] = NPY_INT32,
                              [RM_OP_I64] = NPY_INT64,
                              [RM_OP_U8] = NPY_UINT8,
                              [RM_OP_U64] = NPY_UINT64};
  if (a->type == RM_OP_OUT_T) return type_of(c->out_dtype);
  if (a->type == RM_OP_WEIGHT) return rm_elements[c->a.pack.src_dtype].type;
  if (a->type != RM_OP_T) return types[a->type];
  if (!c->is_decided) c->dtype = rm_op_dtype_of(c, object, a->name);
  c->is_decided = 1;
  return type_of(c->dtype);
}

// Returns a new reference.
static PyObject *new_output(rm_op_call *c, const rm_op_argument *a, int type,
                            int64_t *const sizes[]) {
  const int n_dims = n_dims_of(a);
  int64_t shape[RM_OP_MAX_DIMS];
  for (int i = 0; i < n_dims; i++) {
    rm_op_at_least(c, a->name, *sizes[i], 0);
    shape[i] = *sizes[i];
  }
  if (c->failed) return NULL;
  if (c->self->op_device && !(a->flags & RM_ARRAY_OF_HOST))
    return rm_device_array_new(c->self->op_device, type, n_dims, shape);
  PyObject *out = a->flags & RM_OP_ZERO ? PyArray_ZEROS(n_dims, shape, type, 0)
                                        : PyArray_EMPTY(n_dims, shape, type, 0);
  if (!out && PyErr_ExceptionMatches(PyExc_ValueError)) {
    PyErr_Clear();
    RM_OWNED *tuple = rm_tuple_of(shape, n_dims);
    if (tuple)
      rm_raise_code(RM_E_SHAPE, "%s: expected an output that can be addressed, got shape %R",
                    a->name, tuple);
  }
  return out;
}

// Notes the memory of an array, and refuses it if the op writes to it or to another argument that
// overlaps it. Two packed arrays may overlap: in vLLM, pages of K and V alternate in one array.
static void take_memory(rm_op_call *c, const rm_op_argument *a, const char *data, size_t bytes) {
  for (int i = 0; i < c->n_taken; i++) {
    const rm_op_taken *other = &c->taken[i];
    const int is_same = data == other->data && bytes == other->bytes;
    if (((a->flags | other->flags) & RM_ARRAY_WRITE) &&
        !(a->flags & other->flags & RM_ARRAY_PACKED) && !(is_same && (a->flags & RM_OP_SAME)) &&
        bytes && other->bytes && data < other->data + other->bytes && other->data < data + bytes)
      rm_op_raise(c, RM_E_LAYOUT,
                  "%s: expected memory of its own, got an array that overlaps another argument",
                  a->name);
  }
  c->taken[c->n_taken++] = (rm_op_taken){data, bytes, a->flags};
}

// Copies indices of a device to the host, and waits for the copy.
static void fetch(rm_op_call *c, void *to, const void *from, size_t bytes) {
  const rm_device *device = &c->self->op_device->device;
  rm_error err = RM_ERROR_INIT;
  if (bytes) device->copy_to_host(device->self, to, from, bytes);
  if (RM_UNLOCKED(rm_device_wait(device, &err))) rm_op_fail(c, &err);
}

// Takes the data of an array, for indices a checked copy. A size of exactly −1 is set to the
// array's size.
static void take_data(rm_op_call *c, const rm_op_argument *a, PyObject *object, int type,
                      int64_t *const sizes[]) {
  rm_array_want want = {.name = a->name, .type = type, .flags = a->flags, .n_dims = n_dims_of(a)};
  const int is_index =
      (a->type == RM_OP_I32 || a->type == RM_OP_I64) && !(a->flags & RM_ARRAY_WRITE);
  const int on_host =
      !c->self->op_device || (a->flags & RM_ARRAY_OF_HOST) || (is_index && PyArray_Check(object));
  void *data;
  size_t bytes = 0;
  for (int i = 0; i < want.n_dims; i++) {
    rm_op_at_least(c, a->name, *sizes[i], -1);
    want.shape[i] = *sizes[i];
  }
  if (c->failed) return;
  c->failed = on_host ? rm_array_data(object, &want, &data)
                      : rm_device_array_data(c->self->op_device, object, &want, &data, &bytes);
  for (int i = 0; i < want.n_dims && !c->failed; i++) {
    if (want.n_dims > 1)
      rm_op_size(c, a->name, want.shape[i], 0); // any size is possible beside a 0
    *sizes[i] = want.shape[i];
  }
  if (c->failed) return;
  if (on_host) bytes = (size_t)PyArray_NBYTES((PyArrayObject *)object);
  if (is_index) {
    const size_t value = a->flags & RM_ARRAY_OF_HOST ? 0 : a->value;
    void *copy = rm_op_block_new(c, bytes, value);
    if (!copy) return;
    if (on_host) memcpy(copy, data, bytes);
    else fetch(c, copy, data, bytes);
    data = copy;
  } else take_memory(c, a, data, bytes);
  memcpy(rm_op_value(c, a->value), &data, sizeof data);
  if (a->below)
    rm_op_in_range(c, a->name, a->type, data, 0,
                   (int64_t)(bytes / (a->type == RM_OP_I64 ? sizeof(int64_t) : sizeof(int32_t))),
                   a->low, *(int64_t *)rm_op_value(c, a->below));
}

static void take_array(rm_op_call *c, const rm_op_argument *a, PyObject *object) {
  const int is_output = (a->flags & RM_OP_NEW) != 0, is_absent = !object || object == Py_None;
  int64_t *sizes[RM_OP_MAX_DIMS] = {0};
  if (is_absent && (a->flags & RM_ARRAY_OPTIONAL)) {
    if (is_output) PyTuple_SetItem(c->outputs, c->n_outputs++, Py_NewRef(Py_None));
    return;
  }
  if (!object) object = Py_None;
  const int type = numpy_type(c, a, object);
  for (int i = 0; i < n_dims_of(a); i++) sizes[i] = rm_op_value(c, a->dims[i]);
  if (is_output) {
    object = rm_op_is_new(c, a) ? new_output(c, a, type, sizes) : Py_NewRef(object);
    c->failed = c->failed || !object;
    if (c->failed) return;
    PyTuple_SetItem(c->outputs, c->n_outputs++, object); // takes the reference
  }
  take_data(c, a, object, type, sizes);
}

static void take(rm_op_call *c, int i) {
  rm_op_argument a = c->op->arguments[i];
  if (a.step) a.step(c);
  for (int k = 0; k < 4 && a.with[k]; k++)
    if (rm_op_given(c, a.with[k])) a.flags &= ~RM_ARRAY_OPTIONAL;
  if (a.adjust) a.adjust(c, &a);
  if (c->failed || !a.name) return;
  if (is_array(&a)) take_array(c, &a, c->objects[i]);
  else take_number(c, &a, c->objects[i]);
}

// --------------------------------------------------------------------------------------- the call
static const rm_op *op_named(const char *name) {
  for (int g = 0; g < N_GROUPS; g++)
    for (const rm_op *op = groups[g]; op->name; op++)
      if (strcmp(op->name, name) == 0) return op;
  return NULL;
}

// Finds the argument of each entry. `names` has the names of the entries, in their order. All sizes
// are unknown until an argument sets them.
static int start(rm_op_call *c, PyObject *names, PyObject *arguments) {
  int n_outputs = 0, n_found = 0;
  Py_ssize_t at = 0;
  PyObject *name;
  for (int i = 0; i < c->op->n_arguments; i++) {
    const rm_op_argument *a = &c->op->arguments[i];
    n_outputs += (a->flags & RM_OP_NEW) != 0;
    for (int d = 0; d < n_dims_of(a); d++) *(int64_t *)rm_op_value(c, a->dims[d]) = -1;
    if (a->name && PyDict_Next(names, &at, &name, NULL))
      n_found += (c->objects[i] = PyDict_GetItemWithError(arguments, name)) != NULL;
  }
  if (n_found != PyDict_Size(arguments)) {
    PyErr_Format(PyExc_TypeError, "%s: expected arguments of the op, got %R", c->op->name,
                 arguments);
    return -1;
  }
  c->s.two = 2;
  c->s.three = 3;
  c->outputs = PyTuple_New(n_outputs);
  return c->outputs ? 0 : -1;
}

PyObject *rm_op_run(rm_kernels_object *self, PyObject *args) {
  rm_op_call c = {.self = self};
  PyObject *arguments, *names;
  const char *name;
  if (!PyArg_ParseTuple(args, "sO!:run", &name, &PyDict_Type, &arguments)) return NULL;
  const rm_op *op = c.op = op_named(name);
  if (!op) return PyErr_Format(PyExc_ValueError, "expected the name of an op, got '%.64s'", name);
  names = PyDict_GetItem(rm_state_of(self)->op_arguments, PyTuple_GetItem(args, 0));
  if (start(&c, names, arguments)) return NULL;
  rm_op_enter(&c);
  for (int i = 0; !c.failed && i < op->n_arguments; i++) take(&c, i);
  if (op->dtype) *(rm_dtype *)rm_op_value(&c, op->dtype) = c.dtype;
  if (!rm_op_begin(&c)) {
    op->run(&c);
    rm_op_finish(&c);
  }
  rm_op_leave(&c);
  if (c.failed) Py_CLEAR(c.outputs);
  return c.outputs;
}

// Returns {op: {argument: role}}. A role is "number" or, for an array, "in", "index" (an input that
// the host checks, so it may always be on the host), "host", "inout" or "out".
static const char *role_of(const rm_op_argument *a) {
  return !is_array(a)                                   ? "number"
         : a->flags & RM_OP_NEW                         ? "out"
         : a->flags & RM_ARRAY_OF_HOST                  ? "host"
         : a->flags & RM_ARRAY_WRITE                    ? "inout"
         : a->type == RM_OP_I32 || a->type == RM_OP_I64 ? "index"
                                                        : "in";
}

PyObject *rm_op_table(void) {
  PyObject *all = PyDict_New();
  for (int g = 0; all && g < N_GROUPS; g++)
    for (const rm_op *op = groups[g]; all && op->name; op++) {
      PyObject *roles = PyDict_New();
      for (const rm_op_argument *a = op->arguments; a < op->arguments + op->n_arguments; a++)
        if (a->name) rm_dict_put(&roles, a->name, PyUnicode_FromString(role_of(a)));
      rm_dict_put(&all, op->name, roles);
    }
  return all;
}

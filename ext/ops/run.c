// run.c: takes the arguments of an op by the table, runs it and returns its outputs. See ops.h.
#include "ops.h"

#include <float.h>
#include <string.h>

static const rm_op *const groups[] = {rm_ops_dense, rm_ops_attention, rm_ops_moe, rm_ops_logits};
enum { N_GROUPS = sizeof groups / sizeof *groups };

static int is_last(const rm_op_argument *a) { return !a->name && !a->step; }
static int is_array(const rm_op_argument *a) { return a->name && a->type < RM_OP_SIZE; }

static int n_dims_of(const rm_op_argument *a) {
  int n = 0;
  while (n < RM_OP_MAX_DIMS && a->dims[n]) n++;
  return n;
}

static void *value_at(rm_op_call *c, size_t offset) { return (char *)c + offset; }

PyObject *rm_op_given(const rm_op_call *c, const char *name) {
  int i = 0;
  while (!is_last(&c->table[i]) && (!c->table[i].name || strcmp(c->table[i].name, name) != 0)) i++;
  return c->objects[i] == Py_None ? NULL : c->objects[i];
}

// ----------------------------------------------------------------------------------- one argument
static void take_number(rm_op_call *c, const rm_op_argument *a, PyObject *object) {
  void *to = value_at(c, a->value);
  if (!object && (a->flags & RM_ARRAY_OPTIONAL)) return;
  if (!object) object = Py_None;
  if (a->type == RM_OP_REAL) {
    *(float *)to = rm_op_real(c, object, a->name, a->low ? -FLT_MAX : 0.0f);
  } else if (a->type == RM_OP_FLAG) {
    const int is_true = PyObject_IsTrue(object);
    c->failed = is_true < 0;
    *(int *)to = is_true;
  } else {
    const int64_t value = rm_op_integer(c, object, a->name, a->low, a->high);
    if (a->type == RM_OP_CHOICE) *(int *)to = (int)value;
    else *(int64_t *)to = value;
  }
}

static int numpy_type(rm_op_call *c, const rm_op_argument *a, PyObject *object) {
  static const int types[] = {[RM_OP_F32] = NPY_FLOAT32,
                              [RM_OP_I32] = NPY_INT32,
                              [RM_OP_I64] = NPY_INT64,
                              [RM_OP_U8] = NPY_UINT8,
                              [RM_OP_U64] = NPY_UINT64};
  if (a->type == RM_OP_OUT_T) return rm_op_numpy_type(c->out_dtype);
  if (a->type != RM_OP_T) return types[a->type];
  if (!c->is_decided) c->dtype = rm_op_dtype_of(c, object, a->name);
  c->is_decided = 1;
  return rm_op_numpy_type(c->dtype);
}

// Returns a new reference.
static PyObject *new_output(rm_op_call *c, const rm_op_argument *a, int type,
                            int64_t *const sizes[]) {
  static const char *const names[] = {[NPY_UINT8] = "uint8",
                                      [NPY_INT32] = "int32",
                                      [NPY_UINT16] = "bfloat16",
                                      [NPY_FLOAT32] = "float32"};
  const int n_dims = n_dims_of(a);
  int64_t shape[RM_OP_MAX_DIMS];
  npy_intp dims[RM_OP_MAX_DIMS];
  for (int i = 0; i < n_dims; i++) {
    rm_op_at_least(c, a->name, *sizes[i], 0);
    dims[i] = (npy_intp)(shape[i] = *sizes[i]);
  }
  RM_OWNED *tuple = c->failed ? NULL : rm_tuple_of(shape, n_dims);
  if (!tuple) return NULL;
  PyObject *out = c->self->op_device
                      ? rm_device_array_zeros(c->module, c->self->op_device, names[type], tuple)
                  : a->flags & RM_OP_ZERO ? PyArray_ZEROS(n_dims, dims, type, 0)
                                          : PyArray_EMPTY(n_dims, dims, type, 0);
  if (!out && PyErr_ExceptionMatches(PyExc_ValueError) && !c->self->op_device) {
    PyErr_Clear();
    rm_raise_code(c->module, RM_E_SHAPE,
                  "%s: expected an output that can be addressed, got shape %R", a->name, tuple);
  }
  return out;
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
  for (int i = 0; i < n_dims_of(a); i++) sizes[i] = value_at(c, a->dims[i]);
  if (is_output) {
    object = is_absent || object == Py_Ellipsis ? new_output(c, a, type, sizes) : Py_NewRef(object);
    c->failed = c->failed || !object;
    if (c->failed) return;
    PyTuple_SetItem(c->outputs, c->n_outputs++, object); // takes the reference
  }
  void *data = rm_op_view(c, object, a->name, type, a->flags, sizes, n_dims_of(a));
  memcpy(value_at(c, a->value), &data, sizeof data);
}

static void take(rm_op_call *c, int i) {
  rm_op_argument a = c->table[i];
  if (a.step) a.step(c);
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
static int start(rm_op_call *c, const rm_op *op, PyObject *names, PyObject *arguments) {
  int n_outputs = 0, n_found = 0;
  Py_ssize_t at = 0;
  PyObject *name;
  c->table = op->arguments;
  for (int i = 0; !is_last(&c->table[i]); i++) {
    const rm_op_argument *a = &c->table[i];
    n_outputs += (a->flags & RM_OP_NEW) != 0;
    for (int d = 0; d < n_dims_of(a); d++) *(int64_t *)value_at(c, a->dims[d]) = -1;
    if (a->name && PyDict_Next(names, &at, &name, NULL))
      n_found += (c->objects[i] = PyDict_GetItemWithError(arguments, name)) != NULL;
  }
  if (n_found != PyDict_Size(arguments)) {
    PyErr_Format(PyExc_TypeError, "%s: expected arguments of the op, got %R", op->name, arguments);
    return -1;
  }
  c->s.two = 2;
  c->outputs = PyTuple_New(n_outputs);
  return c->outputs ? 0 : -1;
}

PyObject *rm_op_run(rm_kernels_object *self, PyObject *args) {
  rm_op_call c = {.self = self, .module = rm_module_of((PyObject *)self)};
  PyObject *arguments, *names;
  RM_OWNED *none = NULL;
  const char *name;
  if (!PyArg_ParseTuple(args, "sO!:run", &name, &PyDict_Type, &arguments)) return NULL;
  const rm_op *op = op_named(name);
  if (!op) return PyErr_Format(PyExc_ValueError, "expected the name of an op, got '%.64s'", name);
  names = PyDict_GetItem(rm_state(c.module)->op_arguments, PyTuple_GetItem(args, 0));
  if (start(&c, op, names, arguments)) return NULL;
  for (int i = 0; !c.failed && !is_last(&c.table[i]); i++) take(&c, i);
  if (op->dtype) *(rm_dtype *)value_at(&c, op->dtype) = c.dtype;
  if (!rm_op_begin(&c, c.limits)) {
    op->run(self->table, &c.ctx, &c.a);
    none = rm_op_finish(&c);
  }
  if (!none) Py_CLEAR(c.outputs);
  return c.outputs;
}

// Returns {op: {argument: role}}. A role is "number" or, for an array, "in", "index" (an input that
// the host checks, so it may always be on the host), "host", "inout" or "out".
static const char *role_of(const rm_op_argument *a) {
  return !is_array(a)                                   ? "number"
         : a->flags & RM_ARRAY_OF_HOST                  ? "host"
         : a->flags & RM_OP_NEW                         ? "out"
         : a->flags & RM_ARRAY_WRITE                    ? "inout"
         : a->type == RM_OP_I32 || a->type == RM_OP_I64 ? "index"
                                                        : "in";
}

PyObject *rm_op_table(void) {
  PyObject *all = PyDict_New();
  for (int g = 0; all && g < N_GROUPS; g++)
    for (const rm_op *op = groups[g]; all && op->name; op++) {
      RM_OWNED *roles = PyDict_New();
      int failed = !roles || PyDict_SetItemString(all, op->name, roles);
      for (const rm_op_argument *a = op->arguments; !failed && !is_last(a); a++) {
        if (!a->name) continue;
        RM_OWNED *role = PyUnicode_FromString(role_of(a));
        failed = !role || PyDict_SetItemString(roles, a->name, role);
      }
      if (failed) Py_CLEAR(all);
    }
  return all;
}

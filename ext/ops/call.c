// call.c: see ops.h.
#include "ops.h"

#include <float.h>
#include <math.h>
#include <stdarg.h>
#include <string.h>

#include "base/checked.h"
#include "base/memory.h"

void rm_op_raise(rm_op_call *c, rm_code code, const char *format, ...) {
  va_list args;
  if (c->failed) return;
  c->failed = 1;
  va_start(args, format);
  rm_raise_va(c->module, code, format, args);
  va_end(args);
}

void rm_op_refuse(rm_op_call *c, rm_code code, const char *name, long long seen,
                  const char *expected, long long limit) {
  rm_op_raise(c, code, "%s: expected %s %lld, got %lld", name, expected, limit, seen);
}

void rm_op_at_least(rm_op_call *c, const char *name, int64_t seen, int64_t least) {
  if (seen < least) rm_op_refuse(c, RM_E_SHAPE, name, seen, "at least", least);
}

void rm_op_size(rm_op_call *c, const char *name, int64_t seen, int64_t least) {
  rm_op_at_least(c, name, seen, least);
  if (seen > RM_OP_MAX_SIZE) rm_op_refuse(c, RM_E_SHAPE, name, seen, "at most", RM_OP_MAX_SIZE);
}

// Clears the exception of an object that is not a number. Returns 0 for any other exception
// (Ctrl-C, out of memory), which stays set.
static int is_refusal(void) {
  if (!PyErr_Occurred()) return 1;
  if (PyErr_ExceptionMatches(PyExc_TypeError) || PyErr_ExceptionMatches(PyExc_ValueError) ||
      PyErr_ExceptionMatches(PyExc_OverflowError))
    PyErr_Clear();
  return !PyErr_Occurred();
}

int64_t rm_op_integer(rm_op_call *c, PyObject *object, const char *name, int64_t low,
                      int64_t high) {
  int overflow = 0;
  if (c->failed) return -1;
  RM_OWNED *number = PyBool_Check(object) ? NULL : PyNumber_Index(object);
  const long long value = number ? PyLong_AsLongLongAndOverflow(number, &overflow) : -1;
  c->failed = !number || overflow || value < low || value > high;
  if (c->failed && is_refusal())
    rm_raise_code(c->module, RM_E_SHAPE,
                  overflow ? "%s: expected an integer in [%lld, %lld], got one of more than 64 bits"
                           : "%s: expected an integer in [%lld, %lld], got %.60R",
                  name, (long long)low, (long long)high, object);
  return c->failed ? -1 : value;
}

float rm_op_real(rm_op_call *c, PyObject *object, const char *name, float low) {
  if (c->failed) return 0;
  const int is_number = PyType_GetSlot(Py_TYPE(object), Py_nb_float) ||
                        PyType_GetSlot(Py_TYPE(object), Py_nb_index);   // excludes text
  const int is_bool = PyBool_Check(object) || PyArray_IsScalar(object, Bool);
  RM_OWNED *number =
      is_number && !is_bool && !PyArray_Check(object) ? PyNumber_Float(object) : NULL;
  const double value = number ? PyFloat_AsDouble(number) : NAN;
  c->failed = !(value >= (double)low && value <= (double)FLT_MAX);
  if (c->failed && is_refusal())
    rm_raise_code(c->module, RM_E_CONFIG,
                  number || is_bool || !PyLong_Check(object)
                      ? "%s: expected a finite float32%s, got %.60R"
                      : "%s: expected a finite float32%s, got an integer beyond it",
                  name, low == 0 ? " >= 0" : "", object);
  return c->failed ? 0 : (float)value;
}

// Returns a · b, or 0 after an error.
int64_t rm_op_product(rm_op_call *c, const char *name, int64_t a, int64_t b) {
  int64_t out = 0;
  if (c->failed) return 0;
  if (rm_mul_i64(a, b, &out)) return out;
  rm_op_raise(c, RM_E_SHAPE, "%s: expected fewer than 2^63 elements, got %lld times %lld", name,
              (long long)a, (long long)b);
  return 0;
}

int64_t rm_op_packed_elems(rm_op_call *c, const char *name, int64_t n, int64_t k) {
  return c->failed ? 0
                   : rm_op_product(c, name, rm_round_up(n, RM_N_TILE), rm_round_up(k, RM_K_BLOCK));
}

static void drop_blocks(rm_op_call *c) {
  rm_free(c->block);
  for (int i = 0; i < RM_OP_MAX_INDICES; i++) {
    rm_free(c->copies[i]);
    c->copies[i] = NULL;
  }
}

static void *copied(rm_op_call *c, const void *data, size_t bytes) {
  int i = 0;
  while (i < RM_OP_MAX_INDICES - 1 && c->copies[i]) i++;
  if (c->copies[i] || !(c->copies[i] = rm_alloc(bytes, 1))) {
    c->failed = 1;
    PyErr_NoMemory();
    return NULL;
  }
  return memcpy(c->copies[i], data, bytes);
}

static int is_indices(int type, int flags) {
  return (type == NPY_INT32 || type == NPY_INT64) && !(flags & RM_ARRAY_WRITE);
}

// ----------------------------------------------------------------------------- arrays of a device
void rm_op_fail(rm_op_call *c, rm_error *err) {
  if (c->failed) rm_error_clear(err);
  else rm_raise(c->module, err);
  c->failed = 1;
}

static int open_call(rm_op_call *c) {
  rm_op_device *op_device = c->self->op_device;
  if (c->is_open) return 0;
  if (rm_op_device_enter(c->module, op_device, &c->saved)) return c->failed = 1, -1;
  c->is_open = 1;
  if (c->self->stream) op_device->device.wait_stream(op_device->device.self, c->self->stream);
  return 0;
}

static void close_call(rm_op_call *c) {
  if (c->is_open) rm_op_device_leave(c->self->op_device, c->saved);
  c->is_open = 0;
}

void *rm_op_mirrored(rm_op_call *c, size_t bytes) {
  rm_error err = RM_ERROR_INIT;
  if (c->failed || open_call(c)) return NULL;
  const rm_code code =
      RM_UNLOCKED(rm_op_device_mirrored(c->self->op_device, c->n_mirrored, bytes, &err));
  if (code) return rm_op_fail(c, &err), NULL;
  c->mirrored_bytes[c->n_mirrored] = bytes;
  return c->self->op_device->mirrored[c->n_mirrored++].host;
}

static const rm_mirrored_buffer *mirrored_around(const rm_op_call *c, const void *address,
                                                 int there) {
  for (int i = 0; i < c->n_mirrored; i++) {
    const rm_mirrored_buffer *mirrored = &c->self->op_device->mirrored[i];
    const char *begin = there ? mirrored->on_device : mirrored->host, *at = address;
    if (at >= begin && at < begin + mirrored->bytes) return mirrored;
  }
  return NULL;
}

const void *rm_op_there(const rm_op_call *c, const void *here) {
  const rm_mirrored_buffer *mirrored = mirrored_around(c, here, 0);
  return mirrored ? rm_mirrored_on_device(mirrored, here) : NULL;
}

const void *rm_op_seen(rm_op_call *c, const void *view) {
  rm_error err = RM_ERROR_INIT;
  if (!view || c->failed || !c->self->op_device) return c->failed ? NULL : view;
  const rm_device *device = &c->self->op_device->device;
  if (c->is_fetching) {
    const rm_code code = RM_UNLOCKED(rm_device_wait(device, &err));
    c->is_fetching = 0;
    if (code) return rm_op_fail(c, &err), NULL;
  }
  const rm_mirrored_buffer *mirrored = mirrored_around(c, view, 1);
  return mirrored ? mirrored->host + ((const char *)view - mirrored->on_device)
                  : view;   // otherwise the view is of host memory
}

// Indices are copied into a mirrored buffer, where the host checks them; the view is of its device
// half.
static void *device_view(rm_op_call *c, PyObject *object, rm_array_want *want) {
  const rm_device *device = &c->self->op_device->device;
  void *data = NULL;
  size_t bytes = 0;
  const int indices = is_indices(want->type, want->flags),
            of_host = indices && PyArray_Check(object);
  if (open_call(c)) return NULL;
  if (of_host) c->failed = rm_array_data(c->module, object, want, &data) != 0;
  else
    c->failed =
        rm_device_array_data(c->module, c->self->op_device, object, want, &data, &bytes) != 0;
  if (c->failed || !indices || object == Py_None) return data;
  if (of_host) bytes = (size_t)PyArray_NBYTES((PyArrayObject *)object);
  void *here = rm_op_mirrored(c, bytes);
  if (!here) return NULL;
  if (of_host) {
    if (bytes) memcpy(here, data, bytes);
  } else if (bytes) {
    device->copy_to_host(device->self, here, data, bytes);
    c->is_fetching = 1;
  }
  return (void *)(uintptr_t)rm_op_there(c, here);
}

// ----------------------------------------------------------------------------------------- arrays
// Returns a view of a host array; for indices a copy.
static void *host_view(rm_op_call *c, PyObject *object, rm_array_want *want) {
  void *data = NULL;
  c->failed = rm_array_data(c->module, object, want, &data) != 0;
  if (c->failed || !data || !is_indices(want->type, want->flags)) return data;
  return copied(c, data, (size_t)PyArray_NBYTES((PyArrayObject *)object));
}

void *rm_op_view(rm_op_call *c, PyObject *object, const char *name, int type, int flags,
                 int64_t *const sizes[], int n_dims) {
  rm_array_want want = {.name = name, .type = type, .flags = flags, .n_dims = n_dims};
  for (int i = 0; i < n_dims; i++) {
    rm_op_at_least(c, name, *sizes[i], -1);
    want.shape[i] = *sizes[i];
  }
  if (c->failed) return NULL;
  const int on_host = !c->self || !c->self->op_device || (flags & RM_ARRAY_OF_HOST);
  void *data = on_host ? host_view(c, object, &want) : device_view(c, object, &want);
  for (int i = 0; i < n_dims && !c->failed; i++) {
    if (n_dims > 1) rm_op_size(c, name, want.shape[i], 0); // any size is possible beside a 0
    *sizes[i] = want.shape[i];
  }
  return c->failed ? NULL : data;
}

int rm_op_numpy_type(rm_dtype dtype) { return dtype == RM_BF16 ? NPY_UINT16 : NPY_FLOAT32; }

rm_dtype rm_op_dtype_of(rm_op_call *c, PyObject *object, const char *name) {
  const int type = PyArray_Check(object) ? PyArray_TYPE((PyArrayObject *)object)
                   : c->self && rm_is_device_array(c->module, object) ? rm_device_array_type(object)
                                                                      : -1;
  if (type == NPY_UINT16 || type == NPY_FLOAT32 || c->failed)
    return type == NPY_UINT16 ? RM_BF16 : RM_F32;
  rm_op_refuse_dtype(c, object, name, "bfloat16 (its words in uint16) or float32");
  return RM_F32;
}

void rm_op_refuse_dtype(rm_op_call *c, PyObject *object, const char *name, const char *expected) {
  if (c->failed) return;
  c->failed = 1;
  RM_OWNED *dtype = PyArray_Check(object) || rm_is_device_array(c->module, object)
                        ? PyObject_GetAttrString(object, "dtype")
                        : NULL;
  if (dtype) rm_raise_code(c->module, RM_E_DTYPE, "%s: expected %s, got %S", name, expected, dtype);
  else if (!PyErr_Occurred())
    rm_raise_code(c->module, RM_E_UNSUPPORTED_TENSOR, "%s: expected an array of %s, got %R", name,
                  expected, (PyObject *)Py_TYPE(object));
}

void rm_op_in_range(rm_op_call *c, const char *name, const int32_t *a, int64_t n, int64_t low,
                    int64_t high) {
  rm_op_in_range_from(c, name, a, 0, n, low, high);
}

void rm_op_in_range_from(rm_op_call *c, const char *name, const int32_t *a, int64_t first,
                         int64_t n, int64_t low, int64_t high) {
  a = rm_op_seen(c, a);
  for (int64_t i = first; a && i < first + n && !c->failed; i++)
    if (a[i] < low || a[i] >= high)
      rm_op_raise(c, RM_E_REQUEST, "%s: expected values in [%lld, %lld), got %d at index %lld",
                  name, (long long)low, (long long)high, (int)a[i], (long long)i);
}

void rm_op_apart(rm_op_call *c, const char *name, const void *out, size_t out_bytes, const void *x,
                 size_t x_bytes) {
  const uintptr_t first = (uintptr_t)out, other = (uintptr_t)x;
  if (c->failed || !out_bytes || !x_bytes || first >= other + x_bytes || other >= first + out_bytes)
    return;
  rm_op_raise(c, RM_E_LAYOUT,
              "%s: expected memory of its own, got an array that overlaps another argument", name);
}

void rm_op_multiple_of(rm_op_call *c, const char *name, int64_t seen, int64_t unit) {
  if (seen <= 0 || seen % unit)
    rm_op_refuse(c, RM_E_SHAPE, name, seen, "a positive multiple of", unit);
}

// ---------------------------------------------------------------------------------------- running
// A copy of indices to the host may still be running; the next call's mirrored buffers wait for it.
static int end(rm_op_call *c) {
  if (c->is_fetching) c->self->op_device->device.record_event(c->self->op_device->device.self, 0);
  close_call(c);
  drop_blocks(c);
  return -1;
}

// Begins a call on a device. Reports the failure of an earlier op.
static int begin_on_device(rm_op_call *c, const rm_limits *limits) {
  rm_op_device *op_device = c->self->op_device;
  const rm_device *device = &op_device->device;
  rm_error err = RM_ERROR_INIT;
  const size_t bytes = c->self->table->workspace_bytes(limits);
  c->thread = PyEval_SaveThread();
  const rm_device_status status = device->poll(device->self);
  rm_code code = status == RM_DEVICE_BUSY ? RM_OK : rm_device_check(device, status, &err);
  if (!code) code = rm_op_device_workspace(op_device, bytes, &err);
  for (int i = 0; !code && i < c->n_mirrored; i++)
    rm_mirrored_copy_to_device(&op_device->mirrored[i], op_device->mirrored[i].host,
                               c->mirrored_bytes[i]);
  if (code) {
    PyEval_RestoreThread(c->thread);
    rm_op_fail(c, &err);
    return end(c);
  }
  c->ctx = (rm_ctx){.stream = device->stream,
                    .workspace = op_device->workspace,
                    .workspace_bytes = bytes,
                    .n_threads = 1};
  return 0;
}

static PyObject *finish_on_device(rm_op_call *c) {
  const rm_device *device = &c->self->op_device->device;
  rm_error err = RM_ERROR_INIT;
  rm_code code = RM_OK;
  device->record_event(device->self, 0);
  if (c->self->stream) device->make_stream_wait(device->self, c->self->stream);
  else code = rm_device_wait(device, &err);
  close_call(c);
  PyEval_RestoreThread(c->thread);
  drop_blocks(c);
  return code ? rm_raise(c->module, &err) : Py_NewRef(Py_None);
}

int rm_op_begin(rm_op_call *c, rm_limits limits) {
  rm_kernels_object *self = c->self;
  if (getpid() != self->owner)
    rm_op_raise(c, RM_E_STATE,
                "expected kernels made in this process, got those of process %d; a forked child "
                "has to make its own",
                (int)self->owner);
  if (c->failed) return end(c);
  limits.n_threads = self->op_device ? 1 : rm_team_threads(self->team);
  if (self->op_device) return begin_on_device(c, &limits);
  const size_t bytes = self->table->workspace_bytes(&limits);
  c->thread = PyEval_SaveThread();
  pthread_mutex_lock(&self->mutex);
  if (bytes > self->workspace_bytes) {
    rm_unmap(self->workspace, self->workspace_bytes);
    self->workspace = rm_map(bytes);
    self->workspace_bytes = self->workspace ? bytes : 0;
  }
  if (self->workspace_bytes < bytes) {
    pthread_mutex_unlock(&self->mutex);
    PyEval_RestoreThread(c->thread);
    drop_blocks(c);
    rm_raise_code(c->module, RM_E_MEMORY, "no memory for the %s that this op works in",
                  rm_say_bytes((double)bytes).text);
    return -1;
  }
  c->ctx = (rm_ctx){.workspace = self->workspace,
                    .workspace_bytes = bytes,
                    .n_threads = limits.n_threads,
                    .run = rm_team_run,
                    .team = self->team};
  c->fp = rm_fp_enter();
  return 0;
}

PyObject *rm_op_finish(rm_op_call *c) {
  if (c->self->op_device) return finish_on_device(c);
  rm_fp_leave(c->fp);
  pthread_mutex_unlock(&c->self->mutex);
  PyEval_RestoreThread(c->thread);
  drop_blocks(c);
  return Py_NewRef(Py_None);
}

// call.c: see ops.h.
#include "ops.h"

#include <stdarg.h>
#include <string.h>

#include "base/checked.h"
#include "base/memory.h"

void rm_op_raise(rm_op_call *c, rm_code code, const char *format, ...) {
  va_list args;
  if (c->failed) return;
  c->failed = 1;
  va_start(args, format);
  rm_raise_va(code, format, args);
  va_end(args);
}

void rm_op_refuse(rm_op_call *c, const char *name, int64_t seen, const char *expected,
                  int64_t limit) {
  rm_op_raise(c, RM_E_SHAPE, "%s: expected %s %zd, got %zd", name, expected, limit, seen);
}

void rm_op_at_least(rm_op_call *c, const char *name, int64_t seen, int64_t least) {
  if (seen < least) rm_op_refuse(c, name, seen, "at least", least);
}

void rm_op_size(rm_op_call *c, const char *name, int64_t seen, int64_t least) {
  rm_op_at_least(c, name, seen, least);
  if (seen > RM_OP_MAX_SIZE) rm_op_refuse(c, name, seen, "at most", RM_OP_MAX_SIZE);
}

// Returns a · b, or 0 after an error.
int64_t rm_op_product(rm_op_call *c, const char *name, int64_t a, int64_t b) {
  int64_t out = 0;
  if (c->failed) return 0;
  if (rm_mul_i64(a, b, &out)) return out;
  rm_op_raise(c, RM_E_SHAPE, "%s: expected fewer than 2^63 elements, got %zd times %zd", name, a,
              b);
  return 0;
}

int64_t rm_op_packed_elems(rm_op_call *c, const char *name, int64_t n, int64_t k) {
  return c->failed ? 0
                   : rm_op_product(c, name, rm_round_up(n, RM_N_TILE), rm_round_up(k, RM_K_BLOCK));
}

void *rm_op_block_new(rm_op_call *c, size_t bytes, size_t value) {
  void *host = c->failed || c->n_blocks == RM_OP_MAX_BLOCKS ? NULL : rm_alloc(bytes, 1);
  if (host) c->blocks[c->n_blocks++] = (rm_op_block){host, bytes, value};
  else if (!c->failed) PyErr_NoMemory();
  c->failed |= !host;
  return host;
}

void rm_op_copy(rm_op_call *c, rm_op_argument *copy) {
  *(int64_t *)rm_op_value(c, copy->value) = *(int64_t *)rm_op_value(c, copy->below);
}

int rm_op_is_new(const rm_op_call *c, const rm_op_argument *out) {
  PyObject *given = rm_op_given(c, out->name);
  return !given || given == Py_Ellipsis;
}

void rm_op_out_dtype(rm_op_call *c, rm_op_argument *out) {
  c->out_dtype = !rm_op_is_new(c, out) ? rm_op_dtype_of(c, rm_op_given(c, out->name), out->name)
                 : c->s.float32_out    ? RM_F32
                                       : c->dtype;
}

int rm_op_type_of(const rm_op_call *c, PyObject *object) {
  if (object && PyArray_Check(object)) return PyArray_TYPE((PyArrayObject *)object);
  return object ? rm_device_array_type(c->self, object) : -1;
}

rm_dtype rm_op_dtype_of(rm_op_call *c, PyObject *object, const char *name) {
  const int type = rm_op_type_of(c, object);
  if (type == NPY_UINT16 || type == NPY_FLOAT32 || c->failed)
    return type == NPY_UINT16 ? RM_BF16 : RM_F32;
  rm_op_refuse_dtype(c, object, name, "bfloat16 (its words in uint16) or float32");
  return RM_F32;
}

void rm_op_refuse_dtype(rm_op_call *c, PyObject *object, const char *name, const char *expected) {
  if (c->failed) return;
  c->failed = 1;
  if (!object) object = Py_None;
  RM_OWNED *dtype = rm_op_type_of(c, object) < 0 ? NULL : PyObject_GetAttrString(object, "dtype");
  if (dtype) rm_raise_code(RM_E_DTYPE, "%s: expected %s, got %S", name, expected, dtype);
  else if (!PyErr_Occurred())
    rm_raise_code(RM_E_UNSUPPORTED_TENSOR, "%s: expected an array of %s, got %R", name, expected,
                  (PyObject *)Py_TYPE(object));
}

void rm_op_in_range(rm_op_call *c, const char *name, rm_op_type type, const void *indices,
                    int64_t first, int64_t n, int64_t low, int64_t high) {
  for (int64_t i = first; i < first + n && !c->failed; i++) {
    const int64_t index =
        type == RM_OP_I64 ? ((const int64_t *)indices)[i] : ((const int32_t *)indices)[i];
    if (index < low || index >= high)
      rm_op_raise(c, RM_E_REQUEST, "%s: expected values in [%zd, %zd), got %zd at index %zd", name,
                  low, high, index, i);
  }
}

void rm_op_multiple_of(rm_op_call *c, const char *name, int64_t seen, int64_t unit) {
  if (seen <= 0 || seen % unit) rm_op_refuse(c, name, seen, "a positive multiple of", unit);
}

// ---------------------------------------------------------------------------------------- running
void rm_op_fail(rm_op_call *c, rm_error *err) {
  rm_raise(err);
  c->failed = 1;
}

void rm_op_enter(rm_op_call *c) {
  rm_op_device *op_device = c->self->op_device;
  if (getpid() != c->self->owner)
    rm_op_raise(c, RM_E_STATE,
                "expected kernels made in this process, got those of process %d; a forked child "
                "has to make its own",
                (int)c->self->owner);
  if (c->failed || !op_device) return;
  c->failed = (c->self->stream && rm_op_device_check_stream(op_device, c->self->stream)) ||
              rm_op_device_enter(op_device, &c->saved);
  c->is_entered = !c->failed;
  if (c->is_entered && c->self->stream)
    op_device->device.wait_stream(op_device->device.self, c->self->stream);
}

void rm_op_leave(rm_op_call *c) {
  for (int i = 0; i < c->n_blocks; i++) rm_free(c->blocks[i].host);
  if (c->is_entered) rm_op_device_leave(c->self->op_device, c->saved);
}

// Reports the failure of an earlier op, and grows the memory for this one.
static rm_code prepare_device(rm_op_device *op_device, size_t workspace, size_t moved,
                              rm_error *err) {
  rm_code code = rm_op_device_poll(op_device, err);
  if (!code) code = rm_op_device_workspace(op_device, workspace, err);
  if (!code && moved) code = rm_op_device_mirrored(op_device, moved, err);
  return code;
}

// Moves the blocks to the device.
static int begin_on_device(rm_op_call *c, size_t workspace) {
  rm_op_device *op_device = c->self->op_device;
  const rm_mirrored_buffer *mirrored = &op_device->mirrored;
  size_t moved = 0, at = 0;
  rm_error err = RM_ERROR_INIT;
  for (int i = 0; i < c->n_blocks; i++)
    if (c->blocks[i].value) moved += (size_t)rm_round_up((int64_t)c->blocks[i].bytes, 16);
  if (RM_UNLOCKED(prepare_device(op_device, workspace, moved, &err)))
    return rm_op_fail(c, &err), -1;
  for (int i = 0; i < c->n_blocks; i++) {
    const rm_op_block *block = &c->blocks[i];
    if (!block->value) continue;
    const char *there = mirrored->on_device + at;
    memcpy(rm_op_value(c, block->value), &there, sizeof there);
    if (c->op->placed) c->op->placed(c);
    if (block->bytes) memcpy(mirrored->host + at, block->host, block->bytes);
    at += (size_t)rm_round_up((int64_t)block->bytes, 16);
  }
  if (moved) rm_mirrored_copy_to_device(mirrored, mirrored->host, moved);
  c->thread = PyEval_SaveThread();
  c->ctx = (rm_ctx){.stream = op_device->device.stream,
                    .workspace = op_device->workspace,
                    .workspace_bytes = workspace,
                    .n_threads = 1};
  return 0;
}

static void finish_on_device(rm_op_call *c) {
  const rm_device *device = &c->self->op_device->device;
  rm_error err = RM_ERROR_INIT;
  rm_code code = RM_OK;
  device->record_event(device->self, 0);
  if (c->self->stream) device->make_stream_wait(device->self, c->self->stream);
  else code = rm_device_wait(device, &err);
  PyEval_RestoreThread(c->thread);
  if (code) rm_op_fail(c, &err);
}

int rm_op_begin(rm_op_call *c) {
  rm_kernels_object *self = c->self;
  if (c->failed) return -1;
  c->limits.n_threads = self->op_device ? 1 : rm_team_threads(self->team);
  const size_t bytes = self->table->workspace_bytes(&c->limits);
  if (self->op_device) return begin_on_device(c, bytes);
  if (c->op->placed) c->op->placed(c);
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
    rm_op_raise(c, RM_E_MEMORY, "no memory for the %s that this op works in",
                rm_say_bytes((double)bytes).text);
    return -1;
  }
  c->ctx = (rm_ctx){.workspace = self->workspace,
                    .workspace_bytes = bytes,
                    .n_threads = c->limits.n_threads,
                    .run = rm_team_run,
                    .team = self->team};
  c->fp = rm_fp_enter();
  return 0;
}

void rm_op_finish(rm_op_call *c) {
  if (c->self->op_device) {
    finish_on_device(c);
    return;
  }
  rm_fp_leave(c->fp);
  pthread_mutex_unlock(&c->self->mutex);
  PyEval_RestoreThread(c->thread);
}

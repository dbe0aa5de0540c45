// ops_call.c: see ops.h.
#include "ops.h"

#include <string.h>

#include "base/checked.h"
#include "base/memory.h"

void rm_op_refuse(rm_op_call *c, rm_code code, const char *name, long long seen, const char *wanted, long long limit) {
  if (!c->failed) rm_raise_code(c->module, code, "%s is %lld, wanted %s %lld", name, seen, wanted, limit);
  c->failed = 1;
}

void rm_op_at_least(rm_op_call *c, const char *name, int64_t seen, int64_t least) {
  if (seen < least) rm_op_refuse(c, RM_E_SHAPE, name, seen, "at least", least);
}

void rm_op_size(rm_op_call *c, const char *name, int64_t seen, int64_t least) {
  rm_op_at_least(c, name, seen, least);
  if (seen > RM_OP_MAX_SIZE) rm_op_refuse(c, RM_E_SHAPE, name, seen, "at most", RM_OP_MAX_SIZE);
}

// a · b; 0 after a fault.
int64_t rm_op_product(rm_op_call *c, const char *name, int64_t a, int64_t b) {
  int64_t out = 0;
  if (c->failed) return 0;
  if (rm_mul_i64(a, b, &out)) return out;
  rm_raise_code(c->module, RM_E_SHAPE, "%s would have %lld times %lld elements, wanted less than 2^63", name, (long long)a, (long long)b);
  c->failed = 1;
  return 0;
}

int64_t rm_op_packed_elems(rm_op_call *c, const char *name, int64_t n, int64_t k) {
  return c->failed ? 0 : rm_op_product(c, name, rm_round_up(n, RM_N_TILE), rm_round_up(k, RM_K_BLOCK));
}

static void drop_copies(rm_op_call *c) {
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

void *rm_op_view(rm_op_call *c, PyObject *object, const char *name, int type, int flags, int n_dims, int64_t *d0, int64_t *d1,
                 int64_t *d2) {
  void *data = NULL;
  int64_t *sizes[3] = {d0, d1, d2};
  rm_array_want want = {.name = name, .type = type, .flags = flags, .n_dims = n_dims};
  for (int i = 0; i < n_dims; i++) {
    rm_op_at_least(c, name, *sizes[i], -1);
    want.shape[i] = *sizes[i];
  }
  if (c->failed) return NULL;
  c->failed = rm_array_data(c->module, object, &want, &data) != 0;
  for (int i = 0; i < n_dims && !c->failed; i++) {
    if (n_dims > 1) rm_op_size(c, name, want.shape[i], 0);   // where another size is 0, this one takes no memory
    *sizes[i] = want.shape[i];
  }
  if (c->failed || !data) return NULL;
  const int indices = (type == NPY_INT32 || type == NPY_INT64) && !(flags & RM_ARRAY_WRITE);
  return indices ? copied(c, data, (size_t)PyArray_NBYTES((PyArrayObject *)object)) : data;
}

int rm_op_numpy_type(rm_dtype dtype) { return dtype == RM_BF16 ? NPY_UINT16 : NPY_FLOAT32; }

rm_dtype rm_op_dtype_of(rm_op_call *c, PyObject *object, const char *name) {
  const int type = PyArray_Check(object) ? PyArray_TYPE((PyArrayObject *)object) : -1;
  if (type == NPY_UINT16 || type == NPY_FLOAT32 || c->failed) return type == NPY_UINT16 ? RM_BF16 : RM_F32;
  rm_raise_code(c->module, RM_E_DTYPE, "%s is not an array of uint16 (words of bfloat16) or float32", name);
  c->failed = 1;
  return RM_F32;
}

void rm_op_in_range(rm_op_call *c, const char *name, const int32_t *a, int64_t n, int64_t low, int64_t high) {
  for (int64_t i = 0; a && i < n && !c->failed; i++)
    if (a[i] < low || a[i] >= high) {
      rm_raise_code(c->module, RM_E_REQUEST, "%s has %d at place %lld, wanted [%lld, %lld)", name, (int)a[i], (long long)i, (long long)low,
                    (long long)high);
      c->failed = 1;
    }
}

void rm_op_multiple_of(rm_op_call *c, const char *name, int64_t seen, int64_t unit) {
  if (seen <= 0 || seen % unit) rm_op_refuse(c, RM_E_SHAPE, name, seen, "a positive multiple of", unit);
}

// ------------------------------------------------------------------------------------------------ running
int rm_op_begin(rm_op_call *c, rm_limits limits) {
  rm_kernels_object *self = c->self;
  if (!c->failed && getpid() != self->owner) {
    rm_raise_code(c->module, RM_E_STATE, "these kernels belong to process %d, wanted ones made in the forked child", (int)self->owner);
    c->failed = 1;
  }
  if (c->failed) {
    drop_copies(c);
    return -1;
  }
  limits.n_threads = rm_team_threads(self->team);
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
    drop_copies(c);
    PyErr_NoMemory();
    return -1;
  }
  c->ctx = (rm_ctx){
      .workspace = self->workspace, .workspace_bytes = bytes, .n_threads = limits.n_threads, .run = rm_team_run, .team = self->team};
  c->fp = rm_fp_enter();
  return 0;
}

PyObject *rm_op_finish(rm_op_call *c) {
  rm_fp_leave(c->fp);
  pthread_mutex_unlock(&c->self->mutex);
  PyEval_RestoreThread(c->thread);
  drop_copies(c);
  return Py_NewRef(Py_None);
}

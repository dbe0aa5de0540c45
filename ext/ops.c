// ops.c: the op table over NumPy arrays: `_core.Kernels(isa, threads)` holds one variant, a thread team and a workspace that
// grows on demand; its methods are the ops of kernels.h. Outputs are arrays that the caller brings. Everything the kernels
// take on trust is checked here: dtypes, sizes, ranges of indices; rollmesh.ops gives the methods names and defaults.
//
// A call checks with the GIL, then computes without it under the object's mutex, so that two Python threads may share one.
// Indices are copied before they are checked: another thread may write to the array meanwhile, and an output may lie over it.
#include "arrays.h"

#include <pthread.h>
#include <string.h>
#include <unistd.h>

#include "base/checked.h"
#include "base/memory.h"
#include "base/team.h"

typedef struct kernels_object {
  PyObject_HEAD
  const rm_kernels *table;      // view
  rm_team *team;                // owned
  void *workspace;              // owned
  size_t workspace_bytes;
  pthread_mutex_t mutex;        // of team and workspace
  pid_t owner;                  // a forked child may have inherited the mutex locked, by a thread that it does not have
} kernels_object;

// Every size is held to this: then sums of sizes and rounding up are exact in int64_t, and products are checked.
enum { MAX_SIZE = INT32_MAX };
static const int64_t MAX_INDEX = INT64_MAX / 16;  // of an element in a parameter: bytes and sums of two stay below 2^63

enum { MAX_COPIES = 4 };        // index arrays of one op

// Checking of one call's arguments: the first fault sets the exception, later checks are passed over.
typedef struct check {
  PyObject *module;
  int failed;
  void *copies[MAX_COPIES];     // owned, of index arrays, until the call ends
} check;

static PyObject *module_of(PyObject *self) { return PyType_GetModule(Py_TYPE(self)); }

static void refuse(check *c, rm_code code, const char *name, long long seen, const char *wanted, long long limit) {
  if (!c->failed) rm_raise_code(c->module, code, "%s is %lld, wanted %s %lld", name, seen, wanted, limit);
  c->failed = 1;
}

static void at_least(check *c, const char *name, int64_t seen, int64_t least) {
  if (seen < least) refuse(c, RM_E_SHAPE, name, seen, "at least", least);
}

static void check_size(check *c, const char *name, int64_t seen, int64_t least) {
  at_least(c, name, seen, least);
  if (seen > MAX_SIZE) refuse(c, RM_E_SHAPE, name, seen, "at most", MAX_SIZE);
}

// a · b; 0 after a fault.
static int64_t product(check *c, const char *name, int64_t a, int64_t b) {
  int64_t out = 0;
  if (c->failed) return 0;
  if (rm_mul_i64(a, b, &out)) return out;
  rm_raise_code(c->module, RM_E_SHAPE, "%s would have %lld times %lld elements, wanted less than 2^63", name, (long long)a, (long long)b);
  c->failed = 1;
  return 0;
}

// rm_packed_elems, checked.
static int64_t packed_elems(check *c, const char *name, int64_t n, int64_t k) {
  return c->failed ? 0 : product(c, name, rm_round_up(n, RM_N_TILE), rm_round_up(k, RM_K_BLOCK));
}

static void drop_copies(check *c) {
  for (int i = 0; i < MAX_COPIES; i++) {
    rm_free(c->copies[i]);
    c->copies[i] = NULL;
  }
}

static void *copied(check *c, const void *data, size_t bytes) {
  int i = 0;
  while (i < MAX_COPIES - 1 && c->copies[i]) i++;
  if (c->copies[i] || !(c->copies[i] = rm_alloc(bytes, 1))) {
    c->failed = 1;
    PyErr_NoMemory();
    return NULL;
  }
  return memcpy(c->copies[i], data, bytes);
}

// The data of an array of n_dims sizes, of indices a copy; a size of exactly −1 takes what is found.
static void *view(check *c, PyObject *object, const char *name, int type, int flags, int n_dims, int64_t *d0, int64_t *d1, int64_t *d2) {
  void *data = NULL;
  int64_t *sizes[3] = {d0, d1, d2};
  rm_array_want want = {.name = name, .type = type, .flags = flags, .n_dims = n_dims};
  for (int i = 0; i < n_dims; i++) {
    at_least(c, name, *sizes[i], -1);
    want.shape[i] = *sizes[i];
  }
  if (c->failed) return NULL;
  c->failed = rm_array_data(c->module, object, &want, &data) != 0;
  for (int i = 0; i < n_dims && !c->failed; i++) {
    if (n_dims > 1) check_size(c, name, want.shape[i], 0);   // where another size is 0, this one takes no memory
    *sizes[i] = want.shape[i];
  }
  if (c->failed || !data) return NULL;
  const int indices = (type == NPY_INT32 || type == NPY_INT64) && !(flags & RM_ARRAY_WRITE);
  return indices ? copied(c, data, (size_t)PyArray_NBYTES((PyArrayObject *)object)) : data;
}

static int numpy_type(rm_dtype dtype) { return dtype == RM_BF16 ? NPY_UINT16 : NPY_FLOAT32; }

static rm_dtype dtype_of(check *c, PyObject *object, const char *name) {
  const int type = PyArray_Check(object) ? PyArray_TYPE((PyArrayObject *)object) : -1;
  if (type == NPY_UINT16 || type == NPY_FLOAT32 || c->failed) return type == NPY_UINT16 ? RM_BF16 : RM_F32;
  rm_raise_code(c->module, RM_E_DTYPE, "%s is not an array of uint16 (words of bfloat16) or float32", name);
  c->failed = 1;
  return RM_F32;
}

// a[i] in [low, high) for all i.
static void in_range(check *c, const char *name, const int32_t *a, int64_t n, int64_t low, int64_t high) {
  for (int64_t i = 0; a && i < n && !c->failed; i++)
    if (a[i] < low || a[i] >= high) {
      rm_raise_code(c->module, RM_E_REQUEST, "%s has %d at place %lld, wanted [%lld, %lld)", name, (int)a[i], (long long)i, (long long)low,
                    (long long)high);
      c->failed = 1;
    }
}

static void multiple_of(check *c, const char *name, int64_t seen, int64_t unit) {
  if (seen <= 0 || seen % unit) refuse(c, RM_E_SHAPE, name, seen, "a positive multiple of", unit);
}

// ------------------------------------------------------------------------------------------------ running
typedef struct run {
  rm_ctx ctx;
  uint32_t fp;
  PyThreadState *thread;
} run;

// 0: the ctx may be used, and finish must follow. −1: an exception is set, and the call has ended.
static int begin(kernels_object *self, check *c, rm_limits limits, run *r) {
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
  r->thread = PyEval_SaveThread();
  pthread_mutex_lock(&self->mutex);
  if (bytes > self->workspace_bytes) {
    rm_unmap(self->workspace, self->workspace_bytes);
    self->workspace = rm_map(bytes);
    self->workspace_bytes = self->workspace ? bytes : 0;
  }
  if (self->workspace_bytes < bytes) {
    pthread_mutex_unlock(&self->mutex);
    PyEval_RestoreThread(r->thread);
    drop_copies(c);
    PyErr_NoMemory();
    return -1;
  }
  r->ctx = (rm_ctx){
      .workspace = self->workspace, .workspace_bytes = bytes, .n_threads = limits.n_threads, .run = rm_team_run, .team = self->team};
  r->fp = rm_fp_enter();
  return 0;
}

static PyObject *finish(kernels_object *self, check *c, run *r) {
  rm_fp_leave(r->fp);
  pthread_mutex_unlock(&self->mutex);
  PyEval_RestoreThread(r->thread);
  drop_copies(c);
  return Py_NewRef(Py_None);
}

#define RUN(op, limits, args) \
  do { \
    run r; \
    if (begin(self, &c, limits, &r)) return NULL; \
    self->table->op(&r.ctx, args); \
    return finish(self, &c, &r); \
  } while (0)

#define OBJECTS(n) PyObject *o[n] = {0}
#define CHECK check c = {.module = module_of((PyObject *)self)}

// ------------------------------------------------------------------------------------------------ ops
// (out, ids, table, packed, vocab, hidden)
static PyObject *op_embed(kernels_object *self, PyObject *args) {
  OBJECTS(3);
  CHECK;
  long long vocab, hidden, rows = -1;
  rm_embed_args a = {0};
  if (!PyArg_ParseTuple(args, "OOOpLL:embed", &o[0], &o[1], &o[2], &a.packed, &vocab, &hidden)) return NULL;
  check_size(&c, "vocab", vocab, 0);
  check_size(&c, "hidden", hidden, 0);
  int64_t n = rows, v = vocab, k = hidden, elems = packed_elems(&c, "table", vocab, hidden);
  a.dtype = dtype_of(&c, o[2], "table");
  a.ids = view(&c, o[1], "ids", NPY_INT32, RM_ARRAY_IN, 1, &n, NULL, NULL);
  a.table = a.packed ? view(&c, o[2], "table", numpy_type(a.dtype), RM_ARRAY_IN, 1, &elems, NULL, NULL)
                     : view(&c, o[2], "table", numpy_type(a.dtype), RM_ARRAY_IN, 2, &v, &k, NULL);
  a.out = view(&c, o[0], "out", numpy_type(a.dtype), RM_ARRAY_WRITE, 2, &n, &k, NULL);
  in_range(&c, "ids", a.ids, n, 0, vocab);
  a.rows = n;
  a.hidden = k;
  RUN(embed, ((rm_limits){.max_rows = n, .max_k = k}), &a);
}

// (out, x, from)
static PyObject *op_gather_rows(kernels_object *self, PyObject *args) {
  OBJECTS(3);
  CHECK;
  rm_gather_rows_args a = {.rows = -1};
  if (!PyArg_ParseTuple(args, "OOO:gather_rows", &o[0], &o[1], &o[2])) return NULL;
  int64_t rows_of_x = -1, width = -1;
  const rm_dtype dtype = dtype_of(&c, o[1], "x");
  a.x = view(&c, o[1], "x", numpy_type(dtype), RM_ARRAY_IN, 2, &rows_of_x, &width, NULL);
  a.from = view(&c, o[2], "from", NPY_INT32, RM_ARRAY_IN, 1, &a.rows, NULL, NULL);
  a.out = view(&c, o[0], "out", numpy_type(dtype), RM_ARRAY_WRITE, 2, &a.rows, &width, NULL);
  in_range(&c, "from", a.from, a.rows, 0, rows_of_x);
  a.row_bytes = c.failed ? 0 : (size_t)width * rm_dtype_bytes(dtype);
  RUN(gather_rows, ((rm_limits){.max_rows = a.rows}), &a);
}

// (out, residual, x | None, weight, eps)
static PyObject *op_rms_norm(kernels_object *self, PyObject *args) {
  OBJECTS(4);
  CHECK;
  rm_rms_norm_args a = {.rows = -1, .n = -1};
  if (!PyArg_ParseTuple(args, "OOOOf:rms_norm", &o[0], &o[1], &o[2], &o[3], &a.eps)) return NULL;
  a.dtype = dtype_of(&c, o[1], "residual");
  const int type = numpy_type(a.dtype);
  a.residual = view(&c, o[1], "residual", type, o[2] == Py_None ? RM_ARRAY_IN : RM_ARRAY_WRITE, 2, &a.rows, &a.n, NULL);
  a.x = view(&c, o[2], "x", type, RM_ARRAY_OPTIONAL, 2, &a.rows, &a.n, NULL);
  a.weight = view(&c, o[3], "weight", type, RM_ARRAY_IN, 1, &a.n, NULL, NULL);
  a.out = view(&c, o[0], "out", type, RM_ARRAY_WRITE, 2, &a.rows, &a.n, NULL);
  at_least(&c, "the width of residual", a.n, 1);
  RUN(rms_norm, ((rm_limits){.max_rows = a.rows, .max_k = a.n}), &a);
}

// The groups share out all m rows: a row of none would be left as it was.
static void check_groups(check *c, const rm_gemm_args *a) {
  if (c->failed || !a->group_rows) return;
  in_range(c, "group_rows", a->group_rows, a->n_groups + 1, 0, a->m + 1);
  const int32_t first = a->group_rows[0], last = a->group_rows[a->n_groups];
  if (first != 0) refuse(c, RM_E_SHAPE, "the first of group_rows", first, "exactly", 0);
  if (last != a->m) refuse(c, RM_E_SHAPE, "the last of group_rows", last, "x's rows,", a->m);
  for (int64_t g = 0; g < a->n_groups && !c->failed; g++)
    if (a->group_rows[g + 1] < a->group_rows[g])
      refuse(c, RM_E_SHAPE, "group_rows", a->group_rows[g + 1], "ascending, at least", a->group_rows[g]);
}

// (y, x, w, bias | None, group_rows | None, n, swiglu)
static PyObject *op_gemm(kernels_object *self, PyObject *args) {
  OBJECTS(5);
  CHECK;
  long long n;
  int swiglu;
  rm_gemm_args a = {.m = -1, .k = -1, .n_groups = -1};
  if (!PyArg_ParseTuple(args, "OOOOOLp:gemm", &o[0], &o[1], &o[2], &o[3], &o[4], &n, &swiglu)) return NULL;
  check_size(&c, "n", n, 0);
  a.n = n;
  a.dtype = dtype_of(&c, o[1], "x");
  a.y_dtype = dtype_of(&c, o[0], "y");
  a.x = view(&c, o[1], "x", numpy_type(a.dtype), RM_ARRAY_IN, 2, &a.m, &a.k, NULL);
  int64_t bounds = -1;
  a.group_rows = view(&c, o[4], "group_rows", NPY_INT32, RM_ARRAY_OPTIONAL, 1, &bounds, NULL, NULL);
  if (a.group_rows) at_least(&c, "the length of group_rows", bounds, 1);
  a.n_groups = a.group_rows ? bounds - 1 : 1;
  a.group_stride = c.failed ? 0 : packed_elems(&c, "w", swiglu ? rm_gate_up_rows(n) : n, a.k);
  int64_t elems = product(&c, "w", a.n_groups, a.group_stride);
  a.w = view(&c, o[2], "w", numpy_type(a.dtype), RM_ARRAY_IN, 1, &elems, NULL, NULL);
  a.bias = view(&c, o[3], "bias", numpy_type(a.dtype), RM_ARRAY_OPTIONAL, 1, &a.n, NULL, NULL);
  if (a.bias && (swiglu || a.group_rows)) refuse(&c, RM_E_SHAPE, "bias with groups or swiglu", 1, "at most", 0);
  if (a.dtype == RM_F32 && a.y_dtype == RM_BF16 && !c.failed) {
    rm_raise_code(c.module, RM_E_DTYPE, "y is bfloat16 and x float32; wanted y of x's dtype, or float32");
    c.failed = 1;
  }
  a.y = view(&c, o[0], "y", numpy_type(a.y_dtype), RM_ARRAY_WRITE, 2, &a.m, &a.n, NULL);
  check_groups(&c, &a);
  a.ldx = a.k;
  a.ldy = a.n;
  const rm_limits limits = {.max_rows = a.m, .max_k = a.k, .max_n = a.n};
  if (swiglu) RUN(gemm_swiglu, limits, &a);
  RUN(gemm, limits, &a);
}

typedef struct cache_shape {
  int64_t n_pages, n_kv_heads, k_elems, v_elems;
} cache_shape;

static void check_heads(check *c, int64_t n_heads, int64_t n_kv_heads, int64_t head_dim, int64_t page_size) {
  at_least(c, "num_kv_heads", n_kv_heads, 1);
  multiple_of(c, "page_size", page_size, 16);
  multiple_of(c, "head_dim", head_dim, 2);
  check_size(c, "num_heads", n_heads, 1);
  check_size(c, "num_heads * head_dim", product(c, "q", n_heads, head_dim), 0);
}

static void check_caches(check *c, PyObject *k, PyObject *v, rm_dtype dtype, int64_t page_size, int64_t head_dim, int flags, cache_shape *s,
                         void **k_out, void **v_out) {
  check_size(c, "page_size", page_size, 1);
  check_size(c, "head_dim", head_dim, 1);
  if (c->failed) return;
  s->k_elems = product(c, "k_cache", page_size, rm_round_up(head_dim, RM_K_BLOCK));
  s->v_elems = product(c, "v_cache", page_size, rm_round_up(head_dim, RM_N_TILE));
  *k_out = view(c, k, "k_cache", numpy_type(dtype), flags, 3, &s->n_pages, &s->n_kv_heads, &s->k_elems);
  *v_out = view(c, v, "v_cache", numpy_type(dtype), flags, 3, &s->n_pages, &s->n_kv_heads, &s->v_elems);
}

// (q_out, qkv, q_weight, k_weight, cos, sin, positions, slots, k_cache, v_cache, row_flags, num_heads, page_size, eps)
static PyObject *op_qk_rope_kv(kernels_object *self, PyObject *args) {
  OBJECTS(11);
  CHECK;
  long long n_heads, page_size;
  rm_qk_rope_kv_args a = {.rows = -1, .head_dim = -1};
  if (!PyArg_ParseTuple(args, "OOOOOOOOOOOLLf:qk_rope_kv", &o[0], &o[1], &o[2], &o[3], &o[4], &o[5], &o[6], &o[7], &o[8], &o[9], &o[10],
                        &n_heads, &page_size, &a.eps))
    return NULL;
  a.dtype = dtype_of(&c, o[1], "qkv");
  const int type = numpy_type(a.dtype);
  cache_shape s = {.n_pages = -1, .n_kv_heads = -1};
  int64_t width = -1, n_positions = -1;
  a.q_weight = view(&c, o[2], "q_weight", type, RM_ARRAY_IN, 1, &a.head_dim, NULL, NULL);
  a.k_weight = view(&c, o[3], "k_weight", type, RM_ARRAY_IN, 1, &a.head_dim, NULL, NULL);
  if (!c.failed) check_caches(&c, o[8], o[9], a.dtype, page_size, a.head_dim, RM_ARRAY_WRITE, &s, &a.k_cache, &a.v_cache);
  check_heads(&c, n_heads, s.n_kv_heads, a.head_dim, page_size);
  width = c.failed ? 0 : product(&c, "qkv", n_heads + 2 * s.n_kv_heads, a.head_dim);
  a.qkv = view(&c, o[1], "qkv", type, RM_ARRAY_IN, 2, &a.rows, &width, NULL);
  int64_t half = a.head_dim / 2, heads = n_heads;
  a.q_out = view(&c, o[0], "q_out", type, RM_ARRAY_WRITE, 3, &a.rows, &heads, &a.head_dim);
  a.cos = view(&c, o[4], "cos", NPY_FLOAT32, RM_ARRAY_IN, 2, &n_positions, &half, NULL);
  a.sin = view(&c, o[5], "sin", NPY_FLOAT32, RM_ARRAY_IN, 2, &n_positions, &half, NULL);
  a.positions = view(&c, o[6], "positions", NPY_INT32, RM_ARRAY_IN, 1, &a.rows, NULL, NULL);
  a.slots = view(&c, o[7], "slots", NPY_INT64, RM_ARRAY_IN, 1, &a.rows, NULL, NULL);
  a.row_flags = view(&c, o[10], "row_flags", NPY_UINT8, RM_ARRAY_WRITE, 1, &a.rows, NULL, NULL);
  in_range(&c, "positions", a.positions, a.rows, 0, n_positions);
  for (int64_t r = 0; r < a.rows && !c.failed; r++)
    if (a.slots[r] < -1 || a.slots[r] >= s.n_pages * page_size)
      refuse(&c, RM_E_REQUEST, "a slot", a.slots[r], "-1 or less than", s.n_pages * page_size);
  a.n_heads = n_heads;
  a.n_kv_heads = s.n_kv_heads;
  a.page_size = page_size;
  RUN(qk_rope_kv, ((rm_limits){.max_rows = a.rows, .n_heads = n_heads, .n_kv_heads = s.n_kv_heads, .head_dim = a.head_dim}), &a);
}

// The kv heads are those that the query heads read.
static void check_group(check *c, const rm_attention_args *a) {
  check_size(c, "group", a->group, 0);
  check_size(c, "head0", a->head0, 0);
  if (c->failed) return;
  if (!a->group) {
    multiple_of(c, "num_heads", a->n_heads, a->n_kv_heads);
    if (a->head0) refuse(c, RM_E_SHAPE, "head0 without group", a->head0, "exactly", 0);
    return;
  }
  const int64_t read = (a->head0 + a->n_heads + a->group - 1) / a->group;
  if (a->head0 >= a->group) refuse(c, RM_E_SHAPE, "head0", a->head0, "less than group,", a->group);
  if (a->n_kv_heads != read) refuse(c, RM_E_SHAPE, "num_kv_heads", a->n_kv_heads, "as many as the query heads read,", read);
}

// Every page that a row may look at exists.
static void check_tables(check *c, const rm_attention_args *a, int64_t n_pages) {
  for (int64_t r = 0; r < a->rows && !c->failed; r++) {
    const int64_t last = a->positions[r], first = a->window > 0 ? rm_max64(0, last - a->window + 1) : 0;
    const int32_t *pages = a->block_tables + a->seq_of_row[r] * a->max_pages;
    if (last / a->page_size >= a->max_pages) refuse(c, RM_E_REQUEST, "a position", last, "less than", a->max_pages * a->page_size);
    if (!c->failed) in_range(c, "block_tables", pages + first / a->page_size, last / a->page_size - first / a->page_size + 1, 0, n_pages);
  }
}

// (out, q, k_cache, v_cache, positions, seq_of_row, block_tables, page_size, window, scale, group = 0, head0 = 0)
static PyObject *op_attention(kernels_object *self, PyObject *args) {
  OBJECTS(7);
  CHECK;
  long long page_size, window, group = 0, head0 = 0;
  rm_attention_args a = {.rows = -1, .n_heads = -1, .head_dim = -1, .n_seqs = -1, .max_pages = -1};
  if (!PyArg_ParseTuple(args, "OOOOOOOLLf|LL:attention", &o[0], &o[1], &o[2], &o[3], &o[4], &o[5], &o[6], &page_size, &window, &a.scale,
                        &group, &head0))
    return NULL;
  a.dtype = dtype_of(&c, o[1], "q");
  cache_shape s = {.n_pages = -1, .n_kv_heads = -1};
  void *k = NULL, *v = NULL;
  a.q = view(&c, o[1], "q", numpy_type(a.dtype), RM_ARRAY_IN, 3, &a.rows, &a.n_heads, &a.head_dim);
  a.out = view(&c, o[0], "out", numpy_type(a.dtype), RM_ARRAY_WRITE, 3, &a.rows, &a.n_heads, &a.head_dim);
  if (!c.failed) check_caches(&c, o[2], o[3], a.dtype, page_size, a.head_dim, RM_ARRAY_IN, &s, &k, &v);
  check_heads(&c, a.n_heads, s.n_kv_heads, a.head_dim, page_size);
  a.n_kv_heads = s.n_kv_heads;
  a.group = group;
  a.head0 = head0;
  check_group(&c, &a);
  check_size(&c, "window", window, 0);
  a.positions = view(&c, o[4], "positions", NPY_INT32, RM_ARRAY_IN, 1, &a.rows, NULL, NULL);
  a.seq_of_row = view(&c, o[5], "seq_of_row", NPY_INT32, RM_ARRAY_IN, 1, &a.rows, NULL, NULL);
  a.block_tables = view(&c, o[6], "block_tables", NPY_INT32, RM_ARRAY_IN, 2, &a.n_seqs, &a.max_pages, NULL);
  const int64_t positions = product(&c, "a row of block_tables", a.max_pages, page_size);
  check_size(&c, "block_tables' pages * page_size", positions, 0);
  in_range(&c, "positions", a.positions, a.rows, 0, INT32_MAX);
  in_range(&c, "seq_of_row", a.seq_of_row, a.rows, 0, a.n_seqs);
  a.k_cache = k;
  a.v_cache = v;
  a.page_size = page_size;
  a.window = window;
  check_tables(&c, &a, s.n_pages);
  RUN(attention,
      ((rm_limits){.max_rows = a.rows,
                   .n_heads = a.n_heads,
                   .n_kv_heads = a.n_kv_heads,
                   .head_dim = a.head_dim,
                   .group = a.group,
                   .max_positions = positions}),
      &a);
}

static void check_top_k(check *c, int64_t top_k, int64_t n_experts) {
  at_least(c, "top_k", top_k, 1);
  if (top_k > n_experts || top_k > RM_MAX_TOP_K) refuse(c, RM_E_SHAPE, "top_k", top_k, "at most", rm_min64(n_experts, RM_MAX_TOP_K));
}

// (ids, gates, x, w, bias | None, num_experts, renormalize)
static PyObject *op_router(kernels_object *self, PyObject *args) {
  OBJECTS(5);
  CHECK;
  long long n_experts;
  rm_router_args a = {.rows = -1, .hidden = -1, .top_k = -1};
  if (!PyArg_ParseTuple(args, "OOOOOLp:router", &o[0], &o[1], &o[2], &o[3], &o[4], &n_experts, &a.renormalize)) return NULL;
  a.dtype = dtype_of(&c, o[2], "x");
  a.x = view(&c, o[2], "x", numpy_type(a.dtype), RM_ARRAY_IN, 2, &a.rows, &a.hidden, NULL);
  check_size(&c, "num_experts", n_experts, 1);
  a.n_experts = n_experts;
  int64_t elems = packed_elems(&c, "w", n_experts, a.hidden);
  a.w = view(&c, o[3], "w", numpy_type(a.dtype), RM_ARRAY_IN, 1, &elems, NULL, NULL);
  a.bias = view(&c, o[4], "bias", NPY_FLOAT32, RM_ARRAY_OPTIONAL, 1, &a.n_experts, NULL, NULL);
  a.ids = view(&c, o[0], "ids", NPY_INT32, RM_ARRAY_WRITE, 2, &a.rows, &a.top_k, NULL);
  a.gates = view(&c, o[1], "gates", NPY_FLOAT32, RM_ARRAY_WRITE, 2, &a.rows, &a.top_k, NULL);
  check_top_k(&c, a.top_k, n_experts);
  RUN(router, ((rm_limits){.max_rows = a.rows, .max_k = a.hidden, .n_experts = n_experts, .top_k = a.top_k}), &a);
}

// (x_out, group_rows, place, x, ids, num_experts)
static PyObject *op_permute(kernels_object *self, PyObject *args) {
  OBJECTS(5);
  CHECK;
  long long n_experts;
  rm_permute_args a = {.rows = -1, .hidden = -1, .top_k = -1};
  if (!PyArg_ParseTuple(args, "OOOOOL:permute", &o[0], &o[1], &o[2], &o[3], &o[4], &n_experts)) return NULL;
  a.dtype = dtype_of(&c, o[3], "x");
  a.x = view(&c, o[3], "x", numpy_type(a.dtype), RM_ARRAY_IN, 2, &a.rows, &a.hidden, NULL);
  a.ids = view(&c, o[4], "ids", NPY_INT32, RM_ARRAY_IN, 2, &a.rows, &a.top_k, NULL);
  check_size(&c, "num_experts", n_experts, 0);
  int64_t choices = product(&c, "x_out", a.rows, a.top_k), bounds = c.failed ? 0 : n_experts + 1;
  a.x_out = view(&c, o[0], "x_out", numpy_type(a.dtype), RM_ARRAY_WRITE, 2, &choices, &a.hidden, NULL);
  a.group_rows = view(&c, o[1], "group_rows", NPY_INT32, RM_ARRAY_WRITE, 1, &bounds, NULL, NULL);
  a.place = view(&c, o[2], "place", NPY_INT32, RM_ARRAY_WRITE, 2, &a.rows, &a.top_k, NULL);
  in_range(&c, "ids", a.ids, choices, 0, n_experts);
  a.n_experts = n_experts;
  RUN(permute, ((rm_limits){.max_rows = a.rows, .max_k = a.hidden, .n_experts = n_experts, .top_k = a.top_k}), &a);
}

// A row's experts are distinct: the tree that adds their outputs up has one leaf for each.
static void distinct_in_rows(check *c, const int32_t *ids, int64_t rows, int64_t n) {
  for (int64_t r = 0; r < rows && !c->failed; r++)
    for (int64_t i = 1; i < n && !c->failed; i++)
      for (int64_t j = 0; j < i && !c->failed; j++)
        if (ids[r * n + i] == ids[r * n + j]) {
          rm_raise_code(c->module, RM_E_REQUEST, "row %lld of ids has expert %d twice, wanted distinct ones", (long long)r, ids[r * n + i]);
          c->failed = 1;
        }
}

// (out, y, place, ids, gates, num_experts)
static PyObject *op_combine(kernels_object *self, PyObject *args) {
  OBJECTS(5);
  CHECK;
  long long n_experts;
  rm_combine_args a = {.rows = -1, .hidden = -1, .top_k = -1};
  if (!PyArg_ParseTuple(args, "OOOOOL:combine", &o[0], &o[1], &o[2], &o[3], &o[4], &n_experts)) return NULL;
  a.dtype = dtype_of(&c, o[1], "y");
  a.place = view(&c, o[2], "place", NPY_INT32, RM_ARRAY_IN, 2, &a.rows, &a.top_k, NULL);
  a.ids = view(&c, o[3], "ids", NPY_INT32, RM_ARRAY_IN, 2, &a.rows, &a.top_k, NULL);
  a.gates = view(&c, o[4], "gates", NPY_FLOAT32, RM_ARRAY_IN, 2, &a.rows, &a.top_k, NULL);
  check_size(&c, "num_experts", n_experts, 0);
  int64_t choices = product(&c, "y", a.rows, a.top_k);
  a.y = view(&c, o[1], "y", numpy_type(a.dtype), RM_ARRAY_IN, 2, &choices, &a.hidden, NULL);
  a.out = view(&c, o[0], "out", numpy_type(a.dtype), RM_ARRAY_WRITE, 2, &a.rows, &a.hidden, NULL);
  check_top_k(&c, a.top_k, n_experts);
  in_range(&c, "ids", a.ids, choices, 0, n_experts);
  in_range(&c, "place", a.place, choices, 0, choices);
  distinct_in_rows(&c, a.ids, a.rows, a.top_k);
  a.n_experts = n_experts;
  RUN(combine, ((rm_limits){.max_rows = a.rows, .max_k = a.hidden, .n_experts = n_experts, .top_k = a.top_k}), &a);
}

// (logits | None, stats, target_logprobs | None, targets | None, row_flags, x, w, vocab, pairs | None, target_logits | None). With
// pairs, stats may be None, and vocab 0.
static PyObject *op_lm_head(kernels_object *self, PyObject *args) {
  OBJECTS(9);
  CHECK;
  long long vocab;
  rm_lm_head_args a = {.rows = -1, .hidden = -1};
  o[7] = o[8] = Py_None;
  if (!PyArg_ParseTuple(args, "OOOOOOOL|OO:lm_head", &o[0], &o[1], &o[2], &o[3], &o[4], &o[5], &o[6], &vocab, &o[7], &o[8])) return NULL;
  const int in_pairs = o[7] != Py_None, has_targets = o[2] != Py_None || o[8] != Py_None;
  check_size(&c, "vocab", vocab, !in_pairs);
  a.vocab = vocab;
  a.dtype = dtype_of(&c, o[5], "x");
  a.x = view(&c, o[5], "x", numpy_type(a.dtype), RM_ARRAY_IN, 2, &a.rows, &a.hidden, NULL);
  int64_t elems = packed_elems(&c, "w", vocab, a.hidden), two = 2;
  int64_t n_blocks = c.failed ? 0 : rm_round_up(vocab, RM_VOCAB_BLOCK) / RM_VOCAB_BLOCK;
  a.w = view(&c, o[6], "w", numpy_type(a.dtype), RM_ARRAY_IN, 1, &elems, NULL, NULL);
  a.logits = view(&c, o[0], "logits", NPY_FLOAT32, RM_ARRAY_WRITE | RM_ARRAY_OPTIONAL, 2, &a.rows, &a.vocab, NULL);
  a.stats = view(&c, o[1], "stats", NPY_FLOAT32, RM_ARRAY_WRITE | (in_pairs ? RM_ARRAY_OPTIONAL : 0), 2, &a.rows, &two, NULL);
  a.target_logprobs = view(&c, o[2], "target_logprobs", NPY_FLOAT32, RM_ARRAY_WRITE | RM_ARRAY_OPTIONAL, 1, &a.rows, NULL, NULL);
  a.targets = view(&c, o[3], "targets", NPY_INT32, has_targets ? RM_ARRAY_IN : RM_ARRAY_OPTIONAL, 1, &a.rows, NULL, NULL);
  a.pairs = view(&c, o[7], "pairs", NPY_FLOAT32, RM_ARRAY_WRITE | RM_ARRAY_OPTIONAL, 3, &n_blocks, &a.rows, &two);
  a.target_logits = view(&c, o[8], "target_logits", NPY_FLOAT32, RM_ARRAY_WRITE | RM_ARRAY_OPTIONAL, 1, &a.rows, NULL, NULL);
  a.row_flags = view(&c, o[4], "row_flags", NPY_UINT8, RM_ARRAY_WRITE, 1, &a.rows, NULL, NULL);
  in_range(&c, "targets", a.targets, a.rows, -1, vocab);
  a.ldx = a.hidden;
  a.ld_logits = vocab;
  RUN(lm_head, ((rm_limits){.max_rows = a.rows, .max_k = a.hidden, .vocab = vocab}), &a);
}

// (stats, target_logprobs | None, targets | None, row_flags, pairs, target_logits | None)
static PyObject *op_merge_pairs(kernels_object *self, PyObject *args) {
  OBJECTS(6);
  CHECK;
  rm_merge_pairs_args a = {.rows = -1, .n_blocks = -1};
  if (!PyArg_ParseTuple(args, "OOOOOO:merge_pairs", &o[0], &o[1], &o[2], &o[3], &o[4], &o[5])) return NULL;
  int64_t two = 2;
  a.pairs = view(&c, o[4], "pairs", NPY_FLOAT32, RM_ARRAY_IN, 3, &a.n_blocks, &a.rows, &two);
  at_least(&c, "the blocks of pairs", a.n_blocks, 1);
  a.stats = view(&c, o[0], "stats", NPY_FLOAT32, RM_ARRAY_WRITE, 2, &a.rows, &two, NULL);
  a.target_logprobs = view(&c, o[1], "target_logprobs", NPY_FLOAT32, RM_ARRAY_WRITE | RM_ARRAY_OPTIONAL, 1, &a.rows, NULL, NULL);
  const int wanted = a.target_logprobs ? RM_ARRAY_IN : RM_ARRAY_OPTIONAL;
  a.targets = view(&c, o[2], "targets", NPY_INT32, wanted, 1, &a.rows, NULL, NULL);
  a.target_logits = view(&c, o[5], "target_logits", NPY_FLOAT32, wanted, 1, &a.rows, NULL, NULL);
  a.row_flags = view(&c, o[3], "row_flags", NPY_UINT8, RM_ARRAY_WRITE, 1, &a.rows, NULL, NULL);
  in_range(&c, "targets", a.targets, a.rows, -1, a.n_blocks * RM_VOCAB_BLOCK);
  RUN(merge_pairs, ((rm_limits){.max_rows = a.rows}), &a);
}

// Per row parameters from their columns; owned, NULL with an exception set.
static rm_sample_params *sample_params(check *c, PyObject *const *o, int64_t rows, int64_t vocab) {
  int64_t bounds = rows + 1, n_banned = -1;
  const float *temperature = view(c, o[0], "temperature", NPY_FLOAT32, RM_ARRAY_IN, 1, &rows, NULL, NULL);
  const float *top_p = view(c, o[1], "top_p", NPY_FLOAT32, RM_ARRAY_IN, 1, &rows, NULL, NULL);
  const float *min_p = view(c, o[2], "min_p", NPY_FLOAT32, RM_ARRAY_IN, 1, &rows, NULL, NULL);
  const int32_t *top_k = view(c, o[3], "top_k", NPY_INT32, RM_ARRAY_IN, 1, &rows, NULL, NULL);
  const uint64_t *seed = view(c, o[4], "seed", NPY_UINT64, RM_ARRAY_IN, 1, &rows, NULL, NULL);
  const uint64_t *counter = view(c, o[5], "counter", NPY_UINT64, RM_ARRAY_IN, 1, &rows, NULL, NULL);
  const int32_t *forced = view(c, o[6], "forced", NPY_INT32, RM_ARRAY_IN, 1, &rows, NULL, NULL);
  const int32_t *starts = view(c, o[7], "banned_starts", NPY_INT32, RM_ARRAY_IN, 1, &bounds, NULL, NULL);
  const int32_t *banned = view(c, o[8], "banned", NPY_INT32, RM_ARRAY_IN, 1, &n_banned, NULL, NULL);
  in_range(c, "forced", forced, rows, -1, vocab);
  in_range(c, "banned_starts", starts, bounds, 0, n_banned + 1);
  for (int64_t r = 0; r < rows && !c->failed; r++) {
    if (starts[r + 1] < starts[r]) refuse(c, RM_E_REQUEST, "banned_starts", starts[r + 1], "ascending, at least", starts[r]);
    if (!(temperature[r] >= 0.0f && top_p[r] > 0.0f && top_p[r] <= 1.0f && min_p[r] >= 0.0f && min_p[r] <= 1.0f) && !c->failed) {
      rm_raise_code(c->module, RM_E_REQUEST, "row %lld wants temperature >= 0, top_p in (0, 1] and min_p in [0, 1]", (long long)r);
      c->failed = 1;
    }
  }
  if (c->failed) return NULL;
  rm_sample_params *params = rm_alloc((size_t)rows + 1, sizeof *params);
  if (!params) {
    c->failed = 1;
    PyErr_NoMemory();
    return NULL;
  }
  for (int64_t r = 0; r < rows; r++)
    params[r] = (rm_sample_params){
        temperature[r], top_p[r], min_p[r], top_k[r], seed[r], counter[r], banned + starts[r], starts[r + 1] - starts[r], forced[r]};
  return params;
}

// (tokens, logprobs, sampling_logprobs, logits, stats, row_flags, then the columns of sample_params)
static PyObject *op_sample(kernels_object *self, PyObject *args) {
  OBJECTS(15);
  CHECK;
  rm_sample_args a = {.rows = -1, .vocab = -1};
  if (!PyArg_ParseTuple(args, "OOOOOOOOOOOOOOO:sample", &o[0], &o[1], &o[2], &o[3], &o[4], &o[5], &o[6], &o[7], &o[8], &o[9], &o[10],
                        &o[11], &o[12], &o[13], &o[14]))
    return NULL;
  int64_t two = 2;
  a.logits = view(&c, o[3], "logits", NPY_FLOAT32, RM_ARRAY_IN, 2, &a.rows, &a.vocab, NULL);
  at_least(&c, "vocab", a.vocab, 1);
  a.stats = view(&c, o[4], "stats", NPY_FLOAT32, RM_ARRAY_IN, 2, &a.rows, &two, NULL);
  a.row_flags = view(&c, o[5], "row_flags", NPY_UINT8, RM_ARRAY_IN, 1, &a.rows, NULL, NULL);
  a.tokens = view(&c, o[0], "tokens", NPY_INT32, RM_ARRAY_WRITE, 1, &a.rows, NULL, NULL);
  a.logprobs = view(&c, o[1], "logprobs", NPY_FLOAT32, RM_ARRAY_WRITE, 1, &a.rows, NULL, NULL);
  a.sampling_logprobs = view(&c, o[2], "sampling_logprobs", NPY_FLOAT32, RM_ARRAY_WRITE, 1, &a.rows, NULL, NULL);
  a.ld_logits = a.vocab;
  rm_sample_params *params = sample_params(&c, o + 6, a.rows, a.vocab);
  a.params = params;
  run r;
  PyObject *result = NULL;
  if (!begin(self, &c, (rm_limits){.max_rows = a.rows, .vocab = a.vocab}, &r)) {
    self->table->sample(&r.ctx, &a);
    result = finish(self, &c, &r);
  }
  rm_free(params);
  return result;
}

// (ids, logprobs, logits, stats)
static PyObject *op_top_logprobs(kernels_object *self, PyObject *args) {
  OBJECTS(4);
  CHECK;
  rm_top_logprobs_args a = {.rows = -1, .vocab = -1, .k = -1};
  if (!PyArg_ParseTuple(args, "OOOO:top_logprobs", &o[0], &o[1], &o[2], &o[3])) return NULL;
  int64_t two = 2;
  a.logits = view(&c, o[2], "logits", NPY_FLOAT32, RM_ARRAY_IN, 2, &a.rows, &a.vocab, NULL);
  a.stats = view(&c, o[3], "stats", NPY_FLOAT32, RM_ARRAY_IN, 2, &a.rows, &two, NULL);
  a.ids = view(&c, o[0], "ids", NPY_INT32, RM_ARRAY_WRITE, 2, &a.rows, &a.k, NULL);
  a.logprobs = view(&c, o[1], "logprobs", NPY_FLOAT32, RM_ARRAY_WRITE, 2, &a.rows, &a.k, NULL);
  if (a.k > a.vocab) refuse(&c, RM_E_SHAPE, "k", a.k, "at most", a.vocab);
  a.ld_logits = a.vocab;
  RUN(top_logprobs, ((rm_limits){.max_rows = a.rows, .vocab = a.vocab}), &a);
}

// (ranks, logits, tokens)
static PyObject *op_ranks(kernels_object *self, PyObject *args) {
  OBJECTS(3);
  CHECK;
  rm_ranks_args a = {.rows = -1, .vocab = -1};
  if (!PyArg_ParseTuple(args, "OOO:ranks", &o[0], &o[1], &o[2])) return NULL;
  a.logits = view(&c, o[1], "logits", NPY_FLOAT32, RM_ARRAY_IN, 2, &a.rows, &a.vocab, NULL);
  a.tokens = view(&c, o[2], "tokens", NPY_INT32, RM_ARRAY_IN, 1, &a.rows, NULL, NULL);
  a.ranks = view(&c, o[0], "ranks", NPY_INT32, RM_ARRAY_WRITE, 1, &a.rows, NULL, NULL);
  in_range(&c, "tokens", a.tokens, a.rows, -1, a.vocab);
  a.ld_logits = a.vocab;
  RUN(ranks, ((rm_limits){.max_rows = a.rows, .vocab = a.vocab}), &a);
}

// (dst, src, layout, dst_row0, index0 = 0) → (digest, nonfinite_index). dst: 2 dims plain, 1 dim packed with dst_cols = src's columns.
static PyObject *op_pack(kernels_object *self, PyObject *args) {
  OBJECTS(2);
  CHECK;
  int layout;
  long long row0, index0 = 0;
  if (!PyArg_ParseTuple(args, "OOiL|L:pack", &o[0], &o[1], &layout, &row0, &index0)) return NULL;
  static const int types[] = {NPY_UINT16, NPY_FLOAT32, NPY_FLOAT16, NPY_FLOAT64};  // by rm_src_dtype
  rm_pack_args a = {.rows = -1, .cols = -1, .layout = (rm_layout)layout, .dst_row0 = row0, .index0 = index0};
  const int type = PyArray_Check(o[1]) ? PyArray_TYPE((PyArrayObject *)o[1]) : -1;
  while (a.src_dtype < RM_SRC_F64 && types[a.src_dtype] != type) a.src_dtype++;
  a.dst_dtype = dtype_of(&c, o[0], "dst");
  a.src = view(&c, o[1], "src", types[a.src_dtype], RM_ARRAY_IN, 2, &a.rows, &a.cols, NULL);
  if (layout < RM_PLAIN || layout > RM_PACKED_UP) refuse(&c, RM_E_LAYOUT, "layout", layout, "one of rm_layout, at most", RM_PACKED_UP);
  check_size(&c, "dst_row0", row0, 0);
  at_least(&c, "index0", index0, 0);
  if (index0 > MAX_INDEX) refuse(&c, RM_E_SHAPE, "index0", index0, "at most", MAX_INDEX);
  if (a.cols % 2 == 0 && index0 % 2) refuse(&c, RM_E_SHAPE, "index0 of rows of even width", index0, "even, such as", index0 - 1);
  const int64_t end = c.failed ? 0 : row0 + a.rows, rows_of = layout >= RM_PACKED_GATE ? rm_gate_up_rows(end) : end;
  int64_t elems = -1, dst_rows = -1;
  a.dst = layout == RM_PLAIN ? view(&c, o[0], "dst", numpy_type(a.dst_dtype), RM_ARRAY_WRITE, 2, &dst_rows, &a.cols, NULL)
                             : view(&c, o[0], "dst", numpy_type(a.dst_dtype), RM_ARRAY_WRITE, 1, &elems, NULL, NULL);
  if (!c.failed && layout == RM_PLAIN) at_least(&c, "dst's rows", dst_rows, rows_of);
  const int64_t packed = packed_elems(&c, "dst", rows_of, a.cols);
  if (!c.failed && layout != RM_PLAIN) at_least(&c, "dst's length", elems, packed);
  a.row_stride = a.dst_cols = a.cols;
  a.col_stride = 1;
  run r;
  if (begin(self, &c, (rm_limits){.max_rows = a.rows, .max_k = a.cols}, &r)) return NULL;
  self->table->pack(&r.ctx, &a);
  Py_DECREF(finish(self, &c, &r));
  return Py_BuildValue("KL", (unsigned long long)a.digest, (long long)a.nonfinite_index);
}

// ------------------------------------------------------------------------------------------------ the type
static PyObject *kernels_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
  static char *names[] = {"isa", "threads", NULL};
  const char *isa;
  int threads;
  PyObject *module = PyType_GetModule(type);
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "si:Kernels", names, &isa, &threads)) return NULL;
  int known = 0;
  while (known < RM_N_ISA && strcmp(rm_isa_name((rm_isa)known), isa) != 0) known++;
  const rm_kernels *table = known < RM_N_ISA ? rm_kernels_for((rm_isa)known) : NULL;
  if (!table) return rm_raise_code(module, RM_E_CONFIG, "isa='%s' is not one that this build and processor have", isa);
  kernels_object *self = (kernels_object *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
  rm_error err = RM_ERROR_INIT;
  if (!self) return NULL;
  self->table = table;
  self->owner = getpid();
  pthread_mutex_init(&self->mutex, NULL);
  if (rm_team_create(threads, &self->team, &err)) {
    Py_DECREF(self);
    return rm_raise(module, &err);
  }
  return (PyObject *)self;
}

static void kernels_dealloc(PyObject *object) {
  kernels_object *self = (kernels_object *)object;
  PyTypeObject *type = Py_TYPE(object);
  rm_team_destroy(self->team);
  rm_unmap(self->workspace, self->workspace_bytes);
  if (getpid() == self->owner) pthread_mutex_destroy(&self->mutex);
  ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
  Py_DECREF(type);
}

#define METHOD(name, text) {#name, (PyCFunction)(void (*)(void))op_##name, METH_VARARGS, text}
static PyMethodDef kernels_methods[] = {
    METHOD(embed, "(out, ids, table, packed, vocab, hidden)"),
    METHOD(gather_rows, "(out, x, from)"),
    METHOD(rms_norm, "(out, residual, x | None, weight, eps)"),
    METHOD(gemm, "(y, x, w, bias | None, group_rows | None, n, swiglu)"),
    METHOD(qk_rope_kv,
           "(q_out, qkv, q_weight, k_weight, cos, sin, positions, slots, k_cache, v_cache, row_flags, num_heads, page_size, eps)"),
    METHOD(attention, "(out, q, k_cache, v_cache, positions, seq_of_row, block_tables, page_size, window, scale, group = 0, head0 = 0)"),
    METHOD(router, "(ids, gates, x, w, bias | None, num_experts, renormalize)"),
    METHOD(permute, "(x_out, group_rows, place, x, ids, num_experts)"),
    METHOD(combine, "(out, y, place, ids, gates, num_experts)"),
    METHOD(lm_head, "(logits | None, stats | None, target_logprobs | None, targets | None, row_flags, x, w, vocab, pairs | None = None, "
                    "target_logits | None = None)"),
    METHOD(merge_pairs, "(stats, target_logprobs | None, targets | None, row_flags, pairs, target_logits | None)"),
    METHOD(sample,
           "(tokens, logprobs, sampling_logprobs, logits, stats, row_flags, temperature, top_p, min_p, top_k, seed, counter, forced, "
           "banned_starts, banned)"),
    METHOD(top_logprobs, "(ids, logprobs, logits, stats)"),
    METHOD(ranks, "(ranks, logits, tokens)"),
    METHOD(pack, "(dst, src, layout, dst_row0, index0 = 0) -> (digest, nonfinite_index)"),
    {NULL, NULL, 0, NULL},
};

static PyType_Slot kernels_slots[] = {
    {Py_tp_new, kernels_new},
    {Py_tp_dealloc, kernels_dealloc},
    {Py_tp_methods, kernels_methods},
    {Py_tp_doc, "Kernels(isa, threads): one variant of the ops over arrays; rollmesh.ops is its public face."},
    {0, NULL},
};

static PyType_Spec kernels_spec = {
    .name = "rollmesh._core.Kernels",
    .basicsize = sizeof(kernels_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = kernels_slots,
};

// ------------------------------------------------------------------------------------------------ functions
// (cos, sin, inv_freq, scale, bfloat16)
static PyObject *rope_table(PyObject *module, PyObject *args) {
  OBJECTS(3);
  check c = {.module = module};
  float scale;
  int bf16;
  int64_t positions = -1, half = -1;
  if (!PyArg_ParseTuple(args, "OOOfp:rope_table", &o[0], &o[1], &o[2], &scale, &bf16)) return NULL;
  const float *inv_freq = view(&c, o[2], "inv_freq", NPY_FLOAT32, RM_ARRAY_IN, 1, &half, NULL, NULL);
  float *cos = view(&c, o[0], "cos", NPY_FLOAT32, RM_ARRAY_WRITE, 2, &positions, &half, NULL);
  float *sin = view(&c, o[1], "sin", NPY_FLOAT32, RM_ARRAY_WRITE, 2, &positions, &half, NULL);
  if (c.failed) return NULL;
  Py_BEGIN_ALLOW_THREADS
    ;
    rm_rope_table(cos, sin, inv_freq, positions, half, scale, bf16 ? RM_BF16 : RM_F32);
  Py_END_ALLOW_THREADS;
  Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"rope_table", rope_table, METH_VARARGS, "(cos, sin, inv_freq, scale, bfloat16)"},
    {NULL, NULL, 0, NULL},
};

int rm_ops_add(PyObject *module) {
  PyObject *type = PyType_FromModuleAndSpec(module, &kernels_spec, NULL);
  if (!type) return -1;
  const int failed = PyModule_AddObjectRef(module, "Kernels", type) || PyModule_AddFunctions(module, functions);
  Py_DECREF(type);
  return failed ? -1 : 0;
}

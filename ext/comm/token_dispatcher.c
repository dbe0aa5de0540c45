// token_dispatcher.c: _core.Dispatcher, token rows between ranks (model/moe/dispatch.h) over arrays
// of bytes, [rows][bytes of a row] in uint8, so that a row may be of any dtype. A Dispatcher has
// its group's end for itself: one of a _core.Comm, or of a region that `_core.dispatchers` makes
// for ranks that are threads of this process. Calls release the GIL: the other ranks may be threads
// that wait for it.
#include "arrays.h"
#include "comm_object.h"

#include <stdio.h>
#include <string.h>
#include <structmember.h>

#include "base/memory.h"
#include "comm/block.h"
#include "comm/shm/region.h"
#include "model/moe/dispatch.h"

typedef struct dispatcher_object {
  PyObject_HEAD
  PyObject *end; // owned: the Comm that `comm` is of, or NULL
  rm_comm *comm; // owned; NULL: one rank
  rm_dispatch *dispatch; // owned; NULL: closed
  rm_range here; // experts
  int64_t n_experts, top_k, max_rows;
  int64_t n_plans; // made so far
  int size, rank;
  int busy; // a thread is in a call; written with the GIL held
} dispatcher_object;

typedef struct plan_object {
  PyObject_HEAD
  PyObject *owner; // owned: the Dispatcher that it is of
  rm_dispatch_plan *plan; // owned
  int64_t number; // of the owner's plans, from 1
} plan_object;

// --------------------------------------------------------------------------------------- creation
// What the arguments of both ways to make dispatchers say, beside the ranks.
typedef struct settings {
  long long n_experts, top_k, max_rows, row_bytes;
  const char *backend;
} settings;

static rm_code create_dispatch(dispatcher_object *self, const settings *s, rm_error *err) {
  rm_dispatch_options options = {
      .ep = self->comm, .n_experts = s->n_experts, .top_k = s->top_k, .max_rows = s->max_rows};
  rm_code code = rm_dispatcher_named(s->backend, &options.backend, err);
  if (code) return code;
  if (s->n_experts < 1 || s->n_experts % self->size)
    return rm_fail(err, RM_E_CONFIG, "ep=%d does not divide num_experts=%lld", self->size,
                   s->n_experts);
  rm_range *experts = rm_alloc((size_t)self->size, sizeof *experts);
  if (!experts)
    return rm_fail(err, RM_E_MEMORY, "no memory for the experts of %d ranks", self->size);
  const int64_t each = s->n_experts / self->size;
  for (int r = 0; r < self->size; r++) experts[r] = (rm_range){r * each, each};
  options.experts = experts;
  options.max_row_bytes = s->row_bytes > 0 ? (size_t)s->row_bytes : 0;
  code = rm_dispatch_create(&options, &self->dispatch, err);
  self->here = experts[self->rank];
  rm_free(experts);
  return code;
}

// Takes `comm`, unless it fails. `end`: the Comm that it is of, or NULL.
static PyObject *new_dispatcher(PyObject *module, rm_comm *comm, PyObject *end, const settings *s) {
  rm_error err = RM_ERROR_INIT;
  dispatcher_object *self = rm_object_make(module, RM_TYPE_DISPATCHER);
  if (!self) return NULL;
  self->end = Py_XNewRef(end);
  self->comm = comm;
  self->size = comm ? rm_comm_size(comm) : 1;
  self->rank = comm ? rm_comm_rank(comm) : 0;
  self->n_experts = s->n_experts;
  self->top_k = s->top_k;
  self->max_rows = s->max_rows;
  if (!create_dispatch(self, s, &err)) return (PyObject *)self;
  self->comm = NULL;
  Py_DECREF(self);
  return rm_raise(module, &err);
}

static PyObject *dispatcher_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
  static char *names[] = {"comm", "num_experts", "top_k", "max_rows", "row_bytes", "backend", NULL};
  PyObject *end, *module = PyType_GetModule(type);
  settings s;
  rm_comm *comm;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OLLLLs:Dispatcher", names, &end, &s.n_experts,
                                   &s.top_k, &s.max_rows, &s.row_bytes, &s.backend) ||
      rm_comm_take(module, end, &comm))
    return NULL;
  PyObject *self = new_dispatcher(module, comm, end, &s);
  if (!self) rm_comm_put_back(end, comm);
  return self;
}

enum { BUFFER_BYTES = 1 << 20 };

// (ranks, num_experts, top_k, max_rows, row_bytes, backend, timeout) → [Dispatcher of each rank]
static PyObject *dispatchers(PyObject *module, PyObject *args) {
  int ranks;
  double timeout;
  settings s;
  rm_error err = RM_ERROR_INIT;
  rm_region *region = NULL;
  int32_t members[64];
  if (!PyArg_ParseTuple(args, "iLLLLsd:dispatchers", &ranks, &s.n_experts, &s.top_k, &s.max_rows,
                        &s.row_bytes, &s.backend, &timeout))
    return NULL;
  const rm_region_options options = {
      .world = ranks, .n_groups = 1, .buffer_bytes = BUFFER_BYTES, .timeout = timeout};
  rm_code code = ranks == 1 ? RM_OK : rm_region_create(&options, &region, &err);
  if (code) return rm_raise(module, &err);
  PyObject *out = PyList_New(ranks);
  for (int r = 0; r < ranks; r++) members[r] = r;
  for (int r = 0; out && r < ranks; r++) {
    rm_comm *comm = NULL;
    if (region) code = rm_region_comm(region, 0, members, ranks, r, &comm, &err);
    PyObject *one = code ? rm_raise(module, &err) : new_dispatcher(module, comm, NULL, &s);
    if (!one) rm_comm_destroy(comm);
    if (!one || PyList_SetItem(out, r, one)) Py_CLEAR(out);
  }
  rm_region_release(region);
  return out;
}

// ------------------------------------------------------------------------------------------ calls
static int enter(dispatcher_object *self) {
  const char *why = !self->dispatch ? "is closed"
                    : self->busy    ? "is in a call of another thread"
                                    : NULL;
  if (!why) return self->busy = 1, 0;
  rm_raise_code(rm_module_of((PyObject *)self), RM_E_STATE, "this dispatcher %s", why);
  return -1;
}

static PyObject *leave(dispatcher_object *self, rm_code code, rm_error *err, PyObject *result) {
  self->busy = 0;
  if (!code) return result;
  Py_XDECREF(result);
  return rm_raise(rm_module_of((PyObject *)self), err);
}

static PyObject *dispatcher_plan(dispatcher_object *self, PyObject *object) {
  PyObject *module = rm_module_of((PyObject *)self);
  rm_array_want want = {.name = "ids", .type = NPY_INT32, .n_dims = 2, .shape = {-1, self->top_k}};
  rm_error err = RM_ERROR_INIT;
  rm_code code;
  void *ids;
  if (rm_array_data(module, object, &want, &ids) || enter(self)) return NULL;
  plan_object *plan = rm_object_make(module, RM_TYPE_DISPATCH_PLAN);
  if (!plan) return leave(self, RM_OK, &err, NULL);
  plan->owner = Py_NewRef((PyObject *)self);
  plan->number = ++self->n_plans;
  Py_BEGIN_ALLOW_THREADS
    code = rm_dispatch_plan_create(self->dispatch, &plan->plan, &err);
    if (!code) code = rm_dispatch_plan_fill(self->dispatch, plan->plan, ids, want.shape[0], &err);
  Py_END_ALLOW_THREADS
  return leave(self, code, &err, (PyObject *)plan);
}

typedef rm_code (*move_fn)(rm_dispatch *, const rm_ctx *, const rm_dispatch_plan *, const void *,
                           size_t, char **, rm_error *);

// (what, plan, from, to): `move` of n_from rows into an array of n_to, both members of the plan by
// their offsets. Ranks must agree on `what`, and on the plan's number: plans of two batches may
// have the same sizes.
static PyObject *run_move(dispatcher_object *self, PyObject *args, move_fn move, size_t n_from,
                          size_t n_to) {
  PyObject *module = rm_module_of((PyObject *)self), *plan_arg, *objects[2];
  rm_error err = RM_ERROR_INIT;
  void *from, *to;
  char *moved = NULL, said[RM_DISPATCH_TEXT];
  const char *what;
  rm_code code;
  if (!PyArg_ParseTuple(args, "sOOO", &what, &plan_arg, &objects[0], &objects[1])) return NULL;
  if (!rm_is(module, plan_arg, RM_TYPE_DISPATCH_PLAN) ||
      ((plan_object *)plan_arg)->owner != (PyObject *)self)
    return rm_raise_code(module, RM_E_STATE, "expected a plan of this dispatcher, got %R",
                         plan_arg);
  const rm_dispatch_plan *plan = ((plan_object *)plan_arg)->plan;
  rm_array_want source = {.name = "from", .type = NPY_UINT8, .n_dims = 2, .shape = {0, -1}};
  memcpy(&source.shape[0], (const char *)plan + n_from, sizeof source.shape[0]);
  if (rm_array_data(module, objects[0], &source, &from)) return NULL;
  rm_array_want target = {.name = "to",
                          .type = NPY_UINT8,
                          .flags = RM_ARRAY_WRITE,
                          .n_dims = 2,
                          .shape = {0, source.shape[1]}};
  memcpy(&target.shape[0], (const char *)plan + n_to, sizeof target.shape[0]);
  if (rm_array_data(module, objects[1], &target, &to) || enter(self)) return NULL;
  const size_t bytes = (size_t)source.shape[1];
  snprintf(said, sizeof said, "plan %lld: %s", (long long)((plan_object *)plan_arg)->number, what);
  Py_BEGIN_ALLOW_THREADS
    code = rm_dispatch_agree(self->dispatch, said, bytes, &err);
    if (!code) code = move(self->dispatch, NULL, plan, from, bytes, &moved, &err);
    if (!code) rm_copy(to, moved, (size_t)target.shape[0] * bytes);
  Py_END_ALLOW_THREADS
  return leave(self, code, &err, Py_NewRef(Py_None));
}

#define N_ROWS offsetof(rm_dispatch_plan, n_rows)
#define N_CHOICES offsetof(rm_dispatch_plan, n_choices)
#define N_ARRIVE offsetof(rm_dispatch_plan, n_arrive)

static PyObject *dispatcher_out(dispatcher_object *self, PyObject *args) {
  return run_move(self, args, rm_dispatch_out, N_ROWS, N_ARRIVE);
}
static PyObject *dispatcher_back(dispatcher_object *self, PyObject *args) {
  return run_move(self, args, rm_dispatch_back, N_ARRIVE, N_CHOICES);
}
static PyObject *dispatcher_out_each(dispatcher_object *self, PyObject *args) {
  return run_move(self, args, rm_dispatch_out_each, N_CHOICES, N_ARRIVE);
}

static PyObject *dispatcher_abort(dispatcher_object *self, PyObject *ignored) {
  (void)ignored;
  if (self->comm) rm_comm_abort(self->comm, RM_E_RANK_LOST);
  Py_RETURN_NONE;
}

static void close_dispatcher(dispatcher_object *self) {
  rm_dispatch_destroy(self->dispatch);
  rm_comm_destroy(self->comm);
  self->dispatch = NULL;
  self->comm = NULL;
  Py_CLEAR(self->end);
}

static PyObject *dispatcher_close(dispatcher_object *self, PyObject *ignored) {
  (void)ignored;
  rm_error err = RM_ERROR_INIT;
  if (!self->dispatch) Py_RETURN_NONE;
  if (enter(self)) return NULL;
  close_dispatcher(self);
  return leave(self, RM_OK, &err, Py_NewRef(Py_None));
}

// Cycles through it end in the Comm: comm_clear
RM_TRAVERSE(dispatcher_traverse, dispatcher_object, self->end)

static void dispatcher_dealloc(PyObject *object) {
  PyObject_GC_UnTrack(object);
  close_dispatcher((dispatcher_object *)object);
  rm_object_free(object);
}

static PyObject *dispatcher_experts(dispatcher_object *self, void *unused) {
  (void)unused;
  return Py_BuildValue("LL", (long long)self->here.first,
                       (long long)(self->here.first + self->here.n));
}

// ------------------------------------------------------------------------------------------ plans
RM_TRAVERSE(plan_traverse, plan_object, self->owner)

static void plan_dealloc(PyObject *object) {
  PyObject_GC_UnTrack(object);
  plan_object *self = (plan_object *)object;
  rm_dispatch_plan_destroy(self->plan);
  Py_XDECREF(self->owner);
  rm_object_free(object);
}

static PyObject *plan_get(plan_object *self, void *member) {
  return PyLong_FromLongLong(*(const int64_t *)((const char *)self->plan + (size_t)member));
}

static PyObject *plan_matrix(const plan_object *self, const int32_t *values, int64_t rows) {
  const int64_t shape[2] = {rows, ((const dispatcher_object *)self->owner)->top_k};
  return rm_array_new(NPY_INT32, 2, shape, values);
}
static PyObject *plan_place(plan_object *self, void *unused) {
  (void)unused;
  return plan_matrix(self, self->plan->place, self->plan->n_rows);
}
static PyObject *plan_ids(plan_object *self, void *unused) {
  (void)unused;
  return plan_matrix(self, self->plan->ids,
                     self->plan->n_choices / ((const dispatcher_object *)self->owner)->top_k);
}
static PyObject *plan_group_rows(plan_object *self, void *unused) {
  (void)unused;
  const int64_t n = ((const dispatcher_object *)self->owner)->here.n + 1;
  return rm_array_new(NPY_INT32, 1, &n, self->plan->group_rows);
}

// -------------------------------------------------------------------------------------- the types
#define METHOD(name, flags, doc) RM_METHOD(#name, dispatcher_##name, flags, doc)
static PyMethodDef methods[] = {
    METHOD(plan, METH_O,
           "plan(ids): where the rows of int32 [rows, top_k] ids go; rows of negative ids are "
           "padding. Collective."),
    METHOD(out, METH_VARARGS,
           "out(what, plan, x, rows): sends rows to their experts. Collective; all ranks pass the "
           "same `what`."),
    METHOD(back, METH_VARARGS,
           "back(what, plan, rows, choices): sends the experts' rows back. Collective."),
    METHOD(
        out_each, METH_VARARGS,
        "out_each(what, plan, choices, rows): sends a row of its own to each expert. Collective."),
    METHOD(abort, METH_NOARGS,
           "Ends the group; the other ranks get RankLostError where they wait."),
    METHOD(close, METH_NOARGS, "Leaves the group and frees the buffers. Idempotent."),
    {0},
};

#define FIELD(name, type, field, doc) \
  {#name, type, offsetof(dispatcher_object, field), READONLY, PyDoc_STR(doc)}
static PyMemberDef dispatcher_fields[] = {
    FIELD(num_experts, T_LONGLONG, n_experts, "Of all ranks."),
    FIELD(top_k, T_LONGLONG, top_k, "Experts of a row."),
    FIELD(max_rows, T_LONGLONG, max_rows, "Rows of one plan, of this rank."),
    FIELD(size, T_INT, size, "Ranks."),
    FIELD(rank, T_INT, rank, "This one."),
    {0},
};

#define MEMBER(name, get, closure, doc) \
  {#name, (getter)(void (*)(void))get, NULL, PyDoc_STR(doc), (void *)(closure)}
static PyGetSetDef dispatcher_members[] = {
    MEMBER(experts, dispatcher_experts, 0, "(first, end) of this rank."),
    {0},
};
static PyGetSetDef plan_members[] = {
    MEMBER(num_rows, plan_get, N_ROWS, "Rows of this rank, padding included."),
    MEMBER(num_choices, plan_get, N_CHOICES, "Rows that back gives."),
    MEMBER(num_arrive, plan_get, N_ARRIVE, "Rows that out gives."),
    MEMBER(place, plan_place, 0,
           "int32 [num_rows, top_k]: index of each choice in what back gives; -1: padding."),
    MEMBER(ids, plan_ids, 0, "int32 [rows without padding, top_k]."),
    MEMBER(group_rows, plan_group_rows, 0,
           "int32 [experts here + 1]: where an expert's rows begin."),
    {0},
};

PyMethodDef rm_dispatcher_functions[] = {
    {"dispatchers", dispatchers, METH_VARARGS,
     "(ranks, num_experts, top_k, max_rows, row_bytes, backend, timeout): the Dispatcher of each "
     "rank; ranks are threads."},
    {0},
};

static PyType_Slot dispatcher_slots[] = {
    {Py_tp_new, dispatcher_new},
    {Py_tp_dealloc, dispatcher_dealloc},
    {Py_tp_traverse, dispatcher_traverse},
    {Py_tp_methods, methods},
    {Py_tp_members, dispatcher_fields},
    {Py_tp_getset, dispatcher_members},
    {Py_tp_doc,
     "Dispatcher(comm, num_experts, top_k, max_rows, row_bytes, backend): moves token rows to the "
     "ranks of their experts."},
    {0, NULL},
};
PyType_Spec rm_dispatcher_spec = RM_TYPE("Dispatcher", dispatcher_object, RM_GC, dispatcher_slots);

static PyType_Slot plan_slots[] = {
    {Py_tp_dealloc, plan_dealloc},
    {Py_tp_traverse, plan_traverse},
    {Py_tp_getset, plan_members},
    {Py_tp_doc, "Where the rows of one batch go; of Dispatcher.plan."},
    {0, NULL},
};
PyType_Spec rm_dispatch_plan_spec =
    RM_TYPE("DispatchPlan", plan_object, RM_GC | RM_MADE_HERE, plan_slots);

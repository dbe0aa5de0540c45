// comm.c: groups of ranks in other processes. `_core.attach` joins a shared-memory region and
// returns this rank's endpoint of each group; `_core.Comm(exchange, …)` is a group whose bytes a
// Python function moves (torch.distributed). Python's own messages (a handshake, outputs of other
// replicas) use Comm.all_gather.
#include "comm_object.h"

#include <string.h>

#include "arrays.h"
#include "base/memory.h"
#include "clock.h"
#include "comm/block.h"
#include "engine/groups.h"

typedef struct comm_object {
  PyObject_HEAD
  rm_comm *comm; // owned; NULL: taken by an engine, or closed
  // Owned: (op, sequence, epoch, timeout, [bytes for each rank], [number of bytes from each rank])
  // → [bytes-like]; or NULL.
  PyObject *exchange;
  int size, rank;
  double looked; // rm_now() of the last exchange.look; 0: not called yet
} comm_object;

int rm_comm_take(void *relative, PyObject *object, rm_comm **out) {
  *out = NULL;
  if (object == Py_None) return 0;
  if (!rm_is(relative, object, RM_TYPE_COMM) || !((comm_object *)object)->comm)
    return rm_refuse(RM_E_STATE, "expected a Comm that is open and not in use, got %R", object);
  *out = ((comm_object *)object)->comm;
  ((comm_object *)object)->comm = NULL;
  return 0;
}

void rm_comm_put_back(PyObject *object, rm_comm *comm) {
  if (comm) ((comm_object *)object)->comm = comm;
}

// ------------------------------------------------------------------- a group by a Python function
// The transport's self is the Comm, a view: it outlives its rm_comm (comm_object.h). Garbage
// collection may have cleared `exchange`.
static PyObject *packed(const rm_block *block) {
  PyObject *bytes = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)rm_block_bytes(block));
  if (bytes) rm_block_move(block, 0, PyBytes_AsString(bytes), rm_block_bytes(block), 0);
  return bytes;
}

// Makes the lists of bytes to send and of sizes to receive, with empty entries for this rank.
static void lists_of(const comm_object *c, const rm_block send[], const rm_block recv[],
                     PyObject **sent, PyObject **sizes) {
  *sent = PyList_New(0);
  *sizes = PyList_New(0);
  for (int r = 0; *sent && *sizes && r < c->size; r++) {
    rm_list_put(sent, r == c->rank ? PyBytes_FromStringAndSize(NULL, 0) : packed(&send[r]));
    rm_list_put(sizes, PyLong_FromSize_t(r == c->rank ? 0 : rm_block_bytes(&recv[r])));
  }
}

static int take(const comm_object *c, PyObject *got, const rm_block recv[]) {
  if (PySequence_Size(got) != c->size) {
    if (!PyErr_Occurred())
      PyErr_Format(PyExc_RuntimeError, "exchange: expected %d parts, got %zd", c->size,
                   PySequence_Size(got));
    return -1;
  }
  for (int r = 0; r < c->size && !PyErr_Occurred(); r++) {
    if (r == c->rank) continue;
    Py_buffer view;
    RM_OWNED *part = PySequence_GetItem(got, r);
    if (!part || PyObject_GetBuffer(part, &view, PyBUF_SIMPLE)) return -1;
    const size_t expected = rm_block_bytes(&recv[r]);
    if ((size_t)view.len == expected) rm_block_move(&recv[r], 0, view.buf, expected, 1);
    else
      PyErr_Format(PyExc_RuntimeError, "rank %d: expected %zu bytes, got %zd", r, expected,
                   view.len);
    PyBuffer_Release(&view);
  }
  return PyErr_Occurred() ? -1 : 0;
}

// Returns the code of the pending exception's class; for any other class RM_E_RANK_LOST. A Ctrl-C
// is kept for rm_raise: if it were raised earlier, it could be lost, or keep this rank from
// aborting the group.
static rm_code code_of_exception(rm_error *err) {
  static const rm_code known[] = {RM_E_COLLECTIVE_MISMATCH, RM_E_COLLECTIVE_TIMEOUT,
                                  RM_E_MESH_MISMATCH, RM_E_MEMORY};
  RM_OWNED *type = NULL, *value = NULL, *trace = NULL;
  rm_code code = RM_E_RANK_LOST;
  PyErr_Fetch(&type, &value, &trace);
  for (size_t i = 0; i < RM_LENGTH(known); i++) {
    RM_OWNED *class = rm_error_class(known[i]);
    if (PyErr_GivenExceptionMatches(type, class)) code = known[i];
  }
  const int interrupted = PyErr_GivenExceptionMatches(type, PyExc_KeyboardInterrupt);
  if (interrupted) rm_note_interrupt();
  RM_OWNED *text = value ? PyObject_Str(value) : NULL;
  const char *message = text ? PyUnicode_AsUTF8AndSize(text, NULL) : NULL;
  rm_fail(err, code, "%.400s",
          interrupted ? "the exchange was interrupted"
          : message   ? message
                      : "the exchange failed");
  PyErr_Clear();
  return code;
}

static PyObject *exchanged(const comm_object *c, rm_comm_op op, uint64_t sequence, int64_t epoch,
                           double timeout, const rm_block send[], const rm_block recv[]) {
  RM_OWNED *sent = NULL, *sizes = NULL;
  lists_of(c, send, recv, &sent, &sizes);
  if (!sent || !sizes) return NULL;
  return PyObject_CallFunction(c->exchange, "iKndOO", (int)op, (unsigned long long)sequence, epoch,
                               timeout, sent, sizes);
}

static rm_code call_exchange(void *self, rm_comm_op op, uint64_t sequence, int64_t epoch,
                             double timeout, const rm_block send[], const rm_block recv[],
                             rm_error *err) {
  comm_object *c = self;
  if (!c->exchange)
    return rm_fail(err, RM_E_RANK_LOST, "the exchange of this group was garbage collected");
  const PyGILState_STATE gil = PyGILState_Ensure();
  PyObject *got = exchanged(c, op, sequence, epoch, timeout, send, recv);
  const rm_code code = got && !take(c, got, recv) ? RM_OK : code_of_exception(err);
  Py_XDECREF(got);
  PyGILState_Release(gil);
  return code;
}

// Calls a method of the exchange, if it has it. err: receives its exception; NULL: ignored.
static rm_code call_method(comm_object *c, const char *name, rm_error *err) {
  PyObject *type, *value, *trace;
  rm_code code = RM_OK;
  const PyGILState_STATE gil = PyGILState_Ensure();
  PyErr_Fetch(&type, &value, &trace); // a failed call may have set an exception
  PyObject *method = PyObject_GetAttrString(c->exchange, name),
           *done = method ? PyObject_CallNoArgs(method) : NULL;
  if (method && !done && err) code = code_of_exception(err);
  PyErr_Clear();
  Py_XDECREF(done);
  Py_XDECREF(method);
  PyErr_Restore(type, value, trace);
  PyGILState_Release(gil);
  return code;
}

// Without exchange.abort the other ranks fail at their deadline.
static void call_abort(void *self, rm_code) {
  comm_object *c = self;
  if (c->exchange) call_method(c, "abort", NULL);
}

// Calls exchange.look at most every 100 ms, since each call waits for the GIL.
static rm_code call_look(void *self, rm_error *err) {
  static const double EVERY_SECONDS = 0.1;
  comm_object *c = self;
  const double now = rm_now();
  if (!c->exchange || (c->looked > 0 && now - c->looked < EVERY_SECONDS)) return RM_OK;
  c->looked = now;
  return call_method(c, "look", err);
}

static PyObject *comm_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
  static char *names[] = {"exchange", "rank", "size", NULL};
  PyObject *exchange;
  int rank, size;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Oii:Comm", names, &exchange, &rank, &size))
    return NULL;
  comm_object *self = rm_object_new(type);
  if (!self) return NULL;
  self->exchange = Py_NewRef(exchange);
  self->size = size;
  self->rank = rank;
  const rm_transport transport = {
      .self = self, .exchange = call_exchange, .abort = call_abort, .check = call_look};
  if (RM_FAILS(rm_comm_create(&transport, rank, size, &self->comm, &err))) Py_CLEAR(self);
  return (PyObject *)self;
}

// ------------------------------------------------------------------------------- Python's messages
static int enter(comm_object *self) {
  if (self->comm) return 0;
  return rm_refuse(RM_E_STATE, "expected a Comm that is open and not in use by an engine");
}

static PyObject *comm_all_gather(comm_object *self, PyObject *args) {
  const char *data;
  Py_ssize_t n;
  if (!PyArg_ParseTuple(args, "y#:all_gather", &data, &n) || enter(self)) return NULL;
  const int size = rm_comm_size(self->comm);
  PyObject *out = NULL;
  char *all = NULL;
  int64_t mine = n, *counts = rm_alloc((size_t)size, sizeof *counts);
  size_t total = 0;
  rm_error err = RM_ERROR_INIT;
  rm_code code = counts ? RM_OK : rm_no_memory(&err, "the sizes of the parts", 0);
  Py_BEGIN_ALLOW_THREADS
    if (!code) code = rm_comm_all_gather(self->comm, &mine, counts, sizeof mine, &err);
    for (int r = 0; r < size && !code; r++) total += (size_t)counts[r];
    if (!code && !(all = rm_alloc(total + 1, 1)))
      code = rm_no_memory(&err, "the parts of other ranks", total);
    if (!code && total) code = rm_comm_gather_rows(self->comm, data, all, counts, 1, &err);
  Py_END_ALLOW_THREADS
  if (!code) out = PyList_New(0);
  const char *at = all;
  for (int r = 0; out && r < size; at += counts[r++])
    rm_list_put(&out, PyBytes_FromStringAndSize(at, (Py_ssize_t)counts[r]));
  rm_free(all);
  rm_free(counts);
  return code ? rm_raise(&err) : out;
}

// Converts a tuple of uint8 arrays, one for each rank, to blocks.
static int blocks_of(PyObject *arrays, int size, int flags, rm_block blocks[]) {
  if (arrays && PyTuple_Size(arrays) != size)
    PyErr_Format(PyExc_ValueError, "expected %d arrays, one for each rank, got %zd", size,
                 PyTuple_Size(arrays));
  for (int r = 0; r < size && !PyErr_Occurred(); r++) {
    rm_array_want want = {"bytes of a rank", NPY_UINT8, flags, 1, {-1}};
    void *data;
    if (rm_array_data(PyTuple_GetItem(arrays, r), &want, &data)) break;
    const size_t bytes = (size_t)want.shape[0];
    blocks[r] = (rm_block){data, bytes > 0, bytes, bytes};
  }
  return PyErr_Occurred() ? -1 : 0;
}

static PyObject *comm_all_to_all(comm_object *self, PyObject *args) {
  PyObject *lists[2], *result = NULL;
  if (!PyArg_ParseTuple(args, "OO:all_to_all", &lists[0], &lists[1]) || enter(self)) return NULL;
  // Another thread may change the lists.
  RM_OWNED *give = PySequence_Tuple(lists[0]);
  RM_OWNED *take_into = give ? PySequence_Tuple(lists[1]) : NULL;
  const int size = rm_comm_size(self->comm);
  rm_block *blocks = rm_alloc(2 * (size_t)size, sizeof *blocks);
  if (!blocks) return PyErr_NoMemory();
  if (!blocks_of(give, size, RM_ARRAY_IN, blocks) &&
      !blocks_of(take_into, size, RM_ARRAY_WRITE, blocks + size))
    result = RM_NONE(
        RM_UNLOCKED(rm_comm_exchange(self->comm, RM_COMM_ALL_TO_ALL, blocks, blocks + size, &err)));
  rm_free(blocks);
  return result;
}

static PyObject *comm_set_timeout(comm_object *self, PyObject *seconds) {
  const double value = PyFloat_AsDouble(seconds);
  if ((value == -1.0 && PyErr_Occurred()) || enter(self)) return NULL;
  rm_comm_set_timeout(self->comm, value);
  Py_RETURN_NONE;
}

static PyObject *comm_look(comm_object *self, PyObject *) {
  return enter(self) ? NULL : RM_NONE(rm_comm_check(self->comm, &err));
}

static PyObject *comm_abort(comm_object *self, PyObject *) {
  if (self->comm) rm_comm_abort(self->comm, RM_E_RANK_LOST);
  Py_RETURN_NONE;
}

static PyObject *comm_close(comm_object *self, PyObject *) {
  rm_comm *comm = self->comm;
  if (!comm) Py_RETURN_NONE; // an engine that has taken it still calls the exchange
  self->comm = NULL;
  rm_comm_destroy(comm);
  Py_CLEAR(self->exchange);
  Py_RETURN_NONE;
}

RM_TRAVERSE(comm_traverse, comm_object, self->exchange)

static int comm_clear(PyObject *object) {
  Py_CLEAR(((comm_object *)object)->exchange);
  return 0;
}

static void comm_dealloc(PyObject *object) {
  PyObject_GC_UnTrack(object);
  rm_comm_destroy(((comm_object *)object)->comm);
  comm_clear(object);
  rm_object_free(object);
}

// ---------------------------------------------------------------------------------- shared memory
// (name, rank, nonce, tp, dp, ep, timeout) → (tp, ep, world, control), None for a group of one.
static PyObject *attach(PyObject *module, PyObject *args) {
  const char *name;
  int rank;
  unsigned long long nonce;
  long long tp, dp, ep;
  double timeout;
  rm_mesh mesh;
  rm_comm *ends[RM_N_GROUPS] = {0};
  if (!PyArg_ParseTuple(args, "siKLLLd:attach", &name, &rank, &nonce, &tp, &dp, &ep, &timeout))
    return NULL;
  if (RM_FAILS(rm_mesh_create(tp, dp, ep, &mesh, &err))) return NULL;
  PyObject *out =
      RM_FAILS(RM_UNLOCKED(rm_groups_attach(&mesh, name, rank, nonce, timeout, ends, &err)))
          ? NULL
          : PyTuple_New(RM_N_GROUPS);
  for (int group = 0; group < RM_N_GROUPS; group++) {
    comm_object *end =
        out && ends[group] ? rm_object_new(rm_state(module)->types[RM_TYPE_COMM]) : NULL;
    if (end) end->comm = ends[group];
    else rm_comm_destroy(ends[group]);
    if (ends[group] && !end) Py_CLEAR(out);
    if (out) PyTuple_SetItem(out, group, end ? (PyObject *)end : Py_NewRef(Py_None));
  }
  return out;
}

// --------------------------------------------------------------------------------------- the type
#define METHOD(name, flags) RM_METHOD(#name, comm_##name, flags)
static PyMethodDef methods[] = {
    METHOD(all_gather, METH_VARARGS),
    METHOD(all_to_all, METH_VARARGS),
    METHOD(set_timeout, METH_O),
    METHOD(look, METH_NOARGS),
    METHOD(abort, METH_NOARGS),
    METHOD(close, METH_NOARGS),
    {0},
};

PyMethodDef rm_comm_functions[] = {RM_FUNCTION(attach, VARARGS), {0}};

static PyType_Slot slots[] = {
    {Py_tp_new, comm_new},     {Py_tp_dealloc, comm_dealloc}, {Py_tp_traverse, comm_traverse},
    {Py_tp_clear, comm_clear}, {Py_tp_methods, methods},      {0},
};
PyType_Spec rm_comm_spec = RM_TYPE("Comm", comm_object, RM_GC, slots);

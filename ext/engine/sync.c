// sync.c: weight syncs. A push is a list of SyncEntry objects: a name that was resolved once, and a
// tensor (a DLPack capsule or an array) that was taken once and is held until the engine has read
// it.
#include "engine_object.h"

#include <structmember.h>

#include "attributes.h"
#include "base/memory.h"
#include "tensor.h"
#include "weights/check.h"
#include "weights/resharding.h"

// Returns a key in UTF-8, a view of `name`; NULL with an exception.
static const char *key_of(PyObject *name, size_t *length) {
  Py_ssize_t n = 0;
  if (!PyUnicode_Check(name))
    return rm_raise_code(RM_E_UNEXPECTED_KEY, "expected a name that is a str, got %R",
                         (PyObject *)Py_TYPE(name));
  const char *text = PyUnicode_AsUTF8AndSize(name, &n);
  if (!text && PyErr_ExceptionMatches(PyExc_UnicodeEncodeError))
    rm_raise_code(RM_E_LIMIT, "expected a tensor name in UTF-8, got %.200A", name);
  *length = (size_t)n;
  return text;
}

PyObject *rm_engine_py_sync_begin(rm_engine_object *self, PyObject *args, PyObject *kwargs) {
  static char *names[] = {
      "version",  "cast", "allow_nonfinite", "allow_partial", "allow_bias_removal",
      "in_place", NULL};
  long long version = -1;
  rm_sync_options options = {0};
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "L|$ppppp:sync_begin", names, &version,
                                   &options.cast, &options.allow_nonfinite, &options.allow_partial,
                                   &options.allow_bias_removal, &options.in_place))
    return NULL;
  options.version = version;
  RM_ENTER(self);
  return RM_NONE(RM_UNLOCKED(rm_engine_sync_begin(self->engine, &options, &err)));
}

// ----------------------------------------------------------------------------------------- entries
// _core.SyncEntry: a name of a source, resolved once, and its tensor between sync_take and
// sync_push. The tensor is set and cleared only by the thread that uses the engine.
typedef struct entry_object {
  PyObject_HEAD
  rm_engine_object *engine; // owned; the target's indices refer to its parameters
  PyObject *name; // owned: a str, which entry.name views
  PyObject *params, *shape; // owned: the target's parameters (list), and its shape (tuple)
  PyObject *owner; // owned; keeps the tensor alive; NULL: no tensor
  unsigned long long nbytes; // of the tensor
  char taken; // whether there is a tensor
  rm_entry entry;
} entry_object;

static PyObject *list_of_params(const rm_target *target) {
  PyObject *list = PyList_New(0);
  for (int64_t i = 0; list && i < target->n_pieces; i++)
    rm_list_put(&list, PyLong_FromLongLong(target->pieces[i].param));
  return list;
}

RM_ENGINE_METHOD(sync_resolve, args) {
  PyObject *name;
  int skip_unknown = 0;
  if (!PyArg_ParseTuple(args, "O|p:sync_resolve", &name, &skip_unknown)) return NULL;
  RM_OWNED *object = rm_object_make(self, RM_TYPE_SYNC_ENTRY);
  entry_object *made = (entry_object *)object;
  if (!made || !(made->entry.name = key_of(name, &made->entry.length))) return NULL;
  made->engine = (rm_engine_object *)Py_NewRef((PyObject *)self);
  made->name = Py_NewRef(name);
  if (RM_FAILS(rm_names_resolve(rm_engine_store(self->engine)->params, made->entry.name,
                                made->entry.length, skip_unknown, &made->entry.target, &err)))
    return NULL;
  const rm_target *target = &made->entry.target;
  made->params = list_of_params(target);
  made->shape = rm_tuple_of(target->shape, target->n_pieces ? target->n_dims : 0);
  return made->params && made->shape ? Py_NewRef(object) : NULL;
}

static void drop_tensor(entry_object *self) {
  PyObject *owner = self->owner;
  self->owner = NULL;
  self->nbytes = 0;
  self->taken = 0;
  rm_tensor_release(owner);
}

RM_TRAVERSE(entry_traverse, entry_object, (PyObject *)self->engine, self->owner)

static int entry_clear(PyObject *self) {
  drop_tensor((entry_object *)self);
  return 0;
}

static void entry_dealloc(PyObject *object) {
  PyObject_GC_UnTrack(object);
  entry_object *self = (entry_object *)object;
  drop_tensor(self);
  rm_target_clear(&self->entry.target);
  Py_XDECREF((PyObject *)self->engine);
  Py_XDECREF(self->name);
  Py_XDECREF(self->params);
  Py_XDECREF(self->shape);
  rm_object_free(object);
}

static PyObject *entry_release(entry_object *self, PyObject *) {
  if (rm_engine_enter(self->engine)) return NULL;
  rm_engine_leave(self->engine);
  drop_tensor(self);
  Py_RETURN_NONE;
}

static PyObject *entry_wanted(entry_object *self, PyObject *) {
  rm_engine_object *engine = self->engine;
  const rm_target *target = &self->entry.target;
  RM_ENTER(engine);
  const rm_mesh mesh = rm_engine_mesh(engine->engine);
  _Static_assert(sizeof(rm_part) == 9 * sizeof(int64_t), "a part is a row of the array");
  const int64_t shape[] = {rm_mesh_world(&mesh) * target->n_pieces, 9};
  PyObject *array = rm_array_new(NPY_INT64, 2, shape, NULL);
  if (array)
    rm_list_wanted(rm_engine_store(engine->engine)->params, target, &mesh,
                   PyArray_DATA((PyArrayObject *)array));
  return array;
}

static PyMethodDef entry_methods[] = {
    RM_METHOD("wanted", entry_wanted, METH_NOARGS),
    RM_METHOD("release", entry_release, METH_NOARGS),
    {0},
};

static PyMemberDef entry_members[] = {
    {"name", T_OBJECT_EX, offsetof(entry_object, name), READONLY, NULL},
    {"params", T_OBJECT_EX, offsetof(entry_object, params), READONLY, NULL},
    {"shape", T_OBJECT_EX, offsetof(entry_object, shape), READONLY, NULL},
    {"nbytes", T_ULONGLONG, offsetof(entry_object, nbytes), READONLY, NULL},
    {"taken", T_BOOL, offsetof(entry_object, taken), READONLY, NULL},
    {0},
};

static PyType_Slot entry_slots[] = {
    {Py_tp_dealloc, entry_dealloc}, {Py_tp_traverse, entry_traverse}, {Py_tp_clear, entry_clear},
    {Py_tp_methods, entry_methods}, {Py_tp_members, entry_members},   {0},
};
PyType_Spec rm_sync_entry_spec =
    RM_TYPE("SyncEntry", entry_object, RM_GC | RM_MADE_HERE, entry_slots);

// Returns the object as an entry of this engine, or NULL with an exception set.
static entry_object *entry_of(rm_engine_object *self, PyObject *object) {
  if (rm_is(self, object, RM_TYPE_SYNC_ENTRY) && ((entry_object *)object)->engine == self)
    return (entry_object *)object;
  return rm_raise_code(RM_E_STATE, "expected a SyncEntry of this engine, got %R",
                       (PyObject *)Py_TYPE(object));
}

// -------------------------------------------------------------------- who reads tensors of a GPU
static const rm_device *take_reader(void *engine, PyObject *name, int ordinal) {
  rm_engine_object *self = engine;
  const rm_device *device = NULL;
  rm_error err = RM_ERROR_INIT;
  if (rm_engine_enter(self)) return NULL;
  const rm_code code = rm_engine_ready_queue(self->engine, ordinal, &device, &err);
  if (!code) return device; // give_reader leaves the engine
  rm_engine_leave(self);
  if (code != RM_E_CONFIG) return rm_raise(&err);
  rm_raise_code(RM_E_UNSUPPORTED_TENSOR,
                "%.200U: expected a tensor that this engine can read, got one on cuda:%d: %s", name,
                ordinal, rm_error_message(&err));
  rm_error_clear(&err);
  return NULL;
}

static void give_reader(void *engine) { rm_engine_leave(engine); }

// ---------------------------------------------------------------------------------- take and push
RM_OPEN_METHOD(sync_take, args) {
  PyObject *given, *object, *owner = NULL;
  const rm_tensor_reader reader = {take_reader, give_reader, self};
  if (!PyArg_ParseTuple(args, "OO:sync_take", &given, &object)) return NULL;
  entry_object *entry = entry_of(self, given);
  if (!entry) return NULL;
  rm_tensor tensor;
  if (rm_tensor_from_object(object, entry->name, self->reads_gpus ? &reader : NULL, &tensor,
                            &owner))
    return NULL;
  if (rm_engine_enter(self)) {
    rm_tensor_release(owner);
    return NULL;
  }
  const rm_code code =
      RM_FAILS(rm_sync_check(rm_engine_store(self->engine), &entry->entry, &tensor, &err));
  PyObject *unused = owner;
  if (!code) {
    unused = entry->owner;
    entry->owner = owner;
    entry->entry.tensor = tensor;
    entry->taken = 1;
    entry->nbytes = rm_src_bytes(tensor.dtype);
    for (int i = 0; i < tensor.n_dims; i++) entry->nbytes *= (size_t)tensor.shape[i];
  }
  rm_engine_leave(self);
  rm_tensor_release(unused);
  return code ? NULL : Py_NewRef(Py_None);
}

// Fills `out` with views of the entries of a tuple. Returns −1 with an exception set.
static int entries_of(rm_engine_object *self, PyObject *list, Py_ssize_t n, const rm_entry **out) {
  for (Py_ssize_t i = 0; i < n; i++) {
    const entry_object *entry = entry_of(self, PyTuple_GetItem(list, i));
    if (!entry) return -1;
    if (!entry->taken && entry->entry.target.n_pieces)
      return rm_refuse(RM_E_STATE, "%.200U: expected a tensor taken by sync_take, got none",
                       entry->name);
    out[i] = &entry->entry;
  }
  return 0;
}

// Calls between() while other calls may use the engine. Returns −1 with an exception set.
static int let_others(rm_engine_object *self, PyObject *between) {
  PyObject *type, *value, *trace;
  rm_engine_leave(self);
  RM_OWNED *none = PyObject_CallNoArgs(between);
  PyErr_Fetch(&type, &value, &trace);
  while (rm_engine_enter(self)) {
    if (!self->engine || self->pid != (long)getpid()) return -1;
    PyErr_Clear(); // another thread is inside; the push needs the engine to end
    Py_BEGIN_ALLOW_THREADS
      usleep(50);
    Py_END_ALLOW_THREADS
  }
  PyErr_Restore(type, value, trace);
  return none ? 0 : -1;
}

// Copies the entries in parts of `most` bytes, and calls between() after each part but the last.
// Returns −1 with an exception set.
static int push(rm_engine_object *self, const rm_entry **entries, int64_t n, int64_t most,
                PyObject *between) {
  int is_done = 0;
  rm_code code = RM_FAILS(RM_UNLOCKED(rm_engine_sync_push(self->engine, entries, n, &err)));
  while (!code && !is_done) {
    code = RM_FAILS(RM_UNLOCKED(rm_engine_sync_copy(self->engine, most, &is_done, &err)));
    if (code || is_done || !let_others(self, between)) continue;
    if (self->engine) rm_engine_sync_undo(self->engine);
    return -1;
  }
  return code ? -1 : 0;
}

RM_OPEN_METHOD(sync_push, args) {
  PyObject *given, *between = NULL;
  long long most = INT64_MAX;
  if (!PyArg_ParseTuple(args, "O|LO:sync_push", &given, &most, &between)) return NULL;
  RM_OWNED *list = PySequence_Tuple(given); // another thread may change a list
  int failed = 1;
  if (!list) return NULL;
  const Py_ssize_t n = PyTuple_Size(list);
  // A sync in place that has begun to write allocates nothing for the next tensor.
  const rm_entry *one, **entries = n == 1 ? &one : rm_alloc((size_t)n, sizeof *entries);
  if (!entries) rm_raise_code(RM_E_MEMORY, "no memory for a push of %zd tensors", n);
  if (entries && !rm_engine_enter(self)) {
    failed = entries_of(self, list, n, entries) || push(self, entries, n, most, between);
    if (self->engine) rm_engine_leave(self);
  }
  for (Py_ssize_t i = 0; !failed && i < n; i++)
    drop_tensor((entry_object *)PyTuple_GetItem(list, i));
  if (n != 1) rm_free(entries);
  return failed ? NULL : Py_NewRef(Py_None);
}

#define REPORT(member) RM_MEMBER(rm_sync_report, member)
#define REPORT_AS(name, member) RM_MEMBER_AS(rm_sync_report, name, member)
static const rm_attribute report_fields[] = {
    REPORT(version),
    REPORT_AS(num_tensors, n_tensors),
    REPORT_AS(num_parameters, n_parameters),
    REPORT_AS(num_skipped, n_skipped),
    REPORT(bytes),
    REPORT(seconds),
    REPORT(copy_seconds),
    REPORT(digest),
};

RM_ENGINE_METHOD(sync_commit, word) {
  _Static_assert(RM_INFLIGHT_REFUSE == 0 && RM_INFLIGHT_KEEP_KV == 4, "the order of the words");
  RM_OWNED *words = Py_BuildValue("sssss", "refuse", "restart", "abort", "keep", "keep_kv");
  if (!words) return NULL;
  const Py_ssize_t inflight = PySequence_Index(words, word);
  if (inflight < 0)
    return rm_raise_code(RM_E_CONFIG, "inflight: expected one of %R, got %R", words, word);
  rm_sync_report report;
  if (RM_FAILS(
          RM_UNLOCKED(rm_engine_sync_commit(self->engine, (rm_inflight)inflight, &report, &err))))
    return NULL;
  return rm_attributes_dict(&report, report_fields, RM_LENGTH(report_fields));
}

RM_ENGINE_METHOD(sync_abort, ) {
  rm_engine_sync_abort(self->engine);
  Py_RETURN_NONE;
}

RM_ENGINE_METHOD(sync_state, ) {
  const rm_store *store = rm_engine_store(self->engine);
  const int64_t version = store->version;
  return Py_BuildValue("(NK)", version < 0 ? Py_NewRef(Py_None) : PyLong_FromLongLong(version),
                       (unsigned long long)rm_store_digest(store));
}

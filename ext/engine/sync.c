// sync.c: weight syncs. A tensor (DLPack's capsule or the array) is held while the engine reads it
// without the GIL.
#include "engine_object.h"

#include "attributes.h"
#include "base/memory.h"
#include "tensor.h"
#include "weights/resharding.h"

// A key as UTF-8; *held owns the bytes. Lone surrogates pass, so that the engine can refuse the
// name.
static int key_bytes(PyObject *module, PyObject *name, PyObject **held, const char **text,
                     Py_ssize_t *length) {
  if (!PyUnicode_Check(name)) {
    rm_raise_code(module, RM_E_UNEXPECTED_KEY, "expected a name that is a str, got %R",
                  (PyObject *)Py_TYPE(name));
    return -1;
  }
  char *bytes;
  *held = PyUnicode_AsEncodedString(name, "utf-8", "surrogatepass");
  if (!*held || PyBytes_AsStringAndSize(*held, &bytes, length)) return -1;
  *text = bytes;
  return 0;
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
  if (rm_engine_enter(self)) return NULL;
  rm_error err = RM_ERROR_INIT;
  return rm_engine_finish(self, RM_UNLOCKED(rm_engine_sync_begin(self->engine, &options, &err)),
                          &err);
}

PyObject *rm_engine_py_sync_resolve(rm_engine_object *self, PyObject *name) {
  PyObject *module = rm_engine_module(self), *held = NULL, *list = NULL;
  const char *text;
  Py_ssize_t length;
  rm_target target = {0};
  rm_error err = RM_ERROR_INIT;
  if (key_bytes(module, name, &held, &text, &length)) goto out;
  if (rm_engine_enter(self)) goto out;
  const rm_code code =
      rm_names_resolve(rm_engine_params(self->engine), text, (size_t)length, &target, &err);
  rm_engine_leave(self);
  if (code) {
    rm_raise(module, &err);
    goto out;
  }
  list = PyList_New((Py_ssize_t)target.n_pieces);
  for (int64_t i = 0; list && i < target.n_pieces; i++) {
    PyObject *index = PyLong_FromLongLong(target.pieces[i].param);
    if (!index || PyList_SetItem(list, (Py_ssize_t)i, index)) Py_CLEAR(list);
  }
out:
  rm_target_clear(&target);
  Py_XDECREF(held);
  return list;
}

PyObject *rm_engine_py_sync_wanted(rm_engine_object *self, PyObject *name) {
  PyObject *module = rm_engine_module(self), *held = NULL, *shape = NULL, *array = NULL;
  const char *text;
  Py_ssize_t length;
  rm_target target = {0};
  rm_parts parts = {0};
  rm_error err = RM_ERROR_INIT;
  if (key_bytes(module, name, &held, &text, &length)) goto out;
  if (rm_engine_enter(self)) goto out;
  const rm_params *params = rm_engine_params(self->engine);
  const rm_mesh mesh = rm_engine_mesh(self->engine);
  rm_code code = rm_names_resolve(params, text, (size_t)length, &target, &err);
  if (!code) code = rm_plan_wanted(params, &target, &mesh, &parts, &err);
  rm_engine_leave(self);
  if (code) {
    rm_raise(module, &err);
    goto out;
  }
  shape = rm_tuple_of(target.shape, target.n_dims);
  _Static_assert(sizeof(rm_part) == 9 * sizeof(int64_t), "a part is a row of the array");
  if (shape) array = rm_array_new(NPY_INT64, 2, (const int64_t[]){parts.n, 9}, parts.list);
out:
  rm_parts_clear(&parts);
  rm_target_clear(&target);
  Py_XDECREF(held);
  if (!array) Py_CLEAR(shape);
  return array ? Py_BuildValue("(NN)", shape, array) : NULL;
}

// --------------------------------------------------------------------- who reads tensors of a GPU
static const rm_device *take_reader(void *engine, PyObject *name, int ordinal) {
  rm_engine_object *self = engine;
  PyObject *module = rm_engine_module(self);
  const rm_device *device = NULL;
  rm_error err = RM_ERROR_INIT;
  if (rm_engine_enter(self)) return NULL;
  const rm_code code = rm_engine_ready_queue(self->engine, ordinal, &device, &err);
  if (!code) return device; // the engine is left by give_reader
  rm_engine_leave(self);
  if (code != RM_E_CONFIG) return rm_raise(module, &err), NULL;
  rm_raise_code(module, RM_E_UNSUPPORTED_TENSOR,
                "%.200U: expected a tensor that this engine can read, got one on cuda:%d: %s", name,
                ordinal, rm_error_message(&err));
  rm_error_clear(&err);
  return NULL;
}

static void give_reader(void *engine) { rm_engine_leave(engine); }

static int tensor_of(rm_engine_object *self, PyObject *object, PyObject *name, rm_tensor *tensor,
                     PyObject **owner) {
  const rm_tensor_reader reader = {take_reader, give_reader, self};
  return rm_tensor_from_object(rm_engine_module(self), object, name,
                               self->reads_gpus ? &reader : NULL, tensor, owner);
}

// ------------------------------------------------------------------------------------- tensors in
typedef rm_code (*sync_call)(rm_engine *, const char *, size_t, const rm_tensor *, rm_error *);

static PyObject *with_tensor(rm_engine_object *self, PyObject *name, PyObject *object,
                             sync_call call) {
  PyObject *module = rm_engine_module(self), *key = NULL, *owner = NULL, *result = NULL;
  const char *text;
  Py_ssize_t length;
  rm_tensor tensor;
  rm_error err = RM_ERROR_INIT;
  if (key_bytes(module, name, &key, &text, &length)) goto out;
  if (tensor_of(self, object, name, &tensor, &owner)) goto out;
  if (rm_engine_enter(self)) goto out;
  const rm_code code = RM_UNLOCKED(call(self->engine, text, (size_t)length, &tensor, &err));
  rm_engine_leave(self);
  if (code) rm_raise(module, &err);
  else result = Py_NewRef(Py_None);
out:
  rm_tensor_release(owner);
  Py_XDECREF(key);
  return result;
}

PyObject *rm_engine_py_sync_check(rm_engine_object *self, PyObject *args) {
  PyObject *name, *tensor;
  if (!PyArg_ParseTuple(args, "OO:sync_check", &name, &tensor)) return NULL;
  return with_tensor(self, name, tensor, rm_engine_sync_check);
}

PyObject *rm_engine_py_sync_push(rm_engine_object *self, PyObject *args) {
  PyObject *name, *tensor;
  if (!PyArg_ParseTuple(args, "OO:sync_push", &name, &tensor)) return NULL;
  return with_tensor(self, name, tensor, rm_engine_sync_push);
}

// What an entry views; both owned.
typedef struct held_pair {
  PyObject *key, *owner;
} held_pair;

static int hold_pair(rm_engine_object *self, PyObject *pair, held_pair *held, rm_entry *entry) {
  PyObject *module = rm_engine_module(self);
  PyObject *name, *object;
  Py_ssize_t length;
  if (!PyArg_ParseTuple(pair, "OO:sync_push_all", &name, &object)) return -1;
  if (key_bytes(module, name, &held->key, &entry->name, &length)) return -1;
  entry->length = (size_t)length;
  return tensor_of(self, object, name, &entry->tensor, &held->owner);
}

PyObject *rm_engine_py_sync_push_all(rm_engine_object *self, PyObject *pairs) {
  PyObject *module = rm_engine_module(self), *result = NULL;
  PyObject *list =
      PySequence_Tuple(pairs); // ours: a producer's code may change a list while it is walked
  if (!list) return NULL;
  const Py_ssize_t n = PyTuple_Size(list);
  held_pair *held = rm_alloc((size_t)n, sizeof *held);
  rm_entry *entries = rm_alloc((size_t)n, sizeof *entries);
  if (!held || !entries) {
    rm_raise_code(module, RM_E_MEMORY, "no memory for a push of %zd tensors", n);
    goto out;
  }
  for (Py_ssize_t i = 0; i < n; i++) {
    PyObject *pair = PyTuple_GetItem(list, i);
    if (!PyTuple_Check(pair)) {
      rm_raise_code(module, RM_E_UNSUPPORTED_TENSOR, "expected a tuple (name, tensor), got %R",
                    (PyObject *)Py_TYPE(pair));
      goto out;
    }
    if (hold_pair(self, pair, &held[i], &entries[i])) goto out;
  }
  if (rm_engine_enter(self)) goto out;
  rm_error err = RM_ERROR_INIT;
  const rm_code code = RM_UNLOCKED(rm_engine_sync_push_all(self->engine, entries, n, &err));
  rm_engine_leave(self);
  if (code) rm_raise(module, &err);
  else result = Py_NewRef(Py_None);
out:
  for (Py_ssize_t i = 0; held && i < n; i++) {
    rm_tensor_release(held[i].owner);
    Py_XDECREF(held[i].key);
  }
  rm_free(entries);
  rm_free(held);
  Py_DECREF(list);
  return result;
}

static int choose_inflight(PyObject *module, PyObject *word, rm_inflight *out) {
  static const char *const words[] = {"refuse", "restart", "abort", "keep", "keep_kv"};
  _Static_assert(RM_INFLIGHT_REFUSE == 0 && RM_INFLIGHT_KEEP_KV == 4,
                 "words are in the order of rm_inflight");
  for (int i = 0; i < 5; i++) {
    *out = (rm_inflight)i;
    if (PyUnicode_Check(word) && PyUnicode_CompareWithASCIIString(word, words[i]) == 0) return 0;
  }
  rm_raise_code(module, RM_E_CONFIG,
                "expected inflight to be refuse, restart, abort, keep or keep_kv, got %R", word);
  return -1;
}

#define REPORT(key, type, member) {key, type, offsetof(rm_sync_report, member)}
static const rm_attribute report_fields[] = {
    REPORT("version", RM_ATTR_I64, version),
    REPORT("num_tensors", RM_ATTR_I64, n_tensors),
    REPORT("num_parameters", RM_ATTR_I64, n_parameters),
    REPORT("num_skipped", RM_ATTR_I64, n_skipped),
    REPORT("bytes", RM_ATTR_U64, bytes),
    REPORT("seconds", RM_ATTR_F64, seconds),
    REPORT("copy_seconds", RM_ATTR_F64, copy_seconds),
    REPORT("digest", RM_ATTR_U64, digest),
};

PyObject *rm_engine_py_sync_commit(rm_engine_object *self, PyObject *word) {
  PyObject *module = rm_engine_module(self);
  rm_inflight inflight;
  if (choose_inflight(module, word, &inflight) || rm_engine_enter(self)) return NULL;
  rm_sync_report report;
  rm_error err = RM_ERROR_INIT;
  const rm_code code = RM_UNLOCKED(rm_engine_sync_commit(self->engine, inflight, &report, &err));
  rm_engine_leave(self);
  return code ? rm_raise(module, &err)
              : rm_attributes_dict(&report, report_fields, RM_LENGTH(report_fields));
}

PyObject *rm_engine_py_sync_abort(rm_engine_object *self, PyObject *ignored) {
  (void)ignored;
  return rm_engine_call(self, rm_engine_sync_abort);
}

PyObject *rm_engine_py_sync_state(rm_engine_object *self, PyObject *ignored) {
  (void)ignored;
  if (rm_engine_enter(self)) return NULL;
  const rm_store *store = rm_engine_store(self->engine);
  const int64_t version = rm_store_version(store);
  const uint64_t digest = rm_store_digest(store);
  const int open = rm_store_is_open(store), complete = open && rm_sync_complete(store);
  rm_engine_leave(self);
  return Py_BuildValue("(NKOO)", version < 0 ? Py_NewRef(Py_None) : PyLong_FromLongLong(version),
                       (unsigned long long)digest, open ? Py_True : Py_False,
                       complete ? Py_True : Py_False);
}

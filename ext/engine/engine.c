// engine.c: creation, requests and steps of _core.Engine. A method converts its arguments, releases
// the GIL if the engine computes, and turns a failing rm_code into an exception. Policy (defaults,
// queues, stop strings) is in Python.
#include "engine_object.h"

#include <unistd.h>

#include "attributes.h"
#include "base/memory.h"
#include "comm/comm_object.h"
#include "spec.h"

int rm_engine_enter(rm_engine_object *self) {
  if (self->pid != (long)getpid())
    return rm_refuse(RM_E_STATE,
                     "this generator belongs to process %ld; a forked child has to make its own",
                     self->pid);
  if (!self->engine) return rm_refuse(RM_E_STATE, "the generator is closed");
  if (atomic_exchange(&self->busy, 1)) {
    return rm_refuse(RM_E_STATE, "another thread is inside the engine; one call at a time");
  }
  return 0;
}

void rm_engine_leave(rm_engine_object *self) { atomic_store(&self->busy, 0); }

int rm_engine_id(PyObject *argument, uint64_t *id) {
  *id = PyLong_AsUnsignedLongLong(argument);
  return *id == (uint64_t)-1 && PyErr_Occurred() ? -1 : 0;
}

// -------------------------------------------------------------------------------- create, destroy
// given: (rank, tp, ep, world). The engine takes the Comms; if it cannot be made, they get their
// ends back.
static int make_engine(rm_engine_object *self, PyObject *object) {
  rm_engine_options options;
  rm_endpoints ends = {0};
  PyObject *comms[3];
  rm_comm **const places[3] = {&ends.tp, &ends.ep, &ends.world};
  RM_OWNED *held = rm_engine_options_read(object, &options);
  int n = 0;
  if (!held) return -1;
  if (self->ends != Py_None) {
    if (!PyArg_ParseTuple(self->ends, "iOOO:ends", &ends.index, &comms[0], &comms[1], &comms[2]))
      return -1;
    while (n < 3 && !rm_comm_take(self, comms[n], places[n])) n++;
    options.endpoints = &ends;
  }
  if (!PyErr_Occurred() &&
      !RM_FAILS(RM_UNLOCKED(rm_engine_create(self->spec, &options, &self->engine, &err))))
    return 0;
  while (n-- > 0) rm_comm_put_back(comms[n], *places[n]);
  return -1;
}

static PyObject *engine_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
  static char *names[] = {"spec", "options", "ends", NULL};
  PyObject *spec, *options, *ends = Py_None;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|O:Engine", names, &spec, &options, &ends))
    return NULL;
  rm_engine_object *self = rm_object_new(type);
  if (!self) return NULL;
  self->pid = (long)getpid();
  self->requests = PyDict_New();
  self->ends = Py_NewRef(ends);
  if (self->requests && (self->spec = rm_spec_from_python(spec)) && !make_engine(self, options)) {
    self->reads_gpus = rm_engine_reads_gpus(self->engine);
    return (PyObject *)self;
  }
  Py_DECREF(self);
  return NULL;
}

// Frees the engine, except in a forked child, which does not have the engine's threads.
static void destroy(rm_engine_object *self) {
  rm_engine *engine = self->engine;
  rm_spec *spec = self->spec;
  self->engine = NULL;
  self->spec = NULL;
  if (self->pid != (long)getpid()) return;
  Py_BEGIN_ALLOW_THREADS
    rm_engine_destroy(engine);
    rm_spec_destroy(spec);
  Py_END_ALLOW_THREADS
  Py_CLEAR(self->ends);
}

RM_TRAVERSE(engine_traverse, rm_engine_object, self->requests, self->ends)

// Does not clear the Comms, which the engine needs; a cycle through a Comm is broken in comm.c.
static int engine_clear(PyObject *object) {
  Py_CLEAR(((rm_engine_object *)object)->requests);
  return 0;
}

static void engine_dealloc(PyObject *object) {
  PyObject_GC_UnTrack(object);
  destroy((rm_engine_object *)object); // before the arrays that it may write to
  engine_clear(object);
  Py_CLEAR(((rm_engine_object *)object)->ends);
  rm_object_free(object);
}

RM_OPEN_METHOD(close, ) {
  if (!self->engine) Py_RETURN_NONE;
  if (self->pid == (long)getpid() && rm_engine_enter(self)) return NULL;
  destroy(self);
  PyDict_Clear(self->requests);
  rm_engine_leave(self);
  Py_RETURN_NONE;
}

// --------------------------------------------------------------------------------------- requests
#define REQUEST(member) RM_MEMBER(rm_request, member)
#define REQUEST_BOOL(member) RM_ATTRIBUTE(rm_request, BOOL, member)
static const rm_attribute request_fields[] = {
    REQUEST(n),
    REQUEST(max_tokens),
    REQUEST(min_tokens),
    REQUEST(temperature),
    REQUEST(top_p),
    REQUEST(min_p),
    REQUEST(top_k),
    REQUEST_BOOL(has_seed),
    REQUEST(seed),
    REQUEST_BOOL(ignore_eos),
    REQUEST(logprobs),
    REQUEST(prompt_logprobs),
    RM_ATTRIBUTE_AS(rm_request, BOOL, score, kind),
    REQUEST_BOOL(score_sampling),
    REQUEST_BOOL(ranks),
    REQUEST_BOOL(external_draws),
    REQUEST_BOOL(kept_tokens),
    REQUEST(repetition_penalty),
    REQUEST(frequency_penalty),
    REQUEST(presence_penalty),
};
_Static_assert(RM_GENERATE == 0 && RM_SCORE == 1 && sizeof(rm_request_kind) == sizeof(int),
               "`score` is read as the kind");

// edits: (bias_ids, biases, banned, bad_words, bad_word_ends), or None. The request gets views of
// the arrays.
static int read_edits(PyObject *edits, rm_request *request) {
  PyObject *bias_ids, *biases, *banned, *words, *ends;
  int64_t n_words;
  void *data;
  if (edits == Py_None) return 0;
  if (!PyArg_ParseTuple(edits, "OOOOO:edits", &bias_ids, &biases, &banned, &words, &ends))
    return -1;
  if (rm_array_ids(bias_ids, "logit_bias", &request->bias_ids, &request->n_biases)) return -1;
  rm_array_want want = {"logit_bias", NPY_FLOAT32, 0, 1, {request->n_biases}};
  if (rm_array_data(biases, &want, &data) ||
      rm_array_ids(banned, "banned", &request->banned, &request->n_banned) ||
      rm_array_ids(words, "bad_words", &request->bad_words, &n_words) ||
      rm_array_ids(ends, "bad_words", &request->bad_word_ends, &request->n_bad_words))
    return -1;
  request->biases = data;
  if (request->n_bad_words == 0 || request->bad_word_ends[request->n_bad_words - 1] == n_words)
    return 0;
  return rm_refuse(RM_E_REQUEST, "bad_words: expected the last to end at %zd, got %d", n_words,
                   request->bad_word_ends[request->n_bad_words - 1]);
}

RM_ENGINE_METHOD(add, args) {
  PyObject *prompt, *stop_ids, *object, *logits, *edits = Py_None;
  if (!PyArg_ParseTuple(args, "OOOO|O:add", &prompt, &stop_ids, &object, &logits, &edits))
    return NULL;
  rm_request request = {0};
  uint64_t id;
  void *data;
  if (rm_attributes_read(object, request_fields, RM_LENGTH(request_fields), &request, NULL) ||
      rm_array_ids(prompt, "prompt", &request.prompt, &request.n_prompt) ||
      rm_array_ids(stop_ids, "stop_token_ids", &request.stop_ids, &request.n_stop_ids) ||
      read_edits(edits, &request))
    return NULL;
  const int64_t vocab = self->spec->vocab_size;
  rm_array_want want = {
      "logits", NPY_FLOAT32, RM_ARRAY_WRITE | RM_ARRAY_OPTIONAL, 2, {request.n_prompt, vocab}};
  if (rm_array_data(logits, &want, &data)) return NULL;
  request.logits_out = data;
  if (RM_FAILS(rm_engine_add(self->engine, &request, &id, &err))) return NULL;
  rm_scheduler *scheduler = rm_engine_scheduler(self->engine, id);
  PyObject *key = PyLong_FromUnsignedLongLong(id);
  if (key && (!rm_find_sequence_group(scheduler, id, NULL) ||
              !PyDict_SetItem(self->requests, key, logits)))
    return key;
  // Without an owner of the logits array the request must not write to it.
  Py_XDECREF(key);
  if (!rm_scheduler_abort(scheduler, id, NULL)) rm_scheduler_release(scheduler, id, NULL);
  return NULL;
}

PyObject *rm_engine_call_with_id(rm_engine_object *self, PyObject *argument, rm_id_call call) {
  uint64_t id;
  RM_ENTER(self);
  if (rm_engine_id(argument, &id)) return NULL;
  return RM_NONE(call(rm_engine_scheduler(self->engine, id), id, &err));
}

RM_OPEN_METHOD(abort, id) { return rm_engine_call_with_id(self, id, rm_scheduler_abort); }

RM_OPEN_METHOD(release, id) {
  PyObject *none = rm_engine_call_with_id(self, id, rm_scheduler_release);
  if (none && PyDict_DelItem(self->requests, id)) Py_CLEAR(none);
  return none;
}

RM_ENGINE_METHOD(stop_sample, args) {
  unsigned long long id;
  int sample;
  long long n_tokens;
  if (!PyArg_ParseTuple(args, "KiL:stop_sample", &id, &sample, &n_tokens)) return NULL;
  rm_scheduler *scheduler = rm_engine_scheduler(self->engine, id);
  return RM_NONE(rm_scheduler_stop_sample(scheduler, id, sample, n_tokens, &err));
}

// ------------------------------------------------------------------------------------------ steps
RM_ENGINE_METHOD(step, ) {
  int64_t n_work = 0;
  if (RM_FAILS(RM_UNLOCKED(rm_engine_step(self->engine, NULL, &n_work, &err)))) return NULL;
  return PyLong_FromLongLong(n_work);
}

RM_ENGINE_METHOD(give_up, ) {
  rm_engine_abort_groups(self->engine);
  Py_RETURN_NONE;
}

RM_ENGINE_METHOD(has, id) {
  const int found = PyDict_Contains(self->requests, id);
  return found < 0 ? NULL : PyBool_FromLong(found);
}

RM_ENGINE_METHOD(unfinished, ) { return PyLong_FromLongLong(rm_engine_unfinished(self->engine)); }

RM_ENGINE_METHOD(finished, ) {
  const Py_ssize_t most = PyDict_Size(self->requests);
  uint64_t *ids = PyMem_New(uint64_t, (size_t)most);
  PyObject *set = ids ? PySet_New(NULL) : PyErr_NoMemory();
  const int64_t n = set ? rm_engine_finished(self->engine, ids, most) : 0;
  for (int64_t i = 0; i < n && set; i++) {
    RM_OWNED *id = PyLong_FromUnsignedLongLong(ids[i]);
    if (!id || PySet_Add(set, id)) Py_CLEAR(set);
  }
  PyMem_Free(ids);
  return set;
}

RM_ENGINE_METHOD(ids, ) { return PyDict_Keys(self->requests); }

RM_ENGINE_METHOD(reset_prefix_cache, ) {
  rm_engine_reset_prefix_cache(self->engine);
  Py_RETURN_NONE;
}

static PyObject *change_parts(rm_engine_object *self, PyObject *parts,
                              rm_code (*change)(rm_engine *, unsigned, rm_error *)) {
  RM_ENTER(self);
  const unsigned long mask = PyLong_AsUnsignedLong(parts);
  if (mask == (unsigned long)-1 && PyErr_Occurred()) return NULL;
  return RM_NONE(RM_UNLOCKED(change(self->engine, (unsigned)mask, &err)));
}

RM_OPEN_METHOD(sleep, parts) { return change_parts(self, parts, rm_engine_sleep); }
RM_OPEN_METHOD(wake, parts) { return change_parts(self, parts, rm_engine_wake); }

RM_ENGINE_METHOD(offload_weights, offload) {
  const int value = PyObject_IsTrue(offload);
  if (value < 0) return NULL;
  if (value) return RM_NONE(RM_UNLOCKED(rm_engine_offload_weights(self->engine, &err)));
  Py_BEGIN_ALLOW_THREADS
    rm_engine_free_offloaded(self->engine);
  Py_END_ALLOW_THREADS
  Py_RETURN_NONE;
}

RM_ENGINE_METHOD(host_room, ) {
  const unsigned long long bytes = rm_engine_offload_bytes(self->engine);
  PyObject *list = rm_memory_pool_list("");
  return list ? Py_BuildValue("(KN)", bytes, list) : NULL;
}

// ------------------------------------------------------------------------------------------- type
#define METHOD(name, flags) RM_METHOD(#name, rm_engine_py_##name, METH_##flags),
static PyMethodDef methods[] = {
    RM_ENGINE_METHODS(METHOD)
        RM_METHOD("sync_begin", rm_engine_py_sync_begin, METH_VARARGS | METH_KEYWORDS),
    {0},
};

static PyType_Slot slots[] = {
    {Py_tp_new, engine_new},     {Py_tp_dealloc, engine_dealloc}, {Py_tp_traverse, engine_traverse},
    {Py_tp_clear, engine_clear}, {Py_tp_methods, methods},        {0},
};
PyType_Spec rm_engine_spec = RM_TYPE("Engine", rm_engine_object, RM_GC, slots);

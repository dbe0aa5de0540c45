// views.c: copies results into new arrays, since the engine's views are valid only until the next
// step.
#include "engine_object.h"

#include "attributes.h"
#include "weights/names.h"

static const char *finish_name(rm_finish finish) {
  switch (finish) {
    case RM_FINISH_STOP: return "stop";
    case RM_FINISH_LENGTH: return "length";
    case RM_FINISH_ABORT: return "abort";
    case RM_FINISH_ERROR: return "error";
    default: return NULL;
  }
}

static PyObject *finish_object(rm_finish finish) {
  const char *name = finish_name(finish);
  return name ? PyUnicode_FromString(name) : Py_NewRef(Py_None);
}

// Adds a value to the dict and releases the reference. Returns −1 if it is NULL or cannot be added.
static int put(PyObject *dict, const char *key, PyObject *value) {
  const int failed = !value || PyDict_SetItemString(dict, key, value);
  Py_XDECREF(value);
  return failed ? -1 : 0;
}

// Reads the prompt_logprobs with which the request was added: the width of the view's arrays.
static int asked_for(rm_engine_object *self, PyObject *id, int *prompt_logprobs) {
  PyObject *record = PyDict_GetItemWithError(self->requests, id), *logits;
  if (record) return PyArg_ParseTuple(record, "iO", prompt_logprobs, &logits) ? 0 : -1;
  if (!PyErr_Occurred())
    rm_raise_code(rm_engine_module(self), RM_E_STATE, "there is no request %S", id);
  return -1;
}

static PyObject *error_object(rm_engine_object *self, const rm_request_view *view) {
  if (!view->error) return Py_NewRef(Py_None);
  const char *message = view->message ? view->message : rm_code_name(view->error);
  PyObject *type = rm_state(rm_engine_module(self))->errors[view->error];
  return PyObject_CallFunction(type, "s", message);
}

typedef struct record { // [n], or [n][top]
  const char *key;
  const void *data;
  int type, has_top, optional; // optional: None without data
} record;

static int put_records(PyObject *dict, const record *records, size_t n_records, int64_t n,
                       int64_t top) {
  const int64_t shape[2] = {n, top};
  for (size_t i = 0; i < n_records; i++) {
    const record *r = &records[i];
    const void *data = r->has_top && top <= 0 ? NULL : r->data;
    if (put(dict, r->key,
            data || !r->optional ? rm_array_new(r->type, 1 + r->has_top, shape, data)
                                 : Py_NewRef(Py_None)))
      return -1;
  }
  return 0;
}

// Adds n rows of the routing, or None.
static int put_routed(rm_engine_object *self, PyObject *dict, const char *key, int has_routing,
                      const void *ids, int64_t n) {
  const int64_t shape[3] = {n, self->spec->n_moe_layers, self->spec->top_k};
  return put(dict, key,
             has_routing ? rm_array_new(NPY_INT16, 3, shape, n ? ids : NULL) : Py_NewRef(Py_None));
}

static int put_prompt(rm_engine_object *self, PyObject *dict, const rm_request_view *view,
                      int top) {
  const record records[] = {
      {"prompt_logprobs", view->prompt_logprobs, NPY_FLOAT32, 0, 1},
      {"prompt_sampling_logprobs", view->prompt_sampling_logprobs, NPY_FLOAT32, 0, 1},
      {"prompt_ranks", view->prompt_ranks, NPY_INT32, 0, 1},
      {"prompt_top_ids", view->prompt_top_ids, NPY_INT32, 1, 1},
      {"prompt_top_logprobs", view->prompt_top_logprobs, NPY_FLOAT32, 1, 1},
  };
  if (put_records(dict, records, RM_LENGTH(records), view->n_prompt - 1, top)) return -1;
  // Only for finished requests: a stream would otherwise copy this largest record after each step.
  return put_routed(self, dict, "prompt_routed", view->finished && view->prompt_routed,
                    view->prompt_routed, view->n_prompt);
}

static PyObject *times_object(const rm_request_times *times) {
  return Py_BuildValue("(dddd)", times->queued, times->scheduled, times->first_token,
                       times->last_token);
}

PyObject *rm_engine_py_request(rm_engine_object *self, PyObject *argument) {
  uint64_t id;
  int prompt_logprobs;
  rm_request_view view;
  rm_error err = RM_ERROR_INIT;
  if (rm_engine_id(argument, &id) || asked_for(self, argument, &prompt_logprobs)) return NULL;
  if (rm_scheduler_view(rm_engine_scheduler(self->engine, id), id, &view, &err))
    return rm_raise(rm_engine_module(self), &err);
  PyObject *dict = PyDict_New();
  if (dict &&
      (put(dict, "finished", PyBool_FromLong(view.finished)) ||
       put(dict, "error", error_object(self, &view)) ||
       put(dict, "num_cached_tokens", PyLong_FromLongLong(view.n_cached)) ||
       put(dict, "num_scored", PyLong_FromLongLong(view.n_scored)) ||
       put(dict, "n", PyLong_FromLong(view.n)) || put(dict, "times", times_object(&view.times)) ||
       put_prompt(self, dict, &view, prompt_logprobs)))
    Py_CLEAR(dict);
  return dict;
}

// args: (id, sample), or (id, sample, start).
static int read_sample(rm_engine_object *self, PyObject *args, const char *format,
                       rm_sample_view *view, long long *start) {
  unsigned long long id;
  int sample;
  rm_error err = RM_ERROR_INIT;
  if (!PyArg_ParseTuple(args, format, &id, &sample, start)) return -1;
  if (!rm_scheduler_sample_view(rm_engine_scheduler(self->engine, id), id, sample, view, &err))
    return 0;
  rm_raise(rm_engine_module(self), &err);
  return -1;
}

static int put_sample(rm_engine_object *self, PyObject *dict, const rm_sample_view *view) {
  const int64_t n = view->n_tokens;
  const record records[] = {
      {"token_ids", view->tokens, NPY_INT32, 0, 0},
      {"logprobs", view->logprobs, NPY_FLOAT32, 0, 0},
      {"sampling_logprobs", view->sampling_logprobs, NPY_FLOAT32, 0, 0},
      {"versions", view->versions, NPY_INT64, 0, 0},
      {"no_contract", view->no_contract, NPY_UINT8, 0, 0},
      {"ranks", view->ranks, NPY_INT32, 0, 1},
      {"top_ids", view->top_ids, NPY_INT32, 1, 1},
      {"top_logprobs", view->top_logprobs, NPY_FLOAT32, 1, 1},
      {"kept", view->kept, NPY_INT32, 0, 1},
  };
  if (put(dict, "finish", finish_object(view->finish)) ||
      put(dict, "stop_token", PyLong_FromLong(view->stop_token)) ||
      put_records(dict, records, RM_LENGTH(records), n, view->n_top))
    return -1;
  const int has_routing = self->spec->n_moe_layers && view->finish != RM_RUNNING;
  return put_routed(self, dict, "routed", has_routing, view->routed, n > 0 ? n - 1 : 0);
}

PyObject *rm_engine_py_sample(rm_engine_object *self, PyObject *args) {
  rm_sample_view view;
  if (read_sample(self, args, "Ki:sample", &view, NULL)) return NULL;
  PyObject *dict = PyDict_New();
  if (dict && put_sample(self, dict, &view)) Py_CLEAR(dict);
  return dict;
}

PyObject *rm_engine_py_tokens(rm_engine_object *self, PyObject *args) {
  rm_sample_view view;
  long long start;
  if (read_sample(self, args, "KiL:tokens", &view, &start)) return NULL;
  const int64_t from = rm_min64(rm_max64(start, 0), view.n_tokens),
                shape[1] = {view.n_tokens - from};
  return Py_BuildValue("(NN)", finish_object(view.finish),
                       rm_array_new(NPY_INT32, 1, shape, shape[0] ? view.tokens + from : NULL));
}

#define STAT(key, type, member) {key, type, offsetof(rm_engine_stats, member)}
static const rm_attribute stats_fields[] = {
    STAT("version", RM_ATTR_I64, version),
    STAT("waiting", RM_ATTR_I64, waiting),
    STAT("running", RM_ATTR_I64, running),
    STAT("steps", RM_ATTR_I64, steps),
    STAT("rows", RM_ATTR_I64, rows),
    STAT("generated_tokens", RM_ATTR_I64, generated_tokens),
    STAT("prompt_tokens", RM_ATTR_I64, prompt_tokens),
    STAT("cached_tokens", RM_ATTR_I64, cached_tokens),
    STAT("preemptions", RM_ATTR_I64, preemptions),
    STAT("graph_replays", RM_ATTR_I64, replays),
    STAT("kv_pages", RM_ATTR_I64, kv_pages),
    STAT("kv_pages_free", RM_ATTR_I64, kv_pages_free),
    STAT("prefix_hits", RM_ATTR_I64, prefix_hits),
    STAT("prefix_misses", RM_ATTR_I64, prefix_misses),
    STAT("evictions", RM_ATTR_I64, evictions),
    STAT("weight_bytes", RM_ATTR_U64, weight_bytes),
    STAT("kv_bytes", RM_ATTR_U64, kv_bytes),
    STAT("workspace_bytes", RM_ATTR_U64, workspace_bytes),
    STAT("threads", RM_ATTR_INT, n_threads),
    STAT("asleep", RM_ATTR_INT, asleep),
    STAT("device", RM_ATTR_TEXT, device),
    STAT("isa", RM_ATTR_TEXT, isa),
    STAT("family", RM_ATTR_TEXT, family),
    STAT("forward_seconds", RM_ATTR_F64, forward_seconds),
    STAT("schedule_seconds", RM_ATTR_F64, schedule_seconds),
    STAT("commit_seconds", RM_ATTR_F64, commit_seconds),
    STAT("comm_bytes", RM_ATTR_U64, comm_bytes),
    STAT("comm_calls", RM_ATTR_I64, comm_calls),
    STAT("comm_seconds", RM_ATTR_F64, comm_seconds),
};

PyObject *rm_engine_py_stats(rm_engine_object *self) {
  rm_engine_stats stats;
  rm_engine_statistics(self->engine, &stats);
  return rm_attributes_dict(&stats, stats_fields, RM_LENGTH(stats_fields));
}

static const rm_attribute profile_fields[] = {
    {"op", RM_ATTR_TEXT, offsetof(rm_profile_entry, op)},
    {"n", RM_ATTR_I64, offsetof(rm_profile_entry, n)},
    {"k", RM_ATTR_I64, offsetof(rm_profile_entry, k)},
    {"calls", RM_ATTR_I64, offsetof(rm_profile_entry, calls)},
    {"rows", RM_ATTR_I64, offsetof(rm_profile_entry, rows)},
    {"seconds", RM_ATTR_F64, offsetof(rm_profile_entry, seconds)},
    {"waited", RM_ATTR_F64, offsetof(rm_profile_entry, waited)},
    {"flops", RM_ATTR_F64, offsetof(rm_profile_entry, flops)},
    {"weight_bytes", RM_ATTR_F64, offsetof(rm_profile_entry, weight_bytes)},
};

// Returns the times of rank 0 of this process since the last call.
PyObject *rm_engine_py_profile(rm_engine_object *self) {
  rm_profile *profile = rm_engine_profile(self->engine);
  PyObject *list = PyList_New(0);
  for (int i = 0; list && profile && i < profile->n_entries; i++) {
    PyObject *entry =
        rm_attributes_dict(&profile->entries[i], profile_fields, RM_LENGTH(profile_fields));
    if (!entry || PyList_Append(list, entry)) Py_CLEAR(list);
    Py_XDECREF(entry);
  }
  if (list && profile) rm_profile_reset(profile);
  return list;
}

static PyObject *manifest_entry(const rm_params *params, const rm_param *param) {
  char name[256];
  rm_param_name(params, param, name, sizeof name);
  PyObject *shape = param->n_dims == 1
                        ? Py_BuildValue("(L)", (long long)param->cols)
                        : Py_BuildValue("(LL)", (long long)param->rows, (long long)param->cols);
  return Py_BuildValue("(sNsO)", name, shape, param->dtype == RM_BF16 ? "bfloat16" : "float32",
                       param->required ? Py_True : Py_False);
}

PyObject *rm_engine_py_manifest(rm_engine_object *self) {
  const rm_params *params = rm_engine_params(self->engine);
  PyObject *list = PyList_New((Py_ssize_t)params->n);
  for (int64_t i = 0; list && i < params->n; i++) {
    PyObject *entry = manifest_entry(params, &params->list[i]);
    if (!entry || PyList_SetItem(list, (Py_ssize_t)i, entry)) Py_CLEAR(list);
  }
  return list;
}

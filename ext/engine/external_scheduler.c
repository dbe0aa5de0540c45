// external_scheduler.c: csrc/scheduler/external_scheduler.h over arrays. A step of n requests is arrays of n numbers in and out,
// so that the Python layer has no work for each request.
#include "engine_object.h"

#include <string.h>

#include "base/memory.h"

typedef struct columns { // of a step, views of the caller's arrays
  int64_t n;
  const uint64_t *ids;
  const int64_t *computed, *rows, *page_counts;
  const uint8_t *replace;
  const int32_t *pages;
  int64_t n_pages;
} columns;

static int read_columns(PyObject *module, PyObject *const objects[6], columns *c) {
  static const char *const names[] = {"ids", "computed", "rows", "replace", "page_counts", "pages"};
  static const int types[] = {NPY_UINT64, NPY_INT64, NPY_INT64, NPY_UINT8, NPY_INT64, NPY_INT32};
  void *data[6];
  int64_t n = -1, total = 0;
  for (int i = 0; i < 6; i++) {
    rm_array_want want = {names[i], types[i], 0, 1, {i == 5 ? -1 : n}};
    if (rm_array_data(module, objects[i], &want, &data[i])) return -1;
    if (i == 0) n = want.shape[0];
    if (i == 5) c->n_pages = want.shape[0];
  }
  c->n = n;
  c->ids = data[0], c->computed = data[1], c->rows = data[2], c->replace = data[3], c->page_counts = data[4], c->pages = data[5];
  for (int64_t i = 0; i < n && total >= 0; i++)
    total = c->page_counts[i] < 0 || c->page_counts[i] > c->n_pages ? -1 : total + c->page_counts[i];
  if (total == c->n_pages) return 0;
  rm_raise_code(module, RM_E_SHAPE, "page_counts: expected a sum of %lld, the length of pages, got another", (long long)c->n_pages);
  return -1;
}

static void make_parts(const columns *c, rm_external_part *parts) {
  const int32_t *pages = c->pages;
  for (int64_t i = 0; i < c->n; i++) {
    parts[i] = (rm_external_part){c->ids[i], c->computed[i], c->rows[i], pages, c->page_counts[i], c->replace[i]};
    pages += c->page_counts[i];
  }
}

// (tokens, logprobs, sampling_logprobs, ranks) of the results.
static PyObject *result_columns(const rm_external_result *results, int64_t n) {
  PyObject *tokens = rm_array_new(NPY_INT32, 1, &n, NULL), *logprobs = rm_array_new(NPY_FLOAT32, 1, &n, NULL);
  PyObject *sampling = rm_array_new(NPY_FLOAT32, 1, &n, NULL), *ranks = rm_array_new(NPY_INT32, 1, &n, NULL), *all = NULL;
  if (tokens && logprobs && sampling && ranks) {
    for (int64_t i = 0; i < n; i++) {
      const int32_t given = results[i].token == RM_EXTERNAL_DRAWS ? results[i].row : results[i].rank;
      ((int32_t *)PyArray_DATA((PyArrayObject *)tokens))[i] = results[i].token;
      ((float *)PyArray_DATA((PyArrayObject *)logprobs))[i] = results[i].logprob;
      ((float *)PyArray_DATA((PyArrayObject *)sampling))[i] = results[i].sampling_logprob;
      ((int32_t *)PyArray_DATA((PyArrayObject *)ranks))[i] = given;
    }
    all = PyTuple_Pack(4, tokens, logprobs, sampling, ranks);
  }
  Py_XDECREF(tokens);
  Py_XDECREF(logprobs);
  Py_XDECREF(sampling);
  Py_XDECREF(ranks);
  return all;
}

static PyObject *run_step(rm_engine_object *self, rm_external_step *step, rm_external_result *results) {
  rm_error err = RM_ERROR_INIT;
  int64_t n_work = 0;
  const rm_code code = RM_UNLOCKED(rm_ranks_external_step(self->engine, step, results, &n_work, &err));
  if (code) return rm_raise(rm_engine_module(self), &err);
  PyObject *all = result_columns(results, step->n_parts);
  if (!all) return NULL;
  PyObject *with_rows = Py_BuildValue("(OOOOL)", PyTuple_GetItem(all, 0), PyTuple_GetItem(all, 1), PyTuple_GetItem(all, 2),
                                      PyTuple_GetItem(all, 3), (long long)n_work);
  Py_DECREF(all);
  return with_rows;
}

PyObject *rm_engine_py_host_step(rm_engine_object *self, PyObject *args) {
  PyObject *objects[6], *logits, *stats, *result = NULL, *module = rm_engine_module(self);
  if (!PyArg_ParseTuple(args, "OOOOOOOO:host_step", &objects[0], &objects[1], &objects[2], &objects[3], &objects[4], &objects[5], &logits,
                        &stats))
    return NULL;
  columns c = {0};
  if (read_columns(module, objects, &c) || rm_engine_enter(self)) return NULL;
  rm_external_part *parts = rm_alloc((size_t)c.n + 1, sizeof *parts);
  rm_external_result *results = rm_alloc((size_t)c.n + 1, sizeof *results);
  rm_external_step step = {.parts = parts, .n_parts = c.n};
  rm_array_want want_logits = {"logits", NPY_FLOAT32, RM_ARRAY_WRITE | RM_ARRAY_OPTIONAL, 2, {-1, self->spec->vocab_size}};
  rm_array_want want_stats = {"stats", NPY_FLOAT32, RM_ARRAY_WRITE | RM_ARRAY_OPTIONAL, 2, {-1, 2}};
  void *data[2];
  if (!parts || !results) PyErr_NoMemory();
  else if (!rm_array_data(module, logits, &want_logits, &data[0]) && !rm_array_data(module, stats, &want_stats, &data[1])) {
    if (!data[0] == !data[1] && (!data[0] || want_logits.shape[0] == want_stats.shape[0])) {
      make_parts(&c, parts);
      step.logits = data[0];
      step.stats = data[1];
      step.n_logits = data[0] ? want_logits.shape[0] : 0;
      result = run_step(self, &step, results);
    } else {
      rm_raise_code(module, RM_E_CONFIG, "logits, stats: expected arrays of as many rows, or None for both");
    }
  }
  rm_free(parts);
  rm_free(results);
  rm_engine_leave(self);
  return result;
}

PyObject *rm_engine_py_host_draw(rm_engine_object *self, PyObject *args) {
  PyObject *objects[4], *result = NULL, *module = rm_engine_module(self);
  if (!PyArg_ParseTuple(args, "OOOO:host_draw", &objects[0], &objects[1], &objects[2], &objects[3])) return NULL;
  void *data[4];
  rm_array_want ids = {"ids", NPY_UINT64, 0, 1, {-1}};
  if (rm_array_data(module, objects[0], &ids, &data[0]) || rm_engine_enter(self)) return NULL;
  const int64_t n = ids.shape[0], vocab = self->spec->vocab_size;
  rm_array_want wants[] = {
      {"raw", NPY_FLOAT32, 0, 2, {n, vocab}}, {"stats", NPY_FLOAT32, 0, 2, {n, 2}}, {"edited", NPY_FLOAT32, 0, 2, {n, vocab}}};
  rm_external_draw *draws = rm_alloc((size_t)n + 1, sizeof *draws);
  rm_external_result *results = rm_alloc((size_t)n + 1, sizeof *results);
  rm_error err = RM_ERROR_INIT;
  int failed = !draws || !results;
  if (failed) PyErr_NoMemory();
  for (int i = 0; i < 3 && !failed; i++) failed = rm_array_data(module, objects[i + 1], &wants[i], &data[i + 1]);
  for (int64_t i = 0; i < n && !failed; i++)
    draws[i] = (rm_external_draw){((const uint64_t *)data[0])[i], (const float *)data[1] + i * vocab, (const float *)data[2] + 2 * i,
                                  (const float *)data[3] + i * vocab};
  if (!failed) {
    if (rm_ranks_external_draw(self->engine, draws, n, results, &err)) rm_raise(module, &err);
    else result = result_columns(results, n);
  }
  rm_free(draws);
  rm_free(results);
  rm_engine_leave(self);
  return result;
}

// (ids, logprobs) of the last token of each request, [n][k]; all were added with logprobs of k or more.
PyObject *rm_engine_py_host_top(rm_engine_object *self, PyObject *args) {
  PyObject *object, *ids = NULL, *logprobs = NULL, *result = NULL, *module = rm_engine_module(self);
  long long k;
  void *numbers;
  if (!PyArg_ParseTuple(args, "OL:host_top", &object, &k)) return NULL;
  rm_array_want want = {"ids", NPY_UINT64, 0, 1, {-1}};
  if (rm_array_data(module, object, &want, &numbers) || rm_engine_enter(self)) return NULL;
  const int64_t shape[2] = {want.shape[0], k};
  rm_error err = RM_ERROR_INIT;
  rm_code code = k < 1 ? rm_fail(&err, RM_E_REQUEST, "k=%lld, wanted 1 or more", k) : RM_OK;
  if (!code && (!(ids = rm_array_new(NPY_INT32, 2, shape, NULL)) || !(logprobs = rm_array_new(NPY_FLOAT32, 2, shape, NULL)))) goto out;
  for (int64_t i = 0; i < shape[0] && !code; i++) {
    rm_sample_view view;
    if ((code = rm_ranks_sample_view(self->engine, ((const uint64_t *)numbers)[i], 0, &view, &err))) break;
    if (view.n_top < k || !view.n_tokens) {
      code = rm_fail(&err, RM_E_REQUEST, "request %llu has %d logprobs a token, of %lld tokens, wanted %lld",
                     (unsigned long long)((const uint64_t *)numbers)[i], view.n_top, (long long)view.n_tokens, k);
      break;
    }
    const int64_t from = (view.n_tokens - 1) * view.n_top;
    memcpy((int32_t *)PyArray_DATA((PyArrayObject *)ids) + i * k, view.top_ids + from, (size_t)k * sizeof(int32_t));
    memcpy((float *)PyArray_DATA((PyArrayObject *)logprobs) + i * k, view.top_logprobs + from, (size_t)k * sizeof(float));
  }
  if (code) rm_raise(module, &err);
  else result = PyTuple_Pack(2, ids, logprobs);
out:
  Py_XDECREF(ids);
  Py_XDECREF(logprobs);
  rm_engine_leave(self);
  return result;
}

// int16 [n][moe layers][k]: the routing of positions from `start` on, prompt and generated, up to the last that was fed.
PyObject *rm_engine_py_host_routed(rm_engine_object *self, PyObject *args) {
  unsigned long long id;
  long long start;
  if (!PyArg_ParseTuple(args, "KL:host_routed", &id, &start) || rm_engine_enter(self)) return NULL;
  const rm_spec *spec = self->spec;
  const size_t row = (size_t)(spec->n_moe_layers * spec->top_k) * sizeof(int16_t);
  rm_request_view prompt;
  rm_sample_view sample;
  rm_error err = RM_ERROR_INIT;
  PyObject *result = NULL;
  if (rm_ranks_view(self->engine, id, &prompt, &err) || rm_ranks_sample_view(self->engine, id, 0, &sample, &err)) {
    rm_raise(rm_engine_module(self), &err);
    goto out;
  }
  const int64_t fed = prompt.n_prompt + rm_max64(sample.n_tokens - 1, 0), from = rm_min64(rm_max64(start, 0), fed);
  const int64_t of_prompt = rm_max64(prompt.n_prompt - from, 0), shape[3] = {fed - from, spec->n_moe_layers, spec->top_k};
  if (!(result = rm_array_new(NPY_INT16, 3, shape, NULL)) || !row) goto out;
  char *at = PyArray_DATA((PyArrayObject *)result);
  if (of_prompt) memcpy(at, (const char *)prompt.prompt_routed + (size_t)from * row, (size_t)of_prompt * row);
  const int64_t first = rm_max64(from - prompt.n_prompt, 0), n = fed - prompt.n_prompt - first;
  if (n > 0) memcpy(at + (size_t)of_prompt * row, (const char *)sample.routed + (size_t)first * row, (size_t)n * row);
out:
  rm_engine_leave(self);
  return result;
}

PyObject *rm_engine_py_host_preempt(rm_engine_object *self, PyObject *id) {
  return rm_engine_call_with_id(self, id, rm_ranks_external_preempt);
}
PyObject *rm_engine_py_host_fail(rm_engine_object *self, PyObject *id) { return rm_engine_call_with_id(self, id, rm_ranks_external_fail); }

PyObject *rm_engine_py_host_forget(rm_engine_object *self, PyObject *pages) {
  const int32_t *numbers;
  int64_t n;
  if (rm_array_ids(rm_engine_module(self), pages, "pages", &numbers, &n) || rm_engine_enter(self)) return NULL;
  rm_ranks_external_invalidate_pages(self->engine, numbers, n);
  rm_engine_leave(self);
  Py_RETURN_NONE;
}

PyObject *rm_engine_py_host_tokens(rm_engine_object *self, PyObject *args) {
  unsigned long long id;
  PyObject *object;
  const int32_t *tokens;
  int64_t n;
  if (!PyArg_ParseTuple(args, "KO:host_tokens", &id, &object)) return NULL;
  if (rm_array_ids(rm_engine_module(self), object, "tokens", &tokens, &n) || rm_engine_enter(self)) return NULL;
  rm_error err = RM_ERROR_INIT;
  return rm_engine_finish(self, rm_ranks_external_tokens(self->engine, id, tokens, n, &err), &err);
}

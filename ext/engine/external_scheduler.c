// external_scheduler.c: csrc/scheduler/external_scheduler.h over arrays: a step of n requests has
// arrays of n numbers as arguments and results, so that Python has no work for each request.
#include "engine_object.h"

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
  c->ids = data[0], c->computed = data[1], c->rows = data[2], c->replace = data[3],
  c->page_counts = data[4], c->pages = data[5];
  for (int64_t i = 0; i < n; i++) {
    if (c->page_counts[i] < 0 || c->page_counts[i] > c->n_pages) {
      rm_raise_code(module, RM_E_SHAPE,
                    "page_counts: expected numbers in [0, %lld], the length of pages, got %lld",
                    (long long)c->n_pages, (long long)c->page_counts[i]);
      return -1;
    }
    total += c->page_counts[i];
  }
  if (total == c->n_pages) return 0;
  rm_raise_code(module, RM_E_SHAPE,
                "page_counts: expected a sum of %lld, the length of pages, got %lld",
                (long long)c->n_pages, (long long)total);
  return -1;
}

static void make_parts(const columns *c, rm_external_part *parts) {
  const int32_t *pages = c->pages;
  for (int64_t i = 0; i < c->n; i++) {
    parts[i] = (rm_external_part){c->ids[i], c->computed[i],    c->rows[i],
                                  pages,     c->page_counts[i], c->replace[i]};
    pages += c->page_counts[i];
  }
}

static void *array_of(PyObject *array) { return PyArray_DATA((PyArrayObject *)array); }

// (tokens, logprobs, sampling_logprobs, ranks, then `more`, which is consumed, unless it is NULL)
// of the results.
static PyObject *result_columns(const rm_external_result *results, int64_t n, PyObject *more) {
  PyObject *tokens = rm_array_new(NPY_INT32, 1, &n, NULL),
           *logprobs = rm_array_new(NPY_FLOAT32, 1, &n, NULL);
  PyObject *sampling = rm_array_new(NPY_FLOAT32, 1, &n, NULL),
           *ranks = rm_array_new(NPY_INT32, 1, &n, NULL);
  PyObject *all =
      Py_BuildValue(more ? "(NNNNN)" : "(NNNN)", tokens, logprobs, sampling, ranks, more);
  for (int64_t i = 0; all && i < n; i++) {
    ((int32_t *)array_of(tokens))[i] = results[i].token;
    ((float *)array_of(logprobs))[i] = results[i].logprob;
    ((float *)array_of(sampling))[i] = results[i].sampling_logprob;
    ((int32_t *)array_of(ranks))[i] =
        results[i].token == RM_EXTERNAL_DRAWS ? results[i].row : results[i].rank;
  }
  return all;
}

static PyObject *run_step(rm_engine_object *self, rm_external_step *step,
                          rm_external_result *results) {
  rm_error err = RM_ERROR_INIT;
  int64_t n_work = 0;
  const rm_code code =
      RM_UNLOCKED(rm_engine_external_step(self->engine, step, results, &n_work, &err));
  if (code) return rm_raise(rm_engine_module(self), &err);
  PyObject *rows = PyLong_FromLongLong(n_work);
  return rows ? result_columns(results, step->n_parts, rows) : NULL;
}

PyObject *rm_engine_py_external_step(rm_engine_object *self, PyObject *args) {
  PyObject *objects[6], *logits, *stats, *result = NULL, *module = rm_engine_module(self);
  if (!PyArg_ParseTuple(args, "OOOOOOOO:external_step", &objects[0], &objects[1], &objects[2],
                        &objects[3], &objects[4], &objects[5], &logits, &stats))
    return NULL;
  columns c = {0};
  if (read_columns(module, objects, &c) || rm_engine_enter(self)) return NULL;
  rm_external_part *parts = rm_alloc((size_t)c.n + 1, sizeof *parts);
  rm_external_result *results = rm_alloc((size_t)c.n + 1, sizeof *results);
  rm_external_step step = {.parts = parts, .n_parts = c.n};
  rm_array_want want_logits = {
      "logits", NPY_FLOAT32, RM_ARRAY_WRITE | RM_ARRAY_OPTIONAL, 2, {-1, self->spec->vocab_size}};
  rm_array_want want_stats = {"stats", NPY_FLOAT32, RM_ARRAY_WRITE | RM_ARRAY_OPTIONAL, 2, {-1, 2}};
  void *data[2];
  if (!parts || !results) PyErr_NoMemory();
  else if (!rm_array_data(module, logits, &want_logits, &data[0]) &&
           !rm_array_data(module, stats, &want_stats, &data[1])) {
    if (!data[0] == !data[1] && (!data[0] || want_logits.shape[0] == want_stats.shape[0])) {
      make_parts(&c, parts);
      step.logits = data[0];
      step.stats = data[1];
      step.n_logits = data[0] ? want_logits.shape[0] : 0;
      result = run_step(self, &step, results);
    } else {
      rm_raise_code(module, RM_E_CONFIG,
                    "logits, stats: expected arrays of as many rows, or None for both");
    }
  }
  rm_free(parts);
  rm_free(results);
  rm_engine_leave(self);
  return result;
}

PyObject *rm_engine_py_external_draw(rm_engine_object *self, PyObject *args) {
  PyObject *objects[4], *result = NULL, *module = rm_engine_module(self);
  if (!PyArg_ParseTuple(args, "OOOO:external_draw", &objects[0], &objects[1], &objects[2],
                        &objects[3]))
    return NULL;
  void *data[4];
  rm_array_want ids = {"ids", NPY_UINT64, 0, 1, {-1}};
  if (rm_array_data(module, objects[0], &ids, &data[0]) || rm_engine_enter(self)) return NULL;
  const int64_t n = ids.shape[0], vocab = self->spec->vocab_size;
  rm_array_want wants[] = {{"raw", NPY_FLOAT32, 0, 2, {n, vocab}},
                           {"stats", NPY_FLOAT32, 0, 2, {n, 2}},
                           {"edited", NPY_FLOAT32, 0, 2, {n, vocab}}};
  rm_external_draw *draws = rm_alloc((size_t)n + 1, sizeof *draws);
  rm_external_result *results = rm_alloc((size_t)n + 1, sizeof *results);
  rm_error err = RM_ERROR_INIT;
  int failed = !draws || !results;
  if (failed) PyErr_NoMemory();
  for (int i = 0; i < 3 && !failed; i++)
    failed = rm_array_data(module, objects[i + 1], &wants[i], &data[i + 1]);
  for (int64_t i = 0; i < n && !failed; i++)
    draws[i] =
        (rm_external_draw){((const uint64_t *)data[0])[i], (const float *)data[1] + i * vocab,
                           (const float *)data[2] + 2 * i, (const float *)data[3] + i * vocab};
  if (!failed) {
    if (rm_engine_external_draw(self->engine, draws, n, results, &err)) rm_raise(module, &err);
    else result = result_columns(results, n, NULL);
  }
  rm_free(draws);
  rm_free(results);
  rm_engine_leave(self);
  return result;
}

// (ids, logprobs) of the last token of each request, [n][k]; all were added with logprobs of k or
// more.
PyObject *rm_engine_py_external_top(rm_engine_object *self, PyObject *args) {
  PyObject *object, *module = rm_engine_module(self);
  long long k;
  void *numbers;
  if (!PyArg_ParseTuple(args, "OL:external_top", &object, &k)) return NULL;
  rm_array_want want = {"ids", NPY_UINT64, 0, 1, {-1}};
  if (rm_array_data(module, object, &want, &numbers) || rm_engine_enter(self)) return NULL;
  const int64_t n = want.shape[0], shape[2] = {n, rm_max64(k, 0)};
  rm_error err = RM_ERROR_INIT;
  rm_code code = RM_OK;
  PyObject *ids = rm_array_new(NPY_INT32, 2, shape, NULL),
           *logprobs = rm_array_new(NPY_FLOAT32, 2, shape, NULL);
  PyObject *both = Py_BuildValue("(NN)", ids, logprobs);
  if (both)
    code = rm_external_top(rm_engine_scheduler(self->engine, 0), numbers, n, k, array_of(ids),
                           array_of(logprobs), &err);
  rm_engine_leave(self);
  if (!code) return both;
  Py_DECREF(both);
  return rm_raise(module, &err);
}

// int16 [n][moe layers][k]: the routing of positions from `start` on, prompt and generated, up to
// the last that was fed.
PyObject *rm_engine_py_external_routed(rm_engine_object *self, PyObject *args) {
  unsigned long long id;
  long long start;
  if (!PyArg_ParseTuple(args, "KL:external_routed", &id, &start) || rm_engine_enter(self))
    return NULL;
  rm_error err = RM_ERROR_INIT;
  int64_t shape[3] = {0, self->spec->n_moe_layers, self->spec->top_k};
  PyObject *result = NULL;
  if (rm_external_routed(rm_engine_scheduler(self->engine, 0), id, start, NULL, &shape[0], &err))
    rm_raise(rm_engine_module(self), &err);
  else if ((result =
                rm_array_new(NPY_INT16, 3, shape, NULL))) // no error is left: the request is there
    rm_external_routed(rm_engine_scheduler(self->engine, 0), id, start, array_of(result), &shape[0],
                       &err);
  rm_engine_leave(self);
  return result;
}

PyObject *rm_engine_py_external_preempt(rm_engine_object *self, PyObject *id) {
  return rm_engine_call_with_id(self, id, rm_external_preempt);
}
PyObject *rm_engine_py_external_fail(rm_engine_object *self, PyObject *id) {
  return rm_engine_call_with_id(self, id, rm_external_fail);
}

PyObject *rm_engine_py_external_invalidate_pages(rm_engine_object *self, PyObject *pages) {
  const int32_t *numbers;
  int64_t n;
  if (rm_array_ids(rm_engine_module(self), pages, "pages", &numbers, &n) || rm_engine_enter(self))
    return NULL;
  rm_external_invalidate_pages(rm_engine_scheduler(self->engine, 0), numbers, n);
  rm_engine_leave(self);
  Py_RETURN_NONE;
}

PyObject *rm_engine_py_external_tokens(rm_engine_object *self, PyObject *args) {
  unsigned long long id;
  PyObject *object;
  const int32_t *tokens;
  int64_t n;
  if (!PyArg_ParseTuple(args, "KO:external_tokens", &id, &object)) return NULL;
  if (rm_array_ids(rm_engine_module(self), object, "tokens", &tokens, &n) || rm_engine_enter(self))
    return NULL;
  rm_error err = RM_ERROR_INIT;
  return rm_engine_finish(
      self, rm_external_tokens(rm_engine_scheduler(self->engine, id), id, tokens, n, &err), &err);
}

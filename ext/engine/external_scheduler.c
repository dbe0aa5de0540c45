// external_scheduler.c: csrc/scheduler/external_scheduler.h over arrays. Arguments and results of a
// step of n requests are arrays of n numbers, so that Python does not loop over requests.
#include "engine_object.h"

enum { ANY = -1, N = RM_ARRAY_AS_FIRST, GIVEN_OR_NONE = RM_ARRAY_WRITE | RM_ARRAY_OPTIONAL };

// Returns new arrays (tokens, logprobs, sampling_logprobs, ranks) of n requests, for the engine to
// fill.
static PyObject *results_new(int64_t n, rm_external_results *out) {
  static const int types[] = {NPY_INT32, NPY_FLOAT32, NPY_FLOAT32, NPY_INT32};
  void *data[4];
  PyObject *tuple = PyTuple_New(4);
  for (int i = 0; i < 4 && tuple; i++) {
    PyObject *array = rm_array_new(types[i], 1, &n, NULL);
    if (array) data[i] = PyArray_DATA((PyArrayObject *)array);
    if (!array || PyTuple_SetItem(tuple, i, array)) Py_CLEAR(tuple);
  }
  if (tuple) *out = (rm_external_results){data[0], data[1], data[2], data[3]};
  return tuple;
}

static int check_pages(const rm_external_step *step, int64_t n_pages) {
  int64_t total = 0;
  for (int64_t i = 0; i < step->n && total >= 0; i++) {
    const int64_t count = step->page_counts[i];
    total = count < 0 || count > n_pages ? -1 : total + count;
  }
  if (total == n_pages) return 0;
  return rm_refuse(
      RM_E_SHAPE,
      "page_counts: expected numbers of at least 0 with a sum of %zd, the length of pages",
      n_pages);
}

RM_ENGINE_METHOD(external_step, args) {
  PyObject *results;
  rm_array_want wants[] = {
      {"ids", NPY_UINT64, 0, 1, {ANY}},
      {"computed", NPY_INT64, 0, 1, {N}},
      {"rows", NPY_INT64, 0, 1, {N}},
      {"replace", NPY_UINT8, 0, 1, {N}},
      {"page_counts", NPY_INT64, 0, 1, {N}},
      {"pages", NPY_INT32, 0, 1, {ANY}},
      {"logits", NPY_FLOAT32, GIVEN_OR_NONE, 2, {ANY, self->spec->vocab_size}},
      {"stats", NPY_FLOAT32, GIVEN_OR_NONE, 2, {ANY, 2}},
  };
  void *data[8];
  int64_t n_work = 0;
  if (rm_arrays_data(args, wants, 8, data)) return NULL;
  if (!data[6] != !data[7] || (data[6] && wants[6].shape[0] != wants[7].shape[0]))
    return rm_raise_code(RM_E_CONFIG,
                         "logits, stats: expected arrays of as many rows, or None for both");
  rm_external_step step = {
      .n = wants[0].shape[0],
      .ids = data[0],
      .computed = data[1],
      .rows = data[2],
      .replace = data[3],
      .page_counts = data[4],
      .pages = data[5],
      .logits = data[6],
      .stats = data[7],
      .n_logits = data[6] ? wants[6].shape[0] : 0,
  };
  if (check_pages(&step, wants[5].shape[0])) return NULL;
  if ((results = results_new(step.n, &step.results)) &&
      RM_FAILS(RM_UNLOCKED(rm_engine_step(self->engine, &step, &n_work, &err))))
    Py_CLEAR(results);
  return results ? Py_BuildValue("(Nn)", results, n_work) : NULL;
}

RM_ENGINE_METHOD(external_draw, args) {
  PyObject *results;
  const int64_t vocab = self->spec->vocab_size;
  rm_array_want wants[] = {{"ids", NPY_UINT64, 0, 1, {ANY}},
                           {"raw", NPY_FLOAT32, 0, 2, {N, vocab}},
                           {"stats", NPY_FLOAT32, 0, 2, {N, 2}},
                           {"edited", NPY_FLOAT32, 0, 2, {N, vocab}}};
  void *data[4];
  if (rm_arrays_data(args, wants, 4, data)) return NULL;
  rm_external_draws draws = {wants[0].shape[0], data[0], data[1], data[2], data[3], {0}};
  if ((results = results_new(draws.n, &draws.results)) &&
      RM_FAILS(rm_engine_external_draw(self->engine, &draws, &err)))
    Py_CLEAR(results);
  return results;
}

static void *array_of(PyObject *array) { return PyArray_DATA((PyArrayObject *)array); }

// Returns (ids, logprobs), [n][k], of the likeliest tokens at the last token of each request. All
// requests were added with at least k logprobs.
RM_ENGINE_METHOD(external_top, args) {
  PyObject *object;
  long long k;
  void *numbers;
  if (!PyArg_ParseTuple(args, "OL:external_top", &object, &k)) return NULL;
  rm_array_want want = {"ids", NPY_UINT64, 0, 1, {-1}};
  if (rm_array_data(object, &want, &numbers)) return NULL;
  const int64_t n = want.shape[0], shape[2] = {n, rm_max64(k, 0)};
  PyObject *ids = rm_array_new(NPY_INT32, 2, shape, NULL),
           *logprobs = rm_array_new(NPY_FLOAT32, 2, shape, NULL);
  PyObject *both = Py_BuildValue("(NN)", ids, logprobs);
  if (both && RM_FAILS(rm_external_top(rm_engine_scheduler(self->engine, 0), numbers, n, k,
                                       array_of(ids), array_of(logprobs), &err)))
    Py_CLEAR(both);
  return both;
}

// Returns int16 [n][moe layers][k]: the routing of positions from `start` to the last input token,
// of prompt and generated tokens.
RM_ENGINE_METHOD(external_routed, args) {
  unsigned long long id;
  long long start;
  if (!PyArg_ParseTuple(args, "KL:external_routed", &id, &start)) return NULL;
  rm_scheduler *scheduler = rm_engine_scheduler(self->engine, 0);
  int64_t shape[3] = {0, self->spec->n_moe_layers, self->spec->top_k};
  if (RM_FAILS(rm_external_routed(scheduler, id, start, NULL, &shape[0], &err))) return NULL;
  PyObject *result = rm_array_new(NPY_INT16, 3, shape, NULL);
  // This call cannot fail, since the call above has found the request.
  if (result) rm_external_routed(scheduler, id, start, array_of(result), &shape[0], NULL);
  return result;
}

RM_OPEN_METHOD(external_preempt, id) {
  return rm_engine_call_with_id(self, id, rm_external_preempt);
}
RM_OPEN_METHOD(external_fail, id) { return rm_engine_call_with_id(self, id, rm_external_fail); }

RM_ENGINE_METHOD(external_invalidate_pages, pages) {
  const int32_t *numbers;
  int64_t n;
  if (rm_array_ids(pages, "pages", &numbers, &n)) return NULL;
  rm_external_invalidate_pages(rm_engine_scheduler(self->engine, 0), numbers, n);
  Py_RETURN_NONE;
}

RM_ENGINE_METHOD(external_tokens, args) {
  unsigned long long id;
  PyObject *object;
  const int32_t *tokens;
  int64_t n;
  if (!PyArg_ParseTuple(args, "KO:external_tokens", &id, &object)) return NULL;
  if (rm_array_ids(object, "tokens", &tokens, &n)) return NULL;
  return RM_NONE(rm_external_tokens(rm_engine_scheduler(self->engine, id), id, tokens, n, &err));
}

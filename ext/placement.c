// placement.c: the shard of each tensor that a rank holds, as numbers for rollmesh.model.placement,
// and the copies that move a trainer's pieces there, for rollmesh.weights.resharding.
#include "arrays.h"

#include <string.h>

#include "model/placement.h"
#include "spec.h"
#include "weights/resharding.h"

static PyObject *placement(PyObject *module, PyObject *args) {
  PyObject *values, *out = NULL;
  long long tp, dp, ep;
  if (!PyArg_ParseTuple(args, "OLLL:placement", &values, &tp, &dp, &ep)) return NULL;
  rm_mesh mesh;
  rm_error err = RM_ERROR_INIT;
  if (rm_mesh_create(tp, dp, ep, 1, 1, &mesh, &err)) return rm_raise(module, &err);
  rm_spec *spec = rm_spec_from_python(module, values);
  if (!spec) return NULL;
  if (rm_placement_check(spec, &mesh, &err)) {
    rm_raise(module, &err);
    goto out;
  }
  enum { RANGES = offsetof(rm_placement, counts_replicated) / sizeof(rm_range) }; // they come first
  const int64_t shape[3] = {rm_mesh_world(&mesh), RANGES, 2};
  if (!(out = rm_array_new(NPY_INT64, 3, shape, NULL))) goto out;
  rm_range *ranges = PyArray_DATA((PyArrayObject *)out);
  for (int32_t rank = 0; rank < rm_mesh_world(&mesh); rank++, ranges += RANGES) {
    const rm_placement p = rm_placement_of(spec, &mesh, rank);
    memcpy(ranges, &p, RANGES * sizeof *ranges);
  }
out:
  rm_spec_destroy(spec);
  return out;
}

// Reads parts: int64 [n][9], the memory layout of rm_part.
static int parts_of(PyObject *module, PyObject *object, const char *name, const rm_part **parts,
                    int64_t *n) {
  rm_array_want want = {.name = name,
                        .type = NPY_INT64,
                        .n_dims = 2,
                        .shape = {-1, sizeof(rm_part) / sizeof(int64_t)}};
  void *data;
  if (rm_array_data(module, object, &want, &data)) return -1;
  *parts = data;
  *n = want.shape[0];
  return 0;
}

static int shape_of(PyObject *module, PyObject *shape, rm_pieces *pieces) {
  const Py_ssize_t n = PySequence_Size(shape);
  if (n < 0) return -1;
  if (n > RM_BOX_DIMS) {
    rm_raise_code(module, RM_E_LAYOUT, "%s: expected at most %d dims, got %zd", pieces->name,
                  RM_BOX_DIMS, n);
    return -1;
  }
  pieces->n_dims = (int)n;
  for (Py_ssize_t d = 0; d < n; d++) {
    PyObject *size = PySequence_GetItem(shape, d);
    pieces->shape[d] = size ? PyLong_AsLongLong(size) : -1;
    Py_XDECREF(size);
    if (PyErr_Occurred()) return -1;
  }
  return 0;
}

static PyObject *plan_copies(PyObject *module, PyObject *args) {
  PyObject *shape, *held, *wanted, *out = NULL;
  long long n_ranks;
  rm_pieces pieces = {0};
  rm_copies copies = {0};
  rm_error err = RM_ERROR_INIT;
  if (!PyArg_ParseTuple(args, "sOOOL:plan_copies", &pieces.name, &shape, &held, &wanted, &n_ranks))
    return NULL;
  pieces.n_ranks = n_ranks;
  if (shape_of(module, shape, &pieces) ||
      parts_of(module, held, "held", &pieces.held, &pieces.n_held) ||
      parts_of(module, wanted, "wanted", &pieces.wanted, &pieces.n_wanted))
    return NULL;
  _Static_assert(sizeof(rm_copy) == 10 * sizeof(int64_t), "a copy is a row of the array");
  if (rm_plan_copies(&pieces, &copies, &err)) rm_raise(module, &err);
  else out = rm_array_new(NPY_INT64, 2, (const int64_t[]){copies.n, 10}, copies.list);
  rm_copies_clear(&copies);
  return out;
}

PyMethodDef rm_placement_functions[] = {
    {"placement", placement, METH_VARARGS,
     "(spec, tp, dp, ep): int64 [world][8 ranges][first, n], in the order of placement.h."},
    {"plan_copies", plan_copies, METH_VARARGS,
     "(name, shape, held, wanted, num_ranks), parts int64 [n][rank, 4 firsts, 4 sizes]: int64 "
     "[n][from, to, 4 firsts, 4 sizes]."},
    {0},
};

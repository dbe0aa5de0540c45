// placement.c: the shard of each tensor that a rank holds, as numbers for rollmesh.model.placement.
#include "arrays.h"

#include <string.h>

#include "model/placement.h"
#include "spec.h"

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

PyMethodDef rm_placement_functions[] = {
    {"placement", placement, METH_VARARGS,
     "(spec, tp, dp, ep): int64 [world][8 ranges][first, n], in the order of placement.h."},
    {0},
};

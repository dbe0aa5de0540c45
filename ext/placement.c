// placement.c: a model's parameters and the shard of each that a rank holds, for rollmesh.model.
#include "arrays.h"

#include <string.h>

#include "model/params.h"
#include "spec.h"

// Reads a spec, and the mesh that its model is divided over. Returns the spec, which the caller
// destroys; NULL with the exception set.
static rm_spec *divided(PyObject *values, const long long degrees[3], rm_mesh *mesh) {
  rm_spec *spec = RM_FAILS(rm_mesh_create(degrees[0], degrees[1], degrees[2], mesh, &err))
                      ? NULL
                      : rm_spec_from_python(values);
  if (spec && !RM_FAILS(rm_placement_check(spec, mesh, &err))) return spec;
  rm_spec_destroy(spec);
  return NULL;
}

static PyObject *placement(PyObject *, PyObject *args) {
  PyObject *values;
  long long degrees[3];
  rm_mesh mesh;
  if (!PyArg_ParseTuple(args, "OLLL:placement", &values, degrees, degrees + 1, degrees + 2))
    return NULL;
  rm_spec *spec = divided(values, degrees, &mesh);
  if (!spec) return NULL;
  enum { RANGES = offsetof(rm_placement, counts_replicated) / sizeof(rm_range) }; // they come first
  const int64_t shape[3] = {rm_mesh_world(&mesh), RANGES, 2};
  PyObject *out = rm_array_new(NPY_INT64, 3, shape, NULL);
  rm_range *ranges = out ? PyArray_DATA((PyArrayObject *)out) : NULL;
  for (int32_t rank = 0; out && rank < rm_mesh_world(&mesh); rank++, ranges += RANGES) {
    const rm_placement p = rm_placement_of(spec, &mesh, rank);
    memcpy(ranges, &p, RANGES * sizeof *ranges);
  }
  rm_spec_destroy(spec);
  return out;
}

// Whether a parameter is counted: the model's own memory, without routers' biases.
static int is_counted(const rm_param *p) {
  return p->kind != RM_P_ROUTER_BIAS && (p->kind != RM_P_LM_HEAD || p->required);
}

// Returns the layout of a rank's parameters, which the caller destroys before *spec; NULL with the
// exception set, and then *spec is NULL.
static rm_params *laid_out(PyObject *values, const long long degrees[3], int rank, rm_dtype dtype,
                           rm_spec **spec) {
  rm_mesh mesh;
  rm_params *params = NULL;
  if (!(*spec = divided(values, degrees, &mesh))) return NULL;
  const rm_placement here = rm_placement_of(*spec, &mesh, rank);
  if (!RM_FAILS(rm_params_create(*spec, &here, dtype, 0, &params, &err))) return params;
  rm_spec_destroy(*spec);
  *spec = NULL;
  return NULL;
}

static PyObject *parameters(PyObject *, PyObject *values) {
  rm_spec *spec;
  rm_params *params = laid_out(values, (const long long[]){1, 1, 1}, 0, RM_BF16, &spec);
  PyObject *list = params ? PyList_New(0) : NULL;
  for (int64_t i = 0; list && i < params->n; i++) {
    const rm_param *p = &params->list[i];
    const int64_t shape[2] = {p->rows, p->cols};
    if (!is_counted(p)) continue;
    rm_list_put(&list, Py_BuildValue("ssN", rm_kinds[p->kind].kind, rm_param_name(params, p).text,
                                     rm_tuple_of(shape + 2 - p->n_dims, p->n_dims)));
  }
  rm_params_destroy(params);
  rm_spec_destroy(spec);
  return list;
}

static PyObject *parameter_bytes(PyObject *, PyObject *args) {
  PyObject *values;
  long long degrees[3];
  int rank, is_bf16;
  int64_t bytes[RM_N_PARAM_KIND] = {0};
  rm_spec *spec;
  if (!PyArg_ParseTuple(args, "OLLLip:parameter_bytes", &values, degrees, degrees + 1, degrees + 2,
                        &rank, &is_bf16))
    return NULL;
  const rm_dtype dtype = is_bf16 ? RM_BF16 : RM_F32;
  rm_params *params = laid_out(values, degrees, rank, dtype, &spec);
  if (!params) return NULL;
  for (const rm_param *p = params->list; p < params->list + params->n; p++)
    if (is_counted(p))
      bytes[p->kind] += (int64_t)rm_dtype_bytes(p->dtype) *
                        (p->n_dims == 1          ? p->held
                         : p->layout == RM_PLAIN ? p->held * p->cols
                                                 : rm_packed_elems(p->held, p->cols));
  rm_params_destroy(params);
  rm_spec_destroy(spec);
  PyObject *dict = PyDict_New();
  for (int kind = 0; dict && kind < RM_N_PARAM_KIND; kind++)
    rm_dict_put(&dict, rm_kinds[kind].kind, PyLong_FromLongLong(bytes[kind]));
  return dict;
}

PyMethodDef rm_placement_functions[] = {
    RM_FUNCTION(placement, VARARGS),
    RM_FUNCTION(parameters, O),
    RM_FUNCTION(parameter_bytes, VARARGS),
    {0},
};

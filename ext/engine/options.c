// options.c: reads an engine's options from the attributes of a rollmesh.options.EngineOptions:
// those of rm_engine_option_table, and the names of the dtype, the kernels and the mesh.
#include "engine_object.h"

#include <string.h>

#include "attributes.h"

typedef struct names { // attributes that are converted to other values
  const char *dtype, *isa, *ep_backend;
  int64_t tp, dp, ep;
} names;

#define NAME(member) RM_MEMBER(names, member)
static const rm_attribute name_fields[] = {
    NAME(dtype), NAME(isa), NAME(ep_backend), NAME(tp), NAME(dp), NAME(ep),
};

static int is(const char *name, const char *word) { return name && strcmp(name, word) == 0; }

static rm_code choose_dtype(const char *name, rm_dtype *dtype, rm_error *err) {
  *dtype = is(name, "float32") ? RM_F32 : RM_BF16;
  if (*dtype == RM_F32 || is(name, "bfloat16")) return RM_OK;
  return rm_fail(err, RM_E_CONFIG, "expected dtype='bfloat16' or 'float32', got %.64s",
                 name ? name : "None");
}

rm_code rm_kernels_find(const char *name, const rm_kernels **kernels, rm_error *err) {
  if ((*kernels = rm_kernels_named(name))) return RM_OK;
  return rm_fail(
      err, RM_E_CONFIG,
      "expected an instruction set that this build has and this processor runs, got isa='%.64s'",
      name);
}

static int read_table(PyObject *object, rm_engine_options *out, PyObject *held) {
  int failed = 0;
  for (int i = 0; i < RM_N_ENGINE_OPTIONS && !failed; i++)
    failed = rm_attributes_read(object, &rm_engine_option_table[i].attribute, 1, out, held);
  return failed;
}

PyObject *rm_engine_options_read(PyObject *object, rm_engine_options *out) {
  PyObject *held = PyList_New(0), *eos = PyObject_GetAttrString(object, "eos_token_ids");
  names n;
  *out = (rm_engine_options){0};
  if (!held || !eos || PyList_Append(held, eos) || read_table(object, out, held) ||
      rm_attributes_read(object, name_fields, RM_LENGTH(name_fields), &n, held) ||
      rm_array_ids(eos, "eos_token_ids", &out->eos_ids, &out->n_eos) ||
      RM_FAILS(rm_mesh_create(n.tp, n.dp, n.ep, &out->mesh, &err)) ||
      RM_FAILS(rm_dispatcher_named(n.ep_backend, &out->dispatcher, &err)) ||
      RM_FAILS(choose_dtype(n.dtype, &out->dtype, &err)) ||
      (n.isa && RM_FAILS(rm_kernels_find(n.isa, &out->kernels, &err)))) { // else the engine selects
    Py_CLEAR(held);
  }
  Py_XDECREF(eos);
  return held;
}

// spec.c: see spec.h.
#include "spec.h"

#include <string.h>

#include "arrays.h"
#include "attributes.h"
#include "model/params.h"

#define SPEC(python_name, type, member) {python_name, type, offsetof(rm_spec, member)}
static const rm_attribute fields[] = {
    SPEC("vocab_size", RM_ATTR_I64, vocab_size),
    SPEC("hidden_size", RM_ATTR_I64, hidden_size),
    SPEC("intermediate_size", RM_ATTR_I64, intermediate_size),
    SPEC("num_layers", RM_ATTR_I64, n_layers),
    SPEC("num_heads", RM_ATTR_I64, n_heads),
    SPEC("num_kv_heads", RM_ATTR_I64, n_kv_heads),
    SPEC("head_dim", RM_ATTR_I64, head_dim),
    SPEC("rotary_dim", RM_ATTR_I64, rotary_dim),
    SPEC("num_experts", RM_ATTR_I64, n_experts),
    SPEC("top_k", RM_ATTR_I64, top_k),
    SPEC("moe_intermediate_size", RM_ATTR_I64, moe_intermediate_size),
    SPEC("norm_topk_prob", RM_ATTR_BOOL, norm_topk_prob),
    SPEC("shared_intermediate_size", RM_ATTR_I64, shared_intermediate_size),
    SPEC("shared_switch", RM_ATTR_BOOL, shared_switch),
    SPEC("sigmoid_scores", RM_ATTR_BOOL, sigmoid_scores),
    SPEC("num_groups", RM_ATTR_I64, n_groups),
    SPEC("top_groups", RM_ATTR_I64, top_groups),
    SPEC("route_scale", RM_ATTR_F32, route_scale),
    SPEC("norm_before", RM_ATTR_BOOL, norm_before),
    SPEC("norm_after", RM_ATTR_BOOL, norm_after),
    SPEC("qk_norm", RM_ATTR_INT, qk_norm),
    SPEC("attention_bias", RM_ATTR_BOOL, attention_bias),
    SPEC("o_bias", RM_ATTR_BOOL, o_bias),
    SPEC("tie_word_embeddings", RM_ATTR_BOOL, tie_word_embeddings),
    SPEC("router_bias", RM_ATTR_BOOL, router_bias),
    SPEC("wq_rows", RM_ATTR_INT, wq_rows),
    SPEC("rope_neighbours", RM_ATTR_BOOL, rope_neighbours),
    SPEC("activation", RM_ATTR_INT, activation),
    SPEC("ungated", RM_ATTR_BOOL, ungated),
    SPEC("rms_norm_eps", RM_ATTR_F32, rms_norm_eps),
    SPEC("rope_scale", RM_ATTR_F32, rope_scale),
};

// Reads `names`, a tuple of (kind, name); both are views of the caller's strings.
static int read_names(PyObject *module, PyObject *names, rm_spec *values) {
  for (Py_ssize_t i = 0; i < PyTuple_Size(names); i++) {
    const char *kind, *name;
    if (!PyArg_ParseTuple(PyTuple_GetItem(names, i), "ss", &kind, &name)) return -1;
    int k = 0;
    while (k < RM_N_PARAM_KIND && strcmp(rm_kinds[k].kind, kind) != 0) k++;
    if (k == RM_N_PARAM_KIND) {
      rm_raise_code(module, RM_E_CONFIG, "names: expected kinds of parameters, got %s", kind);
      return -1;
    }
    values->names[k] = name;
  }
  return PyErr_Occurred() ? -1 : 0;
}

rm_spec *rm_spec_from_python(PyObject *module, PyObject *object) {
  rm_spec values = {0}, *spec = NULL;
  rm_error err = RM_ERROR_INIT;
  PyObject *inv_freq = NULL, *is_moe = NULL, *rotates = NULL, *windows = NULL, *names = NULL;
  rm_layer_spec *layers = NULL;
  void *data;
  if (rm_attributes_read(module, object, fields, RM_LENGTH(fields), &values, NULL)) return NULL;
  if (!(inv_freq = PyObject_GetAttrString(object, "inv_freq"))) goto out;
  if (!(is_moe = PyObject_GetAttrString(object, "layer_is_moe"))) goto out;
  if (!(rotates = PyObject_GetAttrString(object, "layer_rotates"))) goto out;
  if (!(names = PyObject_GetAttrString(object, "names")) || read_names(module, names, &values))
    goto out;
  if (!(windows = PyObject_GetAttrString(object, "layer_windows"))) goto out;
  rm_array_want want = {"inv_freq", NPY_FLOAT32, RM_ARRAY_IN, 1, {values.rotary_dim / 2}};
  if (rm_array_data(module, inv_freq, &want, &data)) goto out;
  values.inv_freq = data;
  want = (rm_array_want){"layer_is_moe", NPY_UINT8, RM_ARRAY_IN, 1, {values.n_layers}};
  if (rm_array_data(module, is_moe, &want, &data)) goto out;
  const uint8_t *moe = data;
  want.name = "layer_rotates";
  if (rm_array_data(module, rotates, &want, &data)) goto out;
  const uint8_t *turns = data;
  want = (rm_array_want){"layer_windows", NPY_INT64, RM_ARRAY_IN, 1, {values.n_layers}};
  if (rm_array_data(module, windows, &want, &data)) goto out;
  const int64_t *window = data;
  layers = PyMem_Calloc((size_t)rm_max64(values.n_layers, 1), sizeof *layers);
  if (!layers) {
    PyErr_NoMemory();
    goto out;
  }
  for (int64_t i = 0; i < values.n_layers; i++)
    layers[i] =
        (rm_layer_spec){.is_moe = moe[i] != 0, .rotates = turns[i] != 0, .window = window[i]};
  values.layers = layers;
  if (rm_spec_create(&values, &spec, &err)) rm_raise(module, &err);
out:
  PyMem_Free(layers);
  Py_XDECREF(inv_freq);
  Py_XDECREF(is_moe);
  Py_XDECREF(rotates);
  Py_XDECREF(names);
  Py_XDECREF(windows);
  return spec;
}

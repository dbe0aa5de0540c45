// spec.c: see spec.h.
#include "spec.h"

#include "arrays.h"
#include "attributes.h"

#define SPEC(python_name, type, member) {python_name, type, offsetof(rm_spec, member)}
static const rm_attribute fields[] = {
    SPEC("vocab_size", RM_ATTR_I64, vocab_size),
    SPEC("hidden_size", RM_ATTR_I64, hidden_size),
    SPEC("intermediate_size", RM_ATTR_I64, intermediate_size),
    SPEC("num_layers", RM_ATTR_I64, n_layers),
    SPEC("num_heads", RM_ATTR_I64, n_heads),
    SPEC("num_kv_heads", RM_ATTR_I64, n_kv_heads),
    SPEC("head_dim", RM_ATTR_I64, head_dim),
    SPEC("num_experts", RM_ATTR_I64, n_experts),
    SPEC("top_k", RM_ATTR_I64, top_k),
    SPEC("moe_intermediate_size", RM_ATTR_I64, moe_intermediate_size),
    SPEC("norm_topk_prob", RM_ATTR_BOOL, norm_topk_prob),
    SPEC("attention_bias", RM_ATTR_BOOL, attention_bias),
    SPEC("tie_word_embeddings", RM_ATTR_BOOL, tie_word_embeddings),
    SPEC("router_bias", RM_ATTR_BOOL, router_bias),
    SPEC("rms_norm_eps", RM_ATTR_F32, rms_norm_eps),
    SPEC("rope_scale", RM_ATTR_F32, rope_scale),
};

rm_spec *rm_spec_from_python(PyObject *module, PyObject *object) {
  rm_spec values = {0}, *spec = NULL;
  rm_error err = RM_ERROR_INIT;
  PyObject *inv_freq = NULL, *is_moe = NULL, *windows = NULL;
  rm_layer_spec *layers = NULL;
  void *data;
  if (rm_attributes_read(module, object, fields, RM_LENGTH(fields), &values, NULL)) return NULL;
  if (!(inv_freq = PyObject_GetAttrString(object, "inv_freq"))) goto out;
  if (!(is_moe = PyObject_GetAttrString(object, "layer_is_moe"))) goto out;
  if (!(windows = PyObject_GetAttrString(object, "layer_windows"))) goto out;
  rm_array_want want = {"inv_freq", NPY_FLOAT32, RM_ARRAY_IN, 1, {values.head_dim / 2}};
  if (rm_array_data(module, inv_freq, &want, &data)) goto out;
  values.inv_freq = data;
  want = (rm_array_want){"layer_is_moe", NPY_UINT8, RM_ARRAY_IN, 1, {values.n_layers}};
  if (rm_array_data(module, is_moe, &want, &data)) goto out;
  const uint8_t *moe = data;
  want = (rm_array_want){"layer_windows", NPY_INT64, RM_ARRAY_IN, 1, {values.n_layers}};
  if (rm_array_data(module, windows, &want, &data)) goto out;
  const int64_t *window = data;
  layers = PyMem_Calloc((size_t)rm_max64(values.n_layers, 1), sizeof *layers);
  if (!layers) {
    PyErr_NoMemory();
    goto out;
  }
  for (int64_t i = 0; i < values.n_layers; i++) layers[i] = (rm_layer_spec){.is_moe = moe[i] != 0, .window = window[i]};
  values.layers = layers;
  if (rm_spec_create(&values, &spec, &err)) rm_raise(module, &err);
out:
  PyMem_Free(layers);
  Py_XDECREF(inv_freq);
  Py_XDECREF(is_moe);
  Py_XDECREF(windows);
  return spec;
}

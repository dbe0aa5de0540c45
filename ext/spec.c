// spec.c: see spec.h.
#include "spec.h"

#include <string.h>

#include "arrays.h"
#include "attributes.h"
#include "model/params.h"

#define SPEC(python_name, type, member) {python_name, type, offsetof(rm_spec, member)}
// Attributes of rollmesh.model.spec.ModelSpec.
static const rm_attribute model_fields[] = {
    SPEC("vocab_size", RM_ATTR_I64, vocab_size),
    SPEC("hidden_size", RM_ATTR_I64, hidden_size),
    SPEC("intermediate_size", RM_ATTR_I64, intermediate_size),
    SPEC("num_hidden_layers", RM_ATTR_I64, n_layers),
    SPEC("num_attention_heads", RM_ATTR_I64, n_heads),
    SPEC("num_key_value_heads", RM_ATTR_I64, n_kv_heads),
    SPEC("head_dim", RM_ATTR_I64, head_dim),
    SPEC("num_experts", RM_ATTR_I64, n_experts),
    SPEC("num_experts_per_tok", RM_ATTR_I64, top_k),
    SPEC("moe_intermediate_size", RM_ATTR_I64, moe_intermediate_size),
    SPEC("norm_topk_prob", RM_ATTR_BOOL, norm_topk_prob),
    SPEC("shared_intermediate_size", RM_ATTR_I64, shared_intermediate_size),
    SPEC("shared_switch", RM_ATTR_BOOL, shared_switch),
    SPEC("n_group", RM_ATTR_I64, n_groups),
    SPEC("topk_group", RM_ATTR_I64, top_groups),
    SPEC("routed_scaling_factor", RM_ATTR_F32, route_scale),
    SPEC("norm_before", RM_ATTR_BOOL, norm_before),
    SPEC("norm_after", RM_ATTR_BOOL, norm_after),
    SPEC("attention_bias", RM_ATTR_BOOL, attention_bias),
    SPEC("o_bias", RM_ATTR_BOOL, o_bias),
    SPEC("tie_word_embeddings", RM_ATTR_BOOL, tie_word_embeddings),
    SPEC("router_bias", RM_ATTR_BOOL, router_bias),
    SPEC("ungated", RM_ATTR_BOOL, ungated),
    SPEC("rms_norm_eps", RM_ATTR_F32, rms_norm_eps),
};
// Attributes of EngineValues.
static const rm_attribute fields[] = {
    SPEC("sigmoid_scores", RM_ATTR_BOOL, sigmoid_scores),
    SPEC("qk_norm", RM_ATTR_INT, qk_norm),
    SPEC("wq_rows", RM_ATTR_INT, wq_rows),
    SPEC("rope_neighbours", RM_ATTR_BOOL, rope_neighbours),
    SPEC("activation", RM_ATTR_INT, activation),
    SPEC("rope_scale", RM_ATTR_F32, rope_scale),
};
enum { LAYER_COLUMNS = 3 }; // is_moe, rotates, window

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

// Converts the rows of an int64 array to layers; NULL with MemoryError.
static rm_layer_spec *layers_of(const int64_t *rows, int64_t n) {
  rm_layer_spec *layers = PyMem_Calloc((size_t)n + 1, sizeof *layers);
  if (!layers) PyErr_NoMemory();
  for (int64_t i = 0; layers && i < n; i++, rows += LAYER_COLUMNS)
    layers[i] = (rm_layer_spec){.is_moe = rows[0] != 0, .rotates = rows[1] != 0, .window = rows[2]};
  return layers;
}

rm_spec *rm_spec_from_python(PyObject *module, PyObject *object) {
  rm_spec values = {0}, *spec = NULL;
  rm_error err = RM_ERROR_INIT;
  PyObject *model = NULL, *inv_freq = NULL, *rows = NULL, *names = NULL;
  rm_layer_spec *layers = NULL;
  void *frequencies, *columns;
  if (!(model = PyObject_GetAttrString(object, "spec")) ||
      !(inv_freq = PyObject_GetAttrString(object, "inv_freq")) ||
      !(rows = PyObject_GetAttrString(object, "layers")) ||
      !(names = PyObject_GetAttrString(object, "names")) ||
      rm_attributes_read(module, model, model_fields, RM_LENGTH(model_fields), &values, NULL) ||
      rm_attributes_read(module, object, fields, RM_LENGTH(fields), &values, NULL) ||
      read_names(module, names, &values))
    goto out;
  rm_array_want of_rope = {"inv_freq", NPY_FLOAT32, RM_ARRAY_IN, 1, {-1}},
                of_layers = {"layers", NPY_INT64, RM_ARRAY_IN, 2, {values.n_layers, LAYER_COLUMNS}};
  if (rm_array_data(module, inv_freq, &of_rope, &frequencies) ||
      rm_array_data(module, rows, &of_layers, &columns) ||
      !(layers = layers_of(columns, of_layers.shape[0])))
    goto out;
  values.inv_freq = frequencies;
  values.rotary_dim = 2 * of_rope.shape[0];
  values.layers = layers;
  if (rm_spec_create(&values, &spec, &err)) rm_raise(module, &err);
out:
  PyMem_Free(layers);
  Py_XDECREF(model);
  Py_XDECREF(inv_freq);
  Py_XDECREF(rows);
  Py_XDECREF(names);
  return spec;
}

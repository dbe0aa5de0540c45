// spec.c: see spec.h.
#include "spec.h"

#include <string.h>

#include "arrays.h"
#include "attributes.h"
#include "model/params.h"

#define SPEC(type, member) RM_ATTRIBUTE(rm_spec, type, member)
#define SPEC_AS(type, name, member) RM_ATTRIBUTE_AS(rm_spec, type, name, member)
// Attributes of rollmesh.model.spec.ModelSpec.
static const rm_attribute model_fields[] = {
    SPEC(I64, vocab_size),
    SPEC(I64, hidden_size),
    SPEC(I64, intermediate_size),
    SPEC_AS(I64, num_hidden_layers, n_layers),
    SPEC_AS(I64, num_attention_heads, n_heads),
    SPEC_AS(I64, num_key_value_heads, n_kv_heads),
    SPEC(I64, head_dim),
    SPEC_AS(I64, num_experts, n_experts),
    SPEC_AS(I64, num_experts_per_tok, top_k),
    SPEC(I64, moe_intermediate_size),
    SPEC(BOOL, norm_topk_prob),
    SPEC(I64, shared_intermediate_size),
    SPEC(BOOL, shared_switch),
    SPEC_AS(I64, n_group, n_groups),
    SPEC_AS(I64, topk_group, top_groups),
    SPEC_AS(F32, routed_scaling_factor, route_scale),
    SPEC(BOOL, norm_before),
    SPEC(BOOL, norm_after),
    SPEC(BOOL, attention_bias),
    SPEC(BOOL, o_bias),
    SPEC(BOOL, tie_word_embeddings),
    SPEC(BOOL, router_bias),
    SPEC(BOOL, ungated),
    SPEC(BOOL, zero_centered_norms),
    SPEC(BOOL, qk_norm_last),
    SPEC(BOOL, attention_gate),
    SPEC(I64, kv_lora_rank),
    SPEC(I64, q_lora_rank),
    SPEC(I64, qk_nope_head_dim),
    SPEC(I64, v_head_dim),
    SPEC(F32, rms_norm_eps),
    SPEC(BOOL, sinks),
    SPEC(BOOL, moe_bias),
    SPEC(F32, swiglu_alpha),
    SPEC(F32, swiglu_limit),
    SPEC_AS(I64, linear_num_key_heads, delta_k_heads),
    SPEC_AS(I64, linear_num_value_heads, delta_v_heads),
    SPEC_AS(I64, linear_key_head_dim, delta_k_dim),
    SPEC_AS(I64, linear_value_head_dim, delta_v_dim),
    SPEC_AS(I64, linear_conv_kernel_dim, delta_kernel),
};
// Attributes of ModelSpec.engine_values().
static const rm_attribute fields[] = {
    SPEC(BOOL, sigmoid_scores),      SPEC(I32, qk_norm),           SPEC(I32, wq_rows),
    SPEC(BOOL, rope_neighbours),     SPEC(I32, activation),        SPEC(F32, rope_scale),
    SPEC(BOOL, experts_interleaved), SPEC(F32, min_sum),           SPEC(F32, local_rope_scale),
    SPEC(F32, attention_scale),      SPEC(F32, attention_softcap), SPEC(F32, logits_softcap),
    SPEC(F32, embed_scale),          SPEC(F32, embed_scale_bf16),  SPEC(F32, residual_scale),
    SPEC(F32, logits_scale),         SPEC(BOOL, gate_in_q),        SPEC(BOOL, delta_alternates),
};
enum { LAYER_COLUMNS = 4 }; // is_moe, rotates, window, kind

// Reads `names`, a tuple of (kind, name); both are views of the caller's strings.
static int read_names(PyObject *module, PyObject *names, rm_spec *values) {
  for (Py_ssize_t i = 0; i < PyTuple_Size(names); i++) {
    const char *kind, *name;
    if (!PyArg_ParseTuple(PyTuple_GetItem(names, i), "ss", &kind, &name)) return -1;
    int k = 0;
    while (k < RM_N_PARAM_KIND && strcmp(rm_kinds[k].kind, kind) != 0) k++;
    if (k == RM_N_PARAM_KIND)
      return rm_refuse(module, RM_E_CONFIG, "names: expected kinds of parameters, got %s", kind);
    values->names[k] = name;
  }
  return PyErr_Occurred() ? -1 : 0;
}

// Converts the rows of an int64 array to layers; NULL with MemoryError.
static rm_layer_spec *layers_of(const int64_t *rows, int64_t n) {
  rm_layer_spec *layers = PyMem_Calloc((size_t)n + 1, sizeof *layers);
  if (!layers) PyErr_NoMemory();
  for (int64_t i = 0; layers && i < n; i++, rows += LAYER_COLUMNS)
    layers[i] = (rm_layer_spec){.is_moe = rows[0] != 0,
                                .rotates = (int)rows[1],
                                .window = rows[2],
                                .kind = (rm_layer_kind)rows[3]};
  return layers;
}

rm_spec *rm_spec_from_python(PyObject *module, PyObject *object) {
  rm_spec values = {0}, *spec = NULL;
  rm_error err = RM_ERROR_INIT;
  RM_OWNED *model = NULL, *inv_freq = NULL, *local = NULL, *rows = NULL, *names = NULL;
  rm_layer_spec *layers;
  void *frequencies, *local_frequencies = NULL, *columns;
  if (!(model = PyObject_GetAttrString(object, "spec")) ||
      !(inv_freq = PyObject_GetAttrString(object, "inv_freq")) ||
      !(local = PyObject_GetAttrString(object, "local_inv_freq")) ||
      !(rows = PyObject_GetAttrString(object, "layers")) ||
      !(names = PyObject_GetAttrString(object, "names")) ||
      rm_attributes_read(module, model, model_fields, RM_LENGTH(model_fields), &values, NULL) ||
      rm_attributes_read(module, object, fields, RM_LENGTH(fields), &values, NULL) ||
      read_names(module, names, &values))
    return NULL;
  rm_array_want of_rope = {"inv_freq", NPY_FLOAT32, RM_ARRAY_IN, 1, {-1}},
                of_local = {"local_inv_freq", NPY_FLOAT32, RM_ARRAY_IN, 1, {-1}},
                of_layers = {"layers", NPY_INT64, RM_ARRAY_IN, 2, {values.n_layers, LAYER_COLUMNS}};
  if (rm_array_data(module, inv_freq, &of_rope, &frequencies)) return NULL;
  of_local.shape[0] = of_rope.shape[0];
  if ((local != Py_None && rm_array_data(module, local, &of_local, &local_frequencies)) ||
      rm_array_data(module, rows, &of_layers, &columns) ||
      !(layers = layers_of(columns, of_layers.shape[0])))
    return NULL;
  values.inv_freq = frequencies;
  values.local_inv_freq = local_frequencies;
  values.rotary_dim = 2 * of_rope.shape[0];
  values.layers = layers;
  if (rm_spec_create(&values, &spec, &err)) rm_raise(module, &err);
  PyMem_Free(layers);
  return spec;
}

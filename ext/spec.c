// spec.c: see spec.h.
#include "spec.h"

#include <string.h>

#include "arrays.h"
#include "attributes.h"
#include "model/params.h"

#define SPEC(member) RM_MEMBER(rm_spec, member)
#define SPEC_BOOL(member) RM_ATTRIBUTE(rm_spec, BOOL, member)
#define SPEC_AS(name, member) RM_MEMBER_AS(rm_spec, name, member)
// Attributes of rollmesh.model.spec.ModelSpec.
static const rm_attribute model_fields[] = {
    SPEC(vocab_size),
    SPEC(hidden_size),
    SPEC(intermediate_size),
    SPEC_AS(num_hidden_layers, n_layers),
    SPEC_AS(num_attention_heads, n_heads),
    SPEC_AS(num_key_value_heads, n_kv_heads),
    SPEC(head_dim),
    SPEC_AS(num_experts, n_experts),
    SPEC_AS(num_experts_per_tok, top_k),
    SPEC(moe_intermediate_size),
    SPEC_BOOL(norm_topk_prob),
    SPEC(shared_intermediate_size),
    SPEC_BOOL(shared_switch),
    SPEC_AS(n_group, n_groups),
    SPEC_AS(topk_group, top_groups),
    SPEC_AS(routed_scaling_factor, route_scale),
    SPEC_BOOL(norm_before),
    SPEC_BOOL(norm_after),
    SPEC_BOOL(attention_bias),
    SPEC_BOOL(o_bias),
    SPEC_BOOL(tie_word_embeddings),
    SPEC_BOOL(router_bias),
    SPEC_BOOL(ungated),
    SPEC_BOOL(zero_centered_norms),
    SPEC_BOOL(qk_norm_last),
    SPEC_BOOL(attention_gate),
    SPEC(kv_lora_rank),
    SPEC(q_lora_rank),
    SPEC(qk_nope_head_dim),
    SPEC(v_head_dim),
    SPEC(rms_norm_eps),
    SPEC_BOOL(sinks),
    SPEC_BOOL(moe_bias),
    SPEC(swiglu_alpha),
    SPEC(swiglu_limit),
    SPEC_AS(linear_num_key_heads, delta_k_heads),
    SPEC_AS(linear_num_value_heads, delta_v_heads),
    SPEC_AS(linear_key_head_dim, delta_k_dim),
    SPEC_AS(linear_value_head_dim, delta_v_dim),
    SPEC_AS(linear_conv_kernel_dim, delta_kernel),
};
// Attributes of ModelSpec.engine_values().
static const rm_attribute fields[] = {
    SPEC_BOOL(sigmoid_scores),
    SPEC(qk_norm),
    SPEC(wq_rows),
    SPEC_BOOL(rope_neighbours),
    SPEC(activation),
    SPEC(rope_scale),
    SPEC_BOOL(experts_interleaved),
    SPEC(min_sum),
    SPEC(local_rope_scale),
    SPEC(attention_scale),
    SPEC(attention_softcap),
    SPEC(logits_softcap),
    SPEC(embed_scale),
    SPEC(embed_scale_bf16),
    SPEC(residual_scale),
    SPEC(logits_scale),
    SPEC_BOOL(gate_in_q),
    SPEC_BOOL(delta_alternates),
};
enum { LAYER_COLUMNS = 4 }; // is_moe, rotates, window, kind

// Reads `names`, a tuple of (kind, name); both are views of the caller's strings.
static int read_names(PyObject *names, rm_spec *values) {
  for (Py_ssize_t i = 0; i < PyTuple_Size(names); i++) {
    const char *kind, *name;
    if (!PyArg_ParseTuple(PyTuple_GetItem(names, i), "ss", &kind, &name)) return -1;
    int k = 0;
    while (k < RM_N_PARAM_KIND && strcmp(rm_kinds[k].kind, kind) != 0) k++;
    if (k == RM_N_PARAM_KIND)
      return rm_refuse(RM_E_CONFIG, "names: expected kinds of parameters, got %s", kind);
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

rm_spec *rm_spec_from_python(PyObject *object) {
  rm_spec values = {0}, *spec = NULL;
  RM_OWNED *model = NULL, *inv_freq = NULL, *local = NULL, *rows = NULL, *names = NULL;
  rm_layer_spec *layers;
  void *frequencies, *local_frequencies = NULL, *columns;
  if (!(model = PyObject_GetAttrString(object, "spec")) ||
      !(inv_freq = PyObject_GetAttrString(object, "inv_freq")) ||
      !(local = PyObject_GetAttrString(object, "local_inv_freq")) ||
      !(rows = PyObject_GetAttrString(object, "layers")) ||
      !(names = PyObject_GetAttrString(object, "names")) ||
      rm_attributes_read(model, model_fields, RM_LENGTH(model_fields), &values, NULL) ||
      rm_attributes_read(object, fields, RM_LENGTH(fields), &values, NULL) ||
      read_names(names, &values))
    return NULL;
  rm_array_want of_rope = {"inv_freq", NPY_FLOAT32, RM_ARRAY_IN, 1, {-1}},
                of_local = {"local_inv_freq", NPY_FLOAT32, RM_ARRAY_IN, 1, {-1}},
                of_layers = {"layers", NPY_INT64, RM_ARRAY_IN, 2, {values.n_layers, LAYER_COLUMNS}};
  if (rm_array_data(inv_freq, &of_rope, &frequencies)) return NULL;
  of_local.shape[0] = of_rope.shape[0];
  if ((local != Py_None && rm_array_data(local, &of_local, &local_frequencies)) ||
      rm_array_data(rows, &of_layers, &columns) ||
      !(layers = layers_of(columns, of_layers.shape[0])))
    return NULL;
  values.inv_freq = frequencies;
  values.local_inv_freq = local_frequencies;
  values.rotary_dim = 2 * of_rope.shape[0];
  values.layers = layers;
  (void)RM_FAILS(rm_spec_create(&values, &spec, &err));
  PyMem_Free(layers);
  return spec;
}

// weights.c: the serving weights as arguments of rollmesh.ops, for a model that another runner
// computes op by op. The arrays are read-only views of the packed layouts of params.h. They keep
// the engine alive, and are valid until its next commit, sleep or close.
#include "engine_object.h"

typedef struct serving {
  rm_engine_object *self;
  const rm_params *params;
  const char *block;
  int type; // NumPy type of the weights
} serving;

// Adds a view of n elements (or [rows][cols]) at an offset to the dict. Does nothing if the model
// does not have this matrix.
static int put_view(const serving *s, PyObject *dict, const char *name, size_t offset, int type,
                    int n_dims, int64_t rows, int64_t cols) {
  if (offset == SIZE_MAX) return 0;
  npy_intp dims[2] = {(npy_intp)rows, (npy_intp)cols};
  void *data = (void *)(uintptr_t)(s->block + offset);
  PyObject *view =
      PyArray_New(&PyArray_Type, n_dims, dims, type, NULL, data, 0, NPY_ARRAY_CARRAY_RO, NULL);
  if (!view) return -1;
  if (PyArray_SetBaseObject((PyArrayObject *)view, Py_NewRef((PyObject *)s->self))) {
    Py_DECREF(view);
    return -1;
  }
  const int failed = PyDict_SetItemString(dict, name, view);
  Py_DECREF(view);
  return failed;
}

static int put_run(const serving *s, PyObject *dict, const char *name, size_t offset, int64_t n) {
  return put_view(s, dict, name, offset, s->type, 1, n, 0);
}

static int put_attention(const serving *s, PyObject *dict, const rm_layer_params *layer) {
  const rm_spec *spec = s->params->spec;
  const rm_placement *here = &s->params->placement;
  const int64_t head = spec->head_dim, q = here->heads.n * head, kv = here->kv_heads.n * head,
                width = q + 2 * kv, hidden = spec->hidden_size;
  const int whole = spec->qk_norm == RM_QK_NORM_WHOLE;
  return put_run(s, dict, "input_norm", layer->input_norm, hidden) ||
         put_run(s, dict, "post_attn_norm", layer->post_attn_norm, hidden) ||
         put_run(s, dict, "pre_mlp_norm", layer->pre_mlp_norm, hidden) ||
         put_run(s, dict, "post_mlp_norm", layer->post_mlp_norm, hidden) ||
         put_run(s, dict, "q_norm", layer->q_norm, whole ? q : head) ||
         put_run(s, dict, "k_norm", layer->k_norm, whole ? kv : head) ||
         put_run(s, dict, "qkv", layer->qkv, rm_packed_elems(width, hidden)) ||
         put_run(s, dict, "qkv_bias", layer->qkv_bias, width) ||
         put_run(s, dict, "o", layer->o,
                 rm_packed_elems(here->hidden.n, spec->n_heads * spec->head_dim)) ||
         put_run(s, dict, "o_bias", layer->o_bias, here->hidden.n);
}

static int put_mlp(const serving *s, PyObject *dict, const rm_layer_params *layer) {
  const rm_spec *spec = s->params->spec;
  const rm_placement *here = &s->params->placement;
  const int64_t hidden = spec->hidden_size, experts = here->experts.n;
  const int64_t inner = spec->ungated ? here->inner.n : rm_gate_up_rows(here->inner.n);
  return put_run(s, dict, spec->ungated ? "up" : "gate_up", layer->gate_up,
                 rm_packed_elems(inner, hidden)) ||
         put_run(s, dict, "down", layer->down,
                 rm_packed_elems(here->hidden.n, spec->intermediate_size)) ||
         put_run(s, dict, "router", layer->router, rm_packed_elems(spec->n_experts, hidden)) ||
         put_view(s, dict, "router_bias", layer->router_bias, NPY_FLOAT32, 1, spec->n_experts, 0) ||
         put_run(s, dict, "shared_gate_up", layer->shared_gate_up,
                 rm_packed_elems(rm_gate_up_rows(here->shared_inner.n), hidden)) ||
         put_run(s, dict, "shared_down", layer->shared_down,
                 rm_packed_elems(here->hidden.n, spec->shared_intermediate_size)) ||
         put_run(s, dict, "shared_switch", layer->shared_switch, rm_packed_elems(1, hidden)) ||
         put_run(s, dict, "expert_gate_up", layer->expert_gate_up,
                 experts * layer->expert_gate_up_stride) ||
         put_run(s, dict, "expert_down", layer->expert_down, experts * layer->expert_down_stride);
}

static PyObject *layer_views(const serving *s, const rm_layer_params *layer) {
  PyObject *dict = PyDict_New();
  if (dict && (put_attention(s, dict, layer) || put_mlp(s, dict, layer))) Py_CLEAR(dict);
  return dict;
}

static int put_ends(const serving *s, PyObject *dict) {
  const rm_params *params = s->params;
  const int64_t vocab = params->placement.vocab.n, hidden = params->spec->hidden_size,
                packed = rm_packed_elems(vocab, hidden);
  const int tied = params->spec->tie_word_embeddings;
  if (put_view(s, dict, "embed", params->embed, s->type, tied ? 1 : 2, tied ? packed : vocab,
               hidden))
    return -1;
  return put_run(s, dict, "lm_head", params->lm_head, packed) ||
         put_run(s, dict, "final_norm", params->final_norm, hidden);
}

static PyObject *all_views(const serving *s) {
  const Py_ssize_t n = (Py_ssize_t)s->params->spec->n_layers;
  PyObject *dict = PyDict_New(), *layers = PyList_New(n);
  int failed = !dict || !layers || put_ends(s, dict);
  for (Py_ssize_t i = 0; !failed && i < n; i++) {
    PyObject *layer = layer_views(s, &s->params->layers[i]);
    failed = !layer || PyList_SetItem(layers, i, layer);
  }
  if (!failed) failed = PyDict_SetItemString(dict, "layers", layers);
  Py_XDECREF(layers);
  if (failed) Py_CLEAR(dict);
  return dict;
}

PyObject *rm_engine_py_weights(rm_engine_object *self) {
  rm_store *store = rm_engine_store(self->engine);
  const serving s = {.self = self,
                     .params = rm_store_params(store),
                     .block = rm_store_weights(store),
                     .type = rm_store_params(store)->dtype == RM_BF16 ? NPY_UINT16 : NPY_FLOAT32};
  return s.block ? all_views(&s) : Py_NewRef(Py_None);
}

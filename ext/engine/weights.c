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

// Returns a view of n elements (or [rows][cols]) at an offset.
static PyObject *view_of(const serving *s, size_t offset, int type, int n_dims, int64_t rows,
                         int64_t cols) {
  npy_intp dims[2] = {(npy_intp)rows, (npy_intp)cols};
  void *data = (void *)(uintptr_t)(s->block + offset);
  PyObject *view =
      PyArray_New(&PyArray_Type, n_dims, dims, type, NULL, data, 0, NPY_ARRAY_CARRAY_RO, NULL);
  if (view && PyArray_SetBaseObject((PyArrayObject *)view, Py_NewRef((PyObject *)s->self)))
    Py_CLEAR(view);
  return view;
}

// Names of matrices that are several parameters; any other has its parameter's name.
static const char *const fused_names[RM_N_PARAM_KIND] = {
    [RM_P_Q] = "qkv",
    [RM_P_Q_BIAS] = "qkv_bias",
    [RM_P_GATE] = "gate_up",
    [RM_P_SHARED_GATE] = "shared_gate_up",
    [RM_P_EXPERT_GATE] = "expert_gate_up",
    [RM_P_EXPERT_GATE_BIAS] = "expert_gate_up_bias",
};

// Returns a layer's matrices, or those outside of layers.
static PyObject *views_of(const serving *s, const rm_layer_params *layer) {
  PyObject *dict = PyDict_New();
  const int64_t hidden = s->params->spec->hidden_size;
  for (int kind = 0; kind < RM_N_PARAM_KIND; kind++) {
    const rm_matrix matrix = layer->of[kind];
    const int is_table = kind == RM_P_EMBED && !s->params->spec->tie_word_embeddings;
    // The other parameters of a fused matrix.
    if (matrix.offset == SIZE_MAX || matrix.is_rest) continue;
    rm_dict_put(&dict, fused_names[kind] ? fused_names[kind] : rm_kinds[kind].kind,
                view_of(s, matrix.offset, kind == RM_P_ROUTER_BIAS ? NPY_FLOAT32 : s->type,
                        is_table ? 2 : 1, is_table ? matrix.elems / hidden : matrix.elems, hidden));
  }
  return dict;
}

static PyObject *all_views(const serving *s) {
  PyObject *layers = PyList_New(0), *dict = views_of(s, &s->params->ends);
  for (int64_t i = 0; layers && i < s->params->spec->n_layers; i++)
    rm_list_put(&layers, views_of(s, &s->params->layers[i]));
  rm_dict_put(&dict, "layers", layers);
  return dict;
}

RM_ENGINE_METHOD(weights, ) {
  rm_store *store = rm_engine_store(self->engine);
  const serving s = {.self = self,
                     .params = store->params,
                     .block = store->serving.block,
                     .type = store->params->dtype == RM_BF16 ? NPY_UINT16 : NPY_FLOAT32};
  return s.block ? all_views(&s) : Py_NewRef(Py_None);
}

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

// Adds a view of n elements (or [rows][cols]) at an offset to the dict.
static int put_view(const serving *s, PyObject *dict, const char *name, size_t offset, int type,
                    int n_dims, int64_t rows, int64_t cols) {
  npy_intp dims[2] = {(npy_intp)rows, (npy_intp)cols};
  void *data = (void *)(uintptr_t)(s->block + offset);
  RM_OWNED *view =
      PyArray_New(&PyArray_Type, n_dims, dims, type, NULL, data, 0, NPY_ARRAY_CARRAY_RO, NULL);
  if (!view || PyArray_SetBaseObject((PyArrayObject *)view, Py_NewRef((PyObject *)s->self)))
    return -1;
  return PyDict_SetItemString(dict, name, view);
}

// Names of matrices that are several parameters; any other has its parameter's name.
static const char *const fused_names[RM_N_PARAM_KIND] = {
    [RM_P_Q] = "qkv",
    [RM_P_Q_BIAS] = "qkv_bias",
    [RM_P_GATE] = "gate_up",
    [RM_P_SHARED_GATE] = "shared_gate_up",
    [RM_P_EXPERT_GATE] = "expert_gate_up",
};

// Adds a layer's matrices, or those outside of layers.
static int put_matrices(const serving *s, PyObject *dict, const rm_layer_params *layer) {
  const int64_t hidden = s->params->spec->hidden_size;
  int failed = 0;
  for (int kind = 0; kind < RM_N_PARAM_KIND && !failed; kind++) {
    const rm_matrix matrix = layer->of[kind];
    const char *name = fused_names[kind] ? fused_names[kind] : rm_kinds[kind].kind;
    // The other parameters of a fused matrix.
    if (matrix.offset == SIZE_MAX || matrix.is_rest) continue;
    const int is_table = kind == RM_P_EMBED && !s->params->spec->tie_word_embeddings;
    failed =
        put_view(s, dict, name, matrix.offset, kind == RM_P_ROUTER_BIAS ? NPY_FLOAT32 : s->type,
                 is_table ? 2 : 1, is_table ? matrix.elems / hidden : matrix.elems, hidden);
  }
  return failed;
}

static PyObject *all_views(const serving *s) {
  const Py_ssize_t n = (Py_ssize_t)s->params->spec->n_layers;
  PyObject *dict = PyDict_New(), *layers = PyList_New(n);
  int failed = !dict || !layers || put_matrices(s, dict, &s->params->ends);
  for (Py_ssize_t i = 0; !failed && i < n; i++) {
    PyObject *layer = PyDict_New();
    failed = !layer || put_matrices(s, layer, &s->params->layers[i]);
    if (layer) failed |= PyList_SetItem(layers, i, layer);
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

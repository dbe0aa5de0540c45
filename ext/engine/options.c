// options.c: what an engine is made of, read from the attributes of a Python object (python/rollmesh/runtime/engine_options.py).
#include "engine_object.h"

#include <string.h>

#include "attributes.h"

#define N_ENTRIES(table) (sizeof(table) / sizeof(table)[0])

#define OPTION(python_name, type, member) {python_name, type, offsetof(rm_ranks_options, member)}
static const rm_attribute option_fields[] = {
    OPTION("threads", RM_ATTR_INT, engine.n_threads),
    OPTION("max_model_len", RM_ATTR_I64, engine.max_model_len),
    OPTION("max_num_seqs", RM_ATTR_I64, engine.max_num_seqs),
    OPTION("max_num_batched_tokens", RM_ATTR_I64, engine.max_num_batched_tokens),
    OPTION("block_size", RM_ATTR_I64, engine.page_size),
    OPTION("kv_bytes", RM_ATTR_U64, engine.kv_bytes),
    OPTION("memory_fraction", RM_ATTR_F64, engine.memory_fraction),
    OPTION("host_pages", RM_ATTR_I64, engine.host_pages),
    OPTION("seed", RM_ATTR_U64, engine.seed),
    OPTION("enable_prefix_caching", RM_ATTR_BOOL, engine.prefix_caching),
    OPTION("enforce_eager", RM_ATTR_BOOL, engine.enforce_eager),
    OPTION("sequence_parallel", RM_ATTR_BOOL, sequence_parallel),
    OPTION("cuda_ordinal", RM_ATTR_INT, cuda_ordinal),
};

static int is_word(PyObject *object, const char *word) {
  return PyUnicode_Check(object) && PyUnicode_CompareWithASCIIString(object, word) == 0;
}

static int choose_dtype(PyObject *module, PyObject *name, rm_dtype *dtype) {
  if (is_word(name, "bfloat16")) *dtype = RM_BF16;
  else if (is_word(name, "float32")) *dtype = RM_F32;
  else {
    rm_raise_code(module, RM_E_CONFIG, "dtype = %R, wanted 'bfloat16' or 'float32'", name);
    return -1;
  }
  return 0;
}

// None leaves the choice to the engine; a name asks for exactly that instruction set.
static int choose_kernels(PyObject *module, PyObject *isa, const rm_kernels **kernels) {
  *kernels = NULL;
  if (isa == Py_None) return 0;
  for (int i = 0; i < RM_N_ISA; i++)
    if (is_word(isa, rm_isa_name((rm_isa)i))) *kernels = rm_kernels_for((rm_isa)i);
  if (*kernels) return 0;
  rm_raise_code(module, RM_E_CONFIG, "isa = %R is not an instruction set that this build has and this processor can run", isa);
  return -1;
}

// A view of `word`; NULL for None.
static int optional_text(PyObject *word, const char **text) {
  *text = NULL;
  if (word == Py_None) return 0;
  return (*text = PyUnicode_AsUTF8AndSize(word, NULL)) ? 0 : -1;
}

typedef struct degrees {
  int64_t tp, dp, ep;
} degrees;
static const rm_attribute degree_fields[] = {
    {"tp", RM_ATTR_I64, offsetof(degrees, tp)},
    {"dp", RM_ATTR_I64, offsetof(degrees, dp)},
    {"ep", RM_ATTR_I64, offsetof(degrees, ep)},
};

static int choose_mesh(PyObject *module, PyObject *object, rm_mesh *mesh) {
  degrees d;
  rm_error err = RM_ERROR_INIT;
  if (rm_attributes_read(object, degree_fields, N_ENTRIES(degree_fields), &d)) return -1;
  if (!rm_mesh_create(d.tp, d.dp, d.ep, 1, 1, mesh, &err)) return 0;
  rm_raise(module, &err);
  return -1;
}

static int choose_dispatcher(PyObject *module, PyObject *name, rm_dispatcher *dispatcher) {
  for (int i = 0; i < RM_N_DISPATCHER; i++)
    if (is_word(name, rm_dispatcher_name((rm_dispatcher)i))) {
      *dispatcher = (rm_dispatcher)i;
      return 0;
    }
  rm_raise_code(module, RM_E_CONFIG, "ep_backend = %R is no token dispatcher of this build", name);
  return -1;
}

// Attributes that are texts or None, views of which go into the options.
static const struct {
  const char *name;
  size_t offset;
} text_fields[] = {
    {"cuda_library", offsetof(rm_ranks_options, cuda_library)},
    {"cuda_family", offsetof(rm_ranks_options, cuda_family)},
    {"nccl_library", offsetof(rm_ranks_options, engine.nccl_library)},
    {"nccl_gpu", offsetof(rm_ranks_options, engine.nccl_gpu)},
    {"cublas_library", offsetof(rm_ranks_options, engine.cublas_library)},
};
enum { N_TEXTS = N_ENTRIES(text_fields), HELD_DTYPE = N_TEXTS, HELD_ISA, HELD_BACKEND, HELD_EOS, N_HELD };
static const char *const held_names[N_HELD - N_TEXTS] = {"dtype", "isa", "ep_backend", "eos_token_ids"};

static int read_texts(PyObject *held, rm_ranks_options *options) {
  for (Py_ssize_t i = 0; i < N_TEXTS; i++) {
    const char *text;
    if (optional_text(PyTuple_GetItem(held, i), &text)) return -1;
    memcpy((char *)options + text_fields[i].offset, &text, sizeof text);
  }
  return 0;
}

PyObject *rm_engine_options_read(PyObject *module, PyObject *object, rm_ranks_options *out) {
  PyObject *held = PyTuple_New(N_HELD);
  *out = (rm_ranks_options){0};
  for (Py_ssize_t i = 0; held && i < N_HELD; i++) {
    PyObject *value = PyObject_GetAttrString(object, i < N_TEXTS ? text_fields[i].name : held_names[i - N_TEXTS]);
    if (!value || PyTuple_SetItem(held, i, value)) Py_CLEAR(held);
  }
  rm_engine_options *engine = &out->engine;
  if (!held || rm_attributes_read(object, option_fields, N_ENTRIES(option_fields), out) || choose_mesh(module, object, &out->mesh) ||
      choose_dispatcher(module, PyTuple_GetItem(held, HELD_BACKEND), &out->dispatcher) ||
      choose_dtype(module, PyTuple_GetItem(held, HELD_DTYPE), &engine->dtype) ||
      choose_kernels(module, PyTuple_GetItem(held, HELD_ISA), &engine->kernels) || read_texts(held, out) ||
      rm_array_ids(module, PyTuple_GetItem(held, HELD_EOS), "eos_token_ids", &engine->eos_ids, &engine->n_eos))
    Py_CLEAR(held);
  return held;
}

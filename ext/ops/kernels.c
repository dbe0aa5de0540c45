// kernels.c: _core.Kernels, and the function over arrays that needs none. See ops.h.
#include "ops.h"

#include "base/memory.h"
#include "device/cuda.h"

static PyObject *kernels_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
  static char *names[] = {"isa", "threads", "op_device", "stream", NULL};
  const char *isa;
  int threads;
  unsigned long long stream = 0;
  PyObject *module = PyType_GetModule(type), *op_device = Py_None;
  rm_error err = RM_ERROR_INIT;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "si|OK:Kernels", names, &isa, &threads, &op_device,
                                   &stream))
    return NULL;
  if (op_device != Py_None && !rm_is(module, op_device, RM_TYPE_OP_DEVICE))
    return rm_raise_code(module, RM_E_CONFIG, "op_device: expected an OpDevice or None, got %R",
                         op_device);
  const rm_kernels *table = NULL;
  if (op_device != Py_None &&
      rm_cuda_kernels(((rm_op_device *)op_device)->library, isa, &table, &err))
    return rm_raise(module, &err);
  if (op_device == Py_None && !(table = rm_kernels_named(isa)))
    return rm_raise_code(
        module, RM_E_CONFIG,
        "expected an instruction set that this build has and this processor runs, got isa='%.64s'",
        isa);
  rm_kernels_object *self = rm_object_new((PyObject *)type);
  if (!self) return NULL;
  self->table = table;
  self->owner = getpid();
  self->stream = (void *)(uintptr_t)stream;
  pthread_mutex_init(&self->mutex, NULL);
  if (op_device != Py_None) self->op_device = (rm_op_device *)Py_NewRef(op_device);
  else if (rm_team_create(threads, &self->team, &err)) {
    Py_DECREF(self);
    return rm_raise(module, &err);
  }
  return (PyObject *)self;
}

RM_TRAVERSE(kernels_traverse, rm_kernels_object, (PyObject *)self->op_device)

static void kernels_dealloc(PyObject *object) {
  PyObject_GC_UnTrack(object);
  rm_kernels_object *self = (rm_kernels_object *)object;
  rm_team_destroy(self->team);
  rm_unmap(self->workspace, self->workspace_bytes);
  if (getpid() == self->owner) pthread_mutex_destroy(&self->mutex);
  Py_XDECREF((PyObject *)self->op_device);
  rm_object_free(object);
}

#define METHOD(name, text) RM_METHOD(#name, rm_kernels_py_##name, METH_FASTCALL, text)
static PyMethodDef kernels_methods[] = {
    METHOD(embed, "(out, ids, table, packed, vocab, hidden)"),
    METHOD(gather_rows, "(out, x, from)"),
    METHOD(rms_norm, "(out, residual, x | None, weight | None, eps, x_gate | None)"),
    METHOD(gemm,
           "(y, x, w, bias | None, group_rows | None, n, swiglu, gate_up | None, activation)"),
    METHOD(activate, "(out, x, activation)"),
    METHOD(head_squares, "(q_out, k_out, qkv, head_dim)"),
    METHOD(qk_rope_kv,
           "(q_out, qkv, q_weight | None, k_weight | None, cos, sin, positions, slots, k_cache, "
           "v_cache, row_flags, num_heads, "
           "page_size, eps, q_squares | None, k_squares | None)"),
    METHOD(attention,
           "(out, q, k_cache, v_cache, positions, seq_of_row, block_tables, page_size, window, "
           "scale, group, head0)"),
    METHOD(router, "(ids, gates, x, w, bias | None, num_experts, renormalize, sigmoid, num_groups, "
                   "top_groups, route_scale)"),
    METHOD(permute, "(x_out, group_rows, place, x, ids, num_experts)"),
    METHOD(combine, "(out, y, place, ids, gates, num_experts)"),
    METHOD(lm_head,
           "(logits | None, stats | None, target_logprobs | None, targets | None, row_flags, x, w, "
           "vocab, pairs | None, "
           "target_logits | None)"),
    METHOD(
        merge_pairs,
        "(stats, target_logprobs | None, targets | None, row_flags, pairs, target_logits | None)"),
    METHOD(sample,
           "(tokens, logprobs, sampling_logprobs, kept, logits, stats, row_flags, temperature, "
           "top_p, min_p, top_k, seed, counter, forced, "
           "banned_starts, banned)"),
    METHOD(top_logprobs, "(ids, logprobs, logits, stats)"),
    METHOD(ranks, "(ranks, logits, tokens)"),
    METHOD(pack, "(dst, src, layout, dst_row0, index0) -> (digest, nonfinite_index)"),
    {0},
};

static PyType_Slot slots[] = {
    {Py_tp_new, kernels_new},
    {Py_tp_dealloc, kernels_dealloc},
    {Py_tp_traverse, kernels_traverse},
    {Py_tp_methods, kernels_methods},
    {Py_tp_doc,
     "Kernels(isa, threads, op_device = None, stream = 0): one variant of the ops over arrays; "
     "rollmesh.ops is its public face."},
    {0, NULL},
};

PyType_Spec rm_kernels_spec = RM_TYPE("Kernels", rm_kernels_object, RM_GC, slots);

// -------------------------------------------------------------------------------------- functions
// (cos, sin, inv_freq, scale, bfloat16)
static PyObject *rope_table(PyObject *module, PyObject *args) {
  PyObject *o[3];
  rm_op_call c = {.module = module};
  float scale;
  int bf16;
  int64_t positions = -1, half = -1;
  if (!PyArg_ParseTuple(args, "OOOfp:rope_table", &o[0], &o[1], &o[2], &scale, &bf16)) return NULL;
  const float *inv_freq = VIEW(&c, o[2], "inv_freq", NPY_FLOAT32, RM_ARRAY_IN, &half);
  float *cos = VIEW(&c, o[0], "cos", NPY_FLOAT32, RM_ARRAY_WRITE, &positions, &half);
  float *sin = VIEW(&c, o[1], "sin", NPY_FLOAT32, RM_ARRAY_WRITE, &positions, &half);
  if (c.failed) return NULL;
  Py_BEGIN_ALLOW_THREADS
    rm_rope_table(cos, sin, inv_freq, positions, half, scale, bf16 ? RM_BF16 : RM_F32);
  Py_END_ALLOW_THREADS
  Py_RETURN_NONE;
}

PyMethodDef rm_ops_functions[] = {
    {"rope_table", rope_table, METH_VARARGS, "(cos, sin, inv_freq, scale, bfloat16)"},
    {0},
};

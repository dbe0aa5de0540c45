// kernels.c: _core.Kernels, and the function over arrays that does not need it. See ops.h.
#include "ops.h"

#include "base/memory.h"
#include "gpu/gpu.h"

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

static PyMethodDef kernels_methods[] = {
    RM_METHOD("run", rm_op_run, METH_VARARGS,
              "run(op, {argument: value}): the outputs of an op of op_arguments()."),
    RM_METHOD("pack", rm_op_pack, METH_VARARGS,
              "pack(dst, src, layout, dst_row0, index0): (digest, nonfinite_index)."),
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
  PyObject *cos_object, *sin_object, *inv_freq_object;
  rm_op_call c = {.module = module};
  float scale;
  int bf16;
  int64_t positions = -1, half = -1;
  if (!PyArg_ParseTuple(args, "OOOfp:rope_table", &cos_object, &sin_object, &inv_freq_object,
                        &scale, &bf16))
    return NULL;
  const float *inv_freq = VIEW(&c, inv_freq_object, "inv_freq", NPY_FLOAT32, RM_ARRAY_IN, &half);
  float *cos = VIEW(&c, cos_object, "cos", NPY_FLOAT32, RM_ARRAY_WRITE, &positions, &half);
  float *sin = VIEW(&c, sin_object, "sin", NPY_FLOAT32, RM_ARRAY_WRITE, &positions, &half);
  if (c.failed) return NULL;
  Py_BEGIN_ALLOW_THREADS
    rm_rope_table(cos, sin, inv_freq, positions, half, scale, bf16 ? RM_BF16 : RM_F32);
  Py_END_ALLOW_THREADS
  Py_RETURN_NONE;
}

static PyObject *op_arguments(PyObject *module, PyObject *ignored) {
  (void)ignored;
  return Py_NewRef(rm_state(module)->op_arguments);
}

PyMethodDef rm_ops_functions[] = {
    {"rope_table", rope_table, METH_VARARGS, "(cos, sin, inv_freq, scale, bfloat16)"},
    {"op_arguments", op_arguments, METH_NOARGS,
     "op_arguments(): {op: {argument: 'number', 'in', 'index', 'host', 'inout' or 'out'}}."},
    {0},
};

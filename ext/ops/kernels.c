// kernels.c: _core.Kernels, and the function over arrays that does not need it. See ops.h.
#include "ops.h"

#include <structmember.h>

#include "base/memory.h"
#include "gpu/gpu.h"

static PyObject *kernels_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
  static char *names[] = {"isa", "threads", "op_device", "stream", NULL};
  const char *isa;
  int threads;
  unsigned long long stream = 0;
  PyObject *op_device = Py_None;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "si|OK:Kernels", names, &isa, &threads, &op_device,
                                   &stream))
    return NULL;
  if (op_device != Py_None &&
      !Py_IS_TYPE(op_device,
                  (PyTypeObject *)rm_state(PyType_GetModule(type))->types[RM_TYPE_OP_DEVICE]))
    return rm_raise_code(RM_E_CONFIG, "op_device: expected an OpDevice or None, got %R", op_device);
  const rm_kernels *table = NULL;
  if (RM_FAILS(
          op_device == Py_None
              ? rm_kernels_find(isa, &table, &err)
              : rm_cuda_kernels(PyUnicode_AsUTF8AndSize(((rm_op_device *)op_device)->library, NULL),
                                isa, &table, &err)))
    return NULL;
  rm_kernels_object *self = rm_object_new(type);
  if (!self) return NULL;
  self->table = table;
  self->owner = getpid();
  self->stream = (void *)(uintptr_t)stream;
  pthread_mutex_init(&self->mutex, NULL);
  if (op_device != Py_None) self->op_device = (rm_op_device *)Py_NewRef(op_device);
  else if (RM_FAILS(rm_team_create(threads, &self->team, &err))) Py_CLEAR(self);
  return (PyObject *)self;
}

static void kernels_dealloc(PyObject *object) {
  rm_kernels_object *self = (rm_kernels_object *)object;
  rm_team_destroy(self->team);
  rm_unmap(self->workspace, self->workspace_bytes);
  if (getpid() == self->owner) pthread_mutex_destroy(&self->mutex);
  Py_XDECREF((PyObject *)self->op_device);
  rm_object_free(object);
}

static PyMethodDef kernels_methods[] = {
    RM_METHOD("run", rm_op_run, METH_VARARGS),
    {0},
};

static PyMemberDef kernels_members[] = {
    {"op_device", T_OBJECT, offsetof(rm_kernels_object, op_device), READONLY, NULL},
    {0},
};

static PyType_Slot slots[] = {
    {Py_tp_new, kernels_new},
    {Py_tp_dealloc, kernels_dealloc},
    {Py_tp_methods, kernels_methods},
    {Py_tp_members, kernels_members},
    {0},
};

PyType_Spec rm_kernels_spec = RM_TYPE("Kernels", rm_kernels_object, 0, slots);

// -------------------------------------------------------------------------------------- functions
static PyObject *op_arguments(PyObject *module, PyObject *) {
  return Py_NewRef(rm_state(module)->op_arguments);
}

PyMethodDef rm_ops_functions[] = {RM_FUNCTION(op_arguments, NOARGS), {0}};

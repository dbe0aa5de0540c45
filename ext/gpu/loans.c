// loans.c: _core.Gpus, GPU tensors between processes by CUDA IPC. In the trainer it returns a
// tensor's address and the handle of its allocation; in another process it opens the handle and
// makes a DeviceArray over that memory. Python decides which process opens which memory, and for
// how long (rollmesh.weights.transport.loans). Called with the GIL.
#include "gpu_array.h"

#include <string.h>

#include "base/memory.h"
#include "dlpack.h"
#include "gpu/gpu.h"

typedef struct gpus_object {
  PyObject_HEAD
  rm_ready_streams readers; // owned
} gpus_object;

static PyObject *gpus_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
  static char *names[] = {"library", NULL};
  const char *library;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "s:Gpus", names, &library)) return NULL;
  gpus_object *self = rm_object_new(type);
  if (self && RM_FAILS(rm_ready_streams_init(&self->readers, library, &err))) Py_CLEAR(self);
  return (PyObject *)self;
}

static void gpus_dealloc(PyObject *self) {
  rm_ready_streams_destroy(&((gpus_object *)self)->readers);
  rm_object_free(self);
}

const rm_device *rm_gpus_device(PyObject *gpus, int ordinal) {
  const rm_device *device = NULL;
  (void)RM_FAILS(rm_ready_streams_find(&((gpus_object *)gpus)->readers, ordinal, &device, &err));
  return device;
}

static const rm_device *take_reader(void *self, PyObject *, int ordinal) {
  return rm_gpus_device(self, ordinal);
}

static PyObject *gpus_lend(PyObject *object, PyObject *args) {
  gpus_object *self = (gpus_object *)object;
  const rm_tensor_reader reader = {take_reader, NULL, self};
  PyObject *name, *given, *owner = NULL, *out = NULL;
  rm_tensor tensor;
  if (!PyArg_ParseTuple(args, "UO:lend", &name, &given)) return NULL;
  if (rm_tensor_from_object(given, name, &reader, &tensor, &owner)) return NULL;
  if (!tensor.on_device)
    rm_raise_code(RM_E_UNSUPPORTED_TENSOR, "%.200U: expected a tensor on a GPU, got one on the CPU",
                  name);
  else
    out = Py_BuildValue("(iKsNNO)", tensor.ordinal, (unsigned long long)(uintptr_t)tensor.data,
                        rm_elements[tensor.dtype].name, rm_tuple_of(tensor.shape, tensor.n_dims),
                        rm_tuple_of(tensor.strides, tensor.n_dims), owner);
  rm_tensor_release(owner);
  return out;
}

static PyObject *gpus_wait(PyObject *object, PyObject *args) {
  gpus_object *self = (gpus_object *)object;
  int ordinal;
  if (!PyArg_ParseTuple(args, "i:wait", &ordinal)) return NULL;
  return RM_NONE(RM_UNLOCKED(rm_ready_streams_wait(&self->readers, ordinal, &err)));
}

// Reads (ordinal, address). NULL with an exception.
static const rm_device *device_of(PyObject *object, PyObject *args, void **address) {
  int ordinal;
  unsigned long long number;
  if (!PyArg_ParseTuple(args, "iK", &ordinal, &number)) return NULL;
  *address = (void *)(uintptr_t)number;
  return rm_gpus_device(object, ordinal);
}

// Opening memory waits for the driver, closing it waits for the device: both run without the GIL.
static PyObject *gpus_loan(PyObject *object, PyObject *args) {
  const gpus_object *self = (gpus_object *)object;
  void *address;
  rm_device_loan loan;
  const rm_device *device = device_of(object, args, &address);
  if (!device ||
      RM_FAILS(RM_UNLOCKED(rm_cuda_make_loan(self->readers.library, device, address, &loan, &err))))
    return NULL;
  return Py_BuildValue("(sy#Kn)", loan.device, (const char *)loan.handle,
                       (Py_ssize_t)sizeof loan.handle, (unsigned long long)(uintptr_t)loan.block,
                       (Py_ssize_t)loan.bytes);
}

static PyObject *gpus_borrow(PyObject *object, PyObject *args) {
  gpus_object *self = (gpus_object *)object;
  const char *bus, *handle;
  Py_ssize_t length;
  int ordinal;
  rm_device_loan loan = {0};
  if (!PyArg_ParseTuple(args, "sy#:borrow", &bus, &handle, &length)) return NULL;
  if (length != sizeof loan.handle)
    return rm_raise_code(RM_E_CONFIG, "expected a handle of %zu bytes, got %zd", sizeof loan.handle,
                         length);
  memcpy(loan.handle, handle, sizeof loan.handle);
  if (RM_FAILS(rm_cuda_ordinal(self->readers.library, bus, &ordinal, &err))) return NULL;
  const rm_device *device = rm_gpus_device(object, ordinal);
  if (!device ||
      RM_FAILS(RM_UNLOCKED(rm_cuda_open_loan(self->readers.library, device, &loan, &err))))
    return NULL;
  return Py_BuildValue("(iKn)", ordinal, (unsigned long long)(uintptr_t)loan.block,
                       (Py_ssize_t)loan.bytes);
}

static PyObject *gpus_give_back(PyObject *object, PyObject *args) {
  const gpus_object *self = (gpus_object *)object;
  void *block;
  const rm_device *device = device_of(object, args, &block);
  if (!device) return NULL;
  return RM_NONE(RM_UNLOCKED(rm_cuda_close_loan(self->readers.library, device, block, &err)));
}

static PyMethodDef gpus_methods[] = {
    {"lend", gpus_lend, METH_VARARGS, NULL},
    {"wait", gpus_wait, METH_VARARGS, NULL},
    {"loan", gpus_loan, METH_VARARGS, NULL},
    {"borrow", gpus_borrow, METH_VARARGS, NULL},
    {"give_back", gpus_give_back, METH_VARARGS, NULL},
    {"array", rm_gpu_array_lent, METH_VARARGS, NULL},
    {0},
};

static PyType_Slot gpus_slots[] = {
    {Py_tp_new, gpus_new},
    {Py_tp_dealloc, gpus_dealloc},
    {Py_tp_methods, gpus_methods},
    {0},
};
PyType_Spec rm_gpus_spec = RM_TYPE("Gpus", gpus_object, 0, gpus_slots);

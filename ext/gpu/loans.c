// loans.c: see loans.h. Which process may open what, and for how long, is decided in Python (rollmesh.weights.transport.loans).
#include "loans.h"

#include <string.h>

#include "arrays.h"
#include "base/memory.h"
#include "device/cuda.h"
#include "device/ready_queues.h"
#include "dlpack.h"
#include "gpu_group.h"
#include "tensor.h"

static const struct {
  const char *name;
  uint8_t code, bits;
} dtypes[] = {[RM_SRC_BF16] = {"bfloat16", DL_BFLOAT, 16},
              [RM_SRC_F32] = {"float32", DL_FLOAT, 32},
              [RM_SRC_F16] = {"float16", DL_FLOAT, 16},
              [RM_SRC_F64] = {"float64", DL_FLOAT, 64}};
enum { N_DTYPES = sizeof dtypes / sizeof *dtypes };
#define GIVEN_BACK "the tensor was given back to the process that lent it"

// ------------------------------------------------------------------------------------------------ GpuArray
typedef struct array_object {
  PyObject_HEAD
  PyObject *gpus;               // owned _core.Gpus
  PyObject *held;               // owned: what keeps `data`; NULL: somebody else does
  void *data;                   // not owned; NULL: dropped
  int ordinal, dtype, n_dims;
  int64_t shape[4], strides[4];   // in elements
} array_object;

// What a capsule has: the structures, and the array that they describe.
typedef struct capsule_held {
  dl_versioned managed;
  int64_t shape[4], strides[4];
  PyObject *array;              // owned
} capsule_held;

static void let_go(dl_versioned *managed) {
  if (!Py_IsInitialized()) return;   // the process ends
  capsule_held *held = managed->context;
  const PyGILState_STATE gil = PyGILState_Ensure();
  Py_DECREF(held->array);
  PyGILState_Release(gil);
  rm_free(held);
}

static void end_capsule(PyObject *capsule) {
  if (!PyCapsule_IsValid(capsule, "dltensor_versioned")) return;   // a consumer has taken it
  let_go(PyCapsule_GetPointer(capsule, "dltensor_versioned"));
}

// Written and waited for when it was lent: there is nothing for the consumer's stream to wait for.
static PyObject *array_dlpack(PyObject *object, PyObject *args, PyObject *kwargs) {
  static char *names[] = {"stream", "max_version", "dl_device", "copy", NULL};
  array_object *self = (array_object *)object;
  PyObject *stream = Py_None, *version = Py_None, *device = Py_None, *copy = Py_None;
  int major = 0, minor = 0;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|$OOOO:__dlpack__", names, &stream, &version, &device, &copy)) return NULL;
  if (version != Py_None && !PyTuple_Check(version))
    return PyErr_SetString(PyExc_TypeError, "wanted a tuple of two integers as max_version"), NULL;
  if (version != Py_None && !PyArg_ParseTuple(version, "ii:max_version", &major, &minor)) return NULL;
  if (major < 1 || device != Py_None || copy == Py_True)
    return PyErr_SetString(PyExc_BufferError, "wanted DLPack 1.x, on the device where the tensor is, without a copy"), NULL;
  if (!self->data) return rm_raise_code(rm_module_of(object), RM_E_STATE, GIVEN_BACK);
  capsule_held *held = rm_alloc(1, sizeof *held);
  if (!held) return PyErr_NoMemory();
  memcpy(held->shape, self->shape, sizeof held->shape);
  memcpy(held->strides, self->strides, sizeof held->strides);
  held->array = Py_NewRef(object);
  held->managed = (dl_versioned){.major = 1, .context = held, .deleter = let_go, .flags = DL_READ_ONLY};   // they are another's
  held->managed.tensor = (dl_tensor){
      .data = self->data,
      .device = {DL_CUDA, self->ordinal},
      .n_dims = self->n_dims,
      .dtype = {dtypes[self->dtype].code, dtypes[self->dtype].bits, 1},
      .shape = held->shape,
      .strides = held->strides,
  };
  PyObject *capsule = PyCapsule_New(&held->managed, "dltensor_versioned", end_capsule);
  if (!capsule) let_go(&held->managed);
  return capsule;
}

static PyObject *array_device(PyObject *self, PyObject *ignored) {
  (void)ignored;
  return Py_BuildValue("(ii)", (int)DL_CUDA, ((array_object *)self)->ordinal);
}

static PyObject *array_drop(PyObject *self, PyObject *ignored) {
  (void)ignored;
  ((array_object *)self)->data = NULL;
  Py_RETURN_NONE;
}

// The bytes from its first element in memory to its last, and which of them is element [0, …].
static PyObject *array_host(PyObject *object, PyObject *ignored) {
  array_object *self = (array_object *)object;
  const int64_t each = dtypes[self->dtype].bits / 8;
  int64_t low = 0, high = each;
  rm_error err = RM_ERROR_INIT;
  (void)ignored;
  if (!self->data) return rm_raise_code(rm_module_of(object), RM_E_STATE, GIVEN_BACK);
  for (int i = 0; i < self->n_dims; i++) {
    const int64_t reach = (self->shape[i] - 1) * self->strides[i] * each;
    *(reach < 0 ? &low : &high) += reach;
  }
  const rm_device *device = rm_gpus_device(self->gpus, self->ordinal);
  PyObject *bytes = device ? rm_array_new(NPY_UINT8, 1, (const int64_t[]){high - low}, NULL) : NULL;
  if (!bytes) return NULL;
  rm_code code;
  Py_BEGIN_ALLOW_THREADS
    const int saved = device->enter(device->self);
    device->get(device->self, PyArray_DATA((PyArrayObject *)bytes), (const char *)self->data + low, (size_t)(high - low));
    code = rm_device_wait(device, &err);
    device->leave(device->self, saved);
  Py_END_ALLOW_THREADS
  if (!code) return Py_BuildValue("(NL)", bytes, (long long)-low);
  Py_DECREF(bytes);
  return rm_raise(rm_module_of(object), &err);
}

static PyObject *array_shape(PyObject *self, void *ignored) {
  (void)ignored;
  return rm_tuple_of(((array_object *)self)->shape, ((array_object *)self)->n_dims);
}

static PyObject *array_strides(PyObject *self, void *ignored) {
  (void)ignored;
  return rm_tuple_of(((array_object *)self)->strides, ((array_object *)self)->n_dims);
}

static PyObject *array_dtype(PyObject *self, void *ignored) {
  (void)ignored;
  return PyUnicode_FromString(dtypes[((array_object *)self)->dtype].name);
}

static PyObject *array_nbytes(PyObject *object, void *ignored) {
  const array_object *self = (array_object *)object;
  long long bytes = dtypes[self->dtype].bits / 8;
  (void)ignored;
  for (int i = 0; i < self->n_dims; i++) bytes *= self->shape[i];   // of an allocation: Gpus.array
  return PyLong_FromLongLong(bytes);
}

static int array_traverse(PyObject *object, visitproc visit, void *arg) {
  Py_VISIT(((array_object *)object)->gpus);
  Py_VISIT(((array_object *)object)->held);
  return rm_object_visit(object, visit, arg);
}

static void array_dealloc(PyObject *self) {
  PyObject_GC_UnTrack(self);
  Py_XDECREF(((array_object *)self)->held);
  Py_XDECREF(((array_object *)self)->gpus);
  rm_object_free(self);
}

// Or NumPy would make an array of one object of it.
static PyObject *array_array(PyObject *object, PyObject *args, PyObject *kwargs) {
  const array_object *self = (array_object *)object;
  (void)args, (void)kwargs;
  return rm_raise_code(rm_module_of(object), RM_E_UNSUPPORTED_TENSOR,
                       "a NumPy array of a %s tensor on cuda:%d, wanted one of the host: torch.from_dlpack(it).cpu() is a copy, "
                       "receive_weights with device='cpu' gives copies",
                       dtypes[self->dtype].name, self->ordinal);
}

static PyMethodDef array_methods[] = {
    {"__array__", (PyCFunction)(void (*)(void))array_array, METH_VARARGS | METH_KEYWORDS, PyDoc_STR("UnsupportedTensorError.")},
    {"__dlpack__", (PyCFunction)(void (*)(void))array_dlpack, METH_VARARGS | METH_KEYWORDS, PyDoc_STR("A capsule, DLPack 1.x.")},
    {"__dlpack_device__", array_device, METH_NOARGS, PyDoc_STR("(2, ordinal).")},
    {"host", array_host, METH_NOARGS, PyDoc_STR("(bytes from its first element in memory to its last, the place of element 0).")},
    {"drop", array_drop, METH_NOARGS, PyDoc_STR("Its memory goes: StateError from now on.")},
    {0},
};

static PyGetSetDef array_members[] = {
    {"shape", array_shape, NULL, PyDoc_STR("Sizes."), NULL},
    {"strides", array_strides, NULL, PyDoc_STR("In elements."), NULL},
    {"dtype", array_dtype, NULL, PyDoc_STR("bfloat16, float32, float16 or float64."), NULL},
    {"nbytes", array_nbytes, NULL, PyDoc_STR("Of its elements."), NULL},
    {0},
};

// ------------------------------------------------------------------------------------------------ Gpus
typedef struct gpus_object {
  PyObject_HEAD
  rm_readers readers;           // owned
} gpus_object;

static PyObject *gpus_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
  static char *names[] = {"library", NULL};
  const char *library;
  rm_error err = RM_ERROR_INIT;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "s:Gpus", names, &library)) return NULL;
  gpus_object *self = rm_object_new((PyObject *)type);
  if (!self || !rm_readers_init(&self->readers, library, &err)) return (PyObject *)self;
  Py_DECREF(self);
  return rm_raise(PyType_GetModule(type), &err);
}

static void gpus_dealloc(PyObject *self) {
  rm_readers_destroy(&((gpus_object *)self)->readers);
  rm_object_free(self);
}

static const rm_device *find(gpus_object *self, int ordinal) {
  const rm_device *device = NULL;
  rm_error err = RM_ERROR_INIT;
  if (rm_readers_find(&self->readers, ordinal, &device, &err)) rm_raise(rm_module_of((PyObject *)self), &err);
  return device;
}

const rm_device *rm_gpus_device(PyObject *gpus, int ordinal) { return find((gpus_object *)gpus, ordinal); }

static const rm_device *take_reader(void *self, PyObject *name, int ordinal) {
  (void)name;
  return find(self, ordinal);
}

static void give_reader(void *self) { (void)self; }

static PyObject *gpus_lend(PyObject *object, PyObject *args) {
  gpus_object *self = (gpus_object *)object;
  const rm_tensor_reader reader = {take_reader, give_reader, self};
  PyObject *name, *given, *owner = NULL, *out = NULL, *shape = NULL, *strides = NULL;
  rm_tensor tensor;
  if (!PyArg_ParseTuple(args, "UO:lend", &name, &given)) return NULL;
  if (rm_tensor_from_object(rm_module_of(object), given, name, &reader, &tensor, &owner)) return NULL;
  if (!tensor.on_device) rm_raise_code(rm_module_of(object), RM_E_UNSUPPORTED_TENSOR, "%.200U: a tensor of the host, wanted a GPU's", name);
  else if ((shape = rm_tuple_of(tensor.shape, tensor.n_dims)) && (strides = rm_tuple_of(tensor.strides, tensor.n_dims)))
    out = Py_BuildValue("(iKsOOO)", tensor.ordinal, (unsigned long long)(uintptr_t)tensor.data, dtypes[tensor.dtype].name, shape, strides,
                        owner);
  Py_XDECREF(shape);
  Py_XDECREF(strides);
  rm_tensor_release(owner);
  return out;
}

static PyObject *gpus_wait(PyObject *object, PyObject *args) {
  gpus_object *self = (gpus_object *)object;
  int ordinal;
  rm_error err = RM_ERROR_INIT;
  if (!PyArg_ParseTuple(args, "i:wait", &ordinal)) return NULL;
  rm_code code;
  Py_BEGIN_ALLOW_THREADS
    code = rm_readers_wait(&self->readers, ordinal, &err);
  Py_END_ALLOW_THREADS
  return rm_none(rm_module_of(object), code, &err);
}

// What opens memory waits for the driver, and what closes it for the device: so without the GIL. Why one has failed is the thread's own.
static PyObject *gpus_loan(PyObject *object, PyObject *args) {
  gpus_object *self = (gpus_object *)object;
  int ordinal;
  unsigned long long address;
  rm_device_loan loan;
  rm_error err = RM_ERROR_INIT;
  if (!PyArg_ParseTuple(args, "iK:loan", &ordinal, &address)) return NULL;
  const rm_device *device = find(self, ordinal);
  if (!device) return NULL;
  rm_code code;
  Py_BEGIN_ALLOW_THREADS
    code = rm_cuda_loan(self->readers.library, device, (const void *)(uintptr_t)address, &loan, &err);
  Py_END_ALLOW_THREADS
  if (code) return rm_raise(rm_module_of(object), &err);
  return Py_BuildValue("(sy#Kn)", loan.device, (const char *)loan.handle, (Py_ssize_t)sizeof loan.handle,
                       (unsigned long long)(uintptr_t)loan.block, (Py_ssize_t)loan.bytes);
}

static PyObject *gpus_borrow(PyObject *object, PyObject *args) {
  gpus_object *self = (gpus_object *)object;
  const char *bus, *handle;
  Py_ssize_t length;
  int ordinal;
  rm_device_loan loan = {0};
  rm_error err = RM_ERROR_INIT;
  if (!PyArg_ParseTuple(args, "sy#:borrow", &bus, &handle, &length)) return NULL;
  if (length != sizeof loan.handle)
    return rm_raise_code(rm_module_of(object), RM_E_CONFIG, "a handle of %zd bytes, wanted %zu", length, sizeof loan.handle);
  memcpy(loan.handle, handle, sizeof loan.handle);
  if (rm_cuda_ordinal(self->readers.library, bus, &ordinal, &err)) return rm_raise(rm_module_of(object), &err);
  const rm_device *device = find(self, ordinal);
  if (!device) return NULL;
  rm_code code;
  Py_BEGIN_ALLOW_THREADS
    code = rm_cuda_borrowed(self->readers.library, device, &loan, &err);
  Py_END_ALLOW_THREADS
  if (code) return rm_raise(rm_module_of(object), &err);
  return Py_BuildValue("(iKn)", ordinal, (unsigned long long)(uintptr_t)loan.block, (Py_ssize_t)loan.bytes);
}

static PyObject *gpus_give_back(PyObject *object, PyObject *args) {
  gpus_object *self = (gpus_object *)object;
  int ordinal;
  unsigned long long block;
  rm_error err = RM_ERROR_INIT;
  if (!PyArg_ParseTuple(args, "iK:give_back", &ordinal, &block)) return NULL;
  const rm_device *device = find(self, ordinal);
  if (!device) return NULL;
  rm_code code;
  Py_BEGIN_ALLOW_THREADS
    code = rm_cuda_given_back(self->readers.library, device, (void *)(uintptr_t)block, &err);
  Py_END_ALLOW_THREADS
  return rm_none(rm_module_of(object), code, &err);
}

static PyObject *gpus_array(PyObject *object, PyObject *args) {
  PyObject *module = rm_module_of(object), *shape, *strides, *held = NULL;
  int ordinal, dtype = 0;
  unsigned long long address;
  const char *name;
  if (!PyArg_ParseTuple(args, "iKsO!O!|O:array", &ordinal, &address, &name, &PyTuple_Type, &shape, &PyTuple_Type, &strides, &held))
    return NULL;
  while (dtype < N_DTYPES && strcmp(dtypes[dtype].name, name) != 0) dtype++;
  const Py_ssize_t n = PyTuple_Size(shape);
  if (dtype == N_DTYPES || n > 4 || PyTuple_Size(strides) != n)
    return rm_raise_code(module, RM_E_DTYPE, "a %s of %zd dims, wanted bfloat16, float32, float16 or float64 of at most 4", name, n);
  array_object *array = rm_object_make(module, RM_TYPE_GPU_ARRAY);
  if (!array) return NULL;
  array->gpus = Py_NewRef(object);
  array->held = Py_XNewRef(held);
  array->data = (void *)(uintptr_t)address;
  array->ordinal = ordinal, array->dtype = dtype, array->n_dims = (int)n;
  if (!rm_numbers_of(shape, array->shape, (int)n) && !rm_numbers_of(strides, array->strides, (int)n)) return (PyObject *)array;
  Py_DECREF(array);
  return NULL;
}

static PyMethodDef gpus_methods[] = {
    {"lend", gpus_lend, METH_VARARGS, PyDoc_STR("(name, tensor): (ordinal, address, dtype, shape, strides, what keeps it alive).")},
    {"wait", gpus_wait, METH_VARARGS, PyDoc_STR("(ordinal): until what writes the tensors lent so far is done.")},
    {"loan", gpus_loan, METH_VARARGS, PyDoc_STR("(ordinal, address): the allocation there: (bus id, handle, address, bytes).")},
    {"borrow", gpus_borrow, METH_VARARGS, PyDoc_STR("(bus id, handle): another process's, opened: (ordinal, address, bytes).")},
    {"give_back", gpus_give_back, METH_VARARGS, PyDoc_STR("(ordinal, address): closes it.")},
    {"array", gpus_array, METH_VARARGS,
     PyDoc_STR("(ordinal, address, dtype, shape, strides, held=None): a GpuArray, inside of an allocation, which it keeps by `held`.")},
    {"group", rm_gpu_group_new, METH_VARARGS, PyDoc_STR("(end, ordinal, nccl library, GPU's name, timeout): a GpuGroup of end's ranks.")},
    {0},
};

static PyType_Slot array_slots[] = {
    {Py_tp_dealloc, array_dealloc},
    {Py_tp_traverse, array_traverse},
    {Py_tp_methods, array_methods},
    {Py_tp_getset, array_members},
    {Py_tp_doc, "A tensor on a GPU, in memory that another process lends or another rank has sent."},
    {0, NULL},
};
PyType_Spec rm_gpu_array_spec = RM_TYPE("GpuArray", array_object, RM_GC | RM_MADE_HERE, array_slots);

static PyType_Slot gpus_slots[] = {
    {Py_tp_new, gpus_new},
    {Py_tp_dealloc, gpus_dealloc},
    {Py_tp_methods, gpus_methods},
    {Py_tp_doc, "Gpus(library): the GPUs of this process, for memory that goes between processes."},
    {0, NULL},
};
PyType_Spec rm_gpus_spec = RM_TYPE("Gpus", gpus_object, 0, gpus_slots);

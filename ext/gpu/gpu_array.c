// gpu_array.c: see gpu_array.h. Each array of an OpDevice is a separate allocation. Freeing it
// waits for all work of the device, including that of other libraries. Rejected: a pool, because a
// new array could overwrite memory that another library's stream still reads.
#include "gpu_array.h"

#include <stdio.h>
#include <string.h>
#include <structmember.h>

#include "base/checked.h"
#include "base/memory.h"
#include "dlpack.h"
#include "tensor.h"

enum { MAX_DIMS = 4 };
#define GIVEN_BACK "the tensor was given back to the process that lent it"

typedef struct array_object {
  PyObject_HEAD
  rm_op_device *op_device; // owned; NULL: an array of `gpus`
  PyObject *gpus; // owned _core.Gpus; NULL: an array of `op_device`, which is C-contiguous
  // Owned: the object that keeps `data` alive. NULL: an array of an OpDevice owns its data; the
  // memory of an array of gpus belongs to another process.
  PyObject *owner;
  void *data; // NULL: no elements, or dropped
  size_t bytes;
  const rm_element *element; // view
  char device[16]; // "cuda:0"
  int ordinal, n_dims, read_only, is_dropped;
  int64_t shape[MAX_DIMS], strides[MAX_DIMS]; // in elements
} array_object;

static size_t each(const array_object *array) { return array->element->bits / 8; }

// --------------------------------------------------------------------------------------- creation
static const rm_element *element_named(const char *name) {
  for (int i = 0; i < RM_N_ELEMENTS; i++)
    if (strcmp(rm_elements[i].name, name) == 0) return &rm_elements[i];
  return rm_raise_code(RM_E_DTYPE, "expected dtype " RM_ELEMENTS ", got '%.64s'", name);
}

// NULL without an exception for another type.
static const rm_element *element_of_type(int type) {
  for (int i = 0; i < RM_N_ELEMENTS; i++)
    if (type >= 0 && PyArray_EquivTypenums(type, rm_elements[i].type)) return &rm_elements[i];
  return NULL;
}

static int check_dims(Py_ssize_t n) {
  if (n <= MAX_DIMS) return 0;
  return rm_refuse(RM_E_SHAPE, "expected at most %d dims, got %zd", (int)MAX_DIMS, n);
}

static array_object *made(void *relative, const rm_element *element, int ordinal, int n_dims) {
  array_object *self = rm_object_make(relative, RM_TYPE_DEVICE_ARRAY);
  if (!self) return NULL;
  self->element = element;
  self->ordinal = ordinal;
  self->n_dims = n_dims;
  snprintf(self->device, sizeof self->device, "cuda:%d", ordinal);
  return self;
}

// Makes an array without memory. Checks all sizes and their product.
static array_object *new_array(rm_op_device *op_device, const rm_element *element, int n_dims,
                               const int64_t *shape) {
  int64_t bytes = element->bits / 8, step = 1;
  if (check_dims(n_dims)) return NULL;
  for (int i = 0; i < n_dims; i++)
    if (shape[i] < 0 || !rm_mul_i64(bytes, shape[i], &bytes)) {
      rm_raise_code(
          RM_E_SHAPE,
          "expected a %s array of sizes >= 0 and fewer than 2^63 bytes, got size %lld in dim %d",
          element->name, (long long)shape[i], i);
      return NULL;
    }
  array_object *self = made(op_device, element, op_device->device.ordinal, n_dims);
  if (!self) return NULL;
  self->op_device = (rm_op_device *)Py_NewRef((PyObject *)op_device);
  self->bytes = (size_t)bytes;
  for (int i = n_dims - 1; i >= 0; i--) {
    self->shape[i] = shape[i];
    self->strides[i] = step;
    step *= rm_max64(shape[i], 1);
  }
  return self;
}

// (ordinal, address, dtype, shape, strides): a read-only view of another process's memory.
PyObject *rm_gpu_array_lent(PyObject *gpus, PyObject *args) {
  PyObject *shape, *strides;
  int ordinal;
  unsigned long long address;
  const char *name;
  if (!PyArg_ParseTuple(args, "iKsO!O!:array", &ordinal, &address, &name, &PyTuple_Type, &shape,
                        &PyTuple_Type, &strides))
    return NULL;
  const rm_element *element = element_named(name);
  const Py_ssize_t n = PyTuple_Size(shape);
  if (!element || check_dims(n)) return NULL;
  array_object *array = made(gpus, element, ordinal, (int)n);
  if (!array) return NULL;
  array->gpus = Py_NewRef(gpus);
  array->data = (void *)(uintptr_t)address;
  array->read_only = 1;
  if (rm_numbers_of(shape, array->shape, (int)n) ||
      rm_numbers_of(strides, array->strides, (int)n)) {
    Py_DECREF(array);
    return NULL;
  }
  array->bytes = each(array);
  for (int i = 0; i < array->n_dims; i++)
    array->bytes *= (size_t)array->shape[i]; // cannot overflow: it is part of an allocation
  return (PyObject *)array;
}

// Allocates zeros, or copies `from` and waits for the copy.
static PyObject *fill_new(array_object *self, const void *from) {
  rm_error err = RM_ERROR_INIT;
  rm_code code = RM_OK;
  int saved;
  if (!self || !self->bytes) return (PyObject *)self;
  if (rm_op_device_enter(self->op_device, &saved)) {
    Py_DECREF(self);
    return NULL;
  }
  const rm_device *device = &self->op_device->device;
  Py_BEGIN_ALLOW_THREADS
    code = rm_device_alloc(device, self->bytes, "an array", &self->data, &err);
    if (!code && from) {
      device->copy_to_device(device->self, self->data, from, self->bytes);
      code = rm_device_wait(device, &err);
    }
    rm_op_device_leave(self->op_device, saved);
  Py_END_ALLOW_THREADS
  if (!code) return (PyObject *)self;
  Py_DECREF(self);
  return rm_raise(&err);
}

PyObject *rm_device_array_new(rm_op_device *op_device, int type, int n_dims, const int64_t *shape) {
  return fill_new(new_array(op_device, element_of_type(type), n_dims, shape), NULL);
}

PyObject *rm_device_array_zeros(rm_op_device *op_device, const char *name, PyObject *sizes) {
  const rm_element *element = element_named(name);
  const Py_ssize_t n = PyTuple_Size(sizes);
  int64_t shape[MAX_DIMS];
  if (!element || check_dims(n) || rm_numbers_of(sizes, shape, (int)n)) return NULL;
  return fill_new(new_array(op_device, element, (int)n, shape), NULL);
}

PyObject *rm_device_array_copy(rm_op_device *op_device, PyObject *object) {
  PyArrayObject *array = PyArray_Check(object) ? (PyArrayObject *)object : NULL;
  const rm_element *element = array ? element_of_type(PyArray_TYPE(array)) : NULL;
  if (!element)
    return rm_raise_code(
        RM_E_DTYPE, "expected a NumPy array of uint16 (bfloat16's words), " RM_ELEMENTS ", got %R",
        array ? (PyObject *)PyArray_DESCR(array) : (PyObject *)Py_TYPE(object));
  rm_array_want want = {.name = "the array", .type = element->type, .n_dims = -1};
  void *data;
  if (rm_array_data(object, &want, &data)) return NULL;
  return fill_new(new_array(op_device, element, PyArray_NDIM(array), PyArray_DIMS(array)), data);
}

// ------------------------------------------------------------------------ other libraries' arrays
// Checks C order, alignment, and with the driver that the memory is on this device: a kernel that
// reads other memory ends the CUDA context.
static int check_memory(PyObject *name, const dl_tensor *t, array_object *array) {
  int64_t step = 1;
  const rm_device *device = &array->op_device->device;
  for (int i = t->n_dims - 1; i >= 0; i--) {
    if (t->strides && array->bytes && t->shape[i] > 1 && t->strides[i] != step)
      return rm_refuse(
          RM_E_LAYOUT,
          "%.200U: expected a C-contiguous array, got stride %lld in dim %d; copy it first", name,
          (long long)t->strides[i], i);
    step *= t->shape[i];
  }
  uintptr_t at = (uintptr_t)t->data;
  if (!array->bytes) return 0;
  if (!at || __builtin_add_overflow(at, t->byte_offset, &at) ||
      device->ordinal_of(device->self, (const void *)at) != device->ordinal ||
      device->ordinal_of(device->self, (const char *)at + array->bytes - 1) != device->ordinal)
    return rm_refuse(RM_E_UNSUPPORTED_TENSOR,
                     "%.200U: expected memory of %s, got address %zu, which is not of its memory",
                     name, device->name, (size_t)at);
  if (at % each(array))
    return rm_refuse(RM_E_LAYOUT,
                     "%.200U: expected an aligned array, got address %zu; copy it first", name,
                     (size_t)at);
  array->data = (void *)at;
  return 0;
}

PyObject *rm_device_array_over(rm_op_device *op_device, PyObject *name, const rm_dlpack *taken) {
  const dl_tensor *t = taken->tensor;
  // uint16 is bfloat16, as in NumPy arrays.
  const int is_words = t->dtype.lanes == 1 && t->dtype.code == DL_UINT && t->dtype.bits == 16;
  const int dtype =
      is_words ? RM_SRC_BF16 : rm_element_of(name, t->dtype, RM_N_ELEMENTS, RM_ELEMENTS);
  if (dtype < 0) return NULL;
  if (t->n_dims < 0 || t->n_dims > MAX_DIMS)
    return rm_raise_code(RM_E_SHAPE, "%.200U: expected at most %d dims, got %d", name,
                         (int)MAX_DIMS, t->n_dims);
  array_object *array = new_array(op_device, &rm_elements[dtype], t->n_dims, t->shape);
  if (!array) return NULL;
  array->owner = Py_NewRef(taken->owner);
  array->read_only = taken->read_only;
  if (!check_memory(name, t, array)) return (PyObject *)array;
  Py_DECREF(array);
  return NULL;
}

// ------------------------------------------------------------------------------- arguments of ops
int rm_device_array_type(void *relative, PyObject *object) {
  return rm_is(relative, object, RM_TYPE_DEVICE_ARRAY) ? ((array_object *)object)->element->type
                                                       : -1;
}

// The address of empty arrays, which is never read. Ops take NULL for an absent array.
static char no_element;

int rm_device_array_data(rm_op_device *op_device, PyObject *object, rm_array_want *want,
                         void **data, size_t *bytes) {
  const array_object *array = (array_object *)object;
  const char *where = op_device->device.name, *type = element_of_type(want->type)->name;
  *data = NULL;
  if (rm_device_array_type(op_device, object) < 0)
    return rm_refuse(RM_E_UNSUPPORTED_TENSOR, "%s: expected an array of %s on %s, got %R",
                     want->name, type, where, (PyObject *)Py_TYPE(object));
  if (array->op_device != op_device)
    return rm_refuse(RM_E_UNSUPPORTED_TENSOR, "%s: expected an array on %s, got one on %s",
                     want->name, where, array->device);
  if (array->element->type != want->type)
    return rm_refuse(RM_E_DTYPE, "%s: expected dtype %s, got %s", want->name, type,
                     array->element->name);
  if (rm_array_check_shape(want, array->n_dims, array->shape)) return -1;
  if ((want->flags & RM_ARRAY_WRITE) && array->read_only)
    return rm_refuse(RM_E_LAYOUT,
                     "%s: expected a writable array, got a read-only one; copy it first",
                     want->name);
  if ((want->flags & RM_ARRAY_PACKED) && (uintptr_t)array->data % 16)
    return rm_refuse(RM_E_LAYOUT,
                     "%s: expected memory aligned to 16 bytes, got address %zu; copy it first",
                     want->name, (size_t)(uintptr_t)array->data);
  *data = array->data ? array->data : &no_element;
  *bytes = array->bytes;
  return 0;
}

// ----------------------------------------------------------------------------------------- DLPack
typedef struct dl_managed { // unversioned DLPack
  dl_tensor tensor;
  void *context;
  void (*deleter)(struct dl_managed *);
} dl_managed;

// The contents of a capsule: the structures of both versions, and the array that they describe.
typedef struct capsule_held {
  dl_versioned versioned;
  dl_managed old;
  int64_t shape[MAX_DIMS], strides[MAX_DIMS];
  PyObject *array; // owned
} capsule_held;

static void release(capsule_held *held) {
  if (!Py_IsInitialized()) return; // the process is exiting
  const PyGILState_STATE gil = PyGILState_Ensure();
  Py_DECREF(held->array);
  PyGILState_Release(gil);
  rm_free(held);
}

static void delete_versioned(dl_versioned *managed) { release(managed->context); }
static void delete_old(dl_managed *managed) { release(managed->context); }

// The destructor of a capsule; a consumer that takes the tensor renames the capsule.
static void end_capsule(PyObject *capsule) {
  if (PyCapsule_IsValid(capsule, "dltensor_versioned"))
    delete_versioned(PyCapsule_GetPointer(capsule, "dltensor_versioned"));
  if (PyCapsule_IsValid(capsule, "dltensor")) delete_old(PyCapsule_GetPointer(capsule, "dltensor"));
}

static PyObject *capsule_of(array_object *self, int versioned) {
  capsule_held *held = rm_alloc(1, sizeof *held);
  if (!held) return PyErr_NoMemory();
  memcpy(held->shape, self->shape, sizeof held->shape);
  memcpy(held->strides, self->strides, sizeof held->strides);
  held->array = Py_NewRef((PyObject *)self);
  const dl_tensor tensor = {
      .data = self->data,
      .device = {DL_CUDA, self->ordinal},
      .n_dims = self->n_dims,
      .dtype = {self->element->code, self->element->bits, 1},
      .shape = held->shape,
      .strides = held->strides,
  };
  held->versioned =
      (dl_versioned){.major = 1, .context = held, .deleter = delete_versioned, .tensor = tensor};
  held->versioned.flags = self->read_only ? DL_READ_ONLY : 0;
  held->old = (dl_managed){tensor, held, delete_old};
  PyObject *capsule = versioned ? PyCapsule_New(&held->versioned, "dltensor_versioned", end_capsule)
                                : PyCapsule_New(&held->old, "dltensor", end_capsule);
  if (!capsule) release(held);
  return capsule;
}

// Makes `stream` wait for the ops enqueued so far. In DLPack None is the default stream, and −1
// means no wait. Lent memory is already complete.
static int hand_over(array_object *self, PyObject *stream) {
  const long long handle = stream == Py_None ? 1 : PyLong_AsLongLong(stream);
  rm_error err = RM_ERROR_INIT;
  int saved;
  if (PyErr_Occurred()) return -1;
  if (handle == 0 || handle < -1)
    return PyErr_Format(PyExc_ValueError, "stream: expected a handle, 1, 2, -1 or None, got %lld",
                        handle),
           -1;
  if (handle == -1 || !self->op_device) return 0;
  const rm_device *device = &self->op_device->device;
  if (rm_op_device_check_stream(self->op_device, (void *)(uintptr_t)handle)) return -1;
  if (rm_op_device_enter(self->op_device, &saved)) return -1;
  device->make_stream_wait(device->self, (void *)(uintptr_t)handle);
  const rm_code code = rm_op_device_poll(self->op_device, &err);
  rm_op_device_leave(self->op_device, saved);
  if (code) rm_raise(&err);
  return code ? -1 : 0;
}

// A converter of PyArg_Parse: None leaves the pair as it is.
static int to_pair(PyObject *object, void *pair) {
  int *out = pair;
  if (object == Py_None) return 1;
  if (PyTuple_Check(object)) return PyArg_ParseTuple(object, "ii", &out[0], &out[1]);
  PyErr_SetString(PyExc_TypeError, "max_version, dl_device: expected tuples of two integers");
  return 0;
}

static PyObject *array_dlpack(PyObject *object, PyObject *args, PyObject *kwargs) {
  static char *names[] = {"stream", "max_version", "dl_device", "copy", NULL};
  array_object *self = (array_object *)object;
  PyObject *stream = Py_None, *copy = Py_None;
  int version[2] = {0}, device[2] = {DL_CUDA, self->ordinal};
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|$OO&O&O:__dlpack__", names, &stream, to_pair,
                                   version, to_pair, device, &copy))
    return NULL;
  if (device[0] != DL_CUDA || device[1] != self->ordinal || copy == Py_True)
    return PyErr_Format(PyExc_BufferError,
                        "expected dl_device of %s and copy=False: the array is not copied",
                        self->device);
  if (self->is_dropped) return rm_raise_code(RM_E_STATE, GIVEN_BACK);
  if (version[0] < 1 && self->read_only)
    return PyErr_SetString(
               PyExc_BufferError,
               "expected a consumer with DLPack 1.x, got an older one: the array is read-only"),
           NULL;
  return hand_over(self, stream) ? NULL : capsule_of(self, version[0] >= 1);
}

static PyObject *array_dlpack_device(PyObject *self, PyObject *) {
  return Py_BuildValue("(ii)", (int)DL_CUDA, ((array_object *)self)->ordinal);
}

// ------------------------------------------------------------------------------------ DeviceArray
// Copies bytes to the host, from `low` bytes after element 0 on, and waits for the copy.
static int read_bytes(const array_object *self, void *to, int64_t low, size_t bytes) {
  rm_error err = RM_ERROR_INIT;
  rm_code code;
  int saved = 0;
  const rm_device *device =
      self->op_device ? &self->op_device->device : rm_gpus_device(self->gpus, self->ordinal);
  if (!device || (self->op_device && rm_op_device_enter(self->op_device, &saved))) return -1;
  Py_BEGIN_ALLOW_THREADS
    if (!self->op_device) saved = device->enter(device->self);
    device->copy_to_host(device->self, to, (const char *)self->data + low, bytes);
    code = rm_device_wait(device, &err);
    if (self->op_device) rm_op_device_leave(self->op_device, saved);
    else device->leave(device->self, saved);
  Py_END_ALLOW_THREADS
  if (code) rm_raise(&err);
  return code ? -1 : 0;
}

// Reads the range of memory that the elements are in. A strided array is then rearranged.
static PyObject *array_numpy(PyObject *object, PyObject *) {
  const array_object *self = (array_object *)object;
  const int64_t size = (int64_t)each(self);
  int64_t low = 0, high = self->bytes ? size : 0;
  npy_intp dims[MAX_DIMS], steps[MAX_DIMS];
  if (self->is_dropped) return rm_raise_code(RM_E_STATE, GIVEN_BACK);
  for (int i = 0; i < self->n_dims; i++) {
    dims[i] = (npy_intp)self->shape[i], steps[i] = (npy_intp)(self->strides[i] * size);
    const int64_t reach = self->bytes ? (self->shape[i] - 1) * steps[i] : 0;
    *(reach < 0 ? &low : &high) += reach;
  }
  RM_OWNED *bytes = rm_array_new(NPY_UINT8, 1, (const int64_t[]){high - low}, NULL);
  if (!bytes) return NULL;
  char *to = PyArray_DATA((PyArrayObject *)bytes);
  if (self->bytes && read_bytes(self, to, low, (size_t)(high - low))) return NULL;
  RM_OWNED *view = PyArray_New(&PyArray_Type, self->n_dims, dims, self->element->type, steps,
                               to - low, 0, NPY_ARRAY_ALIGNED | NPY_ARRAY_WRITEABLE, NULL);
  if (!view || PyArray_SetBaseObject((PyArrayObject *)view, Py_NewRef(bytes))) return NULL;
  return PyArray_FromArray((PyArrayObject *)view, NULL, NPY_ARRAY_C_CONTIGUOUS);
}

RM_TRAVERSE(array_traverse, array_object, (PyObject *)self->op_device, self->gpus, self->owner)

// Ends the array's exports. Its owner stays, for consumers of __dlpack__ that still read.
static void drop(array_object *self) {
  self->data = NULL;
  self->is_dropped = 1;
}

static int array_clear(PyObject *object) {
  array_object *self = (array_object *)object;
  PyObject *owner = self->owner;
  if (!owner) return 0;
  drop(self);
  self->owner = NULL;
  rm_tensor_release(owner);
  return 0;
}

static PyObject *array_drop(PyObject *object, PyObject *) {
  array_object *self = (array_object *)object;
  if (!self->gpus) return rm_raise_code(RM_E_STATE, "expected an array that another process lends");
  drop(self);
  Py_RETURN_NONE;
}

static void array_dealloc(PyObject *object) {
  PyObject_GC_UnTrack(object);
  array_object *self = (array_object *)object;
  rm_op_device *op_device = self->op_device;
  if (op_device && self->data && !self->owner && getpid() == op_device->owner) {
    Py_BEGIN_ALLOW_THREADS
      pthread_mutex_lock(&op_device->mutex);
      const int saved = op_device->device.enter(op_device->device.self);
      rm_device_free(&op_device->device, self->data, self->bytes);
      rm_op_device_leave(op_device, saved);
    Py_END_ALLOW_THREADS
  }
  rm_tensor_release(self->owner);
  Py_XDECREF((PyObject *)op_device);
  Py_XDECREF(self->gpus);
  rm_object_free(object);
}

static PyObject *array_shape(PyObject *object, void *strides) {
  const array_object *self = (array_object *)object;
  return rm_tuple_of(strides ? self->strides : self->shape, self->n_dims);
}

static PyObject *array_dtype(PyObject *self, void *) {
  return PyUnicode_FromString(((array_object *)self)->element->name);
}

// Arrays are never copied to the host implicitly. Without __array__ NumPy would make an object
// array.
static PyObject *refuse_host(PyObject *object, const char *what) {
  const array_object *self = (array_object *)object;
  return rm_raise_code(RM_E_UNSUPPORTED_TENSOR,
                       "%s: expected an array of the host, got %s on %s; .numpy() copies it", what,
                       self->element->name, self->device);
}

static PyObject *array_array(PyObject *object, PyObject *, PyObject *) {
  return refuse_host(object, "__array__");
}

static int array_bool(PyObject *object) { return refuse_host(object, "bool()"), -1; }

static Py_ssize_t array_length(PyObject *object) {
  const array_object *self = (array_object *)object;
  if (self->n_dims) return (Py_ssize_t)self->shape[0];
  return PyErr_SetString(PyExc_TypeError, "len(): expected an array with dims, got one without"),
         -1;
}

static PyMethodDef array_methods[] = {
    {"__array__", (PyCFunction)(void (*)(void))array_array, METH_VARARGS | METH_KEYWORDS,
     PyDoc_STR("Raises UnsupportedTensorError; use numpy().")},
    {"__dlpack__", (PyCFunction)(void (*)(void))array_dlpack, METH_VARARGS | METH_KEYWORDS,
     PyDoc_STR("Returns a capsule; the consumer's stream waits for the ops enqueued so far.")},
    {"__dlpack_device__", array_dlpack_device, METH_NOARGS, PyDoc_STR("(2, ordinal).")},
    {"numpy", array_numpy, METH_NOARGS,
     PyDoc_STR("Returns a copy on the host, bfloat16 as uint16 words; waits for the ops so far.")},
    {"drop", array_drop, METH_NOARGS,
     PyDoc_STR("Ends a lent array, whose memory is returned: later uses raise StateError.")},
    {0},
};

static PyGetSetDef array_members[] = {
    {"shape", array_shape, NULL, PyDoc_STR("Sizes."), NULL},
    {"strides", array_shape, NULL, PyDoc_STR("In elements."), (void *)1},
    {"dtype", array_dtype, NULL, PyDoc_STR("'bfloat16', 'float32', …"), NULL},
    {0},
};

static PyMemberDef array_fields[] = {
    {"ndim", T_INT, offsetof(array_object, n_dims), READONLY, PyDoc_STR("Number of dims.")},
    {"nbytes", T_PYSSIZET, offsetof(array_object, bytes), READONLY,
     PyDoc_STR("Bytes of its elements.")},
    {"device", T_STRING_INPLACE, offsetof(array_object, device), READONLY,
     PyDoc_STR("'cuda:0', …")},
    {"op_device", T_OBJECT, offsetof(array_object, op_device), READONLY,
     PyDoc_STR("Its OpDevice; None for a lent array.")},
    {0},
};

static PyType_Slot slots[] = {
    {Py_tp_dealloc, array_dealloc},
    {Py_tp_traverse, array_traverse},
    {Py_tp_clear, array_clear},
    {Py_tp_members, array_fields},
    {Py_tp_methods, array_methods},
    {Py_tp_getset, array_members},
    {Py_sq_length, array_length},
    {Py_nb_bool, array_bool},
    {Py_tp_doc,
     "An array on a GPU: an output of rollmesh.ops, or a view of memory that another process "
     "lends or another rank sent."},
    {0},
};
PyType_Spec rm_device_array_spec =
    RM_TYPE("DeviceArray", array_object, RM_GC | RM_MADE_HERE, slots);

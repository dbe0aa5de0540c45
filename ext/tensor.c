// tensor.c: see tensor.h. Holds the capsule of a DLPack producer without consuming it, so that the
// capsule's own destructor releases the data.
#include "tensor.h"

#include <string.h>

#include "arrays.h"
#include "base/checked.h"
#include "dlpack.h"

const rm_element rm_elements[RM_N_ELEMENTS] = {
    {"bfloat16", DL_BFLOAT, 16, NPY_UINT16}, {"float32", DL_FLOAT, 32, NPY_FLOAT32},
    {"float16", DL_FLOAT, 16, NPY_FLOAT16},  {"float64", DL_FLOAT, 64, NPY_FLOAT64},
    {"int32", DL_INT, 32, NPY_INT32},        {"int64", DL_INT, 64, NPY_INT64},
    {"uint8", DL_UINT, 8, NPY_UINT8},
};
_Static_assert(RM_SRC_BF16 == 0 && RM_SRC_F32 == 1 && RM_SRC_F16 == 2 && RM_SRC_F64 == 3,
               "the order of rm_elements");

static int64_t element_bytes(rm_src_dtype dtype) { return rm_elements[dtype].bits / 8; }

// Copies dims and shape and checks that every size is ≥ 0 and that their product is addressable.
static int take_shape(PyObject *name, int n_dims, const int64_t *shape, rm_tensor *out) {
  if (n_dims < 0 || n_dims > 4)
    return rm_refuse(RM_E_SHAPE, "%.200U: expected at most 4 dims, got %d", name, n_dims);
  out->n_dims = n_dims;
  int64_t bytes = element_bytes(out->dtype);
  for (int i = 0; i < n_dims; i++) {
    if (shape[i] < 0)
      return rm_refuse(RM_E_SHAPE, "%.200U: expected sizes >= 0, got %zd in dim %d", name, shape[i],
                       i);
    out->shape[i] = shape[i];
    if (!rm_mul_i64(bytes, rm_max64(shape[i], 1), &bytes))
      return rm_refuse(
          RM_E_SHAPE,
          "%.200U: expected fewer than 2^63 bytes, got size %zd in dim %d after those before it",
          name, shape[i], i);
  }
  return 0;
}

static void take_span(rm_tensor *out, uintptr_t start, uintptr_t end) {
  const uintptr_t data = (uintptr_t)out->data;
  if (start > data || end < data) return; // not the buffer behind this tensor
  out->span_lo = (int64_t)(data - start);
  out->span_hi = (int64_t)(end - data);
}

// Returns a new reference to an attribute; NULL, without an exception if the attribute is missing.
static PyObject *optional_attr(PyObject *object, const char *attr) {
  PyObject *value = PyObject_GetAttrString(object, attr);
  if (!value && PyErr_ExceptionMatches(PyExc_AttributeError)) PyErr_Clear();
  return value;
}

// ------------------------------------------------------------------------------------------ NumPy
static int text_is(PyObject *text, const char *want) {
  return text && PyUnicode_Check(text) && PyUnicode_CompareWithASCIIString(text, want) == 0;
}

// Whether dtype.metadata["rollmesh"] == "bfloat16"; −1 with an exception.
static int has_bf16_metadata(PyObject *dtype) {
  RM_OWNED *metadata = PyObject_GetAttrString(dtype, "metadata");
  if (!metadata || metadata == Py_None) return metadata ? 0 : -1;
  RM_OWNED *word = PyMapping_GetItemString(metadata, "rollmesh");
  if (!word) PyErr_Clear();
  return text_is(word, "bfloat16");
}

static int numpy_dtype(PyObject *name, PyArrayObject *array, rm_src_dtype *out) {
  const int type = PyArray_TYPE(array), native = !PyArray_ISBYTESWAPPED(array);
  PyObject *dtype = (PyObject *)PyArray_DESCR(array);
  *out = type == NPY_FLOAT ? RM_SRC_F32 : type == NPY_DOUBLE ? RM_SRC_F64 : RM_SRC_F16;
  if (native && (type == NPY_FLOAT || type == NPY_DOUBLE || type == NPY_HALF)) return 0;
  *out = RM_SRC_BF16;
  if (native && type == NPY_USHORT) {
    const int is = has_bf16_metadata(dtype);
    if (is) return is < 0 ? -1 : 0;
  }
  if (PyTypeNum_ISUSERDEF(type) && PyArray_ITEMSIZE(array) == 2) {
    RM_OWNED *word = PyObject_GetAttrString(dtype, "name");
    if (!word) return -1;
    if (text_is(word, "bfloat16")) return 0;
  }
  return rm_refuse(RM_E_DTYPE,
                   "%.200U: expected " RM_WEIGHT_ELEMENTS " in native byte order, got %R", name,
                   dtype);
}

// Finds the memory behind an array: that of the last base that owns memory. as_strided inserts a
// plain object with a `base`. Without a known owner the span stays unknown.
static int numpy_span(PyArrayObject *array, rm_tensor *out) {
  PyObject *at = Py_NewRef((PyObject *)array);
  for (int depth = 0; depth < 64; depth++) {
    if (PyArray_Check(at) && PyArray_CHKFLAGS((PyArrayObject *)at, NPY_ARRAY_OWNDATA)) {
      PyArrayObject *owner = (PyArrayObject *)at;
      if (PyArray_IS_C_CONTIGUOUS(owner) || PyArray_IS_F_CONTIGUOUS(owner)) {
        const uintptr_t start = (uintptr_t)PyArray_DATA(owner);
        take_span(out, start, start + (uintptr_t)PyArray_NBYTES(owner));
      }
      break;
    }
    Py_buffer view;
    if (!PyArray_Check(at) && PyObject_CheckBuffer(at)) {
      if (PyObject_GetBuffer(at, &view, PyBUF_SIMPLE) == 0) {
        take_span(out, (uintptr_t)view.buf, (uintptr_t)view.buf + (uintptr_t)view.len);
        PyBuffer_Release(&view);
      } else {
        PyErr_Clear();
      }
      break;
    }
    PyObject *base = PyArray_Check(at) ? Py_XNewRef(PyArray_BASE((PyArrayObject *)at))
                                       : optional_attr(at, "base");
    Py_DECREF(at);
    if (!base) return PyErr_Occurred() ? -1 : 0;
    at = base;
  }
  Py_DECREF(at);
  return 0;
}

static int from_numpy(PyArrayObject *array, PyObject *name, rm_tensor *out) {
  if (numpy_dtype(name, array, &out->dtype)) return -1;
  const int n_dims = PyArray_NDIM(array);
  if (take_shape(name, n_dims, PyArray_DIMS(array), out)) return -1;
  const int64_t each = element_bytes(out->dtype);
  for (int i = 0; i < n_dims; i++) {
    const int64_t stride = PyArray_STRIDE(array, i);
    if (stride % each && out->shape[i] > 1)
      return rm_refuse(
          RM_E_LAYOUT,
          "%.200U: expected strides that are multiples of %zd bytes (an element), got %zd bytes "
          "in dim %d",
          name, each, stride, i);
    out->strides[i] = stride / each;
  }
  out->data = PyArray_DATA(array);
  return numpy_span(array, out);
}

// ------------------------------------------------------------------------------------------ torch
// Finds the storage behind a torch tensor. LayoutError if it was resized to 0 bytes, as FSDP does.
static int torch_span(PyObject *object, PyObject *name, rm_tensor *out) {
  RM_OWNED *method = optional_attr(object, "untyped_storage");
  if (!method) return PyErr_Occurred() ? -1 : 0;
  RM_OWNED *storage = PyObject_CallNoArgs(method);
  RM_OWNED *start = storage ? PyObject_CallMethod(storage, "data_ptr", NULL) : NULL;
  RM_OWNED *bytes = start ? PyObject_CallMethod(storage, "nbytes", NULL) : NULL;
  if (!bytes) return -1;
  const unsigned long long at = PyLong_AsUnsignedLongLong(start),
                           length = PyLong_AsUnsignedLongLong(bytes);
  if (PyErr_Occurred()) return -1;
  if (length == 0)
    return rm_refuse(
        RM_E_LAYOUT,
        "%.200U: expected a tensor with memory, got one whose storage is empty (0 bytes)", name);
  take_span(out, (uintptr_t)at, (uintptr_t)(at + length));
  return 0;
}

// ----------------------------------------------------------------------------------------- DLPack
static int is_host(long type) { return type == DL_CPU || type == DL_CUDA_HOST; }
static int is_cuda(long type) { return type == DL_CUDA || type == DL_CUDA_MANAGED; }

static int refuse(PyObject *name, const char *what) {
  return rm_refuse(RM_E_UNSUPPORTED_TENSOR, "%.200U: expected a dense tensor, got %s", name, what);
}

// A producer's device: a CUDA device's number, or HOST.
enum { HOST = -1 };

// Returns −1 with an exception if the extension cannot read the producer's device.
static int check_device(PyObject *object, PyObject *name, const rm_tensor_reader *reader,
                        int *ordinal) {
  RM_OWNED *device = PyObject_CallMethod(object, "__dlpack_device__", NULL);
  if (!device) return -1;
  long type, number;
  if (!PyTuple_Check(device) || !PyArg_ParseTuple(device, "ll", &type, &number)) {
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_OverflowError) &&
        !PyErr_ExceptionMatches(PyExc_TypeError))
      return -1;
    PyErr_Clear();
    return rm_refuse(
        RM_E_UNSUPPORTED_TENSOR,
        "%.200U: expected a __dlpack_device__ that returns two integers of 64 bits, got %.80R",
        name, device);
  }
  *ordinal = is_cuda(type) ? (int)number : HOST;
  if (is_cuda(type) && (number < 0 || number > INT32_MAX))
    return refuse(name, "a __dlpack_device__ with an invalid number of a CUDA device");
  if (is_host(type) || (is_cuda(type) && reader)) return 0;
  return rm_refuse(
      RM_E_UNSUPPORTED_TENSOR,
      "%.200U: expected a tensor on the CPU%s, got one on DLPack device type %ld (2: CUDA, 8: "
      "Metal, 10: ROCm)",
      name, reader ? " or a CUDA device" : "", type);
}

// Requests a versioned capsule; an old producer returns an unversioned one. With a stream, work
// that is enqueued on it from now on reads the complete data.
static PyObject *ask_capsule(PyObject *object, PyObject *name, const void *stream) {
  RM_OWNED *method = PyObject_GetAttrString(object, "__dlpack__");
  RM_OWNED *none = method ? PyTuple_New(0) : NULL;
  RM_OWNED *options = none ? Py_BuildValue("{s:(ii)}", "max_version", 1, 1) : NULL;
  RM_OWNED *handle = options ? PyLong_FromUnsignedLongLong((uintptr_t)stream) : NULL;
  if (!handle || (stream && PyDict_SetItemString(options, "stream", handle))) return NULL;
  PyObject *capsule = PyObject_Call(method, none, options);
  if (!capsule && PyErr_ExceptionMatches(PyExc_TypeError)) {
    PyErr_Clear();
    if (!PyDict_DelItemString(options, "max_version"))
      capsule = PyObject_Call(method, none, options);
  }
  if (!capsule && PyErr_ExceptionMatches(PyExc_BufferError)) {
    RM_OWNED *type = NULL, *value = NULL, *trace = NULL;
    PyErr_Fetch(&type, &value, &trace);
    rm_raise_code(
        RM_E_UNSUPPORTED_TENSOR,
        "%.200U: expected a tensor that its library exports by DLPack, got BufferError: %S", name,
        value ? value : Py_None);
  }
  return capsule;
}

int rm_element_of(PyObject *name, dl_dtype dtype, int n_expected, const char *expected) {
  static const char *const kinds[] = {"int",    "uint",    "float", "opaque",
                                      "bfloat", "complex", "bool"}; // by DLPack's code
  for (int i = 0; i < n_expected && dtype.lanes == 1; i++)
    if (rm_elements[i].code == dtype.code && rm_elements[i].bits == dtype.bits) return i;
  const char *kind = dtype.code < RM_LENGTH(kinds) ? kinds[dtype.code] : "DLPack type of bits ";
  return rm_refuse(RM_E_DTYPE, "%.200U: expected %s, got %s%d%s", name, expected, kind,
                   (int)dtype.bits, dtype.lanes == 1 ? "" : " in vectors");
}

static int take_strides(PyObject *name, const dl_tensor *t, rm_tensor *out) {
  int64_t next = 1;
  for (int i = out->n_dims - 1; i >= 0; i--) {
    out->strides[i] = t->strides ? t->strides[i] : next;
    next *= rm_max64(out->shape[i], 1); // checked in take_shape
  }
  uintptr_t data = (uintptr_t)t->data;
  if (data && __builtin_add_overflow(data, t->byte_offset, &data))
    return rm_refuse(RM_E_LAYOUT,
                     "%.200U: expected a byte offset inside the address space, got %llu", name,
                     (unsigned long long)t->byte_offset);
  out->data = (const void *)data;
  return 0;
}

static int from_capsule(PyObject *capsule, PyObject *name, int ordinal, rm_dlpack *out) {
  const dl_tensor *t;
  if (PyCapsule_IsValid(capsule, "dltensor_versioned")) {
    const dl_versioned *managed = PyCapsule_GetPointer(capsule, "dltensor_versioned");
    if (managed->major != 1)
      return rm_refuse(RM_E_UNSUPPORTED_TENSOR, "%.200U: expected DLPack 1.x, got %u.%u", name,
                       managed->major, managed->minor);
    t = &managed->tensor;
    out->read_only = (managed->flags & DL_READ_ONLY) != 0;
  } else if (PyCapsule_IsValid(capsule, "dltensor")) {
    t = PyCapsule_GetPointer(capsule, "dltensor"); // DLManagedTensor begins with its DLTensor
  } else {
    return refuse(name, "a __dlpack__ that does not return a new DLPack capsule");
  }
  if (ordinal == HOST ? !is_host(t->device.type)
                      : !is_cuda(t->device.type) || t->device.id != ordinal)
    return refuse(name, "a capsule whose tensor is not on the __dlpack_device__");
  if (t->n_dims > 0 && !t->shape)
    return refuse(name, "a capsule whose tensor has dims but no shape");
  out->tensor = t;
  out->on_device = ordinal != HOST;
  out->ordinal = ordinal;
  return 0;
}

static int describe(const rm_dlpack *from, PyObject *name, rm_tensor *out) {
  const dl_tensor *t = from->tensor;
  out->on_device = from->on_device;
  out->ordinal = from->ordinal;
  const int dtype = rm_element_of(name, t->dtype, RM_N_WEIGHT_ELEMENTS, RM_WEIGHT_ELEMENTS);
  if (dtype < 0) return -1;
  out->dtype = (rm_src_dtype)dtype;
  if (take_shape(name, t->n_dims, t->shape, out)) return -1;
  return take_strides(name, t, out);
}

void rm_tensor_release(PyObject *owner) {
  if (!owner) return;
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  Py_DECREF(owner);
  PyErr_Restore(type, value, trace);
}

// Requests the capsule. For a tensor on a GPU the reader's device is current meanwhile.
static PyObject *ask_reader(PyObject *object, PyObject *name, const rm_tensor_reader *reader,
                            int ordinal) {
  if (ordinal == HOST) return ask_capsule(object, name, NULL);
  const rm_device *device = reader->take(reader->self, name, ordinal);
  if (!device) return NULL;
  const int saved = device->enter(device->self);
  PyObject *capsule = ask_capsule(object, name, device->stream);
  device->leave(device->self, saved);
  if (reader->give) reader->give(reader->self);
  return capsule;
}

int rm_dlpack_take(PyObject *object, PyObject *name, const rm_tensor_reader *reader,
                   rm_dlpack *out) {
  int ordinal = HOST;
  memset(out, 0, sizeof *out);
  if (check_device(object, name, reader, &ordinal)) return -1;
  PyObject *capsule = ask_reader(object, name, reader, ordinal);
  if (capsule && !from_capsule(capsule, name, ordinal, out)) return out->owner = capsule, 0;
  rm_tensor_release(capsule);
  return -1;
}

static int from_dlpack(PyObject *object, PyObject *name, const rm_tensor_reader *reader,
                       rm_tensor *out, PyObject **owner) {
  rm_dlpack taken;
  if (rm_dlpack_take(object, name, reader, &taken)) return -1;
  if (describe(&taken, name, out) || torch_span(object, name, out)) {
    rm_tensor_release(taken.owner);
    return -1;
  }
  *owner = taken.owner;
  return 0;
}

int rm_tensor_from_object(PyObject *object, PyObject *name, const rm_tensor_reader *reader,
                          rm_tensor *out, PyObject **owner) {
  memset(out, 0, sizeof *out);
  *owner = NULL;
  if (PyArray_Check(object)) {
    if (rm_array_is_masked(object)) return refuse(name, "a masked array; send .filled(value)");
    if (from_numpy((PyArrayObject *)object, name, out)) return -1;
    *owner = Py_NewRef(object);
    return 0;
  }
  RM_OWNED *method = optional_attr(object, "__dlpack_device__");
  if (!method)
    return PyErr_Occurred() ? -1
                            : rm_refuse(RM_E_UNSUPPORTED_TENSOR,
                                        "%.200U: expected a NumPy array or a DLPack tensor, got %R",
                                        name, (PyObject *)Py_TYPE(object));
  return from_dlpack(object, name, reader, out, owner);
}

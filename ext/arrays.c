// arrays.c: see arrays.h. Each check has its own error class, so that a caller can distinguish a
// wrong dtype from a wrong layout.
#include "arrays.h"

#include <string.h>

int rm_array_check_shape(rm_array_want *want, int n_dims, const int64_t *shape) {
  if (n_dims != want->n_dims)
    return rm_refuse(RM_E_SHAPE, "%s: expected %d dims, got %d", want->name, want->n_dims, n_dims);
  for (int i = 0; i < n_dims; i++) {
    if (want->shape[i] >= 0 && shape[i] != want->shape[i])
      return rm_refuse(RM_E_SHAPE, "%s: expected size %zd in dim %d, got %zd", want->name,
                       want->shape[i], i, shape[i]);
    want->shape[i] = shape[i];
  }
  return 0;
}

static int check_layout(PyArrayObject *array, const rm_array_want *want) {
  const char *expected = NULL, *seen = NULL;
  if (!PyArray_IS_C_CONTIGUOUS(array)) expected = "a C-contiguous", seen = "a strided";
  else if (!PyArray_ISALIGNED(array)) expected = "an aligned", seen = "an unaligned";
  else if (!PyArray_ISNOTSWAPPED(array)) expected = "a native-endian", seen = "a byte-swapped";
  else if ((want->flags & RM_ARRAY_WRITE) && !PyArray_ISWRITEABLE(array))
    expected = "a writable", seen = "a read-only";
  if (!expected) return 0;
  return rm_refuse(RM_E_LAYOUT, "%s: expected %s array, got %s one; copy it first", want->name,
                   expected, seen);
}

// Checks the class, since an array of records may have a field of that name.
int rm_array_is_masked(PyObject *object) {
  return !PyArray_CheckExact(object) && PyObject_HasAttrString((PyObject *)Py_TYPE(object), "mask");
}

static int refuse_type(rm_code code, const rm_array_want *want, const char *what, void *got) {
  RM_OWNED *wanted = (PyObject *)PyArray_DescrFromType(want->type);
  return rm_refuse(code, "%s: expected %s %S, got %S", want->name, what, wanted, got);
}

int rm_array_data(PyObject *object, rm_array_want *want, void **data) {
  *data = NULL;
  if (object == Py_None && (want->flags & RM_ARRAY_OPTIONAL)) return 0;
  if (!PyArray_Check(object))
    return refuse_type(RM_E_UNSUPPORTED_TENSOR, want, "a NumPy array of", Py_TYPE(object));
  if (rm_array_is_masked(object))
    return rm_refuse(RM_E_UNSUPPORTED_TENSOR,
                     "%s: expected a plain array, got a masked one; .filled(value) makes one",
                     want->name);
  PyArrayObject *array = (PyArrayObject *)object;
  if (!PyArray_EquivTypenums(PyArray_TYPE(array), want->type))
    return refuse_type(RM_E_DTYPE, want, "dtype", PyArray_DESCR(array));
  if (want->n_dims >= 0 && rm_array_check_shape(want, PyArray_NDIM(array), PyArray_DIMS(array)))
    return -1;
  if (check_layout(array, want)) return -1;
  *data = PyArray_DATA(array);
  return 0;
}

int rm_arrays_data(PyObject *arguments, rm_array_want wants[], int n, void *data[]) {
  if (PyTuple_Size(arguments) != n) {
    PyErr_Format(PyExc_TypeError, "expected %d arrays, got %zd", n, PyTuple_Size(arguments));
    return -1;
  }
  for (int i = 0; i < n; i++) {
    if (wants[i].shape[0] == RM_ARRAY_AS_FIRST) wants[i].shape[0] = wants[0].shape[0];
    if (rm_array_data(PyTuple_GetItem(arguments, i), &wants[i], &data[i])) return -1;
  }
  return 0;
}

int rm_array_ids(PyObject *object, const char *name, const int32_t **ids, int64_t *n_out) {
  PyArrayObject *array = (PyArrayObject *)object;
  if (!PyArray_Check(object) || !PyArray_EquivTypenums(PyArray_TYPE(array), NPY_INT32) ||
      PyArray_NDIM(array) != 1 || !PyArray_ISCARRAY_RO(array))
    return rm_refuse(RM_E_REQUEST, "%s: expected a C-contiguous int32 array of one dim, got %R",
                     name, object);
  *ids = PyArray_DATA(array);
  *n_out = PyArray_DIM(array, 0);
  return 0;
}

PyObject *rm_array_new(int type, int n_dims, const int64_t *shape, const void *source) {
  npy_intp dims[4] = {0, 0, 0, 0};
  for (int i = 0; i < n_dims; i++) dims[i] = (npy_intp)shape[i];
  if (!source) return PyArray_ZEROS(n_dims, dims, type, 0);
  PyObject *array = PyArray_SimpleNew(n_dims, dims, type);
  if (!array) return NULL;
  const size_t bytes = (size_t)PyArray_NBYTES((PyArrayObject *)array);
  if (bytes) memcpy(PyArray_DATA((PyArrayObject *)array), source, bytes);
  return array;
}

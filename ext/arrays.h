// arrays.h: NumPy arrays as raw pointers. Dtype, dims, shape, C order, alignment and writability
// are checked, with a typed error for each; nothing is cast or copied. bfloat16 arrays are uint16
// arrays of its words, since ml_dtypes' dtype number varies (pass `a.view(numpy.uint16)`).
#pragma once

#include "core.h"

#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#define PY_ARRAY_UNIQUE_SYMBOL rm_numpy_api
#ifndef RM_IMPORT_NUMPY // module.c alone defines it and calls import_array
#define NO_IMPORT_ARRAY
#endif
#include <numpy/arrayobject.h>

// Flags. OPTIONAL: None gives data NULL and no error. Of ops alone (ops.h): PACKED: on a device
// aligned to 16 bytes; OF_HOST: of the host also where the others are on a device.
enum {
  RM_ARRAY_IN = 0,
  RM_ARRAY_WRITE = 1,
  RM_ARRAY_OPTIONAL = 2,
  RM_ARRAY_PACKED = 4,
  RM_ARRAY_OF_HOST = 8
};

// What is expected of an argument. shape[i] = −1 accepts any size; the actual size is written back,
// for the check of a later argument.
typedef struct rm_array_want {
  const char *name; // for the message
  int type; // NPY_FLOAT32, NPY_UINT16, NPY_INT32, …
  int flags;
  int n_dims; // 0 … 4; −1: any, shape is not looked at
  int64_t shape[4];
} rm_array_want;

// An array of numpy.ma, or of another class with a mask: masked elements would be read.
int rm_array_is_masked(PyObject *object);

// The data pointer: view, valid while `object` is alive and unchanged. 0, or −1 with the exception
// set: DTypeError, ShapeError, LayoutError (not C order, misaligned, read-only),
// UnsupportedTensorError (no array, or a masked one).
int rm_array_data(PyObject *module, PyObject *object, rm_array_want *want, void **data);

// Any C-contiguous one-dimensional int32 array of token ids; n_out gets its length. RequestError
// otherwise.
int rm_array_ids(PyObject *module, PyObject *object, const char *name, const int32_t **ids,
                 int64_t *n_out);

// New reference to a fresh array of `type`; with `source` its bytes are copied from there, else
// they are zero.
PyObject *rm_array_new(int type, int n_dims, const int64_t *shape, const void *source);

// arrays.h: NumPy arrays as raw pointers. Checks dtype, dims, shape, C order, alignment and
// writability, with a typed error for each, and never casts or copies. bfloat16 arrays are uint16
// arrays of its words, since ml_dtypes' dtype number varies (pass `a.view(numpy.uint16)`). Called
// with the GIL.
#pragma once

#include "core.h"

#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#define PY_ARRAY_UNIQUE_SYMBOL rm_numpy_api
#ifndef RM_IMPORT_NUMPY // only module.c defines it and calls import_array
#define NO_IMPORT_ARRAY
#endif
#include <numpy/arrayobject.h>

// Flags. OPTIONAL: None is accepted and sets data to NULL. Only for ops (ops.h): PACKED: aligned to
// 16 bytes on a device; OF_HOST: always a host array, even if the other arrays are on a device.
enum {
  RM_ARRAY_IN = 0,
  RM_ARRAY_WRITE = 1,
  RM_ARRAY_OPTIONAL = 2,
  RM_ARRAY_PACKED = 4,
  RM_ARRAY_OF_HOST = 8
};

// The expected form of an argument. shape[i] = −1 accepts any size; the actual size is written
// back, so that later arguments can be checked against it.
typedef struct rm_array_want {
  const char *name; // for the message
  int type; // NPY_FLOAT32, NPY_UINT16, NPY_INT32, …
  int flags;
  int n_dims; // 0 to 4; −1: any, shape is ignored
  int64_t shape[4];
} rm_array_want;

// Whether an array is of numpy.ma or of another class with a mask, which C code would ignore.
int rm_array_is_masked(PyObject *object);

// Compares sizes with the expected ones. Returns 0, or −1 with ShapeError.
int rm_array_check_shape(rm_array_want *want, int n_dims, const int64_t *shape);

// Sets *data to the array's data, a view that is valid while `object` is alive and unchanged.
// Returns 0, or −1 with the exception set: DTypeError, ShapeError, LayoutError (not C order,
// misaligned, read-only), UnsupportedTensorError (not an array, or a masked one).
int rm_array_data(PyObject *object, rm_array_want *want, void **data);

// The same for the n arrays of a tuple of arguments. The size RM_ARRAY_AS_FIRST is that of the
// first array's first dim. TypeError for a tuple of another length.
enum { RM_ARRAY_AS_FIRST = -2 };
int rm_arrays_data(PyObject *arguments, rm_array_want wants[], int n, void *data[]);

// The same for a C-contiguous one-dimensional int32 array of token ids; sets *n_out to its length.
// RequestError for anything else.
int rm_array_ids(PyObject *object, const char *name, const int32_t **ids, int64_t *n_out);

// New reference to a new array of `type`, a copy of the bytes at `source`, or zeros if it is NULL.
PyObject *rm_array_new(int type, int n_dims, const int64_t *shape, const void *source);

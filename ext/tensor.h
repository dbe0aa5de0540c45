// tensor.h: converts a trainer's tensor of any library to an rm_tensor, without reading, converting
// or copying its data. NumPy arrays are read through their C API (bfloat16 as ml_dtypes' type, or
// as uint16 with the dtype metadata {"rollmesh": "bfloat16"}), all others through DLPack.
//
// Checks dims, sizes, overflow, device and element type. If the buffer behind the tensor is known
// (a NumPy base, a torch storage), span_lo and span_hi get its ends, and the engine checks the
// strides against them. Python has refused tensors without dense memory, and detached the others
// from autograd (rollmesh.runtime.arguments.exportable). The producer's exceptions pass through,
// except BufferError, which a DLPack producer raises if it cannot export a tensor. Called with the
// GIL.
#pragma once

#include "core.h"

#include "weights/store.h"

// *owner: new reference that keeps the data alive; rm_tensor_release drops it when the tensor has
// been read. `name` (str) is for messages.
// Returns 0, or −1 with the exception set: UnsupportedTensorError, DTypeError, ShapeError,
// LayoutError, or the producer's own.
//
// `reader` returns the device that reads a tensor on a GPU; NULL: such a tensor is
// UnsupportedTensorError. The producer makes that device's stream wait for pending writes of the
// tensor (DLPack's protocol). The device is current meanwhile, since torch exports only tensors of
// the current device.
typedef struct rm_tensor_reader {
  // Returns a view of the device until give; NULL with an exception.
  const rm_device *(*take)(void *self, PyObject *name, int ordinal);
  void (*give)(void *self); // or NULL
  void *self;
} rm_tensor_reader;

int rm_tensor_from_object(PyObject *object, PyObject *name, const rm_tensor_reader *reader,
                          rm_tensor *out, PyObject **owner);

// Only the DLPack part, for any element type: the producer's description, which `owner` keeps
// alive. Checks only the device, not dims, type, sizes and strides.
typedef struct rm_dlpack {
  const struct dl_tensor *tensor; // view of the capsule that owner holds
  int on_device, ordinal; // whether it is on a CUDA device, and that device's number
  int read_only; // the producer's flag; always 0 before DLPack 1.0
  PyObject *owner; // owned
} rm_dlpack;
int rm_dlpack_take(PyObject *object, PyObject *name, const rm_tensor_reader *reader,
                   rm_dlpack *out);

// Index of a DLPack dtype in rm_elements; −1 with DTypeError, whose message lists `expected`.
struct dl_dtype;
int rm_element_of(PyObject *name, struct dl_dtype dtype, int n_expected, const char *expected);

// Drops a reference, which may run the producer's code (a capsule's destructor). Saves a pending
// exception during that code. Safe on NULL.
void rm_tensor_release(PyObject *owner);

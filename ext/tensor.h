// tensor.h: a trainer's tensor of any library as an rm_tensor, without reading, converting or
// copying its data. NumPy arrays come through their C API (bfloat16 as ml_dtypes' type, or as
// uint16 with the dtype metadata {"rollmesh": "bfloat16"}), all others through DLPack.
//
// Checked: dims, sizes, overflow, device, element type. If the buffer behind the tensor is known (a
// NumPy base, a torch storage), span_lo and span_hi get its ends, and the engine checks the strides
// against them. The producer's exceptions pass through, except BufferError, by which a DLPack
// producer refuses.
#pragma once

#include "core.h"

#include "weights/sync.h"

// *owner: new reference that keeps the data alive; rm_tensor_release it when the tensor has been
// read. `name` (str) is for messages.
// 0, or −1 with the exception set: UnsupportedTensorError, DTypeError, ShapeError, LayoutError, or
// the producer's own.
//
// `reader` gives the device that reads a tensor on a GPU; NULL: such a tensor is
// UnsupportedTensorError. The producer makes that device's stream wait for what writes the tensor
// (DLPack's protocol). The device is current meanwhile: torch exports only tensors of the current
// device.
typedef struct rm_tensor_reader {
  const rm_device *(*take)(void *self, PyObject *name,
                           int ordinal); // a view until give; NULL with an exception
  void (*give)(void *self);
  void *self;
} rm_tensor_reader;

int rm_tensor_from_object(PyObject *module, PyObject *object, PyObject *name,
                          const rm_tensor_reader *reader, rm_tensor *out, PyObject **owner);

// The DLPack part alone, for any element type: the producer's description, which `owner` keeps
// alive. Only its place is checked, not dims, type, sizes and strides.
typedef struct rm_dlpack {
  const struct dl_tensor *tensor; // view, of the capsule that owner has
  int on_device, ordinal; // a CUDA device's number
  int read_only; // the producer says so; one from before DLPack 1.0 cannot
  PyObject *owner; // owned
} rm_dlpack;
int rm_dlpack_take(PyObject *module, PyObject *object, PyObject *name,
                   const rm_tensor_reader *reader, rm_dlpack *out);

// The index of a DLPack dtype in rm_elements; −1 with DTypeError, which names those that were
// `expected`.
struct dl_dtype;
int rm_element_of(PyObject *module, PyObject *name, struct dl_dtype dtype, int n_expected,
                  const char *expected);

// Drops a reference, which may run the producer's code (a capsule's destructor). A pending
// exception is hidden from that code and kept. NULL is fine.
void rm_tensor_release(PyObject *owner);

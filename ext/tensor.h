// tensor.h: a trainer's tensor, whatever library it is of, as an rm_tensor. NumPy arrays come through their C API (with
// ml_dtypes' bfloat16, or uint16 words whose dtype carries the metadata {"rollmesh": "bfloat16"}); everything else through
// DLPack, both kinds of capsule. No byte of the data is read here and nothing is converted or copied.
//
// A producer may be anybody's code, so what it says is checked: dims, sizes, overflow, device, element type; and where the
// buffer behind it can be seen (a NumPy base, a torch storage) its ends go into span_lo and span_hi for the engine to check
// the strides against. Exceptions of that code pass through, but for BufferError, which is DLPack's way to refuse.
#pragma once

#include "core.h"

#include "weights/sync.h"

// *owner: new reference that keeps the data alive; rm_tensor_release it when the tensor has been read. `name` (str) is for
// messages.
// 0, or −1 with the exception set: UnsupportedTensorError, DTypeError, ShapeError, LayoutError, or the producer's own.
//
// `reader`: of tensors on a GPU; NULL where nothing reads one: such a tensor is UnsupportedTensorError. What it gives is the device whose
// stream the producer is asked to make wait for what writes the tensor (DLPack's protocol), and which is current while it is asked:
// torch gives tensors of the current device alone.
typedef struct rm_tensor_reader {
  const rm_device *(*take)(void *self, PyObject *name, int ordinal);   // a view until give; NULL with an exception
  void (*give)(void *self);
  void *self;
} rm_tensor_reader;

int rm_tensor_from_object(PyObject *module, PyObject *object, PyObject *name, const rm_tensor_reader *reader, rm_tensor *out,
                          PyObject **owner);

// The DLPack part of it alone, for arrays whose elements may be anything: whose tensor it is, where, and the producer's description,
// which `owner` keeps. That it lies where its producer says was looked at; dims, type, sizes and strides were not.
typedef struct rm_dlpack {
  const struct dl_tensor *tensor;  // view, of the capsule that owner has
  int on_device, ordinal;       // a CUDA device's number
  int read_only;                // the producer says so; one from before versions cannot
  PyObject *owner;              // owned
} rm_dlpack;
int rm_dlpack_take(PyObject *module, PyObject *object, PyObject *name, const rm_tensor_reader *reader, rm_dlpack *out);

// Drops a reference whose end may run the producer's code (a capsule's destructor): that code neither sees nor loses the
// exception that is on its way. NULL is fine.
void rm_tensor_release(PyObject *owner);

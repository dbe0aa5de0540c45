// gpu_array.h: arrays on a CUDA device for the op table. `_core.Queue(library, ordinal)` is a device opened for ops: its stream, what
// they work in, and the host memory that small arrays travel through. `_core.DeviceArray` is an array in its memory, or a view of one
// that another library has (a DLPack producer); whoever wants it takes it by DLPack too.
//
// A Queue lives as long as anything of it. Its mutex is held, and its device is current, between rm_queue_enter and rm_queue_leave; a
// thread that waits for it has released the GIL. It may be entered again by the thread that has it: an array can go while another is
// looked at.
#pragma once

#include "arrays.h"

#include <pthread.h>
#include <unistd.h>

#include "device/devices.h"
#include "tensor.h"

enum { RM_QUEUE_MIRRORS = 4 };

typedef struct rm_queue_object {
  PyObject_HEAD
  rm_device device;             // owned
  char *library;                // owned: where it comes from
  pthread_mutex_t mutex;        // recursive
  pid_t owner;                  // CUDA does not survive a fork
  void *workspace;              // owned, grows
  size_t workspace_bytes;
  rm_paired mirrors[RM_QUEUE_MIRRORS];   // owned, grow: index arrays, parameters, small results
} rm_queue_object;

// −1: this is a forked child, StateError. What to give to leave, in *saved.
// −1 with ConfigError: ops cannot be ordered with that stream.
int rm_queue_check_stream(PyObject *module, rm_queue_object *queue, void *stream);
int rm_queue_enter(PyObject *module, rm_queue_object *queue, int *saved);
void rm_queue_leave(rm_queue_object *queue, int saved);
// Mirror i with room for so many bytes, which no earlier work reads or writes. RM_E_CAPACITY, RM_E_MEMORY, RM_E_DEVICE.
rm_code rm_queue_mirror(rm_queue_object *queue, int i, size_t bytes, rm_error *err);
rm_code rm_queue_workspace(rm_queue_object *queue, size_t bytes, rm_error *err);   // grows it: RM_E_CAPACITY, RM_E_DEVICE

// New arrays: zeros of a dtype by its name and a shape (tuple), a copy of a NumPy array, a view of what a producer gave. CapacityError,
// DTypeError, ShapeError, LayoutError, UnsupportedTensorError.
PyObject *rm_device_array_zeros(PyObject *module, rm_queue_object *queue, const char *name, PyObject *shape);
PyObject *rm_device_array_copy(PyObject *module, rm_queue_object *queue, PyObject *array);
PyObject *rm_device_array_over(PyObject *module, rm_queue_object *queue, PyObject *name, const rm_dlpack *taken);

PyObject *rm_gpu_array_lent(PyObject *gpus, PyObject *args);   // _core.Gpus.array

int rm_is_device_array(PyObject *module, PyObject *object);
// As rm_array_data, of a DeviceArray of `queue`'s device; another array gives UnsupportedTensorError, which names both places. *bytes
// (NULL: not wanted) is their number.
int rm_device_array_data(PyObject *module, rm_queue_object *queue, PyObject *object, rm_array_want *want, void **data, size_t *bytes);
int rm_device_array_type(PyObject *array);   // NPY_UINT16 of bfloat16, NPY_FLOAT32, …

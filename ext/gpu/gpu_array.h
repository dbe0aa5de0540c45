// gpu_array.h: _core.OpDevice and _core.DeviceArray.
//
// `OpDevice(library, ordinal)` is a CUDA device opened for ops: a stream, a workspace and a
// mirrored buffer. A DeviceArray is an array of an OpDevice, a view of another library's tensor (a
// DLPack producer), or a read-only view of memory that another process lends or another rank sent
// (Gpus.array). It is a DLPack producer itself.
//
// An OpDevice lives as long as its arrays. Between rm_op_device_enter and rm_op_device_leave its
// mutex is held and its device is current; waiting for the mutex releases the GIL. The mutex is
// recursive, since an array may be freed while another is checked.
#pragma once

#include "arrays.h"

#include <pthread.h>
#include <unistd.h>

#include "device/devices.h"
#include "tensor.h"

typedef struct rm_op_device {
  PyObject_HEAD
  rm_device device; // owned
  PyObject *library; // owned str: path of the CUDA library
  pthread_mutex_t mutex; // recursive
  pid_t owner; // the process that may use it: CUDA does not survive a fork
  void *workspace; // owned, grows
  size_t workspace_bytes;
  rm_mirrored_buffer mirrored; // owned, grows: index arrays and parameters of an op
} rm_op_device;

// Returns 0, or −1 with ConfigError if ops cannot be ordered with that stream.
int rm_op_device_check_stream(rm_op_device *op_device, void *stream);
// Returns 0, or −1 with StateError in a forked child. *saved is for leave.
int rm_op_device_enter(rm_op_device *op_device, int *saved);
void rm_op_device_leave(rm_op_device *op_device, int saved);
// The failure of an earlier op: RM_OK or RM_E_DEVICE. Does not wait.
rm_code rm_op_device_poll(rm_op_device *op_device, rm_error *err);
// Grows the mirrored buffer to at least `bytes` and waits until earlier work has finished with it.
// RM_E_CAPACITY, RM_E_MEMORY, RM_E_DEVICE.
rm_code rm_op_device_mirrored(rm_op_device *op_device, size_t bytes, rm_error *err);
// Grows the workspace to at least `bytes`. RM_E_CAPACITY, RM_E_DEVICE.
rm_code rm_op_device_workspace(rm_op_device *op_device, size_t bytes, rm_error *err);

// New arrays: zeros of NumPy's type number, or of a dtype by its name and a shape (tuple); a copy
// of a NumPy array; a view of a producer's tensor. CapacityError, DTypeError, ShapeError,
// LayoutError, UnsupportedTensorError.
PyObject *rm_device_array_new(rm_op_device *op_device, int type, int n_dims, const int64_t *shape);
PyObject *rm_device_array_zeros(rm_op_device *op_device, const char *name, PyObject *shape);
PyObject *rm_device_array_copy(rm_op_device *op_device, PyObject *array);
PyObject *rm_device_array_over(rm_op_device *op_device, PyObject *name, const rm_dlpack *taken);

// Returns the device of that number, opened: a view that `gpus`, a _core.Gpus, owns. NULL with an
// exception.
const rm_device *rm_gpus_device(PyObject *gpus, int ordinal);
PyObject *rm_gpu_array_lent(PyObject *gpus, PyObject *args); // _core.Gpus.array

// rm_array_data for a DeviceArray on `op_device`. UnsupportedTensorError for any other array; its
// message names both devices. *bytes: the array's bytes.
int rm_device_array_data(rm_op_device *op_device, PyObject *object, rm_array_want *want,
                         void **data, size_t *bytes);
// NPY_UINT16 for bfloat16, NPY_FLOAT32, …; −1: not a DeviceArray. relative: as of rm_is.
int rm_device_array_type(void *relative, PyObject *object);

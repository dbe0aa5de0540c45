// loans.h: GPU tensors between processes, by CUDA IPC. In the trainer `_core.Gpus` returns a
// tensor's address and the handle of its allocation; in another process it opens the handle and
// makes a DeviceArray over that memory. Called with the GIL.
#pragma once

#include "core.h"
#include "device.h"

// Returns the device of that number, opened: a view that `gpus`, a _core.Gpus, owns. NULL with an
// exception.
const rm_device *rm_gpus_device(PyObject *gpus, int ordinal);

// loans.h: GPU tensors between processes, by CUDA IPC. In the trainer `_core.Gpus` gives a tensor's
// address and the handle of its allocation; in another process it opens the handle and makes a
// DeviceArray over that memory.
#pragma once

#include "core.h"
#include "device.h"

// The device of that number, opened; a view of what `gpus`, a _core.Gpus, has. NULL with an
// exception.
const rm_device *rm_gpus_device(PyObject *gpus, int ordinal);

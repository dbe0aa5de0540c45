// loans.h: tensors of GPUs between processes. `_core.Gpus` says where a trainer's tensor lies and what lets another process open that
// memory; there it opens it, and makes a DeviceArray over it.
#pragma once

#include "core.h"
#include "device.h"

// The device of that number, opened; a view of what `gpus`, a _core.Gpus, has. NULL with an exception.
const rm_device *rm_gpus_device(PyObject *gpus, int ordinal);

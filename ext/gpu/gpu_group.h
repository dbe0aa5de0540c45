// gpu_group.h: buffers of GPU memory that NCCL broadcasts from one rank of a group to all others:
// weights on their way from a trainer's GPUs to the generators'. Python decides what is in a
// buffer, and which rank sends it (rollmesh.weights.transport.carriers).
#pragma once

#include "core.h"

// Of gpus.group(end, ordinal, nccl_library, gpu, timeout), which every rank of `end` calls: a
// _core.GpuGroup. NULL with an exception.
PyObject *rm_gpu_group_new(PyObject *gpus, PyObject *args);

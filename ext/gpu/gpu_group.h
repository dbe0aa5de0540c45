// gpu_group.h: buffers of GPU memory that NCCL broadcasts from one rank of a group to all others,
// to send weights from a trainer's GPUs to the generators'. Python chooses a buffer's content and
// the rank that sends it (rollmesh.weights.transport.carriers). One thread at a time uses a group.
#pragma once

#include "core.h"

// Implements gpus.group(end, ordinal, nccl_library, gpu, timeout), which every rank of `end` calls.
// Returns a _core.GpuGroup, or NULL with an exception.
PyObject *rm_gpu_group_new(PyObject *gpus, PyObject *args);

// gpu_group.h: blocks of a GPU's memory that go from one rank of a group to all others by NCCL: weights on their way from a trainer's
// GPUs to generators'. What is in a block, and who sends when, is decided in Python (rollmesh.weights.transport.carriers).
#pragma once

#include "core.h"

// Of gpus.group(end, ordinal, nccl_library, gpu, timeout), which every rank of `end` calls: a _core.GpuGroup. NULL with an exception.
PyObject *rm_gpu_group_new(PyObject *gpus, PyObject *args);

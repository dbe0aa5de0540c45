// loans.h: tensors of GPUs between processes. `_core.Gpus` says where a trainer's tensor lies and what lets another process open that
// memory; there it opens it. `_core.GpuArray` is such a tensor again: a DLPack producer over memory that is somebody else's.
#pragma once

#include "core.h"

int rm_loan_types_add(PyObject *module);   // 0, or −1 with an exception

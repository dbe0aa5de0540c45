// core.h: what the files of the extension share. This folder is the only one that includes Python.h; it converts arguments,
// releases the GIL, calls the engine and turns an rm_error into an exception. No maths, no policy, no C global that holds a
// PyObject: exception classes and types live in the module's state.
//
// Include this before any system header, as Python.h asks. setup.py passes Py_LIMITED_API (one binary for CPython ≥ 3.11).
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "base/status.h"

typedef struct rm_module_state {
  PyObject *errors[RM_N_CODE];  // owned classes of rollmesh.errors by rm_code; NULL for RM_OK, MemoryError for RM_E_MEMORY
  PyObject *error_base;         // owned rollmesh.errors.Error
  PyObject *deadline_error;     // owned rollmesh.errors.DeadlineError, which no rm_code has
  PyObject *engine_type;        // owned _core.Engine
  PyObject *comm_type;          // owned _core.Comm
  PyObject *dispatcher_type;    // owned _core.Dispatcher
  PyObject *plan_type;          // owned _core.DispatchPlan
  PyObject *gpu_array_type;     // owned _core.GpuArray
  PyObject *gpu_block_type;     // owned _core.GpuBlock
  PyObject *gpu_group_type;     // owned _core.GpuGroup
  PyObject *queue_type;         // owned _core.Queue
  PyObject *device_array_type;  // owned _core.DeviceArray
  PyObject *turn_type;          // owned _core.Turn
  PyObject *holding_type;       // owned _core.Holding
  unsigned long interrupted;    // thread whose call a Ctrl-C has cut short, until that call is over; 0: none
} rm_module_state;

rm_module_state *rm_state(PyObject *module);  // view, never NULL for a module that has been executed

// Of heap types, which all types here are: an object's module, a view; a new object, all zeros, or NULL with MemoryError; and what a
// tp_dealloc ends with, the object's memory and its count of the type.
PyObject *rm_module_of(PyObject *object);
void *rm_object_new(PyObject *type);
void rm_object_free(PyObject *object);

// Sets the exception that belongs to err->code, with its message; clears err; returns NULL, so that a function can
// `return rm_raise(module, &err)`. An exception that is set already (a callback raised) stays; a call that was cut short by Ctrl-C gives
// KeyboardInterrupt.
PyObject *rm_raise(PyObject *module, rm_error *err);
// The same with a sentence of one's own, for what the extension itself refuses. Takes PyErr_Format's formats. Returns NULL.
PyObject *rm_raise_code(PyObject *module, rm_code code, const char *format, ...);

// Parts of the module, each called once while it is executed; 0, or −1 with an exception set.
int rm_ops_add(PyObject *module);          // ops/kernels.c: _core.Kernels and the functions over arrays
int rm_isas_add(PyObject *module);         // isas.c: _core.available_isas, _core.best_isa, _core.isa_states
int rm_cuda_add(PyObject *module);         // gpu/cuda.c: _core.cuda_count, _core.cuda_bus, _core.cuda_available
int rm_mesh_add(PyObject *module);         // placement.c: _core.placement
int rm_comm_type_add(PyObject *module);    // comm/comm.c: _core.Comm, _core.attach
int rm_dispatch_types_add(PyObject *module);   // comm/token_dispatcher.c: _core.Dispatcher, _core.DispatchPlan, _core.dispatchers
int rm_turn_types_add(PyObject *module);   // fair_lock.c: _core.Turn, _core.Holding
int rm_engine_type_add(PyObject *module);  // engine/engine.c: _core.Engine

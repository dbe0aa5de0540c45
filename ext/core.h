// core.h: included by all files of the extension. Only this folder includes Python.h. The extension
// only converts arguments, releases the GIL, calls C and turns an rm_error into an exception. C
// globals never hold a PyObject: exception classes and types are in the module's state.
//
// Include this before any system header, as Python.h requires. setup.py passes Py_LIMITED_API (one
// binary for CPython ≥ 3.11).
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdarg.h>

#include "base/status.h"

typedef enum rm_type {
  RM_TYPE_ENGINE,
  RM_TYPE_SYNC_ENTRY,
  RM_TYPE_KERNELS,
  RM_TYPE_COMM,
  RM_TYPE_OP_DEVICE,
  RM_TYPE_DEVICE_ARRAY,
  RM_TYPE_GPUS,
  RM_N_TYPES
} rm_type;

typedef struct rm_module_state {
  // Owned classes of rollmesh.errors by rm_code; NULL for RM_OK, MemoryError for RM_E_MEMORY.
  PyObject *errors[RM_N_CODE];
  PyObject *error_base; // owned rollmesh.errors.Error
  PyObject *types[RM_N_TYPES]; // owned
  PyObject *op_arguments; // owned: {op: {argument: role}} (ops/run.c)
  unsigned long interrupted; // the thread whose call ends because of a Ctrl-C; 0: none
} rm_module_state;

rm_module_state *rm_state(PyObject *module); // view, never NULL for a module that has been executed

// ---------------------------------------------------------- types (module.c has the table of all)
// A type that may hold a Python reference takes part in garbage collection: RM_GC, RM_TRAVERSE, a
// tp_clear, and a tp_dealloc that begins with PyObject_GC_UnTrack.
#define RM_TYPE(name_, object, flags_, slots_) \
  {.name = "rollmesh._core." name_, \
   .basicsize = sizeof(object), \
   .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | (flags_), \
   .slots = slots_}
enum { RM_GC = Py_TPFLAGS_HAVE_GC, RM_MADE_HERE = Py_TPFLAGS_DISALLOW_INSTANTIATION };
// Private names have their documentation in _core.pyi.
#define RM_METHOD(name, function, flags) {name, (PyCFunction)(void (*)(void))function, flags, NULL}

// RM_OWNED *x = …: a reference, or NULL, that is dropped when its scope ends.
static inline void rm_drop(PyObject **owned) { Py_XDECREF(*owned); }
#define RM_OWNED __attribute__((cleanup(rm_drop))) PyObject

// Runs `call`, which returns an rm_code, without the GIL.
#define RM_UNLOCKED(call) \
  ({ \
    PyThreadState *const thread_ = PyEval_SaveThread(); \
    const rm_code code_ = (call); \
    PyEval_RestoreThread(thread_); \
    code_; \
  })

// Defines a tp_traverse for a type whose objects own the listed Python objects, members of `self`.
#define RM_TRAVERSE(name, type, ...) \
  static int name(PyObject *object, visitproc visit, void *arg) { \
    type *const self = (type *)object; \
    PyObject *const owned[] = {(PyObject *)Py_TYPE(object), __VA_ARGS__}; \
    for (size_t i = 0; i < sizeof owned / sizeof *owned; i++) Py_VISIT(owned[i]); \
    return 0; \
  }

PyObject *rm_module_of(PyObject *object); // view
void *rm_object_new(PyObject *type); // new, all zeros; NULL with MemoryError
void *rm_object_make(PyObject *module, rm_type type);
int rm_is(PyObject *module, PyObject *object, rm_type type); // whether it is exactly of that type
void rm_object_free(PyObject *object); // the last call of a tp_dealloc

// ----------------------------------------------------------------------------------------- errors
// Sets the exception of err->code, with its message; clears err; returns NULL, so that a function
// can `return rm_raise(module, &err)`. Keeps an exception that a callback has already set; raises
// KeyboardInterrupt if a Ctrl-C ended the call.
PyObject *rm_raise(PyObject *module, rm_error *err);
PyObject *rm_none(PyObject *module, rm_code code, rm_error *err); // None, or rm_raise
// Raises an error that the extension finds itself. Formats are PyErr_Format's. Returns NULL.
PyObject *rm_raise_code(PyObject *module, rm_code code, const char *format, ...);
void rm_raise_va(PyObject *module, rm_code code, const char *format, va_list args);
// The same, as the −1 of a function that returns an int.
#define rm_refuse(...) (rm_raise_code(__VA_ARGS__), -1)

// ----------------------------------------------------------------------------- tuples of integers
PyObject *rm_tuple_of(const int64_t *numbers, int n);
// Reads the first n integers of a tuple. Returns −1 with an exception set if there are fewer.
int rm_numbers_of(PyObject *tuple, int64_t *out, int n);
// [(name, available bytes)] of rm_memory_pools (base/memory.h).
PyObject *rm_memory_pool_list(const char *root);

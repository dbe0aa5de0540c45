// core.h: included by all files of the extension. Only this folder includes Python.h. The extension
// only converts arguments, releases the GIL, calls C and turns an rm_error into an exception. C
// globals never hold a PyObject: types are in the module's state, and exception classes in
// rollmesh.errors.
//
// Include this before any system header, as Python.h requires. setup.py passes Py_LIMITED_API (one
// binary for CPython ≥ 3.11).
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdarg.h>

#include "base/status.h"
#include "kernels.h"

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

enum { RM_N_OWNED = RM_N_TYPES + 1 };
typedef struct rm_module_state {
  union {
    PyObject *owned[RM_N_OWNED];
    struct {
      PyObject *types[RM_N_TYPES];
      PyObject *op_arguments; // {op: {argument: role}} (ops/run.c)
    };
  };
} rm_module_state;

rm_module_state *rm_state(PyObject *module); // view, never NULL for a module that has been executed
rm_module_state *rm_state_of(void *object); // the state of the module of the object's type

// ---------------------------------------------------------- types (module.c has the table of all)
// A type that may hold a Python reference takes part in garbage collection: RM_GC, RM_TRAVERSE, a
// tp_clear, and a tp_dealloc that begins with PyObject_GC_UnTrack.
#define RM_TYPE(name_, object, flags_, slots_) \
  {.name = "rollmesh._core." name_, \
   .basicsize = sizeof(object), \
   .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | (flags_), \
   .slots = slots_}
enum { RM_GC = Py_TPFLAGS_HAVE_GC, RM_MADE_HERE = Py_TPFLAGS_DISALLOW_INSTANTIATION };
#define RM_NO_ARGUMENTS PyObject *, PyObject * // METH_NOARGS
#define RM_LENGTH(table) (sizeof(table) / sizeof(table)[0])
// Private names have their documentation in _core.pyi.
#define RM_METHOD(name, function, flags) {name, (PyCFunction)(void (*)(void))function, flags, NULL}
#define RM_FUNCTION(name, flags) RM_METHOD(#name, name, METH_##flags)

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

// The kernels of an instruction set; RM_E_CONFIG if they cannot run here. (engine/options.c)
rm_code rm_kernels_find(const char *name, const rm_kernels **kernels, rm_error *err);
void *rm_object_new(void *type); // new, all zeros; NULL with MemoryError
// `relative`: any object of one of the module's types.
void *rm_object_make(void *relative, rm_type type);
// Whether the object is exactly of that type.
int rm_is(void *relative, PyObject *object, rm_type type);
void rm_object_free(PyObject *object); // the last call of a tp_dealloc

// ----------------------------------------------------------------------------------------- errors
// New: the class of a code in rollmesh.errors, MemoryError for RM_E_MEMORY, RuntimeError if
// there is no class. An exception that is pending makes the lookup fail: fetch or clear it first.
PyObject *rm_error_class(rm_code code);
void rm_note_interrupt(void); // a Ctrl-C ends the call of this thread
// Sets the exception of err->code, with its message; clears err; returns NULL, so that a function
// can `return rm_raise(&err)`. Keeps an exception that a callback has already set; raises
// KeyboardInterrupt after rm_note_interrupt.
void *rm_raise(rm_error *err);
// Raises the error of a call that fails, and is true then. The call returns an rm_code and writes
// its error to `err`.
#define RM_FAILS(call) \
  ({ \
    rm_error err = RM_ERROR_INIT; \
    const rm_code failure_ = (call); \
    if (failure_) rm_raise(&err); \
    failure_; \
  })
#define RM_NONE(call) (RM_FAILS(call) ? NULL : Py_NewRef(Py_None)) // None, or NULL
// Raises an error that the extension finds itself. Formats are PyErr_Format's. Returns NULL.
_Static_assert(_Generic((int64_t)0, Py_ssize_t: 1), "%zd prints an int64_t");
void *rm_raise_code(rm_code code, const char *format, ...);
void rm_raise_va(rm_code code, const char *format, va_list args);
// The same, as the −1 of a function that returns an int.
#define rm_refuse(...) (rm_raise_code(__VA_ARGS__), -1)

// ------------------------------------------------------------------------------------- containers
// Add a value to *list or *dict and take its reference. If it is NULL or cannot be added, *list or
// *dict is released and becomes NULL; on NULL they only drop the value.
void rm_list_put(PyObject **list, PyObject *value);
void rm_dict_put(PyObject **dict, const char *key, PyObject *value);
PyObject *rm_tuple_of(const int64_t *numbers, int n);
// Reads the first n integers of a tuple. Returns −1 with an exception set if there are fewer.
int rm_numbers_of(PyObject *tuple, int64_t *out, int n);
// [(name, available bytes)] of rm_memory_pools (base/memory.h).
PyObject *rm_memory_pool_list(const char *root);

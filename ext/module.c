// module.c: rollmesh._core: its state, types and functions, and how errors become exceptions.
// Multi-phase initialisation.
#define RM_IMPORT_NUMPY
#include "arrays.h"

#include <string.h>

#include "base/checksum.h"
#include "base/memory.h"

rm_module_state *rm_state(PyObject *module) { return PyModule_GetState(module); }

rm_module_state *rm_state_of(void *object) { return rm_state(PyType_GetModule(Py_TYPE(object))); }

void *rm_object_new(void *type) {
  const allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
  return alloc(type, 0);
}

void *rm_object_make(void *relative, rm_type type) {
  return rm_object_new(rm_state_of(relative)->types[type]);
}

int rm_is(void *relative, PyObject *object, rm_type type) {
  return Py_IS_TYPE(object, (PyTypeObject *)rm_state_of(relative)->types[type]);
}

void rm_object_free(PyObject *object) {
  PyTypeObject *type = Py_TYPE(object);
  ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
  Py_DECREF(type);
}

void rm_list_put(PyObject **list, PyObject *value) {
  if (*list && (!value || PyList_Append(*list, value))) Py_CLEAR(*list);
  Py_XDECREF(value);
}

void rm_dict_put(PyObject **dict, const char *key, PyObject *value) {
  if (*dict && (!value || PyDict_SetItemString(*dict, key, value))) Py_CLEAR(*dict);
  Py_XDECREF(value);
}

PyObject *rm_tuple_of(const int64_t *numbers, int n) {
  PyObject *tuple = PyTuple_New(n);
  for (int i = 0; tuple && i < n; i++) {
    PyObject *number = PyLong_FromLongLong(numbers[i]);
    if (!number || PyTuple_SetItem(tuple, i, number)) Py_CLEAR(tuple);
  }
  return tuple;
}

int rm_numbers_of(PyObject *tuple, int64_t *out, int n) {
  for (int i = 0; i < n; i++) {
    PyObject *number = PyTuple_GetItem(tuple, i);
    out[i] = number ? PyLong_AsLongLong(number) : -1;
    if (PyErr_Occurred()) return -1;
  }
  return 0;
}

PyObject *rm_error_class(rm_code code) {
  if (code == RM_E_MEMORY) return Py_NewRef(PyExc_MemoryError);
  RM_OWNED *errors = PyImport_ImportModule("rollmesh.errors");
  PyObject *type = errors ? PyObject_GetAttrString(errors, rm_code_name(code)) : NULL;
  if (type) return type;
  PyErr_Clear(); // modules are gone when the interpreter ends
  return Py_NewRef(PyExc_RuntimeError);
}

static _Thread_local int is_interrupted; // whether a Ctrl-C ends the call of this thread

void rm_note_interrupt(void) { is_interrupted = 1; }

void *rm_raise(rm_error *err) {
  if (is_interrupted) {
    is_interrupted = 0;
    PyErr_SetNone(PyExc_KeyboardInterrupt);
  } else if (!PyErr_Occurred()) {
    // The message may quote a key of a state dict, which may be invalid UTF-8.
    const char *text = rm_error_message(err);
    RM_OWNED *message = PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "backslashreplace");
    RM_OWNED *type = rm_error_class(err->code);
    if (message) PyErr_SetObject(type, message);
  }
  rm_error_clear(err);
  return NULL;
}

void rm_raise_va(rm_code code, const char *format, va_list args) {
  PyErr_Clear(); // the import would fail
  RM_OWNED *type = rm_error_class(code);
  PyErr_FormatV(type, format, args);
}

void *rm_raise_code(rm_code code, const char *format, ...) {
  va_list args;
  va_start(args, format);
  rm_raise_va(code, format, args);
  va_end(args);
  return NULL;
}

// The types and functions of the module, each defined in the file that its comment names.
extern PyType_Spec rm_engine_spec, rm_sync_entry_spec, rm_kernels_spec, rm_comm_spec;
extern PyType_Spec rm_op_device_spec, rm_device_array_spec, rm_gpus_spec;
static PyType_Spec *const types[RM_N_TYPES] = {
    [RM_TYPE_ENGINE] = &rm_engine_spec, // engine/engine.c
    [RM_TYPE_SYNC_ENTRY] = &rm_sync_entry_spec, // engine/sync.c
    [RM_TYPE_KERNELS] = &rm_kernels_spec, // ops/kernels.c
    [RM_TYPE_COMM] = &rm_comm_spec, // comm/comm.c
    [RM_TYPE_OP_DEVICE] = &rm_op_device_spec, // gpu/op_device.c
    [RM_TYPE_DEVICE_ARRAY] = &rm_device_array_spec, // gpu/gpu_array.c
    [RM_TYPE_GPUS] = &rm_gpus_spec, // gpu/loans.c
};
PyObject *rm_op_table(void); // ops/run.c
extern PyMethodDef rm_hardware_functions[], rm_placement_functions[], rm_comm_functions[],
    rm_ops_functions[], rm_gpu_functions[];
static PyMethodDef *const functions[] = {rm_hardware_functions, rm_placement_functions,
                                         rm_comm_functions, rm_ops_functions, rm_gpu_functions};

// The engine's memory hooks, thread teams and CUDA contexts belong to the process, so the module
// works only in its first interpreter.
static int refuse_subinterpreter(void) {
  if (PyInterpreterState_GetID(PyInterpreterState_Get()) == 0) return 0;
  PyErr_SetString(
      PyExc_ImportError,
      "expected the main interpreter, got a subinterpreter: rollmesh supports one interpreter in "
      "a process");
  return -1;
}

static int module_exec(PyObject *module) {
  if (refuse_subinterpreter()) return -1;
  import_array1(-1);
  rm_module_state *state = rm_state(module);
  for (int i = 0; i < RM_N_TYPES; i++) {
    if (!(state->types[i] = PyType_FromModuleAndSpec(module, types[i], NULL))) return -1;
    if (PyModule_AddType(module, (PyTypeObject *)state->types[i])) return -1;
  }
  if (!(state->op_arguments = rm_op_table())) return -1;
  for (size_t i = 0; i < RM_LENGTH(functions); i++)
    if (PyModule_AddFunctions(module, functions[i])) return -1;
  return 0;
}

static int module_traverse(PyObject *module, visitproc visit, void *arg) {
  rm_module_state *state = rm_state(module);
  if (!state) return 0;
  for (int i = 0; i < RM_N_OWNED; i++) Py_VISIT(state->owned[i]);
  return 0;
}

static int module_clear(PyObject *module) {
  rm_module_state *state = rm_state(module);
  if (!state) return 0;
  for (int i = 0; i < RM_N_OWNED; i++) Py_CLEAR(state->owned[i]);
  return 0;
}

static void module_free(void *module) { module_clear(module); }

#define COUNT(name) \
  static PyObject *name(RM_NO_ARGUMENTS) { return PyLong_FromSize_t(rm_##name()); }
COUNT(memory_mapped)
COUNT(memory_blocks)

static PyObject *memory_fail_at(PyObject *, PyObject *args) {
  long n;
  int for_ever = 0;
  if (!PyArg_ParseTuple(args, "l|p:memory_fail_at", &n, &for_ever)) return NULL;
  rm_memory_fail_at(n, for_ever);
  Py_RETURN_NONE;
}

static PyObject *checksum(PyObject *, PyObject *object) {
  Py_buffer bytes;
  uint64_t sum;
  if (PyObject_GetBuffer(object, &bytes, PyBUF_SIMPLE)) return NULL;
  Py_BEGIN_ALLOW_THREADS
    sum = rm_checksum(bytes.buf, (size_t)bytes.len);
  Py_END_ALLOW_THREADS
  PyBuffer_Release(&bytes);
  return PyLong_FromUnsignedLongLong(sum);
}

static PyMethodDef methods[] = {
    RM_FUNCTION(checksum, O),
    RM_FUNCTION(memory_mapped, NOARGS),
    RM_FUNCTION(memory_blocks, NOARGS),
    RM_FUNCTION(memory_fail_at, VARARGS),
    {0},
};

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, module_exec},
// CPython ≥ 3.12; with the limited API of 3.11 only module_exec checks this.
#ifdef Py_mod_multiple_interpreters
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#endif
    {0},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "rollmesh._core",
    .m_doc = "The C engine and its operations; rollmesh.Generator and rollmesh.ops are the public "
             "API.",
    .m_size = sizeof(rm_module_state),
    .m_methods = methods,
    .m_slots = slots,
    .m_traverse = module_traverse,
    .m_clear = module_clear,
    .m_free = module_free,
};

PyMODINIT_FUNC PyInit__core(void) { return PyModuleDef_Init(&definition); }

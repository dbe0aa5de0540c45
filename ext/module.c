// module.c: rollmesh._core. Multi-phase initialisation; all Python objects hang on the module's state, so that the module can
// be created in more than one interpreter and is freed with each.
#define RM_IMPORT_NUMPY
#include "arrays.h"

#include <stdarg.h>
#include <string.h>

#include "base/memory.h"
#include "gpu/gpu_array.h"
#include "gpu/gpu_group.h"
#include "gpu/loans.h"

rm_module_state *rm_state(PyObject *module) { return PyModule_GetState(module); }

PyObject *rm_module_of(PyObject *object) { return PyType_GetModule(Py_TYPE(object)); }

void *rm_object_new(PyObject *type) {
  const allocfunc alloc = (allocfunc)PyType_GetSlot((PyTypeObject *)type, Py_tp_alloc);
  return alloc((PyTypeObject *)type, 0);
}

void rm_object_free(PyObject *object) {
  PyTypeObject *type = Py_TYPE(object);
  ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
  Py_DECREF(type);
}

static PyObject *class_of(PyObject *module, rm_code code) {
  const rm_module_state *state = rm_state(module);
  PyObject *type = code > RM_OK && code < RM_N_CODE ? state->errors[code] : NULL;
  return type ? type : state->error_base;
}

PyObject *rm_raise(PyObject *module, rm_error *err) {
  rm_module_state *state = rm_state(module);
  if (state->interrupted == PyThread_get_thread_ident()) {
    state->interrupted = 0;
    PyErr_SetNone(PyExc_KeyboardInterrupt);
  } else if (!PyErr_Occurred()) {
    // The message may quote a state dict's key, which need not be UTF-8.
    const char *text = rm_error_message(err);
    PyObject *message = PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "backslashreplace");
    if (message) PyErr_SetObject(class_of(module, err->code), message);
    Py_XDECREF(message);
  }
  rm_error_clear(err);
  return NULL;
}

PyObject *rm_raise_code(PyObject *module, rm_code code, const char *format, ...) {
  va_list args;
  va_start(args, format);
  PyErr_FormatV(class_of(module, code), format, args);
  va_end(args);
  return NULL;
}

static int load_errors(rm_module_state *state) {
  PyObject *errors = PyImport_ImportModule("rollmesh.errors");
  if (!errors) return -1;
  int failed = !(state->error_base = PyObject_GetAttrString(errors, "Error"));
  failed = failed || !(state->deadline_error = PyObject_GetAttrString(errors, "DeadlineError"));
  for (int code = RM_OK + 1; !failed && code < RM_N_CODE; code++) {
    if (code == RM_E_MEMORY) state->errors[code] = Py_NewRef(PyExc_MemoryError);
    else failed = !(state->errors[code] = PyObject_GetAttrString(errors, rm_code_name(code)));
  }
  Py_DECREF(errors);
  return failed ? -1 : 0;
}

static int module_exec(PyObject *module) {
  import_array1(-1);
  if (load_errors(rm_state(module))) return -1;
  if (rm_ops_add(module) || rm_isas_add(module) || rm_mesh_add(module) || rm_cuda_add(module) || rm_comm_type_add(module)) return -1;
  if (rm_dispatch_types_add(module) || rm_loan_types_add(module) || rm_gpu_group_types_add(module) || rm_queue_add(module)) return -1;
  if (rm_device_arrays_add(module) || rm_turn_types_add(module)) return -1;
  return rm_engine_type_add(module);
}

static int module_traverse(PyObject *module, visitproc visit, void *arg) {
  rm_module_state *state = rm_state(module);
  if (!state) return 0;
  for (int code = 0; code < RM_N_CODE; code++) Py_VISIT(state->errors[code]);
  Py_VISIT(state->error_base);
  Py_VISIT(state->deadline_error);
  Py_VISIT(state->engine_type);
  Py_VISIT(state->comm_type);
  Py_VISIT(state->dispatcher_type);
  Py_VISIT(state->plan_type);
  Py_VISIT(state->gpu_array_type);
  Py_VISIT(state->gpu_block_type);
  Py_VISIT(state->gpu_group_type);
  Py_VISIT(state->queue_type);
  Py_VISIT(state->device_array_type);
  Py_VISIT(state->turn_type);
  Py_VISIT(state->holding_type);
  return 0;
}

static int module_clear(PyObject *module) {
  rm_module_state *state = rm_state(module);
  if (!state) return 0;
  for (int code = 0; code < RM_N_CODE; code++) Py_CLEAR(state->errors[code]);
  Py_CLEAR(state->error_base);
  Py_CLEAR(state->deadline_error);
  Py_CLEAR(state->engine_type);
  Py_CLEAR(state->comm_type);
  Py_CLEAR(state->dispatcher_type);
  Py_CLEAR(state->plan_type);
  Py_CLEAR(state->gpu_array_type);
  Py_CLEAR(state->gpu_block_type);
  Py_CLEAR(state->gpu_group_type);
  Py_CLEAR(state->queue_type);
  Py_CLEAR(state->device_array_type);
  Py_CLEAR(state->turn_type);
  Py_CLEAR(state->holding_type);
  return 0;
}

static void module_free(void *module) { module_clear(module); }

static PyObject *memory_mapped(PyObject *module, PyObject *ignored) {
  (void)module, (void)ignored;
  return PyLong_FromSize_t(rm_memory_mapped());
}

static PyObject *memory_blocks(PyObject *module, PyObject *ignored) {
  (void)module, (void)ignored;
  return PyLong_FromSize_t(rm_memory_blocks());
}

static PyObject *memory_fail_at(PyObject *module, PyObject *args) {
  (void)module;
  long n;
  int for_ever = 0;
  if (!PyArg_ParseTuple(args, "l|p:memory_fail_at", &n, &for_ever)) return NULL;
  rm_memory_fail_at(n, for_ever);
  Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"memory_mapped", memory_mapped, METH_NOARGS, "Bytes of weights, KV and workspaces mapped now by this process."},
    {"memory_blocks", memory_blocks, METH_NOARGS, "Blocks, small and mapped, that were not given back yet."},
    {"memory_fail_at", memory_fail_at, METH_VARARGS, "(n, for_ever=False): a test hook; the n-th allocation from now fails."},
    {0},
};

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, module_exec},
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "rollmesh._core",
    .m_doc = "The C engine and its operations; rollmesh.Generator and rollmesh.ops are the public faces.",
    .m_size = sizeof(rm_module_state),
    .m_methods = methods,
    .m_slots = slots,
    .m_traverse = module_traverse,
    .m_clear = module_clear,
    .m_free = module_free,
};

PyMODINIT_FUNC PyInit__core(void) { return PyModuleDef_Init(&definition); }

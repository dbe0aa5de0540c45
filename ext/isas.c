// isas.c: which variants of the CPU's ops this build and processor have.
#include "core.h"

#include "kernels.h"

static PyObject *available_isas(PyObject *module, PyObject *unused) {
  (void)module, (void)unused;
  PyObject *names = PyList_New(0);
  for (int isa = 0; names && isa < RM_N_ISA; isa++) {
    if (!rm_kernels_for((rm_isa)isa)) continue;
    PyObject *name = PyUnicode_FromString(rm_isa_name((rm_isa)isa));
    if (!name || PyList_Append(names, name)) Py_CLEAR(names);
    Py_XDECREF(name);
  }
  PyObject *tuple = names ? PyList_AsTuple(names) : NULL;
  Py_XDECREF(names);
  return tuple;
}

static PyObject *best_isa(PyObject *module, PyObject *unused) {
  (void)unused;
  const rm_kernels *best = rm_kernels_best();
  if (best) return PyUnicode_FromString(best->isa);
  return rm_raise_code(module, RM_E_CONFIG,
                       "no instruction set fits: RM_ISA is not ref, avx2, avx512f, avx512bf16 or amx, or the processor lacks FMA");
}

static PyObject *isa_states(PyObject *module, PyObject *unused) {
  (void)module, (void)unused;
  PyObject *states = PyDict_New();
  for (int isa = 0; states && isa < RM_N_ISA; isa++) {
    const rm_isa_state s = rm_isa_ask((rm_isa)isa);
    PyObject *state = Py_BuildValue("zOdd", s.refused, s.emulated ? Py_True : Py_False, s.gflops_one_row, s.gflops_many_rows);
    if (!state || PyDict_SetItemString(states, rm_isa_name((rm_isa)isa), state)) Py_CLEAR(states);
    Py_XDECREF(state);
  }
  return states;
}

static PyMethodDef functions[] = {
    {"available_isas", available_isas, METH_NOARGS, "Names of the variants that this build and processor have, slowest first."},
    {"isa_states", isa_states, METH_NOARGS, "{name: (why refused or None, emulated, GFLOP/s of one row, of many rows)} of every variant."},
    {"best_isa", best_isa, METH_NOARGS, "The variant that an engine would take; RM_ISA in the environment caps it."},
    {NULL, NULL, 0, NULL},
};

int rm_isas_add(PyObject *module) { return PyModule_AddFunctions(module, functions); }

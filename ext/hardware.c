// hardware.c: this machine's instruction sets, cores and memory, and the limits of an engine.
#include "core.h"

#include "base/control_groups.h"
#include "base/memory.h"
#include "engine/engine.h"
#include "kernels.h"

static PyObject *available_isas(RM_NO_ARGUMENTS) {
  RM_OWNED *names = PyList_New(0);
  for (int isa = 0; names && isa < RM_N_ISA; isa++)
    if (rm_kernels_for((rm_isa)isa))
      rm_list_put(&names, PyUnicode_FromString(rm_isa_name((rm_isa)isa)));
  return names ? PyList_AsTuple(names) : NULL;
}

static PyObject *best_isa(RM_NO_ARGUMENTS) {
  const rm_kernels *best = rm_kernels_best();
  if (best) return PyUnicode_FromString(best->isa);
  return rm_raise_code(
      RM_E_CONFIG,
      "RM_ISA: expected ref, avx2, avx512f, avx512bf16 or amx and a processor with FMA, got no "
      "usable instruction set");
}

static PyObject *isa_states(RM_NO_ARGUMENTS) {
  PyObject *states = PyDict_New();
  for (int isa = 0; states && isa < RM_N_ISA; isa++) {
    const rm_isa_state s = rm_isa_ask((rm_isa)isa);
    rm_dict_put(&states, rm_isa_name((rm_isa)isa),
                Py_BuildValue("zOdd", s.refused, s.emulated ? Py_True : Py_False, s.gflops_one_row,
                              s.gflops_many_rows));
  }
  return states;
}

PyObject *rm_memory_pool_list(const char *root) {
  rm_memory_pool pools[RM_MEMORY_POOLS];
  const int n = rm_memory_pools(root, pools);
  PyObject *list = PyList_New(0);
  for (int i = 0; list && i < n; i++)
    rm_list_put(&list, Py_BuildValue("(KK)", (unsigned long long)pools[i].name,
                                     (unsigned long long)pools[i].available));
  return list;
}

// A function (root="") of the control groups under that folder.
#define OF_CONTROL_GROUPS(name, value) \
  static PyObject *name(PyObject *, PyObject *args) { \
    const char *root = ""; \
    return PyArg_ParseTuple(args, "|s:" #name, &root) ? value : NULL; \
  }
OF_CONTROL_GROUPS(usable_cores, PyLong_FromLong(rm_usable_cores(root)))
OF_CONTROL_GROUPS(cpu_quota, PyFloat_FromDouble(rm_cpu_quota(root)))
OF_CONTROL_GROUPS(memory_pools, rm_memory_pool_list(root))

static PyObject *engine_limits(RM_NO_ARGUMENTS) {
  PyObject *dict = PyDict_New();
  for (int i = 0; dict && i < RM_N_ENGINE_OPTIONS; i++) {
    const rm_option *option = &rm_engine_option_table[i];
    if (!option->most) continue; // not an integer
    rm_dict_put(&dict, option->attribute.name,
                Py_BuildValue("(nK)", option->least, (unsigned long long)option->most));
  }
  return dict;
}

// The public names have their documentation here, all others in _core.pyi.
PyMethodDef rm_hardware_functions[] = {
    RM_FUNCTION(engine_limits, NOARGS),
    {"available_isas", available_isas, METH_NOARGS,
     "Names of the usable variants on this machine, slowest first."},
    {"isa_states", isa_states, METH_NOARGS,
     "{name: (why not usable, or None; emulated; GFLOP/s of one row, of many rows)} of all "
     "variants."},
    {"best_isa", best_isa, METH_NOARGS,
     "The default variant of an engine; RM_ISA in the environment caps it."},
    RM_FUNCTION(usable_cores, VARARGS),
    RM_FUNCTION(cpu_quota, VARARGS),
    RM_FUNCTION(memory_pools, VARARGS),
    {0},
};

// cuda.c: what Python asks of the CUDA library before there is an engine.
#include "core.h"

#include "device/cuda.h"

static PyObject *cuda_count(PyObject *module, PyObject *path) {
  rm_error err = RM_ERROR_INIT;
  int count = 0;
  const char *library = PyUnicode_AsUTF8AndSize(path, NULL);
  if (!library) return NULL;
  rm_code code;
  Py_BEGIN_ALLOW_THREADS
    code = rm_cuda_count(library, &count, &err);
  Py_END_ALLOW_THREADS
  if (code) return rm_raise(module, &err);
  return PyLong_FromLong(count);
}

static PyObject *cuda_bus(PyObject *module, PyObject *args) {
  const char *library;
  int ordinal;
  char id[32];
  rm_error err = RM_ERROR_INIT;
  if (!PyArg_ParseTuple(args, "si:cuda_bus", &library, &ordinal)) return NULL;
  rm_code code;
  Py_BEGIN_ALLOW_THREADS
    code = rm_cuda_bus_id(library, ordinal, id, &err);
  Py_END_ALLOW_THREADS
  return code ? rm_raise(module, &err) : PyUnicode_FromString(id);
}

static PyObject *cuda_available(PyObject *module, PyObject *args) {
  const char *library;
  int ordinal;
  rm_error err = RM_ERROR_INIT;
  rm_device device;
  if (!PyArg_ParseTuple(args, "si:cuda_available", &library, &ordinal)) return NULL;
  rm_code code;
  size_t bytes = 0;
  Py_BEGIN_ALLOW_THREADS
    code = rm_cuda_device(library, ordinal, NULL, &device, &err);
    if (!code) {
      const int saved = device.enter(device.self);
      bytes = device.available(device.self);
      device.leave(device.self, saved);
      device.close(device.self);
    }
  Py_END_ALLOW_THREADS
  return code ? rm_raise(module, &err) : PyLong_FromSize_t(bytes);
}

static PyMethodDef functions[] = {
    {"cuda_count", cuda_count, METH_O, "(library): devices that the driver shows, -1 where there is no driver."},
    {"cuda_bus", cuda_bus, METH_VARARGS, "(library, ordinal): the PCI bus id of a device, its name in every process of the machine."},
    {"cuda_available", cuda_available, METH_VARARGS, "(library, ordinal): bytes of a device's memory that are free."},
    {0},
};

int rm_cuda_add(PyObject *module) { return PyModule_AddFunctions(module, functions); }

// hardware.c: the CUDA devices of this machine, and NCCL.
#include "core.h"

#include "gpu/gpu.h"

static PyObject *cuda_count(PyObject *, PyObject *path) {
  int count = 0;
  const char *library = PyUnicode_AsUTF8AndSize(path, NULL);
  if (!library || RM_FAILS(RM_UNLOCKED(rm_cuda_count(library, &count, &err)))) return NULL;
  return PyLong_FromLong(count);
}

static PyObject *cuda_bus(PyObject *, PyObject *args) {
  const char *library;
  int ordinal;
  char id[32];
  if (!PyArg_ParseTuple(args, "si:cuda_bus", &library, &ordinal) ||
      RM_FAILS(RM_UNLOCKED(rm_cuda_bus_id(library, ordinal, id, &err))))
    return NULL;
  return PyUnicode_FromString(id);
}

static PyObject *cuda_available(PyObject *, PyObject *args) {
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
  return code ? rm_raise(&err) : PyLong_FromSize_t(bytes);
}

static PyObject *nccl_version(PyObject *, PyObject *args) {
  const char *path;
  int version;
  if (!PyArg_ParseTuple(args, "s:nccl_version", &path) ||
      RM_FAILS(rm_nccl_version(path, &version, &err)))
    return NULL;
  return PyLong_FromLong(version);
}

PyMethodDef rm_gpu_functions[] = {
    RM_FUNCTION(cuda_count, O),
    RM_FUNCTION(cuda_bus, VARARGS),
    RM_FUNCTION(cuda_available, VARARGS),
    RM_FUNCTION(nccl_version, VARARGS),
    {0},
};

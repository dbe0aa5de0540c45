// op_device.c: _core.OpDevice. See gpu_array.h.
#include "gpu_array.h"

#include <structmember.h>

#include "base/memory.h"
#include "gpu/gpu.h"

int rm_op_device_enter(rm_op_device *op_device, int *saved) {
  if (getpid() != op_device->owner)
    return rm_refuse(
        RM_E_STATE,
        "%s: expected arrays made in this process, got arrays of process %d; a forked child has to "
        "make its own",
        op_device->device.name, (int)op_device->owner);
  Py_BEGIN_ALLOW_THREADS
    pthread_mutex_lock(&op_device->mutex);
  Py_END_ALLOW_THREADS
  *saved = op_device->device.enter(op_device->device.self);
  return 0;
}

void rm_op_device_leave(rm_op_device *op_device, int saved) {
  op_device->device.leave(op_device->device.self, saved);
  pthread_mutex_unlock(&op_device->mutex);
}

rm_code rm_op_device_poll(rm_op_device *op_device, rm_error *err) {
  const rm_device *device = &op_device->device;
  const rm_device_status status = device->poll(device->self);
  return status == RM_DEVICE_BUSY ? RM_OK : rm_device_check(device, status, err);
}

static size_t grown(size_t bytes) { return bytes < 4096 ? 4096 : bytes + bytes / 4; }

rm_code rm_op_device_mirrored(rm_op_device *op_device, size_t bytes, rm_error *err) {
  const rm_device *device = &op_device->device;
  rm_mirrored_buffer *mirrored = &op_device->mirrored;
  const rm_code code = rm_device_check(device, device->wait_event(device->self, 0), err);
  if (code || (mirrored->device && bytes <= mirrored->bytes)) return code;
  rm_mirrored_destroy(mirrored);
  return rm_mirrored_create(device, grown(bytes), "the indices of ops", mirrored, err);
}

rm_code rm_op_device_workspace(rm_op_device *op_device, size_t bytes, rm_error *err) {
  if (bytes <= op_device->workspace_bytes) return RM_OK;
  rm_device_free(&op_device->device, op_device->workspace, op_device->workspace_bytes);
  op_device->workspace_bytes = 0;
  const rm_code code = rm_device_alloc(&op_device->device, bytes, "the workspace of ops",
                                       &op_device->workspace, err);
  if (!code) op_device->workspace_bytes = bytes;
  return code;
}

static PyObject *op_device_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
  static char *names[] = {"library", "ordinal", NULL};
  PyObject *library;
  const char *path;
  int ordinal;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Ui:OpDevice", names, &library, &ordinal) ||
      !(path = PyUnicode_AsUTF8AndSize(library, NULL)))
    return NULL;
  rm_op_device *self = rm_object_new(type);
  if (!self) return NULL;
  pthread_mutexattr_t recursive;
  pthread_mutexattr_init(&recursive);
  pthread_mutexattr_settype(&recursive, PTHREAD_MUTEX_RECURSIVE);
  pthread_mutex_init(&self->mutex, &recursive);
  pthread_mutexattr_destroy(&recursive);
  self->owner = getpid();
  self->library = Py_NewRef(library);
  if (RM_FAILS(RM_UNLOCKED(rm_cuda_device(path, ordinal, NULL, &self->device, &err))))
    Py_CLEAR(self);
  return (PyObject *)self;
}

static void close_op_device(rm_op_device *self) {
  const rm_device *device = &self->device;
  const int saved = device->enter(device->self);
  rm_mirrored_destroy(&self->mirrored);
  rm_device_free(device, self->workspace, self->workspace_bytes);
  device->leave(device->self, saved);
  device->close(device->self);
}

static void op_device_dealloc(PyObject *object) {
  rm_op_device *self = (rm_op_device *)object;
  if (getpid() == self->owner) {
    if (self->device.self) {
      Py_BEGIN_ALLOW_THREADS
        close_op_device(self);
      Py_END_ALLOW_THREADS
    }
    pthread_mutex_destroy(&self->mutex);
  }
  Py_XDECREF(self->library);
  rm_object_free(object);
}

// ----------------------------------------------------------------------------------------- arrays
static PyObject *op_device_zeros(PyObject *self, PyObject *args) {
  PyObject *shape;
  const char *name;
  if (!PyArg_ParseTuple(args, "O!s:zeros", &PyTuple_Type, &shape, &name)) return NULL;
  return rm_device_array_zeros((rm_op_device *)self, name, shape);
}

static PyObject *op_device_copy(PyObject *self, PyObject *object) {
  return rm_device_array_copy((rm_op_device *)self, object);
}

static const rm_device *take_device(void *self, PyObject *name, int ordinal) {
  rm_op_device *op_device = self;
  if (ordinal == op_device->device.ordinal) return &op_device->device;
  return rm_raise_code(RM_E_UNSUPPORTED_TENSOR,
                       "%.200U: expected a tensor on %s, got one on cuda:%d", name,
                       op_device->device.name, ordinal);
}

static PyObject *op_device_take(PyObject *object, PyObject *args) {
  rm_op_device *self = (rm_op_device *)object;
  PyObject *name, *given;
  rm_dlpack taken;
  int saved;
  if (!PyArg_ParseTuple(args, "UO:take", &name, &given) || rm_op_device_enter(self, &saved))
    return NULL;
  const rm_tensor_reader reader = {take_device, NULL, self};
  PyObject *array = NULL;
  if (!rm_dlpack_take(given, name, &reader, &taken)) {
    if (taken.on_device) array = rm_device_array_over(self, name, &taken);
    else
      rm_raise_code(RM_E_UNSUPPORTED_TENSOR, "%.200U: expected a tensor on %s, got one on the CPU",
                    name, self->device.name);
    rm_tensor_release(taken.owner);
  }
  rm_op_device_leave(self, saved);
  return array;
}

int rm_op_device_check_stream(rm_op_device *self, void *stream) {
  int saved;
  if (rm_op_device_enter(self, &saved)) return -1;
  const char *why = self->device.check_stream(self->device.self, stream);
  rm_op_device_leave(self, saved);
  if (!why) return 0;
  return rm_refuse(RM_E_CONFIG, "stream: expected one of %s, got %llu: %s", self->device.name,
                   (unsigned long long)(uintptr_t)stream, why);
}

static PyMethodDef op_device_methods[] = {
    {"zeros", op_device_zeros, METH_VARARGS, NULL},
    {"to_device", op_device_copy, METH_O, NULL},
    {"take", op_device_take, METH_VARARGS, NULL},
    {0},
};

static PyMemberDef op_device_members[] = {
    {"device", T_STRING, offsetof(rm_op_device, device.name), READONLY, NULL},
    {0},
};

static PyType_Slot slots[] = {
    {Py_tp_new, op_device_new},
    {Py_tp_dealloc, op_device_dealloc},
    {Py_tp_methods, op_device_methods},
    {Py_tp_members, op_device_members},
    {0},
};
PyType_Spec rm_op_device_spec = RM_TYPE("OpDevice", rm_op_device, 0, slots);

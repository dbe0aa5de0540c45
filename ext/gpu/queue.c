// queue.c: _core.Queue. See gpu_array.h.
#include "gpu_array.h"

#include <string.h>

#include "base/memory.h"
#include "device/cuda.h"

int rm_queue_enter(PyObject *module, rm_queue_object *queue, int *saved) {
  if (getpid() != queue->owner) {
    rm_raise_code(module, RM_E_STATE,
                  "%s: expected arrays made in this process, got those of process %d; a forked child has to make its own",
                  queue->device.name, (int)queue->owner);
    return -1;
  }
  Py_BEGIN_ALLOW_THREADS
    pthread_mutex_lock(&queue->mutex);
  Py_END_ALLOW_THREADS
  *saved = queue->device.enter(queue->device.self);
  return 0;
}

void rm_queue_leave(rm_queue_object *queue, int saved) {
  queue->device.leave(queue->device.self, saved);
  pthread_mutex_unlock(&queue->mutex);
}

static size_t grown(size_t bytes) { return bytes < 4096 ? 4096 : bytes + bytes / 4; }

rm_code rm_queue_paired(rm_queue_object *queue, int i, size_t bytes, rm_error *err) {
  const rm_device *device = &queue->device;
  rm_paired *paired = &queue->paired[i];
  const rm_code code = rm_device_check(device, device->wait_event(device->self, 0), err);
  if (code || (paired->device && bytes <= paired->bytes)) return code;
  rm_paired_destroy(paired);
  return rm_paired_create(device, grown(bytes), "the indices of ops", paired, err);
}

rm_code rm_queue_workspace(rm_queue_object *queue, size_t bytes, rm_error *err) {
  if (bytes <= queue->workspace_bytes) return RM_OK;
  rm_device_unmap(&queue->device, queue->workspace, queue->workspace_bytes);
  queue->workspace_bytes = 0;
  const rm_code code = rm_device_map(&queue->device, bytes, "the workspace of ops", &queue->workspace, err);
  if (!code) queue->workspace_bytes = bytes;
  return code;
}

static PyObject *queue_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
  static char *names[] = {"library", "ordinal", NULL};
  const char *library;
  int ordinal;
  rm_error err = RM_ERROR_INIT;
  PyObject *module = PyType_GetModule(type);
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "si:Queue", names, &library, &ordinal)) return NULL;
  rm_queue_object *self = rm_object_new((PyObject *)type);
  if (!self) return NULL;
  pthread_mutexattr_t recursive;
  pthread_mutexattr_init(&recursive);
  pthread_mutexattr_settype(&recursive, PTHREAD_MUTEX_RECURSIVE);
  pthread_mutex_init(&self->mutex, &recursive);
  pthread_mutexattr_destroy(&recursive);
  self->owner = getpid();
  const size_t length = strlen(library) + 1;
  if (!(self->library = rm_alloc(length, 1))) {
    Py_DECREF(self);
    return PyErr_NoMemory();
  }
  memcpy(self->library, library, length);
  const rm_code code = RM_UNLOCKED(rm_cuda_device(library, ordinal, NULL, &self->device, &err));
  if (!code) return (PyObject *)self;
  Py_DECREF(self);
  return rm_raise(module, &err);
}

static void close_queue(rm_queue_object *self) {
  const rm_device *device = &self->device;
  const int saved = device->enter(device->self);
  for (int i = 0; i < RM_QUEUE_PAIRED; i++) rm_paired_destroy(&self->paired[i]);
  rm_device_unmap(device, self->workspace, self->workspace_bytes);
  device->leave(device->self, saved);
  device->close(device->self);
}

static void queue_dealloc(PyObject *object) {
  rm_queue_object *self = (rm_queue_object *)object;
  if (getpid() == self->owner) {
    if (self->device.self) {
      Py_BEGIN_ALLOW_THREADS
        close_queue(self);
      Py_END_ALLOW_THREADS
    }
    pthread_mutex_destroy(&self->mutex);
  }
  rm_free(self->library);
  rm_object_free(object);
}

// ------------------------------------------------------------------------------------------------ arrays
static PyObject *queue_zeros(PyObject *self, PyObject *args) {
  PyObject *shape;
  const char *name;
  if (!PyArg_ParseTuple(args, "O!s:zeros", &PyTuple_Type, &shape, &name)) return NULL;
  return rm_device_array_zeros(rm_module_of(self), (rm_queue_object *)self, name, shape);
}

static PyObject *queue_put(PyObject *self, PyObject *object) {
  return rm_device_array_copy(rm_module_of(self), (rm_queue_object *)self, object);
}

static const rm_device *take_device(void *self, PyObject *name, int ordinal) {
  rm_queue_object *queue = self;
  if (ordinal == queue->device.ordinal) return &queue->device;
  rm_raise_code(rm_module_of(self), RM_E_UNSUPPORTED_TENSOR, "%.200U: expected a tensor on %s, got one on cuda:%d", name,
                queue->device.name, ordinal);
  return NULL;
}

static void give_device(void *self) { (void)self; }

static PyObject *queue_take(PyObject *object, PyObject *args) {
  rm_queue_object *self = (rm_queue_object *)object;
  PyObject *name, *given, *module = rm_module_of(object);
  rm_dlpack taken;
  int saved;
  if (!PyArg_ParseTuple(args, "UO:take", &name, &given) || rm_queue_enter(module, self, &saved)) return NULL;
  const rm_tensor_reader reader = {take_device, give_device, self};
  PyObject *array = NULL;
  if (!rm_dlpack_take(module, given, name, &reader, &taken)) {
    if (taken.on_device) array = rm_device_array_over(module, self, name, &taken);
    else rm_raise_code(module, RM_E_UNSUPPORTED_TENSOR, "%.200U: expected a tensor on %s, got one on the CPU", name, self->device.name);
    rm_tensor_release(taken.owner);
  }
  rm_queue_leave(self, saved);
  return array;
}

static PyObject *queue_name(PyObject *self, void *ignored) {
  (void)ignored;
  return PyUnicode_FromString(((rm_queue_object *)self)->device.name);
}

int rm_queue_check_stream(PyObject *module, rm_queue_object *self, void *stream) {
  int saved;
  if (rm_queue_enter(module, self, &saved)) return -1;
  const char *why = self->device.refuses(self->device.self, stream);
  rm_queue_leave(self, saved);
  if (why)
    rm_raise_code(module, RM_E_CONFIG, "expected a stream of %s, got %llu: %s", self->device.name, (unsigned long long)(uintptr_t)stream,
                  why);
  return why ? -1 : 0;
}

static PyObject *queue_check_stream(PyObject *self, PyObject *number) {
  const unsigned long long handle = PyLong_AsUnsignedLongLong(number);
  if (PyErr_Occurred()) return NULL;
  return rm_queue_check_stream(rm_module_of(self), (rm_queue_object *)self, (void *)(uintptr_t)handle) ? NULL : Py_NewRef(Py_None);
}

static PyMethodDef queue_methods[] = {
    {"check_stream", queue_check_stream, METH_O, PyDoc_STR("(handle): ConfigError where ops cannot be ordered with that stream.")},
    {"zeros", queue_zeros, METH_VARARGS, PyDoc_STR("(shape, dtype): a DeviceArray of zeros.")},
    {"put", queue_put, METH_O, PyDoc_STR("(array): a copy of a NumPy array.")},
    {"take", queue_take, METH_VARARGS, PyDoc_STR("(name, tensor): a view of a DLPack producer's tensor, whose stream is waited for.")},
    {0},
};

static PyGetSetDef queue_members[] = {
    {"device", queue_name, NULL, PyDoc_STR("'cuda:0', …"), NULL},
    {0},
};

static PyType_Slot slots[] = {
    {Py_tp_new, queue_new},
    {Py_tp_dealloc, queue_dealloc},
    {Py_tp_methods, queue_methods},
    {Py_tp_getset, queue_members},
    {Py_tp_doc, "Queue(library, ordinal): a CUDA device opened for ops over arrays."},
    {0, NULL},
};
PyType_Spec rm_queue_spec = RM_TYPE("Queue", rm_queue_object, 0, slots);

// gpu_group.c: see gpu_group.h. Each block is a new allocation and never written again, since a
// consumer's stream may still read it after the consumer has released it (torch.from_dlpack does
// not tell). Freeing waits for the device, hence for a broadcast that may never end; so a released
// block is only put on a list, which is freed after the next wait, without the GIL.
#include "gpu_group.h"

#include <string.h>

#include "base/memory.h"
#include "comm/comm_object.h"
#include "comm/nccl/nccl.h"
#include "device/devices.h"
#include "device/strided_copy.h"
#include "loans.h"

typedef struct run { // of the device's memory
  struct run *next;
  char *data; // owned
  size_t bytes;
} run;

typedef struct group_object {
  PyObject_HEAD
  PyObject *gpus,
      *end; // owned: the _core.Gpus that has the device, the _core.Comm that `host` is of
  const rm_device *device; // view
  rm_comm *host, *there; // owned; NULL: closed
  run *spare; // owned, of no block: to be freed when the group has waited
  int is_busy; // a thread is in a call that has let go of the GIL
} group_object;

typedef struct block_object {
  PyObject_HEAD
  group_object *group; // owned
  run *run; // owned; goes back to the group
} block_object;

// Before a call that uses the device without the GIL; −1 with an exception. `saved` is for leave.
static int enter(group_object *self, int *saved) {
  if (!self->there || self->is_busy) {
    rm_raise_code(rm_module_of((PyObject *)self), RM_E_STATE, "this group of GPUs is %s",
                  self->there ? "in use by another thread" : "closed");
    return -1;
  }
  self->is_busy = 1;
  *saved = self->device->enter(self->device->self);
  return 0;
}

// After it: None, or NULL with what `code` and `err` say.
static PyObject *leave(group_object *self, int saved, rm_code code, rm_error *err) {
  self->device->leave(self->device->self, saved);
  self->is_busy = 0;
  return rm_none(rm_module_of((PyObject *)self), code, err);
}

// ----------------------------------------------------------------------------------------- blocks
static void drop_run(const rm_device *device, run *r) {
  const int saved = device->enter(device->self);
  rm_device_free(device, r->data, r->bytes);
  device->leave(device->self, saved);
  rm_free(r);
}

static void drop_runs(const rm_device *device, run *first) {
  while (first) {
    run *next = first->next;
    drop_run(device, first);
    first = next;
  }
}

static run *detach_spare(group_object *self) { // with the GIL, which guards it
  run *first = self->spare;
  self->spare = NULL;
  return first;
}

static rm_code take_run(group_object *self, size_t bytes, run **out, rm_error *err) {
  run *made = rm_alloc(1, sizeof *made);
  void *data = NULL;
  rm_code code = made ? RM_OK : rm_fail(err, RM_E_MEMORY, "no memory for a bucket of weights");
  if (!code) code = rm_device_alloc(self->device, bytes, "a bucket of weights", &data, err);
  if (code) {
    rm_free(made);
    return code;
  }
  *made = (run){.data = data, .bytes = bytes};
  *out = made;
  return RM_OK;
}

static PyObject *group_block(PyObject *object, PyObject *args) {
  group_object *self = (group_object *)object;
  Py_ssize_t bytes;
  int saved;
  rm_error err = RM_ERROR_INIT;
  run *taken = NULL;
  if (!PyArg_ParseTuple(args, "n:block", &bytes)) return NULL;
  if (bytes < 0)
    return rm_raise_code(rm_module_of(object), RM_E_LIMIT, "expected a number of bytes, got %zd",
                         bytes);
  if (enter(self, &saved)) return NULL;
  const rm_code code = take_run(self, bytes ? (size_t)bytes : 1, &taken, &err);
  PyObject *none = leave(self, saved, code, &err);
  if (!none) return NULL;
  Py_DECREF(none);
  block_object *block = rm_object_make(rm_module_of(object), RM_TYPE_GPU_BLOCK);
  if (!block) {
    taken->next = self->spare;
    self->spare = taken;
    return NULL;
  }
  block->group = (group_object *)Py_NewRef(object);
  block->run = taken;
  return (PyObject *)block;
}

RM_TRAVERSE(block_traverse, block_object, (PyObject *)self->group)

// Any thread may run this while another is in a call, so the memory is only put on the list. After
// close it is freed at once.
static void block_dealloc(PyObject *object) {
  PyObject_GC_UnTrack(object);
  block_object *self = (block_object *)object;
  group_object *group = self->group;
  if (group && group->there) {
    self->run->next = group->spare;
    group->spare = self->run;
  } else if (group) {
    drop_run(group->device, self->run);
  }
  Py_XDECREF((PyObject *)group);
  rm_object_free(object);
}

static int check_inside(block_object *self, long long offset, size_t bytes) {
  if (offset >= 0 && (size_t)offset <= self->run->bytes &&
      bytes <= self->run->bytes - (size_t)offset)
    return 0;
  rm_raise_code(rm_module_of((PyObject *)self), RM_E_LIMIT,
                "expected bytes inside a block of %zu, got %zu at %lld", self->run->bytes, bytes,
                offset);
  return -1;
}

// CUDA may delay a copy from host memory until earlier work is done, and a broadcast may never be
// done. So this waits for earlier work first, with the group's deadline.
static PyObject *block_put(PyObject *object, PyObject *args) {
  block_object *self = (block_object *)object;
  const rm_device *device = self->group->device;
  long long offset;
  Py_buffer view;
  int saved;
  rm_error err = RM_ERROR_INIT;
  if (!PyArg_ParseTuple(args, "Ly*:put", &offset, &view)) return NULL;
  PyObject *done = NULL;
  if (!check_inside(self, offset, (size_t)view.len) && !enter(self->group, &saved)) {
    rm_comm *const there = self->group->there;
    rm_code code;
    Py_BEGIN_ALLOW_THREADS
      code = rm_comm_wait(&there, 1, device, rm_comm_timeout(there), &err);
      if (!code)
        device->copy_to_device(device->self, self->run->data + offset, view.buf, (size_t)view.len);
    Py_END_ALLOW_THREADS
    done = leave(self->group, saved, code, &err);
  }
  PyBuffer_Release(&view);
  return done;
}

static PyObject *block_copy(PyObject *object, PyObject *args) {
  block_object *self = (block_object *)object;
  const rm_device *device = self->group->device;
  PyObject *shape, *strides;
  long long offset;
  int ordinal, each, saved;
  unsigned long long address;
  int64_t sizes[RM_STRIDED_DIMS], steps[RM_STRIDED_DIMS];
  if (!PyArg_ParseTuple(args, "LiKiO!O!:copy", &offset, &ordinal, &address, &each, &PyTuple_Type,
                        &shape, &PyTuple_Type, &strides))
    return NULL;
  const int n = (int)PyTuple_Size(shape);
  if (n < 0 || n > RM_STRIDED_DIMS || PyTuple_Size(strides) != n)
    return rm_raise_code(rm_module_of(object), RM_E_SHAPE,
                         "expected at most 4 dims and as many strides, got %d", n);
  if (rm_numbers_of(shape, sizes, n) || rm_numbers_of(strides, steps, n)) return NULL;
  int64_t bytes = each;
  for (int i = 0; i < n; i++) bytes *= sizes[i]; // of a tensor that is there: Gpus.lend
  if (check_inside(self, offset, (size_t)bytes)) return NULL;
  const rm_strided r = rm_strided_of(n, sizes, steps, each);
  if (ordinal != device->ordinal && r.width == (size_t)each && bytes > each)
    return rm_raise_code(
        rm_module_of(object), RM_E_LAYOUT,
        "expected contiguous elements in a tensor on cuda:%d that is sent from cuda:%d, got "
        "strides %R; send .contiguous()",
        ordinal, device->ordinal, strides);
  if (enter(self->group, &saved)) return NULL;
  rm_error err = RM_ERROR_INIT;
  Py_BEGIN_ALLOW_THREADS
    if (bytes)
      rm_strided_copy(device, ordinal, &r, self->run->data + offset,
                      (const char *)(uintptr_t)address);
  Py_END_ALLOW_THREADS
  return leave(self->group, saved, RM_OK, &err);
}

static PyObject *block_address(PyObject *self, void *ignored) {
  (void)ignored;
  return PyLong_FromUnsignedLongLong((uintptr_t)((block_object *)self)->run->data);
}

// ---------------------------------------------------------------------------------- between ranks
static PyObject *group_broadcast(PyObject *object, PyObject *args) {
  group_object *self = (group_object *)object;
  PyObject *given;
  Py_ssize_t bytes;
  int root, saved;
  if (!PyArg_ParseTuple(args, "O!ni:broadcast",
                        rm_state(rm_module_of(object))->types[RM_TYPE_GPU_BLOCK], &given, &bytes,
                        &root))
    return NULL;
  block_object *block = (block_object *)given;
  if (block->group != self)
    return rm_raise_code(rm_module_of(object), RM_E_STATE,
                         "expected a block of this group, got another group's");
  if (check_inside(block, 0, (size_t)bytes) || enter(self, &saved)) return NULL;
  rm_error err = RM_ERROR_INIT;
  return leave(
      self, saved,
      RM_UNLOCKED(rm_comm_broadcast(self->there, block->run->data, (size_t)bytes, root, &err)),
      &err);
}

static PyObject *group_wait(PyObject *object, PyObject *ignored) {
  group_object *self = (group_object *)object;
  int saved;
  (void)ignored;
  if (enter(self, &saved)) return NULL;
  rm_error err = RM_ERROR_INIT;
  const rm_code code =
      RM_UNLOCKED(rm_comm_wait(&self->there, 1, self->device, rm_comm_timeout(self->there), &err));
  run *unused = code ? NULL : detach_spare(self);
  Py_BEGIN_ALLOW_THREADS
    drop_runs(self->device, unused);
  Py_END_ALLOW_THREADS
  return leave(self, saved, code, &err);
}

static PyObject *group_abort(PyObject *object, PyObject *ignored) {
  group_object *self = (group_object *)object;
  (void)ignored;
  if (self->there) rm_comm_abort(self->there, RM_E_RANK_LOST);
  Py_RETURN_NONE;
}

static void close_group(group_object *self) {
  rm_comm *there = self->there, *host = self->host;
  self->there = self->host = NULL;
  if (!self->device) return;
  const int saved = self->device->enter(self->device->self);
  Py_BEGIN_ALLOW_THREADS
    rm_comm_destroy(there);
    rm_comm_destroy(host);
  Py_END_ALLOW_THREADS
  self->device->leave(self->device->self, saved);
  drop_runs(self->device, detach_spare(self));
  Py_CLEAR(self->end);
}

static PyObject *group_close(PyObject *object, PyObject *ignored) {
  group_object *self = (group_object *)object;
  (void)ignored;
  if (self->is_busy)
    return rm_raise_code(rm_module_of(object), RM_E_STATE,
                         "this group of GPUs is in use by another thread");
  close_group(self);
  Py_RETURN_NONE;
}

// Cycles through it end in the Comm: comm.c
RM_TRAVERSE(group_traverse, group_object, self->gpus, self->end)

static void group_dealloc(PyObject *object) {
  PyObject_GC_UnTrack(object);
  close_group((group_object *)object);
  Py_XDECREF(((group_object *)object)->gpus);
  rm_object_free(object);
}

static rm_code create(group_object *self, const rm_nccl_options *options, rm_error *err) {
  const int saved = self->device->enter(self->device->self);
  const rm_code code = rm_comm_create_nccl(self->host, self->device, options, &self->there, err);
  self->device->leave(self->device->self, saved);
  return code;
}

PyObject *rm_gpu_group_new(PyObject *gpus, PyObject *args) {
  PyObject *module = rm_module_of(gpus), *end;
  int ordinal;
  rm_nccl_options options = {.capacity = 0};
  if (!PyArg_ParseTuple(args, "Oissd:group", &end, &ordinal, &options.library, &options.gpu,
                        &options.timeout))
    return NULL;
  const rm_device *device = rm_gpus_device(gpus, ordinal);
  group_object *self = device ? rm_object_make(module, RM_TYPE_GPU_GROUP) : NULL;
  if (!self) return NULL;
  rm_error err = RM_ERROR_INIT;
  self->gpus = Py_NewRef(gpus);
  self->device = device;
  self->end = Py_NewRef(end);
  const int failed = rm_comm_take(module, end, &self->host);
  const rm_code code = failed ? RM_OK : RM_UNLOCKED(create(self, &options, &err));
  if (!failed && !code) return (PyObject *)self;
  Py_DECREF((PyObject *)self);
  return failed ? NULL : rm_raise(module, &err);
}

// -------------------------------------------------------------------------------------- the types
static PyMethodDef block_methods[] = {
    {"put", block_put, METH_VARARGS,
     PyDoc_STR(
         "(offset, host bytes): waits for earlier work, then enqueues a copy; the bytes have to "
         "stay until wait().")},
    {"copy", block_copy, METH_VARARGS,
     PyDoc_STR(
         "(offset, ordinal, address, bytes of an element, shape, strides): enqueues a copy of a "
         "GPU tensor, in C order.")},
    {0},
};

static PyGetSetDef block_members[] = {
    {"address", block_address, NULL, PyDoc_STR("On the group's device."), NULL},
    {0},
};

static PyMethodDef group_methods[] = {
    {"block", group_block, METH_VARARGS, PyDoc_STR("(bytes): a GpuBlock, uninitialized.")},
    {"broadcast", group_broadcast, METH_VARARGS,
     PyDoc_STR("(block, bytes, root): enqueues a broadcast of root's block.")},
    {"wait", group_wait, METH_NOARGS, PyDoc_STR("Waits for all enqueued work.")},
    {"abort", group_abort, METH_NOARGS,
     PyDoc_STR("Ends the group; the other ranks get RankLostError where they wait.")},
    {"close", group_close, METH_NOARGS, PyDoc_STR("Leaves the group. Idempotent.")},
    {0},
};

static PyType_Slot block_slots[] = {
    {Py_tp_dealloc, block_dealloc},
    {Py_tp_traverse, block_traverse},
    {Py_tp_methods, block_methods},
    {Py_tp_getset, block_members},
    {Py_tp_doc, "Bytes of a GPU's memory, for a bucket of weights."},
    {0, NULL},
};
PyType_Spec rm_gpu_block_spec =
    RM_TYPE("GpuBlock", block_object, RM_GC | RM_MADE_HERE, block_slots);

static PyType_Slot group_slots[] = {
    {Py_tp_dealloc, group_dealloc},
    {Py_tp_traverse, group_traverse},
    {Py_tp_methods, group_methods},
    {Py_tp_doc, "One rank of a group of GPUs over NCCL. One thread at a time."},
    {0, NULL},
};
PyType_Spec rm_gpu_group_spec =
    RM_TYPE("GpuGroup", group_object, RM_GC | RM_MADE_HERE, group_slots);

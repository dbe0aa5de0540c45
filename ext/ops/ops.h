// ops.h: _core.Kernels. `Kernels(isa, threads)` has an op table, a thread team and a workspace that
// grows (kernels.c); its methods are the ops of kernels.h (dense.c, attention.c, moe.c, logits.c).
// The caller allocates outputs. Everything that kernels rely on is checked here (call.c): dtypes,
// sizes, ranges of indices. rollmesh.ops adds names and defaults.
//
// A method makes one rm_op_call: views of its arguments, checks, begin, the op, finish. The first
// error sets the exception; later checks do nothing, and begin ends the call. Checks hold the GIL;
// the op runs without it, under the object's mutex. Indices are copied before they are checked,
// since another thread may write to the array, or an output may overlap it.
//
// `Kernels(family, 1, op_device, stream)` has the op table of a CUDA device, over DeviceArrays, on
// the OpDevice's stream. With a caller's stream the op waits for that stream, and later work of
// that stream waits for the op. Without one (0) the call returns when the op is done. Indices are
// copied to pinned memory and checked there; the op reads a device copy of that.
#pragma once

#include "arrays.h"

#include <pthread.h>
#include <unistd.h>

#include "base/team.h"
#include "gpu/gpu_array.h"
#include "kernels.h"

typedef struct rm_kernels_object {
  PyObject_HEAD
  const rm_kernels *table; // view
  rm_op_device *op_device; // owned; NULL: the CPU
  void *stream; // the caller's, which ops are ordered with; NULL: none
  rm_team *team; // owned, as is the workspace; on a device both are the OpDevice's
  void *workspace;
  size_t workspace_bytes;
  pthread_mutex_t mutex; // of team and workspace
  pid_t
      // a forked child may have inherited the mutex locked, by a thread that it does not have
      owner;
} rm_kernels_object;

// The largest size: sums of sizes and rounding up are exact in int64_t; products are checked.
enum { RM_OP_MAX_SIZE = INT32_MAX };
enum { RM_OP_MAX_INDICES = 4 }; // index arrays of one op

typedef struct rm_op_call {
  rm_kernels_object *self; // view
  PyObject *module; // view
  int failed;
  void *copies[RM_OP_MAX_INDICES]; // owned, of index arrays of the host, until the call ends
  int is_open, saved; // on a device: the OpDevice is entered
  int n_mirrored,
      is_fetching; // mirrored buffers of index arrays; whether one is on its way to the host
  size_t mirrored_bytes[RM_OP_DEVICE_MIRRORED]; // bytes that go to the device before the op
  rm_ctx ctx; // from begin on, as all below
  uint32_t fp;
  PyThreadState *thread;
} rm_op_call;

// The data of an array of n_dims sizes, of indices a copy; a size of exactly −1 is set to the
// array's.
void *rm_op_view(rm_op_call *c, PyObject *object, const char *name, int type, int flags,
                 int64_t *const sizes[], int n_dims);
#define VIEW(c, object, name, type, flags, ...) \
  rm_op_view(c, object, name, type, flags, (int64_t *[]){__VA_ARGS__}, \
             sizeof((int64_t *[]){__VA_ARGS__}) / sizeof(int64_t *))
rm_dtype rm_op_dtype_of(rm_op_call *c, PyObject *object, const char *name);
void rm_op_refuse_dtype(rm_op_call *c, PyObject *object, const char *name,
                        const char *expected); // or one that is no array
int rm_op_numpy_type(rm_dtype dtype);
// Host memory with the contents of a view of indices; NULL for NULL, or after an error.
const void *rm_op_seen(rm_op_call *c, const void *view);
// On a device: the host half of a mirrored buffer of so many bytes, to be filled before begin.
// NULL: an error.
void *rm_op_mirrored(rm_op_call *c, size_t bytes);
const void *rm_op_there(const rm_op_call *c, const void *here); // the device's half

void rm_op_refuse(rm_op_call *c, rm_code code, const char *name, long long seen,
                  const char *expected, long long limit);
// A number that is an argument: an integer in [low, high], a size in [least, RM_OP_MAX_SIZE]
// (ShapeError; −1 after an error), a finite float32 of at least `low` (ConfigError).
int64_t rm_op_integer(rm_op_call *c, PyObject *object, const char *name, int64_t low, int64_t high);
int64_t rm_op_size_of(rm_op_call *c, PyObject *object, const char *name, int64_t least);
float rm_op_real(rm_op_call *c, PyObject *object, const char *name, float low);
// A number that was computed from arguments.
void rm_op_at_least(rm_op_call *c, const char *name, int64_t seen, int64_t least);
void rm_op_size(rm_op_call *c, const char *name, int64_t seen, int64_t least);
void rm_op_multiple_of(rm_op_call *c, const char *name, int64_t seen, int64_t unit);
void rm_op_in_range(rm_op_call *c, const char *name, const int32_t *a, int64_t n, int64_t low,
                    int64_t high); // a[i] in [low, high)
void rm_op_in_range_from(rm_op_call *c, const char *name, const int32_t *a, int64_t from, int64_t n,
                         int64_t low, int64_t high);
int64_t rm_op_product(rm_op_call *c, const char *name, int64_t a, int64_t b); // 0 after an error
int64_t rm_op_packed_elems(rm_op_call *c, const char *name, int64_t n,
                           int64_t k); // rm_packed_elems, checked

// 0: ctx is valid, and finish has to follow. −1: an exception is set, and the call has ended.
int rm_op_begin(rm_op_call *c, rm_limits limits);
PyObject *rm_op_finish(rm_op_call *c); // None; on a device NULL where it has failed
void rm_op_fail(rm_op_call *c, rm_error *err);

#define RUN(op, limits, args) \
  do { \
    if (rm_op_begin(&c, limits)) return NULL; \
    self->table->op(&c.ctx, args); \
    return rm_op_finish(&c); \
  } while (0)

// A method begins with CALL(how many arguments it takes); o[i] is the i-th. What they are is in the
// table of kernels.c.
#define CALL(n_wanted) \
  rm_op_call c = {.self = self, .module = rm_module_of((PyObject *)self)}; \
  if (n_given != (n_wanted)) \
  return PyErr_Format(PyExc_TypeError, "expected %d arguments, got %zd", n_wanted, n_given)
#define RM_KERNELS_METHOD(name) \
  PyObject *rm_kernels_py_##name(rm_kernels_object *self, PyObject *const *o, Py_ssize_t n_given)
RM_KERNELS_METHOD(embed);
RM_KERNELS_METHOD(gather_rows);
RM_KERNELS_METHOD(activate);
RM_KERNELS_METHOD(rms_norm);
RM_KERNELS_METHOD(gemm);
RM_KERNELS_METHOD(pack);
RM_KERNELS_METHOD(head_squares);
RM_KERNELS_METHOD(qk_rope_kv);
RM_KERNELS_METHOD(attention);
RM_KERNELS_METHOD(router);
RM_KERNELS_METHOD(permute);
RM_KERNELS_METHOD(combine);
RM_KERNELS_METHOD(lm_head);
RM_KERNELS_METHOD(merge_pairs);
RM_KERNELS_METHOD(sample);
RM_KERNELS_METHOD(top_logprobs);
RM_KERNELS_METHOD(ranks);

// engine_object.h: _core.Engine, the Python object over the ranks of this process. engine.c has
// creation, requests and steps, options.c the options, views.c the results, external_scheduler.c
// the steps of an external scheduler, sync.c and weights.c the weights.
//
// One thread at a time: between rm_engine_enter and rm_engine_leave the object refuses another
// thread; entering also refuses a closed engine and an engine of the parent process. Each error is
// a StateError. One thread of the generator makes all calls (request/loop.py); this flag turns a
// mistake there into an exception.
#pragma once

#include "arrays.h"

#include <stdatomic.h>

#include "engine/engine.h"

typedef struct rm_engine_object {
  PyObject_HEAD
  rm_engine *engine; // owned; NULL once closed
  rm_spec *spec; // owned; the engine's view
  PyObject *requests; // owned dict: id → its logits array, or None, until release
  // Owned: (rank, tp, ep, world), the Comms that the engine has taken; None or NULL without Comms.
  PyObject *ends;
  int reads_gpus; // whether its ranks are on GPUs
  atomic_int busy;
  long pid; // process that made it
} rm_engine_object;

int rm_engine_enter(rm_engine_object *self); // 0, or −1 with StateError set
void rm_engine_leave(rm_engine_object *self);
int rm_engine_id(PyObject *argument, uint64_t *id); // 0, or −1 with OverflowError or TypeError set
typedef rm_code (*rm_id_call)(rm_scheduler *, uint64_t, rm_error *);
PyObject *rm_engine_call_with_id(rm_engine_object *self, PyObject *id,
                                 rm_id_call call); // None, or NULL with its error set

// options.c: fills `out`, whose pointers are views of the returned object. Returns a new reference,
// or NULL with an exception set.
PyObject *rm_engine_options_read(PyObject *object, rm_engine_options *out);

// Enters until the end of the function; on an error returns NULL from it.
static inline void rm_engine_leave_scope(rm_engine_object **self) { rm_engine_leave(*self); }
#define RM_ENTER(self) \
  if (rm_engine_enter(self)) return NULL; \
  __attribute__((cleanup(rm_engine_leave_scope))) rm_engine_object *entered = self

// The methods, by file. _core.pyi has their signatures and docs. Each enters, except that
// sync_take and sync_push do not while they run Python code of others (tensors and their
// finalizers).
#define RM_ENGINE_METHODS(METHOD) \
  /* engine.c */ \
  METHOD(close, NOARGS) \
  METHOD(add, VARARGS) \
  METHOD(abort, O) \
  METHOD(release, O) \
  METHOD(stop_sample, VARARGS) \
  METHOD(step, NOARGS) \
  METHOD(give_up, NOARGS) \
  METHOD(has, O) \
  METHOD(unfinished, NOARGS) \
  METHOD(finished, NOARGS) \
  METHOD(ids, NOARGS) \
  METHOD(reset_prefix_cache, NOARGS) \
  METHOD(sleep, O) \
  METHOD(wake, O) \
  METHOD(offload_weights, O) \
  METHOD(host_room, NOARGS) \
  /* views.c */ \
  METHOD(request, O) \
  METHOD(sample, VARARGS) \
  METHOD(tokens, VARARGS) \
  METHOD(stats, NOARGS) \
  METHOD(profile, NOARGS) \
  METHOD(manifest, NOARGS) \
  /* weights.c */ \
  METHOD(weights, NOARGS) \
  /* external_scheduler.c */ \
  METHOD(external_step, VARARGS) \
  METHOD(external_draw, VARARGS) \
  METHOD(external_top, VARARGS) \
  METHOD(external_routed, VARARGS) \
  METHOD(external_preempt, O) \
  METHOD(external_fail, O) \
  METHOD(external_invalidate_pages, O) \
  METHOD(external_tokens, VARARGS) \
  /* sync.c */ \
  METHOD(sync_resolve, VARARGS) \
  METHOD(sync_take, VARARGS) \
  METHOD(sync_push, VARARGS) \
  METHOD(sync_commit, O) \
  METHOD(sync_abort, NOARGS) \
  METHOD(sync_state, NOARGS)

// Each begins the definition of a method. RM_ENGINE_METHOD enters the engine for the whole call;
// with RM_OPEN_METHOD the method enters it by itself. `argument` is empty for NOARGS.
#define RM_ENGINE_METHOD(name, argument) \
  static PyObject *inside_##name(rm_engine_object *self, PyObject *argument); \
  RM_OPEN_METHOD(name, given) { \
    RM_ENTER(self); \
    return inside_##name(self, given); \
  } \
  static PyObject *inside_##name(rm_engine_object *self, PyObject *argument)
#define RM_OPEN_METHOD(name, argument) \
  PyObject *rm_engine_py_##name(rm_engine_object *self, PyObject *argument)
#define RM_DECLARE_METHOD(name, flags) RM_OPEN_METHOD(name, );
RM_ENGINE_METHODS(RM_DECLARE_METHOD)
PyObject *rm_engine_py_sync_begin(rm_engine_object *self, PyObject *args, PyObject *kwargs);

// engine_object.h: _core.Engine, the Python object over the ranks of this process. engine.c has
// creation, requests and steps, options.c the options, views.c the results, external_scheduler.c
// the steps of an external scheduler, sync.c and weights.c the weights.
//
// One thread at a time: each method works between rm_engine_enter and rm_engine_leave, which refuse
// a second thread, a closed engine and an engine of the parent process with StateError. One thread
// of the generator makes all calls (request/loop.py); this flag turns a mistake there into an
// exception.
#pragma once

#include "arrays.h"

#include <stdatomic.h>

#include "engine/engine.h"

typedef struct rm_engine_object {
  PyObject_HEAD
  rm_engine *engine; // owned; NULL once closed
  rm_spec *spec; // owned; the engine's view
  PyObject *requests; // owned dict: id → (prompt_logprobs, logits array or None) until release
  PyObject *done; // owned set: ids of finished requests until release
  // Owned: (rank, tp, ep, world), the Comms that the engine has taken; None or NULL without Comms.
  PyObject *ends;
  int reads_gpus; // whether its ranks are on GPUs
  atomic_int busy;
  long pid; // process that made it
} rm_engine_object;

PyObject *rm_engine_module(rm_engine_object *self); // view
int rm_engine_enter(rm_engine_object *self); // 0, or −1 with StateError set
void rm_engine_leave(rm_engine_object *self);
PyObject *rm_engine_finish(rm_engine_object *self, rm_code code,
                           rm_error *err); // leaves; None, or NULL with the exception of `code`
PyObject *rm_engine_call(rm_engine_object *self,
                         void (*call)(rm_engine *)); // None, or NULL with its error set
typedef rm_code (*rm_id_call)(rm_scheduler *, uint64_t, rm_error *);
PyObject *rm_engine_call_with_id(rm_engine_object *self, PyObject *id,
                                 rm_id_call call); // None, or NULL with its error set

// options.c: fills `out`, whose pointers are views of the returned object. Returns a new reference,
// or NULL with an exception set.
PyObject *rm_engine_options_read(PyObject *module, PyObject *object, rm_engine_options *out);

// Methods outside engine.c; their signatures and docs are in its table and in _core.pyi.
// views.c
PyObject *rm_engine_py_request(rm_engine_object *self, PyObject *id);
PyObject *rm_engine_py_sample(rm_engine_object *self, PyObject *args);
PyObject *rm_engine_py_tokens(rm_engine_object *self, PyObject *args);
PyObject *rm_engine_py_profile(rm_engine_object *self, PyObject *ignored);
PyObject *rm_engine_py_stats(rm_engine_object *self, PyObject *ignored);
PyObject *rm_engine_py_manifest(rm_engine_object *self, PyObject *ignored);
// external_scheduler.c
PyObject *rm_engine_py_external_step(rm_engine_object *self, PyObject *args);
PyObject *rm_engine_py_external_draw(rm_engine_object *self, PyObject *args);
PyObject *rm_engine_py_external_top(rm_engine_object *self, PyObject *args);
PyObject *rm_engine_py_external_routed(rm_engine_object *self, PyObject *args);
PyObject *rm_engine_py_external_preempt(rm_engine_object *self, PyObject *id);
PyObject *rm_engine_py_external_fail(rm_engine_object *self, PyObject *id);
PyObject *rm_engine_py_external_invalidate_pages(rm_engine_object *self, PyObject *pages);
PyObject *rm_engine_py_external_tokens(rm_engine_object *self, PyObject *args);
// weights.c
PyObject *rm_engine_py_weights(rm_engine_object *self, PyObject *ignored);
// sync.c
PyObject *rm_engine_py_sync_begin(rm_engine_object *self, PyObject *args, PyObject *kwargs);
PyObject *rm_engine_py_sync_resolve(rm_engine_object *self, PyObject *args);
PyObject *rm_engine_py_sync_take(rm_engine_object *self, PyObject *args);
PyObject *rm_engine_py_sync_push(rm_engine_object *self, PyObject *entries);
PyObject *rm_engine_py_sync_commit(rm_engine_object *self, PyObject *inflight);
PyObject *rm_engine_py_sync_abort(rm_engine_object *self, PyObject *ignored);
PyObject *rm_engine_py_sync_state(rm_engine_object *self, PyObject *ignored);

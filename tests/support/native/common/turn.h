// turn.h: the discipline under which ext/engine/engine.c lets threads call one engine, and nothing
// more: an atomic flag that is taken by exchange and given back by a store, around each call, and a
// pointer that is NULL once the engine is closed. Where the extension refuses a second thread, here
// it waits in a queue, so that no thread starves. The queue's numbers are relaxed: they order
// nothing that TSan could take for the flag's order.
#pragma once

#include <sched.h>
#include <stdatomic.h>

#include "engine/engine.h"

typedef struct turn {
  atomic_int busy;
  atomic_long queue; // numbers drawn
  rm_engine *engine; // touched between enter and leave only
  atomic_long n; // turns taken: the number whose turn it is
} turn;

// Returns the engine, NULL when it is closed; turn_leave must follow in either case.
static inline rm_engine *turn_enter(turn *t) {
  const long number = atomic_fetch_add_explicit(&t->queue, 1, memory_order_relaxed);
  while (atomic_load_explicit(&t->n, memory_order_relaxed) != number) sched_yield();
  while (atomic_exchange(&t->busy, 1)) sched_yield();
  return t->engine;
}

static inline void turn_leave(turn *t) {
  atomic_store(&t->busy, 0);
  atomic_fetch_add_explicit(&t->n, 1, memory_order_relaxed);
}

static inline void turn_close(turn *t) {
  rm_engine *engine = turn_enter(t);
  t->engine = NULL;
  rm_engine_destroy(engine);
  turn_leave(t);
}

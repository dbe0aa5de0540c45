// race_engine.c: the engine under TSan. First several engines at once, each with a thread team and
// a thread that creates, syncs, uses and destroys it. Then one engine that several threads call,
// under the discipline of the extension (common/turn.h): two add requests and collect them, one
// steps, one reads statistics, resets the prefix cache and pauses, one adds requests only to abort
// them. Oracle: for every interleaving, every request is bit-identical to the same request on a
// separate engine.
//
//   race_engine [--requests 12] [--rounds 2] [--seed 1] [--plant 1: statistics are read without a
//   turn]
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/memory.h"
#include "common/option.h"
#include "common/tiny.h"
#include "common/turn.h"

enum { MAX_REQUESTS = 256, ENGINES = 3 };

typedef struct scene {
  const tiny_model *model;
  const tiny_weights *weights;
  uint64_t seed;
  int n, plant;
  uint64_t want[MAX_REQUESTS]; // hash of each request on a separate engine
  turn turn;
  atomic_int collectors; // that are still working
  atomic_long steps, reads, aborts;
} scene;

// ----------------------------------------------------------------------------------- many engines
static void *lone_engine(void *arg) {
  scene *s = arg;
  rm_engine *engine = tiny_engine(s->model, 2);
  rm_error err = RM_ERROR_INIT;
  tiny_must(tiny_sync(engine, s->weights, RM_INFLIGHT_REFUSE, &err), &err);
  for (int i = 0; i < s->n; i++) {
    tiny_room room;
    uint64_t id;
    const rm_request request = tiny_request(s->model, s->seed, i, &room);
    tiny_must(rm_engine_add(engine, &request, &id, &err), &err);
    tiny_must(tiny_drain(engine, &err), &err);
    s->want[i] = tiny_hash(engine, id);
    tiny_must(rm_scheduler_release(rm_engine_scheduler(engine, id), id, &err), &err);
  }
  rm_engine_destroy(engine);
  return NULL;
}

static void many_engines(scene *s) {
  static scene others[ENGINES];
  pthread_t threads[ENGINES];
  for (int i = 0; i < ENGINES; i++) {
    others[i] = (scene){.model = s->model, .weights = s->weights, .seed = s->seed, .n = s->n};
    if (pthread_create(&threads[i], NULL, lone_engine, &others[i])) tiny_die("no thread %d", i);
  }
  for (int i = 0; i < ENGINES; i++) pthread_join(threads[i], NULL);
  for (int r = 0; r < s->n; r++) {
    s->want[r] = others[0].want[r];
    for (int i = 1; i < ENGINES; i++)
      if (others[i].want[r] != s->want[r])
        tiny_die("request %d differs between engines 0 and %d", r, i);
  }
}

// ------------------------------------------------------------------------------------- one engine
static void *collect(void *arg) {
  scene *s = arg;
  rm_error err = RM_ERROR_INIT;
  for (int i = 0; i < s->n; i++) {
    tiny_room room;
    const rm_request request = tiny_request(s->model, s->seed, i, &room);
    uint64_t id;
    tiny_request_view view = {0};
    tiny_must(rm_engine_add(turn_enter(&s->turn), &request, &id, &err), &err);
    turn_leave(&s->turn);
    while (!view.finished) {
      rm_engine *engine = turn_enter(&s->turn);
      tiny_must(tiny_view_request(rm_engine_scheduler(engine, id), id, &view, &err), &err);
      if (view.finished) {
        if (tiny_hash(engine, id) != s->want[i])
          tiny_die("request %d differs from what a lone engine gave", i);
        tiny_must(rm_scheduler_release(rm_engine_scheduler(engine, id), id, &err), &err);
      }
      turn_leave(&s->turn);
      sched_yield();
    }
  }
  atomic_fetch_sub(&s->collectors, 1);
  return NULL;
}

static void *step(void *arg) {
  scene *s = arg;
  rm_error err = RM_ERROR_INIT;
  int64_t rows;
  while (atomic_load(&s->collectors)) {
    tiny_must(rm_engine_step(turn_enter(&s->turn), NULL, &rows, &err), &err);
    turn_leave(&s->turn);
    if (rows) atomic_fetch_add(&s->steps, 1);
    else sched_yield();
  }
  return NULL;
}

static void *read_and_reset(void *arg) {
  scene *s = arg;
  rm_engine *engine = turn_enter(&s->turn); // outlives these threads
  turn_leave(&s->turn);
  while (atomic_load(&s->collectors)) {
    rm_engine_stats stats;
    if (s->plant) rm_engine_statistics(engine, &stats);
    turn_enter(&s->turn);
    rm_engine_statistics(engine, &stats);
    const long n = atomic_fetch_add(&s->reads, 1);
    if (n % 16 == 3) rm_engine_reset_prefix_cache(engine);
    turn_leave(&s->turn);
    sched_yield();
  }
  return NULL;
}

static void *add_and_abort(void *arg) {
  scene *s = arg;
  rm_error err = RM_ERROR_INIT;
  for (int i = 0; atomic_load(&s->collectors); i++) {
    tiny_room room;
    const rm_request request = tiny_request(s->model, s->seed + 1, i, &room);
    uint64_t id;
    tiny_must(rm_engine_add(turn_enter(&s->turn), &request, &id, &err), &err);
    turn_leave(&s->turn);
    for (int k = 0; k < i % 4; k++) sched_yield();
    rm_engine *engine = turn_enter(&s->turn);
    tiny_must(rm_scheduler_abort(rm_engine_scheduler(engine, id), id, &err), &err);
    tiny_must(rm_scheduler_release(rm_engine_scheduler(engine, id), id, &err), &err);
    turn_leave(&s->turn);
    atomic_fetch_add(&s->aborts, 1);
  }
  return NULL;
}

static void one_engine(scene *s) {
  void *(*const parts[])(void *) = {collect, collect, step, read_and_reset, add_and_abort};
  enum { N = sizeof parts / sizeof *parts };
  pthread_t threads[N];
  rm_error err = RM_ERROR_INIT;
  s->turn.engine = tiny_engine(s->model, 2);
  tiny_must(tiny_sync(s->turn.engine, s->weights, RM_INFLIGHT_REFUSE, &err), &err);
  atomic_store(&s->collectors, 2);
  for (int i = 0; i < N; i++)
    if (pthread_create(&threads[i], NULL, parts[i], s)) tiny_die("no thread %d", i);
  for (int i = 0; i < N; i++) pthread_join(threads[i], NULL);
  turn_close(&s->turn);
}

int main(int argc, char **argv) {
  static scene s;
  long turns = 0, requests = 0, rounds = 2, n = 12, plant = 0;
  uint64_t seed = 1;
  option_read(argc, argv,
              (option[]){{"rounds", .least = 1, .most = OPTION_MOST, .count = &rounds},
                         {"requests", .least = 1, .most = MAX_REQUESTS, .count = &n},
                         {"plant", .most = 1, .count = &plant},
                         {"seed", .bits = &seed},
                         {0}});
  for (long round = 0; round < rounds; round++) {
    tiny_model *model =
        tiny_model_create(round % 2 ? TINY_DENSE : TINY_MOE, round % 4 < 2 ? RM_BF16 : RM_F32);
    s.model = model;
    s.seed = seed + (uint64_t)round;
    s.n = (int)n;
    s.plant = (int)plant;
    tiny_weights *weights = tiny_weights_create(model, s.seed);
    s.weights = weights;
    many_engines(&s);
    one_engine(&s);
    requests += (ENGINES + 2L) * s.n;
    tiny_weights_destroy(weights);
    tiny_model_destroy(model);
  }
  turns = atomic_load(&s.turn.n);
  if (rm_memory_blocks()) tiny_die("%zu blocks were not given back", rm_memory_blocks());
  printf("race_engine: %ld requests as a lone engine gives them, %ld turns, %ld steps, %ld "
         "statistics, %ld aborts\n",
         requests, turns, (long)s.steps, (long)s.reads, (long)s.aborts);
  return 0;
}

// race_sync.c: weights that change while an engine works, under TSan and the discipline of the
// extension (common/turn.h). A trainer pushes version after version, one tensor a turn, out of a
// buffer that it overwrites in between; some syncs it aborts, and some tensors it sends wrong
// first. Another thread opens syncs and drops them, which resets the trainer's. One thread steps,
// one adds requests and collects them, and at the end one closes the engine while the others are
// still calling it.
//
// Oracle: under "restart" all tokens of a request are of one version (P6), and its bits are those
// that a lone engine gives with that version's weights. A lost tensor, or a torn one, is another
// hash.
//
//   race_sync [--versions 12] [--seed 1] [--plant 1: statistics are read without a turn]
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/memory.h"
#include "common/option.h"
#include "common/tiny.h"
#include "common/turn.h"

enum { SETS = 3, REQUESTS = 8 };

typedef struct scene {
  const tiny_model *model;
  tiny_weights *sets[SETS]; // version v has the weights of set v % SETS
  uint64_t seed, want[SETS][REQUESTS];
  long n_versions, plant;
  rm_engine *unlocked; // for the injected fault
  turn turn;
  atomic_int closed;
  atomic_long commits, aborts, resets, refused, requests, reads;
} scene;

static void make_oracle(scene *s) {
  for (int set = 0; set < SETS; set++) {
    rm_engine *engine = tiny_engine(s->model, 1);
    rm_error err = RM_ERROR_INIT;
    tiny_must(tiny_sync(engine, s->sets[set], RM_INFLIGHT_REFUSE, &err), &err);
    for (int i = 0; i < REQUESTS; i++) {
      tiny_room room;
      const rm_request request = tiny_request(s->model, s->seed, i, &room);
      uint64_t id;
      tiny_must(rm_engine_add(engine, &request, &id, &err), &err);
      tiny_must(tiny_drain(engine, &err), &err);
      s->want[set][i] = tiny_hash(engine, id);
    }
    rm_engine_destroy(engine);
  }
}

// ------------------------------------------------------------------------------------ the trainer
// Pushes one tensor, copied to `buffer` first; sometimes a broken tensor comes before it.
static rm_code push(scene *s, const tiny_tensor *from, char *buffer, int broken, rm_error *err) {
  tiny_tensor t = *from;
  memcpy(buffer, from->tensor.data, (size_t)from->tensor.span_hi);
  t.tensor.data = buffer;
  if (broken) {
    rm_tensor wrong = t.tensor;
    wrong.shape[0]++;
    const rm_code code = tiny_push(turn_enter(&s->turn), 0, t.name, t.length, &wrong, err);
    turn_leave(&s->turn);
    if (code != RM_E_SHAPE && code != RM_E_STATE && code != RM_E_DUPLICATE_KEY)
      tiny_die("a broken tensor: %s", rm_code_name(code));
    atomic_fetch_add(&s->refused, 1);
  }
  const rm_code code = tiny_push(turn_enter(&s->turn), 0, t.name, t.length, &t.tensor, err);
  turn_leave(&s->turn);
  memset(buffer, 0xFF, (size_t)from->tensor.span_hi); // NaNs, which a late reader would see
  return code;
}

static rm_code send(scene *s, int64_t version, uint64_t r, char *buffer, rm_error *err) {
  const tiny_weights *weights = s->sets[version % SETS];
  rm_code code =
      rm_engine_sync_begin(turn_enter(&s->turn), &(rm_sync_options){.version = version}, err);
  turn_leave(&s->turn);
  const int64_t stop = r % 4 == 0 ? (int64_t)(r >> 8) % weights->n : weights->n;
  for (int64_t i = 0; i < stop && !code; i++)
    code = push(s, &weights->list[i], buffer, (r >> 16) % 8 == (uint64_t)i, err);
  rm_engine *engine = turn_enter(&s->turn);
  if (!code && stop == weights->n)
    code = rm_engine_sync_commit(engine, RM_INFLIGHT_RESTART, NULL, err);
  else rm_engine_sync_abort(engine), atomic_fetch_add(&s->aborts, 1);
  turn_leave(&s->turn);
  return stop < weights->n && !code ? RM_E_INCOMPLETE_SYNC : code;
}

// Waits until this version has served some requests.
static void await_requests(scene *s) {
  const long enough = atomic_load(&s->requests) + REQUESTS / 2;
  while (atomic_load(&s->requests) < enough) sched_yield();
}

static void *train(void *arg) {
  scene *s = arg;
  rm_error err = RM_ERROR_INIT;
  char *buffer = malloc(1 << 20);
  if (!buffer) tiny_die("no buffer");
  for (int64_t version = 0, attempt = 0; version < s->n_versions; attempt++) {
    const rm_code code = send(s, version, tiny_mix(s->seed + (uint64_t)attempt), buffer, &err);
    if (code == RM_OK) {
      version++;
      atomic_fetch_add(&s->commits, 1);
      await_requests(s);
    } else if (code == RM_E_STATE || code == RM_E_INCOMPLETE_SYNC)
      atomic_fetch_add(&s->resets, 1); // the other thread interfered, or the sync was dropped
    else tiny_must(code, &err);
  }
  free(buffer);
  rm_error_clear(&err);
  turn_close(&s->turn);
  atomic_store(&s->closed, 1);
  return NULL;
}

static void *interfere(void *arg) {
  scene *s = arg;
  rm_error err = RM_ERROR_INIT;
  for (uint64_t i = 0; !atomic_load(&s->closed); i++) {
    // Turns of all threads: a sync takes some hundred.
    const long until = atomic_load(&s->turn.n) + (long)(tiny_mix(s->seed + i) % 1000);
    while (atomic_load(&s->turn.n) < until && !atomic_load(&s->closed)) sched_yield();
    rm_engine *engine = turn_enter(&s->turn);
    if (engine && i % 3 == 0)
      tiny_must(rm_engine_sync_begin(engine, &(rm_sync_options){.version = -1}, &err), &err);
    if (engine && i % 3 == 1) rm_engine_sync_abort(engine);
    rm_engine_stats stats;
    if (engine) rm_engine_statistics(engine, &stats), atomic_fetch_add(&s->reads, 1);
    turn_leave(&s->turn);
  }
  return NULL;
}

// ------------------------------------------------------------------------------------- the others
static void *step(void *arg) {
  scene *s = arg;
  rm_error err = RM_ERROR_INIT;
  while (!atomic_load(&s->closed)) {
    int64_t rows;
    rm_engine *engine = turn_enter(&s->turn);
    const rm_code code = engine ? rm_engine_step(engine, NULL, &rows, &err) : RM_OK;
    turn_leave(&s->turn);
    if (code && code != RM_E_NOT_SYNCED) tiny_must(code, &err);
    rm_engine_stats stats;
    if (s->plant && !code) rm_engine_statistics(s->unlocked, &stats);
  }
  rm_error_clear(&err);
  return NULL;
}

static void check(scene *s, rm_engine *engine, uint64_t id, int i) {
  const uint64_t hash = tiny_hash(engine, id);
  tiny_request_view view;
  rm_error err = RM_ERROR_INIT;
  int64_t version = -1;
  tiny_must(tiny_view_request(rm_engine_scheduler(engine, id), id, &view, &err), &err);
  for (int32_t sample = 0; sample < view.n; sample++) {
    tiny_sample_view w;
    tiny_must(tiny_view_sample(rm_engine_scheduler(engine, id), id, sample, &w, &err), &err);
    for (int64_t t = 0; t < w.n_tokens; t++) {
      if (version >= 0 && w.versions[t] != version)
        tiny_die("request %d has tokens of versions %lld and %lld", i, (long long)version,
                 (long long)w.versions[t]);
      version = w.versions[t];
    }
  }
  int agrees = 0;
  // A score has no tokens.
  for (int set = 0; set < SETS; set++)
    agrees |= (version < 0 || version % SETS == set) && hash == s->want[set][i];
  if (!agrees)
    tiny_die("request %d under version %lld is not what a lone engine gives", i,
             (long long)version);
  atomic_fetch_add(&s->requests, 1);
}

static void *collect(void *arg) {
  scene *s = arg;
  rm_error err = RM_ERROR_INIT;
  uint64_t ids[REQUESTS];
  for (int at = 0, live = 0; !atomic_load(&s->closed); at = (at + 1) % REQUESTS) {
    tiny_room room;
    const rm_request request = tiny_request(s->model, s->seed, at, &room);
    rm_engine *engine = turn_enter(&s->turn);
    tiny_request_view view;
    rm_code code = RM_OK;
    if (engine && live >> at & 1) {
      tiny_must(tiny_view_request(rm_engine_scheduler(engine, ids[at]), ids[at], &view, &err),
                &err);
      if (view.finished) {
        check(s, engine, ids[at], at);
        tiny_must(rm_scheduler_release(rm_engine_scheduler(engine, ids[at]), ids[at], &err), &err);
        live &= ~(1 << at);
      }
    } else if (engine && !(code = rm_engine_add(engine, &request, &ids[at], &err))) {
      live |= 1 << at;
    }
    turn_leave(&s->turn);
    if (code && code != RM_E_NOT_SYNCED) tiny_must(code, &err);
  }
  rm_error_clear(&err);
  return NULL;
}

static void run(scene *s) {
  void *(*const parts[])(void *) = {train, interfere, step, collect};
  enum { N = sizeof parts / sizeof *parts };
  pthread_t threads[N];
  make_oracle(s);
  s->unlocked = s->turn.engine = tiny_engine(s->model, 2);
  atomic_store(&s->closed, 0);
  for (int i = 0; i < N; i++)
    if (pthread_create(&threads[i], NULL, parts[i], s)) tiny_die("no thread %d", i);
  for (int i = 0; i < N; i++) pthread_join(threads[i], NULL);
}

int main(int argc, char **argv) {
  static scene s;
  s.n_versions = 12, s.seed = 1;
  option_read(argc, argv,
              (option[]){{"versions", .least = 1, .most = OPTION_MOST, .count = &s.n_versions},
                         {"plant", .most = 1, .count = &s.plant},
                         {"seed", .bits = &s.seed},
                         {0}});
  for (int kind = TINY_TIED; kind <= TINY_MOE; kind++) {
    tiny_model *model = tiny_model_create((tiny_kind)kind, RM_BF16);
    s.model = model;
    for (int set = 0; set < SETS; set++)
      s.sets[set] = tiny_weights_create(model, s.seed + (uint64_t)set);
    run(&s);
    for (int set = 0; set < SETS; set++) tiny_weights_destroy(s.sets[set]);
    tiny_model_destroy(model);
  }
  if (rm_memory_blocks()) tiny_die("%zu blocks were not given back", rm_memory_blocks());
  printf("race_sync: %ld commits, %ld syncs lost or dropped, %ld tensors refused, %ld requests of "
         "one whole version, %ld turns\n",
         (long)s.commits, (long)s.resets, (long)s.refused, (long)s.requests, (long)s.turn.n);
  return 0;
}

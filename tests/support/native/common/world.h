// world.h: the data that fuzz_calls.c computes before it starts: a tiny model, three sets of
// weights, the answers of a separate engine to each of sixteen requests under each set, and the
// contribution of every parameter of every set to the digest of a version, from which the digest of
// any mixture follows.
#pragma once

#include <string.h>

#include "common/predict.h"

enum { SETS = 3, REQUESTS = 16, NEW_TOKENS = 10 };

typedef struct answer { // of one request under one set of weights
  uint64_t hash;
  int64_t n_tokens[3];
  int32_t tokens[3][NEW_TOKENS];
  float logprobs[3][NEW_TOKENS];
} answer;

typedef struct world {
  tiny_model *model; // NULL until it is made
  tiny_weights *sets[SETS];
  rm_engine *lone[SETS];
  answer want[SETS][REQUESTS];
  uint64_t digest; // of set 0
  uint64_t delta[SETS][PREDICT_PARAMS],
      no_bias; // added to it when one parameter is of another set, or the bias is absent
  int bias;
} world;

// Some want logprobs of their prompt without the likeliest others: those can be had from the prefix
// cache.
static rm_request request_of(const world *w, int which, tiny_room *room) {
  rm_request r = tiny_request(w->model, 1, which, room);
  r.max_tokens = NEW_TOKENS;
  if (which % 2 && r.prompt_logprobs > 0) r.prompt_logprobs = 0;
  return r;
}

static answer world_ask(rm_engine *engine, const rm_request *request) {
  rm_error err = RM_ERROR_INIT;
  uint64_t id;
  tiny_must(rm_engine_add(engine, request, &id, &err), &err);
  tiny_must(tiny_drain(engine, &err), &err);
  answer a = {.hash = tiny_hash(engine, id)};
  for (int32_t i = 0; i < (request->kind == RM_SCORE ? 1 : request->n); i++) {
    tiny_sample_view v;
    tiny_must(tiny_view_sample(rm_engine_scheduler(engine, id), id, i, &v, &err), &err);
    a.n_tokens[i] = v.n_tokens;
    if (!v.n_tokens) continue; // then the arrays do not exist either
    memcpy(a.tokens[i], v.tokens, (size_t)v.n_tokens * sizeof *v.tokens);
    memcpy(a.logprobs[i], v.logprobs, (size_t)v.n_tokens * sizeof *v.logprobs);
  }
  tiny_must(rm_scheduler_release(rm_engine_scheduler(engine, id), id, &err), &err);
  return a;
}

// Without a prefix cache, so that answers do not depend on earlier requests.
static rm_engine *lone_engine(const world *w, int set) {
  rm_engine_options options = tiny_options(w->model, 1);
  rm_engine *engine;
  rm_error err = RM_ERROR_INIT;
  options.prefix_caching = 0;
  tiny_must(rm_engine_create(w->model->spec, &options, &engine, &err), &err);
  tiny_must(tiny_sync(engine, w->sets[set], RM_INFLIGHT_REFUSE, &err), &err);
  return engine;
}

// Computes the contribution of each parameter to the digest: set 0 with one tensor replaced.
static void world_digests(world *w, rm_engine *engine) {
  rm_error err = RM_ERROR_INIT;
  w->digest = rm_store_digest(rm_engine_store(engine));
  const rm_sync_options partial = {.version = -1, .allow_partial = 1},
                        full = {.version = -1, .allow_bias_removal = 1};
  for (int64_t i = 0; i < w->sets[0]->n; i++)
    for (int set = SETS - 1; set >= 0; set--) { // set 0 last, which restores it
      const tiny_weights one = {.n = 1, .list = &w->sets[set]->list[i]};
      tiny_must(tiny_sync_with(engine, &one, &partial, RM_INFLIGHT_REFUSE, &err), &err);
      w->delta[set][i] = rm_store_digest(rm_engine_store(engine)) - w->digest;
    }
  if (w->bias < 0) return;
  tiny_must(rm_engine_sync_begin(engine, &full, &err), &err);
  for (int64_t i = 0; i < w->sets[0]->n; i++) {
    const tiny_tensor *t = &w->sets[0]->list[i];
    if (i != w->bias) tiny_must(tiny_push(engine, 0, t->name, t->length, &t->tensor, &err), &err);
  }
  tiny_must(rm_engine_sync_commit(engine, RM_INFLIGHT_REFUSE, NULL, &err), &err);
  w->no_bias = rm_store_digest(rm_engine_store(engine)) - w->digest;
}

// One of twice as many models as kinds; `plant` as fuzz_calls.c says.
static void world_create(world *w, int which, long plant) {
  w->model =
      tiny_model_create((tiny_kind)(which % TINY_N_KIND), which < TINY_N_KIND ? RM_BF16 : RM_F32);
  for (int set = 0; set < SETS; set++)
    w->sets[set] = tiny_weights_create(w->model, 40 + (uint64_t)set);
  if (w->sets[0]->n > PREDICT_PARAMS) tiny_die("%lld parameters", (long long)w->sets[0]->n);
  w->bias = -1;
  for (int t = 0; t < w->sets[0]->n; t++)
    if (strstr(w->sets[0]->list[t].name, "bias") && strstr(w->sets[0]->list[t].name, "mlp"))
      w->bias = t;
  for (int set = 0; set < SETS; set++) {
    w->lone[set] = lone_engine(w, set);
    for (int i = 0; i < REQUESTS; i++) {
      tiny_room room;
      const rm_request request = request_of(w, i, &room);
      w->want[set][i] = world_ask(w->lone[set], &request);
    }
    w->want[set][5].hash ^= plant == 3;
  }
  rm_engine *engine = lone_engine(w, 0);
  world_digests(w, engine);
  rm_engine_destroy(engine);
  w->delta[1][2] += plant == 2;
}

static void world_destroy(world *w) {
  for (int set = 0; set < SETS; set++)
    rm_engine_destroy(w->lone[set]), tiny_weights_destroy(w->sets[set]);
  tiny_model_destroy(w->model);
}

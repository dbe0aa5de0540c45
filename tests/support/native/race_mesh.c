// race_mesh.c: all ranks of a mesh as threads of one engine, under TSan: ranks share the plan and
// the requests of their replica while they compute, and the first rank writes the records. Every
// kind of record is in the requests (common/tiny.h), and the KV cache sleeps in between.
//
// Oracle: the hash of an engine with one rank.
//
//   race_mesh [--requests 12] [--seed 1] [--plant 1: statistics are read while a step runs]
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>

#include "base/memory.h"
#include "common/option.h"
#include "common/tiny.h"

typedef struct scene {
  rm_engine *engine;
  atomic_int ended;
} scene;

static void *read_statistics(void *arg) {
  scene *s = arg;
  rm_engine_stats stats;
  while (!atomic_load(&s->ended)) rm_engine_statistics(s->engine, &stats);
  return NULL;
}

static uint64_t rollout(const tiny_model *model, rm_mesh mesh, uint64_t seed, int n, long plant) {
  rm_engine_options options = tiny_options(model, 4);
  rm_error err = RM_ERROR_INIT;
  scene s = {0};
  pthread_t reader;
  options.mesh = mesh;
  options.dispatcher = mesh.ep > 1 ? RM_DISPATCH_ALLTOALL : RM_DISPATCH_DISABLED;
  tiny_must(rm_engine_create(model->spec, &options, &s.engine, &err), &err);
  tiny_weights *weights = tiny_weights_create(model, seed);
  tiny_must(tiny_sync(s.engine, weights, RM_INFLIGHT_REFUSE, &err), &err);
  tiny_weights_destroy(weights);
  if (plant && pthread_create(&reader, NULL, read_statistics, &s)) tiny_die("no thread");
  uint64_t hash = tiny_generate(s.engine, model, seed, n);
  atomic_store(&s.ended, 1);
  if (plant) pthread_join(reader, NULL);
  tiny_must(rm_engine_sleep(s.engine, RM_PART_KV, &err), &err);
  tiny_must(rm_engine_wake(s.engine, RM_PART_KV, &err), &err);
  hash = tiny_mix(hash ^ tiny_generate(s.engine, model, seed + 1, n));
  rm_engine_destroy(s.engine);
  return hash;
}

int main(int argc, char **argv) {
  static const rm_mesh meshes[] = {{2, 1, 1}, {1, 2, 1}, {2, 2, 1}};
  long n = 12, plant = 0, engines = 0;
  uint64_t seed = 1;
  option_read(argc, argv,
              (option[]){{"requests", .least = 1, .most = 1000, .count = &n},
                         {"plant", .most = 1, .count = &plant},
                         {"seed", .bits = &seed},
                         {0}});
  for (int kind = 0; kind < TINY_N_KIND; kind++) {
    tiny_model *model = tiny_model_create((tiny_kind)kind, kind == TINY_TIED ? RM_F32 : RM_BF16);
    const uint64_t want = rollout(model, (rm_mesh){0}, seed, (int)n, 0);
    for (size_t m = 0; m < sizeof meshes / sizeof *meshes; m++, engines++)
      if (rollout(model, meshes[m], seed, (int)n, plant) != want)
        tiny_die("kind %d, tp=%d, dp=%d: not the bits of one rank", kind, meshes[m].tp,
                 meshes[m].dp);
    tiny_model_destroy(model);
  }
  if (rm_memory_blocks()) tiny_die("%zu blocks were not given back", rm_memory_blocks());
  printf("race_mesh: %ld engines of up to 4 ranks have the bits of one rank\n", engines);
  return 0;
}

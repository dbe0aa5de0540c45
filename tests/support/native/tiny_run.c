// tiny_run.c: a rollout of every tiny model under two versions, start to end: what valgrind
// watches, and the shortest program over the engine. Prints one hash a model; for one family of
// instruction sets it is the same whatever RM_ISA and --threads.
//
//   tiny_run [--threads 2] [--requests 12] [--kinds 3: that many of dense, tied, MoE, wide; 0 for a
//   injected fault alone]
//            [--plant 1: loses a block, 2: reads one that was freed; to see that either is found]
#include <stdio.h>

#include "base/memory.h"
#include "common/option.h"
#include "common/tiny.h"

static uint64_t rollout(tiny_kind kind, rm_dtype dtype, int threads, int n) {
  tiny_model *model = tiny_model_create(kind, dtype);
  rm_engine *engine = tiny_engine(model, threads);
  rm_error err = RM_ERROR_INIT;
  uint64_t hash = 0;
  for (uint64_t seed = 1; seed <= 2; seed++) {
    tiny_weights *weights = tiny_weights_create(model, seed);
    tiny_must(tiny_sync(engine, weights, RM_INFLIGHT_REFUSE, &err), &err);
    tiny_weights_destroy(weights);
    hash = tiny_mix(hash ^ tiny_generate(engine, model, seed, n));
    tiny_must(rm_engine_sleep(engine, RM_PART_KV, &err), &err);
    tiny_must(rm_engine_wake(engine, RM_PART_KV, &err), &err);
  }
  rm_engine_destroy(engine);
  tiny_model_destroy(model);
  return hash;
}

static void plant(long fault) {
  volatile char *volatile block = rm_alloc(100, 1);
  if (fault == 1) block = NULL;
  rm_free((void *)block);
  if (fault == 2 && block[50]) puts("read");
}

int main(int argc, char **argv) {
  long threads = 2, n = 12, kinds = TINY_N_KIND, fault = 0;
  option_read(argc, argv,
              (option[]){{"threads", .least = 1, .most = 256, .count = &threads},
                         {"requests", .least = 1, .most = 1 << 20, .count = &n},
                         {"kinds", .most = TINY_WIDE + 1, .count = &kinds},
                         {"plant", .most = 2, .count = &fault},
                         {0}});
  if (!kinds && !fault) option_refuse("--kinds 0 without --plant leaves nothing to run");
  if (fault) plant(fault);
  for (int kind = 0; kind < kinds; kind++)
    for (int dtype = RM_BF16; dtype <= RM_F32; dtype++)
      printf("kind %d dtype %d hash %016llx\n", kind, dtype,
             (unsigned long long)rollout((tiny_kind)kind, (rm_dtype)dtype, (int)threads, (int)n));
  return 0;
}

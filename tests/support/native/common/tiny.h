// tiny.h: a whole model small enough for TSan and valgrind, made without Python: a spec, a state
// dict of random values that depends on its seed only, an engine, and the work of a rollout hashed
// into one number.
//
//   tiny_model *model = tiny_model_create(TINY_MOE, RM_BF16);
//   tiny_weights *weights = tiny_weights_create(model, 7);
//   rm_engine *engine = tiny_engine(model, 2);
//   tiny_must(tiny_sync(engine, weights, RM_INFLIGHT_REFUSE, &err), &err);
//   // the same for every instruction set and number of threads:
//   uint64_t hash = tiny_generate(engine, 1, 6);
//   rm_engine_destroy(engine);
//   tiny_weights_destroy(weights);
//   tiny_model_destroy(model);
//
// Only tiny_model_create and the engine's own calls use the library's allocator, so
// rm_memory_fail_at counts the engine's allocations only. A failure ends the program with status 1
// and a message on stderr.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "common/views.h"
#include "engine/engine.h"

typedef enum tiny_kind {
  TINY_DENSE,
  TINY_TIED,
  TINY_MOE,
  TINY_N_KIND,
  TINY_WIDE = TINY_N_KIND
} tiny_kind;

// Sizes are not multiples of a tile. TINY_MOE has a dense layer and an expert layer with a router
// bias; the others have a layer with a sliding window and, for TINY_TIED, attention biases.
// TINY_WIDE, which is not among the TINY_N_KIND, is like TINY_MOE with sizes of several tiles.
typedef struct tiny_model {
  tiny_kind kind;
  rm_dtype dtype;
  rm_spec *spec; // owned, as is params
  rm_params *params; // the manifest: names and shapes
} tiny_model;

typedef struct tiny_tensor {
  char name[128];
  size_t length; // of the name
  // Contiguous, in the parameter's own dtype, with spans; the data is in the weights' block.
  rm_tensor tensor;
} tiny_tensor;

// Every parameter of the model once, in the manifest's order (without a tied lm_head).
typedef struct tiny_weights {
  int64_t n;
  tiny_tensor *list;
  char *block;
} tiny_weights;

// ----------------------------------------------------------------------------------------- making
tiny_model *tiny_model_create(tiny_kind kind, rm_dtype dtype);
void tiny_model_destroy(tiny_model *model);
tiny_weights *tiny_weights_create(const tiny_model *model, uint64_t seed);
void tiny_weights_destroy(tiny_weights *weights);
// max_model_len 64, 4 sequences, 24 rows a step, pages of 16, 12 pages, prefix caching, eos 3; the
// best kernels.
rm_engine_options tiny_options(const tiny_model *model, int n_threads);
rm_engine *tiny_engine(const tiny_model *model, int n_threads);

// ---------------------------------------------------------------------------------------- working
// begin, a push of every tensor, commit; on failure the sync is aborted and the failing call's code
// returned.
rm_code tiny_sync(rm_engine *engine, const tiny_weights *weights, rm_inflight inflight,
                  rm_error *err);
rm_code tiny_sync_with(rm_engine *engine, const tiny_weights *weights,
                       const rm_sync_options *options, rm_inflight inflight, rm_error *err);

// Resolves a name (skip_unknown as in sync.h), checks its tensor, pushes it.
rm_code tiny_check(rm_engine *engine, int skip_unknown, const char *name, size_t length,
                   const rm_tensor *tensor, rm_error *err);
rm_code tiny_push(rm_engine *engine, int skip_unknown, const char *name, size_t length,
                  const rm_tensor *tensor, rm_error *err);

// The i-th of an endless list of requests: prompts of 1 … 40 tokens (every third begins like
// another), n of 1 … 3, greedy and sampled with all filters, stop tokens, top logprobs, prompt
// logprobs, and scores. Its arrays are in `room`.
typedef struct tiny_room {
  int32_t prompt[64], stop_ids[2];
} tiny_room;
rm_request tiny_request(const tiny_model *model, uint64_t seed, int i, tiny_room *room);

// Everything of a request that the contract fixes: tokens, ends, bits of all logprobs, routing. Not
// the versions.
uint64_t tiny_hash(const rm_engine *engine, uint64_t id);
// Steps until all requests have finished.
rm_code tiny_drain(rm_engine *engine, rm_error *err);
// Adds requests 0 … n−1 of `seed`, drains, hashes all, releases them. Ends the program on any
// error.
uint64_t tiny_generate(rm_engine *engine, const tiny_model *model, uint64_t seed, int n);

// ---------------------------------------------------------------------------------------- helpers
uint64_t tiny_mix(uint64_t x); // a bijection that looks random
uint64_t tiny_hash_bytes(uint64_t hash, const void *data, size_t bytes);
void tiny_must(rm_code code, const rm_error *err); // ends the program unless RM_OK
_Noreturn void tiny_die(const char *format, ...) __attribute__((format(printf, 1, 2)));

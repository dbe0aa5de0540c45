// requests.c: routes requests to replicas and finds them there. Ids are unique in the process.
#include "base/hash.h"
#include "engine/state.h"

// For a cached prefix, a replica may have more work than the least busy replica by this many
// requests of the same size.
enum { AHEAD = 4 };

// ---------------------------------------------------------------------------------------- routing
static uint64_t hash_prefix(const rm_request *request, int64_t n) {
  const uint64_t hash =
      rm_hash_bytes(RM_HASH_SEED, request->prompt, (size_t)n * sizeof *request->prompt);
  return hash ? hash : 1;
}

static int64_t work_of(const rm_request *request) {
  if (request->kind == RM_SCORE) return request->n_prompt;
  return request->n_prompt + request->n * rm_min64(request->max_tokens, 1 << 20);
}

// The request was checked. *hash: of its first page, 0 if it does not matter.
static int choose_replica(const rm_engine *engine, const rm_request *request, uint64_t *hash) {
  const int64_t *assigned = engine->assigned, page_size = engine->options.page_size;
  const int dp = engine->options.mesh.dp;
  int least = 0;
  *hash = 0;
  for (int d = 1; d < dp; d++)
    if (assigned[d] < assigned[least]) least = d;
  if (engine->options.external_pages) return engine->own; // the external scheduler chose it
  if (dp == 1 || request->n_prompt < page_size) return least;
  *hash = hash_prefix(request, page_size);
  const rm_prefix *known = &engine->prefixes[*hash % PREFIX_SLOTS];
  const int before = known->hash == *hash ? known->replica : least;
  return assigned[before] - assigned[least] <= AHEAD * work_of(request) ? before : least;
}

rm_code rm_engine_add(rm_engine *engine, const rm_request *request, uint64_t *id, rm_error *err) {
  const rm_request_limits *limits = &engine->schedulers[0].options.limits;
  uint64_t hash;
  RM_TRY(rm_check_serving(engine, RM_PART_WEIGHTS, "a request", err));
  RM_TRY(rm_sequence_group_check(request, limits, err));
  const int chosen = choose_replica(engine, request, &hash), here = chosen - engine->own;
  if (here >= 0 && here < engine->n_replicas)
    RM_TRY(rm_scheduler_add(&engine->schedulers[here], request, engine->next_id, err));
  if (hash) engine->prefixes[hash % PREFIX_SLOTS] = (rm_prefix){hash, chosen};
  engine->assigned[chosen] += work_of(request);
  *id = engine->next_id++;
  return RM_OK;
}

// ----------------------------------------------------------------------------------- all replicas
rm_scheduler *rm_engine_scheduler(const rm_engine *engine, uint64_t id) {
  int d = engine->n_replicas - 1;
  while (d > 0 && !rm_find_sequence_group(&engine->schedulers[d], id, NULL)) d--;
  return &engine->schedulers[d];
}

int64_t rm_engine_unfinished(const rm_engine *engine) {
  int64_t n = 0;
  for (int d = 0; d < engine->n_replicas; d++) n += engine->schedulers[d].n_live;
  return n;
}

int64_t rm_engine_finished(const rm_engine *engine, uint64_t *ids, int64_t capacity) {
  int64_t n = 0;
  for (int d = 0; d < engine->n_replicas; d++) {
    const rm_link *head = &engine->schedulers[d].finished;
    for (const rm_link *at = head->next; at != head && n < capacity; at = at->next)
      ids[n++] = ((const rm_sequence_group *)at)->id;
  }
  return n;
}

void rm_engine_reset_prefix_cache(rm_engine *engine) {
  for (int d = 0; d < engine->n_replicas; d++) rm_kv_reset(engine->schedulers[d].cache);
}

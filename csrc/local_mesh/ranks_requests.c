// ranks_requests.c: routing of requests to replicas, and calls for requests, which run on all ranks
// of the replica in this process. Ids are unique in the process, so a request's replica is the one
// that has its id.
#include "base/hash.h"
#include "local_mesh/ranks_state.h"

// For a cached prefix, a replica may be ahead of the least busy one by the work of so many such
// requests.
enum { AHEAD = 4 };

// --------------------------------------------------------------------------------------- replicas
// `replica` counts the replicas of this process, `i` the replica's ranks of this process.
static rm_engine *engine_of(const rm_ranks *ranks, int replica, int i) {
  return ranks->members[replica * ranks->per_replica + i].engine;
}
static rm_engine *leader(const rm_ranks *ranks, int replica) {
  return engine_of(ranks, replica, 0);
}

static uint64_t hash_prefix(const rm_request *request, int64_t n) {
  const uint64_t hash =
      rm_hash_bytes(RM_HASH_SEED, request->prompt, (size_t)n * sizeof *request->prompt);
  return hash ? hash : 1;
}

static int64_t work_of(const rm_request *request) {
  const int64_t per_sample =
      request->kind == RM_GENERATE ? rm_min64(rm_max64(request->max_tokens, 0), 1 << 20) : 0;
  return request->n_prompt + per_sample * (request->kind == RM_GENERATE ? request->n : 1);
}

// The request was checked. *place: the entry for its prefix, NULL: it is shorter than a page.
static int choose_replica(rm_ranks *ranks, const rm_request *request, rm_prefix **place) {
  int least = 0;
  *place = NULL;
  for (int d = 1; d < ranks->mesh.dp; d++)
    if (ranks->assigned[d] < ranks->assigned[least]) least = d;
  if (ranks->has_external_scheduler) return ranks->own;
  if (ranks->mesh.dp == 1 || request->n_prompt < ranks->page_size) return least;
  const uint64_t hash = hash_prefix(request, ranks->page_size);
  *place = &ranks->prefixes[hash % PREFIX_SLOTS];
  const int before = (*place)->hash == hash ? (*place)->replica : least;
  return ranks->assigned[before] - ranks->assigned[least] <= AHEAD * work_of(request) ? before
                                                                                      : least;
}

int rm_ranks_has(const rm_ranks *ranks, uint64_t id) {
  int has = 0;
  for (int d = 0; d < ranks->n_replicas && !has; d++) has = rm_engine_has(leader(ranks, d), id);
  return has;
}

// The replica that has the request; 0 if none has.
static int replica_of(const rm_ranks *ranks, uint64_t id) {
  int d = ranks->n_replicas - 1;
  while (d > 0 && !rm_engine_has(leader(ranks, d), id)) d--;
  return d;
}

// Calls it on every rank of the replica; returns the first rank's result, since all are the same.
typedef rm_code (*id_call)(rm_engine *, uint64_t, rm_error *);
static rm_code on_replica(rm_ranks *ranks, uint64_t id, id_call call, rm_error *err) {
  const int replica = replica_of(ranks, id);
  const rm_code code = call(leader(ranks, replica), id, err);
  for (int i = 1; i < ranks->per_replica && !code; i++)
    call(engine_of(ranks, replica, i), id, NULL);
  return code;
}

// --------------------------------------------------------------------------------------- requests
// On all ranks of a replica here, or on none.
static rm_code add_to(rm_ranks *ranks, int replica, const rm_request *request, uint64_t *id,
                      rm_error *err) {
  rm_request mine = *request;
  mine.wants_logits = request->wants_logits || request->logits_out;
  for (int i = 0; i < ranks->per_replica; i++) {
    const rm_code code = rm_engine_add(engine_of(ranks, replica, i), &mine, id, err);
    while (code && i-- > 0) { // no memory for it on a later rank
      rm_engine_abort(engine_of(ranks, replica, i), mine.id, NULL);
      rm_engine_release(engine_of(ranks, replica, i), mine.id, NULL);
    }
    if (code) return code;
    mine.logits_out = NULL;
  }
  return RM_OK;
}

rm_code rm_ranks_add(rm_ranks *ranks, const rm_request *request, uint64_t *id, rm_error *err) {
  rm_request mine = *request;
  rm_prefix *place;
  mine.id = *id = ranks->next_id;
  rm_code code = ranks->mesh.dp > 1 ? rm_engine_check(leader(ranks, 0), &mine, err)
                                    : RM_OK; // the same result on every rank
  if (code) return code;
  const int chosen = choose_replica(ranks, &mine, &place),
            replica = chosen - ranks->own; // own is 0 where all are here
  if (replica >= 0 && replica < ranks->n_replicas &&
      (code = add_to(ranks, replica, &mine, id, err)))
    return code;
  if (place) *place = (rm_prefix){hash_prefix(&mine, ranks->page_size), chosen};
  ranks->assigned[chosen] += work_of(&mine);
  ranks->next_id++;
  return RM_OK;
}

static rm_code step_member(rm_member *member, void *arg) {
  (void)arg;
  return rm_engine_step(member->engine, &member->n_work, &member->err);
}

rm_code rm_ranks_step(rm_ranks *ranks, int64_t *n_work, int *more, rm_error *err) {
  *n_work = *more = 0;
  for (int r = 0; r < ranks->n;
       r++) // else the others would wait for a rank that differs until the timeout
    if (rm_engine_unfinished(ranks->members[r].engine) !=
        rm_engine_unfinished(leader(ranks, r / ranks->per_replica)))
      return rm_fail(err, RM_E_COLLECTIVE_MISMATCH,
                     "rank %d has %lld requests and the first of its replica %lld",
                     ranks->first + r, (long long)rm_engine_unfinished(ranks->members[r].engine),
                     (long long)rm_engine_unfinished(leader(ranks, r / ranks->per_replica)));
  const rm_code code = rm_ranks_run(ranks, step_member, NULL, err);
  for (int d = 0; d < ranks->n_replicas; d++) {
    *n_work += ranks->members[d * ranks->per_replica].n_work;
    *more |= rm_engine_had_work(leader(ranks, d));
  }
  return code;
}

int64_t rm_ranks_unfinished(const rm_ranks *ranks) {
  int64_t n = 0;
  for (int d = 0; d < ranks->n_replicas; d++) n += rm_engine_unfinished(leader(ranks, d));
  return n;
}

uint64_t rm_ranks_next_finished(const rm_ranks *ranks) {
  uint64_t id = 0;
  for (int d = 0; d < ranks->n_replicas && !id; d++) id = rm_engine_next_finished(leader(ranks, d));
  return id;
}

int64_t rm_ranks_finished(rm_ranks *ranks, uint64_t *ids, int64_t capacity) {
  int64_t n = 0;
  for (int d = 0; d < ranks->n_replicas; d++) {
    const int64_t got = rm_engine_finished(leader(ranks, d), ids + n, capacity - n);
    for (int t = 1; t < ranks->per_replica; t++) {
      uint64_t same; // the other ranks of the replica finish the same requests in the same order
      for (int64_t i = 0; i < got; i++) rm_engine_finished(engine_of(ranks, d, t), &same, 1);
    }
    n += got;
  }
  return n;
}

rm_code rm_ranks_view(const rm_ranks *ranks, uint64_t id, rm_request_view *out, rm_error *err) {
  return rm_engine_view(leader(ranks, replica_of(ranks, id)), id, out, err);
}

rm_code rm_ranks_sample_view(const rm_ranks *ranks, uint64_t id, int32_t sample,
                             rm_sample_view *out, rm_error *err) {
  return rm_engine_sample_view(leader(ranks, replica_of(ranks, id)), id, sample, out, err);
}

rm_code rm_ranks_release(rm_ranks *ranks, uint64_t id, rm_error *err) {
  return on_replica(ranks, id, rm_engine_release, err);
}
rm_code rm_ranks_abort(rm_ranks *ranks, uint64_t id, rm_error *err) {
  return on_replica(ranks, id, rm_engine_abort, err);
}

rm_code rm_ranks_stop_sample(rm_ranks *ranks, uint64_t id, int32_t sample, int64_t n_tokens,
                             rm_error *err) {
  const int replica = replica_of(ranks, id);
  rm_code code = RM_OK;
  for (int t = 0; t < ranks->per_replica && !code; t++)
    code = rm_engine_stop_sample(engine_of(ranks, replica, t), id, sample, n_tokens, err);
  return code;
}

void rm_ranks_pause(rm_ranks *ranks, int paused) {
  for (int r = 0; r < ranks->n; r++) rm_engine_pause(ranks->members[r].engine, paused);
}

void rm_ranks_reset_prefix_cache(rm_ranks *ranks) {
  for (int r = 0; r < ranks->n; r++) rm_engine_reset_prefix_cache(ranks->members[r].engine);
}

// --------------------------------------------------------------------- with an external scheduler
rm_code rm_ranks_external_step(rm_ranks *ranks, const rm_external_step *step,
                               rm_external_result *results, int64_t *n_work, rm_error *err) {
  return rm_engine_external_step(ranks->members[0].engine, step, results, n_work, err);
}

rm_code rm_ranks_external_draw(rm_ranks *ranks, const rm_external_draw *draws, int64_t n,
                               rm_external_result *results, rm_error *err) {
  return rm_engine_external_draw(ranks->members[0].engine, draws, n, results, err);
}

void rm_ranks_external_invalidate_pages(rm_ranks *ranks, const int32_t *pages, int64_t n) {
  rm_external_invalidate_pages(rm_engine_scheduler(ranks->members[0].engine), pages, n);
}

rm_code rm_ranks_external_fail(rm_ranks *ranks, uint64_t id, rm_error *err) {
  return rm_external_fail(rm_engine_scheduler(ranks->members[0].engine), id, err);
}

rm_code rm_ranks_external_preempt(rm_ranks *ranks, uint64_t id, rm_error *err) {
  return rm_external_preempt(rm_engine_scheduler(ranks->members[0].engine), id, err);
}

rm_code rm_ranks_external_tokens(rm_ranks *ranks, uint64_t id, const int32_t *tokens, int64_t n,
                                 rm_error *err) {
  return rm_external_tokens(rm_engine_scheduler(ranks->members[0].engine), id, tokens, n, err);
}

// weights.c: sync, sleep and wake, on all ranks here or on none. A worker's store does the work
// (weights/store.h); this file decides when a sync is allowed and what happens to running requests
// and the KV cache.
#include <assert.h>

#include "engine/state.h"
#include "weights/two_phase_commit.h"

static void on_all(rm_engine *engine, void (*call)(rm_store *)) {
  for (int w = 0; w < engine->n_workers; w++) call(engine->workers[w].store);
}

// ------------------------------------------------------------------------------------------- sync
static rm_code refuse_unfinished(const rm_engine *engine, const char *sync, const char *instead,
                                 rm_error *err) {
  const int64_t n = rm_engine_unfinished(engine);
  RM_FAIL_IF(n, RM_E_STATE, "unfinished requests: expected none %s, got %ld; %s", sync, n, instead);
  return RM_OK;
}

static rm_code begin_worker(rm_worker *worker, void *options) {
  return rm_sync_begin(worker->store, options, &worker->err);
}

rm_code rm_engine_sync_begin(rm_engine *engine, const rm_sync_options *options, rm_error *err) {
  RM_TRY(rm_check_awake(engine, RM_PART_WEIGHTS, "a sync", err));
  if (options->in_place)
    RM_TRY(refuse_unfinished(engine, "before a sync in place", "finish or abort them first", err));
  const rm_code code = rm_run_workers(engine, begin_worker, (void *)options, err);
  if (code && engine->n_workers > 1) rm_engine_sync_abort(engine);
  if (!engine->workers[0].store->serving.block) // in place: cached KV loses its version
    rm_engine_reset_prefix_cache(engine);
  return code;
}

typedef struct pushed {
  const rm_entry *const *entries;
  int64_t n;
} pushed;

static rm_code push_worker(rm_worker *worker, void *arg) {
  const pushed *it = arg;
  return rm_sync_push(worker->store, it->entries, it->n, &worker->err);
}

// Producers of GPU tensors have made a queue of that GPU wait for pending writes. If this is the
// queue of the only worker, reads are enqueued after the writes; otherwise this function waits
// until the tensors are complete.
static rm_code await_tensors(rm_engine *engine, const rm_entry *const *entries, int64_t n,
                             rm_error *err) {
  const rm_device *only = engine->n_workers == 1 ? engine->workers[0].device : NULL;
  uint64_t waited_for = 0; // a bit for each device
  for (int64_t i = 0; i < n && rm_engine_reads_gpus(engine); i++) {
    const rm_tensor *tensor = &entries[i]->tensor;
    const int ordinal = tensor->ordinal;
    if (!tensor->on_device || (only && ordinal == only->ordinal)) continue;
    if (ordinal >= 0 && ordinal < RM_MAX_GPUS && waited_for >> ordinal & 1) continue;
    RM_TRY(rm_ready_streams_wait(&engine->ready_streams, ordinal, err));
    waited_for |= (uint64_t)1 << ordinal;
  }
  return RM_OK;
}

void rm_engine_sync_undo(rm_engine *engine) { on_all(engine, rm_sync_undo); }

// Runs a part of a push on all workers. If one fails, all undo the push.
static rm_code push_on_all(rm_engine *engine, rm_code (*part)(rm_worker *, void *), void *arg,
                           rm_error *err) {
  const rm_code code = rm_run_workers(engine, part, arg, err);
  if (code) rm_engine_sync_undo(engine);
  return code;
}

rm_code rm_engine_sync_push(rm_engine *engine, const rm_entry *const *entries, int64_t n,
                            rm_error *err) {
  pushed it = {entries, n};
  RM_TRY(await_tensors(engine, entries, n, err));
  return push_on_all(engine, push_worker, &it, err);
}

static rm_code copy_worker(rm_worker *worker, void *most) {
  return rm_sync_copy(worker->store, *(const int64_t *)most, &worker->err);
}

rm_code rm_engine_sync_copy(rm_engine *engine, int64_t most, int *is_done, rm_error *err) {
  const rm_code code = push_on_all(engine, copy_worker, &most, err);
  *is_done = 1;
  for (int w = 0; w < engine->n_workers; w++) *is_done &= !engine->workers[w].store->tasks.n;
  return code;
}

static rm_code commit_worker(rm_worker *worker, void *arg) {
  (void)arg;
  RM_TRY(rm_sync_commit(worker->store, &worker->runner.rank, &worker->err));
  rm_rank_set_epoch(&worker->runner.rank, worker->store->version);
  return RM_OK;
}

rm_code rm_engine_sync_commit(rm_engine *engine, rm_inflight inflight, rm_sync_report *report,
                              rm_error *err) {
  if (inflight == RM_INFLIGHT_REFUSE && rm_engine_store(engine)->open)
    RM_TRY(refuse_unfinished(engine, "with inflight=refuse",
                             "finish them, or choose restart, abort or keep", err));
  RM_TRY(rm_run_workers(engine, commit_worker, NULL, err));
  for (int d = 0; d < engine->n_replicas; d++) {
    rm_scheduler *scheduler = &engine->schedulers[d];
    rm_weights_changed(scheduler, inflight);
    rm_kv_reset(scheduler->cache);
  }
  if (!report) return RM_OK;
  *report = engine->workers[0].store->report;
  for (int w = 1; w < engine->n_workers; w++) {
    const rm_sync_report *its = &engine->workers[w].store->report;
    report->bytes += its->bytes;
    if (its->seconds > report->seconds) report->seconds = its->seconds;
    if (its->copy_seconds > report->copy_seconds) report->copy_seconds = its->copy_seconds;
  }
  return RM_OK;
}

void rm_engine_sync_abort(rm_engine *engine) { on_all(engine, rm_sync_abort); }

int rm_engine_reads_gpus(const rm_engine *engine) { return engine->ready_streams.library != NULL; }

rm_code rm_engine_ready_queue(rm_engine *engine, int ordinal, const rm_device **out,
                              rm_error *err) {
  return rm_ready_streams_find(&engine->ready_streams, ordinal, out, err);
}

// ------------------------------------------------------------------------------------------ sleep
static rm_code check_no_sync(const rm_engine *engine, rm_error *err) {
  RM_FAIL_IF(engine->workers[0].store->open, RM_E_STATE,
             "sync: expected none open while the weights go to sleep, got an open one");
  return RM_OK;
}

static rm_code offload_worker(rm_worker *worker, void *arg) {
  (void)arg;
  return rm_store_offload(worker->store, &worker->err);
}

size_t rm_engine_offload_bytes(const rm_engine *engine) {
  size_t bytes = 0;
  for (int w = 0; w < engine->n_workers && !(engine->asleep & RM_PART_WEIGHTS); w++)
    bytes += rm_store_offload_bytes(engine->workers[w].store);
  return bytes;
}

rm_code rm_engine_offload_weights(rm_engine *engine, rm_error *err) {
  const size_t available = rm_memory_available(), wanted = rm_engine_offload_bytes(engine);
  if (engine->asleep & RM_PART_WEIGHTS) return RM_OK;
  RM_TRY(check_no_sync(engine, err));
  if (wanted > available) // the ranks of a process share the host's memory
    return rm_fail(
        err, RM_E_CAPACITY,
        "keep_weights: expected %s of free host memory for the weights of %d ranks, got %s",
        rm_say_bytes((double)wanted).text, engine->n_workers, rm_say_bytes((double)available).text);
  const rm_code code = rm_run_workers(engine, offload_worker, NULL, err);
  if (code) rm_engine_free_offloaded(engine);
  return code;
}

void rm_engine_free_offloaded(rm_engine *engine) { on_all(engine, rm_store_free_offloaded); }

static rm_code sleep_worker(rm_worker *worker, void *arg) {
  const unsigned parts = *(const unsigned *)arg;
  if (parts & (RM_PART_WEIGHTS | RM_PART_KV)) rm_graphs_clear(worker->runner.graphs);
  if (parts & RM_PART_WEIGHTS) {
    if (parts & RM_SLEEP_OFFLOAD) rm_store_release_blocks(worker->store);
    else rm_store_discard(worker->store);
  }
  if (parts & RM_PART_KV) {
    rm_device_free(worker->device, worker->runner.cache.pages, worker->kv_bytes);
    worker->runner.cache.pages = NULL;
  }
  return RM_OK;
}

// Only offloading can fail, so it comes first.
rm_code rm_engine_sleep(rm_engine *engine, unsigned parts, rm_error *err) {
  const unsigned offload = parts & RM_SLEEP_OFFLOAD, asked = parts & ~(unsigned)RM_SLEEP_OFFLOAD;
  unsigned job = (asked & ~engine->asleep) | offload;
  assert(!(asked & ~(unsigned)(RM_PART_WEIGHTS | RM_PART_KV)));
  if (job & RM_PART_WEIGHTS)
    RM_TRY(offload ? rm_engine_offload_weights(engine, err) : check_no_sync(engine, err));
  if (!offload) job |= asked & RM_PART_WEIGHTS; // also those that an earlier sleep offloaded
  rm_run_workers(engine, sleep_worker, &job, NULL);
  for (int d = 0; d < engine->n_replicas && job & asked; d++) {
    rm_scheduler *scheduler = &engine->schedulers[d];
    rm_pages_lost(scheduler); // without the weights the KV has no version
    rm_kv_reset(scheduler->cache);
    if (job & RM_PART_KV) rm_kv_renew(scheduler->cache);
  }
  engine->asleep |= asked;
  return RM_OK;
}

static rm_code wake_worker(rm_worker *worker, void *arg) {
  const unsigned parts = *(const unsigned *)arg;
  if (parts & RM_PART_WEIGHTS) RM_TRY(rm_store_restore(worker->store, &worker->err));
  return parts & RM_PART_KV ? rm_worker_map_cache(worker) : RM_OK;
}

rm_code rm_engine_wake(rm_engine *engine, unsigned parts, rm_error *err) {
  parts &= engine->asleep;
  const rm_code code = rm_run_workers(engine, wake_worker, &parts, err);
  if (!code) engine->asleep &= ~parts;
  parts |= RM_SLEEP_OFFLOAD;
  if (code) rm_run_workers(engine, sleep_worker, &parts, NULL); // also what was not awake yet
  return code;
}

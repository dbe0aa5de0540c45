// step.c: a step of all ranks here. The calling thread schedules and commits for each replica; the
// workers compute in parallel.
#include "engine/state.h"

static rm_code check_not_lost(const rm_engine *engine, rm_error *err) {
  const rm_error *lost = &engine->lost;
  return lost->code ? rm_fail(err, lost->code, "%s", rm_error_message(lost)) : RM_OK;
}

rm_code rm_check_awake(const rm_engine *engine, unsigned parts, const char *before, rm_error *err) {
  RM_FAIL_IF(engine->asleep & parts, RM_E_STATE,
             "%s: expected awake, got asleep; call wake() before %s",
             engine->asleep & RM_PART_WEIGHTS ? "weights" : "KV cache", before);
  return RM_OK;
}

rm_code rm_check_serving(const rm_engine *engine, unsigned parts, const char *before,
                         rm_error *err) {
  const rm_code code = rm_check_awake(engine, parts, before, err);
  if (code || engine->workers[0].store->serving.block) return code;
  return rm_fail(err, RM_E_NOT_SYNCED,
                 "weights: expected synced ones, got none; call sync_weights first");
}

// Computes the plan of the worker's replica.
static rm_code compute(rm_worker *worker, void *arg) {
  rm_runner *runner = &worker->runner;
  rm_error *err = &worker->err;
  (void)arg;
  rm_code code = rm_lockstep_agree(runner, &worker->progress, err);
  if (!code && worker->progress != RM_NO_WORK) {
    const double start = rm_now();
    const rm_step_shape *shape = &runner->shape;
    const rm_graph_step graph = {shape->padded, shape->with_token_ranks,
                                 runner->store->serving.number, rm_step_enqueue, runner};
    code = rm_step_prepare(runner, err);
    if (!code)
      code =
          shape->padded ? rm_graphs_run(runner->graphs, &graph, err) : rm_step_enqueue(runner, err);
    if (!code) code = rm_step_finish(runner, err);
    worker->forward_seconds += rm_now() - start;
  }
  if (code) {
    rm_rank_abort(&runner->rank, code); // other ranks may wait for this one
    // Enqueued work may write to records, which may be freed next.
    rm_device_settle(&runner->rank, runner->device);
  }
  return code;
}

static void schedule(rm_engine *engine) {
  const double start = rm_now();
  for (int d = 0; d < engine->n_replicas; d++) {
    rm_scheduler *scheduler = &engine->schedulers[d];
    scheduler->version = engine->workers[0].store->version;
    const rm_progress progress = rm_schedule(scheduler);
    for (int w = 0; w < engine->per_replica; w++) rm_first_worker(engine, d)[w].progress = progress;
  }
  engine->schedule_seconds += rm_now() - start;
}

// Returns what the workers of all replicas have next, at most.
static rm_progress commit(rm_engine *engine, int64_t *n_work) {
  const double start = rm_now();
  rm_progress progress = RM_NO_WORK;
  for (int d = 0; d < engine->n_replicas; d++) {
    const rm_worker *worker = rm_first_worker(engine, d);
    if (worker->progress == RM_NO_WORK) continue;
    if (worker->progress > progress) progress = worker->progress;
    *n_work += worker->scheduler->plan.n_rows;
    rm_commit(worker->scheduler, &worker->runner.step.output);
  }
  engine->commit_seconds += rm_now() - start;
  engine->steps += progress != RM_NO_WORK;
  return progress;
}

// After a failed forward the state of the exchanges is undefined, so the engine is unusable.
rm_code rm_engine_step(rm_engine *engine, const rm_external_step *external, int64_t *n_work,
                       rm_error *err) {
  rm_scheduler *first = &engine->schedulers[0];
  *n_work = 0;
  RM_FAIL_IF(!external != !engine->options.external_pages, RM_E_STATE, "%s",
             external ? "this engine schedules its own requests: expected step, got "
                        "external_step"
                      : "this engine has an external scheduler: expected external_step, got "
                        "step");
  RM_TRY(rm_check_serving(engine, RM_PART_WEIGHTS | RM_PART_KV, "a step", err));
  RM_TRY(check_not_lost(engine, err));
  if (external) RM_TRY(rm_external_begin(first, external, err));
  rm_code code = RM_OK;
  // An external step with more rows than a batch has takes several rounds.
  for (rm_progress progress = RM_MORE_BATCHES; progress == RM_MORE_BATCHES && !code;) {
    schedule(engine);
    code = rm_run_workers(engine, compute, NULL, &engine->lost);
    if (!code) progress = commit(engine, n_work);
  }
  engine->rows += *n_work;
  if (external) rm_external_end(first, code);
  return code ? check_not_lost(engine, err) : RM_OK;
}

// ------------------------------------------------------------------------ with external scheduler
rm_code rm_engine_external_draw(rm_engine *engine, const rm_external_draws *draws, rm_error *err) {
  rm_worker *worker = &engine->workers[0];
  rm_scheduler *scheduler = worker->scheduler;
  const int64_t vocab = engine->spec->vocab_size;
  RM_TRY(check_not_lost(engine, err));
  for (int64_t i = 0; i < draws->n; i++) RM_TRY(rm_external_drawing(scheduler, draws->ids[i], err));
  rm_code code = RM_OK;
  scheduler->version = worker->store->version;
  const rm_entered saved = rm_enter(worker);
  for (int64_t i = 0; i < draws->n && !code; i++) { // fails only if the device is dead
    rm_sequence *seq = rm_find_sequence_group(scheduler, draws->ids[i], NULL)->sequences;
    rm_drawn drawn;
    code = rm_draw_edited(&worker->runner, seq, draws->raw + i * vocab, draws->stats + 2 * i,
                          draws->edited + i * vocab, &drawn, err);
    if (!code) rm_external_drawn(scheduler, seq, &drawn, &draws->results, i);
  }
  rm_leave(saved);
  return code;
}

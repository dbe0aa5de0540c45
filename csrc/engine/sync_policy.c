// sync_policy.c: when a sync is allowed, and what its commit does to running requests. The store
// does the sync itself.
#include "engine/state.h"
#include "weights/two_phase_commit.h"

// ------------------------------------------------------------------------------------------- sync
rm_code rm_engine_require_idle(const rm_engine *engine, rm_error *err) {
  const long long n = engine->scheduler.n_live;
  return n ? rm_fail(err, RM_E_STATE,
                     "expected no unfinished requests, got %lld; finish or abort them, or choose "
                     "another inflight",
                     n)
           : RM_OK;
}

rm_code rm_engine_sync_begin(rm_engine *engine, const rm_sync_options *options, rm_error *err) {
  if (engine->asleep & RM_PART_WEIGHTS)
    return rm_fail(err, RM_E_STATE, "cannot sync while the weights are asleep; call wake() first");
  rm_code code = options->in_place ? rm_engine_require_idle(engine, err) : RM_OK;
  if (code) return code;
  const rm_entered saved = rm_enter(engine);
  code = rm_sync_begin(engine->store, options, err);
  rm_leave(engine, saved);
  if (!rm_store_weights(engine->store))
    rm_kv_reset(engine->scheduler.cache); // in place: cached KV cannot be used any more
  return code;
}

rm_code rm_engine_sync_check(rm_engine *engine, const rm_entry *entry, const rm_tensor *tensor,
                             rm_error *err) {
  return rm_sync_check(engine->store, entry, tensor, err);
}

rm_code rm_engine_sync_push(rm_engine *engine, const rm_entry *const *entries, int64_t n,
                            rm_error *err) {
  const rm_entered saved = rm_enter(engine);
  const rm_code code = rm_sync_push(engine->store, entries, n, err);
  rm_leave(engine, saved);
  return code;
}

rm_code rm_engine_sync_commit(rm_engine *engine, rm_inflight inflight, rm_sync_report *report,
                              rm_error *err) {
  rm_scheduler *scheduler = &engine->scheduler;
  if (inflight < RM_INFLIGHT_REFUSE || inflight > RM_INFLIGHT_KEEP_KV)
    return rm_fail(err, RM_E_CONFIG,
                   "inflight=%d: expected a policy for running requests (rm_inflight)",
                   (int)inflight);
  rm_code code = RM_OK;
  if (inflight == RM_INFLIGHT_REFUSE && rm_store_is_open(engine->store))
    code = rm_engine_require_idle(engine, err);
  if (code) return code;
  const rm_entered saved = rm_enter(engine);
  code = rm_sync_commit_together(engine->store, &engine->runner.rank, report, err);
  rm_leave(engine, saved);
  if (code) return code;
  rm_comms_set_epoch(&engine->runner, rm_store_version(engine->store));
  scheduler->options.policy->weights_changed(scheduler, inflight);
  rm_kv_reset(scheduler->cache);
  return RM_OK;
}

void rm_engine_sync_abort(rm_engine *engine) { rm_sync_abort(engine->store); }

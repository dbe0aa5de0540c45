// sync_policy.c: what a new version, or the loss of a part, means for requests in flight. The store knows how weights get in;
// here is only what the engine adds: when that is allowed, and what becomes of KV and records made under the old version.
#include "engine/state.h"
#include "weights/two_phase_commit.h"

// ---------------------------------------------------------------------------------------------- requests in flight
// The group begins again: from its prompt, with all its samples, whether they had ended or not.
static void restart(rm_engine *engine, rm_group *group) {
  for (int32_t i = 0; i < group->n; i++) rm_release_places(engine, &group->sequences[i]);
  rm_group_rewind(group);
  for (int32_t i = group->n - 1; i >= 0; i--) rm_enqueue(engine, &group->sequences[i]);
}

// Tokens and their records stay. Without keep_kv all KV goes, and is computed again before the next token is drawn. A group
// that has no token yet has nothing to keep, and its prompt's records must be of one version: it begins again.
static void keep(rm_engine *engine, rm_group *group, int keep_kv) {
  int has_tokens = 0;
  for (int32_t i = 0; i < group->n; i++) has_tokens |= group->sequences[i].n_tokens > 0;
  if (!has_tokens) {
    restart(engine, group);
    return;
  }
  group->mixed = 1;
  for (int32_t i = group->n - 1; i >= 0; i--) {
    rm_sequence *seq = &group->sequences[i];
    if (seq->status != RM_ACTIVE) continue;
    if (keep_kv && seq->n_tokens) seq->stale = 1;
    else rm_preempt(engine, seq);
  }
}

// Newest first: each is then older than those already put back, and finds its place in the queue at once.
static void apply(rm_engine *engine, rm_inflight inflight) {
  if (rm_is_external(engine)) {   // what becomes of requests is the host's; KV of the old version is found by its number
    rm_external_renew(engine, 0);
    return;
  }
  for (rm_link *at = engine->live.prev, *before; at != &engine->live; at = before) {
    rm_group *group = (rm_group *)at;
    before = at->prev;
    if (inflight == RM_INFLIGHT_RESTART) restart(engine, group);
    if (inflight == RM_INFLIGHT_ABORT) rm_finish_group(engine, group, RM_FINISH_ABORT);
    if (inflight == RM_INFLIGHT_KEEP) keep(engine, group, 0);
    if (inflight == RM_INFLIGHT_KEEP_KV) keep(engine, group, 1);
  }
}

static void preempt_all(rm_engine *engine) {
  while (!rm_list_empty(&engine->active)) rm_preempt(engine, (rm_sequence *)engine->active.prev);
}

// ---------------------------------------------------------------------------------------------- sync
rm_code rm_engine_sync_begin(rm_engine *engine, const rm_sync_options *options, rm_error *err) {
  if (engine->asleep & RM_PART_WEIGHTS) return rm_fail(err, RM_E_STATE, "a sync while the weights are asleep; wake them first");
  if (options->in_place && engine->n_live)
    return rm_fail(err, RM_E_STATE, "an in-place sync while %lld requests are unfinished; finish or abort them first",
                   (long long)engine->n_live);
  const rm_entered saved = rm_enter(engine);
  const rm_code code = rm_sync_begin(engine->store, options, err);
  rm_leave(engine, saved);
  if (!rm_store_weights(engine->store)) rm_kv_reset(engine->cache);   // in place: nothing that was cached can be served again
  return code;
}

rm_code rm_engine_sync_check(rm_engine *engine, const char *name, size_t length, const rm_tensor *tensor, rm_error *err) {
  return rm_sync_check(engine->store, name, length, tensor, err);
}

rm_code rm_engine_sync_push(rm_engine *engine, const char *name, size_t length, const rm_tensor *tensor, rm_error *err) {
  const rm_entered saved = rm_enter(engine);
  const rm_code code = rm_sync_push(engine->store, name, length, tensor, err);
  rm_leave(engine, saved);
  return code;
}

rm_code rm_engine_sync_push_all(rm_engine *engine, const rm_entry *entries, int64_t n, rm_error *err) {
  const rm_entered saved = rm_enter(engine);
  const rm_code code = rm_sync_push_all(engine->store, entries, n, err);
  rm_leave(engine, saved);
  return code;
}

// From here on a rank that serves another version is found out by the header of whatever it sends.
static void set_epoch(rm_engine *engine) {
  const rm_rank *rank = &engine->options.rank;
  rm_comm *const groups[] = {rank->tp, rank->ep, engine->tp_there, engine->ep_there};
  for (size_t i = 0; i < sizeof groups / sizeof *groups; i++)
    if (groups[i]) rm_comm_set_epoch(groups[i], rm_store_version(engine->store));
}

rm_code rm_engine_sync_commit(rm_engine *engine, rm_inflight inflight, rm_sync_report *report, rm_error *err) {
  if (inflight < RM_INFLIGHT_REFUSE || inflight > RM_INFLIGHT_KEEP_KV)
    return rm_fail(err, RM_E_CONFIG, "inflight=%d is no policy for requests in flight", (int)inflight);
  if (inflight == RM_INFLIGHT_REFUSE && engine->n_live && rm_store_is_open(engine->store))
    return rm_fail(err, RM_E_STATE, "%lld requests are unfinished; finish them, or choose restart, abort or keep",
                   (long long)engine->n_live);
  const rm_entered saved = rm_enter(engine);
  const rm_code code = rm_sync_commit_together(engine->store, &engine->options.rank, report, err);
  rm_leave(engine, saved);
  if (code) return code;
  set_epoch(engine);
  apply(engine, inflight);
  rm_kv_reset(engine->cache);
  return RM_OK;
}

void rm_engine_sync_abort(rm_engine *engine) { rm_sync_abort(engine->store); }

// ---------------------------------------------------------------------------------------------- sleep and wake
static rm_code check_parts(unsigned parts, rm_error *err) {
  if (parts && !(parts & ~(unsigned)(RM_PART_WEIGHTS | RM_PART_KV))) return RM_OK;
  return rm_fail(err, RM_E_CONFIG, "parts=%u: weights are %d, the KV cache is %d, both are %d", parts, RM_PART_WEIGHTS, RM_PART_KV,
                 RM_PART_WEIGHTS | RM_PART_KV);
}

static rm_code check_no_sync(const rm_engine *engine, rm_error *err) {
  if (!rm_store_is_open(engine->store)) return RM_OK;
  return rm_fail(err, RM_E_STATE, "the weights cannot sleep while a sync is open");
}

rm_code rm_engine_keep_weights(rm_engine *engine, rm_error *err) {
  if (engine->asleep & RM_PART_WEIGHTS) return RM_OK;
  rm_code code = check_no_sync(engine, err);
  if (code) return code;
  const rm_entered saved = rm_enter(engine);
  code = rm_store_keep(engine->store, err);
  rm_leave(engine, saved);
  return code;
}

size_t rm_engine_bytes_to_keep(const rm_engine *engine) {
  return engine->asleep & RM_PART_WEIGHTS ? 0 : rm_store_bytes_to_keep(engine->store);
}

void rm_engine_forget_kept(rm_engine *engine) { rm_store_forget(engine->store); }

static void sleep_weights(rm_engine *engine, int keep) {
  if (keep) rm_store_rest(engine->store);
  else rm_store_discard(engine->store);
}

rm_code rm_engine_sleep(rm_engine *engine, unsigned parts, rm_error *err) {
  const int keep = (parts & RM_SLEEP_KEEP) != 0;
  parts &= ~(unsigned)RM_SLEEP_KEEP;
  rm_code code = check_parts(parts, err);
  if (code) return code;
  if (parts & engine->asleep & RM_PART_WEIGHTS && !keep) rm_store_discard(engine->store);   // what an earlier sleep has kept
  parts &= ~engine->asleep;
  if (parts & RM_PART_WEIGHTS && (code = keep ? rm_engine_keep_weights(engine, err) : check_no_sync(engine, err))) return code;
  if (!parts) return RM_OK;
  const rm_entered saved = rm_enter(engine);
  if (rm_is_external(engine)) rm_external_renew(engine, 1);   // the host's requests keep their pages
  else preempt_all(engine);   // without the weights the KV is of no version, without the pages there is none
  rm_kv_reset(engine->cache);
  rm_decode_forget(engine);
  if (parts & RM_PART_WEIGHTS) sleep_weights(engine, keep);
  if (parts & RM_PART_KV) {
    rm_kv_renew(engine->cache);
    rm_device_unmap(engine->device, engine->kv, engine->kv_bytes);
    engine->kv = NULL;
  }
  rm_leave(engine, saved);
  engine->asleep |= parts;
  return RM_OK;
}

rm_code rm_engine_wake(rm_engine *engine, unsigned parts, rm_error *err) {
  rm_code code = check_parts(parts, err);
  if (code) return code;
  parts &= engine->asleep;
  const rm_entered saved = rm_enter(engine);
  if (parts & RM_PART_WEIGHTS) code = rm_store_restore(engine->store, err);
  if (parts & RM_PART_KV && !code) code = rm_device_map(engine->device, engine->kv_bytes, "the KV cache", &engine->kv, err);
  if (parts & RM_PART_WEIGHTS && code) rm_store_rest(engine->store);   // they came, and the cache did not
  rm_leave(engine, saved);
  if (!code) engine->asleep &= ~parts;
  return code;
}

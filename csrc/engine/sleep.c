// sleep.c: sleep and wake: frees the memory of the weights or of the KV cache, and allocates it
// again. The store handles the weights; this file the KV cache, graphs and running requests.
#include "engine/state.h"

static rm_code check_parts(unsigned parts, rm_error *err) {
  if (parts && !(parts & ~(unsigned)(RM_PART_WEIGHTS | RM_PART_KV))) return RM_OK;
  return rm_fail(err, RM_E_CONFIG, "parts=%u: expected %d (weights), %d (KV cache) or %d (both)",
                 parts, RM_PART_WEIGHTS, RM_PART_KV, RM_PART_WEIGHTS | RM_PART_KV);
}

static rm_code check_no_sync(const rm_engine *engine, rm_error *err) {
  if (!rm_store_is_open(engine->store)) return RM_OK;
  return rm_fail(err, RM_E_STATE, "the weights cannot sleep while a sync is open");
}

rm_code rm_engine_offload_weights(rm_engine *engine, rm_error *err) {
  if (engine->asleep & RM_PART_WEIGHTS) return RM_OK;
  rm_code code = check_no_sync(engine, err);
  if (code) return code;
  const rm_entered saved = rm_enter(engine);
  code = rm_store_offload(engine->store, err);
  rm_leave(engine, saved);
  return code;
}

size_t rm_engine_offload_bytes(const rm_engine *engine) {
  return engine->asleep & RM_PART_WEIGHTS ? 0 : rm_store_offload_bytes(engine->store);
}

void rm_engine_free_offloaded(rm_engine *engine) { rm_store_free_offloaded(engine->store); }

static void sleep_weights(rm_engine *engine, int offload) {
  if (offload) rm_store_release_blocks(engine->store);
  else rm_store_discard(engine->store);
}

rm_code rm_engine_sleep(rm_engine *engine, unsigned parts, rm_error *err) {
  rm_scheduler *scheduler = &engine->scheduler;
  const int offload = (parts & RM_SLEEP_OFFLOAD) != 0;
  parts &= ~(unsigned)RM_SLEEP_OFFLOAD;
  rm_code code = check_parts(parts, err);
  if (code) return code;
  if (parts & engine->asleep & RM_PART_WEIGHTS && !offload)
    rm_store_discard(engine->store); // offloaded by an earlier sleep
  parts &= ~engine->asleep;
  if (parts & RM_PART_WEIGHTS &&
      (code = offload ? rm_engine_offload_weights(engine, err) : check_no_sync(engine, err)))
    return code;
  if (!parts) return RM_OK;
  const rm_entered saved = rm_enter(engine);
  scheduler->options.policy->pages_lost(scheduler); // without the weights the KV has no version
  rm_kv_reset(engine->scheduler.cache);
  rm_graphs_clear(&engine->runner);
  if (parts & RM_PART_WEIGHTS) sleep_weights(engine, offload);
  if (parts & RM_PART_KV) {
    rm_kv_renew(engine->scheduler.cache);
    rm_device_free(engine->device, engine->runner.kv, engine->kv_bytes);
    engine->runner.kv = NULL;
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
  if (parts & RM_PART_KV && !code)
    code =
        rm_device_alloc(engine->device, engine->kv_bytes, "the KV cache", &engine->runner.kv, err);
  if (parts & RM_PART_WEIGHTS && code)
    rm_store_release_blocks(engine->store); // the cache could not be allocated
  rm_leave(engine, saved);
  if (!code) engine->asleep &= ~parts;
  return code;
}

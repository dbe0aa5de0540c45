// store.c: see store.h. A version (its allocation and the digests of its parameters) is one struct;
// a commit swaps two of them.
#include "weights/store.h"

#include <assert.h>

#include "base/checked.h"
#include "base/memory.h"
#include "gpu/gpu.h"

enum { MIN_HALF_BYTES = 64 << 10, MAX_HALF_BYTES = 32 << 20 }; // of the staging buffer

static int create_state(rm_version_state *state, int64_t n) {
  state->sums = rm_alloc((size_t)n, 2 * sizeof *state->sums);
  state->counts = rm_alloc((size_t)n, sizeof *state->counts);
  return state->sums && state->counts;
}

rm_code rm_store_create(const rm_params *params, const rm_device *device, rm_team *team,
                        rm_store **out, rm_error *err) {
  *out = NULL;
  rm_store *store = rm_alloc(1, sizeof *store);
  if (!store) goto no_memory;
  store->params = params;
  store->device = store->staging.device = device;
  // float64 sources take up to 4 times the bytes.
  store->staging.half_bytes =
      (size_t)rm_min64(rm_max64(4 * (int64_t)params->bytes, MIN_HALF_BYTES), MAX_HALF_BYTES);
  store->ctx = (rm_ctx){.stream = device->stream,
                        .n_threads = rm_team_threads(team),
                        .run = rm_team_run,
                        .team = team};
  store->version = store->last_version = -1;
  store->tied_head = store->tied_embed = -1;
  if (params->spec->tie_word_embeddings) {
    store->tied_head = rm_params_find(params, RM_P_LM_HEAD, -1, -1);
    store->tied_embed = rm_params_find(params, RM_P_EMBED, -1, -1);
  }
  store->flags = rm_alloc((size_t)params->n, sizeof *store->flags);
  store->has_bias = rm_alloc((size_t)params->spec->n_layers, sizeof *store->has_bias);
  if (!store->flags || !store->has_bias || !create_state(&store->serving, params->n) ||
      !create_state(&store->staged, params->n))
    goto no_memory;
  *out = store;
  return RM_OK;

no_memory:
  rm_store_destroy(store);
  return rm_no_memory(err, "the state of the weights", 0);
}

void rm_store_drop_block(rm_store *store, rm_version_state *state) {
  rm_device_free(store->device, state->block, store->params->bytes);
  state->block = NULL;
}

static void destroy_state(rm_store *store, rm_version_state *state) {
  rm_store_drop_block(store, state);
  rm_free(state->sums);
  rm_free(state->counts);
}

void rm_store_destroy(rm_store *store) {
  if (!store) return;
  destroy_state(store, &store->serving);
  destroy_state(store, &store->staged);
  rm_unmap(store->offloaded, store->params->bytes);
  rm_free(store->has_bias);
  rm_free(store->flags);
  rm_staging_free(&store->staging);
  rm_copy_tasks_free(&store->tasks);
  rm_free(store);
}

uint64_t rm_store_digest(const rm_store *store) {
  return store->serving.block ? store->serving.digest : 0;
}

static void drop_offloaded(rm_store *store) {
  rm_unmap(store->offloaded, store->params->bytes);
  store->offloaded = NULL;
}

static void drop_blocks(rm_store *store) {
  rm_store_drop_block(store, &store->serving);
  rm_store_drop_block(store, &store->staged);
  rm_staging_free(&store->staging);
  store->version = -1;
}

void rm_store_discard(rm_store *store) {
  rm_sync_abort(store);
  drop_offloaded(store);
  drop_blocks(store);
}

size_t rm_store_offload_bytes(const rm_store *store) {
  return !store->serving.block || store->offloaded || store->device->on_host ? 0
                                                                             : store->params->bytes;
}

rm_code rm_store_offload(rm_store *store, rm_error *err) {
  if (!rm_store_offload_bytes(store)) return RM_OK;
  return rm_offload_block(store->device, store->serving.block, store->params->bytes, &store->ctx,
                          &store->offloaded, err);
}

void rm_store_release_blocks(rm_store *store) {
  assert(!store->serving.block || store->offloaded || store->device->on_host);
  if (store->serving.block) store->offloaded_version = store->version;
  if (store->device->on_host && store->serving.block) { // on the CPU the allocation itself is kept
    store->offloaded = store->serving.block;
    store->serving.block = NULL;
  }
  drop_blocks(store);
}

rm_code rm_store_restore(rm_store *store, rm_error *err) {
  if (store->serving.block || !store->offloaded) return RM_OK;
  if (store->device->on_host) {
    store->serving.block = store->offloaded;
    store->offloaded = NULL;
  } else {
    RM_TRY(rm_restore_block(store->device, store->offloaded, store->params->bytes, &store->ctx,
                            &store->serving.block, err));
  }
  store->serving.number = ++store->n_blocks;
  store->version = store->offloaded_version;
  return RM_OK;
}

void rm_store_free_offloaded(rm_store *store) {
  if (store->serving.block) drop_offloaded(store);
}

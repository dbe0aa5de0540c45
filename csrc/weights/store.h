// store.h: the versions of the weights on one rank. A store owns up to two device allocations of
// params->bytes: the serving one and the staged one, which a sync (sync.h) fills and a commit swaps
// in. On a mesh it holds this rank's shard of each parameter.
//
// Not thread-safe; its owner (engine.c) serialises calls.
#pragma once

#include "base/team.h"
#include "device/devices.h"
#include "model/params.h"

typedef struct rm_store rm_store;

// Views until destroy: params, device, team. No weights are allocated before the first sync.
rm_code rm_store_create(const rm_params *params, const rm_device *device, rm_team *team,
                        rm_store **out, rm_error *err);
void rm_store_destroy(rm_store *store); // safe on NULL

int64_t rm_store_version(const rm_store *store); // −1: none, or unsynced by a failed in-place sync
const void *rm_store_weights(
    const rm_store
        *store); // the serving block on the device; NULL when unsynced; view until the next commit
uint64_t rm_store_block(
    const rm_store *store); // the serving block's number, counted from 1 as mapped; 0 when unsynced
uint64_t rm_store_digest(
    const rm_store *store); // of names and values over the whole mesh; 0 when unsynced
size_t rm_store_staging_bytes(
    const rm_store
        *store); // device memory of the staging buffer, which a sync takes besides the weights
int rm_store_is_open(const rm_store *store); // a sync is open
const rm_params *rm_store_params(const rm_store *store);

// Sleep and wake of the weights. Either discard: the allocations are freed and the store is
// unsynced. Or, in order:
//   offload          copies the serving weights to host memory (nothing to copy on the CPU, whose
//                    memory stays as it is)
//   release_blocks   frees the device's memory
//   restore          serves the same version from new device memory, with a new block number
//   free_offloaded   frees the copy
// The copy stays until free_offloaded, so release_blocks and restore can each be undone without new
// host memory. An unsynced store offloads nothing. No sync may be open.
void rm_store_discard(rm_store *store); // aborts an open sync; frees the copy too
size_t rm_store_offload_bytes(const rm_store *store); // host memory that offload would take
rm_code rm_store_offload(rm_store *store,
                         rm_error *err); // on failure nothing has changed, also of restore
void rm_store_release_blocks(rm_store *store); // after offload
rm_code rm_store_restore(rm_store *store, rm_error *err);
void rm_store_free_offloaded(rm_store *store); // no effect between release_blocks and restore

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

// Keeps views of params, device and team until destroy. The first two syncs allocate a copy each.
rm_code rm_store_create(const rm_params *params, const rm_device *device, rm_team *team,
                        rm_store **out, rm_error *err);
void rm_store_destroy(rm_store *store); // safe on NULL

// −1: none, or unsynced by a failed in-place sync.
int64_t rm_store_version(const rm_store *store);
// The serving block on the device; NULL when unsynced. A view until the next commit.
const void *rm_store_weights(const rm_store *store);
// The serving block's number; blocks are counted from 1 as they are mapped. 0 when unsynced.
uint64_t rm_store_block(const rm_store *store);
// Digest of names and values over the whole mesh; 0 when unsynced.
uint64_t rm_store_digest(const rm_store *store);
// Device memory of the staging buffer, which a sync takes besides the weights.
size_t rm_store_staging_bytes(const rm_store *store);
int rm_store_is_open(const rm_store *store); // whether a sync is open
const rm_params *rm_store_params(const rm_store *store);

// Sleep and wake of the weights. Either discard: the allocations are freed and the store is
// unsynced. Or, in order:
//   offload          copies the serving weights to host memory; on the CPU does nothing, since the
//                    memory itself is kept
//   release_blocks   frees the device's memory
//   restore          serves the same version from new device memory, with a new block number
//   free_offloaded   frees the copy
// The copy stays until free_offloaded, so release_blocks and restore can each be undone without new
// host memory. Offload skips an unsynced store. All but discard require that a sync is not open.
void rm_store_discard(rm_store *store); // aborts an open sync; frees the copy too
size_t rm_store_offload_bytes(const rm_store *store); // host memory that offload would take
// offload and restore leave the store unchanged on failure.
rm_code rm_store_offload(rm_store *store, rm_error *err);
void rm_store_release_blocks(rm_store *store); // after offload
rm_code rm_store_restore(rm_store *store, rm_error *err);
void rm_store_free_offloaded(rm_store *store); // between release_blocks and restore: does nothing

// store.h: the versions of the weights on one rank. A store owns up to two device allocations of
// params->bytes: the serving one and the staged one, which a sync (sync.h) fills and a commit swaps
// in. On a mesh it holds this rank's shard of each parameter.
//
// Other modules read `params`, `serving`, `version`, `open` and `staging`; the files of this folder
// write the fields: store.c (allocations, sleep and wake) and sync.c (syncs).
//
// Not thread-safe; its owner (engine.c) serialises calls.
#pragma once

#include "base/team.h"
#include "device/devices.h"
#include "weights/parallel_copy.h"
#include "weights/sync.h"

typedef struct rm_version_state {
  char *block; // device memory, owned; NULL: none. A view for others, until the next commit
  uint64_t number; // blocks are counted from 1 as they are mapped
  // [2][n] digests of the values that this rank counts (added over all ranks for the version's
  // digest), and of all values that it holds (equal on ranks that hold the same shard).
  uint64_t *sums;
  // [n] 1: the parameter is part of the version; 0 for absent biases and a tied lm_head.
  uint8_t *counts;
  uint64_t digest; // digest of names and sums over the whole mesh
} rm_version_state;

struct rm_store {
  const rm_params *params; // view
  const rm_device *device; // view
  rm_ctx ctx;
  rm_staging staging;
  rm_version_state serving, staged;
  // [params->bytes] host memory, owned: a copy of the serving block, which may have been freed
  // since; NULL: none.
  char *offloaded;
  int64_t offloaded_version;
  uint64_t n_blocks; // blocks mapped so far
  int64_t version; // of `serving`; −1: none, or unsynced by a failed in-place sync
  int64_t last_version; // the last one committed; −1: none
  uint8_t *has_bias; // [n_layers] the last committed version has a router bias in this layer
  int64_t tied_head, tied_embed; // indices; −1 when not tied

  int open; // whether a sync is open
  rm_sync_options options; // with the version resolved
  int64_t version_before; // in place: an abort before the first write restores it
  int has_base; // the sync is partial, and staging began as a copy of the serving version
  uint8_t *flags; // [n]
  rm_copy_tasks tasks; // of the last push; empty once all are copied
  const rm_entry *const *pushed; // [n_pushed] the entries of the last push that were taken; a view
  int64_t n_pushed;
  uint64_t read_before; // report.bytes before the last push
  rm_sync_report report;
  int64_t n_entries; // pushed tensors, successful or not
  double began;
};

// Keeps views of params, device and team until destroy. The first two syncs allocate a copy each.
rm_code rm_store_create(const rm_params *params, const rm_device *device, rm_team *team,
                        rm_store **out, rm_error *err);
void rm_store_destroy(rm_store *store); // safe on NULL

// Digest of names and values over the whole mesh; 0 when unsynced.
uint64_t rm_store_digest(const rm_store *store);

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

// For the files of this folder.
void rm_store_drop_block(rm_store *store, rm_version_state *state);
static inline void rm_store_swap_blocks(rm_store *store) {
  const rm_version_state other = store->serving;
  store->serving = store->staged;
  store->staged = other;
}

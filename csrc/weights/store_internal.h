// store_internal.h: the struct of a store, shared by store.c (allocations, sleep and wake) and
// sync.c (syncs).
#pragma once

#include "weights/parallel_copy.h"
#include "weights/store.h"
#include "weights/sync.h"

typedef struct rm_version_state {
  char *block; // device memory, owned; NULL: none
  uint64_t number; // the block's number (rm_store_block)
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
  int64_t version; // of `serving`; −1: none
  int64_t last_version; // the last one committed; −1: none
  uint8_t *has_bias; // [n_layers] the last committed version has a router bias in this layer
  int64_t tied_head, tied_embed; // indices; −1 when not tied

  int open;
  rm_sync_options options; // with the version resolved
  int64_t version_before; // in place: an abort before the first write restores it
  int has_base; // the sync is partial, and staging began as a copy of the serving version
  uint8_t *flags; // [n]
  rm_copy_tasks tasks; // of the last push
  const rm_entry *const *pushed; // [n_pushed] the entries of the last push that were taken; a view
  int64_t n_pushed;
  uint64_t read_before; // report.bytes before the last push
  rm_sync_report report;
  int64_t n_entries; // pushed tensors, successful or not
  double began;
};

// store.c
void rm_store_drop_block(rm_store *store, rm_version_state *state);
static inline void rm_store_swap_blocks(rm_store *store) {
  const rm_version_state other = store->serving;
  store->serving = store->staged;
  store->staged = other;
}

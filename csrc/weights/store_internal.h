// store_internal.h: the struct of a store, shared by store.c (allocations, sleep and wake) and
// sync.c (syncs).
#pragma once

#include "weights/parallel_copy.h"
#include "weights/store.h"
#include "weights/sync.h"

typedef struct rm_version_state {
  char *block; // of the device, owned; NULL: none
  uint64_t number; // of the block
  uint64_t
      *sums; // [2][n] digests of the values that this rank counts, and of all values that it holds
  uint8_t *
      // [n] the parameter is part of the version: all are but absent biases and a tied lm_head
      counts;
  uint64_t digest; // of names and sums, over the whole mesh
} rm_version_state;

struct rm_store {
  const rm_params *params; // view
  const rm_device *device; // view
  rm_ctx ctx;
  rm_staging staging;
  rm_version_state serving, staged;
  char *
      // owned; what the serving block holds, or held before it went: [params->bytes] of the host;
      // NULL: none
      offloaded;
  int64_t offloaded_version;
  uint64_t n_blocks; // that were mapped
  int64_t version; // of serving, −1
  int64_t last_version; // ever committed, −1
  uint8_t *has_bias; // [n_layers] the last committed version carried a router bias here
  int64_t tied_head, tied_embed; // indices; −1 when not tied

  int open;
  rm_sync_options options; // with the version resolved
  int64_t version_before; // in place: what serves again if nothing gets written
  int has_base; // partial, and staging began as what served
  uint8_t *flags; // [n]
  rm_copy_tasks tasks; // of the push at hand, not yet run
  rm_sync_report report;
  int64_t n_entries; // pushed tensors, successful or not
  double began;
};

// store.c
void rm_store_drop_block(rm_store *store, rm_version_state *state);
void rm_store_swap_blocks(rm_store *store); // serving and staged change places

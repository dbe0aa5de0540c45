// sync.h: how a new version of the weights gets in, whole or not at all.
//
//   begin ──► push … push ──► commit        one sync at a time; begin while one is open resets the open one
//                └──────────► abort
//
// The store owns two blocks of params->bytes of the device: the one that serves and the staging one (allocated at the first sync that
// needs it). push copies one tensor into staging in the kernels' layout, checking name, shape, dtype, strides, range and
// finiteness; commit checks that every required parameter has come once and swaps the blocks. Until that swap no byte of
// the serving block changes, whatever fails. With `in_place` there is no staging: the serving block is marked unsynced at
// begin and serves again after commit. A failed push leaves the sync open with that tensor not there: it may be sent again,
// and commit fails while it is missing.
//
// On a rank of a mesh the store has that rank's part of each parameter, and every rank is sent every tensor: names, shapes and
// strides are checked whole, and of the values just those of the part are read, checked and copied. Then a commit has two phases,
// between which the ranks vote: prepare says whether this rank can, and swap, which cannot fail, does it.
//
// The store is not thread-safe; its owner (engine.c) serialises. A push waits until the device has read the tensor; nothing waits for
// other ranks.
#pragma once

#include "base/team.h"
#include "device/devices.h"
#include "model/params.h"
#include "weights/names.h"

typedef struct rm_store rm_store;

// A tensor of the trainer: a view that must stay valid and unchanged during the push.
typedef struct rm_tensor {
  const void *data;
  rm_src_dtype dtype;
  int n_dims;                   // 0 … 4
  int64_t shape[4];
  int64_t strides[4];           // in elements, any sign
  int64_t span_lo, span_hi;     // bytes before / after data that belong to the owner's buffer, both 0 when not known
  int on_device, ordinal;       // data is in the memory of this CUDA device, and there
} rm_tensor;

typedef struct rm_entry {
  const char *name;             // [length], UTF-8
  size_t length;
  rm_tensor tensor;
} rm_entry;

typedef struct rm_sync_options {
  int64_t version;              // must exceed the serving version; −1: the next number
  int cast;                     // convert from other float dtypes
  int allow_nonfinite;
  int allow_partial;            // strict=False: unexpected names are skipped, missing parameters keep the serving value
  int allow_bias_removal;       // a router bias that the serving version has may be absent
  int in_place;
} rm_sync_options;

typedef struct rm_sync_report {
  int64_t version, n_tensors, n_parameters, n_skipped;
  uint64_t bytes;               // of tensor data read by this rank
  double seconds;               // begin to commit
  double copy_seconds;          // inside push
  uint64_t digest;              // of names and stored values; the same for every spelling of the same weights
} rm_sync_report;

rm_code rm_store_create(const rm_params *params, const rm_device *device, rm_team *team, rm_store **out, rm_error *err);
void rm_store_destroy(rm_store *store);

int64_t rm_store_version(const rm_store *store);          // −1: never synced, or unsynced by a failed in-place sync
const void *rm_store_weights(const rm_store *store); // the serving block, the device's, NULL when unsynced; view until the next commit
uint64_t rm_store_block(const rm_store *store);           // its number: blocks are counted as they are mapped, from 1; 0 when unsynced
uint64_t rm_store_digest(const rm_store *store);
size_t rm_store_staging_bytes(const rm_store *store);       // of the device, which a sync takes besides the weights
int rm_store_is_open(const rm_store *store);
const rm_params *rm_store_params(const rm_store *store);
int64_t rm_sync_version(const rm_store *store);           // of the open sync, or of the last one

rm_code rm_sync_begin(rm_store *store, const rm_sync_options *options, rm_error *err);
rm_code rm_sync_check(rm_store *store, const char *name, size_t length, const rm_tensor *tensor,
                      rm_error *err); // push's checks, nothing written
rm_code rm_sync_push(rm_store *store, const char *name, size_t length, const rm_tensor *tensor, rm_error *err);
// The same for many at once, which costs less for each: all of them are there afterwards, or none.
rm_code rm_sync_push_all(rm_store *store, const rm_entry *entries, int64_t n, rm_error *err);
rm_code rm_sync_commit(rm_store *store, rm_sync_report *report, rm_error *err);   // on failure the sync is closed, old serves
rm_code rm_sync_prepare(rm_store *store, rm_error *err);  // commit's checks; on failure the sync is closed, old serves
// Sums of what is staged, [2][params->n]: first of what this rank answers for, which are the first half of a digest when they are added
// up over all ranks; then of all that it holds, which are equal on ranks that hold the same. A view until the sync ends.
const uint64_t *rm_sync_sums(const rm_store *store);
void rm_sync_swap(rm_store *store, const uint64_t *sums, rm_sync_report *report);   // after prepare; sums: the whole mesh's
// As if this name had not been pushed: it failed on another rank. Of a name that is not there nothing happens.
void rm_sync_forget(rm_store *store, const char *name, size_t length);
void rm_sync_abort(rm_store *store);
int rm_sync_complete(const rm_store *store);              // every required parameter has come

// Sleep and wake of the weights. Discard: the blocks go back to the system, and what was kept; the store is unsynced then. In between
// what serves may be kept in the host's memory: keep copies it (on the CPU there is nothing to copy), rest is discard but for the copy,
// and restore has the same version serve from a new block, whose number is new. The copy stays until forget, so that either can be
// taken back without fail: rest after restore needs no new copy. Of a store that is unsynced nothing is kept. No sync is open.
void rm_store_discard(rm_store *store);
size_t rm_store_bytes_to_keep(const rm_store *store);       // of the host, that keep would take
rm_code rm_store_keep(rm_store *store, rm_error *err);      // on failure nothing has changed, as below
void rm_store_rest(rm_store *store);                        // after keep
rm_code rm_store_restore(rm_store *store, rm_error *err);
void rm_store_forget(rm_store *store);                      // the copy, where there is one and the weights are not at rest
